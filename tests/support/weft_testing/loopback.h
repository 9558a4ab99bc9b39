// Real sockets on loopback, and a log that tests can read.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <span>
#include <thread>

#include "weft/base.h"

namespace weft {

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

}  // namespace weft
