// Real sockets on loopback, ranks as threads, strangers, and a log that tests can read.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "tcp/handshake.h"
#include "weft/transport.h"

namespace weft::transport {

inline constexpr const char* kSecret = "a secret of the test";

inline sockaddr_in loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

inline uint16_t free_port() {
  Fd fd(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = loopback(0);
  WEFT_CHECK(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  socklen_t size = sizeof address;
  getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin_port);
}

inline void pause_ms(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// A connection that blocks, for at most ten seconds a call. Tries until someone listens.
inline Fd connect_to(uint16_t port) {
  sockaddr_in address = loopback(port);
  for (int attempt = 0; attempt < 1000; ++attempt) {
    Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    timeval patience{10, 0};
    setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
    pause_ms(5);
  }
  return Fd();
}

// Two ends of one TCP connection.
inline std::pair<Fd, Fd> tcp_pair() {
  Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = loopback(0);
  WEFT_CHECK(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  WEFT_CHECK(::listen(listener.get(), 1) == 0);
  socklen_t size = sizeof address;
  getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size);
  Fd one = connect_to(ntohs(address.sin_port));
  Fd two(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  WEFT_CHECK(one && two);
  return {std::move(one), std::move(two)};
}

inline bool send_all(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    ssize_t put = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (put <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
  return true;
}
inline bool send_all(int fd, std::string_view words) {
  return send_all(fd, std::as_bytes(std::span(words)));
}

// Reads what comes until the other side ends the connection, or ten seconds pass.
inline bool is_closed_by_peer(int fd) {
  std::array<std::byte, 4096> buffer;
  for (;;) {
    ssize_t got = ::recv(fd, buffer.data(), buffer.size(), 0);
    if (got == 0) return true;
    if (got < 0) return errno != EAGAIN && errno != EWOULDBLOCK;
  }
}

// The connector's side of the handshake on a socket that blocks; true when both proved themselves.
inline bool prove(int fd, const std::string& secret, const Hello& hello) {
  tcp::Handshake handshake(tcp::Handshake::Role::connector, secret, hello);
  std::unique_ptr<Socket> socket = adopt(Fd(::dup(fd)));
  for (int turn = 0; turn < 5000; ++turn) {
    auto finished = handshake.advance(*socket);
    if (!finished) return false;
    if (*finished) return true;
    pause_ms(1);
  }
  return false;
}

// While it lives, log lines come here.
class LogLines {
 public:
  LogLines() {
    log_set_sink([this](std::string_view line) {
      std::lock_guard lock(mutex_);
      lines_.emplace_back(line);
    });
  }
  ~LogLines() { log_set_sink({}); }
  LogLines(const LogLines&) = delete;
  LogLines& operator=(const LogLines&) = delete;

  size_t count(std::string_view words) const {
    std::lock_guard lock(mutex_);
    return static_cast<size_t>(std::count_if(
        lines_.begin(), lines_.end(),
        [&](const std::string& line) { return line.find(words) != std::string::npos; }));
  }
  std::string all() const {
    std::lock_guard lock(mutex_);
    std::string out;
    for (const std::string& line : lines_) out += line + "\n";
    return out;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

inline std::unique_ptr<Reactor> new_reactor() { return kernel_network().reactor(); }

inline JoinOptions options_for(uint32_t rank, uint32_t ranks, uint16_t port) {
  JoinOptions options;
  options.rank = {rank};
  options.ranks = ranks;
  options.rendezvous = text("127.0.0.1:%u", unsigned{port});
  options.secret = kSecret;
  options.host = text("host%u", rank / 2);
  options.agreement = "the same";
  options.probe = false;
  options.shared_memory = false;
  options.deadline = Nanos::from_seconds(10);
  return options;
}

// Joins all ranks, each in a thread. `before` runs when rank 0 is joining and the others are not.
inline std::vector<Result<Mesh>> join_all(uint32_t ranks, uint16_t port,
                                          const std::function<void(JoinOptions&)>& change = {},
                                          const std::function<void()>& before = {}) {
  std::vector<std::optional<Result<Mesh>>> outcomes(ranks);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      JoinOptions options = options_for(rank, ranks, port);
      if (change) change(options);
      outcomes[rank] = join(options);
    });
    if (rank == 0 && before) before();
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<Result<Mesh>> out;
  out.reserve(ranks);
  for (auto& outcome : outcomes) out.push_back(std::move(*outcome));
  return out;
}

// Turns the reactor until `done` says so; false after ten seconds.
inline bool turn_until(Reactor& reactor, const std::function<bool()>& done) {
  Nanos deadline = monotonic_clock().now() + Nanos::from_seconds(10);
  while (!done()) {
    if (monotonic_clock().now() > deadline) return false;
    reactor.run_once(Nanos::from_millis(2));
  }
  return true;
}

// The lanes of a group that all live in this thread.
struct LinkedGroup {
  struct Line {
    Rank peer;
    uint16_t lane;
    std::unique_ptr<Socket> socket;
    std::shared_ptr<shm::Segment> shared;
  };
  struct Side {
    std::vector<Line> opened, accepted;
    std::unique_ptr<Socket> asked;
    std::unique_ptr<Links> links;
  };

  explicit LinkedGroup(std::vector<Result<Mesh>>& joined) : meshes(joined), sides(joined.size()) {
    for (size_t rank = 0; rank < meshes.size(); ++rank) {
      Side& side = sides[rank];
      Links::Callbacks callbacks;
      callbacks.opened = [&side](Rank peer, uint16_t lane, auto socket, auto shared) {
        side.opened.push_back({peer, lane, std::move(socket), std::move(shared)});
      };
      callbacks.accepted = [&side](Rank peer, uint16_t lane, auto socket, auto shared) {
        side.accepted.push_back({peer, lane, std::move(socket), std::move(shared)});
      };
      callbacks.asked = [&side](auto socket) { side.asked = std::move(socket); };
      side.links = std::make_unique<Links>(*meshes[rank], std::move(callbacks));
    }
  }

  // Turns all of them until `done` says so; false after ten seconds.
  bool turn_until(const std::function<bool()>& done) {
    Nanos deadline = monotonic_clock().now() + Nanos::from_seconds(10);
    while (!done()) {
      if (monotonic_clock().now() > deadline) return false;
      for (size_t rank = 0; rank < meshes.size(); ++rank) {
        meshes[rank]->reactor->run_once(Nanos::from_millis(1));
        sides[rank].links->tick(monotonic_clock().now());
      }
    }
    return true;
  }

  std::vector<Result<Mesh>>& meshes;
  std::vector<Side> sides;
};

}  // namespace weft::transport
