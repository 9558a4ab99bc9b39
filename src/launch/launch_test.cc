#include "weft/launch.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "output.h"

namespace weft::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Sends a file descriptor of this process to a file while it lives.
class Redirected {
 public:
  Redirected(int fd, const std::string& path) : fd_(fd), path_(path), before_(dup(fd)) {
    fflush(nullptr);  // what was printed before stays outside
    Fd file(open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    dup2(file.get(), fd);
  }
  ~Redirected() { restore(); }
  std::string text() {
    restore();
    std::stringstream content;
    content << std::ifstream(path_).rdbuf();
    return content.str();
  }

 private:
  void restore() {
    if (!before_) return;
    fflush(nullptr);
    dup2(before_.get(), fd_);
    before_.reset();
  }
  int fd_;
  std::string path_;
  Fd before_;
};

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::stringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

class LaunchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = std::filesystem::temp_directory_path() / "weft-launch-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  std::vector<std::string> lines_in(const std::string& name) const {
    std::stringstream content;
    content << std::ifstream(path(name)).rdbuf();
    return lines_of(content.str());
  }

  // Waits until a file has so many lines; false after ten seconds.
  bool wait_for_lines(const std::string& name, size_t count) const {
    for (int i = 0; i < 1000; ++i) {
      if (lines_in(name).size() >= count) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }

  // Every rank runs `script`, with $WEFT_RANK and $FOLDER set.
  std::vector<Process> job(uint32_t ranks, const std::string& script) const {
    auto processes = local_job(ranks, {"/bin/sh", "-c", script});
    EXPECT_TRUE(processes.ok());
    for (Process& process : *processes) process.environment["FOLDER"] = folder_;
    return *processes;
  }

  struct Ran {
    Report report;
    std::string out;
    std::string err;
    Nanos took;
  };
  Ran run_job(const std::vector<Process>& processes, const Options& options = {}) const {
    Redirected out(STDOUT_FILENO, path("stdout"));
    Redirected err(STDERR_FILENO, path("stderr"));
    const Nanos start = monotonic_clock().now();
    auto report = run(processes, options);
    const Nanos took = monotonic_clock().now() - start;
    Ran ran{.report = {}, .out = out.text(), .err = err.text(), .took = took};
    EXPECT_TRUE(report.ok()) << report.error().message();
    if (report.ok()) ran.report = *report;
    return ran;
  }

  // Runs a job in a process of its own, so that the launcher can be sent signals. The child's exit
  // code is 0 if the job went well, 3 if not; the reason is in the file "reason".
  pid_t run_apart(const std::vector<Process>& processes, const Options& options) const {
    const pid_t pid = fork();
    if (pid != 0) return pid;
    auto report = run(processes, options);
    if (!report.ok()) _exit(1);
    std::ofstream(path("reason")) << report->reason << "\n";
    _exit(report->ok() ? 0 : 3);
  }

  std::string folder_;
};

int wait_for(pid_t pid) {
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
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

TEST_F(LaunchTest, RanksKnowTheirGroup) {
  const auto ran = run_job(job(3,
                               "echo $WEFT_RANK of $WEFT_SIZE at $WEFT_RENDEZVOUS; "
                               "echo ${#WEFT_SECRET} >&2"));
  EXPECT_TRUE(ran.report.ok()) << ran.report.reason;
  auto lines = lines_of(ran.out);
  std::sort(lines.begin(), lines.end());
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_THAT(lines[2], StartsWith("[2] 2 of 3 at 127.0.0.1:"));
  EXPECT_THAT(lines_of(ran.err), ::testing::UnorderedElementsAre("[0] 64", "[1] 64", "[2] 64"));
  ASSERT_EQ(ran.report.outcomes.size(), 3u);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(ran.report.outcomes[rank].rank, rank);
    EXPECT_EQ(ran.report.outcomes[rank].exit_code, 0);
    EXPECT_FALSE(ran.report.outcomes[rank].ended_by_us);
    EXPECT_GT(ran.report.outcomes[rank].after.count, 0);
  }
}

TEST_F(LaunchTest, RanksKnowTheirGroupAsTorchCallsIt) {
  const auto ran = run_job(job(2,
                               "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE here, "
                               "at $MASTER_ADDR; echo $MASTER_PORT $WEFT_RENDEZVOUS >&2"));
  EXPECT_TRUE(ran.report.ok()) << ran.report.reason;
  EXPECT_THAT(lines_of(ran.out),
              ::testing::UnorderedElementsAre("[0] 0 of 2, 0 of 2 here, at 127.0.0.1",
                                              "[1] 1 of 2, 1 of 2 here, at 127.0.0.1"));
  const auto ports = lines_of(ran.err);
  ASSERT_EQ(ports.size(), 2u);
  EXPECT_EQ(ports[0].substr(4), ports[1].substr(4));
  const std::string store = ports[0].substr(4, ports[0].find(' ', 4) - 4);
  EXPECT_THAT(ports[0], ::testing::Not(::testing::EndsWith(":" + store)));
}

TEST_F(LaunchTest, TheEnvironmentIsAddedToTheCallers) {
  setenv("WEFT_LAUNCH_TEST", "mine", 1);
  setenv("WEFT_RANK", "77", 1);
  const auto ran = run_job(job(1, "echo $WEFT_LAUNCH_TEST $WEFT_RANK"));
  unsetenv("WEFT_LAUNCH_TEST");
  unsetenv("WEFT_RANK");
  EXPECT_EQ(ran.out, "[0] mine 0\n");
}

TEST_F(LaunchTest, ManyLinesArriveWholeAndInOrder) {
  constexpr int kLines = 20'000;
  const auto ran = run_job(job(3, "i=0; while [ $i -lt " + std::to_string(kLines) +
                                      " ]; do echo line $i; i=$((i+1)); done"));
  EXPECT_TRUE(ran.report.ok());
  std::map<std::string, int> next;
  for (const std::string& line : lines_of(ran.out)) {
    const std::string prefix = line.substr(0, 4);
    ASSERT_EQ(line, prefix + "line " + std::to_string(next[prefix]));
    ++next[prefix];
  }
  EXPECT_THAT(next, ElementsAre(::testing::Pair("[0] ", kLines), ::testing::Pair("[1] ", kLines),
                                ::testing::Pair("[2] ", kLines)));
}

TEST_F(LaunchTest, APartialLastLineIsShown) {
  EXPECT_EQ(run_job(job(1, "printf 'a\\n\\nlast'")).out, "[0] a\n[0] \n[0] last\n");
}

TEST_F(LaunchTest, WithoutPrefixOutputIsAsItComes) {
  Options options;
  options.prefix_output = false;
  EXPECT_EQ(run_job(job(1, "printf 'no end'"), options).out, "no end");
}

TEST_F(LaunchTest, OutputCanBeKeptOffStandardOutput) {
  Options options;
  options.output_to_stderr = true;
  for (const bool prefixed : {true, false}) {
    options.prefix_output = prefixed;
    const auto ran = run_job(job(1, "echo text"), options);
    EXPECT_EQ(ran.out, "");
    EXPECT_EQ(ran.err, prefixed ? "[0] text\n" : "text\n");
  }
}

TEST_F(LaunchTest, StandardInputIsEmpty) {
  EXPECT_EQ(run_job(job(1, "cat; echo end")).out, "[0] end\n");
}

TEST_F(LaunchTest, OneFailureEndsTheOthers) {
  const auto ran = run_job(job(3, "if [ $WEFT_RANK = 1 ]; then sleep 0.2; exit 7; fi; sleep 60"));
  EXPECT_FALSE(ran.report.ok());
  EXPECT_EQ(ran.report.first_failure, 1u);
  EXPECT_THAT(ran.report.reason, StartsWith("rank 1 exited with code 7 after "));
  EXPECT_LT(ran.took, Nanos::from_seconds(20));
  EXPECT_EQ(ran.report.outcomes[1].exit_code, 7);
  EXPECT_FALSE(ran.report.outcomes[1].ended_by_us);
  EXPECT_TRUE(ran.report.outcomes[0].ended_by_us);
  EXPECT_EQ(ran.report.outcomes[2].signal, SIGTERM);
}

TEST_F(LaunchTest, DeathBySignalIsNamed) {
  const auto ran = run_job(job(2, "if [ $WEFT_RANK = 0 ]; then kill -9 $$; fi; sleep 60"));
  EXPECT_EQ(ran.report.first_failure, 0u);
  EXPECT_THAT(ran.report.reason, StartsWith("rank 0 was killed by signal 9 (Killed) after "));
  EXPECT_EQ(ran.report.outcomes[0].signal, SIGKILL);
}

TEST_F(LaunchTest, WhoIgnoresBeingAskedIsKilled) {
  Options options;
  options.grace = Nanos::from_millis(200);
  const auto ran =
      run_job(job(2,
                  "if [ $WEFT_RANK = 1 ]; then while [ ! -e $FOLDER/ready ]; do sleep 0.01; "
                  "done; exit 1; fi; trap '' TERM; touch $FOLDER/ready; "
                  "while :; do sleep 0.05; done"),
              options);
  EXPECT_EQ(ran.report.first_failure, 1u);
  EXPECT_EQ(ran.report.outcomes[0].signal, SIGKILL);
  EXPECT_TRUE(ran.report.outcomes[0].ended_by_us);
  EXPECT_LT(ran.took, Nanos::from_seconds(20));
}

TEST_F(LaunchTest, TheDeadlineEndsAll) {
  Options options;
  options.deadline = Nanos::from_millis(200);
  const auto ran = run_job(job(3, "[ $WEFT_RANK = 1 ] || sleep 60"), options);
  EXPECT_FALSE(ran.report.ok());
  EXPECT_FALSE(ran.report.first_failure.has_value());
  EXPECT_THAT(ran.report.reason, HasSubstr("still running: rank 0, 2"));
  EXPECT_LT(ran.took, Nanos::from_seconds(20));
}

TEST_F(LaunchTest, AProgramThatIsNotThereIsAnError) {
  const auto absent = run(*local_job(2, {"/absent/program"}), {});
  ASSERT_FALSE(absent.ok());
  EXPECT_EQ(absent.error().code(), Code::not_found);
  EXPECT_THAT(absent.error().message(), HasSubstr("/absent/program"));

  auto processes = job(2, "echo $$ >> $FOLDER/pids; sleep 60");
  processes[1].before_exec = [] {
    usleep(300'000);  // time for rank 0 to begin
    return EPERM;
  };
  const auto refused = run(processes, {});
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.error().message(), HasSubstr("rank 1"));
  // None is left, not even one that had started well.
  for (const std::string& pid : lines_in("pids")) EXPECT_FALSE(is_alive(std::stoi(pid)));

  EXPECT_FALSE(run({}, {}).ok());
  EXPECT_FALSE(run({Process{}}, {}).ok());
  EXPECT_FALSE(run({processes[0], processes[0]}, {}).ok());
  EXPECT_FALSE(local_job(0, {"true"}).ok());
  EXPECT_FALSE(local_job(1, {}).ok());
}

TEST_F(LaunchTest, BeforeExecRunsInTheChild) {
  auto processes = job(1, "pwd");
  processes[0].before_exec = [] { return chdir("/") == 0 ? 0 : errno; };
  EXPECT_EQ(run_job(processes).out, "[0] /\n");
}

TEST_F(LaunchTest, WhoHoldsThePipeDoesNotHoldTheLauncher) {
  const auto ran = run_job(job(1, "sleep 60 & echo $! > $FOLDER/pid; echo done"));
  EXPECT_TRUE(ran.report.ok());
  EXPECT_EQ(ran.out, "[0] done\n");
  EXPECT_LT(ran.took, Nanos::from_seconds(20));
  // And is not left behind.
  EXPECT_TRUE(wait_until_gone(std::stoi(lines_in("pid").at(0))));
}

TEST_F(LaunchTest, LateOutputOfAGrandchildIsShown) {
  EXPECT_EQ(run_job(job(1, "(sleep 0.1; echo late) & exit 0")).out, "[0] late\n");
}

TEST_F(LaunchTest, ChildrenAndTheirsDieWithTheLauncher) {
  const pid_t launcher =
      run_apart(job(2, "sleep 300 & echo $$ >> $FOLDER/pids; echo $! >> $FOLDER/pids; wait"), {});
  ASSERT_GT(launcher, 0);
  ASSERT_TRUE(wait_for_lines("pids", 4));
  kill(launcher, SIGKILL);
  EXPECT_TRUE(WIFSIGNALED(wait_for(launcher)));
  for (const std::string& pid : lines_in("pids")) EXPECT_TRUE(wait_until_gone(std::stoi(pid)));
}

TEST_F(LaunchTest, SignalsArePassedOnOnce) {
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) {
    std::filesystem::remove(path("ready"));
    std::filesystem::remove(path("got"));
    Options options;
    options.grace = Nanos::from_seconds(60);
    const pid_t launcher =
        run_apart(job(2,
                      "trap 'echo got >> $FOLDER/got' TERM INT HUP; echo r >> $FOLDER/ready; "
                      "while [ ! -e $FOLDER/got ]; do sleep 0.02; done; sleep 0.3"),
                  options);
    ASSERT_TRUE(wait_for_lines("ready", 2));
    kill(launcher, number);
    const int status = wait_for(launcher);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 3);
    EXPECT_EQ(lines_in("got").size(), 2u) << strsignal(number);
    EXPECT_THAT(lines_in("reason").at(0), StartsWith(text("ended by signal %d (", number)));
  }
}

TEST_F(LaunchTest, TheSecondInterruptKills) {
  Options options;
  options.grace = Nanos::from_seconds(60);
  const pid_t launcher = run_apart(job(2,
                                       "trap 'echo got >> $FOLDER/got' INT; echo r >> "
                                       "$FOLDER/ready; while :; do sleep 0.02; done"),
                                   options);
  ASSERT_TRUE(wait_for_lines("ready", 2));
  const Nanos start = monotonic_clock().now();
  kill(launcher, SIGINT);
  ASSERT_TRUE(wait_for_lines("got", 2));
  kill(launcher, SIGINT);
  const int status = wait_for(launcher);
  EXPECT_EQ(WEXITSTATUS(status), 3);
  EXPECT_LT(monotonic_clock().now() - start, Nanos::from_seconds(30));
}

TEST_F(LaunchTest, AReaderThatStopsDoesNotStopTheMinding) {
  // Nobody reads the pipe: the launcher must still see the deadline, and then a signal ends it.
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const Fd reader(ends[0]);
  Fd writer(ends[1]);
  Options options;
  options.deadline = Nanos::from_millis(300);
  const auto processes = job(2, "echo $$ >> $FOLDER/pids; exec yes");
  const pid_t launcher = fork();
  if (launcher == 0) {
    dup2(writer.get(), STDOUT_FILENO);
    signal(SIGTERM, [](int) {});  // one may come when run() has ended and minds it no longer
    auto report = run(processes, options);
    _exit(report.ok() && !report->ok() ? 3 : 1);
  }
  writer.reset();
  ASSERT_TRUE(wait_for_lines("pids", 2));
  for (const std::string& pid : lines_in("pids")) EXPECT_TRUE(wait_until_gone(std::stoi(pid)));
  int status = 0;
  for (int i = 0; i < 1000 && waitpid(launcher, &status, WNOHANG) == 0; ++i) {
    kill(launcher, SIGTERM);  // the first may come before it has seen that the children are gone
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(WEXITSTATUS(status), 3);
}

// ---- output --------------------------------------------------------------------------------

class OutputTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
    read_ = Fd(ends[0]);
    write_ = Fd(ends[1]);
  }
  std::string received(Sink& sink) {
    std::string all;
    std::string buffer(1 << 16, '\0');
    for (;;) {
      sink.write_some();
      const ssize_t n = read(read_.get(), buffer.data(), buffer.size());
      if (n <= 0) return all;
      all += buffer.substr(0, static_cast<size_t>(n));
    }
  }
  Fd read_;
  Fd write_;
};

TEST_F(OutputTest, LinesAreJoinedFromPieces) {
  Sink sink(write_.get());
  Lines lines("[7] ", sink);
  for (const char* piece : {"a", "b\nc", "\n", "\n", "d"}) lines.feed(piece);
  EXPECT_EQ(received(sink), "[7] ab\n[7] c\n[7] \n");
  lines.finish();
  lines.finish();
  EXPECT_EQ(received(sink), "[7] d\n");
}

TEST_F(OutputTest, LongLinesAreCut) {
  for (const size_t size : {Lines::kLineBytesMax - 1, Lines::kLineBytesMax,
                            Lines::kLineBytesMax + 1, 3 * Lines::kLineBytesMax + 5}) {
    Sink sink(write_.get());
    Lines lines("", sink);
    lines.feed(std::string(size, 'x') + "\nend\n");
    size_t characters = 0;
    const auto got = lines_of(received(sink));
    for (const std::string& line : got) {
      EXPECT_LE(line.size(), Lines::kLineBytesMax);
      characters += line.size();
    }
    EXPECT_EQ(characters, size + 3);
    EXPECT_EQ(got.back(), "end");
  }
}

TEST_F(OutputTest, ASinkDoesNotWait) {
  Sink sink(write_.get());
  const std::string text(2 << 20, 'x');
  sink.append(text);
  EXPECT_TRUE(sink.full());
  sink.write_some();  // the pipe holds less
  EXPECT_TRUE(sink.pending());
  EXPECT_EQ(received(sink), text);
  EXPECT_FALSE(sink.pending());
}

}  // namespace
}  // namespace weft::launch
