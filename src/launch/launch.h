// launch: how the processes of a job are started and minded, on this host and on others.
//
// Each gets WEFT_RANK, WEFT_SIZE, WEFT_RENDEZVOUS and a fresh WEFT_SECRET, which membership reads,
// and the variables from which torch.distributed learns the same (torch_variables()).
//
// The processes of a run print line by line behind their rank; signals are passed on; when one
// fails, the others are ended, and which one failed first and how is told. Nothing is left behind:
// children and what they forked die with the launcher, however it dies, and with the end of the
// run. Other hosts are reached through an agent, ssh for instance:
//
//   weft run ──stdin──► agent HOST weft run --remote-child ──► program
//              rank, folder, environment and secret, then signals; its end ends the program
//
// so that no secret stands in a command line. Of the environment only what a job needs goes along
// (docs/launch.md), not what is secret or belongs to a host or a session.
//
// SIGINT, SIGTERM and SIGHUP that come during a run are passed on once; when they come again the
// processes are killed. Standard input of the processes is empty.
//
// Threads: one at a time, and no other thread of the caller takes these signals. Not here: what the
// processes do.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base.h"

namespace weft::launch {

// ---- starting ----------------------------------------------------------------------------

struct Process {
  uint32_t rank = 0;
  std::string host;  // for messages; empty: this one
  std::vector<std::string> argv;
  std::map<std::string, std::string> environment;  // added to the caller's
  // Called in the child before exec, to enter namespaces for instance; returns 0 or errno.
  std::function<int()> before_exec;
  // For an agent: what it gets on its standard input, which then stays open. Signals follow, a
  // byte each, instead of being sent to the agent itself.
  std::optional<std::string> input;
};

struct Options {
  bool prefix_output = true;             // "[2] text"; otherwise as it comes
  bool output_to_stderr = false;         // what ranks print too: stdout is the caller's alone
  Nanos grace = Nanos::from_seconds(3);  // between asking a process to end and killing it
  Nanos deadline = {0};                  // 0: none
  int control_fd = -1;  // bytes that are signals to pass on; its end ends the processes
};

struct Outcome {
  uint32_t rank = 0;
  int exit_code = 0;  // valid when signal == 0
  int signal = 0;
  bool ended_by_us = false;
  Nanos after = {0};  // since start
};

struct Report {
  std::vector<Outcome> outcomes;          // by rank
  std::optional<uint32_t> first_failure;  // the rank whose failure ended the job
  std::string reason;                     // "rank 2 was killed by signal 9 (Killed) after 1.2 s"
  bool ok() const { return !first_failure.has_value() && reason.empty(); }
};

// Runs all to their end. Fails only if a process cannot be started (then none is left).
Result<Report> run(const std::vector<Process>& processes, const Options& options);

// Variables that are added to those of every rank.
using Variables = std::map<std::string, std::string>;
// From "NAME=VALUE", or "NAME" with the value that it has here. Fails with not_found for a name
// that is not set here.
Result<Variables> parse_variables(const std::vector<std::string>& list);

// What torch.distributed reads (its "env://"), and who follows it: RANK, WORLD_SIZE, LOCAL_RANK,
// LOCAL_WORLD_SIZE, and where rank 0's store listens: MASTER_ADDR and MASTER_PORT.
struct Seat {
  uint32_t rank = 0, ranks = 1;
  uint32_t local_rank = 0, local_ranks = 1;
};
Variables torch_variables(const Seat& seat, const std::string& store_address, uint16_t store_port);

// N copies of a program on this machine, with a fresh secret and free ports.
Result<std::vector<Process>> local_job(uint32_t ranks, const std::vector<std::string>& argv,
                                       const Variables& added = {});

// ---- other hosts ---------------------------------------------------------------------------

struct Host {
  std::string name;  // as the agent and messages call it, "gpu1" or "me@gpu1"
  uint32_t slots = 1;
};
// "a:2,b" or "[fd00::1]:2": names with how many ranks each takes, one if not said.
Result<std::vector<Host>> parse_hosts(std::string_view list);

struct Placement {
  std::vector<Host> hosts;  // filled in this order
  std::string agent = "ssh";
  std::string rendezvous;   // empty: an address of rank 0's host
  std::string interface;    // empty: the one that routes to the others
  std::string remote_weft;  // the program on other hosts; empty: the path of this one
  Variables added;
  Nanos grace = Nanos::from_seconds(3);
};
// Ranks on several hosts, in the present folder. Those on this host are started directly.
Result<std::vector<Process>> job_on_hosts(uint32_t ranks, const std::vector<std::string>& argv,
                                          const Placement& placement);

// The other end of an agent: reads from `input` what to start, runs it, and returns its exit code,
// 128 more than the signal that ended it.
Result<int> remote_child(int input);

// ---- names and addresses -------------------------------------------------------------------

// An address of an interface of this host.
struct InterfaceAddress {
  std::string interface;
  std::string address;  // numeric
  int family = 0;       // AF_INET or AF_INET6
  bool up = false;
  bool loopback = false;
  bool link_local = false;
};
std::vector<InterfaceAddress> interface_addresses();

// The numeric addresses of a name, as far as this host can tell. Fails with why not.
Result<std::vector<std::string>> addresses_of(const std::string& name);

// The address from which this host would send to `address` (numeric).
Result<std::string> source_towards(const std::string& address);

// "localhost", this host's name, short or long, or one of its addresses.
bool is_this_host(const std::string& name);

// "me@gpu1" -> "gpu1".
std::string without_user(const std::string& host);

// A port that was free a moment ago on `address` (numeric). Another program may take it before
// rank 0 does; then rank 0 says so and the job is started again.
Result<uint16_t> free_port(const std::string& address);
// Another one than `taken`; the next one where `address` is not of this host, so that nobody can
// look.
Result<uint16_t> free_port_beside(const std::string& address, uint16_t taken);

// An agent's command line for a command on a host: "ssh" -> ssh -o BatchMode=yes -T HOST COMMAND.
// The words of the command must mean themselves to a shell, since ssh hands them to one.
Result<std::vector<std::string>> agent_command(const std::string& agent, const std::string& host,
                                               const std::vector<std::string>& command);

// A socket address from numeric text.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};
Result<SocketAddress> socket_address(const std::string& address, uint16_t port);

}  // namespace weft::launch
