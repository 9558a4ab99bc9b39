#include "checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "weft/launch.h"
#include "weft/membership.h"
#include "weft/process.h"

namespace weft::doctor {
namespace {

using ::testing::HasSubstr;

const Check& find_in(const std::vector<Check>& checks, const std::string& name) {
  for (const Check& check : checks) {
    if (check.name == name) return check;
  }
  ADD_FAILURE() << "no check " << name;
  static const Check none;
  return none;
}

// A machine made of files.
class DoctorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = std::filesystem::temp_directory_path() / "weft-doctor-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    files_.root = name;
  }
  void TearDown() override { std::filesystem::remove_all(files_.root); }

  void put(const std::string& path, const std::string& content) const {
    std::filesystem::create_directories(std::filesystem::path(files_.root + path).parent_path());
    std::ofstream(files_.root + path) << content;
  }
  const Check& find(const std::string& name) const { return find_in(checks_.list(), name); }
  KernelFiles files_;
  Checks checks_;
};

TEST_F(DoctorTest, ProcessorsAgainstRanks) {
  check_processors(checks_, files_, 100'000);
  EXPECT_EQ(find("processors").verdict, Verdict::note);
  EXPECT_THAT(find("processors").remedy, HasSubstr("at most"));
  Checks limited;
  put("/sys/fs/cgroup/cpu.max", "50000 100000\n");
  check_processors(limited, files_, 2);
  EXPECT_EQ(limited.list()[0].verdict, Verdict::note);
  EXPECT_THAT(limited.list()[0].found, HasSubstr("allows 0.5"));
  Checks free;
  put("/sys/fs/cgroup/cpu.max", "max 100000\n");
  check_processors(free, files_, 1);
  EXPECT_EQ(free.list()[0].verdict, Verdict::ok);
}

TEST_F(DoctorTest, Memory) {
  const std::pair<const char*, Verdict> cases[] = {
      {"MemTotal: 9 kB\nMemAvailable:  8000000 kB\n", Verdict::ok},
      {"MemAvailable:  800000 kB\n", Verdict::note},
      {"MemAvailable:  100000 kB\n", Verdict::problem},
      {"MemAvailable: garbage\n", Verdict::note},
      {"MemAvailable: 99999999999999999999999 kB\n", Verdict::note},
  };
  for (const auto& [content, verdict] : cases) {
    put("/proc/meminfo", content);
    Checks checks;
    check_memory(checks, files_);
    EXPECT_EQ(checks.list()[0].verdict, verdict) << content;
  }
}

TEST_F(DoctorTest, LimitsNameTheCommand) {
  check_shared_memory(checks_, mib(64).count, mib(16).count);
  EXPECT_EQ(find("shared memory").verdict, Verdict::problem);
  EXPECT_THAT(find("shared memory").remedy, HasSubstr("size=1G /dev/shm"));
  check_limits(checks_, 100, 1 << 20, 0, 4);
  EXPECT_EQ(find("open files").verdict, Verdict::problem);
  EXPECT_EQ(find("open files").remedy, "ulimit -n 4096");
  EXPECT_EQ(find("locked memory").verdict, Verdict::note);

  Checks hard;
  check_limits(hard, 1024, 1024, RLIM_INFINITY, 1000);
  EXPECT_EQ(hard.list()[0].verdict, Verdict::problem);
  EXPECT_THAT(hard.list()[0].remedy, HasSubstr("limits.conf"));
  EXPECT_EQ(hard.list()[1].verdict, Verdict::ok);
  Checks good;
  check_limits(good, 65536, RLIM_INFINITY, RLIM_INFINITY, 8);
  check_shared_memory(good, mib(2048).count, mib(1024).count);
  for (const Check& check : good.list()) EXPECT_EQ(check.verdict, Verdict::ok) << check.name;
}

TEST_F(DoctorTest, TcpSettings) {
  put("/proc/sys/net/ipv4/tcp_congestion_control", "cubic\n");
  put("/proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n");
  put("/proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t212992\n");
  put("/proc/sys/net/core/somaxconn", "16\n");
  put("/proc/sys/net/ipv4/tcp_slow_start_after_idle", "1\n");
  check_tcp_settings(checks_, files_);
  EXPECT_EQ(find("congestion control").found, "cubic");
  EXPECT_EQ(find("tcp_rmem").verdict, Verdict::ok);
  EXPECT_EQ(find("tcp_wmem").remedy, "sysctl -w net.ipv4.tcp_wmem=\"4096 16384 4194304\"");
  EXPECT_EQ(find("somaxconn").remedy, "sysctl -w net.core.somaxconn=4096");
  EXPECT_EQ(find("slow start after idle").remedy, "sysctl -w net.ipv4.tcp_slow_start_after_idle=0");
}

TEST_F(DoctorTest, PtraceScope) {
  check_ptrace(checks_, files_);
  EXPECT_EQ(find("ptrace scope").verdict, Verdict::ok);
  put("/proc/sys/kernel/yama/ptrace_scope", "1\n");
  Checks restricted;
  check_ptrace(restricted, files_);
  EXPECT_EQ(restricted.list()[0].remedy, "sysctl -w kernel.yama.ptrace_scope=0");
}

TEST_F(DoctorTest, ThisMachineIsLookedAtFully) {
  Options options;
  options.rank0 = "127.0.0.1";
  options.ranks = 1;
  const auto found = examine(options);
  for (const Check& check : found) {
    EXPECT_FALSE(check.found.empty()) << check.name;
    // What is not well comes with what to do.
    EXPECT_EQ(check.remedy.empty(), check.verdict == Verdict::ok) << check.name;
    EXPECT_STRNE(name_of(check.verdict), "unknown");
  }
  EXPECT_THAT(find_in(found, "route to rank 0").found, HasSubstr("127.0.0.1 on lo"));
  EXPECT_THAT(find_in(found, "rate on this host").found, HasSubstr("4 flows"));
  EXPECT_EQ(find_in(found, "ports").verdict, Verdict::ok);
}

TEST_F(DoctorTest, AnUnknownRankZeroIsAProblem) {
  Options options;
  options.rank0 = "weft-no-such-host.invalid";
  check_network(checks_, options);
  EXPECT_EQ(find("route to rank 0").verdict, Verdict::problem);
  EXPECT_THAT(find("route to rank 0").remedy, HasSubstr("WEFT_RENDEZVOUS"));
}

TEST_F(DoctorTest, AnInterfaceThatIsNotThereIsAProblem) {
  setenv("WEFT_INTERFACE", "none0", 1);
  check_network(checks_, {});
  unsetenv("WEFT_INTERFACE");
  EXPECT_EQ(find("interfaces").verdict, Verdict::problem);
  EXPECT_THAT(find("interfaces").remedy, HasSubstr("WEFT_INTERFACE"));
}

TEST_F(DoctorTest, HostsThatTheAgentDoesNotReachAreProblems) {
  Options options;
  options.remote_weft = "weft";
  const std::pair<const char*, const char*> cases[] = {
      {"false", "it ended without an answer"},
      {"echo", "it answers \"far weft doctor-peer\""},
      {"/absent/agent", "there is no program \"/absent/agent\""},
      {"ls", "cannot access"},
  };
  for (const auto& [agent, said] : cases) {
    options.agent = agent;
    Checks checks;
    check_other_host(checks, options, "far");
    ASSERT_EQ(checks.list().size(), 1u);
    EXPECT_EQ(checks.list()[0].verdict, Verdict::problem);
    EXPECT_THAT(checks.list()[0].found, HasSubstr(said));
    EXPECT_FALSE(checks.list()[0].remedy.empty());
  }
}

TEST(DoctorPeer, RefusesWhoIsNotADoctor) {
  for (const char* line : {"", "hello\n", "weft-doctor 2 short - -\n", "weft-doctor 1 x\n"}) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    Fd mine(ends[0]);
    const Fd theirs(ends[1]);
    ASSERT_EQ(write(mine.get(), line, strlen(line)), static_cast<ssize_t>(strlen(line)));
    mine.reset();
    EXPECT_FALSE(serve_as_peer(theirs.get(), theirs.get()).ok()) << line;
  }
}

// A peer in a thread of this process, greeted by hand.
class ServedPeer {
 public:
  explicit ServedPeer(const std::string& there)
      : token_(membership::new_secret()),
        in_(*process::make_socket_pair()),
        out_(*process::make_pipe()),
        thread_([this] { ended_ = serve_as_peer(in_.read.get(), out_.write.get()).ok(); }) {
    const std::string greeting = "weft-doctor 2 " + token_ + " " + there + " 127.0.0.1\n";
    EXPECT_EQ(write(in_.write.get(), greeting.data(), greeting.size()),
              static_cast<ssize_t>(greeting.size()));
    std::string answer(256, '\0');
    const ssize_t n = read(out_.read.get(), answer.data(), answer.size());
    EXPECT_EQ(sscanf(answer.c_str(), "weft-doctor 2 %u ", &port_), 1) << n;
  }
  ~ServedPeer() {
    in_.write.reset();
    thread_.join();
    EXPECT_TRUE(ended_);
  }
  const std::string& token() const { return token_; }
  unsigned port() const { return port_; }
  Fd connect_to(const std::string& address) const {
    auto to = launch::socket_address(address, static_cast<uint16_t>(port_));
    Fd fd(socket(to->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    return connect(fd.get(), to->get(), to->size) == 0 ? std::move(fd) : Fd();
  }
  // Whether it tells its time to one who shows this token.
  bool answers(const std::string& address, const std::string& token) const {
    const Fd fd = connect_to(address);
    const std::string question = token + "c?";
    char answer[8];
    return fd && send(fd.get(), question.data(), question.size(), MSG_NOSIGNAL) > 0 &&
           recv(fd.get(), answer, sizeof(answer), MSG_WAITALL) == sizeof(answer);
  }

 private:
  std::string token_;
  process::Pipe in_, out_;
  unsigned port_ = 0;
  bool ended_ = false;
  std::thread thread_;
};

TEST(DoctorPeer, ListensOnlyWhereTheDoctorKnocks) {
  const ServedPeer peer("127.0.0.1");
  EXPECT_TRUE(peer.answers("127.0.0.1", peer.token()));
  EXPECT_FALSE(peer.connect_to("127.0.0.2")) << "another address of the same host";
}

TEST(DoctorPeer, AtAnAddressThatIsNotItsOwnListensWhereItAnswersFrom) {
  const ServedPeer peer("192.0.2.1");  // forwarded from there, say
  EXPECT_TRUE(peer.answers("127.0.0.1", peer.token()));
  EXPECT_FALSE(peer.connect_to("127.0.0.2"));
}

TEST(DoctorPeer, WithoutAnAddressListensNowhere) { EXPECT_EQ(ServedPeer("-").port(), 0u); }

TEST(DoctorPeer, LetsInOnlyWhoShowsTheToken) {
  const ServedPeer peer("127.0.0.1");
  std::string nearly = peer.token();
  nearly.back() = nearly.back() == '0' ? '1' : '0';
  EXPECT_FALSE(peer.answers("127.0.0.1", nearly));
  EXPECT_FALSE(peer.answers("127.0.0.1", membership::new_secret()));
  EXPECT_TRUE(peer.answers("127.0.0.1", peer.token()));
}

}  // namespace
}  // namespace weft::doctor
