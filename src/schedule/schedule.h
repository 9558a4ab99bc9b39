// schedule: what is decided, apart from what is done.
//
// Which tensors travel together, in which pieces, which piece starts next, which chunk may be
// sent now: pure state machines with no clock, thread or socket. The runtime drives them with
// real messages, the replayer will drive the same objects with simulated time, so a prediction is
// of what the runtime does. docs/schedule.md tells who decides what, and when.
//
//   Plan x tensors ──► Layout: buckets, cut into pieces
//   gradient ready ──► Readiness (each rank) ──bucket complete──► Admission (rank 0)
//                                                      │ all ranks ready, credit left
//                                                      ▼
//                                  one common order of operations, told to all ranks
//                                                      │
//   each rank:  RingSteps (which chunk next) ──► Dispatch (most urgent first) ──► any lane with
//   room
//
// Sizes are elements (fp32) of the job as it runs. Threads: one at a time per object.
#pragma once

#include <cstdint>
#include <queue>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "weft/plan.h"

namespace weft::schedule {

inline constexpr uint64_t kElementBytes = 4;  // fp32

// A gradient that takes part. Listed in forward order: the order of layers, then of creation.
struct Tensor {
  std::string name;
  uint64_t elements = 0;
  uint32_t layer = 0;  // whose forward needs it first
};

// A part of a bucket that travels as one operation.
struct Piece {
  uint32_t bucket = 0;
  uint16_t partition = 0;
  uint64_t first = 0;  // element offset in the bucket
  uint64_t elements = 0;
};

struct Bucket {
  std::vector<uint32_t> tensors;  // in the order in which they lie
  std::vector<uint64_t> offsets;  // element offset of each
  uint64_t elements = 0;
  int64_t priority = 0;      // smaller is more urgent; equal: first eligible first
  uint32_t first_piece = 0;  // its pieces are consecutive
  uint32_t pieces = 0;
};

// How a plan lays out these tensors. The same on every rank, because it depends on nothing else.
struct Layout {
  std::vector<Bucket> buckets;
  std::vector<Piece> pieces;
  std::vector<uint32_t> bucket_of;  // by tensor
  uint64_t chunk_elements = 0;
  uint64_t credit_elements = 0;  // 0: no limit
  uint32_t lanes = 1;
  plan::Barrier barrier = plan::Barrier::all;
};

// Divides every size of a plan by `shrink`, as a lab that runs a smaller job must. Small sizes
// are kept at a floor where framing would otherwise outweigh data; shrink 1 changes nothing.
plan::Plan scaled(const plan::Plan& plan, double shrink);

// What this weft's runtime cannot do is refused by name, so that nothing in a plan is silently
// ignored.
Result<void> supported(const plan::Plan& plan);
// The size of a chunk of a plan, at least what is worth a header.
uint64_t chunk_elements(const plan::Plan& plan);

// Fails with what supported() refuses, and when the plan names tensors that the job lacks.
Result<Layout> make_layout(const plan::Plan& plan, std::span<const Tensor> tensors);

// Which tensors have a part in each piece, by piece. An empty tensor lies in no piece: it counts to
// the first one of its bucket.
std::vector<std::vector<uint32_t>> tensors_by_piece(const Layout& layout);

// ---- one rank: which buckets are complete -------------------------------------------------

class Readiness {
 public:
  explicit Readiness(const Layout& layout);

  // Gradient `tensor` of `step` is there. Returns the bucket that this completes, if any.
  // Fails if the tensor is unknown, was already ready for this step, or skips a step.
  Result<std::optional<uint32_t>> ready(uint32_t tensor, uint64_t step);

 private:
  const Layout& layout_;
  std::vector<uint64_t> next_step_;  // by tensor
  std::vector<uint32_t> missing_;    // by bucket, in the bucket's current step
};

// ---- rank 0: the common order -------------------------------------------------------------

struct Start {
  uint32_t operation = 0;  // 0, 1, 2, ...: the common order
  uint32_t piece = 0;
  uint64_t step = 0;
};

// Decides which piece starts next, for all ranks. A bucket is eligible once every rank reported
// it; among eligible pieces the most urgent starts, while what is in flight stays within the
// credit (a single piece may exceed it alone). Because every rank's data is there before an
// operation starts, a started operation always ends: no order of readiness can hang it. Because
// nothing bypasses the most urgent piece, that one waits for no more than the credit.
class Admission {
 public:
  Admission(const Layout& layout, uint32_t ranks);

  // `rank` completed `bucket` in `step`. Fails on a report that a correct rank cannot make.
  Result<void> ready(Rank rank, uint32_t bucket, uint64_t step);
  // An operation has ended on the deciding rank: its credit returns.
  Result<void> finished(uint32_t operation);
  // The next operation to start, if any may start now. Call until it returns nothing.
  std::optional<Start> next();

  uint64_t in_flight_elements() const { return in_flight_; }
  // Buckets that some ranks reported and others did not, oldest first.
  struct Lacking {
    uint32_t bucket = 0;
    uint64_t step = 0;
    std::vector<Rank> missing;
  };
  std::optional<Lacking> lacking() const;

 private:
  struct Eligible {
    int64_t priority;
    uint64_t sequence;  // order of becoming eligible
    uint32_t piece;
    uint64_t step;
    bool operator>(const Eligible& other) const {
      return priority != other.priority ? priority > other.priority : sequence > other.sequence;
    }
  };

  const Layout& layout_;
  uint32_t ranks_;
  std::vector<std::vector<uint64_t>> reported_;  // by bucket, by rank: steps reported so far
  std::vector<uint64_t> eligible_steps_;         // by bucket: steps made eligible so far
  std::priority_queue<Eligible, std::vector<Eligible>, std::greater<>> eligible_;
  std::unordered_map<uint32_t, uint64_t> running_;  // operation -> elements
  uint64_t eligible_count_ = 0;
  uint64_t in_flight_ = 0;
  uint32_t next_operation_ = 0;
};

// ---- one operation on one rank: its steps and chunks --------------------------------------

enum class Collective : uint8_t {
  all_reduce = 1,
  reduce_scatter = 2,
  all_gather = 3,
  broadcast = 4
};
const char* name_of(Collective collective);

// A chunk within its operation.
struct ChunkId {
  uint16_t step = 0;
  uint32_t chunk = 0;
  friend bool operator==(const ChunkId&, const ChunkId&) = default;
};

struct ChunkRange {
  uint64_t first = 0;  // element offset in the operation
  uint64_t elements = 0;
  bool reduce = false;  // add to what is there; otherwise replace it
};

// The ring as a state machine. The data is cut into one segment a rank, each segment into chunks;
// a chunk moves on as soon as it has arrived, so steps overlap. All-reduce is a reduce-scatter
// (steps 0 to p-2) followed by an all-gather (steps p-1 to 2p-3). Each element is added in an
// order that depends on its segment alone: every rank ends with the same bits, whatever the
// lanes. Broadcast passes chunks from the root along the ring.
class RingSteps {
 public:
  RingSteps(Collective collective, Rank rank, uint32_t ranks, uint64_t elements,
            uint64_t chunk_elements, Rank root = {0});

  // Chunks that may be sent before anything arrives.
  std::vector<ChunkId> start();
  // Where an outgoing or arriving chunk lies. `arriving` fails on one that is not due: unknown,
  // or here before (a peer's bytes are not trusted).
  ChunkRange outgoing(ChunkId id) const;
  Result<ChunkRange> arriving(ChunkId id) const;
  // The chunk has arrived and was reduced or stored. Returns the chunk that this allows to send.
  std::optional<ChunkId> received(ChunkId id);
  void sent(ChunkId id);
  bool finished() const { return to_receive_ == 0 && to_send_ == 0; }

  uint32_t steps() const { return steps_; }
  uint64_t chunks_left() const { return to_receive_ + to_send_; }
  // After a reduce-scatter: the part that this rank owns.
  ChunkRange owned() const;

 private:
  struct Segment {
    uint64_t first;
    uint64_t elements;
  };
  Segment segment(uint32_t index) const;
  uint32_t chunks_in(uint32_t segment) const;
  uint32_t sent_segment(uint32_t step) const;
  uint32_t received_segment(uint32_t step) const;
  bool reduces(uint32_t step) const;
  ChunkRange range(uint32_t segment, uint32_t chunk) const;

  Collective collective_;
  uint32_t rank_;
  uint32_t ranks_;
  uint64_t elements_;
  uint64_t chunk_;
  uint32_t root_;
  uint32_t steps_ = 0;  // of the whole operation, the same on all ranks
  uint64_t to_send_ = 0;
  uint64_t to_receive_ = 0;
  std::vector<uint32_t> arrived_first_;  // by step: index of its first bit
  std::vector<bool> arrived_;
};

// ---- one rank: which chunk next -----------------------------------------------------------

// Chunks that may be sent to one peer, most urgent first. A lane that has room takes the front;
// no chunk belongs to a lane before that, so a slow lane slows only what it already took.
class Dispatch {
 public:
  struct Entry {
    int64_t priority = 0;
    uint32_t operation = 0;
    ChunkId id;
  };
  void push(const Entry& entry);
  std::optional<Entry> pop();
  bool empty() const { return queue_.empty(); }
  size_t size() const { return queue_.size(); }

 private:
  struct Later {
    bool operator()(const Entry& a, const Entry& b) const {
      if (a.priority != b.priority) return a.priority > b.priority;
      if (a.operation != b.operation) return a.operation > b.operation;
      if (a.id.step != b.id.step) return a.id.step > b.id.step;
      return a.id.chunk > b.id.chunk;
    }
  };
  std::priority_queue<Entry, std::vector<Entry>, Later> queue_;
};

}  // namespace weft::schedule
