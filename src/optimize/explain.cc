#include "explain.h"

#include <cmath>

#include "search.h"

namespace weft::optimize {
namespace {

using plan::Plan;

// Which pass decides the value at a path of the document.
std::string pass_of(const std::string& path) {
  size_t end = path.find('/', 1);
  std::string field = path.substr(1, end == std::string::npos ? end : end - 1);
  if (field == "bucket_rule") return "bucket";
  if (field == "buckets") return "boundaries";
  if (field == "lane_worker" || field == "lane_workers") return "workers";
  return field;
}

// The chosen plan with the value at `path` as it was recorded.
Plan undone(const std::string& path, const Plan& chosen, const Plan& recorded) {
  Plan out = chosen;
  if (path == "/bucket_rule/first") {
    out.bucket_rule.first = recorded.bucket_rule.first;
  } else if (path == "/bucket_rule/size") {
    out.bucket_rule.size = recorded.bucket_rule.size;
  } else if (path == "/bucket_rule/may_exceed") {
    out.bucket_rule.may_exceed = recorded.bucket_rule.may_exceed;
  } else {
    take(pass_of(path), recorded, out);
  }
  return out;
}

std::string groups(const Plan& plan) {
  if (plan.buckets.empty()) return "none";
  return text("%zu groups by name", plan.buckets.size());
}

std::string algorithms(const Plan& plan) {
  std::string out;
  for (const plan::AlgorithmRule& rule : plan.algorithm) {
    out += (out.empty() ? "" : ", ") + rule.use;
    if (rule.up_to) out += " up to " + format_bytes(*rule.up_to);
  }
  return out;
}

// What speaks for a value that replay cannot tell from the recorded one.
std::string reason_of_tie(const std::string& path, const Plan& chosen, const Space& space) {
  std::string pass = pass_of(path);
  if (pass == "lanes") {
    if (space.spare_lanes() == chosen.lanes)
      return text("a margin: %u fill the link, one more makes up for a slow one",
                  *space.filling_lanes);
    return "kept because the rest was chosen with it";
  }
  // The rule's values are compared one by one, as they are explained one by one.
  if (undone(path, chosen, space.expert) == chosen) {
    bool bounds = pass == "partition" || pass == "credit";
    return bounds && chosen.order == plan::Order::layer
               ? "as in the default, a margin so that the urgent can overtake"
               : "kept as in the default";
  }
  return "kept because the rest was chosen with it";
}

std::string flows(const Space& space) {
  if (!space.flow_capped() || !std::isfinite(space.flow_bits_per_s)) return "";
  return text("; one flow carries %s of the link's %s", format_rate(space.flow_bits_per_s).c_str(),
              format_rate(space.link_bits_per_s).c_str());
}

std::string why(const std::string& path, const Plan& chosen, double chosen_ns, const Space& space,
                PlanTimer& timer) {
  std::string facts = pass_of(path) == "lanes" ? flows(space) : "";
  auto other = timer.time_of(undone(path, chosen, space.recorded));
  if (!other || !(chosen_ns > 0)) return "undone alone it cannot be replayed" + facts;
  double slower = *other / chosen_ns - 1;
  if (slower > kGain)
    return text("undone alone, an iteration takes %.1f %% longer: %.1f instead of %.1f ms",
                slower * 100, timer.target_ms(*other), timer.target_ms(chosen_ns)) +
           facts;
  std::string reason = reason_of_tie(path, chosen, space) + facts;
  if (slower < -kGain)
    return text("undone alone, an iteration takes %.2f %% less by replay: %s", -slower * 100,
                reason.c_str());
  return "no difference by replay: " + reason;
}

}  // namespace

std::vector<Decision> explain(const Plan& chosen, double chosen_ns, const Space& space,
                              PlanTimer& timer) {
  Plan before = space.recorded;
  before.name = chosen.name;
  before.comment = chosen.comment;
  std::vector<Decision> out;
  bool said_groups = false, said_algorithms = false;
  for (const plan::Difference& difference : plan::diff(before, chosen)) {
    Decision decision = {difference.path, difference.before, difference.after, ""};
    if (pass_of(difference.path) == "boundaries") {
      if (std::exchange(said_groups, true)) continue;
      decision = {"/buckets", groups(before), groups(chosen), ""};
    }
    if (pass_of(difference.path) == "algorithm") {
      if (std::exchange(said_algorithms, true)) continue;
      decision = {"/algorithm", algorithms(before), algorithms(chosen), ""};
    }
    decision.why = why(decision.field, chosen, chosen_ns, space, timer);
    out.push_back(std::move(decision));
  }
  return out;
}

}  // namespace weft::optimize
