// The memory between a process and one of its lane workers.
//
//   commands ──ring──►  worker      serve this; send this chunk; this buffer is free again
//   events   ◄──ring──  worker      sent, receipted, arrived, broken
//   buffers             chunks on their way out and in
//
// One side writes a ring and the other reads it; a bell (eventfd) wakes a reader that sleeps. A
// lane is named by a number that is used once, so that what is said of an old lane is never taken
// for one that has its place. What an auxiliary process writes here is checked before it is used.
#pragma once

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "weft/lane.h"

namespace weft::lane::worker {

enum class What : uint8_t {
  // commands
  open = 1,  // serve the connection that lies ready under this number
  send,      // the payload is in `buffer`
  release,   // a receive buffer may be used again
  close,     // the lane is given up; answered by `closed`
  // events
  taken = 16,  // the worker has the connection
  refused,     // it could not take it: the owner still has it
  opened,      // out: the other end has answered
  sent,        // `buffer` of the command is free again
  receipted,
  arrived,
  broken,  // buffers of its chunks are free again
  closed,  // the same
};

inline constexpr uint32_t kRingMessages = 1024;
inline constexpr uint32_t kNoBuffer = 0xffffffff;

struct Message {
  What what = What::release;
  uint8_t code = 0;
  Lane::Role role = Lane::Role::out;
  uint32_t lane = 0;
  uint32_t buffer = kNoBuffer;
  uint32_t unsent_limit = 0;
  uint64_t token = 0;
  ChunkHeader header;
  int64_t first = 0;
  int64_t last = 0;
  char words[160] = {};
};

struct Ring {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  std::atomic<uint32_t> reader_sleeps;
  alignas(64) Message messages[kRingMessages];
};

// Each side keeps its own position to itself: what stands in the memory is for the other, and the
// other's is not trusted.
class RingWriter {
 public:
  explicit RingWriter(Ring& ring) : ring_(ring) {}
  // False when it is full.
  bool push(const Message& message) {
    if (at_ - ring_.read.load(std::memory_order_acquire) >= kRingMessages) return false;
    ring_.messages[at_ % kRingMessages] = message;
    ring_.written.store(++at_, std::memory_order_seq_cst);
    return true;
  }

 private:
  Ring& ring_;
  uint64_t at_ = 0;
};

class RingReader {
 public:
  enum class Outcome : uint8_t { message, empty, nonsense };
  explicit RingReader(Ring& ring) : ring_(ring) {}
  Outcome pop(Message& message) {
    uint64_t there = ring_.written.load(std::memory_order_seq_cst) - at_;
    if (there == 0) return Outcome::empty;
    if (there > kRingMessages) return Outcome::nonsense;
    message = ring_.messages[at_ % kRingMessages];
    message.words[sizeof message.words - 1] = '\0';
    ring_.read.store(++at_, std::memory_order_release);
    return Outcome::message;
  }
  bool empty() const { return ring_.written.load(std::memory_order_seq_cst) == at_; }

 private:
  Ring& ring_;
  uint64_t at_ = 0;
};

struct Facts {
  uint32_t magic = 0;
  uint32_t buffer_bytes = 0;
  uint32_t send_buffers = 0;     // numbered from 0
  uint32_t receive_buffers = 0;  // behind them
};
inline constexpr uint32_t kFactsMagic = 0x33724c77;  // "wLr3"

struct Head {
  Facts facts;
  std::atomic<uint64_t> beats;          // grows as long as the worker turns
  std::atomic<int64_t> processor_ns;    // that the worker has used
  std::atomic<uint32_t> lacked_memory;  // 1: the worker has ended because it found none
  Ring commands;
  Ring events;
};

inline constexpr Nanos kLongestSleep = Nanos::from_millis(100);  // of a worker

inline size_t buffers_at() { return (sizeof(Head) + 4095) / 4096 * 4096; }
inline size_t memory_size(const Facts& facts) {
  return buffers_at() +
         size_t{facts.buffer_bytes} * (size_t{facts.send_buffers} + facts.receive_buffers);
}

// What comes over the channel with a connection's descriptor.
struct Handover {
  uint32_t lane = 0;
  bool sealed = false;
  net::Seal seal;
};

// Where a worker finds the connections that it is told to serve.
class Connections {
 public:
  virtual ~Connections() = default;
  virtual Result<std::unique_ptr<net::Socket>> take(uint32_t lane) = 0;
  // It serves this one, until it says that it closes it.
  virtual void serves(uint32_t lane, net::Socket& socket) { (void)lane, (void)socket; }
  // It is about to close this one.
  virtual void closes(uint32_t lane) { (void)lane; }
  // Nobody needs the worker any more.
  virtual bool ended() = 0;
};

// Those of a thread: given from one thread to the other. The owner can end them while the thread
// stands still.
class GivenConnections final : public Connections {
 public:
  void give(uint32_t lane, std::unique_ptr<net::Socket> socket);
  void end() { ended_ = true; }
  // Ends every connection that the thread has, without it. False if it may be in the middle of
  // closing one.
  bool shut_all();

  Result<std::unique_ptr<net::Socket>> take(uint32_t lane) override;
  void serves(uint32_t lane, net::Socket& socket) override;
  void closes(uint32_t lane) override;
  bool ended() override { return ended_; }

 private:
  std::mutex mutex_;
  std::map<uint32_t, std::unique_ptr<net::Socket>> given_;
  std::map<uint32_t, net::Socket*> served_;
  std::atomic<bool> ended_{false};
};

// Serves until `connections` have ended. The memory is mapped at `base`; the connections are of
// `network`.
void serve(std::byte* base, Connections& connections, net::Bell& bell_in, net::Bell& bell_out,
           net::Network& network);

}  // namespace weft::lane::worker
