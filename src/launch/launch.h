// launch: how a process finds its group, and how the processes of a job are started and minded.
//
// A process that is started by weft gets WEFT_RANK, WEFT_SIZE, WEFT_RENDEZVOUS and WEFT_SECRET;
// one that another launcher started finds the same in that launcher's variables (docs/launch.md).
//
// The processes of a run print line by line behind their rank; signals are passed on; when one
// fails, the others are ended, and which one failed first and how is told. Nothing is left behind:
// children and what they forked die with the launcher, however it dies, and with the end of the
// run. Other hosts are reached through an agent, ssh for instance:
//
//   weft run ──stdin──► agent HOST weft run --remote-child ──► program
//              rank, folder, environment and secret, then signals; its end ends the program
//
// so that no secret stands in a command line.
//
// SIGINT, SIGTERM and SIGHUP that come during a run are passed on once; when they come again the
// processes are killed. Standard input of the processes is empty.
//
// Threads: one at a time, and no other thread of the caller takes these signals. Not here: what the
// processes do.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base.h"

namespace weft::launch {

// ---- joining -----------------------------------------------------------------------------

// How a process finds its group, from its environment.
struct Membership {
  uint32_t rank = 0;
  uint32_t size = 1;
  uint32_t local_rank = 0;  // among the ranks of this host
  uint32_t local_size = 0;  // 0: the launcher does not say
  std::string launcher;     // "weft", "torchrun", "Open MPI", "MPICH", "Slurm", "Horovod", "DMLC"
  std::string host;         // this host's name, for messages
  std::string interface;    // WEFT_INTERFACE, or empty: the one that routes to rank 0
  std::string rendezvous;   // "address:port" of rank 0, "[v6]:port", or "file:PATH" on one host
  std::string secret;       // hex; proves that a connection belongs to this job
};

// The value of a variable of the environment, or nothing if it is not set.
using Lookup = std::function<std::optional<std::string>(const char* name)>;

// WEFT_RANK and WEFT_SIZE win; then the first launcher of the list above whose variables are set.
// Fails with not_found where nobody started this process as a rank, and with the name of the
// variable that is wrong or missing.
Result<Membership> membership_from_environment();
Result<Membership> membership_from_environment(const Lookup& lookup);
// The launcher that started this process as a rank, if one did.
std::optional<std::string> launcher_of_environment();
std::optional<std::string> launcher_of_environment(const Lookup& lookup);

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

// N copies of a program on this machine, with a fresh secret and a free port.
Result<std::vector<Process>> local_job(uint32_t ranks, const std::vector<std::string>& argv);

std::string new_secret();

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
  Nanos grace = Nanos::from_seconds(3);
};
// Ranks on several hosts, in the present folder. Those on this host are started directly.
Result<std::vector<Process>> job_on_hosts(uint32_t ranks, const std::vector<std::string>& argv,
                                          const Placement& placement);

// The other end of an agent: reads from `input` what to start, runs it, and returns its exit code,
// 128 more than the signal that ended it.
Result<int> remote_child(int input);

// ---- the doctor ----------------------------------------------------------------------------

enum class Verdict : uint8_t { ok, note, problem };
const char* name_of(Verdict verdict);

struct Check {
  std::string name;  // "open files"
  Verdict verdict = Verdict::ok;
  std::string found;
  std::string remedy;  // the variable or the command to set; empty when all is well
};

struct DoctorOptions {
  std::string rank0;   // address or name of rank 0's host; empty: unknown
  uint32_t ranks = 0;  // on this host; 0: unknown
  std::vector<std::string> hosts;
  std::string agent = "ssh";
  std::string remote_weft;
  bool rates = true;  // takes about a second, and one more a host
};
// Looks at what a job needs of this host and of the way to others. Never fails: what cannot be
// looked at is said in a check.
std::vector<Check> doctor(const DoctorOptions& options);

// The other end of a doctor, started on a host by the agent: listens for what the doctor sends.
Result<void> doctor_peer(int input, int output);

}  // namespace weft::launch
