// Four steps, each of them in docs/alignment.md:
//   1. pairs whose two directions contradict each other are loosened, and that is said;
//   2. hosts that are connected share an anchor;
//   3. corridors spread from the anchors, until no host's becomes narrower;
//   4. one line a host is chosen, such that all of them together break no bound.

#include "solve.h"

#include <algorithm>
#include <cmath>

#include "weft/align.h"

namespace weft::align {

namespace {

constexpr double kDriftMax = kDriftMaxPpm * 1e-6;
// Two clocks that are within kDriftMax of a third.
constexpr double kPairDriftMax = 2.01 * kDriftMax;
constexpr int64_t kFarthest = int64_t{1} << 61;
constexpr uint32_t kNobody = 0xffffffff;
// Rounds of step 3 beyond the number of hosts, and at most; stopping early leaves corridors wide.
constexpr size_t kSpareRounds = 8;
constexpr size_t kMaxRounds = 200;
// A corridor that became narrower by less than this share is not worth another round.
constexpr double kWorthwhile = 0.002;
// Step 4 asks for this much more than nothing, so that rounding to nanoseconds breaks no bound ...
constexpr double kMargin_ns = 1;
// ... moves a line somewhat further than it must, to end inside and not at the edge, ...
constexpr double kOvershoot = 1.5;
// ... and gives up after so many looks at a bound.
constexpr uint64_t kMaxLooks = 50'000'000;
constexpr int kMaxPasses = 5000;

// ---- 1. pairs ------------------------------------------------------------------------------

// The bounds of one pair as those of the line from a's clock to b's. Clocks are read in whole
// nanoseconds, so a bound holds to within one.
struct PairPoints {
  std::vector<Point> floor, ceiling;
};

PairPoints points_between(const std::vector<Trip>& a_to_b, const std::vector<Trip>& b_to_a) {
  PairPoints out;
  for (const Trip& trip : a_to_b) out.ceiling.push_back({trip.sent, trip.seen - trip.sent + 1});
  for (const Trip& trip : b_to_a) out.floor.push_back({trip.seen, trip.sent - trip.seen - 1});
  return out;
}

bool agree(const std::vector<Trip>& a_to_b, const std::vector<Trip>& b_to_a) {
  PairPoints points = points_between(a_to_b, b_to_a);
  return Corridor::between(std::move(points.floor), std::move(points.ceiling), kPairDriftMax)
      .has_value();
}

void loosen(std::vector<Trip>& trips, int64_t by) {
  for (Trip& trip : trips) trip.seen = std::min(trip.seen + by, kFarthest);
}

// What is left of a pair that contradicts itself: its pings, whose four stamps belong together by
// construction; or else all of it, made as vague as it is wrong.
void settle(const Evidence& evidence, uint32_t a, uint32_t b, Route& there, Route& back,
            std::vector<std::string>& remarks) {
  if (there.trips.empty() || back.trips.empty() || agree(there.trips, back.trips)) return;
  PairPoints points = points_between(there.trips, back.trips);
  const double wrong =
      contradiction(std::move(points.floor), std::move(points.ceiling), kPairDriftMax);
  std::string remark = text(
      "%s and %s: no pair of steady clocks explains all messages (by %.3f us); either sends "
      "and receives are mismatched, or a clock was set or drifts by more than %.0f ppm",
      evidence.hosts[a].label.c_str(), evidence.hosts[b].label.c_str(), wrong * 1e-3, kDriftMaxPpm);
  if (!there.pings.empty() && !back.pings.empty() && agree(there.pings, back.pings)) {
    there.trips = there.pings;
    back.trips = back.pings;
    remarks.push_back(remark + "; only pings are used between them");
    return;
  }
  const auto by = static_cast<int64_t>(std::min(std::ceil(2 * wrong), 0x1p60)) + 1;
  loosen(there.trips, by);
  loosen(back.trips, by);
  remarks.push_back(remark + "; the interval is widened by as much and may not hold");
}

void settle_pairs(Evidence& evidence, std::vector<std::string>& remarks) {
  for (auto& [pair, there] : evidence.routes) {
    if (pair.first > pair.second) continue;
    const auto back = evidence.routes.find({pair.second, pair.first});
    if (back == evidence.routes.end()) continue;
    settle(evidence, pair.first, pair.second, there, back->second, remarks);
  }
}

// ---- 2. who is connected -------------------------------------------------------------------

struct Neighbour {
  uint32_t host = 0;
  const std::vector<Trip>* from_it = nullptr;  // null: nothing came from there
  const std::vector<Trip>* to_it = nullptr;
};

struct Network {
  std::vector<std::vector<Neighbour>> neighbours;  // by host
  std::vector<uint32_t> anchor;                    // by host
  std::vector<uint32_t> order;                     // hosts, each after one that it is connected to
};

Neighbour& neighbour(std::vector<Neighbour>& list, uint32_t host) {
  for (Neighbour& known : list) {
    if (known.host == host) return known;
  }
  return list.emplace_back(Neighbour{host, nullptr, nullptr});
}

void visit_from(Network& network, uint32_t start) {
  size_t next = network.order.size();
  network.order.push_back(start);
  network.anchor[start] = start;
  for (; next < network.order.size(); ++next) {
    for (const Neighbour& there : network.neighbours[network.order[next]]) {
      if (network.anchor[there.host] != kNobody) continue;
      network.anchor[there.host] = start;
      network.order.push_back(there.host);
    }
  }
}

Network connect(const Evidence& evidence) {
  Network network;
  network.neighbours.resize(evidence.hosts.size());
  network.anchor.assign(evidence.hosts.size(), kNobody);
  for (const auto& [pair, route] : evidence.routes) {
    neighbour(network.neighbours[pair.first], pair.second).to_it = &route.trips;
    neighbour(network.neighbours[pair.second], pair.first).from_it = &route.trips;
  }
  for (uint32_t host = 0; host < evidence.hosts.size(); ++host) {
    if (network.anchor[host] == kNobody) visit_from(network, host);
  }
  return network;
}

// ---- 3. corridors --------------------------------------------------------------------------

struct Bounds {
  std::vector<Point> floor, ceiling;
};

// A bound that was computed is made a little weaker, by a nanosecond and by what doubles lose.
double rounding(double w) { return 1 + std::abs(w) * 0x1p-50; }

void add_point(std::vector<Point>& points, int64_t u, int64_t w, double more) {
  const double sum = static_cast<double>(w) + more;
  if (!(std::abs(sum) < 0x1p61) || !(std::abs(more) < 0x1p61)) return;  // nor when not a number
  points.push_back({u, w + static_cast<int64_t>(more)});
}

// A host's clock was not earlier than what came says, and not later than what went says, when its
// neighbour's clock is at least low_of(u) and at most high_of(u) ahead of its reading u.
template <typename Low, typename High>
void add_bounds(const Neighbour& there, Low low_of, High high_of, Bounds& out) {
  if (there.from_it != nullptr) {
    for (const Trip& trip : *there.from_it) {
      const double low = low_of(static_cast<double>(trip.sent));
      add_point(out.floor, trip.seen, trip.sent - trip.seen, std::floor(low - rounding(low)));
    }
  }
  if (there.to_it != nullptr) {
    for (const Trip& trip : *there.to_it) {
      const double high = high_of(static_cast<double>(trip.seen));
      add_point(out.ceiling, trip.sent, trip.seen - trip.sent, std::ceil(high + rounding(high)));
    }
  }
}

// The part of a host's clock in which something bounds it.
struct Extent {
  double from = 0;
  double to = 0;
};

class Spread {
 public:
  Spread(const Evidence& evidence, const Network& network)
      : evidence_(evidence),
        network_(network),
        corridors_(network.anchor.size(), Corridor(kDriftMax)),
        changed_(network.anchor.size(), false),
        left_out_(network.anchor.size()) {
    for (uint32_t host = 0; host < corridors_.size(); ++host) {
      if (network.anchor[host] != host) continue;
      corridors_[host] = Corridor::exact();
      changed_[host] = true;
    }
  }

  // REQUIRES: extents outlive the call.
  void run(const std::vector<Extent>& extents) {
    const size_t rounds = std::min(corridors_.size() + kSpareRounds, kMaxRounds);
    for (size_t round = 0; round < rounds; ++round) {
      bool any = false;
      for (const uint32_t host : network_.order) any = update(host, extents[host]) || any;
      if (!any) return;
    }
  }

  const std::vector<Corridor>& corridors() const { return corridors_; }

  // Whether what the two exchanged is used.
  bool believes(uint32_t a, uint32_t b) const {
    const auto has = [](const std::vector<uint32_t>& list, uint32_t host) {
      return std::find(list.begin(), list.end(), host) != list.end();
    };
    return !has(left_out_[a], b) && !has(left_out_[b], a);
  }

  void add_remarks(std::vector<std::string>& remarks) const {
    for (size_t host = 0; host < left_out_.size(); ++host) {
      if (!left_out_[host].empty())
        remarks.push_back(
            text("%s: what goes round over several hosts contradicts what it exchanged with "
                 "nearer ones; the former is not used",
                 evidence_.hosts[host].label.c_str()));
    }
  }

 private:
  void bounds_from(const Neighbour& there, Bounds& out) const {
    const Corridor& corridor = corridors_[there.host];
    add_bounds(
        there, [&](double u) { return corridor.low(u); },
        [&](double u) { return corridor.high(u); }, out);
  }

  // A host looks again when one of its neighbours has changed since it last did.
  bool update(uint32_t host, const Extent& extent) {
    if (network_.anchor[host] == host) return false;
    const auto& around = network_.neighbours[host];
    if (std::none_of(around.begin(), around.end(),
                     [&](const Neighbour& there) { return changed_[there.host]; }))
      return settle_down(host);
    Bounds all;
    for (const Neighbour& there : around) bounds_from(there, all);
    auto fresh = Corridor::between(std::move(all.floor), std::move(all.ceiling), kDriftMax);
    if (!fresh) fresh = with_nearest_first(host);
    const bool better = narrower(corridors_[host], *fresh, extent);
    if (better) corridors_[host] = std::move(*fresh);
    changed_[host] = better;
    return better;
  }

  bool settle_down(uint32_t host) {
    changed_[host] = false;
    return false;
  }

  // Neighbours that contradict those that were connected before them are left out.
  Corridor with_nearest_first(uint32_t host) {
    left_out_[host].clear();
    Corridor best(kDriftMax);
    Bounds used;
    for (const uint32_t near : network_.order) {
      for (const Neighbour& there : network_.neighbours[host]) {
        if (there.host != near) continue;
        Bounds more = used;
        bounds_from(there, more);
        auto fresh = Corridor::between(more.floor, more.ceiling, kDriftMax);
        if (!fresh) {
          left_out_[host].push_back(there.host);
          continue;
        }
        best = std::move(*fresh);
        used = std::move(more);
      }
    }
    return best;
  }

  static bool narrower(const Corridor& old, const Corridor& fresh, const Extent& extent) {
    if ((fresh.has_floor() && !old.has_floor()) || (fresh.has_ceiling() && !old.has_ceiling()))
      return true;
    for (const double u : {0.0, extent.from, extent.to}) {
      const double before = old.high(u) - old.low(u);
      const double gain = fresh.has_floor() && fresh.has_ceiling()
                              ? before - (fresh.high(u) - fresh.low(u))
                              : std::max(fresh.has_floor() ? fresh.low(u) - old.low(u) : 0,
                                         fresh.has_ceiling() ? old.high(u) - fresh.high(u) : 0);
      const double scale = std::isfinite(before) ? before * kWorthwhile : 1000;
      if (gain > scale + 2) return true;
    }
    return false;
  }

  const Evidence& evidence_;
  const Network& network_;
  std::vector<Corridor> corridors_;
  std::vector<bool> changed_;
  std::vector<std::vector<uint32_t>> left_out_;  // by host: neighbours that are not believed
};

std::vector<Extent> extents_of(const Evidence& evidence) {
  std::vector<Extent> extents(evidence.hosts.size());
  const auto include = [&](uint32_t host, int64_t moment) {
    Extent& extent = extents[host];
    extent.from = std::min(extent.from, static_cast<double>(moment));
    extent.to = std::max(extent.to, static_cast<double>(moment));
  };
  for (const auto& [pair, route] : evidence.routes) {
    for (const Trip& trip : route.trips) {
      include(pair.first, trip.sent);
      include(pair.second, trip.seen);
    }
  }
  return extents;
}

// ---- 4. lines ------------------------------------------------------------------------------

// The middle of each corridor. A host that is connected but not bounded (its messages point the
// wrong way) goes to the nearest place that its neighbours' lines leave.
std::vector<Line> middles(const Network& network, const std::vector<Corridor>& corridors) {
  std::vector<Line> lines(corridors.size());
  std::vector<bool> done(corridors.size(), false);
  for (const uint32_t host : network.order) {
    lines[host] = corridors[host].middle();
    done[host] = true;
    if (corridors[host].has_floor() || corridors[host].has_ceiling()) continue;
    Bounds bounds;
    for (const Neighbour& there : network.neighbours[host]) {
      if (!done[there.host]) continue;
      const auto place = [&](double u) { return lines[there.host].at(u); };
      add_bounds(there, place, place, bounds);
    }
    if (const auto near =
            Corridor::between(std::move(bounds.floor), std::move(bounds.ceiling), kDriftMax))
      lines[host] = near->middle();
  }
  return lines;
}

// Lines that break no bound together. Each is inside its corridor, but two neighbours may have
// been put too near to each other. Every broken bound moves the two lines that it is about, by as
// little as mends it; a common solution exists (the truth is one), and so this comes to one.
class Mend {
 public:
  Mend(const Evidence& evidence, const Network& network, const std::vector<Extent>& extents,
       const Spread& spread) {
    const std::vector<Line> lines = middles(network, spread.corridors());
    for (size_t host = 0; host < lines.size(); ++host) {
      Handle handle;
      handle.fixed = network.anchor[host] == host;
      handle.half = std::max(1.0, (extents[host].to - extents[host].from) / 2);
      handle.middle = extents[host].from + handle.half;
      handle.w = lines[host].at(handle.middle);
      handle.tilt = lines[host].d * handle.half;
      handles_.push_back(handle);
    }
    for (const auto& [pair, route] : evidence.routes) {
      if (!spread.believes(pair.first, pair.second)) continue;
      for (const Trip& trip : route.trips) add_demand(pair.first, pair.second, trip);
    }
  }

  void run() {
    uint64_t looks = 0;
    for (int pass = 0; pass < kMaxPasses && looks < kMaxLooks; ++pass) {
      bool broken = false;
      for (const Demand& demand : demands_) broken = satisfy(demand) || broken;
      looks += demands_.size();
      if (!broken) return;
    }
  }

  Line line(size_t host) const {
    const Handle& handle = handles_[host];
    const double d = handle.tilt / handle.half;
    return {handle.w - d * handle.middle, d};
  }

 private:
  // A line, held in the middle of its extent: there its place and its tilt are independent.
  struct Handle {
    double middle = 0, half = 1;
    double w = 0, tilt = 0;  // at the middle; from there to the end
    bool fixed = false;
    double at(double t) const { return w + tilt * t; }
  };
  struct Demand {
    uint32_t from = 0, to = 0;
    double delay = 0;             // as the two clocks read
    double t_from = 0, t_to = 0;  // -1 to 1 along the extents
  };

  void add_demand(uint32_t from, uint32_t to, const Trip& trip) {
    const auto along = [](const Handle& handle, int64_t moment) {
      return (static_cast<double>(moment) - handle.middle) / handle.half;
    };
    demands_.push_back({from, to, static_cast<double>(trip.seen - trip.sent),
                        along(handles_[from], trip.sent), along(handles_[to], trip.seen)});
  }

  static double weight(const Handle& handle, double t) { return handle.fixed ? 0 : 1 + t * t; }

  static void move(Handle& handle, double t, double by) {
    if (handle.fixed) return;
    const double most = kDriftMax * handle.half;
    handle.w += by;
    handle.tilt = std::clamp(handle.tilt + by * t, -most, most);
  }

  bool satisfy(const Demand& demand) {
    Handle& from = handles_[demand.from];
    Handle& to = handles_[demand.to];
    const double slack = demand.delay + to.at(demand.t_to) - from.at(demand.t_from);
    if (slack >= kMargin_ns) return false;
    const double sum = weight(from, demand.t_from) + weight(to, demand.t_to);
    if (sum <= 0) return false;
    // A little more than the margin, or the last steps would be endless.
    const double by = kOvershoot * (kMargin_ns + 0.01 - slack) / sum;
    move(to, demand.t_to, by);
    move(from, demand.t_from, -by);
    return true;
  }

  std::vector<Handle> handles_;
  std::vector<Demand> demands_;
};

}  // namespace

Fit solve(Evidence evidence) {
  Fit fit;
  settle_pairs(evidence, fit.remarks);
  const Network network = connect(evidence);
  const std::vector<Extent> extents = extents_of(evidence);
  Spread spread(evidence, network);
  spread.run(extents);
  spread.add_remarks(fit.remarks);
  Mend mend(evidence, network, extents, spread);
  mend.run();
  for (uint32_t host = 0; host < evidence.hosts.size(); ++host)
    fit.hosts.push_back({network.anchor[host], spread.corridors()[host], mend.line(host)});
  return fit;
}

}  // namespace weft::align
