#include "findings.h"

#include <algorithm>
#include <cmath>

namespace weft::diagnose {
namespace {

constexpr uint32_t kLanesTried = 16;  // more are rarely worth their sockets
constexpr double kSlowRank = 1.05;    // of what the others compute
constexpr double kEqualRanks = 0.95;  // ranks this near to each other are slow together
constexpr size_t kNamedLanes = 8;     // more are counted
constexpr double kGapsWorthPercent = 1;

// Of equal gains the cause named first is the more particular one.
constexpr const char* kNames[] = {
    "other_backend",    "one_flow_limit", "straggler",        "not_overlapped",  "bucket_too_large",
    "bucket_too_small", "bad_order",      "credit_too_small", "chunk_too_small", "chunk_too_large",
    "slow_lane",        "data_loading",   "host_gaps"};

size_t place_of(const std::string& name) {
  return static_cast<size_t>(std::find(std::begin(kNames), std::end(kNames), name) -
                             std::begin(kNames));
}

double median(const std::vector<double>& values) {
  return values.empty() ? 0 : quantile(values, 0.5);
}

std::string percent(double value) { return text("%.1f %%", value); }

class Search {
 public:
  Search(const graph::Graph& graph, const Activity& activity, const GainEstimator& gains,
         Diagnosis& out)
      : graph_(graph),
        activity_(activity),
        gains_(gains),
        plan_(gains.replayer().recorded_plan()),
        costs_(gains.replayer().costs()),
        out_(out) {}

  void run() {
    const bool over_weft = graph_.sums_by.empty();
    over_weft ? one_flow_limit() : other_backend();
    stragglers();
    if (over_weft) causes_in_the_plan();
    data_loading();
    host_gaps();
    std::stable_sort(out_.findings.begin(), out_.findings.end(),
                     [](const Finding& a, const Finding& b) {
                       if (a.gain_percent != b.gain_percent) return a.gain_percent > b.gain_percent;
                       return place_of(a.name) < place_of(b.name);
                     });
    bounds();
  }

 private:
  void causes_in_the_plan() {
    not_overlapped();
    bucket_sizes();
    order();
    credit();
    chunks();
    slow_lanes();
  }

  // ---- words ---------------------------------------------------------------------------------

  // Of the target cluster, as people know it.
  std::string time(double wall_ns) const {
    double ns = graph_.environment.to_target_ns(wall_ns);
    if (!std::isfinite(ns) || std::abs(ns) > 1e18) return "an unknown time";
    return format_duration({static_cast<int64_t>(ns)});
  }
  std::string rate(double bytes_per_s) const {
    return format_rate(bytes_per_s * 8 * graph_.environment.dilation);
  }
  std::string size(double bytes) const {
    return format_size(graph_.environment.to_target_bytes(bytes));
  }
  // "/lanes 1 to 5", for all that differs.
  std::string changes(const plan::Plan& after) const {
    std::string all;
    for (const plan::Difference& difference : plan::diff(plan_, after)) {
      if (difference.path == "/name" || difference.path == "/comment") continue;
      all += text("%s%s from %s to %s", all.empty() ? "" : ", ", difference.path.c_str() + 1,
                  difference.before.c_str(), difference.after.c_str());
    }
    return all;
  }

  // ---- judging -------------------------------------------------------------------------------

  void settle(Finding finding, const Verdict& verdict, const std::string& tried) {
    finding.gain_percent = verdict.gain_percent;
    finding.low = std::max(0.0, verdict.low);
    finding.high = verdict.high;
    if (gains_.is_sure(verdict)) {
      out_.findings.push_back(std::move(finding));
      return;
    }
    std::string who = finding.rank ? text(" (rank %u)", *finding.rank) : "";
    const char* why = verdict.high <= 0           ? "it is worse"
                      : verdict.gain_percent <= 0 ? "it does not help"
                                                  : "it may be error";
    out_.rejected.push_back(text("%s%s: %s would change the time by %+.1f %% (%+.1f to %+.1f): %s",
                                 finding.name.c_str(), who.c_str(), tried.c_str(),
                                 0.0 - verdict.gain_percent, 0.0 - verdict.high, 0.0 - verdict.low,
                                 why));
  }

  void cannot_judge(const std::string& name, const Error& why) {
    out_.remarks.push_back(name + " cannot be judged: " + why.message());
  }

  // The best of several plans stands for the hypothesis. Those that change nothing are no trial.
  void suppose(Finding finding, const std::vector<plan::Plan>& variants) {
    std::optional<Verdict> best;
    const plan::Plan* chosen = nullptr;
    for (const plan::Plan& variant : variants) {
      if (variant == plan_) continue;
      auto verdict = gains_.of_plan(variant);
      if (!verdict) {
        cannot_judge(finding.name, verdict.error());
        continue;
      }
      if (best && best->gain_percent >= verdict->gain_percent) continue;
      best = *verdict;
      chosen = &variant;
    }
    if (!best) return;
    std::string changed = changes(*chosen);
    finding.evidence.push_back(text("replayed with %s: %s an iteration instead of %s",
                                    changed.c_str(), time(best->iteration_ns).c_str(),
                                    time(gains_.recorded_ns()).c_str()));
    if (finding.remedy.empty()) finding.remedy = "Change " + changed + ".";
    settle(std::move(finding), *best, changed);
  }

  // ---- the network ---------------------------------------------------------------------------

  bool is_capped() const {
    return costs_.flow_bytes_per_s && costs_.link_bytes_per_s &&
           costs_.flow_bytes_per_s->value < costs_.link_bytes_per_s->value;
  }

  // The fewest lanes that fill the link, or the most whose rate is known.
  uint32_t lanes_that_fill() const {
    uint32_t best = plan_.lanes;
    for (uint32_t n = plan_.lanes + 1; n <= kLanesTried; ++n) {
      if (!cost::rate_of_flows(costs_, n)) break;
      best = n;
      if (n * costs_.flow_bytes_per_s->value >= cost::kFillsLink * costs_.link_bytes_per_s->value)
        break;
    }
    return best;
  }

  void one_flow_limit() {
    if (!is_capped()) return;
    double flow = costs_.flow_bytes_per_s->value, link = costs_.link_bytes_per_s->value;
    if (plan_.lanes * flow >= cost::kFillsLink * link) return;
    uint32_t lanes = lanes_that_fill();
    Finding finding;
    finding.name = "one_flow_limit";
    finding.title = text("One connection carries only %s of a link of %s, and the plan uses %u.",
                         rate(flow).c_str(), rate(link).c_str(), plan_.lanes);
    finding.evidence.push_back(text("measured: one connection %s, the link %s%s",
                                    rate(flow).c_str(), rate(link).c_str(),
                                    costs_.link_is_lower_bound ? " or more" : ""));
    finding.evidence.push_back(text("%u of them can use %s, %.0f %% of the link", plan_.lanes,
                                    rate(plan_.lanes * flow).c_str(),
                                    100 * plan_.lanes * flow / link));
    if (costs_.lane_bytes_per_s)
      finding.evidence.push_back(
          text("in this run a busy lane carried %s", rate(costs_.lane_bytes_per_s->value).c_str()));
    finding.evidence.push_back(
        text("%u lanes would carry %s", lanes, rate(std::min(lanes * flow, link)).c_str()));
    finding.remedy = text("Use %u lanes instead of %u.", lanes, plan_.lanes);
    plan::Plan more = plan_;
    more.lanes = lanes;
    suppose(std::move(finding), {more});
  }

  // All slow lanes are mended together: of several that are alike one alone would gain nothing.
  void slow_lanes() {
    const std::vector<cost::Costs::SlowLane>& slow = costs_.slow_lanes;
    if (slow.empty()) return;
    replay::WhatIf what_if;
    what_if.no_slow_lanes = true;
    auto verdict = gains_.of(what_if);
    if (!verdict) return cannot_judge("slow_lane", verdict.error());
    const cost::Costs::SlowLane& worst =
        *std::min_element(slow.begin(), slow.end(), [](const auto& one, const auto& other) {
          return one.bytes_per_s.value < other.bytes_per_s.value;
        });
    Finding finding;
    finding.name = "slow_lane";
    finding.rank = worst.from;
    finding.title = text("Lane %u from rank %u to rank %u is slower than the others of that rank.",
                         worst.lane, worst.from, worst.to);
    finding.evidence = {
        text("it carries %s while it always has something to send, the median lane of that rank %s",
             rate(worst.bytes_per_s.value).c_str(), rate(worst.others_bytes_per_s).c_str())};
    if (slow.size() > 1) {
      std::string all;
      for (size_t i = 0; i < std::min(slow.size(), kNamedLanes); ++i)
        all += text("%s%u from rank %u to %u", i == 0 ? "" : ", ", slow[i].lane, slow[i].from,
                    slow[i].to);
      finding.evidence.push_back(text("%zu lanes are slow, and mended together: %s%s", slow.size(),
                                      all.c_str(), slow.size() > kNamedLanes ? ", ..." : ""));
    }
    finding.remedy = "Look at that connection's path: loss, a slow port, another user.";
    settle(std::move(finding), *verdict, "no lane slower than the others");
  }

  const Share& path(const char* what) const {
    static const Share kNothing;
    for (const Share& share : out_.path)
      if (share.what == what) return share;
    return kNothing;
  }

  // ---- devices and hosts ---------------------------------------------------------------------

  double others(uint32_t rank, double RankActivity::*field) const {
    std::vector<double> values;
    for (uint32_t r = 0; r < activity_.ranks.size(); ++r)
      if (r != rank) values.push_back(activity_.ranks[r].*field);
    return median(values);
  }

  // Slowest first.
  std::vector<uint32_t> slow_ranks() const {
    std::vector<uint32_t> out;
    for (uint32_t r = 0; r < activity_.ranks.size(); ++r) {
      double typical = others(r, &RankActivity::compute_ns);
      if (typical > 0 && activity_.ranks[r].compute_ns > kSlowRank * typical) out.push_back(r);
    }
    std::stable_sort(out.begin(), out.end(), [&](uint32_t a, uint32_t b) {
      return activity_.ranks[a].compute_ns > activity_.ranks[b].compute_ns;
    });
    return out;
  }

  // Equally slow ranks hide each other: one alone would gain nothing, so they are healed together;
  // and a rank behind a slower one shows only once that one is healed.
  void stragglers() {
    std::vector<uint32_t> slow = slow_ranks();
    double before_ns = gains_.recorded_ns();
    for (size_t first = 0, end = 0; first < slow.size(); first = end) {
      while (end < slow.size() && activity_.ranks[slow[end]].compute_ns >=
                                      kEqualRanks * activity_.ranks[slow[first]].compute_ns)
        ++end;
      auto verdict = healed({slow.begin(), slow.begin() + static_cast<ptrdiff_t>(end)}, slow);
      if (!verdict) return cannot_judge("straggler", verdict.error());
      double step_ns = before_ns - verdict->iteration_ns;
      Verdict own = gains_.of_time(gains_.recorded_ns() - step_ns, true);
      for (size_t i = first; i < end; ++i) straggler(slow, first, end, i, own);
      before_ns = verdict->iteration_ns;
    }
  }

  Result<Verdict> healed(const std::vector<uint32_t>& ranks, const std::vector<uint32_t>& slow) {
    if (slow.size() == 1) {
      replay::WhatIf what_if;
      what_if.healed = Rank{ranks.front()};
      return gains_.of(what_if);
    }
    std::vector<graph::Iteration> iterations = graph_.iterations;
    for (graph::Iteration& iteration : iterations) {
      std::vector<graph::LayerTimes> sound = sound_layers(iteration, slow);
      for (uint32_t rank : ranks) iteration.layers[rank] = sound;
    }
    return gains_.of_compute(std::move(iterations));
  }

  // Each layer as on the median of the ranks that are not slow.
  static std::vector<graph::LayerTimes> sound_layers(const graph::Iteration& iteration,
                                                     const std::vector<uint32_t>& slow) {
    std::vector<graph::LayerTimes> out(iteration.layers.front().size());
    using Field = int64_t graph::LayerTimes::*;
    for (Field field :
         {&graph::LayerTimes::forward_ns, &graph::LayerTimes::backward_ns,
          &graph::LayerTimes::update_ns, &graph::LayerTimes::gap_before_forward_ns,
          &graph::LayerTimes::gap_before_backward_ns, &graph::LayerTimes::gap_before_update_ns,
          &graph::LayerTimes::before_wait_ns, &graph::LayerTimes::forward_cpu_ns,
          &graph::LayerTimes::backward_cpu_ns, &graph::LayerTimes::update_cpu_ns})
      for (size_t l = 0; l < out.size(); ++l) {
        std::vector<double> values;
        for (uint32_t r = 0; r < iteration.layers.size(); ++r)
          if (std::find(slow.begin(), slow.end(), r) == slow.end())
            values.push_back(static_cast<double>(iteration.layers[r][l].*field));
        out[l].*field = static_cast<int64_t>(median(values));
      }
    return out;
  }

  void straggler(const std::vector<uint32_t>& slow, size_t first, size_t end, size_t at,
                 const Verdict& verdict) {
    uint32_t rank = slow[at];
    const RankActivity& own = activity_.ranks[rank];
    double typical = others(rank, &RankActivity::compute_ns);
    Finding finding;
    finding.name = "straggler";
    finding.rank = rank;
    finding.title =
        text("Rank %u takes %.2f times as long as the others to compute, and they wait.", rank,
             own.compute_ns / typical);
    finding.evidence = {
        text("rank %u computes %s an iteration, the median of the others %s", rank,
             time(own.compute_ns).c_str(), time(typical).c_str()),
        text("its device waits %s an iteration for gradients, the others' %s",
             time(own.waiting_ns).c_str(), time(others(rank, &RankActivity::waiting_ns)).c_str()),
        text("the critical path waits %s an iteration for it", time(own.waited_for_ns).c_str())};
    if (end - first > 1)
      finding.evidence.push_back("the gain is that of healing all ranks that are as slow: " +
                                 list(slow, first, end));
    if (first > 0)
      finding.evidence.push_back("the gain is what comes after healing those that are slower: " +
                                 list(slow, 0, first));
    finding.remedy =
        text("See what slows rank %u's device or host: clocks, heat, another job.", rank);
    settle(std::move(finding), verdict, "computing as the others do");
  }

  static std::string list(const std::vector<uint32_t>& ranks, size_t first, size_t end) {
    std::string out;
    for (size_t i = first; i < end; ++i) out += text("%srank %u", i == first ? "" : ", ", ranks[i]);
    return out;
  }

  // What of these gaps was time in which nothing was computed because data was loaded. Taken away
  // in the order in which it is likely: first what lies before a wait.
  static void without_loading(graph::Iteration& iteration) {
    for (size_t rank = 0; rank < iteration.layers.size(); ++rank) {
      int64_t left = rank < iteration.loading_ns.size() ? iteration.loading_ns[rank] : 0;
      auto take = [&](int64_t& gap) {
        const int64_t taken = std::min(left, gap);
        gap -= taken;
        left -= taken;
      };
      for (graph::LayerTimes& layer : iteration.layers[rank]) {
        take(layer.before_wait_ns);
        take(layer.gap_before_forward_ns);
        take(layer.gap_before_update_ns);
      }
    }
  }

  void data_loading() {
    double loading = 0;
    for (uint32_t rank = 0; rank < graph_.ranks; ++rank) {
      std::vector<double> own;
      for (size_t i = graph_.first_counted(); i < graph_.iterations.size(); ++i)
        if (rank < graph_.iterations[i].loading_ns.size())
          own.push_back(static_cast<double>(graph_.iterations[i].loading_ns[rank]));
      loading = std::max(loading, median(own));
    }
    if (loading < kGapsWorthPercent / 100 * gains_.recorded_ns()) return;
    std::vector<graph::Iteration> iterations = graph_.iterations;
    for (graph::Iteration& iteration : iterations) without_loading(iteration);
    auto verdict = gains_.of_compute(std::move(iterations));
    if (!verdict) return cannot_judge("data_loading", verdict.error());
    Finding finding;
    finding.name = "data_loading";
    finding.title = text("Nothing is computed while data is loaded, for %s an iteration.",
                         time(loading).c_str());
    finding.evidence = {
        text("up to %s an iteration on a rank, as the program marked it", time(loading).c_str())};
    finding.remedy = "Load the next data in another thread, while this step computes.";
    settle(std::move(finding), *verdict, "data that is there when it is needed");
  }

  void host_gaps() {
    double gaps = 0;
    for (const RankActivity& own : activity_.ranks) gaps = std::max(gaps, own.gaps_ns);
    if (gaps < kGapsWorthPercent / 100 * gains_.recorded_ns()) return;
    std::vector<graph::Iteration> iterations = graph_.iterations;
    for (graph::Iteration& iteration : iterations)
      for (std::vector<graph::LayerTimes>& layers : iteration.layers)
        for (graph::LayerTimes& layer : layers)
          layer.gap_before_forward_ns = layer.gap_before_backward_ns = layer.gap_before_update_ns =
              layer.before_wait_ns = 0;
    auto verdict = gains_.of_compute(std::move(iterations));
    if (!verdict) return cannot_judge("host_gaps", verdict.error());
    Finding finding;
    finding.name = "host_gaps";
    finding.title =
        "Devices stand still between layers although nothing holds them: hosts are late.";
    finding.evidence = {text("up to %s an iteration on a rank", time(gaps).c_str()),
                        text("%s of the critical path has no other explanation",
                             percent(path("host").percent).c_str())};
    finding.remedy = "See what keeps the host's threads from feeding the device.";
    settle(std::move(finding), *verdict, "hosts that are never late");
  }

  // ---- the plan ------------------------------------------------------------------------------

  void not_overlapped() {
    if (plan_.barrier == plan::Barrier::tensor && plan_.order == plan::Order::layer) return;
    plan::Plan other = plan_;
    other.barrier = plan::Barrier::tensor;
    other.order = plan::Order::layer;
    if (!other.partition) other.partition = mib(4);
    if (!other.credit) other.credit = mib(32);
    plan::Plan reordered = plan_;
    reordered.order = plan::Order::layer;
    if (other == reordered) return;  // that is bad_order's to say
    Finding finding;
    finding.name = "not_overlapped";
    finding.title = text("Only %s of %s of communication is hidden behind compute.",
                         time(out_.overlapped_ns).c_str(), time(out_.communication_ns).c_str());
    finding.evidence = {text("devices stand still for %s an iteration while data is on its way",
                             time(out_.exposed_ns).c_str()),
                        text("with compute beside it all the time, %s could be hidden",
                             time(out_.overlap_possible_ns).c_str())};
    if (plan_.barrier == plan::Barrier::all)
      finding.evidence.push_back(
          "no layer of the next step starts before the last gradient is there (barrier all)");
    suppose(std::move(finding), {other});
  }

  static Bytes times(Bytes size, double factor, Bytes least) {
    double scaled =
        std::clamp(static_cast<double>(size.count) * factor, static_cast<double>(least.count),
                   static_cast<double>(plan::kSizeMax.count));
    return {static_cast<uint64_t>(scaled)};
  }

  plan::Plan with_buckets(double factor) const {
    plan::Plan out = plan_;
    constexpr Bytes kLeast = kib(64);
    out.bucket_rule.first = times(plan_.bucket_rule.first, factor, kLeast);
    out.bucket_rule.size = times(plan_.bucket_rule.size, factor, kLeast);
    if (plan_.partition)
      out.partition = times(*plan_.partition, factor, std::max(kLeast, plan::kPartitionMin));
    else if (factor < 1)
      out.partition = out.bucket_rule.size;
    return out;
  }

  void bucket_sizes() {
    Finding small;
    small.name = "bucket_too_small";
    small.title = text("Gradients travel in %.0f operations an iteration: too many small ones.",
                       activity_.operations);
    small.evidence = {operations_said(), text("%s of the critical path is agreeing on the order",
                                              percent(path("control").percent).c_str())};
    Finding large = small;
    large.name = "bucket_too_large";
    large.title = text("Gradients travel in %.0f operations an iteration: too few large ones.",
                       activity_.operations);
    large.evidence = {operations_said(), behind_others()};
    suppose(std::move(small), {with_buckets(4), with_buckets(16)});
    suppose(std::move(large), {with_buckets(0.25), with_buckets(0.0625)});
  }

  std::string behind_others() const {
    double waited = path("wait_for_lane").percent + path("wait_for_credit").percent;
    return text("%s of the critical path is waiting while other tensors travel",
                percent(waited).c_str());
  }

  std::string operations_said() const {
    double bytes = gains_.replayer().gradient_bytes();
    return text("%s of gradients in operations of %s on average", size(bytes).c_str(),
                size(activity_.operations > 0 ? bytes / activity_.operations : 0).c_str());
  }

  void order() {
    bool by_layer = plan_.order == plan::Order::layer;
    plan::Plan other = plan_;
    other.order = by_layer ? plan::Order::ready : plan::Order::layer;
    Finding finding;
    finding.name = "bad_order";
    finding.title = by_layer ? "Sending what is needed first delays more than it helps."
                             : "Gradients that the next step needs first are not sent first.";
    finding.evidence = {behind_others()};
    suppose(std::move(finding), {other});
  }

  void credit() {
    if (!plan_.credit) return;
    plan::Plan more = plan_, all = plan_;
    more.credit = times(*plan_.credit, 4, *plan_.credit);
    all.credit.reset();
    Finding finding;
    finding.name = "credit_too_small";
    finding.title = text("At most %s may be in flight, and the network runs dry.",
                         format_bytes(*plan_.credit).c_str());
    finding.evidence = {text("%s of the critical path is waiting for credit",
                             percent(path("wait_for_credit").percent).c_str())};
    suppose(std::move(finding), {more, all});
  }

  void chunks() {
    auto with_chunk = [&](double factor) {
      plan::Plan out = plan_;
      out.chunk = std::min(times(plan_.chunk, factor, plan::kChunkMin), plan::kChunkMax);
      return out;
    };
    Finding small;
    small.name = "chunk_too_small";
    small.title = text("Chunks of %s cost more processor time than they are worth.",
                       format_bytes(plan_.chunk).c_str());
    if (costs_.cpu_ns_per_chunk)
      small.evidence = {text("a chunk costs %s of processor time, whatever its size",
                             time(costs_.cpu_ns_per_chunk->value).c_str())};
    Finding large;
    large.name = "chunk_too_large";
    large.title =
        text("Chunks of %s make the ring wait for whole ones.", format_bytes(plan_.chunk).c_str());
    suppose(std::move(small), {with_chunk(4)});
    suppose(std::move(large), {with_chunk(0.25)});
  }

  // ---- somebody else's sums ------------------------------------------------------------------

  void other_backend() {
    plan::Plan whole = *plan::preset("default");
    const std::pair<const char*, const plan::Plan*> ways[] = {
        {"over weft, with DDP's buckets", &plan_},
        {"over weft, plan default by weft.torch.attach", &whole}};
    std::optional<Verdict> best;
    const char* chosen = nullptr;
    Finding finding;
    finding.name = "other_backend";
    finding.title = text("Devices stand still for %s of %s an iteration until %s has summed.",
                         time(out_.exposed_ns).c_str(), time(out_.iteration_ns).c_str(),
                         graph_.sums_by.c_str());
    for (const auto& [name, plan] : ways) {
      auto verdict = gains_.of_plan(*plan);
      if (!verdict) {
        cannot_judge(finding.name, verdict.error());
        continue;
      }
      out_.alternatives.push_back(
          {name, verdict->iteration_ns, verdict->gain_percent, verdict->low, verdict->high});
      finding.evidence.push_back(text("replayed %s: %s an iteration instead of %s", name,
                                      time(verdict->iteration_ns).c_str(),
                                      time(gains_.recorded_ns()).c_str()));
      if (best && best->gain_percent >= verdict->gain_percent) continue;
      best = *verdict;
      chosen = name;
    }
    if (!best) return;
    finding.remedy = text("Carry the sums %s: init_process_group(\"weft\").", chosen);
    settle(std::move(finding), *best, text("sums %s", chosen));
  }

  // ---- what no cure passes -------------------------------------------------------------------

  void bounds() {
    auto bound = [&](const char* name, bool replay::WhatIf::*wish) {
      replay::WhatIf what_if;
      what_if.*wish = true;
      auto verdict = gains_.of(what_if);
      if (!verdict) return cannot_judge(name, verdict.error());
      out_.bounds.push_back({name, verdict->iteration_ns, verdict->gain_percent});
    };
    bound("communication is free", &replay::WhatIf::free_communication);
    bound("no stragglers", &replay::WhatIf::no_stragglers);
    if (is_capped() && graph_.sums_by.empty())
      bound("one flow may fill the link", &replay::WhatIf::no_flow_cap);
  }

  const graph::Graph& graph_;
  const Activity& activity_;
  const GainEstimator& gains_;
  const plan::Plan& plan_;
  const cost::Costs& costs_;
  Diagnosis& out_;
};

}  // namespace

void find_causes(const graph::Graph& graph, const Activity& activity, const GainEstimator& gains,
                 Diagnosis& out) {
  Search(graph, activity, gains, out).run();
}

}  // namespace weft::diagnose
