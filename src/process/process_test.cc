#include "weft/process.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace weft::process {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr Nanos kPatience = Nanos::from_seconds(20);

Command shell(const std::string& script) {
  Command command;
  command.argv = {"sh", "-c", script};
  return command;
}

std::string said(const Command& command) {
  const auto finished = run(command, kPatience);
  if (!finished) return finished.error().message();
  EXPECT_TRUE(finished->ending.ok()) << finished->ending.words() << finished->errors;
  return finished->output;
}

// A zombie that nobody has reaped yet does not run any more.
bool is_alive(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  if (!std::getline(file, stat)) return false;
  const size_t end = stat.rfind(')');
  return end != std::string::npos && end + 2 < stat.size() && stat[end + 2] != 'Z' &&
         stat[end + 2] != 'X';
}

bool wait_until_gone(pid_t pid) {
  for (int i = 0; i < 1000 && is_alive(pid); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return !is_alive(pid);
}

class ProcessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = std::filesystem::temp_directory_path() / "weft-process-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  // The number that a child writes to a file, once it is whole.
  pid_t number_in(const std::string& name) const {
    for (int i = 0; i < 1000; ++i) {
      std::stringstream content;
      content << std::ifstream(path(name)).rdbuf();
      if (content.str().ends_with('\n')) return std::stoi(content.str());
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ADD_FAILURE() << name << " has not appeared";
    return -1;
  }
  std::string folder_;
};

TEST_F(ProcessTest, OutputErrorsAndEndAreTold) {
  const auto finished = run(shell("echo out; echo err >&2; exit 7"), kPatience);
  ASSERT_TRUE(finished.ok()) << finished.error().message();
  EXPECT_EQ(finished->output, "out\n");
  EXPECT_EQ(finished->errors, "err\n");
  EXPECT_EQ(finished->ending.exit_code, 7);
  EXPECT_EQ(finished->ending.words(), "exited with code 7");
  const auto killed = run(shell("kill -9 $$"), kPatience);
  EXPECT_EQ(killed->ending.signal, SIGKILL);
  EXPECT_EQ(killed->ending.code(), 137);
  EXPECT_EQ(killed->ending.words(), "was killed by signal 9 (Killed)");
}

TEST_F(ProcessTest, InputIsEmptyOrWhatIsGiven) {
  EXPECT_EQ(said(shell("cat; echo end")), "end\n");
  Command command = shell("cat");
  command.input = std::string(3 << 20, 'x');  // more than a pipe holds
  EXPECT_EQ(said(command), *command.input);
}

TEST_F(ProcessTest, MuchOutputOnBothSidesDoesNotBlock) {
  const auto finished =
      run(shell("head -c 3000000 /dev/zero; head -c 2000000 /dev/zero >&2; head -c 5 /dev/zero"),
          kPatience);
  ASSERT_TRUE(finished.ok());
  EXPECT_EQ(finished->output.size(), 3000005u);
  EXPECT_EQ(finished->errors.size(), 2000000u);
}

TEST_F(ProcessTest, TheEnvironmentIsAddedToTheCallers) {
  setenv("WEFT_PROCESS_TEST", "mine", 1);
  setenv("WEFT_PROCESS_OTHER", "mine", 1);
  Command command = shell("echo $WEFT_PROCESS_TEST $WEFT_PROCESS_OTHER $WEFT_PROCESS");
  command.environment = {"WEFT_PROCESS_OTHER=yours", "WEFT_PROCESS=new"};
  EXPECT_EQ(said(command), "mine yours new\n");
  unsetenv("WEFT_PROCESS_TEST");
  unsetenv("WEFT_PROCESS_OTHER");
}

TEST_F(ProcessTest, AProgramIsLookedForInThePathOfItsEnvironment) {
  std::ofstream(path("weft-process-script")) << "echo script $1\n";  // without #!: the shell's
  chmod(path("weft-process-script").c_str(), 0700);
  Command command;
  command.argv = {"weft-process-script", "word"};
  EXPECT_EQ(Child::start(command).error().code(), Code::not_found);
  command.environment = {"PATH=" + folder_ + ":/bin"};
  EXPECT_EQ(said(command), "script word\n");
}

TEST_F(ProcessTest, WhatCannotBeStartedIsAnErrorAndLeavesNothing) {
  Command command;
  EXPECT_EQ(Child::start(command).error().code(), Code::invalid_argument);
  for (const char* name : {"/absent/program", "weft-no-such-program"}) {
    command.argv = {name};
    const auto absent = Child::start(command);
    ASSERT_FALSE(absent.ok());
    EXPECT_EQ(absent.error().code(), Code::not_found);
    EXPECT_EQ(absent.error().message(), text("there is no program \"%s\"", name));
  }
  command.argv = {folder_};
  EXPECT_THAT(Child::start(command).error().message(), StartsWith("cannot start"));
  command.argv = {"true"};
  command.before_exec = [] { return EPERM; };
  EXPECT_THAT(Child::start(command).error().message(), StartsWith("cannot prepare to start"));
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
  EXPECT_EQ(errno, ECHILD);
}

TEST_F(ProcessTest, BeforeExecRunsInTheChild) {
  Command command = shell("pwd");
  command.before_exec = [] { return chdir("/") == 0 ? 0 : errno; };
  EXPECT_EQ(said(command), "/\n");
  EXPECT_NE(std::filesystem::current_path(), "/");
}

// ---- descriptors -----------------------------------------------------------------------------

TEST_F(ProcessTest, DescriptorsComeUnderTheNumbersThatAreAskedFor) {
  auto first = make_pipe(), second = make_pipe();
  ASSERT_TRUE(first.ok() && second.ok());
  // Each asked to be where the other is.
  Command command = shell(text("echo one >&%d; echo two >&%d; echo far > /proc/self/fd/100",
                               first->write.get(), second->write.get()));
  command.descriptors = {{second->write.get(), first->write.get()},
                         {first->write.get(), second->write.get()},
                         {second->write.get(), 100}};
  auto child = Child::start(command);
  ASSERT_TRUE(child.ok()) << child.error().message();
  first->write.reset();
  second->write.reset();
  const auto all_of = [](int fd) {
    std::string out;
    char c = 0;
    while (read(fd, &c, 1) == 1) out += c;
    return out;
  };
  EXPECT_EQ(all_of(first->read.get()), "two\n");
  EXPECT_EQ(all_of(second->read.get()), "one\nfar\n");
  EXPECT_TRUE(child->wait(kPatience)->ok());
}

TEST_F(ProcessTest, NoOtherDescriptorGoesAlong) {
  // As a library opens one: not close-on-exec.
  const Fd careless(open("/dev/null", O_RDONLY));  // NOLINT(android-cloexec-open)
  ASSERT_GE(careless.get(), 3);
  Command command = shell(text("[ -e /proc/self/fd/%d ] && echo there; true", careless.get()));
  EXPECT_EQ(said(command), "");
  command.keeps_descriptors = true;
  EXPECT_EQ(said(command), "there\n");
  command.keeps_descriptors = false;
  command.descriptors = {{careless.get(), careless.get()}};
  EXPECT_EQ(said(command), "there\n");
}

TEST_F(ProcessTest, StartingLeavesNoDescriptorOpenHere) {
  const auto count = [] {
    size_t n = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
      ++n;
    return n;
  };
  const size_t before = count();
  Command absent;
  absent.argv = {"/absent/program"};
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(said(shell("true")), "");
    EXPECT_FALSE(Child::start(absent).ok());
  }
  EXPECT_EQ(count(), before);
}

// ---- signals ---------------------------------------------------------------------------------

TEST_F(ProcessTest, SignalsAreAsTheyWereBornExceptIgnoredOnes) {
  Command own_status;
  own_status.argv = {"cat", "/proc/self/status"};
  sigset_t blocked, before;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  const auto handled = signal(SIGUSR1, [](int) {});
  const auto ignored = signal(SIGHUP, SIG_IGN);
  const auto broken_pipe = signal(SIGPIPE, SIG_IGN);
  const std::string status = said(own_status);
  signal(SIGUSR1, handled);
  signal(SIGHUP, ignored);
  signal(SIGPIPE, broken_pipe);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  EXPECT_THAT(status, HasSubstr("SigBlk:\t0000000000000000"));
  EXPECT_THAT(status, HasSubstr("SigCgt:\t0000000000000000"));
  const uint64_t ignoring = std::stoull(status.substr(status.find("SigIgn:") + 7), nullptr, 16);
  EXPECT_TRUE(ignoring & (1u << (SIGHUP - 1))) << status;
  EXPECT_FALSE(ignoring & (1u << (SIGPIPE - 1))) << status;
}

TEST_F(ProcessTest, AHandlerOfTheCallersNeverRunsInTheChild) {
  // Memory is shared until exec: a handler that ran in the child would be seen in its parent. That
  // one leads a group of its own, so that nobody else is hit.
  static std::atomic<int> strangers;
  static pid_t own;
  auto parent = Child::fork(
      [] {
        own = getpid();
        signal(SIGUSR1, [](int) { strangers += getpid() != own; });
        std::atomic<bool> done{false};
        std::thread noise([&] {
          while (!done) kill(0, SIGUSR1);
        });
        Command command;
        command.argv = {"true"};
        for (int i = 0; i < 100; ++i) {
          auto child = Child::start(command);
          if (!child) return 2;
        }
        done = true;
        noise.join();
        return strangers == 0 ? 0 : 1;
      },
      true);
  ASSERT_TRUE(parent.ok());
  EXPECT_EQ(parent->wait(kPatience)->words(), "exited with code 0");
}

// ---- ends ------------------------------------------------------------------------------------

TEST_F(ProcessTest, OneThatEndedKeepsItsNumberUntilItIsReaped) {
  auto child = Child::start(shell("exit 3"));
  ASSERT_TRUE(child.ok());
  const pid_t pid = child->pid();
  EXPECT_EQ(child->wait(kPatience)->exit_code, 3);
  EXPECT_EQ(child->ended()->exit_code, 3);
  EXPECT_EQ(kill(pid, 0), 0) << "still a zombie";
  EXPECT_EQ(child->kill_and_reap().exit_code, 3);
  EXPECT_FALSE(*child);
  EXPECT_EQ(child->ended(), std::nullopt);
  EXPECT_EQ(kill(pid, 0), -1);
}

TEST_F(ProcessTest, WhoIsAskedMayEndByItself) {
  auto child = Child::start(
      shell("trap 'exit 5' TERM; echo $$ > " + path("up") + "; while :; do sleep 0.01; done"));
  ASSERT_TRUE(child.ok());
  number_in("up");
  EXPECT_EQ(child->wait(Nanos::from_millis(20)), std::nullopt);
  EXPECT_EQ(child->end(SIGTERM, kPatience).exit_code, 5);
}

TEST_F(ProcessTest, WhoIgnoresBeingAskedIsKilled) {
  auto child = Child::start(
      shell("trap '' TERM; echo $$ > " + path("up") + "; while :; do sleep 0.01; done"));
  ASSERT_TRUE(child.ok());
  number_in("up");
  const Nanos start = monotonic_clock().now();
  EXPECT_EQ(child->end(SIGTERM, Nanos::from_millis(100)).signal, SIGKILL);
  EXPECT_LT(monotonic_clock().now() - start, Nanos::from_seconds(10));
}

TEST_F(ProcessTest, AGroupEndsWithItsLeader) {
  Command command = shell("sleep 300 & echo $! > " + path("pid") + "; exit 0");
  command.own_group = true;
  auto child = Child::start(command);
  ASSERT_TRUE(child.ok());
  const pid_t grandchild = number_in("pid");
  EXPECT_TRUE(child->wait(kPatience)->ok());
  EXPECT_TRUE(is_alive(grandchild));
  child->kill_and_reap();
  EXPECT_TRUE(wait_until_gone(grandchild));
}

TEST_F(ProcessTest, OneThatIsLateIsKilled) {
  const Nanos start = monotonic_clock().now();
  Command command = shell("echo $$ > " + path("pid") + "; sleep 300; true");
  command.own_group = true;
  const auto late = run(command, Nanos::from_millis(200));
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Code::timeout);
  EXPECT_THAT(late.error().message(), HasSubstr("did not end within 200"));
  EXPECT_LT(monotonic_clock().now() - start, Nanos::from_seconds(10));
  EXPECT_TRUE(wait_until_gone(number_in("pid")));
}

TEST_F(ProcessTest, WhoHoldsThePipeDoesNotHoldTheCaller) {
  const Nanos start = monotonic_clock().now();
  Command command = shell("sleep 300 & echo done");
  command.own_group = true;
  EXPECT_EQ(said(command), "done\n");
  EXPECT_LT(monotonic_clock().now() - start, Nanos::from_seconds(10));
}

TEST_F(ProcessTest, AChildDiesWithItsParent) {
  auto parent = Child::fork([&] {
    Command command = shell("echo $$ > " + path("pid") + "; exec sleep 300");
    command.dies_with_parent = true;
    auto child = Child::start(command);
    pause();
    return 0;
  });
  ASSERT_TRUE(parent.ok());
  const pid_t child = number_in("pid");
  EXPECT_TRUE(is_alive(child));
  parent->kill_and_reap();
  EXPECT_TRUE(wait_until_gone(child));
}

TEST_F(ProcessTest, GroupsThatAreMindedDieWithTheirParent) {
  auto parent = Child::fork([&] {
    auto minder = Minder::start(1);
    Command command = shell("sleep 300 & echo $! > " + path("pid") + "; wait");
    command.own_group = true;
    auto child = Child::start(command);
    minder->watch(*child);
    std::ofstream(path("watched")) << "1\n";
    pause();
    return 0;
  });
  ASSERT_TRUE(parent.ok());
  number_in("watched");
  const pid_t grandchild = number_in("pid");
  EXPECT_TRUE(is_alive(grandchild));
  parent->kill_and_reap();
  EXPECT_TRUE(wait_until_gone(grandchild));
}

TEST_F(ProcessTest, AMinderThatIsSentAwayKillsNobody) {
  Command command = shell("sleep 300");
  command.own_group = true;
  auto child = Child::start(command);
  ASSERT_TRUE(child.ok());
  {
    auto minder = Minder::start(1);
    ASSERT_TRUE(minder.ok());
    minder->watch(*child);
  }
  EXPECT_EQ(child->wait(Nanos::from_millis(100)), std::nullopt);
}

TEST_F(ProcessTest, ACopyOfTheParentLeavesItsChildrenAlone) {
  // Without a shell around it, which would be killed alone and leave it behind.
  auto child = Child::start(shell("exec sleep 300"));
  ASSERT_TRUE(child.ok());
  auto copy = Child::fork([&] {
    child->signal(SIGKILL);
    child->kill_and_reap();
    return 4;
  });
  ASSERT_TRUE(copy.ok());
  EXPECT_EQ(copy->wait(kPatience)->exit_code, 4);
  EXPECT_EQ(child->wait(Nanos::from_millis(100)), std::nullopt);
}

TEST_F(ProcessTest, OneThatSomebodyElseReapedHasEnded) {
  auto child = Child::start(shell("exit 3"));
  ASSERT_TRUE(child.ok());
  ASSERT_EQ(waitpid(child->pid(), nullptr, 0), child->pid());
  const auto ending = child->wait(kPatience);
  ASSERT_TRUE(ending.has_value());
  EXPECT_EQ(ending->exit_code, kUnknown);
  EXPECT_FALSE(ending->ok());
}

}  // namespace
}  // namespace weft::process
