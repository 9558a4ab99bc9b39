#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "weft/transport.h"

namespace weft::transport {
namespace {

constexpr size_t kMaxParts = 512;            // below the kernel's limit of 1024
constexpr size_t kReceiveBudget = 4u << 20;  // bytes a turn, so that no lane starves the others

void to_iovec(const std::vector<std::span<const std::byte>>& parts, std::vector<iovec>& out) {
  for (std::span<const std::byte> part : parts)
    if (!part.empty()) out.push_back({const_cast<std::byte*>(part.data()), part.size()});
}

// Drops the first `count` bytes from parts[index...].
void advance(std::vector<iovec>& parts, size_t& index, size_t count) {
  while (count > 0) {
    iovec& part = parts[index];
    size_t used = std::min(count, part.iov_len);
    part.iov_base = static_cast<std::byte*>(part.iov_base) + used;
    part.iov_len -= used;
    count -= used;
    if (part.iov_len == 0) ++index;
  }
}

}  // namespace

Lane::Lane(Reactor& reactor, Fd socket, uint16_t index, ChunkHandler& handler, const Clock& clock,
           uint32_t unsent_limit, OnError on_error)
    : reactor_(reactor),
      socket_(std::move(socket)),
      index_(index),
      handler_(handler),
      clock_(clock),
      on_error_(std::move(on_error)) {
  // Data that waits unsent in the kernel can no longer be overtaken by something more urgent, and
  // hides from us which lane is slow. Buffers themselves are left to the kernel.
  auto limit = static_cast<int>(unsent_limit);
  setsockopt(socket_.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &limit, sizeof limit);
  interest_ = EPOLLIN;
  reactor_.add(socket_.get(), interest_, this);
}

Lane::~Lane() {
  if (socket_ && !failed_) reactor_.remove(socket_.get());
}

void Lane::fail(Error error) {
  if (failed_) return;
  failed_ = true;
  reactor_.remove(socket_.get());
  on_error_(index_, std::move(error));
}

void Lane::update_interest() {
  if (failed_) return;
  uint32_t wanted = (paused_ ? 0u : static_cast<uint32_t>(EPOLLIN)) |
                    (want_write_ ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  if (wanted == interest_) return;
  interest_ = wanted;
  reactor_.modify(socket_.get(), wanted, this);
}

void Lane::resume() {
  if (!paused_ || failed_) return;
  paused_ = false;
  if (begin_payload()) update_interest();
}

void Lane::halt() {
  if (failed_) return;
  failed_ = true;
  reactor_.remove(socket_.get());
}

void Lane::on_events(uint32_t epoll_events) {
  if ((epoll_events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0 && !paused_) receive_some();
  if (failed_) return;
  // One chunk a turn; as long as there is more to send, epoll brings us back.
  if ((epoll_events & EPOLLOUT) != 0) push_out();
  if (failed_) return;
  if (paused_ && (epoll_events & (EPOLLERR | EPOLLHUP)) != 0) {
    fail(error(Code::peer_lost, "connection closed"));
    return;
  }
  update_interest();
}

bool Lane::send_one() {
  // A full lane is served when epoll says that there is room.
  if (failed_ || want_write_) return false;
  bool took = push_out();
  if (took) want_write_ = false;
  update_interest();
  return took;
}

// Moves the current chunk, or a new one. True when a chunk went out whole; false when there is
// none, when the lane is full (want_write_ is then set) or when it failed.
bool Lane::push_out() {
  if (!sending_) {
    out_.payload.clear();
    if (!handler_.take(index_, out_)) {
      want_write_ = false;
      return false;
    }
    out_.header.checksum = checksum(out_.payload);
    encode(out_.header, out_header_);
    out_parts_.clear();
    out_parts_.push_back({out_header_.data(), out_header_.size()});
    to_iovec(out_.payload, out_parts_);
    out_part_ = 0;
    sending_ = true;
    out_first_ = clock_.now();
  }
  while (out_part_ < out_parts_.size()) {
    msghdr message{};
    message.msg_iov = out_parts_.data() + out_part_;
    message.msg_iovlen = std::min(kMaxParts, out_parts_.size() - out_part_);
    ssize_t put = ::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        want_write_ = true;
        return false;
      }
      fail(Error(Code::peer_lost, text("sending failed: %s", std::strerror(errno))));
      return false;
    }
    counters_.bytes_sent += static_cast<uint64_t>(put);
    advance(out_parts_, out_part_, static_cast<size_t>(put));
  }
  sending_ = false;
  ++counters_.chunks_sent;
  handler_.sent(index_, out_.header, {out_first_, clock_.now()});
  return true;
}

// The header is complete: asks where the payload goes. Returns false if the lane failed.
bool Lane::begin_payload() {
  auto landing = handler_.arriving(index_, in_header_);
  if (!landing) {
    fail(std::move(landing).error());
    return false;
  }
  if (landing->not_yet) {
    paused_ = true;
    update_interest();
    return true;
  }
  landing_ = std::move(*landing);
  in_parts_.clear();
  size_t total = 0;
  for (std::span<std::byte> part : landing_.payload) {
    if (part.empty()) continue;
    in_parts_.push_back({part.data(), part.size()});
    total += part.size();
  }
  WEFT_CHECK(total == in_header_.length);
  in_part_ = 0;
  in_payload_ = true;
  if (total == 0) return end_payload(clock_.now());
  return true;
}

// The payload is complete: checks it and hands it over. Returns false if the lane failed.
bool Lane::end_payload(Nanos now) {
  in_payload_ = false;
  in_header_have_ = 0;
  std::vector<std::span<const std::byte>> parts(landing_.payload.begin(), landing_.payload.end());
  if (checksum(parts) != in_header_.checksum) {
    fail(error(Code::corrupt, "payload of operation %u, step %u, chunk %u was damaged on the way",
               in_header_.operation, unsigned{in_header_.step}, in_header_.chunk));
    return false;
  }
  ++counters_.chunks_received;
  if (auto taken = handler_.arrived(index_, in_header_, {in_first_, now}); !taken) {
    fail(std::move(taken).error());
    return false;
  }
  return true;
}

void Lane::receive_some() {
  size_t budget = kReceiveBudget;
  while (budget > 0 && !paused_) {
    // One call takes the rest of this payload and the header behind it.
    std::vector<iovec> parts;
    size_t payload_parts = 0;
    if (in_payload_) {
      payload_parts = std::min(kMaxParts, in_parts_.size() - in_part_);
      parts.assign(in_parts_.begin() + static_cast<ptrdiff_t>(in_part_),
                   in_parts_.begin() + static_cast<ptrdiff_t>(in_part_ + payload_parts));
      // Only when all of the payload is asked for may the next header follow it.
      if (in_part_ + payload_parts == in_parts_.size())
        parts.push_back({in_header_bytes_.data(), in_header_bytes_.size()});
    } else {
      parts.push_back(
          {in_header_bytes_.data() + in_header_have_, in_header_bytes_.size() - in_header_have_});
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    ssize_t got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      fail(Error(Code::peer_lost, text("receiving failed: %s", std::strerror(errno))));
      return;
    }
    if (got == 0) {
      fail(error(Code::peer_lost, "connection closed"));
      return;
    }
    auto count = static_cast<size_t>(got);
    counters_.bytes_received += count;
    budget -= std::min(budget, count);
    if (in_payload_) {
      size_t left = 0;
      for (size_t i = in_part_; i < in_part_ + payload_parts; ++i) left += in_parts_[i].iov_len;
      size_t of_payload = std::min(count, left);
      advance(in_parts_, in_part_, of_payload);
      count -= of_payload;
      if (in_part_ == in_parts_.size() && !end_payload(clock_.now())) return;
      if (count == 0) continue;
    }
    in_header_have_ += count;
    if (in_header_have_ < kChunkHeaderBytes) continue;
    in_first_ = clock_.now();
    auto header = decode(in_header_bytes_);
    if (!header) {
      fail(std::move(header).error());
      return;
    }
    in_header_ = *header;
    if (!begin_payload()) return;
  }
}

std::optional<TcpInfo> Lane::tcp_info() const {
  struct ::tcp_info raw {};
  socklen_t size = sizeof raw;
  if (failed_ || getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &raw, &size) != 0)
    return std::nullopt;
  TcpInfo info;
  info.round_trip_us = raw.tcpi_rtt;
  info.congestion_window = raw.tcpi_snd_cwnd;
  info.retransmitted = raw.tcpi_total_retrans;
  info.unsent_bytes = raw.tcpi_notsent_bytes;
  info.delivery_bytes_per_s = raw.tcpi_delivery_rate;
  return info;
}

}  // namespace weft::transport
