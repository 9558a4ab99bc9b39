// lane: chunks over one connection.
//
// A lane is one connection from a rank to another, over which chunks go one way and receipts come
// back. Chunks say for themselves which operation, step, offset and length they are, so any chunk
// may use any lane, and a lane with room takes whatever is most urgent.
//
//   rank r ══lane 0..N-1══> any rank      chunks; receipts the other way
//
// Between ranks on one host a lane's bytes go through shared memory, and its connection only
// carries wake-ups. A lane is served by the thread that drives its reactor, or by a worker: a
// thread, or an auxiliary process. Bytes from a peer are checked before they are used: lengths are
// bounded, headers and payloads carry checksums.
//
// Threads: one thread at a time drives a Reactor and the lanes registered with it. Nothing blocks.
// Not here: who opens connections and proves what they are (join), and what chunks mean
// (collective).
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "weft/capture.h"
#include "weft/cost.h"
#include "weft/net.h"
#include "weft/schedule.h"

namespace weft::lane {

inline constexpr uint32_t kMaxChunkBytes = 64u << 20;

// ---- chunks ------------------------------------------------------------------------------

// 64 bytes in front of every chunk; docs/wire.md has the layout.
struct ChunkHeader {
  // The signature: what both sides must agree on.
  uint8_t collective = 0;
  uint8_t type = 0;  // of elements; reduce::Type
  uint8_t op = 0;    // reduce::Op
  uint16_t root = 0;
  uint64_t elements = 0;  // of the whole operation
  // Which chunk of which operation.
  uint32_t group = 0;  // of ranks; 0 is all
  uint64_t operation = 0;
  uint16_t step = 0;
  uint32_t chunk = 0;
  uint64_t first = 0;          // element offset of this chunk in its message
  uint32_t length = 0;         // payload bytes
  bool wants_receipt = false;  // nobody keeps a copy of it: its sender waits
  // Its lane broke, and it is sent once more from where it lies. If it had arrived, what followed
  // from it may lie there by now.
  bool again = false;
  uint64_t message = 0;   // unique in the run
  uint64_t checksum = 0;  // XXH3-64 of the payload; 0: none was made
};
inline constexpr size_t kChunkHeaderBytes = cost::kHeaderBytes;

void encode(const ChunkHeader& header, std::span<std::byte, kChunkHeaderBytes> out);
// Fails with corrupt on anything that encode() cannot have written.
Result<ChunkHeader> decode(std::span<const std::byte, kChunkHeaderBytes> bytes);

uint64_t checksum(std::span<const std::span<const std::byte>> parts);

struct OutgoingChunk {
  ChunkHeader header;                               // checksum is filled in by the lane
  std::vector<std::span<const std::byte>> payload;  // stays valid: see keep
  uint64_t token = 0;                               // the handler's own word for it
  // The lane copies the payload as it leaves, and keeps it until the receipt. Otherwise it stays
  // where it lies until then; in shared memory, until it has left.
  bool keep = false;
};

// Where an arriving chunk is to be put.
struct Destination {
  bool not_yet = false;   // there is no place for it yet: stop reading this lane until
                          // Lane::resume()
  bool in_place = false;  // read it where the transport has it; only if that was offered
  std::vector<std::span<std::byte>> payload;  // otherwise: adds up to the header's length
};

struct Moment {
  Nanos first;  // first byte given to, or taken from, the kernel
  Nanos last;
};

// Who supplies chunks to lanes and takes those that arrive: the collective engine, or the probe.
class ChunkHandler {
 public:
  virtual ~ChunkHandler() = default;
  // Out of send_one(): the lane has room. Returns false when there is nothing to send.
  virtual bool take(uint32_t lane, OutgoingChunk& out) = 0;
  // The chunk has left whole.
  virtual void sent(uint32_t lane, const ChunkHeader& header, uint64_t token, Moment when) = 0;
  // It has arrived, as the other end says: each chunk, in their order. Never through shared memory.
  virtual void receipted(uint32_t lane, const ChunkHeader& header, uint64_t token) {
    (void)lane, (void)header, (void)token;
  }
  // `in_place`: the payload is in memory that can be read where it is.
  virtual Result<Destination> arriving(uint32_t lane, const ChunkHeader& header, bool in_place) = 0;
  // `payload` is null unless the landing was in place.
  virtual Result<void> arrived(uint32_t lane, const ChunkHeader& header, const std::byte* payload,
                               Moment when) = 0;
};

// ---- shared memory -----------------------------------------------------------------------

// Memory that a connector offers to the acceptor of a lane on the same host.
namespace shm {
class Segment;
// A new one, under a name that nobody can guess. What killed processes left is removed first.
Result<std::shared_ptr<Segment>> make(net::System& system);
// One that another process made.
Result<std::shared_ptr<Segment>> attach(net::System& system, const std::string& name);
const std::string& name_of(const Segment& segment);
}  // namespace shm

// ---- lanes -------------------------------------------------------------------------------

struct LaneCounters {
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  uint64_t chunks_sent = 0;
  uint64_t chunks_received = 0;
};

// What a user of a lane sees of it, whoever serves its connection.
class LanePort {
 public:
  virtual ~LanePort() = default;
  // What it can do for another chunk now.
  virtual schedule::Room room() const = 0;
  // Takes one chunk, if it has room, and sends as much of it as the transport takes now; with the
  // rest it goes on by itself. It never takes one unasked: who gets the next is not its decision.
  // True when the chunk has gone, so that there may be room for another.
  virtual bool send_one() = 0;
  // Its sender has given it up for another: takes what lies in memory, since nothing more will
  // come. False if some of it has no place yet: it is taken when the lane resumes.
  virtual bool drain() { return true; }
  virtual void resume() = 0;  // a chunk that was refused with not_yet may be offered again
  // Touches no payload from now on; the connection stays open, and nobody is told.
  virtual void halt() = 0;
  // Sends receipts that are due but not urgent enough to be sent by themselves; `all`: also those
  // that could wait for more, because no more will come.
  virtual void send_receipts(bool all = false) { (void)all; }
  virtual bool ready() const = 0;  // out: the other end has answered
  virtual bool shared() const = 0;
  virtual const LaneCounters& counters() const = 0;
  virtual std::optional<net::TcpInfo> tcp_info() const = 0;

  // Chunks that a lane that failed may not have delivered, oldest first. Those that it was to keep
  // and that had left whole come with their bytes.
  struct Unsettled {
    ChunkHeader header;
    uint64_t token = 0;
    bool retained = false;
    std::vector<std::byte> payload;
  };
  virtual std::vector<Unsettled> take_unsettled() = 0;
};

// One connection. Errors end the lane and are told once.
class Lane final : public LanePort, public net::Reactor::Handler {
 public:
  // `out` and `in` are the two ends of a lane; `without_receipts` is a connection on which
  // chunks go either way, as the probe uses it.
  enum class Role : uint8_t { without_receipts, out, in };
  using OnError = std::function<void(uint32_t lane, Error error)>;
  // `unsent_limit`: how much may wait in the kernel before the lane counts as full.
  Lane(Role role, net::Reactor& reactor, std::unique_ptr<net::Socket> socket,
       std::shared_ptr<shm::Segment> shared, uint32_t index, ChunkHandler& handler,
       const Clock& clock, uint32_t unsent_limit, OnError on_error);
  ~Lane() override;

  schedule::Room room() const override;
  bool send_one() override;
  bool drain() override;
  void resume() override;
  void halt() override;
  void send_receipts(bool all = false) override;
  bool failed() const { return failed_; }
  bool ready() const override { return !failed_ && greeted_; }
  bool shared() const override { return socket_->shared(); }
  const LaneCounters& counters() const override { return counters_; }
  std::optional<net::TcpInfo> tcp_info() const override;
  void on_events(uint32_t epoll_events) override;
  std::vector<Unsettled> take_unsettled() override;
  // Leaves checksums of payloads out where no link can damage them.
  void trust_this_machine();

 private:
  bool needs_receipts() const { return role_ == Role::out && !socket_->shared(); }
  bool push_out();
  void chunk_left(Nanos now);
  void receive_some();
  bool use_ahead();
  void receive_shared();
  void answer_bells();
  bool begin_payload();
  bool end_payload(const std::byte* in_place, Nanos now);
  void receive_receipts();
  void send_receipt(bool asked);
  void lose(const char* doing, ssize_t outcome);
  void attach();
  void fail(Error error);
  void update_interest();

  Role role_;
  net::Reactor& reactor_;
  std::unique_ptr<net::Socket> socket_;
  std::shared_ptr<shm::Segment> offered_;
  uint32_t index_;
  ChunkHandler& handler_;
  const Clock& clock_;
  OnError on_error_;
  uint32_t interest_ = 0;
  bool failed_ = false;
  bool greeted_ = false;
  bool deaf_ =
      false;  // in: no bells come any more, and the memory stays until the lane is replaced
  bool checks_ = true;           // own payloads get checksums
  bool needs_checksums_ = true;  // and those that come must have them
  LaneCounters counters_;

  bool sending_ = false;
  bool want_write_ = false;
  OutgoingChunk out_;
  std::array<std::byte, kChunkHeaderBytes> out_header_;
  std::vector<iovec> out_parts_;
  size_t out_part_ = 0;
  Nanos out_first_;
  std::deque<Unsettled> unsettled_;
  std::vector<std::vector<std::byte>> spare_;
  uint64_t settled_ = 0;

  // Receipts: going out (in) or coming in (out).
  std::vector<std::byte> receipt_;
  size_t receipt_done_ = 0;
  schedule::Receipts receipts_;

  bool paused_ = false;
  bool in_payload_ = false;
  // Read but not yet used: what came behind a payload, or a small chunk as a whole.
  static constexpr size_t kAhead = 8192;
  std::array<std::byte, kAhead> ahead_;
  size_t ahead_have_ = 0;
  ChunkHeader in_header_;
  Destination landing_;
  std::vector<iovec> in_parts_;
  std::vector<iovec> call_parts_;
  size_t in_part_ = 0;
  Nanos in_first_;
};

// ---- lanes that others serve -------------------------------------------------------------

// Threads, or auxiliary processes that share memory with this one, that serve connections: they
// make the system calls and the checksums, and the thread that drives the engine only hands over
// chunks and takes them. They work on copies: no worker ever has an address of the user's memory.
// One that ends or stands still is named, and its lanes break as if their connections had; lanes
// that are opened then go to the workers that are left, or stay with the thread that drives.
// docs/design/0003-lane-workers.md tells how.
class LaneWorkers {
 public:
  enum class Kind : uint8_t { thread, process };
  struct Options {
    Kind kind = Kind::thread;
    uint32_t count = 1;
    uint32_t lanes = 1;        // that each serves at most, each way
    uint32_t chunk_bytes = 0;  // the largest
    std::string program;       // process: the weft program; empty: found by itself
  };
  // Connections and workers are of `network`; what is told has the time of `clock`.
  static Result<std::unique_ptr<LaneWorkers>> start(const Options& options, net::Network& network,
                                                    net::Reactor& reactor, ChunkHandler& handler,
                                                    const Clock& clock, Lane::OnError on_error);
  virtual ~LaneWorkers() = default;
  // Hands a connection over to the worker of lane `number`. `index` names it to the handler.
  virtual std::unique_ptr<LanePort> serve(Lane::Role role, std::unique_ptr<net::Socket> socket,
                                          uint16_t number, uint32_t index,
                                          uint32_t unsent_limit) = 0;
  // Call it often, with the time: a worker that stands still is noticed here, and its lanes break.
  virtual void watch(Nanos now) = 0;
  // Processor time that the workers have used.
  virtual Nanos processor_time() const = 0;
};
// What an auxiliary process does, from its start to its end; the numbers are its descriptors.
int run_lane_worker(int memory, int channel, int bell_in, int bell_out);

}  // namespace weft::lane
