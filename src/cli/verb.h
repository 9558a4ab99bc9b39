// How a verb is made. Each lives in verb_NAME.cc, which alone includes <CLI/CLI.hpp> (slow to
// compile), and stands in the list in cli.cc:
//
//   namespace {
//   struct Options {
//     std::string file;
//     bool json = false;
//   };
//
//   Outcome run(const Options& options) {
//     WEFT_ASSIGN(auto trace, trace::load(options.file));   // an Error is an Outcome
//     print(...);
//     return {};
//   }
//   }  // namespace
//
//   void add_info(CLI::App& app, Context& context) {
//     auto options = std::make_shared<Options>();
//     CLI::App* verb = add_verb(app, "info", "Says what a trace holds.", "weft info run7/");
//     verb->add_option("TRACE", options->file, "A trace file.")->required();
//     verb->add_flag("--json", options->json, "Print one JSON object.");
//     on_call(*verb, context, [options] { return run(*options); });
//   }
//
// The parser only stores what to do; it is done after the whole line has been understood, so a
// bad call does no work.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "weft/base.h"
#include "weft/cli.h"

namespace CLI {
class App;
}

namespace weft::cli {

// How a verb ended: an exit code, and the line to show if it is not 0.
class [[nodiscard]] Outcome {
 public:
  Outcome() = default;
  // 1 if the input was at fault, 3 if the world was: the error's code says which.
  Outcome(const Error& error);          // NOLINT(google-explicit-constructor)
  Outcome(const Result<void>& result);  // NOLINT(google-explicit-constructor)

  // What was given cannot be used, whatever the code of the error: a file that cannot be opened.
  static Outcome bad_input(const Error& error) { return {kExitBadInput, error.message()}; }
  // Arguments that are wrong together; what is wrong with one alone, the parser says.
  static Outcome bad_call(std::string message) { return {kExitBadCall, std::move(message)}; }
  // The run failed, whatever the code of the error.
  static Outcome run_failed(std::string message) { return {kExitRunFailed, std::move(message)}; }
  // Ends with `exit_code`; what there is to say has been said with complain().
  static Outcome said(int exit_code) { return {exit_code, ""}; }

  int exit_code() const { return exit_code_; }
  const std::string& message() const { return message_; }

 private:
  Outcome(int exit_code, std::string message)
      : exit_code_(exit_code), message_(std::move(message)) {}

  int exit_code_ = kExitDone;
  std::string message_;
};

struct Context {
  std::string verb;                 // as called, "weft plan check"; set before `action` runs
  std::function<Outcome()> action;  // of the verb that was called
};

// A new verb below `parent`. `summary` is one sentence; `example` is one or more lines that a
// reader could type. Both are shown by --help.
CLI::App* add_verb(CLI::App& parent, const std::string& name, const std::string& summary,
                   const std::string& example);
// A verb that only holds others, such as `weft plan`.
CLI::App* add_group(CLI::App& parent, const std::string& name, const std::string& summary,
                    const std::string& example);
void on_call(CLI::App& verb, Context& context, std::function<Outcome()> action);

// To standard output. What cannot be written is reported once, when the verb ends.
void print(std::string_view text);
void print_json(const nlohmann::ordered_json& object);
// One line to standard error: "weft VERB: message".
void complain(const Context& context, std::string_view message);

// The verbs, each in its own file.
void add_align(CLI::App& app, Context& context);
void add_bench(CLI::App& app, Context& context);
void add_diagnose(CLI::App& app, Context& context);
void add_diff(CLI::App& app, Context& context);
void add_doctor(CLI::App& app, Context& context);
void add_export(CLI::App& app, Context& context);
void add_info(CLI::App& app, Context& context);
void add_lab(CLI::App& app, Context& context);
void add_loop(CLI::App& app, Context& context);
void add_optimize(CLI::App& app, Context& context);
void add_plan(CLI::App& app, Context& context);
void add_probe(CLI::App& app, Context& context);
void add_replay(CLI::App& app, Context& context);
void add_report(CLI::App& app, Context& context);
void add_run(CLI::App& app, Context& context);
void add_show(CLI::App& app, Context& context);
void add_status(CLI::App& app, Context& context);

}  // namespace weft::cli
