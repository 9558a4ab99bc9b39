#include "search.h"

#include <algorithm>

#include "edits.h"

namespace weft::optimize {
namespace {

using plan::Plan;

// The search ends after this many disturbed plans, or earlier when a row of them gained nothing.
constexpr int kTrials = 24;
constexpr int kTrialsInVain = 6;
constexpr int kRounds = 12;  // of all passes in one descent
// Shares of the budget: the search, then giving back what does not pay. The rest is for the
// answer's own predictions.
constexpr double kSearchShare = 0.8, kSimplifyShare = 0.95;
// With more buckets than this only those are touched that a device waited for.
constexpr size_t kFewGroups = 6;
constexpr size_t kTouched = 4;

// A descent from one of them comes by the other.
bool differ_in_lanes_only(Plan a, const Plan& b) {
  a.lanes = b.lanes;
  return a == b;
}

double in_seconds(Nanos since) { return (monotonic_clock().now() - since).seconds(); }

}  // namespace

Search::Search(PlanTimer& timer, const Space& space, const Options& options, double bound_ns)
    : timer_(timer),
      space_(space),
      options_(options),
      bound_ns_(bound_ns),
      start_(monotonic_clock().now()) {
  for (const std::string& name : pass_names())
    if (space.has(name)) passes_.push_back({name});
}

bool Search::spent(double share) {
  if (in_seconds(start_) < options_.budget.seconds() * share) return false;
  cut_ = true;
  return true;
}

// Nothing when the plan cannot be replayed or the budget is spent.
std::optional<double> Search::time_of(const Plan& plan) {
  if (spent(share_)) return std::nullopt;
  return timer_.time_of(plan);
}

// With an Rng, boundaries are touched at random; otherwise where a device waited.
std::vector<Plan> Search::edits_of(const std::string& pass, const Plan& plan, Rng* rng) {
  if (pass != "boundaries") return edits(pass, plan, space_);
  std::vector<plan::BucketSpec> groups = groups_of(plan, space_);
  if (groups.empty()) return {};
  std::vector<size_t> touched;
  if (groups.size() <= kFewGroups) {
    for (size_t g = 0; g < groups.size(); ++g) touched.push_back(g);
  } else if (rng != nullptr) {
    touched.push_back(rng->below(groups.size()));
  } else {
    std::map<std::string, double> waited;
    std::vector<double> by_tensor = timer_.waited_ns(plan);
    for (size_t t = 0; t < by_tensor.size(); ++t) waited[space_.tensors[t].name] = by_tensor[t];
    std::vector<std::pair<double, size_t>> by_group;  // most waited for first
    for (size_t g = 0; g < groups.size(); ++g) {
      double sum = 0;
      for (const std::string& name : groups[g].tensors) sum += waited[name];
      if (sum > 0) by_group.emplace_back(-sum, g);
    }
    std::sort(by_group.begin(), by_group.end());
    for (size_t i = 0; i < std::min(kTouched, by_group.size()); ++i)
      touched.push_back(by_group[i].second);
  }
  return boundary_edits(plan, groups, touched, space_);
}

// Takes the best edit of the pass as long as there is one that gains.
bool Search::improve(const std::string& pass, Candidate& now) {
  auto use = std::find_if(passes_.begin(), passes_.end(),
                          [&](const PassUse& each) { return each.name == pass; });
  Nanos start = monotonic_clock().now();
  bool improved = false;
  for (bool gained = true; gained && !spent(share_);) {
    gained = false;
    Candidate best = now;
    for (Plan& plan : edits_of(pass, now.plan, nullptr)) {
      auto ns = time_of(plan);
      if (!ns) continue;
      ++use->tried;
      if (*ns < best.ns) best = {std::move(plan), *ns};
    }
    if (best.ns < now.ns * (1 - kGain)) {
      now = std::move(best);
      ++use->kept;
      gained = improved = true;
    }
  }
  use->seconds += in_seconds(start);
  return improved;
}

void Search::descend(Candidate& now) {
  bool improved = true;
  for (int round = 0; improved && round < kRounds && !settled(now.ns); ++round) {
    improved = false;
    for (const PassUse& pass : passes_) {
      // Groups of a plan that still changes would be chosen in vain, and they are many.
      if (pass.name == "boundaries" && improved) continue;
      if (improve(pass.name, now)) improved = true;
    }
  }
}

// What is left to gain is less than what makes a difference.
bool Search::settled(double ns) const { return ns <= bound_ns_ * (1 + kGain); }

// A few random edits of `from`, so that a descent from there may end elsewhere.
std::optional<Candidate> Search::disturbed(const Candidate& from, Rng& rng) {
  Plan plan = from.plan;
  uint64_t count = 2 + rng.below(3);
  for (uint64_t i = 0; i < count; ++i) {
    const std::string& pass = passes_[rng.below(passes_.size())].name;
    std::vector<Plan> choice = edits_of(pass, plan, &rng);
    if (!choice.empty()) plan = std::move(choice[rng.below(choice.size())]);
  }
  auto ns = time_of(plan);
  if (!ns) return std::nullopt;
  return Candidate{std::move(plan), *ns};
}

// Descends from the other starts and from disturbed plans, and keeps the best.
void Search::restart(Candidate& best, const Plan& best_start, std::vector<Candidate> others) {
  auto attempt = [&](Candidate from) {
    descend(from);
    if (from.ns >= best.ns * (1 - kGain)) return false;
    best = std::move(from);
    say("another start", best.ns);
    return true;
  };
  std::vector<Plan> descended = {best_start};
  for (Candidate& other : others) {
    if (settled(best.ns) || spent(share_)) return;
    bool again = std::any_of(descended.begin(), descended.end(), [&](const Plan& plan) {
      return differ_in_lanes_only(plan, other.plan);
    });
    if (again) continue;
    descended.push_back(other.plan);
    attempt(std::move(other));
  }
  Rng rng(options_.seed);
  int in_vain = 0;
  for (int i = 0; i < kTrials && in_vain < kTrialsInVain; ++i) {
    if (settled(best.ns) || spent(share_)) return;
    auto from = disturbed(best, rng);
    in_vain = from && attempt(std::move(*from)) ? 0 : in_vain + 1;
  }
}

Candidate Search::run(double recorded_ns) {
  share_ = kSearchShare;
  std::vector<Candidate> found = {{space_.recorded, recorded_ns}};
  say("as recorded", recorded_ns);
  for (const Plan& plan : starts(space_)) {
    bool known = std::any_of(found.begin(), found.end(),
                             [&](const Candidate& each) { return each.plan == plan; });
    if (known) continue;
    if (auto ns = time_of(plan)) found.push_back({plan, *ns});
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Candidate& a, const Candidate& b) { return a.ns < b.ns; });
  Candidate best = found.front();
  found.erase(found.begin());
  say("the best start", best.ns);
  if (passes_.empty()) return best;
  const Plan best_start = best.plan;
  descend(best);
  say("after the passes", best.ns);
  restart(best, best_start, std::move(found));
  share_ = kSimplifyShare;
  simplify(best);
  take_margins(best);
  say("in the end", best.ns);
  return best;
}

// ---- giving back -----------------------------------------------------------------------------

bool Search::back_to(const std::string& pass, const Plan& from, double limit, Candidate& now) {
  if (!space_.has(pass) || same_in(pass, now.plan, from)) return false;
  Plan plan = now.plan;
  take(pass, from, plan);
  auto ns = time_of(plan);
  if (!ns || *ns > limit) return false;
  now = {std::move(plan), *ns};
  return true;
}

void Search::fewest_lanes(double limit, Candidate& now) {
  if (!space_.has("lanes")) return;
  std::vector<uint32_t> counts;
  if (space_.spare_lanes()) counts.push_back(*space_.spare_lanes());
  for (uint32_t lanes = 1; lanes < now.plan.lanes; ++lanes) counts.push_back(lanes);
  for (uint32_t lanes : counts) {
    if (lanes >= now.plan.lanes) continue;
    Plan fewer = now.plan;
    fewer.lanes = lanes;
    fewer.lane_workers = std::min(fewer.lane_workers, lanes);
    auto ns = time_of(fewer);
    if (!ns || *ns > limit) continue;
    now = {std::move(fewer), *ns};
    return;
  }
}

// Undoes what does not pay. All that is given back together costs no more than a tie.
void Search::simplify(Candidate& best) {
  double untried = best.ns * (1 + std::max(kUntried, space_.replay_error));
  for (const char* pass : {"algorithm", "workers"}) back_to(pass, space_.recorded, untried, best);
  double limit = best.ns * (1 + kTie);
  if (!back_to("boundaries", space_.recorded, limit, best))
    back_to("boundaries", space_.expert, limit, best);
  back_to("order", space_.recorded, limit, best);
  back_to("barrier", space_.recorded, limit, best);
  for (const char* pass : {"bucket", "partition", "credit", "chunk"}) {
    if (same_in(pass, best.plan, space_.recorded)) continue;
    if (!back_to(pass, space_.expert, limit, best)) back_to(pass, space_.recorded, limit, best);
  }
  fewest_lanes(limit, best);
}

// Values that cost next to nothing by replay, and make up for what replay does not see.
void Search::take_margins(Candidate& now) {
  double limit = now.ns * (1 + kMargin);
  auto accept = [&](Plan plan) {
    auto ns = time_of(plan);
    if (ns && *ns <= limit) now = {std::move(plan), *ns};
  };
  // A flow that carries a little less than it was measured to must not leave the link idle.
  auto lanes = space_.spare_lanes();
  if (lanes && now.plan.lanes < *lanes) {
    Plan more = now.plan;
    more.lanes = *lanes;
    accept(std::move(more));
  }
  // The urgent can overtake only what is not yet in flight, and kernels hold more than is known.
  if (now.plan.order != plan::Order::layer) return;
  Plan bounded = now.plan;
  if (!bounded.partition) bounded.partition = space_.expert.partition;
  if (!bounded.credit) bounded.credit = space_.expert.credit;
  if (bounded != now.plan) accept(std::move(bounded));
}

void Search::say(const char* what, double ns) const {
  if (!options_.progress) return;
  options_.progress(text("%s: %.2f ms by replay, %llu replays, %.1f s", what, timer_.target_ms(ns),
                         static_cast<unsigned long long>(timer_.replays()), in_seconds(start_)));
}

}  // namespace weft::optimize
