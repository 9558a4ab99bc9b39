#include "compute.h"

#include <numeric>

namespace weft::replay {
namespace {

graph::LayerTimes median_of(const std::vector<const graph::LayerTimes*>& all) {
  auto middle = [&](int64_t graph::LayerTimes::*field) {
    std::vector<double> values;
    for (const graph::LayerTimes* times : all) values.push_back(static_cast<double>(times->*field));
    return static_cast<int64_t>(quantile(values, 0.5));
  };
  return {middle(&graph::LayerTimes::forward_ns),
          middle(&graph::LayerTimes::backward_ns),
          middle(&graph::LayerTimes::update_ns),
          middle(&graph::LayerTimes::gap_before_forward_ns),
          middle(&graph::LayerTimes::gap_before_backward_ns),
          middle(&graph::LayerTimes::gap_before_update_ns),
          middle(&graph::LayerTimes::before_wait_ns),
          middle(&graph::LayerTimes::forward_cpu_ns),
          middle(&graph::LayerTimes::backward_cpu_ns),
          middle(&graph::LayerTimes::update_cpu_ns)};
}

}  // namespace

std::vector<graph::LayerTimes> median_layers(const graph::Iteration& iteration,
                                             const std::vector<uint32_t>& of, size_t layers) {
  std::vector<graph::LayerTimes> out;
  for (size_t l = 0; l < layers; ++l) {
    std::vector<const graph::LayerTimes*> all;
    for (uint32_t r : of) all.push_back(&iteration.layers[r][l]);
    out.push_back(median_of(all));
  }
  return out;
}

Compute compute_of(std::vector<graph::Iteration> iterations, uint32_t ranks, size_t layers) {
  Compute out;
  std::vector<uint32_t> all(ranks);
  std::iota(all.begin(), all.end(), 0u);
  for (const graph::Iteration& iteration : iterations)
    out.typical.push_back(median_layers(iteration, all, layers));
  out.iterations = std::move(iterations);
  return out;
}

std::vector<graph::Iteration> as_it_lasted(std::vector<graph::Iteration> iterations) {
  for (graph::Iteration& iteration : iterations)
    for (std::vector<graph::LayerTimes>& layers : iteration.layers)
      for (graph::LayerTimes& layer : layers)
        layer.forward_cpu_ns = layer.backward_cpu_ns = layer.update_cpu_ns = -1;
  return iterations;
}

}  // namespace weft::replay
