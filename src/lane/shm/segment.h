// Memory between two ranks of one host, in place of the bytes of a lane's connection.
//
// The connector makes a segment and names it in its hello; the acceptor maps it. It holds a ring
// of bytes that one side writes and the other reads, mapped twice in a row so that every stretch
// of it is contiguous. The lane's connection stays: a byte on it wakes a side that sleeps, and its
// end tells that the other side is gone. What the other side writes is not trusted: positions are
// checked against the ring's size.
#pragma once

#include "weft/lane.h"

namespace weft::lane::shm {

struct Head;  // positions and flags, in the segment itself

class Segment {
 public:
  static Result<std::shared_ptr<Segment>> make(net::System& system);
  static Result<std::shared_ptr<Segment>> attach(net::System& system, const std::string& name);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const std::string& name() const { return memory_->name(); }
  Head& head() const;
  std::byte* data() const { return memory_->ring(); }
  size_t capacity() const { return memory_->capacity(); }
  // The name is of no use any more. Also done when the segment goes.
  void unlink() { memory_->unlink(); }

 private:
  explicit Segment(std::unique_ptr<net::SharedMemory> memory) : memory_(std::move(memory)) {}

  std::unique_ptr<net::SharedMemory> memory_;
};

// The two ends of a lane whose bytes go through `segment`. Where memory runs out, the caller still
// has the bell.
std::unique_ptr<net::Socket> writer(std::unique_ptr<net::Socket>& bell,
                                    std::shared_ptr<Segment> segment);
std::unique_ptr<net::Socket> reader(std::unique_ptr<net::Socket>& bell,
                                    std::shared_ptr<Segment> segment);

}  // namespace weft::lane::shm
