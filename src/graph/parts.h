// What build() has in hand between a trace and a graph: nodes that have no final place yet, and
// tables to find them by what they are about.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "weft/graph.h"

namespace weft::graph {

// Operations from here on were asked for directly (set-up), and stand in no common order.
inline constexpr uint32_t kDirectOperations = 1u << 31;
inline constexpr uint32_t kNobody = 0xffffffff;

// The order in which things happen that happen at one instant.
int stage_of(NodeType type);
// One step of a device?
bool is_compute(NodeType type);

inline uint64_t key_of(uint32_t iteration, uint32_t subject) {
  return uint64_t{iteration} << 32 | subject;
}

// Nodes of one sort by (iteration, subject), several to a key in order of time.
class Table {
 public:
  struct Entry {
    uint64_t key;
    int64_t time_ns;
    uint32_t node;
    uint32_t iteration() const { return static_cast<uint32_t>(key >> 32); }
    uint32_t subject() const { return static_cast<uint32_t>(key); }
  };

  void add(uint64_t key, int64_t time_ns, uint32_t node) {
    entries_.push_back({key, time_ns, node});
  }
  void sort();

  // After sort(). kNobody where there is none.
  uint32_t first(uint64_t key) const;
  uint32_t last(uint64_t key) const;
  std::span<const Entry> of(uint64_t key) const { return between(key, key); }
  std::span<const Entry> of_iteration(uint32_t iteration) const {
    return between(key_of(iteration, 0), key_of(iteration, kNobody));
  }
  std::span<const Entry> all() const { return entries_; }
  std::vector<uint32_t> iterations() const;  // that it has, ascending

 private:
  std::span<const Entry> between(uint64_t low, uint64_t high) const;
  std::vector<Entry> entries_;
};

struct Interval {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
};

// One half of a message.
struct Half {
  uint64_t place;  // (operation, step)
  uint64_t message;
  uint32_t chunk;
  uint32_t node;
  uint16_t peer;
  uint32_t operation() const { return static_cast<uint32_t>(place >> 16); }
  uint16_t step() const { return static_cast<uint16_t>(place); }
};

// Processor time of a compute span.
struct ProcessorTime {
  NodeType type = NodeType::forward;
  uint64_t key = 0;  // (iteration, layer)
  int64_t start_ns = 0;
  int64_t ns = 0;
};

// An operation as one rank saw it.
struct OperationOnRank {
  uint32_t number = 0;
  uint32_t node = kNobody;
  uint64_t bucket = 0;  // key of (iteration, bucket)
  int64_t end_ns = 0;
  uint32_t last_send = kNobody;  // by end
  uint32_t last_receive = kNobody;
};

struct RankParts {
  Table forward, backward, update;          // subject: layer
  Table ready, done;                        // subject: tensor
  Table ready_of_bucket, bucket;            // subject: bucket
  std::vector<OperationOnRank> operations;  // by number
  std::vector<Half> sends, receives;        // by (place, chunk, peer)
  std::vector<Interval> waits;  // by start; `end_ns` is the latest of all that started until then
  std::map<uint32_t, Interval> iterations;            // spans, by number
  std::map<int64_t, int64_t> whole_updates;           // of all layers, by start: how long
  std::vector<ProcessorTime> processor;               // of spans that are there
  std::map<uint32_t, std::vector<Interval>> loading;  // of data, by iteration
};

struct Parts {
  std::vector<Node> nodes;
  std::vector<RankParts> ranks;
  Table admitted;  // iteration 0, subject: operation
  std::map<uint32_t, Operation> operations;
  std::vector<uint32_t> bucket_of;  // by tensor; kNobody: not known
  uint64_t whole_updates = 0;       // of all layers at once
  uint64_t unusable = 0;            // events whose layer, tensor or iteration makes no sense

  uint32_t add(const Node& node) {
    nodes.push_back(node);
    return static_cast<uint32_t>(nodes.size() - 1);
  }
};

// All that the trace holds of the model's layers and tensors; whatever does not fit is counted.
Parts collect(const trace::Trace& trace, const trace::Model& model, uint32_t ranks);

struct Edges {
  std::vector<Edge> required;
  std::vector<Edge> recorded;
  std::vector<std::string> remarks;
};

// Makes the virtual nodes (sum) and all edges.
Edges connect(Parts& parts, const trace::Model& model, const trace::Environment& environment,
              const std::vector<uint32_t>& host_of);

// Gives nodes and edges their final order and numbers, and sees to it that there is no cycle.
// `graph` gets them; `parts` loses its nodes, its tables hold the old numbers.
void settle(Graph& graph, Parts& parts, Edges edges);

// Fills graph.iterations with those that all ranks have whole. REQUIRES: settle().
void find_iterations(Graph& graph, const Parts& parts);

}  // namespace weft::graph
