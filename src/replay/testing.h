// Small jobs made by hand, for tests of what stands on replay.
#pragma once

#include "weft/replay.h"

namespace weft::replay::testing {

struct SmallJob {
  uint32_t ranks = 4;
  std::vector<uint64_t> tensor_elements = {1'000'000, 1'000'000, 1'000'000};  // one a layer
  int64_t forward_ns = 2'000'000;
  int64_t backward_ns = 4'000'000;
  int64_t update_ns = 100'000;
  uint32_t iterations = 4;
  plan::Plan plan;
  bool burns = false;             // compute is processor time
  std::vector<double> speed;      // by rank; 1 where absent
  std::vector<uint32_t> host_of;  // by rank; empty: each on its own
};

inline graph::Graph graph_of(const SmallJob& job) {
  graph::Graph graph;
  graph.ranks = job.ranks;
  graph.environment.ranks = job.ranks;
  graph.host_of = job.host_of;
  graph.environment.cores = 4;
  graph.environment.plan_text = plan::canonical(job.plan);
  graph.model.name = "small";
  for (uint32_t l = 0; l < job.tensor_elements.size(); ++l) {
    graph.model.layers.push_back({text("layer%u", l)});
    graph.model.tensors.push_back(
        {text("tensor%u", l), job.tensor_elements[l] * schedule::kElementBytes, l, l, l});
  }
  for (uint32_t i = 0; i < job.iterations; ++i) {
    graph::Iteration iteration;
    iteration.number = i;
    for (uint32_t r = 0; r < job.ranks; ++r) {
      double speed = r < job.speed.size() ? job.speed[r] : 1;
      auto scaled = [&](int64_t ns) { return Nanos{ns}.scaled(1 / speed).count; };
      graph::LayerTimes times{scaled(job.forward_ns), scaled(job.backward_ns),
                              scaled(job.update_ns), 0, 0};
      if (job.burns) {
        times.forward_cpu_ns = times.forward_ns;
        times.backward_cpu_ns = times.backward_ns;
        times.update_cpu_ns = times.update_ns;
      }
      iteration.layers.emplace_back(job.tensor_elements.size(), times);
      iteration.start_ns.push_back(int64_t{i} * 1'000'000'000);
      iteration.end_ns.push_back(int64_t{i + 1} * 1'000'000'000);
    }
    graph.iterations.push_back(std::move(iteration));
  }
  return graph;
}

inline cost::Fitted exactly(double value) { return {value, value, value, 8}; }

// A link of 1 GB/s, flows of 0.25 GB/s, 20 us of latency.
inline cost::Costs costs_of_capped_link() {
  cost::Costs costs;
  costs.link_bytes_per_s = exactly(1e9);
  costs.flow_bytes_per_s = exactly(0.25e9);
  costs.ring_rates = {{1, exactly(0.25e9)}, {4, exactly(1e9)}, {8, exactly(1e9)}};
  costs.round_trip_idle_ns = exactly(40'000);
  costs.cpu_ns_per_byte = exactly(0.05);
  costs.cpu_ns_per_chunk = exactly(2'000);
  costs.report_ns = exactly(30'000);
  costs.begin_ns = exactly(30'000);
  costs.hand_over_ns = exactly(5'000);
  costs.wake_up_ns = exactly(10'000);
  costs.sending.cores = 4;
  return costs;
}

}  // namespace weft::replay::testing
