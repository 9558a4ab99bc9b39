// weft diff: two runs side by side, measured or predicted.

#include <CLI/CLI.hpp>
#include <algorithm>
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
  std::string before, after;
  bool json = false;
};

constexpr size_t kLayersShown = 12;
constexpr size_t kWidth = 40;

std::optional<double> change_of(const analysis::Row& row) {
  if (!row.before || !row.after) return std::nullopt;
  return *row.after - *row.before;
}

Json rows_json(const std::vector<analysis::Row>& rows) {
  auto or_null = [](const std::optional<double>& value) {
    return value ? Json(*value) : Json(nullptr);
  };
  Json out = Json::array();
  for (const analysis::Row& row : rows)
    out.push_back({{"what", row.what},
                   {"before_ms", or_null(row.before)},
                   {"after_ms", or_null(row.after)},
                   {"change_ms", or_null(change_of(row))}});
  return out;
}

Json side_json(const std::string& path, const analysis::Recorded& run, const Interval& time) {
  return {{"run", path},
          {"predicted", run.predicted()},
          {"plan", run.environment().plan_name},
          {"plan_hash", run.environment().plan_hash},
          {"iteration_ms", time.value},
          {"low", time.low},
          {"high", time.high}};
}

Json as_json(const Options& options, const analysis::Recorded& before,
             const analysis::Recorded& after, const analysis::Comparison& found,
             const std::vector<std::string>& remarks) {
  Json plan = nullptr;
  if (found.plan) {
    plan = Json::array();
    for (const plan::Difference& difference : *found.plan)
      plan.push_back(
          {{"path", difference.path}, {"before", difference.before}, {"after", difference.after}});
  }
  return {{"before", side_json(options.before, before, found.before)},
          {"after", side_json(options.after, after, found.after)},
          {"change_ms", found.after.value - found.before.value},
          {"change_percent", found.percent()},
          {"kinds", rows_json(found.kinds)},
          {"ranks", rows_json(found.ranks)},
          {"layer_waits", rows_json(found.layers)},
          {"plan_differences", std::move(plan)},
          {"remarks", remarks}};
}

std::string cell(const std::optional<double>& ms) { return ms ? text("%.2f ms", *ms) : "-"; }

void add_rows(Table& table, const std::vector<analysis::Row>& rows) {
  for (const analysis::Row& row : rows) {
    auto change = change_of(row);
    table.add(
        {row.what, cell(row.before), cell(row.after), change ? text("%+.2f ms", *change) : "-"});
  }
}

void print_comparison(const Options& options, const analysis::Recorded& before,
                      const analysis::Recorded& after, const analysis::Comparison& found) {
  auto side = [](const char* name, const std::string& path, const analysis::Recorded& run,
                 const Interval& time) {
    print(text(
        "%-11s %.1f ms (%.1f to %.1f), %s under plan %s: %s\n", name, time.value, time.low,
        time.high, run.predicted() ? "predicted" : "measured",
        run.environment().plan_name.empty() ? "not recorded" : run.environment().plan_name.c_str(),
        path.c_str()));
  };
  side("before", options.before, before, found.before);
  side("after", options.after, after, found.after);
  print(text("change      %+.1f ms, %s\n\n", found.after.value - found.before.value,
             percent_text(found.percent()).c_str()));
  Table table({{"of one iteration"},
               {"before", Align::right},
               {"after", Align::right},
               {"change", Align::right}});
  add_rows(table, found.kinds);
  add_rows(table, found.ranks);
  print(table.text());

  std::vector<analysis::Row> layers;
  for (const analysis::Row& row : found.layers)
    if (row.before.value_or(0) >= 0.005 || row.after.value_or(0) >= 0.005) layers.push_back(row);
  auto size = [](const analysis::Row& row) {
    return std::fabs(row.after.value_or(0) - row.before.value_or(0));
  };
  std::stable_sort(
      layers.begin(), layers.end(),
      [&](const analysis::Row& a, const analysis::Row& b) { return size(a) > size(b); });
  layers.resize(std::min(layers.size(), kLayersShown));
  if (!layers.empty()) {
    Table waits({{"waited for layer"},
                 {"before", Align::right},
                 {"after", Align::right},
                 {"change", Align::right}});
    add_rows(waits, layers);
    print("\n" + waits.text());
  }
  if (!found.plan) return print("\nplan        not recorded in both\n");
  if (found.plan->empty()) return print("\nplan        the same\n");
  Table plan({{"plan"}, {"before"}, {"after"}});
  for (const plan::Difference& difference : *found.plan)
    plan.add({difference.path, shortened(difference.before, kWidth),
              shortened(difference.after, kWidth)});
  print("\n" + plan.text());
}

Outcome run(const Options& options) {
  auto before = analysis::understand(options.before);
  if (!before) return Outcome::bad_input(before.error());
  auto after = analysis::understand(options.after);
  if (!after) return Outcome::bad_input(after.error());
  std::vector<std::string> remarks;
  for (const auto& [name, run] : {std::pair("before: ", &*before), {"after: ", &*after}})
    for (const std::string& remark : run->remarks) remarks.push_back(name + remark);
  if (before->graph.model.name != after->graph.model.name)
    remarks.push_back("the runs are of different models: " + before->graph.model.name + " and " +
                      after->graph.model.name);
  const analysis::Comparison found = analysis::compare(*before, *after);
  if (options.json) {
    print_json(as_json(options, *before, *after, found, remarks));
    return {};
  }
  print_comparison(options, *before, *after, found);
  print_notes("note", remarks);
  return {};
}

}  // namespace

void add_diff(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = add_verb(app, "diff", "Compares two runs, measured or predicted.",
                            "weft diff before/ after/\nweft diff predicted/ after/");
  verb->add_option("BEFORE", options->before, "A run folder")->required();
  verb->add_option("AFTER", options->after, "A run folder")->required();
  verb->add_flag("--json", options->json, "Print one JSON object");
  on_call(*verb, context, [options] { return run(*options); });
}

}  // namespace weft::cli
