// weft optimize: a better plan for a recorded run.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <filesystem>
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
  std::string under;
  std::string output;
  std::string budget = "10s";
  uint64_t seed = 1;
  uint32_t max_lanes = 16;
  std::vector<std::string> without;
  std::vector<std::string> set;
  bool as_lab = false;
  bool json = false;
};

Json as_json(const Options& options, const trace::Environment& environment,
             const optimize::Optimized& found, const std::vector<std::string>& remarks) {
  Json decisions = Json::array(), passes = Json::array();
  for (const optimize::Decision& decision : found.decisions)
    decisions.push_back({{"field", decision.field},
                         {"before", decision.before},
                         {"after", decision.after},
                         {"why", decision.why}});
  for (const optimize::PassUse& pass : found.passes)
    passes.push_back({{"name", pass.name},
                      {"tried", pass.tried},
                      {"kept", pass.kept},
                      {"seconds", pass.seconds}});
  double speedup =
      found.after.iteration_ns > 0 ? found.before.iteration_ns / found.after.iteration_ns : 1;
  return {{"run", options.run},
          {"plan", options.output},
          {"plan_name", found.plan.name},
          {"plan_hash", plan::hash(found.plan)},
          {"before", interval_json(environment, found.before)},
          {"after", interval_json(environment, found.after)},
          {"speedup", speedup},
          {"decisions", std::move(decisions)},
          {"passes", std::move(passes)},
          {"communication_free_ms", to_target_ms(environment, found.bound_ns)},
          {"floor_ms",
           found.floor_ns > 0 ? Json(to_target_ms(environment, found.floor_ns)) : Json(nullptr)},
          {"replays", found.replays},
          {"seconds", found.seconds},
          {"replay_seconds", found.replay_seconds},
          {"finished", found.finished},
          {"seed", options.seed},
          {"unknown", found.after.unknown},
          {"assumed", found.after.assumed},
          {"remarks", remarks}};
}

void print_found(const Options& options, const trace::Environment& environment,
                 const optimize::Optimized& found, const std::vector<std::string>& remarks) {
  double speedup =
      found.after.iteration_ns > 0 ? found.before.iteration_ns / found.after.iteration_ns : 1;
  print(text("before      %s, replayed\n",
             target_ms(environment, found.before.iteration_ns).c_str()));
  print(text("after       %s (%.1f to %.1f), predicted: %.2f x as fast\n",
             target_ms(environment, found.after.iteration_ns).c_str(),
             to_target_ms(environment, found.after.low_ns),
             to_target_ms(environment, found.after.high_ns), speedup));
  print(text("limits      %s if communication were free%s\n",
             target_ms(environment, found.bound_ns).c_str(),
             found.floor_ns > 0
                 ? text(", floor %s", target_ms(environment, found.floor_ns).c_str()).c_str()
                 : ""));
  print(text("search      %llu replays in %.1f s%s\n",
             static_cast<unsigned long long>(found.replays), found.seconds,
             found.finished ? "" : "; the budget ended it"));
  constexpr size_t kWidth = 24;
  if (!found.decisions.empty()) {
    Table table({{"decision"}, {"before"}, {"after"}, {"why"}});
    for (const optimize::Decision& decision : found.decisions)
      table.add({decision.field, shortened(decision.before, kWidth),
                 shortened(decision.after, kWidth), decision.why});
    print("\n" + table.text() + "\n");
  }
  print_notes("unknown", found.after.unknown);
  print_notes("assumed", found.after.assumed);
  print_notes("note", remarks);
  print("plan        " + options.output + "\n");
}

Outcome run(const Options& options) {
  optimize::Options search;
  WEFT_ASSIGN(search.budget, parse_duration(options.budget));
  if (search.budget.count <= 0)
    return Outcome::bad_call("--budget " + options.budget + ": expected a time above 0");
  search.seed = options.seed;
  search.max_lanes = options.max_lanes;
  search.without = options.without;
  search.progress = narrator();
  WEFT_ASSIGN(search.cluster, cluster_of(options.set, options.as_lab));
  auto analysis = analysis::analyze(options.run, options.under, options.probe);
  if (!analysis) return Outcome::bad_input(analysis.error());
  // A place that cannot be written to is told before the search, not after it.
  std::string folder = std::filesystem::path(options.output).parent_path();
  if (folder.empty()) folder = ".";
  if (access(folder.c_str(), W_OK) != 0)
    return io_error(errno, "cannot write %s", options.output.c_str());
  auto found = optimize::optimize(analysis->replayer, search);
  if (!found) return std::move(found).error().in(options.run);
  WEFT_TRY(write_file(options.output, plan::canonical(found->plan)));
  const trace::Environment& environment = analysis->recorded.environment();
  std::vector<std::string> remarks = analysis->recorded.remarks;
  remarks.insert(remarks.end(), found->remarks.begin(), found->remarks.end());
  if (analysis::framework_cuts(analysis->recorded.trace))
    remarks.emplace_back(
        "the framework keeps its own buckets: of a plan it obeys lanes, chunks, workers and "
        "algorithms, and the rest only where weft.torch.attach(model, optimizer) carries the "
        "gradients");
  if (options.json)
    print_json(as_json(options, environment, *found, remarks));
  else
    print_found(options, environment, *found, remarks);
  return {};
}

}  // namespace

void add_optimize(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = add_verb(app, "optimize", "Searches a better plan for a recorded run.",
                            "weft optimize run7/ -o plan.json\n"
                            "weft optimize run7/ -o plan.json --budget 30s --without boundaries");
  verb->add_option("RUN", options->run, "A run folder")->required();
  verb->add_option("--probe", options->probe, kProbeOption)->type_name("PROBE");
  verb->add_option("--under", options->under, kUnder);
  verb->add_option("-o,--output", options->output, "File to write the plan to")->required();
  verb->add_option("--budget", options->budget, "How long to search")
      ->type_name("TIME")
      ->capture_default_str();
  verb->add_option("--seed", options->seed, "Of the search")->capture_default_str();
  verb->add_option("--max-lanes", options->max_lanes, "Most lanes that a plan may use")
      ->check(CLI::Range(1u, plan::kLanesMax).description(""))
      ->capture_default_str();
  verb->add_option("--without", options->without, "Leave a pass of the search out")
      ->type_name("PASS")
      ->check(CLI::IsMember(optimize::pass_names()))
      ->allow_extra_args(false);
  verb->add_option("--set", options->set, "For another cluster: link=RATE, flow=RATE|none, hosts=N")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  verb->add_flag("--as-lab", options->as_lab, kAsLab);
  verb->add_flag("--json", options->json, "Print one JSON object");
  on_call(*verb, context, [options] { return run(*options); });
}

}  // namespace weft::cli
