// A run, described in a few lines of text and made by the replayer: its trace is that of a run, and
// all about it is known. What is not said costs nothing, so that a formula can be exact.
//
//   cluster ranks 4 link 8gbit flow 2gbit latency 20us     flow, latency, hosts, cores: if needed
//   costs   chunk 2us byte 0.05 report 30us                of the processor and of agreeing
//   layer   conv 4MB forward 2ms backward 4ms update 0.1ms its one tensor has its name
//   layers  3 4MB forward 2ms backward 4ms                 layer0, layer1, layer2
//   burns   1                                              the share of compute that is processor time
//   rank    2 speed 0.5
//   host    1 link 0.25                                    of what the others' links carry
//   plan    ddp lanes 4 bucket_rule/size 64MiB             a preset, and what differs
//   iterations 8
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "weft/replay.h"

namespace weft::scenarios {

// One line, split at spaces.
using Words = std::vector<std::string>;

struct Layer {
  std::string name;
  Bytes bytes;
  Nanos forward, backward, update, gap;  // the gap is idle time of the host before the backward
};

// A preset with changes: "ddp lanes 4 barrier tensor". Keys are paths of the plan's document.
Result<plan::Plan> changed(const plan::Plan& base, std::span<const std::string> changes);

class World {
 public:
  // Takes a line of the description in; false: it is none.
  Result<bool> take(const Words& line);

  struct Run {
    graph::Graph graph;
    replay::Replayer replayer;
  };
  // The run as it would have been recorded, and a replayer that knows what a probe would.
  Result<Run> run() const;

  const cost::Costs& costs() const { return costs_; }
  const plan::Plan& plan() const { return plan_; }
  cost::Group group() const;
  double gradient_bytes() const;

 private:
  Result<void> take_cluster(const Words& line);
  Result<void> take_costs(const Words& line);
  Result<void> take_layer(const Words& line);
  graph::Graph compute() const;

  uint32_t ranks_ = 4;
  uint32_t hosts_ = 0;  // 0: as many as ranks
  uint32_t iterations_ = 6;
  double burns_ = 0;  // 0: compute takes none of the processor
  cost::Costs costs_;
  std::vector<Layer> layers_;
  std::map<uint32_t, double> speed_;          // by rank
  std::map<uint32_t, double> share_of_link_;  // by host
  plan::Plan plan_;
};

// `graph` as if the link of `host` carried only `share` of what it did. Every node keeps its lag
// behind the last of its causes, and what leaves the host leaves one after another at the slower
// rate; so a rank that waits for that host's messages is late, and those that wait for it.
// REQUIRES: the ring, one rank a host.
void slow_down(graph::Graph& graph, uint32_t host, double share, const cost::Costs& costs);

}  // namespace weft::scenarios
