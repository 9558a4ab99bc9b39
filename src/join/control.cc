#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "weft/join.h"

namespace weft::join {
namespace {
constexpr size_t kFrameHead = 9;    // length (4), type (1), checksum (4)
constexpr size_t kLastWords = 512;  // for which there is always memory

// A damaged address would send others to the wrong place, and the wrong one would be blamed. Takes
// no memory: a frame may have to say that there is none.
uint32_t frame_checksum(std::span<const std::byte> payload, uint8_t type) {
  std::array<uint64_t, 2> words = {hash64(payload), (uint64_t{payload.size()} << 8) | type};
  return static_cast<uint32_t>(hash64(std::as_bytes(std::span(words))));
}

}  // namespace

ControlChannel::ControlChannel(net::Reactor& reactor, std::unique_ptr<net::Socket> socket,
                               Rank peer)
    : reactor_(reactor), socket_(std::move(socket)), peer_(peer) {
  out_.reserve(kLastWords);
  if (auto added = reactor_.add(*socket_, EPOLLIN, this); !added) fail(std::move(added).error());
}

ControlChannel::~ControlChannel() {
  if (!failure_) reactor_.remove(*socket_);
}

std::string ControlChannel::local_host() const { return socket_->local_host(); }

void ControlChannel::send(Control type, const Packer& payload) {
  const std::vector<std::byte>& bytes = payload.bytes();
  if (failure_) return;
  if (bytes.size() > kMaxControlBytes) {
    fail(error(Code::invalid_argument, "a control frame of %zu bytes is too long; %u are allowed",
               bytes.size(), kMaxControlBytes));
    return;
  }
  auto length = static_cast<uint32_t>(bytes.size());
  std::array<std::byte, kFrameHead> head;
  std::memcpy(head.data(), &length, sizeof length);
  head[4] = static_cast<std::byte>(type);
  uint32_t checksum = frame_checksum(bytes, static_cast<uint8_t>(type));
  std::memcpy(head.data() + 5, &checksum, sizeof checksum);
  if (flushed()) {
    out_.clear();
    out_done_ = 0;
  }
  // All of a frame or nothing: half of one would spoil those behind it.
  out_.reserve(out_.size() + head.size() + bytes.size());
  out_.insert(out_.end(), head.begin(), head.end());
  out_.insert(out_.end(), bytes.begin(), bytes.end());
  // Also behind another one: the socket may have found no memory for that, and then nobody waits
  // for room.
  write_some();
}

void ControlChannel::write_some() {
  while (!flushed()) {
    iovec part{out_.data() + out_done_, out_.size() - out_done_};
    ssize_t put = socket_->send(&part, 1);
    if (put == -EAGAIN || put == -EWOULDBLOCK) {
      reactor_.modify(*socket_, EPOLLIN | EPOLLOUT, this);
      return;
    }
    if (put < 0) {
      fail(Error(Code::peer_lost,
                 text("sending failed: %s", std::strerror(static_cast<int>(-put)))));
      return;
    }
    out_done_ += static_cast<size_t>(put);
  }
}

void ControlChannel::fail(Error error) {
  if (failure_) return;
  failure_ = std::move(error);
  reactor_.remove(*socket_);
}

void ControlChannel::hang_up() {
  fail({Code::exhausted, "no memory left"});
  socket_ = nullptr;
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
    if (flushed()) reactor_.modify(*socket_, EPOLLIN, this);
  }
  std::array<std::byte, 16384> buffer;
  std::optional<Error> closed;
  for (;;) {
    iovec part{buffer.data(), buffer.size()};
    ssize_t got = socket_->receive(&part, 1);
    if (got == -EAGAIN || got == -EWOULDBLOCK) break;
    if (got <= 0) {
      // What came before is still read: it may say why.
      closed = got == 0 ? error(Code::peer_lost, "connection closed")
               : got == -EBADMSG
                   ? error(Code::corrupt, "%s", socket_->problem().c_str())
                   : Error(Code::peer_lost,
                           text("receiving failed: %s", std::strerror(static_cast<int>(-got))));
      break;
    }
    in_.insert(in_.end(), buffer.begin(), buffer.begin() + got);
    if (in_.size() > 2 * kMaxControlBytes) break;
  }
  size_t used = 0;
  while (in_.size() - used >= sizeof(uint32_t)) {
    uint32_t length;
    std::memcpy(&length, in_.data() + used, sizeof length);
    if (length > kMaxControlBytes) {
      fail(error(Code::corrupt, "control frame of %u bytes; at most %u are allowed", length,
                 kMaxControlBytes));
      return;
    }
    if (in_.size() - used < kFrameHead + length) break;
    uint32_t checksum;
    std::memcpy(&checksum, in_.data() + used + 5, sizeof checksum);
    std::span<const std::byte> payload = std::span(in_).subspan(used + kFrameHead, length);
    if (checksum != frame_checksum(payload, static_cast<uint8_t>(in_[used + 4]))) {
      fail(error(Code::corrupt, "a control frame was damaged on the way"));
      return;
    }
    inbox_.push_back(
        {static_cast<Control>(in_[used + 4]), std::vector(payload.begin(), payload.end())});
    used += kFrameHead + length;
  }
  in_.erase(in_.begin(), in_.begin() + static_cast<ptrdiff_t>(used));
  if (closed) fail(std::move(*closed));
}

}  // namespace weft::join
