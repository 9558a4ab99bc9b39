// run(): from a model and a target cluster to a measured iteration time.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "cluster.h"
#include "engines.h"
#include "job.h"
#include "soundness.h"
#include "weft/cost.h"
#include "weft/membership.h"
#include "weft/schedule.h"

namespace weft::lab {
namespace {

namespace fs = std::filesystem;

constexpr uint16_t kPort = 29500;
constexpr Nanos kEndTogether = Nanos::from_seconds(5);  // for the others to end after one failed
constexpr const char* kOutcomeFile = "run.json";

using Say = std::function<void(const std::string&)>;

Result<void> check_options(const RunOptions& options) {
  if (options.hosts < 1 || options.hosts > 64)
    return error(Code::invalid_argument, "%u hosts; expected 1 to 64", options.hosts);
  if (options.iterations <= kWarmUpIterations || options.iterations > 100000)
    return error(Code::invalid_argument,
                 "%u iterations; expected %u to 100000 (the first %u warm up and do not count)",
                 options.iterations, kWarmUpIterations + 1, kWarmUpIterations);
  for (const auto& [rank, speed] : options.slow)
    if (rank >= options.hosts || !(speed > 0) || speed > 100)
      return error(Code::invalid_argument,
                   "slow %u:%g; expected a rank below %u and a speed above 0", rank, speed,
                   options.hosts);
  for (const auto& [rank, wrong] : options.clock)
    if (rank >= options.hosts)
      return error(Code::invalid_argument, "clock of rank %u; there are %u ranks", rank,
                   options.hosts);
  if (options.output.empty())
    return error(Code::invalid_argument, "no folder for the run is named");
  return {};
}

Result<void> make_folder(const std::string& path) {
  std::error_code failure;
  if (fs::exists(path, failure)) {
    if (!fs::is_directory(path, failure))
      return error(Code::invalid_argument, "%s exists and is not a folder", path.c_str());
    if (!fs::is_empty(path, failure))
      return error(Code::invalid_argument, "%s is not empty; name a new folder for the run",
                   path.c_str());
    return {};
  }
  fs::create_directories(path, failure);
  if (failure) return io_error(failure.value(), "cannot make %s", path.c_str());
  return {};
}

std::map<std::string, std::string> facts_of(const RunOptions& options, const Cluster& cluster) {
  std::map<std::string, std::string> facts;
  for (const auto& [key, value] : cluster.facts()) facts[key] = value;
  facts["engine"] = name_of(options.engine);
  facts["hosts"] = std::to_string(options.hosts);
  facts["link_bits_per_s"] = text("%.17g", options.link_bits_per_s);
  facts["flow_bits_per_s"] = text("%.17g", options.flow_bits_per_s);
  facts["iterations"] = std::to_string(options.iterations);
  facts["seed"] = std::to_string(options.seed);
  for (const auto& [rank, speed] : options.slow)
    facts[text("slow_rank_%u", rank)] = text("%g", speed);
  for (const auto& [rank, wrong] : options.clock)
    facts[text("clock_rank_%u", rank)] =
        text("%lld ns %+g ppm", static_cast<long long>(wrong.offset.count), wrong.drift_ppm);
  return facts;
}

// How the plan lays out this model's tensors. Fails on a plan that does not fit it.
Result<schedule::Layout> layout_of(const RunOptions& options, const Model& model,
                                   const Factors& factors) {
  std::vector<schedule::Tensor> described;
  for (uint32_t l = 0; l < model.layers.size(); ++l)
    for (const ModelTensor& tensor : model.layers[l].tensors)
      described.push_back({tensor.name, factors.to_real_elements(tensor.elements()), l});
  return schedule::make_layout(schedule::scaled(options.plan, factors.shrink), described);
}

// The part of a job that is the same on all ranks.
Result<Job> common_job(const RunOptions& options, const Model& model, const Factors& factors,
                       const Cluster& cluster) {
  Job job;
  job.ranks = options.hosts;
  job.address = cluster.address(0);
  job.port = kPort;
  job.secret = membership::new_secret();
  job.iterations = options.iterations;
  job.seed = options.seed;
  job.factors = factors;
  job.record = options.record;
  job.probe = options.probe;
  job.compute_only = options.compute_only;
  job.burn = options.burn;
  for (const auto& [lane, bits_per_s] : options.lane_rate)
    job.lane_rate[lane] = bits_per_s / 8 / factors.dilation;
  job.folder = fs::absolute(options.output).string();
  job.model = model.name;
  job.plan = plan::canonical(options.plan);
  job.facts = facts_of(options, cluster);
  for (const ModelLayer& layer : model.layers) {
    JobLayer out{layer.name,
                 factors.to_wall(layer.forward),
                 factors.to_wall(layer.backward),
                 factors.to_wall(model.update(layer)),
                 {}};
    for (const ModelTensor& tensor : layer.tensors) {
      out.tensors.push_back(static_cast<uint32_t>(job.tensors.size()));
      job.tensors.push_back({tensor.name, factors.to_real_elements(tensor.elements())});
    }
    job.layers.push_back(std::move(out));
  }
  WEFT_ASSIGN(schedule::Layout layout, layout_of(options, model, factors));
  for (const schedule::Bucket& bucket : layout.buckets) job.buckets.push_back(bucket.tensors);
  return job;
}

struct Child {
  EngineProcess process;
  std::optional<process::Ending> ending;
  Nanos after{0};

  bool failed() const { return ending && !ending->ok(); }
};

// The last line that a process wrote, for messages.
std::string last_words(const Child& child) {
  auto content = read_file(child.process.log, mib(16));
  if (!content) return "";
  while (!content->empty() && content->back() == '\n') content->pop_back();
  size_t line = content->rfind('\n');
  return line == std::string::npos ? *content : content->substr(line + 1);
}

// Waits for all workers. When one fails the others are given time to say why, then ended.
Result<void> mind(std::vector<Child>& children) {
  Nanos begin = monotonic_clock().now();
  std::optional<size_t> first;
  Nanos failed_at{0};
  for (;;) {
    Nanos now = monotonic_clock().now();
    bool all = true;
    for (size_t i = 0; i < children.size(); ++i) {
      Child& child = children[i];
      if (child.ending) continue;
      child.ending = child.process.child.ended();
      child.after = now - begin;
      all = all && child.ending.has_value();
      if (child.failed() && !first) {
        first = i;
        failed_at = now;
      }
    }
    if (all) break;
    if (first && now - failed_at > kEndTogether)
      for (const Child& child : children)
        if (!child.ending) child.process.child.signal(SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  if (!first) return {};
  // A worker that was killed is the cause, whoever was reaped first.
  for (size_t i = 0; i < children.size(); ++i)
    if (children[i].ending->signal != 0 && children[i].ending->signal != SIGPIPE &&
        children[i].after <= children[*first].after + Nanos::from_seconds(2)) {
      first = i;
      break;
    }
  const Child& cause = children[*first];
  std::string message = text("%s %s after %s", cause.process.name.c_str(),
                             cause.ending->words().c_str(), format_duration(cause.after).c_str());
  std::string words = last_words(cause);
  if (!words.empty()) message += ": " + words;
  for (const Child& child : children) {
    if (&child == &cause || !child.failed()) continue;
    words = last_words(child);
    message +=
        text("\n  %s %s %s later%s%s", child.process.name.c_str(), child.ending->words().c_str(),
             format_duration(child.after - cause.after).c_str(), words.empty() ? "" : ": ",
             words.c_str());
  }
  return Error(Code::peer_lost, message);
}

Result<RunResult> summarise(const RunOptions& options, const Model& model, const Factors& factors) {
  RunResult out;
  out.sums_exact = true;
  out.dilation = factors.dilation;
  out.shrink = factors.shrink;
  bool first = true;
  for (uint32_t rank = 0; rank < options.hosts; ++rank) {
    std::string path = result_path(options.output, rank);
    WEFT_ASSIGN(WorkerResult result, read_result(path));
    if (result.starts_ns.size() != options.iterations + 1)
      return error(Code::corrupt, "rank %u reports %zu starts of %u iterations", rank,
                   result.starts_ns.size(), options.iterations);
    out.sums_exact = out.sums_exact && result.exact;
    if (rank == 0) {
      out.cpu_busy_percent = result.cpu_busy_percent;
      out.steal_percent = result.steal_percent;
    }
    out.training_cpu_ms += result.training_cpu_ms / options.hosts;
    out.communication_cpu_ms += result.communication_cpu_ms / options.hosts;
    out.auxiliary_cpu_ms += result.auxiliary_cpu_ms / options.hosts;
    std::vector<double> intervals;
    for (size_t i = kWarmUpIterations; i + 1 < result.starts_ns.size(); ++i)
      intervals.push_back(
          factors.to_target(Nanos{result.starts_ns[i + 1] - result.starts_ns[i]}).millis());
    Interval spread = intervals.empty() ? Interval{} : median_of(intervals);
    if (first || spread.value > out.iteration_ms.value) {
      out.iteration_ms = spread;
      out.iterations_ms = intervals;
      out.slowest_rank = rank;
    }
    first = false;
    std::error_code ignored;
    fs::remove(path, ignored);
    fs::remove(text("%s/rank-%u.job.json", options.output.c_str(), rank), ignored);
  }
  out.gradient_bytes = static_cast<double>(model.gradient_bytes().count);
  out.compute_ms = model.compute().millis();
  out.wire_ms =
      1e3 * cost::ring_wire_seconds(out.gradient_bytes, options.hosts, options.link_bits_per_s / 8);
  if (options.compute_only) out.wire_ms = 0;
  out.floor_ms = std::max(out.compute_ms, out.wire_ms);
  return out;
}

nlohmann::ordered_json to_json(const RunResult& result) {
  return {{"iteration_ms", result.iteration_ms.value},
          {"low", result.iteration_ms.low},
          {"high", result.iteration_ms.high},
          {"iterations_ms", result.iterations_ms},
          {"slowest_rank", result.slowest_rank},
          {"compute_ms", result.compute_ms},
          {"wire_ms", result.wire_ms},
          {"floor_ms", result.floor_ms},
          {"gradient_bytes", result.gradient_bytes},
          {"sums_exact", result.sums_exact},
          {"dilation", result.dilation},
          {"shrink", result.shrink},
          {"cpu_busy_percent", result.cpu_busy_percent},
          {"steal_percent", result.steal_percent},
          {"training_cpu_ms", result.training_cpu_ms},
          {"communication_cpu_ms", result.communication_cpu_ms},
          {"auxiliary_cpu_ms", result.auxiliary_cpu_ms},
          {"sound", result.sound},
          {"confinement", result.confinement},
          {"remarks", result.remarks},
          {"explained", result.explained},
          {"wall_seconds", result.wall_seconds}};
}

RunResult from_json(const nlohmann::json& in) {
  RunResult out;
  out.iteration_ms = {in.at("iteration_ms"), in.at("low"), in.at("high")};
  out.iterations_ms = in.at("iterations_ms").get<std::vector<double>>();
  out.slowest_rank = in.at("slowest_rank");
  out.compute_ms = in.at("compute_ms");
  out.wire_ms = in.at("wire_ms");
  out.floor_ms = in.at("floor_ms");
  out.gradient_bytes = in.at("gradient_bytes");
  out.sums_exact = in.at("sums_exact");
  out.dilation = in.at("dilation");
  out.shrink = in.at("shrink");
  out.cpu_busy_percent = in.at("cpu_busy_percent");
  out.steal_percent = in.at("steal_percent");
  out.training_cpu_ms = in.at("training_cpu_ms");
  out.communication_cpu_ms = in.at("communication_cpu_ms");
  out.auxiliary_cpu_ms = in.at("auxiliary_cpu_ms");
  out.sound = in.at("sound");
  out.confinement = in.at("confinement");
  out.remarks = in.at("remarks").get<std::vector<std::string>>();
  out.explained = in.at("explained").get<std::vector<std::string>>();
  out.wall_seconds = in.at("wall_seconds");
  return out;
}

// Everything that happens inside the namespaces.
Result<RunResult> run_inside(const RunOptions& options, const Model& model, const Factors& factors,
                             const std::string& program, const Isolation& isolation,
                             const Say& say) {
  ClusterSpec spec;
  spec.hosts = options.hosts;
  spec.link_bits_per_s = factors.to_real_rate(options.link_bits_per_s);
  spec.flow_bits_per_s = factors.to_real_rate(options.flow_bits_per_s);
  spec.mtu = options.mtu;
  spec.congestion_control = options.congestion_control;
  WEFT_ASSIGN(Cluster cluster, Cluster::create(spec, isolation));
  WEFT_ASSIGN(Job job, common_job(options, model, factors, cluster));
  say(text("%u hosts are up; running %u iterations of %s", options.hosts, options.iterations,
           model.name.c_str()));

  for (uint32_t rank = 0; rank < options.hosts; ++rank) {
    Job mine = job;
    mine.rank = rank;
    mine.host = cluster.name(rank);
    mine.station = cluster.station(rank);
    if (auto wrong = options.clock.find(rank); wrong != options.clock.end())
      mine.clock = wrong->second;
    if (auto slow = options.slow.find(rank); slow != options.slow.end())
      for (JobLayer& layer : mine.layers) {
        layer.forward = layer.forward.scaled(1 / slow->second);
        layer.backward = layer.backward.scaled(1 / slow->second);
        layer.update = layer.update.scaled(1 / slow->second);
      }
    std::string job_file = text("%s/rank-%u.job.json", mine.folder.c_str(), rank);
    WEFT_TRY(write_file(job_file, write_job(mine), Readers::owner));  // the secret is in it
  }
  std::vector<process::Child> helpers;
  WEFT_ASSIGN(auto processes, start_engine(options.engine, program, cluster, job.folder, helpers));
  std::vector<Child> children;
  for (EngineProcess& process : processes)
    children.push_back({std::move(process), std::nullopt, {0}});
  WEFT_TRY(mind(children));
  for (const Child& child : children) {
    std::error_code ignored;
    if (fs::file_size(child.process.log, ignored) == 0) fs::remove(child.process.log, ignored);
  }
  WEFT_ASSIGN(RunResult result, summarise(options, model, factors));
  result.confinement = confinement_name(isolation.confinement);
  if (!isolation.lost.empty()) result.remarks.push_back(isolation.lost);
  const auto unsound = [&](const std::string& why) {
    result.sound = false;
    result.remarks.push_back("unsound: " + why);
  };
  if (!cluster.shaped()) unsound("links are not limited");
  if (cluster.station(0) && options.engine != Engine::weft)
    unsound(text("flows of %s are not limited here, and no time says anything about a cluster",
                 name_of(options.engine)));
  if (cluster.unlimited_sockets() > 0)
    unsound(text("%llu sockets escaped their limits: raise the limit of open files (ulimit -Hn)",
                 static_cast<unsigned long long>(cluster.unlimited_sockets())));
  return result;
}

}  // namespace

std::string summary_json(const RunResult& result) { return to_json(result).dump(2) + "\n"; }

const char* name_of(Engine engine) {
  switch (engine) {
    case Engine::weft: return "weft";
    case Engine::gloo: return "gloo";
    case Engine::openmpi: return "openmpi";
    case Engine::horovod: return "horovod";
  }
  return "unknown";
}

Result<Engine> engine_of(const std::string& name) {
  for (Engine engine : {Engine::weft, Engine::gloo, Engine::openmpi, Engine::horovod})
    if (name == name_of(engine)) return engine;
  return error(Code::invalid_argument,
               "there is no engine \"%s\"; expected weft, gloo, openmpi or horovod", name.c_str());
}

Result<RunResult> run(const RunOptions& options, const Say& progress) {
  WEFT_TRY(check_options(options));
  WEFT_TRY(plan::validate(options.plan));
  WEFT_ASSIGN(Model model, load_model(options.model));
  Target target{options.hosts, options.link_bits_per_s, options.flow_bits_per_s};
  Workload workload{model.gradient_bytes(), model.compute()};
  FactorLimits limits;
  limits.cores = std::max(1u, std::thread::hardware_concurrency());
  WEFT_ASSIGN(Factors factors,
              choose_factors(target, workload, limits, options.dilation, options.shrink));
  // A plan that cannot be carried out is refused before anything is made or started.
  WEFT_TRY(layout_of(options, model, factors));
  WEFT_ASSIGN(const Confinement first, asked_confinement());
  // What an engine needs is fetched while there is a network to fetch it from.
  WEFT_ASSIGN(std::string program, prepare_engine(options.engine));
  WEFT_TRY(make_folder(options.output));

  Say say = progress ? progress : [](const std::string&) {};
  Nanos begin = monotonic_clock().now();
  std::string outcome_file = options.output + "/" + kOutcomeFile;
  // The inner process has the result; a file carries it out, and stays as the run's summary.
  const auto inside = [&](const Isolation& isolation) {
    auto result = run_inside(options, model, factors, program, isolation, say);
    nlohmann::ordered_json out;
    if (result)
      out = to_json(*result);
    else
      out = {{"error", result.error().message()},
             {"code", static_cast<int>(result.error().code())}};
    auto written = write_file(outcome_file, out.dump(2) + "\n");
    return written ? 0 : 1;
  };
  WEFT_ASSIGN(int status, run_isolated(inside, first));
  if (status > 128)
    return error(Code::cancelled,
                 "the run was ended by signal %d (%s); its workers and network are gone",
                 status - 128, strsignal(status - 128));
  WEFT_ASSIGN(std::string content, read_file(outcome_file, mib(16)));
  try {
    nlohmann::json outcome = nlohmann::json::parse(content);
    if (outcome.contains("error"))
      return Error(static_cast<Code>(outcome.at("code").get<int>()),
                   outcome.at("error").get<std::string>());
    RunResult result = from_json(outcome);
    result.wall_seconds = (monotonic_clock().now() - begin).seconds();
    if (!options.burn && result.cpu_busy_percent + result.steal_percent > kUnsoundBusyPercent) {
      result.sound = false;
      result.remarks.push_back(
          text("unsound: the processors were %.0f %% busy and %.0f %% stolen (limit %.0f %%); use "
               "a larger "
               "--dilation",
               result.cpu_busy_percent, result.steal_percent, kUnsoundBusyPercent));
    }
    if (result.steal_percent > kUnsoundStealPercent) {
      result.sound = false;
      result.remarks.push_back(
          text("unsound: %.0f %% of the processors' time was taken by other guests of this machine "
               "(limit %.0f %%); run it again",
               result.steal_percent, kUnsoundStealPercent));
    }
    if (!result.sums_exact)
      result.remarks.push_back("WRONG SUMS: a gradient differs from its exact sum");
    result.remarks.push_back(options.burn
                                 ? "device compute is emulated by processor time that is burnt; "
                                   "everything else is real"
                                 : "device compute is emulated by timers; everything else is real");
    result.explained.push_back(explain(factors, target));
    WEFT_TRY(write_file(outcome_file, summary_json(result)));
    return result;
  } catch (const nlohmann::json::exception& failure) {
    return error(Code::corrupt, "%s: %s", outcome_file.c_str(), failure.what());
  }
}

Result<ModelSummary> describe_model(const std::string& name_or_path) {
  WEFT_ASSIGN(Model model, load_model(name_or_path));
  ModelSummary out{model.name,
                   model.source,
                   model.device,
                   model.batch,
                   model.layers.size(),
                   0,
                   model.parameters(),
                   model.forward().millis(),
                   model.backward().millis(),
                   model.update().millis()};
  for (const ModelLayer& layer : model.layers) out.tensors += layer.tensors.size();
  return out;
}

Result<std::vector<ModelSummary>> models() {
  std::vector<ModelSummary> out;
  for (const std::string& name : list_models()) {
    WEFT_ASSIGN(ModelSummary summary, describe_model(name));
    out.push_back(std::move(summary));
  }
  return out;
}

}  // namespace weft::lab
