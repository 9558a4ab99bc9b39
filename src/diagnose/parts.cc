// What each tensor, layer and lane has to do with the time.
#include <algorithm>
#include <map>

#include "activity.h"

namespace weft::diagnose {
namespace {

using graph::Node;
using graph::NodeType;

// Which tensors travel in which piece, by bucket and partition.
class Cargo {
 public:
  static Result<Cargo> make(const graph::Graph& graph, const plan::Plan& plan) {
    std::vector<schedule::Tensor> tensors;
    for (const trace::Tensor& tensor : graph.model.tensors)
      tensors.push_back({tensor.name, tensor.bytes / schedule::kElementBytes, tensor.consumed_by});
    plan::Plan sized = schedule::scaled(plan, graph.environment.shrink);
    WEFT_ASSIGN(schedule::Layout layout, schedule::make_layout(sized, tensors));
    Cargo out;
    out.of_piece_.resize(layout.pieces.size());
    for (const schedule::Bucket& bucket : layout.buckets)
      for (size_t t = 0; t < bucket.tensors.size(); ++t)
        out.load(layout, bucket, bucket.tensors[t], bucket.offsets[t],
                 bucket.offsets[t] + tensors[bucket.tensors[t]].elements);
    out.buckets_ = std::move(layout.buckets);
    return out;
  }

  const std::vector<uint32_t>* of(const graph::Operation& operation) const {
    if (operation.bucket >= buckets_.size()) return nullptr;
    const schedule::Bucket& bucket = buckets_[operation.bucket];
    if (operation.partition >= bucket.pieces) return nullptr;
    return &of_piece_[bucket.first_piece + operation.partition];
  }

 private:
  void load(const schedule::Layout& layout, const schedule::Bucket& bucket, uint32_t tensor,
            uint64_t first, uint64_t end) {
    auto begin = layout.pieces.begin() + bucket.first_piece;
    auto at = std::partition_point(begin, begin + bucket.pieces, [&](const schedule::Piece& piece) {
      return piece.first + piece.elements <= first;
    });
    for (; at != begin + bucket.pieces && at->first < end; ++at)
      of_piece_[static_cast<size_t>(at - layout.pieces.begin())].push_back(tensor);
  }

  std::vector<schedule::Bucket> buckets_;
  std::vector<std::vector<uint32_t>> of_piece_;
};

// When a tensor was ready and travelled in one iteration.
struct Travel {
  std::vector<std::optional<Span>> on_rank;
  std::optional<int64_t> ready_ns;  // on the last rank
};
using Travels = std::map<uint32_t, Travel>;  // by tensor or layer

void extend(std::optional<Span>& span, const Span& by) {
  if (!span) span = by;
  span->start_ns = std::min(span->start_ns, by.start_ns);
  span->end_ns = std::max(span->end_ns, by.end_ns);
}

Travels travels(const graph::Graph& graph, const Cargo& cargo, const Activity& activity,
                const std::vector<const graph::Operation*>& operations) {
  Travels out;
  for (const graph::Operation* operation : operations) {
    const std::vector<uint32_t>* tensors = cargo.of(*operation);
    if (tensors == nullptr) continue;
    for (uint32_t tensor : *tensors) {
      Travel& travel = out[tensor];
      travel.on_rank.resize(graph.ranks);
      for (uint32_t r = 0; r < graph.ranks; ++r) {
        auto found = activity.ranks[r].operations.find(operation->number);
        if (found != activity.ranks[r].operations.end())
          extend(travel.on_rank[r], found->second.span);
      }
    }
  }
  return out;
}

// How long it travelled on the mean rank, and how long it lay ready everywhere before.
struct Journey {
  double transfer_ns = 0;
  double queued_ns = 0;
};

Journey journey_of(const Travel& travel) {
  Journey out;
  double ranks = 0;
  std::optional<int64_t> began;
  for (const std::optional<Span>& span : travel.on_rank) {
    if (!span) continue;
    out.transfer_ns += span->length();
    began = std::min(began.value_or(span->start_ns), span->start_ns);
    ++ranks;
  }
  if (ranks > 0) out.transfer_ns /= ranks;
  if (began && travel.ready_ns) out.queued_ns = Span{*travel.ready_ns, *began}.length();
  return out;
}

// A layer's tensors looked at as one: ready with the first of them, on the way until the last.
void merge(const Travel& from, Travel& into) {
  into.on_rank.resize(std::max(into.on_rank.size(), from.on_rank.size()));
  for (size_t r = 0; r < from.on_rank.size(); ++r)
    if (from.on_rank[r]) extend(into.on_rank[r], *from.on_rank[r]);
  if (from.ready_ns)
    into.ready_ns = std::min(into.ready_ns.value_or(*from.ready_ns), *from.ready_ns);
}

void add_travels(const graph::Graph& graph, const Travels& all, double iterations, Diagnosis& out) {
  Travels by_layer;
  auto add = [&](const Travel& travel, Detail& detail) {
    Journey journey = journey_of(travel);
    detail.transfer_ns += journey.transfer_ns / iterations;
    detail.queued_ns += journey.queued_ns / iterations;
  };
  for (const auto& [tensor, travel] : all) {
    add(travel, out.tensors[tensor]);
    uint32_t layer = graph.model.tensors[tensor].produced_by;
    if (layer < out.layers.size()) merge(travel, by_layer[layer]);
  }
  for (const auto& [layer, travel] : by_layer) add(travel, out.layers[layer]);
}

// One iteration at a time, because tensors times ranks times iterations may be many.
void add_all_travels(const graph::Graph& graph, const Cargo& cargo, const Activity& activity,
                     Diagnosis& out) {
  std::map<uint32_t, std::vector<const graph::Operation*>> operations;
  for (const graph::Operation& operation : graph.operations)
    if (activity.counts(operation.iteration)) operations[operation.iteration].push_back(&operation);
  std::map<uint32_t, std::vector<const Node*>> sums;
  for (const Node& node : graph.nodes)
    if (node.type == NodeType::sum && activity.counts(node.iteration))
      sums[node.iteration].push_back(&node);
  for (const auto& [iteration, list] : operations) {
    Travels all = travels(graph, cargo, activity, list);
    for (const Node* sum : sums[iteration]) {
      auto found = all.find(sum->subject);
      if (found != all.end()) found->second.ready_ns = sum->start_ns;
    }
    add_travels(graph, all, static_cast<double>(activity.counted.size()), out);
  }
}

// Busy times of one direction of a lane, and what it carried in them.
struct Carried {
  std::vector<Span> busy;
  double bytes = 0;
};

const graph::Operation* find(const graph::Graph& graph, uint32_t number) {
  auto found = std::lower_bound(
      graph.operations.begin(), graph.operations.end(), number,
      [](const graph::Operation& operation, uint32_t wanted) { return operation.number < wanted; });
  return found != graph.operations.end() && found->number == number ? &*found : nullptr;
}

}  // namespace

void detail_tensors(const graph::Graph& graph, const plan::Plan& plan, const Activity& activity,
                    Diagnosis& out) {
  double each = static_cast<double>(activity.counted.size()) * graph.ranks;
  for (const trace::Layer& layer : graph.model.layers) out.layers.push_back({.name = layer.name});
  for (const trace::Tensor& tensor : graph.model.tensors) {
    double bytes = static_cast<double>(tensor.bytes);
    out.tensors.push_back({.name = tensor.name, .bytes = bytes});
    if (tensor.produced_by < out.layers.size()) out.layers[tensor.produced_by].bytes += bytes;
  }
  for (size_t i = graph.first_counted(); i < graph.iterations.size(); ++i)
    for (const std::vector<graph::LayerTimes>& layers : graph.iterations[i].layers)
      for (size_t l = 0; l < std::min(layers.size(), out.layers.size()); ++l)
        out.layers[l].compute_ns += (static_cast<double>(layers[l].forward_ns) +
                                     static_cast<double>(layers[l].backward_ns) +
                                     static_cast<double>(layers[l].update_ns)) /
                                    each;
  for (const RankActivity& own : activity.ranks)
    for (const Wait& wait : own.waits) {
      if (!activity.counts(wait.iteration) || wait.tensor >= out.tensors.size()) continue;
      double ns = wait.span.length() / each;
      out.tensors[wait.tensor].waited_ns += ns;
      uint32_t layer = graph.model.tensors[wait.tensor].produced_by;
      if (layer < out.layers.size()) out.layers[layer].waited_ns += ns;
    }
  if (graph.operations.empty()) return;
  auto cargo = Cargo::make(graph, plan);
  if (!cargo) {
    out.remarks.push_back("which tensors an operation carried is unknown: " +
                          cargo.error().message());
    return;
  }
  add_all_travels(graph, *cargo, activity, out);
}

void detail_lanes(const graph::Graph& graph, const Activity& activity, Diagnosis& out) {
  // A message's own size is not in the graph; those of an operation are about alike. Together they
  // are what a ring sends, with all algorithms that do not send more for fewer steps.
  std::map<uint32_t, uint64_t> messages;  // by operation
  for (const RankActivity& own : activity.ranks)
    for (const auto& [number, operation] : own.operations) messages[number] += operation.sends;
  std::map<std::tuple<uint16_t, uint16_t, uint16_t>, Carried> lanes;  // rank, lane, peer
  for (const graph::Edge& edge : graph.recorded) {
    const Node &send = graph.nodes[edge.from], &receive = graph.nodes[edge.to];
    if (send.type != NodeType::send || receive.type != NodeType::receive) continue;
    if (send.rank >= graph.ranks || send.lane == graph::kNoLane || !activity.counts(send.iteration))
      continue;
    Carried& carried = lanes[{send.rank, send.lane, receive.rank}];
    carried.busy.push_back({send.start_ns, receive.end_ns()});
    const graph::Operation* operation = find(graph, send.subject);
    if (operation == nullptr) continue;
    double all =
        graph.ranks * cost::ring_bytes_per_rank(static_cast<double>(operation->bytes), graph.ranks);
    carried.bytes += all / static_cast<double>(std::max<uint64_t>(1, messages[send.subject]));
  }
  std::vector<double> total(graph.ranks, 0);
  for (size_t i = graph.first_counted(); i < graph.iterations.size(); ++i)
    for (uint32_t r = 0; r < graph.ranks; ++r)
      total[r] += Span{graph.iterations[i].start_ns[r], graph.iterations[i].end_ns[r]}.length();
  for (auto& [id, carried] : lanes) {
    auto [rank, lane, peer] = id;
    double busy = length(united(std::move(carried.busy)));
    out.lanes.push_back({rank, lane, busy > 0 ? carried.bytes / busy * 1e9 : 0,
                         total[rank] > 0 ? std::min(100.0, 100 * busy / total[rank]) : 0, peer});
  }
}

}  // namespace weft::diagnose
