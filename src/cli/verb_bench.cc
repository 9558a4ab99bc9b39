// weft bench: how fast weft itself is on this machine.

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "verb.h"
#include "weft/bench.h"

namespace weft::cli {

namespace {

struct Options {
  bench::ReplayOptions replay;
  bool json = false;
};

Outcome replay(const Options& options) {
  WEFT_ASSIGN(bench::ReplaySpeed speed, bench::replay_speed(options.replay, monotonic_clock()));
  if (options.json) {
    print_json({{"operations_per_second", speed.operations_per_second},
                {"operations", speed.operations},
                {"events", speed.events},
                {"events_per_second", speed.events_per_second},
                {"seconds", speed.seconds},
                {"ranks", speed.ranks},
                {"layers", speed.layers},
                {"iterations", speed.iterations},
                {"threads", 1},
                {"replay_share_percent", speed.replay_share_percent},
                {"search_replays", speed.search_replays},
                {"search_seconds", speed.search_seconds}});
    return {};
  }
  print(text("replay      %.2f M operations a second: %llu in %.3f s on one thread (%llu events)\n",
             speed.operations_per_second * 1e-6, static_cast<unsigned long long>(speed.operations),
             speed.seconds, static_cast<unsigned long long>(speed.events)));
  print(text("job         %u ranks, %u layers, %u iterations, made in memory\n", speed.ranks,
             speed.layers, speed.iterations));
  print(text("search      %llu replays in %.2f s; %.1f %% of that is replay\n",
             static_cast<unsigned long long>(speed.search_replays), speed.search_seconds,
             speed.replay_share_percent));
  return {};
}

}  // namespace

void add_bench(CLI::App& app, Context& context) {
  CLI::App* group =
      add_group(app, "bench", "Measures how fast weft itself is here.", "weft bench replay");
  auto options = std::make_shared<Options>();
  CLI::App* verb = add_verb(*group, "replay", "Times the replay of a large job made in memory.",
                            "weft bench replay --json");
  verb->add_option("--operations", options->replay.operations, "How many to simulate at the least")
      ->check(CLI::Range(uint64_t{1000}, uint64_t{1'000'000'000}).description(""))
      ->capture_default_str();
  verb->add_flag("--json", options->json, "Print one JSON object");
  on_call(*verb, context, [options] { return replay(*options); });
}

}  // namespace weft::cli
