// machine: what the machine did while something was measured, and what iperf3 makes of it.
#pragma once

#include <cstdint>
#include <optional>

#include "weft/base.h"

namespace weft::bench {

struct StolenTime {
  uint64_t stolen = 0, total = 0;  // ticks of all processors since boot
};
StolenTime stolen_time();
double steal_percent(StolenTime from, StolenTime to);

// A TCP port that nobody uses now.
Result<uint16_t> free_port();

// What one connection each way carries on loopback at once, each way's rate; absent without iperf3.
std::optional<double> iperf3_gb_per_s();

}  // namespace weft::bench
