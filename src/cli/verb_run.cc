// weft run: starts a program once a rank on this machine and minds the processes.

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "verb.h"
#include "weft/launch.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

struct Options {
  uint32_t ranks = 0;
  std::vector<std::string> program;
  std::string timeout;
  std::string grace = "3s";
  bool no_prefix = false;
  bool json = false;
};

Json described(const launch::Report& report) {
  Json outcomes = Json::array();
  for (const launch::Outcome& outcome : report.outcomes) {
    Json one = {{"rank", outcome.rank}};
    if (outcome.signal != 0) {
      one["signal"] = outcome.signal;
    } else {
      one["exit_code"] = outcome.exit_code;
    }
    one["ended_by_us"] = outcome.ended_by_us;
    one["seconds"] = outcome.after.seconds();
    outcomes.push_back(std::move(one));
  }
  return {{"ok", report.ok()},
          {"first_failure", report.first_failure ? Json(*report.first_failure) : Json()},
          {"reason", report.reason},
          {"outcomes", std::move(outcomes)}};
}

Outcome run(const Options& options) {
  launch::Options how;
  how.prefix_output = !options.no_prefix;
  how.output_to_stderr = options.json;
  WEFT_ASSIGN(how.grace, parse_duration(options.grace));
  if (!options.timeout.empty()) {
    WEFT_ASSIGN(how.deadline, parse_duration(options.timeout));
  }
  WEFT_ASSIGN(const auto processes, launch::local_job(options.ranks, options.program));
  WEFT_ASSIGN(const launch::Report report, launch::run(processes, how));
  if (options.json) print_json(described(report));
  return report.ok() ? Outcome() : Outcome::run_failed(report.reason);
}

std::string flaw_of_duration(const std::string& value) {
  const auto duration = parse_duration(value);
  if (!duration) return duration.error().message();
  return duration->count > 0 ? "" : "\"" + value + "\" is not a time to wait";
}

}  // namespace

void add_run(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = add_verb(
      app, "run", "Starts a program once a rank on this machine; if one fails, ends them all.",
      "weft run -n 4 -- python train.py --epochs 3");
  verb->add_option("-n,--ranks", options->ranks, "How many processes to start")
      ->type_name("N")
      ->check(CLI::Range(1u, 65535u).description(""))
      ->required();
  verb->add_option("PROGRAM", options->program, "What to start, with its arguments, after --")
      ->required();
  verb->add_option("--timeout", options->timeout, "End the job when it takes longer, as in 10s")
      ->type_name("TIME")
      ->check(flaw_of_duration);
  verb->add_option("--grace", options->grace, "Time to end by itself before a process is killed")
      ->type_name("TIME")
      ->check(flaw_of_duration)
      ->capture_default_str();
  verb->add_flag("--no-prefix", options->no_prefix, "Show output as it comes, without \"[rank] \"");
  verb->add_flag("--json", options->json,
                 "Print one JSON object at the end; what ranks print goes to standard error");
  on_call(*verb, context, [options] { return run(*options); });
}

}  // namespace weft::cli
