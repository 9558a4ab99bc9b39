// cluster: hosts that exist only inside this process and vanish with it.
//
//   weft (outer) ── waits, forwards signals, returns the exit code
//     └─ inner, process 1 of its own user, network, mount, process and name namespaces
//          ├─ br0 ─ port0 ══ eth0 of host0   10.77.0.1
//          │      ─ port1 ══ eth0 of host1   10.77.0.2     (══ is a veth pair, shaped at both ends)
//          └─ the job's processes, each inside one host
//
// Nothing of the machine's own network is touched and no root is needed. The kernel kills all
// processes of a process namespace with its first one, and a network namespace goes with its last
// process, so nothing is left however the lab dies: the inner process asks to be killed with the
// outer one.
//
// A host's link is limited in both directions by htb: on its eth0 (what it sends) and on the
// bridge's port (what it receives). A cap on each flow is a class of its own under the link's
// class, chosen by a hash of both ports.
//
// Where user namespaces are forbidden root's own are used; where those are forbidden too, hosts are
// addresses on the loopback interface, whose flows are paced (links.h), and `Isolation::lost` says
// what that costs.
//
// Threads: run_isolated needs a process with one thread. A Cluster may be used from any thread,
// one at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "station.h"
#include "weft/base.h"
#include "weft/process.h"

namespace weft::lab {

enum class Confinement : uint8_t {
  user_namespaces,  // an ordinary user's: what the lab is meant to run in
  root_namespaces,  // user namespaces are forbidden, but we are root
  loopback,         // both are forbidden
};

const char* confinement_name(Confinement confinement);
// The best that the lab is to use: what WEFT_LAB_CONFINEMENT names, or the first of them. Fails
// with invalid_argument if it names none.
Result<Confinement> asked_confinement();

struct Isolation {
  Confinement confinement = Confinement::loopback;
  // What the lab cannot do here, and why; empty when nothing is lost.
  std::string lost;
};

// Runs `inside` as the first process of new namespaces, waits for it and returns what it returned
// (128 + the signal's number if it was killed). SIGINT, SIGTERM and SIGHUP are forwarded to it;
// what has not ended 500 ms later is killed, with everything that it started. `inside` may set
// handlers of its own; as a namespace's first process it ignores signals that it has none for.
// The best confinement that the system grants is used, from `first` down.
// REQUIRES: the process has one thread.
Result<int> run_isolated(const std::function<int(const Isolation&)>& inside,
                         Confinement first = Confinement::user_namespaces);

// What the network is asked to be. Rates are real ones, after dilation.
struct ClusterSpec {
  uint32_t hosts = 2;          // 1 to 64
  double link_bits_per_s = 0;  // of each host, each direction; 0: not shaped
  double flow_bits_per_s = 0;  // of each TCP flow; 0, or not below the link's rate: no cap
  uint32_t mtu = 9000;         // 1500 would spend 4.4 % of an asked rate on headers
  std::string congestion_control = "reno";
};

class Cluster {
 public:
  // Makes the hosts and shapes them. Fails with io naming the command that failed and what it
  // said, with unsupported when iproute2 is absent or the kernel lacks a part.
  // REQUIRES: inside run_isolated, with its Isolation.
  static Result<Cluster> create(const ClusterSpec& spec, const Isolation& isolation);

  Cluster(Cluster&&) noexcept;
  Cluster& operator=(Cluster&&) noexcept;
  ~Cluster();

  const ClusterSpec& spec() const;
  // Whether links have limits. On loopback they hold for processes that use network_at() alone.
  bool shaped() const;
  // On loopback: what a process that is started on `host` needs, to be limited as a host is.
  std::optional<Station> station(uint32_t host) const;
  // How many sockets escaped their limits; above 0 no time means anything.
  uint64_t unlimited_sockets() const;
  uint32_t size() const { return spec().hosts; }
  // "10.77.0.1"; valid only inside.
  std::string address(uint32_t host) const;
  // "host0"; resolves to address(host) on every host (not on loopback).
  std::string name(uint32_t host) const;
  // The interface that carries the host's traffic: "eth0", or "lo" on loopback.
  std::string interface() const;

  // Starts a process inside a host. It is killed with the inner process (on loopback: with the
  // thread that called this).
  Result<process::Child> spawn(uint32_t host, process::Command command) const;
  // What a process that others start calls before exec, to be inside a host. Fails with unsupported
  // on loopback, where a process must know its station itself.
  // REQUIRES: used while the Cluster lives.
  Result<std::function<int()>> entering(uint32_t host) const;
  // Runs a command inside a host to its end, or kills it after `patience` (then: timeout).
  Result<process::Finished> run(uint32_t host, process::Command command, Nanos patience) const;

  // What was fixed, by name, for the trace's environment: congestion control, mtu, queue limits,
  // flow classes, sysctls.
  const std::vector<std::pair<std::string, std::string>>& facts() const;

 private:
  struct State;
  explicit Cluster(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// The processors' time since boot, in ticks, over all of them.
struct CpuTimes {
  uint64_t busy = 0;
  uint64_t steal = 0;  // taken by other guests of the same machine; not part of busy
  uint64_t total = 0;
};

struct CpuLoad {
  double busy_percent = 0;
  double steal_percent = 0;
};

Result<CpuTimes> cpu_times();
// The share of all processors' time between two points.
CpuLoad cpu_load(const CpuTimes& from, const CpuTimes& to);
// Over this share of busy (and stolen) time a run is unsound.
inline constexpr double kUnsoundBusyPercent = 70;
// Over this share of stolen time as well: a tenth was seen to lengthen iterations by a tenth, and
// two fifths by seven.
inline constexpr double kUnsoundStealPercent = 10;

}  // namespace weft::lab
