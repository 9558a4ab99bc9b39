// factors: how a target cluster is made small enough for this machine, and what that does.
//
// Dilation slows links and compute alike, until the machine carries the cluster's whole traffic
// with its processors under half load. Shrink divides tensor bytes and compute time, until an
// iteration is short. With both, wall time = target time × dilation ÷ shrink, and a transfer of
// b target bytes at r target bits a second is one of b ÷ shrink bytes at r ÷ dilation.
//
// The factors follow from the cluster and the model alone, never from a plan: all plans for one
// model on one cluster are measured under the same factors. Pure functions, no clock.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "weft/base.h"

namespace weft::lab {

// The cluster that the user asked for.
struct Target {
  uint32_t hosts = 2;
  double link_bits_per_s = 0;
  double flow_bits_per_s = 0;  // 0: no cap below the link's
};

// What one iteration of the model is made of, in the target's units.
struct Workload {
  Bytes gradients;
  Nanos compute;  // forward, backward and update
};

struct Factors {
  double dilation = 1;
  double shrink = 1;

  double wall_per_target() const { return dilation / shrink; }
  Nanos to_wall(Nanos target) const { return target.scaled(wall_per_target()); }
  Nanos to_target(Nanos wall) const { return wall.scaled(1 / wall_per_target()); }
  double to_real_rate(double target_bits_per_s) const { return target_bits_per_s / dilation; }
  // Sizes that are not 0 stay at least 1.
  Bytes to_real(Bytes target) const;
  uint64_t to_real_elements(uint64_t target) const;
};

struct FactorLimits {
  uint32_t cores = 1;
  // What a core carries through veth and htb at under half load, summed over what all hosts send.
  double bits_per_s_per_core = 1.25e9;
  Nanos iteration_wall = {2'500'000'000};
};

// Chooses the factors, or takes the asked ones. Fails with invalid_argument if an asked one is
// below 1 or the shrink would exceed the dilation.
Result<Factors> choose_factors(const Target& target, const Workload& workload,
                               const FactorLimits& limits, std::optional<double> dilation = {},
                               std::optional<double> shrink = {});

// The target's time of one iteration with everything over one flow and nothing overlapped: what
// the shrink is chosen for.
Nanos one_flow_iteration(const Target& target, const Workload& workload);

// What the factors do to fixed costs and to costs a byte and a chunk, for people.
std::string explain(const Factors& factors, const Target& target);

}  // namespace weft::lab
