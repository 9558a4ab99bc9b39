#include "weft/loop.h"

#include <algorithm>
#include <filesystem>

#include "weft/report.h"

namespace weft::loop {
namespace {

namespace fs = std::filesystem;

using Say = std::function<void(const std::string&)>;

// Made by the first run, once its options are known to be good.
Result<void> check_folder(const std::string& path) {
  if (path.empty()) return error(Code::invalid_argument, "no folder for the loop is named");
  std::error_code failure;
  if (fs::exists(path, failure) &&
      (!fs::is_directory(path, failure) || !fs::is_empty(path, failure)))
    return error(Code::invalid_argument, "%s is not an empty folder; name a new one for the loop",
                 path.c_str());
  return {};
}

Interval to_target_ms(const trace::Environment& environment, const replay::Prediction& prediction) {
  auto ms = [&](double ns) { return environment.to_target_ns(ns) * 1e-6; };
  return {ms(prediction.iteration_ns), ms(prediction.low_ns), ms(prediction.high_ns)};
}

// Both runs say that compute is emulated; once is enough.
void add_remarks(const std::vector<std::string>& from, std::vector<std::string>& to,
                 const char* prefix) {
  for (const std::string& remark : from) {
    if (std::find(to.begin(), to.end(), remark) != to.end()) continue;
    to.push_back(remark.starts_with("unsound") ? prefix + remark : remark);
  }
}

Result<void> predict_chosen(const replay::Replayer& replayer, Outcome& out, trace::Trace& trace) {
  replay::Question question;
  question.plan = out.optimized.plan;
  question.cluster.of = replay::Of::lab;  // which will measure it
  question.make_trace = true;
  WEFT_ASSIGN(out.predicted, replayer.predict(question));
  trace = std::move(*out.predicted.trace);
  out.predicted.trace.reset();
  out.predicted_ms = to_target_ms(out.environment, out.predicted);
  return analysis::write_run(trace, out.paths.predicted);
}

// The same job under the new plan. A plan that does the same is not run again.
Result<void> run_again(const Options& options, const Say& say, Outcome& out) {
  if (plan::hash(out.optimized.plan) == plan::hash(out.plan_before)) {
    out.after = out.before;
    out.paths.after = out.paths.before;
    out.kept_old = true;
    out.remarks.push_back("no better plan was found: the old one stays, and was not run again");
    return {};
  }
  say(text("running under the new plan, predicted %.1f ms", out.predicted_ms.value));
  lab::RunOptions again = options.lab;
  again.plan = out.optimized.plan;
  again.output = out.paths.after;
  again.dilation = out.before.dilation;
  again.shrink = out.before.shrink;
  auto after = lab::run(again, say);
  if (!after) return std::move(after).error().in("the run under the new plan");
  out.after = std::move(*after);
  if (out.after.iteration_ms.value <= out.before.iteration_ms.value) return {};
  out.kept_old = true;
  out.remarks.push_back(
      text("the new plan was measured slower (%.1f ms, before %.1f ms): the old "
           "one stays",
           out.after.iteration_ms.value, out.before.iteration_ms.value));
  return {};
}

Result<void> write_plans(const std::string& folder, const Outcome& out) {
  const plan::Plan& best = out.kept_old ? out.plan_before : out.optimized.plan;
  WEFT_TRY(write_file(out.paths.plan, plan::canonical(best)));
  if (out.kept_old && plan::hash(out.optimized.plan) != plan::hash(out.plan_before))
    WEFT_TRY(write_file(folder + "/rejected.json", plan::canonical(out.optimized.plan)));
  return {};
}

Result<void> write_page(const Options& options, const analysis::Analysis& before,
                        const trace::Trace& predicted, const Outcome& out) {
  WEFT_ASSIGN(analysis::Analysis after, analysis::analyze(out.paths.after));
  WEFT_ASSIGN(diagnose::Diagnosis diagnosis,
              diagnose::diagnose(after.recorded.graph, after.replayer));
  report::Page page;
  page.title = text("%s on %u hosts", before.recorded.graph.model.name.c_str(), options.lab.hosts);
  auto measured = [](const char* label, const analysis::Analysis& run, const Interval& time,
                     const diagnose::Diagnosis& found) {
    return report::Run{label, &run.recorded.trace, time.value, time.low, time.high, &found};
  };
  page.runs.push_back(measured("before, measured", before, out.before.iteration_ms, out.diagnosis));
  page.runs.push_back(measured("after, measured", after, out.after.iteration_ms, diagnosis));
  page.runs.push_back({"after, predicted", &predicted, out.predicted_ms.value, out.predicted_ms.low,
                       out.predicted_ms.high, nullptr});
  page.plan = &out.optimized.plan;
  page.optimized = &out.optimized;
  page.prediction_error_percent = out.prediction_error_percent;
  page.self_replay_error_percent = out.fidelity.error_percent;
  page.floor_ms = out.before.floor_ms;
  page.remarks = out.remarks;
  WEFT_ASSIGN(std::string html, report::html(page));
  return write_file(out.paths.report, html);
}

void compare_with_measured(Outcome& out) {
  add_remarks(out.before.remarks, out.remarks, "before: ");
  add_remarks(out.after.remarks, out.remarks, "after: ");
  add_remarks(out.optimized.remarks, out.remarks, "");
  double measured = out.after.iteration_ms.value;
  if (!(measured > 0)) return;
  out.prediction_error_percent = 100 * (out.predicted_ms.value - measured) / measured;
  out.speedup = out.before.iteration_ms.value / measured;
}

}  // namespace

Result<Outcome> run(const Options& options, const Say& progress) {
  if (options.lab.engine != lab::Engine::weft)
    return error(Code::unsupported,
                 "the loop needs weft's own engine: only it records and obeys a "
                 "plan");
  if (!options.lab.record) return error(Code::invalid_argument, "the loop needs what runs record");
  if (options.lab.compute_only)
    return error(Code::invalid_argument,
                 "a run without communication has nothing that a plan could change");
  const Say say = progress ? progress : [](const std::string&) {};
  WEFT_TRY(check_folder(options.output));

  Outcome out;
  const std::string& folder = options.output;
  out.paths = {folder + "/before", folder + "/after", folder + "/predicted", folder + "/plan.json",
               folder + "/report.html"};
  out.plan_before = options.lab.plan;
  lab::RunOptions first = options.lab;
  first.output = out.paths.before;
  say("running under plan " + first.plan.name);
  WEFT_ASSIGN(out.before, lab::run(first, say));

  say("reading, aligning and replaying what was recorded");
  WEFT_ASSIGN(analysis::Analysis before, analysis::analyze(out.paths.before));
  out.environment = before.recorded.environment();
  out.remarks = before.recorded.remarks;
  out.fidelity = before.replayer.fidelity();
  say("diagnosing");
  WEFT_ASSIGN(out.diagnosis, diagnose::diagnose(before.recorded.graph, before.replayer));
  say("searching for a better plan");
  optimize::Options search = options.optimize;
  search.cluster.of = replay::Of::lab;
  if (!search.progress) search.progress = say;
  WEFT_ASSIGN(out.optimized, optimize::optimize(before.replayer, search));
  trace::Trace predicted;
  WEFT_TRY(predict_chosen(before.replayer, out, predicted));

  WEFT_TRY(run_again(options, say, out));
  compare_with_measured(out);
  WEFT_TRY(write_plans(folder, out));
  say("writing the page");
  WEFT_TRY(write_page(options, before, predicted, out));
  WEFT_TRY(write_file(folder + "/loop.json", json(out)));
  return out;
}

}  // namespace weft::loop
