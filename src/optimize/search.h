// The search itself: descends by passes from several starts, then from disturbed plans, and at the
// end gives back what does not pay.
#pragma once

#include <functional>

#include "plan_timer.h"
#include "space.h"

namespace weft::optimize {

// An edit must gain this share of the iteration to stay.
inline constexpr double kGain = 0.001;
// Plans this close are equal: the simpler one wins.
inline constexpr double kTie = 0.002;
// What replay promises from another algorithm or other workers must be at least this: few of them
// were run and compared (docs/optimize.md).
inline constexpr double kUntried = 0.02;
// What all margins together may cost by replay (docs/optimize.md).
inline constexpr double kMargin = 0.005;

struct Candidate {
  plan::Plan plan;
  double ns = 0;
};

class Search {
 public:
  // `deadline` is on the monotonic clock; `bound_ns` is what no plan passes, 0 when unknown.
  Search(PlanTimer& timer, const Space& space, const Options& options, double bound_ns);

  // From the recorded plan, which takes `recorded_ns`, to the best one. Never worse than it.
  Candidate run(double recorded_ns);

  bool finished() const { return !cut_; }
  const std::vector<PassUse>& passes() const { return passes_; }

 private:
  bool spent(double share);
  std::optional<double> time_of(const plan::Plan& plan);
  std::vector<plan::Plan> edits_of(const std::string& pass, const plan::Plan& plan, Rng* rng);
  bool improve(const std::string& pass, Candidate& now);
  void descend(Candidate& now);
  bool settled(double ns) const;
  std::optional<Candidate> disturbed(const Candidate& from, Rng& rng);
  void restart(Candidate& best, const plan::Plan& best_start, std::vector<Candidate> others);

  bool back_to(const std::string& pass, const plan::Plan& from, double limit, Candidate& now);
  void simplify(Candidate& best);
  void fewest_lanes(double limit, Candidate& now);
  void take_margins(Candidate& now);

  void say(const char* what, double ns) const;

  PlanTimer& timer_;
  const Space& space_;
  const Options& options_;
  double bound_ns_;
  Nanos start_;
  double share_ = 0;  // of the budget, that the current part of the search may use
  bool cut_ = false;
  std::vector<PassUse> passes_;  // in the order of pass_names(), those that are on
};

}  // namespace weft::optimize
