#include <sys/epoll.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "sim/fiber.h"
#include "sim/wire.h"
#include "weft/net.h"

namespace weft::net::sim {
namespace {

constexpr Nanos kTurn = Nanos::from_micros(0.2);  // a turn takes at least this long
constexpr uint64_t kTurnChance = 2000;            // and up to so many nanoseconds more
constexpr uint64_t kWaitsAfterDeath = 200'000;    // then it is told to end by force
constexpr const char* kNet = "10.0.0.";

struct Gone {};  // unwinds a rank that does not notice that it is dead

}  // namespace

class SimSocket : public Socket {
 public:
  virtual uint32_t events() const = 0;
};

class SimReactor;

class World::Impl {
 public:
  explicit Impl(Options options)
      : options_(std::move(options)), wire_(options_), places_(options_.ranks) {}

  struct Place {
    uint64_t waits = 0;
    uint64_t waits_after_death = 0;
    Nanos ahead{0};  // a dead rank's clock runs away
    std::unique_ptr<Fiber> fiber;
    SimReactor* waiting = nullptr;
    Nanos deadline{0};
    bool delayed = false;
    Nanos not_before{0};
  };

  // A rank waits. False if it is dead.
  bool wait(uint32_t rank, SimReactor& reactor, Nanos timeout);
  Outcome run(std::vector<std::function<void()>> bodies);
  Nanos now(uint32_t rank) const { return wire_.now() + places_[rank].ahead; }
  bool alive(uint32_t rank) const { return wire_.alive(rank); }
  void doom(uint32_t rank, uint64_t waits, bool silently) {
    Fault fault;
    fault.kind = silently ? Fault::Kind::power_loss : Fault::Kind::death;
    fault.rank = rank;
    fault.at = places_[rank].waits + waits;
    options_.faults.push_back(fault);
  }
  Wire& wire() { return wire_; }
  const Options& options() const { return options_; }
  std::vector<std::unique_ptr<Network>> networks;  // by rank

 private:
  bool is_ready(uint32_t rank);
  bool stopped_for_ever(uint32_t rank) const;
  void resume(uint32_t rank);
  void end(const char* why, Outcome& outcome);

  Options options_;
  Wire wire_;
  std::vector<Place> places_;
  std::optional<uint32_t> current_;
};

// ---- what a rank sees --------------------------------------------------------------------

class StreamSocket final : public SimSocket {
 public:
  StreamSocket(World::Impl& world, std::shared_ptr<Connection> connection, size_t side)
      : world_(world), connection_(std::move(connection)), side_(side) {}
  ~StreamSocket() override { world_.wire().close(*connection_, side_); }
  ssize_t send(const iovec* parts, size_t count) override {
    return world_.wire().send(*connection_, side_, parts, count);
  }
  ssize_t receive(const iovec* parts, size_t count) override {
    return world_.wire().receive(*connection_, side_, parts, count);
  }
  int connect_outcome() override { return connection_->failures[side_]; }
  std::string local_host() const override { return World::address_of({connection_->ranks[side_]}); }
  std::string peer() const override { return World::address_of({connection_->ranks[1 - side_]}); }
  uint32_t events() const override { return world_.wire().events(*connection_, side_); }

 private:
  World::Impl& world_;
  std::shared_ptr<Connection> connection_;
  size_t side_;
};

class ListenSocket final : public SimSocket {
 public:
  ListenSocket(World::Impl& world, uint32_t rank, uint16_t port)
      : world_(world), rank_(rank), port_(port) {}
  ~ListenSocket() override { world_.wire().stop_listening(rank_, port_); }
  ssize_t send(const iovec*, size_t) override { return -ENOTCONN; }
  ssize_t receive(const iovec*, size_t) override { return -ENOTCONN; }
  Result<std::unique_ptr<Socket>> accept() override {
    auto connection = world_.wire().accept(rank_, port_);
    if (!connection) return std::unique_ptr<Socket>();
    return std::unique_ptr<Socket>(
        std::make_unique<StreamSocket>(world_, std::move(connection), 1));
  }
  std::string local_host() const override { return World::address_of({rank_}); }
  uint16_t local_port() const override { return port_; }
  std::string peer() const override { return "nobody"; }
  uint32_t events() const override {
    return world_.wire().has_caller(rank_, port_) ? static_cast<uint32_t>(EPOLLIN) : 0u;
  }

 private:
  World::Impl& world_;
  uint32_t rank_;
  uint16_t port_;
};

class SimReactor final : public Reactor {
 public:
  SimReactor(World::Impl& world, uint32_t rank) : world_(world), rank_(rank) {}

  Result<void> add(Socket& socket, uint32_t events, Handler* handler) override {
    auto* known = dynamic_cast<SimSocket*>(&socket.carrier());
    WEFT_CHECK(known != nullptr);
    places_.push_back({&socket, known, events, handler});
    return {};
  }
  void modify(Socket& socket, uint32_t events, Handler* handler) override {
    auto found = std::find_if(places_.begin(), places_.end(),
                              [&](const Place& place) { return place.socket == &socket; });
    WEFT_CHECK(found != places_.end());
    found->events = events;
    found->handler = handler;
  }
  void remove(Socket& socket) override {
    std::erase_if(places_, [&](const Place& place) { return place.socket == &socket; });
    ++generation_;
  }
  bool run_once(Nanos timeout) override {
    if (!world_.wait(rank_, *this, timeout)) return false;
    woken_ = false;
    if (places_.empty()) return false;
    // Whoever comes first is left to chance.
    std::vector<Place> round = places_;
    size_t first = world_.wire().rng().below(round.size());
    uint64_t generation = generation_;
    bool any = false;
    for (size_t i = 0; i < round.size(); ++i) {
      const Place& place = round[(first + i) % round.size()];
      uint32_t ready = ready_events(place);
      if (ready == 0) continue;
      any = true;
      place.handler->on_events(ready);
      if (generation != generation_) return true;
    }
    return any;
  }
  void wake() override { woken_ = true; }

  bool has_reason_to_run() const {
    return woken_ || std::any_of(places_.begin(), places_.end(),
                                 [](const Place& place) { return ready_events(place) != 0; });
  }

 private:
  struct Place {
    Socket* socket;
    SimSocket* carrier;
    uint32_t events;
    Handler* handler;
  };
  static uint32_t ready_events(const Place& place) {
    uint32_t ready = place.carrier->events() & (place.events | EPOLLERR | EPOLLHUP);
    if (place.socket->in_memory()) ready |= place.socket->memory_events(place.events, false);
    return ready;
  }

  World::Impl& world_;
  uint32_t rank_;
  std::vector<Place> places_;
  uint64_t generation_ = 0;
  std::atomic<bool> woken_ = false;
};

class RankNetwork final : public Network, private Clock {
 public:
  RankNetwork(World::Impl& world, uint32_t rank) : world_(world), rank_(rank) {}

  Result<std::unique_ptr<Socket>> listen(const std::string& host, uint16_t port) override {
    if (host != World::address_of({rank_}) || !world_.alive(rank_))
      return io_error(EADDRNOTAVAIL, "cannot listen on %s", host.c_str());
    if (port == 0) port = world_.wire().free_port(rank_);
    if (!world_.wire().listen(rank_, port))
      return io_error(EADDRINUSE, "cannot listen on %s:%u", host.c_str(), unsigned{port});
    return std::unique_ptr<Socket>(std::make_unique<ListenSocket>(world_, rank_, port));
  }
  Result<std::unique_ptr<Socket>> connect(const std::string& host, uint16_t port) override {
    if (!world_.alive(rank_)) return io_error(ENETDOWN, "cannot connect to %s", host.c_str());
    for (uint32_t other = 0; other < world_.options().ranks; ++other)
      if (host == World::address_of({other}))
        return std::unique_ptr<Socket>(
            std::make_unique<StreamSocket>(world_, world_.wire().call(rank_, other, port), 0));
    return error(Code::not_found, "cannot find host \"%s\"", host.c_str());
  }
  Result<std::unique_ptr<Reactor>> reactor() override {
    return std::unique_ptr<Reactor>(std::make_unique<SimReactor>(world_, rank_));
  }
  const Clock& clock() const override { return *this; }
  std::string machine() const override { return {}; }

 private:
  Nanos now() const override { return world_.now(rank_); }

  World::Impl& world_;
  uint32_t rank_;
};

// ---- turns -------------------------------------------------------------------------------

bool World::Impl::wait(uint32_t rank, SimReactor& reactor, Nanos timeout) {
  Place& place = places_[rank];
  bool inside = current_ == rank;
  if (inside && wire_.alive(rank)) {
    ++place.waits;
    for (const Fault& fault : options_.faults)
      if ((fault.kind == Fault::Kind::death || fault.kind == Fault::Kind::power_loss) &&
          fault.rank == rank && fault.at == place.waits)
        wire_.die(rank, fault.kind == Fault::Kind::power_loss);
  }
  if (inside && wire_.alive(rank)) {
    place.waiting = &reactor;
    bool never = timeout.count >= kForever.count - wire_.now().count;
    place.deadline = never ? kForever : wire_.now() + std::max(timeout, Nanos{0});
    place.fiber->yield();
    place.waiting = nullptr;
  }
  if (wire_.alive(rank)) return true;
  place.ahead += std::clamp(timeout, kTurn, Nanos::from_seconds(1));
  if (inside && ++place.waits_after_death > kWaitsAfterDeath) throw Gone{};
  return false;
}

bool World::Impl::is_ready(uint32_t rank) {
  Place& place = places_[rank];
  if (place.fiber->finished()) return false;
  if (place.waiting != nullptr && place.deadline > wire_.now() &&
      !place.waiting->has_reason_to_run())
    return false;
  if (wire_.active(Fault::Kind::stop, rank) != nullptr) return false;
  const Fault* slow = wire_.active(Fault::Kind::slow, rank);
  if (slow != nullptr && !std::exchange(place.delayed, true)) {
    auto bound = static_cast<uint64_t>(slow->amount.count) + 1;
    Nanos delay{static_cast<int64_t>(wire_.rng().below(bound))};
    place.not_before = wire_.now() + delay;
    wire_.after(delay, [] {});
  }
  return slow == nullptr || wire_.now() >= place.not_before;
}

bool World::Impl::stopped_for_ever(uint32_t rank) const {
  const Fault* stop = wire_.active(Fault::Kind::stop, rank);
  return stop != nullptr && stop->until == kForever;
}

void World::Impl::resume(uint32_t rank) {
  Place& place = places_[rank];
  place.delayed = false;
  current_ = rank;
  place.fiber->resume();
  current_.reset();
  if (place.fiber->finished()) wire_.note("returns", rank);
}

// Nobody can go on, or it took too long: says who waits, and lets everyone find out that the
// world is gone.
void World::Impl::end(const char* why, Outcome& outcome) {
  outcome.complete = false;
  outcome.report = text("%s after %s and %llu turns:", why, format_duration(outcome.took).c_str(),
                        static_cast<unsigned long long>(outcome.steps));
  for (uint32_t rank = 0; rank < options_.ranks; ++rank) {
    if (places_[rank].fiber->finished()) continue;
    outcome.report += text(" rank %u is in its wait %llu;", rank,
                           static_cast<unsigned long long>(places_[rank].waits));
  }
}

Outcome World::Impl::run(std::vector<std::function<void()>> bodies) {
  WEFT_CHECK(bodies.size() == options_.ranks && !current_);
  for (uint32_t rank = 0; rank < options_.ranks; ++rank)
    places_[rank].fiber = std::make_unique<Fiber>([body = std::move(bodies[rank])] {
      try {
        body();
      } catch (const Gone&) {
        return;
      }
    });
  Outcome outcome;
  outcome.complete = true;
  Nanos began = wire_.now();
  std::vector<uint32_t> ready;
  for (;;) {
    outcome.took = wire_.now() - began;
    bool unfinished = false;
    ready.clear();
    for (uint32_t rank = 0; rank < options_.ranks; ++rank) {
      unfinished = unfinished || (!places_[rank].fiber->finished() && !stopped_for_ever(rank));
      if (is_ready(rank)) ready.push_back(rank);
    }
    if (!unfinished) break;
    if (++outcome.steps > options_.steps_max || outcome.took > options_.time_max) {
      end("not finished", outcome);
      break;
    }
    if (!ready.empty()) {
      wire_.advance_to(wire_.now() + kTurn +
                       Nanos{static_cast<int64_t>(wire_.rng().below(kTurnChance))});
      resume(ready[wire_.rng().below(ready.size())]);
      continue;
    }
    Nanos next = wire_.next_event().value_or(kForever);
    for (const Place& place : places_)
      if (!place.fiber->finished() && place.waiting != nullptr && place.deadline > wire_.now())
        next = std::min(next, place.deadline);
    if (next == kForever) {
      end("everyone waits for ever", outcome);
      break;
    }
    wire_.advance_to(next);
  }
  for (uint32_t rank = 0; rank < options_.ranks; ++rank)
    outcome.died.push_back(!wire_.alive(rank) || !places_[rank].fiber->finished());
  for (uint32_t rank = 0; rank < options_.ranks; ++rank) {
    if (places_[rank].fiber->finished()) continue;
    wire_.die(rank, false);
    resume(rank);
    WEFT_CHECK(places_[rank].fiber->finished());
  }
  return outcome;
}

// ---- the world ---------------------------------------------------------------------------

World::World(Options options) : impl_(std::make_unique<Impl>(std::move(options))) {
  for (uint32_t rank = 0; rank < impl_->options().ranks; ++rank)
    impl_->networks.push_back(std::make_unique<RankNetwork>(*impl_, rank));
}

World::~World() = default;

Network& World::network_of(Rank rank) { return *impl_->networks.at(rank.index); }
std::string World::address_of(Rank rank) { return kNet + std::to_string(rank.index + 1); }
Outcome World::run(std::vector<std::function<void()>> ranks) {
  return impl_->run(std::move(ranks));
}
void World::doom(Rank rank, uint64_t waits, bool silently) {
  impl_->doom(rank.index, waits, silently);
}
std::optional<Nanos> World::died(Rank rank) const { return impl_->wire().died(rank.index); }
std::optional<std::pair<Rank, Rank>> World::ends_of(uint64_t connection) const {
  return impl_->wire().ends_of(connection);
}
uint64_t World::course() const { return impl_->wire().course(); }
std::string World::lines() const { return impl_->wire().lines(); }

// ---- faults ------------------------------------------------------------------------------

std::string to_text(const Fault& fault) {
  static constexpr const char* kNames[] = {"spike",     "partition", "stop",  "slow",      "reset",
                                           "half_open", "corrupt",   "death", "power_loss"};
  std::string out = kNames[static_cast<size_t>(fault.kind)];
  switch (fault.kind) {
    case Fault::Kind::spike:
    case Fault::Kind::partition:
    case Fault::Kind::stop:
    case Fault::Kind::slow:
      out += text(" of rank %u", fault.rank);
      if (fault.other != kEveryone) out += text(" and rank %u", fault.other);
      out += text(" from %.3f ms", fault.from.millis());
      if (fault.until != kForever) out += text(" to %.3f ms", fault.until.millis());
      if (fault.amount.count > 0) out += text(" by %.3f ms", fault.amount.millis());
      return out;
    case Fault::Kind::reset:
    case Fault::Kind::half_open:
    case Fault::Kind::corrupt:
      return out + text(" of connection %llu at byte %llu%s",
                        static_cast<unsigned long long>(fault.connection),
                        static_cast<unsigned long long>(fault.at), fault.reverse ? " back" : "");
    case Fault::Kind::death:
    case Fault::Kind::power_loss:
      return out + text(" of rank %u at wait %llu", fault.rank,
                        static_cast<unsigned long long>(fault.at));
  }
  return out;
}

Fault random_fault(Rng& rng, uint32_t ranks, Nanos horizon, uint64_t connections, uint64_t bytes) {
  // Small numbers as often as large ones: much happens at the beginning.
  auto below = [&](uint64_t bound) {
    uint64_t shrunk = bound >> rng.below(16);
    return rng.below(std::max<uint64_t>(shrunk, 1));
  };
  auto moment = [&](Nanos bound) {
    return Nanos{static_cast<int64_t>(below(static_cast<uint64_t>(bound.count)))};
  };
  Fault fault;
  fault.kind = static_cast<Fault::Kind>(rng.below(9));
  fault.rank = static_cast<uint32_t>(rng.below(ranks));
  if (ranks > 1 && rng.below(2) == 0)
    fault.other = static_cast<uint32_t>((fault.rank + 1 + rng.below(ranks - 1)) % ranks);
  fault.from = moment(horizon);
  fault.until = rng.below(2) == 0 ? kForever : fault.from + moment(horizon);
  if (fault.kind == Fault::Kind::spike) fault.amount = moment(Nanos::from_millis(100));
  if (fault.kind == Fault::Kind::slow) fault.amount = moment(Nanos::from_millis(5));
  fault.connection = rng.below(std::max<uint64_t>(connections, 1));
  fault.reverse = rng.below(4) == 0;
  bool dies = fault.kind == Fault::Kind::death || fault.kind == Fault::Kind::power_loss;
  fault.at = dies ? 1 + below(4000) : below(bytes);
  return fault;
}

}  // namespace weft::net::sim
