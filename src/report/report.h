// report: one self-contained page that opens from disk.
//
// Where the time went, the findings, before and after, predicted and measured, and a timeline of
// all ranks and lanes to zoom and pan, measured above predicted. No network, no other file: style,
// script and data stand in the page.
//
// Threads: pure functions.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "weft/diagnose.h"
#include "weft/optimize.h"
#include "weft/trace.h"

namespace weft::report {

// One run on the page, measured or predicted. Events are on one clock (weft/align.h).
struct Run {
  std::string label;  // "before, measured"
  const trace::Trace* trace = nullptr;
  double iteration_ms = 0;  // of the target
  double low_ms = 0, high_ms = 0;
  const diagnose::Diagnosis* diagnosis = nullptr;  // may be absent
};

struct Page {
  std::string title;
  std::vector<Run> runs;                           // in the order to show: before, after, predicted
  const plan::Plan* plan = nullptr;                // the plan that was chosen, if any
  const optimize::Optimized* optimized = nullptr;  // why it was chosen
  std::optional<double> prediction_error_percent;
  std::optional<double> self_replay_error_percent;
  std::optional<double> floor_ms;
  std::vector<std::string> remarks;  // what is emulated, unsound or unknown
  // Iterations of each run that the timeline shows, from the middle of the run.
  uint32_t timeline_iterations = 2;
};

// The whole page. Fails when no run is given.
Result<std::string> html(const Page& page);

}  // namespace weft::report
