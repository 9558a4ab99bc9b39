// What a run, measured or predicted, spent its time on, so that the two can be compared.
#pragma once

#include "weft/replay.h"

namespace weft::replay {

Fidelity compare(const graph::Graph& measured, const graph::Graph& replayed);

}  // namespace weft::replay
