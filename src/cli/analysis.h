// Private to cli: what the verbs of analysis (align, show, replay, diagnose, optimize, diff,
// report) share.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "verb.h"
#include "weft/analysis.h"

namespace weft::cli {

// Wall nanoseconds of a run as "318.2 ms" of the target.
std::string target_ms(const trace::Environment& environment, double wall_ns);
double to_target_ms(const trace::Environment& environment, double wall_ns);
// "+1.2 %".
std::string percent_text(double percent);
// "note        ..." lines, one a remark.
void print_notes(const char* label, const std::vector<std::string>& lines);

// The assignments of --set, such as link=10gbit, and whether --as-lab was given.
Result<replay::Cluster> cluster_of(const std::vector<std::string>& assignments, bool as_lab);
inline constexpr const char* kAsLab =
    "As the run's lab would measure it, where all hosts share one machine's processors; otherwise "
    "as the cluster that it stands for";
// The same option of several verbs.
inline constexpr const char* kProbeOption =
    "What weft probe -o PROBE measured under the launcher of a run that has no probe of its own; "
    "RUN/probe if absent";
inline constexpr const char* kUnder =
    "Where the plan changed during the run: take the steps under the plan of this name or hash; "
    "the "
    "last plan's if not given";
// "recorded", or what was set: "link 10.00 Gb/s, 8 hosts".
std::string describe(const replay::Cluster& cluster);

// Lines to standard error if that is a terminal, otherwise nothing.
std::function<void(const std::string&)> narrator();

// {"iteration_ms", "low", "high"} of a prediction.
nlohmann::ordered_json interval_json(const trace::Environment& environment,
                                     const replay::Prediction& prediction);
nlohmann::ordered_json fidelity_json(const trace::Environment& environment,
                                     const replay::Fidelity& fidelity);

}  // namespace weft::cli
