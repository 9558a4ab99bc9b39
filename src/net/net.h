// net: what a process sees of the world: sockets, readiness and time.
//
// A Network is the kernel's, or a simulated one in which a whole group runs in one thread under a
// seed; everything above is the same code over either. Nothing here blocks but Reactor::run_once().
//
//   Network ──listen, connect──► Socket ──add──► Reactor ──run_once──► Handler::on_events
//
// Threads: one thread at a time drives a Reactor and everything registered with it; wake() is for
// any thread. Not here: what the bytes mean, and who may send them.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "weft/base.h"

namespace weft::net {

struct TcpInfo {
  uint64_t round_trip_us = 0;
  uint64_t congestion_window = 0;  // segments
  uint64_t retransmitted = 0;      // segments, since the start
  uint64_t unsent_bytes = 0;
  uint64_t delivery_bytes_per_s = 0;
};

// What one side needs to go on with a sealed connection: a key for each direction, and how many
// records went either way.
struct Seal {
  using Key = std::array<std::byte, 32>;
  Key send{}, receive{};
  uint64_t sent = 0, received = 0;
};

// One end of a connection, or a place where connections are accepted. Nothing blocks.
class Socket {
 public:
  virtual ~Socket() = default;
  // Bytes moved; 0 from receive() is the end of the connection; -errno otherwise. Bytes that
  // send() did not take are offered again, the same ones first: they may be sealed already.
  virtual ssize_t send(const iovec* parts, size_t count) = 0;
  virtual ssize_t receive(const iovec* parts, size_t count) = 0;
  // The next one who called; null if nobody waits. An error is this process's: it lacks
  // descriptors or memory, and whoever called waits on.
  virtual Result<std::unique_ptr<Socket>> accept() { return std::unique_ptr<Socket>(); }
  virtual int connect_outcome() { return 0; }  // errno of an attempt that has ended
  virtual std::string local_host() const = 0;
  virtual uint16_t local_port() const { return 0; }
  virtual std::string peer() const = 0;  // "host:port"; known also when the connection was reset
  virtual std::string peer_host() const { return peer(); }
  virtual void limit_unsent(uint32_t bytes) { (void)bytes; }
  virtual void limit_rate(double bytes_per_s) { (void)bytes_per_s; }
  virtual std::optional<TcpInfo> tcp_info() const { return std::nullopt; }
  virtual int fd() const { return -1; }  // the kernel's number for it, if it has one
  // What carries the bytes: a socket that only changes them names the one behind it.
  virtual Socket& carrier() { return *this; }
  // Ends the connection for both sides, while others may be using it. From any thread.
  virtual void shut() {}
  // Where -EBADMSG was told: what was wrong with the bytes that came.
  virtual std::string problem() const { return {}; }
  // Bytes are encrypted and proved, so that nobody on the way can read or change them.
  virtual bool sealed() const { return false; }
  // Another process goes on with the descriptor, and this object has only to go. What it needs
  // besides; nothing if the connection is not sealed. REQUIRES: nothing was received or sent yet.
  virtual std::optional<Seal> hand_over() { return std::nullopt; }
  // Both ends are on this machine: bytes go from memory to memory, and no link can damage them.
  virtual bool inside_machine() const { return false; }

  // Memory that both sides see: what has arrived can be read in place.
  virtual bool shared() const { return false; }
  virtual std::span<const std::byte> peek() { return {}; }
  virtual void consume(size_t bytes) { (void)bytes; }
  virtual size_t shared_capacity() const { return 0; }
  // Bytes may wait in memory where the kernel sees nothing of them: a reactor asks the socket too.
  virtual bool in_memory() const { return shared(); }
  // Which of `events` the memory is ready for. A side that is `sleeping` wants a bell for the
  // others.
  virtual uint32_t memory_events(uint32_t events, bool sleeping) {
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
  // place here. Fails when this process or its user may not watch more.
  virtual Result<void> add(Socket& socket, uint32_t events, Handler* handler) = 0;
  virtual void modify(Socket& socket, uint32_t events, Handler* handler) = 0;
  virtual void remove(Socket& socket) = 0;
  // Waits for events at most `timeout`, and calls their handlers. True if there were any.
  virtual bool run_once(Nanos timeout) = 0;
  // Makes run_once() return early; from any thread.
  virtual void wake() = 0;
};

// Something that any thread may ring and that a reactor watches: readable until it is quiet again.
class Bell : public Socket {
 public:
  virtual void ring() = 0;
  virtual void quiet() = 0;
  ssize_t send(const iovec*, size_t) override { return ring(), 8; }
  ssize_t receive(const iovec*, size_t) override { return quiet(), -EAGAIN; }
  std::string local_host() const override { return {}; }
  std::string peer() const override { return "a bell"; }
};

// Work that goes on beside that of the one who started it. One that has not ended when this goes is
// left behind: what it uses must belong to it.
class Task {
 public:
  virtual ~Task() = default;
  virtual std::string name() const = 0;  // "thread 1234"
  // Waits until it has ended, and not for ever. False if it has not.
  virtual bool finish(Nanos patience) = 0;
};

// Memory that processes of one machine see: a head, and behind it a ring that lies there twice in a
// row, so that every stretch of it is contiguous.
class SharedMemory {
 public:
  static constexpr size_t kHeadBytes = 4096;
  virtual ~SharedMemory() = default;
  virtual const std::string& name() const = 0;
  virtual std::byte* head() const = 0;  // zero in the beginning
  virtual std::byte* ring() const = 0;
  virtual size_t capacity() const = 0;  // of the ring
  // The name is of no use any more. Also done when its maker's memory goes.
  virtual void unlink() = 0;
};

// What a process has besides connections: others that work for it, memory that it shares, chance,
// and files.
class System {
 public:
  virtual ~System() = default;
  virtual Result<std::unique_ptr<Bell>> bell() = 0;
  virtual Result<std::unique_ptr<Task>> start(std::function<void()> body) = 0;
  // New memory, under a name that nobody can guess. What killed processes left is removed first.
  virtual Result<std::unique_ptr<SharedMemory>> make_memory() = 0;
  // That of another process on this machine.
  virtual Result<std::unique_ptr<SharedMemory>> attach_memory(const std::string& name) = 0;
  // Numbers that nobody can guess.
  virtual Result<void> random(std::span<std::byte> out) = 0;
  virtual Files& files() { return kernel_files(); }
};
System& kernel_system();
std::unique_ptr<Bell> adopt_bell(Fd eventfd);

// What a rank can reach, and what time it is there.
class Network {
 public:
  virtual ~Network() = default;
  virtual Result<std::unique_ptr<Socket>> listen(const std::string& host, uint16_t port) = 0;
  // Starts a connection; it is open, or failed, when the socket is writable. An error that is this
  // process's own (no descriptors, no such address here) has the code io; one of the way there,
  // peer_lost; a name that nobody knows, not_found.
  virtual Result<std::unique_ptr<Socket>> connect(const std::string& host, uint16_t port) = 0;
  virtual Result<std::unique_ptr<Reactor>> reactor() = 0;
  virtual const Clock& clock() const = 0;
  // Ranks that say the same word can share memory; empty: nobody can.
  virtual std::string machine() const = 0;
  virtual System& system() { return kernel_system(); }
};
// The kernel's.
Network& kernel_network();
// What a system call of this process met, and what to do if that is one of its limits.
[[gnu::format(printf, 2, 3)]] Error own_error(int error_number, const char* format, ...);
std::unique_ptr<Socket> adopt(Fd connected);

// ---- forked children ---------------------------------------------------------------------

// A child that a program forks (a data loader's) has copies of all descriptors. As long as it
// lives, a connection of its dead parent does not end, and nobody hears of the death. So
// descriptors that are named here lead nowhere in a child. Destroy it before the descriptor is
// closed.
class KeptFromChildren {
 public:
  explicit KeptFromChildren(int fd);
  ~KeptFromChildren();
  KeptFromChildren(const KeptFromChildren&) = delete;
  KeptFromChildren& operator=(const KeptFromChildren&) = delete;

 private:
  int fd_;
};
// How many forks lie between this process and the one that loaded weft: what was made at another
// number belongs to a parent, and its threads are not here.
uint64_t times_forked();

// ---- descriptors for other processes -----------------------------------------------------

// Words, and with them a descriptor unless `fd` is negative, over a channel that keeps records
// apart (SOCK_SEQPACKET). 0, or errno; a full channel is one, unless the caller waits for it.
int send_record(int channel, std::span<const std::byte> words, int fd, bool waits);
struct Record {
  ssize_t bytes = 0;  // 0: the channel has ended; -errno otherwise
  Fd fd;  // none: there was none, or this process can have no more, and the kernel left it out
};
Record receive_record(int channel, std::span<std::byte> words);

// ---- sealed connections ------------------------------------------------------------------
//
// Records of at most 64 KiB: length, ciphertext, proof (AES-256-GCM). Their numbers are part of the
// proof, so one that was changed, repeated, left out or moved ends the connection with -EBADMSG.
// docs/design/0004-sealed-connections.md has the reasons; docs/wire.md the bytes.

// Keys from a secret and what both sides of one connection have said: the same on both, with the
// directions exchanged. `context` is what the connection claims to be.
Seal derive_seal(std::string_view secret, std::span<const std::byte> connector_nonce,
                 std::span<const std::byte> acceptor_nonce, std::span<const std::byte> context,
                 bool connector);
std::unique_ptr<Socket> seal(std::unique_ptr<Socket> inner, const Seal& keys);

// ---- addresses ---------------------------------------------------------------------------

struct HostPort {
  std::string host;
  uint16_t port = 0;
};
// "10.0.0.1:4000", "[::1]:4000" or "name:4000".
Result<HostPort> split(const std::string& address);
// Fails with not_found when no address belongs to the name of a host.
Result<void> find_host(const std::string& host);
// The first address of an interface, of the family that `like` resolves to.
Result<std::string> address_of_interface(const std::string& interface, const std::string& like);

// ---- the simulated network ---------------------------------------------------------------
//
// A group of ranks in one thread, under a seed: every rank is a function with a stack of its own
// that runs until it waits in Reactor::run_once(), or for the end of a task. A rank's tasks are
// functions with stacks of their own too: any two of them may take turns at any wait. Time is
// virtual and goes on to the next thing that happens. Connections keep their bytes in order, cut
// anywhere and delayed by chance, so different connections overtake each other. Memory that ranks
// of one machine share is real, and what one writes is there for the other at once; it is told of
// by bells alone, as by the kernel. Files are real too, and every request to them is a moment at
// which others may go on, or the rank dies: what a dead rank asks is refused. The same seed and
// faults give the same course of events.

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
    task_stop,   // tasks of `rank` do not run
    task_end,    // a task of `rank` ends at its `at`-th wait, without a word
    refusal,     // the `at`-th thing that `rank` asks of its system is refused: a connection or a
                 // place for one, a reactor or a place in it, a bell, a task, shared memory,
                 // chance
    memory,      // allocations `at` to `at + count - 1` of `rank`, in Scarce code, are refused
    file,        // requests `at` to `at + count - 1` of `rank` to its Files fail with `failure`:
                 // EINTR is met where a signal can interrupt, and 0 means half of the bytes
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
  uint64_t count = 1;
  int failure = 0;  // errno
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
  // By rank: those with the same number are on one machine, and share memory. Empty: nobody does.
  std::vector<uint32_t> machines;
  uint32_t ring = 64u << 10;  // bytes of shared memory; whole pages
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
  // Rank r's address is "10.0.0.<r + 1>", and "127.0.0.1" for those on its machine.
  Network& network_of(Rank rank);
  static std::string address_of(Rank rank);
  // Runs one function a rank until all have returned. A rank that died goes on without a network,
  // and with a clock that runs away, until it notices.
  Outcome run(std::vector<std::function<void()>> ranks);
  // From inside: `rank` dies at the wait that is so many from now, `silently` as by power_loss.
  void doom(Rank rank, uint64_t waits, bool silently);
  // When it did, by its own clock.
  std::optional<Nanos> died(Rank rank) const;
  // Whether its system refused it something, or memory.
  bool refused(Rank rank) const;
  // Which of its requests to its Files failed of a fault, in order; not those that succeed when
  // they are made again.
  const std::vector<Files::Call>& refused_files(Rank rank) const;
  // How many there were.
  uint64_t file_requests(Rank rank) const;
  // How often it asked for memory in Scarce code, and in its tasks.
  uint64_t allocations(Rank rank) const;
  // Who called and who was called, if there was such a connection.
  std::optional<std::pair<Rank, Rank>> ends_of(uint64_t connection) const;
  // A number for all that happened, and the last of it in words if they were kept.
  uint64_t course() const;
  std::string lines() const;

  class Impl;

 private:
  friend class Scarce;
  std::unique_ptr<Impl> impl_;
};

// From here to the end of the scope, allocations are those of `rank`: they are counted, and refused
// where a fault says so. Tasks of a rank are charged by themselves; what the simulation needs for
// its own work is charged to nobody.
class Scarce {
 public:
  Scarce(World& world, Rank rank);
  ~Scarce();
  Scarce(const Scarce&) = delete;
  Scarce& operator=(const Scarce&) = delete;

 private:
  void* before_;
};
// Whether the allocation that is asked for now is to fail: for the operator new of a program whose
// simulated ranks run out of memory. Elsewhere, and in other threads, never.
bool refuses_memory() noexcept;

}  // namespace sim

}  // namespace weft::net
