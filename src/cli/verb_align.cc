// weft align: how the hosts' clocks differ, and the run on one clock.

#include <CLI/CLI.hpp>
#include <cmath>
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
  std::string output;
  bool json = false;
};

// Infinite bounds become null: nothing was seen on that side.
Json as_json(const Options& options, const align::Alignment& alignment) {
  Json hosts = Json::array();
  for (const align::HostClock& host : alignment.hosts)
    hosts.push_back({{"host", host.host},
                     {"host_index", host.host_index},
                     {"offset_ns", host.offset_ns},
                     {"low_ns", host.low_ns},
                     {"high_ns", host.high_ns},
                     {"drift_ppm", host.drift_ppm},
                     {"drift_low_ppm", host.drift_low_ppm},
                     {"drift_high_ppm", host.drift_high_ppm},
                     {"quality", align::name_of(host.quality)},
                     {"constraints", host.constraints}});
  return {{"run", options.run},
          {"hosts", std::move(hosts)},
          {"messages", alignment.messages},
          {"backward_before", alignment.backward_before},
          {"backward_after", alignment.backward_after},
          {"output", options.output.empty() ? Json(nullptr) : Json(options.output)},
          {"remarks", alignment.remarks}};
}

void print_alignment(const align::Alignment& alignment) {
  auto duration = [](double ns) {
    return std::isfinite(ns) ? format_duration(Nanos{static_cast<int64_t>(ns)})
                             : std::string("unknown");
  };
  Table table({{"host"},
               {"offset", Align::right},
               {"at least", Align::right},
               {"at most", Align::right},
               {"drift", Align::right},
               {"quality"}});
  for (const align::HostClock& host : alignment.hosts)
    table.add({host.host, duration(host.offset_ns), duration(host.low_ns), duration(host.high_ns),
               text("%+.2f ppm", host.drift_ppm), align::name_of(host.quality)});
  print(table.text());
  print(
      text("\n%llu messages; received before they were sent: %llu by the raw clocks, %llu on one "
           "clock\n",
           static_cast<unsigned long long>(alignment.messages),
           static_cast<unsigned long long>(alignment.backward_before),
           static_cast<unsigned long long>(alignment.backward_after)));
  print_notes("note", alignment.remarks);
}

Outcome run(const Options& options) {
  auto trace = trace::read(options.run);
  if (!trace) return Outcome::bad_input(trace.error());
  auto alignment = analysis::put_on_one_clock(*trace);
  if (!alignment) return Outcome::bad_input(std::move(alignment).error().in(options.run));
  for (const trace::Damage& damage : trace->damage)
    if (damage.any())
      alignment->remarks.push_back(damage.file + " is damaged: aligned by what is left of it");
  if (!options.output.empty()) WEFT_TRY(analysis::write_run(*trace, options.output));
  if (options.json) {
    print_json(as_json(options, *alignment));
    return {};
  }
  print_alignment(*alignment);
  if (!options.output.empty()) print("run         " + options.output + "\n");
  return {};
}

}  // namespace

void add_align(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = add_verb(app, "align", "Puts all hosts of a run on one clock.",
                            "weft align run7/\nweft align run7/ -o run7-aligned");
  verb->add_option("RUN", options->run, "A run folder")->required();
  verb->add_option("-o,--output", options->output, "Write the aligned run into this new folder");
  verb->add_flag("--json", options->json, "Print one JSON object");
  on_call(*verb, context, [options] { return run(*options); });
}

}  // namespace weft::cli
