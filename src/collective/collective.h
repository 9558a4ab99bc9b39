// collective: operations on the data of all ranks, over the lanes to the ring neighbours.
//
// The engine carries out what `schedule` decides: it starts operations when told, offers their
// chunks to whichever lane has room, puts what arrives where it belongs, and adds where it must.
// Several operations run at a time; the most urgent one's chunks go first. Tensors stay where
// they are: an operation's buffer may consist of many parts, and nothing is copied together.
//
// All ranks must start the same operations under the same numbers; a chunk carries the
// operation's signature, and one that differs is an error that names both sides. A chunk that
// arrives before its operation was started here waits in memory, within a bound.
//
// Threads: one thread drives an Engine together with its Reactor. Everything is recorded: each
// operation as a span, each chunk as a send on one rank and a receive on the other.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "weft/schedule.h"
#include "weft/transport.h"

namespace weft::collective {

// The memory of one operation, in order.
class Buffer {
 public:
  void add(std::span<float> part);
  uint64_t elements() const { return elements_; }
  // Calls f(std::span<float>) for each stretch of [first, first + count).
  template <typename F>
  void slice(uint64_t first, uint64_t count, F&& f) const {
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
  size_t find(uint64_t element) const;
  std::vector<std::span<float>> parts_;
  std::vector<uint64_t> starts_;
  uint64_t elements_ = 0;
};

// Adds `from` to `to`, element by element.
void add_to(std::span<float> to, const float* from);

struct Operation {
  uint32_t number = 0;  // the same on all ranks
  schedule::Collective collective = schedule::Collective::all_reduce;
  Buffer buffer;
  Rank root;             // broadcast only
  int64_t priority = 0;  // smaller goes first
  // For the trace.
  trace::Kind kind = trace::Kind::operation;
  uint32_t iteration = trace::kNone;
  uint32_t bucket = trace::kNone;
  uint16_t partition = trace::kNone16;
};

// What is in flight and since when nothing moved, for deadlines and for messages.
struct Progress {
  size_t operations = 0;
  uint32_t oldest = 0;      // operation number
  uint64_t bytes_done = 0;  // of the oldest
  uint64_t bytes_total = 0;
  Nanos last_change;                // a byte of any chunk arrived or left
  bool waits_for_previous = false;  // something is due from the previous rank
  bool waits_for_next = false;      // something could not be handed to the next rank
};

class Engine final : private transport::ChunkHandler {
 public:
  struct Options {
    Rank rank;
    uint32_t ranks = 1;
    uint64_t chunk_elements = 65536;
    uint64_t early_bytes_limit = 256u << 20;  // for chunks of operations not yet started here
  };
  // A lane broke: to which rank, and why.
  using OnLost = std::function<void(Rank peer, Error error)>;

  Engine(const Options& options, transport::Reactor& reactor, std::vector<Fd> lanes_out,
         std::vector<Fd> lanes_in, capture::Recorder& recorder, OnLost on_lost);
  ~Engine() override;

  // REQUIRES: the number is not running. Data must stay in place until the operation is finished.
  void start(Operation operation);
  // Moves what can be moved; call after each turn of the reactor. Returns what has finished.
  std::vector<uint32_t> poll();
  // The last poll() could have sent more: call it again without waiting for an event.
  bool more_to_send() const { return more_to_send_; }

  // Touches no operation's memory from now on: its owner may have it back. Nothing finishes.
  void halt();

  bool idle() const { return running_.empty(); }
  Progress progress() const;
  void record_tcp_info();  // one sample a lane into the trace

 private:
  struct Running {
    Operation operation;
    schedule::RingSteps steps;
    Nanos since;
    uint64_t bytes_done = 0;
    uint64_t bytes_total = 0;
  };
  struct Early {
    uint16_t lane;
    transport::ChunkHeader header;
    std::vector<std::byte> payload;
    transport::Moment when;
  };

  bool take(uint16_t lane, transport::OutgoingChunk& out) override;
  void sent(uint16_t lane, const transport::ChunkHeader& header, transport::Moment when) override;
  Result<transport::Landing> arriving(uint16_t lane, const transport::ChunkHeader& header) override;
  Result<void> arrived(uint16_t lane, const transport::ChunkHeader& header,
                       transport::Moment when) override;

  bool is_landing(const transport::ChunkHeader& header) const;
  Result<schedule::ChunkRange> check(const Running& running,
                                     const transport::ChunkHeader& header) const;
  void absorb(Running& running, const transport::ChunkHeader& header,
              const std::byte* reduced_from);
  Result<void> absorb_early(Running& running, const Early& early);
  void offer(const Running& running, schedule::ChunkId id);
  void finish_if_done(Running& running);
  void record_chunk(trace::Shape shape, uint16_t lane, const transport::ChunkHeader& header,
                    transport::Moment when);
  uint16_t lane_count() const { return static_cast<uint16_t>(out_.size()); }

  // Lanes stamp with the clock of the trace.
  struct RecorderClock final : Clock {
    explicit RecorderClock(const capture::Recorder& recorder) : recorder_(recorder) {}
    Nanos now() const override { return recorder_.now(); }
    const capture::Recorder& recorder_;
  };

  Options options_;
  capture::Recorder& recorder_;
  RecorderClock clock_;
  OnLost on_lost_;
  uint32_t next_rank_;
  uint32_t previous_rank_;
  std::vector<std::unique_ptr<transport::Lane>> out_;  // lane numbers 0 to N-1
  std::vector<std::unique_ptr<transport::Lane>> in_;   // N to 2N-1
  std::vector<trace::TrackId> tracks_;                 // by lane number
  trace::TrackId operation_track_ = 0;
  std::vector<trace::NameId> tcp_names_;
  std::unordered_map<uint32_t, Running> running_;
  std::vector<uint32_t> finished_;
  std::unordered_map<uint32_t, std::vector<Early>> early_;
  uint64_t early_bytes_ = 0;
  std::vector<std::vector<std::byte>> scratch_;        // by incoming lane
  std::vector<std::unique_ptr<Early>> landing_early_;  // by incoming lane: payload on its way in
  struct Place {
    uint32_t operation;
    schedule::ChunkId id;
  };
  std::vector<std::optional<Place>> landing_;  // by incoming lane: chunk of a running operation
  schedule::Dispatch dispatch_;
  size_t next_lane_ = 0;
  bool more_to_send_ = false;
  uint64_t next_message_;
  Nanos last_change_;
};

}  // namespace weft::collective
