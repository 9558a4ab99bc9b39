// The memory between a process and one of its lane workers.
//
//   commands ──ring──►  worker      send this chunk; this buffer is free again
//   events   ◄──ring──  worker      sent, settled, arrived, broken
//   buffers             chunks on their way out (processes only) and in
//
// One side writes a ring and the other reads it; a bell (eventfd) wakes a reader that sleeps.
#pragma once

#include <atomic>
#include <cstring>

#include "weft/lane.h"

namespace weft::lane::worker {

enum class What : uint8_t {
  // commands
  send = 1,  // buffer or pointers: where the payload is
  release,   // a receive buffer may be used again
  resume,    // nothing is done: only wakes
  // events
  opened = 16,  // out: the other end has answered
  sent,
  settled,
  arrived,
  broken,
};

inline constexpr uint32_t kRingMessages = 1024;
inline constexpr uint32_t kNoBuffer = 0xffffffff;
inline constexpr size_t kPointers = 4;  // parts of a payload that a thread can be told of directly

struct Part {
  uint64_t at;  // address, in the process of threads
  uint64_t size;
};

struct Message {
  What what = What::resume;
  uint8_t code = 0;
  uint8_t parts = 0;
  uint32_t lane = 0;
  uint32_t buffer = kNoBuffer;
  uint64_t token = 0;
  ChunkHeader header;
  int64_t first = 0;
  int64_t last = 0;
  Part part[kPointers] = {};
  char words[120] = {};
};

// Single writer, single reader.
struct Ring {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  std::atomic<uint32_t> reader_sleeps;
  alignas(64) Message messages[kRingMessages];

  bool push(const Message& message) {
    uint64_t at = written.load(std::memory_order_relaxed);
    if (at - read.load(std::memory_order_acquire) >= kRingMessages) return false;
    messages[at % kRingMessages] = message;
    written.store(at + 1, std::memory_order_seq_cst);
    return true;
  }
  bool pop(Message& message) {
    uint64_t at = read.load(std::memory_order_relaxed);
    if (at == written.load(std::memory_order_acquire)) return false;
    message = messages[at % kRingMessages];
    read.store(at + 1, std::memory_order_release);
    return true;
  }
  bool empty() const {
    return read.load(std::memory_order_relaxed) == written.load(std::memory_order_seq_cst);
  }
};

struct Facts {
  uint32_t magic = 0;
  uint32_t buffer_bytes = 0;
  uint32_t send_buffers = 0;     // numbered from 0
  uint32_t receive_buffers = 0;  // behind them
};
inline constexpr uint32_t kFactsMagic = 0x6b724c77;  // "wLrk"

struct Head {
  Facts facts;
  std::atomic<int64_t> processor_ns;  // that the worker has used
  Ring commands;
  Ring events;
};

inline size_t buffers_at() { return (sizeof(Head) + 4095) / 4096 * 4096; }
inline size_t memory_size(const Facts& facts) {
  return buffers_at() +
         size_t{facts.buffer_bytes} * (size_t{facts.send_buffers} + facts.receive_buffers);
}

// What comes over the channel with a connection's descriptor.
struct Handover {
  uint32_t lane = 0;
  uint32_t unsent_limit = 0;
  Lane::Role role = Lane::Role::out;
};

// An eventfd as something that a reactor can watch.
class Bell final : public net::Socket {
 public:
  explicit Bell(Fd fd) : fd_(std::move(fd)) {}
  ssize_t send(const iovec* parts, size_t count) override;
  ssize_t receive(const iovec* parts, size_t count) override;
  std::string local_host() const override { return {}; }
  std::string peer() const override { return "a bell"; }
  int fd() const override { return fd_.get(); }
  void ring();
  void quiet();

 private:
  Fd fd_;
};

// Serves until the channel is closed. The memory is mapped at `base`.
int serve(std::byte* base, int channel, Bell& bell_in, Bell& bell_out);

}  // namespace weft::lane::worker
