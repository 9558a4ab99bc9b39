#include "tcp/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <cstring>

namespace weft::transport::tcp {

Result<sockaddr_in> resolve(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  int status = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (status != 0 || found == nullptr)
    return error(Code::not_found, "cannot find host \"%s\": %s", host.c_str(),
                 gai_strerror(status));
  sockaddr_in address{};
  std::memcpy(&address, found->ai_addr, sizeof address);
  freeaddrinfo(found);
  address.sin_port = htons(port);
  return address;
}

Result<sockaddr_in> resolve(const std::string& address) {
  size_t colon = address.rfind(':');
  unsigned port = 0;
  const char* end = address.data() + address.size();
  if (colon != std::string::npos) {
    auto [used, failure] = std::from_chars(address.data() + colon + 1, end, port);
    if (failure == std::errc() && used == end && port >= 1 && port <= 65535)
      return resolve(address.substr(0, colon), static_cast<uint16_t>(port));
  }
  return error(Code::invalid_argument, "\"%s\" is not an address; expected HOST:PORT",
               address.c_str());
}

std::string to_text(const sockaddr_in& address) {
  char buffer[INET_ADDRSTRLEN] = "?";
  inet_ntop(AF_INET, &address.sin_addr, buffer, sizeof buffer);
  return text("%s:%u", buffer, unsigned{ntohs(address.sin_port)});
}

Result<Fd> listen_on(const sockaddr_in& address) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return io_error(errno, "cannot make a socket");
  int yes = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    return io_error(errno, "cannot listen on %s", to_text(address).c_str());
  if (::listen(fd.get(), 1024) != 0)
    return io_error(errno, "cannot listen on %s", to_text(address).c_str());
  return fd;
}

Result<Fd> start_connect(const sockaddr_in& address) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return io_error(errno, "cannot make a socket");
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 &&
      errno != EINPROGRESS)
    return io_error(errno, "cannot connect to %s", to_text(address).c_str());
  return fd;
}

int connect_outcome(int fd) {
  int outcome = 0;
  socklen_t size = sizeof outcome;
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &outcome, &size) != 0) return errno;
  return outcome;
}

void tune(int fd) {
  int yes = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
}

sockaddr_in local_address_of(int fd) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return address;
}

std::string peer_text(int fd) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0)
    return "an unknown address";
  return to_text(address);
}

}  // namespace weft::transport::tcp
