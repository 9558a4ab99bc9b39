// The hypotheses: what may have cost time, why one may think so, and what a world without it gains.
#pragma once

#include "judge.h"
#include "seen.h"

namespace weft::diagnose {

// Fills findings, rejected and bounds. Expects path, overlap and lanes to be known.
void find_causes(const graph::Graph& graph, const Seen& seen, const Judge& judge, Diagnosis& out);

}  // namespace weft::diagnose
