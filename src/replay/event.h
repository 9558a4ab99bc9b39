// What stands in the queue of the simulator.
#pragma once

#include <cstdint>
#include <limits>

namespace weft::replay {

inline constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

enum class What : uint8_t {
  nothing,    // of a thread's work: nobody wants to hear that it is done
  device,     // rank: its device is free, or what it waited for is there
  computes,   // rank: its device's thread begins with what takes processor time
  computed,   // rank: and has done it
  handed,     // rank, a: layer, b: iteration: its gradients are handed over
  carried,    // rank, a: bucket, b: iteration: somebody else has summed it
  report,     // rank, a: bucket, b: iteration: the rank above has to read it
  reported,   // the same: the rank above knows
  told,       // rank, a: operation, b: 1 if it is the first of a frame
  tells,      // the same: its thread has written to those below, and it begins
  begin,      // rank, a: operation
  ended,      // a: operation, on rank 0
  turn,       // rank: the last turn was cut short
  hands,      // a: lane, b: bytes: a chunk has been copied for the worker that sends it
  filled,     // a: lane: a piece of work that put bytes there is done
  egress,     // rank: a packet may leave
  arrived,    // a: lane, b: how many chunks are complete with this packet
  copied,     // a: lane, b: bytes: a worker has read a chunk, which the rank's thread copies
  absorb,     // a: lane: a chunk has been dealt with
  patience,   // rank: those who wait for receipts have waited long enough
  thanks,     // a: lane, b: how many chunks it tells of: a receipt leaves
  receipt,    // rank, a: lane, b: how many chunks it tells of: it has come back
  receipted,  // rank: it reads those that have come
  processor,  // a: one of them: a piece of work may be done
  breaks,     // a: one of those that break
  returns,    // a: one of these: it is open again
};

struct Event {
  int64_t at;
  uint32_t sequence;
  What what;
  uint16_t rank;
  uint32_t a;
  uint32_t b;
  bool operator>(const Event& other) const {
    return at != other.at ? at > other.at : sequence > other.sequence;
  }
};

// What happens when a thread's piece of work is done.
struct Then {
  What what = What::nothing;
  uint16_t rank = 0;
  uint32_t a = 0, b = 0;
};

}  // namespace weft::replay
