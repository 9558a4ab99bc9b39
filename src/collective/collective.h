// collective: operations on the data of all ranks, over lanes.
//
// The engine carries out what `schedule` decides: it starts operations when told, hands their
// chunks to the lanes that a schedule::Dispatcher names, puts what arrives where it belongs, and
// combines where it must. Several operations run at a time; the most urgent one's chunks go first.
// Tensors stay where they are: an operation's memory may consist of many parts, and nothing is
// copied together.
//
// All ranks must start the same operations under the same numbers; a chunk carries the
// operation's signature, and one that differs is an error that names both sides. A chunk that
// arrives before its operation was started here waits in memory, within a bound. Lanes to a rank
// are opened when it is first sent to. A lane that breaks is opened again, and what it may not
// have delivered goes over another one or the new one; a chunk that comes twice is taken once.
//
// Threads: one thread at a time drives an Engine together with its Reactor. Everything is
// recorded: each operation as a span, each chunk as a send on one rank and a receive on the other.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "weft/join.h"
#include "weft/reduce.h"
#include "weft/schedule.h"

namespace weft::collective {

// Memory in parts, in order.
class Buffer {
 public:
  void add(std::span<std::byte> part);
  uint64_t bytes() const { return bytes_; }
  // Calls f(std::span<std::byte>) for each stretch of [first, first + count).
  template <typename F>
  void slice(uint64_t first, uint64_t count, F&& f) const {
    if (count == 0) return;
    size_t part = find(first);
    while (count > 0) {
      uint64_t skip = first - starts_[part];
      uint64_t here = std::min<uint64_t>(count, parts_[part].size() - skip);
      f(parts_[part].subspan(skip, here));
      first += here;
      count -= here;
      ++part;
    }
  }

 private:
  size_t find(uint64_t byte) const;
  std::vector<std::span<std::byte>> parts_;
  std::vector<uint64_t> starts_;
  uint64_t bytes_ = 0;
};

// Ranks that do operations together: their numbers in the job, in the order of the group.
using Members = std::shared_ptr<const std::vector<uint32_t>>;

// The exchange's operations are of all ranks, and numbered apart from those that a program calls.
inline constexpr uint32_t kExchangeGroup = 1u << 31;

struct Operation {
  uint32_t group = 0;   // 0: all ranks
  uint64_t number = 0;  // in the group, the same on all its ranks; point to point: of the pair
  schedule::OperationShape shape;
  Members members;  // null: all ranks
  reduce::Type type = reduce::Type::float32;
  reduce::Op op = reduce::Op::sum;
  Buffer input, output;  // the same memory where the operation is in place
  int64_t priority = 0;  // smaller goes first
  Nanos deadline{0};     // without any progress; 0: the engine's owner decides
  // Its chunks are cut to this size, the same on all its ranks; 0: Engine::Options::chunk_bytes.
  uint64_t chunk_bytes = 0;
  // For the trace.
  uint32_t iteration = trace::kNone;
  uint32_t bucket = trace::kNone;
  uint16_t partition = trace::kNone16;
};

// Names an operation among all that run on a rank: collectives by group and number, point-to-point
// operations by pair, direction and number.
struct Key {
  uint32_t group = 0;
  uint32_t pair = 0;  // 0: none; otherwise the other rank and the direction
  uint64_t number = 0;
  friend bool operator==(const Key&, const Key&) = default;
};
Key key_of(const Operation& operation);
struct KeyHash {
  size_t operator()(const Key& key) const;
};
// The number by which traces, which have 32 bits for it, call an operation: the low 31 bits, and
// the highest set for what does not belong to the exchange.
uint32_t trace_number(const Key& key);

// What is in flight and since when nothing of it moved, for deadlines and for messages.
struct Flight {
  Key key;
  schedule::Collective collective = schedule::Collective::all_reduce;
  uint64_t bytes_done = 0;  // received
  uint64_t bytes_total = 0;
  uint64_t chunks_done = 0;
  Nanos since;        // on the clock of the trace
  Nanos last_change;  // a chunk of it arrived or left, or it waited its turn and others left
  Nanos deadline{0};
  std::optional<uint32_t> waits_for;  // a rank from which something is still to come
  std::optional<uint32_t>
      cannot_send_to;  // a rank that does not take, or not acknowledge, something
  std::string signature;
};
struct LaneStatus {
  uint32_t peer = 0;
  uint16_t number = 0;
  bool outgoing = true;
  bool shared_memory = false;
  bool alive = true;
  lane::LaneCounters counters;
};
struct Progress {
  size_t operations = 0;
  // The one that was started first, among those that stand still for longer than they may if there
  // are any: the same on all ranks that wait in it.
  Flight foremost;
  Nanos last_change;  // a chunk of any arrived or left
};

// The lanes of a rank: how many, for which chunks, and who serves them.
struct LaneSettings {
  uint16_t lanes = 1;                 // to each rank on another host
  uint64_t chunk_bytes = 256u << 10;  // the usual size of a chunk
  // Who serves them: the thread that drives the engine, or others.
  std::optional<lane::LaneWorkers::Kind> worker = {};
  uint32_t workers = 1;
};

class Engine final : private lane::ChunkHandler {
 public:
  struct Options : LaneSettings {
    uint64_t early_bytes_limit = 256u << 20;    // for chunks of operations not yet started here
    std::map<uint16_t, double> lane_rate = {};  // most bytes a second of a lane
    bool check_inside_machine = true;           // checksums also where no link can damage anything
  };
  // A rank cannot be talked to any more, or said something that it must not.
  using OnLost = std::function<void(Rank peer, Error error)>;
  using OnAsked = std::function<void(std::unique_ptr<net::Socket> socket)>;
  using OnBranch = std::function<void(Rank peer, std::unique_ptr<net::Socket> socket)>;

  Engine(const Options& options, join::Mesh& mesh, capture::Recorder& recorder, OnLost on_lost,
         OnAsked on_asked, OnBranch on_branch = {});
  ~Engine() override;

  // Starts the workers that the options name, and lets lanes be opened. Call it once, first.
  Result<void> begin();

  // Data must stay in place until it is finished. Fails, and leaves nothing behind, where memory
  // runs out and where another operation of the same key is running.
  Result<void> start(Operation operation);
  // Other lanes, on all ranks at the same moment. First every rank gets ready: what other ranks may
  // open from now on finds its place, and what cannot be had (a worker) is refused, with everything
  // as it was. When all are ready each changes; if one is not, each forgets it.
  // A lane that the change concerns is closed, and opened again if there still is one of its
  // number, and what it may not have delivered goes again: so there may be operations in flight.
  Result<void> get_ready(const LaneSettings& settings);
  void change_lanes();
  void forget_change();

  // Whether some of it is here before it was started.
  bool came_early(const Key& key) const { return early_.contains(key); }
  // Opens the lanes to a rank, if they are not open.
  void prepare(Rank peer);
  // Opens a branch (weft/join.h), and tries until it works: on_branch has it then.
  void open_branch(Rank peer) { links_->open_branch(peer); }
  bool connected(Rank peer) const;  // with at least one lane
  // Moves what can be moved; call after each turn of the reactor. Returns what has finished.
  std::vector<Key> poll(Nanos now);
  // The last poll() could have sent more: call it again without waiting for an event.
  bool more_to_send() const { return more_to_send_; }

  // Tells all peers what has arrived from them. Before connections are closed in agreement: a peer
  // that has not heard of it would send the last chunks again.
  void acknowledge();

  // Touches no operation's memory from now on: its owner may have it back. Nothing finishes.
  void halt();

  // Nobody drove for so long, because this process did not run: that is nobody's silence.
  void forgive(Nanos gap);

  bool idle() const { return running_.empty(); }
  Progress progress(Nanos now) const;
  std::vector<Flight> flights() const;
  std::vector<LaneStatus> lanes() const;
  void record_tcp_info();  // one sample a lane into the trace
  // Processor time of the lane workers, where there are any, and whether they are processes. From
  // any thread.
  Nanos workers_processor_time() const;
  bool has_processes() const;

 private:
  struct Running {
    Operation operation;
    schedule::Steps steps;
    Nanos since;
    Running(Operation what, schedule::Steps how, Nanos when)
        : operation(std::move(what)), steps(std::move(how)), since(when) {}
    uint64_t order = 0;  // of starting on this rank
    Nanos last_change;
    // By member: chunks that wait for their turn, and that have not settled.
    std::vector<uint32_t> queued, unsettled;
    std::vector<uint64_t>
        taken;  // by receive: checksums of the payloads that came, where there are
    uint64_t bytes_done = 0;
    uint64_t bytes_total = 0;
    uint64_t chunks_done = 0;
    std::vector<std::byte> temporary;
    Buffer temporary_buffer;
    std::vector<std::byte> input_copy;  // of one that may not be in place, and is
    std::vector<float> wide;
    std::unordered_map<uint32_t, std::vector<std::byte>> held;  // by receive: not yet its turn
  };
  // Where a chunk came from, or went; it may outlive the lane.
  struct Line {
    uint32_t peer = 0;
    uint16_t number = 0;
    trace::TrackId track = 0;
  };
  struct Early {
    Line line;
    lane::ChunkHeader header;
    std::vector<std::byte> payload;  // the first header.length bytes count
    lane::Moment when;
  };
  // What a lane is receiving right now.
  struct Landing {
    enum class Where : uint8_t { nowhere, discard, early, scratch, destination } where;
    Key key;
    uint32_t receive = 0;
  };
  struct Slot {
    std::unique_ptr<lane::LanePort> lane;
    lane::LaneWorkers* served_by = nullptr;  // null: the thread that drives
    uint32_t peer = 0;
    uint16_t number = 0;
    bool outgoing = true;
    bool broken = false;
    trace::TrackId track = 0;
    Line line() const { return {peer, number, track}; }
    Landing landing{Landing::Where::nowhere, {}, 0};
    std::vector<std::byte> scratch;
    std::unique_ptr<Early> early;
  };
  struct Resend {
    lane::ChunkHeader header;
    std::vector<std::byte> payload;
  };
  struct Peer {
    bool wanted = false;
    std::vector<std::optional<uint32_t>> out;  // slots, by the number of the lane
    Nanos last_sent{0};
    std::optional<Nanos> down_since;
  };
  struct Signature {
    uint8_t collective, type, op;
    uint16_t root;
    uint64_t elements;
    friend bool operator==(const Signature&, const Signature&) = default;
  };

  bool take(uint32_t lane, lane::OutgoingChunk& out) override;
  void sent(uint32_t lane, const lane::ChunkHeader& header, uint64_t token,
            lane::Moment when) override;
  void receipted(uint32_t lane, const lane::ChunkHeader& header, uint64_t token) override;
  Result<lane::Destination> arriving(uint32_t lane, const lane::ChunkHeader& header,
                                     bool in_place) override;
  Result<void> arrived(uint32_t lane, const lane::ChunkHeader& header, const std::byte* payload,
                       lane::Moment when) override;

  // engine.cc: operations
  uint32_t global(const Operation& operation, uint32_t member) const;
  static Signature signature_of(const Running& running, uint32_t peer, bool outgoing);
  Result<uint32_t> check(const Running& running, uint32_t peer,
                         const lane::ChunkHeader& header) const;
  Error mismatch(uint32_t peer, const lane::ChunkHeader& header, const Signature& own) const;
  static const Buffer& space_of(const Running& running, schedule::Space space);
  void begin(Running& running);
  Flight flight_of(const Key& key, const Running& running) const;
  void prepare_memory(Running& running);
  void take_in(Running& running, uint32_t receive, const std::byte* data);
  void apply(Running& running, uint32_t receive, const std::byte* data);
  Result<void> absorb_early(Running& running, Early& early);
  void offer(Running& running, uint32_t send);
  static std::vector<std::byte> copy_of(const Running& running, uint32_t send);
  void settle(const schedule::Dispatcher::Settled& settled);
  void finish_if_done(Running& running);
  void record_reduce(const Running& running, const schedule::Receive& receive, Nanos begin);
  void record_chunk(trace::Shape shape, const Line& line, const lane::ChunkHeader& header,
                    lane::Moment when);
  static Result<void> is_the_same(const Running& running, uint32_t peer, uint32_t receive,
                                  const lane::ChunkHeader& header);
  bool lands_elsewhere(uint32_t lane, const Key& key, uint32_t receive) const;
  void give_up_landings(const Key& key, uint32_t receive);

  // peers.cc: lanes
  Result<std::shared_ptr<lane::LaneWorkers>> start_workers(const LaneSettings& settings,
                                                           uint64_t chunk_bytes);
  uint16_t lanes_to(uint32_t rank) const;
  void renew_lanes(uint32_t rank, bool all);
  void dismiss_workers();
  void open_lanes(uint32_t rank);
  void replace_lane(Rank rank, uint16_t number);
  uint32_t add_lane(bool outgoing, Rank peer, uint16_t number, std::unique_ptr<net::Socket> socket,
                    std::shared_ptr<lane::shm::Segment> shared);
  void broke(uint32_t lane, Error error);
  void reap(Nanos now);
  schedule::Room room_of(uint32_t rank, uint16_t number) const;
  void send_some();
  void send_receipts(Nanos now);

  // Lanes stamp with the clock of the trace.
  struct RecorderClock final : Clock {
    explicit RecorderClock(const capture::Recorder& recorder) : recorder_(recorder) {}
    Nanos now() const override { return recorder_.now(); }
    const capture::Recorder& recorder_;
  };

  Options options_;
  join::Mesh& mesh_;
  capture::Recorder& recorder_;
  RecorderClock clock_;
  OnLost on_lost_;
  OnAsked on_asked_;
  OnBranch on_branch_;
  std::unique_ptr<join::Links> links_;
  schedule::Programs programs_;
  mutable std::mutex workers_mutex_;  // what other threads may ask about is changed under it
  LaneSettings settings_;
  // Who serves lanes that are opened from now on, if not the thread that drives; and all who still
  // serve some. They outlive the lanes that they serve.
  std::shared_ptr<lane::LaneWorkers> workers_;
  std::vector<std::shared_ptr<lane::LaneWorkers>> all_workers_;
  Nanos dismissed_time_{0};  // processor time of workers that are gone
  struct Change {
    LaneSettings settings;
    std::shared_ptr<lane::LaneWorkers> workers_before;
    bool other_service = false;  // not only another number of lanes
  };
  std::optional<Change> change_;  // that this rank is ready for
  std::vector<Peer> peers_;       // by rank
  std::vector<Slot> slots_;       // a lane's index
  std::vector<uint32_t> broken_;
  bool halted_ = false;
  trace::TrackId operation_track_ = 0;
  std::vector<trace::NameId> tcp_names_;
  std::vector<trace::NameId> collective_names_;  // by collective; of what a program calls
  std::unordered_map<Key, Running, KeyHash> running_;
  std::unordered_map<uint64_t, Running*> by_order_;
  uint64_t next_order_ = 0;
  std::vector<Key> finished_;
  // What has ended, for a while: its chunks may come again, or be meant for something else.
  std::unordered_map<Key, Signature, KeyHash> ended_;
  std::deque<Key> ended_order_;
  std::unordered_map<Key, std::vector<Early>, KeyHash> early_;
  uint64_t early_bytes_ = 0;
  bool paused_any_ = false;
  schedule::Dispatcher dispatcher_;
  std::optional<schedule::Dispatcher::HandOver> handing_;  // what the lane that is asked may take
  std::unordered_map<uint64_t, Resend> resends_;           // by ticket
  std::vector<std::vector<std::byte>> spare_;              // temporaries to use again
  std::vector<std::vector<std::byte>> spare_early_;        // and what held early chunks
  std::vector<uint32_t> ready_sends_, ready_receives_;
  schedule::Owed owed_;  // receipts
  Nanos owed_since_;
  bool more_to_send_ = false;
  uint64_t next_message_;
  Nanos last_change_;
};

}  // namespace weft::collective
