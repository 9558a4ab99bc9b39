#include "launch_report.h"

namespace weft::cli {

using Json = nlohmann::ordered_json;

Json described(const launch::Report& report) {
  Json outcomes = Json::array();
  for (const launch::Outcome& outcome : report.outcomes) {
    Json one = {{"rank", outcome.rank}};
    if (outcome.signal != 0) {
      one["signal"] = outcome.signal;
    } else {
      one["exit_code"] = outcome.exit_code;
    }
    one["ended_by_us"] = outcome.ended_by_us;
    one["seconds"] = outcome.after.seconds();
    outcomes.push_back(std::move(one));
  }
  return {{"ok", report.ok()},
          {"first_failure", report.first_failure ? Json(*report.first_failure) : Json()},
          {"reason", report.reason},
          {"outcomes", std::move(outcomes)}};
}

std::string flaw_of_duration(const std::string& value) {
  const auto duration = parse_duration(value);
  if (!duration) return duration.error().message();
  return duration->count > 0 ? "" : "\"" + value + "\" is not a time to wait";
}

}  // namespace weft::cli
