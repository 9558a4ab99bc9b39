#include "weft/optimize.h"

#include <algorithm>
#include <cmath>

#include "explain.h"
#include "search.h"

namespace weft::optimize {
namespace {

using plan::Plan;

// A gain by replay below this, or below the error of the replay, is none.
constexpr double kLeastGain = 0.005;

Plan signed_by_optimizer(Plan plan, const replay::Replayer& replayer, const Options& options,
                         const Space& space) {
  const Plan& recorded = replayer.recorded_plan();
  std::string link;
  if (space.link_bits_per_s > 0) link = ", " + format_rate(space.link_bits_per_s);
  plan.name = "optimized";
  plan.comment =
      text("for %s on %u hosts%s; from %s (%s)", printable(replayer.model().name).c_str(),
           options.cluster.hosts.value_or(replayer.ranks()), link.c_str(),
           printable(recorded.name).c_str(), plan::hash(recorded).c_str());
  return plan;
}

Result<replay::Prediction> with_interval(PlanTimer& timer, const Plan& plan) {
  replay::Question question;
  question.plan = plan;
  question.cluster = timer.cluster();
  return timer.predict(question);
}

// "Communication is free": what is left to gain.
double bound_of(PlanTimer& timer, const Plan& plan) {
  replay::Question question;
  question.plan = plan;
  question.cluster = timer.cluster();
  question.what_if.free_communication = true;
  question.interval = false;
  auto answer = timer.predict(question);
  return answer ? answer->iteration_ns : 0;
}

void remark(const replay::Replayer& replayer, const PlanTimer& timer, const Space& space,
            Optimized& out) {
  if (timer.refused() > 0)
    out.remarks.push_back(text("%llu plans were left out because they cannot be replayed: %s",
                               static_cast<unsigned long long>(timer.refused()),
                               timer.first_refusal().c_str()));
  if (replayer.fidelity().unknown)
    out.remarks.push_back("how well the recorded plan replays is unknown: " +
                          replayer.fidelity().unknown->message());
  if (!replayer.costs().link_bytes_per_s)
    out.remarks.emplace_back(
        "the trace has no probe: more lanes than were used could not be tried");
  if (!out.finished)
    out.remarks.emplace_back("the budget ended the search: a larger one may find more");
  if (space.passes.size() < pass_names().size())
    out.remarks.push_back(text("%zu passes were left out: what they decide is as recorded",
                               pass_names().size() - space.passes.size()));
}

}  // namespace

Result<Optimized> optimize(const replay::Replayer& replayer, const Options& options) {
  Nanos start = monotonic_clock().now();
  WEFT_ASSIGN(Space space, make_space(replayer, options));
  PlanTimer timer(replayer, options.cluster);
  Optimized out;
  WEFT_ASSIGN(out.before, with_interval(timer, space.recorded));
  auto recorded_ns = timer.time_of(space.recorded);
  if (!recorded_ns) return error(Code::unsupported, "%s", timer.first_refusal().c_str());
  out.bound_ns = bound_of(timer, space.recorded);
  out.floor_ns = floor_of(replayer, options.cluster);

  Search search(timer, space, options, std::max(out.bound_ns, out.floor_ns));
  Candidate best = search.run(*recorded_ns);
  out.finished = search.finished();
  out.passes = search.passes();

  double gain = 1 - best.ns / *recorded_ns;
  double least = std::max(kLeastGain, std::abs(replayer.fidelity().error_percent) / 100);
  if (best.plan != space.recorded && gain > least) {
    out.plan = signed_by_optimizer(best.plan, replayer, options, space);
    WEFT_TRY(plan::validate(out.plan));
    WEFT_TRY(schedule::supported(out.plan));
    WEFT_ASSIGN(out.after, with_interval(timer, out.plan));
  }
  if (out.after.iteration_ns > 0 && out.after.iteration_ns < out.before.iteration_ns) {
    out.decisions = explain(out.plan, best.ns, space, timer);
  } else {
    out.plan = space.recorded;
    out.after = out.before;
    out.remarks.push_back(
        text("the recorded plan is kept: what was found gains %.2f %% by replay, and up to %.2f %% "
             "is within its error",
             std::max(gain, 0.0) * 100, least * 100));
  }
  remark(replayer, timer, space, out);
  out.replays = timer.replays();
  out.replay_seconds = timer.seconds();
  out.seconds = (monotonic_clock().now() - start).seconds();
  return out;
}

}  // namespace weft::optimize
