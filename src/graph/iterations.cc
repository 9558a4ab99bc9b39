#include <algorithm>
#include <limits>

#include "parts.h"

namespace weft::graph {
namespace {

// A row of LayerTimes a layer, rank and iteration is more than the events that ask for it when a
// file claims many layers and uses few: at most this many for free, and so many for each event.
constexpr size_t kRowsFree = size_t{1} << 16;
constexpr size_t kRowsPerEvent = 8;

int64_t add(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

size_t distinct(std::span<const Table::Entry> entries) {
  size_t count = 0;
  for (size_t i = 0; i < entries.size(); ++i)
    if (i == 0 || entries[i].key != entries[i - 1].key) ++count;
  return count;
}

// How many layers a table ever has: an iteration with fewer is not whole.
size_t layers_in(const Table& table, size_t layers) {
  std::vector<bool> seen(layers, false);
  for (const Table::Entry& entry : table.all()) seen[entry.subject()] = true;
  return static_cast<size_t>(std::count(seen.begin(), seen.end(), true));
}

std::optional<int64_t> first_start(std::span<const Table::Entry> entries) {
  std::optional<int64_t> first;
  for (const Table::Entry& entry : entries)
    if (!first || entry.time_ns < *first) first = entry.time_ns;
  return first;
}

class RankView {
 public:
  RankView(const RankParts& own, size_t layers) : own_(own) {
    for (const Table* table : {&own.forward, &own.backward, &own.update})
      expected_.push_back(layers_in(*table, layers));
  }

  std::optional<Interval> whole(uint32_t iteration) const {
    size_t at = 0;
    for (const Table* table : {&own_.forward, &own_.backward, &own_.update})
      if (distinct(table->of_iteration(iteration)) != expected_[at++]) return std::nullopt;
    std::optional<int64_t> start = first_start(own_.forward.of_iteration(iteration));
    std::optional<int64_t> end = first_start(own_.forward.of_iteration(iteration + 1));
    auto span = own_.iterations.find(iteration);
    if (span != own_.iterations.end()) {
      if (!start) start = span->second.start_ns;
      if (!end) end = span->second.end_ns;
    }
    if (!start || !end || *end <= *start || expected_[0] + expected_[1] == 0) return std::nullopt;
    return Interval{*start, *end};
  }

 private:
  const RankParts& own_;
  std::vector<size_t> expected_;
};

std::vector<uint32_t> candidates(const RankParts& own) {
  std::vector<uint32_t> out = own.forward.iterations();
  for (const auto& [number, span] : own.iterations) out.push_back(number);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

// Adds up compute, and idle time that nothing before a step explains.
class Times {
 public:
  Times(Graph& graph, const Parts& parts) : graph_(graph), parts_(parts), predecessors_(graph) {
    for (size_t i = 0; i < graph.iterations.size(); ++i) index_[graph.iterations[i].number] = i;
  }

  void fill() {
    // An emulated device stands still before its first layer because its timer has to wake up,
    // which is the plan's affair; a real one because its thread did something else.
    const bool real = !graph_.environment.emulated_compute && !graph_.environment.predicted;
    if (real) find_before_waits();
    find_loading();
    for (uint32_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      if (!is_compute(node.type)) continue;
      auto found = index_.find(node.iteration);
      if (found == index_.end()) continue;
      LayerTimes& times = graph_.iterations[found->second].layers[node.rank][node.subject];
      if (node.type == NodeType::update) {
        times.update_ns = add(times.update_ns, node.duration_ns);
        if (real) times.gap_before_update_ns = add(times.gap_before_update_ns, gap_before(n));
      } else if (node.type == NodeType::forward) {
        times.forward_ns = add(times.forward_ns, node.duration_ns);
        if (real || node.subject > 0)
          times.gap_before_forward_ns = add(times.gap_before_forward_ns, gap_before(n));
      } else {
        times.backward_ns = add(times.backward_ns, node.duration_ns);
        times.gap_before_backward_ns = add(times.gap_before_backward_ns, gap_before(n));
      }
    }
    for (size_t rank = 0; rank < parts_.ranks.size(); ++rank)
      for (const ProcessorTime& time : parts_.ranks[rank].processor) {
        auto found = index_.find(static_cast<uint32_t>(time.key >> 32));
        if (found == index_.end()) continue;
        LayerTimes& times =
            graph_.iterations[found->second].layers[rank][static_cast<uint32_t>(time.key)];
        int64_t& of = time.type == NodeType::update    ? times.update_cpu_ns
                      : time.type == NodeType::forward ? times.forward_cpu_ns
                                                       : times.backward_cpu_ns;
        of = add(std::max<int64_t>(of, 0), time.ns);
      }
  }

 private:
  int64_t gap_before(uint32_t n) const {
    const Node& node = graph_.nodes[n];
    std::optional<int64_t> explained;
    for (Predecessors::In in : predecessors_.of(n)) {
      int64_t end = std::min(graph_.nodes[in.from].end_ns(), node.start_ns);
      if (!explained || *explained < end) explained = end;
    }
    if (!explained) return 0;
    // A thread that waits holds its device up until it no longer does.
    const std::vector<Interval>& waits = parts_.ranks[node.rank].waits;
    auto after = std::partition_point(waits.begin(), waits.end(), [&](const Interval& wait) {
      return wait.start_ns < node.start_ns;
    });
    if (after != waits.begin())
      explained = std::max(*explained, std::min(std::prev(after)->end_ns, node.start_ns));
    return node.start_ns - *explained;
  }

  void find_loading() {
    std::vector<Covered> busy(parts_.ranks.size());  // computing
    for (const Node& node : graph_.nodes)
      if (is_compute(node.type)) busy[node.rank].take(node.start_ns, node.end_ns());
    for (Iteration& iteration : graph_.iterations)
      for (size_t rank = 0; rank < parts_.ranks.size(); ++rank) {
        int64_t alone = 0;
        auto spans = parts_.ranks[rank].loading.find(iteration.number);
        if (spans != parts_.ranks[rank].loading.end())
          for (const Interval& span : spans->second)
            alone =
                add(alone, span.end_ns - span.start_ns -
                               (busy[rank].until(span.end_ns) - busy[rank].until(span.start_ns)));
        iteration.loading_ns.push_back(alone);
      }
  }

  // How much of time intervals cover, which come in order of start.
  class Covered {
   public:
    void take(int64_t start, int64_t end) {
      if (!pieces_.empty() && start <= pieces_.back().end_ns) {
        pieces_.back().end_ns = std::max(pieces_.back().end_ns, end);
        return;
      }
      before_.push_back(
          pieces_.empty() ? 0 : before_.back() + pieces_.back().end_ns - pieces_.back().start_ns);
      pieces_.push_back({start, end});
    }
    int64_t until(int64_t ns) const {
      auto after = std::partition_point(pieces_.begin(), pieces_.end(),
                                        [&](const Interval& one) { return one.start_ns < ns; });
      if (after == pieces_.begin()) return 0;
      const Interval& last = *std::prev(after);
      return before_[static_cast<size_t>(after - pieces_.begin()) - 1] + std::min(ns, last.end_ns) -
             last.start_ns;
    }

   private:
    std::vector<Interval> pieces_;  // apart from each other
    std::vector<int64_t> before_;   // by piece: covered by those before it
  };

  // What the thread did after the last backward and before it waited for gradients.
  void find_before_waits() {
    // By rank: when the last backward of an iteration ended. Tables know starts only.
    std::vector<std::map<uint32_t, int64_t>> ends(parts_.ranks.size());
    for (const Node& node : graph_.nodes) {
      if (node.type != NodeType::backward) continue;
      auto [at, made] = ends[node.rank].try_emplace(node.iteration, node.end_ns());
      at->second = std::max(at->second, node.end_ns());
    }
    for (Iteration& iteration : graph_.iterations)
      for (size_t rank = 0; rank < parts_.ranks.size() && iteration.number > 0; ++rank) {
        const RankParts& own = parts_.ranks[rank];
        auto free = ends[rank].find(iteration.number - 1);
        std::optional<int64_t> next = first_start(own.update.of_iteration(iteration.number - 1));
        std::optional<int64_t> forward = first_start(own.forward.of_iteration(iteration.number));
        if (!next || (forward && *forward < *next)) next = forward;
        if (free == ends[rank].end() || !next) continue;
        auto wait =
            std::partition_point(own.waits.begin(), own.waits.end(),
                                 [&](const Interval& w) { return w.start_ns < free->second; });
        if (wait == own.waits.end() || wait->start_ns >= *next) continue;
        iteration.layers[rank][0].before_wait_ns = wait->start_ns - free->second;
      }
  }

  Graph& graph_;
  const Parts& parts_;
  Predecessors predecessors_;
  std::map<uint32_t, size_t> index_;
};

}  // namespace

void find_iterations(Graph& graph, const Parts& parts) {
  size_t layers = graph.model.layers.size();
  std::vector<RankView> views;
  for (const RankParts& own : parts.ranks) views.emplace_back(own, layers);
  size_t rows_left = kRowsFree + kRowsPerEvent * graph.nodes.size();
  size_t partial = 0, too_many = 0;
  uint32_t first_partial = 0;
  for (uint32_t number : candidates(parts.ranks[0])) {
    Iteration iteration;
    iteration.number = number;
    for (const RankView& view : views) {
      std::optional<Interval> whole = view.whole(number);
      if (!whole) break;
      iteration.start_ns.push_back(whole->start_ns);
      iteration.end_ns.push_back(whole->end_ns);
    }
    if (iteration.start_ns.size() < views.size()) {
      if (partial++ == 0) first_partial = number;
      continue;
    }
    if (rows_left < layers * views.size()) {
      ++too_many;
      continue;
    }
    rows_left -= layers * views.size();
    iteration.layers.assign(views.size(), std::vector<LayerTimes>(layers));
    graph.iterations.push_back(std::move(iteration));
  }
  if (partial > 0)
    graph.remarks.push_back(
        text("%zu iterations are left out, because not all ranks have them "
             "whole; the first is %u",
             partial, first_partial));
  if (too_many > 0)
    graph.remarks.push_back(
        text("%zu iterations are left out: so many layers and so few events cannot be", too_many));
  Times(graph, parts).fill();
}

}  // namespace weft::graph
