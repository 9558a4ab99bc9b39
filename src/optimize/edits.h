// Small changes to a plan, by pass. Each can be undone by another.
#pragma once

#include "space.h"

namespace weft::optimize {

// Plans one edit away from `plan`, all different from it. Not for "boundaries".
std::vector<plan::Plan> edits(const std::string& pass, const plan::Plan& plan, const Space& space);

// The buckets of `plan` in backward order, said by name, whether the plan says them or its rule
// makes them.
std::vector<plan::BucketSpec> groups_of(const plan::Plan& plan, const Space& space);

// Plans in which one of the groups `touched` is merged with a neighbour, split, or gives its first
// or last tensor to a neighbour.
std::vector<plan::Plan> boundary_edits(const plan::Plan& plan,
                                       const std::vector<plan::BucketSpec>& groups,
                                       const std::vector<size_t>& touched, const Space& space);

}  // namespace weft::optimize
