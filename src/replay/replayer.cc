#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "compute.h"
#include "fidelity.h"
#include "recording.h"
#include "simulator.h"
#include "taken.h"
#include "weft/replay.h"

namespace weft::replay {
namespace {

constexpr uint32_t kLeastIterations = 4;
constexpr double kLongestDelay = 1e8;  // 0.1 s: what takes longer is not a host's delay
using trace::kWarmUpIterations;
// Enough to compare with what was measured; more only takes memory.
constexpr uint32_t kFidelityIterations = 12;
// What is left when everything that is modelled is right: the spread of errors over plans and
// clusters that were predicted before they were run (docs/cost_model.md).
constexpr double kModelError = 0.04;
// A recorded run holds events of every message, so what its own plan asks for is in proportion to
// its graph. A file that claims vast tensors and holds few events would be simulated for minutes.
constexpr double kMessagesFree = 2.5e5, kMessagesPerNode = 8;
constexpr double kPacketsFree = 1e6, kPacketsPerNode = 128;  // chunks of 4 MiB have 64
// Up to so many ranks each is simulated: it costs little, and rank 0 differs from the others.
constexpr uint32_t kRanksInFull = 16;
// Of a folded job, in all iterations together: a second's work.
constexpr double kFoldedMessages = 1e6;
// What folding was seen to miss of whole jobs (docs/cost_model.md).
constexpr double kFoldError = 0.08;
// Threads that wait for a core have it in slices, not in shares.
constexpr double kBusy = 0.4;
constexpr double kBusyError = 0.3;  // for each core's worth above that
// What is known of weft from a probe alone: delays of agreement and wake-ups are not
// (docs/torch.md).
constexpr double kUnseenSumsError = 0.1;

std::optional<double> recorded_rate(const trace::Environment& environment, const char* key) {
  auto found = environment.lab.find(key);
  if (found == environment.lab.end()) return std::nullopt;
  double value = std::strtod(found->second.c_str(), nullptr);
  if (!std::isfinite(value) || value <= 0) return std::nullopt;
  return value;
}

double value_or_zero(const std::optional<cost::Fitted>& constant) {
  return constant ? constant->value : 0;
}

int64_t nanos(const std::optional<cost::Fitted>& constant, double scale = 1) {
  return static_cast<int64_t>(std::clamp(value_or_zero(constant) * scale, 0.0, kLongestDelay));
}

uint32_t hosts_in(const std::vector<uint32_t>& host_of) {
  return static_cast<uint32_t>(std::set<uint32_t>(host_of.begin(), host_of.end()).size());
}

// For how long Linux lets a thread run before it looks who else should: base_slice_ns of a machine
// with so many cores. One that slept and wakes has as much before others.
double slice_ns(uint32_t cores) { return 0.7e6 * (1 + std::floor(std::log2(std::min(cores, 8u)))); }

// Which end of each fitted constant to use.
enum class End { middle, fast, slow };

double pick(const cost::Fitted& rate, End end) {
  return end == End::fast ? rate.high : end == End::slow ? rate.low : rate.value;
}

}  // namespace

namespace {

// What of the time beside processor time waited for no core: 0 to 1.
struct IdleShare {
  double backward = 0;
  double other = 0;
};

}  // namespace

struct Replayer::Impl {
  trace::Environment environment;
  trace::Model model;
  uint32_t ranks = 0;
  std::vector<uint32_t> host_of;  // by rank; empty: each on its own
  cost::Costs costs;
  plan::Plan recorded;
  std::vector<schedule::Tensor> tensors;
  size_t nodes = 0;  // of the graph; 0: it was made up
  Compute compute;
  // Where somebody else summed the gradients: how long that took, and compute as it was beside it.
  std::string sums_by;
  Taken taken;
  Compute beside_taken;
  graph::IterationTimes measured;
  double compute_ns = 0;
  double gradient_bytes = 0;
  Fidelity fidelity;

  std::vector<IdleShare> idle_shares;  // by rank
  // What compute waited for something else than the job's own threads, for each second that it had
  // a core, and in an iteration, on the rank where it was most; as far as it was beside no sums. 0
  // where weft carried the sums: then it shows in the fidelity.
  double waits_for_others = 0;
  double waits_for_others_ns = 0;

  void set_compute(std::vector<graph::Iteration> counted);
  void find_idle_shares();
  const Compute& compute_for(const Question& question) const {
    return question.sums_as_measured ? beside_taken : compute;
  }
  // Sums that somebody else carried have no messages to simulate.
  uint32_t fidelity_iterations() const {
    const auto all = static_cast<uint32_t>(compute.iterations.size()) + kWarmUpIterations;
    return std::max(kLeastIterations, sums_by.empty() ? std::min(all, kFidelityIterations) : all);
  }
  std::vector<uint32_t> hosts_for(const Cluster& cluster) const;
  std::vector<schedule::Algorithm> algorithms(const plan::Plan& plan,
                                              const schedule::Layout& layout, const Job& job,
                                              Prediction& notes) const;
  Result<Network> network(const Question& question, const plan::Plan& plan, uint32_t flows, End end,
                          Prediction& notes) const;
  schedule::Tree tree_of(uint32_t of_ranks) const { return schedule::tree_of_run(costs, of_ranks); }
  Result<Job> job(const Question& question,
                  std::vector<std::vector<graph::LayerTimes>>& made) const;
  void own_processors(Prediction& notes) const;
  Result<Simulated> simulated(const Question& question, const plan::Plan& plan, End end,
                              Prediction& notes, Recording* recording) const;
  Result<Prediction> predict(const Question& question) const;
  void widen(const Question& question, const plan::Plan& plan, Prediction& prediction) const;
};

namespace {

// The rates of the asked cluster in real bytes a nanosecond.
struct Rates {
  double link = 0;
  double flow = std::numeric_limits<double>::infinity();
};

// `flows`: connections of a rank that are busy at a time.
Result<Rates> recorded_rates(const cost::Costs& costs, uint32_t lanes, uint32_t flows, End end,
                             Prediction& notes) {
  Rates rates;
  if (costs.link_bytes_per_s) {
    rates.link = pick(*costs.link_bytes_per_s, end) * 1e-9;
    if (costs.flow_bytes_per_s) rates.flow = pick(*costs.flow_bytes_per_s, end) * 1e-9;
    if (cost::rate_of_flows(costs, flows)) return rates;
    // The rate still grew when the probe ended. What the run itself did over as many lanes is
    // known.
    if (!costs.lane_bytes_per_s || lanes > costs.lanes)
      return error(Code::unsupported,
                   "what %u connections of a rank carry is unknown: the probe measured fewer, and "
                   "the rate was still growing",
                   flows);
    rates.flow = pick(*costs.lane_bytes_per_s, end) * 1e-9;
    rates.link = std::max(rates.link, rates.flow * costs.connections);
    notes.unknown.push_back(
        "the rate of the link: it still grew when the probe ended, so what the run's own lanes "
        "carried is taken for it");
    return rates;
  }
  // Without a probe only what the run itself did is known.
  if (!costs.lane_bytes_per_s)
    return error(Code::unsupported,
                 "the trace has no probe and no lane was ever busy: what the network carries is "
                 "unknown; record with the probe (it takes less than a second)");
  if (lanes > costs.lanes)
    return error(Code::unsupported,
                 "the trace has no probe: what %u lanes carry is unknown, only %u were used", lanes,
                 costs.lanes);
  rates.flow = pick(*costs.lane_bytes_per_s, end) * 1e-9;
  rates.link = rates.flow * costs.connections;
  notes.unknown.push_back(
      "the rate of the link: the trace has no probe, so the lanes' own rate is "
      "taken for it");
  return rates;
}

// Applies a change of link or flow, said in the target's bits.
void change_rates(const Cluster& cluster, const trace::Environment& environment, Rates& rates,
                  Prediction& notes) {
  auto real = [&](double target_bits, const char* key, double fitted) {
    double nominal = target_bits / 8e9 / environment.dilation;
    auto recorded = recorded_rate(environment, key);
    // Headers and the shaper's habits cost the same share of another rate.
    if (recorded && std::isfinite(fitted))
      return nominal * fitted / (*recorded / 8e9 / environment.dilation);
    notes.assumed.push_back("a set rate is all payload: the recorded cluster's own is not known");
    return nominal;
  };
  if (cluster.link_bits_per_s) {
    double link = real(*cluster.link_bits_per_s, "link_bits_per_s", rates.link);
    if (!std::isfinite(rates.flow) && link > rates.link && !cluster.flow_bits_per_s)
      notes.assumed.push_back("one flow fills the faster link as it fills the recorded one");
    rates.link = link;
  }
  if (!cluster.flow_bits_per_s) return;
  rates.flow = std::isinf(*cluster.flow_bits_per_s)
                   ? std::numeric_limits<double>::infinity()
                   : real(*cluster.flow_bits_per_s, "flow_bits_per_s",
                          std::isfinite(rates.flow) ? rates.flow : rates.link);
}

}  // namespace

// Which algorithm each piece takes.
std::vector<schedule::Algorithm> Replayer::Impl::algorithms(const plan::Plan& plan,
                                                            const schedule::Layout& layout,
                                                            const Job& job,
                                                            Prediction& notes) const {
  bool automatic = std::any_of(plan.algorithm.begin(), plan.algorithm.end(),
                               [](const auto& rule) { return rule.use == "auto"; });
  schedule::Choice choice;
  if (automatic) {
    choice = schedule::choice_of_run(costs, {job.ranks, plan.lanes, hosts_in(job.host_of)});
    notes.assumed.push_back("\"auto\" chooses its algorithms by what the recorded run knew");
  }
  std::vector<schedule::Algorithm> out;
  for (const schedule::Piece& piece : layout.pieces)
    out.push_back(schedule::algorithm_for(plan, piece.elements * schedule::kElementBytes, choice));
  return out;
}

namespace {

// Connections over which a rank sends at a time, at the most.
uint32_t flows_of(const std::vector<schedule::Algorithm>& algorithms, uint32_t lanes,
                  uint32_t ranks) {
  uint32_t peers = 1;
  for (schedule::Algorithm algorithm : algorithms) {
    if (algorithm == schedule::Algorithm::direct) peers = std::max(peers, ranks - 1);
    if (algorithm == schedule::Algorithm::tree)
      peers = std::max(peers, std::min<uint32_t>(3, ranks - 1));
  }
  return peers * lanes;
}

// What serving the lanes beside the engine's thread changes.
void set_workers(const plan::Plan& plan, const cost::Costs& costs, Network& out,
                 Prediction& notes) {
  bool process = plan.lane_worker == plan::LaneWorker::process;
  if (!process && plan.lane_workers == 1) return;
  out.lane_workers = plan.lane_workers;
  out.copy_ns_per_byte = value_or_zero(costs.copy_ns_per_byte);
  if (!costs.copy_ns_per_byte)
    notes.unknown.push_back("what copying to a lane worker costs: taken as 0");
}

}  // namespace

// What a lab's hosts have to share, those of the cluster that it stands for have of their own.
// What a chunk and a byte cost is not measured for these: it is what the lab's own cost counts as
// in the target's time (docs/lab.md).
void Replayer::Impl::own_processors(Prediction& notes) const {
  auto target_us = [&](double wall_ns) { return environment.to_target_ns(wall_ns) * 1e-3; };
  // A byte of the lab stands for `shrink` of the target's.
  double per_byte = value_or_zero(costs.cpu_ns_per_byte) / environment.shrink;
  notes.assumed.push_back(
      text("every host has %u core%s of its own; a chunk costs it %.1f us and a MB %.1f us, as the "
           "lab's count in the target (docs/lab.md)",
           costs.sending.cores, costs.sending.cores == 1 ? "" : "s",
           target_us(value_or_zero(costs.cpu_ns_per_chunk)), target_us(1e6 * per_byte)));
}

Result<Network> Replayer::Impl::network(const Question& question, const plan::Plan& plan,
                                        uint32_t flows, End end, Prediction& notes) const {
  Network out;
  out.free = question.what_if.free_communication || question.sums_as_measured;
  out.cores = costs.sending.cores;
  out.shared_processor = costs.sending.shared_processor && question.cluster.of == Of::lab;
  out.most_credit_ns = slice_ns(out.cores);
  if (ranks == 1 && !question.cluster.hosts) out.free = true;
  if (out.free) {
    out.link_bytes_per_ns = 1;
    return out;
  }
  Rates rates;
  bool replaced = question.cluster.link_bits_per_s && question.cluster.flow_bits_per_s;
  auto known = recorded_rates(costs, plan.lanes, flows, end, notes);
  if (!known && !replaced) return std::move(known).error();
  if (known) rates = *known;
  change_rates(question.cluster, environment, rates, notes);
  if (question.what_if.no_flow_cap) rates.flow = std::numeric_limits<double>::infinity();
  out.link_bytes_per_ns = rates.link;
  out.flow_bytes_per_ns = std::min(rates.flow, rates.link);
  if (!(rates.flow < rates.link)) out.flow_bytes_per_ns = std::numeric_limits<double>::infinity();
  // A bad connection is one of the recorded cluster, and keeps its number.
  if (!question.cluster.hosts && !question.what_if.no_slow_lanes && !question.what_if.no_flow_cap)
    for (const cost::Costs::SlowLane& slow : costs.slow_lanes)
      if (slow.lane < plan.lanes)
        out.odd_lanes.push_back(
            {slow.from, slow.to, slow.lane, slow.bytes_per_s.value * 1e-9, -1, 0});
  const cost::Costs::Sending& sending = costs.sending;
  out.packet_bytes = sending.packet_bytes;
  out.queue_bytes = sending.queue_bytes;
  out.flow_burst_bytes = sending.flow_burst_bytes;
  out.link_burst_bytes = sending.link_burst_bytes;
  out.shaped = sending.shaped;
  if (question.what_if.no_overhead) return out;
  out.latency_ns = nanos(costs.round_trip_idle_ns, 0.5);
  out.hand_over_ns = nanos(costs.hand_over_ns);
  // Measured from the farthest rank to rank 0, and back.
  const schedule::Tree recorded_tree = tree_of(ranks);
  const double level = 1.0 / std::max(1u, recorded_tree.depth());
  out.report_ns = nanos(costs.report_ns, level);
  out.begin_ns = nanos(costs.begin_ns, level);
  out.wake_up_ns = nanos(costs.wake_up_ns);
  out.send_ns_per_chunk = out.receive_ns_per_chunk = value_or_zero(costs.cpu_ns_per_chunk) / 2;
  out.send_ns_per_byte = out.receive_ns_per_byte = value_or_zero(costs.cpu_ns_per_byte) / 2;
  out.reduce_ns_per_byte = value_or_zero(costs.reduce_ns_per_byte);
  // Whatever made compute wait may do as much to the threads that communicate.
  if (end == End::slow)
    for (double* each : {&out.send_ns_per_chunk, &out.receive_ns_per_chunk, &out.send_ns_per_byte,
                         &out.receive_ns_per_byte, &out.reduce_ns_per_byte})
      *each *= 1 + waits_for_others;
  if (sending.shared_processor && !out.shared_processor) own_processors(notes);
  out.below_in_delays = recorded_tree.below(0);
  set_workers(plan, costs, out, notes);
  if (!costs.round_trip_idle_ns) notes.unknown.push_back("the latency of a message: taken as 0");
  if (!costs.cpu_ns_per_chunk)
    notes.unknown.push_back("what a chunk costs the processor: taken as 0");
  return out;
}

// Ranks that share a host do so in the order of steps only: in the network of a replay every rank
// has a link of its own. A cluster of another number of hosts has one rank on each.
std::vector<uint32_t> Replayer::Impl::hosts_for(const Cluster& cluster) const {
  if (!cluster.hosts && host_of.size() == ranks) return host_of;
  std::vector<uint32_t> own(cluster.hosts.value_or(ranks));
  std::iota(own.begin(), own.end(), 0u);
  return own;
}

Result<Job> Replayer::Impl::job(const Question& question,
                                std::vector<std::vector<graph::LayerTimes>>& made) const {
  const WhatIf& what_if = question.what_if;
  const auto& [iterations, typical] = compute_for(question);
  if (what_if.healed && what_if.healed->index >= ranks)
    return error(Code::invalid_argument, "rank %u cannot be healed: there are %u",
                 what_if.healed->index, ranks);
  Job out;
  out.host_of = hosts_for(question.cluster);
  out.ranks = static_cast<uint32_t>(out.host_of.size());
  out.fan_out = tree_of(out.ranks).fan_out;
  out.iterations =
      question.iterations > 0
          ? question.iterations
          : std::max<uint32_t>(kLeastIterations,
                               static_cast<uint32_t>(iterations.size()) + kWarmUpIterations);
  out.model = &model;
  if (question.sums_as_measured && !what_if.free_communication) out.taken = &taken;
  if (what_if.healed && ranks > 1) {
    std::vector<uint32_t> others;
    for (uint32_t r = 0; r < ranks; ++r)
      if (r != what_if.healed->index) others.push_back(r);
    for (const graph::Iteration& iteration : iterations)
      made.push_back(median_layers(iteration, others, model.layers.size()));
  }
  out.compute.resize(out.ranks);
  for (uint32_t r = 0; r < out.ranks; ++r) {
    bool healed = what_if.healed && what_if.healed->index == r && !made.empty();
    bool typical_rank = what_if.no_stragglers || r >= ranks;
    for (size_t i = 0; i < iterations.size(); ++i)
      out.compute[r].push_back(healed         ? &made[i]
                               : typical_rank ? &typical[i]
                                              : &iterations[i].layers[r]);
  }
  return out;
}

namespace {

// Messages that a rank sends for a piece, and bytes, at the most.
struct Traffic {
  double messages = 0;
  double bytes = 0;
};

Traffic traffic_of(const schedule::Piece& piece, schedule::Algorithm algorithm, double ranks,
                   double chunk) {
  double elements = static_cast<double>(piece.elements);
  double bytes = elements * schedule::kElementBytes;
  double rounds = std::floor(std::log2(ranks));
  double in_parts = 2 * std::ceil(elements / ranks / chunk) * ranks;  // of p nearly equal ones
  double whole = std::ceil(elements / chunk);
  switch (algorithm) {
    case schedule::Algorithm::halving_doubling: return {4 * whole + 2 * rounds + 2, 4 * bytes};
    case schedule::Algorithm::tree: return {2 * whole + 4, 2 * bytes};
    case schedule::Algorithm::doubling: return {(rounds + 1) * whole, (rounds + 1) * bytes};
    default: return {in_parts, 2 * bytes};
  }
}

// Messages that a rank sends in one iteration, and bytes.
Traffic traffic_of(const schedule::Layout& layout,
                   const std::vector<schedule::Algorithm>& algorithms, double ranks) {
  Traffic all;
  for (size_t i = 0; i < layout.pieces.size(); ++i) {
    Traffic own = traffic_of(layout.pieces[i], algorithms[i], ranks,
                             static_cast<double>(layout.chunk_elements));
    all.messages += own.messages;
    all.bytes += own.bytes;
  }
  return all;
}

// Why a job of many ranks is not folded; null when it can be.
const char* unfoldable(const Job& job, const std::vector<schedule::Algorithm>& algorithms,
                       const Network& network, bool recording) {
  if (recording) return "a trace has the events of every rank: without one, ranks fold";
  if (network.shared_processor)
    return "in a lab every rank counts: the target's answer can be had for more";
  if (hosts_in(job.host_of) != job.ranks) return "ranks fold where each has its own host";
  if (!network.odd_lanes.empty()) return "ranks fold where no lane is slower than the others";
  for (schedule::Algorithm algorithm : algorithms)
    if (!folds(algorithm, job.ranks))
      return "ranks fold under ring or direct, and under halving_doubling or doubling if their "
             "number is a power of two: ask for a plan with one of these";
  return nullptr;
}

// One rank for all, and a device for each way to compute. Where an iteration has very many
// messages, fewer iterations.
void fold(Job& job, const Traffic& of_iteration, bool may_shorten, Prediction& notes) {
  notes.folded = true;
  notes.assumed.push_back(text("one rank stands for all %u", job.ranks));
  auto compute = std::move(job.compute);
  job.compute.clear();
  for (auto& own : compute) {
    if (job.compute.empty() || job.compute.back() != own) {
      job.compute.push_back(std::move(own));
      job.alike.push_back(0);
    }
    ++job.alike.back();
  }
  double most = std::max<double>(kLeastIterations, kFoldedMessages / of_iteration.messages);
  if (!may_shorten || job.iterations <= most) return;
  auto few = static_cast<uint32_t>(most);
  notes.assumed.push_back(
      text("%u iterations stand for the %u that would be simulated for fewer hosts", few,
           job.iterations));
  job.iterations = few;
}

// A file may say anything: what would take for ever, or all memory, or more nanoseconds than can be
// counted, is refused before it starts.
Result<void> bounded(const Job& job, const schedule::Layout& layout,
                     const std::vector<schedule::Algorithm>& algorithms, const Network& network,
                     bool recording, size_t recorded_nodes) {
  constexpr double kMostOperations = 1e8, kLongestNs = 1e17;
  constexpr double kMostAtATime = 2e7;  // of one iteration; each takes memory until it is done
  constexpr uint64_t kMostTracks = 65000;
  constexpr double kMostLooks = 1e9;  // at the connections of a folded rank: each message looks
  // Recorded ones take memory; many ranks one by one take minutes.
  const bool many = job.ranks > kRanksInFull && !job.folded();
  const double most_messages = recording ? 2e7 : many ? 1e7 : 1e8;
  const double ranks = job.folded() ? 1 : job.ranks, iterations = job.iterations;
  const Traffic of_rank = traffic_of(layout, algorithms, job.ranks);
  const double at_a_time = of_rank.messages * ranks;
  const double messages = at_a_time * iterations, bytes = of_rank.bytes * ranks * iterations;
  const double packets = bytes / network.packet_bytes;
  const double parts = std::max(messages, packets);
  const auto nodes = static_cast<double>(recorded_nodes);
  if (!network.free && recorded_nodes > 0 &&
      (messages > std::max(kMessagesFree, kMessagesPerNode * nodes) ||
       packets > std::max(kPacketsFree, kPacketsPerNode * nodes)))
    return error(Code::unsupported,
                 "%.3g messages in %.3g packets are too many to replay for a trace of %zu events: "
                 "it is damaged, or most of it is lost",
                 messages, packets, recorded_nodes);
  double operations = iterations * static_cast<double>(job.compute.size()) *
                      static_cast<double>(layout.pieces.size() + 3 * job.model->layers.size() +
                                          job.model->tensors.size());
  if (!network.free && (parts > most_messages || at_a_time > kMostAtATime)) {
    const char* why = many ? unfoldable(job, algorithms, network, recording) : nullptr;
    return error(Code::unsupported, "%.3g messages are too many to replay (at most %.3g): %s",
                 parts, most_messages,
                 why != nullptr
                     ? text("%u ranks are simulated one by one; %s", job.ranks, why).c_str()
                     : "larger chunks or fewer iterations would do");
  }
  const uint32_t flows = flows_of(algorithms, layout.lanes, job.ranks);
  if (!network.free && job.folded() && messages * flows > kMostLooks)
    return error(Code::unsupported,
                 "%u connections of each rank are too many to replay: ask for fewer lanes, or for "
                 "ring or halving_doubling instead of direct",
                 flows);
  if (recording && 2ull * flows > kMostTracks)
    return error(Code::unsupported, "%u lanes to each of %u ranks are too many to record",
                 layout.lanes, job.ranks - 1);
  if (operations > kMostOperations)
    return error(Code::unsupported, "%.3g operations are too many to replay (at most %.3g)",
                 operations, kMostOperations);
  double longest = 0;
  for (const auto& recorded : job.compute) {
    double sum = 0;
    for (const std::vector<graph::LayerTimes>* layers : recorded)
      for (const graph::LayerTimes& layer : *layers)
        sum += static_cast<double>(layer.forward_ns) + static_cast<double>(layer.backward_ns) +
               static_cast<double>(layer.update_ns) +
               static_cast<double>(layer.gap_before_forward_ns) +
               static_cast<double>(layer.gap_before_backward_ns) +
               static_cast<double>(layer.gap_before_update_ns) +
               static_cast<double>(layer.before_wait_ns);
    longest = std::max(longest, sum / static_cast<double>(recorded.size()) * iterations);
  }
  if (job.taken != nullptr)
    for (const auto& buckets : *job.taken)
      for (const std::vector<int64_t>& by_rank : buckets)
        longest += static_cast<double>(*std::max_element(by_rank.begin(), by_rank.end())) *
                   iterations / static_cast<double>(job.taken->size());
  if (!network.free)
    longest += bytes / std::min(network.link_bytes_per_ns, network.flow_bytes_per_ns) +
               messages * (network.send_ns_per_chunk + network.receive_ns_per_chunk) +
               bytes * (network.send_ns_per_byte + network.receive_ns_per_byte +
                        network.reduce_ns_per_byte);
  if (!(longest < kLongestNs))
    return error(Code::unsupported,
                 "the run would take %.3g s: times or rates in the trace make "
                 "no sense",
                 longest * 1e-9);
  return {};
}

}  // namespace

Result<Simulated> Replayer::Impl::simulated(const Question& question, const plan::Plan& plan,
                                            End end, Prediction& notes,
                                            Recording* recording) const {
  plan::Plan sized = schedule::scaled(plan, environment.shrink);
  WEFT_ASSIGN(schedule::Layout layout, schedule::make_layout(sized, tensors));
  std::vector<std::vector<graph::LayerTimes>> made;
  WEFT_ASSIGN(Job work, job(question, made));
  std::vector<schedule::Algorithm> chosen = algorithms(sized, layout, work, notes);
  WEFT_ASSIGN(Network net,
              network(question, sized, flows_of(chosen, layout.lanes, work.ranks), end, notes));
  if (work.ranks == 1) net.free = true;
  if (work.taken == nullptr && work.ranks > kRanksInFull &&
      unfoldable(work, chosen, net, recording != nullptr) == nullptr)
    fold(work, traffic_of(layout, chosen, work.ranks), question.iterations == 0, notes);
  const bool as_recorded = !question.plan && !question.cluster.hosts;
  WEFT_TRY(bounded(work, layout, chosen, net, recording != nullptr, as_recorded ? nodes : 0));
  Simulated run = simulate(work, layout, chosen, net, recording);
  // A time that nothing took is no answer.
  for (const std::vector<int64_t>& starts : run.starts)
    if (starts.size() < 2)
      return error(Code::unsupported,
                   "the replay of plan \"%s\" stood still before its first iteration was over, "
                   "which is a fault of weft: please report it with the trace",
                   sized.name.c_str());
  if (!work.folded()) return run;
  // Ranks that compute alike end alike.
  std::vector<std::vector<int64_t>> starts;
  std::vector<double> computing_ns;
  for (size_t i = 0; i < work.alike.size(); ++i) {
    starts.insert(starts.end(), work.alike[i], run.starts[i]);
    computing_ns.insert(computing_ns.end(), work.alike[i], run.computing_ns[i]);
  }
  run.starts = std::move(starts);
  run.computing_ns = std::move(computing_ns);
  return run;
}

namespace {

// Fills in the times of the iterations that count.
void summarize(const Simulated& run, Prediction& out) {
  double slowest = -1;
  for (const std::vector<int64_t>& starts : run.starts) {
    std::vector<double> own;
    size_t first = starts.size() > kWarmUpIterations + 2 ? kWarmUpIterations : 0;
    for (size_t i = first; i + 1 < starts.size(); ++i)
      own.push_back(static_cast<double>(starts[i + 1] - starts[i]));
    double median = own.empty() ? 0 : quantile(own, 0.5);
    out.of_rank_ns.push_back(median);
    if (median > slowest) {
      slowest = median;
      out.iterations_ns = std::move(own);
    }
  }
  out.iteration_ns = out.low_ns = out.high_ns = std::max(slowest, 0.0);
  out.events = run.events;
  out.processor_busy = run.processor_busy;
  out.order = run.order;
}

}  // namespace

// The interval: what the fit's own spread does to the answer, how far measured iterations lie
// apart, how well the recorded plan replays, and what the model is known to miss.
void Replayer::Impl::widen(const Question& question, const plan::Plan& plan,
                           Prediction& prediction) const {
  double value = prediction.iteration_ns;
  if (!(value > 0)) return;
  double fast = value, slow = value;
  Prediction ignored;
  for (End end : {End::fast, End::slow}) {
    Prediction other;
    auto run = simulated(question, plan, end, ignored, nullptr);
    if (!run) {
      prediction.unknown.push_back(text("what the spread of the constants does to the answer: %s",
                                        run.error().message().c_str()));
      continue;
    }
    summarize(*run, other);
    fast = std::min(fast, other.iteration_ns);
    slow = std::max(slow, other.iteration_ns);
  }
  double spread = 0;
  if (!measured.of_slowest_ns.empty()) {
    double median = quantile(measured.of_slowest_ns, 0.5);
    if (median > 0)
      spread = (quantile(measured.of_slowest_ns, 0.75) - quantile(measured.of_slowest_ns, 0.25)) /
               2 / median;
  }
  if (fidelity.unknown)
    prediction.unknown.push_back("how well the recorded plan replays: " +
                                 fidelity.unknown->message());
  double busy = std::max(0.0, prediction.processor_busy - kBusy);
  if (busy > 0)
    prediction.assumed.push_back(
        text("communication keeps the processors %.0f %% busy: it may take longer than predicted",
             100 * prediction.processor_busy));
  const bool unseen = !sums_by.empty() && !question.sums_as_measured;
  if (unseen)
    prediction.unknown.push_back(
        text("how well sums over weft replay here: %s carried them in "
             "this run, so they are known from the probe alone",
             sums_by.c_str()));
  if (unseen && waits_for_others > kModelError)
    prediction.unknown.push_back(
        text("what other programs on the machine take: forward and update waited %.2f s for each "
             "second that they had a core, beside no sums and for no thread of the job. Compute is "
             "predicted to wait as much again, the sums not at all, and the interval holds as much "
             "either way; record and probe when nothing else runs",
             waits_for_others));
  const double unseen_error = unseen ? kUnseenSumsError : 0;
  const double others_error = unseen ? waits_for_others_ns / value : 0;
  auto together = [&](double fit) {
    double fidelity_error = fidelity.error_percent / 100,
           model_error = kModelError + kBusyError * busy + unseen_error,
           fold_error = prediction.folded ? kFoldError : 0;
    return std::sqrt(fit * fit + spread * spread + fidelity_error * fidelity_error +
                     model_error * model_error + fold_error * fold_error +
                     others_error * others_error);
  };
  prediction.low_ns = value * std::max(0.0, 1 - together((value - fast) / value));
  prediction.high_ns = value * (1 + together((slow - value) / value));
}

Result<Prediction> Replayer::Impl::predict(const Question& question) const {
  Prediction out;
  const plan::Plan& plan = question.plan ? *question.plan : recorded;
  WEFT_TRY(plan::validate(plan));
  if (question.sums_as_measured && sums_by.empty())
    return error(Code::invalid_argument, "weft carried the sums of this run, by its plan");
  if (question.sums_as_measured &&
      (question.plan || question.cluster.hosts || question.cluster.link_bits_per_s ||
       question.cluster.flow_bits_per_s))
    return error(Code::invalid_argument,
                 "sums as they were measured are those of the recorded run: no plan and no other "
                 "cluster can be asked for with them");
  std::optional<Recording> recording;
  if (question.make_trace)
    recording.emplace(environment, model, plan, hosts_for(question.cluster), plan.lanes);
  WEFT_ASSIGN(Simulated run,
              simulated(question, plan, End::middle, out, recording ? &*recording : nullptr));
  summarize(run, out);
  if (recording) out.trace = std::move(*recording).take();
  if (question.interval) widen(question, plan, out);
  return out;
}

namespace {

// Calls f(how long it lasted, processor time of that, its idle share) for each piece of a layer's
// compute.
template <typename Share, typename F>
void for_each_part(graph::LayerTimes& layer, Share& share, F&& f) {
  f(layer.forward_ns, layer.forward_cpu_ns, share.other);
  f(layer.backward_ns, layer.backward_cpu_ns, share.backward);
  f(layer.update_ns, layer.update_cpu_ns, share.other);
}

// Time that pieces of compute lasted beside their processor time, and that.
struct Lasted {
  double beside = 0;
  double processor = 0;
};
struct LastedByPart {
  Lasted backward, other;
};

}  // namespace

// A recorded piece of compute lasted for as long as it had a core, for as long as it waited for one
// and for as long as it waited for something else. The simulation says the second for any plan. How
// much it says of the recorded one tells it from the third, which stays as it was.
//
// What somebody else's sums took of the cores cannot be simulated. Beside forward and update there
// are none of them: what these wait for is what backward would wait for without.
void Replayer::Impl::find_idle_shares() {
  const std::vector<graph::Iteration> recorded_iterations = compute.iterations;
  Question same;
  same.cluster.of = Of::lab;  // where it was measured
  same.iterations = fidelity_iterations();
  same.what_if.free_communication = !sums_by.empty();
  std::vector<LastedByPart> parts(ranks);
  bool known = false;
  for (uint32_t i = 0; i < same.iterations; ++i)
    for (uint32_t r = 0; r < ranks; ++r)
      for (graph::LayerTimes layer : recorded_iterations[i % recorded_iterations.size()].layers[r])
        for_each_part(layer, parts[r], [&](int64_t lasted, int64_t used, Lasted& of) {
          known = known || used >= 0;
          const int64_t own = used < 0 ? lasted : std::min(used, lasted);
          of.processor += static_cast<double>(own);
          of.beside += static_cast<double>(lasted - own);
        });
  if (!known) return;
  idle_shares.assign(ranks, {});
  set_compute(recorded_iterations);
  Prediction notes;
  auto run = simulated(same, recorded, End::middle, notes, nullptr);
  for (uint32_t r = 0; r < ranks; ++r) {
    const auto& [backward, other] = parts[r];
    const double alone = backward.processor + other.processor;
    const double explained = run ? run->computing_ns[r] - alone : 0;
    auto share_of = [](double idle, double beside) {
      return beside > 0 ? std::clamp(idle / beside, 0.0, 1.0) : 0;
    };
    if (sums_by.empty()) {
      const double beside = backward.beside + other.beside;
      idle_shares[r].backward = idle_shares[r].other = share_of(beside - explained, beside);
      continue;
    }
    const double idle =
        std::max(0.0, other.beside - (alone > 0 ? explained / alone * other.processor : 0));
    idle_shares[r].other = share_of(idle, other.beside);
    if (!(other.processor > 0)) continue;
    idle_shares[r].backward =
        share_of(idle / other.processor * backward.processor, backward.beside);
    waits_for_others = std::max(waits_for_others, idle / other.processor);
    waits_for_others_ns =
        std::max(waits_for_others_ns, (idle + idle_shares[r].backward * backward.beside) /
                                          static_cast<double>(same.iterations));
  }
  set_compute(recorded_iterations);
}

void Replayer::Impl::set_compute(std::vector<graph::Iteration> counted) {
  if (!sums_by.empty())
    beside_taken = compute_of(as_it_lasted(counted), ranks, model.layers.size());
  for (graph::Iteration& iteration : counted)
    for (uint32_t r = 0; r < idle_shares.size(); ++r)
      for (graph::LayerTimes& layer : iteration.layers[r])
        for_each_part(layer, idle_shares[r], [](int64_t& lasted, int64_t& used, double share) {
          if (used < 0) return;
          used = std::min(used, lasted);
          lasted = used + static_cast<int64_t>(share * static_cast<double>(lasted - used));
        });
  compute = compute_of(std::move(counted), ranks, model.layers.size());
  std::vector<double> sums;
  for (const std::vector<graph::LayerTimes>& layers : compute.typical) {
    double sum = 0;
    for (const graph::LayerTimes& layer : layers)
      sum += static_cast<double>(layer.forward_ns + layer.backward_ns + layer.update_ns);
    sums.push_back(sum);
  }
  compute_ns = quantile(sums, 0.5);
}

// ---- the public face ---------------------------------------------------------------------

Replayer::Replayer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Replayer::Replayer(Replayer&&) noexcept = default;
Replayer& Replayer::operator=(Replayer&&) noexcept = default;
Replayer::~Replayer() = default;

Result<Replayer> Replayer::make(const graph::Graph& graph, const cost::Costs& costs) {
  WEFT_ASSIGN(Replayer best, with_costs(graph, costs));
  // What the run's messages are said to know better than its probe must show in the run itself.
  auto miss = [](const Replayer& one) {
    return one.fidelity().unknown ? std::numeric_limits<double>::infinity()
                                  : std::abs(one.fidelity().error_percent);
  };
  for (const cost::Costs& other : cost::without_corrections(costs)) {
    auto replayer = with_costs(graph, other);
    if (replayer && miss(*replayer) < miss(best)) best = std::move(*replayer);
  }
  return best;
}

Result<Replayer> Replayer::with_costs(const graph::Graph& graph, const cost::Costs& costs) {
  auto impl = std::make_unique<Impl>();
  impl->environment = graph.environment;
  impl->model = graph.model;
  impl->ranks = graph.ranks;
  impl->host_of = graph.host_of;
  impl->nodes = graph.nodes.size();
  impl->costs = costs;
  if (graph.iterations.empty() || graph.ranks == 0)
    return error(Code::unsupported, "no iteration is whole on all ranks: nothing to replay");
  if (graph.model.layers.empty())
    return error(Code::unsupported, "the trace has no layers: nothing to replay");
  auto plan = plan::parse(graph.environment.plan_text);
  if (!plan) return std::move(plan).error().in("the plan inside the trace");
  impl->recorded = std::move(*plan);
  for (const trace::Tensor& tensor : graph.model.tensors) {
    impl->tensors.push_back(
        {tensor.name, tensor.bytes / schedule::kElementBytes, tensor.consumed_by});
    impl->gradient_bytes += static_cast<double>(tensor.bytes);
  }
  impl->sums_by = graph.sums_by;
  impl->set_compute({graph.iterations.begin() + static_cast<ptrdiff_t>(graph.first_counted()),
                     graph.iterations.end()});
  impl->measured = graph::iteration_times(graph);
  if (!impl->sums_by.empty()) {
    WEFT_ASSIGN(const schedule::Layout layout,
                schedule::make_layout(schedule::scaled(impl->recorded, impl->environment.shrink),
                                      impl->tensors));
    WEFT_ASSIGN(impl->taken, taken_by_sums(graph, layout));
  }

  impl->find_idle_shares();

  // Fidelity first: the recorded plan, replayed like any other.
  Question same;
  same.cluster.of = Of::lab;  // where it was measured
  same.sums_as_measured = !impl->sums_by.empty();
  same.make_trace = true;
  same.interval = false;
  same.iterations = impl->fidelity_iterations();
  impl->fidelity.measured_ns = quantile(impl->measured.of_slowest_ns, 0.5);
  impl->fidelity.sums_as_measured = same.sums_as_measured;
  auto replayed = impl->predict(same);
  if (!replayed) {
    impl->fidelity.unknown = std::move(replayed).error();
    return Replayer(std::move(impl));
  }
  auto again = graph::build(*replayed->trace);
  if (!again) return std::move(again).error().in("the replay of the recorded plan");
  impl->fidelity = compare(graph, *again);
  impl->fidelity.sums_as_measured = same.sums_as_measured;
  return Replayer(std::move(impl));
}

Replayer Replayer::with_compute(std::vector<graph::Iteration> counted) const {
  WEFT_CHECK(!counted.empty());
  auto other = std::make_unique<Impl>(*impl_);
  other->set_compute(std::move(counted));
  return Replayer(std::move(other));
}

Result<Prediction> Replayer::predict(const Question& question) const {
  return impl_->predict(question);
}
const Fidelity& Replayer::fidelity() const { return impl_->fidelity; }
const plan::Plan& Replayer::recorded_plan() const { return impl_->recorded; }
const std::string& Replayer::sums_by() const { return impl_->sums_by; }
const trace::Environment& Replayer::environment() const { return impl_->environment; }
const trace::Model& Replayer::model() const { return impl_->model; }
uint32_t Replayer::ranks() const { return impl_->ranks; }
uint32_t Replayer::hosts() const { return hosts_in(impl_->hosts_for({})); }
double Replayer::measured_iteration_ns() const { return impl_->fidelity.measured_ns; }
double Replayer::measured_low_ns() const { return quantile(impl_->measured.of_slowest_ns, 0.25); }
double Replayer::measured_high_ns() const { return quantile(impl_->measured.of_slowest_ns, 0.75); }
const cost::Costs& Replayer::costs() const { return impl_->costs; }
double Replayer::compute_ns() const { return impl_->compute_ns; }
double Replayer::gradient_bytes() const { return impl_->gradient_bytes; }

std::optional<double> Replayer::floor_ns() const {
  if (impl_->ranks == 1) return impl_->compute_ns;
  if (!impl_->costs.link_bytes_per_s) return std::nullopt;
  return 1e9 * cost::iteration_floor_seconds(impl_->compute_ns * 1e-9, impl_->gradient_bytes,
                                             impl_->ranks, impl_->costs.link_bytes_per_s->value);
}

}  // namespace weft::replay
