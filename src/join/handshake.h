// The proof that a connection belongs to the job, before anything else of it is read.
//
//   acceptor  -> connector : magic (8) | nonce A (32)
//   connector -> acceptor  : nonce C (32) | hello (128) | HMAC(secret, "connect" A C hello) (32)
//   acceptor  -> connector : HMAC(secret, "accept" C A hello) (32)
//
// All parts have fixed sizes, so a stranger's bytes are never taken for a length. The nonces are
// fresh on both sides: neither a recorded proof nor a reflected one is worth anything.
#pragma once

#include <array>

#include "weft/join.h"

namespace weft::join {

inline constexpr size_t kNonce = 32;
inline constexpr size_t kMac = 32;
inline constexpr size_t kHello = 128;
inline constexpr std::array<char, 8> kMagic = {'w', 'e', 'f', 't', '/', '2', '\r', '\n'};
inline constexpr size_t kChallenge = kMagic.size() + kNonce;
inline constexpr size_t kProof = kNonce + kHello + kMac;

std::array<std::byte, kHello> encode_hello(const Hello& hello);
Result<Hello> decode_hello(std::span<const std::byte, kHello> bytes);

// One side of the exchange, fed by a non-blocking socket.
class Handshake {
 public:
  enum class Role { acceptor, connector };
  Handshake(Role role, std::string secret, const Hello& hello);

  // Moves as far as the socket allows. True when the other side has proved itself.
  Result<bool> advance(net::Socket& socket);
  bool wants_write() const { return sent_ < out_.size(); }
  const Hello& hello() const { return hello_; }  // the connector's; valid when done

 private:
  Result<void> message_complete();
  std::array<std::byte, kMac> mac(const char* label, std::span<const std::byte> first,
                                  std::span<const std::byte> second,
                                  std::span<const std::byte> hello) const;
  void queue(std::span<const std::byte> bytes);

  Role role_;
  std::string secret_;
  Hello hello_;
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
// other side may not be listening yet.
class Dial final : public net::Reactor::Handler {
 public:
  Dial(net::Network& network, net::Reactor& reactor, std::string host, uint16_t port,
       std::string secret, Hello hello);
  ~Dial() override;
  void tick(Nanos now);
  void on_events(uint32_t epoll_events) override;
  bool done() const { return done_; }
  // Why the last attempt failed; empty if none did.
  const std::string& last_problem() const { return problem_; }
  std::unique_ptr<net::Socket> take() { return std::move(socket_); }

 private:
  void attempt();
  void give_up_attempt(std::string problem);
  std::string address() const { return host_ + ":" + std::to_string(port_); }

  net::Network& network_;
  net::Reactor& reactor_;
  std::string host_;
  uint16_t port_;
  std::string secret_;
  Hello hello_;
  std::unique_ptr<net::Socket> socket_;
  std::unique_ptr<Handshake> handshake_;
  bool connecting_ = false;
  bool done_ = false;
  Nanos attempted_at_{0};
  Nanos retry_at_{0};
  std::string problem_;
};

}  // namespace weft::join
