#include "evidence.h"

#include <algorithm>

namespace weft::align {

namespace {

using trace::Event;
using trace::Process;
using trace::Shape;

struct Half {
  uint64_t message = 0;
  size_t event = 0;
  uint32_t process = 0;
  bool receive = false;
};

std::vector<Half> halves_of(const trace::Trace& trace) {
  std::vector<Half> halves;
  for (size_t p = 0; p < trace.processes.size(); ++p) {
    const std::vector<Event>& events = trace.processes[p].events;
    for (size_t i = 0; i < events.size(); ++i) {
      const bool receive = events[i].shape == Shape::receive;
      if ((receive || events[i].shape == Shape::send) && events[i].message != 0)
        halves.push_back({events[i].message, i, static_cast<uint32_t>(p), receive});
    }
  }
  std::sort(halves.begin(), halves.end(), [](const Half& a, const Half& b) {
    if (a.message != b.message) return a.message < b.message;
    return a.receive < b.receive;
  });
  return halves;
}

// `stamp` counted from `first`; false when out of reach.
bool rebase(int64_t stamp, int64_t first, int64_t& out) {
  return !__builtin_sub_overflow(stamp, first, &out) && out <= kReach && out >= -kReach;
}

// For each process the place of its host_index among those that there are.
std::vector<uint32_t> hosts_of_processes(const trace::Trace& trace) {
  std::map<uint32_t, uint32_t> places;
  for (const Process& process : trace.processes) places[process.environment.host_index] = 0;
  uint32_t next = 0;
  for (auto& [index, place] : places) place = next++;
  std::vector<uint32_t> out;
  out.reserve(trace.processes.size());
  for (const Process& process : trace.processes)
    out.push_back(places.at(process.environment.host_index));
  return out;
}

void keep_first(Evidence::Host& host, int64_t stamp) {
  host.first_ns = host.any ? std::min(host.first_ns, stamp) : stamp;
  host.any = true;
}

void find_first_record(const Process& process, Evidence::Host& host) {
  for (const Event& event : process.events) keep_first(host, event.start_ns);
  for (const trace::ClockSample& sample : process.clock_samples) keep_first(host, sample.trace_ns);
  for (const trace::PingSample& ping : process.pings) keep_first(host, ping.t0);
}

std::vector<Evidence::Host> describe_hosts(const trace::Trace& trace,
                                           const std::vector<uint32_t>& of_process) {
  std::vector<Evidence::Host> hosts;
  for (size_t p = 0; p < trace.processes.size(); ++p) {
    const Process& process = trace.processes[p];
    if (hosts.size() <= of_process[p]) hosts.resize(of_process[p] + 1);
    Evidence::Host& host = hosts[of_process[p]];
    host.index = process.environment.host_index;
    if (host.name.empty()) host.name = process.environment.host;
    find_first_record(process, host);
  }
  for (Evidence::Host& host : hosts) {
    host.label = text("host %u", host.index);
    if (!host.name.empty()) host.label += " (" + host.name + ")";
  }
  return hosts;
}

// Adds what went from host `from` at `sent` to host `to`, where it was seen at `seen`.
bool add_trip(Evidence& evidence, uint32_t from, int64_t sent, uint32_t to, int64_t seen,
              bool ping) {
  Trip trip;
  if (!rebase(sent, evidence.hosts[from].first_ns, trip.sent) ||
      !rebase(seen, evidence.hosts[to].first_ns, trip.seen)) {
    ++evidence.unusable;
    return false;
  }
  Route& route = evidence.routes[{from, to}];
  route.trips.push_back(trip);
  if (ping) route.pings.push_back(trip);
  return true;
}

void count_bound(Evidence& evidence, uint32_t a, uint32_t b) {
  ++evidence.hosts[a].bounds;
  ++evidence.hosts[b].bounds;
}

void add_messages(const trace::Trace& trace, const Matches& matches, Evidence& evidence) {
  for (const Message& message : matches.messages) {
    const uint32_t from = evidence.of_process[message.send.process];
    const uint32_t to = evidence.of_process[message.receive.process];
    if (from == to) continue;
    if (add_trip(evidence, from, event_at(trace, message.send).start_ns, to,
                 event_at(trace, message.receive).start_ns, false))
      count_bound(evidence, from, to);
  }
}

void add_pings(const Process& process, uint32_t asking, Evidence& evidence) {
  for (const trace::PingSample& ping : process.pings) {
    const auto peer = evidence.of_rank.find(ping.peer);
    if (peer == evidence.of_rank.end() || peer->second == asking) continue;
    if (ping.t3 < ping.t0 || ping.t2 < ping.t1) {
      ++evidence.unusable;
      continue;
    }
    const bool there = add_trip(evidence, asking, ping.t0, peer->second, ping.t1, true);
    const bool back = add_trip(evidence, peer->second, ping.t2, asking, ping.t3, true);
    if (there || back) count_bound(evidence, asking, peer->second);
  }
}

std::vector<Trip> only_corners(const std::vector<Trip>& trips) {
  std::vector<Point> points;
  points.reserve(trips.size());
  for (const Trip& trip : trips) points.push_back({trip.sent, trip.seen - trip.sent});
  std::vector<Trip> kept;
  for (const Point& corner : lower_hull(std::move(points)))
    kept.push_back({corner.u, corner.u + corner.w});
  return kept;
}

}  // namespace

Matches match(const trace::Trace& trace) {
  const std::vector<Half> halves = halves_of(trace);
  Matches out;
  out.messages.reserve(halves.size() / 2);
  for (size_t from = 0; from < halves.size();) {
    size_t to = from;
    while (to < halves.size() && halves[to].message == halves[from].message) ++to;
    const Half& first = halves[from];
    const Half& last = halves[to - 1];
    if (to - from == 2 && !first.receive && last.receive)
      out.messages.push_back({{first.process, first.event}, {last.process, last.event}});
    else
      out.unmatched += to - from;
    from = to;
  }
  return out;
}

// Whatever the clocks of the two hosts are, as long as they are linear, a trip whose (sent, delay)
// is no corner of the lower hull is implied by those that are.
void Route::reduce() {
  trips = only_corners(trips);
  pings = only_corners(pings);
}

Evidence gather(const trace::Trace& trace, const Matches& matches) {
  Evidence evidence;
  evidence.of_process = hosts_of_processes(trace);
  evidence.hosts = describe_hosts(trace, evidence.of_process);
  for (size_t p = 0; p < trace.processes.size(); ++p)
    evidence.of_rank[trace.processes[p].environment.rank] = evidence.of_process[p];
  add_messages(trace, matches, evidence);
  for (size_t p = 0; p < trace.processes.size(); ++p)
    add_pings(trace.processes[p], evidence.of_process[p], evidence);
  for (auto& [pair, route] : evidence.routes) route.reduce();
  return evidence;
}

}  // namespace weft::align
