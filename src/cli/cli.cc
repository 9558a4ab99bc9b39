#include "weft/cli.h"

#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "verb.h"

namespace weft::cli {

namespace {

// Every verb, in the order in which help lists them.
constexpr void (*kVerbs[])(CLI::App&, Context&) = {
    add_info,     add_show, add_export, add_align,  add_replay, add_diagnose,
    add_optimize, add_diff, add_report, add_plan,   add_lab,    add_loop,
    add_probe,    add_run,  add_status, add_doctor, add_bench,
};

}  // namespace

// ---- what verbs use ----------------------------------------------------------------------

Outcome::Outcome(const Error& error) : message_(error.message()) {
  switch (error.code()) {
    case Code::invalid_argument:
    case Code::not_found:
    case Code::corrupt:
    case Code::unsupported: exit_code_ = kExitBadInput; break;
    case Code::io:
    case Code::peer_lost:
    case Code::timeout:
    case Code::cancelled:
    case Code::exhausted: exit_code_ = kExitRunFailed; break;
  }
}

Outcome::Outcome(const Result<void>& result) {
  if (!result) *this = Outcome(result.error());
}

namespace {

std::string example_text(const std::string& example) {
  std::string out = "Example:\n  ";
  for (char c : example) out += c == '\n' ? "\n  " : std::string(1, c);
  return out;
}

}  // namespace

CLI::App* add_verb(CLI::App& parent, const std::string& name, const std::string& summary,
                   const std::string& example) {
  CLI::App* verb = parent.add_subcommand(name, summary);
  verb->group("Verbs");
  verb->footer(example_text(example));
  return verb;
}

CLI::App* add_group(CLI::App& parent, const std::string& name, const std::string& summary,
                    const std::string& example) {
  CLI::App* group = add_verb(parent, name, summary, example);
  group->require_subcommand(1);
  return group;
}

void on_call(CLI::App& verb, Context& context, std::function<Outcome()> action) {
  verb.callback([&context, action = std::move(action)] { context.action = action; });
}

namespace {

// Why standard output could not be written, the first time. As global as the stream it describes,
// which itself remembers only that something failed.
int output_errno = 0;

void note_output(bool written) {
  if (!written && output_errno == 0) output_errno = errno != 0 ? errno : EIO;
}

}  // namespace

void print(std::string_view text) {
  errno = 0;
  note_output(std::fwrite(text.data(), 1, text.size(), stdout) == text.size());
}

void print_json(const nlohmann::ordered_json& object) {
  print(object.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

void complain(const Context& context, std::string_view message) {
  std::string line = context.verb + ": ";
  line += message;
  for (char& c : line)
    if (c == '\n' || c == '\r') c = ' ';
  std::fprintf(stderr, "%s\n", line.c_str());
}

namespace {

// Help as this program words it: verbs, arguments, and no shouting about types.
class Formatter final : public CLI::Formatter {
 public:
  Formatter() {
    column_width(26);
    label("SUBCOMMAND", "VERB");
    label("Positionals", "Arguments");
  }

  std::string make_option_opts(const CLI::Option* option) const override {
    std::string out;
    if (!option->get_positional() && option->get_type_size() != 0)
      out += " " + option->get_type_name();
    if (option->get_expected_max() == CLI::detail::expected_max_vector_size) out += " ...";
    if (!option->get_default_str().empty()) out += " (" + option->get_default_str() + ")";
    return out;
  }
};

}  // namespace

// ---- the call ----------------------------------------------------------------------------

namespace {

// The chain of verbs that was recognised, from the program itself to the last.
std::vector<const CLI::App*> chain_of(const CLI::App& root) {
  std::vector<const CLI::App*> chain = {&root};
  while (!chain.back()->get_subcommands().empty())
    chain.push_back(chain.back()->get_subcommands().front());
  return chain;
}

std::string name_of(const std::vector<const CLI::App*>& chain) {
  std::string name;
  for (const CLI::App* app : chain) name += (name.empty() ? "" : " ") + app->get_name();
  return name;
}

std::vector<const CLI::App*> verbs_of(const CLI::App& app) { return app.get_subcommands({}); }

// Says which word of the line is not understood, and either the near one that may have been meant
// or where to look.
std::string unknown_word(const CLI::App& app, const std::string& word, const std::string& called) {
  std::vector<std::string> known;
  std::string message;
  if (word.size() > 1 && word[0] == '-') {
    for (const CLI::Option* option : app.get_options())
      for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
    message = "unknown option " + word;
  } else if (!verbs_of(app).empty()) {
    for (const CLI::App* verb : verbs_of(app)) known.push_back(verb->get_name());
    message = "unknown verb \"" + word + "\"";
  } else {
    message = "unexpected argument \"" + word + "\"";
  }
  // An option may carry its value: --lane=8.
  const auto near = nearest(word.substr(0, word.find('=')), known);
  return message + (near ? "; did you mean " + *near + "?" : "; see " + called + " --help");
}

int bad_call(const CLI::App& root, Context& context, const CLI::ParseError& failure) {
  const auto chain = chain_of(root);
  // A word that was not understood explains more than what it made missing.
  for (size_t i = 0; i < chain.size(); ++i) {
    const std::vector<std::string> rest = chain[i]->remaining();
    if (rest.empty() || rest.front() == "--") continue;  // behind -- every word is understood
    context.verb = name_of({chain.begin(), chain.begin() + static_cast<std::ptrdiff_t>(i) + 1});
    complain(context, unknown_word(*chain[i], rest.front(), context.verb));
    return kExitBadCall;
  }
  context.verb = name_of(chain);
  if (!verbs_of(*chain.back()).empty() && chain.back()->get_subcommands().empty()) {
    std::fputs(root.help().c_str(), stderr);
    return kExitBadCall;
  }
  complain(context, std::string(failure.what()) + "; see " + context.verb + " --help");
  return kExitBadCall;
}

// A program started with a standard stream closed would get the next file it opens in its place,
// and print into it. Opened the wrong way round, the stream fails as a closed one does.
void hold_standard_streams() {
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0 && errno == EBADF)
      static_cast<void>(::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY));
}

// The answer is given once it is written. A reader that has seen enough (`| head`) is no failure;
// normally SIGPIPE ends the program before this, quietly and without needless work.
int finish_output(const Context& context, int exit_code) {
  errno = 0;
  note_output(std::fflush(stdout) == 0);
  if (output_errno == 0 || output_errno == EPIPE) return exit_code;
  complain(context, io_error(output_errno, "cannot write standard output").message());
  return exit_code == kExitDone ? kExitRunFailed : exit_code;
}

constexpr char kNoMemory[] =
    "memory ran out; give it less at a time (fewer ranks, a shorter run), or more memory (see "
    "ulimit -v, or the limit of the container)";

int run(Context& context) {
  Outcome outcome;
  try {
    outcome = context.action();
  } catch (const std::bad_alloc&) {
    outcome = Outcome::run_failed(kNoMemory);
  } catch (const std::length_error&) {  // more than any memory has room for
    outcome = Outcome::run_failed(kNoMemory);
  } catch (const std::exception& failure) {
    outcome = Outcome::run_failed(std::string("a fault of weft: ") + failure.what());
  }
  if (!outcome.message().empty()) complain(context, outcome.message());
  return outcome.exit_code();
}

}  // namespace

namespace {

int call(int argc, char** argv, Context& context) {
  CLI::App app("Measures, predicts and cuts the communication time of distributed training.",
               "weft");
  app.set_version_flag("--version", text("weft %s", version()), "Print the version and exit");
  app.set_help_flag("-h,--help", "Print this help and exit");
  app.require_subcommand(1);
  app.formatter(std::make_shared<Formatter>());
  app.footer(example_text("weft plan show default") +
             "\n\nExit status: 0 done, 1 bad input, 2 bad call, 3 the run failed.");
  for (const auto add : kVerbs) add(app, context);

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    print(app.help());
    return finish_output(context, kExitDone);
  } catch (const CLI::CallForVersion& called) {
    print(std::string(called.what()) + "\n");
    return finish_output(context, kExitDone);
  } catch (const CLI::ParseError& failure) {
    return bad_call(app, context, failure);
  }
  context.verb = name_of(chain_of(app));
  WEFT_CHECK(context.action != nullptr);
  return finish_output(context, run(context));
}

}  // namespace

int main(int argc, char** argv) {
  hold_standard_streams();
  Context context;
  context.verb = "weft";
  try {
    return call(argc, argv, context);
  } catch (const std::bad_alloc&) {  // before or after the verb itself
    std::fprintf(stderr, "weft: %s\n", kNoMemory);
    return kExitRunFailed;
  }
}

}  // namespace weft::cli
