// What a diagnosis found, for programs. Times are the target's milliseconds.
#include <nlohmann/json.hpp>

#include "weft/analysis.h"

namespace weft::analysis {
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

}  // namespace

std::string findings_json(const diagnose::Diagnosis& diagnosis) {
  return text_of(findings_of(diagnosis));
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
  Json alternatives = Json::array();
  for (const diagnose::Alternative& way : diagnosis.alternatives)
    alternatives.push_back({{"name", way.name},
                            {"iteration_ms", ms(way.iteration_ns)},
                            {"gain_percent", way.gain_percent},
                            {"low", way.low},
                            {"high", way.high}});
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
                  {"alternatives", std::move(alternatives)},
                  {"fidelity_error_percent", diagnosis.fidelity_error_percent},
                  {"layers", details(diagnosis.layers)},
                  {"tensors", details(diagnosis.tensors)},
                  {"lanes", std::move(lanes)},
                  {"remarks", std::move(remarks)}});
}

}  // namespace weft::analysis
