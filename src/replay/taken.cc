#include "taken.h"

#include <algorithm>
#include <map>

namespace weft::replay {
namespace {

using graph::Node;
using graph::NodeType;

// One bucket in one iteration.
struct Sum {
  std::optional<int64_t> complete_ns;           // on the last rank
  std::vector<std::optional<int64_t>> done_ns;  // by rank
};

constexpr int64_t kNotKnown = -1;

int64_t since(const std::optional<int64_t>& start, const std::optional<int64_t>& end) {
  int64_t ns = 0;
  if (!start || !end || __builtin_sub_overflow(*end, *start, &ns)) return kNotKnown;
  return std::max<int64_t>(0, ns);
}

// What is not known of an iteration is as in the median of the others; false: nothing is known.
bool fill_in(Taken& taken, size_t bucket, uint32_t rank) {
  std::vector<double> known;
  for (const auto& iteration : taken)
    if (iteration[bucket][rank] != kNotKnown)
      known.push_back(static_cast<double>(iteration[bucket][rank]));
  if (known.empty()) return false;
  const auto typical = static_cast<int64_t>(quantile(known, 0.5));
  for (auto& iteration : taken)
    if (iteration[bucket][rank] == kNotKnown) iteration[bucket][rank] = typical;
  return true;
}

}  // namespace

Result<Taken> taken_by_sums(const graph::Graph& graph, const schedule::Layout& layout) {
  const size_t first = graph.first_counted(), count = graph.iterations.size() - first;
  std::map<uint32_t, size_t> place;
  for (size_t i = 0; i < count; ++i) place[graph.iterations[first + i].number] = i;
  std::vector<std::vector<Sum>> sums(count, std::vector<Sum>(layout.buckets.size()));
  for (const Node& node : graph.nodes) {
    if (node.type != NodeType::ready && node.type != NodeType::done) continue;
    auto at = place.find(node.iteration);
    if (at == place.end() || node.subject >= layout.bucket_of.size() || node.rank >= graph.ranks)
      continue;
    Sum& sum = sums[at->second][layout.bucket_of[node.subject]];
    sum.done_ns.resize(graph.ranks);
    if (node.type == NodeType::ready) {
      sum.complete_ns = std::max(sum.complete_ns.value_or(node.start_ns), node.start_ns);
    } else {
      auto& done = sum.done_ns[node.rank];
      done = std::max(done.value_or(node.start_ns), node.start_ns);
    }
  }
  Taken taken(count, {layout.buckets.size(), std::vector<int64_t>(graph.ranks, kNotKnown)});
  for (size_t i = 0; i < count; ++i)
    for (size_t b = 0; b < layout.buckets.size(); ++b)
      for (uint32_t r = 0; r < sums[i][b].done_ns.size(); ++r)
        taken[i][b][r] = since(sums[i][b].complete_ns, sums[i][b].done_ns[r]);
  for (size_t b = 0; b < layout.buckets.size(); ++b)
    for (uint32_t r = 0; r < graph.ranks; ++r)
      if (!fill_in(taken, b, r))
        return error(Code::unsupported,
                     "%s summed the gradients, and when bucket %zu was there on rank %u is not "
                     "recorded",
                     graph.sums_by.c_str(), b, r);
  return taken;
}

}  // namespace weft::replay
