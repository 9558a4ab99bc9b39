// weft replay: what the run would have taken under another plan, on another cluster.

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "analysis.h"
#include "table.h"
#include "verb.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string run;
  std::string probe;
  std::string plan;
  std::string under;
  std::vector<std::string> set;
  std::string output;
  bool as_lab = false;
  bool json = false;
};

// Work of one layer is too small for one digit.
std::string precise_ms(const trace::Environment& environment, double ns) {
  return text("%.3f ms", to_target_ms(environment, ns));
}

void print_fidelity(const trace::Environment& environment, const replay::Fidelity& fidelity) {
  print(text("fidelity    measured %s, replayed%s %s: %s\n",
             target_ms(environment, fidelity.measured_ns).c_str(),
             fidelity.sums_as_measured ? " with sums as long as they were," : "",
             target_ms(environment, fidelity.replayed_ns).c_str(),
             percent_text(fidelity.error_percent).c_str()));
  Table table(
      {{""}, {"measured", Align::right}, {"replayed", Align::right}, {"error", Align::right}});
  for (const auto* rows : {&fidelity.ranks, &fidelity.kinds})
    for (const replay::Fidelity::Row& row : *rows)
      table.add({row.what, precise_ms(environment, row.measured_ns),
                 precise_ms(environment, row.replayed_ns),
                 row.measured_ns > 0 ? percent_text(100 * (row.replayed_ns / row.measured_ns - 1))
                                     : "-"});
  print(table.text() + "\n");
}

Outcome run(const Options& options) {
  replay::Question question;
  if (!options.plan.empty()) {
    auto plan = plan::load(options.plan);
    if (!plan) return Outcome::bad_input(plan.error());
    question.plan = std::move(*plan);
  }
  WEFT_ASSIGN(question.cluster, cluster_of(options.set, options.as_lab));
  question.make_trace = !options.output.empty();
  auto analysis = analysis::analyze(options.run, options.under, options.probe);
  if (!analysis) return Outcome::bad_input(analysis.error());
  const replay::Replayer& replayer = analysis->replayer;
  auto prediction = replayer.predict(question);
  if (!prediction) return std::move(prediction).error().in(options.run);
  if (!options.output.empty()) {
    analysis::note_cluster(*prediction, question.cluster);
    WEFT_TRY(analysis::write_run(*prediction->trace, options.output));
  }

  const trace::Environment& environment = analysis->recorded.environment();
  const replay::Fidelity& fidelity = replayer.fidelity();
  const plan::Plan& plan = question.plan ? *question.plan : replayer.recorded_plan();
  double speedup =
      prediction->iteration_ns > 0 ? fidelity.measured_ns / prediction->iteration_ns : 1;
  if (options.json) {
    print_json({{"run", options.run},
                {"fidelity", fidelity_json(environment, fidelity)},
                {"plan", plan.name},
                {"plan_hash", plan::hash(plan)},
                {"cluster", describe(question.cluster)},
                {"predicted", interval_json(environment, *prediction)},
                {"speedup", speedup},
                {"events", prediction->events},
                {"unknown", prediction->unknown},
                {"assumed", prediction->assumed},
                {"output", options.output.empty() ? Json(nullptr) : Json(options.output)},
                {"remarks", analysis->recorded.remarks}});
    return {};
  }
  print_fidelity(environment, fidelity);
  print(text("predicted   %s (%.1f to %.1f) under plan %s on %s: %.2f x as fast\n",
             target_ms(environment, prediction->iteration_ns).c_str(),
             to_target_ms(environment, prediction->low_ns),
             to_target_ms(environment, prediction->high_ns), plan.name.c_str(),
             describe(question.cluster).c_str(), speedup));
  print_notes("unknown", prediction->unknown);
  print_notes("assumed", prediction->assumed);
  print_notes("note", analysis->recorded.remarks);
  if (!options.output.empty()) print("run         " + options.output + "\n");
  return {};
}

}  // namespace

void add_replay(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb =
      add_verb(app, "replay", "Predicts a run under another plan or on another cluster.",
               "weft replay run7/ --plan default\n"
               "weft replay run7/ --set link=10gbit --set hosts=8 -o predicted\n"
               "weft replay run7/ --set hosts=1024");
  verb->add_option("RUN", options->run, "A run folder")->required();
  verb->add_option("--probe", options->probe, kProbeOption)->type_name("PROBE");
  verb->add_option("--under", options->under, kUnder);
  verb->add_option("--plan", options->plan, "A plan file, or a preset; the recorded one if absent");
  verb->add_option("--set", options->set, "Another cluster: link=RATE, flow=RATE|none, hosts=N")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  verb->add_flag("--as-lab", options->as_lab, kAsLab);
  verb->add_option("-o,--output", options->output, "Write the predicted run into this new folder");
  verb->add_flag("--json", options->json, "Print one JSON object");
  on_call(*verb, context, [options] { return run(*options); });
}

}  // namespace weft::cli
