// From records to constants. docs/cost_model.md says which records each constant comes from.

#include <algorithm>
#include <map>
#include <utility>

#include "messages.h"
#include "weft/cost.h"

namespace weft::cost {

namespace {

using trace::PingSample;
using trace::ProbeResult;
using trace::ProbeScope;
using trace::ProbeType;

// One flow that carries this share of what many carry fills the link; and n flows that carry this
// share of n times one are not held back by it.
constexpr double kNearlyAll = 0.9;
// Chunk sizes closer than this (as a ratio) cannot tell the cost of a byte from that of a chunk.
constexpr double kChunkSizesApart = 1.2;
// Fewer samples than this cannot outvote a mishap.
constexpr size_t kEnoughToAgree = 5;
// A rate this far above what flows in proportion would carry was not carried by the network.
constexpr double kMishap = 1.2;
// A sample below the lower quartile by this many times its distance from the median is a mishap.
constexpr double kFence = 3;

// A file may hold anything: only records that something was measured by are used.
bool usable(const ProbeResult& result) { return result.bytes > 0 && result.duration_ns > 0; }

double ns_per_byte(const ProbeResult& result) {
  return static_cast<double>(result.duration_ns) / static_cast<double>(result.bytes);
}

template <typename Use>
void for_each_probe(const trace::Trace& trace, Use use) {
  for (const trace::Process& process : trace.processes) {
    for (const ProbeResult& result : process.probe) {
      if (usable(result)) use(result);
    }
  }
}

// ---- rates ---------------------------------------------------------------------------------

using Samples = std::vector<double>;

// Bytes a second by number of flows. Of several chunk sizes the one that carried most stands: small
// chunks are limited by the processor, and that has constants of its own.
std::map<uint32_t, Samples> rates_by_flows(const trace::Trace& trace, ProbeScope scope) {
  std::map<uint32_t, std::map<uint32_t, Samples>> all;  // by flows, by chunk size
  for_each_probe(trace, [&](const ProbeResult& result) {
    if (result.type != ProbeType::rate || result.scope != scope || result.flows == 0) return;
    all[result.flows][result.chunk_bytes].push_back(1e9 / ns_per_byte(result));
  });
  std::map<uint32_t, Samples> best;
  for (auto& [flows, by_chunk] : all) {
    double best_rate = -1;
    for (auto& [chunk_bytes, samples] : by_chunk) {
      if (const double rate = quantile(samples, 0.5); rate > best_rate) {
        best_rate = rate;
        best[flows] = samples;
      }
    }
  }
  return best;
}

// Where most samples agree: the middle of the shortest stretch that holds over half of them. What a
// busy host adds to a measured rate or takes from it is scattered; what the network did is not.
std::optional<Fitted> agreed(Samples samples) {
  if (samples.size() < kEnoughToAgree) return summary(samples);
  std::sort(samples.begin(), samples.end());
  const size_t half = samples.size() / 2 + 1;
  size_t best = 0;
  for (size_t first = 1; first + half <= samples.size(); ++first)
    if (samples[first + half - 1] - samples[first] < samples[best + half - 1] - samples[best])
      best = first;
  Fitted out = *summary({samples.begin() + static_cast<ptrdiff_t>(best),
                         samples.begin() + static_cast<ptrdiff_t>(best + half)});
  out.low = samples[best];
  out.high = samples[best + half - 1];
  out.samples = static_cast<uint32_t>(samples.size());
  return out;
}

struct Line {
  std::optional<Fitted> link;
  std::optional<Fitted> flow;
  bool link_is_lower_bound = false;
  std::vector<Costs::RatePoint> points;
};

// The points that can all be true: more flows cannot carry more than in proportion. Where they do,
// a sender was held up during the lesser number, or a receiver during the greater, which then found
// at once what had piled up; the most points that agree stand, of equally many the earlier ones.
std::vector<Costs::RatePoint> consistent(const std::vector<Costs::RatePoint>& points) {
  auto follows = [](const Costs::RatePoint& fewer, const Costs::RatePoint& more) {
    return more.bytes_per_s.value <= kMishap * fewer.bytes_per_s.value / fewer.flows * more.flows;
  };
  std::vector<size_t> length(points.size(), 1), next(points.size(), points.size());
  size_t first = 0;
  for (size_t i = points.size(); i-- > 0;) {
    for (size_t j = i + 1; j < points.size(); ++j) {
      if (length[j] < length[i] || !follows(points[i], points[j])) continue;
      length[i] = length[j] + 1;
      next[i] = j;
    }
    if (length[i] >= length[first] || i + 1 == points.size()) first = i;
  }
  std::vector<Costs::RatePoint> out;
  for (size_t i = first; i < points.size(); i = next[i]) out.push_back(points[i]);
  return out;
}

// rate(n) = min(n * flow, link)
Line fit_line(const std::map<uint32_t, Samples>& rates) {
  Line line;
  for (const auto& [flows, samples] : rates) line.points.push_back({flows, *summary(samples)});
  line.points = consistent(line.points);
  if (line.points.empty()) return line;

  const auto fastest = std::max_element(
      line.points.begin(), line.points.end(),
      [](const auto& a, const auto& b) { return a.bytes_per_s.value < b.bytes_per_s.value; });
  line.link = fastest->bytes_per_s;
  const double plateau = line.link->value;
  // All that fill the link have measured it; the fastest alone would be the luckiest.
  Samples of_link;
  for (const auto& point : line.points)
    if (point.bytes_per_s.value >= kNearlyAll * plateau)
      of_link.insert(of_link.end(), rates.at(point.flows).begin(), rates.at(point.flows).end());
  line.link = agreed(of_link);

  // The least number of flows says how one flow grows, if it does not fill the link already.
  const Costs::RatePoint& least = line.points.front();
  const double of_one = least.bytes_per_s.value / least.flows;
  Samples of_one_flow;
  for (const auto& point : line.points) {
    const bool fills = point.bytes_per_s.value >= kNearlyAll * plateau;
    const bool grows = point.bytes_per_s.value >= kNearlyAll * of_one * point.flows;
    if (fills || !grows) continue;
    for (const double rate : rates.at(point.flows)) of_one_flow.push_back(rate / point.flows);
  }
  line.flow = agreed(of_one_flow);

  const Costs::RatePoint& most = line.points.back();
  line.link_is_lower_bound = most.bytes_per_s.value >= kNearlyAll * of_one * most.flows;
  return line;
}

// ---- round trips ---------------------------------------------------------------------------

std::optional<double> round_trip_ns(const PingSample& ping) {
  int64_t outside = 0;
  int64_t inside = 0;
  int64_t trip = 0;
  if (__builtin_sub_overflow(ping.t3, ping.t0, &outside) ||
      __builtin_sub_overflow(ping.t2, ping.t1, &inside) ||
      __builtin_sub_overflow(outside, inside, &trip) || inside < 0 || trip <= 0) {
    return std::nullopt;
  }
  return static_cast<double>(trip);
}

// ---- the processor -------------------------------------------------------------------------

// One probe's processor time a byte, and how many chunks a byte it had.
struct Work {
  double chunks_per_byte;
  double ns_per_byte;
};

// Keeps the cheaper half of one chunk size: what a virtual processor is taken away for counts as
// its work, so noise only adds. What lies far below the others is no measurement either.
std::vector<Work> without_mishaps(const std::vector<Work>& works) {
  Samples times;
  for (const Work& work : works) times.push_back(work.ns_per_byte);
  const double low = quantile(times, 0.25);
  const double middle = quantile(times, 0.5);
  const double reach = kFence * (middle - low);
  std::vector<Work> kept;
  for (const Work& work : works) {
    if (work.ns_per_byte >= low - reach && work.ns_per_byte <= middle) kept.push_back(work);
  }
  return kept;
}

std::vector<Work> processor_work(const trace::Trace& trace) {
  std::map<uint32_t, std::vector<Work>> by_chunk_size;
  for_each_probe(trace, [&](const ProbeResult& result) {
    if (result.type != ProbeType::rate || result.chunks == 0) return;
    if (result.cpu_send_ns < 0 || result.cpu_receive_ns < 0) return;
    const double cpu_ns =
        static_cast<double>(result.cpu_send_ns) + static_cast<double>(result.cpu_receive_ns);
    if (cpu_ns <= 0) return;  // not measured
    const auto bytes = static_cast<double>(result.bytes);
    by_chunk_size[result.chunk_bytes].push_back(
        {static_cast<double>(result.chunks) / bytes, cpu_ns / bytes});
  });
  std::vector<Work> all;
  for (const auto& [chunk_bytes, works] : by_chunk_size) {
    const auto kept = without_mishaps(works);
    all.insert(all.end(), kept.begin(), kept.end());
  }
  return all;
}

// cpu = bytes * per_byte + chunks * per_chunk, by least squares with neither below 0. Divided by
// the bytes, so that a long probe does not count for more than a short one.
void fit_processor(const std::vector<Work>& works, Costs& costs) {
  if (works.size() < 2) return;
  const auto [few, many] = std::minmax_element(
      works.begin(), works.end(),
      [](const Work& a, const Work& b) { return a.chunks_per_byte < b.chunks_per_byte; });
  if (many->chunks_per_byte < kChunkSizesApart * few->chunks_per_byte) return;

  const auto count = static_cast<double>(works.size());
  // In units of the largest value, so that squares stay in range whatever a file says.
  const double unit = many->chunks_per_byte;
  double mean_x = 0;
  double mean_y = 0;
  for (const Work& work : works) {
    mean_x += work.chunks_per_byte / unit / count;
    mean_y += work.ns_per_byte / count;
  }
  double xx = 0;
  double xy = 0;
  double raw_xx = 0;
  double raw_xy = 0;
  for (const Work& work : works) {
    const double x = work.chunks_per_byte / unit;
    xx += (x - mean_x) * (x - mean_x);
    xy += (x - mean_x) * (work.ns_per_byte - mean_y);
    raw_xx += x * x;
    raw_xy += x * work.ns_per_byte;
  }
  double per_chunk = xy / xx / unit;
  double per_byte = mean_y - per_chunk * unit * mean_x;
  if (per_chunk < 0) {
    per_chunk = 0;
    per_byte = mean_y;
  } else if (per_byte < 0) {
    per_byte = 0;
    per_chunk = raw_xy / raw_xx / unit;
  }

  // The spread of each, were the other exact.
  Samples bytes;
  Samples chunks;
  for (const Work& work : works) {
    bytes.push_back(std::max(0.0, work.ns_per_byte - per_chunk * work.chunks_per_byte));
    chunks.push_back(std::max(0.0, (work.ns_per_byte - per_byte) / work.chunks_per_byte));
  }
  costs.cpu_ns_per_byte = summary(bytes);
  costs.cpu_ns_per_chunk = summary(chunks);
  costs.cpu_ns_per_byte->value = per_byte;
  costs.cpu_ns_per_chunk->value = per_chunk;
}

std::optional<Fitted> local_cost(const trace::Trace& trace, ProbeType type) {
  Samples samples;
  for_each_probe(trace, [&](const ProbeResult& result) {
    if (result.type == type) samples.push_back(ns_per_byte(result));
  });
  return summary(samples);
}

}  // namespace

std::optional<Fitted> summary(const std::vector<double>& samples) {
  if (samples.empty()) return std::nullopt;
  return Fitted{.value = quantile(samples, 0.5),
                .low = quantile(samples, 0.25),
                .high = quantile(samples, 0.75),
                .samples = static_cast<uint32_t>(samples.size())};
}

Costs fit(const trace::Trace& trace) {
  Costs costs;
  Line ring = fit_line(rates_by_flows(trace, ProbeScope::ring));
  const Line pair = fit_line(rates_by_flows(trace, ProbeScope::pair));
  costs.link_bytes_per_s = ring.link;
  costs.link_is_lower_bound = ring.link_is_lower_bound;
  costs.pair_link_bytes_per_s = pair.link;
  // What one connection carries is the same alone and among neighbours, unless they hold it back.
  costs.flow_bytes_per_s = ring.link ? ring.flow : pair.flow;
  costs.ring_rates = std::move(ring.points);

  Samples idle;
  Samples loaded;
  for (const trace::Process& process : trace.processes) {
    for (const PingSample& ping : process.pings) {
      if (const auto trip = round_trip_ns(ping))
        (ping.loaded != 0 ? loaded : idle).push_back(*trip);
    }
  }
  costs.round_trip_idle_ns = summary(idle);
  costs.round_trip_loaded_ns = summary(loaded);

  fit_processor(processor_work(trace), costs);
  costs.copy_ns_per_byte = local_cost(trace, ProbeType::copy);
  costs.reduce_ns_per_byte = local_cost(trace, ProbeType::reduce);
  costs.checksum_ns_per_byte = local_cost(trace, ProbeType::checksum);
  fit_messages(trace, costs);
  for (const trace::Process& process : trace.processes)
    for (const trace::Note& note : process.notes)
      if (note.key == kAgreedNote && !costs.agreed)
        if (auto agreed = from_json(note.value))
          costs.agreed = std::make_shared<const Costs>(std::move(*agreed));
  return costs;
}

std::vector<Costs> without_corrections(const Costs& costs) {
  std::vector<Costs> out;
  auto add = [&](bool link, bool flow) {
    Costs& other = out.emplace_back(costs);
    if (link) other.link_bytes_per_s = std::exchange(other.probed_link_bytes_per_s, std::nullopt);
    if (flow) other.flow_bytes_per_s = std::exchange(other.probed_flow_bytes_per_s, std::nullopt);
  };
  const bool link = costs.probed_link_bytes_per_s.has_value();
  const bool flow = costs.probed_flow_bytes_per_s.has_value();
  if (link) add(true, false);
  if (flow) add(false, true);
  if (link && flow) add(true, true);
  return out;
}

}  // namespace weft::cost
