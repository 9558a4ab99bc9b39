// Says what a world without some cause would gain, by replaying it.
#pragma once

#include "weft/diagnose.h"

namespace weft::diagnose {

struct Verdict {
  double iteration_ns = 0;
  double gain_percent = 0;
  double low = 0, high = 0;
};

class GainEstimator {
 public:
  // Replays the recorded plan, which everything is compared with. Fails as predict() does.
  static Result<GainEstimator> make(const graph::Graph& graph, const replay::Replayer& replayer);

  Result<Verdict> of_plan(const plan::Plan& plan) const;
  Result<Verdict> of(const replay::WhatIf& what_if) const;
  // The recorded plan, if the devices had computed like this.
  Result<Verdict> of_compute(std::vector<graph::Iteration> iterations) const;
  // What a replayed or estimated time means.
  Verdict of_time(double iteration_ns, bool same_plan) const;

  // A gain below this may be the replay's error.
  double least_gain_percent() const;
  bool is_sure(const Verdict& verdict) const {
    return verdict.gain_percent > least_gain_percent() && verdict.low > 0;
  }
  double recorded_ns() const { return recorded_ns_; }
  const replay::Replayer& replayer() const { return *replayer_; }

 private:
  const graph::Graph* graph_ = nullptr;
  const replay::Replayer* replayer_ = nullptr;
  double recorded_ns_ = 0;
  // How far off a replay may be, as a share: of another plan; of the same with other compute.
  double plan_error_ = 0;
  double compute_error_ = 0;
};

}  // namespace weft::diagnose
