// weft loop and weft lab loop: run a job, find what slows it, and run it again under a better plan.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>

#include "analysis.h"
#include "lab_options.h"
#include "table.h"
#include "verb.h"
#include "weft/loop.h"

namespace weft::cli {

namespace {

struct Options {
  LabOptions lab;
  std::string budget = "10s";
  std::vector<std::string> without;
  std::string output;
  bool json = false;
};

constexpr size_t kFindingsShown = 3;
constexpr size_t kWidth = 28;

std::string interval_text(const Interval& time) {
  return text("%.1f ms (%.1f to %.1f)", time.value, time.low, time.high);
}

// "lanes 1 -> 8, order ready -> layer".
std::string decisions_text(const optimize::Optimized& optimized) {
  std::string out;
  for (const optimize::Decision& decision : optimized.decisions) {
    std::string field = decision.field.starts_with("/") ? decision.field.substr(1) : decision.field;
    out +=
        text("%s%s %s -> %s", out.empty() ? "" : ", ", field.c_str(),
             shortened(decision.before, kWidth).c_str(), shortened(decision.after, kWidth).c_str());
  }
  return out.empty() ? "as before" : out;
}

void print_findings(const diagnose::Diagnosis& diagnosis) {
  if (diagnosis.findings.empty()) print("found       no cause that would pay\n");
  for (size_t i = 0; i < std::min(kFindingsShown, diagnosis.findings.size()); ++i) {
    const diagnose::Finding& finding = diagnosis.findings[i];
    print(text("found       %.0f %% less without this: %s\n", finding.gain_percent,
               finding.title.c_str()));
  }
}

void print_summary(const lab::RunOptions& asked, const loop::Outcome& out) {
  std::string flow = asked.flow_bits_per_s > 0 ? format_rate(asked.flow_bits_per_s) : "no cap";
  print(text("%s on %u hosts, link %s, flow %s\n", asked.model.c_str(), asked.hosts,
             format_rate(asked.link_bits_per_s).c_str(), flow.c_str()));
  print(text("before      %s under plan %s\n", interval_text(out.before.iteration_ms).c_str(),
             out.plan_before.name.c_str()));
  print_findings(out.diagnosis);
  print("decided     " + decisions_text(out.optimized) + "\n");
  print(text("predicted   %s\n", interval_text(out.predicted_ms).c_str()));
  print(text("after       %s: %.2f x as fast, %.2f x the floor of %.1f ms\n",
             interval_text(out.after.iteration_ms).c_str(), out.speedup,
             out.after.iteration_ms.value / std::max(out.before.floor_ms, 1e-9),
             out.before.floor_ms));
  print(text("error       prediction %s; replay of the run before %s\n",
             percent_text(out.prediction_error_percent).c_str(),
             percent_text(out.fidelity.error_percent).c_str()));
  print(text("sums        %s\n", out.before.sums_exact && out.after.sums_exact
                                     ? "exact in both runs, on every rank, in every step"
                                     : "WRONG"));
  print(
      text("lab         dilation %g, shrink %g, processors up to %.0f %% busy, %.0f %% stolen%s\n",
           out.before.dilation, out.before.shrink,
           std::max(out.before.cpu_busy_percent, out.after.cpu_busy_percent),
           std::max(out.before.steal_percent, out.after.steal_percent),
           out.before.sound && out.after.sound ? "" : ", UNSOUND"));
  print_notes("note", out.remarks);
  print(text("plan        %s%s\n", out.paths.plan.c_str(), out.kept_old ? ", the old one" : ""));
  print("page        " + out.paths.report + "\n");
}

Outcome run(const Options& options) {
  auto asked = understood(options.lab);
  if (!asked) return Outcome::bad_input(asked.error());
  loop::Options work;
  work.lab = *asked;
  work.output = options.output;
  WEFT_ASSIGN(work.optimize.budget, parse_duration(options.budget));
  if (work.optimize.budget.count <= 0)
    return Outcome::bad_call("--budget " + options.budget + ": expected a time above 0");
  work.optimize.without = options.without;
  WEFT_ASSIGN(loop::Outcome out, loop::run(work, narrator()));
  if (options.json)
    print(loop::json(out));
  else
    print_summary(*asked, out);
  if (!out.before.sums_exact || !out.after.sums_exact)
    return Outcome::run_failed("a gradient differs from its exact sum");
  return {};
}

// ---- any program ---------------------------------------------------------------------------

struct ProgramOptions {
  std::vector<std::string> command;
  std::string plan;
  std::string budget = "10s";
  std::vector<std::string> without;
  std::string timeout;
  std::string output;
  bool json = false;
};

void print_summary(const ProgramOptions& asked, const loop::ProgramOutcome& out) {
  std::string command;
  for (const std::string& word : asked.command) command += (command.empty() ? "" : " ") + word;
  print(text("%s, %u rank%s\n", command.c_str(), out.ranks, out.ranks == 1 ? "" : "s"));
  print(text("before      %s an iteration under plan %s, %zu counted\n",
             interval_text(out.before.iteration_ms).c_str(), out.plan_before.name.c_str(),
             out.before.iterations));
  print_findings(out.diagnosis);
  print("decided     " + decisions_text(out.optimized) + "\n");
  print(text("predicted   %s\n", interval_text(out.predicted_ms).c_str()));
  print(text("after       %s: %.2f x as fast\n", interval_text(out.after.iteration_ms).c_str(),
             out.speedup));
  print(text("error       prediction %s; replay of the run before %s\n",
             percent_text(out.prediction_error_percent).c_str(),
             percent_text(out.fidelity.error_percent).c_str()));
  print(text("took        %s before, %s after, from start to end\n",
             format_duration(out.before.took).c_str(), format_duration(out.after.took).c_str()));
  print_notes("note", out.remarks);
  print(text("plan        %s%s\n", out.paths.plan.c_str(), out.kept_old ? ", the old one" : ""));
  print("page        " + out.paths.report + "\n");
}

Outcome run_program(const ProgramOptions& options) {
  loop::ProgramOptions work;
  work.command = options.command;
  work.plan = options.plan;
  work.output = options.output;
  work.output_to_stderr = options.json;
  WEFT_ASSIGN(work.optimize.budget, parse_duration(options.budget));
  if (work.optimize.budget.count <= 0)
    return Outcome::bad_call("--budget " + options.budget + ": expected a time above 0");
  work.optimize.without = options.without;
  if (!options.timeout.empty()) {
    WEFT_ASSIGN(work.deadline, parse_duration(options.timeout));
    if (work.deadline.count <= 0)
      return Outcome::bad_call("--timeout " + options.timeout + ": expected a time above 0");
  }
  // Always, for two runs of a job take their time; beside what the job prints.
  auto say = [](const std::string& line) { std::fprintf(stderr, "weft loop: %s\n", line.c_str()); };
  work.optimize.progress = narrator();
  WEFT_ASSIGN(const loop::ProgramOutcome out, loop::run_program(work, say));
  if (options.json)
    print(loop::json(out));
  else
    print_summary(options, out);
  return {};
}

}  // namespace

void add_loop(CLI::App& app, Context& context) {
  auto options = std::make_shared<ProgramOptions>();
  CLI::App* verb = add_verb(app, "loop",
                            "Runs a program recorded, finds a better plan, runs it again under "
                            "that, and keeps the faster.",
                            "weft loop -o loop1 -- weft run -n 2 -- ./training\n"
                            "weft loop -o loop2 -- mpirun -n 4 ./training");
  verb->add_option("COMMAND", options->command,
                   "What to run, with its launcher and arguments, after --")
      ->required();
  verb->add_option("-o,--output", options->output,
                   "Folder to make for runs, plan and page; all hosts of the job must see it")
      ->required();
  verb->add_option("--before", options->plan,
                   "The plan to begin with: a file, or a preset; otherwise what WEFT_PLAN says")
      ->type_name("PLAN");
  verb->add_option("--budget", options->budget, "How long to search for a plan")
      ->type_name("TIME")
      ->capture_default_str();
  verb->add_option("--without", options->without, "Leave a pass of the search out")
      ->type_name("PASS")
      ->check(CLI::IsMember(optimize::pass_names()))
      ->allow_extra_args(false);
  verb->add_option("--timeout", options->timeout, "End a run that takes longer, as in 10m")
      ->type_name("TIME");
  verb->add_flag("--json", options->json,
                 "Print one JSON object; what the program prints goes to standard error");
  on_call(*verb, context, [options] { return run_program(*options); });
}

void add_lab_loop(CLI::App& group, Context& context) {
  auto options = std::make_shared<Options>();
  options->lab.plan = "ddp";
  CLI::App* verb =
      add_verb(group, "loop", "Runs a model, finds a better plan, and runs it again under that.",
               "weft lab loop --model vgg16 --hosts 4 --link 25gbit --flow 5gbit "
               "--before ddp -o loop1");
  add_lab_options(*verb, options->lab);
  verb->add_option("--before", options->lab.plan, "The plan to begin with: a file, or a preset")
      ->type_name("PLAN")
      ->capture_default_str();
  verb->add_option("--budget", options->budget, "How long to search for a plan")
      ->type_name("TIME")
      ->capture_default_str();
  verb->add_option("--without", options->without, "Leave a pass of the search out")
      ->type_name("PASS")
      ->check(CLI::IsMember(optimize::pass_names()))
      ->allow_extra_args(false);
  verb->add_option("-o,--output", options->output, "Folder to make for runs, plan and page")
      ->required();
  verb->add_flag("--json", options->json, "Print one JSON object");
  on_call(*verb, context, [options] { return run(*options); });
}

}  // namespace weft::cli
