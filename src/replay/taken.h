// How long sums took that somebody else carried, by the records of a run.
#pragma once

#include "simulator.h"

namespace weft::replay {

// For the iterations of `graph` that count. What was not recorded of an iteration took what it took
// in the median of the others. Fails when a bucket of `layout` was never summed.
Result<Taken> taken_by_sums(const graph::Graph& graph, const schedule::Layout& layout);

}  // namespace weft::replay
