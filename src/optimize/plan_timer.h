// Asks the replayer how long an iteration takes under a plan, and remembers the answers.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "weft/replay.h"

namespace weft::optimize {

class PlanTimer {
 public:
  PlanTimer(const replay::Replayer& replayer, const replay::Cluster& cluster)
      : replayer_(replayer), cluster_(cluster) {}

  // Wall nanoseconds of one iteration; nothing when that cannot be replayed. Asked twice, a plan
  // is replayed once.
  std::optional<double> time_of(const plan::Plan& plan);

  // How long the devices stood still for each tensor under `plan`, summed over ranks.
  std::vector<double> waited_ns(const plan::Plan& plan);

  // A prediction for people: all iterations, not remembered.
  Result<replay::Prediction> predict(const replay::Question& question);

  // Milliseconds of the target, as people read them.
  double target_ms(double wall_ns) const {
    return replayer_.environment().to_target_ns(wall_ns) * 1e-6;
  }
  const replay::Cluster& cluster() const { return cluster_; }
  uint64_t replays() const { return replays_; }
  double seconds() const { return seconds_; }
  // Plans that could not be replayed, and what the first of them lacked.
  uint64_t refused() const { return refused_; }
  const std::string& first_refusal() const { return first_refusal_; }

 private:
  const replay::Replayer& replayer_;
  replay::Cluster cluster_;
  std::map<std::string, std::optional<double>> known_;  // by plan::hash
  uint64_t replays_ = 0;
  double seconds_ = 0;
  uint64_t refused_ = 0;
  std::string first_refusal_;
};

}  // namespace weft::optimize
