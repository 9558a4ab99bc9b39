// What a run, measured or predicted, spent its time on, so that the two can be compared.
#pragma once

#include "weft/replay.h"

namespace weft::replay {

struct IterationTimes {
  std::vector<double> of_slowest_ns;  // those that count, on the rank with the largest median
  std::vector<double> median_ns;      // by rank
};
IterationTimes iteration_times(const graph::Graph& graph);

Fidelity compare(const graph::Graph& measured, const graph::Graph& replayed);

}  // namespace weft::replay
