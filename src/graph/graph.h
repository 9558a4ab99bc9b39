// graph: the global dataflow graph of a run, over all ranks, down to single messages.
//
// Two kinds of edges, kept apart:
//   required   any plan must obey them: a device runs its program in order, a gradient is ready
//              after its backward, a sum needs the gradients of all ranks, an update needs the sum,
//              the next forward needs the update;
//   recorded   the recorded plan caused them: which tensors share a bucket, which operation was
//              admitted after which ended, which chunk waited behind which on a lane, what a
//              barrier held back.
// Replay keeps the first and makes the second anew from a Plan.
//
//   forward ─► backward ─► ready ┬► sum ─► done ─► update ─► next forward      (required)
//                                └► bucket ─► admitted ─► operation ─► send ─► receive ─► … ─► done
//                                                                              (recorded)
//
// Times are those of the trace, which should be aligned (weft/align.h) before.
// Threads: plain values and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "weft/trace.h"

namespace weft::graph {

enum class NodeType : uint8_t {
  forward = 1,    // subject: layer
  backward = 2,   // layer
  update = 3,     // layer
  ready = 4,      // tensor; an instant on its rank
  bucket = 5,     // bucket; the instant at which its last tensor was ready on this rank
  admitted = 6,   // operation; the instant at which rank 0 put it in the common order
  operation = 7,  // operation; the instant at which this rank began it
  send = 8,       // operation
  receive = 9,    // operation
  done = 10,      // tensor; an instant on its rank
  sum = 11,       // tensor; virtual: the latest `ready` of all ranks (rank is the last one's)
};
const char* name_of(NodeType type);

inline constexpr uint16_t kNoLane = 0xffff;

struct Node {
  int64_t start_ns = 0;
  int64_t duration_ns = 0;
  uint32_t iteration = 0;
  uint32_t subject = 0;  // see NodeType
  uint16_t rank = 0;
  uint16_t lane = kNoLane;  // of a send or a receive
  uint16_t step = 0;        // of a send or a receive
  NodeType type = NodeType::forward;
  uint8_t reserved = 0;

  int64_t end_ns() const { return start_ns + duration_ns; }
};
static_assert(sizeof(Node) <= 32);

struct Edge {
  uint32_t from = 0;
  uint32_t to = 0;
};
static_assert(sizeof(Edge) <= 8);

// One operation of the common order.
struct Operation {
  uint32_t number = 0;
  uint32_t iteration = 0;
  uint32_t bucket = 0;
  uint16_t partition = 0;
  uint64_t bytes = 0;
};

// Compute of one layer in one iteration on one rank; what the trace does not have is 0.
struct LayerTimes {
  int64_t forward_ns = 0;
  int64_t backward_ns = 0;
  int64_t update_ns = 0;
  // Idle time of the device before that work which no dependency and no wait explains: the host was
  // late. Where compute is real, the thread was at other work: loading data, say.
  int64_t gap_before_forward_ns = 0;
  int64_t gap_before_backward_ns = 0;
  int64_t gap_before_update_ns = 0;
  // The same between the last backward and the moment from which the thread waited for gradients,
  // before it went on with this forward, or with updates before it: of the first layer only.
  int64_t before_wait_ns = 0;
  // Of these, processor time; negative: the work is not the processor's, or nobody recorded it.
  int64_t forward_cpu_ns = -1;
  int64_t backward_cpu_ns = -1;
  int64_t update_cpu_ns = -1;
};

// One iteration that every rank has whole.
struct Iteration {
  uint32_t number = 0;
  std::vector<int64_t> start_ns;  // by rank: start of forward
  std::vector<int64_t> end_ns;    // by rank: start of the next forward
  // By rank: data was loaded, and nothing computed meanwhile. A part of the gaps of its layers.
  std::vector<int64_t> loading_ns;
  // by rank, by layer
  std::vector<std::vector<LayerTimes>> layers;
};

struct Graph {
  uint32_t ranks = 0;
  std::vector<uint32_t> host_of;  // by rank
  trace::Model model;
  trace::Environment environment;  // rank 0's: plan, factors
  std::vector<Node> nodes;         // by start, then by a fixed order: deterministic
  std::vector<Edge> required;
  std::vector<Edge> recorded;
  std::vector<Operation> operations;  // by number
  std::vector<Iteration> iterations;  // whole ones, in order
  std::vector<std::string> remarks;   // what was missing or left out, for people
  std::string sums_by;                // who summed the gradients, if not weft; see kSumsBy

  // Iterations that count: without those that warm up, if there are others.
  size_t first_counted() const;
};

// How long an iteration takes: those that count, from start to end.
struct IterationTimes {
  std::vector<double> of_slowest_ns;  // on the rank with the largest median
  std::vector<double> median_ns;      // by rank
};
IterationTimes iteration_times(const Graph& graph);

// The key of a note that says who summed the gradients, where weft did not and nobody recorded the
// messages: understanding a run leaves it there (weft/analysis.h).
inline constexpr const char* kSumsBy = "sums_by";

// Fails with invalid_argument, saying what is missing, when the trace cannot make a graph: a rank
// is missing, no model, no whole iteration. A run without communication makes a graph of compute.
Result<Graph> build(const trace::Trace& aligned);

// ---- the critical path ---------------------------------------------------------------------

// Edges into each node, both kinds, for walking back.
class Predecessors {
 public:
  explicit Predecessors(const Graph& graph);
  struct In {
    uint32_t from;
    bool required;
  };
  // Into node `to`, in a fixed order.
  std::vector<In> of(uint32_t to) const;

 private:
  std::vector<uint32_t> first_;  // by node: where its edges start
  std::vector<uint32_t> from_;   // the top bit is set for a required edge
};

// What a stretch of the critical path was spent on.
enum class Spent : uint8_t {
  compute = 1,          // forward, backward or update of a device
  transfer = 2,         // a message on its way, and what is done with it
  wait_for_rank = 3,    // everyone else was ready; the rank named was not
  wait_for_lane = 4,    // there to be sent, but the connection was full of other tensors
  wait_for_credit = 5,  // ready everywhere, but others had taken the credit of the plan
  control = 6,          // agreeing on the order
  host = 7,             // nothing recorded explains it: the host was late
};
const char* name_of(Spent spent);

struct Stretch {
  Spent spent = Spent::compute;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  uint16_t rank = 0;  // where it was spent; for wait_for_rank: the rank that was waited for
  uint32_t node = 0;  // that ends the stretch
};

// The chain of causes that ends where iteration `index` (into graph.iterations) ends on the rank
// that ends it last, back to where that iteration began on that rank. Stretches are in order of
// time, touch each other and cover the iteration exactly. docs/graph.md says what counts as what.
std::vector<Stretch> critical_path(const Graph& graph, const Predecessors& predecessors,
                                   size_t index);

}  // namespace weft::graph
