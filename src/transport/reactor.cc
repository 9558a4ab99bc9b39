#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "weft/transport.h"

namespace weft::transport {

Reactor::Reactor()
    : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  WEFT_CHECK(epoll_ && wake_);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = nullptr;
  WEFT_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) == 0);
}

void Reactor::add(int fd, uint32_t events, Handler* handler) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = handler;
  WEFT_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0);
}

void Reactor::modify(int fd, uint32_t events, Handler* handler) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = handler;
  WEFT_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) == 0);
}

void Reactor::remove(int fd) {
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  ++generation_;
}

void Reactor::run_once(Nanos timeout) {
  std::array<epoll_event, 64> events;
  auto milliseconds = static_cast<int>(std::max<int64_t>(0, (timeout.count + 999'999) / 1'000'000));
  int count =
      epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), milliseconds);
  if (count < 0) WEFT_CHECK(errno == EINTR);
  uint64_t generation = generation_;
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    if (event.data.ptr == nullptr) {
      uint64_t ignored;
      [[maybe_unused]] ssize_t got = ::read(wake_.get(), &ignored, sizeof ignored);
      continue;
    }
    static_cast<Handler*>(event.data.ptr)->on_events(event.events);
    // Something was unregistered: what is left of this round may point to it. Level triggering
    // brings the rest again.
    if (generation != generation_) return;
  }
}

void Reactor::wake() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t put = ::write(wake_.get(), &one, sizeof one);
}

}  // namespace weft::transport
