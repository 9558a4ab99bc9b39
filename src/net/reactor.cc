#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "address.h"

namespace weft::net {
namespace {

constexpr Nanos kLongestWait = Nanos::from_seconds(60);  // milliseconds in an int

// epoll, and beside it the sockets whose bytes may wait in memory: those are asked directly.
class EpollReactor final : public Reactor {
 public:
  Result<void> begin() {
    epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
    if (!epoll_) return own_error(errno, "cannot wait for connections");
    wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_) return own_error(errno, "cannot wait for connections");
    epoll_kept_.emplace(epoll_.get());
    wake_kept_.emplace(wake_.get());
    if (control(EPOLL_CTL_ADD, wake_.get(), EPOLLIN, kWake) != 0)
      return own_error(errno, "cannot wait for connections");
    return {};
  }

  Result<void> add(Socket& socket, uint32_t events, Handler* handler) override {
    auto fd = static_cast<uint32_t>(socket.fd());
    // Memory first: what the kernel watches must have its place here.
    if (places_.size() <= fd) places_.resize(fd + 1);
    if (socket.in_memory()) asked_.reserve(asked_.size() + 1);
    if (control(EPOLL_CTL_ADD, socket.fd(), kernel_events(socket, events), next_ << 32 | fd) != 0)
      return own_error(errno, "cannot watch a connection");
    places_[fd] = {handler, next_++};
    if (socket.in_memory()) asked_.push_back({&socket, events, handler});
    return {};
  }
  void modify(Socket& socket, uint32_t events, Handler* handler) override {
    if (!socket.shared()) {
      // What is watched already takes nothing more.
      Place& place = places_.at(static_cast<size_t>(socket.fd()));
      place.handler = handler;
      uint64_t word = place.number << 32 | static_cast<uint32_t>(socket.fd());
      WEFT_CHECK(control(EPOLL_CTL_MOD, socket.fd(), events, word) == 0);
    }
    for (Asked& place : asked_)
      if (place.socket == &socket) place = {&socket, events, handler};
  }
  void remove(Socket& socket) override {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket.fd(), nullptr);
    if (static_cast<size_t>(socket.fd()) < places_.size())
      places_[static_cast<size_t>(socket.fd())] = {};
    std::erase_if(asked_, [&](const Asked& place) { return place.socket == &socket; });
    ++generation_;
  }

  bool run_once(Nanos timeout) override {
    bool any = ask_all(false);
    // Whoever writes from now on must ring; what was written just before is seen here.
    bool sleeps = !any && timeout.count > 0 && !asked_.empty();
    if (sleeps) any = ask_all(true);
    std::array<epoll_event, 64> events;
    int64_t left = any ? 0 : std::clamp<int64_t>(timeout.count, 0, kLongestWait.count);
    auto milliseconds = static_cast<int>((left + 999'999) / 1'000'000);
    int count =
        epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), milliseconds);
    if (count < 0) WEFT_CHECK(errno == EINTR);
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      if (event.data.u64 == kWake) {
        uint64_t ignored;
        [[maybe_unused]] ssize_t got = ::read(wake_.get(), &ignored, sizeof ignored);
        continue;
      }
      // A handler before it in this round may have removed it, and another have its descriptor.
      const Place& place = places_[static_cast<uint32_t>(event.data.u64)];
      if (place.handler != nullptr && (place.number & 0xffffffff) == event.data.u64 >> 32)
        place.handler->on_events(event.events);
    }
    return any || count > 0;
  }

  void wake() override {
    uint64_t one = 1;
    [[maybe_unused]] ssize_t put = ::write(wake_.get(), &one, sizeof one);
  }

 private:
  struct Place {
    Handler* handler = nullptr;
    uint64_t number = 0;
  };
  static constexpr uint64_t kWake = 0;

  struct Asked {
    Socket* socket;
    uint32_t events;
    Handler* handler;
  };

  // The connection beside shared memory only rings: its room does not matter.
  static uint32_t kernel_events(const Socket& socket, uint32_t events) {
    return socket.shared() ? static_cast<uint32_t>(EPOLLIN) : events;
  }

  int control(int what, int fd, uint32_t events, uint64_t word) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = word;
    return epoll_ctl(epoll_.get(), what, fd, &event);
  }

  bool ask_all(bool sleeping) {
    bool any = false;
    for (size_t i = 0; i < asked_.size(); ++i) {
      Asked place = asked_[i];
      uint32_t ready = place.socket->memory_events(place.events, sleeping);
      if (ready == 0) continue;
      any = true;
      uint64_t generation = generation_;
      place.handler->on_events(ready);
      if (generation != generation_) return true;
    }
    return any;
  }

  Fd epoll_;
  Fd wake_;
  // A child that removed its copies of sockets here would remove its parent's.
  std::optional<KeptFromChildren> epoll_kept_, wake_kept_;
  std::vector<Place> places_;  // by descriptor
  uint64_t next_ = 1;          // of registrations; 32 bits of it tell two of one round apart
  std::vector<Asked> asked_;
  uint64_t generation_ = 0;  // grows when a handler is removed
};

}  // namespace

Result<std::unique_ptr<Reactor>> make_reactor() {
  auto made = std::make_unique<EpollReactor>();
  WEFT_TRY(made->begin());
  return std::unique_ptr<Reactor>(std::move(made));
}

}  // namespace weft::net
