// What the loop and the diagnosis found, for programs. Times are the target's milliseconds.
#include <nlohmann/json.hpp>

#include "weft/loop.h"

namespace weft::loop {
namespace {

using Json = nlohmann::ordered_json;

std::string text_of(const Json& object) {
  return object.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

Json findings_of(const diagnose::Diagnosis& diagnosis) {
  Json out = Json::array();
  for (const diagnose::Finding& finding : diagnosis.findings)
    out.push_back({{"name", finding.name},
                   {"title", finding.title},
                   {"rank", finding.rank ? Json(*finding.rank) : Json(nullptr)},
                   {"gain_percent", finding.gain_percent},
                   {"low", finding.low},
                   {"high", finding.high},
                   {"evidence", finding.evidence},
                   {"remedy", finding.remedy}});
  return out;
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

Json interval_of(const lab::Interval& interval) {
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
       {"findings", findings_of(outcome.diagnosis)},
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

std::string json(const std::string& run, const Analysis& analysis,
                 const diagnose::Diagnosis& diagnosis) {
  const trace::Environment& environment = analysis.recorded.environment();
  auto ms = [&](double ns) { return environment.to_target_ns(ns) * 1e-6; };
  auto bytes = [&](double real) { return environment.to_target_bytes(real); };
  Json path = Json::array();
  for (const diagnose::Share& share : diagnosis.path)
    path.push_back({{"what", share.what}, {"ms", ms(share.ns)}, {"percent", share.percent}});
  auto details = [&](const std::vector<diagnose::Detail>& list) {
    Json out = Json::array();
    for (const diagnose::Detail& detail : list)
      out.push_back({{"name", detail.name},
                     {"bytes", bytes(detail.bytes)},
                     {"compute_ms", ms(detail.compute_ns)},
                     {"transfer_ms", ms(detail.transfer_ns)},
                     {"waited_ms", ms(detail.waited_ns)},
                     {"queued_ms", ms(detail.queued_ns)}});
    return out;
  };
  Json lanes = Json::array();
  for (const diagnose::LaneUse& lane : diagnosis.lanes)
    lanes.push_back({{"rank", lane.rank},
                     {"lane", lane.lane},
                     {"bits_per_s", 8 * lane.bytes_per_s * environment.dilation},
                     {"busy_percent", lane.busy_percent}});
  Json bounds = Json::array();
  for (const diagnose::Bound& bound : diagnosis.bounds)
    bounds.push_back({{"name", bound.name},
                      {"iteration_ms", ms(bound.iteration_ns)},
                      {"gain_percent", bound.gain_percent}});
  std::vector<std::string> remarks = analysis.recorded.remarks;
  remarks.insert(remarks.end(), diagnosis.remarks.begin(), diagnosis.remarks.end());
  return text_of({{"run", run},
                  {"predicted", environment.predicted},
                  {"plan", environment.plan_name},
                  {"iteration_ms", ms(diagnosis.iteration_ns)},
                  {"path", std::move(path)},
                  {"communication_ms", ms(diagnosis.communication_ns)},
                  {"overlapped_ms", ms(diagnosis.overlapped_ns)},
                  {"overlap_possible_ms", ms(diagnosis.overlap_possible_ns)},
                  {"exposed_ms", ms(diagnosis.exposed_ns)},
                  {"findings", findings_of(diagnosis)},
                  {"rejected", diagnosis.rejected},
                  {"bounds", std::move(bounds)},
                  {"fidelity_error_percent", diagnosis.fidelity_error_percent},
                  {"layers", details(diagnosis.layers)},
                  {"tensors", details(diagnosis.tensors)},
                  {"lanes", std::move(lanes)},
                  {"remarks", std::move(remarks)}});
}

}  // namespace weft::loop
