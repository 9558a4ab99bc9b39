#include "activity.h"

#include <algorithm>
#include <array>

namespace weft::diagnose {
namespace {

using graph::Node;
using graph::NodeType;

bool is_compute(NodeType type) {
  return type == NodeType::forward || type == NodeType::backward || type == NodeType::update;
}

void add_operation(const Node& node, RankActivity& own) {
  auto [at, made] =
      own.operations.try_emplace(node.subject, OperationSpan{{node.start_ns, node.end_ns()}, 0});
  Span& span = at->second.span;
  span.start_ns = std::min(span.start_ns, node.start_ns);
  span.end_ns = std::max(span.end_ns, node.end_ns());
  if (node.type == NodeType::send) ++at->second.sends;
}

// Of an operation without messages only the end is known: a tensor was done.
void end_operation(const graph::Graph& graph, const graph::Predecessors& predecessors,
                   uint32_t done, RankActivity& own) {
  for (graph::Predecessors::In in : predecessors.of(done)) {
    const Node& cause = graph.nodes[in.from];
    if (cause.type != NodeType::operation) continue;
    auto at = own.operations.find(cause.subject);
    if (at == own.operations.end()) continue;
    at->second.span.end_ns = std::max(at->second.span.end_ns, graph.nodes[done].start_ns);
  }
}

// Before `index` the device stood still since `free_ns`. Each tensor that it waited for has the
// time since the one before it was done.
void add_waits(const graph::Graph& graph, const graph::Predecessors& predecessors, uint32_t index,
               int64_t free_ns, RankActivity& own) {
  std::vector<const Node*> causes;
  for (graph::Predecessors::In in : predecessors.of(index)) {
    const Node& cause = graph.nodes[in.from];
    if (cause.type == NodeType::done && cause.start_ns > free_ns) causes.push_back(&cause);
  }
  std::stable_sort(causes.begin(), causes.end(),
                   [](const Node* a, const Node* b) { return a->start_ns < b->start_ns; });
  int64_t since = free_ns;
  for (const Node* cause : causes) {
    int64_t until = std::min(cause->start_ns, graph.nodes[index].start_ns);
    if (until <= since) continue;
    own.waits.push_back({{since, until}, cause->subject, cause->iteration});
    since = until;
  }
}

void collect_nodes(const graph::Graph& graph, const graph::Predecessors& predecessors,
                   Activity& activity) {
  std::vector<std::optional<int64_t>> free_ns(graph.ranks);
  for (uint32_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (node.rank >= graph.ranks) continue;
    RankActivity& own = activity.ranks[node.rank];
    if (is_compute(node.type)) {
      std::optional<int64_t>& free = free_ns[node.rank];
      if (free && *free < node.start_ns) add_waits(graph, predecessors, n, *free, own);
      free = std::max(free.value_or(node.end_ns()), node.end_ns());
      own.compute.push_back({node.start_ns, node.end_ns()});
    } else if (node.type == NodeType::done && !graph.sums_by.empty()) {
      end_operation(graph, predecessors, n, own);
    } else if (node.type == NodeType::operation || node.type == NodeType::send ||
               node.type == NodeType::receive) {
      add_operation(node, own);
    }
  }
  for (RankActivity& own : activity.ranks) {
    own.compute = united(std::move(own.compute));
    for (const auto& [number, operation] : own.operations)
      own.communication.push_back(operation.span);
    own.communication = united(std::move(own.communication));
  }
}

void collect_compute(const graph::Graph& graph, Activity& activity) {
  for (uint32_t r = 0; r < graph.ranks; ++r) {
    std::vector<double> busy, late;
    for (size_t i = graph.first_counted(); i < graph.iterations.size(); ++i) {
      double work = 0, gaps = 0;
      for (const graph::LayerTimes& layer : graph.iterations[i].layers[r]) {
        work += static_cast<double>(layer.forward_ns) + static_cast<double>(layer.backward_ns);
        gaps += static_cast<double>(layer.gap_before_backward_ns) +
                static_cast<double>(layer.gap_before_forward_ns) +
                static_cast<double>(layer.gap_before_update_ns) +
                static_cast<double>(layer.before_wait_ns);
      }
      busy.push_back(work + gaps);
      late.push_back(gaps);
    }
    activity.ranks[r].compute_ns = quantile(busy, 0.5);
    activity.ranks[r].gaps_ns = quantile(late, 0.5);
  }
}

Span window_of(const graph::Graph& graph, size_t iteration, uint32_t rank) {
  return {graph.iterations[iteration].start_ns[rank], graph.iterations[iteration].end_ns[rank]};
}

}  // namespace

bool Activity::counts(uint32_t iteration) const {
  return std::binary_search(counted.begin(), counted.end(), iteration);
}

Activity activity_of(const graph::Graph& graph, const graph::Predecessors& predecessors) {
  Activity activity;
  activity.ranks.resize(graph.ranks);
  for (size_t i = graph.first_counted(); i < graph.iterations.size(); ++i)
    activity.counted.push_back(graph.iterations[i].number);
  std::sort(activity.counted.begin(), activity.counted.end());
  collect_nodes(graph, predecessors, activity);
  collect_compute(graph, activity);
  double iterations = static_cast<double>(activity.counted.size());
  for (RankActivity& own : activity.ranks)
    for (const Wait& wait : own.waits)
      if (activity.counts(wait.iteration)) own.waiting_ns += wait.span.length() / iterations;
  for (const graph::Operation& operation : graph.operations)
    if (activity.counts(operation.iteration)) activity.operations += 1 / iterations;
  return activity;
}

void share_path(const graph::Graph& graph, const graph::Predecessors& predecessors,
                Activity& activity, Diagnosis& out) {
  constexpr std::array kAll = {
      graph::Spent::compute,       graph::Spent::transfer,        graph::Spent::wait_for_rank,
      graph::Spent::wait_for_lane, graph::Spent::wait_for_credit, graph::Spent::control,
      graph::Spent::host};
  for (graph::Spent spent : kAll) out.path.push_back({graph::name_of(spent), 0, 0});
  if (graph.nodes.empty()) return;
  double iterations = static_cast<double>(activity.counted.size());
  for (size_t i = graph.first_counted(); i < graph.iterations.size(); ++i)
    for (const graph::Stretch& stretch : graph::critical_path(graph, predecessors, i)) {
      double ns = Span{stretch.start_ns, stretch.end_ns}.length() / iterations;
      size_t kind =
          static_cast<size_t>(std::find(kAll.begin(), kAll.end(), stretch.spent) - kAll.begin());
      if (kind >= kAll.size()) continue;
      out.path[kind].ns += ns;
      out.iteration_ns += ns;
      if (stretch.spent == graph::Spent::wait_for_rank && stretch.rank < graph.ranks)
        activity.ranks[stretch.rank].waited_for_ns += ns;
    }
  for (Share& share : out.path)
    share.percent = out.iteration_ns > 0 ? 100 * share.ns / out.iteration_ns : 0;
}

void measure_overlap(const graph::Graph& graph, const Activity& activity, Diagnosis& out) {
  double windows = static_cast<double>(activity.counted.size()) * graph.ranks;
  for (uint32_t r = 0; r < graph.ranks; ++r) {
    const RankActivity& own = activity.ranks[r];
    std::vector<Span> waiting;
    for (const Wait& wait : own.waits) waiting.push_back(wait.span);
    waiting = united(std::move(waiting));
    for (size_t i = graph.first_counted(); i < graph.iterations.size(); ++i) {
      Span window = window_of(graph, i, r);
      std::vector<Span> communication = within(own.communication, window);
      std::vector<Span> compute = within(own.compute, window);
      double moved = length(communication);
      out.communication_ns += moved / windows;
      out.overlapped_ns += length(intersection(communication, compute)) / windows;
      out.overlap_possible_ns += std::min(moved, length(compute)) / windows;
      out.exposed_ns += length(intersection(communication, within(waiting, window))) / windows;
    }
  }
}

}  // namespace weft::diagnose
