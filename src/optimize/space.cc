#include "space.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace weft::optimize {
namespace {

// Sizes of the target. Smaller ones were not run and compared with their replay; a piece then costs
// an agreement or a header for little data, and replay is kind to the processor that pays.
constexpr Bytes kLeastChunk = kib(128), kMostChunk = mib(4);
constexpr Bytes kLeastPartition = mib(1), kMostPartition = mib(256);
constexpr Bytes kLeastBucket = mib(1), kMostBucket = mib(1024);
constexpr Bytes kMostCredit = mib(1024);
// Less in flight than the link carries in this time may leave it idle when a rank is late to agree
// on what comes next. Caution, not a law: docs/optimize.md says what was seen.
constexpr double kCreditSeconds = 0.016;
constexpr Bytes kLeastCreditLow = mib(4), kLeastCreditHigh = mib(32);

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The least credit that is trusted on a link of that (real) rate.
Bytes least_credit(double link_bytes_per_s, double shrink) {
  Bytes least = kLeastCreditLow;
  while (least < kLeastCreditHigh &&
         static_cast<double>(least.count) < link_bytes_per_s * kCreditSeconds * shrink)
    least.count *= 2;
  return least;
}

Range reaching(Range range, std::optional<Bytes> recorded) {
  if (recorded) range.least = std::min(range.least, *recorded);
  return range;
}

// The cluster's rates in real bytes a second, as the replayer understands a change of them.
struct Rates {
  double link = 0;  // 0: unknown
  double flow = kInfinity;
};

double real_rate(double target_bits, const trace::Environment& environment, const char* key,
                 double fitted) {
  double nominal = target_bits / 8 / environment.dilation;
  auto found = environment.lab.find(key);
  if (found == environment.lab.end() || !std::isfinite(fitted) || fitted <= 0) return nominal;
  double recorded = std::strtod(found->second.c_str(), nullptr) / 8 / environment.dilation;
  return std::isfinite(recorded) && recorded > 0 ? nominal * fitted / recorded : nominal;
}

Rates rates_of(const replay::Replayer& replayer, const replay::Cluster& cluster) {
  const cost::Costs& costs = replayer.costs();
  Rates rates;
  if (costs.link_bytes_per_s) rates.link = costs.link_bytes_per_s->value;
  if (costs.flow_bytes_per_s) rates.flow = costs.flow_bytes_per_s->value;
  const trace::Environment& environment = replayer.environment();
  if (cluster.link_bits_per_s)
    rates.link = real_rate(*cluster.link_bits_per_s, environment, "link_bits_per_s", rates.link);
  if (cluster.flow_bits_per_s)
    rates.flow = std::isinf(*cluster.flow_bits_per_s)
                     ? kInfinity
                     : real_rate(*cluster.flow_bits_per_s, environment, "flow_bits_per_s",
                                 std::isfinite(rates.flow) ? rates.flow : rates.link);
  return rates;
}

std::optional<uint32_t> filling_lanes(const replay::Replayer& replayer,
                                      const replay::Cluster& cluster, const Rates& rates,
                                      uint32_t max_lanes) {
  if (!(rates.link > 0)) return std::nullopt;
  if (cluster.link_bits_per_s || cluster.flow_bits_per_s) {
    if (!(rates.flow > 0)) return std::nullopt;
    double lanes = std::ceil(cost::kFillsLink * rates.link / rates.flow);
    return static_cast<uint32_t>(std::clamp(lanes, 1.0, static_cast<double>(max_lanes)));
  }
  // The most that was measured may be less than the link; then more lanes are not asked for.
  std::optional<uint32_t> best;
  for (uint32_t n = max_lanes; n >= 1; --n) {
    auto rate = cost::rate_of_flows(replayer.costs(), n);
    if (!rate) continue;
    if (!best ||
        *rate >= cost::kFillsLink * cost::rate_of_flows(replayer.costs(), *best).value_or(0))
      best = n;
  }
  return best;
}

}  // namespace

const std::vector<std::string>& pass_names() {
  static const std::vector<std::string> names = {"lanes",     "order",     "barrier", "bucket",
                                                 "partition", "credit",    "chunk",   "algorithm",
                                                 "workers",   "boundaries"};
  return names;
}

bool same_in(const std::string& pass, const plan::Plan& a, const plan::Plan& b) {
  if (pass == "lanes") return a.lanes == b.lanes;
  if (pass == "order") return a.order == b.order;
  if (pass == "barrier") return a.barrier == b.barrier;
  if (pass == "bucket") return a.bucket_rule == b.bucket_rule;
  if (pass == "partition") return a.partition == b.partition;
  if (pass == "credit") return a.credit == b.credit;
  if (pass == "chunk") return a.chunk == b.chunk;
  if (pass == "algorithm") return a.algorithm == b.algorithm;
  if (pass == "workers") return a.lane_worker == b.lane_worker && a.lane_workers == b.lane_workers;
  return a.buckets == b.buckets;
}

void take(const std::string& pass, const plan::Plan& from, plan::Plan& to) {
  if (pass == "lanes") to.lanes = from.lanes;
  if (pass == "order") to.order = from.order;
  if (pass == "barrier") to.barrier = from.barrier;
  if (pass == "bucket") to.bucket_rule = from.bucket_rule;
  if (pass == "partition") to.partition = from.partition;
  if (pass == "credit") to.credit = from.credit;
  if (pass == "chunk") to.chunk = from.chunk;
  if (pass == "algorithm") to.algorithm = from.algorithm;
  if (pass == "workers") {
    to.lane_worker = from.lane_worker;
    to.lane_workers = from.lane_workers;
  }
  if (pass == "boundaries") to.buckets = from.buckets;
  // A worker without a lane is none.
  to.lane_workers = std::min(to.lane_workers, to.lanes);
}

std::optional<uint32_t> Space::spare_lanes() const {
  if (!flow_capped() || !has("lanes")) return std::nullopt;
  return std::min(*filling_lanes + 1, max_lanes);
}

Result<Space> make_space(const replay::Replayer& replayer, const Options& options) {
  Space space;
  space.passes = {pass_names().begin(), pass_names().end()};
  for (const std::string& name : options.without) {
    if (space.passes.erase(name) > 0) continue;
    if (std::find(pass_names().begin(), pass_names().end(), name) != pass_names().end()) continue;
    auto near = nearest(name, pass_names());
    std::string all;
    for (const std::string& known : pass_names()) all += (all.empty() ? "" : ", ") + known;
    return error(Code::invalid_argument, "no pass is named \"%s\"; expected one of %s%s",
                 name.c_str(), all.c_str(),
                 near ? text("; did you mean %s?", near->c_str()).c_str() : "");
  }
  space.recorded = replayer.recorded_plan();
  WEFT_ASSIGN(plan::Plan preset, plan::preset("default"));
  space.expert = space.recorded;
  for (const std::string& pass : space.passes) take(pass, preset, space.expert);
  for (const trace::Tensor& tensor : replayer.model().tensors)
    space.tensors.push_back(
        {tensor.name, tensor.bytes / schedule::kElementBytes, tensor.consumed_by});
  space.shrink = std::max(1.0, replayer.environment().shrink);
  space.ranks = options.cluster.hosts.value_or(replayer.ranks());
  space.choice = schedule::choice_of_run(
      replayer.costs(),
      {space.ranks, space.recorded.lanes, options.cluster.hosts.value_or(replayer.hosts())});
  space.replay_error = std::abs(replayer.fidelity().error_percent) / 100;
  space.max_lanes = std::clamp<uint32_t>(options.max_lanes, 1, plan::kLanesMax);
  Rates rates = rates_of(replayer, options.cluster);
  double bits = 8 * replayer.environment().dilation;
  space.link_bits_per_s = rates.link * bits;
  space.flow_bits_per_s = rates.flow * bits;
  space.filling_lanes = filling_lanes(replayer, options.cluster, rates, space.max_lanes);
  if (space.has("lanes")) space.expert.lanes = std::min(space.expert.lanes, space.max_lanes);
  const plan::Plan& recorded = space.recorded;
  space.bucket = reaching({kLeastBucket, kMostBucket},
                          std::min(recorded.bucket_rule.first, recorded.bucket_rule.size));
  space.partition = reaching({kLeastPartition, kMostPartition}, recorded.partition);
  space.credit = reaching({least_credit(rates.link, space.shrink), kMostCredit}, recorded.credit);
  space.chunk = reaching({kLeastChunk, kMostChunk}, recorded.chunk);
  return space;
}

std::vector<plan::Plan> starts(const Space& space) {
  std::vector<plan::Plan> out = {space.expert};
  // Every tensor on its own, in small pieces: the other end from one large bucket.
  plan::Plan fine = space.expert;
  if (space.has("bucket")) fine.bucket_rule = {space.bucket.least, space.bucket.least, false};
  if (space.has("partition")) fine.partition = Bytes{2 * space.partition.least.count};
  if (space.has("credit")) fine.credit = space.credit.least;
  out.push_back(fine);
  if (space.has("lanes") && space.filling_lanes) {
    plan::Plan filled = space.expert;
    filled.lanes = space.spare_lanes().value_or(*space.filling_lanes);
    out.push_back(filled);
    // The same lanes with nothing else changed: where flows are all that is wrong.
    filled = space.recorded;
    filled.lanes = *space.filling_lanes;
    out.push_back(filled);
  }
  return out;
}

double floor_of(const replay::Replayer& replayer, const replay::Cluster& cluster) {
  if (!cluster.hosts && !cluster.link_bits_per_s) return replayer.floor_ns().value_or(0);
  uint32_t ranks = cluster.hosts.value_or(replayer.ranks());
  double link = rates_of(replayer, cluster).link;
  if (ranks > 1 && !(link > 0)) return 0;
  return 1e9 * cost::iteration_floor_seconds(replayer.compute_ns() * 1e-9,
                                             replayer.gradient_bytes(), ranks, link);
}

}  // namespace weft::optimize
