// One thread's way to the background writer: a bounded queue with one producer and one consumer.
//
// head counts what was ever pushed, tail what was ever taken; neither wraps in practice (64 bits),
// so full and empty need no spare slot. Each side writes its own cache line, and the producer
// looks at the consumer's only when its last view says "full".
//
// A ring outlives its thread: the thread's end marks it ownerless, the writer empties it and
// offers it to the next thread that comes.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <span>

#include "weft/trace.h"

namespace weft::capture {

inline constexpr size_t kCacheLine = 64;

class Ring {
 public:
  enum class Push : uint8_t { stored, stored_and_filling, dropped };

  // REQUIRES: capacity is a power of two, at least 4.
  explicit Ring(uint64_t capacity)
      : slots_(new trace::Event[capacity]), mask_(capacity - 1), wake_mask_(capacity / 4 - 1) {}

  // Producer. stored_and_filling once every quarter of the ring: a good moment to wake the writer.
  Push push(const trace::Event& event) noexcept {
    const uint64_t head = head_.load(std::memory_order_relaxed);
    if (head - tail_seen_ > mask_) [[unlikely]] {
      tail_seen_ = tail_.load(std::memory_order_acquire);
      if (head - tail_seen_ > mask_) {
        // Only this thread writes the count, so no read-modify-write is needed.
        drops_.store(drops_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        return Push::dropped;
      }
    }
    slots_[head & mask_] = event;
    head_.store(head + 1, std::memory_order_release);
    return ((head + 1) & wake_mask_) == 0 ? Push::stored_and_filling : Push::stored;
  }

  // Consumer. Everything pushed before end() was read lies in [tail, end): at most two pieces.
  uint64_t end() const { return head_.load(std::memory_order_acquire); }
  uint64_t begin() const { return tail_.load(std::memory_order_relaxed); }
  std::span<const trace::Event> piece(uint64_t from, uint64_t to) const {
    const uint64_t at = from & mask_;
    const uint64_t until_wrap = mask_ + 1 - at;
    const uint64_t count = to - from < until_wrap ? to - from : until_wrap;
    return {slots_.get() + at, count};
  }
  void release_to(uint64_t position) { tail_.store(position, std::memory_order_release); }

  uint64_t drops() const { return drops_.load(std::memory_order_relaxed); }

  // The owner's last act, and what the writer asks before it looks at end() for the last time.
  void disown() { owned_.store(false, std::memory_order_release); }
  bool owned() const { return owned_.load(std::memory_order_acquire); }
  // REQUIRES: no owner, and the caller got the ring from the writer.
  void adopt() { owned_.store(true, std::memory_order_relaxed); }

  // The recorder is gone: a thread may let go of the ring.
  void close() { closed_.store(true, std::memory_order_relaxed); }
  bool closed() const { return closed_.load(std::memory_order_relaxed); }

 private:
  const std::unique_ptr<trace::Event[]> slots_;
  const uint64_t mask_;
  const uint64_t wake_mask_;
  std::atomic<bool> owned_{true};
  std::atomic<bool> closed_{false};

  alignas(kCacheLine) std::atomic<uint64_t> head_{0};  // written by the producer
  uint64_t tail_seen_ = 0;                             // the producer's last view of tail_
  std::atomic<uint64_t> drops_{0};

  alignas(kCacheLine) std::atomic<uint64_t> tail_{0};  // written by the consumer
};

}  // namespace weft::capture
