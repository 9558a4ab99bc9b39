// measure_collective(): all engines in turns, size by size.
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <thread>

#include "engines.h"
#include "machine.h"
#include "weft/bench.h"

namespace weft::bench {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kCallBytes[] = {256 << 10, 512 << 10, 1 << 20};  // tried by the wire,
constexpr uint64_t kSmallBuffers = 1;                               // and each with these
constexpr uint32_t kIterationsMax = 20000;

// A folder that goes with its object.
class Folder {
 public:
  static Result<Folder> make() {
    std::error_code ignored;
    std::string path = (fs::temp_directory_path(ignored) / "weft-bench-XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr) return io_error(errno, "making %s", path.c_str());
    return Folder(path);
  }
  Folder(Folder&& other) noexcept : path_(std::exchange(other.path_, "")) {}
  Folder& operator=(Folder&&) = delete;
  ~Folder() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  explicit Folder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

// An engine that takes part.
struct Runner {
  Entrant entrant;
  std::unique_ptr<EngineProcesses> processes;
  EngineReport* report = nullptr;
  std::vector<uint64_t> settings = {0};
};

// One engine with one of its settings, at one size.
struct Series {
  Runner* runner = nullptr;
  uint64_t setting = 0;
  uint32_t iterations = 1;
  std::vector<double> times_us;
  std::optional<uint64_t> wrong;
};

bool known(const std::vector<std::string>& list, const std::string& word) {
  return std::find(list.begin(), list.end(), word) != list.end();
}

Result<void> check_options(const CollectiveOptions& options) {
  const auto refuse = [](const char* what, const std::string& found,
                         const std::vector<std::string>& list) {
    std::string all;
    for (const std::string& word : list) all += (all.empty() ? "" : ", ") + word;
    return error(Code::invalid_argument, "%s \"%s\"; expected one of %s", what, found.c_str(),
                 all.c_str());
  };
  if (!known(collectives(), options.collective))
    return refuse("collective", options.collective, collectives());
  if (!known(types(), options.type)) return refuse("type", options.type, types());
  if (!known(operations(), options.op)) return refuse("operation", options.op, operations());
  for (const std::string& name : options.peers)
    if (!known(peers(), name)) return refuse("peer", name, peers());
  if (options.ranks < 1 || options.ranks > 64)
    return error(Code::invalid_argument, "%u ranks; expected 1 to 64", options.ranks);
  if (options.from.count == 0 || options.from > options.to || options.to.count > (1ull << 32))
    return error(Code::invalid_argument, "sizes from %s to %s; expected 1 byte to 4 GiB, rising",
                 format_bytes(options.from).c_str(), format_bytes(options.to).c_str());
  if (options.factor < 2 || options.repeats < 1 || options.repeats > 1000)
    return error(Code::invalid_argument,
                 "factor %u and %u repeats; expected at least 2, and 1 to 1000", options.factor,
                 options.repeats);
  return {};
}

// Elements of the whole, such that every rank has as many.
uint64_t count_of(uint64_t bytes, const CollectiveOptions& options) {
  const uint64_t elements = std::max<uint64_t>(bytes / element_bytes(options.type), 1);
  return std::max<uint64_t>(elements / options.ranks, 1) * options.ranks;
}

class Harness {
 public:
  Harness(const CollectiveOptions& options, const Say& say) : options_(options), say_(say) {}

  Result<CollectiveResult> run() {
    const Nanos begin = monotonic_clock().now();
    const auto cpu_from = stolen_time();
    lanes_ = std::max(1u, options_.lanes);
    WEFT_ASSIGN(Folder folder, Folder::make());
    start_all(folder.path());
    for (uint64_t bytes = options_.from.count;; bytes *= options_.factor) {
      measure_size(bytes);
      if (bytes > options_.to.count / options_.factor) break;
    }
    runners_.clear();
    // A rate, so only beside sizes that show one.
    if (options_.transport == Transport::tcp && options_.to >= mib(1))
      result_.iperf3_gb_per_s = iperf3_gb_per_s();
    result_.cores = std::max(1u, std::thread::hardware_concurrency());
    result_.steal_percent = steal_percent(cpu_from, stolen_time());
    result_.seconds = (monotonic_clock().now() - begin).seconds();
    return std::move(result_);
  }

 private:
  void start_all(const std::string& folder) {
    result_.engines.reserve(options_.peers.size() + 3);  // runners point into it
    enter("weft", Result<Entrant>(weft(options_, folder)), folder);
    if (options_.sealed) enter(kSealed, Result<Entrant>(weft(options_, folder, true)), folder);
    enter("wire", Result<Entrant>(wire(options_, folder)), folder);
    for (const std::string& name : options_.peers) {
      say_("setting up " + name);
      enter(name, peer(name, options_, folder), folder);
    }
  }

  void enter(const std::string& name, Result<Entrant> entrant, const std::string& folder) {
    EngineReport& report = result_.engines.emplace_back();
    report.name = name;
    if (!entrant) {
      report.absent = entrant.error().message();
      return;
    }
    report.how = entrant->how;
    auto processes = EngineProcesses::start(name, entrant->start, folder);
    if (!processes) {
      report.absent = processes.error().message();
      return;
    }
    report.version = (*processes)->version();
    Runner& runner = *runners_.emplace_back(std::make_unique<Runner>());
    runner.entrant = std::move(*entrant);
    runner.processes = std::move(*processes);
    runner.report = &report;
    if (name != "wire") return;
    runner.settings.assign(std::begin(kCallBytes), std::end(kCallBytes));
    if (options_.transport == Transport::tcp)
      for (uint64_t bytes : kCallBytes) runner.settings.push_back(bytes + kSmallBuffers);
  }

  // Asks one engine once; microseconds of one collective. An engine that fails is out from now on.
  std::optional<double> ask(Series& series, uint32_t warmups, uint32_t iterations, bool check) {
    Runner& runner = *series.runner;
    if (!runner.processes) return std::nullopt;
    Request request{options_.collective, options_.type, options_.op,   count_, warmups,
                    iterations,          check,         series.setting};
    auto answer = runner.processes->measure(request);
    if (!answer) {
      runner.report->absent =
          text("at %s: %s", format_bytes({bytes_}).c_str(), answer.error().message().c_str());
      runner.processes.reset();
      return std::nullopt;
    }
    if (check) series.wrong = series.wrong.value_or(0) + answer->wrong;
    return answer->seconds * 1e6 / iterations;
  }

  // How many iterations fill a repeat: from one, from a few, then from enough to know.
  void calibrate(Series& series) {
    const double wanted_us = options_.repeat_time.micros();
    for (double share : {0.0, 0.02, 0.2}) {
      const auto time_us = ask(series, share == 0 ? 1 : 0, series.iterations, false);
      if (!time_us) return;
      const double next = (share < 0.2 ? (share == 0 ? 0.02 : 0.2) : 1) * wanted_us;
      series.iterations = static_cast<uint32_t>(
          std::clamp(std::round(next / std::max(*time_us, 0.1)), 1.0, double{kIterationsMax}));
      if (*time_us > wanted_us / 4) break;
    }
  }

  void measure_size(uint64_t bytes) {
    count_ = count_of(bytes, options_);
    bytes_ = count_ * element_bytes(options_.type);
    say_(format_bytes({bytes_}));
    std::vector<Series> all;
    for (auto& runner : runners_)
      for (uint64_t setting : runner->settings)
        if (runner->processes) all.push_back({runner.get(), setting, 1, {}, std::nullopt});
    for (Series& series : all) calibrate(series);
    for (uint32_t repeat = 0; repeat < options_.repeats; ++repeat)
      for (size_t i = 0; i < all.size(); ++i) {
        // Who comes first is somebody else each time.
        Series& series = all[(i + repeat) % all.size()];
        if (auto time_us = ask(series, 1, series.iterations, options_.check && repeat == 0))
          series.times_us.push_back(*time_us);
      }
    for (auto& runner : runners_) report(*runner, all);
  }

  // The best setting of an engine becomes its row.
  void report(const Runner& runner, const std::vector<Series>& all) {
    const Series* best = nullptr;
    for (const Series& series : all)
      if (series.runner == &runner && !series.times_us.empty() &&
          (best == nullptr || quantile(series.times_us, 0.5) < quantile(best->times_us, 0.5)))
        best = &series;
    if (best == nullptr || !runner.processes) return;
    Row row;
    row.engine = runner.entrant.name;
    row.transport = runner.entrant.transport;
    row.ranks = options_.ranks;
    row.bytes = bytes_;
    row.count = count_;
    row.time_us = quantile(best->times_us, 0.5);
    row.time_us_low = quantile(best->times_us, 0.25);
    row.time_us_high = quantile(best->times_us, 0.75);
    row.algbw = static_cast<double>(bytes_) / std::max(row.time_us, 1e-3) * 1e-3;
    row.busbw = row.algbw * bus_factor(options_.collective, options_.ranks);
    if (options_.check && runner.entrant.name != "wire") row.wrong = best->wrong;
    row.iterations = best->iterations;
    if (row.engine == "weft" || row.engine == kSealed) {
      row.lanes = lanes_;
      row.algorithm = options_.algorithm.empty() ? "auto" : options_.algorithm;
    }
    result_.rows.push_back(std::move(row));
  }

  const CollectiveOptions& options_;
  const Say& say_;
  CollectiveResult result_;
  std::vector<std::unique_ptr<Runner>> runners_;
  uint64_t bytes_ = 0, count_ = 0;
  uint32_t lanes_ = 0;  // of weft
};

}  // namespace

const char* name_of(Transport transport) { return transport == Transport::shm ? "shm" : "tcp"; }

const std::vector<std::string>& collectives() {
  static const std::vector<std::string> all = {"allreduce", "reduce-scatter", "all-gather",
                                               "broadcast", "all-to-all",     "sendrecv"};
  return all;
}
const std::vector<std::string>& types() {
  static const std::vector<std::string> all = {"float32", "float64", "float16", "bfloat16", "int8",
                                               "uint8",   "int16",   "int32",   "int64"};
  return all;
}
const std::vector<std::string>& operations() {
  static const std::vector<std::string> all = {"sum", "min", "max"};
  return all;
}
const std::vector<std::string>& peers() {
  static const std::vector<std::string> all = {"gloo", "openmpi", "mpich", "horovod",
                                               "horovod-mpi"};
  return all;
}

double bus_factor(const std::string& collective, uint32_t ranks) {
  const double n = ranks;
  if (collective == "broadcast" || collective == "sendrecv") return 1;
  return (collective == "allreduce" ? 2 : 1) * (n - 1) / n;
}

Result<CollectiveResult> measure_collective(const CollectiveOptions& options, const Say& say) {
  WEFT_TRY(check_options(options));
  const Say quiet = [](const std::string&) {};
  return Harness(options, say ? say : quiet).run();
}

}  // namespace weft::bench
