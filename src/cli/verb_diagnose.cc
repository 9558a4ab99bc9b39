// weft diagnose: where an iteration's time went, and what removing each cause would gain.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "analysis.h"
#include "table.h"
#include "verb.h"

namespace weft::cli {

namespace {

struct Options {
  std::string run;
  std::string probe;
  std::string under;
  bool json = false;
};

constexpr size_t kFindingsShown = 5, kEvidenceShown = 2, kLayersShown = 5;

const char* name_of(const diagnose::Share& share) {
  const auto words = diagnose::words_of(share.what);
  return words ? words->name : share.what.c_str();
}

void print_path(const trace::Environment& environment, const diagnose::Diagnosis& diagnosis) {
  print(text("iteration   %s%s; the replay is off by %s\n",
             target_ms(environment, diagnosis.iteration_ns).c_str(),
             environment.predicted ? ", predicted" : "",
             percent_text(diagnosis.fidelity_error_percent).c_str()));
  std::string line;
  for (const diagnose::Share& share : diagnosis.path)
    if (share.percent >= 0.05)
      line += text("%s%s %.1f %%", line.empty() ? "" : ", ", name_of(share), share.percent);
  print("spent on    " + line + "\n");
  print(
      text("overlap     communication %s, %s of it beside compute (possible: %s), %s waited for\n",
           target_ms(environment, diagnosis.communication_ns).c_str(),
           target_ms(environment, diagnosis.overlapped_ns).c_str(),
           target_ms(environment, diagnosis.overlap_possible_ns).c_str(),
           target_ms(environment, diagnosis.exposed_ns).c_str()));
}

void print_findings(const diagnose::Diagnosis& diagnosis) {
  if (diagnosis.findings.empty())
    print("findings    none: no cause costs more than the error of the replay\n");
  size_t shown = std::min(kFindingsShown, diagnosis.findings.size());
  for (size_t i = 0; i < shown; ++i) {
    const diagnose::Finding& finding = diagnosis.findings[i];
    std::string rank = finding.rank ? text(" (rank %u)", *finding.rank) : "";
    print(text("\n%zu. %s%s: without it %.1f %% less (%.1f to %.1f)\n", i + 1, finding.name.c_str(),
               rank.c_str(), finding.gain_percent, finding.low, finding.high));
    print("   " + finding.title + "\n");
    for (size_t e = 0; e < std::min(kEvidenceShown, finding.evidence.size()); ++e)
      print("   - " + finding.evidence[e] + "\n");
    print("   do: " + finding.remedy + "\n");
  }
  if (shown < diagnosis.findings.size())
    print(text("   and %zu more, in --json\n", diagnosis.findings.size() - shown));
}

void print_layers(const trace::Environment& environment, const diagnose::Diagnosis& diagnosis) {
  std::vector<const diagnose::Detail*> waited;
  for (const diagnose::Detail& layer : diagnosis.layers)
    if (environment.to_target_ns(layer.waited_ns) >= 0.005e6) waited.push_back(&layer);
  std::stable_sort(waited.begin(), waited.end(),
                   [](const auto* a, const auto* b) { return a->waited_ns > b->waited_ns; });
  if (waited.empty()) return;
  waited.resize(std::min(waited.size(), kLayersShown));
  Table table({{"waited for"},
               {"gradients", Align::right},
               {"compute", Align::right},
               {"transfer", Align::right},
               {"queued", Align::right},
               {"waited", Align::right}});
  auto ms = [&](double ns) { return text("%.2f ms", to_target_ms(environment, ns)); };
  for (const diagnose::Detail* layer : waited)
    table.add({layer->name, format_size(environment.to_target_bytes(layer->bytes)),
               ms(layer->compute_ns), ms(layer->transfer_ns), ms(layer->queued_ns),
               ms(layer->waited_ns)});
  print("\n" + table.text());
}

Outcome run(const Options& options) {
  auto analysis = analysis::analyze(options.run, options.under, options.probe);
  if (!analysis) return Outcome::bad_input(analysis.error());
  auto diagnosis = diagnose::diagnose(analysis->recorded.graph, analysis->replayer);
  if (!diagnosis) return Outcome::bad_input(std::move(diagnosis).error().in(options.run));
  if (options.json) {
    print(analysis::json(options.run, *analysis, *diagnosis));
    return {};
  }
  const trace::Environment& environment = analysis->recorded.environment();
  print_path(environment, *diagnosis);
  print_findings(*diagnosis);
  print_layers(environment, *diagnosis);
  print("\n");
  for (const diagnose::Alternative& way : diagnosis->alternatives)
    print(text("instead     %s: %s, %.1f %% less (%.1f to %.1f)\n", way.name.c_str(),
               target_ms(environment, way.iteration_ns).c_str(), way.gain_percent, way.low,
               way.high));
  for (const diagnose::Bound& bound : diagnosis->bounds)
    print(text("bound       %s: %s, %.1f %% less\n", bound.name.c_str(),
               target_ms(environment, bound.iteration_ns).c_str(), bound.gain_percent));
  print_notes("note", analysis->recorded.remarks);
  print_notes("note", diagnosis->remarks);
  return {};
}

}  // namespace

void add_diagnose(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb =
      add_verb(app, "diagnose", "Says where the time went and what it would pay to fix.",
               "weft diagnose run7/");
  verb->add_option("RUN", options->run, "A run folder")->required();
  verb->add_option("--probe", options->probe, kProbeOption)->type_name("PROBE");
  verb->add_option("--under", options->under, kUnder);
  verb->add_flag("--json", options->json, "Print one JSON object, with every layer and tensor");
  on_call(*verb, context, [options] { return run(*options); });
}

}  // namespace weft::cli
