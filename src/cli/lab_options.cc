// The options of a lab run: read from the line, and understood.
#include "lab_options.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdlib>

#include "weft/plan.h"

namespace weft::cli {

namespace {

// "2:0.5" -> rank 2 at speed 0.5.
Result<std::pair<uint32_t, std::string>> ranked(const std::string& value, const char* form) {
  size_t colon = value.find(':');
  uint32_t rank = 0;
  auto [end, failure] =
      std::from_chars(value.data(), value.data() + std::min(colon, value.size()), rank);
  if (colon == std::string::npos || failure != std::errc() || end != value.data() + colon)
    return error(Code::invalid_argument, "\"%s\" is not of the form %s", value.c_str(), form);
  return std::pair(rank, value.substr(colon + 1));
}

Result<void> read_slow(const std::vector<std::string>& values, lab::RunOptions& run) {
  for (const std::string& value : values) {
    WEFT_ASSIGN(auto parts, ranked(value, "RANK:SPEED, such as 2:0.5"));
    char* end = nullptr;
    double speed = std::strtod(parts.second.c_str(), &end);
    if (end == parts.second.c_str() || *end != '\0' || !(speed > 0))
      return error(Code::invalid_argument, "--slow %s: \"%s\" is not a speed above 0",
                   value.c_str(), parts.second.c_str());
    run.slow[parts.first] = speed;
  }
  return {};
}

Result<void> read_clock(const std::vector<std::string>& values, lab::RunOptions& run) {
  for (const std::string& value : values) {
    WEFT_ASSIGN(auto parts, ranked(value, "RANK:OFFSET[:DRIFTppm], such as 1:+250ms:+50ppm"));
    std::string offset = parts.second, drift;
    if (size_t colon = offset.find(':'); colon != std::string::npos) {
      drift = offset.substr(colon + 1);
      offset.resize(colon);
    }
    lab::ClockError wrong;
    WEFT_ASSIGN(wrong.offset, parse_duration(offset));
    if (!drift.empty()) {
      char* end = nullptr;
      wrong.drift_ppm = std::strtod(drift.c_str(), &end);
      if (end == drift.c_str() || std::string_view(end) != "ppm")
        return error(Code::invalid_argument, "--clock %s: \"%s\" is not a drift such as +50ppm",
                     value.c_str(), drift.c_str());
    }
    run.clock[parts.first] = wrong;
  }
  return {};
}

Result<void> read_lane_rate(const std::vector<std::string>& values, lab::RunOptions& run) {
  for (const std::string& value : values) {
    WEFT_ASSIGN(auto parts, ranked(value, "LANE:RATE, such as 3:500mbit"));
    if (parts.first >= plan::kLanesMax)
      return error(Code::invalid_argument, "--lane-rate %s: there is no such lane", value.c_str());
    WEFT_ASSIGN(run.lane_rate[static_cast<uint16_t>(parts.first)], parse_rate(parts.second));
  }
  return {};
}

}  // namespace

Result<lab::RunOptions> understood(const LabOptions& options) {
  lab::RunOptions run = options.run;
  WEFT_ASSIGN(run.link_bits_per_s, parse_rate(options.link));
  if (!options.flow.empty()) {
    WEFT_ASSIGN(run.flow_bits_per_s, parse_rate(options.flow));
  }
  WEFT_ASSIGN(run.plan, plan::load(options.plan));
  WEFT_TRY(read_slow(options.slow, run));
  WEFT_TRY(read_clock(options.clock, run));
  WEFT_TRY(read_lane_rate(options.lane_rate, run));
  if (options.dilation > 0) run.dilation = options.dilation;
  if (options.shrink > 0) run.shrink = options.shrink;
  run.probe = !options.no_probe;
  return run;
}

void add_lab_options(CLI::App& verb, LabOptions& options) {
  verb.add_option("--model", options.run.model, "A model of `weft lab models`, or a file")
      ->required();
  verb.add_option("--hosts", options.run.hosts, "How many hosts, one rank each")
      ->capture_default_str();
  verb.add_option("--link", options.link, "Rate of each host's link")
      ->type_name("RATE")
      ->capture_default_str();
  verb.add_option("--flow", options.flow, "Most that one TCP flow may carry; none if not given")
      ->type_name("RATE");
  verb.add_option("--iterations", options.run.iterations, "How many; the first two do not count")
      ->capture_default_str();
  verb.add_option("--slow", options.slow, "Speed of a rank's compute, as in 2:0.5")
      ->type_name("RANK:SPEED");
  verb.add_option("--clock", options.clock, "Error of a rank's clock, as in 1:+250ms:+50ppm")
      ->type_name("RANK:OFFSET:DRIFT");
  verb.add_option("--lane-rate", options.lane_rate,
                  "Most that one lane may carry, as in 3:500mbit: a bad connection")
      ->type_name("LANE:RATE");
  verb.add_option("--seed", options.run.seed, "Of the gradients' values")->capture_default_str();
  verb.add_option("--dilation", options.dilation,
                  "Slow links and compute by this factor instead of the chosen one")
      ->check(CLI::Range(1.0, 1e6).description(""));
  verb.add_option("--shrink", options.shrink,
                  "Divide bytes and compute time by this factor instead of the chosen one")
      ->check(CLI::Range(1.0, 1e6).description(""));
  verb.add_option("--congestion-control", options.run.congestion_control, "Of TCP, on all hosts")
      ->capture_default_str();
  verb.add_option("--mtu", options.run.mtu, "Of all interfaces")
      ->check(CLI::Range(576u, 65535u).description(""))
      ->capture_default_str();
  verb.add_flag("--no-probe", options.no_probe, "Do not measure the network when joining");
}

}  // namespace weft::cli
