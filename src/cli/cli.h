// cli: `weft <verb>`, one verb a module, no logic.
//
// A verb reads its arguments, calls the module that does the work, and shows what came back. What
// it prints on standard output is the answer: text for people, or with --json one JSON object.
// Everything else goes to standard error, and a failure is one line there: `weft VERB: message`.
//
//   0  done
//   1  bad input: a file or value that the verb was given cannot be used
//   2  bad call: a verb, option or argument that does not exist or is missing
//   3  the run failed: the machine, the network or a peer did not do its part
//
// Threads: main() once, from the main thread.
#pragma once

namespace weft::cli {

inline constexpr int kExitDone = 0;
inline constexpr int kExitBadInput = 1;
inline constexpr int kExitBadCall = 2;
inline constexpr int kExitRunFailed = 3;

// The whole program; the executable's main() only calls it. Returns the exit code.
int main(int argc, char** argv);

}  // namespace weft::cli
