// launch: starts the processes of a job on this machine and minds them.
//
// Each gets WEFT_RANK, WEFT_SIZE, WEFT_RENDEZVOUS and WEFT_SECRET (the names below); its output
// comes out line by line behind its rank; signals are passed on; when one fails, the others are
// ended, and which one failed first and how is told. Nothing is left behind: children and what
// they forked die with the launcher, however it dies, and with the end of the run.
//
// SIGINT, SIGTERM and SIGHUP that come during a run are passed on once; when they come again the
// processes are killed. Standard input of the processes is empty.
//
// Threads: one at a time, and no other thread of the caller takes these signals. Not here: what the
// processes do, remote hosts.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "weft/base.h"

namespace weft::launch {

// How a process finds its group, from its environment.
struct Membership {
  uint32_t rank = 0;
  uint32_t size = 1;
  std::string rendezvous;  // "address:port" of rank 0
  std::string secret;      // hex; proves that a connection belongs to this job
};
Result<Membership> membership_from_environment();

struct Process {
  uint32_t rank = 0;
  std::vector<std::string> argv;
  std::map<std::string, std::string> environment;  // added to the caller's
  // Called in the child before exec, to enter namespaces for instance; returns 0 or errno.
  std::function<int()> before_exec;
};

struct Options {
  bool prefix_output = true;             // "[2] text"; otherwise as it comes
  bool output_to_stderr = false;         // what ranks print too: stdout is the caller's alone
  Nanos grace = Nanos::from_seconds(3);  // between asking a process to end and killing it
  Nanos deadline = {0};                  // 0: none
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

}  // namespace weft::launch
