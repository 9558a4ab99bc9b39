#include "handshake.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

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
  uint64_t attempt;
  uint32_t to;
  char place[kMaxPlace];
  uint8_t sealed;
};
static_assert(sizeof(WireHello) == kHello);

// Words of a stranger do not reach the log as they are.
std::string printable(std::string words) {
  for (char& letter : words)
    if (letter < 0x20 || letter > 0x7e) letter = '?';
  return words;
}

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
  wire.attempt = hello.attempt;
  wire.to = hello.to;
  std::memcpy(wire.place, hello.place.data(), std::min(hello.place.size(), kMaxPlace));
  wire.sealed = hello.sealed ? 1 : 0;
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
  if (wire.purpose < 1 || wire.purpose > 5)
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
  hello.attempt = wire.attempt;
  hello.to = wire.to;
  hello.place.assign(wire.place, strnlen(wire.place, kMaxPlace));
  hello.sealed = wire.sealed != 0;
  return hello;
}

std::string place_of(const std::string& address, uint16_t port) {
  bool v6 = address.find(':') != std::string::npos;
  std::string place = text(v6 ? "[%s]:%u" : "%s:%u", address.c_str(), unsigned{port});
  return place.substr(0, kMaxPlace);
}

Result<void> is_meant(const Hello& hello, const Identity& self) {
  if (hello.purpose == Purpose::status) return {};
  if (hello.purpose == Purpose::control) {
    // Before they have met, ranks know each other by number only: the address by which the root is
    // reached may be a name, or a port that is mapped to another.
    if (self.control == kAnyRank || hello.to != self.control)
      return error(Code::invalid_argument, "wants to join at rank %u, which is not here", hello.to);
    return {};
  }
  if (hello.place != self.place || (self.rank != kAnyRank && hello.to != self.rank))
    return error(Code::invalid_argument, "means rank %u at %s, and not this one at %s", hello.to,
                 printable(hello.place).c_str(), self.place.c_str());
  return {};
}

Handshake::Handshake(net::System& system, Role role, std::string secret, const Hello& hello,
                     const Identity* self)
    : system_(system), role_(role), secret_(std::move(secret)), hello_(hello), self_(self) {
  if (role_ == Role::acceptor) {
    expected_ = kProof;
  } else {
    hello_bytes_ = encode_hello(hello);
    expected_ = kChallenge;
  }
}

Result<void> Handshake::challenge() {
  WEFT_TRY(system_.random(own_nonce_));
  queue(std::as_bytes(std::span(kMagic)));
  queue(own_nonce_);
  return {};
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
  // The only thing that it can lack is memory.
  if (HMAC(EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()), message.data(),
           message.size(), reinterpret_cast<unsigned char*>(out.data()), &length) == nullptr)
    throw std::bad_alloc();
  WEFT_CHECK(length == kMac);
  return out;
}

Result<void> Handshake::message_complete() {
  if (role_ == Role::connector && stage_ == 0) {
    if (std::memcmp(in_.data(), kMagic.data(), kMagic.size()) != 0)
      return error(Code::corrupt, "does not speak weft's protocol");
    std::copy_n(in_.begin() + kMagic.size(), kNonce, peer_nonce_.begin());
    WEFT_TRY(system_.random(own_nonce_));
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
    if (self_ != nullptr) WEFT_TRY(is_meant(hello_, *self_));
    queue(mac("accept", peer_nonce_, own_nonce_, hello_bytes_));
    proved_ = true;
  }
  ++stage_;
  in_.clear();
  return {};
}

Result<bool> Handshake::advance(net::Socket& socket) {
  // Whoever has hung up already is not worth a challenge.
  if (role_ == Role::acceptor && out_.empty()) {
    WEFT_TRY(receive(socket));
    WEFT_TRY(challenge());
  }
  for (;;) {
    while (sent_ < out_.size()) {
      iovec part{out_.data() + sent_, out_.size() - sent_};
      ssize_t put = socket.send(&part, 1);
      if (put == -EAGAIN || put == -EWOULDBLOCK) return false;
      if (put < 0) return ended(static_cast<int>(-put));
      sent_ += static_cast<size_t>(put);
    }
    if (proved_) return true;
    if (in_.size() < expected_) {
      WEFT_ASSIGN(bool more, receive(socket));
      if (!more) return false;
    }
    if (in_.size() == expected_) WEFT_TRY(message_complete());
  }
}

// Takes what has come; false if that is nothing.
Result<bool> Handshake::receive(net::Socket& socket) {
  std::array<std::byte, kProof> buffer;
  // Never more than the message: what follows belongs to the connection's next user.
  iovec part{buffer.data(), expected_ - in_.size()};
  ssize_t got = socket.receive(&part, 1);
  if (got == -EAGAIN || got == -EWOULDBLOCK) return false;
  if (got <= 0) return ended(static_cast<int>(-got));
  in_.insert(in_.end(), buffer.begin(), buffer.begin() + got);
  return true;
}

std::unique_ptr<net::Socket> Handshake::finished(std::unique_ptr<net::Socket> socket) const {
  WEFT_CHECK(proved_);
  if (!hello_.sealed) return socket;
  bool connector = role_ == Role::connector;
  return net::seal(std::move(socket),
                   net::derive_seal(secret_, connector ? own_nonce_ : peer_nonce_,
                                    connector ? peer_nonce_ : own_nonce_, hello_bytes_, connector));
}

namespace {
constexpr Nanos kRetry = Nanos::from_millis(50);
// A call that is not taken for so long has found the queue at the other side full of strangers, and
// was lost. Which of several is taken there is chance, so many are made: sooner than the kernel
// would send the first one again, and each for a short time only.
constexpr Nanos kLost = Nanos::from_millis(250);
constexpr Nanos kAnother = Nanos::from_millis(50);
constexpr Nanos kOthersTime = Nanos::from_millis(300);
constexpr size_t kTogether = 8;
// The first one is for the slowest way that a job is run over.
constexpr Nanos kFirstTime = Nanos::from_seconds(1);
// One that was taken waits for its turn, for longer than a silent stranger may stay. But a queue
// that is full when a connection is complete forgets it, and this side is not told.
constexpr Nanos kFirstTurnTime = Nanos::from_seconds(6);
constexpr Nanos kOthersTurnTime = Nanos::from_seconds(2);
}  // namespace

class Dial::Attempt final : public net::Reactor::Handler {
 public:
  Attempt(Dial& owner, std::unique_ptr<net::Socket> socket, Nanos now)
      : owner_(owner),
        socket_(std::move(socket)),
        handshake_(owner.network_.system(), Handshake::Role::connector, owner.secret_,
                   owner.hello_),
        since_(now) {}
  ~Attempt() override {
    if (watched_) owner_.reactor_.remove(*socket_);
  }
  Result<void> watch() {
    WEFT_TRY(owner_.reactor_.add(*socket_, EPOLLOUT, this));
    watched_ = true;
    return {};
  }
  void stop_watching() {
    if (std::exchange(watched_, false)) owner_.reactor_.remove(*socket_);
  }

  void on_events(uint32_t events) override {
    if (connecting_) {
      if (int failure = socket_->connect_outcome(); failure != 0) {
        owner_.failed(*this, text("cannot connect to %s: %s", owner_.address().c_str(),
                                  std::strerror(failure)));
        owner_.refused_ = failure == ECONNREFUSED;
        return;
      }
      connecting_ = false;
      since_ = owner_.network_.clock().now();
    }
    bool says_something = (events & ~static_cast<uint32_t>(EPOLLOUT)) != 0;
    if (says_something && !std::exchange(answered_, true)) owner_.go_on_with(*this);
    if (answered_) {
      auto finished = handshake_.advance(*socket_);
      if (!finished) {
        owner_.failed(*this, owner_.address() + " " + finished.error().message());
        return;
      }
      if (*finished) {
        stop_watching();
        owner_.proved_ = this;
        return;
      }
    }
    uint32_t wanted = EPOLLIN | (handshake_.wants_write() ? static_cast<uint32_t>(EPOLLOUT) : 0u);
    owner_.reactor_.modify(*socket_, wanted, this);
  }

  Dial& owner_;
  std::unique_ptr<net::Socket> socket_;
  Handshake handshake_;
  bool connecting_ = true;
  bool answered_ = false;  // the other side has said something
  bool watched_ = false;
  Nanos since_;  // it was begun, or taken
};

Dial::Dial(net::Network& network, net::Reactor& reactor, std::string host, uint16_t port,
           std::string secret, Hello hello, uint64_t& attempts)
    : network_(network),
      reactor_(reactor),
      host_(std::move(host)),
      port_(port),
      secret_(std::move(secret)),
      hello_(std::move(hello)),
      attempts_(attempts) {}

Dial::~Dial() = default;

std::unique_ptr<net::Socket> Dial::take() {
  return proved_->handshake_.finished(std::move(proved_->socket_));
}

void Dial::attempt(Nanos now) {
  begun_ = true;
  hello_.attempt = ++attempts_;
  auto started = network_.connect(host_, port_);
  if (!started) {
    problem_ = started.error().message();
    own_.reset();
    if (started.error().code() == Code::io) own_ = std::move(started).error();
    retry_at_ = now + kRetry;
    return;
  }
  Attempt& made =
      *under_way_.emplace_back(std::make_unique<Attempt>(*this, std::move(*started), now));
  if (auto added = made.watch(); !added) {
    failed(made, added.error().message());
    own_ = std::move(added).error();
  }
}

void Dial::failed(Attempt& attempt, std::string problem) {
  problem_ = std::move(problem);
  own_.reset();
  refused_ = false;
  attempt.stop_watching();
  attempt.socket_.reset();
  auto found = std::find_if(under_way_.begin(), under_way_.end(),
                            [&](const auto& one) { return one.get() == &attempt; });
  // Its own function may have called.
  ended_.push_back(std::move(*found));
  under_way_.erase(found);
  retry_at_ = network_.clock().now() + kRetry;
}

// Two proofs of one rank would be two lanes of one number.
void Dial::go_on_with(const Attempt& chosen) {
  std::erase_if(under_way_, [&](const auto& one) { return one.get() != &chosen; });
}

bool Dial::another_is_due(Nanos now) const {
  if (under_way_.empty()) return now >= retry_at_;
  const Attempt& last = *under_way_.back();
  if (under_way_.size() >= kTogether || last.answered_) return false;
  bool lost_one = under_way_.size() > 1 && last.connecting_;
  return now - last.since_ > (lost_one ? kAnother : kLost);
}

void Dial::tick(Nanos now, bool may_begin) {
  ended_.clear();
  if (done()) return;
  for (size_t i = 0; i < under_way_.size();) {
    Attempt& one = *under_way_[i];
    Nanos patience = one.connecting_ ? (i == 0 ? kFirstTime : kOthersTime)
                                     : (i == 0 ? kFirstTurnTime : kOthersTurnTime);
    if (now - one.since_ > patience)
      failed(one, text("%s does not answer", address().c_str()));
    else
      ++i;
  }
  // One that is beside others needs no permission of its own.
  if ((may_begin || !under_way_.empty()) && another_is_due(now)) attempt(now);
}

}  // namespace weft::join
