// The proof that a connection belongs to the job, before anything else of it is read.
//
//   acceptor  -> connector : magic (8) | nonce A (32)
//   connector -> acceptor  : nonce C (32) | hello (192) | HMAC(secret, "connect" A C hello) (32)
//   acceptor  -> connector : HMAC(secret, "accept" C A hello) (32)
//
// All parts have fixed sizes, so a stranger's bytes are never taken for a length. The nonces are
// fresh on both sides: neither a recorded proof nor a reflected one is worth anything. The hello
// says who calls and who is meant; the acceptor answers only if it is the one, so that a proof
// cannot be carried from one rank's door to another's.
#pragma once

#include <array>

#include "weft/join.h"

namespace weft::join {

inline constexpr size_t kNonce = 32;
inline constexpr size_t kMac = 32;
inline constexpr size_t kHello = 192;
inline constexpr size_t kMaxPlace = 59;
inline constexpr std::array<char, 8> kMagic = {'w', 'e', 'f', 't', '/', '6', '\r', '\n'};
inline constexpr size_t kChallenge = kMagic.size() + kNonce;
inline constexpr size_t kProof = kNonce + kHello + kMac;

std::array<std::byte, kHello> encode_hello(const Hello& hello);
Result<Hello> decode_hello(std::span<const std::byte, kHello> bytes);
// Whether `hello` was meant for this door.
Result<void> is_meant(const Hello& hello, const Identity& self);

// Why a connection is refused whose seal is not what this rank was told to use.
inline const char* sealed_differs(bool is_sealed) {
  return is_sealed ? "it is sealed, and this rank was started without WEFT_SEAL=1"
                   : "it is not sealed, and this rank was started with WEFT_SEAL=1";
}

// One side of the exchange, fed by a non-blocking socket.
class Handshake {
 public:
  enum class Role { acceptor, connector };
  // `self` is the acceptor's, and must outlive the exchange; without it, it answers to any name.
  Handshake(net::System& system, Role role, std::string secret, const Hello& hello,
            const Identity* self = nullptr);

  // Moves as far as the socket allows. True when the other side has proved itself.
  Result<bool> advance(net::Socket& socket);
  bool wants_write() const { return sent_ < out_.size(); }
  bool silent() const { return in_.empty() && stage_ == 0; }  // nothing has come yet
  const Hello& hello() const { return hello_; }               // the connector's; valid when done
  // The connection for what follows: sealed if the hello says so. REQUIRES: the proof is done.
  std::unique_ptr<net::Socket> finished(std::unique_ptr<net::Socket> socket) const;

 private:
  Result<void> message_complete();
  Result<void> challenge();
  Result<bool> receive(net::Socket& socket);
  std::array<std::byte, kMac> mac(const char* label, std::span<const std::byte> first,
                                  std::span<const std::byte> second,
                                  std::span<const std::byte> hello) const;
  void queue(std::span<const std::byte> bytes);

  net::System& system_;
  Role role_;
  std::string secret_;
  Hello hello_;
  const Identity* self_;
  std::array<std::byte, kHello> hello_bytes_{};
  std::array<std::byte, kNonce> own_nonce_{};
  std::array<std::byte, kNonce> peer_nonce_{};
  std::vector<std::byte> out_;
  size_t sent_ = 0;
  std::vector<std::byte> in_;
  size_t expected_ = 0;
  int stage_ = 0;
  bool proved_ = false;
};

// Opens a connection and proves the secret on it, trying again until it is told to stop: the
// other side may not be listening yet, or its door may be crowded. Several calls may be under way
// at a time; the first that is answered goes on, and only that one proves anything.
class Dial final {
 public:
  // Every attempt takes a number from `attempts`, which must outlive it.
  Dial(net::Network& network, net::Reactor& reactor, std::string host, uint16_t port,
       std::string secret, Hello hello, uint64_t& attempts);
  ~Dial();
  // Begins an attempt if one is due and `may_begin`, and ends those that take too long.
  void tick(Nanos now, bool may_begin = true);
  bool trying() const { return !under_way_.empty() && !done(); }
  bool begun() const { return begun_; }
  bool done() const { return proved_ != nullptr; }
  // Why the last attempt failed; empty if none did.
  const std::string& last_problem() const { return problem_; }
  bool refused() const { return refused_; }                         // nobody listens there
  const std::optional<Error>& own_problem() const { return own_; }  // this process's fault
  std::unique_ptr<net::Socket> take();

 private:
  class Attempt;
  void attempt(Nanos now);
  void failed(Attempt& attempt, std::string problem);
  void go_on_with(const Attempt& chosen);
  bool another_is_due(Nanos now) const;
  std::string address() const { return host_ + ":" + std::to_string(port_); }

  net::Network& network_;
  net::Reactor& reactor_;
  std::string host_;
  uint16_t port_;
  std::string secret_;
  Hello hello_;
  uint64_t& attempts_;
  std::vector<std::unique_ptr<Attempt>> under_way_;  // oldest first
  std::vector<std::unique_ptr<Attempt>> ended_;      // until the next tick
  Attempt* proved_ = nullptr;
  bool begun_ = false;
  bool refused_ = false;
  Nanos retry_at_{0};
  std::string problem_;
  std::optional<Error> own_;
};

}  // namespace weft::join
