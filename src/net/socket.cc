#include "address.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/tcp.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <set>

namespace weft::net {
namespace {

// Unacknowledged data on a live host's connection does not stay so for longer.
constexpr unsigned kUserTimeoutMs = 20'000;
// Inside one machine a connection has no distance to fill: what lies in the kernel only falls out
// of the caches before it is read. (The kernel doubles this.)
constexpr int kLocalBuffer = 128 << 10;
// Who calls waits here for its turn, behind everyone who came before, strangers too: a long queue
// is a long wait, and whoever finds it full calls again. (The kernel has a limit of its own.)
constexpr int kBacklog = 1024;

class TcpSocket final : public Socket {
 public:
  explicit TcpSocket(Fd fd, const Address& peer = {})
      : fd_(std::move(fd)), peer_(peer), kept_(fd_.get()) {}

  ssize_t send(const iovec* parts, size_t count) override {
    return move(parts, count, [this](msghdr& message) {
      return ::sendmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    });
  }
  ssize_t receive(const iovec* parts, size_t count) override {
    return move(parts, count,
                [this](msghdr& message) { return ::recvmsg(fd_.get(), &message, MSG_DONTWAIT); });
  }
  Result<std::unique_ptr<Socket>> accept() override {
    for (;;) {
      // A connection that was reset since knows its address no more: this call still does.
      Address from;
      from.size = sizeof from.storage;
      Fd connected(::accept4(fd_.get(), reinterpret_cast<sockaddr*>(&from.storage), &from.size,
                             SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (connected) {
        tune(connected.get());
        return std::unique_ptr<Socket>(std::make_unique<TcpSocket>(std::move(connected), from));
      }
      if (errno == EAGAIN || errno == EWOULDBLOCK) return std::unique_ptr<Socket>();
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        // The kernel looks for a descriptor before it looks whether anybody waits.
        int failure = errno;
        pollfd waiting{fd_.get(), POLLIN, 0};
        if (::poll(&waiting, 1, 0) == 0) return std::unique_ptr<Socket>();
        return own_error(failure, "cannot accept a connection");
      }
      // Otherwise it is that connection which failed, and the next may not.
      if (errno == EBADF || errno == EINVAL || errno == ENOTSOCK || errno == EOPNOTSUPP)
        return own_error(errno, "cannot accept connections");
    }
  }
  int connect_outcome() override {
    int outcome = 0;
    socklen_t size = sizeof outcome;
    if (getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &outcome, &size) != 0) return errno;
    return outcome;
  }
  std::string local_host() const override { return host_of(local()); }
  uint16_t local_port() const override {
    Address address = local();
    return ntohs(address.storage.ss_family == AF_INET6
                     ? reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port
                     : reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
  }
  std::string peer() const override {
    Address address = other_end();
    return address.size > 0 ? to_text(address) : "an unknown address";
  }
  std::string peer_host() const override {
    Address address = other_end();
    return address.size > 0 ? host_of(address) : "an unknown address";
  }
  void limit_unsent(uint32_t bytes) override {
    auto limit = static_cast<int>(bytes);
    setsockopt(fd_.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &limit, sizeof limit);
    if (inside_machine())
      setsockopt(fd_.get(), SOL_SOCKET, SO_SNDBUF, &kLocalBuffer, sizeof kLocalBuffer);
  }
  void limit_rate(double bytes_per_s) override {
    auto rate = static_cast<uint64_t>(bytes_per_s);
    setsockopt(fd_.get(), SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
  }
  std::optional<TcpInfo> tcp_info() const override {
    struct ::tcp_info raw {};
    socklen_t size = sizeof raw;
    if (getsockopt(fd_.get(), IPPROTO_TCP, TCP_INFO, &raw, &size) != 0) return std::nullopt;
    TcpInfo info;
    info.round_trip_us = raw.tcpi_rtt;
    info.congestion_window = raw.tcpi_snd_cwnd;
    info.retransmitted = raw.tcpi_total_retrans;
    info.unsent_bytes = raw.tcpi_notsent_bytes;
    info.delivery_bytes_per_s = raw.tcpi_delivery_rate;
    return info;
  }
  int fd() const override { return fd_.get(); }
  void shut() override { ::shutdown(fd_.get(), SHUT_RDWR); }
  bool inside_machine() const override {
    Address other = other_end();
    return other.size > 0 && host_of(other) == local_host();
  }

  static void tune(int fd) {
    int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMs, sizeof kUserTimeoutMs);
  }

 private:
  template <typename Call>
  static ssize_t move(const iovec* parts, size_t count, Call&& call) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = count;
    for (;;) {
      ssize_t moved = call(message);
      if (moved >= 0) return moved;
      if (errno != EINTR) return -errno;
    }
  }
  Address local() const {
    Address address;
    address.size = sizeof address.storage;
    getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address.storage), &address.size);
    return address;
  }

  // Empty if that cannot be known any more.
  Address other_end() const {
    if (peer_.size > 0) return peer_;
    Address address;
    address.size = sizeof address.storage;
    if (getpeername(fd_.get(), reinterpret_cast<sockaddr*>(&address.storage), &address.size) != 0)
      address.size = 0;
    return address;
  }

  Fd fd_;
  Address peer_;           // of an accepted connection
  KeptFromChildren kept_;  // goes first
};

// One boot of one machine, and one view of its network: containers of their own are others.
std::string machine_word() {
  std::string word;
  Fd file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  char buffer[64];
  ssize_t got = file ? ::read(file.get(), buffer, sizeof buffer) : -1;
  struct stat view {};
  if (got <= 0 || ::stat("/proc/self/ns/net", &view) != 0) return {};
  while (got > 0 && buffer[got - 1] == '\n') --got;
  word.assign(buffer, static_cast<size_t>(got));
  return text("%s/%llu", word.c_str(), static_cast<unsigned long long>(view.st_ino));
}

class KernelNetwork final : public Network {
 public:
  Result<std::unique_ptr<Socket>> listen(const std::string& host, uint16_t port) override {
    WEFT_ASSIGN(Address address, resolve(host, port));
    Fd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) return own_error(errno, "cannot make a socket");
    int yes = 1;
    setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (::bind(fd.get(), address.raw(), address.size) != 0 || ::listen(fd.get(), kBacklog) != 0)
      return io_error(errno, "cannot listen on %s", to_text(address).c_str());
    return std::unique_ptr<Socket>(std::make_unique<TcpSocket>(std::move(fd)));
  }
  Result<std::unique_ptr<Socket>> connect(const std::string& host, uint16_t port) override {
    WEFT_ASSIGN(Address address, resolve(host, port));
    Fd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) return own_error(errno, "cannot make a socket");
    TcpSocket::tune(fd.get());
    if (::connect(fd.get(), address.raw(), address.size) != 0 && errno != EINPROGRESS) {
      if (errno == EADDRNOTAVAIL || errno == EADDRINUSE || errno == ENOBUFS || errno == ENOMEM)
        return own_error(errno, "cannot connect to %s", to_text(address).c_str());
      return error(Code::peer_lost, "cannot connect to %s: %s", to_text(address).c_str(),
                   std::strerror(errno));
    }
    return std::unique_ptr<Socket>(std::make_unique<TcpSocket>(std::move(fd)));
  }
  Result<std::unique_ptr<Reactor>> reactor() override { return make_reactor(); }
  const Clock& clock() const override { return monotonic_clock(); }
  std::string machine() const override { return machine_word(); }
};

}  // namespace

Result<HostPort> split(const std::string& address) {
  size_t colon = address.rfind(':');
  unsigned port = 0;
  const char* end = address.data() + address.size();
  if (colon != std::string::npos) {
    auto [used, failure] = std::from_chars(address.data() + colon + 1, end, port);
    std::string host = address.substr(0, colon);
    if (host.size() > 2 && host.front() == '[' && host.back() == ']')
      host = host.substr(1, host.size() - 2);
    if (failure == std::errc() && used == end && port >= 1 && port <= 65535 && !host.empty())
      return HostPort{host, static_cast<uint16_t>(port)};
  }
  return error(Code::invalid_argument, "\"%s\" is not an address; expected HOST:PORT",
               address.c_str());
}

Result<Address> resolve(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0 || found == nullptr)
    return error(Code::not_found, "cannot find host \"%s\": %s", host.c_str(),
                 gai_strerror(status));
  // Where a name has both, IPv4: a host without a route of the other kind is the more common one.
  const addrinfo* best = found;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next)
    if (one->ai_family == AF_INET) {
      best = one;
      break;
    }
  Address address;
  address.size = best->ai_addrlen;
  std::memcpy(&address.storage, best->ai_addr, best->ai_addrlen);
  freeaddrinfo(found);
  return address;
}

Result<void> find_host(const std::string& host) {
  WEFT_TRY(resolve(host, 0));
  return {};
}

std::string host_of(const Address& address) {
  char buffer[NI_MAXHOST] = "?";
  getnameinfo(address.raw(), address.size, buffer, sizeof buffer, nullptr, 0, NI_NUMERICHOST);
  return buffer;
}

std::string to_text(const Address& address) {
  char port[NI_MAXSERV] = "?";
  getnameinfo(address.raw(), address.size, nullptr, 0, port, sizeof port, NI_NUMERICSERV);
  std::string host = host_of(address);
  return address.storage.ss_family == AF_INET6 ? text("[%s]:%s", host.c_str(), port)
                                               : text("%s:%s", host.c_str(), port);
}

Result<std::string> address_of_interface(const std::string& interface, const std::string& like) {
  WEFT_ASSIGN(Address wanted, resolve(like, 0));
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return io_error(errno, "cannot list the network interfaces");
  std::string found;
  std::set<std::string> names;
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr) continue;
    std::string name = one->ifa_name;
    names.insert(name);
    if (name != interface || one->ifa_addr->sa_family != wanted.storage.ss_family) continue;
    Address address;
    address.size =
        one->ifa_addr->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    std::memcpy(&address.storage, one->ifa_addr, address.size);
    if (found.empty()) found = host_of(address);
  }
  freeifaddrs(list);
  if (!found.empty()) return found;
  std::string list_of_names;
  for (const std::string& name : names) list_of_names += (list_of_names.empty() ? "" : ", ") + name;
  return error(Code::not_found, "no interface \"%s\" with an address that reaches %s; there are %s",
               interface.c_str(), like.c_str(), list_of_names.c_str());
}

Error own_error(int error_number, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char what[256];
  std::vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  std::string words = text("%s: %s", what, std::strerror(error_number));
  rlimit files{};
  if (error_number == EMFILE && getrlimit(RLIMIT_NOFILE, &files) == 0)
    words += text("; this process may have %llu (ulimit -n): raise that limit, or use fewer lanes",
                  static_cast<unsigned long long>(files.rlim_cur));
  if (error_number == ENFILE) words += "; the whole host has no more (sysctl fs.file-max)";
  if (error_number == ENOSPC)
    words += "; this user may not watch more files (sysctl fs.epoll.max_user_watches)";
  if (error_number == EADDRNOTAVAIL || error_number == EADDRINUSE)
    words += "; this host may have no free ports (sysctl net.ipv4.ip_local_port_range)";
  return {Code::io, std::move(words)};
}

Network& kernel_network() {
  static KernelNetwork network;
  return network;
}

std::unique_ptr<Socket> adopt(Fd connected) {
  TcpSocket::tune(connected.get());
  return std::make_unique<TcpSocket>(std::move(connected));
}

}  // namespace weft::net
