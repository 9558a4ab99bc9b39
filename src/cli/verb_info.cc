// weft info: says what was run where, and whether all of it was recorded.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "table.h"
#include "verb.h"
#include "weft/trace.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string run;
  bool json = false;
};

double model_bytes(const trace::Model& model) {
  double sum = 0;
  for (const trace::Tensor& tensor : model.tensors) sum += static_cast<double>(tensor.bytes);
  return sum;
}

std::vector<uint32_t> missing_ranks(const trace::Trace& trace) {
  std::vector<uint32_t> missing;
  const uint32_t ranks = trace.processes.front().environment.ranks;
  for (uint32_t rank = 0; rank < ranks && missing.size() < 1000; ++rank) {
    if (trace.of_rank(rank) == nullptr) missing.push_back(rank);
  }
  return missing;
}

std::string describe(const trace::ProbeSummary& row) {
  std::string what = name_of(row.type);
  if (row.type != trace::ProbeType::rate) return what;
  what += text(", %s, %u flow%s", name_of(row.scope), row.flows, row.flows == 1 ? "" : "s");
  return row.reverse != 0 ? what + ", reverse" : what;
}

Json as_json(const Options& options, const trace::Trace& trace) {
  const trace::Environment& first = trace.processes.front().environment;
  const trace::Model& model = trace.processes.front().model;
  Json processes = Json::array();
  for (size_t i = 0; i < trace.processes.size(); ++i) {
    const trace::Process& p = trace.processes[i];
    const trace::FileFacts& file = trace.files[i];
    processes.push_back({{"rank", p.environment.rank},
                         {"host", p.environment.host},
                         {"host_index", p.environment.host_index},
                         {"cores", p.environment.cores},
                         {"kernel", p.environment.kernel},
                         {"congestion_control", p.environment.congestion_control},
                         {"sysctls", p.environment.sysctls},
                         {"file", file.path},
                         {"format", file.format},
                         {"written_by", file.written_by},
                         {"bytes", file.bytes},
                         {"blocks", file.blocks},
                         {"events", file.events},
                         {"tracks", p.tracks.size()},
                         {"clock_samples", p.clock_samples.size()},
                         {"pings", p.pings.size()},
                         {"probe", p.probe.size()},
                         {"notes", p.notes.size()},
                         {"dropped", p.dropped}});
  }
  Json probe = Json::array();
  for (const trace::ProbeSummary& row : summarize_probe(trace)) {
    probe.push_back({{"type", name_of(row.type)},
                     {"scope", name_of(row.scope)},
                     {"flows", row.flows},
                     {"reverse", row.reverse != 0},
                     {"count", row.count},
                     {"slowest_bps", row.slowest_bps},
                     {"median_bps", row.median_bps},
                     {"fastest_bps", row.fastest_bps}});
  }
  Json damage = Json::array();
  for (const trace::Damage& d : trace.damage) {
    damage.push_back({{"file", d.file},
                      {"damaged", d.any()},
                      {"blocks_lost", d.blocks_lost},
                      {"bytes_lost", d.bytes_lost},
                      {"unfinished", d.unfinished},
                      {"details", d.details}});
  }
  return {{"run", options.run},
          {"made", first.predicted ? "predicted" : "measured"},
          {"weft_version", first.weft_version},
          {"ranks", first.ranks},
          {"missing_ranks", missing_ranks(trace)},
          {"plan", {{"name", first.plan_name}, {"hash", first.plan_hash}}},
          {"model",
           {{"name", model.name},
            {"layers", model.layers.size()},
            {"tensors", model.tensors.size()},
            {"bytes", first.to_target_bytes(model_bytes(model))}}},
          {"dilation", first.dilation},
          {"shrink", first.shrink},
          {"emulated_compute", first.emulated_compute},
          {"lab", first.lab},
          {"processes", std::move(processes)},
          {"probe", std::move(probe)},
          {"damage", std::move(damage)}};
}

// What was asked for. Keys with a dot are what the lab made of it, and stand in --json only.
std::string asked_of_lab(const std::map<std::string, std::string>& lab) {
  std::string out;
  for (const auto& [key, value] : lab) {
    if (key.find('.') != std::string::npos) continue;
    if (!out.empty()) out += ", ";
    out += key;
    out += ' ';
    out += value;
  }
  return out;
}

void print_run(const Options& options, const trace::Trace& trace) {
  const trace::Environment& first = trace.processes.front().environment;
  const trace::Model& model = trace.processes.front().model;
  Table facts({{}, {}});
  facts.add({"run", options.run});
  facts.add({"made", text("%s by weft %s", first.predicted ? "predicted" : "measured",
                          first.weft_version.c_str())});
  std::string ranks = text("%u", first.ranks);
  if (const auto missing = missing_ranks(trace); !missing.empty()) {
    ranks += ", without a file:";
    for (size_t i = 0; i < std::min<size_t>(missing.size(), 10); ++i)
      ranks += text(" %u", missing[i]);
    if (missing.size() > 10) ranks += " ...";
  }
  facts.add({"ranks", ranks});
  facts.add({"plan", first.plan_name.empty() ? "not recorded"
                                             : first.plan_name + " (" + first.plan_hash + ")"});
  facts.add({"model", model.tensors.empty() && model.layers.empty()
                          ? "not recorded"
                          : text("%s: %zu layers, %zu tensors, %s", model.name.c_str(),
                                 model.layers.size(), model.tensors.size(),
                                 format_size(first.to_target_bytes(model_bytes(model))).c_str())});
  if (first.dilation != 1 || first.shrink != 1)
    facts.add({"scale", text("time dilated by %g, sizes shrunk by %g%s", first.dilation,
                             first.shrink, first.emulated_compute ? ", compute emulated" : "")});
  if (!first.lab.empty()) facts.add({"lab", asked_of_lab(first.lab)});
  if (!first.kernel.empty())
    facts.add(
        {"kernel",
         first.kernel + (first.congestion_control.empty() ? "" : ", " + first.congestion_control)});
  for (const trace::Process& process : trace.processes)
    for (const trace::Note& note : process.notes)
      if (note.key == trace::kMarksRefused)
        facts.add({"marks refused", text("rank %u: %s", process.environment.rank,
                                         shortened(note.value, 200).c_str())});
  print(facts.text());
}

void print_parts(const trace::Trace& trace) {
  Table ranks({{"rank", Align::right},
               {"host"},
               {"cores", Align::right},
               {"events", Align::right},
               {"dropped", Align::right},
               {"pings", Align::right},
               {"notes", Align::right},
               {"file", Align::right}});
  for (size_t i = 0; i < trace.processes.size(); ++i) {
    const trace::Process& p = trace.processes[i];
    ranks.add({std::to_string(p.environment.rank), p.environment.host,
               std::to_string(p.environment.cores), std::to_string(trace.files[i].events),
               std::to_string(p.dropped), std::to_string(p.pings.size()),
               std::to_string(p.notes.size()),
               format_size(static_cast<double>(trace.files[i].bytes))});
  }
  print("\n" + ranks.text());
  const auto probe = summarize_probe(trace);
  if (!probe.empty()) {
    const double dilation = trace.processes.front().environment.dilation;
    Table table({{"probe"},
                 {"results", Align::right},
                 {"slowest", Align::right},
                 {"median", Align::right},
                 {"fastest", Align::right},
                 {"median, target", Align::right}});
    for (const trace::ProbeSummary& row : probe)
      table.add(
          {describe(row), std::to_string(row.count), format_rate(row.slowest_bps),
           format_rate(row.median_bps), format_rate(row.fastest_bps),
           // The lab slows the network, not the processor.
           row.scope == trace::ProbeScope::local ? "-" : format_rate(row.median_bps * dilation)});
    print("\n" + table.text());
  }
  for (const trace::Damage& damage : trace.damage) {
    print(text("\n%s: %s\n", damage.file.c_str(), damage.any() ? "damaged" : "whole"));
    if (damage.any())
      print(text("  %llu blocks and %llu bytes lost\n",
                 static_cast<unsigned long long>(damage.blocks_lost),
                 static_cast<unsigned long long>(damage.bytes_lost)));
    for (const std::string& detail : damage.details) print("  " + detail + "\n");
  }
}

Outcome run(const Options& options) {
  trace::ReadOptions read;
  read.events = false;
  WEFT_ASSIGN(const auto trace, trace::read(options.run, read));
  if (options.json) {
    print_json(as_json(options, trace));
    return {};
  }
  print_run(options, trace);
  print_parts(trace);
  return {};
}

}  // namespace

void add_info(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb =
      add_verb(app, "info", "Says what was run where, and whether all of it was recorded.",
               "weft info run7/");
  verb->add_option("RUN", options->run, "A run folder or one trace file.")->required();
  verb->add_flag("--json", options->json, "Print one JSON object.");
  on_call(*verb, context, [options] { return run(*options); });
}

}  // namespace weft::cli
