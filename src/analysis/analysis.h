// analysis: from a folder of files to an understood run, which every verb of analysis begins with.
//
//   files ──► Recorded (one clock, a graph) ──► Analysis (costs, a replayer) ──► diagnosis, plans
//
// It holds no knowledge of its own: each step is a module, and here they stand in a row.
// Threads: pure functions.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "weft/align.h"
#include "weft/diagnose.h"
#include "weft/optimize.h"
#include "weft/replay.h"

namespace weft::analysis {

// ---- understanding a run -------------------------------------------------------------------

// Gradients that say their bucket, in a run without an exchange, were summed by all-reduces that a
// framework called itself (PyTorch's DDP). Finds which those were, on all ranks alike, and makes of
// them what an exchange would have recorded, and of the buckets the plan in force. Says what it
// did; nothing where there is nothing to do. Sums without messages are of another backend: then the
// plan is what weft would do with these buckets.
std::vector<std::string> adopt_called_sums(trace::Trace& trace);
// Adds to a run what `weft probe` measured under the same launcher: ranks, hosts and their clocks
// must be those of the run, which must have no probe of its own.
Result<void> add_probe(trace::Trace& run, const trace::Trace& probe);
// A folder of this name inside a run is its probe, where the run has none of its own.
inline constexpr const char* kProbeFolder = "probe";
// Whether that was so: then the framework cuts and orders gradients itself, and of a plan it obeys
// lanes, chunks, workers and algorithms.
bool framework_cuts(const trace::Trace& trace);
// The passes of the search that change the rest.
const std::vector<std::string>& passes_of_an_exchange();
// A plan of a run, and the steps that it was in force for.
struct PlanInForce {
  std::string name, hash, text;
  uint32_t first = 0;
  std::optional<uint32_t> end;  // the first step that is not of it
  bool holds(uint32_t step) const;
  std::string steps() const;  // "steps 4 to 7"
};
// In their order; a run that never changed its plan has one. Fails with corrupt when ranks changed
// to different plans.
Result<std::vector<PlanInForce>> plans_of(const trace::Trace& trace);
// Keeps the steps of one plan, as if the run had had no other: the one of this name or hash, or if
// that is empty the last that moved gradients. Says which, where there were several. Fails with
// not_found when none has that name.
Result<std::vector<std::string>> keep_one_plan(trace::Trace& trace, const std::string& which = "");
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
  Interval iteration_ms() const;
};
// Errors name the run, what it lacks, and what to do. `under`: keep_one_plan().
Result<Recorded> understand(trace::Trace trace, const std::string& under = "");
// With a probe of its own, or that of the folder `probe`, or that of the one inside the run's.
Result<Recorded> understand(const std::string& run, const std::string& under = "",
                            const std::string& probe = "");

// The same, and what prediction needs. A run that moved no gradient is replayed as compute alone,
// and its remarks say so.
struct Analysis {
  Recorded recorded;
  cost::Costs costs;
  replay::Replayer replayer;
};
Result<Analysis> analyze(Recorded recorded);
Result<Analysis> analyze(const std::string& run, const std::string& under = "",
                         const std::string& probe = "");

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
  Interval before, after;   // iteration_ms
  std::vector<Row> kinds;   // ms of one iteration of one rank
  std::vector<Row> ranks;   // ms of an iteration
  std::vector<Row> layers;  // ms that training waited for a layer's gradients
  std::optional<std::vector<plan::Difference>> plan;  // absent: a run has no plan
  double percent() const;                             // of the iteration: after against before
};
Comparison compare(const Recorded& before, const Recorded& after);

// ---- as JSON -------------------------------------------------------------------------------

// Two-space indent, a newline at the end; times are the target's.
std::string findings_json(const diagnose::Diagnosis& diagnosis);  // an array
std::string json(const std::string& run, const Analysis& analysis,
                 const diagnose::Diagnosis& diagnosis);

}  // namespace weft::analysis
