// diagnose: where an iteration's time went, and what removing each cause would gain.
//
// The time is that of the critical path across ranks (weft/graph.h), so the parts add up to the
// iteration. Causes are hypotheses with evidence from the records; each is judged by a replay of a
// world without it, and named only if the gain is larger than the error of the replay itself.
//
// Threads: pure functions.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "weft/graph.h"
#include "weft/replay.h"

namespace weft::diagnose {

struct Share {
  std::string what;  // graph::name_of(Spent)
  double ns = 0;     // wall, of one iteration (mean over those that count)
  double percent = 0;
};

// What one layer, tensor or lane has to do with it.
struct Detail {
  std::string name;
  double bytes = 0;        // real, of one iteration
  double compute_ns = 0;   // layers
  double transfer_ns = 0;  // from the start of its first operation to the end of its last
  double waited_ns = 0;    // a device stood still for it
  double queued_ns = 0;    // ready on all ranks, but not started
};

struct LaneUse {
  uint16_t rank = 0;
  uint16_t lane = 0;
  double bytes_per_s = 0;   // while it was busy
  double busy_percent = 0;  // of the iteration
  uint16_t peer = 0;        // the rank that it leads to
};

struct Finding {
  std::string name;   // one_flow_limit, straggler, ...
  std::string title;  // one sentence for people
  std::optional<uint32_t> rank;
  double gain_percent = 0;   // of the iteration's time, if the cause were gone
  double low = 0, high = 0;  // of that gain
  std::vector<std::string> evidence;
  std::string remedy;  // what to do, one sentence
};

struct Bound {
  std::string name;  // "communication is free", "no stragglers"
  double iteration_ns = 0;
  double gain_percent = 0;
};

// What another way to carry the sums would take.
struct Alternative {
  std::string name;  // "over weft, with DDP's buckets"
  double iteration_ns = 0;
  double gain_percent = 0;
  double low = 0, high = 0;  // of that gain
};

struct Diagnosis {
  double iteration_ns = 0;
  std::vector<Share> path;         // one of each graph::Spent, in their order
  double communication_ns = 0;     // time in which at least one operation was in flight
  double overlapped_ns = 0;        // of that: while the rank's device computed
  double overlap_possible_ns = 0;  // of that: could be, with a perfect order and no barrier
  double exposed_ns = 0;           // a device stood still and waited for communication
  std::vector<Detail> layers;
  std::vector<Detail> tensors;
  std::vector<LaneUse> lanes;
  std::vector<Finding> findings;      // by gain, largest first; none below the fidelity error
  std::vector<std::string> rejected;  // hypotheses that were tried and did not pay, with figures
  std::vector<Bound> bounds;
  std::vector<Alternative> alternatives;  // where somebody else carried the sums: over weft
  double fidelity_error_percent = 0;
  std::vector<std::string> remarks;
};

Result<Diagnosis> diagnose(const graph::Graph& graph, const replay::Replayer& replayer);

// What a share of the path is called among people, and what it means for them.
struct Words {
  const char* name;     // "waiting for a full connection"
  const char* meaning;  // one clause
};
// Nothing for what is no share of a path.
std::optional<Words> words_of(const std::string& what);

}  // namespace weft::diagnose
