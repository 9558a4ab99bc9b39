// run_program(): the ranks of a real job, each in a host of the lab.
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "cluster.h"
#include "lab.h"
#include "weft/membership.h"

namespace weft::lab {
namespace {

using Json = nlohmann::ordered_json;
using Say = std::function<void(const std::string&)>;

constexpr uint16_t kPort = 29500;       // nobody else lives in these namespaces
constexpr uint16_t kStorePort = 29501;  // of torch
constexpr uint32_t kRanksPerHostMax = 64;

Result<void> check_options(const ProgramOptions& options) {
  if (options.command.empty() || options.command[0].empty())
    return error(Code::invalid_argument, "no program is named");
  if (options.ranks_per_host < 1 || options.ranks_per_host > kRanksPerHostMax)
    return error(Code::invalid_argument, "%u ranks on a host; expected 1 to %u",
                 options.ranks_per_host, kRanksPerHostMax);
  return {};
}

// What the ranks' traces say of the place in which they ran.
std::string facts_of(const ProgramOptions& options, const Cluster& cluster) {
  Json facts;
  for (const auto& [key, value] : cluster.facts()) facts[key] = value;
  facts["hosts"] = std::to_string(options.hosts);
  facts["link_bits_per_s"] = text("%.17g", options.link_bits_per_s);
  facts["flow_bits_per_s"] = text("%.17g", options.flow_bits_per_s);
  return facts.dump();
}

Result<std::vector<launch::Process>> processes_of(const ProgramOptions& options,
                                                  const Cluster& cluster) {
  const uint32_t here = options.ranks_per_host;
  const uint32_t ranks = options.hosts * here;
  const std::string secret = membership::new_secret();
  const std::string facts = facts_of(options, cluster);
  std::vector<launch::Process> out;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const uint32_t host = rank / here, local = rank % here;
    launch::Process process;
    process.rank = rank;
    process.host = cluster.name(host);
    process.argv = options.command;
    process.environment = {
        {"WEFT_RANK", std::to_string(rank)},
        {"WEFT_SIZE", std::to_string(ranks)},
        {"WEFT_LOCAL_RANK", std::to_string(local)},
        {"WEFT_LOCAL_SIZE", std::to_string(here)},
        {"WEFT_RENDEZVOUS", text("%s:%u", cluster.address(0).c_str(), unsigned{kPort})},
        {"WEFT_SECRET", secret},
        {"WEFT_HOST", cluster.name(host)},
        {"WEFT_INTERFACE", cluster.interface()},
        {"WEFT_LAB", facts},
        // Other systems ask for it by their own names.
        {"GLOO_SOCKET_IFNAME", cluster.interface()}};
    process.environment.merge(
        launch::torch_variables({rank, ranks, local, here}, cluster.address(0), kStorePort));
    for (const auto& [name, value] : options.variables) process.environment[name] = value;
    WEFT_ASSIGN(process.before_exec, cluster.entering(host));
    out.push_back(std::move(process));
  }
  return out;
}

// The inner process has the result, which is carried out in a file without a name.
class Letter {
 public:
  static Result<Letter> make() {
    Fd file(memfd_create("weft-lab-result", MFD_CLOEXEC));
    if (!file) return io_error(errno, "cannot make a file in memory");
    return Letter(std::move(file));
  }
  bool write(const Json& words) const {
    const std::string bytes = words.dump(-1, ' ', false, Json::error_handler_t::replace);
    return ::pwrite(file_.get(), bytes.data(), bytes.size(), 0) ==
           static_cast<ssize_t>(bytes.size());
  }
  Result<Json> read() const {
    std::string bytes(static_cast<size_t>(std::max<off_t>(lseek(file_.get(), 0, SEEK_END), 0)), 0);
    if (::pread(file_.get(), bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
      return io_error(errno, "cannot read the result");
    Json words = Json::parse(bytes, nullptr, false);
    if (!words.is_object()) return error(Code::corrupt, "the lab ended without a result");
    return words;
  }

 private:
  explicit Letter(Fd file) : file_(std::move(file)) {}
  Fd file_;
};

Json to_json(const launch::Report& report) {
  Json outcomes = Json::array();
  for (const launch::Outcome& one : report.outcomes)
    outcomes.push_back({one.rank, one.exit_code, one.signal, one.ended_by_us, one.after.count});
  return {{"outcomes", std::move(outcomes)},
          {"first", report.first_failure ? Json(*report.first_failure) : Json()},
          {"reason", report.reason}};
}

launch::Report report_from(const Json& in) {
  launch::Report out;
  for (const Json& one : in.at("outcomes"))
    out.outcomes.push_back(
        {one.at(0), one.at(1), one.at(2), one.at(3), Nanos{one.at(4).get<int64_t>()}});
  if (!in.at("first").is_null()) out.first_failure = in.at("first").get<uint32_t>();
  out.reason = in.at("reason");
  return out;
}

Result<Json> run_inside(const ProgramOptions& options, const Isolation& isolation, const Say& say) {
  if (isolation.confinement == Confinement::loopback)
    return error(Code::unsupported,
                 "a program cannot be put on hosts here, because the system forbids namespaces: %s",
                 isolation.lost.c_str());
  ClusterSpec spec;
  spec.hosts = options.hosts;
  spec.link_bits_per_s = options.link_bits_per_s;
  spec.flow_bits_per_s = options.flow_bits_per_s;
  spec.mtu = options.mtu;
  spec.congestion_control = options.congestion_control;
  WEFT_ASSIGN(Cluster cluster, Cluster::create(spec, isolation));
  WEFT_ASSIGN(const auto processes, processes_of(options, cluster));
  say(text("%u hosts are up; running %zu ranks", options.hosts, processes.size()));
  WEFT_ASSIGN(const CpuTimes from, cpu_times());
  const Nanos begin = monotonic_clock().now();
  WEFT_ASSIGN(const launch::Report report, launch::run(processes, options.how));
  const Nanos took = monotonic_clock().now() - begin;
  WEFT_ASSIGN(const CpuTimes to, cpu_times());
  const CpuLoad load = cpu_load(from, to);
  return Json{{"report", to_json(report)},
              {"busy", load.busy_percent},
              {"steal", load.steal_percent},
              {"took", took.count},
              {"confinement", confinement_name(isolation.confinement)}};
}

}  // namespace

Result<ProgramResult> run_program(const ProgramOptions& options, const Say& progress) {
  WEFT_TRY(check_options(options));
  WEFT_ASSIGN(const Confinement first, asked_confinement());
  WEFT_ASSIGN(const Letter letter, Letter::make());
  const Say say = progress ? progress : [](const std::string&) {};
  const auto inside = [&](const Isolation& isolation) {
    auto result = run_inside(options, isolation, say);
    const Json words = result ? *result
                              : Json{{"error", result.error().message()},
                                     {"code", static_cast<int>(result.error().code())}};
    return letter.write(words) ? 0 : 1;
  };
  WEFT_ASSIGN(const int status, run_isolated(inside, first));
  if (status > 128)
    return error(Code::cancelled,
                 "the run was ended by signal %d (%s); its ranks and network are "
                 "gone",
                 status - 128, strsignal(status - 128));
  WEFT_ASSIGN(const Json words, letter.read());
  try {
    if (words.contains("error"))
      return Error(static_cast<Code>(words.at("code").get<int>()),
                   words.at("error").get<std::string>());
    ProgramResult out;
    out.report = report_from(words.at("report"));
    out.cpu_busy_percent = words.at("busy");
    out.steal_percent = words.at("steal");
    out.took = Nanos{words.at("took").get<int64_t>()};
    out.confinement = words.at("confinement");
    return out;
  } catch (const nlohmann::json::exception& failure) {
    return error(Code::corrupt, "the result of the run: %s", failure.what());
  }
}

}  // namespace weft::lab
