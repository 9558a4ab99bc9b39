// weft run: starts a program once a rank, on this host or on several, and minds the processes.
//
// weft remote-child, which help does not list, is what it starts through an agent on another host.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "launch_report.h"
#include "verb.h"
#include "weft/launch.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

struct Options {
  uint32_t ranks = 0;  // 0: as many as the hosts have slots
  std::vector<std::string> program;
  std::string hosts;
  std::vector<std::string> variables;
  launch::Placement placement;
  std::string timeout;
  std::string grace = "3s";
  bool no_prefix = false;
  bool json = false;
};

// Exit codes by which a shell says that there is no program, or that it could not be started.
constexpr int kExitNotFound = 127, kExitNotStarted = 126;

Result<std::vector<launch::Process>> processes_of(const Options& options, Nanos grace) {
  launch::Placement placement = options.placement;
  placement.grace = grace;
  WEFT_ASSIGN(placement.added, launch::parse_variables(options.variables));
  const bool here = options.hosts.empty();
  if (here && placement.rendezvous.empty() && placement.interface.empty()) {
    return launch::local_job(options.ranks, options.program, placement.added);
  }
  if (here) {
    placement.hosts = {{"localhost", options.ranks}};
  } else {
    WEFT_ASSIGN(placement.hosts, launch::parse_hosts(options.hosts));
  }
  uint32_t ranks = options.ranks;
  if (ranks == 0) {
    for (const launch::Host& host : placement.hosts) ranks += host.slots;
  }
  return launch::job_on_hosts(ranks, options.program, placement);
}

Outcome run(const Options& options) {
  if (options.ranks == 0 && options.hosts.empty()) {
    return Outcome::bad_call("--ranks or --hosts must say how many processes; see weft run --help");
  }
  launch::Options how;
  how.prefix_output = !options.no_prefix;
  how.output_to_stderr = options.json;
  WEFT_ASSIGN(how.grace, parse_duration(options.grace));
  if (!options.timeout.empty()) {
    WEFT_ASSIGN(how.deadline, parse_duration(options.timeout));
  }
  WEFT_ASSIGN(const auto processes, processes_of(options, how.grace));
  WEFT_ASSIGN(const launch::Report report, launch::run(processes, how));
  if (options.json) print_json(described(report));
  return report.ok() ? Outcome() : Outcome::run_failed(report.reason);
}

Outcome run_remote_child(const Context& context) {
  const auto code = launch::remote_child(STDIN_FILENO);
  if (code) return Outcome::said(*code);
  complain(context, code.error().message());
  return Outcome::said(code.error().code() == Code::not_found ? kExitNotFound : kExitNotStarted);
}

}  // namespace

void add_run(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = add_verb(
      app, "run", "Starts a program once a rank; if one fails, ends them all and says which.",
      "weft run -n 4 -- python train.py --epochs 3\nweft run -H gpu1:2,gpu2:2 -- python train.py");
  verb->add_option("-n,--ranks", options->ranks, "How many processes to start")
      ->type_name("N")
      ->check(CLI::Range(1u, 65535u).description(""));
  verb->add_option("PROGRAM", options->program, "What to start, with its arguments, after --")
      ->required();
  verb->add_option("-H,--hosts", options->hosts,
                   "Where, and how many on each; this host if left out")
      ->type_name("HOST:N,...");
  launch::Placement& placement = options->placement;
  verb->add_option("--agent", placement.agent, "Runs a command on a host: AGENT HOST COMMAND...")
      ->type_name("AGENT")
      ->capture_default_str();
  verb->add_option("--weft", placement.remote_weft,
                   "This program's path on other hosts, if another")
      ->type_name("PATH");
  verb->add_option("--rendezvous", placement.rendezvous, "Where the ranks find rank 0")
      ->type_name("ADDRESS:PORT");
  verb->add_option("--interface", placement.interface, "The network to use, by its interface")
      ->type_name("IF");
  verb->add_option("-x,--env", options->variables,
                   "A variable for every rank, also on other hosts, where few go by themselves")
      ->type_name("NAME[=VALUE]")
      ->allow_extra_args(false);
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

  CLI::App* child =
      add_verb(app, "remote-child", "What `weft run` starts on another host.", "weft remote-child");
  child->group("");  // not for people
  on_call(*child, context, [&context] { return run_remote_child(context); });
}

}  // namespace weft::cli
