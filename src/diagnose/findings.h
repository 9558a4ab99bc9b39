// The hypotheses: what may have cost time, why one may think so, and what a world without it gains.
#pragma once

#include "activity.h"
#include "gain_estimator.h"

namespace weft::diagnose {

// Fills findings, rejected and bounds. Expects path, overlap and lanes to be known.
void find_causes(const graph::Graph& graph, const Activity& activity, const GainEstimator& gains,
                 Diagnosis& out);

}  // namespace weft::diagnose
