#include "profile.h"

#include <cmath>
#include <fstream>

namespace weft::trace {
namespace {

using nlohmann::json;

constexpr int kDepthMax = 64;  // deeper values of an event are left out
constexpr double kMicrosMax = 9e15;

// Where a parser's callback is in the file: events are the elements of "traceEvents", or those of
// a file that is one array.
struct Place {
  std::string key;  // at the top
  bool array = false;

  bool is_event(int depth) const { return array ? depth == 1 : depth == 2 && key == "traceEvents"; }
};

std::optional<int64_t> micros_of(const json& event, int64_t base_ns) {
  const auto found = event.find("ts");
  if (found == event.end() || !found->is_number()) return std::nullopt;
  int64_t ns = 0;
  if (found->is_number_integer() && std::abs(found->get<double>()) < kMicrosMax) {
    ns = found->get<int64_t>() * 1000;
  } else {
    const double micros = found->get<double>();
    if (!(std::abs(micros) < kMicrosMax)) return std::nullopt;
    ns = std::llround(micros * 1000);
  }
  int64_t out = 0;
  if (__builtin_add_overflow(ns, base_ns, &out)) return std::nullopt;
  return out;
}

Error not_a_profile(const std::string& path, const char* why) {
  return error(Code::corrupt,
               "%s: %s; expected the JSON that torch.profiler writes (export_chrome_trace)",
               path.c_str(), why);
}

// Calls `use` with each event, which is then forgotten, and returns what else is in the file.
Result<json> parse(const std::string& path, const std::function<void(json&)>& use) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return io_error(errno, "cannot read %s", path.c_str());
  if (in.peek() == 0x1f) return not_a_profile(path, "the file is compressed: gunzip it first");
  Place place;
  const auto visit = [&](int depth, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::array_start:
        if (depth == 0) place.array = true;
        return depth <= kDepthMax;
      case json::parse_event_t::object_start: return depth <= kDepthMax;
      case json::parse_event_t::key:
        if (depth == 1 && !place.array) place.key = parsed.get<std::string>();
        return true;
      case json::parse_event_t::object_end:
        if (!place.is_event(depth)) return true;
        use(parsed);
        return false;
      default: return !place.is_event(depth);
    }
  };
  json rest = json::parse(in, visit, false);
  if (rest.is_discarded()) return not_a_profile(path, "it is no JSON, or it ends too early");
  return rest;
}

}  // namespace

Result<ProfileHead> read_profile_head(const std::string& path) {
  ProfileHead head;
  WEFT_ASSIGN(const json rest, parse(path, [&](json& event) {
                const auto at = micros_of(event, 0);
                if (!at) return;
                head.first_ns = head.events == 0 ? *at : std::min(head.first_ns, *at);
                head.last_ns = head.events == 0 ? *at : std::max(head.last_ns, *at);
                head.events += 1;
              }));
  if (head.events == 0) return not_a_profile(path, "there is no event with a time in it");
  if (!rest.is_object()) return head;
  if (const auto base = rest.find("baseTimeNanoseconds");
      base != rest.end() && base->is_number_integer())
    head.base_ns = base->get<int64_t>();
  if (__builtin_add_overflow(head.first_ns, head.base_ns, &head.first_ns) ||
      __builtin_add_overflow(head.last_ns, head.base_ns, &head.last_ns))
    return not_a_profile(path, "its times are beyond any clock");
  const auto group = rest.find("distributedInfo");
  if (group != rest.end() && group->is_object() && group->contains("rank") &&
      (*group)["rank"].is_number_unsigned())
    head.rank = (*group)["rank"].get<uint32_t>();
  return head;
}

Result<void> read_profile(const std::string& path, const ProfileHead& head,
                          const ProfileUser& user) {
  auto rest = parse(path, [&](json& event) { user(event, micros_of(event, head.base_ns)); });
  if (!rest) return rest.error();
  return {};
}

}  // namespace weft::trace
