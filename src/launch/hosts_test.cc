#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "remote.h"
#include "weft/launch.h"
#include "weft/membership.h"

namespace weft::launch {
namespace {

using membership::host_name;

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// ---- names ---------------------------------------------------------------------------------

std::string listed(std::string_view list) {
  const auto hosts = parse_hosts(list);
  if (!hosts) return "refused";
  std::string out;
  for (const Host& host : *hosts) out += text("%s*%u ", host.name.c_str(), host.slots);
  return out;
}

TEST(Hosts, AreReadWithTheirSlots) {
  EXPECT_EQ(listed("a:2,b:3"), "a*2 b*3 ");
  EXPECT_EQ(listed("a,b"), "a*1 b*1 ");
  EXPECT_EQ(listed("a:2,b,a:3"), "a*5 b*1 ");
  EXPECT_EQ(listed("[fd00::1]:4,10.0.0.1:2"), "fd00::1*4 10.0.0.1*2 ");
  EXPECT_EQ(listed("me@gpu-1.lan"), "me@gpu-1.lan*1 ");
  for (const char* bad :
       {"", ",", "a,", "a:", "a:0", "a:x", "a:65536", "fd00::1:2", "[a", "[]:2", "a b",
        "-oProxyCommand=x", "a;b", "$(a)", "a:1:2", "[a]x", "a:40000,b:40000"}) {
    EXPECT_EQ(listed(bad), "refused") << bad;
  }
}

TEST(Hosts, ThisOneIsKnownByItsNamesAndAddresses) {
  EXPECT_TRUE(is_this_host("localhost"));
  EXPECT_TRUE(is_this_host("127.0.0.1"));
  EXPECT_TRUE(is_this_host(host_name()));
  EXPECT_FALSE(is_this_host("192.0.2.250"));
  EXPECT_FALSE(is_this_host("weft-no-such-host.invalid"));
  EXPECT_EQ(without_user("me@gpu1"), "gpu1");
  EXPECT_EQ(without_user("gpu1"), "gpu1");
}

TEST(Hosts, AddressesAreFound) {
  EXPECT_EQ(*source_towards("127.0.0.1"), "127.0.0.1");
  EXPECT_FALSE(source_towards("no address").ok());
  EXPECT_THAT(*addresses_of("127.0.0.1"), ElementsAre("127.0.0.1"));
  const auto unknown = addresses_of("weft-no-such-host.invalid");
  ASSERT_FALSE(unknown.ok());
  EXPECT_THAT(unknown.error().message(), HasSubstr("weft-no-such-host.invalid"));
  EXPECT_GT(*free_port("127.0.0.1"), 0);
}

TEST(Agent, GetsHostAndCommand) {
  EXPECT_THAT(
      *agent_command("ssh", "b", {"/usr/bin/weft", "remote-child"}),
      ElementsAre("ssh", "-o", "BatchMode=yes", "-T", "b", "/usr/bin/weft", "remote-child"));
  EXPECT_THAT(*agent_command("ip  netns exec", "b", {"weft"}),
              ElementsAre("ip", "netns", "exec", "b", "weft"));
  EXPECT_FALSE(agent_command(" ", "b", {"weft"}).ok());
  const auto odd = agent_command("ssh", "b", {"/my folder/weft"});
  ASSERT_FALSE(odd.ok());
  EXPECT_THAT(odd.error().message(), HasSubstr("--weft"));
}

// ---- what is sent --------------------------------------------------------------------------

TEST(RemoteStart, IsReadBack) {
  RemoteStart start;
  start.rank = 3;
  start.folder = "/a folder";
  start.grace = Nanos::from_seconds(2);
  start.environment = {{"A", "x=y\n"}, {"EMPTY", ""}};
  start.argv = {"program", "", "two words", "\n"};
  const std::string sent = encode(start);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const Fd reader(ends[0]), writer(ends[1]);
  ASSERT_EQ(write(writer.get(), (sent + "\x0f").data(), sent.size() + 1),
            static_cast<ssize_t>(sent.size() + 1));
  const auto read_back = read_remote_start(reader.get());
  ASSERT_TRUE(read_back.ok()) << read_back.error().message();
  EXPECT_EQ(read_back->rank, 3u);
  EXPECT_EQ(read_back->folder, start.folder);
  EXPECT_EQ(read_back->grace, start.grace);
  EXPECT_EQ(read_back->environment, start.environment);
  EXPECT_EQ(read_back->argv, start.argv);
  char rest = 0;
  EXPECT_EQ(read(reader.get(), &rest, 1), 1);
  EXPECT_EQ(rest, '\x0f');
}

TEST(RemoteStart, GarbageIsRefused) {
  for (const std::string& bytes :
       {std::string("x"), std::string("weft-remote 1 99999999999\n"), std::string(100, 'w'),
        std::string("weft-remote 1 \n"), std::string("weft-remote 1 -1\n"),
        std::string("weft-remote 2 0\n"), std::string("weft-remote 1 0\n"),
        std::string("weft-remote 1 9\nabc"), std::string()}) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const Fd reader(ends[0]);
    Fd writer(ends[1]);
    ASSERT_EQ(write(writer.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    writer.reset();
    EXPECT_FALSE(read_remote_start(reader.get()).ok()) << bytes;
  }
  for (const std::string_view items :
       {std::string_view("ax"), std::string_view("zx\0", 3), std::string_view("\0", 1),
        std::string_view("r70000\0ax\0", 10), std::string_view("eA\0ax\0", 6),
        std::string_view("e=A\0ax\0", 7), std::string_view("a\0", 2),
        std::string_view("g-1\0ax\0", 7)}) {
    EXPECT_FALSE(decode(items).ok()) << items;
  }
}

// Sets variables while it lives.
class Environment {
 public:
  explicit Environment(std::initializer_list<const char*> names) : names_(names) {
    for (const char* name : names_) setenv(name, "value", 1);
  }
  ~Environment() {
    for (const char* name : names_) unsetenv(name);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  std::vector<const char*> names_;
};

TEST(RemoteStart, OnlyWhatAJobNeedsOfTheEnvironmentGoesAlong) {
  const auto needed = {"WEFT_HOSTS_TEST",      "OMP_NUM_THREADS", "NCCL_DEBUG", "PYTHONPATH",
                       "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV",     "LC_ALL"};
  const auto not_theirs = {"AWS_SECRET_ACCESS_KEY",
                           "SSH_AUTH_SOCK",
                           "LD_PRELOAD",
                           "GITHUB_TOKEN",
                           "KUBECONFIG",
                           "XDG_RUNTIME_DIR",
                           "TMPDIR",
                           "WEFT_HOST",
                           "WEFT_SECRET_FD",
                           "WEFT_SECRET_FILE",
                           "MY_OMP_KEY"};
  const Environment set(needed), also(not_theirs);
  const auto sent = environment_for_others();
  for (const char* name : needed) EXPECT_EQ(sent.at(name), "value") << name;
  for (const char* name : not_theirs) EXPECT_FALSE(sent.contains(name)) << name;
  EXPECT_FALSE(sent.contains("HOME"));
  EXPECT_TRUE(sent.contains("PATH"));
}

TEST(Variables, AreNamedOrGiven) {
  const Environment set({"WEFT_HOSTS_TEST"});
  const auto found = parse_variables({"WEFT_HOSTS_TEST", "A=b=c", "EMPTY="});
  ASSERT_TRUE(found.ok()) << found.error().message();
  EXPECT_EQ(*found, (Variables{{"WEFT_HOSTS_TEST", "value"}, {"A", "b=c"}, {"EMPTY", ""}}));
  const auto unset = parse_variables({"WEFT_NOT_SET_HERE"});
  ASSERT_FALSE(unset.ok());
  EXPECT_THAT(unset.error().message(), HasSubstr("WEFT_NOT_SET_HERE is not set here"));
  EXPECT_FALSE(parse_variables({"=x"}).ok());
  EXPECT_FALSE(parse_variables({""}).ok());
}

// ---- jobs ----------------------------------------------------------------------------------

std::map<std::string, std::string> sent_environment(const Process& process) {
  const std::string& input = *process.input;
  return decode(std::string_view(input).substr(input.find('\n') + 1))->environment;
}

TEST(JobOnHosts, FillsHostsInOrder) {
  Placement placement;
  placement.hosts = *parse_hosts("localhost:1,weft-b.invalid:2,weft-c.invalid:4");
  placement.rendezvous = "10.0.0.1:5000";
  placement.agent = "agent --option";
  placement.remote_weft = "/opt/weft";
  placement.interface = "eth1";
  placement.added = {{"ASKED_FOR", "yes"}, {"WEFT_RANK", "77"}};
  const auto job = job_on_hosts(4, {"program", "word"}, placement);
  ASSERT_TRUE(job.ok()) << job.error().message();
  ASSERT_EQ(job->size(), 4u);
  EXPECT_FALSE((*job)[0].input.has_value());
  EXPECT_THAT((*job)[0].argv, ElementsAre("program", "word"));
  EXPECT_EQ((*job)[0].environment.at("WEFT_LOCAL_SIZE"), "1");
  EXPECT_THAT((*job)[2].argv,
              ElementsAre("agent", "--option", "weft-b.invalid", "/opt/weft", "remote-child"));
  const auto sent = sent_environment((*job)[2]);
  EXPECT_EQ(sent.at("WEFT_RANK"), "2");
  EXPECT_EQ(sent.at("WEFT_SIZE"), "4");
  EXPECT_EQ(sent.at("WEFT_LOCAL_RANK"), "1");
  EXPECT_EQ(sent.at("WEFT_LOCAL_SIZE"), "2");
  EXPECT_EQ(sent.at("WEFT_RENDEZVOUS"), "10.0.0.1:5000");
  EXPECT_EQ(sent.at("RANK"), "2");
  EXPECT_EQ(sent.at("WORLD_SIZE"), "4");
  EXPECT_EQ(sent.at("LOCAL_RANK"), "1");
  EXPECT_EQ(sent.at("LOCAL_WORLD_SIZE"), "2");
  EXPECT_EQ(sent.at("MASTER_ADDR"), "10.0.0.1");
  EXPECT_EQ(sent.at("MASTER_PORT"), "5001");
  EXPECT_EQ(sent.at("WEFT_INTERFACE"), "eth1");
  EXPECT_EQ(sent.at("ASKED_FOR"), "yes");
  EXPECT_EQ((*job)[0].environment.at("ASKED_FOR"), "yes");
  EXPECT_EQ(sent_environment((*job)[3]).at("WEFT_LOCAL_SIZE"), "1");
  // The secret goes over the input, and nowhere that ps looks.
  EXPECT_EQ(sent.at("WEFT_SECRET"), (*job)[0].environment.at("WEFT_SECRET"));
  for (const std::string& word : (*job)[2].argv)
    EXPECT_THAT(word, Not(HasSubstr(sent.at("WEFT_SECRET"))));
  EXPECT_TRUE((*job)[2].environment.empty());
}

TEST(JobOnHosts, HasAPlaceForTorchsStoreBesideWeft) {
  Placement placement;
  placement.hosts = *parse_hosts("weft-b.invalid:1");
  placement.remote_weft = "weft";
  placement.rendezvous = "[fd00::1]:65535";
  const auto far = sent_environment(job_on_hosts(1, {"p"}, placement)->at(0));
  EXPECT_EQ(far.at("MASTER_ADDR"), "fd00::1");
  EXPECT_EQ(far.at("MASTER_PORT"), "1024");
  placement.hosts = *parse_hosts("localhost:1");
  placement.rendezvous = "";
  const auto here = job_on_hosts(1, {"p"}, placement)->at(0).environment;
  EXPECT_EQ(here.at("MASTER_ADDR"), "127.0.0.1");
  EXPECT_NE("127.0.0.1:" + here.at("MASTER_PORT"), here.at("WEFT_RENDEZVOUS"));
}

TEST(JobOnHosts, FindsAPlaceToMeet) {
  Placement placement;
  placement.hosts = *parse_hosts("localhost:2");
  EXPECT_THAT(job_on_hosts(2, {"p"}, placement)->at(1).environment.at("WEFT_RENDEZVOUS"),
              StartsWith("127.0.0.1:"));
  placement.hosts = *parse_hosts("weft-b.invalid:2");
  placement.remote_weft = "weft";
  const std::string there =
      sent_environment(job_on_hosts(2, {"p"}, placement)->at(1)).at("WEFT_RENDEZVOUS");
  ASSERT_THAT(there, StartsWith("weft-b.invalid:"));
  const int port = std::stoi(there.substr(there.find(':') + 1));
  EXPECT_GE(port, 20000);
  EXPECT_LT(port, 32000);
  placement.hosts = *parse_hosts("localhost,weft-b.invalid");
  const auto unknown = job_on_hosts(2, {"p"}, placement);
  ASSERT_FALSE(unknown.ok());
  EXPECT_THAT(unknown.error().message(), HasSubstr("--rendezvous"));
  placement.interface = "lo";
  EXPECT_THAT(job_on_hosts(2, {"p"}, placement)->at(0).environment.at("WEFT_RENDEZVOUS"),
              StartsWith("127.0.0.1:"));
  placement.interface = "none0";
  EXPECT_FALSE(job_on_hosts(2, {"p"}, placement).ok());
  placement.rendezvous = "nonsense";
  EXPECT_FALSE(job_on_hosts(2, {"p"}, placement).ok());
  placement.rendezvous = "h:1";
  EXPECT_FALSE(job_on_hosts(3, {"p"}, placement).ok());
  EXPECT_FALSE(job_on_hosts(0, {"p"}, placement).ok());
  EXPECT_FALSE(job_on_hosts(1, {}, placement).ok());
}

// ---- both ends -----------------------------------------------------------------------------

class RemoteChild : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = std::filesystem::temp_directory_path() / "weft-remote-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override {
    input_.reset();
    std::filesystem::remove_all(folder_);
  }
  // Runs the other end in a process of its own; what it starts runs `script` in the folder.
  void start(const std::string& script) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    input_ = Fd(ends[0]);
    const Fd other(ends[1]);
    child_ = fork();
    if (child_ == 0) {
      input_.reset();
      const auto code = remote_child(other.get());
      _exit(code.ok() ? *code : 99);
    }
    RemoteStart start;
    start.rank = 1;
    start.folder = folder_;
    start.grace = Nanos::from_seconds(60);
    start.environment = {{"GREETING", "hello"}};
    start.argv = {"sh", "-c", script};
    const std::string sent = encode(start);
    ASSERT_EQ(write(input_.get(), sent.data(), sent.size()), static_cast<ssize_t>(sent.size()));
  }
  int exit_code() {
    int status = 0;
    while (waitpid(child_, &status, 0) < 0 && errno == EINTR) {
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  std::string content(const std::string& name) const {
    std::stringstream out;
    out << std::ifstream(folder_ + "/" + name).rdbuf();
    return out.str();
  }
  bool wait_for(const std::string& name) const {
    for (int i = 0; i < 1000; ++i) {
      if (!content(name).empty()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }
  std::string folder_;
  Fd input_;
  pid_t child_ = -1;
};

TEST_F(RemoteChild, RunsInTheFolderWithTheEnvironment) {
  start("echo $GREETING > said; exit 5");
  EXPECT_EQ(exit_code(), 5);
  EXPECT_EQ(content("said"), "hello\n");
}

TEST_F(RemoteChild, ASignalIsAnExitCode) {
  start("kill -9 $$");
  EXPECT_EQ(exit_code(), 128 + SIGKILL);
}

TEST_F(RemoteChild, PassesSignalsOn) {
  start("trap 'echo int > got; exit 6' INT; echo $$ > ready; while :; do sleep 0.02; done");
  ASSERT_TRUE(wait_for("ready"));
  const char number = SIGINT;
  ASSERT_EQ(write(input_.get(), &number, 1), 1);
  EXPECT_EQ(exit_code(), 6);
  EXPECT_EQ(content("got"), "int\n");
}

TEST_F(RemoteChild, EndsWithTheConnection) {
  start("trap 'echo term > got; exit 7' TERM; echo $$ > ready; while :; do sleep 0.02; done");
  ASSERT_TRUE(wait_for("ready"));
  input_.reset();
  EXPECT_EQ(exit_code(), 7);
  EXPECT_EQ(content("got"), "term\n");
}

TEST_F(RemoteChild, SaysWhatItCannotStart) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const Fd reader(ends[0]);
  Fd writer(ends[1]);
  RemoteStart start;
  start.folder = folder_ + "/none";
  start.argv = {"true"};
  const std::string sent = encode(start);
  ASSERT_EQ(write(writer.get(), sent.data(), sent.size()), static_cast<ssize_t>(sent.size()));
  const auto code = remote_child(reader.get());
  ASSERT_FALSE(code.ok());
  EXPECT_THAT(code.error().message(), HasSubstr("cannot enter " + start.folder));
}

TEST_F(RemoteChild, AnAgentGetsItsInputAndThenSignals) {
  // More than a pipe holds, read late; then a byte, which is a signal.
  Process process;
  process.rank = 4;
  process.host = "far";
  process.input = std::string(3 << 20, 'x');
  process.environment = {{"FOLDER", folder_}};
  process.argv = {"sh", "-c",
                  "sleep 0.2; head -c 3145728 | wc -c > $FOLDER/count; echo r > $FOLDER/ready; "
                  "head -c 1 | od -An -tu1 > $FOLDER/signal; exit 130"};
  const pid_t launcher = fork();
  if (launcher == 0) {
    const auto report = run({process}, {});
    std::ofstream(folder_ + "/reason") << report->reason;
    _exit(0);
  }
  ASSERT_TRUE(wait_for("ready"));
  kill(launcher, SIGINT);
  waitpid(launcher, nullptr, 0);
  EXPECT_EQ(std::stoi(content("count")), 3 << 20);
  EXPECT_EQ(std::stoi(content("signal")), SIGINT);
  EXPECT_THAT(content("reason"), StartsWith("ended by signal 2"));
}

TEST_F(RemoteChild, TheFailureOfAnAgentIsExplained) {
  const auto reason = [](int code) {
    Process process;
    process.host = "far";
    process.input = "";
    process.argv = {"sh", "-c", text("exit %d", code)};
    return run({process}, {})->reason;
  };
  EXPECT_THAT(reason(3), StartsWith("rank 0 on far exited with code 3 after"));
  EXPECT_THAT(reason(255), HasSubstr("cannot connect"));
  EXPECT_THAT(reason(127), HasSubstr("not there"));
  EXPECT_THAT(reason(137), HasSubstr("signal 9, Killed"));
}

}  // namespace
}  // namespace weft::launch
