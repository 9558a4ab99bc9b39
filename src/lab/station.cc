#include "station.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "links_message.h"

namespace weft::lab {
namespace {

// Tells the lab of the sockets of this process.
class Teller {
 public:
  explicit Teller(Fd channel) : channel_(std::move(channel)) {
    // A process that serves lanes for this one must not keep it open: its end is our end.
    fcntl(channel_.get(), F_SETFD, FD_CLOEXEC);
  }

  uint64_t opened(int socket, uint32_t from, uint32_t to) {
    LinkMessage words;
    words.kind = LinkMessage::Kind::opened;
    words.from = from;
    words.to = to;
    words.socket = next_++;
    send(words, socket);
    return words.socket;
  }
  void say(LinkMessage::Kind kind, uint64_t socket, double rate = 0) {
    LinkMessage words;
    words.kind = kind;
    words.socket = socket;
    words.rate = rate;
    send(words, -1);
  }

 private:
  void send(const LinkMessage& words, int socket) {
    // A lab that does not listen has ended, and this process ends with it.
    net::send_record(channel_.get(), std::as_bytes(std::span(&words, 1)), socket, true);
  }

  Fd channel_;
  std::atomic<uint64_t> next_{1};
};

struct Here {
  explicit Here(const Station& at) : station(at), teller(Fd(at.channel)) {}

  const Station station;
  Teller teller;

  // The host of an address of this lab.
  std::optional<uint32_t> host_of(const std::string& address) const {
    const std::string start = text("127.77.%u.", station.block);
    if (!address.starts_with(start)) return std::nullopt;
    const int last = std::atoi(address.c_str() + start.size());
    return last > 0 ? std::optional(static_cast<uint32_t>(last - 1)) : std::nullopt;
  }
};

// A connection between two hosts, or a place where those are accepted.
class LinkSocket final : public net::Socket {
 public:
  LinkSocket(std::shared_ptr<Here> here, std::unique_ptr<net::Socket> inner,
             std::optional<uint32_t> to)
      : here_(std::move(here)), inner_(std::move(inner)) {
    if (to) number_ = here_->teller.opened(inner_->fd(), here_->station.host, *to);
  }
  ~LinkSocket() override {
    if (number_ != 0) here_->teller.say(LinkMessage::Kind::closed, number_);
  }

  Result<std::unique_ptr<net::Socket>> accept() override {
    WEFT_ASSIGN(auto socket, inner_->accept());
    if (!socket) return socket;
    const auto from = here_->host_of(socket->peer_host());
    return std::unique_ptr<net::Socket>(
        std::make_unique<LinkSocket>(here_, std::move(socket), from));
  }
  void limit_rate(double bytes_per_s) override {
    if (number_ != 0) here_->teller.say(LinkMessage::Kind::limited, number_, bytes_per_s);
  }
  std::optional<net::Seal> hand_over() override {
    if (number_ != 0) here_->teller.say(LinkMessage::Kind::left, std::exchange(number_, 0));
    return inner_->hand_over();
  }

  ssize_t send(const iovec* parts, size_t count) override { return inner_->send(parts, count); }
  ssize_t receive(const iovec* parts, size_t count) override {
    return inner_->receive(parts, count);
  }
  int connect_outcome() override { return inner_->connect_outcome(); }
  std::string local_host() const override { return inner_->local_host(); }
  uint16_t local_port() const override { return inner_->local_port(); }
  std::string peer() const override { return inner_->peer(); }
  std::string peer_host() const override { return inner_->peer_host(); }
  void limit_unsent(uint32_t bytes) override { inner_->limit_unsent(bytes); }
  std::optional<net::TcpInfo> tcp_info() const override { return inner_->tcp_info(); }
  int fd() const override { return inner_->fd(); }
  void shut() override { inner_->shut(); }
  bool inside_machine() const override { return inner_->inside_machine(); }

 private:
  std::shared_ptr<Here> here_;
  std::unique_ptr<net::Socket> inner_;
  uint64_t number_ = 0;  // 0: not the lab's business
};

class StationNetwork final : public net::Network {
 public:
  explicit StationNetwork(const Station& station) : here_(std::make_shared<Here>(station)) {}

  Result<std::unique_ptr<net::Socket>> listen(const std::string& host, uint16_t port) override {
    WEFT_ASSIGN(Fd fd, make_socket());
    WEFT_ASSIGN(sockaddr_in address, address_of(host, port));
    constexpr int kYes = 1, kBacklog = 1024;
    setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &kYes, sizeof kYes);
    if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
        ::listen(fd.get(), kBacklog) != 0)
      return io_error(errno, "cannot listen on %s:%u", host.c_str(), unsigned{port});
    return wrap(std::move(fd), std::nullopt);
  }
  Result<std::unique_ptr<net::Socket>> connect(const std::string& host, uint16_t port) override {
    WEFT_ASSIGN(Fd fd, make_socket());
    WEFT_ASSIGN(sockaddr_in there, address_of(host, port));
    const std::string own = station_address(here_->station.block, here_->station.host);
    WEFT_ASSIGN(sockaddr_in from, address_of(own, 0));
    constexpr int kYes = 1;
    setsockopt(fd.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &kYes, sizeof kYes);
    if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&from), sizeof from) != 0)
      return net::own_error(errno, "cannot use the address %s", own.c_str());
    if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&there), sizeof there) != 0 &&
        errno != EINPROGRESS) {
      if (errno == EADDRNOTAVAIL || errno == EADDRINUSE || errno == ENOBUFS || errno == ENOMEM)
        return net::own_error(errno, "cannot connect to %s:%u", host.c_str(), unsigned{port});
      return error(Code::peer_lost, "cannot connect to %s:%u: %s", host.c_str(), unsigned{port},
                   std::strerror(errno));
    }
    return wrap(std::move(fd), here_->host_of(host));
  }
  Result<std::unique_ptr<net::Reactor>> reactor() override {
    return net::kernel_network().reactor();
  }
  const Clock& clock() const override { return net::kernel_network().clock(); }
  std::string machine() const override {
    return text("%s/%s", net::kernel_network().machine().c_str(),
                station_address(here_->station.block, here_->station.host).c_str());
  }

 private:
  // What is set on a socket that accepts holds for those that it accepts.
  Result<Fd> make_socket() const {
    Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) return net::own_error(errno, "cannot make a socket");
    const Station& station = here_->station;
    const auto segment = static_cast<int>(station.segment);
    setsockopt(fd.get(), IPPROTO_TCP, TCP_MAXSEG, &segment, sizeof segment);
    setsockopt(fd.get(), IPPROTO_TCP, TCP_CONGESTION, station.congestion_control.data(),
               static_cast<socklen_t>(station.congestion_control.size()));
    // Until the lab has seen it. The kernel paces only what was asked for in time.
    if (station.flow_rate > 0) {
      const auto rate = static_cast<uint64_t>(station.flow_rate);
      setsockopt(fd.get(), SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
    }
    return fd;
  }
  static Result<sockaddr_in> address_of(const std::string& host, uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    if (inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1)
      return error(Code::not_found, "cannot find host \"%s\": the lab's hosts have addresses only",
                   host.c_str());
    return address;
  }
  Result<std::unique_ptr<net::Socket>> wrap(Fd fd, std::optional<uint32_t> to) const {
    return std::unique_ptr<net::Socket>(
        std::make_unique<LinkSocket>(here_, net::adopt(std::move(fd)), to));
  }

  std::shared_ptr<Here> here_;
};

}  // namespace

std::string station_address(uint32_t block, uint32_t host) {
  return text("127.77.%u.%u", block, host + 1);
}

nlohmann::json to_json(const Station& station) {
  return {{"block", station.block},     {"host", station.host},
          {"channel", station.channel}, {"flow_rate", station.flow_rate},
          {"segment", station.segment}, {"congestion_control", station.congestion_control}};
}

Station station_from(const nlohmann::json& in) {
  return {in.at("block"),     in.at("host"),    in.at("channel"),
          in.at("flow_rate"), in.at("segment"), in.at("congestion_control")};
}

std::unique_ptr<net::Network> network_at(const Station& station) {
  return std::make_unique<StationNetwork>(station);
}

}  // namespace weft::lab
