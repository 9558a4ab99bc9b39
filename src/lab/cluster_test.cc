// Real namespaces, real tc, real iperf3. Skipped, with a word why, only where the system forbids
// namespaces.
#include "cluster.h"

#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>

#include "shaper.h"
#include "soundness.h"

namespace weft::lab {
namespace {

constexpr Nanos kPatience = {10'000'000'000};
constexpr const char* kForbidden = "forbidden: ";

// Runs `inside` in namespaces. It returns what is wrong, or nothing; the words come out by a pipe,
// since a check that fails in another process would go unseen.
void isolated(const std::function<std::string(const Isolation&)>& inside,
              Confinement first = Confinement::user_namespaces) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  Fd from(ends[0]), to(ends[1]);
  const Result<int> code = run_isolated(
      [&](const Isolation& isolation) {
        const bool forbidden =
            isolation.confinement == Confinement::loopback && first != Confinement::loopback;
        const std::string wrong = forbidden ? kForbidden + isolation.lost : inside(isolation);
        return write(to.get(), wrong.data(), wrong.size()) < 0 ? 1 : 0;
      },
      first);
  to.reset();
  ASSERT_TRUE(code) << code.error().message();
  std::string wrong(65536, '\0');
  wrong.resize(
      static_cast<size_t>(std::max<ssize_t>(0, read(from.get(), wrong.data(), wrong.size()))));
  if (wrong.starts_with(kForbidden)) GTEST_SKIP() << wrong;
  EXPECT_EQ(wrong, "");
  EXPECT_EQ(*code, 0);
}

process::Command command(std::vector<std::string> arguments) {
  process::Command result;
  result.argv = std::move(arguments);
  return result;
}

// What a command says in a host, or what is wrong.
std::string said(const Cluster& cluster, uint32_t host, std::vector<std::string> arguments) {
  const Result<process::Finished> finished =
      cluster.run(host, command(std::move(arguments)), kPatience);
  if (!finished) return finished.error().message();
  return finished->output + finished->errors;
}

std::string check_three_hosts(const Isolation& isolation) {
  const Result<Cluster> cluster = Cluster::create({.hosts = 3, .link_bits_per_s = 1e9}, isolation);
  if (!cluster) return cluster.error().message();
  for (uint32_t host = 0; host < 3; ++host) {
    const std::string name = said(*cluster, host, {"cat", "/proc/sys/kernel/hostname"});
    if (name != cluster->name(host) + "\n") return "its own name: " + name;
    for (uint32_t other = 0; other < 3; ++other) {
      const std::string found = said(*cluster, host, {"getent", "hosts", cluster->name(other)});
      if (found.find(cluster->address(other)) != 0) return "another's address: " + found;
    }
  }
  // Only what the lab made is there to see.
  const std::string links = said(*cluster, 1, {"ip", "-o", "link"});
  if (std::count(links.begin(), links.end(), '\n') != 2) return "interfaces: " + links;
  return "";
}

TEST(Cluster, HostsKnowTheirNamesAndNothingElse) { isolated(check_three_hosts); }

TEST(Cluster, WorksWithRootsOwnNamespaces) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  isolated(check_three_hosts, Confinement::root_namespaces);
}

TEST(Cluster, WorksForAnOrdinaryUser) {
  if (geteuid() != 0) GTEST_SKIP() << "is one already: the other tests show it";
  const pid_t child = fork();
  if (child == 0) {
    constexpr unsigned kNobody = 65534;
    if (setgroups(0, nullptr) != 0 || setgid(kNobody) != 0 || setuid(kNobody) != 0) _exit(2);
    prctl(PR_SET_DUMPABLE, 1);  // as it is for a program that a user started
    const Result<int> code = run_isolated([](const Isolation& isolation) {
      if (isolation.confinement == Confinement::loopback) return 77;
      const std::string wrong = check_three_hosts(isolation);
      fprintf(stderr, "%s", wrong.c_str());
      return wrong.empty() ? 0 : 1;
    });
    _exit(code ? *code : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "user namespaces are forbidden here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Cluster, CarriesTheAskedRates) {
  if (!process::find_program("iperf3")) GTEST_SKIP() << "there is no iperf3";
  isolated([](const Isolation& isolation) -> std::string {
    const Result<Cluster> cluster = Cluster::create(
        {.hosts = 2, .link_bits_per_s = 500e6, .flow_bits_per_s = 125e6}, isolation);
    if (!cluster) return cluster.error().message();
    SoundnessOptions options;
    options.flows = {1, 8};
    options.seconds = 1;
    options.ring = false;
    // Whoever else runs here may take the processors away for a while: one good try is proof.
    std::string tables;
    for (int tries = 0; tries < 3; ++tries) {
      const Result<std::vector<SoundnessRow>> rows = check_soundness(*cluster, options);
      if (!rows) return rows.error().message();
      const bool good = std::all_of(rows->begin(), rows->end(), [](const SoundnessRow& row) {
        return std::abs(row.error_percent()) <= kSoundErrorPercent;
      });
      if (good) return "";
      tables += soundness_table(*rows);
    }
    return tables;
  });
}

TEST(Cluster, SaysWhatFailed) {
  isolated([](const Isolation& isolation) -> std::string {
    ClusterSpec spec{.hosts = 1, .link_bits_per_s = 1e9, .congestion_control = "nonsense"};
    Result<Cluster> refused = Cluster::create(spec, isolation);
    if (refused || refused.error().message().find("congestion_control") == std::string::npos)
      return "nonsense as congestion control was not refused by name";
    spec = {.hosts = 1};
    const Result<Cluster> cluster = Cluster::create(spec, isolation);
    if (!cluster) return cluster.error().message();
    const Result<process::Child> nothing = cluster->spawn(0, command({"no-such-program"}));
    if (nothing || nothing.error().code() != Code::not_found) return "started a missing program";
    const Result<process::Finished> late =
        cluster->run(0, command({"sleep", "9"}), Nanos::from_millis(50));
    if (late || late.error().code() != Code::timeout) return "waited for ever";
    const Result<process::Finished> failed =
        cluster->run(0, command({"sh", "-c", "exit 7"}), kPatience);
    if (!failed || failed->ending.exit_code != 7) return "lost the exit code";
    return "";
  });
}

TEST(Cluster, RefusesWhatIsNoCluster) {
  const Isolation isolation{Confinement::loopback, "a test"};
  for (const ClusterSpec& spec :
       {ClusterSpec{.hosts = 0}, ClusterSpec{.hosts = 65}, ClusterSpec{.link_bits_per_s = -1},
        ClusterSpec{.link_bits_per_s = 10}, ClusterSpec{.mtu = 100},
        ClusterSpec{.congestion_control = ""}}) {
    const Result<Cluster> cluster = Cluster::create(spec, isolation);
    ASSERT_FALSE(cluster);
    EXPECT_EQ(cluster.error().code(), Code::invalid_argument);
  }
}

TEST(Cluster, OnLoopbackSaysWhatIsLost) {
  isolated(
      [](const Isolation& isolation) -> std::string {
        if (isolation.lost.find("not apart") == std::string::npos) return isolation.lost;
        const Result<Cluster> cluster =
            Cluster::create({.hosts = 2, .link_bits_per_s = 1e9}, isolation);
        if (!cluster) return cluster.error().message();
        if (!cluster->shaped() || !cluster->station(1)) return "not limited";
        if (cluster->address(1).find("127.77.") != 0) return "not on loopback";
        return said(*cluster, 1, {"echo", "-n"});
      },
      Confinement::loopback);
}

// However the lab dies, its processes die too, within a second. Each of them holds the write end
// of a pipe, so its end of file tells when the last is gone.
void dies(int signal, Confinement confinement) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  Fd from(ends[0]), to(ends[1]);
  const pid_t lab = fork();
  if (lab == 0) {
    from.reset();
    const Result<int> code = run_isolated(
        [&](const Isolation& isolation) {
          const Result<Cluster> cluster = Cluster::create({.hosts = 1}, isolation);
          if (!cluster) return 1;
          // The grandchild ignores what can be ignored.
          process::Command stubborn =
              command({"sh", "-c", "trap '' INT TERM; echo up; sleep 30; sleep 30"});
          stubborn.descriptors = {{to.get(), 1}};
          const Result<process::Child> child = cluster->spawn(0, stubborn);
          if (!child) return 1;
          for (;;) pause();
        },
        confinement);
    _exit(code ? *code : 1);
  }
  to.reset();
  char word[8];
  ASSERT_EQ(read(from.get(), word, sizeof word), 3) << "the process did not start";
  const Nanos begin = monotonic_clock().now();
  kill(lab, signal);
  int status = 0;
  ASSERT_EQ(waitpid(lab, &status, 0), lab);
  if (signal != SIGKILL) {
    EXPECT_EQ(WEXITSTATUS(status), 128 + signal);
  }
  pollfd waiting = {from.get(), POLLIN, 0};
  EXPECT_EQ(poll(&waiting, 1, 2000), 1);
  EXPECT_EQ(read(from.get(), word, sizeof word), 0) << "something lives on";
  EXPECT_LT((monotonic_clock().now() - begin).seconds(), 1.0);
}

TEST(Cluster, DiesOfCtrlC) { dies(SIGINT, Confinement::user_namespaces); }
TEST(Cluster, DiesOfTerm) { dies(SIGTERM, Confinement::user_namespaces); }
TEST(Cluster, DiesOfKill) { dies(SIGKILL, Confinement::user_namespaces); }
TEST(Cluster, ExitCodeComesOut) {
  const Result<int> code = run_isolated([](const Isolation&) { return 42; });
  ASSERT_TRUE(code);
  EXPECT_EQ(*code, 42);
}

// A classic BPF machine, as far as the filter uses it.
uint32_t run_filter(uint32_t classes, const std::vector<uint8_t>& packet) {
  std::istringstream in(flow_filter(classes));
  int count = 0;
  char comma;
  in >> count;
  struct Op {
    unsigned code, yes, no;
    uint32_t k;
  };
  std::vector<Op> program;
  for (int i = 0; i < count; ++i) {
    Op op{};
    in >> comma >> op.code >> op.yes >> op.no >> op.k;
    program.push_back(op);
  }
  EXPECT_TRUE(in) << "the filter has fewer instructions than it says";
  uint32_t a = 0, x = 0;
  for (size_t at = 0; at < program.size(); ++at) {
    const Op& op = program[at];
    switch (op.code) {
      case 40: a = static_cast<uint32_t>(packet.at(op.k) << 8 | packet.at(op.k + 1)); break;
      case 48: a = packet.at(op.k); break;
      case 21: at += a == op.k ? op.yes : op.no; break;
      case 7: x = a; break;
      case 12: a += x; break;
      case 84: a &= op.k; break;
      case 4: a += op.k; break;
      case 22: return a;
      case 6: return op.k;
      default: ADD_FAILURE() << "instruction " << op.code; return 0;
    }
  }
  ADD_FAILURE() << "ran off the end";
  return 0;
}

std::vector<uint8_t> packet(uint16_t type, uint8_t protocol, uint16_t from, uint16_t to) {
  std::vector<uint8_t> bytes(64);
  const auto put = [&](size_t at, uint16_t value) {
    bytes[at] = static_cast<uint8_t>(value >> 8);
    bytes[at + 1] = static_cast<uint8_t>(value);
  };
  put(12, type);
  bytes[23] = protocol;
  put(34, from);
  put(36, to);
  return bytes;
}

TEST(ShaperSettings, LanesOfAPairNeverShareAClass) {
  const uint32_t classes = shaper_settings({.hosts = 4, .link_bits_per_s = 1e9}).flow_classes;
  for (const bool accepting : {false, true}) {
    std::set<uint32_t> seen;
    for (uint16_t lane = 0; lane < 64; ++lane) {
      // The kernel advances by 2 to 16 from one connection to the next.
      const auto port = static_cast<uint16_t>(60'900 + 16 * lane);
      const uint32_t chosen = accepting ? run_filter(classes, packet(0x800, 6, 29500, port))
                                        : run_filter(classes, packet(0x800, 6, port, 29500));
      EXPECT_GE(chosen, 0x10000 + classes);
      EXPECT_LT(chosen, 0x10000 + 2 * classes);
      seen.insert(chosen);
    }
    EXPECT_EQ(seen.size(), 64u);
  }
}

TEST(ShaperSettings, WhatIsNoFlowGoesToTheDefaultClass) {
  EXPECT_EQ(run_filter(1024, packet(0x806, 6, 1, 2)), 0u);   // ARP
  EXPECT_EQ(run_filter(1024, packet(0x800, 17, 1, 2)), 0u);  // UDP
  EXPECT_EQ(run_filter(1024, packet(0x800, 1, 1, 2)), 0u);   // ICMP
}

TEST(ShaperSettings, EveryClassOfTheFilterExists) {
  const std::string lines = egress_commands(
      shaper_settings({.hosts = 4, .link_bits_per_s = 1.25e9, .flow_bits_per_s = 250e6}));
  EXPECT_NE(lines.find("classid 1:400 htb"), std::string::npos);
  EXPECT_NE(lines.find("classid 1:7ff htb"), std::string::npos);
  EXPECT_NE(lines.find("ceil 250000000bit"), std::string::npos);
}

TEST(Cpu, LoadIsAShareOfAllProcessors) {
  const CpuLoad load = cpu_load({100, 10, 1000}, {150, 20, 1200});
  EXPECT_DOUBLE_EQ(load.busy_percent, 25);
  EXPECT_DOUBLE_EQ(load.steal_percent, 5);
  EXPECT_DOUBLE_EQ(cpu_load({1, 1, 1}, {1, 1, 1}).busy_percent, 0);
  ASSERT_TRUE(cpu_times());
}

}  // namespace
}  // namespace weft::lab
