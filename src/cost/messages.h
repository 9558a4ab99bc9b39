// What a run's own messages and events say about costs.
#pragma once

#include "weft/cost.h"

namespace weft::cost {

// The median with its quartiles; nothing for no samples.
std::optional<Fitted> summary(const std::vector<double>& samples);

void fit_messages(const trace::Trace& trace, Costs& costs);

}  // namespace weft::cost
