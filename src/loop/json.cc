// What the loop found, for programs. Times are the target's milliseconds.
#include <nlohmann/json.hpp>

#include "weft/loop.h"

namespace weft::loop {
namespace {

using Json = nlohmann::ordered_json;

std::string text_of(const Json& object) {
  return object.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

Json decisions_of(const optimize::Optimized& optimized) {
  Json out = Json::array();
  for (const optimize::Decision& decision : optimized.decisions)
    out.push_back({{"field", decision.field},
                   {"before", decision.before},
                   {"after", decision.after},
                   {"why", decision.why}});
  return out;
}

Json interval_of(const Interval& interval) {
  return {{"iteration_ms", interval.value}, {"low", interval.low}, {"high", interval.high}};
}

}  // namespace

std::string json(const Outcome& outcome) {
  auto measured = [](const lab::RunResult& run, const std::string& plan) {
    Json out = interval_of(run.iteration_ms);
    out["plan"] = plan;
    out["sums_exact"] = run.sums_exact;
    out["sound"] = run.sound;
    return out;
  };
  const optimize::Optimized& optimized = outcome.optimized;
  auto ms = [&](double ns) { return outcome.environment.to_target_ns(ns) * 1e-6; };
  return text_of(
      {{"before", measured(outcome.before, outcome.plan_before.name)},
       {"after", measured(outcome.after, optimized.plan.name)},
       {"predicted", interval_of(outcome.predicted_ms)},
       {"prediction_error_percent", outcome.prediction_error_percent},
       {"self_replay_error_percent", outcome.fidelity.error_percent},
       {"speedup", outcome.speedup},
       {"kept_old", outcome.kept_old},
       {"findings", Json::parse(analysis::findings_json(outcome.diagnosis))},
       {"decisions", decisions_of(optimized)},
       {"gradients_equal", outcome.before.sums_exact && outcome.after.sums_exact},
       {"floor_ms", outcome.before.floor_ms},
       {"communication_free_ms", ms(optimized.bound_ns)},
       {"search",
        {{"seconds", optimized.seconds},
         {"replays", optimized.replays},
         {"finished", optimized.finished}}},
       {"dilation", outcome.before.dilation},
       {"shrink", outcome.before.shrink},
       {"cpu_busy_percent",
        std::max(outcome.before.cpu_busy_percent, outcome.after.cpu_busy_percent)},
       {"steal_percent", std::max(outcome.before.steal_percent, outcome.after.steal_percent)},
       {"sound", outcome.before.sound && outcome.after.sound},
       {"unknown", outcome.predicted.unknown},
       {"assumed", outcome.predicted.assumed},
       {"paths",
        {{"before", outcome.paths.before},
         {"after", outcome.paths.after},
         {"predicted", outcome.paths.predicted},
         {"plan", outcome.paths.plan},
         {"report", outcome.paths.report}}},
       {"remarks", outcome.remarks}});
}

}  // namespace weft::loop
