// A probe that was taken apart from the run, by `weft probe` under the same launcher.
#include <algorithm>
#include <cstdlib>

#include "probe.h"

namespace weft::analysis {
namespace {

// The clock of a host may have been set a little in between; one that was started anew counts from
// another beginning.
constexpr int64_t kSameClockNs = 2'000'000'000;

std::optional<int64_t> wall_of_clock(const trace::Process& process) {
  int64_t ns = 0;
  if (process.clock_samples.empty() ||
      __builtin_sub_overflow(process.clock_samples.front().wall_ns,
                             process.clock_samples.front().trace_ns, &ns))
    return std::nullopt;
  return ns;
}

bool is_one_clock(const trace::Process& one, const trace::Process& other) {
  const auto a = wall_of_clock(one), b = wall_of_clock(other);
  int64_t apart = 0;
  return !a || !b || (!__builtin_sub_overflow(*a, *b, &apart) && std::abs(apart) < kSameClockNs);
}

Result<void> check(const trace::Process& run, const trace::Process& probe) {
  const uint32_t rank = run.environment.rank;
  if (run.environment.host != probe.environment.host)
    return error(Code::invalid_argument,
                 "rank %u was on %s in the run and is on %s in the probe: take the probe with the "
                 "launcher, the hosts and the order of the run",
                 rank, printable(run.environment.host).c_str(),
                 printable(probe.environment.host).c_str());
  if (!is_one_clock(run, probe))
    return error(Code::invalid_argument,
                 "the clock of %s does not go on from the one to the other: was it started anew "
                 "between run and probe? Take the probe again",
                 printable(run.environment.host).c_str());
  return {};
}

}  // namespace

bool has_probe(const trace::Trace& trace) {
  return std::any_of(
      trace.processes.begin(), trace.processes.end(), [](const trace::Process& process) {
        return std::any_of(
            process.probe.begin(), process.probe.end(),
            [](const trace::ProbeResult& result) { return result.type == trace::ProbeType::rate; });
      });
}

void tell_hosts_apart(trace::Trace& trace) {
  std::vector<std::string> hosts;
  for (const trace::Process& process : trace.processes)
    if (process.environment.host_index != 0) return;
  for (trace::Process& process : trace.processes) {
    const auto at = std::find(hosts.begin(), hosts.end(), process.environment.host);
    process.environment.host_index = static_cast<uint32_t>(at - hosts.begin());
    if (at == hosts.end()) hosts.push_back(process.environment.host);
  }
}

Result<void> add_probe(trace::Trace& run, const trace::Trace& probe) {
  if (has_probe(run))
    return error(Code::invalid_argument, "the run has a probe of its own: leave the other out");
  if (!has_probe(probe))
    return error(Code::invalid_argument,
                 "no rate was measured: it is not of `weft probe`, or the machine was too busy for "
                 "it; take it again with weft probe -o");
  if (probe.processes.size() != run.processes.size())
    return error(Code::invalid_argument,
                 "it is of %zu ranks, the run of %zu: take the probe with the launcher of the run",
                 probe.processes.size(), run.processes.size());
  for (const trace::Process& process : run.processes) {
    const trace::Process* measured = probe.of_rank(process.environment.rank);
    if (measured == nullptr)
      return error(Code::invalid_argument, "it lacks rank %u", process.environment.rank);
    WEFT_TRY(check(process, *measured));
  }
  for (trace::Process& process : run.processes) {
    const trace::Process& measured = *probe.of_rank(process.environment.rank);
    process.probe.insert(process.probe.end(), measured.probe.begin(), measured.probe.end());
    process.pings.insert(process.pings.end(), measured.pings.begin(), measured.pings.end());
    for (const trace::Note& note : measured.notes)
      if (note.key == cost::kAgreedNote) process.notes.push_back(note);
    process.environment.lab.insert(measured.environment.lab.begin(),
                                   measured.environment.lab.end());
  }
  return {};
}

}  // namespace weft::analysis
