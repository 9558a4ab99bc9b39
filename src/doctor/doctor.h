// doctor: looks at what a job needs of this host and of the way to others, and changes nothing.
//
// Each thing that it looks at is a Check: well, a note (the job runs, but could run better), or a
// problem (it may not run), with the variable or the command to set. On another host it starts a
// peer of its own through an agent, which listens on the one address that the doctor comes to, lets
// in who shows a random token that went over the agent, and ends with the agent.
//
// Threads: any. Not here: mending.
#pragma once

#include <string>
#include <vector>

#include "weft/base.h"

namespace weft::doctor {

enum class Verdict : uint8_t { ok, note, problem };
const char* name_of(Verdict verdict);

struct Check {
  std::string name;  // "open files"
  Verdict verdict = Verdict::ok;
  std::string found;
  std::string remedy;  // the variable or the command to set; empty when all is well
};

struct Options {
  std::string rank0;   // address or name of rank 0's host; empty: unknown
  uint32_t ranks = 0;  // on this host; 0: unknown
  std::vector<std::string> hosts;
  std::string agent = "ssh";
  std::string remote_weft;
  bool rates = true;  // takes about a second, and one more a host
};
// Never fails: what cannot be looked at is said in a check.
std::vector<Check> examine(const Options& options);

// The other end of a doctor, started on a host by the agent: listens for what the doctor sends.
Result<void> serve_as_peer(int input, int output);

}  // namespace weft::doctor
