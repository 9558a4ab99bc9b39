// weft doctor: looks at what a job needs of this host and of the way to others.
//
// weft doctor-peer, which help does not list, is what it starts on another host.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "verb.h"
#include "weft/doctor.h"
#include "weft/launch.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

struct Options {
  doctor::Options looking;
  std::string hosts;
  bool no_rates = false;
  bool json = false;
};

size_t count_of(const std::vector<doctor::Check>& checks, doctor::Verdict verdict) {
  return static_cast<size_t>(std::count_if(
      checks.begin(), checks.end(), [&](const auto& check) { return check.verdict == verdict; }));
}

Json described(const std::vector<doctor::Check>& checks) {
  Json list = Json::array();
  for (const doctor::Check& check : checks) {
    list.push_back({{"name", check.name},
                    {"verdict", doctor::name_of(check.verdict)},
                    {"found", check.found},
                    {"remedy", check.remedy}});
  }
  return {{"ok", count_of(checks, doctor::Verdict::problem) == 0},
          {"problems", count_of(checks, doctor::Verdict::problem)},
          {"notes", count_of(checks, doctor::Verdict::note)},
          {"checks", std::move(list)}};
}

void print_checks(const std::vector<doctor::Check>& checks) {
  size_t width = 0;
  for (const doctor::Check& check : checks) width = std::max(width, check.name.size());
  for (const doctor::Check& check : checks) {
    print(text("%-8s %-*s  %s\n", doctor::name_of(check.verdict), static_cast<int>(width),
               check.name.c_str(), check.found.c_str()));
    if (!check.remedy.empty()) {
      print(text("%-8s %-*s  -> %s\n", "", static_cast<int>(width), "", check.remedy.c_str()));
    }
  }
}

Outcome run(const Options& options) {
  doctor::Options looking = options.looking;
  looking.rates = !options.no_rates;
  if (!options.hosts.empty()) {
    WEFT_ASSIGN(const auto hosts, launch::parse_hosts(options.hosts));
    for (const launch::Host& host : hosts) looking.hosts.push_back(host.name);
  }
  const auto checks = doctor::examine(looking);
  if (options.json) {
    print_json(described(checks));
  } else {
    print_checks(checks);
  }
  const size_t problems = count_of(checks, doctor::Verdict::problem);
  if (problems == 0) return {};
  return Outcome::run_failed(text("%zu %s must be fixed before a job can be sure to run", problems,
                                  problems == 1 ? "problem" : "problems"));
}

}  // namespace

void add_doctor(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb =
      add_verb(app, "doctor",
               "Looks at what a job needs of this host and its network, and says what to set.",
               "weft doctor --hosts gpu1,gpu2 --rank0 gpu1");
  verb->add_option("--hosts", options->hosts, "Other hosts to look at, through the agent")
      ->type_name("HOST,...");
  verb->add_option("--rank0", options->looking.rank0, "Where rank 0 will run: the way there")
      ->type_name("HOST");
  verb->add_option("-n,--ranks", options->looking.ranks, "How many ranks will run on this host")
      ->type_name("N")
      ->check(CLI::Range(1u, 65535u).description(""));
  verb->add_option("--agent", options->looking.agent,
                   "Runs a command on a host: AGENT HOST COMMAND...")
      ->type_name("AGENT")
      ->capture_default_str();
  verb->add_option("--weft", options->looking.remote_weft,
                   "This program's path on other hosts, if another")
      ->type_name("PATH");
  verb->add_flag("--no-rates", options->no_rates, "Do not measure what connections carry");
  verb->add_flag("--json", options->json, "Print one JSON object");
  on_call(*verb, context, [options] { return run(*options); });

  CLI::App* peer = add_verb(app, "doctor-peer", "What `weft doctor` starts on another host.",
                            "weft doctor-peer");
  peer->group("");  // not for people
  on_call(*peer, context,
          [] { return Outcome(doctor::serve_as_peer(STDIN_FILENO, STDOUT_FILENO)); });
}

}  // namespace weft::cli
