// weft plan: shows, checks and compares plans.

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "table.h"
#include "verb.h"
#include "weft/plan.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

// Plans are files or presets.
struct CheckOptions {
  std::vector<std::string> plans;
  bool json = false;
};

struct ShowOptions {
  std::string plan;
  bool json = false;
};

struct DiffOptions {
  std::string before;
  std::string after;
  bool json = false;
};

Outcome check(const CheckOptions& options, const Context& context) {
  Json results = Json::array();
  Table table({{}, {}, {}});
  bool bad = false;
  for (const std::string& source : options.plans) {
    auto plan = plan::load(source);
    if (plan) {
      const std::string hash = plan::hash(*plan);
      results.push_back({{"source", source}, {"ok", true}, {"name", plan->name}, {"hash", hash}});
      table.add({source, "ok", hash});
    } else {
      bad = true;
      results.push_back({{"source", source}, {"ok", false}, {"error", plan.error().message()}});
      complain(context, plan.error().message());
    }
  }
  if (options.json) {
    print_json({{"ok", !bad}, {"plans", std::move(results)}});
  } else {
    print(table.text());
  }
  return bad ? Outcome::said(kExitBadInput) : Outcome();
}

Outcome show(const ShowOptions& options) {
  const auto plan = plan::load(options.plan);
  if (!plan) return Outcome::bad_input(plan.error());
  const std::string canonical = plan::canonical(*plan);
  if (options.json) {
    print_json(
        {{"source", options.plan}, {"hash", plan::hash(*plan)}, {"plan", Json::parse(canonical)}});
  } else {
    print(canonical);
  }
  return {};
}

Outcome diff(const DiffOptions& options) {
  const auto before = plan::load(options.before);
  if (!before) return Outcome::bad_input(before.error());
  const auto after = plan::load(options.after);
  if (!after) return Outcome::bad_input(after.error());
  const std::string hashes[] = {plan::hash(*before), plan::hash(*after)};
  const bool same = hashes[0] == hashes[1];
  const auto differences = plan::diff(*before, *after);
  if (options.json) {
    Json list = Json::array();
    for (const plan::Difference& d : differences)
      list.push_back({{"path", d.path}, {"before", d.before}, {"after", d.after}});
    print_json({{"same", same},
                {"before", {{"source", options.before}, {"hash", hashes[0]}}},
                {"after", {{"source", options.after}, {"hash", hashes[1]}}},
                {"differences", std::move(list)}});
    return {};
  }
  if (same) print("same: both do " + hashes[0] + "\n");
  if (differences.empty()) return {};
  constexpr size_t kWidth = 40;  // lists of tensors can be long; --json has them whole
  Table table({{"path"}, {options.before}, {options.after}});
  for (const plan::Difference& d : differences)
    table.add({d.path, shortened(d.before, kWidth), shortened(d.after, kWidth)});
  print(table.text());
  return {};
}

std::string presets_text() {
  Table table({{}, {}, {}});
  for (const std::string& name : plan::preset_names())
    if (auto plan = plan::preset(name)) table.add({"", name, plan->comment});
  return "Presets:\n" + table.text();
}

}  // namespace

void add_plan(CLI::App& app, Context& context) {
  CLI::App* group =
      add_group(app, "plan", "Shows, checks and compares plans: what to do with gradients.",
                "weft plan show default > my.json\nweft plan check my.json\n"
                "weft plan diff ddp my.json");
  group->footer([] { return presets_text(); });
  const std::string what = "A file, or the name of a preset";
  const std::string json = "Print one JSON object";

  CLI::App* verb = add_verb(*group, "check", "Says whether plans are valid, and their hashes.",
                            "weft plan check my.json");
  auto check_options = std::make_shared<CheckOptions>();
  verb->add_option("PLAN", check_options->plans, what)->required();
  verb->add_flag("--json", check_options->json, json);
  on_call(*verb, context, [check_options, &context] { return check(*check_options, context); });

  verb = add_verb(*group, "show", "Prints the whole plan, with every value that it leaves out.",
                  "weft plan show default > my.json");
  auto show_options = std::make_shared<ShowOptions>();
  verb->add_option("PLAN", show_options->plan, what)->required();
  verb->add_flag("--json", show_options->json, json + ": the source, the hash and the plan");
  on_call(*verb, context, [show_options] { return show(*show_options); });

  verb = add_verb(*group, "diff",
                  "Lists what differs between two plans. The exit status is 0 either way.",
                  "weft plan diff ddp my.json");
  auto diff_options = std::make_shared<DiffOptions>();
  verb->add_option("BEFORE", diff_options->before, what)->required();
  verb->add_option("AFTER", diff_options->after, what)->required();
  verb->add_flag("--json", diff_options->json, json);
  on_call(*verb, context, [diff_options] { return diff(*diff_options); });

  verb = add_verb(*group, "schema", "Prints the JSON Schema of plans, for editors.",
                  "weft plan schema > plan.schema.json");
  on_call(*verb, context, []() -> Outcome {
    print(plan::schema());
    return {};
  });
}

}  // namespace weft::cli
