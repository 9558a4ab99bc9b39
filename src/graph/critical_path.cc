#include <algorithm>
#include <numeric>

#include "parts.h"

namespace weft::graph {
namespace {

constexpr uint32_t kRequired = 1u << 31;

// Walks back from the end of an iteration, from each node to what it waited for.
class Walk {
 public:
  Walk(const Graph& graph, const Predecessors& predecessors, size_t index)
      : graph_(graph),
        predecessors_(predecessors),
        iteration_(graph.iterations[index]),
        lane_steps_(graph.nodes.size()) {
    auto last = std::max_element(iteration_.end_ns.begin(), iteration_.end_ns.end());
    rank_ = static_cast<uint16_t>(last - iteration_.end_ns.begin());
    begin_ = iteration_.start_ns[rank_];
    cursor_ = *last;
  }

  std::vector<Stretch> run() {
    uint32_t at = next_forward();
    if (at == kNobody) {
      at = last_before_end();
      if (at != kNobody) spend(Spent::host, end_of(at), at);
    }
    uint32_t earliest = at == kNobody ? 0 : at;
    while (at != kNobody && cursor_ > begin_) {
      earliest = at;
      at = step(at);
    }
    spend(Spent::host, begin_, earliest);
    std::reverse(stretches_.begin(), stretches_.end());
    return std::move(stretches_);
  }

 private:
  const Node& node(uint32_t index) const { return graph_.nodes[index]; }
  int64_t end_of(uint32_t index) const { return node(index).end_ns(); }

  // What lies between `from` and where the walk stands went into `spent`.
  void spend(Spent spent, int64_t from, uint32_t at) {
    from = std::clamp(from, begin_, cursor_);
    if (from == cursor_) return;
    stretches_.push_back({spent, from, cursor_, node(at).rank, at});
    cursor_ = from;
  }

  // The next iteration's start on this rank, which is where this one ends.
  uint32_t next_forward() const {
    auto at = std::lower_bound(graph_.nodes.begin(), graph_.nodes.end(), cursor_,
                               [](const Node& n, int64_t time) { return n.start_ns < time; });
    for (; at != graph_.nodes.end() && at->start_ns == cursor_; ++at)
      if (at->type == NodeType::forward && at->rank == rank_ &&
          at->iteration == iteration_.number + 1)
        return static_cast<uint32_t>(at - graph_.nodes.begin());
    return kNobody;
  }

  // Without one: what this rank did last before the end.
  uint32_t last_before_end() const {
    auto at = std::upper_bound(graph_.nodes.begin(), graph_.nodes.end(), cursor_,
                               [](int64_t time, const Node& n) { return time < n.start_ns; });
    uint32_t best = kNobody;
    int64_t best_end = 0;
    while (at != graph_.nodes.begin()) {
      --at;
      if (at->start_ns < begin_) break;
      bool counts = is_compute(at->type) ? at->start_ns < cursor_ : at->type == NodeType::done;
      if (!counts || at->rank != rank_ || at->iteration > iteration_.number) continue;
      int64_t end = std::min(at->end_ns(), cursor_);
      if (best != kNobody && end <= best_end) continue;
      best = static_cast<uint32_t>(at - graph_.nodes.begin());
      best_end = end;
    }
    return best;
  }

  // Of what `at` waited for, what came last; of equals the first. Clocks may disagree a little, so
  // what seems to end after `at` did counts as ending with it.
  template <typename Allowed>
  uint32_t cause_among(uint32_t at, Allowed allowed) const {
    uint32_t best = kNobody;
    int64_t best_end = 0;
    for (Predecessors::In in : predecessors_.of(at)) {
      if (!allowed(node(in.from).type)) continue;
      int64_t end = std::min(end_of(in.from), end_of(at));
      if (best != kNobody && end <= best_end) continue;
      best = in.from;
      best_end = end;
    }
    return best;
  }
  uint32_t cause_of(uint32_t at) const {
    return cause_among(at, [](NodeType) { return true; });
  }

  // Spends the time since the cause of `at`; returns the node at which to go on.
  uint32_t step(uint32_t at) {
    switch (node(at).type) {
      case NodeType::forward:
      case NodeType::backward:
      case NodeType::update: return through_compute(at);
      case NodeType::admitted: return through_admission(at);
      case NodeType::send: return through_send(at);
      default: break;
    }
    uint32_t cause = cause_of(at);
    if (cause != kNobody) spend(between(node(cause).type, node(at).type), end_of(cause), at);
    return cause;
  }

  static Spent between(NodeType cause, NodeType effect) {
    if (effect == NodeType::operation) return Spent::control;
    if (effect == NodeType::receive) return Spent::transfer;
    // Of a communication that left no record but its end, all is transfer.
    if (effect == NodeType::done) return cause == NodeType::sum ? Spent::transfer : Spent::control;
    return Spent::host;
  }

  uint32_t through_compute(uint32_t at) {
    uint32_t cause = cause_of(at);
    int64_t since = cause == kNobody ? begin_ : end_of(cause);
    int64_t start = std::max(since, node(at).start_ns);
    spend(Spent::wait_for_rank, std::max(start, end_of(at) - excess_of(node(at))), at);
    spend(Spent::compute, start, at);
    if (cause != kNobody) spend(Spent::host, since, at);
    return cause;
  }

  // Held back by credit: for tensors of its own bucket, and then the path goes through these; or
  // for others, and then it was ready and waited for credit.
  uint32_t through_admission(uint32_t at) {
    uint32_t cause = cause_of(at);
    if (cause == kNobody) return cause;
    uint32_t bucket = cause_among(at, [](NodeType type) { return type == NodeType::bucket; });
    bool held = node(cause).type != NodeType::bucket;
    if (bucket == kNobody || (held && same_bucket(node(cause), node(at)))) {
      spend(Spent::control, end_of(cause), at);
      return cause;
    }
    spend(held ? Spent::wait_for_credit : Spent::control, end_of(bucket), at);
    return bucket;
  }

  // What is sent before it on the lane is transfer too, if it is of the same bucket.
  uint32_t through_send(uint32_t at) {
    auto on_lane = [](NodeType type) { return type == NodeType::send; };
    spend(Spent::transfer, node(at).start_ns, at);
    uint32_t data = cause_among(at, [&](NodeType type) { return !on_lane(type); });
    uint32_t before = cause_among(at, on_lane);
    if (data == kNobody) {
      if (before != kNobody) spend(Spent::wait_for_lane, end_of(before), at);
      return before;
    }
    int64_t since = std::max(begin_, end_of(data));
    for (; before != kNobody && end_of(before) > since && cursor_ > since && lane_steps_ > 0;
         before = cause_among(before, on_lane), --lane_steps_)
      wait_until(since, before, at);
    spend(Spent::transfer, since, at);
    return data;
  }

  // While `before` had the lane. Adds to the stretch that follows, if it is of the same kind.
  void wait_until(int64_t since, uint32_t before, uint32_t at) {
    Spent spent = same_bucket(node(before), node(at)) ? Spent::transfer : Spent::wait_for_lane;
    int64_t from = std::clamp(node(before).start_ns, since, cursor_);
    if (!stretches_.empty() && stretches_.back().node == at && stretches_.back().spent == spent) {
      stretches_.back().start_ns = from;
      cursor_ = from;
    } else {
      spend(spent, from, at);
    }
  }

  // Of the tensors that travel together. Both are about operations.
  bool same_bucket(const Node& a, const Node& b) const {
    if (a.subject == b.subject) return true;
    const Operation *x = operation(a.subject), *y = operation(b.subject);
    return x != nullptr && y != nullptr && x->iteration == y->iteration && x->bucket == y->bucket;
  }

  const Operation* operation(uint32_t number) const {
    auto found = std::lower_bound(
        graph_.operations.begin(), graph_.operations.end(), number,
        [](const Operation& operation, uint32_t wanted) { return operation.number < wanted; });
    if (found == graph_.operations.end() || found->number != number) return nullptr;
    return &*found;
  }

  // How much longer than on the median rank it took.
  int64_t excess_of(const Node& compute) const {
    auto found = std::lower_bound(
        graph_.iterations.begin(), graph_.iterations.end(), compute.iteration,
        [](const Iteration& iteration, uint32_t number) { return iteration.number < number; });
    if (found == graph_.iterations.end() || found->number != compute.iteration) return 0;
    std::vector<int64_t> took;
    for (const std::vector<LayerTimes>& layers : found->layers)
      took.push_back(time_of(layers[compute.subject], compute.type));
    // Of an even number the lower: of two ranks the slower one is waited for.
    auto middle = took.begin() + static_cast<ptrdiff_t>((took.size() - 1) / 2);
    std::nth_element(took.begin(), middle, took.end());
    return std::max<int64_t>(0, compute.duration_ns - *middle);
  }

  static int64_t time_of(const LayerTimes& times, NodeType type) {
    if (type == NodeType::forward) return times.forward_ns;
    return type == NodeType::backward ? times.backward_ns : times.update_ns;
  }

  const Graph& graph_;
  const Predecessors& predecessors_;
  const Iteration& iteration_;
  uint16_t rank_ = 0;
  int64_t begin_ = 0;
  int64_t cursor_ = 0;  // all after it is spent
  size_t lane_steps_;   // more than a sound trace needs: no lane is walked twice
  std::vector<Stretch> stretches_;
};

}  // namespace

Predecessors::Predecessors(const Graph& graph) {
  size_t nodes = graph.nodes.size();
  first_.assign(nodes + 1, 0);
  for (const auto* edges : {&graph.required, &graph.recorded})
    for (const Edge& edge : *edges) ++first_[edge.to + 1];
  std::partial_sum(first_.begin(), first_.end(), first_.begin());
  from_.resize(first_.back());
  std::vector<uint32_t> next(first_.begin(), first_.end() - 1);
  for (const Edge& edge : graph.required) from_[next[edge.to]++] = edge.from | kRequired;
  for (const Edge& edge : graph.recorded) from_[next[edge.to]++] = edge.from;
}

std::vector<Predecessors::In> Predecessors::of(uint32_t to) const {
  std::vector<In> out;
  if (to + size_t{1} >= first_.size()) return out;
  for (uint32_t i = first_[to]; i < first_[to + 1]; ++i)
    out.push_back({from_[i] & ~kRequired, (from_[i] & kRequired) != 0});
  return out;
}

const char* name_of(Spent spent) {
  switch (spent) {
    case Spent::compute: return "compute";
    case Spent::transfer: return "transfer";
    case Spent::wait_for_rank: return "wait_for_rank";
    case Spent::wait_for_lane: return "wait_for_lane";
    case Spent::wait_for_credit: return "wait_for_credit";
    case Spent::control: return "control";
    case Spent::host: return "host";
  }
  return "unknown";
}

std::vector<Stretch> critical_path(const Graph& graph, const Predecessors& predecessors,
                                   size_t index) {
  if (index >= graph.iterations.size()) return {};
  return Walk(graph, predecessors, index).run();
}

}  // namespace weft::graph
