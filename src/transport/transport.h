// transport: messages over lanes.
//
// A lane is one TCP connection to a ring neighbour. Chunks say for themselves which operation,
// step, offset and length they are, so any chunk may use any lane, and a lane with room takes
// whatever is most urgent. Beside the lanes every rank keeps one control channel to rank 0.
//
//   rank 0 <──control── rank r            small frames: ready, start, ping, abort, bye
//   rank r ══lane 0..N-1══> rank r+1      chunks
//
// Every connection begins with a proof of the job's secret (HMAC-SHA256 over fresh nonces of both
// sides); nothing else of it is read before. Bytes from a peer are checked before they are used:
// lengths are bounded, headers and payloads carry checksums.
//
// Threads: one thread drives a Reactor and everything registered with it. Nothing here blocks
// except join() and probe(), which have deadlines.
#pragma once

#include <sys/uio.h>

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "weft/capture.h"
#include "weft/cost.h"

namespace weft::transport {

inline constexpr uint16_t kProtocol = 1;
inline constexpr uint32_t kMaxChunkBytes = 64u << 20;
inline constexpr uint32_t kMaxControlBytes = 1u << 20;
inline constexpr uint32_t kMaxRanks = 4096;
inline constexpr size_t kMaxAgreement = 64;

// ---- chunks ------------------------------------------------------------------------------

// 64 bytes in front of every chunk; docs/wire.md has the layout.
struct ChunkHeader {
  uint8_t collective = 0;  // part of the signature that both sides must agree on
  uint16_t step = 0;
  uint32_t operation = 0;
  uint32_t chunk = 0;
  uint64_t elements = 0;  // of the whole operation: the rest of the signature
  uint64_t first = 0;     // element offset of this chunk in the operation
  uint32_t length = 0;    // payload bytes
  uint32_t root = 0;
  uint64_t message = 0;   // unique in the run
  uint64_t checksum = 0;  // XXH3-64 of the payload
};
inline constexpr size_t kChunkHeaderBytes = cost::kHeaderBytes;

void encode(const ChunkHeader& header, std::span<std::byte, kChunkHeaderBytes> out);
// Fails with corrupt on anything that encode() cannot have written.
Result<ChunkHeader> decode(std::span<const std::byte, kChunkHeaderBytes> bytes);

uint64_t checksum(std::span<const std::span<const std::byte>> parts);

struct OutgoingChunk {
  ChunkHeader header;                               // checksum is filled in by the lane
  std::vector<std::span<const std::byte>> payload;  // stays valid until sent()
};

// Where an arriving chunk is to be put.
struct Landing {
  bool not_yet = false;  // the operation is not known here yet: stop reading this lane until
                         // Lane::resume()
  std::vector<std::span<std::byte>> payload;  // adds up to the header's length
};

struct Moment {
  Nanos first;  // first byte given to, or taken from, the kernel
  Nanos last;
};

// Who supplies chunks to lanes and takes those that arrive: the collective engine, or the probe.
class ChunkHandler {
 public:
  virtual ~ChunkHandler() = default;
  // A lane has room. Returns false when there is nothing to send.
  virtual bool take(uint16_t lane, OutgoingChunk& out) = 0;
  virtual void sent(uint16_t lane, const ChunkHeader& header, Moment when) = 0;
  virtual Result<Landing> arriving(uint16_t lane, const ChunkHeader& header) = 0;
  virtual Result<void> arrived(uint16_t lane, const ChunkHeader& header, Moment when) = 0;
};

// ---- the loop ----------------------------------------------------------------------------

class Reactor {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void on_events(uint32_t epoll_events) = 0;
  };

  Reactor();
  // Level-triggered; `events` are EPOLLIN and EPOLLOUT. The handler must outlive its place here.
  void add(int fd, uint32_t events, Handler* handler);
  void modify(int fd, uint32_t events, Handler* handler);
  void remove(int fd);
  // Waits for events at most `timeout`, and calls their handlers.
  void run_once(Nanos timeout);
  // Makes run_once() return early; from any thread.
  void wake();

 private:
  Fd epoll_;
  Fd wake_;
  uint64_t generation_ = 0;  // grows when a handler is removed
};

// ---- lanes -------------------------------------------------------------------------------

struct LaneCounters {
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  uint64_t chunks_sent = 0;
  uint64_t chunks_received = 0;
};

struct TcpInfo {
  uint64_t round_trip_us = 0;
  uint64_t congestion_window = 0;  // segments
  uint64_t retransmitted = 0;      // segments, since the start
  uint64_t unsent_bytes = 0;
  uint64_t delivery_bytes_per_s = 0;
};

// One connection, used in both directions. Errors end the lane and are told once.
class Lane final : public Reactor::Handler {
 public:
  using OnError = std::function<void(uint16_t lane, Error error)>;
  // `unsent_limit`: how much may wait in the kernel before the lane counts as full.
  Lane(Reactor& reactor, Fd socket, uint16_t index, ChunkHandler& handler, const Clock& clock,
       uint32_t unsent_limit, OnError on_error);
  ~Lane() override;

  // Takes one chunk and sends as much of it as there is room for. False when the lane is full
  // (it goes on by itself once there is room) or there is nothing to send. One at a time, so that
  // a few chunks spread over all lanes instead of filling the first.
  bool send_one();
  void resume();  // a chunk that was refused with not_yet may be offered again
  void halt();    // touches no payload from now on; the connection stays open, and nobody is told
  bool failed() const { return failed_; }
  const LaneCounters& counters() const { return counters_; }
  std::optional<TcpInfo> tcp_info() const;
  void on_events(uint32_t epoll_events) override;

 private:
  bool push_out();
  void receive_some();
  bool begin_payload();
  bool end_payload(Nanos now);
  void fail(Error error);
  void update_interest();

  Reactor& reactor_;
  Fd socket_;
  uint16_t index_;
  ChunkHandler& handler_;
  const Clock& clock_;
  OnError on_error_;
  uint32_t interest_ = 0;
  bool failed_ = false;
  LaneCounters counters_;

  bool sending_ = false;
  bool want_write_ = false;
  OutgoingChunk out_;
  std::array<std::byte, kChunkHeaderBytes> out_header_;
  std::vector<iovec> out_parts_;
  size_t out_part_ = 0;
  Nanos out_first_;

  bool paused_ = false;
  bool in_payload_ = false;
  std::array<std::byte, kChunkHeaderBytes> in_header_bytes_;
  size_t in_header_have_ = 0;
  ChunkHeader in_header_;
  Landing landing_;
  std::vector<iovec> in_parts_;
  size_t in_part_ = 0;
  Nanos in_first_;
};

// ---- control channel ---------------------------------------------------------------------

// Types of control frames. On the wire: append, never renumber.
enum class Control : uint8_t {
  register_ = 1,  // where this rank listens
  table = 2,      // where everyone listens
  joined = 3,
  go = 4,
  probe_step = 5,
  probe_result = 6,
  ready = 7,  // a bucket is complete on this rank
  start = 8,  // operations to start, in order
  ping = 9,
  pong = 10,
  abort = 11,  // who is to blame, and why
  bye = 12,
};

// Reads and writes fields of control frames; reading past the end fails once and for all.
class Packer {
 public:
  template <typename T>
  Packer& number(T value) {
    static_assert(std::is_integral_v<T>);
    const auto* raw = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), raw, raw + sizeof value);
    return *this;
  }
  Packer& string(std::string_view value);
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

class Unpacker {
 public:
  explicit Unpacker(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <typename T>
  T number() {
    static_assert(std::is_integral_v<T>);
    T value{};
    take(&value, sizeof value);
    return value;
  }
  std::string string();
  // True when everything was there and nothing is left.
  bool complete() const { return !failed_ && bytes_.empty(); }
  bool failed() const { return failed_; }
  bool more() const { return !failed_ && !bytes_.empty(); }

 private:
  void take(void* out, size_t size);
  std::span<const std::byte> bytes_;
  bool failed_ = false;
};

struct Frame {
  Control type;
  std::vector<std::byte> payload;
};

// Length-prefixed frames over one connection, never blocking. What arrives waits in order until
// it is taken, so that the phases of a group's life (join, probe, run) hand over without loss.
class ControlChannel final : public Reactor::Handler {
 public:
  ControlChannel(Reactor& reactor, Fd socket, Rank peer);
  ~ControlChannel() override;

  void send(Control type, const Packer& payload);
  std::optional<Frame> receive();
  // Why the connection ended, once everything that came before is taken.
  const std::optional<Error>& failure() const { return failure_; }
  bool flushed() const { return out_.size() == out_done_; }
  Rank peer() const { return peer_; }
  std::string local_host() const;  // the address that this side has on the connection
  void on_events(uint32_t epoll_events) override;

 private:
  void write_some();
  void fail(Error error);

  Reactor& reactor_;
  Fd socket_;
  Rank peer_;
  std::optional<Error> failure_;
  std::vector<std::byte> out_;
  size_t out_done_ = 0;
  std::vector<std::byte> in_;
  std::deque<Frame> inbox_;
};

// ---- joining -----------------------------------------------------------------------------

// What a connection claims to be; read only after it has proved the secret.
enum class Purpose : uint8_t { control = 1, lane = 2, probe = 3 };
struct Hello {
  uint16_t protocol = kProtocol;
  Purpose purpose = Purpose::control;
  uint32_t rank = 0;
  uint32_t ranks = 0;
  uint16_t lane = 0;
  uint16_t lanes = 0;
  uint8_t probe = 0;
  std::string agreement;  // what all ranks must have in common: the hash of plan and job
};

// Listens, and lets in only those who prove the secret and are expected. Others are refused,
// counted and logged.
class Acceptor final : public Reactor::Handler {
 public:
  // Takes the socket of one who proved the secret, or says why it is not wanted.
  using OnConnection = std::function<Result<void>(Fd& socket, const Hello& hello)>;
  Acceptor(Reactor& reactor, Fd listener, std::string secret, OnConnection on_connection);
  ~Acceptor() override;
  void on_events(uint32_t epoll_events) override;
  void set_on_connection(OnConnection on_connection) { on_connection_ = std::move(on_connection); }
  void tick(Nanos now);  // ends handshakes that take too long
  uint64_t refused() const { return refused_; }
  uint16_t port() const;

 private:
  class Pending;
  void finish(Pending* pending, Result<Hello> outcome);

  Reactor& reactor_;
  Fd listener_;
  std::string secret_;
  OnConnection on_connection_;
  std::vector<std::unique_ptr<Pending>> pending_;
  std::vector<std::unique_ptr<Pending>> ended_;
  uint64_t refused_ = 0;
};

struct Member {
  uint32_t rank = 0;
  std::string host;
  uint32_t host_index = 0;  // the same for ranks on one host
  std::string address;
  uint16_t port = 0;
};

struct JoinOptions {
  Rank rank;
  uint32_t ranks = 1;
  std::string rendezvous;  // "address:port"; rank 0 listens there
  std::string secret;
  std::string host;       // this host's name
  std::string agreement;  // must be equal on all ranks; a rank that differs is named
  uint16_t lanes = 1;
  bool probe = true;  // open the connections that probe() needs
  Nanos deadline = Nanos::from_seconds(30);
};

// The connections of one rank.
struct Mesh {
  Rank rank;
  uint32_t ranks = 1;
  std::vector<Member> members;  // by rank
  std::unique_ptr<Reactor> reactor;
  std::unique_ptr<Acceptor> acceptor;                    // still open: refuses strangers
  std::vector<std::unique_ptr<ControlChannel>> control;  // rank 0: by rank, none for itself;
                                                         // others: one, to rank 0
  std::vector<Fd> lanes_out, lanes_in;                   // to the next rank, from the previous
  std::vector<Fd> probe_out, probe_in;
  uint32_t next() const { return (rank.index + 1) % ranks; }
  uint32_t previous() const { return (rank.index + ranks - 1) % ranks; }
};

// Meets the others at the rendezvous and opens all connections. Errors name the ranks that did
// not come, or that came with another plan.
Result<Mesh> join(const JoinOptions& options);

// ---- probe -------------------------------------------------------------------------------

struct ProbeOptions {
  Nanos budget = Nanos::from_millis(900);  // never longer than this, and a little
  uint32_t chunk_bytes = 256u << 10;       // the chunk size that the plan will use
  uint32_t other_chunk_bytes = 64u << 10;  // and one more, to tell bytes from chunks
};

// Measures the group's network and this processor, into `recorder`. All ranks call it together,
// right after join() and before anything else uses the mesh; its connections are closed.
Result<std::vector<trace::ProbeResult>> probe(Mesh& mesh, const ProbeOptions& options,
                                              capture::Recorder& recorder);

}  // namespace weft::transport
