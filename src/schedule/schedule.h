// schedule: what is decided, apart from what is done.
//
// Which tensors travel together, in which pieces, which piece starts next, which chunk may be
// sent now and which lane takes it: pure state machines with no clock, thread or socket. The
// runtime drives them with real messages, the replayer drives the same objects with simulated time,
// so a prediction is of what the runtime does. docs/schedule.md tells who decides what, and when.
//
//   Plan x tensors ──► Layout: buckets, cut into pieces
//   gradient ready ──► Readiness (each rank) ──bucket complete──► Reports (each rank, of those
//                                                      │           below it in the tree)
//                                                      ▼
//                                              Admission (rank 0)
//                                                      │ all ranks ready, credit left
//                                                      ▼
//                                  one common order of operations, told to all ranks
//                                                      │
//                                                      ▼
//   each rank: Steps of a Program (which chunk may go) ──► Dispatcher (the most urgent one, to which
//              peer, over which lane; when it is settled) ──► the lane does as it is told
//
// Sizes are elements of the job as it runs, and those that compare buckets words of 4 bytes, which
// an fp32 element is. Threads: one at a time per object.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "weft/cost.h"
#include "weft/plan.h"

namespace weft::schedule {

inline constexpr uint64_t kElementBytes = 4;  // fp32, and a word

// A gradient that takes part. Listed in forward order: the order of layers, then of creation.
struct Tensor {
  std::string name;
  uint64_t elements = 0;
  uint32_t layer = 0;  // whose forward needs it first
  // Of its elements. Tensors of different types share no bucket.
  uint32_t element_bytes = kElementBytes;
  uint8_t type = 1;  // reduce::Type
  uint64_t words() const { return words_of(elements, element_bytes); }
  static uint64_t words_of(uint64_t elements, uint64_t element_bytes) {
    return (elements * element_bytes + kElementBytes - 1) / kElementBytes;
  }
};

// A part of a bucket that travels as one operation.
struct Piece {
  uint32_t bucket = 0;
  uint16_t partition = 0;
  uint64_t first = 0;  // element offset in the bucket
  uint64_t elements = 0;
  uint64_t words = 0;  // what it counts against the credit
};

struct Bucket {
  std::vector<uint32_t> tensors;  // in the order in which they lie
  std::vector<uint64_t> offsets;  // element offset of each
  uint64_t elements = 0;
  uint32_t element_bytes = kElementBytes;
  int64_t priority = 0;      // smaller is more urgent; equal: first eligible first
  uint32_t first_piece = 0;  // its pieces are consecutive
  uint32_t pieces = 0;
};

// How a plan lays out these tensors. The same on every rank, because it depends on nothing else.
struct Layout {
  std::vector<Bucket> buckets;
  std::vector<Piece> pieces;
  std::vector<uint32_t> bucket_of;  // by tensor
  uint64_t chunk_elements = 0;      // words
  uint64_t credit_elements = 0;     // words; 0: no limit
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

// A layout need not be the first one of a job: steps and operations go on from where it begins.
struct Beginning {
  uint64_t step = 0;
  uint64_t operation = 0;
};

class Readiness {
 public:
  explicit Readiness(const Layout& layout, uint64_t first_step = 0);

  // Gradient `tensor` of `step` is there. Returns the bucket that this completes, if any.
  // Fails if the tensor is unknown, was already ready for this step, or skips a step.
  Result<std::optional<uint32_t>> ready(uint32_t tensor, uint64_t step);
  // What ready() would say, without its being so.
  Result<void> may_be_ready(uint32_t tensor, uint64_t step) const;
  // The tensors of `tensor`'s bucket that were not made ready in `step`.
  std::vector<uint32_t> lacking(uint32_t tensor, uint64_t step) const;
  // The step in which `tensor` is made ready next.
  uint64_t due(uint32_t tensor) const { return next_step_[tensor]; }

 private:
  const Layout& layout_;
  std::vector<uint64_t> next_step_;  // by tensor
  std::vector<uint32_t> missing_;    // by bucket, in the bucket's current step
};

// ---- the way to rank 0 ----------------------------------------------------------------------

// Who reports to whom, and who hears from whom what starts: at most `fan_out` ranks from each.
// Rank r has below it the ranks r * fan_out + 1 to r * fan_out + fan_out, so rank 0 has nobody
// above, and a tree of so few ranks that all report to rank 0 is what it is without one.
struct Tree {
  uint32_t ranks = 1;
  uint32_t fan_out = 1;  // at least 1

  static Tree flat(uint32_t ranks) { return {ranks, ranks > 2 ? ranks - 1 : 1}; }
  bool is_flat() const { return fan_out + 1 >= ranks; }
  // REQUIRES: rank > 0.
  uint32_t above(uint32_t rank) const { return (rank - 1) / fan_out; }
  uint32_t first_below(uint32_t rank) const;           // ranks if there is none
  uint32_t below(uint32_t rank) const;                 // how many
  uint32_t depth(uint32_t rank) const;                 // how many reports it takes to reach rank 0
  uint32_t depth() const { return depth(ranks - 1); }  // of the rank that is farthest
  friend bool operator==(const Tree&, const Tree&) = default;
};

// The tree of the fewest levels that halves what an agreement takes without one (a tree has more
// connections that all depend on), by cost::agreement_seconds; with cost::typical() where latency
// or messages were not measured.
Tree choose_tree(const cost::Costs& costs, uint32_t ranks);
// As a run chooses that knows what the one these costs were fitted to knew.
Tree tree_of_run(const cost::Costs& fitted, uint32_t ranks);

// What a rank knows of its own buckets and of those of the ranks below it. A bucket that it and all
// of these have is reported once, upwards.
class Reports {
 public:
  Reports(const Layout& layout, const Tree& tree, Rank rank, uint64_t first_step = 0);

  // `rank` (this one, or one right below it, for itself and all below it) has `bucket` in `step`.
  // True if all have it now. Fails on a report that a correct rank cannot make.
  Result<bool> ready(Rank rank, uint32_t bucket, uint64_t step);
  // The bucket that some of them reported and others did not, the oldest one.
  struct Lacking {
    uint32_t bucket = 0;
    uint64_t step = 0;
    std::vector<Rank> missing;  // this rank, or those right below it
  };
  std::optional<Lacking> lacking() const;
  // Who has not reported it, of this rank and those right below it.
  std::vector<Rank> missing(uint32_t bucket, uint64_t step) const;

 private:
  Rank rank_of(size_t place) const;

  uint32_t self_;
  uint32_t first_below_;
  uint32_t below_;
  std::vector<std::vector<uint64_t>> reported_;  // by bucket; this rank, then those below: steps
  std::vector<uint64_t> complete_;               // by bucket: steps that all have reported
};

// ---- rank 0: the common order -------------------------------------------------------------

struct Start {
  uint64_t operation = 0;  // 0, 1, 2, ...: the common order
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
  Admission(const Layout& layout, const Tree& tree, const Beginning& from = {});

  // Rank 0, or a rank right below it and all below that, have `bucket` in `step`. Fails on a report
  // that a correct rank cannot make.
  Result<void> ready(Rank rank, uint32_t bucket, uint64_t step);
  // An operation has ended on the deciding rank: its credit returns.
  Result<void> finished(uint64_t operation);
  // The next operation to start, if any may start now. Call until it returns nothing.
  std::optional<Start> next();

  uint64_t in_flight_elements() const { return in_flight_; }
  uint64_t next_operation() const { return next_operation_; }
  std::optional<Reports::Lacking> lacking() const { return reports_.lacking(); }

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
  Reports reports_;
  std::priority_queue<Eligible, std::vector<Eligible>, std::greater<>> eligible_;
  std::unordered_map<uint64_t, uint64_t> running_;  // operation -> elements
  uint64_t eligible_count_ = 0;
  uint64_t in_flight_ = 0;
  uint64_t next_operation_ = 0;
};

// ---- one operation on one rank: its program -------------------------------------------------

// On the wire: append, never renumber.
enum class Collective : uint8_t {
  all_reduce = 1,
  reduce_scatter = 2,
  all_gather = 3,
  broadcast = 4,
  reduce = 5,
  gather = 6,
  scatter = 7,
  all_to_all = 8,
  barrier = 9,
  point_to_point = 10,
};
const char* name_of(Collective collective);

enum class Algorithm : uint8_t {
  ring = 1,
  halving_doubling = 2,  // any number of ranks; the extra ones are folded in first
  tree = 3,              // double binary tree, pipelined by chunks
  hierarchical = 4,      // rings inside hosts, rings between them
  doubling = 5,          // recursive doubling: all data in every step; for small operations
  direct = 6,            // everyone with everyone, one step (two for all_reduce)
};
inline constexpr Algorithm kAlgorithms[] = {Algorithm::ring,     Algorithm::halving_doubling,
                                            Algorithm::tree,     Algorithm::hierarchical,
                                            Algorithm::doubling, Algorithm::direct};
const char* name_of(Algorithm algorithm);
std::optional<Algorithm> algorithm_named(std::string_view name);

// A chunk within its operation: which message (a step's transfer from one rank to another), and
// which part of it.
struct ChunkId {
  uint16_t step = 0;
  uint32_t chunk = 0;
  friend bool operator==(const ChunkId&, const ChunkId&) = default;
};

// What an operation is on one rank. Ranks are those of the group that does it, from 0.
struct OperationShape {
  Collective collective = Collective::all_reduce;
  Algorithm algorithm = Algorithm::ring;
  uint32_t rank = 0;
  uint32_t ranks = 1;
  uint32_t root = 0;      // broadcast, reduce, gather, scatter; point_to_point: the other rank
  uint64_t elements = 0;  // of the whole: of everyone's blocks together where there are blocks
  // Elements of each rank's block: reduce_scatter, all_gather, gather, scatter (empty: as equal as
  // can be, the first ones larger); all_to_all: what this rank sends to each.
  std::vector<uint64_t> counts;
  std::vector<uint64_t> receive_counts;  // all_to_all: what each sends to this rank
  std::vector<uint32_t> host_of;         // hierarchical: by rank; empty: all on one host
  bool sends = true;                     // point_to_point: sends to root, or receives from it
  bool wide = false;  // direct: sums are kept in fp32 and rounded once (16-bit floats)
  uint64_t chunk_elements = 65536;
  friend bool operator==(const OperationShape&, const OperationShape&) = default;
};

// Where data lies: what the caller gave, what it gets, and what the operation needs between.
enum class Space : uint8_t { input, output, temporary };

struct Send {
  uint32_t peer = 0;
  ChunkId id;
  Space space = Space::input;
  uint64_t first = 0;  // element offset in that space
  uint64_t elements = 0;
  uint64_t offset = 0;  // element offset in its message
};

struct Receive {
  uint32_t peer = 0;
  ChunkId id;
  Space space = Space::output;
  uint64_t first = 0;
  uint64_t elements = 0;
  uint64_t offset = 0;
  // Combine with what is at `with`, and put the result at `first`; otherwise just put it there.
  bool combine = false;
  bool received_first = false;  // the received value is the first operand: all ranks then combine
                                // the same values in the same order
  Space with = Space::input;
  uint64_t with_first = 0;
  // OperationShape::wide: the sum is kept in fp32 at `wide_at` of an array of
  // Program::wide_elements(). The first one widens `with` before it adds; the last one rounds into
  // `space`.
  bool wide = false;
  bool wide_opens = false;
  bool wide_closes = false;
  uint64_t wide_at = 0;
};

// Input elements that stay on this rank, copied when the operation starts.
struct Copy {
  uint64_t from = 0;  // in the input
  uint64_t to = 0;    // in the output
  uint64_t elements = 0;
};

// All that an operation does on one rank: what it sends and receives, and what must come before
// what. Immutable; made once for a shape and shared by all operations of that shape. A send waits
// for the last receives that wrote what it reads, and a receive is applied after the ones that
// wrote the same place: so each element is combined in an order that depends on the shape alone,
// and every rank ends with the same bits, whatever the lanes. Nothing is overwritten before its
// new value depends on its delivery: a lost chunk can be sent again from where it lies.
class Program {
 public:
  // REQUIRES: rank < ranks, root < ranks, chunk_elements > 0; counts and host_of empty or one a
  // rank; all_to_all: both counts or none, equal for the own rank; point_to_point: root is another
  // rank. An algorithm that does not exist for a collective is replaced by one that does (see
  // algorithm()).
  static std::shared_ptr<const Program> make(const OperationShape& shape);

  const OperationShape& shape() const { return shape_; }
  Algorithm algorithm() const { return shape_.algorithm; }
  std::span<const Send> sends() const { return sends_; }  // in the order in which they are wanted
  std::span<const Receive> receives() const { return receives_; }
  std::span<const Copy> copies() const { return copies_; }
  // The sizes of the three spaces, and of the fp32 sums. n: OperationShape::elements, or the sum of
  // counts.
  //                   input             output
  //   all_reduce      n                 n
  //   reduce_scatter  n                 own block
  //   all_gather      own block         n
  //   broadcast       root: n, else 0   n
  //   reduce          n                 root: n, else 0
  //   gather          own block         root: n, else 0
  //   scatter         root: n, else 0   own block
  //   all_to_all      sum of counts     sum of receive_counts
  //   barrier         n                 n
  //   point_to_point  sender: n, else 0 receiver: n, else 0
  uint64_t input_elements() const { return input_elements_; }
  uint64_t output_elements() const { return output_elements_; }
  uint64_t temporary_elements() const { return temporary_elements_; }
  uint64_t wide_elements() const { return wide_elements_; }
  // Whether input and output may share memory, where an element of both is the same: with blocks,
  // the own block of the larger one is the smaller one. If not, the caller's input must be copied.
  bool in_place() const;
  // The receive that a chunk from `peer` is; nullopt for one that this operation does not expect.
  std::optional<uint32_t> find(uint32_t peer, ChunkId id) const;
  // What waits for a receive: sends by index, receives by index + the number of sends.
  std::span<const uint32_t> allowed_by(uint32_t receive) const {
    return std::span(allows_).subspan(allows_first_[receive],
                                      allows_first_[receive + 1u] - allows_first_[receive]);
  }

 private:
  friend class Steps;
  friend class Compiler;
  OperationShape shape_;
  std::vector<Send> sends_;
  std::vector<Receive> receives_;
  std::vector<Copy> copies_;
  uint64_t input_elements_ = 0;
  uint64_t output_elements_ = 0;
  uint64_t temporary_elements_ = 0;
  uint64_t wide_elements_ = 0;
  // What each send and receive waits for, as counts; and what a receive allows, as lists.
  std::vector<uint32_t> send_needs_;
  std::vector<uint32_t> receive_needs_;
  std::vector<uint32_t> allows_first_;  // by receive, one more at the end: into allows_
  std::vector<uint32_t> allows_;        // sends by index; receives by index + sends
  struct Message {
    uint32_t peer;
    uint16_t step;
    uint32_t first_receive;
    uint32_t chunks;
  };
  std::vector<Message> messages_;  // that arrive here, ordered by peer and step
};

// Programs by shape, so that one that is used again is not made again. Bounded; single-threaded.
class Programs {
 public:
  std::shared_ptr<const Program> get(const OperationShape& shape);
  size_t size() const { return made_.size(); }

 private:
  struct Hash {
    size_t operator()(const OperationShape& shape) const;
  };
  std::unordered_map<OperationShape, std::shared_ptr<const Program>, Hash> made_;
  uint64_t chunks_ = 0;  // of all that were made
};

// Which all-reduce for which size, where a plan says "auto".
struct Choice {
  std::vector<std::pair<uint64_t, Algorithm>> by_size;  // up to so many bytes, ascending
  Algorithm at(uint64_t bytes) const;
};
// By the equations of `cost`; with cost::typical() where the rate or the latency is not known.
Choice choose_all_reduce(const cost::Costs& costs, const cost::Group& group);
// As a run chooses that knows what the one these costs were fitted to knew.
Choice choice_of_run(const cost::Costs& fitted, const cost::Group& group);
std::optional<double> all_reduce_seconds(const cost::Costs& costs, Algorithm algorithm,
                                         double bytes, const cost::Group& group);
// An all-reduce that was timed.
struct Timed {
  Algorithm algorithm = Algorithm::ring;
  double bytes = 0;
  double seconds = 0;
};
// The constants with which those equations come closest to the times, none of them negative.
Result<cost::Costs> fit_all_reduces(std::span<const Timed> timed, const cost::Group& group);
// The algorithm that the plan names for a size, as the runtime and the replayer both ask.
Algorithm algorithm_for(const plan::Plan& plan, uint64_t bytes, const Choice& choice);

// One operation under way on one rank. Indices are those of the program.
class Steps {
 public:
  explicit Steps(std::shared_ptr<const Program> program);
  const Program& program() const { return *program_; }

  // What may be sent before anything arrives, in order.
  void start(std::vector<uint32_t>& sends) const;
  // False for a chunk that was taken already: it came a second time.
  bool is_due(uint32_t receive) const { return !taken_[receive]; }
  // Nothing that must be applied before this one is missing.
  bool may_apply(uint32_t receive) const { return receive_needs_[receive] == 0; }
  // The chunk is here, whole. It may be applied now, or must be kept until applied() says so.
  bool take(uint32_t receive);
  // It was combined or stored. Appends the sends that this allows, and the receives taken before
  // that may be applied now.
  void applied(uint32_t receive, std::vector<uint32_t>& sends, std::vector<uint32_t>& receives);
  void sent(uint32_t send);
  bool finished() const { return to_send_ == 0 && to_receive_ == 0; }
  uint64_t chunks_left() const { return to_send_ + to_receive_; }
  // A peer from which something is still to come, if any.
  std::optional<uint32_t> waits_for() const;

 private:
  std::shared_ptr<const Program> program_;
  std::vector<uint32_t> send_needs_;
  std::vector<uint32_t> receive_needs_;
  std::vector<bool> taken_;
  uint64_t to_send_ = 0;
  uint64_t to_receive_ = 0;
};

// ---- one rank: which chunk next, over which lane ---------------------------------------------

// First in, first out, without an allocation for each element.
template <typename T>
class Fifo {
 public:
  bool empty() const { return head_ == items_.size(); }
  T& front() { return items_[head_]; }
  T& operator[](size_t i) { return items_[head_ + i]; }
  void push(const T& item) { items_.push_back(item); }
  void pop() {
    if (++head_ == items_.size()) {
      items_.clear();
      head_ = 0;
    } else if (head_ >= 256 && head_ * 2 > items_.size()) {
      items_.erase(items_.begin(), items_.begin() + static_cast<ptrdiff_t>(head_));
      head_ = 0;
    }
  }

 private:
  std::vector<T> items_;
  size_t head_ = 0;
};

// A chunk that may be sent. Wanted in the order of priority, operation, place in its program.
struct Chunk {
  int64_t priority = 0;
  uint64_t operation = 0;  // in the order in which they were started
  uint32_t send = 0;       // index in the operation's program
  uint32_t bytes = 0;      // of payload
};

// What a lane can do for a chunk now.
enum class Room : uint8_t {
  none,        // it is full, not open yet, or broken
  connection,  // it may break with what it carries, and can keep copies until it knows better
  memory,      // that the peer shares: what is there has arrived
  worker,      // serves a connection for this rank, and keeps no copies
};

// A chunk up to this size is kept by its lane until it is known to have arrived; a larger one is
// sent again from where it lies, so its operation waits for the receipt.
inline constexpr uint32_t kKeptBytes = 64u << 10;

// Which chunk goes next, to which peer, over which of its lanes; and when a chunk that went is
// settled, so that its operation need not wait for it any more. Peers take turns, a chunk each, in
// the order of their ranks; of a peer's lanes the next one with room takes its most urgent chunk.
// No chunk belongs to a lane before that, so a slow lane slows only what it has taken. What a lane
// that broke may not have delivered goes first.
//
// A turn is what a rank hands over before it looks at what has arrived: at most kRounds chunks a
// lane to each peer, because on a fast path there is always room.
class Dispatcher {
 public:
  static constexpr uint32_t kRounds = 4;

  struct HandOver {
    uint32_t peer = 0;
    uint16_t lane = 0;    // its number among the peer's
    uint64_t ticket = 0;  // names this chunk until it has arrived, also when it is sent again
    Chunk chunk;
    bool again = false;  // its lane broke
    bool keep = false;   // the lane keeps a copy until the receipt
  };
  // The place from which a chunk was sent is free. `first`: its operation may count it as sent; it
  // was not told so before.
  struct Settled {
    uint64_t ticket = 0;
    Chunk chunk;
    bool first = true;
  };

  // A peer has so many lanes, open or not. Told once for each peer, before anything is offered.
  void connect(uint32_t peer, uint16_t lanes);
  // It has so many from now on. REQUIRES: those that it loses carry nothing.
  void change_lanes(uint32_t peer, uint16_t lanes);
  void offer(uint32_t peer, const Chunk& chunk);
  // Forgets what was offered of an operation. REQUIRES: nothing of it was handed over.
  void withdraw(uint64_t operation);
  bool waiting() const { return waiting_ > 0; }

  void begin_turn();
  // The next chunk to hand over in this turn; the caller does so at once. Call until it returns
  // nothing. `room(peer, lane)` says what that lane can do now.
  template <typename RoomOf>
  std::optional<HandOver> next(RoomOf&& room);
  // The turn has ended although there was room for more.
  bool cut_short() const { return cut_short_; }

  // The oldest chunk on this lane that had not left it has left whole.
  std::optional<Settled> left(uint32_t peer, uint16_t lane);
  // The oldest chunk on this lane has arrived.
  std::optional<Settled> receipted(uint32_t peer, uint16_t lane);
  // What the lane carried goes again, over any lane: these chunks, by their tickets, oldest first.
  std::vector<std::pair<uint64_t, Chunk>> broke(uint32_t peer, uint16_t lane);

 private:
  struct Later {
    bool operator()(const Chunk& a, const Chunk& b) const {
      if (a.priority != b.priority) return a.priority > b.priority;
      if (a.operation != b.operation) return a.operation > b.operation;
      return a.send > b.send;
    }
  };
  // A chunk that was handed over and may have to go again.
  struct Carried {
    uint64_t ticket;
    Chunk chunk;
    Room over;
    bool keep;
    bool settled;
  };
  struct Lane {
    Fifo<Carried> carries;
    size_t left = 0;  // of these
  };
  struct Peer {
    uint32_t rank = 0;
    std::vector<Lane> lanes;
    uint32_t next_lane = 0;
    std::priority_queue<Chunk, std::vector<Chunk>, Later> wanted;
    Fifo<Carried> again;
    // Of the turn in which it was looked at last.
    uint64_t turn = 0;
    uint32_t chunks_left = 0;
    bool full = false;
    bool empty() const { return wanted.empty() && again.empty(); }
  };

  Lane& lane_of(uint32_t peer, uint16_t lane);
  HandOver hand_over(Peer& peer, uint16_t lane, Room room);

  std::vector<Peer> peers_;         // by rank, ascending
  std::vector<uint32_t> index_of_;  // by rank: into peers_
  size_t next_peer_ = 0;            // into peers_: the first one after the last that was served
  std::optional<uint32_t> served_;  // that one's rank
  size_t waiting_ = 0;              // chunks, of all peers
  uint64_t next_ticket_ = 0;
  uint64_t turn_ = 0;
  bool cut_short_ = false;
};

template <typename RoomOf>
std::optional<Dispatcher::HandOver> Dispatcher::next(RoomOf&& room) {
  if (waiting_ == 0) return std::nullopt;
  for (size_t i = 0; i < peers_.size(); ++i) {
    size_t index = next_peer_ + i < peers_.size() ? next_peer_ + i : next_peer_ + i - peers_.size();
    Peer& peer = peers_[index];
    if (peer.empty()) continue;
    auto lanes = static_cast<uint32_t>(peer.lanes.size());
    if (peer.turn != turn_) {
      peer.turn = turn_;
      peer.chunks_left = kRounds * lanes;
      peer.full = false;
    }
    if (peer.full) continue;
    for (uint32_t tried = 0; tried < lanes; ++tried) {
      auto lane = static_cast<uint16_t>((peer.next_lane + tried) % lanes);
      Room found = room(peer.rank, lane);
      if (found == Room::none) continue;
      if (peer.chunks_left == 0) {
        cut_short_ = true;
        break;
      }
      --peer.chunks_left;
      next_peer_ = index + 1 < peers_.size() ? index + 1 : 0;
      served_ = peer.rank;
      return hand_over(peer, lane, found);
    }
    peer.full = true;
  }
  return std::nullopt;
}

// ---- one rank: when it tells what has arrived -------------------------------------------------

// Of one lane, at its receiving end. Senders that keep a copy can wait until a receipt is worth
// its bytes; others are told when their rank is asked to (Owed).
class Receipts {
 public:
  void arrived(uint64_t bytes, bool wanted);
  void want_all() { wanted_ = told_ < arrived_; }
  // `asked`: those who wait are to be told now.
  bool due(bool asked) const;
  // Chunks that have arrived, of which all are told by this.
  uint64_t take();

 private:
  uint64_t arrived_ = 0, told_ = 0;  // chunks
  uint64_t bytes_ = 0;               // that were not told
  bool wanted_ = false;
};

// Of all lanes of a rank: senders that wait are told when an operation has all that it receives,
// because they may be waiting for nothing else, and otherwise after kReceiptPatience, so that one
// receipt tells of many chunks.
inline constexpr Nanos kReceiptPatience = Nanos::from_millis(1);
class Owed {
 public:
  // A chunk has come whose sender waits. True if nobody waited before: patience begins here.
  bool wanted() { return !std::exchange(owed_, true); }
  void received_all() { all_ = true; }
  bool any() const { return owed_; }
  // Whether to tell now; nothing is owed then. Asked after each turn.
  bool due(bool out_of_patience);

 private:
  bool owed_ = false;
  bool all_ = false;
};

}  // namespace weft::schedule
