// Why each value of the chosen plan is what it is.
#pragma once

#include "plan_timer.h"
#include "space.h"

namespace weft::optimize {

// One for every difference between the recorded and the chosen plan (all explicit groups are one),
// with what undoing it alone would cost. Name and comment decide nothing and are left out.
std::vector<Decision> explain(const plan::Plan& chosen, double chosen_ns, const Space& space,
                              PlanTimer& timer);

}  // namespace weft::optimize
