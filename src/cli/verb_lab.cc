// weft lab: an emulated cluster on this machine, and training jobs to run in it.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>

#include "analysis.h"
#include "lab_options.h"
#include "launch_report.h"
#include "table.h"
#include "verb.h"
#include "weft/lab.h"
#include "weft/plan.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

struct Options {
  LabOptions lab;
  std::string engine = "weft";
  bool no_record = false;
  bool json = false;
  // Of a program.
  std::vector<std::string> command;
  uint32_t ranks_per_host = 1;
  std::vector<std::string> variables;
  std::string timeout;
  bool no_prefix = false;
};

Outcome run(const Options& options) {
  auto understood_options = understood(options.lab);
  if (!understood_options) return Outcome::bad_input(understood_options.error());
  lab::RunOptions& asked = *understood_options;
  WEFT_ASSIGN(asked.engine, lab::engine_of(options.engine));
  asked.record = !options.no_record;
  WEFT_ASSIGN(lab::RunResult result, lab::run(asked, narrator()));
  std::string flow = asked.flow_bits_per_s > 0 ? format_rate(asked.flow_bits_per_s) : "no cap";
  if (options.json) {
    // The run's own summary, and what was asked.
    Json out = Json::parse(lab::summary_json(result));
    out.update(Json{{"model", asked.model},
                    {"hosts", asked.hosts},
                    {"link_bits_per_s", asked.link_bits_per_s},
                    {"flow_bits_per_s", asked.flow_bits_per_s},
                    {"engine", lab::name_of(asked.engine)},
                    {"plan", asked.plan.name},
                    {"plan_hash", plan::hash(asked.plan)},
                    {"run", asked.output}});
    print_json(out);
  } else {
    print(text("%s on %u hosts, link %s, flow %s, %s under plan %s\n", asked.model.c_str(),
               asked.hosts, format_rate(asked.link_bits_per_s).c_str(), flow.c_str(),
               lab::name_of(asked.engine), asked.plan.name.c_str()));
    print(text("iteration   %.1f ms (%.1f to %.1f), %.2f x the floor of %.1f ms\n",
               result.iteration_ms.value, result.iteration_ms.low, result.iteration_ms.high,
               result.iteration_ms.value / result.floor_ms, result.floor_ms));
    print(text("floor       compute %.1f ms, wire %.1f ms for %s of gradients\n", result.compute_ms,
               result.wire_ms, format_size(result.gradient_bytes).c_str()));
    print(text("sums        %s\n",
               result.sums_exact ? "exact on every rank, in every step" : "WRONG"));
    print(text("lab         dilation %g, shrink %g, processors %.0f %% busy, %.0f %% stolen%s\n",
               result.dilation, result.shrink, result.cpu_busy_percent, result.steal_percent,
               result.sound ? "" : ", UNSOUND"));
    for (const std::string& line : result.explained) print(line + "\n");
    for (const std::string& line : result.remarks) print("note        " + line + "\n");
    print("run         " + asked.output + "\n");
  }
  if (!result.sums_exact) return Outcome::run_failed("a gradient differs from its exact sum");
  return {};
}

// ---- a program -----------------------------------------------------------------------------

// What only the lab's own job understands, and what only a program does.
constexpr const char* kOfModels[] = {"--model",     "--iterations", "--slow",     "--clock",
                                     "--lane-rate", "--seed",       "--dilation", "--shrink",
                                     "--no-probe",  "--engine",     "--burn",     "--compute-only"};
constexpr const char* kOfPrograms[] = {"--ranks-per-host", "--env", "--timeout", "--no-prefix"};
constexpr const char* kProgramLink = "1gbit";

std::string given_of(const CLI::App& verb, std::span<const char* const> names) {
  for (const char* name : names)
    if (verb.count(name) > 0) return name;
  return "";
}

// Ranks record where they are told to, and not over what is there.
Result<void> record_into(const std::string& folder, lab::ProgramOptions& program) {
  std::error_code failure;
  const fs::path whole = fs::absolute(folder, failure).lexically_normal();
  if (!failure && fs::exists(whole) && (!fs::is_directory(whole) || !fs::is_empty(whole)))
    return error(Code::invalid_argument, "%s exists and is not an empty folder; name a new one",
                 folder.c_str());
  if (!failure) fs::create_directories(whole, failure);
  if (failure) return io_error(failure.value(), "cannot make %s", folder.c_str());
  program.variables["WEFT_TRACE"] = whole.string();
  return {};
}

Outcome run_program(const Options& options, const CLI::App& verb) {
  if (const std::string odd = given_of(verb, kOfModels); !odd.empty())
    return Outcome::bad_call(odd + " is for the lab's own jobs, and a program was named after --");
  lab::ProgramOptions program;
  program.command = options.command;
  program.hosts = verb.count("--hosts") > 0 ? options.lab.run.hosts : program.hosts;
  program.ranks_per_host = options.ranks_per_host;
  program.congestion_control = options.lab.run.congestion_control;
  program.mtu = options.lab.run.mtu;
  const std::string link = verb.count("--link") > 0 ? options.lab.link : kProgramLink;
  WEFT_ASSIGN(program.link_bits_per_s, parse_rate(link));
  if (!options.lab.flow.empty()) {
    WEFT_ASSIGN(program.flow_bits_per_s, parse_rate(options.lab.flow));
  }
  WEFT_ASSIGN(program.variables, launch::parse_variables(options.variables));
  if (verb.count("--plan") > 0) {
    WEFT_ASSIGN(const plan::Plan plan, plan::load(options.lab.plan));  // it is refused here, once
    std::error_code failure;
    const bool file = fs::exists(options.lab.plan, failure);
    program.variables["WEFT_PLAN"] =
        file ? fs::absolute(options.lab.plan, failure).string() : options.lab.plan;
  }
  if (!options.timeout.empty()) {
    WEFT_ASSIGN(program.how.deadline, parse_duration(options.timeout));
  }
  program.how.prefix_output = !options.no_prefix;
  program.how.output_to_stderr = options.json;
  const std::string& output = options.lab.run.output;
  if (options.no_record)
    program.variables["WEFT_TRACE"] = "";
  else if (!output.empty())
    WEFT_TRY(record_into(output, program));

  WEFT_ASSIGN(const lab::ProgramResult result, lab::run_program(program, narrator()));
  if (options.json) {
    Json out = described(result.report);
    out.update(Json{{"hosts", program.hosts},
                    {"ranks", result.report.outcomes.size()},
                    {"link_bits_per_s", program.link_bits_per_s},
                    {"flow_bits_per_s", program.flow_bits_per_s},
                    {"seconds", result.took.seconds()},
                    {"cpu_busy_percent", result.cpu_busy_percent},
                    {"steal_percent", result.steal_percent},
                    {"confinement", result.confinement},
                    {"run", options.no_record || output.empty() ? Json() : Json(output)}});
    print_json(out);
  } else {
    const std::string flow =
        program.flow_bits_per_s > 0 ? format_rate(program.flow_bits_per_s) : "no cap";
    std::fprintf(stderr,
                 "weft lab run: %u hosts, link %s, flow %s; %s; processors, which all hosts share, "
                 "%.0f %% busy, %.0f %% stolen\n",
                 program.hosts, format_rate(program.link_bits_per_s).c_str(), flow.c_str(),
                 format_duration(result.took).c_str(), result.cpu_busy_percent,
                 result.steal_percent);
  }
  return result.report.ok() ? Outcome() : Outcome::run_failed(result.report.reason);
}

Outcome run_either(const Options& options, const CLI::App& verb) {
  if (!options.command.empty()) return run_program(options, verb);
  if (const std::string odd = given_of(verb, kOfPrograms); !odd.empty())
    return Outcome::bad_call(odd + " is for a program, which is named after --");
  if (options.lab.run.model.empty())
    return Outcome::bad_call("--model or a program after -- must say what to run; see --help");
  if (options.lab.run.output.empty())
    return Outcome::bad_call("-o must name a folder to make for the run");
  return run(options);
}

Outcome models(const std::string& which, bool json) {
  std::vector<lab::ModelSummary> list;
  if (which.empty()) {
    WEFT_ASSIGN(list, lab::models());
  } else {
    WEFT_ASSIGN(lab::ModelSummary one, lab::describe_model(which));
    list.push_back(std::move(one));
  }
  if (json) {
    Json rows = Json::array();
    for (const lab::ModelSummary& model : list)
      rows.push_back({{"name", model.name},
                      {"parameters", model.parameters},
                      {"layers", model.layers},
                      {"tensors", model.tensors},
                      {"batch", model.batch},
                      {"device", model.device},
                      {"forward_ms", model.forward_ms},
                      {"backward_ms", model.backward_ms},
                      {"update_ms", model.update_ms},
                      {"source", model.source}});
    print_json({{"models", std::move(rows)}});
    return {};
  }
  Table table({{"model"},
               {"parameters", Align::right},
               {"layers", Align::right},
               {"tensors", Align::right},
               {"batch", Align::right},
               {"forward", Align::right},
               {"backward", Align::right},
               {"update", Align::right},
               {"device"}});
  for (const lab::ModelSummary& model : list)
    table.add({model.name, std::to_string(model.parameters), std::to_string(model.layers),
               std::to_string(model.tensors), std::to_string(model.batch),
               text("%.1f ms", model.forward_ms), text("%.1f ms", model.backward_ms),
               text("%.1f ms", model.update_ms), model.device});
  print(table.text());
  if (!which.empty()) print(list[0].source + "\n");
  return {};
}

Outcome check(const lab::CheckOptions& asked, const std::string& link, const std::string& flow,
              double dilation, bool json) {
  lab::CheckOptions options = asked;
  WEFT_ASSIGN(options.link_bits_per_s, parse_rate(link));
  if (!flow.empty()) {
    WEFT_ASSIGN(options.flow_bits_per_s, parse_rate(flow));
  }
  if (dilation > 0) options.dilation = dilation;
  WEFT_ASSIGN(lab::CheckResult result, lab::check(options, narrator()));
  if (json) {
    Json rows = Json::array();
    for (const lab::CheckRow& row : result.rows)
      rows.push_back({{"pattern", row.pattern},
                      {"flows", row.flows},
                      {"asked_bits_per_s", row.asked_bits_per_s},
                      {"measured_bits_per_s", row.measured_bits_per_s},
                      {"cpu_busy_percent", row.cpu_busy_percent}});
    print_json({{"sound", result.sound},
                {"dilation", result.dilation},
                {"measured_by", result.measured_by},
                {"confinement", result.confinement},
                {"lost", result.lost},
                {"rows", std::move(rows)}});
  } else {
    Table table({{"pattern"},
                 {"flows", Align::right},
                 {"asked", Align::right},
                 {"measured", Align::right},
                 {"error", Align::right},
                 {"busy", Align::right}});
    for (const lab::CheckRow& row : result.rows)
      table.add({row.pattern, std::to_string(row.flows), format_rate(row.asked_bits_per_s),
                 format_rate(row.measured_bits_per_s),
                 text("%+.1f %%", 100 * (row.measured_bits_per_s / row.asked_bits_per_s - 1)),
                 text("%.0f %%", row.cpu_busy_percent)});
    print(table.text());
    print(text("dilation %g; rates are real ones, after it, measured by %s; %s\n", result.dilation,
               result.measured_by.c_str(), result.sound ? "sound" : "NOT sound"));
    if (!result.lost.empty()) print("note: " + result.lost + "\n");
  }
  return result.sound ? Outcome()
                      : Outcome::run_failed("the emulated network is not what was asked");
}

void add_lab_run(CLI::App& group, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = add_verb(
      group, "run", "Runs a model, or a program of yours, on an emulated cluster and records it.",
      "weft lab run --model vgg16 --hosts 4 --link 25gbit --flow 5gbit --plan ddp -o run1\n"
      "weft lab run --hosts 2 --link 1gbit --flow 200mbit -o run2 -- python train.py");
  add_lab_options(*verb, options->lab);
  verb->get_option("--model")->required(false);
  verb->add_option("PROGRAM", options->command,
                   "Instead of a model: what each rank runs, with its arguments, after --; nothing "
                   "is slowed or shrunk then, and --link is " +
                       std::string(kProgramLink) + " and --hosts 2 unless given");
  verb->add_option("--ranks-per-host", options->ranks_per_host, "Of a program")
      ->check(CLI::Range(1u, 64u).description(""))
      ->capture_default_str();
  verb->add_option("-x,--env", options->variables, "A variable for every rank of a program")
      ->type_name("NAME[=VALUE]")
      ->allow_extra_args(false);
  verb->add_option("--timeout", options->timeout, "End a program that takes longer, as in 10m")
      ->type_name("TIME")
      ->check(flaw_of_duration);
  verb->add_flag("--no-prefix", options->no_prefix,
                 "Show a program's output as it comes, without \"[rank] \"");
  verb->add_option("--plan", options->lab.plan, "A plan file, or a preset")->capture_default_str();
  verb->add_option("--engine", options->engine, "Who communicates")
      ->check(CLI::IsMember({"weft", "gloo", "openmpi", "horovod"}))
      ->capture_default_str();
  verb->add_flag("--no-record", options->no_record, "Write no trace");
  verb->add_flag("--compute-only", options->lab.run.compute_only, "Leave communication out");
  verb->add_flag("--burn", options->lab.run.burn,
                 "Compute takes processor time, as training on a processor does, not timers");
  verb->add_option("-o,--output", options->lab.run.output, "Folder to make for the run");
  verb->add_flag("--json", options->json,
                 "Print one JSON object; what a program prints goes to standard error");
  on_call(*verb, context, [options, verb] { return run_either(*options, *verb); });
}

}  // namespace

void add_lab(CLI::App& app, Context& context) {
  CLI::App* group = add_group(app, "lab", "Runs jobs on an emulated cluster, without root.",
                              "weft lab models\n"
                              "weft lab run --model vgg16 --plan ddp -o run1\n"
                              "weft lab loop --model vgg16 --flow 5gbit --before ddp -o loop1");
  add_lab_run(*group, context);
  add_lab_loop(*group, context);

  struct Asked {
    std::string model;
    bool json = false;
  };
  auto asked = std::make_shared<Asked>();
  CLI::App* list = add_verb(*group, "models", "Lists the models that the lab knows.",
                            "weft lab models\nweft lab models vgg16");
  list->add_option("MODEL", asked->model, "One model, with its source; a name or a file");
  list->add_flag("--json", asked->json, "Print one JSON object");
  on_call(*list, context, [asked] { return models(asked->model, asked->json); });

  struct Checked {
    lab::CheckOptions options;
    std::string link = "25gbit", flow;
    double dilation = 0;
    bool json = false;
  };
  auto checked = std::make_shared<Checked>();
  CLI::App* soundness =
      add_verb(*group, "check", "Compares the emulated network with what was asked.",
               "weft lab check --hosts 4 --link 25gbit --flow 5gbit");
  soundness->add_option("--hosts", checked->options.hosts, "How many hosts")->capture_default_str();
  soundness->add_option("--link", checked->link, "Rate of each host's link")
      ->type_name("RATE")
      ->capture_default_str();
  soundness->add_option("--flow", checked->flow, "Most that one TCP flow may carry")
      ->type_name("RATE");
  soundness->add_option("--dilation", checked->dilation, "Slow links by this factor")
      ->check(CLI::Range(1.0, 1e6).description(""));
  soundness->add_flag("--json", checked->json, "Print one JSON object");
  on_call(*soundness, context, [checked] {
    return check(checked->options, checked->link, checked->flow, checked->dilation, checked->json);
  });

  // Not for people: what `weft lab run` starts inside each host.
  auto job = std::make_shared<std::string>();
  CLI::App* worker = add_verb(*group, "worker", "One rank of a job of `weft lab run`.",
                              "weft lab worker rank-0.job.json");
  worker->add_option("JOB", *job, "The job file")->required();
  worker->group("");
  on_call(*worker, context, [job] { return Outcome::said(lab::worker(*job)); });

  auto streams = std::make_shared<std::string>();
  CLI::App* stream =
      add_verb(*group, "stream", "One host's flows of `weft lab check`.", "weft lab stream JOB");
  stream->add_option("JOB", *streams, "The job, as JSON")->required();
  stream->group("");
  on_call(*stream, context, [streams] { return Outcome::said(lab::stream(*streams)); });
}

}  // namespace weft::cli
