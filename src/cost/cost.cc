#include "weft/cost.h"

#include <algorithm>
#include <limits>

namespace weft::cost {

std::optional<double> rate_of_flows(const Costs& costs, uint32_t flows) {
  if (!costs.link_bytes_per_s) return std::nullopt;
  if (flows == 0) return 0.0;
  if (costs.link_is_lower_bound) {
    uint32_t measured = 0;
    for (const Costs::RatePoint& point : costs.ring_rates) {
      measured = std::max(measured, point.flows);
    }
    if (flows > measured) return std::nullopt;
  }
  const double link = costs.link_bytes_per_s->value;
  if (!costs.flow_bytes_per_s) return link;
  return std::min(flows * costs.flow_bytes_per_s->value, link);
}

uint32_t unsent_limit(uint64_t chunk_bytes) {
  // Below this a sender that is woken a few milliseconds late leaves a slow lane idle.
  constexpr uint64_t kLeast = 64u << 10, kMost = 512u << 10;
  return static_cast<uint32_t>(std::clamp(2 * std::min(chunk_bytes, kMost), kLeast, kMost));
}

double ring_bytes_per_rank(double bytes, uint32_t ranks) {
  if (ranks < 2) return 0;
  return 2.0 * (ranks - 1) / ranks * bytes;
}

double ring_wire_seconds(double bytes, uint32_t ranks, double bytes_per_s) {
  const double moved = ring_bytes_per_rank(bytes, ranks);
  if (moved <= 0) return 0;
  if (bytes_per_s <= 0) return std::numeric_limits<double>::infinity();
  return moved / bytes_per_s;
}

double iteration_floor_seconds(double compute_s, double gradient_bytes, uint32_t ranks,
                               double link_bytes_per_s) {
  return std::max(compute_s, ring_wire_seconds(gradient_bytes, ranks, link_bytes_per_s));
}

std::optional<double> ring_all_reduce_seconds(const Costs& costs, double bytes, uint32_t ranks,
                                              uint32_t lanes) {
  if (ranks < 2) return 0.0;
  const auto rate = rate_of_flows(costs, lanes);
  if (!rate || *rate <= 0) return std::nullopt;
  const double others = ranks - 1;
  double seconds = ring_wire_seconds(bytes, ranks, *rate);
  if (costs.round_trip_idle_ns) seconds += 2 * others * costs.round_trip_idle_ns->value / 2 * 1e-9;
  if (costs.reduce_ns_per_byte) {
    seconds += others / ranks * bytes * costs.reduce_ns_per_byte->value * 1e-9;
  }
  return seconds;
}

}  // namespace weft::cost
