// The loop on any program: what it does is told to it by environment variables alone.
#include <algorithm>
#include <csignal>
#include <filesystem>

#include "parts.h"
#include "weft/process.h"

namespace weft::loop {
namespace {

namespace fs = std::filesystem;

constexpr Nanos kGrace = Nanos::from_seconds(5);  // to end by itself before it is killed
// Fewer tell nothing of how much they differ.
constexpr size_t kLeastIterations = 3;
// A plan that needs a change of the program has to gain more than a search calls a gain.
constexpr double kWorthALine = 0.02;
// The least of the budget that is left to a search.
constexpr Nanos kLeastSearch = Nanos::from_seconds(1);

// Other processes may have other folders of their own.
Result<std::string> absolute(const std::string& path) {
  std::error_code failure;
  const fs::path whole = fs::absolute(path, failure);
  if (failure) return io_error(failure.value(), "cannot find the folder of %s", path.c_str());
  return whole.lexically_normal().string();
}

bool has_trace(const std::string& folder) {
  std::error_code failure;
  for (const auto& entry : fs::directory_iterator(folder, failure))
    if (entry.path().extension() == ".weft") return true;
  return false;
}

// Runs the command, which records into `folder`.
Result<Nanos> run_once(const ProgramOptions& options, const std::string& folder,
                       const std::string& plan) {
  process::Command command;
  command.argv = options.command;
  command.environment = {"WEFT_TRACE=" + folder};
  if (!plan.empty()) command.environment.push_back("WEFT_PLAN=" + plan);
  // In the caller's group: an interruption at a terminal reaches it, and its launcher's ranks.
  command.dies_with_parent = true;
  if (options.output_to_stderr) command.descriptors = {{2, 1}, {2, 2}};
  const Nanos begin = monotonic_clock().now();
  WEFT_ASSIGN(process::Child child, process::Child::start(command));
  const std::string line = process::command_line(options.command);
  const Nanos patience =
      options.deadline.count > 0 ? options.deadline : Nanos::from_seconds(365.0 * 24 * 3600);
  const auto ended = child.wait(patience);
  if (!ended) {
    child.end(SIGTERM, kGrace);
    return error(Code::timeout, "%s did not end within %s", line.c_str(),
                 format_duration(options.deadline).c_str());
  }
  if (!ended->ok()) return error(Code::cancelled, "%s %s", line.c_str(), ended->words().c_str());
  if (!has_trace(folder))
    return error(
        Code::not_found,
        "%s recorded nothing: no rank of it wrote a trace into %s. Its ranks have to be of a job "
        "of weft, which record where WEFT_TRACE says: in PyTorch init_process_group(\"weft\"), in "
        "other programs weft::api::join or weft_join; see that the launcher hands WEFT_TRACE and "
        "WEFT_PLAN on, and that this folder is there for all ranks",
        line.c_str(), folder.c_str());
  return monotonic_clock().now() - begin;
}

Run measured(const analysis::Analysis& of, Nanos took) {
  const graph::Graph& graph = of.recorded.graph;
  return {of.recorded.iteration_ms(), graph.iterations.size() - graph.first_counted(), took};
}

Result<void> check_length(const graph::Graph& graph) {
  const size_t all = graph.iterations.size();
  if (all >= trace::kWarmUpIterations + kLeastIterations) return {};
  return error(Code::invalid_argument,
               "the program did %zu iterations that can be compared, of which the first %u warm "
               "up: let it train for more steps, 10 or better 20",
               all, trace::kWarmUpIterations);
}

// What a plan would do that the framework also took its buckets from.
Result<void> ask_for_more(const analysis::Analysis& before, optimize::Options search,
                          const Say& say, ProgramOutcome& out) {
  search.budget =
      std::max(search.budget - Nanos::from_seconds(out.optimized.seconds), kLeastSearch);
  search.cluster.of = replay::Of::lab;
  say("searching what a plan of all gradients would gain");
  WEFT_ASSIGN(const optimize::Optimized all, optimize::optimize(before.replayer, search));
  if (all.after.iteration_ns >= out.optimized.after.iteration_ns * (1 - kWorthALine)) return {};
  out.attached_ms = to_target_ms(out.environment, all.after);
  out.remarks.push_back(
      text("with weft.torch.attach(model, optimizer) after DistributedDataParallel(...), a plan "
           "that decides these too is predicted to take %.1f ms (%.1f to %.1f): add it, and run "
           "the loop again",
           out.attached_ms->value, out.attached_ms->low, out.attached_ms->high));
  return {};
}

// The plan that the run recorded is the one that was in force.
Result<void> check_plan(const analysis::Analysis& after, const Found& out) {
  WEFT_ASSIGN(plan::Plan obeyed, plan::parse(after.recorded.environment().plan_text));
  if (analysis::framework_cuts(after.recorded.trace)) obeyed.buckets = out.optimized.plan.buckets;
  if (plan::hash(obeyed) == plan::hash(out.optimized.plan)) return {};
  return error(Code::invalid_argument,
               "the second run was under plan \"%s\" and not under the one that was found: the "
               "program names a plan itself, or its launcher does not hand WEFT_PLAN on",
               obeyed.name.c_str());
}

}  // namespace

Result<ProgramOutcome> run_program(const ProgramOptions& options, const Say& progress) {
  if (options.command.empty())
    return error(Code::invalid_argument, "no command is named: weft loop -o FOLDER -- COMMAND");
  const Say say = progress ? progress : [](const std::string&) {};
  WEFT_TRY(check_folder(options.output));
  WEFT_ASSIGN(const std::string folder, absolute(options.output));
  std::error_code failure;
  fs::create_directories(folder, failure);
  if (failure) return io_error(failure.value(), "cannot make %s", folder.c_str());

  ProgramOutcome out;
  out.paths = paths_in(folder);
  std::string first_plan;
  if (!options.plan.empty()) {
    WEFT_ASSIGN(const plan::Plan plan, plan::load(options.plan));
    first_plan = folder + "/before.json";
    WEFT_TRY(write_file(first_plan, plan::canonical(plan)));
  }
  say("running " + process::command_line(options.command));
  WEFT_ASSIGN(const Nanos first, run_once(options, out.paths.before, first_plan));

  say("reading, aligning and replaying what was recorded");
  WEFT_ASSIGN(analysis::Analysis before, analysis::analyze(out.paths.before));
  out.before = measured(before, first);
  WEFT_TRY(check_length(before.recorded.graph));
  out.ranks = before.recorded.graph.ranks;
  out.plan_before = before.replayer.recorded_plan();
  out.framework_cuts = analysis::framework_cuts(before.recorded.trace);
  optimize::Options search = options.optimize;
  if (out.framework_cuts)
    for (const std::string& pass : analysis::passes_of_an_exchange())
      search.without.push_back(pass);
  trace::Trace predicted;
  WEFT_TRY(find_plan(before, search, say, out, predicted));
  if (out.framework_cuts) {
    out.remarks.emplace_back(
        "the framework keeps its own buckets and their order, whatever a plan says: only lanes, "
        "chunks, workers and algorithms were searched");
    WEFT_TRY(ask_for_more(before, options.optimize, say, out));
  }

  // It is measured before it is the one that stays.
  if (same_plan(out)) {
    out.after = out.before;
    out.paths.after = out.paths.before;
    out.kept_old = true;
    out.remarks.push_back("no better plan was found: the old one stays, and was not run again");
  } else {
    const std::string candidate = folder + "/candidate.json";
    WEFT_TRY(write_file(candidate, plan::canonical(out.optimized.plan)));
    say(text("running under the new plan, predicted %.1f ms an iteration", out.predicted_ms.value));
    auto second = run_once(options, out.paths.after, candidate);
    if (!second) return std::move(second).error().in("the run under the new plan");
    WEFT_ASSIGN(const analysis::Analysis after, analysis::analyze(out.paths.after));
    WEFT_TRY(check_plan(after, out));
    out.after = measured(after, *second);
    add_remarks(after.recorded.remarks, out.remarks, "after: ");
    fs::remove(candidate, failure);
  }
  compare(out.before.iteration_ms, out.after.iteration_ms, out);
  add_remarks(out.optimized.remarks, out.remarks, "");
  WEFT_TRY(write_plans(folder, out));
  say("writing the page");
  const Page page{process::command_line(options.command), out.before.iteration_ms,
                  out.after.iteration_ms, std::nullopt};
  WEFT_TRY(write_page(page, before, predicted, out));
  WEFT_TRY(write_file(folder + "/loop.json", json(out)));
  return out;
}

}  // namespace weft::loop
