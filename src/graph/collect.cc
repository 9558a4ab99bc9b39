#include <algorithm>
#include <tuple>

#include "parts.h"

namespace weft::graph {
namespace {

using trace::Event;
using trace::Kind;
using trace::kNone;
using trace::kNone16;
using trace::Shape;

// Times further out are nobody's, and their differences would not fit a number.
constexpr int64_t kTimeMax = int64_t{1} << 61;
constexpr int64_t kDurationMax = int64_t{1} << 60;
// An update of all layers becomes one a layer: so many for free, and so many for each event.
constexpr size_t kShareNodesFree = size_t{1} << 16;
constexpr size_t kShareNodesPerEvent = 8;

bool usable(const Event& event) {
  if (trace::flaw_of(event) != nullptr) return false;
  if ((event.shape == Shape::counter) != (event.kind == Kind::processor_time)) return false;
  if (event.duration_ns < 0) return false;
  return event.start_ns > -kTimeMax && event.start_ns < kTimeMax &&
         event.duration_ns < kDurationMax;
}

class Collector {
 public:
  Collector(Parts& parts, const trace::Model& model) : parts_(parts), model_(model) {
    share_updates();
  }

  void take(uint16_t rank, const Event& event) {
    ++events_;
    if (!matters(event)) return;
    if (!usable(event) || !place(rank, event)) ++parts_.unusable;
  }

 private:
  static bool matters(const Event& event) {
    switch (event.kind) {
      case Kind::iteration:
      case Kind::forward:
      case Kind::backward:
      case Kind::update:
      case Kind::gradient_ready:
      case Kind::tensor_done:
      case Kind::wait:
      case Kind::data_loading:
      case Kind::processor_time: return true;
      case Kind::chunk: return event.operation < kDirectOperations;
      case Kind::operation:
      case Kind::admitted: return event.operation < kDirectOperations || event.operation == kNone;
      default: return false;
    }
  }

  // False when the event does not say what it must.
  bool place(uint16_t rank, const Event& event) {
    RankParts& own = parts_.ranks[rank];
    if (event.kind == Kind::wait) {
      own.waits.push_back({event.start_ns, event.end_ns()});
      return true;
    }
    if (event.iteration == kNone) return false;
    switch (event.kind) {
      case Kind::iteration:
        return own.iterations.try_emplace(event.iteration, Interval{event.start_ns, event.end_ns()})
            .second;
      case Kind::forward: return compute(own.forward, NodeType::forward, rank, event);
      case Kind::backward: return compute(own.backward, NodeType::backward, rank, event);
      case Kind::update:
        if (is_whole_update(event)) return whole_update(rank, event);
        return compute(own.update, NodeType::update, rank, event);
      case Kind::data_loading:
        own.loading[event.iteration].push_back({event.start_ns, event.end_ns()});
        return true;
      case Kind::processor_time: return processor_time(own, event);
      case Kind::gradient_ready: return ready(rank, event);
      case Kind::tensor_done:
        if (event.tensor >= model_.tensors.size()) return false;
        own.done.add(key_of(event.iteration, event.tensor), event.start_ns,
                     instant(NodeType::done, rank, event, event.tensor));
        return true;
      case Kind::chunk: return chunk(rank, event);
      default: return operation(rank, event);
    }
  }

  uint32_t layer_of(const Event& event) const {
    if (event.layer != kNone16) return event.layer;
    // An optimizer may step tensor by tensor.
    if ((event.kind == Kind::update || event.kind == Kind::processor_time) &&
        event.tensor < model_.tensors.size())
      return model_.tensors[event.tensor].updated_by;
    return kNone;
  }

  bool compute(Table& table, NodeType type, uint16_t rank, const Event& event) {
    uint32_t layer = layer_of(event);
    if (layer >= model_.layers.size()) return false;
    Node node = node_of(type, rank, event, layer);
    node.duration_ns = event.duration_ns;
    table.add(key_of(event.iteration, layer), event.start_ns, parts_.add(node));
    return true;
  }

  // An optimizer that steps all layers at once: each has a share of its time, by the bytes of the
  // gradients that it applies, one after the other.
  struct Share {
    uint32_t layer;
    double from, to;
  };

  void share_updates() {
    std::vector<double> bytes(model_.layers.size(), 0);
    double all = 0;
    for (const trace::Tensor& tensor : model_.tensors) {
      if (tensor.updated_by >= bytes.size()) continue;
      bytes[tensor.updated_by] += static_cast<double>(tensor.bytes);
      all += static_cast<double>(tensor.bytes);
    }
    double before = 0;
    for (uint32_t layer = 0; all > 0 && layer < bytes.size(); ++layer) {
      if (bytes[layer] == 0) continue;
      shares_.push_back({layer, before / all, (before + bytes[layer]) / all});
      before += bytes[layer];
    }
    if (shares_.empty() && !model_.layers.empty()) shares_.push_back({0, 0, 1});
  }

  static bool is_whole_update(const Event& event) {
    return event.layer == kNone16 && event.tensor == kNone;
  }

  static int64_t part(int64_t whole, double share) {
    return static_cast<int64_t>(static_cast<double>(whole) * share);
  }

  // The work that a file may ask for stays in proportion to its events.
  bool whole_update(uint16_t rank, const Event& event) {
    if (shares_.size() > kShareNodesFree + kShareNodesPerEvent * events_ - share_nodes_)
      return false;
    share_nodes_ += shares_.size();
    ++parts_.whole_updates;
    RankParts& own = parts_.ranks[rank];
    own.whole_updates[event.start_ns] = event.duration_ns;
    for (const Share& share : shares_) {
      Node node = node_of(NodeType::update, rank, event, share.layer);
      const int64_t from = part(event.duration_ns, share.from);
      node.start_ns += from;
      node.duration_ns = part(event.duration_ns, share.to) - from;
      own.update.add(key_of(event.iteration, share.layer), node.start_ns, parts_.add(node));
    }
    return true;
  }

  // Which span it is of is known when all are there.
  bool processor_time(RankParts& own, const Event& event) {
    auto whole = own.whole_updates.find(event.start_ns);
    if (is_whole_update(event) && whole != own.whole_updates.end()) {
      for (const Share& share : shares_)
        own.processor.push_back({NodeType::update, key_of(event.iteration, share.layer),
                                 event.start_ns + part(whole->second, share.from),
                                 part(event.duration_ns, share.to - share.from)});
      own.whole_updates.erase(whole);  // it has one
      return true;
    }
    uint32_t layer = layer_of(event);
    if (layer >= model_.layers.size()) return false;
    own.processor.push_back(
        {NodeType::forward, key_of(event.iteration, layer), event.start_ns, event.duration_ns});
    return true;
  }

  bool ready(uint16_t rank, const Event& event) {
    if (event.tensor >= model_.tensors.size()) return false;
    RankParts& own = parts_.ranks[rank];
    uint32_t node = instant(NodeType::ready, rank, event, event.tensor);
    own.ready.add(key_of(event.iteration, event.tensor), event.start_ns, node);
    if (event.bucket == kNone) return true;
    own.ready_of_bucket.add(key_of(event.iteration, event.bucket), event.start_ns, node);
    uint32_t& bucket = parts_.bucket_of[event.tensor];
    if (bucket == kNobody) bucket = event.bucket;
    return true;
  }

  bool operation(uint16_t rank, const Event& event) {
    if (event.operation == kNone || event.bucket == kNone) return false;
    Operation known{event.operation, event.iteration, event.bucket, event.partition, event.bytes};
    parts_.operations.try_emplace(event.operation, known);
    if (event.kind == Kind::admitted) {
      parts_.admitted.add(event.operation, event.start_ns,
                          instant(NodeType::admitted, rank, event, event.operation));
      return true;
    }
    OperationOnRank on_rank;
    on_rank.number = event.operation;
    on_rank.node = instant(NodeType::operation, rank, event, event.operation);
    on_rank.bucket = key_of(event.iteration, event.bucket);
    on_rank.end_ns = event.end_ns();
    parts_.ranks[rank].operations.push_back(on_rank);
    return true;
  }

  bool chunk(uint16_t rank, const Event& event) {
    if (event.step == kNone16 || (event.shape != Shape::send && event.shape != Shape::receive))
      return false;
    bool sends = event.shape == Shape::send;
    Node node = node_of(sends ? NodeType::send : NodeType::receive, rank, event, event.operation);
    node.duration_ns = event.duration_ns;
    node.lane = event.lane;
    node.step = event.step;
    RankParts& own = parts_.ranks[rank];
    (sends ? own.sends : own.receives)
        .push_back({uint64_t{event.operation} << 16 | event.step, event.message, event.chunk,
                    parts_.add(node), event.peer});
    return true;
  }

  static Node node_of(NodeType type, uint16_t rank, const Event& event, uint32_t subject) {
    Node node;
    node.start_ns = event.start_ns;
    node.iteration = event.iteration;
    node.subject = subject;
    node.rank = rank;
    node.type = type;
    return node;
  }

  uint32_t instant(NodeType type, uint16_t rank, const Event& event, uint32_t subject) {
    return parts_.add(node_of(type, rank, event, subject));
  }

  Parts& parts_;
  const trace::Model& model_;
  std::vector<Share> shares_;
  size_t share_nodes_ = 0;
  size_t events_ = 0;
};

// A bucket is there when the last of its tensors is.
void add_buckets(Parts& parts, uint16_t rank) {
  RankParts& own = parts.ranks[rank];
  std::span<const Table::Entry> all = own.ready_of_bucket.all();
  for (size_t i = 0; i < all.size(); ++i) {
    if (i + 1 < all.size() && all[i + 1].key == all[i].key) continue;
    Node node;
    node.start_ns = all[i].time_ns;
    node.iteration = all[i].iteration();
    node.subject = all[i].subject();
    node.rank = rank;
    node.type = NodeType::bucket;
    own.bucket.add(all[i].key, node.start_ns, parts.add(node));
  }
  own.bucket.sort();
}

// The last halves of each operation, which end it.
void note_last(const std::vector<Node>& nodes, const std::vector<Half>& halves,
               std::vector<OperationOnRank>& operations, uint32_t OperationOnRank::*last) {
  auto at = operations.begin();
  for (const Half& half : halves) {
    while (at != operations.end() && at->number < half.operation()) ++at;
    if (at == operations.end()) return;
    if (at->number != half.operation()) continue;
    uint32_t& best = (*at).*last;
    if (best == kNobody || nodes[best].end_ns() < nodes[half.node].end_ns()) best = half.node;
  }
}

// The span that starts where the record says; of several the longest. What has none is dropped.
void find_spans(const std::vector<Node>& nodes, RankParts& own) {
  std::erase_if(own.processor, [&](ProcessorTime& time) {
    int64_t longest = -1;
    for (const Table* table : {&own.forward, &own.backward, &own.update})
      for (const Table::Entry& entry : table->of(time.key)) {
        const Node& node = nodes[entry.node];
        if (entry.time_ns != time.start_ns || node.duration_ns <= longest) continue;
        longest = node.duration_ns;
        time.type = node.type;
      }
    return longest < 0;
  });
}

void sort_rank(const std::vector<Node>& nodes, RankParts& own) {
  for (Table* table :
       {&own.forward, &own.backward, &own.update, &own.ready, &own.done, &own.ready_of_bucket})
    table->sort();
  find_spans(nodes, own);
  auto by_place = [](const Half& a, const Half& b) {
    return std::tie(a.place, a.chunk, a.peer, a.node) < std::tie(b.place, b.chunk, b.peer, b.node);
  };
  std::sort(own.sends.begin(), own.sends.end(), by_place);
  std::sort(own.receives.begin(), own.receives.end(), by_place);
  auto by_number = [](const OperationOnRank& a, const OperationOnRank& b) {
    return std::tie(a.number, a.node) < std::tie(b.number, b.node);
  };
  std::sort(own.operations.begin(), own.operations.end(), by_number);
  note_last(nodes, own.sends, own.operations, &OperationOnRank::last_send);
  note_last(nodes, own.receives, own.operations, &OperationOnRank::last_receive);
  std::sort(own.waits.begin(), own.waits.end(), [](const Interval& a, const Interval& b) {
    return std::tie(a.start_ns, a.end_ns) < std::tie(b.start_ns, b.end_ns);
  });
  for (size_t i = 1; i < own.waits.size(); ++i)
    own.waits[i].end_ns = std::max(own.waits[i].end_ns, own.waits[i - 1].end_ns);
}

}  // namespace

int stage_of(NodeType type) {
  switch (type) {
    case NodeType::forward: return 0;
    case NodeType::backward: return 1;
    case NodeType::ready: return 2;
    case NodeType::sum: return 3;
    case NodeType::bucket: return 4;
    case NodeType::admitted: return 5;
    case NodeType::operation: return 6;
    case NodeType::send: return 7;
    case NodeType::receive: return 8;
    case NodeType::done: return 9;
    case NodeType::update: return 10;
  }
  return 11;
}

bool is_compute(NodeType type) {
  return type == NodeType::forward || type == NodeType::backward || type == NodeType::update;
}

void Table::sort() {
  std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.key, a.time_ns, a.node) < std::tie(b.key, b.time_ns, b.node);
  });
}

std::span<const Table::Entry> Table::between(uint64_t low, uint64_t high) const {
  auto below = [](const Entry& entry, uint64_t key) { return entry.key < key; };
  auto above = [](uint64_t key, const Entry& entry) { return key < entry.key; };
  auto from = std::lower_bound(entries_.begin(), entries_.end(), low, below);
  auto to = std::upper_bound(from, entries_.end(), high, above);
  return {from, to};
}

uint32_t Table::first(uint64_t key) const {
  std::span<const Entry> found = of(key);
  return found.empty() ? kNobody : found.front().node;
}

uint32_t Table::last(uint64_t key) const {
  std::span<const Entry> found = of(key);
  return found.empty() ? kNobody : found.back().node;
}

std::vector<uint32_t> Table::iterations() const {
  std::vector<uint32_t> out;
  for (const Entry& entry : entries_)
    if (out.empty() || out.back() != entry.iteration()) out.push_back(entry.iteration());
  return out;
}

Parts collect(const trace::Trace& trace, const trace::Model& model, uint32_t ranks) {
  Parts parts;
  parts.ranks.resize(ranks);
  parts.bucket_of.assign(model.tensors.size(), kNobody);
  size_t events = 0;
  for (const trace::Process& process : trace.processes) events += process.events.size();
  parts.nodes.reserve(events);
  Collector collector(parts, model);
  // In the order of ranks, whatever the order of files: the same trace makes the same graph.
  for (uint32_t rank = 0; rank < ranks; ++rank)
    for (const Event& event : trace.of_rank(rank)->events)
      collector.take(static_cast<uint16_t>(rank), event);
  parts.admitted.sort();
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    sort_rank(parts.nodes, parts.ranks[rank]);
    add_buckets(parts, static_cast<uint16_t>(rank));
  }
  return parts;
}

}  // namespace weft::graph
