// soundness: does the emulated network carry what was asked? iperf3, which knows nothing of weft,
// measures inside; the answer stands beside the asked rate. On loopback, where only flows of weft's
// own are limited, streams of weft's own measure instead, and the answer says so.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cluster.h"
#include "weft/base.h"

namespace weft::lab {

struct SoundnessOptions {
  std::vector<uint32_t> flows = {1, 2, 4, 8};
  double seconds = 2;  // of each measurement, after a start that is not counted
  bool pair = true;    // host0 to host1, and back
  bool ring = true;    // every host to the next, all at once
};

struct SoundnessRow {
  std::string pattern;          // "forward", "reverse", "ring"
  uint32_t flows = 0;           // of each sender
  double asked_bits_per_s = 0;  // of each sender: min(link, flows × cap)
  double bits_per_s = 0;        // the payload that arrived; in a ring, at the slowest
  double round_trip_us = 0;     // as the senders' TCP sees it, under this load
  uint64_t retransmits = 0;
  CpuLoad cpu;

  double error_percent() const {
    return asked_bits_per_s > 0 ? 100 * (bits_per_s / asked_bits_per_s - 1) : 0;
  }
};

inline constexpr double kSoundErrorPercent = 5;

// Who measures in this cluster, for people: "iperf3", or "weft's own streams".
std::string who_measures(const Cluster& cluster);
// Fails with unsupported if there is no iperf3 where that measures.
Result<std::vector<SoundnessRow>> check_soundness(const Cluster& cluster,
                                                  const SoundnessOptions& options);
// Whether every rate is within kSoundErrorPercent of the asked one and no run was too busy.
bool is_sound(const std::vector<SoundnessRow>& rows);
// As a Markdown table.
std::string soundness_table(const std::vector<SoundnessRow>& rows);

}  // namespace weft::lab
