// optimize: a better plan, searched and judged by replay.
//
// Passes make small edits to a plan (lanes, chunk, buckets, partition, credit, order, barrier);
// an edit stays if the replayed iteration becomes shorter. The search is any-time: it stops at the
// budget with the best so far, and it is deterministic under a seed as long as the budget does not
// cut it short. The plan says why: one line for every decision.
//
// Threads: pure functions.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "weft/plan.h"
#include "weft/replay.h"

namespace weft::optimize {

struct Options {
  Nanos budget = Nanos::from_seconds(10);
  uint64_t seed = 1;
  replay::Cluster cluster;  // optimize for another cluster than the recorded one
  uint32_t max_lanes = 16;
  // Passes to leave out, by name: "lanes", "order", "barrier", "bucket", "partition", "credit",
  // "chunk", "boundaries".
  std::vector<std::string> without;
  std::function<void(const std::string&)> progress;  // lines for people
};
const std::vector<std::string>& pass_names();

struct Decision {
  std::string field;   // "/lanes"
  std::string before;  // as plan::diff says it
  std::string after;
  std::string why;  // one line, with the gain that replay gave it
};

struct PassUse {
  std::string name;
  uint32_t tried = 0;
  uint32_t kept = 0;
  double seconds = 0;
};

struct Optimized {
  plan::Plan plan;
  replay::Prediction before;  // of the recorded plan, replayed
  replay::Prediction after;   // with interval
  std::vector<Decision> decisions;
  std::vector<PassUse> passes;
  double bound_ns = 0;  // "communication is free": what is left to gain
  double floor_ns = 0;  // max(compute, wire at the rate of the link); 0 when unknown
  uint64_t replays = 0;
  double seconds = 0;
  double replay_seconds = 0;  // of these, inside replay
  bool finished = false;      // false: the budget ended the search
  std::vector<std::string> remarks;
};

// Fails with what the replayer fails with; a trace without a probe cannot be optimized for lanes
// that it did not use, and says so in remarks.
Result<Optimized> optimize(const replay::Replayer& replayer, const Options& options);

}  // namespace weft::optimize
