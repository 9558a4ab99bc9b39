// Where the search may go: the passes that are on, the limits of each value, and where to start.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "weft/optimize.h"

namespace weft::optimize {

// The values that a pass decides. Two plans agree in a pass if these are equal.
bool same_in(const std::string& pass, const plan::Plan& a, const plan::Plan& b);
// Takes the values of `pass` from another plan.
void take(const std::string& pass, const plan::Plan& from, plan::Plan& to);

// A size may be anything from `least` to `most`; the search moves by factors of two.
struct Range {
  Bytes least;
  Bytes most;
};

struct Space {
  plan::Plan recorded;
  plan::Plan expert;  // the preset "default", with what is not searched as in `recorded`
  std::set<std::string> passes;
  std::vector<schedule::Tensor> tensors;  // in forward order
  double shrink = 1;
  uint32_t ranks = 1;
  schedule::Choice choice;  // what "auto" means
  double replay_error = 0;  // with which the recorded plan replays, as a share
  uint32_t max_lanes = 16;
  // The fewest lanes that fill the link; absent when that is not known.
  std::optional<uint32_t> filling_lanes;
  // Rates of the cluster in bits of the target, 0 when unknown; for people.
  double link_bits_per_s = 0;
  double flow_bits_per_s = 0;  // infinite: no cap
  Range bucket, partition, credit, chunk;

  bool has(const std::string& pass) const { return passes.contains(pass); }
  // One flow cannot fill the link.
  bool flow_capped() const { return filling_lanes && *filling_lanes > 1; }
  // One lane more than fill the link; absent where lanes are not capped or not searched.
  std::optional<uint32_t> spare_lanes() const;
};

// Fails with invalid_argument when options name a pass that is not, with a near name.
Result<Space> make_space(const replay::Replayer& replayer, const Options& options);

// Plans to start from, without the recorded one, in a fixed order.
std::vector<plan::Plan> starts(const Space& space);

// What no plan passes on the cluster that is optimized for; 0 when unknown.
double floor_of(const replay::Replayer& replayer, const replay::Cluster& cluster);

}  // namespace weft::optimize
