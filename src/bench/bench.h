// bench: how fast weft's own machinery is, on jobs made in memory.
//
// The jobs are the same on every machine, so two figures differ only by the machine and the code.
// They say nothing about a cluster.
//
// Threads: pure functions; what is measured runs on the calling thread.
#pragma once

#include <cstdint>

#include "weft/base.h"

namespace weft::bench {

struct ReplayOptions {
  uint64_t operations = 1'000'000;        // at least as many are simulated
  Nanos search = Nanos::from_seconds(2);  // budget of the search whose parts are told
};

struct ReplaySpeed {
  uint32_t ranks = 0, layers = 0, iterations = 0;
  // Of the simulated graph: compute, gradients ready and done, decisions, operations, sends and
  // receives. Events are steps of the simulator, which are more.
  uint64_t operations = 0, events = 0;
  double seconds = 0;  // of one replay, the best of a few
  double operations_per_second = 0, events_per_second = 0;
  double replay_share_percent = 0;  // of a search's time
  uint64_t search_replays = 0;
  double search_seconds = 0;
};

Result<ReplaySpeed> replay_speed(const ReplayOptions& options, const Clock& clock);

}  // namespace weft::bench
