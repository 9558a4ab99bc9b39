// The way to rank 0: who reports to whom, and what each knows of those below it.
#include <algorithm>

#include "weft/schedule.h"

namespace weft::schedule {

uint32_t Tree::first_below(uint32_t rank) const {
  uint64_t first = uint64_t{rank} * fan_out + 1;
  return first < ranks ? static_cast<uint32_t>(first) : ranks;
}

uint32_t Tree::below(uint32_t rank) const { return std::min(fan_out, ranks - first_below(rank)); }

uint32_t Tree::depth(uint32_t rank) const {
  uint32_t out = 0;
  for (; rank > 0; rank = above(rank)) ++out;
  return out;
}

Tree choose_tree(const cost::Costs& costs, uint32_t ranks) {
  const Tree flat = Tree::flat(ranks);
  if (ranks < 4) return flat;
  if (!costs.round_trip_idle_ns || !costs.cpu_ns_per_chunk)
    return choose_tree(cost::typical(), ranks);
  constexpr double kWorthIt = 0.5;
  auto seconds = [&](const Tree& tree) {
    return *cost::agreement_seconds(costs, tree.fan_out, tree.depth());
  };
  // Every level is also a thread on every rank on the way that has to wake up: the fewest that do.
  uint32_t levels = UINT32_MAX;
  Tree chosen = flat;
  for (uint32_t fan_out = 2; fan_out + 1 < ranks; ++fan_out) {
    Tree tree{ranks, fan_out};
    if (tree.depth() >= levels || seconds(tree) >= kWorthIt * seconds(flat)) continue;
    levels = tree.depth();
    chosen = tree;
  }
  return chosen;
}

Tree tree_of_run(const cost::Costs& fitted, uint32_t ranks) {
  return choose_tree(fitted.agreed ? *fitted.agreed : cost::typical(), ranks);
}

Reports::Reports(const Layout& layout, const Tree& tree, Rank rank, uint64_t first_step)
    : self_(rank.index),
      first_below_(tree.first_below(rank.index)),
      below_(tree.below(rank.index)),
      reported_(layout.buckets.size(), std::vector<uint64_t>(1 + below_, first_step)),
      complete_(layout.buckets.size(), first_step) {}

Rank Reports::rank_of(size_t place) const {
  return {place == 0 ? self_ : first_below_ + static_cast<uint32_t>(place) - 1};
}

Result<bool> Reports::ready(Rank rank, uint32_t bucket, uint64_t step) {
  // Wraps around for a rank that is before these.
  uint32_t place = rank.index == self_ ? 0 : rank.index - first_below_ + 1;
  if ((rank.index != self_ && (rank.index < first_below_ || place > below_)) ||
      bucket >= reported_.size())
    return error(Code::invalid_argument,
                 "rank %u reports bucket %u to rank %u, which hears of %u ranks; there are %zu "
                 "buckets",
                 rank.index, bucket, self_, below_, reported_.size());
  std::vector<uint64_t>& reported = reported_[bucket];
  if (step != reported[place])
    return error(Code::invalid_argument,
                 "rank %u reports bucket %u for step %llu, but step %llu is due", rank.index,
                 bucket, static_cast<unsigned long long>(step),
                 static_cast<unsigned long long>(reported[place]));
  ++reported[place];
  for (uint64_t steps : reported)
    if (steps <= complete_[bucket]) return false;
  ++complete_[bucket];
  return true;
}

std::vector<Rank> Reports::missing(uint32_t bucket, uint64_t step) const {
  std::vector<Rank> out;
  for (size_t place = 0; place < reported_[bucket].size(); ++place)
    if (reported_[bucket][place] <= step) out.push_back(rank_of(place));
  return out;
}

std::optional<Reports::Lacking> Reports::lacking() const {
  std::optional<Lacking> oldest;
  for (uint32_t bucket = 0; bucket < reported_.size(); ++bucket) {
    Lacking candidate{bucket, complete_[bucket], missing(bucket, complete_[bucket])};
    const bool someone = candidate.missing.size() < reported_[bucket].size();
    if (someone && (!oldest || candidate.step < oldest->step)) oldest = std::move(candidate);
  }
  return oldest;
}

}  // namespace weft::schedule
