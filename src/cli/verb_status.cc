// weft status: asks a running job what it is doing.

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "verb.h"
#include "weft/membership.h"
#include "weft/runtime.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kEnvironmentMax = 4u << 20;

struct Options {
  std::string address;
  uint32_t pid = 0;
  std::string timeout = "3s";
  bool json = false;
};

struct Job {
  int pid = 0;
  membership::Membership membership;
};

std::optional<std::map<std::string, std::string>> environment_of(const std::string& pid) {
  Fd file(::open(("/proc/" + pid + "/environ").c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return std::nullopt;
  std::string bytes(kEnvironmentMax, '\0');
  size_t have = 0;
  for (ssize_t got = 1; got > 0 && have < bytes.size(); have += static_cast<size_t>(got)) {
    got = ::read(file.get(), bytes.data() + have, bytes.size() - have);
    if (got < 0) return std::nullopt;
  }
  bytes.resize(have);
  std::map<std::string, std::string> out;
  for (size_t from = 0; from < bytes.size();) {
    size_t end = std::min(bytes.find('\0', from), bytes.size());
    std::string entry = bytes.substr(from, end - from);
    from = end + 1;
    if (size_t equals = entry.find('='); equals != std::string::npos)
      out[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  return out;
}

// The job that a process belongs to, as its environment tells: only its owner can read that.
std::optional<Job> job_of(const std::string& pid) {
  auto environment = environment_of(pid);
  if (!environment) return std::nullopt;
  // A descriptor of that process is none of this one.
  if (environment->contains("WEFT_SECRET_FD") && !environment->contains("WEFT_SECRET"))
    return std::nullopt;
  auto membership =
      membership::from_environment([&](const char* name) -> std::optional<std::string> {
        auto found = environment->find(name);
        return found == environment->end() ? std::nullopt : std::optional(found->second);
      });
  if (!membership || membership->rendezvous.starts_with("file:")) return std::nullopt;
  Job job;
  std::from_chars(pid.data(), pid.data() + pid.size(), job.pid);
  job.membership = std::move(*membership);
  return job;
}

// The jobs of this user on this host, each once.
std::vector<Job> running_jobs() {
  std::map<std::string, Job> by_address;
  DIR* folder = ::opendir("/proc");
  while (folder != nullptr) {
    const dirent* entry = ::readdir(folder);
    if (entry == nullptr) break;
    std::string name = entry->d_name;
    struct stat facts {};
    if (name.find_first_not_of("0123456789") != std::string::npos ||
        ::stat(("/proc/" + name).c_str(), &facts) != 0 || facts.st_uid != ::geteuid() ||
        name == std::to_string(::getpid()))
      continue;
    if (auto job = job_of(name)) by_address.emplace(job->membership.rendezvous, std::move(*job));
  }
  if (folder != nullptr) ::closedir(folder);
  std::vector<Job> out;
  for (auto& [address, job] : by_address) out.push_back(std::move(job));
  return out;
}

void show(const Json& status) {
  print(
      text("%u ranks, %zu answered\n", status["ranks"].get<unsigned>(), status["answered"].size()));
  for (const Json& rank : status["silent"])
    print(text("rank %u is silent\n", rank.get<unsigned>()));
  for (const Json& rank : status["answered"]) {
    uint64_t out = 0;
    size_t lanes = 0;
    for (const Json& lane : rank["lanes"])
      if (lane["direction"] == "out") {
        out += lane["bytes"].get<uint64_t>();
        ++lanes;
      }
    print(
        text("rank %u on %s (process %d): %zu in flight, last progress %.3f s ago, %s sent over "
             "%zu lanes\n",
             rank["rank"].get<unsigned>(), rank["host"].get<std::string>().c_str(),
             rank["pid"].get<int>(), rank["operations"].size(),
             rank["last_progress_seconds_ago"].get<double>(),
             format_size(static_cast<double>(out)).c_str(), lanes));
    for (const Json& operation : rank["operations"])
      print(
          text("  operation %u: %s, %s of %s received, since %.3f s%s\n",
               operation["operation"].get<unsigned>(), operation["what"].get<std::string>().c_str(),
               format_size(operation["bytes_received"].get<double>()).c_str(),
               format_size(operation["bytes_to_receive"].get<double>()).c_str(),
               operation["seconds"].get<double>(),
               operation["waits_for"].is_null()
                   ? ""
                   : text(", waits for rank %u", operation["waits_for"].get<unsigned>()).c_str()));
  }
}

Outcome run(const Options& options) {
  WEFT_ASSIGN(const Nanos patience, parse_duration(options.timeout));
  Job job;
  if (options.pid != 0) {
    auto found = job_of(std::to_string(options.pid));
    if (!found)
      return Outcome::bad_input(
          error(Code::not_found,
                "process %u is not a rank of a job, or its environment and secret cannot be read",
                options.pid));
    job = std::move(*found);
  } else if (!options.address.empty()) {
    const char* secret = std::getenv("WEFT_SECRET");
    if (secret == nullptr)
      return Outcome::bad_call("an address needs the job's secret in WEFT_SECRET");
    job.membership.rendezvous = options.address;
    job.membership.secret = secret;
  } else {
    std::vector<Job> jobs = running_jobs();
    if (jobs.empty())
      return Outcome::bad_input(error(
          Code::not_found, "no job of this user runs on this host; give an ADDRESS or --pid"));
    if (jobs.size() > 1) {
      std::string list;
      for (const Job& one : jobs)
        list += text(" --pid %d (%s)", one.pid, one.membership.rendezvous.c_str());
      return Outcome::bad_call("there are several jobs; choose one:" + list);
    }
    job = std::move(jobs.front());
  }
  auto answer = runtime::ask_status(job.membership.rendezvous, job.membership.secret, patience);
  if (!answer) return Outcome::run_failed(answer.error().message());
  if (auto small = check_json(*answer, {.depth = 32, .values = 1u << 20}); !small)
    return Outcome::run_failed("the job's answer: " + small.error().message());
  Json status = Json::parse(*answer, nullptr, false);
  if (status.is_discarded()) return Outcome::run_failed("the job's answer cannot be read");
  if (options.json) {
    print_json(status);
    return {};
  }
  try {
    show(status);
  } catch (const Json::exception&) {
    return Outcome::run_failed("the job answered in another form than expected; try --json");
  }
  return {};
}

}  // namespace

void add_status(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = add_verb(app, "status",
                            "Asks a running job: what is in flight, what lanes carry, who waits "
                            "for whom.",
                            "weft status\nweft status --pid 4711 --json");
  verb->add_option("ADDRESS", options->address,
                   "Rank 0 of the job, HOST:PORT, with its secret in WEFT_SECRET; without it the "
                   "job that runs on this host");
  verb->add_option("--pid", options->pid, "Any rank of the job, on this host")->type_name("PID");
  verb->add_option("--timeout", options->timeout, "How long to wait for an answer")
      ->type_name("TIME")
      ->capture_default_str();
  verb->add_flag("--json", options->json, "Print one JSON object");
  on_call(*verb, context, [options] { return run(*options); });

  CLI::App* worker =
      add_verb(app, "lane-worker", "What serves lanes beside a rank.", "weft lane-worker");
  worker->group("");  // not for people
  on_call(*worker, context, [] {
    // The numbers under which the rank that started it gave its descriptors.
    return Outcome::said(lane::run_lane_worker(100, 101, 102, 103));
  });
}

}  // namespace weft::cli
