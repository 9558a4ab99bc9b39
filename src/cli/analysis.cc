#include "analysis.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace weft::cli {

using Json = nlohmann::ordered_json;

double to_target_ms(const trace::Environment& environment, double wall_ns) {
  return environment.to_target_ns(wall_ns) * 1e-6;
}

std::string target_ms(const trace::Environment& environment, double wall_ns) {
  return text("%.1f ms", to_target_ms(environment, wall_ns));
}

std::string percent_text(double percent) { return text("%+.1f %%", percent); }

void print_notes(const char* label, const std::vector<std::string>& lines) {
  for (const std::string& line : lines) print(text("%-11s ", label) + line + "\n");
}

Result<replay::Cluster> cluster_of(const std::vector<std::string>& assignments, bool as_lab) {
  replay::Cluster cluster;
  cluster.of = as_lab ? replay::Of::lab : replay::Of::target;
  for (const std::string& assignment : assignments) {
    auto done = replay::set(cluster, assignment);
    if (!done) return std::move(done).error().in("--set");
  }
  return cluster;
}

std::string describe(const replay::Cluster& cluster) {
  std::string out;
  auto add = [&](const std::string& part) { out += (out.empty() ? "" : ", ") + part; };
  if (cluster.hosts) add(text("%u hosts", *cluster.hosts));
  if (cluster.link_bits_per_s) add("link " + format_rate(*cluster.link_bits_per_s));
  if (cluster.flow_bits_per_s)
    add(std::isinf(*cluster.flow_bits_per_s) ? "no cap on a flow"
                                             : "flow " + format_rate(*cluster.flow_bits_per_s));
  if (out.empty()) out = "the recorded cluster";
  return cluster.of == replay::Of::lab ? out + ", in the lab" : out;
}

std::function<void(const std::string&)> narrator() {
  if (isatty(STDERR_FILENO) == 0) return {};
  return [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
}

Json interval_json(const trace::Environment& environment, const replay::Prediction& prediction) {
  return {{"iteration_ms", to_target_ms(environment, prediction.iteration_ns)},
          {"low", to_target_ms(environment, prediction.low_ns)},
          {"high", to_target_ms(environment, prediction.high_ns)}};
}

Json fidelity_json(const trace::Environment& environment, const replay::Fidelity& fidelity) {
  auto rows = [&](const std::vector<replay::Fidelity::Row>& list) {
    Json out = Json::array();
    for (const replay::Fidelity::Row& row : list) {
      double error =
          row.measured_ns > 0 ? 100 * (row.replayed_ns - row.measured_ns) / row.measured_ns : 0;
      out.push_back({{"what", row.what},
                     {"measured_ms", to_target_ms(environment, row.measured_ns)},
                     {"replayed_ms", to_target_ms(environment, row.replayed_ns)},
                     {"error_percent", error}});
    }
    return out;
  };
  return {{"measured_ms", to_target_ms(environment, fidelity.measured_ns)},
          {"replayed_ms", to_target_ms(environment, fidelity.replayed_ns)},
          {"error_percent", fidelity.error_percent},
          {"sums_as_measured", fidelity.sums_as_measured},
          {"ranks", rows(fidelity.ranks)},
          {"kinds", rows(fidelity.kinds)}};
}

}  // namespace weft::cli
