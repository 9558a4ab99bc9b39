#include "parts.h"

#include <algorithm>
#include <filesystem>

#include "weft/report.h"

namespace weft::loop {

namespace fs = std::filesystem;

Result<void> check_folder(const std::string& path) {
  if (path.empty()) return error(Code::invalid_argument, "no folder for the loop is named");
  std::error_code failure;
  if (fs::exists(path, failure) &&
      (!fs::is_directory(path, failure) || !fs::is_empty(path, failure)))
    return error(Code::invalid_argument, "%s is not an empty folder; name a new one for the loop",
                 path.c_str());
  return {};
}

Paths paths_in(const std::string& folder) {
  return {folder + "/before", folder + "/after", folder + "/predicted", folder + "/plan.json",
          folder + "/report.html"};
}

// Both runs say that compute is emulated; once is enough.
void add_remarks(const std::vector<std::string>& from, std::vector<std::string>& to,
                 const char* prefix) {
  for (const std::string& remark : from) {
    if (std::find(to.begin(), to.end(), remark) != to.end()) continue;
    to.push_back(remark.starts_with("unsound") ? prefix + remark : remark);
  }
}

Interval to_target_ms(const trace::Environment& environment, const replay::Prediction& prediction) {
  auto ms = [&](double ns) { return environment.to_target_ns(ns) * 1e-6; };
  return {ms(prediction.iteration_ns), ms(prediction.low_ns), ms(prediction.high_ns)};
}

namespace {

Result<void> predict_chosen(const replay::Replayer& replayer, Found& out, trace::Trace& trace) {
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

}  // namespace

Result<void> find_plan(const analysis::Analysis& before, const optimize::Options& search,
                       const Say& say, Found& out, trace::Trace& predicted) {
  out.environment = before.recorded.environment();
  out.remarks = before.recorded.remarks;
  out.fidelity = before.replayer.fidelity();
  say("diagnosing");
  WEFT_ASSIGN(out.diagnosis, diagnose::diagnose(before.recorded.graph, before.replayer));
  say("searching for a better plan");
  optimize::Options asked = search;
  asked.cluster.of = replay::Of::lab;
  if (!asked.progress) asked.progress = say;
  WEFT_ASSIGN(out.optimized, optimize::optimize(before.replayer, asked));
  return predict_chosen(before.replayer, out, predicted);
}

bool same_plan(const Found& out) {
  return plan::hash(out.optimized.plan) == plan::hash(out.plan_before);
}

void compare(const Interval& before, const Interval& after, Found& out) {
  if (!(after.value > 0)) return;
  out.prediction_error_percent = 100 * (out.predicted_ms.value - after.value) / after.value;
  out.speedup = before.value / after.value;
  if (same_plan(out)) return;
  if (after.value < before.value) {
    if (after.high >= before.low)
      out.remarks.push_back(
          "what was gained is within the spread of the two runs' iterations: it may be chance");
    return;
  }
  out.kept_old = true;
  out.remarks.push_back(
      text("the new plan was measured slower (%.1f ms, before %.1f ms): the old one stays",
           after.value, before.value));
}

Result<void> write_plans(const std::string& folder, const Found& out) {
  const plan::Plan& best = out.kept_old ? out.plan_before : out.optimized.plan;
  WEFT_TRY(write_file(out.paths.plan, plan::canonical(best)));
  if (out.kept_old && !same_plan(out))
    WEFT_TRY(write_file(folder + "/rejected.json", plan::canonical(out.optimized.plan)));
  return {};
}

Result<void> write_page(const Page& about, const analysis::Analysis& before,
                        const trace::Trace& predicted, const Found& out) {
  WEFT_ASSIGN(analysis::Analysis after, analysis::analyze(out.paths.after));
  WEFT_ASSIGN(diagnose::Diagnosis diagnosis,
              diagnose::diagnose(after.recorded.graph, after.replayer));
  report::Page page;
  page.title = about.title;
  auto measured = [](const char* label, const analysis::Analysis& run, const Interval& time,
                     const diagnose::Diagnosis& found) {
    return report::Run{label, &run.recorded.trace, time.value, time.low, time.high, &found};
  };
  page.runs.push_back(measured("before, measured", before, about.before, out.diagnosis));
  page.runs.push_back(measured("after, measured", after, about.after, diagnosis));
  page.runs.push_back({"after, predicted", &predicted, out.predicted_ms.value, out.predicted_ms.low,
                       out.predicted_ms.high, nullptr});
  page.plan = &out.optimized.plan;
  page.optimized = &out.optimized;
  page.prediction_error_percent = out.prediction_error_percent;
  page.self_replay_error_percent = out.fidelity.error_percent;
  page.floor_ms = about.floor_ms;
  page.remarks = out.remarks;
  WEFT_ASSIGN(std::string html, report::html(page));
  return write_file(out.paths.report, html);
}

}  // namespace weft::loop
