// align: N clocks become one, with bounds that hold.
//
// Every message bounds the difference of two hosts' clocks: it cannot be received before it was
// sent. Messages both ways (chunks, and the four stamps of a ping) leave a corridor of lines
// offset + drift * time; the answer is the middle of the corridor, and its edges are the interval.
// Nothing is assumed about delays except that they are not negative, so the true offset lies
// inside the interval whatever the queues did. Host 0 is the reference.
//
//   Trace (clocks as read) ──► Alignment ──apply()──► the same Trace on host 0's clock
//
// Threads: plain values and pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weft/trace.h"

namespace weft::align {

// The one thing that is believed without being seen: no clock drifts from another by more. It keeps
// the interval of a short run finite. Quartz is within 100.
inline constexpr double kDriftMaxPpm = 1000;

enum class Quality : uint8_t {
  reference,  // this host is the reference
  bounded,    // messages bound it from both sides
  one_sided,  // only one direction was seen: the offset is the nearest that is possible
  unknown,    // nothing connects this host to the reference; its clock is left as it is, or is
              // moved to that of the lowest host that it is connected to
};
const char* name_of(Quality quality);

// How one host's clock differs from the reference: reading = reference + offset, where the offset
// is stated for `at_ns` on this host's clock (its first record) and grows by `drift_ppm`. A bound
// that does not exist is infinite.
struct HostClock {
  std::string host;
  uint32_t host_index = 0;
  Quality quality = Quality::unknown;
  int64_t at_ns = 0;
  int64_t reference_ns = 0;  // the same moment on the reference clock: exact, unlike `offset_ns`
  double offset_ns = 0;
  double low_ns = 0, high_ns = 0;  // the true offset at `at_ns` lies within
  double drift_ppm = 0;            // taken to be within kDriftMaxPpm
  double drift_low_ppm = 0, drift_high_ppm = 0;
  uint64_t constraints = 0;  // messages and pings that bounded it
};

struct Alignment {
  std::vector<HostClock> hosts;      // by host_index; the first is the reference
  std::vector<uint32_t> of_process;  // index into hosts, in the order of Trace::processes
  uint64_t messages = 0;             // pairs of a send and its receive
  uint64_t backward_before = 0;      // of these: received before it was sent, by the raw clocks
  uint64_t backward_after = 0;       // the same on the common clock; apply() moves these
  std::vector<std::string> remarks;  // what could not be had, for people

  // A moment of a process's clock on the reference clock. Keeps the order of moments; what would be
  // further than 2^62 ns from zero, where a trace ends, is there.
  // REQUIRES: process < of_process.size().
  int64_t to_reference(size_t process, int64_t ns) const;
};

// Fails with invalid_argument when the trace has no process. A trace of one host, or without
// messages, is answered with what is known, and with remarks.
Result<Alignment> align(const trace::Trace& trace);

// Moves every time of the trace (events, all four stamps of pings, clock samples, notes) to the
// reference clock. After it no receive starts before its send: the few that still would
// (`backward_after`) start with it. Moving a trace twice is an error that nobody notices; align()
// it anew instead. REQUIRES: `alignment` was made from a trace with the same processes.
void apply(const Alignment& alignment, trace::Trace& trace);

}  // namespace weft::align
