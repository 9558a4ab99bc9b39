// What devices did in the iterations of a run that count, and what the typical one did.
#pragma once

#include "weft/graph.h"

namespace weft::replay {

struct Compute {
  std::vector<graph::Iteration> iterations;
  std::vector<std::vector<graph::LayerTimes>> typical;  // by iteration: median of all ranks
};
Compute compute_of(std::vector<graph::Iteration> iterations, uint32_t ranks, size_t layers);

// Each layer as the median of the ranks in `of`.
std::vector<graph::LayerTimes> median_layers(const graph::Iteration& iteration,
                                             const std::vector<uint32_t>& of, size_t layers);

// All of it as long as it lasted, and none of it the processor's work.
std::vector<graph::Iteration> as_it_lasted(std::vector<graph::Iteration> iterations);

}  // namespace weft::replay
