#include "edits.h"

#include <algorithm>
#include <unordered_map>

namespace weft::optimize {
namespace {

using plan::BucketSpec;
using plan::Plan;

// A size, its half and its double, and values worth a jump; only what the range allows.
std::vector<Bytes> sizes_near(Bytes size, Range range, std::initializer_list<Bytes> jumps) {
  std::vector<Bytes> out;
  auto add = [&](Bytes candidate) {
    candidate = std::clamp(candidate, range.least, range.most);
    if (candidate != size && std::find(out.begin(), out.end(), candidate) == out.end())
      out.push_back(candidate);
  };
  add({size.count / 2});
  add({size.count * 2});
  for (Bytes jump : jumps) add(jump);
  return out;
}

std::vector<Plan> lanes_edits(const Plan& plan, const Space& space) {
  std::vector<uint32_t> counts = {1, 2, 3, 4, 6, 8, 12, 16, plan.lanes - 1, plan.lanes + 1};
  if (space.filling_lanes) counts.insert(counts.end(), {*space.filling_lanes});
  if (space.spare_lanes()) counts.push_back(*space.spare_lanes());
  counts.push_back(space.max_lanes);
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  std::vector<Plan> out;
  for (uint32_t lanes : counts) {
    if (lanes < 1 || lanes > space.max_lanes || lanes == plan.lanes) continue;
    out.push_back(plan);
    out.back().lanes = lanes;
    out.back().lane_workers = std::min(plan.lane_workers, lanes);
  }
  return out;
}

// One algorithm for all sizes, or one for small pieces and the present one for the rest.
std::vector<Plan> algorithm_edits(const Plan& plan, const Space& space) {
  std::vector<Plan> out;
  auto layout = schedule::make_layout(schedule::scaled(plan, space.shrink), space.tensors);
  if (!layout) return out;
  std::vector<std::vector<schedule::Algorithm>> seen;
  auto is_new = [&](const Plan& candidate) {
    plan::Plan sized = schedule::scaled(candidate, space.shrink);
    std::vector<schedule::Algorithm> used;
    for (const schedule::Piece& piece : layout->pieces)
      used.push_back(
          schedule::algorithm_for(sized, piece.elements * schedule::kElementBytes, space.choice));
    if (std::find(seen.begin(), seen.end(), used) != seen.end()) return false;
    seen.push_back(std::move(used));
    return true;
  };
  is_new(plan);
  auto add = [&](std::vector<plan::AlgorithmRule> rules) {
    Plan candidate = plan;
    candidate.algorithm = std::move(rules);
    if (is_new(candidate)) out.push_back(std::move(candidate));
  };
  std::string rest = plan.algorithm.back().use;
  // Two ranks have one peer each: what is left to choose is the number of steps.
  std::vector<const char*> all = {"ring"};
  if (space.ranks > 2) all = {"ring", "halving_doubling", "tree", "direct"};
  for (const char* algorithm : all) add({{std::nullopt, algorithm}});
  std::vector<const char*> small = {"doubling"};
  if (space.ranks > 2) small = {"doubling", "halving_doubling", "direct"};
  for (const char* algorithm : small)
    for (Bytes up_to : {kib(256), mib(1), mib(4)})
      if (algorithm != rest) add({{up_to, algorithm}, {std::nullopt, rest}});
  return out;
}

std::vector<Plan> worker_edits(const Plan& plan) {
  std::vector<Plan> out;
  for (auto worker : {plan::LaneWorker::thread, plan::LaneWorker::process})
    for (uint32_t workers : {1u, 2u, 4u}) {
      if (workers > plan.lanes) continue;
      if (worker == plan.lane_worker && workers == plan.lane_workers) continue;
      out.push_back(plan);
      out.back().lane_worker = worker;
      out.back().lane_workers = workers;
    }
  return out;
}

std::vector<Plan> bucket_edits(const Plan& plan, const Space& space) {
  std::vector<plan::BucketRule> rules;
  plan::BucketRule rule = plan.bucket_rule;
  auto add = [&](Bytes first, Bytes size, bool may_exceed) {
    plan::BucketRule made{first, size, may_exceed};
    if (made != rule && std::find(rules.begin(), rules.end(), made) == rules.end())
      rules.push_back(made);
  };
  for (Bytes size : sizes_near(rule.size, space.bucket, {space.expert.bucket_rule.size})) {
    add(rule.first, size, rule.may_exceed);
    add(size, size, rule.may_exceed);
  }
  for (Bytes first : sizes_near(rule.first, space.bucket, {rule.size}))
    add(first, rule.size, rule.may_exceed);
  add(rule.first, rule.size, !rule.may_exceed);
  std::vector<Plan> out;
  for (const plan::BucketRule& made : rules) {
    out.push_back(plan);
    out.back().bucket_rule = made;
    // A rule says nothing where every tensor is in a group.
    if (space.has("boundaries")) out.back().buckets = space.expert.buckets;
  }
  return out;
}

std::vector<Plan> optional_size_edits(const Plan& plan, std::optional<Bytes> Plan::*field,
                                      Range range, Bytes usual) {
  std::vector<std::optional<Bytes>> values;
  const std::optional<Bytes>& now = plan.*field;
  if (now) {
    values.emplace_back(std::nullopt);
    for (Bytes size : sizes_near(*now, range, {usual})) values.emplace_back(size);
  } else {
    // From "none" there is no neighbour: all usual sizes.
    for (uint64_t size = range.least.count; size <= usual.count * 4; size *= 2)
      values.emplace_back(std::min(Bytes{size}, range.most));
  }
  std::vector<Plan> out;
  for (const std::optional<Bytes>& value : values) {
    out.push_back(plan);
    out.back().*field = value;
  }
  return out;
}

std::vector<Plan> chunk_edits(const Plan& plan, const Space& space) {
  std::vector<Plan> out;
  for (Bytes size : sizes_near(plan.chunk, space.chunk, {space.expert.chunk})) {
    out.push_back(plan);
    out.back().chunk = size;
  }
  return out;
}

void flip_order(Plan& plan) {
  plan.order = plan.order == plan::Order::ready ? plan::Order::layer : plan::Order::ready;
}

void flip_barrier(Plan& plan) {
  plan.barrier = plan.barrier == plan::Barrier::all ? plan::Barrier::tensor : plan::Barrier::all;
}

// ---- boundaries ----------------------------------------------------------------------------

// What two buckets become as one; nothing when they cannot be.
std::optional<BucketSpec> merged(const BucketSpec& a, const BucketSpec& b) {
  if (a.codec != b.codec) return std::nullopt;
  BucketSpec out = a;
  out.tensors.insert(out.tensors.end(), b.tensors.begin(), b.tensors.end());
  if (a.priority && b.priority) out.priority = std::min(*a.priority, *b.priority);
  if (!a.priority) out.priority = b.priority;
  return out;
}

// Where to cut a bucket: after its first tensor, before its last, and in the middle of its bytes.
std::vector<size_t> cuts_of(const BucketSpec& group,
                            const std::unordered_map<std::string, uint64_t>& elements) {
  size_t count = group.tensors.size();
  if (count < 2) return {};
  auto size_of = [&](const std::string& name) {
    auto found = elements.find(name);
    return found == elements.end() ? 0.0 : static_cast<double>(found->second);
  };
  double total = 0, before = 0;
  for (const std::string& name : group.tensors) total += size_of(name);
  size_t middle = 0;
  while (middle + 1 < count && before + size_of(group.tensors[middle]) <= total / 2)
    before += size_of(group.tensors[middle++]);
  std::vector<size_t> out = {1, std::clamp<size_t>(middle, 1, count - 1), count - 1};
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

class BoundaryEdits {
 public:
  BoundaryEdits(const Plan& plan, const std::vector<BucketSpec>& groups) : groups_(groups) {
    base_ = plan;
  }

  void merge(size_t at) {  // with the next
    if (at + 1 >= groups_.size()) return;
    auto one = merged(groups_[at], groups_[at + 1]);
    if (!one) return;
    std::vector<BucketSpec> made = groups_;
    made[at] = std::move(*one);
    made.erase(made.begin() + static_cast<ptrdiff_t>(at) + 1);
    add(std::move(made));
  }

  void split(size_t at, size_t cut) {
    std::vector<BucketSpec> made = groups_;
    BucketSpec rest = made[at];
    auto middle = static_cast<ptrdiff_t>(cut);
    rest.tensors.erase(rest.tensors.begin(), rest.tensors.begin() + middle);
    made[at].tensors.resize(cut);
    made.insert(made.begin() + static_cast<ptrdiff_t>(at) + 1, std::move(rest));
    add(std::move(made));
  }

  // Across the boundary between `at` and the next: its last tensor goes there, or the next one's
  // first comes here.
  void move(size_t at, bool to_next) {
    if (at + 1 >= groups_.size()) return;
    std::vector<BucketSpec> made = groups_;
    std::vector<std::string>& left = made[at].tensors;
    std::vector<std::string>& right = made[at + 1].tensors;
    // What would empty a bucket is a merge.
    if ((to_next ? left : right).size() < 2) return;
    if (to_next) {
      right.insert(right.begin(), left.back());
      left.pop_back();
    } else {
      left.push_back(right.front());
      right.erase(right.begin());
    }
    add(std::move(made));
  }

  std::vector<Plan> take() && { return std::move(out_); }

 private:
  void add(std::vector<BucketSpec> made) {
    out_.push_back(base_);
    out_.back().buckets = std::move(made);
  }

  Plan base_;
  const std::vector<BucketSpec>& groups_;
  std::vector<Plan> out_;
};

}  // namespace

std::vector<Plan> edits(const std::string& pass, const Plan& plan, const Space& space) {
  if (pass == "lanes") return lanes_edits(plan, space);
  if (pass == "bucket") return bucket_edits(plan, space);
  if (pass == "chunk") return chunk_edits(plan, space);
  if (pass == "algorithm") return algorithm_edits(plan, space);
  if (pass == "workers") return worker_edits(plan);
  if (pass == "partition")
    return optional_size_edits(plan, &Plan::partition, space.partition,
                               space.expert.partition.value_or(mib(4)));
  if (pass == "credit")
    return optional_size_edits(plan, &Plan::credit, space.credit,
                               space.expert.credit.value_or(mib(32)));
  Plan other = plan;
  if (pass == "order") flip_order(other);
  if (pass == "barrier") flip_barrier(other);
  if (other == plan) return {};
  std::vector<Plan> out = {other};
  // The first layers first gains little while all are waited for: the two go together.
  if (pass == "order" && space.has("barrier")) {
    flip_barrier(other);
    out.push_back(other);
  }
  return out;
}

std::vector<BucketSpec> groups_of(const Plan& plan, const Space& space) {
  auto layout = schedule::make_layout(schedule::scaled(plan, space.shrink), space.tensors);
  if (!layout) return {};
  std::vector<std::pair<uint32_t, BucketSpec>> found;  // by the latest tensor: backward's order
  for (size_t b = 0; b < layout->buckets.size(); ++b) {
    BucketSpec spec;
    // Explicit buckets come first, in the plan's order.
    if (b < plan.buckets.size()) spec = plan.buckets[b];
    spec.tensors.clear();
    uint32_t latest = 0;
    for (uint32_t t : layout->buckets[b].tensors) {
      spec.tensors.push_back(space.tensors[t].name);
      latest = std::max(latest, t);
    }
    found.emplace_back(latest, std::move(spec));
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<BucketSpec> out;
  for (auto& [latest, spec] : found) out.push_back(std::move(spec));
  return out;
}

std::vector<Plan> boundary_edits(const Plan& plan, const std::vector<BucketSpec>& groups,
                                 const std::vector<size_t>& touched, const Space& space) {
  std::unordered_map<std::string, uint64_t> elements;
  for (const schedule::Tensor& tensor : space.tensors) elements[tensor.name] = tensor.elements;
  BoundaryEdits made(plan, groups);
  std::vector<size_t> boundaries;  // each by the group before it
  for (size_t at : touched) {
    if (at > 0) boundaries.push_back(at - 1);
    boundaries.push_back(at);
    for (size_t cut : cuts_of(groups[at], elements)) made.split(at, cut);
  }
  std::sort(boundaries.begin(), boundaries.end());
  boundaries.erase(std::unique(boundaries.begin(), boundaries.end()), boundaries.end());
  for (size_t at : boundaries) {
    made.merge(at);
    made.move(at, true);
    made.move(at, false);
  }
  std::vector<Plan> out = std::move(made).take();
  if (!plan.buckets.empty()) {
    out.push_back(plan);
    out.back().buckets.clear();
  }
  return out;
}

}  // namespace weft::optimize
