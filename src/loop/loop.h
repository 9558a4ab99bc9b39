// loop: run, trace, align, graph, replay, diagnose, optimize, apply the plan, run again, and say
// how far the prediction was off.
//
//   run ──► Recorded (one clock, a graph) ──► Analysis (a replayer) ──► diagnosis, better plan
//    ▲                                                                          │
//    └────────────────────────── the same job under it ◄────────────────────────┘
//
// It holds no knowledge of its own: each step is a module, and here they stand in a row. What
// the verbs of analysis share (reading a run, comparing two, JSON) is here too.
//
// Threads: run() needs a process with one thread, as lab::run() does; the rest are pure functions.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "weft/align.h"
#include "weft/diagnose.h"
#include "weft/lab.h"
#include "weft/optimize.h"
#include "weft/replay.h"

namespace weft::loop {

// ---- understanding a run -------------------------------------------------------------------

// Puts all processes on one clock. A predicted trace has one clock, and is not touched.
Result<align::Alignment> put_on_one_clock(trace::Trace& trace);

// A trace on one clock, and its graph: enough to look at, and to compare.
struct Recorded {
  trace::Trace trace;
  align::Alignment alignment;
  graph::Graph graph;
  std::vector<std::string> remarks;  // what was missing, damaged or left out, for people

  const trace::Environment& environment() const { return graph.environment; }
  bool predicted() const { return graph.environment.predicted; }
  // One iteration in the target's milliseconds, on the rank that is slowest; those that count.
  lab::Interval iteration_ms() const;
};
// Errors name the run, what it lacks, and what to do.
Result<Recorded> understand(trace::Trace trace);
Result<Recorded> understand(const std::string& run);

// The same, and what prediction needs. A run that moved no gradient is replayed as compute alone,
// and its remarks say so.
struct Analysis {
  Recorded recorded;
  cost::Costs costs;
  replay::Replayer replayer;
};
Result<Analysis> analyze(Recorded recorded);
Result<Analysis> analyze(const std::string& run);

// Writes every process of a trace into a folder, which must be absent or empty.
Result<void> write_run(const trace::Trace& trace, const std::string& folder);
// The events of a predicted run, with the asked cluster among its facts.
// REQUIRES: prediction.trace.
void note_cluster(replay::Prediction& prediction, const replay::Cluster& cluster);

// ---- comparing two runs --------------------------------------------------------------------

// In the target's time. A side that has no such thing is absent.
struct Row {
  std::string what;
  std::optional<double> before, after;
};
struct Comparison {
  lab::Interval before, after;  // iteration_ms
  std::vector<Row> kinds;       // ms of one iteration of one rank
  std::vector<Row> ranks;       // ms of an iteration
  std::vector<Row> layers;      // ms that training waited for a layer's gradients
  std::optional<std::vector<plan::Difference>> plan;  // absent: a run has no plan
  double percent() const;                             // of the iteration: after against before
};
Comparison compare(const Recorded& before, const Recorded& after);

// ---- the loop ------------------------------------------------------------------------------

struct Options {
  lab::RunOptions lab;  // its plan is the one before; its output is not used
  optimize::Options optimize;
  std::string output;  // folder to make
};

struct Paths {
  std::string before, after, predicted, plan, report;
};

struct Outcome {
  lab::RunResult before, after;
  replay::Prediction predicted;  // of the plan that was applied; without its trace
  lab::Interval predicted_ms;    // the same in the target's time
  replay::Fidelity fidelity;
  diagnose::Diagnosis diagnosis;  // of the run before
  optimize::Optimized optimized;
  trace::Environment environment;  // of the run before
  plan::Plan plan_before;
  double prediction_error_percent = 0;  // (predicted - measured) / measured
  double speedup = 1;                   // before / after, as measured
  bool kept_old = false;  // no plan was better: none was found, or it was measured slower
  Paths paths;
  std::vector<std::string> remarks;
};

// Makes before/, after/, predicted/, plan.json, report.html and loop.json in `output`. plan.json is
// the better plan as measured; when that is the old one, a new one that lost is in rejected.json.
// The second run has the factors of the first. Fails with what the steps fail with.
Result<Outcome> run(const Options& options,
                    const std::function<void(const std::string&)>& progress);

// ---- as JSON -------------------------------------------------------------------------------

// One object each, two-space indent, a newline at the end; times are the target's.
std::string json(const Outcome& outcome);
std::string json(const std::string& run, const Analysis& analysis,
                 const diagnose::Diagnosis& diagnosis);

}  // namespace weft::loop
