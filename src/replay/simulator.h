// One simulated run: the schedule's objects driven by an event queue instead of sockets.
#pragma once

#include <limits>
#include <span>
#include <vector>

#include "weft/graph.h"
#include "weft/schedule.h"

namespace weft::replay {

// What communication costs, in real bytes and wall nanoseconds.
struct Network {
  double link_bytes_per_ns = 0;
  double flow_bytes_per_ns = std::numeric_limits<double>::infinity();
  double packet_bytes = 65536;
  double queue_bytes = 65536;  // of a lane, below the socket
  double flow_burst_bytes = 0;
  double link_burst_bytes = 0;
  bool shaped = false;       // see cost::Costs::Sending
  int64_t latency_ns = 0;    // of a packet, one way
  int64_t hand_over_ns = 0;  // end of backward -> gradient handed over
  int64_t report_ns = 0;     // another rank's bucket complete -> rank 0 knows
  int64_t begin_ns = 0;      // admitted -> begun on another rank
  int64_t wake_up_ns = 0;    // sum there -> the waiting thread goes on
  double send_ns_per_chunk = 0, send_ns_per_byte = 0;
  double receive_ns_per_chunk = 0, receive_ns_per_byte = 0;
  double reduce_ns_per_byte = 0;
  // Who serves sockets: the engine's own thread, or workers beside it. With auxiliary processes a
  // chunk is copied to and from the memory that they share.
  uint32_t lane_workers = 0;  // 0: the engine's thread
  double copy_ns_per_byte = 0;
  uint32_t cores = 1;
  bool shared_processor = false;  // one machine's cores for all ranks; otherwise each has its own
  bool free = false;              // sums are there as soon as all gradients are
};

// What the devices do. One program for all ranks; durations differ.
struct Job {
  uint32_t ranks = 1;
  std::vector<uint32_t> host_of;  // by rank
  uint32_t iterations = 4;
  const trace::Model* model = nullptr;
  // compute[rank][iteration % size][layer]
  std::vector<std::vector<const std::vector<graph::LayerTimes>*>> compute;
};

// Events of a simulated run, as a run records them; see recording.cc.
class Recording;

struct Simulated {
  std::vector<std::vector<int64_t>> starts;  // by rank: start of each iteration, and of one more
  std::vector<uint32_t> order;               // pieces, in the common order
  uint64_t events = 0;
  double processor_busy = 0;  // share of the cores that served lanes, 0 to 1
};

// Runs `job` under `layout` on `network`; `algorithms` has one a piece. `recording` may be null.
Simulated simulate(const Job& job, const schedule::Layout& layout,
                   const std::vector<schedule::Algorithm>& algorithms, const Network& network,
                   Recording* recording);

}  // namespace weft::replay
