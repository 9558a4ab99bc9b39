#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "tcp/socket.h"
#include "weft/transport.h"

namespace weft::transport {
namespace {
constexpr size_t kFrameHead = 5;  // length (4), type (1)
}

ControlChannel::ControlChannel(Reactor& reactor, Fd socket, Rank peer)
    : reactor_(reactor), socket_(std::move(socket)), peer_(peer) {
  reactor_.add(socket_.get(), EPOLLIN, this);
}

ControlChannel::~ControlChannel() {
  if (!failure_) reactor_.remove(socket_.get());
}

std::string ControlChannel::local_host() const {
  std::string address = tcp::to_text(tcp::local_address_of(socket_.get()));
  return address.substr(0, address.rfind(':'));
}

void ControlChannel::send(Control type, const Packer& payload) {
  const std::vector<std::byte>& bytes = payload.bytes();
  WEFT_CHECK(bytes.size() <= kMaxControlBytes);
  if (failure_) return;
  auto length = static_cast<uint32_t>(bytes.size());
  std::array<std::byte, kFrameHead> head;
  std::memcpy(head.data(), &length, sizeof length);
  head[4] = static_cast<std::byte>(type);
  bool idle = flushed();
  if (idle) {
    out_.clear();
    out_done_ = 0;
  }
  out_.insert(out_.end(), head.begin(), head.end());
  out_.insert(out_.end(), bytes.begin(), bytes.end());
  if (idle) write_some();
}

void ControlChannel::write_some() {
  while (!flushed()) {
    ssize_t put = ::send(socket_.get(), out_.data() + out_done_, out_.size() - out_done_,
                         MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      reactor_.modify(socket_.get(), EPOLLIN | EPOLLOUT, this);
      return;
    }
    if (put < 0) {
      fail(Error(Code::peer_lost, text("sending failed: %s", std::strerror(errno))));
      return;
    }
    out_done_ += static_cast<size_t>(put);
  }
}

void ControlChannel::fail(Error error) {
  if (failure_) return;
  failure_ = std::move(error);
  reactor_.remove(socket_.get());
}

std::optional<Frame> ControlChannel::receive() {
  if (inbox_.empty()) return std::nullopt;
  Frame front = std::move(inbox_.front());
  inbox_.pop_front();
  return front;
}

void ControlChannel::on_events(uint32_t epoll_events) {
  if ((epoll_events & EPOLLOUT) != 0) {
    write_some();
    if (failure_) return;
    if (flushed()) reactor_.modify(socket_.get(), EPOLLIN, this);
  }
  std::array<std::byte, 16384> buffer;
  bool closed = false;
  for (;;) {
    ssize_t got = ::recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (got <= 0) {
      closed = true;  // what came before is still read: it may say why
      break;
    }
    in_.insert(in_.end(), buffer.begin(), buffer.begin() + got);
    if (in_.size() > 2 * kMaxControlBytes) break;
  }
  size_t used = 0;
  while (in_.size() - used >= kFrameHead) {
    uint32_t length;
    std::memcpy(&length, in_.data() + used, sizeof length);
    if (length > kMaxControlBytes) {
      fail(error(Code::corrupt, "control frame of %u bytes; at most %u are allowed", length,
                 kMaxControlBytes));
      return;
    }
    if (in_.size() - used < kFrameHead + length) break;
    auto first = in_.begin() + static_cast<ptrdiff_t>(used + kFrameHead);
    inbox_.push_back({static_cast<Control>(in_[used + 4]), {first, first + length}});
    used += kFrameHead + length;
  }
  in_.erase(in_.begin(), in_.begin() + static_cast<ptrdiff_t>(used));
  if (closed) fail(error(Code::peer_lost, "connection closed"));
}

}  // namespace weft::transport
