// loop: run, trace, align, graph, replay, diagnose, optimize, apply the plan, run again, and say
// how far the prediction was off.
//
//   run ──► Recorded (one clock, a graph) ──► Analysis (a replayer) ──► diagnosis, better plan
//    ▲                                                                          │
//    └────────────────────────── the same job under it ◄────────────────────────┘
//
// The job is one of the lab, or any program that uses weft: of that only environment variables are
// set, so that whoever launches it does not matter.
//
// It holds no knowledge of its own: each step is a module, and here they stand in a row.
//
// Threads: run() needs a process with one thread, as lab::run() does; run_program() any.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "weft/analysis.h"
#include "weft/lab.h"

namespace weft::loop {

// ---- the loop ------------------------------------------------------------------------------

struct Options {
  lab::RunOptions lab;  // its plan is the one before; its output is not used
  optimize::Options optimize;
  std::string output;  // folder to make
};

struct Paths {
  std::string before, after, predicted, plan, report;
};

// What is found out in between, whatever the job.
struct Found {
  replay::Prediction predicted;  // of the plan that was applied; without its trace
  Interval predicted_ms;         // the same in the target's time
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

struct Outcome : Found {
  lab::RunResult before, after;
};

// Makes before/, after/, predicted/, plan.json, report.html and loop.json in `output`. plan.json is
// the better plan as measured; when that is the old one, a new one that lost is in rejected.json.
// The second run has the factors of the first. Fails with what the steps fail with.
Result<Outcome> run(const Options& options,
                    const std::function<void(const std::string&)>& progress);

// ---- any program -----------------------------------------------------------------------------

struct ProgramOptions {
  std::vector<std::string> command;  // with its launcher: {"mpirun", "-n", "2", "./training"}
  std::string plan;                  // to begin with: a file or a preset; empty: the program's own
  optimize::Options optimize;
  std::string output;             // folder to make; all hosts of the job see it under this path
  Nanos deadline = {0};           // of each run; 0: none
  bool output_to_stderr = false;  // what the program prints; otherwise as it comes
};

// One run of the program.
struct Run {
  Interval iteration_ms;  // on the slowest rank
  size_t iterations = 0;  // that count
  Nanos took;             // the command, from its start to its end
};

struct ProgramOutcome : Found {
  Run before, after;
  uint32_t ranks = 0;
  // The framework cuts gradients itself, so that only what it obeys was searched; what a plan for
  // all of it is predicted to take, if that is less.
  bool framework_cuts = false;
  std::optional<Interval> attached_ms;
};

// The same for a command whose ranks use weft: WEFT_TRACE says where they record, WEFT_PLAN under
// which plan they run. Fails with cancelled when the command fails, and with what to do when it
// recorded nothing, or too little.
Result<ProgramOutcome> run_program(const ProgramOptions& options,
                                   const std::function<void(const std::string&)>& progress);

// ---- as JSON -------------------------------------------------------------------------------

// One object, two-space indent, a newline at the end; times are the target's.
std::string json(const Outcome& outcome);
std::string json(const ProgramOutcome& outcome);

}  // namespace weft::loop
