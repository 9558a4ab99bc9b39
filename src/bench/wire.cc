// The wire's own limit: the bytes that a ring moves for a collective, with nothing else done. Each
// rank sends to the next and receives from the one before, at once, in one thread. No reduction, no
// header, no step waits for another.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

#include "worker.h"

namespace weft::bench {
namespace {

constexpr Nanos kMeetPatience = Nanos::from_seconds(30);
constexpr Nanos kMovePatience = Nanos::from_seconds(30);

// What a rank sends and receives in one collective.
struct Load {
  uint64_t sent = 0, received = 0;
};

Load load_of(const std::string& collective, uint64_t bytes, uint32_t rank, uint32_t ranks) {
  const uint64_t part = bytes / ranks * (ranks - 1);
  if (ranks == 1) return {};
  if (collective == "allreduce") return {2 * part, 2 * part};
  if (collective == "broadcast") return {rank + 1 < ranks ? bytes : 0, rank > 0 ? bytes : 0};
  if (collective == "sendrecv") return {bytes, bytes};
  return {part, part};
}

// Moves bytes to the next rank and from the one before, as much as is possible without waiting.
class Link {
 public:
  virtual ~Link() = default;
  virtual Result<size_t> send(const std::byte* data, size_t size) = 0;
  virtual Result<size_t> receive(std::byte* data, size_t size) = 0;
  virtual Result<void> wait(bool to_send, bool to_receive) = 0;
};

class TcpLink final : public Link {
 public:
  static Result<std::unique_ptr<Link>> meet(uint32_t rank, uint32_t ranks, const std::string& store,
                                            int buffer) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    socklen_t length = sizeof address;
    auto* plain = reinterpret_cast<sockaddr*>(&address);
    if (!listener || ::bind(listener.get(), plain, length) != 0 ||
        ::listen(listener.get(), 8) != 0 || ::getsockname(listener.get(), plain, &length) != 0)
      return io_error(errno, "listening on loopback");
    WEFT_TRY(write_file(text("%s.port-%u", store.c_str(), rank),
                        std::to_string(ntohs(address.sin_port))));
    const std::string next = text("%s.port-%u", store.c_str(), (rank + 1) % ranks);
    const Nanos deadline = monotonic_clock().now() + kMeetPatience;
    for (;;) {
      if (auto port = read_file(next, kib(1))) {
        address.sin_port = htons(static_cast<uint16_t>(atoi(port->c_str())));
        break;
      }
      if (monotonic_clock().now() > deadline)
        return error(Code::timeout, "the next rank did not come");
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    auto link = std::make_unique<TcpLink>();
    link->next_ = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!link->next_ || ::connect(link->next_.get(), plain, sizeof address) != 0)
      return io_error(errno, "connecting to the next rank");
    link->previous_ = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!link->previous_) return io_error(errno, "accepting the rank before");
    const int on = 1;
    ::setsockopt(link->next_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (buffer > 0) ::setsockopt(link->next_.get(), SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
    return std::unique_ptr<Link>(std::move(link));
  }

  Result<size_t> send(const std::byte* data, size_t size) override {
    return moved(::send(next_.get(), data, size, MSG_DONTWAIT | MSG_NOSIGNAL));
  }
  Result<size_t> receive(std::byte* data, size_t size) override {
    const ssize_t n = ::recv(previous_.get(), data, size, MSG_DONTWAIT);
    if (n == 0) return error(Code::peer_lost, "the rank before ended");
    return moved(n);
  }
  Result<void> wait(bool to_send, bool to_receive) override {
    pollfd waiting[2] = {{to_send ? next_.get() : -1, POLLOUT, 0},
                         {to_receive ? previous_.get() : -1, POLLIN, 0}};
    if (::poll(waiting, 2, static_cast<int>(kMovePatience.millis())) == 0)
      return error(Code::timeout, "nothing moved for %s", format_duration(kMovePatience).c_str());
    return {};
  }

 private:
  static Result<size_t> moved(ssize_t n) {
    if (n >= 0) return static_cast<size_t>(n);
    if (errno == EAGAIN || errno == EINTR) return size_t{0};
    return io_error(errno, "moving bytes");
  }
  Fd next_, previous_;
};

// A ring of bytes in memory that one rank writes and the next one reads.
struct Pipe {
  static constexpr size_t kBytes = 4 << 20;
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(4096) std::byte data[kBytes];
};

class ShmLink final : public Link {
 public:
  static Result<std::unique_ptr<Link>> meet(uint32_t rank, uint32_t ranks,
                                            const std::string& store) {
    auto link = std::make_unique<ShmLink>();
    WEFT_ASSIGN(link->next_, map(text("%s.pipe-%u", store.c_str(), rank)));
    WEFT_ASSIGN(link->previous_,
                map(text("%s.pipe-%u", store.c_str(), (rank + ranks - 1) % ranks)));
    return std::unique_ptr<Link>(std::move(link));
  }
  ~ShmLink() override {
    for (Pipe* pipe : {next_, previous_})
      if (pipe != nullptr) ::munmap(pipe, sizeof(Pipe));
  }

  Result<size_t> send(const std::byte* data, size_t size) override {
    const uint64_t at = next_->written.load(std::memory_order_relaxed);
    const uint64_t room = Pipe::kBytes - (at - next_->read.load(std::memory_order_acquire));
    size = std::min({size, static_cast<size_t>(room), Pipe::kBytes - at % Pipe::kBytes});
    memcpy(next_->data + at % Pipe::kBytes, data, size);
    next_->written.store(at + size, std::memory_order_release);
    return size;
  }
  Result<size_t> receive(std::byte* data, size_t size) override {
    const uint64_t at = previous_->read.load(std::memory_order_relaxed);
    const uint64_t there = previous_->written.load(std::memory_order_acquire) - at;
    size = std::min({size, static_cast<size_t>(there), Pipe::kBytes - at % Pipe::kBytes});
    memcpy(data, previous_->data + at % Pipe::kBytes, size);
    previous_->read.store(at + size, std::memory_order_release);
    return size;
  }
  Result<void> wait(bool, bool) override {
    ::sched_yield();
    return {};
  }

 private:
  // Whoever comes first makes it; its bytes are zero, which is how a pipe starts.
  static Result<Pipe*> map(const std::string& path) {
    Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!fd || ::ftruncate(fd.get(), sizeof(Pipe)) != 0)
      return io_error(errno, "making %s", path.c_str());
    void* at = ::mmap(nullptr, sizeof(Pipe), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                      fd.get(), 0);
    if (at == MAP_FAILED) return io_error(errno, "mapping %s", path.c_str());
    return static_cast<Pipe*>(at);
  }
  Pipe* next_ = nullptr;
  Pipe* previous_ = nullptr;
};

class Wire final : public Engine {
 public:
  Wire(uint32_t rank, uint32_t ranks, std::vector<std::unique_ptr<Link>> links)
      : rank_(rank), ranks_(ranks), links_(std::move(links)) {}

  Result<Answer> measure(const Request& request) override {
    const uint64_t bytes = request.count * element_bytes(request.type);
    if (request.setting == 0) return error(Code::unsupported, "no bytes a call are named");
    if (!links_.empty()) link_ = links_[request.setting % 2 % links_.size()].get();
    from_.resize(std::max<uint64_t>(bytes, 64));
    to_.resize(from_.size());
    const Load load = load_of(request.collective, bytes, rank_, ranks_);
    for (uint32_t i = 0; i < request.warmups; ++i) WEFT_TRY(move(load, request.setting));
    // A byte all around, twice: nobody starts before all are there.
    WEFT_TRY(barrier());
    const Nanos begin = monotonic_clock().now();
    for (uint32_t i = 0; i < request.iterations; ++i) WEFT_TRY(move(load, request.setting));
    // What a rank has sent has not arrived yet: the end is when all have theirs.
    WEFT_TRY(barrier());
    return Answer{(monotonic_clock().now() - begin).seconds(), 0};
  }
  std::string version() const override { return "a ring of connections with nothing else done"; }

 private:
  Result<void> move(Load left, uint64_t chunk) {
    uint64_t sent = 0, received = 0;
    while (sent < left.sent || received < left.received) {
      size_t progress = 0;
      if (received < left.received) {
        const uint64_t at = received % to_.size();
        WEFT_ASSIGN(size_t n,
                    link_->receive(to_.data() + at,
                                   std::min({chunk, to_.size() - at, left.received - received})));
        received += n;
        progress += n;
      }
      if (sent < left.sent) {
        const uint64_t at = sent % from_.size();
        WEFT_ASSIGN(size_t n, link_->send(from_.data() + at,
                                          std::min({chunk, from_.size() - at, left.sent - sent})));
        sent += n;
        progress += n;
      }
      if (progress == 0) WEFT_TRY(link_->wait(sent < left.sent, received < left.received));
    }
    return {};
  }

  Result<void> barrier() {
    if (ranks_ == 1) return {};
    for (int round = 0; round < 2; ++round) {
      if (rank_ > 0) WEFT_TRY(move({0, 1}, 1));
      WEFT_TRY(move({1, 0}, 1));
      if (rank_ == 0) WEFT_TRY(move({0, 1}, 1));
    }
    return {};
  }

  uint32_t rank_, ranks_;
  std::vector<std::unique_ptr<Link>> links_;
  Link* link_ = nullptr;  // the one that is asked for
  std::vector<std::byte> from_, to_;
};

}  // namespace

// Over TCP with the buffers that the kernel chooses, and (settings that are odd) with small ones,
// which stay in the caches.
Result<std::unique_ptr<Engine>> make_wire(const Place& place, bool shm) {
  constexpr int kSmallBuffer = 128 << 10;
  std::vector<std::unique_ptr<Link>> links;
  if (place.ranks > 1 && shm) {
    WEFT_ASSIGN(auto link, ShmLink::meet(place.rank, place.ranks, place.store));
    links.push_back(std::move(link));
  } else if (place.ranks > 1) {
    for (int buffer : {0, kSmallBuffer}) {
      WEFT_ASSIGN(auto link, TcpLink::meet(place.rank, place.ranks,
                                           text("%s.%d", place.store.c_str(), buffer), buffer));
      links.push_back(std::move(link));
    }
  }
  return std::unique_ptr<Engine>(new Wire(place.rank, place.ranks, std::move(links)));
}

}  // namespace weft::bench
