#include "weft/cost.h"

#include <algorithm>
#include <bit>
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

namespace {

// What the busiest rank does: steps one after the other, messages and bytes that it sends, bytes
// that it adds.
struct Work {
  double steps = 0;
  double messages = 0;
  double sent = 0;
  double added = 0;
};

std::optional<double> seconds_of(const Costs& costs, uint32_t flows, const Work& work) {
  const auto rate = rate_of_flows(costs, flows);
  if (!rate || *rate <= 0) return std::nullopt;
  double seconds = work.sent / *rate;
  if (costs.round_trip_idle_ns) seconds += work.steps * costs.round_trip_idle_ns->value / 2 * 1e-9;
  if (costs.cpu_ns_per_chunk) seconds += work.messages * costs.cpu_ns_per_chunk->value * 1e-9;
  if (costs.reduce_ns_per_byte) seconds += work.added * costs.reduce_ns_per_byte->value * 1e-9;
  return seconds;
}

// Ranks beyond a power of two hand everything over first and get everything back at the end.
void add_fold(uint32_t ranks, double bytes, Work& work) {
  if (std::has_single_bit(ranks)) return;
  work.steps += 2;
  work.messages += 1;
  work.sent += 2 * bytes;
  work.added += bytes;
}

double rounds(uint32_t ranks) { return std::bit_width(ranks) - 1; }

}  // namespace

std::optional<double> ring_all_reduce_seconds(const Costs& costs, double bytes, uint32_t ranks,
                                              uint32_t lanes) {
  if (ranks < 2) return 0.0;
  const double others = ranks - 1;
  return seconds_of(
      costs, lanes,
      {2 * others, 2 * others, ring_bytes_per_rank(bytes, ranks), others / ranks * bytes});
}

std::optional<double> halving_doubling_all_reduce_seconds(const Costs& costs, double bytes,
                                                          const Group& group) {
  if (group.ranks < 2) return 0.0;
  const double power = std::bit_floor(group.ranks);
  Work work{2 * rounds(group.ranks), 2 * rounds(group.ranks), 2 * (power - 1) / power * bytes,
            (power - 1) / power * bytes};
  add_fold(group.ranks, bytes, work);
  return seconds_of(costs, group.lanes, work);
}

std::optional<double> doubling_all_reduce_seconds(const Costs& costs, double bytes,
                                                  const Group& group) {
  if (group.ranks < 2) return 0.0;
  const double steps = rounds(group.ranks);
  Work work{steps, steps, steps * bytes, steps * bytes};
  add_fold(group.ranks, bytes, work);
  return seconds_of(costs, group.lanes, work);
}

std::optional<double> tree_all_reduce_seconds(const Costs& costs, double bytes,
                                              const Group& group) {
  if (group.ranks < 2) return 0.0;
  if (group.ranks == 2) return seconds_of(costs, group.lanes, {2, 2, bytes, bytes / 2});
  const double depth = std::bit_width(group.ranks - 1);
  return seconds_of(costs, group.lanes, {2 * depth, 4, 2 * bytes, bytes});
}

std::optional<double> direct_all_reduce_seconds(const Costs& costs, double bytes,
                                                const Group& group) {
  if (group.ranks < 2) return 0.0;
  const double others = group.ranks - 1;
  const double moved = others / group.ranks * bytes;
  return seconds_of(costs, group.lanes * (group.ranks - 1), {2, 2 * others, 2 * moved, moved});
}

std::optional<double> hierarchical_all_reduce_seconds(const Costs& costs, double bytes,
                                                      const Group& group) {
  if (group.ranks < 2) return 0.0;
  if (group.hosts < 2 || group.ranks % group.hosts != 0 || group.ranks == group.hosts)
    return std::nullopt;
  if (!costs.copy_ns_per_byte) return std::nullopt;
  const uint32_t on_each = group.ranks / group.hosts;
  const double local = on_each;
  const double moved = (local - 1) / local * bytes;
  double inside = 2 * moved * 2 * costs.copy_ns_per_byte->value;  // into shared memory, and out
  if (costs.reduce_ns_per_byte) inside += moved * costs.reduce_ns_per_byte->value;
  const auto between = ring_all_reduce_seconds(costs, bytes / local, group.hosts, group.lanes);
  if (!between) return std::nullopt;
  return *between + inside * 1e-9;
}

std::optional<double> agreement_seconds(const Costs& costs, uint32_t fan_out, uint32_t depth) {
  if (!costs.round_trip_idle_ns || !costs.cpu_ns_per_chunk) return std::nullopt;
  const double level =
      costs.round_trip_idle_ns->value + fan_out * costs.cpu_ns_per_chunk->value;  // up and down
  return depth * level * 1e-9;
}

}  // namespace weft::cost
