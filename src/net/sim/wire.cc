#include "sim/wire.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace weft::net::sim {
namespace {

using State = Connection::State;

constexpr Nanos kUserTimeout = Nanos::from_seconds(20);  // as the kernel's sockets are set
constexpr size_t kLines = 4000;
constexpr uint16_t kFirstPort = 40000;

bool between(const Fault& fault, uint32_t one, uint32_t other) {
  if (fault.other == kEveryone) return fault.rank == one || fault.rank == other;
  return (fault.rank == one && fault.other == other) || (fault.rank == other && fault.other == one);
}

}  // namespace

Wire::Wire(const Options& options)
    : options_(options),
      rng_(options.seed),
      now_(Nanos::from_seconds(1000)),
      began_(now_),
      ports_(options.ranks, kFirstPort),
      alive_(options.ranks, true),
      dark_(options.ranks, false),
      died_(options.ranks),
      used_(options.faults.size(), false) {
  // A rank that was stopped can run again.
  for (const Fault& fault : options_.faults)
    if ((fault.kind == Fault::Kind::stop || fault.kind == Fault::Kind::task_stop) &&
        fault.until != kForever)
      after(fault.until, [] {});
}

// ---- time --------------------------------------------------------------------------------

void Wire::after(Nanos delay, std::function<void()> what) {
  queue_.push({now_ + delay, events_++, std::move(what)});
}

std::optional<Nanos> Wire::next_event() const {
  if (queue_.empty()) return std::nullopt;
  return queue_.top().at;
}

void Wire::advance_to(Nanos moment) {
  while (!queue_.empty() && queue_.top().at <= moment) {
    Event event = queue_.top();
    queue_.pop();
    now_ = std::max(now_, event.at);
    event.what();
  }
  now_ = std::max(now_, moment);
}

const Fault* Wire::active(Fault::Kind kind, uint32_t rank) const {
  Nanos since = now_ - began_;
  for (const Fault& fault : options_.faults)
    if (fault.kind == kind && fault.rank == rank && since >= fault.from && since < fault.until)
      return &fault;
  return nullptr;
}

Nanos Wire::delay_between(uint32_t one, uint32_t other) {
  auto chance = [&](Nanos bound) {
    return Nanos{static_cast<int64_t>(rng_.below(static_cast<uint64_t>(bound.count) + 1))};
  };
  Nanos delay = options_.delay_min + chance(options_.delay_max - options_.delay_min);
  Nanos since = now_ - began_;
  for (const Fault& fault : options_.faults)
    if (fault.kind == Fault::Kind::spike && between(fault, one, other) && since >= fault.from &&
        since < fault.until)
      delay += chance(fault.amount);
  return delay;
}

// When bytes can pass again between two ranks: now, later, or never.
Nanos Wire::blocked_until(uint32_t one, uint32_t other) const {
  Nanos since = now_ - began_;
  Nanos until{0};
  for (const Fault& fault : options_.faults)
    if (fault.kind == Fault::Kind::partition && between(fault, one, other) && since >= fault.from &&
        since < fault.until)
      until = std::max(until, fault.until == kForever ? kForever : began_ + fault.until);
  return until;
}

// ---- connections -------------------------------------------------------------------------

bool Wire::listen(uint32_t rank, uint16_t port) {
  return listeners_.try_emplace({rank, port}).second;
}

uint16_t Wire::free_port(uint32_t rank) { return ports_[rank]++; }

void Wire::stop_listening(uint32_t rank, uint16_t port) {
  auto found = listeners_.find({rank, port});
  if (found == listeners_.end()) return;
  // As Linux does now and then: who was called forgets a connection that was not quite open, and
  // the caller, for whom it opens, hears nothing unless it speaks.
  for (const auto& waiting : found->second)
    if (waiting->states[0] == State::opening && rng_.below(2) == 0)
      waiting->states[1] = State::closed;
    else
      close(*waiting, 1);
  listeners_.erase(found);
}

bool Wire::has_caller(uint32_t rank, uint16_t port) const {
  auto found = listeners_.find({rank, port});
  return found != listeners_.end() && !found->second.empty();
}

std::shared_ptr<Connection> Wire::accept(uint32_t rank, uint16_t port) {
  auto found = listeners_.find({rank, port});
  if (found == listeners_.end() || found->second.empty()) return nullptr;
  std::shared_ptr<Connection> connection = std::move(found->second.front());
  found->second.pop_front();
  note("accept", connection->number);
  return connection;
}

std::shared_ptr<Connection> Wire::call(uint32_t from, uint32_t to, uint16_t port) {
  auto connection = std::make_shared<Connection>();
  connection->number = connections_.size();
  connection->ranks = {from, to};
  connection->port = port;
  connections_.push_back(connection);
  note("call", connection->number, from, to);
  after(delay_between(from, to), [this, connection] { knock(connection); });
  return connection;
}

// The first word of a connection has come to the one who was called.
void Wire::knock(const std::shared_ptr<Connection>& connection) {
  auto [from, to] = connection->ranks;
  if (connection->states[0] != State::opening || dark_[to] || dark_[from]) return;
  Nanos until = blocked_until(from, to);
  if (until == kForever) return;
  if (until > now_) {
    after(until - now_ + delay_between(from, to), [this, connection] { knock(connection); });
    return;
  }
  auto found = listeners_.find({to, connection->port});
  if (found == listeners_.end()) {
    after(delay_between(from, to), [this, connection] { break_off(*connection, 0, ECONNREFUSED); });
    return;
  }
  connection->states[1] = State::open;
  found->second.push_back(connection);
  after(delay_between(from, to), [this, connection] {
    if (connection->states[0] != State::opening) return;
    connection->states[0] = State::open;
    note("open", connection->number);
  });
}

size_t Wire::room(const Connection& connection, size_t side) const {
  const Pipe& pipe = connection.pipes[side];
  size_t filled = pipe.flying_bytes + pipe.unread();
  return filled < options_.buffer ? options_.buffer - filled : 0;
}

Fault* Wire::due(const Connection& connection, size_t side, uint64_t count) {
  uint64_t sent = connection.pipes[side].sent;
  for (size_t i = 0; i < options_.faults.size(); ++i) {
    Fault& fault = options_.faults[i];
    bool by_byte = fault.kind == Fault::Kind::reset || fault.kind == Fault::Kind::half_open ||
                   fault.kind == Fault::Kind::corrupt;
    if (!by_byte || used_[i] || fault.connection != connection.number ||
        fault.reverse != (side == 1) || fault.at < sent || fault.at >= sent + count)
      continue;
    used_[i] = true;
    return &fault;
  }
  return nullptr;
}

ssize_t Wire::send(Connection& connection, size_t side, const iovec* parts, size_t count) {
  if (connection.states[side] == State::failed) return -connection.failures[side];
  if (connection.states[side] == State::closed) return -EPIPE;
  if (connection.states[side] == State::opening) return -EAGAIN;
  std::vector<std::byte> bytes;
  size_t fits = room(connection, side);
  for (size_t i = 0; i < count && bytes.size() < fits; ++i) {
    const auto* from = static_cast<const std::byte*>(parts[i].iov_base);
    bytes.insert(bytes.end(), from, from + std::min(parts[i].iov_len, fits - bytes.size()));
  }
  if (bytes.empty()) return -EAGAIN;
  if (rng_.below(4) == 0) bytes.resize(1 + rng_.below(bytes.size()));
  size_t taken = bytes.size();
  Pipe& pipe = connection.pipes[side];
  const Fault* fault = due(connection, side, taken);
  size_t good = fault != nullptr ? static_cast<size_t>(fault->at - pipe.sent) : taken;
  pipe.sent += taken;
  if (fault != nullptr) {
    note(to_text(*fault).c_str(), connection.number, fault->at);
    if (fault->kind == Fault::Kind::corrupt) {
      bytes[good] ^= std::byte(1u << rng_.below(8));
      good = taken;
    }
  }
  for (size_t from = 0; from < good;) {
    size_t bound = rng_.below(8) == 0 ? 64 : options_.stretch_max;
    size_t size = std::min<size_t>(1 + rng_.below(bound), good - from);
    Parcel parcel;
    auto first = bytes.begin() + static_cast<ptrdiff_t>(from);
    parcel.bytes.assign(first, first + static_cast<ptrdiff_t>(size));
    launch(connection, side, std::move(parcel));
    from += size;
  }
  if (fault != nullptr && fault->kind == Fault::Kind::half_open) {
    lose(connection, 0);
    lose(connection, 1);
    pipe.flying_bytes += taken - good;
  } else if (fault != nullptr && fault->kind == Fault::Kind::reset) {
    for (size_t end : {size_t{0}, size_t{1}}) reset_peer(connection, end);
  }
  return static_cast<ssize_t>(taken);
}

ssize_t Wire::receive(Connection& connection, size_t side, const iovec* parts, size_t count) {
  Pipe& pipe = connection.pipes[1 - side];
  if (connection.states[side] == State::closed) return -ECONNRESET;
  ssize_t taken = 0;
  for (size_t i = 0; i < count && pipe.unread() > 0; ++i) {
    size_t size = std::min(parts[i].iov_len, pipe.unread());
    if (size == 0) continue;
    std::memcpy(parts[i].iov_base, pipe.here.data() + pipe.read, size);
    pipe.read += size;
    taken += static_cast<ssize_t>(size);
  }
  if (pipe.unread() == 0) {
    pipe.here.clear();
    pipe.read = 0;
  }
  if (taken > 0) return taken;
  if (connection.states[side] == State::failed) return -connection.failures[side];
  return pipe.ended ? 0 : -EAGAIN;
}

uint32_t Wire::events(const Connection& connection, size_t side) const {
  switch (connection.states[side]) {
    case State::opening: return 0;
    case State::failed:
    case State::closed: return EPOLLIN | EPOLLOUT | EPOLLERR | EPOLLHUP;
    case State::open: break;
  }
  const Pipe& pipe = connection.pipes[1 - side];
  return (pipe.unread() > 0 || pipe.ended ? static_cast<uint32_t>(EPOLLIN) : 0u) |
         (room(connection, side) > 0 ? static_cast<uint32_t>(EPOLLOUT) : 0u);
}

void Wire::close(Connection& connection, size_t side) {
  State before = std::exchange(connection.states[side], State::closed);
  if (before == State::closed) return;
  note("close", connection.number, side);
  Pipe& in = connection.pipes[1 - side];
  bool unread = in.unread() > 0;
  in.here.clear();
  in.read = 0;
  if (before != State::open) return;
  // As the kernel does: what was not read is answered by a reset, and that may overtake what was
  // sent before.
  if (unread) {
    reset_peer(connection, side);
  } else {
    Parcel end;
    end.kind = Parcel::Kind::end;
    launch(connection, side, std::move(end));
  }
}

// A reset goes from `side` to the other; some of what is on its way gets there before.
void Wire::reset_peer(Connection& connection, size_t side) {
  Pipe& pipe = connection.pipes[side];
  size_t keep = rng_.below(pipe.flying.size() + 1);
  while (pipe.flying.size() > keep) {
    pipe.flying_bytes -= pipe.flying.back().bytes.size();
    pipe.flying.pop_back();
  }
  Parcel reset;
  reset.kind = Parcel::Kind::reset;
  launch(connection, side, std::move(reset));
}

void Wire::break_off(Connection& connection, size_t side, int failure) {
  State& state = connection.states[side];
  if (state != State::open && state != State::opening) return;
  state = State::failed;
  connection.failures[side] = failure;
  note("fails", connection.number, side, static_cast<uint64_t>(failure));
}

// ---- bytes on their way ------------------------------------------------------------------

// From now on this direction leads nowhere; the sender's kernel gives up after a while.
void Wire::lose(Connection& connection, size_t side) {
  Pipe& pipe = connection.pipes[side];
  pipe.lost = true;
  if (std::exchange(pipe.times_out, true)) return;
  std::shared_ptr<Connection> held = connections_[connection.number];
  after(kUserTimeout, [this, held, side] {
    Pipe& late = held->pipes[side];
    if (late.flying_bytes > 0)
      break_off(*held, side, ETIMEDOUT);
    else
      late.times_out = false;  // nothing was sent: there is nothing to give up
  });
}

void Wire::launch(Connection& connection, size_t side, Parcel parcel) {
  Pipe& pipe = connection.pipes[side];
  pipe.flying_bytes += parcel.bytes.size();
  if (pipe.lost) {
    lose(connection, side);
    return;
  }
  Nanos delay = delay_between(connection.ranks[0], connection.ranks[1]);
  parcel.arrival = std::max(pipe.last_arrival, now_ + delay);
  pipe.last_arrival = parcel.arrival;
  pipe.flying.push_back(std::move(parcel));
  if (!pipe.expected) expect(connection, side, pipe.flying.front().arrival - now_);
}

void Wire::expect(Connection& connection, size_t side, Nanos delay) {
  connection.pipes[side].expected = true;
  std::shared_ptr<Connection> held = connections_[connection.number];
  after(delay, [this, held, side] {
    held->pipes[side].expected = false;
    deliver(*held, side);
  });
}

void Wire::deliver(Connection& connection, size_t side) {
  Pipe& pipe = connection.pipes[side];
  size_t to = 1 - side;
  while (!pipe.flying.empty()) {
    if (pipe.flying.front().arrival > now_)
      return expect(connection, side, pipe.flying.front().arrival - now_);
    Nanos until = blocked_until(connection.ranks[0], connection.ranks[1]);
    if (until == kForever || dark_[connection.ranks[to]]) return lose(connection, side);
    if (until > now_)
      return expect(connection, side,
                    until - now_ + delay_between(connection.ranks[0], connection.ranks[1]));
    Parcel parcel = std::move(pipe.flying.front());
    pipe.flying.pop_front();
    pipe.flying_bytes -= parcel.bytes.size();
    note("arrives", connection.number * 2 + side, static_cast<uint64_t>(parcel.kind),
         parcel.bytes.size());
    bool open = connection.states[to] == State::open || connection.states[to] == State::opening;
    if (parcel.kind == Parcel::Kind::reset) {
      break_off(connection, to, ECONNRESET);
    } else if (parcel.kind == Parcel::Kind::end) {
      pipe.ended = true;
    } else if (open) {
      pipe.here.insert(pipe.here.end(), parcel.bytes.begin(), parcel.bytes.end());
    } else if (connection.states[to] == State::closed && alive_[connection.ranks[side]]) {
      reset_peer(connection, to);
    }
  }
}

void Wire::die(uint32_t rank, bool silently) {
  if (!alive_[rank]) return;
  note(silently ? "dark" : "dies", rank);
  alive_[rank] = false;
  died_[rank] = now_;
  dark_[rank] = silently;
  for (const auto& connection : connections_)
    for (size_t side : {size_t{0}, size_t{1}}) {
      if (connection->ranks[side] != rank) continue;
      if (silently)
        connection->states[side] = State::closed;
      else if (side == 0 || connection->states[1] != State::opening)
        close(*connection, side);
    }
  for (auto place = listeners_.begin(); place != listeners_.end();)
    place = place->first.first == rank ? listeners_.erase(place) : std::next(place);
}

std::optional<std::pair<Rank, Rank>> Wire::ends_of(uint64_t number) const {
  if (number >= connections_.size()) return std::nullopt;
  return std::pair(Rank{connections_[number]->ranks[0]}, Rank{connections_[number]->ranks[1]});
}

// ---- the course of events ----------------------------------------------------------------

void Wire::note(const char* what, uint64_t a, uint64_t b, uint64_t c) {
  auto mix = [&](uint64_t word) { course_ = (course_ ^ word) * 1099511628211ull; };
  for (const char* at = what; *at != '\0'; ++at) mix(static_cast<uint64_t>(*at));
  for (uint64_t word : {a, b, c, static_cast<uint64_t>(now_.count)}) mix(word);
  if (!options_.keep_lines) return;
  if (lines_.size() == kLines) lines_.pop_front();
  lines_.push_back(text("%12.3f us  %s %llu %llu %llu", (now_ - began_).micros(), what,
                        static_cast<unsigned long long>(a), static_cast<unsigned long long>(b),
                        static_cast<unsigned long long>(c)));
}

std::string Wire::lines() const {
  std::string out;
  for (const std::string& line : lines_) out += line + "\n";
  return out;
}

}  // namespace weft::net::sim
