// Small jobs made by hand, whose best plans can be found by trying all.
#pragma once

#include "weft/optimize.h"

namespace weft::optimize::testing {

struct SmallJob {
  uint32_t ranks = 2;
  std::vector<uint64_t> tensor_bytes = {1u << 20, 1u << 20, 1u << 20};  // one a layer
  std::vector<int64_t> forward_ns = {500'000, 500'000, 500'000};
  std::vector<int64_t> backward_ns = {1'000'000, 1'000'000, 1'000'000};
  int64_t update_ns = 10'000;
  plan::Plan plan;
  std::vector<uint32_t> host_of;  // by rank; empty: each on its own
  double shrink = 8;              // the sizes of a plan are of a job that is so much larger
};

// `iteration_ns` is what an iteration is said to have taken.
inline graph::Graph graph_of(const SmallJob& job, int64_t iteration_ns) {
  graph::Graph graph;
  graph.ranks = job.ranks;
  graph.environment.ranks = job.ranks;
  graph.host_of = job.host_of;
  graph.environment.cores = 4;
  graph.environment.shrink = job.shrink;
  graph.environment.plan_text = plan::canonical(job.plan);
  graph.model.name = "small";
  std::vector<graph::LayerTimes> layers;
  for (uint32_t l = 0; l < job.tensor_bytes.size(); ++l) {
    graph.model.layers.push_back({text("layer%u", l)});
    graph.model.tensors.push_back({text("tensor%u", l), job.tensor_bytes[l], l, l, l});
    layers.push_back({job.forward_ns[l], job.backward_ns[l], job.update_ns, 0, 0});
  }
  for (uint32_t i = 0; i < 4; ++i) {
    graph::Iteration iteration;
    iteration.number = i;
    for (uint32_t r = 0; r < job.ranks; ++r) {
      iteration.layers.push_back(layers);
      iteration.start_ns.push_back(int64_t{i} * iteration_ns);
      iteration.end_ns.push_back(int64_t{i + 1} * iteration_ns);
    }
    graph.iterations.push_back(std::move(iteration));
  }
  return graph;
}

inline cost::Fitted exactly(double value) { return {value, value, value, 8}; }

// A link, and flows that carry no more than a cap; equal rates mean that there is no cap.
inline cost::Costs costs_of(double link_bytes_per_s, double flow_bytes_per_s,
                            double round_trip_ns = 40'000) {
  cost::Costs costs;
  costs.link_bytes_per_s = exactly(link_bytes_per_s);
  if (flow_bytes_per_s < link_bytes_per_s) costs.flow_bytes_per_s = exactly(flow_bytes_per_s);
  for (uint32_t flows : {1u, 4u, 16u})
    costs.ring_rates.push_back(
        {flows, exactly(std::min(flows * flow_bytes_per_s, link_bytes_per_s))});
  costs.round_trip_idle_ns = exactly(round_trip_ns);
  costs.cpu_ns_per_byte = exactly(0.05);
  costs.cpu_ns_per_chunk = exactly(2'000);
  costs.report_ns = exactly(30'000);
  costs.begin_ns = exactly(30'000);
  costs.hand_over_ns = exactly(5'000);
  costs.wake_up_ns = exactly(10'000);
  costs.sending.cores = 4;
  return costs;
}

// Of a run that took what its replay takes, so that nothing is hidden by an error of the replay.
inline Result<replay::Replayer> replayer_of(const SmallJob& job, const cost::Costs& costs) {
  WEFT_ASSIGN(replay::Replayer guess, replay::Replayer::make(graph_of(job, 1'000'000'000), costs));
  replay::Question question;
  question.interval = false;
  auto answer = guess.predict(question);
  if (!answer) return guess;
  return replay::Replayer::make(graph_of(job, static_cast<int64_t>(answer->iteration_ns)), costs);
}

}  // namespace weft::optimize::testing
