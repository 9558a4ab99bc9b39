#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <tuple>

#include "causes.h"
#include "parts.h"
#include "weft/plan.h"

namespace weft::graph {
namespace {

// What the recorded plan says that no event does. An absent answer is read from the events.
struct PlanFacts {
  std::optional<plan::Barrier> barrier;
  bool may_hold_back = true;  // by credit
};

PlanFacts facts_of(const trace::Environment& environment) {
  PlanFacts facts;
  if (environment.plan_text.empty()) return facts;
  if (auto plan = plan::parse(environment.plan_text)) {
    facts.barrier = plan->barrier;
    facts.may_hold_back = plan->credit.has_value();
  }
  return facts;
}

class Connector {
 public:
  Connector(Parts& parts, const trace::Model& model, const trace::Environment& environment,
            const std::vector<uint32_t>& host_of)
      : parts_(parts),
        model_(model),
        facts_(facts_of(environment)),
        real_(!environment.emulated_compute && !environment.predicted),
        programs_(host_of, environment) {}

  Edges run() {
    know_layers();
    if (!facts_.barrier) facts_.barrier = seems_held() ? plan::Barrier::all : plan::Barrier::tensor;
    for (RankParts& own : parts_.ranks) {
      run_program(own);
      make_ready(own);
      use_sums(own);
    }
    make_sums();
    admit();
    for (RankParts& own : parts_.ranks) {
      run_operations(own, static_cast<uint32_t>(&own - parts_.ranks.data()));
      run_lanes(own);
      end_tensors(own);
      hold_at_barrier(own);
      share_device(own);
    }
    match_messages();
    remark();
    return std::move(edges_);
  }

 private:
  bool is_layer(uint32_t layer) const { return layer < model_.layers.size(); }
  const Node& node(uint32_t index) const { return parts_.nodes[index]; }

  void require(uint32_t from, uint32_t to) {
    if (from != kNobody && to != kNobody) edges_.required.push_back({from, to});
  }
  void record(uint32_t from, uint32_t to) {
    if (from != kNobody && to != kNobody) edges_.recorded.push_back({from, to});
  }

  // Dependencies between layers, whichever tensors they stand for.
  void know_layers() {
    consumers_.resize(model_.layers.size());
    producers_.resize(model_.layers.size());
    for (const trace::Tensor& tensor : model_.tensors) {
      if (!is_layer(tensor.updated_by)) continue;
      if (is_layer(tensor.consumed_by)) consumers_[tensor.updated_by].push_back(tensor.consumed_by);
      if (is_layer(tensor.produced_by)) producers_[tensor.updated_by].push_back(tensor.produced_by);
    }
    for (auto* lists : {&consumers_, &producers_})
      for (std::vector<uint32_t>& layers : *lists) {
        std::sort(layers.begin(), layers.end());
        layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
      }
  }

  // Calls `use` with those of `layers` that `table` has in that iteration, and never takes longer
  // than the shorter of the two lists.
  template <typename Use>
  static void each_present(const Table& table, uint32_t iteration,
                           const std::vector<uint32_t>& layers, Use use) {
    std::span<const Table::Entry> entries = table.of_iteration(iteration);
    if (layers.size() <= entries.size()) {
      for (uint32_t layer : layers) use(layer);
      return;
    }
    uint32_t before = kNobody;
    for (const Table::Entry& entry : entries) {
      if (entry.subject() == before) continue;
      before = entry.subject();
      if (std::binary_search(layers.begin(), layers.end(), before)) use(before);
    }
  }

  // ---- required ------------------------------------------------------------------------------

  // Forward of the first layer to the last, backward of the last to the first. Real programs do not
  // always name their layers in the order in which they compute them: theirs is as it was.
  std::vector<uint32_t> program(const RankParts& own, uint32_t iteration) const {
    std::vector<uint32_t> out;
    if (real_) {
      for (const Table* table : {&own.forward, &own.backward})
        for (const Table::Entry& entry : table->of_iteration(iteration)) out.push_back(entry.node);
      std::stable_sort(out.begin(), out.end(), [&](uint32_t a, uint32_t b) {
        return node(a).start_ns + node(a).duration_ns / 2 <
               node(b).start_ns + node(b).duration_ns / 2;
      });
      return out;
    }
    for (const Table::Entry& entry : own.forward.of_iteration(iteration)) out.push_back(entry.node);
    std::span<const Table::Entry> back = own.backward.of_iteration(iteration);
    for (size_t end = back.size(); end > 0;) {
      size_t first = end - 1;
      while (first > 0 && back[first - 1].key == back[end - 1].key) --first;
      for (size_t i = first; i < end; ++i) out.push_back(back[i].node);
      end = first;
    }
    return out;
  }

  void run_program(const RankParts& own) {
    std::vector<uint32_t> iterations = own.forward.iterations();
    std::vector<uint32_t> backward = own.backward.iterations();
    std::vector<uint32_t> all;
    std::set_union(iterations.begin(), iterations.end(), backward.begin(), backward.end(),
                   std::back_inserter(all));
    uint32_t before = kNobody;
    for (size_t i = 0; i < all.size(); ++i) {
      std::vector<uint32_t> steps = program(own, all[i]);
      if (i > 0 && all[i - 1] + 1 == all[i]) require(before, steps.front());
      for (size_t k = 1; k < steps.size(); ++k) require(steps[k - 1], steps[k]);
      before = steps.back();
    }
  }

  void make_ready(const RankParts& own) {
    for (const Table::Entry& entry : own.ready.all()) {
      uint32_t layer = model_.tensors[entry.subject()].produced_by;
      if (is_layer(layer)) require(own.backward.last(key_of(entry.iteration(), layer)), entry.node);
    }
  }

  void use_sums(const RankParts& own) {
    for (const Table::Entry& entry : own.done.all()) {
      const trace::Tensor& tensor = model_.tensors[entry.subject()];
      uint32_t update = kNobody;
      if (is_layer(tensor.updated_by))
        update = own.update.first(key_of(entry.iteration(), tensor.updated_by));
      if (update != kNobody)
        require(entry.node, update);
      else if (is_layer(tensor.consumed_by))
        require(entry.node, own.forward.first(key_of(entry.iteration() + 1, tensor.consumed_by)));
    }
    for (const Table::Entry& entry : own.update.all()) {
      uint32_t iteration = entry.iteration();
      if (entry.node == own.update.last(entry.key))
        each_present(own.forward, iteration + 1, consumers_[entry.subject()], [&](uint32_t layer) {
          const uint32_t forward = own.forward.first(key_of(iteration + 1, layer));
          // Of a layer whose forward was over, something is used only behind it.
          if (forward != kNobody && node(forward).end_ns() >= node(entry.node).end_ns())
            require(entry.node, forward);
        });
      // Where nothing travelled an update needs what its own backward made.
      if (entry.node != own.update.first(entry.key) || !own.done.of_iteration(iteration).empty())
        continue;
      each_present(own.backward, iteration, producers_[entry.subject()], [&](uint32_t layer) {
        require(own.backward.last(key_of(iteration, layer)), entry.node);
      });
    }
  }

  // A sum is where the gradients of all ranks meet.
  void make_sums() {
    std::vector<Table::Entry> all;
    for (const RankParts& own : parts_.ranks)
      all.insert(all.end(), own.ready.all().begin(), own.ready.all().end());
    std::sort(all.begin(), all.end(), [](const Table::Entry& a, const Table::Entry& b) {
      return std::tie(a.key, a.time_ns, a.node) < std::tie(b.key, b.time_ns, b.node);
    });
    for (size_t first = 0, end = 0; first < all.size(); first = end) {
      while (end < all.size() && all[end].key == all[first].key) ++end;
      Node sum = node(all[end - 1].node);
      sum.type = NodeType::sum;
      uint32_t index = parts_.add(sum);
      for (size_t i = first; i < end; ++i) require(all[i].node, index);
      if (end - first < parts_.ranks.size()) ++lonely_sums_;
      for (const RankParts& own : parts_.ranks) {
        uint32_t done = own.done.first(all[first].key);
        if (done == kNobody) ++never_done_;
        require(index, done);
      }
    }
  }

  // ---- recorded ------------------------------------------------------------------------------

  void admit() {
    std::vector<OperationOnRank> by_end = parts_.ranks[0].operations;
    std::sort(by_end.begin(), by_end.end(), [](const OperationOnRank& a, const OperationOnRank& b) {
      return std::tie(a.end_ns, a.number) < std::tie(b.end_ns, b.number);
    });
    for (RankParts& own : parts_.ranks) {
      for (const Table::Entry& entry : own.ready_of_bucket.all())
        record(entry.node, own.bucket.first(entry.key));
    }
    for (const auto& [number, operation] : parts_.operations) {
      uint32_t admitted = parts_.admitted.first(number);
      if (admitted == kNobody) {
        start_alone(operation);
        continue;
      }
      int64_t ready_ns = std::numeric_limits<int64_t>::min();
      for (const RankParts& own : parts_.ranks) {
        uint32_t bucket = own.bucket.first(key_of(operation.iteration, operation.bucket));
        if (bucket == kNobody) continue;
        record(bucket, admitted);
        ready_ns = std::max(ready_ns, node(bucket).end_ns());
      }
      if (facts_.may_hold_back) hold_back(by_end, number, admitted, ready_ns);
    }
  }

  // Where nobody admits, each rank starts when its own bucket is there.
  void start_alone(const Operation& operation) {
    if (!parts_.admitted.all().empty()) {
      ++never_admitted_;
      return;
    }
    for (const RankParts& own : parts_.ranks) {
      auto at = std::lower_bound(
          own.operations.begin(), own.operations.end(), operation.number,
          [](const OperationOnRank& a, uint32_t number) { return a.number < number; });
      if (at == own.operations.end() || at->number != operation.number) continue;
      record(own.bucket.first(key_of(operation.iteration, operation.bucket)), at->node);
    }
  }

  // Ready everywhere at `ready_ns`, yet admitted only when another operation had ended.
  void hold_back(const std::vector<OperationOnRank>& by_end, uint32_t number, uint32_t admitted,
                 int64_t ready_ns) {
    int64_t at = node(admitted).start_ns;
    auto after = std::upper_bound(
        by_end.begin(), by_end.end(), at,
        [](int64_t time, const OperationOnRank& operation) { return time < operation.end_ns; });
    if (after == by_end.begin()) return;
    const OperationOnRank& freed = *std::prev(after);
    if (freed.end_ns <= ready_ns || freed.number >= number) return;
    record(last_of(freed), admitted);
  }

  // The node whose end is the operation's, within what the rank needs to notice it.
  uint32_t last_of(const OperationOnRank& operation) const {
    uint32_t last = operation.node;
    for (uint32_t half : {operation.last_send, operation.last_receive})
      if (half != kNobody && node(half).end_ns() > node(last).end_ns()) last = half;
    return last;
  }

  void run_operations(const RankParts& own, uint32_t rank) {
    for (const OperationOnRank& operation : own.operations)
      record(parts_.admitted.first(operation.number), operation.node);
    auto operation = own.operations.begin();
    std::span<const Half> left = own.sends;
    while (!left.empty()) {
      uint32_t number = left.front().operation();
      size_t count = 0;
      while (count < left.size() && left[count].operation() == number) ++count;
      while (operation != own.operations.end() && operation->number < number) ++operation;
      bool known = operation != own.operations.end() && operation->number == number;
      run_sends(own, rank, known ? operation->node : kNobody, left.first(count));
      left = left.subspan(count);
    }
  }

  // The sends of one operation: each waits for what its algorithm says, or for the start.
  void run_sends(const RankParts& own, uint32_t rank, uint32_t begun, std::span<const Half> sends) {
    if (begun == kNobody) without_operation_ += sends.size();
    auto operation = parts_.operations.find(sends.front().operation());
    const Causes* causes = nullptr;
    if (operation != parts_.operations.end())
      causes = programs_.of(rank, operation->second.bytes, sends);
    for (const Half& half : sends) {
      waits_for_.clear();
      size_t missing =
          causes != nullptr ? find_causes(own, *causes, half) : find_in_ring(own, half);
      without_cause_ += missing > 0 ? 1 : 0;
      for (uint32_t receive : waits_for_) record(receive, half.node);
      // A chunk may come before the rank was told to start; then the start lets it go on.
      bool early = begun != kNobody &&
                   std::all_of(waits_for_.begin(), waits_for_.end(), [&](uint32_t receive) {
                     return node(receive).end_ns() < node(begun).start_ns;
                   });
      if (early || missing > 0) record(begun, half.node);
    }
  }

  // Fills waits_for_. Returns how many of them have no record.
  size_t find_causes(const RankParts& own, const Causes& causes, const Half& half) {
    size_t missing = 0;
    uint64_t operation = half.place & ~uint64_t{0xffff};
    for (const schedule::Receive* receive :
         causes.of(*causes.find(half.peer, {half.step(), half.chunk}))) {
      auto key = std::tuple(operation | receive->id.step, receive->id.chunk,
                            static_cast<uint16_t>(receive->peer));
      auto found = std::lower_bound(own.receives.begin(), own.receives.end(), key,
                                    [](const Half& a, const auto& sought) {
                                      return std::tuple(a.place, a.chunk, a.peer) < sought;
                                    });
      if (found != own.receives.end() &&
          std::tuple(found->place, found->chunk, found->peer) == key) {
        waits_for_.push_back(found->node);
      } else {
        ++missing;
      }
    }
    return missing;
  }

  // In a ring what is sent in a step is what came in the step before.
  size_t find_in_ring(const RankParts& own, const Half& half) {
    if (half.step() == 0) return 0;
    auto key = std::pair(half.place - 1, half.chunk);
    auto found = std::lower_bound(
        own.receives.begin(), own.receives.end(), key,
        [](const Half& a, const auto& sought) { return std::pair(a.place, a.chunk) < sought; });
    if (found == own.receives.end() || std::pair(found->place, found->chunk) != key) return 1;
    waits_for_.push_back(found->node);
    return 0;
  }

  void run_lanes(const RankParts& own) {
    std::vector<std::pair<uint16_t, uint32_t>> sends;  // peer, node
    sends.reserve(own.sends.size());
    for (const Half& half : own.sends)
      if (node(half.node).lane != kNoLane) sends.emplace_back(half.peer, half.node);
    std::sort(sends.begin(), sends.end(), [&](const auto& a, const auto& b) {
      const Node &x = node(a.second), &y = node(b.second);
      return std::tie(a.first, x.lane, x.start_ns, x.duration_ns, a.second) <
             std::tie(b.first, y.lane, y.start_ns, y.duration_ns, b.second);
    });
    for (size_t i = 1; i < sends.size(); ++i) {
      auto [peer, before] = sends[i - 1];
      if (peer == sends[i].first && node(before).lane == node(sends[i].second).lane)
        record(before, sends[i].second);
    }
  }

  // A tensor is done when the last operation with a part of it has ended.
  void end_tensors(const RankParts& own) {
    std::vector<OperationOnRank> by_bucket = own.operations;
    std::sort(
        by_bucket.begin(), by_bucket.end(), [](const OperationOnRank& a, const OperationOnRank& b) {
          return std::tie(a.bucket, a.end_ns, a.number) < std::tie(b.bucket, b.end_ns, b.number);
        });
    for (const Table::Entry& done : own.done.all()) {
      uint32_t bucket = parts_.bucket_of[done.subject()];
      if (bucket == kNobody) continue;
      uint64_t key = key_of(done.iteration(), bucket);
      auto after =
          std::upper_bound(by_bucket.begin(), by_bucket.end(), std::pair(key, done.time_ns),
                           [](const auto& at, const OperationOnRank& operation) {
                             return at < std::pair(operation.bucket, operation.end_ns);
                           });
      if (after == by_bucket.begin() || std::prev(after)->bucket != key) {
        ++without_end_;
        continue;
      }
      const OperationOnRank& last = *std::prev(after);
      record(last.last_receive, done.node);
      record(last.last_send, done.node);
      if (last_of(last) == last.node) record(last.node, done.node);
    }
  }

  // What the device did first after the tensors of that iteration were done.
  static const Table::Entry* first_after(const RankParts& own, uint32_t iteration) {
    std::span<const Table::Entry> held = own.update.of_iteration(iteration);
    if (held.empty()) held = own.forward.of_iteration(iteration + 1);
    auto first = std::min_element(
        held.begin(), held.end(),
        [](const Table::Entry& a, const Table::Entry& b) { return a.time_ns < b.time_ns; });
    return first == held.end() ? nullptr : &*first;
  }

  // Where no plan is known: whether nothing ever went on before all was done.
  bool seems_held() const {
    for (const RankParts& own : parts_.ranks)
      for (uint32_t iteration : own.done.iterations()) {
        const Table::Entry* first = first_after(own, iteration);
        if (first == nullptr) continue;
        for (const Table::Entry& done : own.done.of_iteration(iteration))
          if (done.time_ns > first->time_ns) return false;
      }
    return true;
  }

  // The plan let nothing go on before all was done.
  void hold_at_barrier(const RankParts& own) {
    if (facts_.barrier == plan::Barrier::tensor) return;
    for (uint32_t iteration : own.done.iterations()) {
      const Table::Entry* first = first_after(own, iteration);
      if (first == nullptr) continue;
      for (const Table::Entry& done : own.done.of_iteration(iteration))
        record(done.node, first->node);
    }
  }

  // Updates stand in a device's program where the plan's barrier put them.
  void share_device(const RankParts& own) {
    std::vector<uint32_t> steps;
    for (const Table* table : {&own.forward, &own.backward, &own.update})
      for (const Table::Entry& entry : table->all()) steps.push_back(entry.node);
    // By their middles: starts are read with an error that exceeds the length of some steps.
    std::sort(steps.begin(), steps.end(), [&](uint32_t a, uint32_t b) {
      const Node &x = node(a), &y = node(b);
      int64_t middle_x = x.start_ns + x.duration_ns / 2, middle_y = y.start_ns + y.duration_ns / 2;
      int stage_x = stage_of(x.type), stage_y = stage_of(y.type);
      return std::tie(middle_x, stage_x, x.iteration, x.subject, a) <
             std::tie(middle_y, stage_y, y.iteration, y.subject, b);
    });
    for (size_t i = 1; i < steps.size(); ++i) {
      bool update =
          node(steps[i - 1]).type == NodeType::update || node(steps[i]).type == NodeType::update;
      if (update) record(steps[i - 1], steps[i]);
    }
  }

  void match_messages() {
    std::vector<std::pair<uint64_t, uint32_t>> sends, receives;
    for (const RankParts& own : parts_.ranks) {
      for (const Half& half : own.sends)
        if (half.message != 0) sends.emplace_back(half.message, half.node);
      for (const Half& half : own.receives)
        if (half.message != 0) receives.emplace_back(half.message, half.node);
    }
    std::sort(sends.begin(), sends.end());
    std::sort(receives.begin(), receives.end());
    auto send = sends.begin();
    size_t matched = 0;
    for (auto [message, receive] : receives) {
      while (send != sends.end() && send->first < message) ++send;
      if (send == sends.end() || send->first != message) continue;
      record(send->second, receive);
      ++matched;
    }
    lost_sends_ = receives.size() - matched;
    lost_receives_ = sends.size() - std::min(sends.size(), matched);
  }

  void remark() {
    auto say = [&](uint64_t count, const char* what) {
      if (count > 0)
        edges_.remarks.push_back(text("%llu %s", static_cast<unsigned long long>(count), what));
    };
    say(lonely_sums_, "sums of a tensor lack the gradient of at least one rank");
    say(never_done_, "sums never reached a rank");
    say(never_admitted_, "operations have no record of their admission");
    say(without_operation_, "sent chunks belong to an operation that has no record on their rank");
    say(without_cause_, "sent chunks lack the record of the chunk that they pass on");
    say(without_end_, "done tensors lack the operation that ended them");
    say(lost_sends_, "received messages have no record of being sent");
    say(lost_receives_, "sent messages have no record of being received");
  }

  Parts& parts_;
  const trace::Model& model_;
  PlanFacts facts_;
  const bool real_;  // and not emulated by timers, whose starts are read late, nor predicted
  Programs programs_;
  std::vector<uint32_t> waits_for_;               // receives, of the send at hand
  std::vector<std::vector<uint32_t>> consumers_;  // by the layer of an update
  std::vector<std::vector<uint32_t>> producers_;
  Edges edges_;
  uint64_t lonely_sums_ = 0;
  uint64_t never_done_ = 0;
  uint64_t never_admitted_ = 0;
  uint64_t without_operation_ = 0;
  uint64_t without_cause_ = 0;
  uint64_t without_end_ = 0;
  uint64_t lost_sends_ = 0;
  uint64_t lost_receives_ = 0;
};

}  // namespace

Edges connect(Parts& parts, const trace::Model& model, const trace::Environment& environment,
              const std::vector<uint32_t>& host_of) {
  return Connector(parts, model, environment, host_of).run();
}

}  // namespace weft::graph
