// weft export: turns a trace into files that other tools open.

#include <CLI/CLI.hpp>
#include <charconv>
#include <memory>
#include <nlohmann/json.hpp>

#include "analysis.h"
#include "verb.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string run;
  std::string to = "chrome";
  std::string file;
  std::vector<std::string> profiles;
  bool target_time = false;
  bool json = false;
};

// "RANK=FILE", or a file that says itself of which rank it is.
trace::Profile profile_of(const std::string& words) {
  trace::Profile profile{words, {}};
  const size_t equals = words.find('=');
  uint32_t rank = 0;
  const char* end = words.data() + std::min(equals, words.size());
  const auto [stopped, failure] = std::from_chars(words.data(), end, rank);
  if (equals == std::string::npos || failure != std::errc() || stopped != end) return profile;
  return {words.substr(equals + 1), rank};
}

Outcome to_chrome(const Options& options, const trace::Trace& trace) {
  trace::ChromeOptions chrome;
  chrome.target_time = options.target_time;
  for (const std::string& words : options.profiles) chrome.profiles.push_back(profile_of(words));
  WEFT_ASSIGN(const auto summary, trace::write_chrome(trace, options.file, chrome));
  if (options.json) {
    print_json({{"file", options.file},
                {"format", options.to},
                {"time", options.target_time ? "target" : "wall"},
                {"processes", trace.processes.size()},
                {"rows", summary.rows},
                {"slices", summary.slices},
                {"instants", summary.instants},
                {"counters", summary.counters},
                {"arrows", summary.flows},
                {"arrows_backward", summary.backward},
                {"halves", summary.halves},
                {"joined", summary.joined}});
    return {};
  }
  print(text("%s: %llu slices, %llu instants, %llu counter values, %llu arrows of %zu ranks\n",
             options.file.c_str(), static_cast<unsigned long long>(summary.slices),
             static_cast<unsigned long long>(summary.instants),
             static_cast<unsigned long long>(summary.counters),
             static_cast<unsigned long long>(summary.flows), trace.processes.size()));
  if (summary.halves > 0)
    print(text("%llu halves of messages have no other half, and no arrow\n",
               static_cast<unsigned long long>(summary.halves)));
  if (summary.backward > 0)
    print(text("%llu arrows point backward: the clocks of these ranks do not agree\n",
               static_cast<unsigned long long>(summary.backward)));
  if (!options.profiles.empty())
    print(text("%llu events of %zu profiles stand beside their ranks\n",
               static_cast<unsigned long long>(summary.joined), options.profiles.size()));
  print("open it in https://ui.perfetto.dev or chrome://tracing\n");
  return {};
}

// On one clock, since what is compared with a mask or a sort says nothing of clocks.
Outcome to_npy(const Options& options, trace::Trace trace) {
  std::vector<std::string> remarks = trace::infer_iterations(trace);
  auto alignment = analysis::put_on_one_clock(trace);
  if (!alignment) return Outcome::bad_input(std::move(alignment).error().in(options.run));
  remarks.insert(remarks.begin(), alignment->remarks.begin(), alignment->remarks.end());
  trace::TablesOptions tables;
  tables.target_time = options.target_time;
  WEFT_ASSIGN(const auto summary, trace::write_tables(trace, options.file, tables));
  uint64_t rows = 0;
  Json rows_of = Json::object();
  for (const auto& [name, count] : summary.rows) {
    rows += count;
    rows_of[name] = count;
  }
  if (options.json) {
    print_json({{"folder", options.file},
                {"format", options.to},
                {"time", options.target_time ? "target" : "wall"},
                {"processes", trace.processes.size()},
                {"rows", std::move(rows_of)},
                {"halves", summary.halves},
                {"remarks", remarks}});
    return {};
  }
  print(text("%s: %llu rows in %zu tables of %zu ranks\n", options.file.c_str(),
             static_cast<unsigned long long>(rows), summary.rows.size(), trace.processes.size()));
  if (summary.halves > 0)
    print(text("%llu halves of messages have no other half, and are not in messages.npy\n",
               static_cast<unsigned long long>(summary.halves)));
  print_notes("note", remarks);
  return {};
}

Outcome run(const Options& options, const Context& context) {
  WEFT_ASSIGN(auto trace, trace::read(options.run));
  for (const trace::Damage& damage : trace.damage) {
    if (damage.any()) complain(context, damage.file + ": damaged; exporting what is left of it");
  }
  if (options.to == "npy" && !options.profiles.empty())
    return Outcome::bad_call("--profile is for --to chrome: tables hold what weft recorded");
  return options.to == "npy" ? to_npy(options, std::move(trace)) : to_chrome(options, trace);
}

}  // namespace

void add_export(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb =
      add_verb(app, "export", "Writes a trace in a format that other tools open.",
               "weft export run7/ --to chrome -o run7.json\n"
               "weft export run7/ -o run7.json --profile rank0.json --profile rank1.json\n"
               "weft export run7/ --to npy -o run7-tables");
  verb->add_option("RUN", options->run, "A run folder or one trace file.")->required();
  verb->add_option(
          "--to", options->to,
          "The format: chrome, for Perfetto and chrome://tracing; npy, for NumPy, on one clock.")
      ->check(CLI::IsMember({"chrome", "npy"}));
  verb->add_option("-o,--output", options->file, "The file to write; npy: the folder.")->required();
  verb->add_option("--profile", options->profiles,
                   "What torch.profiler exported (export_chrome_trace) of a rank of the same run, "
                   "to stand beside it; the rank only where the file does not say it.")
      ->type_name("[RANK=]FILE")
      ->allow_extra_args(false);
  verb->add_flag("--target-time", options->target_time,
                 "Show the target cluster's time and bytes instead of the lab's.");
  verb->add_flag("--json", options->json, "Print one JSON object.");
  on_call(*verb, context, [options, &context] { return run(*options, context); });
}

}  // namespace weft::cli
