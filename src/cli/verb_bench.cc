// weft bench: how fast weft is on this machine, beside other systems and the wire.

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "analysis.h"
#include "table.h"
#include "verb.h"
#include "weft/bench.h"
#include "weft/launch.h"
#include "weft/membership.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

struct ReplayOptions {
  bench::ReplayOptions replay;
  bool json = false;
};

Outcome replay(const ReplayOptions& options) {
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

struct CollectiveOptions {
  bench::CollectiveOptions bench;
  std::string from = "1K", to = "64M", transport = "tcp", time = "150ms";
  std::vector<std::string> peers;
  bool json = false;
};

// nccl-tests' sizes: "1K" and "64M" are binary there, and so they are here.
Result<Bytes> parse_size(const std::string& input) {
  std::string words = input;
  if (!words.empty() && std::string_view("KMGkmg").find(words.back()) != std::string_view::npos) {
    words.back() = static_cast<char>(std::toupper(words.back()));
    words += "iB";
  }
  return parse_bytes(words);
}

Json row_json(const bench::Row& row, const bench::CollectiveOptions& asked) {
  Json out = {{"engine", row.engine},
              {"transport", bench::name_of(row.transport)},
              {"ranks", row.ranks},
              {"bytes", row.bytes},
              {"count", row.count},
              {"type", asked.type},
              {"redop", asked.op},
              {"time_us", row.time_us},
              {"time_us_low", row.time_us_low},
              {"time_us_high", row.time_us_high},
              {"algbw", row.algbw},
              {"busbw", row.busbw},
              {"iterations", row.iterations}};
  if (row.wrong) out["wrong"] = *row.wrong;
  if (row.engine == "weft" || row.engine == bench::kSealed) {
    out["lanes"] = row.lanes;
    out["algorithm"] = row.algorithm;
  }
  return out;
}

Json collective_json(const bench::CollectiveResult& result, const bench::CollectiveOptions& asked) {
  Json rows = Json::array(), engines = Json::array();
  for (const bench::Row& row : result.rows) rows.push_back(row_json(row, asked));
  for (const bench::EngineReport& engine : result.engines) {
    Json one = {{"engine", engine.name}, {"version", engine.version}, {"how", engine.how}};
    if (!engine.absent.empty()) one["absent"] = engine.absent;
    engines.push_back(std::move(one));
  }
  Json out = {{"collective", asked.collective}, {"rows", std::move(rows)},
              {"engines", std::move(engines)},  {"repeats", asked.repeats},
              {"cores", result.cores},          {"steal_percent", result.steal_percent},
              {"seconds", result.seconds}};
  if (result.iperf3_gb_per_s) out["iperf3_gb_per_s"] = *result.iperf3_gb_per_s;
  return out;
}

void print_collective(const bench::CollectiveResult& result,
                      const bench::CollectiveOptions& asked) {
  print(
      text("# %s, %u ranks on %u cores, asked over %s; medians of %u repeats taken in turns; "
           "%.1f %% stolen\n",
           asked.collective.c_str(), asked.ranks, result.cores, bench::name_of(asked.transport),
           asked.repeats, result.steal_percent));
  for (const bench::EngineReport& engine : result.engines)
    print(text("# %s: %s%s%s%s\n", engine.name.c_str(), engine.version.c_str(),
               engine.how.empty() || engine.version.empty() ? "" : "; ", engine.how.c_str(),
               engine.absent.empty() ? "" : (" ABSENT: " + engine.absent).c_str()));
  Table table({{"size", Align::right},
               {"count", Align::right},
               {"type"},
               {"redop"},
               {"engine"},
               {"over"},
               {"time(us)", Align::right},
               {"low", Align::right},
               {"high", Align::right},
               {"algbw(GB/s)", Align::right},
               {"busbw(GB/s)", Align::right},
               {"#wrong", Align::right}});
  for (const bench::Row& row : result.rows)
    table.add({std::to_string(row.bytes), std::to_string(row.count), asked.type, asked.op,
               row.engine, bench::name_of(row.transport), text("%.2f", row.time_us),
               text("%.2f", row.time_us_low), text("%.2f", row.time_us_high),
               text("%.3f", row.algbw), text("%.3f", row.busbw),
               row.wrong ? std::to_string(*row.wrong) : "N/A"});
  print(table.text());
  if (result.iperf3_gb_per_s)
    print(text("# iperf3, one connection each way at once: %.3f GB/s each way\n",
               *result.iperf3_gb_per_s));
}

Outcome collective(const CollectiveOptions& options) {
  bench::CollectiveOptions asked = options.bench;
  WEFT_ASSIGN(asked.from, parse_size(options.from));
  WEFT_ASSIGN(asked.to, parse_size(options.to));
  asked.transport = options.transport == "shm" ? bench::Transport::shm : bench::Transport::tcp;
  WEFT_ASSIGN(asked.repeat_time, parse_duration(options.time));
  asked.peers = options.peers;
  WEFT_ASSIGN(bench::CollectiveResult result, bench::measure_collective(asked, narrator()));
  if (options.json)
    print_json(collective_json(result, asked));
  else
    print_collective(result, asked);
  for (const bench::Row& row : result.rows)
    if (row.wrong.value_or(0) > 0)
      return Outcome::run_failed(text(
          "%s gave %llu wrong elements at %llu bytes", row.engine.c_str(),
          static_cast<unsigned long long>(*row.wrong), static_cast<unsigned long long>(row.bytes)));
  return {};
}

void add_collective(CLI::App& group, Context& context, const std::string& name) {
  auto options = std::make_shared<CollectiveOptions>();
  options->bench.collective = name;
  CLI::App* verb =
      add_verb(group, name, "Times " + name + " beside other systems and the wire.",
               "weft bench " + name + " -n 4 -b 1K -e 64M -f 4 --peers gloo,openmpi --check");
  verb->add_option("-n,--ranks", options->bench.ranks, "How many ranks, on this machine")
      ->check(CLI::Range(1u, 64u).description(""))
      ->capture_default_str();
  verb->add_option("-b,--minbytes", options->from, "Smallest size")->capture_default_str();
  verb->add_option("-e,--maxbytes", options->to, "Largest size")->capture_default_str();
  verb->add_option("-f,--stepfactor", options->bench.factor, "From one size to the next")
      ->check(CLI::Range(2u, 1u << 20).description(""))
      ->capture_default_str();
  verb->add_option("--transport", options->transport, "What peers on one host talk over")
      ->check(CLI::IsMember({"tcp", "shm"}))
      ->capture_default_str();
  verb->add_option("--lanes", options->bench.lanes, "Lanes of weft; one if not given")
      ->check(CLI::Range(1u, 64u).description(""));
  verb->add_option("--algorithm", options->bench.algorithm,
                   "Algorithm of weft; its own choice if not given");
  verb->add_option("--type", options->bench.type, "Of the elements")
      ->check(CLI::IsMember(bench::types()))
      ->capture_default_str();
  verb->add_option("--op", options->bench.op, "Reduction")
      ->check(CLI::IsMember(bench::operations()))
      ->capture_default_str();
  verb->add_flag("--sealed", options->bench.sealed,
                 "weft once more, with sealed connections (WEFT_SEAL=1)");
  verb->add_option("--peers", options->peers, "Systems to measure beside weft, set up if missing")
      ->delimiter(',')
      ->check(CLI::IsMember(bench::peers()));
  verb->add_option("--repeats", options->bench.repeats, "Of each measurement")
      ->check(CLI::Range(1u, 1000u).description(""))
      ->capture_default_str();
  verb->add_option("--time", options->time, "About what one repeat should take")
      ->type_name("DURATION")
      ->capture_default_str();
  verb->add_flag("--check", options->bench.check, "Compare results with what they must be");
  verb->add_flag("--json", options->json, "Print one JSON object");
  on_call(*verb, context, [options] { return collective(*options); });
}

struct LanesOptions {
  bench::LanesOptions bench;
  uint32_t ranks = 0;  // 0: not said
  bool json = false;
};

void print_lanes(const bench::LanesResult& result) {
  Table table({{"lanes", Align::right},
               {"time(us)", Align::right},
               {"low", Align::right},
               {"high", Align::right},
               {"algbw(GB/s)", Align::right},
               {"busbw(GB/s)", Align::right}});
  for (const bench::LanesRow& row : result.rows)
    table.add({std::to_string(row.lanes), text("%.1f", row.time_us), text("%.1f", row.time_us_low),
               text("%.1f", row.time_us_high), text("%.3f", row.algbw), text("%.3f", row.busbw)});
  print(text("# all-reduce of %s, %u ranks; %u cores here, %.1f %% stolen\n",
             format_bytes({result.bytes}).c_str(), result.ranks, result.cores,
             result.steal_percent));
  print(table.text());
  print(text("best: %u lane%s", result.best, result.best == 1 ? "" : "s"));
  print(result.losing_from ? text("; from %u lanes on more lanes lose, %.0f %% there\n",
                                  *result.losing_from, result.loss_percent)
                           : std::string("; more lanes do not lose here\n"));
}

Json lanes_json(const bench::LanesResult& result) {
  Json rows = Json::array();
  for (const bench::LanesRow& row : result.rows)
    rows.push_back({{"lanes", row.lanes},
                    {"time_us", row.time_us},
                    {"time_us_low", row.time_us_low},
                    {"time_us_high", row.time_us_high},
                    {"algbw", row.algbw},
                    {"busbw", row.busbw}});
  return {{"ranks", result.ranks},
          {"bytes", result.bytes},
          {"rows", std::move(rows)},
          {"best", result.best},
          {"losing_from", result.losing_from ? Json(*result.losing_from) : Json()},
          {"loss_percent", result.loss_percent},
          {"cores", result.cores},
          {"steal_percent", result.steal_percent}};
}

// A verb that measures inside a job is one rank there; outside it starts such a job here.
Outcome start_job(uint32_t ranks, const std::vector<std::string>& command) {
  WEFT_ASSIGN(const auto processes, launch::local_job(ranks == 0 ? 4 : ranks, command));
  launch::Options how;
  how.prefix_output = false;
  WEFT_ASSIGN(const launch::Report report, launch::run(processes, how));
  return report.ok() ? Outcome() : Outcome::run_failed(report.reason);
}

const char* const kLeaveRanksOut = "inside a job the number of ranks is the job's: leave -n out";

Outcome lanes(const LanesOptions& options) {
  if (membership::launcher()) {
    if (options.ranks != 0) return Outcome::bad_call(kLeaveRanksOut);
    WEFT_ASSIGN(const membership::Membership member, membership::from_environment());
    WEFT_ASSIGN(bench::LanesResult result, bench::measure_lanes(member, options.bench));
    if (member.rank != 0) return {};
    if (options.json)
      print_json(lanes_json(result));
    else
      print_lanes(result);
    return {};
  }
  std::vector<std::string> command = {self_path(),
                                      "bench",
                                      "lanes",
                                      "--max",
                                      std::to_string(options.bench.max),
                                      "--repeats",
                                      std::to_string(options.bench.repeats)};
  if (options.json) command.emplace_back("--json");
  return start_job(options.ranks, command);
}

struct AlgorithmsOptions {
  bench::AlgorithmsOptions bench;
  std::string from = "1K", to = "16M", transport = "shm", out;
  uint32_t ranks = 0;  // 0: not said
  bool json = false;
};

void print_algorithms(const bench::AlgorithmsResult& result) {
  print(
      text("# all-reduce, %u ranks on %u host%s; microseconds, medians taken in turns; %u cores "
           "here, %.1f %% stolen\n",
           result.ranks, result.hosts, result.hosts == 1 ? "" : "s", result.cores,
           result.steal_percent));
  std::vector<Column> columns = {{"size", Align::right}};
  for (const std::string& name : result.algorithms) columns.push_back({name, Align::right});
  columns.push_back({"chosen"});
  columns.push_back({"loss", Align::right});
  Table table(columns);
  for (const bench::AlgorithmsRow& row : result.rows) {
    std::vector<std::string> cells = {std::to_string(row.bytes)};
    for (double time : row.time_us) cells.push_back(text("%.1f", time));
    cells.push_back(result.algorithms[row.chosen]);
    cells.push_back(text("%.0f %%", row.loss_percent));
    table.add(cells);
  }
  print(table.text());
  print("costs: " + Json::parse(result.costs).dump() + "\n");
}

Json algorithms_json(const bench::AlgorithmsResult& result) {
  Json rows = Json::array();
  for (const bench::AlgorithmsRow& row : result.rows) {
    Json times = Json::object(), reckoned = Json::object();
    for (size_t i = 0; i < result.algorithms.size(); ++i) {
      times[result.algorithms[i]] = row.time_us[i];
      reckoned[result.algorithms[i]] = row.reckoned_us[i];
    }
    rows.push_back({{"bytes", row.bytes},
                    {"time_us", std::move(times)},
                    {"reckoned_us", std::move(reckoned)},
                    {"chosen", result.algorithms[row.chosen]},
                    {"loss_percent", row.loss_percent}});
  }
  return {{"ranks", result.ranks},   {"hosts", result.hosts},
          {"rows", std::move(rows)}, {"costs", Json::parse(result.costs)},
          {"cores", result.cores},   {"steal_percent", result.steal_percent}};
}

Outcome algorithms(const AlgorithmsOptions& options) {
  bench::AlgorithmsOptions asked = options.bench;
  WEFT_ASSIGN(asked.from, parse_size(options.from));
  WEFT_ASSIGN(asked.to, parse_size(options.to));
  asked.shared_memory = options.transport == "shm";
  if (membership::launcher()) {
    if (options.ranks != 0) return Outcome::bad_call(kLeaveRanksOut);
    WEFT_ASSIGN(const membership::Membership member, membership::from_environment());
    WEFT_ASSIGN(bench::AlgorithmsResult result, bench::measure_algorithms(member, asked));
    if (member.rank != 0) return {};
    if (options.json)
      print_json(algorithms_json(result));
    else
      print_algorithms(result);
    if (options.out.empty()) return {};
    WEFT_TRY(write_file(options.out, result.costs));
    if (!options.json)
      print(text("wrote %s; jobs use it with WEFT_COSTS=%s\n", options.out.c_str(),
                 options.out.c_str()));
    return {};
  }
  std::vector<std::string> command = {self_path(),
                                      "bench",
                                      "algorithms",
                                      "-b",
                                      options.from,
                                      "-e",
                                      options.to,
                                      "-f",
                                      std::to_string(asked.factor),
                                      "--transport",
                                      options.transport,
                                      "--repeats",
                                      std::to_string(asked.repeats)};
  if (!options.out.empty()) command.insert(command.end(), {"-o", options.out});
  if (options.json) command.emplace_back("--json");
  return start_job(options.ranks, command);
}

void add_algorithms(CLI::App& group, Context& context) {
  auto options = std::make_shared<AlgorithmsOptions>();
  CLI::App* verb = add_verb(
      group, "algorithms",
      "Times every all-reduce on this network and fits the constants by which one is chosen.",
      "weft bench algorithms -n 4 -o costs.json\n"
      "weft run -H a:2,b:2 -- weft bench algorithms -o costs.json\n"
      "WEFT_COSTS=costs.json weft run -H a:2,b:2 -- ./train");
  verb->add_option("-n,--ranks", options->ranks,
                   "How many ranks to start on this machine; 4 if not given. Not inside a job")
      ->check(CLI::Range(2u, 64u).description(""));
  verb->add_option("-b,--minbytes", options->from, "Smallest size")->capture_default_str();
  verb->add_option("-e,--maxbytes", options->to, "Largest size")->capture_default_str();
  verb->add_option("-f,--stepfactor", options->bench.factor, "From one size to the next")
      ->check(CLI::Range(2u, 1u << 20).description(""))
      ->capture_default_str();
  verb->add_option("--transport", options->transport, "What ranks of one host talk over")
      ->check(CLI::IsMember({"tcp", "shm"}))
      ->capture_default_str();
  verb->add_option("--repeats", options->bench.repeats, "Of each measurement")
      ->check(CLI::Range(1u, 1000u).description(""))
      ->capture_default_str();
  verb->add_option("-o,--output", options->out, "File for the constants, for WEFT_COSTS");
  verb->add_flag("--json", options->json, "Print one JSON object");
  on_call(*verb, context, [options] { return algorithms(*options); });
}

void add_lanes(CLI::App& group, Context& context) {
  auto options = std::make_shared<LanesOptions>();
  CLI::App* verb = add_verb(group, "lanes", "Finds how many lanes are fastest on this network.",
                            "weft bench lanes -n 4\n"
                            "weft run -H a:1,b:1 -- weft bench lanes");
  verb->add_option("-n,--ranks", options->ranks,
                   "How many ranks to start on this machine; 4 if not given. Not inside a job")
      ->check(CLI::Range(2u, 64u).description(""));
  verb->add_option("--max", options->bench.max, "Most lanes to try")
      ->check(CLI::Range(1u, 64u).description(""))
      ->capture_default_str();
  verb->add_option("--repeats", options->bench.repeats, "Of each count")
      ->check(CLI::Range(1u, 1000u).description(""))
      ->capture_default_str();
  verb->add_flag("--json", options->json, "Print one JSON object");
  on_call(*verb, context, [options] { return lanes(*options); });
}

}  // namespace

void add_bench(CLI::App& app, Context& context) {
  CLI::App* group = add_group(app, "bench", "Measures how fast weft is here, and its peers.",
                              "weft bench allreduce -n 4 --peers gloo,openmpi\n"
                              "weft bench replay");
  for (const std::string& name : bench::collectives()) add_collective(*group, context, name);
  add_lanes(*group, context);
  add_algorithms(*group, context);

  auto options = std::make_shared<ReplayOptions>();
  CLI::App* verb = add_verb(*group, "replay", "Times the replay of a large job made in memory.",
                            "weft bench replay --json");
  verb->add_option("--operations", options->replay.operations, "How many to simulate at the least")
      ->check(CLI::Range(uint64_t{1000}, uint64_t{1'000'000'000}).description(""))
      ->capture_default_str();
  verb->add_flag("--json", options->json, "Print one JSON object");
  on_call(*verb, context, [options] { return replay(*options); });

  // Not for people: what the verbs above start.
  auto engine = std::make_shared<std::string>();
  CLI::App* worker = add_verb(*group, "worker", "One rank of an engine of `weft bench`.",
                              "weft bench worker wire-tcp");
  worker->add_option("ENGINE", *engine, "Which")->required();
  worker->group("");
  on_call(*worker, context, [engine] { return Outcome::said(bench::worker(*engine)); });
}

}  // namespace weft::cli
