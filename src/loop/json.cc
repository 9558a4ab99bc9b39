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

// What both kinds of loops say alike, behind `out`'s own.
void add_found(const Found& found, Json& out) {
  const optimize::Optimized& optimized = found.optimized;
  out["predicted"] = interval_of(found.predicted_ms);
  out["prediction_error_percent"] = found.prediction_error_percent;
  out["self_replay_error_percent"] = found.fidelity.error_percent;
  out["speedup"] = found.speedup;
  out["kept_old"] = found.kept_old;
  out["findings"] = Json::parse(analysis::findings_json(found.diagnosis));
  out["decisions"] = decisions_of(optimized);
  out["communication_free_ms"] = found.environment.to_target_ns(optimized.bound_ns) * 1e-6;
  out["search"] = {{"seconds", optimized.seconds},
                   {"replays", optimized.replays},
                   {"finished", optimized.finished}};
  out["unknown"] = found.predicted.unknown;
  out["assumed"] = found.predicted.assumed;
  out["paths"] = {{"before", found.paths.before},
                  {"after", found.paths.after},
                  {"predicted", found.paths.predicted},
                  {"plan", found.paths.plan},
                  {"report", found.paths.report}};
  out["remarks"] = found.remarks;
}

}  // namespace

std::string json(const ProgramOutcome& outcome) {
  auto measured = [](const Run& run, const std::string& plan) {
    Json out = interval_of(run.iteration_ms);
    out["plan"] = plan;
    out["iterations"] = run.iterations;
    out["seconds"] = run.took.seconds();
    return out;
  };
  Json out = {{"ranks", outcome.ranks},
              {"before", measured(outcome.before, outcome.plan_before.name)},
              {"after", measured(outcome.after, outcome.optimized.plan.name)},
              {"framework_cuts", outcome.framework_cuts},
              {"attached", outcome.attached_ms ? interval_of(*outcome.attached_ms) : Json()}};
  add_found(outcome, out);
  return text_of(out);
}

std::string json(const Outcome& outcome) {
  auto measured = [](const lab::RunResult& run, const std::string& plan) {
    Json out = interval_of(run.iteration_ms);
    out["plan"] = plan;
    out["sums_exact"] = run.sums_exact;
    out["sound"] = run.sound;
    return out;
  };
  Json out = {
      {"before", measured(outcome.before, outcome.plan_before.name)},
      {"after", measured(outcome.after, outcome.optimized.plan.name)},
      {"gradients_equal", outcome.before.sums_exact && outcome.after.sums_exact},
      {"floor_ms", outcome.before.floor_ms},
      {"dilation", outcome.before.dilation},
      {"shrink", outcome.before.shrink},
      {"cpu_busy_percent",
       std::max(outcome.before.cpu_busy_percent, outcome.after.cpu_busy_percent)},
      {"steal_percent", std::max(outcome.before.steal_percent, outcome.after.steal_percent)},
      {"sound", outcome.before.sound && outcome.after.sound}};
  add_found(outcome, out);
  return text_of(out);
}

}  // namespace weft::loop
