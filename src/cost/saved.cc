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

// Takes the constants out of a text as it is read. No tree is made of it: ranks read what they
// agree on when they meet, and taking a tree of nlohmann's apart needs memory, for want of which
// the process would end.
class Reader final : public nlohmann::json_sax<Json> {
 public:
  bool is_costs = false;
  Costs costs;
  std::string problem;  // with one of the constants

  bool null() override { return value(std::nullopt); }
  bool boolean(bool) override { return value(std::nullopt); }
  bool number_integer(number_integer_t number) override {
    return value(static_cast<double>(number));
  }
  bool number_unsigned(number_unsigned_t number) override {
    return value(static_cast<double>(number));
  }
  bool number_float(number_float_t number, const string_t&) override { return value(number); }
  bool string(string_t&) override { return value(std::nullopt); }
  bool binary(binary_t&) override { return value(std::nullopt); }
  bool start_object(size_t) override { return begin(true); }
  bool key(string_t& name) override {
    if (depth_ == 1) key_ = name;
    return true;
  }
  bool end_object() override { return end(); }
  bool start_array(size_t) override { return begin(false); }
  bool end_array() override { return end(); }
  bool parse_error(size_t, const std::string&, const Json::exception&) override { return false; }

 private:
  bool begin(bool object) {
    bool fits = depth_ > 0 ? value(std::nullopt) : object;
    ++depth_;
    return fits;
  }
  bool end() {
    --depth_;
    return true;
  }
  bool value(std::optional<double> number) {
    if (depth_ == 0) return false;
    if (depth_ > 1) return true;
    if (key_ == "weft_costs") is_costs = number == 1.0;
    for (const Constant& constant : kConstants) {
      if (key_ != constant.name) continue;
      if (number && *number >= 0 && *number <= kMost)
        costs.*constant.where = only(*number);
      else
        problem = text("\"%s\" is %s: expected a number from 0 to %g", constant.name,
                       number ? text("%g", *number).c_str() : "no number", kMost);
    }
    return true;
  }

  size_t depth_ = 0;
  std::string key_;
};

}  // namespace

std::string to_json(const Costs& costs) {
  std::string out = "{\n  \"weft_costs\": 1";
  for (const Constant& constant : kConstants)
    if (const auto& fitted = costs.*constant.where)
      out += text(",\n  \"%s\": %.17g", constant.name, fitted->value);
  return out + "\n}\n";
}

Result<Costs> from_json(std::string_view text) {
  if (auto small = check_json(text, kLimits); !small)
    return error(Code::corrupt, "not a file of costs: %s", small.error().message().c_str());
  Reader reader;
  if (!Json::sax_parse(text, &reader) || !reader.is_costs)
    return error(Code::corrupt,
                 "not a file of costs: expected a JSON object with \"weft_costs\": 1, as `weft "
                 "bench algorithms -o FILE` writes it");
  if (!reader.problem.empty()) return error(Code::corrupt, "%s", reader.problem.c_str());
  Costs& costs = reader.costs;
  if (!costs.link_bytes_per_s || !(costs.link_bytes_per_s->value > 0) || !costs.round_trip_idle_ns)
    return error(Code::corrupt, "\"bytes_per_s\" and \"round_trip_ns\" must be there");
  return std::move(costs);
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
