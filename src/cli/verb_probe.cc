// weft probe: measures what the network between ranks carries and what the processor pays for it.
//
// Inside a job (`weft run -n 4 -- weft probe`) it is one rank: it joins, measures, hands its
// records to rank 0 over the group itself, and rank 0 prints. Outside it starts such a job on this
// machine.

#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "table.h"
#include "verb.h"
#include "weft/capture.h"
#include "weft/cost.h"
#include "weft/launch.h"
#include "weft/membership.h"
#include "weft/plan.h"
#include "weft/runtime.h"

namespace weft::cli {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr uint32_t kDefaultRanks = 2;

struct Options {
  uint32_t ranks = 0;  // 0: not said
  std::string output;
  bool json = false;
};

// A folder that goes when the object does.
class TemporaryFolder {
 public:
  static Result<TemporaryFolder> make() {
    std::error_code failure;
    std::string path = (fs::temp_directory_path(failure) / "weft-probe-XXXXXX").string();
    if (failure || ::mkdtemp(path.data()) == nullptr)
      return io_error(failure ? failure.value() : errno, "cannot make a folder like %s",
                      path.c_str());
    return TemporaryFolder(std::move(path));
  }
  TemporaryFolder(TemporaryFolder&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  explicit TemporaryFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

Result<void> make_folder(const std::string& path) {
  std::error_code failure;
  fs::create_directories(path, failure);
  if (failure) return io_error(failure.value(), "cannot make %s", path.c_str());
  return {};
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "localhost";
  return name.data();
}

// ---- one rank ----------------------------------------------------------------------------

// Rank `from`'s bytes, on every rank. The group speaks floats: two bytes in each, exactly.
Result<std::string> shared(runtime::Group& group, const std::string& own, Rank from) {
  constexpr float kBase = 65536;
  const size_t high = own.size() / 65536, low = own.size() % 65536;
  std::array<float, 2> size = {static_cast<float>(high), static_cast<float>(low)};
  WEFT_TRY(group.broadcast(size, from));
  auto bytes = static_cast<size_t>(size[0] * kBase + size[1]);
  std::vector<float> words((bytes + 1) / 2);
  std::string out(2 * words.size(), '\0');
  if (from == group.rank()) {
    std::copy(own.begin(), own.end(), out.begin());
    for (size_t i = 0; i < words.size(); ++i) {
      uint16_t word = 0;
      std::memcpy(&word, out.data() + 2 * i, 2);
      words[i] = word;
    }
  }
  WEFT_TRY(group.broadcast(words, from));
  for (size_t i = 0; i < words.size(); ++i) {
    auto word = static_cast<uint16_t>(words[i]);
    std::memcpy(out.data() + 2 * i, &word, 2);
  }
  out.resize(bytes);
  return out;
}

// Joins, which measures, and brings all ranks' records together.
Result<trace::Trace> measure(const membership::Membership& member, const std::string& file) {
  WEFT_ASSIGN(const plan::Plan plan, plan::preset("default"));
  runtime::Options joining;
  joining.rank = {member.rank};
  joining.ranks = member.size;
  joining.rendezvous = member.rendezvous;
  joining.interface = member.interface;
  joining.secret = member.secret;
  joining.host = host_name();
  joining.plan = plan;
  joining.probe = true;
  capture::Options recording;
  recording.path = file;
  recording.environment = runtime::describe_rank(joining);
  WEFT_ASSIGN(const auto recorder, capture::Recorder::start(std::move(recording)));
  WEFT_ASSIGN(auto group, runtime::Group::join(joining, *recorder));
  WEFT_TRY(recorder->flush());
  WEFT_ASSIGN(const std::string own, read_file(file, mib(64)));
  trace::Trace trace;
  for (uint32_t rank = 0; rank < member.size; ++rank) {
    WEFT_ASSIGN(const std::string bytes, shared(*group, own, {rank}));
    WEFT_ASSIGN(trace::ReadFile read, trace::read_process(std::as_bytes(std::span(bytes)),
                                                          text("the records of rank %u", rank)));
    trace.processes.push_back(std::move(read.process));
  }
  WEFT_TRY(group->leave());
  group.reset();
  WEFT_TRY(recorder->stop());
  return trace;
}

// ---- what was found ----------------------------------------------------------------------

struct Line {
  const char* name;
  const char* words;
  const std::optional<cost::Fitted>& value;
  std::string (*shown)(double);
};

std::vector<Line> lines_of(const cost::Costs& costs) {
  auto rate = [](double bytes_per_s) { return format_rate(8 * bytes_per_s); };
  auto time = [](double ns) { return format_duration(Nanos{static_cast<int64_t>(ns)}); };
  auto per_byte = [](double ns) { return text("%.3f ns/byte", ns); };
  auto per_chunk = [](double ns) { return text("%.1f us", ns * 1e-3); };
  return {
      {"link_bytes_per_s", "a rank's link, all sending at once", costs.link_bytes_per_s, rate},
      {"pair_link_bytes_per_s", "a rank's link, one pair alone", costs.pair_link_bytes_per_s, rate},
      {"flow_bytes_per_s", "one connection", costs.flow_bytes_per_s, rate},
      {"round_trip_idle_ns", "round trip, idle", costs.round_trip_idle_ns, time},
      {"round_trip_loaded_ns", "round trip, loaded", costs.round_trip_loaded_ns, time},
      {"cpu_ns_per_byte", "processor, a byte sent and received", costs.cpu_ns_per_byte, per_byte},
      {"cpu_ns_per_chunk", "processor, a chunk", costs.cpu_ns_per_chunk, per_chunk},
      {"copy_ns_per_byte", "copying", costs.copy_ns_per_byte, per_byte},
      {"reduce_ns_per_byte", "adding", costs.reduce_ns_per_byte, per_byte},
      {"checksum_ns_per_byte", "checksums", costs.checksum_ns_per_byte, per_byte},
  };
}

Json as_json(const Options& options, const trace::Trace& trace, const cost::Costs& costs) {
  Json rates = Json::array();
  for (const trace::ProbeSummary& row : summarize_probe(trace)) {
    if (row.type != trace::ProbeType::rate) continue;
    rates.push_back({{"scope", name_of(row.scope)},
                     {"direction", row.reverse != 0 ? "reverse" : "forward"},
                     {"flows", row.flows},
                     {"results", row.count},
                     {"slowest_bps", row.slowest_bps},
                     {"median_bps", row.median_bps},
                     {"fastest_bps", row.fastest_bps}});
  }
  Json fitted = Json::object();
  for (const Line& line : lines_of(costs)) {
    fitted[line.name] = line.value ? Json{{"value", line.value->value},
                                          {"low", line.value->low},
                                          {"high", line.value->high},
                                          {"samples", line.value->samples}}
                                   : Json();
  }
  fitted["link_is_lower_bound"] = costs.link_is_lower_bound;
  return {{"ranks", trace.processes.size()},
          {"rates", std::move(rates)},
          {"costs", std::move(fitted)},
          {"run", options.output.empty() ? Json() : Json(options.output)}};
}

void print_found(const Options& options, const trace::Trace& trace, const cost::Costs& costs) {
  Table rates({{"who sends"},
               {"direction"},
               {"flows", Align::right},
               {"results", Align::right},
               {"slowest", Align::right},
               {"median", Align::right},
               {"fastest", Align::right}});
  for (const trace::ProbeSummary& row : summarize_probe(trace)) {
    if (row.type != trace::ProbeType::rate) continue;
    rates.add({row.scope == trace::ProbeScope::ring ? "all at once" : "one pair alone",
               row.reverse != 0 ? "against the ring" : "along the ring", std::to_string(row.flows),
               std::to_string(row.count), format_rate(row.slowest_bps), format_rate(row.median_bps),
               format_rate(row.fastest_bps)});
  }
  print(rates.text() + "\n");
  Table fitted({{"fitted"},
                {"value", Align::right},
                {"low", Align::right},
                {"high", Align::right},
                {"samples", Align::right}});
  for (const Line& line : lines_of(costs)) {
    if (!line.value) {
      fitted.add({line.words, "unknown", "", "", "0"});
      continue;
    }
    fitted.add({line.words, line.shown(line.value->value), line.shown(line.value->low),
                line.shown(line.value->high), std::to_string(line.value->samples)});
  }
  print(fitted.text());
  if (costs.link_is_lower_bound)
    print("the rate still grew with the last flow: a link may carry more than is said here\n");
  if (!costs.flow_bytes_per_s)
    print("one connection fills the link, so that the most of one connection is unknown\n");
  if (!options.output.empty()) print("run " + options.output + "\n");
}

// ---- the verb ----------------------------------------------------------------------------

Outcome run_rank(const Options& options) {
  if (options.ranks != 0)
    return Outcome::bad_call("inside a job the number of ranks is the job's: leave -n out");
  WEFT_ASSIGN(const membership::Membership member, membership::from_environment());
  std::optional<TemporaryFolder> temporary;
  std::string folder = options.output;
  if (folder.empty()) {
    WEFT_ASSIGN(TemporaryFolder made, TemporaryFolder::make());
    folder = made.path();
    temporary.emplace(std::move(made));
  } else {
    WEFT_TRY(make_folder(folder));
  }
  const std::string file = folder + "/" + trace::file_name(member.rank);
  if (fs::exists(file))
    return error(Code::invalid_argument, "%s exists; name a new folder for the run", file.c_str());
  WEFT_ASSIGN(const trace::Trace trace, measure(member, file));
  if (member.rank != 0) return {};
  const cost::Costs costs = cost::fit(trace);
  if (options.json) {
    print_json(as_json(options, trace, costs));
  } else {
    print_found(options, trace, costs);
  }
  return {};
}

Outcome run(const Options& options) {
  if (membership::launcher()) return run_rank(options);
  const uint32_t ranks = options.ranks == 0 ? kDefaultRanks : options.ranks;
  std::vector<std::string> command = {self_path(), "probe"};
  if (options.json) command.emplace_back("--json");
  if (!options.output.empty()) {
    std::error_code failure;
    if (fs::exists(options.output, failure) &&
        (!fs::is_directory(options.output, failure) || !fs::is_empty(options.output, failure)))
      return error(Code::invalid_argument, "%s is not an empty folder; name a new one for the run",
                   options.output.c_str());
    WEFT_TRY(make_folder(options.output));
    command.insert(command.end(), {"-o", options.output});
  }
  WEFT_ASSIGN(const auto processes, launch::local_job(ranks, command));
  if (::isatty(STDERR_FILENO) != 0)
    std::fprintf(stderr, "measuring %u ranks on this machine for about a second\n", ranks);
  launch::Options how;
  how.prefix_output = false;
  how.deadline = Nanos::from_seconds(60);
  WEFT_ASSIGN(const launch::Report report, launch::run(processes, how));
  // A reader that has seen enough (`| head`) is no failure.
  if (report.ok() || report.outcomes[0].signal == SIGPIPE) return {};
  return Outcome::run_failed(report.reason);
}

}  // namespace

void add_probe(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = add_verb(
      app, "probe",
      "Measures what the network between ranks carries and what the processor pays for it.",
      "weft probe -n 4\nweft run -n 4 -- weft probe --json");
  verb->add_option(
          "-n,--ranks", options->ranks,
          text("How many ranks to start on this machine; %u if not given. Not inside a job",
               kDefaultRanks))
      ->type_name("N")
      ->check(CLI::Range(2u, 64u).description(""));
  verb->add_option("-o,--output", options->output, "Folder for the traces; not kept if not given")
      ->type_name("RUN");
  verb->add_flag("--json", options->json, "Print one JSON object");
  on_call(*verb, context, [options] { return run(*options); });
}

}  // namespace weft::cli
