#include "gain_estimator.h"

#include <algorithm>
#include <cmath>

namespace weft::diagnose {
namespace {

// As many as every answer is compared over: two that fill the queues and two that count.
constexpr uint32_t kIterations = 4;
// Smaller gains are not worth a sentence, however well a run replays.
constexpr double kLeastGainPercent = 1;

// A diagnosis says where the time of the run went that was measured.
replay::Question of_the_run(const replay::Replayer& replayer) {
  replay::Question question;
  question.sums_as_measured = !replayer.sums_by().empty();
  question.cluster.of = replay::Of::lab;
  // Where somebody else carried the sums little is asked, and how long weft would take is told.
  if (!question.sums_as_measured) question.iterations = kIterations;
  return question;
}

}  // namespace

Result<GainEstimator> GainEstimator::make(const graph::Graph& graph,
                                          const replay::Replayer& replayer) {
  GainEstimator out;
  out.graph_ = &graph;
  out.replayer_ = &replayer;
  // How sure a gain is follows from it.
  if (replayer.fidelity().unknown) return *replayer.fidelity().unknown;
  replay::Question question = of_the_run(replayer);
  WEFT_ASSIGN(replay::Prediction recorded, replayer.predict(question));
  if (!(recorded.iteration_ns > 0) || !std::isfinite(recorded.iteration_ns))
    return error(Code::unsupported, "the recorded plan replays in no time");
  out.recorded_ns_ = recorded.iteration_ns;
  auto error_of = [](const replay::Prediction& answer) {
    return (answer.high_ns - answer.low_ns) / 2 / answer.iteration_ns;
  };
  out.plan_error_ = out.compute_error_ = error_of(recorded);
  if (question.sums_as_measured) {
    question.sums_as_measured = false;
    WEFT_ASSIGN(const replay::Prediction over_weft, replayer.predict(question));
    if (over_weft.iteration_ns > 0) out.plan_error_ = error_of(over_weft);
  }
  // With the same plan most of what the model leaves out is left out on both sides; but another
  // resource may bound what is left.
  constexpr double kStays = 0.5;
  double measured = replayer.measured_iteration_ns();
  double spread =
      measured > 0 ? (replayer.measured_high_ns() - replayer.measured_low_ns()) / 2 / measured : 0;
  out.compute_error_ = std::max(std::hypot(replayer.fidelity().error_percent / 100, spread),
                                kStays * out.compute_error_);
  return out;
}

Verdict GainEstimator::of_time(double iteration_ns, bool same_plan) const {
  Verdict out;
  out.iteration_ns = iteration_ns;
  double left = iteration_ns / recorded_ns_;
  out.gain_percent = 100 * (1 - left);
  // The recorded time was measured: only what is left of it is in doubt.
  double doubt = 100 * left * (same_plan ? compute_error_ : plan_error_);
  out.low = out.gain_percent - doubt;
  out.high = std::min(100.0, out.gain_percent + doubt);
  return out;
}

Result<Verdict> GainEstimator::of_plan(const plan::Plan& plan) const {
  replay::Question question = of_the_run(*replayer_);
  question.sums_as_measured = false;
  question.plan = plan;
  question.interval = false;
  WEFT_ASSIGN(replay::Prediction answer, replayer_->predict(question));
  return of_time(answer.iteration_ns, false);
}

Result<Verdict> GainEstimator::of(const replay::WhatIf& what_if) const {
  replay::Question question = of_the_run(*replayer_);
  // What costs nothing takes no cores either.
  if (what_if.free_communication) question.sums_as_measured = false;
  question.what_if = what_if;
  question.interval = false;
  WEFT_ASSIGN(replay::Prediction answer, replayer_->predict(question));
  return of_time(answer.iteration_ns, true);
}

Result<Verdict> GainEstimator::of_compute(std::vector<graph::Iteration> iterations) const {
  auto first = static_cast<ptrdiff_t>(graph_->first_counted());
  iterations.erase(iterations.begin(), iterations.begin() + first);
  replay::Replayer edited = replayer_->with_compute(std::move(iterations));
  replay::Question question = of_the_run(*replayer_);
  question.interval = false;
  WEFT_ASSIGN(replay::Prediction answer, edited.predict(question));
  return of_time(answer.iteration_ns, true);
}

double GainEstimator::least_gain_percent() const {
  return std::max(std::abs(replayer_->fidelity().error_percent), kLeastGainPercent);
}

}  // namespace weft::diagnose
