// The worker's side: connections, and nothing that decides.
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>

#include "weft/net.h"
#include "worker/shared.h"

namespace weft::lane::worker {
namespace {

Nanos thread_time() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  auto ns = [](const timeval& t) { return (int64_t{t.tv_sec} * 1'000'000 + t.tv_usec) * 1000; };
  return Nanos{ns(usage.ru_utime) + ns(usage.ru_stime)};
}

class Server final : public ChunkHandler, net::Reactor::Handler {
 public:
  Server(std::byte* base, int channel, Bell& bell_in, Bell& bell_out,
         std::unique_ptr<net::Reactor> reactor)
      : head_(*reinterpret_cast<Head*>(base)),
        facts_(head_.facts),
        buffers_(base + buffers_at()),
        channel_(channel),
        bell_in_(bell_in),
        bell_out_(bell_out),
        reactor_(std::move(reactor)) {
    for (uint32_t i = 0; i < facts_.receive_buffers; ++i) free_.push_back(facts_.send_buffers + i);
  }
  Result<void> begin() { return reactor_->add(bell_in_, EPOLLIN, this); }
  ~Server() override {
    lanes_.clear();
    reactor_->remove(bell_in_);
  }

  void run() {
    Nanos next_account{0};
    while (!ended_) {
      head_.commands.reader_sleeps.store(1, std::memory_order_seq_cst);
      bool more = more_ || !head_.commands.empty();
      reactor_->run_once(more ? Nanos{0} : Nanos::from_millis(100));
      head_.commands.reader_sleeps.store(0);
      take_connections();
      take_commands();
      send_all();
      flush_events();
      Nanos now = monotonic_clock().now();
      if (now < next_account) continue;
      next_account = now + Nanos::from_millis(20);
      head_.processor_ns.store(thread_time().count, std::memory_order_relaxed);
    }
  }

  // ---- from lanes
  bool take(uint32_t lane, OutgoingChunk& out) override {
    auto& waiting = places_.at(lane).waiting;
    if (waiting.empty()) return false;
    const Message& next = waiting.front();
    out.header = next.header;
    out.token = next.token;
    if (next.buffer != kNoBuffer)
      out.payload.push_back({buffer(next.buffer), next.header.length});
    else
      for (size_t i = 0; i < next.parts; ++i)
        out.payload.push_back(
            {reinterpret_cast<const std::byte*>(next.part[i].at), next.part[i].size});
    waiting.pop_front();
    return true;
  }
  void sent(uint32_t lane, const ChunkHeader& header, uint64_t token, Moment when) override {
    tell(What::sent, lane, header, token, kNoBuffer, when);
  }
  void settled(uint32_t lane, const ChunkHeader& header, uint64_t token) override {
    tell(What::settled, lane, header, token, kNoBuffer, {});
  }
  Result<Destination> arriving(uint32_t lane, const ChunkHeader& header, bool) override {
    if (header.length > facts_.buffer_bytes)
      return error(Code::corrupt, "a chunk of %u bytes; at most %u are expected", header.length,
                   facts_.buffer_bytes);
    if (free_.empty()) {
      paused_ = true;
      return Destination{true, false, {}};
    }
    uint32_t number = free_.back();
    free_.pop_back();
    places_.at(lane).landing = number;
    return Destination{false, false, {std::span(buffer(number), header.length)}};
  }
  Result<void> arrived(uint32_t lane, const ChunkHeader& header, const std::byte*,
                       Moment when) override {
    Place& place = places_.at(lane);
    tell(What::arrived, lane, header, 0, std::exchange(place.landing, kNoBuffer), when);
    return {};
  }

 private:
  struct Place {
    std::deque<Message> waiting;
    uint32_t landing = kNoBuffer;
    bool opened = false;
  };

  std::byte* buffer(uint32_t number) const {
    return buffers_ + size_t{number} * facts_.buffer_bytes;
  }

  void on_events(uint32_t) override { bell_in_.quiet(); }

  void take_connections() {
    for (;;) {
      Handover handover;
      iovec part{&handover, sizeof handover};
      alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))];
      msghdr message{};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      message.msg_control = space;
      message.msg_controllen = sizeof space;
      ssize_t got = ::recvmsg(channel_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
      if (got == 0) ended_ = true;  // the process that we serve is gone
      if (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) ended_ = true;
      if (got != static_cast<ssize_t>(sizeof handover)) return;
      const cmsghdr* rights = CMSG_FIRSTHDR(&message);
      if (rights == nullptr || rights->cmsg_type != SCM_RIGHTS) return;
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(rights), sizeof fd);
      add(handover, Fd(fd));
    }
  }

  void add(const Handover& handover, Fd socket) {
    lanes_.erase(handover.lane);
    places_[handover.lane] = {};
    auto lane =
        std::make_unique<Lane>(handover.role, *reactor_, net::adopt(std::move(socket)), nullptr,
                               handover.lane, *this, monotonic_clock(), handover.unsent_limit,
                               [this](uint32_t index, Error error) { broke(index, error); });
    lane->keep_no_copies();
    lanes_[handover.lane] = std::move(lane);
  }

  void broke(uint32_t lane, const Error& error) {
    Place& place = places_.at(lane);
    if (place.landing != kNoBuffer) free_.push_back(std::exchange(place.landing, kNoBuffer));
    place.waiting.clear();
    Message event;
    event.what = What::broken;
    event.lane = lane;
    event.code = static_cast<uint8_t>(error.code());
    std::strncpy(event.words, error.message().c_str(), sizeof event.words - 1);
    unsaid_.push_back(event);
    broken_.push_back(lane);
  }

  void tell(What what, uint32_t lane, const ChunkHeader& header, uint64_t token, uint32_t number,
            Moment when) {
    Message event;
    event.what = what;
    event.lane = lane;
    event.header = header;
    event.token = token;
    event.buffer = number;
    event.first = when.first.count;
    event.last = when.last.count;
    unsaid_.push_back(event);
  }

  void take_commands() {
    Message command;
    while (head_.commands.pop(command)) {
      if (command.what == What::send) {
        if (auto place = places_.find(command.lane); place != places_.end())
          place->second.waiting.push_back(command);
      } else if (command.what == What::release) {
        free_.push_back(command.buffer);
        if (std::exchange(paused_, false))
          for (auto& [index, lane] : lanes_) lane->resume();
      }
    }
  }

  void send_all() {
    more_ = false;
    for (auto& [index, lane] : lanes_) {
      lane->send_receipts();
      Place& place = places_.at(index);
      if (!place.opened && lane->ready()) {
        place.opened = true;
        tell(What::opened, index, {}, 0, kNoBuffer, {});
      }
      if (!place.waiting.empty() && lane->send_one()) more_ = more_ || !place.waiting.empty();
    }
    for (uint32_t lane : std::exchange(broken_, {})) lanes_.erase(lane);
  }

  void flush_events() {
    bool any = false;
    while (!unsaid_.empty() && head_.events.push(unsaid_.front())) {
      unsaid_.pop_front();
      any = true;
    }
    if (!unsaid_.empty()) more_ = true;
    if (any && head_.events.reader_sleeps.exchange(0) != 0) bell_out_.ring();
  }

  Head& head_;
  Facts facts_;
  std::byte* buffers_;
  int channel_;
  Bell& bell_in_;
  Bell& bell_out_;
  std::unique_ptr<net::Reactor> reactor_;
  std::map<uint32_t, std::unique_ptr<Lane>> lanes_;
  std::map<uint32_t, Place> places_;
  std::vector<uint32_t> free_;
  std::vector<uint32_t> broken_;
  std::deque<Message> unsaid_;
  bool paused_ = false;
  bool more_ = false;
  bool ended_ = false;
};

}  // namespace

ssize_t Bell::send(const iovec*, size_t) {
  ring();
  return 8;
}
ssize_t Bell::receive(const iovec*, size_t) {
  quiet();
  return -EAGAIN;
}
void Bell::ring() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t put = ::write(fd_.get(), &one, sizeof one);
}
void Bell::quiet() {
  uint64_t ignored;
  [[maybe_unused]] ssize_t got = ::read(fd_.get(), &ignored, sizeof ignored);
}

int serve(std::byte* base, int channel, Bell& bell_in, Bell& bell_out) {
  auto reactor = net::kernel_network().reactor();
  if (!reactor) {
    WEFT_LOG(lane, error, "a lane worker cannot begin: %s", reactor.error().message().c_str());
    return 1;
  }
  Server server(base, channel, bell_in, bell_out, std::move(*reactor));
  if (auto begun = server.begin(); !begun) {
    WEFT_LOG(lane, error, "a lane worker cannot begin: %s", begun.error().message().c_str());
    return 1;
  }
  server.run();
  return 0;
}

}  // namespace weft::lane::worker

namespace weft::lane {

int run_lane_worker(int memory, int channel, int bell_in, int bell_out) {
  Fd file(memory), wire(channel);
  worker::Bell in{Fd(bell_in)}, out{Fd(bell_out)};
  struct stat facts {};
  if (::fstat(file.get(), &facts) != 0 || facts.st_size < static_cast<off_t>(worker::buffers_at()))
    return 2;
  auto size = static_cast<size_t>(facts.st_size);
  void* place = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (place == MAP_FAILED) return 2;
  auto* head = static_cast<worker::Head*>(place);
  if (head->facts.magic != worker::kFactsMagic || worker::memory_size(head->facts) > size) return 2;
  return worker::serve(static_cast<std::byte*>(place), wire.get(), in, out);
}

}  // namespace weft::lane
