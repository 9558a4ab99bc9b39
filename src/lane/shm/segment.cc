#include "shm/segment.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "shm/name.h"

namespace weft::lane::shm {

// Each side writes its own line of the cache.
struct Head {
  alignas(64) std::atomic<uint64_t> written;
  std::atomic<uint32_t> writer_sleeps;  // ring when there is room
  alignas(64) std::atomic<uint64_t> read;
  std::atomic<uint32_t> reader_sleeps;  // ring when there is data
};

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kCapacity = 2u << 20;  // a few chunks, and still in a core's cache

class RingSocket : public net::Socket {
 public:
  RingSocket(std::unique_ptr<net::Socket> bell, std::shared_ptr<Segment> segment)
      : bell_(std::move(bell)), segment_(std::move(segment)), head_(segment_->head()) {}

  std::string local_host() const override { return bell_->local_host(); }
  std::string peer() const override { return bell_->peer(); }
  int fd() const override { return bell_->fd(); }
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

Result<std::shared_ptr<Segment>> Segment::map(const std::string& name, const Fd& file) {
  std::shared_ptr<Segment> segment(new Segment());
  segment->name_ = name;
  segment->capacity_ = kCapacity;
  // One stretch of addresses for the head and twice the data; then the file's pages into it.
  size_t whole = kPage + 2 * kCapacity;
  void* place = ::mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place == MAP_FAILED) return io_error(errno, "cannot reserve memory for a lane");
  auto* base = static_cast<std::byte*>(place);
  segment->head_ = reinterpret_cast<Head*>(base);
  segment->data_ = base + kPage;
  auto put = [&](std::byte* at, size_t size, off_t offset) {
    return ::mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file.get(), offset) !=
           MAP_FAILED;
  };
  if (!put(base, kPage, 0) || !put(base + kPage, kCapacity, kPage) ||
      !put(base + kPage + kCapacity, kCapacity, kPage))
    return io_error(errno, "cannot map the memory of a lane");
  return segment;
}

namespace {

// Takes the pages now: a full file system is an error here, and a signal later.
int reserve(const Fd& file) {
  int failure = EINTR;
  while (failure == EINTR) failure = ::posix_fallocate(file.get(), 0, kPage + kCapacity);
  return failure;
}

Error no_room(int failure) {
  Error error = io_error(failure, "cannot get %zu bytes of shared memory", kPage + kCapacity);
  if (failure != ENOSPC) return error;
  return Error(error.code(),
               error.message() +
                   "; make room with: mount -o remount,size=1G /dev/shm (a container: docker run "
                   "--shm-size=1g), or set WEFT_SHARED_MEMORY=0");
}

}  // namespace

Result<std::shared_ptr<Segment>> Segment::make() {
  sweep_if_due();
  WEFT_ASSIGN(NamedFile made, make_named());
  if (int failure = reserve(made.file); failure != 0) {
    ::shm_unlink(made.name.c_str());
    return no_room(failure);
  }
  auto segment = map(made.name, made.file);
  if (!segment) {
    ::shm_unlink(made.name.c_str());
    return segment;
  }
  (*segment)->held_ = std::move(made.file);
  return segment;
}

Result<std::shared_ptr<Segment>> Segment::attach(const std::string& name) {
  if (!is_lane_name(name))
    return error(Code::invalid_argument, "\"%s\" is not a lane's memory", name.c_str());
  Fd file(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0));
  if (!file) return io_error(errno, "cannot open shared memory %s", name.c_str());
  struct stat facts {};
  if (::fstat(file.get(), &facts) != 0 || facts.st_uid != ::geteuid() ||
      facts.st_size != static_cast<off_t>(kPage + kCapacity))
    return error(Code::invalid_argument, "shared memory %s is not a lane's", name.c_str());
  return map(name, file);
}

void Segment::unlink() {
  if (!held_) return;
  ::shm_unlink(name_.c_str());
  held_.reset();  // last: a name without a lock is anybody's to remove
}

Segment::~Segment() {
  unlink();
  if (head_ != nullptr) ::munmap(head_, kPage + 2 * capacity_);
}

std::unique_ptr<net::Socket> writer(std::unique_ptr<net::Socket> bell,
                                    std::shared_ptr<Segment> segment) {
  segment->unlink();
  return std::make_unique<Writer>(std::move(bell), std::move(segment));
}

std::unique_ptr<net::Socket> reader(std::unique_ptr<net::Socket> bell,
                                    std::shared_ptr<Segment> segment) {
  return std::make_unique<Reader>(std::move(bell), std::move(segment));
}

Result<std::shared_ptr<Segment>> make() { return Segment::make(); }
Result<std::shared_ptr<Segment>> attach(const std::string& name) { return Segment::attach(name); }
const std::string& name_of(const Segment& segment) { return segment.name(); }

}  // namespace weft::lane::shm
