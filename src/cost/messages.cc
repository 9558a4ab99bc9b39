#include "messages.h"

#include <algorithm>
#include <charconv>
#include <compare>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

namespace weft::cost {
namespace {

using trace::Event;
using trace::Kind;
using trace::Process;
using trace::Shape;

// A chunk that was handed to its lane this long before the one ahead of it had arrived was waiting
// for the lane, not the lane for it.
constexpr int64_t kQueuedBefore = 200'000;
// Fewer back-to-back arrivals than this say nothing about a rate; a lane that carries far less than
// the others has far fewer, each of them longer.
constexpr size_t kEnoughArrivals = 50, kEnoughSlowArrivals = 10;
// Among fewer lanes of a rank none can be told from a usual one.
constexpr size_t kEnoughLanes = 3;
// A lane's own messages overrule the probe only where no link, that of the sender or that of the
// receiver, held the lanes back.
constexpr double kLinkNotFull = 0.9;
// How long a host must have moved data at a rate for its link to be said to carry it: what piled up
// while a thread was held up comes faster than that, but not for so long. Longer stretches are
// looked at too, because a chunk counts only in those that it lies in whole.
constexpr int64_t kSustained = 50'000'000;
constexpr int kDoublings = 5;
constexpr int64_t kStepsPerStretch = 4;  // stretches overlap
constexpr size_t kEnoughStretches = 20;
// A run that carried this much more than its probe was probed in a bad moment.
constexpr double kMoreThanProbed = 1.1;

int64_t difference(int64_t a, int64_t b) {
  int64_t out = 0;
  // Times lie within 2^62 of zero (trace::flaw_of), so this cannot overflow for a whole file.
  if (__builtin_sub_overflow(a, b, &out)) return 0;
  return out;
}

// ---- rates of lanes ------------------------------------------------------------------------

struct Transfer {
  int64_t sent = 0;      // first byte handed to the kernel
  int64_t received = 0;  // last byte taken
  uint64_t bytes = 0;
};

// A lane from one rank to another.
struct LaneId {
  uint32_t from;
  uint32_t to;
  uint16_t lane;
  friend auto operator<=>(const LaneId&, const LaneId&) = default;
};

// Messages by lane, in the order of arrival.
using Transfers = std::map<LaneId, std::vector<Transfer>>;

Transfers transfers(const trace::Trace& trace) {
  std::unordered_map<uint64_t, std::pair<uint32_t, const Event*>> sends;
  for (const Process& process : trace.processes)
    for (const Event& event : process.events)
      if (event.shape == Shape::send && event.kind == Kind::chunk &&
          event.iteration != trace::kNone)
        sends.emplace(event.message, std::pair(process.environment.rank, &event));
  Transfers by_lane;
  for (const Process& process : trace.processes)
    for (const Event& event : process.events) {
      if (event.shape != Shape::receive || event.kind != Kind::chunk) continue;
      auto send = sends.find(event.message);
      if (send == sends.end() || send->second.first == process.environment.rank) continue;
      by_lane[{send->second.first, process.environment.rank, event.lane}].push_back(
          {send->second.second->start_ns, event.end_ns(), event.bytes});
    }
  for (auto& [lane, list] : by_lane)
    std::sort(list.begin(), list.end(),
              [](const Transfer& a, const Transfer& b) { return a.received < b.received; });
  return by_lane;
}

// What surely passed during the busiest tenth of the stretches of one length: bytes that were
// handed to a lane after the stretch had begun and were taken from it before it ended. What was
// under way at either end may have passed before or after, and does not count, so this is never too
// much. A shaper lets `burst` bytes more pass than the link carries.
std::optional<Fitted> surely_carried(const std::vector<Transfer>& moved, int64_t length,
                                     double burst) {
  const int64_t step = length / kStepsPerStretch;
  auto floor_div = [&](int64_t at) { return at / step - (at % step < 0 ? 1 : 0); };
  std::unordered_map<int64_t, double> bytes;  // by first step
  for (const Transfer& one : moved) {
    // Every stretch of which a part was used is a sample, also if nothing lies in it whole.
    for (int64_t first = floor_div(one.received) - kStepsPerStretch + 1,
                 last = floor_div(one.received);
         first <= last; ++first) {
      bool whole = first * step <= one.sent && one.received <= first * step + length;
      bytes[first] += whole ? static_cast<double>(one.bytes + kHeaderBytes) : 0;
    }
  }
  if (bytes.size() < kEnoughStretches * kStepsPerStretch) return std::nullopt;
  std::vector<double> rates;
  rates.reserve(bytes.size());
  for (const auto& [first, sum] : bytes)
    rates.push_back(std::max(0.0, sum - burst) / static_cast<double>(length) * 1e9);
  return Fitted{quantile(rates, 0.9), quantile(rates, 0.85), quantile(rates, 0.95),
                static_cast<uint32_t>(rates.size())};
}

// What the busiest rank sent or took in. What stays inside a host says nothing about a link, unless
// there is but one host.
std::optional<Fitted> carried(const trace::Trace& trace, const Transfers& by_lane, double burst) {
  std::map<uint32_t, uint32_t> host_of;
  std::set<uint32_t> hosts;
  for (const Process& process : trace.processes) {
    host_of[process.environment.rank] = process.environment.host_index;
    hosts.insert(process.environment.host_index);
  }
  std::map<std::pair<uint32_t, bool>, std::vector<Transfer>> moved;  // by rank, out or in
  for (const auto& [lane, list] : by_lane) {
    if (hosts.size() > 1 && host_of[lane.from] == host_of[lane.to]) continue;
    for (bool in : {false, true}) {
      auto& all = moved[{in ? lane.to : lane.from, in}];
      all.insert(all.end(), list.begin(), list.end());
    }
  }
  std::optional<Fitted> most;
  for (const auto& [side, transfers_of_side] : moved) {
    int64_t length = kSustained;
    for (int i = 0; i <= kDoublings; ++i, length *= 2) {
      auto rate = surely_carried(transfers_of_side, length, burst);
      if (!rate) break;  // the run is too short for longer ones as well
      if (!most || rate->value > most->value) most = rate;
    }
  }
  return most;
}

struct LaneRate {
  LaneId lane;
  double bytes_per_s = 0;
  size_t arrivals = 0;
};

// Parts the lanes of one sender: those that are like one another give `rates`.
void tell_slow(const std::vector<LaneRate>& lanes, std::vector<double>& rates, Costs& costs) {
  std::vector<double> usual;
  for (const LaneRate& each : lanes)
    if (each.arrivals >= kEnoughArrivals) usual.push_back(each.bytes_per_s);
  const double typical = usual.empty() ? 0 : quantile(usual, 0.5);
  for (const LaneRate& each : lanes) {
    if (lanes.size() >= kEnoughLanes && each.bytes_per_s < kSlowLane * typical) {
      Fitted rate{each.bytes_per_s, each.bytes_per_s, each.bytes_per_s,
                  static_cast<uint32_t>(each.arrivals)};
      costs.slow_lanes.push_back({each.lane.from, each.lane.to, each.lane.lane, rate, typical});
    } else if (each.arrivals >= kEnoughArrivals) {
      rates.push_back(each.bytes_per_s);
    }
  }
}

void fit_lanes(const trace::Trace& trace, Costs& costs) {
  const Transfers by_lane = transfers(trace);
  const std::optional<Fitted> seen = carried(trace, by_lane, costs.sending.link_burst_bytes);
  if (seen && costs.link_bytes_per_s &&
      seen->value > kMoreThanProbed * costs.link_bytes_per_s->value)
    costs.probed_link_bytes_per_s = std::exchange(costs.link_bytes_per_s, seen);
  std::map<uint32_t, std::vector<LaneRate>> measured;  // by sender
  uint16_t lanes = 0;
  std::map<uint32_t, uint32_t> out_of, into;  // connections by rank
  for (const auto& [lane, list] : by_lane) {
    if (lane.lane != trace::kNone16) lanes = std::max<uint16_t>(lanes, lane.lane + 1);
    costs.connections = std::max({costs.connections, ++out_of[lane.from], ++into[lane.to]});
    double bytes = 0, ns = 0;
    size_t count = 0;
    for (size_t i = 1; i < list.size(); ++i) {
      if (difference(list[i - 1].received, list[i].sent) < kQueuedBefore) continue;
      bytes += static_cast<double>(list[i].bytes + kHeaderBytes);
      ns += static_cast<double>(difference(list[i].received, list[i - 1].received));
      ++count;
    }
    if (count >= kEnoughSlowArrivals && ns > 0)
      measured[lane.from].push_back({lane, bytes / ns * 1e9, count});
  }
  std::vector<double> rates;
  for (const auto& [sender, of_sender] : measured) tell_slow(of_sender, rates, costs);
  costs.lane_bytes_per_s = summary(rates);
  costs.lanes = lanes;
  if (!costs.lane_bytes_per_s || !costs.flow_bytes_per_s || !costs.link_bytes_per_s) return;
  if (costs.connections * costs.lane_bytes_per_s->value <
      kLinkNotFull * costs.link_bytes_per_s->value)
    costs.probed_flow_bytes_per_s = std::exchange(costs.flow_bytes_per_s, costs.lane_bytes_per_s);
}

// ---- delays --------------------------------------------------------------------------------

struct BucketStep {
  uint32_t bucket;
  uint32_t iteration;
  auto operator<=>(const BucketStep&) const = default;
};

struct Delays {
  std::vector<double> hand_over, report, begin, wake_up;
};

void collect_rank(const Process& process, std::map<BucketStep, int64_t>& complete, Delays& delays) {
  std::map<std::pair<uint32_t, uint32_t>, int64_t> backward_end;  // by iteration, layer
  std::map<std::pair<uint32_t, uint32_t>, int64_t> done;          // by iteration, tensor
  for (const Event& event : process.events) {
    if (event.kind == Kind::backward) backward_end[{event.iteration, event.layer}] = event.end_ns();
    if (event.kind == Kind::tensor_done) done[{event.iteration, event.tensor}] = event.start_ns;
  }
  for (const Event& event : process.events) {
    if (event.kind == Kind::gradient_ready) {
      int64_t& last =
          complete.try_emplace({event.bucket, event.iteration}, event.start_ns).first->second;
      last = std::max(last, event.start_ns);
      auto produced = backward_end.find({event.iteration, event.layer});
      if (produced != backward_end.end())
        if (int64_t late = difference(event.start_ns, produced->second); late >= 0)
          delays.hand_over.push_back(static_cast<double>(late));
    } else if (event.kind == Kind::wait) {
      // Only where it did wait: the sum came within the span.
      auto sum = done.find({event.iteration, event.tensor});
      if (sum == done.end() || sum->second < event.start_ns || sum->second > event.end_ns())
        continue;
      delays.wake_up.push_back(static_cast<double>(difference(event.end_ns(), sum->second)));
    }
  }
}

void fit_delays(const trace::Trace& trace, Costs& costs) {
  Delays delays;
  std::map<BucketStep, int64_t> complete;  // when the last rank had it
  for (const Process& process : trace.processes) collect_rank(process, complete, delays);
  std::map<uint32_t, int64_t> admitted;  // by operation
  for (const Process& process : trace.processes)
    for (const Event& event : process.events) {
      if (event.kind != Kind::admitted) continue;
      admitted[event.operation] = event.start_ns;
      // Behind another operation it may have waited for credit; the first of its bucket that comes
      // right away did not.
      auto ready = complete.find({event.bucket, event.iteration});
      if (ready == complete.end() || event.partition != 0) continue;
      if (int64_t late = difference(event.start_ns, ready->second); late >= 0)
        delays.report.push_back(static_cast<double>(late));
    }
  for (const Process& process : trace.processes) {
    if (process.environment.rank == 0) continue;
    for (const Event& event : process.events) {
      if (event.kind != Kind::operation) continue;
      auto when = admitted.find(event.operation);
      if (when != admitted.end())
        delays.begin.push_back(
            std::max(0.0, static_cast<double>(difference(event.start_ns, when->second))));
    }
  }
  costs.hand_over_ns = summary(delays.hand_over);
  costs.begin_ns = summary(delays.begin);
  costs.wake_up_ns = summary(delays.wake_up);
  // Where credit holds most operations back, those that it did not are the quickest ones.
  if (!delays.report.empty()) {
    const double quick = quantile(delays.report, 0.1);
    std::erase_if(delays.report, [&](double ns) { return ns > 4 * quick; });
    costs.report_ns = summary(delays.report);
  }
}

// ---- recorded facts ------------------------------------------------------------------------

std::optional<double> number(const std::map<std::string, std::string>& facts, const char* key) {
  auto found = facts.find(key);
  if (found == facts.end()) return std::nullopt;
  double value = 0;
  const std::string& written = found->second;
  auto [end, failure] = std::from_chars(written.data(), written.data() + written.size(), value);
  if (failure != std::errc() || !(value >= 0) || value > 1e15) return std::nullopt;
  return value;
}

void read_facts(const trace::Trace& trace, Costs& costs) {
  if (trace.processes.empty()) return;
  const trace::Environment& environment = trace.processes.front().environment;
  Costs::Sending& sending = costs.sending;
  sending.cores = std::clamp(environment.cores, 1u, 4096u);
  // The lab's hosts are all on one machine, whether what runs there is emulated or real.
  sending.shared_processor =
      environment.emulated_compute || environment.lab.contains("lab.confinement");
  // Packets below a page's worth would only make replay slow.
  constexpr double kLeastPacket = 4096;
  if (auto bytes = number(environment.lab, "lab.gso_max_bytes"))
    sending.packet_bytes = std::max(kLeastPacket, *bytes);
  if (auto bytes = number(environment.lab, "net.ipv4.tcp_limit_output_bytes"))
    sending.queue_bytes = *bytes;
  if (auto bytes = number(environment.lab, "lab.flow_burst_bytes"))
    sending.flow_burst_bytes = *bytes;
  if (auto bytes = number(environment.lab, "lab.link_burst_bytes")) {
    sending.link_burst_bytes = *bytes;
    sending.shaped = true;
  }
}

}  // namespace

void fit_messages(const trace::Trace& trace, Costs& costs) {
  read_facts(trace, costs);
  fit_lanes(trace, costs);
  fit_delays(trace, costs);
}

}  // namespace weft::cost
