#include "handshake.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "weft/net.h"

namespace weft::join {
namespace {

constexpr size_t kMaxShared = 40;

struct WireHello {
  uint16_t protocol;
  uint8_t purpose;
  uint8_t probe;
  uint32_t rank;
  uint32_t ranks;
  uint16_t lane;
  uint16_t lanes;
  char agreement[kMaxAgreement];
  char shared[kMaxShared];
  uint8_t reserved[kHello - 16 - kMaxAgreement - kMaxShared];
};
static_assert(sizeof(WireHello) == kHello);

// Words that follow a name: "it", or an address.
Error ended(int error_number) {
  if (error_number == 0 || error_number == ECONNRESET || error_number == EPIPE)
    return error(Code::peer_lost, "closed before it proved the secret");
  return io_error(error_number, "cannot be talked to");
}

}  // namespace

std::array<std::byte, kHello> encode_hello(const Hello& hello) {
  WireHello wire{};
  wire.protocol = hello.protocol;
  wire.purpose = static_cast<uint8_t>(hello.purpose);
  wire.probe = hello.probe;
  wire.rank = hello.rank;
  wire.ranks = hello.ranks;
  wire.lane = hello.lane;
  wire.lanes = hello.lanes;
  std::memcpy(wire.agreement, hello.agreement.data(),
              std::min(hello.agreement.size(), kMaxAgreement));
  std::memcpy(wire.shared, hello.shared.data(), std::min(hello.shared.size(), kMaxShared));
  std::array<std::byte, kHello> bytes;
  std::memcpy(bytes.data(), &wire, kHello);
  return bytes;
}

Result<Hello> decode_hello(std::span<const std::byte, kHello> bytes) {
  WireHello wire;
  std::memcpy(&wire, bytes.data(), kHello);
  if (wire.protocol != kProtocol)
    return error(Code::unsupported, "speaks protocol %u, this weft %u", unsigned{wire.protocol},
                 unsigned{kProtocol});
  if (wire.purpose < 1 || wire.purpose > 4)
    return error(Code::corrupt, "unknown purpose %u", unsigned{wire.purpose});
  Hello hello;
  hello.purpose = static_cast<Purpose>(wire.purpose);
  hello.probe = wire.probe;
  hello.rank = wire.rank;
  hello.ranks = wire.ranks;
  hello.lane = wire.lane;
  hello.lanes = wire.lanes;
  hello.agreement.assign(wire.agreement, strnlen(wire.agreement, kMaxAgreement));
  hello.shared.assign(wire.shared, strnlen(wire.shared, kMaxShared));
  return hello;
}

Handshake::Handshake(Role role, std::string secret, const Hello& hello)
    : role_(role), secret_(std::move(secret)), hello_(hello) {
  random_bytes(own_nonce_);
  if (role_ == Role::acceptor) {
    queue(std::as_bytes(std::span(kMagic)));
    queue(own_nonce_);
    expected_ = kProof;
  } else {
    hello_bytes_ = encode_hello(hello);
    expected_ = kChallenge;
  }
}

void Handshake::queue(std::span<const std::byte> bytes) {
  out_.insert(out_.end(), bytes.begin(), bytes.end());
}

std::array<std::byte, kMac> Handshake::mac(const char* label, std::span<const std::byte> first,
                                           std::span<const std::byte> second,
                                           std::span<const std::byte> hello) const {
  std::vector<unsigned char> message;
  auto append = [&](std::span<const std::byte> part) {
    const auto* raw = reinterpret_cast<const unsigned char*>(part.data());
    message.insert(message.end(), raw, raw + part.size());
  };
  append(std::as_bytes(std::span(label, std::strlen(label))));
  append(first);
  append(second);
  append(hello);
  std::array<std::byte, kMac> out{};
  unsigned int length = 0;
  HMAC(EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()), message.data(),
       message.size(), reinterpret_cast<unsigned char*>(out.data()), &length);
  WEFT_CHECK(length == kMac);
  return out;
}

Result<void> Handshake::message_complete() {
  if (role_ == Role::connector && stage_ == 0) {
    if (std::memcmp(in_.data(), kMagic.data(), kMagic.size()) != 0)
      return error(Code::corrupt, "does not speak weft's protocol");
    std::copy_n(in_.begin() + kMagic.size(), kNonce, peer_nonce_.begin());
    queue(own_nonce_);
    queue(hello_bytes_);
    queue(mac("connect", peer_nonce_, own_nonce_, hello_bytes_));
    expected_ = kMac;
  } else if (role_ == Role::connector) {
    auto wanted = mac("accept", own_nonce_, peer_nonce_, hello_bytes_);
    if (CRYPTO_memcmp(wanted.data(), in_.data(), kMac) != 0)
      return error(Code::invalid_argument, "does not know the job's secret");
    proved_ = true;
  } else {
    std::copy_n(in_.begin(), kNonce, peer_nonce_.begin());
    std::copy_n(in_.begin() + kNonce, kHello, hello_bytes_.begin());
    auto wanted = mac("connect", own_nonce_, peer_nonce_, hello_bytes_);
    if (CRYPTO_memcmp(wanted.data(), in_.data() + kNonce + kHello, kMac) != 0)
      return error(Code::invalid_argument, "does not know the job's secret");
    WEFT_ASSIGN(hello_, decode_hello(hello_bytes_));
    queue(mac("accept", peer_nonce_, own_nonce_, hello_bytes_));
    proved_ = true;
  }
  ++stage_;
  in_.clear();
  return {};
}

Result<bool> Handshake::advance(net::Socket& socket) {
  for (;;) {
    while (sent_ < out_.size()) {
      iovec part{out_.data() + sent_, out_.size() - sent_};
      ssize_t put = socket.send(&part, 1);
      if (put == -EAGAIN || put == -EWOULDBLOCK) return false;
      if (put < 0) return ended(static_cast<int>(-put));
      sent_ += static_cast<size_t>(put);
    }
    if (proved_) return true;
    std::array<std::byte, kProof> buffer;
    // Never more than the message: what follows belongs to the connection's next user.
    iovec part{buffer.data(), expected_ - in_.size()};
    ssize_t got = socket.receive(&part, 1);
    if (got == -EAGAIN || got == -EWOULDBLOCK) return false;
    if (got <= 0) return ended(static_cast<int>(-got));
    in_.insert(in_.end(), buffer.begin(), buffer.begin() + got);
    if (in_.size() == expected_) WEFT_TRY(message_complete());
  }
}

namespace {
constexpr Nanos kRetry = Nanos::from_millis(50);
// A connection that is neither opened nor refused, or that stops in its proof, is tried again.
constexpr Nanos kAttempt = Nanos::from_seconds(2);
}  // namespace

Dial::Dial(net::Network& network, net::Reactor& reactor, std::string host, uint16_t port,
           std::string secret, Hello hello)
    : network_(network),
      reactor_(reactor),
      host_(std::move(host)),
      port_(port),
      secret_(std::move(secret)),
      hello_(std::move(hello)) {
  attempt();
}

Dial::~Dial() {
  if (socket_ && !done_) reactor_.remove(*socket_);
}

void Dial::attempt() {
  attempted_at_ = network_.clock().now();
  auto started = network_.connect(host_, port_);
  if (!started) {
    problem_ = started.error().message();
    retry_at_ = attempted_at_ + kRetry;
    return;
  }
  socket_ = std::move(*started);
  connecting_ = true;
  retry_at_ = {0};
  handshake_ = std::make_unique<Handshake>(Handshake::Role::connector, secret_, hello_);
  if (auto added = reactor_.add(*socket_, EPOLLOUT, this); !added)
    give_up_attempt(added.error().message());
}

void Dial::give_up_attempt(std::string problem) {
  problem_ = std::move(problem);
  reactor_.remove(*socket_);
  socket_.reset();
  retry_at_ = network_.clock().now() + kRetry;
}

void Dial::tick(Nanos now) {
  if (done_) return;
  if (!socket_ && now >= retry_at_) attempt();
  if (socket_ && now - attempted_at_ > kAttempt)
    give_up_attempt(text("%s does not answer", address().c_str()));
}

void Dial::on_events(uint32_t) {
  if (done_ || !socket_) return;
  if (connecting_) {
    if (int failure = socket_->connect_outcome(); failure != 0) {
      give_up_attempt(text("cannot connect to %s: %s", address().c_str(), std::strerror(failure)));
      return;
    }
    connecting_ = false;
  }
  auto finished = handshake_->advance(*socket_);
  if (!finished) {
    give_up_attempt(address() + " " + finished.error().message());
    return;
  }
  if (*finished) {
    reactor_.remove(*socket_);
    done_ = true;
    return;
  }
  uint32_t wanted = EPOLLIN | (handshake_->wants_write() ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  reactor_.modify(*socket_, wanted, this);
}

}  // namespace weft::join
