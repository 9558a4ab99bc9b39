// transport: messages over lanes.
//
// A lane is one connection from a rank to another, over which chunks go one way and receipts come
// back. Chunks say for themselves which operation, step, offset and length they are, so any chunk
// may use any lane, and a lane with room takes whatever is most urgent. Lanes are opened when they
// are first needed. Beside them every rank keeps one control channel to rank 0.
//
//   rank 0 <──control── rank r            small frames: ready, start, ping, abort, bye
//   rank r ══lane 0..N-1══> any rank      chunks; receipts the other way
//
// Between ranks on one host a lane's bytes go through shared memory, and its connection only
// carries wake-ups. Every connection begins with a proof of the job's secret (HMAC-SHA256 over
// fresh nonces of both sides); nothing else of it is read before. Bytes from a peer are checked
// before they are used: lengths are bounded, headers and payloads carry checksums.
//
// What a rank sees of the world (sockets, readiness, time) is a Network: the kernel's, or a
// simulated one that runs the same code under a seed.
//
// Threads: one thread at a time drives a Reactor and everything registered with it. Nothing here
// blocks except join() and probe(), which have deadlines.
#pragma once

#include <sys/uio.h>

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

namespace weft::transport {

inline constexpr uint16_t kProtocol = 2;
inline constexpr uint32_t kMaxChunkBytes = 64u << 20;
inline constexpr uint32_t kMaxControlBytes = 1u << 20;
inline constexpr uint32_t kMaxRanks = 4096;
inline constexpr size_t kMaxAgreement = 64;
// A chunk up to this size is kept until it is known to have arrived; a larger one is sent again
// from where it lies, so its operation waits for the receipt.
inline constexpr uint32_t kRetainedBytes = 64u << 10;

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
  uint32_t operation = 0;
  uint16_t step = 0;
  uint32_t chunk = 0;
  uint64_t first = 0;          // element offset of this chunk in its message
  uint32_t length = 0;         // payload bytes
  bool wants_receipt = false;  // its sender keeps no copy
  uint64_t message = 0;        // unique in the run
  uint64_t checksum = 0;       // XXH3-64 of the payload; 0: none was made
};
inline constexpr size_t kChunkHeaderBytes = cost::kHeaderBytes;

void encode(const ChunkHeader& header, std::span<std::byte, kChunkHeaderBytes> out);
// Fails with corrupt on anything that encode() cannot have written.
Result<ChunkHeader> decode(std::span<const std::byte, kChunkHeaderBytes> bytes);

uint64_t checksum(std::span<const std::span<const std::byte>> parts);

struct OutgoingChunk {
  ChunkHeader header;                               // checksum is filled in by the lane
  std::vector<std::span<const std::byte>> payload;  // stays valid until settled()
  uint64_t token = 0;                               // the handler's own word for it
};

// Where an arriving chunk is to be put.
struct Landing {
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
  // A lane has room. Returns false when there is nothing to send.
  virtual bool take(uint32_t lane, OutgoingChunk& out) = 0;
  // The chunk has left whole.
  virtual void sent(uint32_t lane, const ChunkHeader& header, uint64_t token, Moment when) = 0;
  // It will not be needed from its place any more: it has arrived, or the lane has a copy.
  virtual void settled(uint32_t lane, const ChunkHeader& header, uint64_t token) {
    (void)lane, (void)header, (void)token;
  }
  // `in_place`: the payload is in memory that can be read where it is.
  virtual Result<Landing> arriving(uint32_t lane, const ChunkHeader& header, bool in_place) = 0;
  // `payload` is null unless the landing was in place.
  virtual Result<void> arrived(uint32_t lane, const ChunkHeader& header, const std::byte* payload,
                               Moment when) = 0;
};

// ---- the world ---------------------------------------------------------------------------

struct TcpInfo {
  uint64_t round_trip_us = 0;
  uint64_t congestion_window = 0;  // segments
  uint64_t retransmitted = 0;      // segments, since the start
  uint64_t unsent_bytes = 0;
  uint64_t delivery_bytes_per_s = 0;
};

// One end of a connection, or a place where connections are accepted. Nothing blocks.
class Socket {
 public:
  virtual ~Socket() = default;
  // Bytes moved; 0 from receive() is the end of the connection; -errno otherwise.
  virtual ssize_t send(const iovec* parts, size_t count) = 0;
  virtual ssize_t receive(const iovec* parts, size_t count) = 0;
  virtual std::unique_ptr<Socket> accept() { return nullptr; }
  virtual int connect_outcome() { return 0; }  // errno of an attempt that has ended
  virtual std::string local_host() const = 0;
  virtual uint16_t local_port() const { return 0; }
  virtual std::string peer() const = 0;
  virtual void limit_unsent(uint32_t bytes) { (void)bytes; }
  virtual void limit_rate(double bytes_per_s) { (void)bytes_per_s; }
  virtual std::optional<TcpInfo> tcp_info() const { return std::nullopt; }
  virtual int fd() const { return -1; }  // the kernel's number for it, if it has one
  // Both ends are on this machine: bytes go from memory to memory, and no link can damage them.
  virtual bool inside_machine() const { return false; }

  // Memory that both sides see: what has arrived can be read in place.
  virtual bool shared() const { return false; }
  virtual std::span<const std::byte> peek() { return {}; }
  virtual void consume(size_t bytes) { (void)bytes; }
  virtual size_t shared_capacity() const { return 0; }
  // Which of `events` the memory is ready for. A side that is `sleeping` wants a bell for the
  // others.
  virtual uint32_t shared_events(uint32_t events, bool sleeping) {
    (void)events, (void)sleeping;
    return 0;
  }
};

class Reactor {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void on_events(uint32_t epoll_events) = 0;
  };

  virtual ~Reactor() = default;
  // Level-triggered; `events` are EPOLLIN and EPOLLOUT. Handler and socket must outlive their
  // place here.
  virtual void add(Socket& socket, uint32_t events, Handler* handler) = 0;
  virtual void modify(Socket& socket, uint32_t events, Handler* handler) = 0;
  virtual void remove(Socket& socket) = 0;
  // Waits for events at most `timeout`, and calls their handlers. True if there were any.
  virtual bool run_once(Nanos timeout) = 0;
  // Makes run_once() return early; from any thread.
  virtual void wake() = 0;
};

// What a rank can reach, and what time it is there.
class Network {
 public:
  virtual ~Network() = default;
  virtual Result<std::unique_ptr<Socket>> listen(const std::string& host, uint16_t port) = 0;
  // Starts a connection; it is open, or failed, when the socket is writable.
  virtual Result<std::unique_ptr<Socket>> connect(const std::string& host, uint16_t port) = 0;
  virtual std::unique_ptr<Reactor> reactor() = 0;
  virtual const Clock& clock() const = 0;
  // Ranks that say the same word can share memory; empty: nobody can.
  virtual std::string machine() const = 0;
};
// The kernel's.
Network& kernel_network();
std::unique_ptr<Socket> adopt(Fd connected);

namespace shm {
class Segment;  // memory that a connector offers to the acceptor of a lane
}

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
  // Takes one chunk and sends as much of it as there is room for. False when the lane is full
  // (it goes on by itself once there is room) or there is nothing to send. One at a time, so that
  // a few chunks spread over all lanes instead of filling the first.
  virtual bool send_one() = 0;
  virtual void resume() = 0;  // a chunk that was refused with not_yet may be offered again
  // Touches no payload from now on; the connection stays open, and nobody is told.
  virtual void halt() = 0;
  // Sends receipts that are due but not urgent enough to be sent by themselves; `all`: also those
  // that could wait for more, because no more will come.
  virtual void send_receipts(bool all = false) { (void)all; }
  virtual bool ready() const = 0;  // out: the other end has answered
  virtual bool shared() const = 0;
  virtual const LaneCounters& counters() const = 0;
  virtual std::optional<TcpInfo> tcp_info() const = 0;

  // Chunks that a lane that failed may not have delivered, oldest first. Those up to
  // kRetainedBytes that had left whole come with their bytes.
  struct Unsettled {
    ChunkHeader header;
    uint64_t token = 0;
    bool retained = false;
    std::vector<std::byte> payload;
  };
  virtual std::vector<Unsettled> take_unsettled() = 0;
};

// One connection. Errors end the lane and are told once.
class Lane final : public LanePort, public Reactor::Handler {
 public:
  // `out` and `in` are the two ends of a lane; `both` is a connection without receipts, on which
  // chunks go either way, as the probe uses it.
  enum class Role : uint8_t { both, out, in };
  using OnError = std::function<void(uint32_t lane, Error error)>;
  // `unsent_limit`: how much may wait in the kernel before the lane counts as full.
  Lane(Role role, Reactor& reactor, std::unique_ptr<Socket> socket,
       std::shared_ptr<shm::Segment> shared, uint32_t index, ChunkHandler& handler,
       const Clock& clock, uint32_t unsent_limit, OnError on_error);
  ~Lane() override;

  bool send_one() override;
  void resume() override;
  void halt() override;
  void send_receipts(bool all = false) override;
  bool failed() const { return failed_; }
  bool ready() const override { return !failed_ && greeted_; }
  bool shared() const override { return socket_->shared(); }
  const LaneCounters& counters() const override { return counters_; }
  std::optional<TcpInfo> tcp_info() const override;
  void on_events(uint32_t epoll_events) override;
  std::vector<Unsettled> take_unsettled() override;
  // Leaves checksums of payloads out where no link can damage them.
  void trust_this_machine();
  // Keeps no copies: every chunk is settled by its receipt, and stays where it lies until then.
  void keep_no_copies() { keeps_copies_ = false; }

 private:
  bool push_out();
  void chunk_left(Nanos now);
  void receive_some();
  bool use_ahead();
  void receive_shared();
  void answer_bells();
  bool begin_payload();
  bool end_payload(const std::byte* in_place, Nanos now);
  void receive_receipts();
  void send_receipt(bool owed);
  void attach();
  void fail(Error error);
  void update_interest();

  Role role_;
  Reactor& reactor_;
  std::unique_ptr<Socket> socket_;
  std::shared_ptr<shm::Segment> offered_;
  uint32_t index_;
  ChunkHandler& handler_;
  const Clock& clock_;
  OnError on_error_;
  uint32_t interest_ = 0;
  bool failed_ = false;
  bool greeted_ = false;
  bool keeps_copies_ = true;
  bool checks_ = true;
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
  uint64_t receipted_ = 0;
  uint64_t unreceipted_bytes_ = 0;
  bool receipt_urgent_ = false;

  bool paused_ = false;
  bool in_payload_ = false;
  // Read but not yet used: what came behind a payload, or a small chunk as a whole.
  static constexpr size_t kAhead = 8192;
  std::array<std::byte, kAhead> ahead_;
  size_t ahead_have_ = 0;
  ChunkHeader in_header_;
  Landing landing_;
  std::vector<iovec> in_parts_;
  std::vector<iovec> call_parts_;
  size_t in_part_ = 0;
  Nanos in_first_;
};

// ---- lanes that others serve -------------------------------------------------------------

// Threads, or auxiliary processes that share memory with this one, that serve connections: they
// make the system calls and the checksums, and the thread that drives the engine only hands over
// chunks and takes them. docs/design/0003-lane-workers.md tells how.
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
  static Result<std::unique_ptr<LaneWorkers>> start(const Options& options, Reactor& reactor,
                                                    ChunkHandler& handler, const Clock& clock,
                                                    Lane::OnError on_error);
  virtual ~LaneWorkers() = default;
  // Hands a connection over to the worker of lane `number`. `index` names it to the handler.
  virtual std::unique_ptr<LanePort> serve(Lane::Role role, std::unique_ptr<Socket> socket,
                                          uint16_t number, uint32_t index,
                                          uint32_t unsent_limit) = 0;
  // Processor time that the workers have used.
  virtual Nanos processor_time() const = 0;
};
// What an auxiliary process does, from its start to its end; the numbers are its descriptors.
int run_lane_worker(int memory, int channel, int bell_in, int bell_out);

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
  costs = 13,  // of all-reduces, as rank 0 knows them: all must choose alike
  query = 14,  // what is in flight? (weft status)
  answer = 15,
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
  ControlChannel(Reactor& reactor, std::unique_ptr<Socket> socket, Rank peer);
  ~ControlChannel() override;

  void send(Control type, const Packer& payload);
  std::optional<Frame> receive();
  // Why the connection ended, once everything that came before is taken.
  const std::optional<Error>& failure() const { return failure_; }
  bool flushed() const { return out_.size() == out_done_; }
  Rank peer() const { return peer_; }
  void set_peer(Rank peer) { peer_ = peer; }  // its number in a new group
  std::string local_host() const;             // the address that this side has on the connection
  void on_events(uint32_t epoll_events) override;

 private:
  void write_some();
  void fail(Error error);

  Reactor& reactor_;
  std::unique_ptr<Socket> socket_;
  Rank peer_;
  std::optional<Error> failure_;
  std::vector<std::byte> out_;
  size_t out_done_ = 0;
  std::vector<std::byte> in_;
  std::deque<Frame> inbox_;
};

// ---- joining -----------------------------------------------------------------------------

// What a connection claims to be; read only after it has proved the secret.
enum class Purpose : uint8_t { control = 1, lane = 2, probe = 3, status = 4 };
struct Hello {
  uint16_t protocol = kProtocol;
  Purpose purpose = Purpose::control;
  uint32_t rank = 0;
  uint32_t ranks = 0;
  uint16_t lane = 0;
  uint16_t lanes = 0;
  uint8_t probe = 0;
  std::string agreement;  // what all ranks must have in common: the hash of plan and job
  std::string shared;     // lane: name of the memory that it offers; empty for none
};

// Listens, and lets in only those who prove the secret and are expected. Others are refused,
// counted and logged.
class Acceptor final : public Reactor::Handler {
 public:
  // Takes the socket of one who proved the secret, or says why it is not wanted.
  using OnConnection =
      std::function<Result<void>(std::unique_ptr<Socket>& socket, const Hello& hello)>;
  Acceptor(Network& network, Reactor& reactor, std::shared_ptr<Socket> listener, std::string secret,
           OnConnection on_connection);
  ~Acceptor() override;
  void on_events(uint32_t epoll_events) override;
  void set_on_connection(OnConnection on_connection) { on_connection_ = std::move(on_connection); }
  void tick(Nanos now);  // ends handshakes that take too long
  uint64_t refused() const { return refused_; }
  uint16_t port() const;
  std::string host() const { return listener_->local_host(); }
  // For another acceptor, when this one is gone: whoever calls meanwhile waits.
  std::shared_ptr<Socket> listener() const { return listener_; }

 private:
  class Pending;
  void finish(Pending* pending, Result<Hello> outcome);

  Network& network_;
  Reactor& reactor_;
  std::shared_ptr<Socket> listener_;
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
  bool shares_memory = false;  // with this rank
};

struct JoinOptions {
  Rank rank;
  uint32_t ranks = 1;
  // "address:port" or "[v6 address]:port", where rank 0 listens; or "file:PATH", where rank 0
  // writes it, for ranks on one host.
  std::string rendezvous;
  std::string interface;  // whose address to use; empty: the one that reaches rank 0
  std::string secret;
  std::string host;       // this host's name
  std::string agreement;  // must be equal on all ranks; a rank that differs is named
  uint16_t lanes = 1;
  bool probe = true;          // open the connections that probe() needs
  bool shared_memory = true;  // with ranks on this host
  Nanos deadline = Nanos::from_seconds(30);
  Network* network = nullptr;  // null: the kernel's
  // After a failure: `rank` and `ranks` are those of the group that failed; those of its ranks that
  // come to `root` within `settle` form the new one, the root first.
  bool survivors = false;
  Rank root;
  Nanos settle = Nanos::from_seconds(5);
  // The root's, from the group that failed. Closing it and listening again would lose those who
  // call in that moment: for some the connection opens, and nobody is at the other end.
  std::shared_ptr<Socket> listener;
};

// The connections of one rank.
struct Mesh {
  Rank rank;
  uint32_t ranks = 1;
  Network* network = nullptr;
  std::string secret;
  std::string agreement;
  std::vector<Member> members;  // by rank
  std::unique_ptr<Reactor> reactor;
  std::unique_ptr<Acceptor> acceptor;                        // of ranks > 1
  std::vector<std::unique_ptr<ControlChannel>> control;      // rank 0: by rank, none for itself;
                                                             // others: one, to rank 0
  std::vector<std::unique_ptr<Socket>> probe_out, probe_in;  // to the next rank, from the previous
  // Lanes of ranks that were faster; where the acceptor puts them until Links takes over.
  std::shared_ptr<std::vector<std::pair<Hello, std::unique_ptr<Socket>>>> early;
  uint32_t next() const { return (rank.index + 1) % ranks; }
  uint32_t previous() const { return (rank.index + ranks - 1) % ranks; }
};

// Meets the others at the rendezvous. Errors name the ranks that did not come, or that came with
// another plan.
Result<Mesh> join(const JoinOptions& options);

// A connection to a member of a running job, for a purpose that is not membership.
Result<std::unique_ptr<Socket>> call(const std::string& address, const std::string& secret,
                                     Purpose purpose, Nanos deadline);

// Opens lanes to other ranks when asked, takes those that others open, and refuses everyone else.
class Links {
 public:
  struct Callbacks {
    // This rank opened a lane to `peer`; `shared` is what it offered.
    std::function<void(Rank peer, uint16_t lane, std::unique_ptr<Socket> socket,
                       std::shared_ptr<shm::Segment> shared)>
        opened;
    // `peer` opened a lane to this rank.
    std::function<void(Rank peer, uint16_t lane, std::unique_ptr<Socket> socket,
                       std::shared_ptr<shm::Segment> shared)>
        accepted;
    // Someone who knows the secret asks how the job is doing.
    std::function<void(std::unique_ptr<Socket> socket)> asked;
  };
  Links(Mesh& mesh, Callbacks callbacks);
  ~Links();
  // Tries until it works or close() is called.
  void open(Rank peer, uint16_t lane);
  void close(Rank peer);
  void tick(Nanos now);  // tries again what failed, and ends handshakes that take too long
  // Why the last attempt to reach `peer` failed; empty if none did.
  std::string problem(Rank peer) const;

 private:
  struct Opening;
  Result<void> accept(std::unique_ptr<Socket>& socket, const Hello& hello);
  Mesh& mesh_;
  Callbacks callbacks_;
  std::vector<std::unique_ptr<Opening>> openings_;
  bool told_no_memory_ = false;
};

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

// ---- the simulated network ---------------------------------------------------------------
//
// A group of ranks in one thread, under a seed: every rank is a function with a stack of its own
// that runs until it waits in Reactor::run_once(), the only place where anybody waits. Time is
// virtual and goes on to the next thing that happens. Connections keep their bytes in order, cut
// anywhere and delayed by chance, so different connections overtake each other. The same seed and
// faults give the same course of events. Ranks share no memory here.

namespace sim {

inline constexpr uint32_t kEveryone = 0xffffffff;
inline constexpr Nanos kForever = {INT64_MAX};

struct Fault {
  enum class Kind : uint8_t {
    spike,       // bytes between `rank` and `other` take up to `amount` longer
    partition,   // nothing passes between them: held back, or lost if it never ends
    stop,        // `rank` does not run
    slow,        // `rank` takes up to `amount` longer for every turn
    reset,       // `connection` breaks when byte `at` of it is sent
    half_open,   // from byte `at` on, `connection` leads nowhere, and neither end is told
    corrupt,     // one bit of byte `at` of `connection` flips
    death,       // `rank` ends at its `at`-th wait, and the kernel closes its connections
    power_loss,  // the same, but nobody is told
  };
  Kind kind = Kind::spike;
  uint32_t rank = 0;
  uint32_t other = kEveryone;
  Nanos from{0};  // since the world began
  Nanos until = kForever;
  Nanos amount{0};
  uint64_t connection = 0;  // counted in the order in which they were begun, from 0
  bool reverse = false;     // bytes of the side that was called
  uint64_t at = 0;
};
std::string to_text(const Fault& fault);
// Any of the kinds, in the first `horizon` and on the first `connections`.
Fault random_fault(Rng& rng, uint32_t ranks, Nanos horizon, uint64_t connections, uint64_t bytes);

struct Options {
  uint32_t ranks = 2;
  uint64_t seed = 1;
  Nanos delay_min = Nanos::from_micros(5);  // of a stretch of bytes
  Nanos delay_max = Nanos::from_micros(300);
  uint32_t stretch_max = 64u << 10;  // bytes that travel together
  uint32_t buffer = 256u << 10;      // bytes that a connection holds each way
  std::vector<Fault> faults;
  Nanos time_max = Nanos::from_seconds(300);  // virtual
  uint64_t steps_max = 5'000'000;
  bool keep_lines = false;
};

struct Outcome {
  bool complete = false;   // every rank's function returned by itself
  std::string report;      // otherwise: who waited for what
  std::vector<bool> died;  // by rank
  Nanos took{0};
  uint64_t steps = 0;
};

class World {
 public:
  explicit World(Options options);
  ~World();
  // Rank r's address is "10.0.0.<r + 1>".
  Network& network_of(Rank rank);
  static std::string address_of(Rank rank);
  // Runs one function a rank until all have returned. A rank that died goes on without a network,
  // and with a clock that runs away, until it notices.
  Outcome run(std::vector<std::function<void()>> ranks);
  // When it did, by its own clock.
  std::optional<Nanos> died(Rank rank) const;
  // Who called and who was called, if there was such a connection.
  std::optional<std::pair<Rank, Rank>> ends_of(uint64_t connection) const;
  // A number for all that happened, and the last of it in words if they were kept.
  uint64_t course() const;
  std::string lines() const;

  class Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace sim

}  // namespace weft::transport
