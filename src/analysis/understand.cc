// From a folder to a graph and a replayer, with errors that say what to do.
#include <algorithm>
#include <filesystem>

#include "probe.h"

namespace weft::analysis {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTensorTypes = "tensor_types";  // the key of a note

bool is_predicted(const trace::Trace& trace) {
  return !trace.processes.empty() && trace.processes.front().environment.predicted;
}

// Nobody recorded a gradient or an operation: compute alone, or a job that does not train.
bool without_communication(const graph::Graph& graph) {
  return graph.operations.empty() &&
         std::none_of(graph.nodes.begin(), graph.nodes.end(), [](const graph::Node& node) {
           return node.type == graph::NodeType::ready || node.type == graph::NodeType::send;
         });
}

void remark_notes(const trace::Trace& trace, std::vector<std::string>& remarks) {
  for (const trace::Process& process : trace.processes)
    for (const trace::Note& note : process.notes)
      if (note.key == kTensorTypes && process.environment.rank == 0)
        remarks.push_back(
            text("gradients have several types (%s), which share no bucket in the "
                 "runtime and do in a replay",
                 note.value.c_str()));
      else if (note.key == trace::kMarksRefused)
        remarks.push_back(text("rank %u: marks of the program that made no sense: %s",
                               process.environment.rank, note.value.c_str()));
}

}  // namespace

Result<align::Alignment> put_on_one_clock(trace::Trace& trace) {
  WEFT_ASSIGN(align::Alignment alignment, align::align(trace));
  if (!is_predicted(trace)) {
    align::apply(alignment, trace);
    return alignment;
  }
  for (align::HostClock& host : alignment.hosts) {
    if (host.quality != align::Quality::reference) host.quality = align::Quality::bounded;
    host.reference_ns = host.at_ns;
    host.offset_ns = host.low_ns = host.high_ns = 0;
    host.drift_ppm = host.drift_low_ppm = host.drift_high_ppm = 0;
  }
  alignment.backward_after = alignment.backward_before;
  alignment.remarks = {"a predicted run has one clock: nothing was moved"};
  return alignment;
}

Interval Recorded::iteration_ms() const {
  std::vector<double> times = graph::iteration_times(graph).of_slowest_ns;
  if (times.empty()) return {};
  for (double& time : times) time = environment().to_target_ns(time) * 1e-6;
  return median_of(times);
}

Result<Recorded> understand(trace::Trace trace, const std::string& under) {
  Recorded out;
  out.trace = std::move(trace);
  WEFT_ASSIGN(std::vector<std::string> inferred, keep_one_plan(out.trace, under));
  for (std::string& iterations : trace::infer_iterations(out.trace))
    inferred.push_back(std::move(iterations));
  for (std::string& adopted : adopt_called_sums(out.trace)) inferred.push_back(std::move(adopted));
  tell_hosts_apart(out.trace);
  WEFT_ASSIGN(out.alignment, put_on_one_clock(out.trace));
  WEFT_ASSIGN(out.graph, graph::build(out.trace));
  if (!is_predicted(out.trace)) out.remarks = out.alignment.remarks;
  out.remarks.insert(out.remarks.end(), inferred.begin(), inferred.end());
  remark_notes(out.trace, out.remarks);
  out.remarks.insert(out.remarks.end(), out.graph.remarks.begin(), out.graph.remarks.end());
  if (out.predicted())
    out.remarks.push_back("this run is a prediction: what is said of it was not measured");
  size_t counted = out.graph.iterations.size() - out.graph.first_counted();
  if (counted < 3)
    out.remarks.push_back(
        text("only %zu iteration%s: the spread is not known, and a warm-up may be "
             "among %s; record at least 5",
             counted, counted == 1 ? "" : "s", counted == 1 ? "it" : "them"));
  return out;
}

namespace {

// Nothing where there is none to add.
Result<void> add_probe_of(const std::string& run, const std::string& probe, trace::Trace& trace) {
  std::error_code ignored;
  const std::string inside = run + "/" + kProbeFolder;
  const bool own = probe.empty() && !has_probe(trace) && fs::is_directory(inside, ignored);
  if (probe.empty() && !own) return {};
  const std::string& folder = own ? inside : probe;
  auto measured = trace::read(folder);
  if (!measured) return std::move(measured).error();
  auto added = add_probe(trace, *measured);
  if (!added) return std::move(added).error().in("the probe " + folder);
  return {};
}

}  // namespace

Result<Recorded> understand(const std::string& run, const std::string& under,
                            const std::string& probe) {
  WEFT_ASSIGN(trace::Trace trace, trace::read(run));
  WEFT_TRY(add_probe_of(run, probe, trace));
  // A file that was lost may be why a rank is missing: the reader knows more than the graph.
  std::string lost;
  for (const trace::Damage& damage : trace.damage)
    if (damage.any() && lost.empty())
      lost = "; " + damage.file + " is damaged" +
             (damage.details.empty() ? "" : ": " + damage.details.front());
  std::error_code ignored;
  bool one_file = trace.processes.size() == 1 && !fs::is_directory(run, ignored);
  auto out = understand(std::move(trace), under);
  if (out) return out;
  std::string message = out.error().message() + lost;
  if (one_file) message += "; name the folder of the run, not one file";
  return Error(out.error().code(), message).in(run);
}

Result<Analysis> analyze(Recorded recorded) {
  if (recorded.graph.environment.plan_text.empty())
    return error(Code::unsupported,
                 "the trace does not hold the plan that was in force, so it cannot be replayed; "
                 "record it with this version of weft");
  if (without_communication(recorded.graph)) {
    // Without tensors the replay has nothing to send either, and agrees with the record.
    recorded.graph.model.tensors.clear();
    if (recorded.graph.ranks > 1)
      recorded.remarks.push_back(
          "the run moved no gradient: everything here is about compute alone, and no plan can "
          "change it");
  } else if (!recorded.graph.sums_by.empty() && !has_probe(recorded.trace)) {
    return error(Code::unsupported,
                 "%s carried its sums, so that nothing in it says what weft would carry: take a "
                 "probe with the launcher of the run (weft run -n %u -- weft probe -o PROBE, or "
                 "torchrun --no-python ... weft probe -o PROBE), and add --probe PROBE, or let "
                 "PROBE be the folder \"%s\" inside the run's",
                 recorded.graph.sums_by.c_str(), recorded.graph.ranks, kProbeFolder);
  } else if (recorded.graph.ranks > 1 && !recorded.predicted() && !has_probe(recorded.trace)) {
    recorded.remarks.push_back(
        "the trace has no probe: more lanes than were used, and the rate of the link, are unknown; "
        "record with the probe, which takes less than a second");
  }
  cost::Costs costs = cost::fit(recorded.trace);
  // Nothing travels, so any rate will do.
  if (recorded.graph.model.tensors.empty() && !costs.link_bytes_per_s)
    costs.link_bytes_per_s = cost::Fitted{1e9, 1e9, 1e9, 0};
  WEFT_ASSIGN(replay::Replayer replayer, replay::Replayer::make(recorded.graph, costs));
  if (replayer.fidelity().unknown) return *replayer.fidelity().unknown;
  if (!(replayer.fidelity().replayed_ns > 0))
    return error(Code::unsupported, "its iterations take no time: nothing to replay");
  costs = replayer.costs();
  return Analysis{std::move(recorded), std::move(costs), std::move(replayer)};
}

Result<Analysis> analyze(const std::string& run, const std::string& under,
                         const std::string& probe) {
  WEFT_ASSIGN(Recorded recorded, understand(run, under, probe));
  auto out = analyze(std::move(recorded));
  if (!out) return std::move(out).error().in(run);
  return out;
}

Result<void> write_run(const trace::Trace& trace, const std::string& folder) {
  std::error_code failure;
  if (fs::exists(folder, failure) &&
      (!fs::is_directory(folder, failure) || !fs::is_empty(folder, failure)))
    return error(Code::invalid_argument, "%s exists and is not an empty folder; name a new one",
                 folder.c_str());
  fs::create_directories(folder, failure);
  if (failure) return io_error(failure.value(), "cannot make %s", folder.c_str());
  for (const trace::Process& process : trace.processes)
    WEFT_TRY(trace::write(folder + "/" + trace::file_name(process.environment.rank), process));
  return {};
}

void note_cluster(replay::Prediction& prediction, const replay::Cluster& cluster) {
  WEFT_CHECK(prediction.trace.has_value());
  for (trace::Process& process : prediction.trace->processes) {
    auto& facts = process.environment.lab;
    if (cluster.hosts) facts["hosts"] = std::to_string(*cluster.hosts);
    if (cluster.link_bits_per_s) facts["link_bits_per_s"] = text("%.17g", *cluster.link_bits_per_s);
    if (cluster.flow_bits_per_s)
      facts["flow_bits_per_s"] =
          text("%.17g", *cluster.flow_bits_per_s < 1e300 ? *cluster.flow_bits_per_s : 0.0);
  }
}

}  // namespace weft::analysis
