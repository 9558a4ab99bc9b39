// Constants as text.
#include <nlohmann/json.hpp>

#include "weft/cost.h"

namespace weft::cost {
namespace {

using Json = nlohmann::ordered_json;

struct Constant {
  const char* name;
  std::optional<Fitted> Costs::*where;
};
constexpr Constant kConstants[] = {{"round_trip_ns", &Costs::round_trip_idle_ns},
                                   {"bytes_per_s", &Costs::link_bytes_per_s},
                                   {"message_ns", &Costs::cpu_ns_per_chunk},
                                   {"copy_ns_per_byte", &Costs::copy_ns_per_byte},
                                   {"reduce_ns_per_byte", &Costs::reduce_ns_per_byte}};
constexpr double kMost = 1e15;  // of any constant, in its unit
constexpr JsonLimits kLimits = {.depth = 8, .values = 1000};

Fitted only(double value) { return {value, value, value, 1}; }

}  // namespace

std::string to_json(const Costs& costs) {
  Json out = {{"weft_costs", 1}};
  for (const Constant& constant : kConstants)
    if (const auto& fitted = costs.*constant.where) out[constant.name] = fitted->value;
  return out.dump(2) + "\n";
}

Result<Costs> from_json(std::string_view text) {
  if (auto small = check_json(text, kLimits); !small)
    return error(Code::corrupt, "not a file of costs: %s", small.error().message().c_str());
  Json in = Json::parse(text, nullptr, false);
  if (!in.is_object() || in.value("weft_costs", Json()) != Json(1))
    return error(Code::corrupt,
                 "not a file of costs: expected a JSON object with \"weft_costs\": 1, as `weft "
                 "bench algorithms -o FILE` writes it");
  Costs costs;
  for (const Constant& constant : kConstants) {
    auto found = in.find(constant.name);
    if (found == in.end()) continue;
    if (!found->is_number() || !(found->get<double>() >= 0) || found->get<double>() > kMost)
      return error(Code::corrupt, "\"%s\" is %s: expected a number from 0 to %g", constant.name,
                   found->dump().substr(0, 40).c_str(), kMost);
    costs.*constant.where = only(found->get<double>());
  }
  if (!costs.link_bytes_per_s || !(costs.link_bytes_per_s->value > 0) || !costs.round_trip_idle_ns)
    return error(Code::corrupt, "\"bytes_per_s\" and \"round_trip_ns\" must be there");
  return costs;
}

Costs typical() {
  Costs costs;
  costs.round_trip_idle_ns = only(10e3);
  costs.link_bytes_per_s = only(8e9);
  costs.cpu_ns_per_chunk = only(15e3);
  costs.reduce_ns_per_byte = only(1.6);
  return costs;
}

}  // namespace weft::cost
