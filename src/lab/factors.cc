#include "factors.h"

#include <algorithm>
#include <cmath>

#include "weft/cost.h"

namespace weft::lab {
namespace {

// The least number a person would write that is not below `value`: 1 to 6, 8, then these times
// powers of ten. Sizes divided by such a factor stay easy to check by hand.
double round_up(double value) {
  constexpr double kRound[] = {1, 1.25, 1.5, 1.6, 2, 2.5, 3, 3.2, 4, 5, 6, 6.4, 8};
  constexpr double kRoundBelowTen[] = {1, 2, 3, 4, 5, 6, 8};
  value = std::max(value, 1.0);
  // A value that a rounding error put just above a round number is that number.
  value *= 1 - 1e-9;
  for (const double round : kRoundBelowTen)
    if (value <= round) return round;
  for (double power = 10; power < 1e12; power *= 10)
    for (const double round : kRound)
      if (value <= round * power) return round * power;
  return value;
}

uint64_t divided(uint64_t count, double factor) {
  if (count == 0) return 0;
  return std::max<uint64_t>(
      1, static_cast<uint64_t>(std::llround(static_cast<double>(count) / factor)));
}

Result<void> check_factor(const char* name, double value) {
  if (!std::isfinite(value) || value < 1 || value > 1e6)
    return error(Code::invalid_argument, "%s is %g; expected 1 to 1000000", name, value);
  return {};
}

}  // namespace

Bytes Factors::to_real(Bytes target) const { return {divided(target.count, shrink)}; }
uint64_t Factors::to_real_elements(uint64_t target) const { return divided(target, shrink); }

Nanos one_flow_iteration(const Target& target, const Workload& workload) {
  const uint32_t hosts = std::max(target.hosts, 1u);
  const double rate = target.flow_bits_per_s > 0
                          ? std::min(target.link_bits_per_s, target.flow_bits_per_s)
                          : target.link_bits_per_s;
  const Nanos transfer = rate > 0
                             ? Nanos::from_seconds(cost::ring_wire_seconds(
                                   static_cast<double>(workload.gradients.count), hosts, rate / 8))
                             : Nanos{};
  return workload.compute + transfer;
}

Result<Factors> choose_factors(const Target& target, const Workload& workload,
                               const FactorLimits& limits, std::optional<double> dilation,
                               std::optional<double> shrink) {
  if (target.hosts < 1 || !std::isfinite(target.link_bits_per_s) || target.link_bits_per_s <= 0 ||
      !std::isfinite(target.flow_bits_per_s) || target.flow_bits_per_s < 0)
    return error(Code::invalid_argument,
                 "a target of %u hosts, links of %g and flows of %g bits a second; expected at "
                 "least one host and rates above 0",
                 target.hosts, target.link_bits_per_s, target.flow_bits_per_s);
  WEFT_CHECK(limits.cores > 0 && limits.bits_per_s_per_core > 0 && limits.iteration_wall.count > 0);

  Factors factors;
  if (dilation) {
    WEFT_TRY(check_factor("dilation", *dilation));
    factors.dilation = *dilation;
  } else {
    // One host alone sends nothing.
    const double traffic = target.hosts > 1 ? target.hosts * target.link_bits_per_s : 0;
    factors.dilation = round_up(traffic / (limits.cores * limits.bits_per_s_per_core));
    // A shrink that was asked for needs at least as much dilation.
    if (shrink) factors.dilation = std::max(factors.dilation, *shrink);
  }
  if (shrink) {
    WEFT_TRY(check_factor("shrink", *shrink));
    if (*shrink > factors.dilation)
      return error(Code::invalid_argument,
                   "shrink is %g; expected at most the dilation, %g: fixed costs would seem larger "
                   "than they are",
                   *shrink, factors.dilation);
    factors.shrink = *shrink;
  } else {
    const double wall = one_flow_iteration(target, workload).seconds() * factors.dilation;
    factors.shrink = std::min(round_up(wall / limits.iteration_wall.seconds()), factors.dilation);
  }
  WEFT_TRY(check_factor("dilation", factors.dilation));
  return factors;
}

std::string explain(const Factors& factors, const Target& target) {
  const double d = factors.dilation, s = factors.shrink;
  std::string lines = text(
      "dilation %g, shrink %g: 1 ms of the target takes %g ms here; links of %s run at %s, 1 MB of "
      "the target is %s here\n",
      d, s, d / s, format_rate(target.link_bits_per_s).c_str(),
      format_rate(target.link_bits_per_s / d).c_str(), format_size(1e6 / s).c_str());
  if (target.flow_bits_per_s > 0)
    lines += text("flows are capped at %s, here %s\n", format_rate(target.flow_bits_per_s).c_str(),
                  format_rate(target.flow_bits_per_s / d).c_str());
  if (d == 1 && s == 1) return lines + "nothing is scaled: host costs count in full\n";
  lines += text(
      "a fixed cost of the host (a system call, a wake-up, a round trip) of 100 us here counts as "
      "%.3g us of the target\n",
      100 * s / d);
  lines += text(
      "a cost of the host for each byte (copying, reducing, checksumming) counts %.3g times: bytes "
      "are divided by %g, time is slowed by %g; a chunk of the target is as many chunks here, each "
      "%g times smaller\n",
      1 / d, s, d / s, s);
  lines += "so nothing is claimed about transfer that the processor bounds\n";
  return lines;
}

}  // namespace weft::lab
