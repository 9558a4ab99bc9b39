// weft show: a trace as a table, by iteration, layer, tensor, lane, peer or kind.

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "analysis.h"
#include "table.h"
#include "verb.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;
using trace::By;

struct Options {
  std::string run;
  std::string by;
  std::string under;
  int64_t rank = -1;
  bool json = false;
};

Json as_json(const Options& options, const trace::Summary& summary) {
  const bool link = summary.by == By::lane || summary.by == By::peer;
  Json rows = Json::array();
  for (const trace::SummaryRow& row : summary.rows) {
    Json out = {{"what", row.what}};
    if (row.rank != trace::kNone) out["rank"] = row.rank;
    out["count"] = row.count;
    out["total_ns"] = row.total_ns;
    out["mean_ns"] = row.mean_ns;
    out["p50_ns"] = row.p50_ns;
    out["p95_ns"] = row.p95_ns;
    out["bytes"] = row.bytes;
    if (link) {
      out["busy_ns"] = row.busy_ns;
      out["rate_bps"] = row.rate_bps > 0 ? Json(row.rate_bps) : Json(nullptr);
    }
    if (summary.by == By::layer) {
      out["forward_ns"] = row.forward_ns;
      out["backward_ns"] = row.backward_ns;
      out["update_ns"] = row.update_ns;
      out["wait_ns"] = row.wait_ns;
    }
    if (summary.by == By::iteration) {
      out["compute_ns"] = row.compute_ns;
      out["wait_ns"] = row.wait_ns;
      if (row.slowest != trace::kNone) out["slowest_rank"] = row.slowest;
    }
    rows.push_back(std::move(out));
  }
  return {{"run", options.run},           {"by", name_of(summary.by)}, {"time", "target"},
          {"dilation", summary.dilation}, {"shrink", summary.shrink},  {"rows", std::move(rows)}};
}

std::string layers_as_text(const trace::Summary& summary) {
  const auto duration = [](double ns) {
    return ns > 0 ? format_duration(Nanos{static_cast<int64_t>(ns)}) : "-";
  };
  Table table({{"layer"},
               {"forward", Align::right},
               {"backward", Align::right},
               {"update", Align::right},
               {"gradients", Align::right},
               {"travel p50", Align::right},
               {"travel p95", Align::right},
               {"exposed wait", Align::right}});
  for (const trace::SummaryRow& row : summary.rows)
    table.add({row.what, duration(row.forward_ns), duration(row.backward_ns),
               duration(row.update_ns), row.bytes > 0 ? format_size(row.bytes) : "-",
               duration(row.p50_ns), duration(row.p95_ns), duration(row.wait_ns)});
  return table.text() +
         "\nMeans of one iteration of one rank; travel is from gradient ready to sum done.\n";
}

// The columns that each kind of row has something to say in.
std::string as_text(const trace::Summary& summary) {
  if (summary.by == By::layer) return layers_as_text(summary);
  const bool link = summary.by == By::lane || summary.by == By::peer;
  const bool iteration = summary.by == By::iteration;
  const auto duration = [](double ns) { return format_duration(Nanos{static_cast<int64_t>(ns)}); };
  std::vector<Column> columns = {{name_of(summary.by)}};
  if (link) columns.insert(columns.begin(), {"rank", Align::right});
  const char* count = iteration ? "ranks" : summary.by == By::tensor ? "reductions" : "count";
  for (const char* name : {count, "total", "mean", "p50", "p95", "bytes"})
    columns.push_back({name, Align::right});
  if (link) columns.insert(columns.end(), {{"busy", Align::right}, {"mean rate", Align::right}});
  if (iteration)
    columns.insert(columns.end(), {{"compute", Align::right},
                                   {"exposed wait", Align::right},
                                   {"slowest rank", Align::right}});
  Table table(columns);
  for (const trace::SummaryRow& row : summary.rows) {
    std::vector<std::string> cells = {row.what};
    if (link) cells.insert(cells.begin(), std::to_string(row.rank));
    cells.push_back(std::to_string(row.count));
    for (double ns : {row.total_ns, row.mean_ns, row.p50_ns, row.p95_ns})
      cells.push_back(row.count > 0 ? duration(ns) : "-");
    cells.push_back(row.bytes > 0 ? format_size(row.bytes) : "-");
    if (link) {
      cells.push_back(duration(row.busy_ns));
      cells.push_back(row.rate_bps > 0 ? format_rate(row.rate_bps) : "-");
    }
    if (iteration) {
      cells.push_back(duration(row.compute_ns));
      cells.push_back(duration(row.wait_ns));
      cells.push_back(row.slowest != trace::kNone ? std::to_string(row.slowest) : "-");
    }
    table.add(std::move(cells));
  }
  return table.text();
}

Outcome run(const Options& options, const Context& context) {
  WEFT_ASSIGN(const By by, trace::parse_by(options.by));
  WEFT_ASSIGN(auto trace, trace::read(options.run));
  auto kept = analysis::keep_one_plan(trace, options.under);
  if (!kept) return Outcome::bad_input(std::move(kept).error().in(options.run));
  for (const std::string& plan : *kept) complain(context, plan);
  if (by == By::iteration)
    for (const std::string& inferred : trace::infer_iterations(trace)) complain(context, inferred);
  std::optional<uint32_t> rank;
  if (options.rank >= 0) {
    rank = static_cast<uint32_t>(options.rank);
    if (trace.of_rank(*rank) == nullptr)
      return error(Code::not_found, "%s: no rank %u in this run", options.run.c_str(), *rank);
  }
  for (const trace::Damage& damage : trace.damage) {
    if (damage.any()) complain(context, damage.file + ": damaged; showing what is left of it");
  }
  const trace::Summary summary = summarize(trace, by, rank);
  if (options.json) {
    print_json(as_json(options, summary));
    return {};
  }
  if (summary.rows.empty()) {
    print(text("%s: nothing recorded by %s\n", options.run.c_str(), options.by.c_str()));
    return {};
  }
  print(as_text(summary));
  if (summary.dilation != 1 || summary.shrink != 1)
    print(
        text("\nIn the target cluster's time and bytes: the lab dilated time by %g and shrank "
             "sizes by %g.\n",
             summary.dilation, summary.shrink));
  return {};
}

}  // namespace

void add_show(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = add_verb(app, "show", "Shows the times and bytes of a trace as a table.",
                            "weft show run7/ --by layer");
  verb->add_option("RUN", options->run, "A run folder or one trace file.")->required();
  verb->add_option("--by", options->by, "iteration, layer, tensor, lane, peer or kind.")
      ->required()
      ->check(CLI::IsMember({"iteration", "layer", "tensor", "lane", "peer", "kind"}));
  verb->add_option("--under", options->under, kUnder);
  verb->add_option("--rank", options->rank, "Only this rank.")
      ->check(CLI::Range(int64_t{0}, int64_t{0xffffffff}));
  verb->add_flag("--json", options->json, "Print one JSON object.");
  on_call(*verb, context, [options, &context] { return run(*options, context); });
}

}  // namespace weft::cli
