// One simulated run: the schedule's objects driven by an event queue instead of sockets.
//
// Where every rank of an all-reduce does the same as every other up to a renaming, one stands for
// all (Job::alike): what it sends comes back to it as what the peer on its other side sends. Then a
// thousand ranks take as long to simulate as one.
#pragma once

#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "weft/graph.h"
#include "weft/schedule.h"

namespace weft::replay {

// A lane that is not like the others.
struct OddLane {
  uint32_t from = 0, to = 0;
  uint16_t lane = 0;
  double bytes_per_ns = std::numeric_limits<double>::infinity();
  int64_t breaks_ns = -1;  // negative: never
  int64_t returns_ns = 0;
};

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
  int64_t report_ns = 0;     // a bucket complete -> the rank above knows
  int64_t begin_ns = 0;      // admitted, or told -> begun on a rank below
  int64_t wake_up_ns = 0;    // sum there -> the waiting thread goes on
  double send_ns_per_chunk = 0, send_ns_per_byte = 0;
  double receive_ns_per_chunk = 0, receive_ns_per_byte = 0;
  double reduce_ns_per_byte = 0;
  // Who serves sockets: the engine's own thread, or workers beside it. With auxiliary processes a
  // chunk is copied to and from the memory that they share.
  uint32_t lane_workers = 0;  // 0: the engine's thread
  double copy_ns_per_byte = 0;
  uint32_t cores = 1;             // of each host
  bool shared_processor = false;  // one machine's cores for all hosts
  double most_credit_ns = 0;      // that a thread gets for having slept (processor.h)
  // report_ns and begin_ns hold what frames cost a rank that has so many below it. Those of further
  // ones are its thread's work, a frame a chunk.
  uint32_t below_in_delays = std::numeric_limits<uint32_t>::max();
  bool free = false;  // sums are there as soon as all gradients are
  std::vector<OddLane> odd_lanes;
};

// How long sums took that somebody else carried: [iteration % size][bucket][rank], from when the
// last rank had the bucket until its sums were there.
using Taken = std::vector<std::vector<std::vector<int64_t>>>;

// What the devices do. One program for all ranks; durations differ.
struct Job {
  uint32_t ranks = 1;
  uint32_t fan_out = 0;           // of agreement (schedule::Tree); 0: all report to rank 0
  std::vector<uint32_t> host_of;  // by rank
  uint32_t iterations = 4;
  const trace::Model* model = nullptr;
  // compute[rank][iteration % size][layer]
  std::vector<std::vector<const std::vector<graph::LayerTimes>*>> compute;
  // Empty: every rank is simulated. Otherwise the job is folded: one rank's network stands for that
  // of all, and compute[i] is that of so many ranks, in their order.
  std::vector<uint32_t> alike;
  // Not null: sums take this long, and no network carries them. Such a job is not folded.
  const Taken* taken = nullptr;

  bool folded() const { return !alike.empty(); }
  schedule::Tree tree() const {
    return fan_out > 0 ? schedule::Tree{ranks, fan_out} : schedule::Tree::flat(ranks);
  }
};

// Whether all ranks do the same up to a renaming: a rotation (rank r sends to r + d what it gets
// from r - d) or an exclusive or (what goes to r ^ m comes from there).
bool folds(schedule::Algorithm algorithm, uint32_t ranks);

// Events of a simulated run, as a run records them; see recording.cc.
class Recording;

// What happens to a rank, and what it does then, in order: so that an engine can be let live
// through the same.
struct Seen {
  enum class What : uint8_t {
    begins,      // operation
    arrives,     // operation, id: from peer over lane
    room,        // lane to peer: the rest of its last chunk has left
    receipt,     // lane to peer: so many chunks more have arrived
    breaks,      // lane to peer
    returns,     // the same
    turn,        // it sends what it can
    hands_over,  // operation, id: to peer over lane; chunks: 1 if it left whole at once
    finishes,    // operation
  } what;
  uint32_t rank = 0;
  uint32_t peer = 0;
  uint16_t lane = 0;
  uint32_t operation = 0;
  schedule::ChunkId id = {};
  uint32_t chunks = 0;
};
using Witness = std::function<void(const Seen&)>;

struct Simulated {
  // By entry of Job::compute: start of each iteration, and of one more.
  std::vector<std::vector<int64_t>> starts;
  std::vector<uint32_t> order;       // pieces, in the common order
  std::vector<double> computing_ns;  // by entry of Job::compute: in forward, backward and update
  uint64_t events = 0;
  double processor_busy = 0;  // share of the cores that served lanes, 0 to 1
};

// Runs `job` under `layout` on `network`; `algorithms` has one a piece. `recording` may be null,
// and `witness` empty. REQUIRES of a folded job: both are, all algorithms fold, each rank has a
// host of its own, no processor is shared and no lane is odd.
Simulated simulate(const Job& job, const schedule::Layout& layout,
                   const std::vector<schedule::Algorithm>& algorithms, const Network& network,
                   Recording* recording, const Witness& witness = {});

}  // namespace weft::replay
