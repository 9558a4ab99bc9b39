#include "links.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "links_message.h"

namespace weft::lab {
namespace {

constexpr Nanos kLook = Nanos::from_millis(1);
// A lane between two chunks has nothing to send for a moment: it keeps its share.
constexpr Nanos kIdleAfter = Nanos::from_millis(2);
// A socket with less to send than this carries receipts or control, and needs no share.
constexpr int kBusyBytes = 4096;
// How often a socket that another process serves is asked whether its connection has ended.
constexpr Nanos kAskEnded = Nanos::from_millis(100);
constexpr uint32_t kBlocks = 256;
// The kernel takes no larger one from a user.
constexpr uint32_t kSegmentMax = 32767;
// IPv4 and TCP with time stamps.
constexpr uint32_t kHeaders = 52;

bool has_ended(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return true;
  return info.tcpi_state != TCP_ESTABLISHED && info.tcpi_state != TCP_SYN_SENT;
}

// A block of addresses that no other lab of this network has. The kernel gives the name back with
// the descriptor.
Result<std::pair<uint32_t, Fd>> claim_block() {
  for (uint32_t block = 0; block < kBlocks; ++block) {
    Fd claim(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!claim) return io_error(errno, "making a socket");
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const std::string word = text("weft-lab-127.77.%u", block);
    std::memcpy(name.sun_path + 1, word.data(), word.size());
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + word.size());
    if (::bind(claim.get(), reinterpret_cast<sockaddr*>(&name), size) == 0)
      return std::pair(block, std::move(claim));
    if (errno != EADDRINUSE) return io_error(errno, "claiming addresses on loopback");
  }
  return error(Code::unsupported, "%u labs run on this loopback interface already", kBlocks);
}

}  // namespace

struct Links::Socket {
  Fd fd;
  Flow flow;
  Nanos busy_at{INT64_MIN / 2};  // when it was last seen with bytes to send
  Nanos ask_at{0};
  bool left = false;
  double rate = 0;  // as set
};

struct Links::Channel {
  Fd fd;
  std::map<uint64_t, Socket> sockets;
};

Links::Links(const ClusterSpec& spec)
    : spec_(spec), link_rate_(spec.link_bits_per_s / 8), flow_rate_(spec.flow_bits_per_s / 8) {
  if (link_rate_ > 0) flow_rate_ = flow_rate_ > 0 ? std::min(flow_rate_, link_rate_) : link_rate_;
}

Result<std::unique_ptr<Links>> Links::start(const ClusterSpec& spec) {
  std::unique_ptr<Links> links(new Links(spec));
  WEFT_TRY(links->begin());
  return links;
}

Result<void> Links::begin() {
  Fd trial(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!trial) return io_error(errno, "making a socket");
  const std::string& congestion = spec_.congestion_control;
  if (setsockopt(trial.get(), IPPROTO_TCP, TCP_CONGESTION, congestion.data(),
                 static_cast<socklen_t>(congestion.size())) != 0)
    return error(Code::unsupported,
                 "setting tcp_congestion_control to %s (see "
                 "net.ipv4.tcp_allowed_congestion_control): %s",
                 congestion.c_str(), std::strerror(errno));
  // The copies of all sockets of all hosts are here.
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  WEFT_ASSIGN(auto claimed, claim_block());
  block_ = claimed.first;
  claim_ = std::move(claimed.second);
  epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  stop_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_ || !stop_) return io_error(errno, "waiting for the lab's processes");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = stop_.get();
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, stop_.get(), &event) != 0)
    return io_error(errno, "waiting for the lab's processes");
  thread_ = std::thread([this] { run(); });
  return {};
}

Links::~Links() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = ::write(stop_.get(), &one, sizeof one);
  thread_.join();
}

Station Links::station(uint32_t host, int channel) const {
  return {block_,
          host,
          channel,
          flow_rate_,
          std::min(spec_.mtu - kHeaders, kSegmentMax),
          spec_.congestion_control};
}

Result<Fd> Links::open_channel() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0)
    return io_error(errno, "making a channel to the lab");
  auto channel = std::make_unique<Channel>();
  channel->fd = Fd(ends[0]);
  Fd theirs(ends[1]);
  std::lock_guard lock(mutex_);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = channel->fd.get();
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, channel->fd.get(), &event) != 0)
    return io_error(errno, "listening to a process of the lab");
  channels_[channel->fd.get()] = std::move(channel);
  return theirs;
}

void Links::run() {
  prctl(PR_SET_TIMERSLACK, 1UL);
  Nanos next = monotonic_clock().now();
  for (;;) {
    std::array<epoll_event, 16> events;
    const Nanos left = next - monotonic_clock().now();
    // The wait is in whole milliseconds: after an interruption a look comes up to one too late.
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                 left.count > 0 ? 1 : 0);
    std::lock_guard lock(mutex_);
    for (int i = 0; i < count; ++i) {
      const int fd = events[static_cast<size_t>(i)].data.fd;
      if (fd == stop_.get()) return;
      if (auto found = channels_.find(fd); found != channels_.end() && !hear(*found->second)) {
        channels_.erase(found);
        changed_ = true;
      }
    }
    const Nanos now = monotonic_clock().now();
    if (now < next) continue;
    next = now + kLook;
    look(now);
    if (std::exchange(changed_, false)) set_rates();
  }
}

// False when the process has ended.
bool Links::hear(Channel& channel) {
  for (;;) {
    LinkMessage words;
    net::Record record =
        net::receive_record(channel.fd.get(), std::as_writable_bytes(std::span(&words, 1)));
    if (record.bytes < 0) return record.bytes == -EAGAIN || record.bytes == -EWOULDBLOCK;
    if (record.bytes != sizeof words) return false;
    changed_ = true;
    auto known = channel.sockets.find(words.socket);
    if (words.kind == LinkMessage::Kind::opened) {
      // The kernel leaves the descriptor out when this process can have no more.
      if (!record.fd || words.from >= spec_.hosts || words.to >= spec_.hosts) {
        ++lost_;
        continue;
      }
      Socket& made = channel.sockets[words.socket];
      made.fd = std::move(record.fd);
      made.flow = {words.from, words.to, flow_rate_ > 0 ? flow_rate_ : HUGE_VAL, false};
    } else if (known != channel.sockets.end()) {
      switch (words.kind) {
        case LinkMessage::Kind::limited:
          known->second.flow.cap = std::min(known->second.flow.cap, words.rate);
          break;
        case LinkMessage::Kind::left: known->second.left = true; break;
        default: channel.sockets.erase(known);
      }
    }
  }
}

void Links::look(Nanos now) {
  for (auto& [fd, channel] : channels_) {
    for (auto at = channel->sockets.begin(); at != channel->sockets.end();) {
      Socket& socket = at->second;
      if (socket.left && now >= socket.ask_at) {
        socket.ask_at = now + kAskEnded;
        if (has_ended(socket.fd.get())) {
          at = channel->sockets.erase(at);
          changed_ = true;
          continue;
        }
      }
      int waiting = 0;
      if (ioctl(socket.fd.get(), SIOCOUTQ, &waiting) == 0 && waiting >= kBusyBytes)
        socket.busy_at = now;
      const bool active = now - socket.busy_at < kIdleAfter;
      if (active != socket.flow.active) changed_ = true;
      socket.flow.active = active;
      ++at;
    }
  }
}

void Links::set_rates() {
  std::vector<Socket*> sockets;
  std::vector<Flow> flows;
  for (auto& [fd, channel] : channels_)
    for (auto& [number, socket] : channel->sockets) {
      sockets.push_back(&socket);
      flows.push_back(socket.flow);
    }
  std::vector<double> rates;
  if (link_rate_ > 0)
    rates = share_out(flows, spec_.hosts, link_rate_);
  else
    for (const Flow& flow : flows) rates.push_back(flow.cap);
  for (size_t i = 0; i < sockets.size(); ++i) {
    if (!std::isfinite(rates[i]) || rates[i] == sockets[i]->rate) continue;
    const auto rate = static_cast<uint64_t>(std::max(rates[i], 1.0));
    setsockopt(sockets[i]->fd.get(), SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
    sockets[i]->rate = rates[i];
  }
}

}  // namespace weft::lab
