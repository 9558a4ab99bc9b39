#include "shm/segment.h"

#include <sys/epoll.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

namespace weft::lane::shm {

// Each side writes its own line of the cache.
struct Head {
  alignas(64) std::atomic<uint64_t> written;
  std::atomic<uint32_t> writer_sleeps;  // ring when there is room
  alignas(64) std::atomic<uint64_t> read;
  std::atomic<uint32_t> reader_sleeps;  // ring when there is data
};
static_assert(sizeof(Head) <= net::SharedMemory::kHeadBytes);

namespace {

class RingSocket : public net::Socket {
 public:
  RingSocket(std::unique_ptr<net::Socket> bell, std::shared_ptr<Segment> segment)
      : bell_(std::move(bell)), segment_(std::move(segment)), head_(segment_->head()) {}

  std::string local_host() const override { return bell_->local_host(); }
  std::string peer() const override { return bell_->peer(); }
  std::string problem() const override { return bell_->problem(); }
  int fd() const override { return bell_->fd(); }
  net::Socket& carrier() override { return bell_->carrier(); }
  bool shared() const override { return true; }
  size_t shared_capacity() const override { return segment_->capacity(); }
  // Only bells come over the connection.
  ssize_t receive(const iovec* parts, size_t count) override {
    return bell_->receive(parts, count);
  }

 protected:
  void ring() {
    std::byte one{1};
    iovec part{&one, 1};
    // A full connection has bells enough in it.
    [[maybe_unused]] ssize_t put = bell_->send(&part, 1);
  }
  // Bytes in the ring; a position that cannot be counts as an empty, or full, ring.
  size_t filled(uint64_t written, uint64_t read) const {
    uint64_t bytes = written - read;
    return bytes <= segment_->capacity() ? static_cast<size_t>(bytes) : 0;
  }

  std::unique_ptr<net::Socket> bell_;
  std::shared_ptr<Segment> segment_;
  Head& head_;
};

class Writer final : public RingSocket {
 public:
  using RingSocket::RingSocket;

  ssize_t send(const iovec* parts, size_t count) override {
    size_t room = room_for();
    size_t put = 0;
    for (size_t i = 0; i < count && room > 0; ++i) {
      size_t here = std::min(room, parts[i].iov_len);
      std::memcpy(segment_->data() + (at_ + put) % segment_->capacity(), parts[i].iov_base, here);
      put += here;
      room -= here;
    }
    if (put == 0) return -EAGAIN;
    at_ += put;
    head_.written.store(at_, std::memory_order_seq_cst);
    if (head_.reader_sleeps.load(std::memory_order_seq_cst) != 0 &&
        head_.reader_sleeps.exchange(0) != 0)
      ring();
    return static_cast<ssize_t>(put);
  }

  uint32_t memory_events(uint32_t events, bool sleeping) override {
    if ((events & EPOLLOUT) == 0) return 0;
    // Enough room to be worth a turn.
    if (room_for() >= segment_->capacity() / 4) {
      head_.writer_sleeps.store(0);
      return EPOLLOUT;
    }
    if (sleeping) {
      head_.writer_sleeps.store(1, std::memory_order_seq_cst);
      if (room_for() >= segment_->capacity() / 4) return EPOLLOUT;
    }
    return 0;
  }

 private:
  size_t room_for() const {
    uint64_t read = head_.read.load(std::memory_order_seq_cst);
    // A reader that claims to be elsewhere gets nothing more; its deadline names it.
    if (at_ - read > segment_->capacity()) return 0;
    return segment_->capacity() - static_cast<size_t>(at_ - read);
  }
  uint64_t at_ = 0;
};

class Reader final : public RingSocket {
 public:
  using RingSocket::RingSocket;

  ssize_t send(const iovec*, size_t) override { return -EAGAIN; }
  std::span<const std::byte> peek() override {
    size_t here = filled(head_.written.load(std::memory_order_acquire), at_);
    return {segment_->data() + at_ % segment_->capacity(), here};
  }
  void consume(size_t bytes) override {
    at_ += bytes;
    head_.read.store(at_, std::memory_order_seq_cst);
    if (head_.writer_sleeps.load(std::memory_order_seq_cst) == 0) return;
    size_t left = filled(head_.written.load(std::memory_order_acquire), at_);
    if (left <= segment_->capacity() / 2 && head_.writer_sleeps.exchange(0) != 0) ring();
  }
  uint32_t memory_events(uint32_t events, bool sleeping) override {
    if ((events & EPOLLIN) == 0) return 0;
    if (news()) return EPOLLIN;
    if (!sleeping) return 0;
    head_.reader_sleeps.store(1, std::memory_order_seq_cst);
    return news() ? static_cast<uint32_t>(EPOLLIN) : 0;
  }

 private:
  // Something was written since this was last asked, or something is left by a reader who took
  // some: he may have had enough for one turn. What he leaves untouched is not whole yet.
  bool news() {
    uint64_t written = head_.written.load(std::memory_order_seq_cst);
    bool fresh = std::exchange(seen_, written) != written;
    bool took = std::exchange(asked_at_, at_) != at_;
    return fresh || (took && written != at_);
  }
  uint64_t at_ = 0;
  uint64_t seen_ = 0;      // of what was written, when last asked
  uint64_t asked_at_ = 0;  // own position then
};

}  // namespace

Result<std::shared_ptr<Segment>> Segment::make(net::System& system) {
  WEFT_ASSIGN(auto memory, system.make_memory());
  return std::shared_ptr<Segment>(new Segment(std::move(memory)));
}

Result<std::shared_ptr<Segment>> Segment::attach(net::System& system, const std::string& name) {
  WEFT_ASSIGN(auto memory, system.attach_memory(name));
  return std::shared_ptr<Segment>(new Segment(std::move(memory)));
}

Head& Segment::head() const { return *reinterpret_cast<Head*>(memory_->head()); }

std::unique_ptr<net::Socket> writer(std::unique_ptr<net::Socket>& bell,
                                    std::shared_ptr<Segment> segment) {
  segment->unlink();
  return std::make_unique<Writer>(std::move(bell), std::move(segment));
}

std::unique_ptr<net::Socket> reader(std::unique_ptr<net::Socket>& bell,
                                    std::shared_ptr<Segment> segment) {
  return std::make_unique<Reader>(std::move(bell), std::move(segment));
}

Result<std::shared_ptr<Segment>> make(net::System& system) { return Segment::make(system); }
Result<std::shared_ptr<Segment>> attach(net::System& system, const std::string& name) {
  return Segment::attach(system, name);
}
const std::string& name_of(const Segment& segment) { return segment.name(); }

}  // namespace weft::lane::shm
