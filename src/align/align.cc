#include "weft/align.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>

#include "solve.h"

namespace weft::align {

namespace {

using trace::Process;

constexpr double kInfinite = std::numeric_limits<double>::infinity();
// Where a trace ends (docs/trace_format.md).
constexpr int64_t kMaxTime = int64_t{1} << 62;

int64_t within_trace(Wide ns) {
  return static_cast<int64_t>(std::clamp<Wide>(ns, -kMaxTime, kMaxTime));
}

// A line says what to add to a reading, as a share d of the time gone by on this clock. Drift is
// what this clock gains, as a share of the time gone by on the other: (1 + d) (1 + drift) = 1.
double other_way_round(double share) { return 0.0 - share / (1 + share); }
double ppm(double share) { return share * 1e6; }

void fill_in(const HostFit& fit, int64_t at, int64_t anchor_at, HostClock& clock) {
  const double apart = static_cast<double>(static_cast<Wide>(at) - anchor_at);
  clock.at_ns = at;
  const auto c = static_cast<int64_t>(std::llround(std::clamp(fit.line.c, -0x1p62, 0x1p62)));
  clock.reference_ns = within_trace(static_cast<Wide>(anchor_at) + c);
  clock.offset_ns = apart - static_cast<double>(c);
  // Whatever was chosen, what is claimed contains it.
  clock.low_ns = std::min(clock.offset_ns, apart - fit.corridor.high(0));
  clock.high_ns = std::max(clock.offset_ns, apart - fit.corridor.low(0));
  clock.drift_ppm = ppm(other_way_round(fit.line.d));
  clock.drift_low_ppm = std::min(clock.drift_ppm, ppm(other_way_round(fit.corridor.drift_high())));
  clock.drift_high_ppm = std::max(clock.drift_ppm, ppm(other_way_round(fit.corridor.drift_low())));
}

Quality quality_of(const HostFit& fit, uint32_t host) {
  if (host == 0) return Quality::reference;
  if (fit.anchor != 0) return Quality::unknown;
  return fit.corridor.has_floor() && fit.corridor.has_ceiling() ? Quality::bounded
                                                                : Quality::one_sided;
}

HostClock clock_of(const Evidence& evidence, const Fit& fit, uint32_t host) {
  const Evidence::Host& facts = evidence.hosts[host];
  HostClock clock;
  clock.host = facts.name;
  clock.host_index = facts.index;
  clock.constraints = facts.bounds;
  clock.quality = quality_of(fit.hosts[host], host);
  fill_in(fit.hosts[host], facts.first_ns, evidence.hosts[fit.hosts[host].anchor].first_ns, clock);
  if (clock.quality == Quality::unknown) {
    clock.low_ns = -kInfinite;
    clock.high_ns = kInfinite;
    clock.drift_low_ppm = -kDriftMaxPpm;
    clock.drift_high_ppm = kDriftMaxPpm;
  }
  return clock;
}

// ---- remarks -------------------------------------------------------------------------------

void remark_on_input(const Evidence& evidence, const Matches& matches,
                     std::vector<std::string>& remarks) {
  if (evidence.hosts[0].index != 0)
    remarks.push_back(text("no process of host 0 was read: %s is the reference",
                           evidence.hosts[0].label.c_str()));
  if (evidence.hosts.size() == 1) remarks.push_back("all processes share one clock");
  if (matches.unmatched > 0)
    remarks.push_back(text("%llu sends or receives are without their other half; not used",
                           static_cast<unsigned long long>(matches.unmatched)));
  if (evidence.unusable > 0)
    remarks.push_back(text("%llu stamps or pings cannot be true; not used",
                           static_cast<unsigned long long>(evidence.unusable)));
}

// A host's trace clock minus its wall clock, at its first sample.
std::optional<Wide> trace_minus_wall(const trace::Trace& trace, const Evidence& evidence,
                                     uint32_t host) {
  for (size_t p = 0; p < trace.processes.size(); ++p) {
    const Process& process = trace.processes[p];
    if (evidence.of_process[p] != host || process.clock_samples.empty()) continue;
    const trace::ClockSample& sample = process.clock_samples.front();
    return static_cast<Wide>(sample.trace_ns) - sample.wall_ns;
  }
  return std::nullopt;
}

std::string what_wall_clocks_say(const trace::Trace& trace, const Evidence& evidence,
                                 uint32_t host) {
  const auto here = trace_minus_wall(trace, evidence, host);
  const auto reference = trace_minus_wall(trace, evidence, 0);
  if (!here || !reference) return {};
  return text("; wall clocks suggest an offset of %.3f ms, which is not relied on",
              static_cast<double>(*here - *reference) * 1e-6);
}

void remark_on_host(const trace::Trace& trace, const Evidence& evidence, const Fit& fit,
                    uint32_t host, Quality quality, std::vector<std::string>& remarks) {
  const std::string& label = evidence.hosts[host].label;
  if (quality == Quality::one_sided)
    remarks.push_back(label +
                      ": bounded from one side only; taken to be as near as messages allow" +
                      what_wall_clocks_say(trace, evidence, host));
  if (quality != Quality::unknown) return;
  const uint32_t anchor = fit.hosts[host].anchor;
  remarks.push_back(
      label + ": no message or ping connects it to the reference; its clock " +
      (anchor == host ? "is left as it is" : "follows " + evidence.hosts[anchor].label) +
      what_wall_clocks_say(trace, evidence, host));
}

void count_backward(const trace::Trace& trace, const Matches& matches, Alignment& out) {
  int64_t farthest = 0;
  out.messages = matches.messages.size();
  for (const Message& message : matches.messages) {
    const int64_t sent = event_at(trace, message.send).start_ns;
    const int64_t seen = event_at(trace, message.receive).start_ns;
    if (seen < sent) ++out.backward_before;
    const int64_t sent_after = out.to_reference(message.send.process, sent);
    const int64_t seen_after = out.to_reference(message.receive.process, seen);
    if (seen_after >= sent_after) continue;
    ++out.backward_after;
    farthest = std::max(farthest, within_trace(static_cast<Wide>(sent_after) - seen_after));
  }
  if (out.backward_after > 0)
    out.remarks.push_back(
        text("%llu of %llu messages are still received before they are sent, by up to %.3f us; "
             "these receives are moved to their sends",
             static_cast<unsigned long long>(out.backward_after),
             static_cast<unsigned long long>(out.messages), static_cast<double>(farthest) * 1e-3));
}

}  // namespace

const char* name_of(Quality quality) {
  switch (quality) {
    case Quality::reference: return "reference";
    case Quality::bounded: return "bounded";
    case Quality::one_sided: return "one_sided";
    case Quality::unknown: return "unknown";
  }
  return "unknown";
}

int64_t Alignment::to_reference(size_t process, int64_t ns) const {
  const HostClock& clock = hosts[of_process[process]];
  if (clock.reference_ns == clock.at_ns && clock.drift_ppm == 0) return ns;
  const Wide passed = static_cast<Wide>(ns) - clock.at_ns;
  const double gained = static_cast<double>(passed) * other_way_round(clock.drift_ppm * 1e-6);
  return within_trace(clock.reference_ns + passed + static_cast<Wide>(std::nearbyint(gained)));
}

Result<Alignment> align(const trace::Trace& trace) {
  if (trace.processes.empty())
    return error(Code::invalid_argument, "the trace has no process to align");
  const Matches matches = match(trace);
  const Evidence evidence = gather(trace, matches);
  Fit fit = solve(evidence);
  Alignment out;
  out.of_process = evidence.of_process;
  remark_on_input(evidence, matches, out.remarks);
  std::move(fit.remarks.begin(), fit.remarks.end(), std::back_inserter(out.remarks));
  for (uint32_t host = 0; host < evidence.hosts.size(); ++host) {
    out.hosts.push_back(clock_of(evidence, fit, host));
    remark_on_host(trace, evidence, fit, host, out.hosts.back().quality, out.remarks);
  }
  count_backward(trace, matches, out);
  return out;
}

}  // namespace weft::align
