#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "parts.h"

namespace weft::graph {
namespace {

// Predecessors keeps a mark in the top bit of a node's number.
constexpr size_t kNodesMax = size_t{1} << 31;

// Hosts by number, in the order in which ranks name them.
std::vector<uint32_t> hosts_of(const trace::Trace& trace, uint32_t ranks) {
  std::map<std::pair<uint32_t, std::string>, uint32_t> numbers;
  std::vector<uint32_t> out;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const trace::Environment& own = trace.of_rank(rank)->environment;
    auto number = static_cast<uint32_t>(numbers.size());
    out.push_back(numbers.try_emplace({own.host_index, own.host}, number).first->second);
  }
  return out;
}

Result<uint32_t> count_ranks(const trace::Trace& trace) {
  if (trace.processes.empty()) return error(Code::invalid_argument, "the trace has no process");
  uint32_t ranks = 0;
  for (const trace::Process& process : trace.processes)
    ranks = std::max(ranks, process.environment.ranks);
  if (ranks > kNoLane)
    return error(Code::invalid_argument, "a run of %u ranks; a graph can have %u", ranks,
                 unsigned{kNoLane});
  std::vector<uint32_t> seen(ranks, 0);
  for (const trace::Process& process : trace.processes) {
    uint32_t rank = process.environment.rank;
    if (rank >= ranks)
      return error(Code::invalid_argument, "rank %u in a run of %u ranks", rank, ranks);
    if (seen[rank]++ > 0) return error(Code::invalid_argument, "rank %u is there twice", rank);
  }
  std::string missing;
  uint32_t count = 0;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    if (seen[rank] > 0) continue;
    if (count++ < 8) missing += text("%s%u", missing.empty() ? "" : ", ", rank);
  }
  if (count > 8) missing += text(" and %u more", count - 8);
  if (count > 0)
    return error(Code::invalid_argument,
                 "the trace of rank %s is missing; a run of %u ranks can only be understood whole",
                 missing.c_str(), ranks);
  return ranks;
}

Result<trace::Model> model_of(const trace::Trace& trace, std::vector<std::string>& remarks) {
  const trace::Model* model = nullptr;
  for (const trace::Process& process : trace.processes) {
    // A damaged file may hold an early version of it, and a later one only adds.
    if (process.model.layers.empty()) continue;
    if (model == nullptr || process.model.layers.size() > model->layers.size() ||
        process.model.tensors.size() > model->tensors.size())
      model = &process.model;
  }
  if (model == nullptr)
    return error(Code::invalid_argument,
                 "the trace has no model: nobody knows its layers; a program says them when it "
                 "makes its exchange, "
                 "or to its marks (weft/mark.h)");
  for (const trace::Process& process : trace.processes)
    if (process.model != *model)
      remarks.push_back(text("rank %u describes another model", process.environment.rank));
  return *model;
}

void remark_losses(const trace::Trace& trace, std::vector<std::string>& remarks) {
  for (const trace::Process& process : trace.processes)
    if (process.dropped > 0)
      remarks.push_back(text("rank %u recorded %llu events fewer than happened",
                             process.environment.rank,
                             static_cast<unsigned long long>(process.dropped)));
  for (const trace::Damage& damage : trace.damage)
    if (damage.any())
      remarks.push_back(text("%s is not whole: %llu blocks lost", damage.file.c_str(),
                             static_cast<unsigned long long>(damage.blocks_lost)));
}

auto rank_of(const Node& node) {
  return std::tuple(node.start_ns, stage_of(node.type), node.iteration, node.rank, node.subject,
                    node.step, node.lane, node.duration_ns);
}

// By node to, then by node from; none twice.
void sort_edges(size_t nodes, std::vector<Edge>& edges) {
  std::vector<uint32_t> first(nodes + 1, 0);
  for (const Edge& edge : edges) ++first[edge.to + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<Edge> sorted(edges.size());
  std::vector<uint32_t> next(first.begin(), first.end() - 1);
  for (const Edge& edge : edges) sorted[next[edge.to]++] = edge;
  auto by_from = [](const Edge& a, const Edge& b) { return a.from < b.from; };
  auto equal = [](const Edge& a, const Edge& b) { return a.from == b.from && a.to == b.to; };
  for (size_t n = 0; n < nodes; ++n)
    if (first[n + 1] - first[n] > 1)
      std::sort(sorted.begin() + first[n], sorted.begin() + first[n + 1], by_from);
  sorted.erase(std::unique(sorted.begin(), sorted.end(), equal), sorted.end());
  edges = std::move(sorted);
}

// What is required need not be said again. Both are sorted.
void remove_repeated(const std::vector<Edge>& required, std::vector<Edge>& recorded) {
  std::vector<Edge> out;
  auto less = [](const Edge& a, const Edge& b) {
    return std::tie(a.to, a.from) < std::tie(b.to, b.from);
  };
  out.reserve(recorded.size());
  std::set_difference(recorded.begin(), recorded.end(), required.begin(), required.end(),
                      std::back_inserter(out), less);
  recorded = std::move(out);
}

// Takes nodes away before which nothing is left (or behind which, backwards), again and again.
void peel(const Graph& graph, bool backwards, std::vector<bool>& left) {
  const size_t nodes = graph.nodes.size();
  auto begin = [&](const Edge& edge) { return backwards ? edge.to : edge.from; };
  auto end = [&](const Edge& edge) { return backwards ? edge.from : edge.to; };
  std::vector<uint32_t> first(nodes + 1, 0), waits_for(nodes, 0);
  for (const auto* edges : {&graph.required, &graph.recorded})
    for (const Edge& edge : *edges)
      if (left[edge.from] && left[edge.to]) ++first[begin(edge) + 1], ++waits_for[end(edge)];
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<uint32_t> to(first.back());
  std::vector<uint32_t> next(first.begin(), first.end() - 1);
  for (const auto* edges : {&graph.required, &graph.recorded})
    for (const Edge& edge : *edges)
      if (left[edge.from] && left[edge.to]) to[next[begin(edge)]++] = end(edge);
  std::vector<uint32_t> free;
  for (uint32_t n = 0; n < nodes; ++n)
    if (left[n] && waits_for[n] == 0) free.push_back(n);
  while (!free.empty()) {
    const uint32_t n = free.back();
    free.pop_back();
    left[n] = false;
    for (uint32_t i = first[n]; i < first[n + 1]; ++i)
      if (--waits_for[to[i]] == 0) free.push_back(to[i]);
  }
}

// Nodes that are in a circle, or between two; empty: there is none.
std::vector<bool> circles(const Graph& graph) {
  std::vector<bool> left(graph.nodes.size(), true);
  peel(graph, false, left);
  if (std::find(left.begin(), left.end(), true) == left.end()) return {};
  peel(graph, true, left);
  return left;
}

// Edges that follow time cannot make a circle. Most that do not are only late to be recorded, and
// stay where they make none.
size_t remove_backward(const std::vector<Node>& nodes, const std::vector<bool>& in_circles,
                       std::vector<Edge>& edges) {
  return std::erase_if(edges, [&](const Edge& edge) {
    if (!in_circles[edge.from] || !in_circles[edge.to]) return false;
    int64_t from = nodes[edge.from].end_ns(), to = nodes[edge.to].end_ns();
    return std::tie(from, edge.from) >= std::tie(to, edge.to);
  });
}

}  // namespace

const char* name_of(NodeType type) {
  switch (type) {
    case NodeType::forward: return "forward";
    case NodeType::backward: return "backward";
    case NodeType::update: return "update";
    case NodeType::ready: return "ready";
    case NodeType::bucket: return "bucket";
    case NodeType::admitted: return "admitted";
    case NodeType::operation: return "operation";
    case NodeType::send: return "send";
    case NodeType::receive: return "receive";
    case NodeType::done: return "done";
    case NodeType::sum: return "sum";
  }
  return "unknown";
}

size_t Graph::first_counted() const {
  return iterations.size() > trace::kWarmUpIterations + 1 ? trace::kWarmUpIterations : 0;
}

IterationTimes iteration_times(const Graph& graph) {
  IterationTimes out;
  double slowest = -1;
  for (uint32_t rank = 0; rank < graph.ranks; ++rank) {
    std::vector<double> own;
    for (size_t i = graph.first_counted(); i < graph.iterations.size(); ++i)
      own.push_back(static_cast<double>(graph.iterations[i].end_ns[rank] -
                                        graph.iterations[i].start_ns[rank]));
    if (own.empty()) return out;
    out.median_ns.push_back(quantile(own, 0.5));
    if (out.median_ns.back() <= slowest) continue;
    slowest = out.median_ns.back();
    out.of_slowest_ns = std::move(own);
  }
  return out;
}

void settle(Graph& graph, Parts& parts, Edges edges) {
  std::vector<uint32_t> order(parts.nodes.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    const Node &x = parts.nodes[a], &y = parts.nodes[b];
    if (x.start_ns != y.start_ns) return x.start_ns < y.start_ns;
    auto place_x = rank_of(x), place_y = rank_of(y);
    return place_x != place_y ? place_x < place_y : a < b;
  });
  std::vector<uint32_t> place(order.size());
  graph.nodes.reserve(order.size());
  for (uint32_t i = 0; i < order.size(); ++i) {
    place[order[i]] = i;
    graph.nodes.push_back(parts.nodes[order[i]]);
  }
  parts.nodes = {};
  for (auto* list : {&edges.required, &edges.recorded}) {
    for (Edge& edge : *list) edge = {place[edge.from], place[edge.to]};
    sort_edges(graph.nodes.size(), *list);
  }
  remove_repeated(edges.required, edges.recorded);
  graph.required = std::move(edges.required);
  graph.recorded = std::move(edges.recorded);
  std::vector<bool> in_circles = circles(graph);
  if (in_circles.empty()) return;
  size_t removed = remove_backward(graph.nodes, in_circles, graph.recorded);
  in_circles = circles(graph);
  if (!in_circles.empty()) removed += remove_backward(graph.nodes, in_circles, graph.required);
  graph.remarks.push_back(
      text("%zu dependencies that go back in time were left out, because they made a circle; are "
           "the clocks aligned?",
           removed));
}

namespace {

// Without compute there is nothing to hide communication behind, and no program to keep.
std::optional<Error> without_compute(const Parts& parts) {
  for (const RankParts& own : parts.ranks)
    if (!own.forward.all().empty() || !own.backward.all().empty()) return std::nullopt;
  return error(
      Code::invalid_argument,
      "the trace has no forward and no backward of any layer: what the program computes is "
      "unknown; mark it (weft/mark.h, or weft_mark_begin in C)");
}

}  // namespace

Result<Graph> build(const trace::Trace& aligned) {
  Graph graph;
  WEFT_ASSIGN(graph.ranks, count_ranks(aligned));
  WEFT_ASSIGN(graph.model, model_of(aligned, graph.remarks));
  graph.environment = aligned.of_rank(0)->environment;
  graph.host_of = hosts_of(aligned, graph.ranks);
  for (const trace::Note& note : aligned.of_rank(0)->notes)
    if (note.key == kSumsBy && graph.ranks > 1) graph.sums_by = printable(note.value);
  remark_losses(aligned, graph.remarks);

  Parts parts = collect(aligned, graph.model, graph.ranks);
  if (parts.unusable > 0)
    graph.remarks.push_back(text("%llu events say too little, or name what the model lacks",
                                 static_cast<unsigned long long>(parts.unusable)));
  if (parts.whole_updates > 0)
    graph.remarks.push_back(
        "updates were marked for all layers at once: the time of each layer's is inferred from the "
        "size of its gradients");
  if (auto lacks = without_compute(parts)) return *lacks;
  Edges edges = connect(parts, graph.model, graph.environment, graph.host_of);
  if (parts.nodes.size() >= kNodesMax)
    return error(Code::invalid_argument, "%zu nodes; a graph can have %zu", parts.nodes.size(),
                 kNodesMax);
  for (std::string& remark : edges.remarks) graph.remarks.push_back(std::move(remark));
  for (const auto& [number, operation] : parts.operations) graph.operations.push_back(operation);
  settle(graph, parts, std::move(edges));
  const size_t remarks = graph.remarks.size();
  find_iterations(graph, parts);
  if (graph.iterations.empty())
    return error(Code::invalid_argument,
                 "the trace has no iteration that all %u ranks have whole: forward and backward of "
                 "every layer, and the start of the next%s%s",
                 graph.ranks, graph.remarks.size() > remarks ? "; " : "",
                 graph.remarks.size() > remarks ? graph.remarks.back().c_str() : "");
  return graph;
}

}  // namespace weft::graph
