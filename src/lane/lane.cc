#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "shm/segment.h"
#include "weft/lane.h"

namespace weft::lane {
namespace {

constexpr size_t kMaxParts = 512;            // below the kernel's limit of 1024
constexpr size_t kReceiveBudget = 4u << 20;  // bytes a turn, so that no lane starves the others

// A receipt says how many chunks have arrived whole.
constexpr uint32_t kReceiptMagic = 0x6b634177;  // "wAck"
constexpr uint32_t kAttached = 1;               // the first receipt: the offered memory is in use
constexpr size_t kSpareCopies = 64;             // whose memory is used again
struct Receipt {
  uint32_t magic = kReceiptMagic;
  uint32_t flags = 0;
  uint64_t chunks = 0;
};

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

bool would_block(ssize_t moved) { return moved == -EAGAIN || moved == -EWOULDBLOCK; }

}  // namespace

Lane::Lane(Role role, net::Reactor& reactor, std::unique_ptr<net::Socket> socket,
           std::shared_ptr<shm::Segment> shared, uint32_t index, ChunkHandler& handler,
           const Clock& clock, uint32_t unsent_limit, OnError on_error)
    : role_(role),
      reactor_(reactor),
      socket_(std::move(socket)),
      offered_(std::move(shared)),
      index_(index),
      handler_(handler),
      clock_(clock),
      on_error_(std::move(on_error)),
      greeted_(role != Role::out) {
  // Data that waits unsent in the kernel can no longer be overtaken by something more urgent, and
  // hides from us which lane is slow. Buffers themselves are left to the kernel.
  socket_->limit_unsent(unsent_limit);
  // A seal proves more than a checksum.
  checks_ = !socket_->sealed();
  needs_checksums_ = !socket_->sealed() && !offered_ && !socket_->inside_machine();
  if (role_ == Role::in) {
    // The greeting: from now on chunks may come, through memory if that is possible.
    Receipt greeting;
    greeting.flags = offered_ ? kAttached : 0;
    const auto* raw = reinterpret_cast<const std::byte*>(&greeting);
    receipt_.assign(raw, raw + sizeof greeting);
    send_receipt(false);
    if (socket_->shared() || failed_) return;  // attached
  }
  interest_ = EPOLLIN;
  if (auto added = reactor_.add(*socket_, interest_, this); !added) {
    fail(std::move(added).error());
    return;
  }
  update_interest();
}

Lane::~Lane() {
  if (!failed_) reactor_.remove(*socket_);
}

void Lane::trust_this_machine() {
  if (socket_->inside_machine()) checks_ = false;
}

void Lane::fail(Error error) {
  if (failed_) return;
  failed_ = true;
  reactor_.remove(*socket_);
  on_error_(index_, std::move(error));
}

// The connection has ended, or cannot go on.
void Lane::lose(const char* doing, ssize_t outcome) {
  if (outcome == 0)
    fail(error(Code::peer_lost, "connection closed"));
  else if (outcome == -EBADMSG)
    fail(error(Code::corrupt, "%s", socket_->problem().c_str()));
  else
    fail(error(Code::peer_lost, "%s failed: %s", doing, std::strerror(static_cast<int>(-outcome))));
}

void Lane::update_interest() {
  if (failed_ || deaf_) return;
  bool writes = want_write_ || receipt_done_ < receipt_.size();
  uint32_t wanted = (paused_ ? 0u : static_cast<uint32_t>(EPOLLIN)) |
                    (writes ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  if (wanted == interest_) return;
  interest_ = wanted;
  reactor_.modify(*socket_, wanted, this);
}

void Lane::resume() {
  if (!paused_ || failed_) return;
  paused_ = false;
  if (!begin_payload()) return;
  // What is in memory already will not be announced again.
  if (socket_->shared())
    receive_shared();
  else
    receive_some();
  if (!failed_) update_interest();
}

bool Lane::drain() {
  if (failed_ || role_ != Role::in || !socket_->shared()) return true;
  if (!paused_) receive_shared();
  return failed_ || !paused_;
}

// Often called by the handler, out of one of its own calls: so after each of them everybody here
// looks at failed_ before he touches anything.
void Lane::halt() {
  if (failed_) return;
  failed_ = true;
  reactor_.remove(*socket_);
}

void Lane::on_events(uint32_t epoll_events) {
  if ((epoll_events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0 && socket_->shared()) answer_bells();
  if (failed_ || deaf_) return;
  if ((epoll_events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0 && !paused_) {
    if (role_ == Role::out && socket_->shared())
      ;  // nothing but bells comes this way
    else if (role_ == Role::out)
      receive_receipts();
    else if (socket_->shared())
      receive_shared();
    else
      receive_some();
  }
  if (failed_) return;
  if ((epoll_events & EPOLLOUT) != 0) {
    if (role_ == Role::in && !socket_->shared()) {
      send_receipt(false);
    } else if (sending_) {
      push_out();
    } else {
      // Between two chunks it is worth no system call to stop asking; now nobody came for so long.
      want_write_ = false;
    }
  }
  if (failed_) return;
  if (paused_ && (epoll_events & (EPOLLERR | EPOLLHUP)) != 0) {
    fail(error(Code::peer_lost, "connection closed"));
    return;
  }
  update_interest();
}

// ---- sending -----------------------------------------------------------------------------

schedule::Room Lane::room() const {
  if (failed_ || sending_ || !greeted_) return schedule::Room::none;
  return socket_->shared() ? schedule::Room::memory : schedule::Room::connection;
}

bool Lane::send_one() {
  // What did not fit goes on when epoll says that there is room.
  if (room() == schedule::Room::none) return false;
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
    out_.keep = false;
    bool took = handler_.take(index_, out_);
    if (failed_) return false;  // halted meanwhile: what it gave may be gone
    if (!took) {
      want_write_ = false;
      return false;
    }
    out_.header.wants_receipt = needs_receipts() && !out_.keep;
    out_.header.checksum = checks_ && !socket_->shared() ? checksum(out_.payload) : 0;
    encode(out_.header, out_header_);
    out_parts_.clear();
    out_parts_.push_back({out_header_.data(), out_header_.size()});
    to_iovec(out_.payload, out_parts_);
    out_part_ = 0;
    sending_ = true;
    out_first_ = clock_.now();
  }
  while (out_part_ < out_parts_.size()) {
    ssize_t put = socket_->send(out_parts_.data() + out_part_,
                                std::min(kMaxParts, out_parts_.size() - out_part_));
    if (would_block(put)) {
      want_write_ = true;
      return false;
    }
    if (put < 0) {
      lose("sending", put);
      return false;
    }
    counters_.bytes_sent += static_cast<uint64_t>(put);
    advance(out_parts_, out_part_, static_cast<size_t>(put));
  }
  chunk_left(clock_.now());
  return true;
}

void Lane::chunk_left(Nanos now) {
  sending_ = false;
  ++counters_.chunks_sent;
  if (needs_receipts()) {
    Unsettled unsettled{out_.header, out_.token, out_.keep, {}};
    if (out_.keep) {
      if (!spare_.empty()) {
        unsettled.payload = std::move(spare_.back());
        spare_.pop_back();
      }
      // Never shrunk: memory that grows again is zeroed again.
      if (unsettled.payload.size() < out_.header.length)
        unsettled.payload.resize(out_.header.length);
      std::byte* to = unsettled.payload.data();
      for (std::span<const std::byte> part : out_.payload) {
        if (part.empty()) continue;
        std::memcpy(to, part.data(), part.size());
        to += part.size();
      }
    }
    unsettled_.push_back(std::move(unsettled));
  }
  handler_.sent(index_, out_.header, out_.token, {out_first_, now});
}

void Lane::receive_receipts() {
  for (;;) {
    receipt_.resize(sizeof(Receipt));
    iovec part{receipt_.data() + receipt_done_, sizeof(Receipt) - receipt_done_};
    ssize_t got = socket_->receive(&part, 1);
    if (would_block(got)) break;
    if (got <= 0) {
      lose("receiving", got);
      return;
    }
    receipt_done_ += static_cast<size_t>(got);
    if (receipt_done_ < sizeof(Receipt)) continue;
    receipt_done_ = 0;
    Receipt receipt;
    std::memcpy(&receipt, receipt_.data(), sizeof receipt);
    bool sound =
        receipt.magic == kReceiptMagic && receipt.chunks >= settled_ &&
        receipt.chunks <= settled_ + unsettled_.size() &&
        (greeted_ || (receipt.chunks == 0 && ((receipt.flags & kAttached) == 0 || offered_)));
    if (!sound) {
      fail(error(Code::corrupt, "a receipt for chunks that were not sent"));
      return;
    }
    if (!greeted_) {
      greeted_ = true;
      if ((receipt.flags & kAttached) != 0) {
        attach();
        return;
      }
      offered_.reset();
    }
    while (settled_ < receipt.chunks) {
      Unsettled arrived = std::move(unsettled_.front());
      unsettled_.pop_front();
      ++settled_;
      if (arrived.retained && spare_.size() < kSpareCopies)
        spare_.push_back(std::move(arrived.payload));
      handler_.receipted(index_, arrived.header, arrived.token);
      if (failed_) return;
    }
  }
  // This buffer is also what update_interest() looks at on the other side.
  receipt_.resize(receipt_done_);
}

// The greeting is through: from now on the connection only rings.
void Lane::attach() {
  receipt_.clear();
  receipt_done_ = 0;
  reactor_.remove(*socket_);
  socket_ = role_ == Role::in ? shm::reader(socket_, std::move(offered_))
                              : shm::writer(socket_, std::move(offered_));
  interest_ = EPOLLIN;
  if (auto added = reactor_.add(*socket_, interest_, this); !added) fail(std::move(added).error());
}

std::vector<Lane::Unsettled> Lane::take_unsettled() {
  std::vector<Unsettled> out(std::make_move_iterator(unsettled_.begin()),
                             std::make_move_iterator(unsettled_.end()));
  for (Unsettled& chunk : out)
    if (chunk.retained) chunk.payload.resize(chunk.header.length);
  unsettled_.clear();
  if (sending_) out.push_back({out_.header, out_.token, false, {}});
  sending_ = false;
  return out;
}

// ---- receiving ---------------------------------------------------------------------------

// The header is complete: asks where the payload goes. Returns false if the lane failed or was
// halted.
bool Lane::begin_payload() {
  bool can_stay = socket_->shared() && in_header_.length <= socket_->shared_capacity() / 2;
  auto landing = handler_.arriving(index_, in_header_, can_stay);
  if (failed_) return false;  // halted meanwhile: the place may be gone
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
  in_part_ = 0;
  in_payload_ = true;
  if (landing_.in_place) return true;
  size_t total = 0;
  for (std::span<std::byte> part : landing_.payload) {
    if (part.empty()) continue;
    in_parts_.push_back({part.data(), part.size()});
    total += part.size();
  }
  WEFT_CHECK(total == in_header_.length);
  if (total == 0) return end_payload(nullptr, clock_.now());
  return true;
}

// The payload is complete: checks it and hands it over. Returns false if the lane failed or was
// halted.
bool Lane::end_payload(const std::byte* in_place, Nanos now) {
  in_payload_ = false;
  if (needs_checksums_ && in_header_.checksum == 0 && in_header_.length > 0) {
    fail(error(Code::corrupt,
               "payload of operation %llu, step %u, chunk %u came without a checksum from another "
               "host, over a connection that is not sealed",
               static_cast<unsigned long long>(in_header_.operation), unsigned{in_header_.step},
               in_header_.chunk));
    return false;
  }
  if (!socket_->shared() && in_header_.checksum != 0) {
    std::vector<std::span<const std::byte>> parts(landing_.payload.begin(), landing_.payload.end());
    if (checksum(parts) != in_header_.checksum) {
      fail(error(Code::corrupt,
                 "payload of operation %llu, step %u, chunk %u was damaged on the way",
                 static_cast<unsigned long long>(in_header_.operation), unsigned{in_header_.step},
                 in_header_.chunk));
      return false;
    }
  }
  ++counters_.chunks_received;
  receipts_.arrived(in_header_.length, in_header_.wants_receipt);
  if (auto taken = handler_.arrived(index_, in_header_, in_place, {in_first_, now}); !taken)
    fail(std::move(taken).error());
  return !failed_;
}

void Lane::send_receipts(bool all) {
  if (all) receipts_.want_all();
  if (receipts_.due(true)) send_receipt(true);
  update_interest();
}

void Lane::send_receipt(bool asked) {
  if (role_ != Role::in || failed_ || socket_->shared()) return;
  for (;;) {
    while (receipt_done_ < receipt_.size()) {
      iovec part{receipt_.data() + receipt_done_, receipt_.size() - receipt_done_};
      ssize_t put = socket_->send(&part, 1);
      if (would_block(put)) return;
      // A broken connection is noticed, and told, where data is read.
      if (put < 0) return;
      receipt_done_ += static_cast<size_t>(put);
    }
    // The rest of a greeting that did not leave at once would be taken for bells.
    if (offered_) return attach();
    if (!receipts_.due(asked)) return;
    Receipt receipt;
    receipt.chunks = receipts_.take();
    const auto* raw = reinterpret_cast<const std::byte*>(&receipt);
    receipt_.assign(raw, raw + sizeof receipt);
    receipt_done_ = 0;
  }
}

// Headers and payloads from what was read ahead. Returns false if the lane failed or was halted.
bool Lane::use_ahead() {
  size_t used = 0;
  while (!paused_) {
    const size_t have = ahead_have_ - used;
    if (in_payload_) {
      if (have == 0) break;
      iovec& part = in_parts_[in_part_];
      const size_t count = std::min(have, part.iov_len);
      std::memcpy(part.iov_base, ahead_.data() + used, count);
      used += count;
      advance(in_parts_, in_part_, count);
      if (in_part_ == in_parts_.size() && !end_payload(nullptr, clock_.now())) return false;
      continue;
    }
    if (have < kChunkHeaderBytes) break;
    in_first_ = clock_.now();
    auto header = decode(std::span(ahead_).subspan(used).first<kChunkHeaderBytes>());
    used += kChunkHeaderBytes;
    if (!header) {
      fail(std::move(header).error());
      return false;
    }
    in_header_ = *header;
    if (!begin_payload()) return false;
  }
  ahead_have_ -= used;
  if (used > 0 && ahead_have_ > 0) std::memmove(ahead_.data(), ahead_.data() + used, ahead_have_);
  return true;
}

void Lane::receive_some() {
  size_t budget = kReceiveBudget;
  while (use_ahead() && budget > 0 && !paused_) {
    // One call takes the rest of this payload and what comes behind it: a small chunk as a whole.
    call_parts_.clear();
    size_t asked = 0, of_payload = 0;
    bool all = true;
    if (in_payload_) {
      const size_t parts = std::min(kMaxParts, in_parts_.size() - in_part_);
      call_parts_.assign(in_parts_.begin() + static_cast<ptrdiff_t>(in_part_),
                         in_parts_.begin() + static_cast<ptrdiff_t>(in_part_ + parts));
      for (const iovec& part : call_parts_) of_payload += part.iov_len;
      asked = of_payload;
      all = in_part_ + parts == in_parts_.size();
    }
    if (all) {
      call_parts_.push_back({ahead_.data() + ahead_have_, kAhead - ahead_have_});
      asked += kAhead - ahead_have_;
    }
    ssize_t got = socket_->receive(call_parts_.data(), call_parts_.size());
    if (would_block(got)) break;
    if (got <= 0) {
      lose("receiving", got);
      return;
    }
    auto count = static_cast<size_t>(got);
    counters_.bytes_received += count;
    budget -= std::min(budget, count);
    if (in_payload_) {
      of_payload = std::min(count, of_payload);
      advance(in_parts_, in_part_, of_payload);
      ahead_have_ += count - of_payload;
      if (in_part_ == in_parts_.size() && !end_payload(nullptr, clock_.now())) return;
    } else {
      ahead_have_ += count;
    }
    // Less than was asked for: there is no more, or epoll will say so.
    if (count < asked) {
      if (!use_ahead()) return;
      break;
    }
  }
  if (!failed_) send_receipt(false);
}

// The same, where whole chunks can be read in place. What is left is announced again; what a peer
// that is gone has left fits into one turn, because the memory is smaller.
void Lane::receive_shared() {
  const uint64_t enough = counters_.bytes_received + kReceiveBudget;
  while (!paused_ && counters_.bytes_received < enough) {
    std::span<const std::byte> here = socket_->peek();
    if (!in_payload_) {
      if (here.size() < kChunkHeaderBytes) return;
      in_first_ = clock_.now();
      auto header = decode(here.first<kChunkHeaderBytes>());
      socket_->consume(kChunkHeaderBytes);
      counters_.bytes_received += kChunkHeaderBytes;
      if (!header) {
        fail(std::move(header).error());
        return;
      }
      in_header_ = *header;
      if (!begin_payload()) return;
    } else if (landing_.in_place) {
      size_t length = in_header_.length;
      if (here.size() < length) return;
      counters_.bytes_received += length;
      if (!end_payload(here.data(), clock_.now())) return;
      socket_->consume(length);
    } else {
      if (here.empty()) return;
      iovec& part = in_parts_[in_part_];
      size_t count = std::min(here.size(), part.iov_len);
      std::memcpy(part.iov_base, here.data(), count);
      socket_->consume(count);
      counters_.bytes_received += count;
      advance(in_parts_, in_part_, count);
      if (in_part_ == in_parts_.size() && !end_payload(nullptr, clock_.now())) return;
    }
  }
}

// The connection beside the memory wakes us, and tells when the other side is gone.
void Lane::answer_bells() {
  std::array<std::byte, 64> bells;
  iovec part{bells.data(), bells.size()};
  ssize_t got = socket_->receive(&part, 1);
  if (got > 0 || would_block(got)) return;
  // What it wrote before it went is still there.
  if (role_ == Role::in && !paused_) receive_shared();
  if (failed_) return;
  // Who closed it writes no more. Who does not know yet that it broke writes what it will not send
  // again.
  bool may_be_more = paused_ || got < 0;
  if (role_ != Role::in || !may_be_more || got == -EBADMSG) return lose("receiving", got);
  deaf_ = true;
  reactor_.remove(*socket_);
}

std::optional<net::TcpInfo> Lane::tcp_info() const {
  if (failed_) return std::nullopt;
  return socket_->tcp_info();
}

}  // namespace weft::lane
