// Two ends that measure what lies between them.
//
//   doctor ── agent's input: "weft-doctor 2 TOKEN THERE HERE\n" ─► peer
//          ◄─ agent's output: "weft-doctor 2 PORT VERSION\n" ─────
//          ── connections to PORT: TOKEN, then 'd' and data, or 'c' and questions for the time ──►
//
// THERE is the address at which the doctor will knock, and the peer listens on that one alone; if
// it is none of its own (a forwarded one), on the one that routes to HERE, which is the doctor's.
// "-" stands for what is not known; then nothing listens, and PORT is 0.
//
// Data is thrown away and counted; the count comes back when the data ends. The peer lives until
// its input ends, and for a minute at most.

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <list>
#include <sstream>
#include <thread>

#include "checks.h"
#include "weft/launch.h"
#include "weft/membership.h"
#include "weft/process.h"

namespace weft::doctor {

using launch::addresses_of;
using launch::socket_address;
using launch::SocketAddress;

namespace {

constexpr std::string_view kGreeting = "weft-doctor 2 ";
constexpr size_t kTokenBytes = 64;  // as new_secret() makes them
constexpr const char* kUnknown = "-";
constexpr size_t kBlockBytes = 256 << 10;
constexpr size_t kConnectionsMax = 64;
constexpr uint32_t kFlows = 4;
constexpr int kClockQuestions = 16;
constexpr Nanos kPeerLife = Nanos::from_seconds(60);
constexpr Nanos kAgentPatience = Nanos::from_seconds(15);
constexpr Nanos kEndPatience = Nanos::from_seconds(2);
constexpr Nanos kMeasure = Nanos::from_millis(300);
constexpr int kSocketPatienceSeconds = 3;

// ---- words and numbers ---------------------------------------------------------------------

bool send_all(int fd, const void* data, size_t size) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t n = send(fd, next, size, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    next += n;
    size -= static_cast<size_t>(n);
  }
  return true;
}

bool receive_all(int fd, void* data, size_t size) {
  char* next = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t n = recv(fd, next, size, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    next += n;
    size -= static_cast<size_t>(n);
  }
  return true;
}

// Lowest byte first, whatever the hosts are.
using NumberBytes = std::array<unsigned char, 8>;
NumberBytes bytes_of(uint64_t number) {
  NumberBytes out{};
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<unsigned char>(number >> (8 * i));
  return out;
}
uint64_t number_of(const NumberBytes& bytes) {
  uint64_t out = 0;
  for (size_t i = 0; i < bytes.size(); ++i) out |= uint64_t{bytes[i]} << (8 * i);
  return out;
}

// A line, without its end, from something that may never send one.
Result<std::string> read_line(int fd, Nanos patience) {
  constexpr size_t kLineMax = 256;
  const Nanos until = monotonic_clock().now() + patience;
  std::string line;
  for (;;) {
    pollfd ready{.fd = fd, .events = POLLIN, .revents = 0};
    const double left_ms = (until - monotonic_clock().now()).millis();
    if (left_ms <= 0 || poll(&ready, 1, static_cast<int>(left_ms) + 1) == 0) {
      return error(Code::timeout, "no answer within %s", format_duration(patience).c_str());
    }
    char c = 0;
    const ssize_t n = read(fd, &c, 1);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return error(Code::peer_lost, "it ended without an answer");
    if (c == '\n') return line;
    line += c;
    if (line.size() > kLineMax) return error(Code::corrupt, "it answers something else");
  }
}

void set_patience(int fd) {
  const timeval patience{.tv_sec = kSocketPatienceSeconds, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// ---- the peer ------------------------------------------------------------------------------

void count_data(int fd) {
  std::vector<char> block(kBlockBytes);
  uint64_t count = 0;
  for (;;) {
    const ssize_t n = recv(fd, block.data(), block.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    count += static_cast<uint64_t>(n);
  }
  const NumberBytes answer = bytes_of(count);
  send_all(fd, answer.data(), answer.size());
}

void tell_time(int fd) {
  char question = 0;
  while (receive_all(fd, &question, 1)) {
    const NumberBytes answer = bytes_of(static_cast<uint64_t>(wall_time().count));
    if (!send_all(fd, answer.data(), answer.size())) return;
  }
}

void serve(int fd, const std::string& token) {
  std::string presented(kTokenBytes, '\0');
  char kind = 0;
  if (!receive_all(fd, presented.data(), presented.size()) ||
      !membership::same_secret(presented, token) || !receive_all(fd, &kind, 1)) {
    return;
  }
  if (kind == 'd') count_data(fd);
  if (kind == 'c') tell_time(fd);
}

struct Connection {
  explicit Connection(Fd accepted) : fd(std::move(accepted)) {}
  Fd fd;
  std::atomic<bool> done = false;
  std::thread thread;
};

// Returns the port. `address` is one of this host's, or that is the error.
Result<uint16_t> listen_on(const std::string& address, Fd& listener) {
  WEFT_ASSIGN(SocketAddress local, socket_address(address, 0));
  listener = Fd(socket(local.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!listener || bind(listener.get(), local.get(), local.size) != 0 ||
      listen(listener.get(), kConnectionsMax) != 0 ||
      getsockname(listener.get(), local.get(), &local.size) != 0) {
    return io_error(errno, "cannot listen on %s", membership::shown(address).c_str());
  }
  // The port is at the same place for both families.
  sockaddr_in6 bound{};
  std::memcpy(&bound, &local.storage, sizeof(bound));
  return ntohs(bound.sin6_port);
}

// On the address at which the doctor knocks, or on the one from which this host answers it.
Result<uint16_t> listen_for_doctor(const std::string& there, const std::string& here,
                                   Fd& listener) {
  if (there == kUnknown) return uint16_t{0};
  auto port = listen_on(there, listener);
  if (port || here == kUnknown) return port;
  WEFT_ASSIGN(const std::string own, launch::source_towards(here));
  return listen_on(own, listener);
}

// Until the input ends. Without a listener (-1) nobody comes.
void accept_connections(int input, int listener, const std::string& token) {
  std::list<Connection> connections;
  const Nanos until = monotonic_clock().now() + kPeerLife;
  while (monotonic_clock().now() < until) {
    std::array<pollfd, 2> ready = {pollfd{.fd = input, .events = POLLIN, .revents = 0},
                                   pollfd{.fd = listener, .events = POLLIN, .revents = 0}};
    if (poll(ready.data(), ready.size(), 1000) <= 0) continue;
    if (ready[0].revents != 0) break;
    if (ready[1].revents == 0) continue;
    Fd accepted(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    // Who was sent away must not keep others out.
    std::erase_if(connections, [](Connection& connection) {
      if (!connection.done) return false;
      connection.thread.join();
      return true;
    });
    if (!accepted || connections.size() >= kConnectionsMax) continue;
    set_patience(accepted.get());
    Connection& connection = connections.emplace_back(std::move(accepted));
    connection.thread = std::thread([&connection, &token] {
      serve(connection.fd.get(), token);
      shutdown(connection.fd.get(), SHUT_RDWR);
      connection.done = true;
    });
  }
  for (Connection& connection : connections) {
    shutdown(connection.fd.get(), SHUT_RDWR);
    connection.thread.join();
  }
}

}  // namespace

Result<void> serve_as_peer(int input, int output) {
  WEFT_ASSIGN(const std::string line, read_line(input, kPeerLife));
  std::istringstream words(line.starts_with(kGreeting) ? line.substr(kGreeting.size()) : "");
  std::string token, there, here;
  if (!(words >> token >> there >> here) || token.size() != kTokenBytes) {
    return error(Code::corrupt, "what comes is not from `weft doctor`; this verb is for it alone");
  }
  Fd listener;
  WEFT_ASSIGN(const uint16_t port, listen_for_doctor(there, here, listener));
  const std::string answer =
      text("%s%u %s\n", std::string(kGreeting).c_str(), unsigned{port}, version());
  if (write(output, answer.data(), answer.size()) != static_cast<ssize_t>(answer.size())) {
    return io_error(errno, "cannot answer");
  }
  accept_connections(input, listener.get(), token);
  return {};
}

namespace {

// ---- the doctor's end ----------------------------------------------------------------------

struct Peer {
  std::string address;
  uint16_t port = 0;
  std::string token;
};

Result<Fd> connect_to(const Peer& peer, char kind) {
  WEFT_ASSIGN(SocketAddress to, socket_address(peer.address, peer.port));
  Fd fd(socket(to.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return io_error(errno, "no socket");
  set_patience(fd.get());  // bounds connect() too
  if (connect(fd.get(), to.get(), to.size) != 0) {
    return io_error(errno == EINPROGRESS ? ETIMEDOUT : errno, "cannot connect to %s port %u",
                    peer.address.c_str(), unsigned{peer.port});
  }
  if (!send_all(fd.get(), peer.token.data(), peer.token.size()) || !send_all(fd.get(), &kind, 1)) {
    return io_error(errno, "%s closes the connection", peer.address.c_str());
  }
  return fd;
}

// Bytes a second of so many connections at once. The end of each is when its count has come back.
Result<double> measure_rate(const Peer& peer, uint32_t flows) {
  std::vector<Fd> fds;
  for (uint32_t i = 0; i < flows; ++i) {
    WEFT_ASSIGN(Fd fd, connect_to(peer, 'd'));
    fds.push_back(std::move(fd));
  }
  const std::vector<char> block(kBlockBytes, 'x');
  std::vector<uint64_t> counts(flows);
  std::vector<std::thread> threads;
  const Nanos start = monotonic_clock().now();
  for (uint32_t i = 0; i < flows; ++i) {
    threads.emplace_back([&, i] {
      const int fd = fds[i].get();
      while (monotonic_clock().now() - start < kMeasure &&
             send_all(fd, block.data(), block.size())) {
      }
      shutdown(fd, SHUT_WR);
      NumberBytes count{};
      if (receive_all(fd, count.data(), count.size())) counts[i] = number_of(count);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const double seconds = (monotonic_clock().now() - start).seconds();
  double bytes = 0;
  for (const uint64_t count : counts) {
    if (count == 0) return error(Code::peer_lost, "a connection carried nothing");
    bytes += static_cast<double>(count);
  }
  return bytes / seconds;
}

struct ClockOffset {
  Nanos offset;  // theirs less ours
  Nanos round_trip;
};

// The answer with the shortest way says most.
Result<ClockOffset> measure_clock(const Peer& peer) {
  WEFT_ASSIGN(const Fd fd, connect_to(peer, 'c'));
  std::optional<ClockOffset> best;
  for (int i = 0; i < kClockQuestions; ++i) {
    NumberBytes answer{};
    const Nanos asked = wall_time(), start = monotonic_clock().now();
    if (!send_all(fd.get(), "?", 1) || !receive_all(fd.get(), answer.data(), answer.size())) {
      return error(Code::peer_lost, "it does not tell its time");
    }
    const Nanos took = monotonic_clock().now() - start;
    const auto told = static_cast<int64_t>(number_of(answer));
    // Bytes from outside may be any number.
    if (told < 0) return error(Code::corrupt, "it tells no time");
    if (!best || took < best->round_trip) {
      best = {Nanos{told} - asked - took.scaled(0.5), took};
    }
  }
  return *best;
}

void judge_rates(Checks& checks, const std::string& name, double one, double several) {
  const std::string found = text("one flow %s, %u flows %s", format_rate(8 * one).c_str(), kFlows,
                                 format_rate(8 * several).c_str());
  if (several > 1.3 * one) {
    checks.note(
        name, found + ": one connection does not use all that is there",
        text("a plan with \"lanes\": %u; `weft bench lanes` finds the best number", kFlows));
  } else if (several < 0.8 * one) {
    checks.note(name, found + ": more connections lose", "a plan with \"lanes\": 1");
  } else {
    checks.ok(name, found);
  }
}

void check_rates(Checks& checks, const std::string& name, const Peer& peer) {
  const auto one = measure_rate(peer, 1);
  const auto several = one ? measure_rate(peer, kFlows) : one;
  if (!several) {
    checks.problem(name, several.error().message(),
                   "let TCP between the hosts of the job pass: `nft list ruleset` shows filters");
    return;
  }
  judge_rates(checks, name, *one, *several);
}

Result<Peer> greet(int input, int output, const std::string& address, std::string* their_version) {
  Peer peer;
  peer.address = address;
  peer.token = membership::new_secret();
  const auto here = launch::source_towards(address);
  const std::string greeting =
      text("%s%s %s %s\n", std::string(kGreeting).c_str(), peer.token.c_str(),
           address.empty() ? kUnknown : address.c_str(), here ? here->c_str() : kUnknown);
  // If it has ended already, what it answers, or that it does not, says more.
  send_all(input, greeting.data(), greeting.size());
  WEFT_ASSIGN(const std::string line, read_line(output, kAgentPatience));
  std::istringstream words(line.starts_with(kGreeting) ? line.substr(kGreeting.size()) : "");
  if (!(words >> peer.port >> *their_version) || (peer.port == 0) != address.empty()) {
    return error(Code::corrupt, "it answers \"%s\"", line.substr(0, 80).c_str());
  }
  return peer;
}

// ---- the agent -----------------------------------------------------------------------------

// A command with both ends of its standard input and output, and what it complains.
class Agent {
 public:
  static Result<std::unique_ptr<Agent>> start(std::vector<std::string> words) {
    std::unique_ptr<Agent> agent(new Agent());
    WEFT_ASSIGN(process::Pipe in, process::make_socket_pair());
    WEFT_ASSIGN(process::Pipe out, process::make_pipe());
    WEFT_ASSIGN(process::Pipe err, process::make_pipe());
    process::Command command;
    command.argv = std::move(words);
    command.descriptors = {{in.read.get(), STDIN_FILENO},
                           {out.write.get(), STDOUT_FILENO},
                           {err.write.get(), STDERR_FILENO}};
    WEFT_ASSIGN(agent->child_, process::Child::start(command));
    agent->input_ = std::move(in.write);
    agent->output_ = std::move(out.read);
    agent->complaints_ = std::move(err.read);
    return agent;
  }

  ~Agent() {
    input_.reset();
    child_.end(0, kEndPatience);  // it ends by itself, because its input does
  }
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  int input() const { return input_.get(); }
  int output() const { return output_.get(); }
  // The last line that it complained, as far as it can be shown.
  std::string complaint() const {
    std::string text(4096, '\0');
    fcntl(complaints_.get(), F_SETFL, O_NONBLOCK);
    const ssize_t n = read(complaints_.get(), text.data(), text.size());
    text.resize(n > 0 ? static_cast<size_t>(n) : 0);
    text.erase(text.find_last_not_of("\r\n ") + 1);
    text.erase(0, text.rfind('\n') + 1);
    for (char& c : text) c = c >= ' ' && c <= '~' ? c : '?';
    return text.substr(0, 200);
  }

 private:
  Agent() = default;
  process::Child child_;
  Fd input_, output_, complaints_;
};

void check_clock_of(Checks& checks, const std::string& name, const Peer& peer) {
  const auto clock = measure_clock(peer);
  if (!clock) {
    checks.note(name + " clock", clock.error().message(), "timedatectl status");
    return;
  }
  const Nanos away{std::abs(clock->offset.count)};
  const std::string found = text(
      "%s %s of this host's, round trip %s", format_duration(away).c_str(),
      clock->offset.count < 0 ? "behind" : "ahead", format_duration(clock->round_trip).c_str());
  if (away > Nanos::from_seconds(1)) {
    checks.note(name + " clock", found, "timedatectl set-ntp true, on both");
  } else {
    checks.ok(name + " clock", found);
  }
}

}  // namespace

void check_loopback_rate(Checks& checks) {
  auto in = process::make_socket_pair(), out = process::make_pipe();
  if (!in || !out) {
    checks.note("rate on this host", "not measured: " + (in ? out : in).error().message(),
                "ulimit -n 4096");
    return;
  }
  std::thread peer_thread([&] {
    if (const auto ended = serve_as_peer(in->read.get(), out->write.get()); !ended) {
      // The other end then waits for an answer in vain, and says so.
      WEFT_LOG(doctor, info, "%s", ended.error().message().c_str());
    }
  });
  std::string their_version;
  const auto peer = greet(in->write.get(), out->read.get(), "127.0.0.1", &their_version);
  if (peer) {
    check_rates(checks, "rate on this host", *peer);
  } else {
    checks.problem("rate on this host", peer.error().message(), "ulimit -n 4096");
  }
  in->write.reset();
  peer_thread.join();
}

void check_other_host(Checks& checks, const Options& options, const std::string& host) {
  const std::string weft = options.remote_weft.empty() ? self_path() : options.remote_weft;
  const std::string remedy =
      text("`%s %s %s --version` must work without asking anything (ssh-copy-id %s; --weft PATH)",
           options.agent.c_str(), host.c_str(), weft.c_str(), host.c_str());
  auto words = launch::agent_command(options.agent, host, {weft, "doctor-peer"});
  if (!words) {
    checks.problem(host, words.error().message(), "--weft PATH");
    return;
  }
  auto agent = Agent::start(*std::move(words));
  if (!agent) {
    checks.problem(host, agent.error().message(), "--agent with a program that is installed");
    return;
  }
  const auto addresses = addresses_of(launch::without_user(host));
  std::string their_version;
  const auto peer = greet((*agent)->input(), (*agent)->output(),
                          addresses ? addresses->front() : "", &their_version);
  if (!peer) {
    const std::string complaint = (*agent)->complaint();
    checks.problem(host, peer.error().message() + (complaint.empty() ? "" : ": " + complaint),
                   remedy);
    return;
  }
  if (their_version != version()) {
    checks.problem(host, text("has weft %s, and this host %s", their_version.c_str(), version()),
                   "install the same on both");
  } else {
    checks.ok(host, "the agent reaches it, with the same weft " + their_version);
  }
  if (!addresses) {
    checks.problem(host + " name", addresses.error().message(),
                   text("echo \"ADDRESS %s\" >> /etc/hosts", launch::without_user(host).c_str()));
    return;
  }
  check_clock_of(checks, host, *peer);
  if (options.rates) check_rates(checks, host + " rate", *peer);
}

}  // namespace weft::doctor
