// weft report: one page about one or more runs, to open from disk.

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "analysis.h"
#include "verb.h"
#include "weft/report.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::vector<std::string> runs;
  std::string plan;
  std::string title;
  std::string output;
  bool json = false;
};

// A run with what is known of it. A run that cannot be replayed is shown without findings.
struct Shown {
  std::string path;
  std::string label;
  std::optional<analysis::Analysis> analysis;
  std::optional<analysis::Recorded> recorded;  // when there is no analysis
  std::optional<diagnose::Diagnosis> diagnosis;

  const analysis::Recorded& run() const { return analysis ? analysis->recorded : *recorded; }
};

Result<Shown> look_at(const std::string& path) {
  Shown out;
  out.path = path;
  WEFT_ASSIGN(analysis::Recorded recorded, analysis::understand(path));
  if (recorded.predicted()) {
    out.recorded = std::move(recorded);
    return out;
  }
  WEFT_ASSIGN(out.analysis, analysis::analyze(std::move(recorded)));
  WEFT_ASSIGN(out.diagnosis,
              diagnose::diagnose(out.analysis->recorded.graph, out.analysis->replayer));
  return out;
}

void name_runs(std::vector<Shown>& runs) {
  uint32_t measured = 0, predicted = 0;
  for (Shown& shown : runs) {
    bool is_predicted = shown.run().predicted();
    uint32_t before = is_predicted ? predicted++ : measured++;
    if (is_predicted)
      shown.label = before == 0 ? "predicted" : text("predicted %u", before + 1);
    else
      shown.label = before == 0   ? "before, measured"
                    : before == 1 ? "after, measured"
                                  : text("after %u, measured", before);
  }
}

// The prediction and the measurement of one plan, if both are there.
std::optional<double> prediction_error(const std::vector<Shown>& runs) {
  for (const Shown& predicted : runs)
    for (const Shown& measured : runs) {
      if (!predicted.run().predicted() || measured.run().predicted()) continue;
      if (predicted.run().environment().plan_hash != measured.run().environment().plan_hash)
        continue;
      double was = measured.run().iteration_ms().value;
      if (was > 0) return 100 * (predicted.run().iteration_ms().value - was) / was;
    }
  return std::nullopt;
}

void add_facts(const std::vector<Shown>& runs, report::Page& page) {
  page.prediction_error_percent = prediction_error(runs);
  for (const Shown& shown : runs) {
    if (shown.analysis && !page.self_replay_error_percent) {
      const replay::Replayer& replayer = shown.analysis->replayer;
      page.self_replay_error_percent = replayer.fidelity().error_percent;
      if (auto floor = replayer.floor_ns())
        page.floor_ms = to_target_ms(shown.run().environment(), *floor);
    }
    for (const std::string& remark : shown.run().remarks)
      page.remarks.push_back(shown.label + ": " + remark);
  }
  const trace::Environment& first = runs.front().run().environment();
  if (first.emulated_compute)
    page.remarks.emplace_back("device compute is emulated by timers; everything else is real");
}

Outcome run(const Options& options) {
  std::optional<plan::Plan> plan;
  if (!options.plan.empty()) {
    auto loaded = plan::load(options.plan);
    if (!loaded) return Outcome::bad_input(loaded.error());
    plan = std::move(*loaded);
  }
  std::vector<Shown> runs;
  for (const std::string& path : options.runs) {
    auto shown = look_at(path);
    if (!shown) {
      bool named = shown.error().message().find(path) != std::string::npos;
      return Outcome::bad_input(named ? shown.error() : std::move(shown).error().in(path));
    }
    runs.push_back(std::move(*shown));
  }
  name_runs(runs);

  report::Page page;
  page.title = options.title;
  if (page.title.empty())
    page.title = text("%s on %u ranks", runs.front().run().graph.model.name.c_str(),
                      runs.front().run().graph.ranks);
  for (const Shown& shown : runs) {
    Interval time = shown.run().iteration_ms();
    page.runs.push_back({shown.label, &shown.run().trace, time.value, time.low, time.high,
                         shown.diagnosis ? &*shown.diagnosis : nullptr});
  }
  if (plan) page.plan = &*plan;
  add_facts(runs, page);
  WEFT_ASSIGN(std::string html, report::html(page));
  WEFT_TRY(write_file(options.output, html));
  if (options.json) {
    Json list = Json::array();
    for (size_t i = 0; i < runs.size(); ++i)
      list.push_back({{"run", runs[i].path},
                      {"label", runs[i].label},
                      {"predicted", runs[i].run().predicted()},
                      {"iteration_ms", page.runs[i].iteration_ms}});
    print_json({{"report", options.output},
                {"bytes", html.size()},
                {"runs", std::move(list)},
                {"remarks", page.remarks}});
    return {};
  }
  print(text("%s: %zu run%s, %s\n", options.output.c_str(), runs.size(),
             runs.size() == 1 ? "" : "s", format_size(static_cast<double>(html.size())).c_str()));
  return {};
}

}  // namespace

void add_report(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb =
      add_verb(app, "report", "Writes one page about runs, to open from disk.",
               "weft report before/ after/ predicted/ --plan plan.json -o report.html");
  verb->add_option("RUN", options->runs, "Run folders; the first is the one before")->required();
  verb->add_option("--plan", options->plan, "The plan that was chosen: a file, or a preset");
  verb->add_option("--title", options->title, "Of the page; model and ranks if not given");
  verb->add_option("-o,--output", options->output, "The page to write")->required();
  verb->add_flag("--json", options->json, "Print one JSON object");
  on_call(*verb, context, [options] { return run(*options); });
}

}  // namespace weft::cli
