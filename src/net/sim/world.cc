#include <sys/epoll.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <new>

#include "shm/name.h"
#include "sim/account.h"
#include "sim/fiber.h"
#include "sim/memory.h"
#include "sim/wire.h"
#include "weft/net.h"

namespace weft::net::sim {
namespace {

constexpr Nanos kTurn = Nanos::from_micros(0.2);  // a turn takes at least this long
constexpr uint64_t kTurnChance = 2000;            // and up to so many nanoseconds more
constexpr uint64_t kWaitsAfterDeath = 200'000;    // then it is told to end by force
constexpr const char* kNet = "10.0.0.";
constexpr const char* kLoopback = "127.0.0.1";
constexpr uint16_t kLoopbackPorts = 50'000;  // from here on: no rank's own

struct Gone {};  // unwinds a rank that does not notice that it is dead

}  // namespace

// What a reactor of the simulation can watch.
class Source {
 public:
  virtual ~Source() = default;
  virtual uint32_t events() const = 0;
};

class SimReactor;

class World::Impl {
 public:
  explicit Impl(Options options)
      : options_(std::move(options)), wire_(options_), memories_(options_) {
    for (uint32_t rank = 0; rank < options_.ranks; ++rank) add_place(rank);
    waits_.resize(options_.ranks);
    ahead_.resize(options_.ranks);
    asked_.resize(options_.ranks);
    refused_.resize(options_.ranks);
    file_requests_.resize(options_.ranks);
    refused_files_.resize(options_.ranks);
    for (uint32_t rank = 0; rank < options_.ranks; ++rank) accounts_.push_back({this, rank, 0});
  }

  // A stack of its own: a rank's, and behind those of all ranks, one for each task.
  struct Place {
    uint32_t rank = 0;
    bool task = false;
    uint64_t waits = 0;
    uint64_t waits_after_death = 0;
    bool ends = false;  // it is told to, by force
    std::unique_ptr<Fiber> fiber;
    // What it waits for, if it does: events, or the end of a task.
    SimReactor* waiting = nullptr;
    const Place* awaited = nullptr;
    Nanos deadline{0};
    bool delayed = false;
    Nanos not_before{0};
  };

  // A rank waits. False if it is dead.
  bool wait(uint32_t rank, SimReactor& reactor, Nanos timeout) {
    return sleep(rank, &reactor, nullptr, timeout);
  }
  Place& start_task(uint32_t rank, std::function<void()> body);
  bool finish(Place& task, Nanos patience);
  Outcome run(std::vector<std::function<void()>> bodies);
  Nanos now(uint32_t rank) const { return wire_.now() + ahead_[rank]; }
  bool alive(uint32_t rank) const { return wire_.alive(rank); }
  void doom(uint32_t rank, uint64_t waits, bool silently) {
    Fault fault;
    fault.kind = silently ? Fault::Kind::power_loss : Fault::Kind::death;
    fault.rank = rank;
    fault.at = waits_[rank] + waits;
    options_.faults.push_back(fault);
  }
  // A rank asks its system for something. False if it does not get it.
  bool may_have(uint32_t rank) {
    uint64_t number = ++asked_[rank];
    for (const Fault& fault : options_.faults) {
      if (fault.kind != Fault::Kind::refusal || fault.rank != rank || fault.at != number) continue;
      refused_[rank] = true;
      wire_.note("refuses", rank, number);
      return false;
    }
    return true;
  }
  bool refused(uint32_t rank) const { return refused_[rank]; }
  Account& account_of(uint32_t rank) { return accounts_[rank]; }
  // A rank asks for memory. False if it does not get it.
  bool may_allocate(Account& account) {
    uint64_t number = ++account.asked;
    for (const Fault& fault : options_.faults) {
      if (fault.kind != Fault::Kind::memory || fault.rank != account.rank || number < fault.at ||
          number - fault.at >= fault.count)
        continue;
      refused_[account.rank] = true;
      wire_.note("has no memory for", account.rank, number);
      return false;
    }
    return true;
  }
  // A rank asks for something of a file. The errno that it gets instead; 0: it gets it.
  int refuse_file(uint32_t rank, Files::Call call, size_t& bytes) {
    sleep(rank, nullptr, nullptr, Nanos{0});  // others may be first, and it may die here
    if (!wire_.alive(rank)) return EIO;
    uint64_t number = ++file_requests_[rank];
    bool moves = call == Files::Call::read || call == Files::Call::write;
    for (const Fault& fault : options_.faults) {
      if (fault.kind != Fault::Kind::file || fault.rank != rank || number < fault.at ||
          number - fault.at >= fault.count)
        continue;
      wire_.note("refuses a file", rank, number, static_cast<uint64_t>(fault.failure));
      if (fault.failure == 0) {
        if (moves) bytes = (bytes + 1) / 2;
      } else if (fault.failure != EINTR) {
        refused_files_[rank].push_back(call);
        return fault.failure;
      } else if (moves || call == Files::Call::open || call == Files::Call::sync) {
        return EINTR;
      }
    }
    return 0;
  }
  const std::vector<Files::Call>& refused_files(uint32_t rank) const {
    return refused_files_[rank];
  }
  uint64_t file_requests(uint32_t rank) const { return file_requests_[rank]; }

  // ---- the address by which ranks of one machine reach each other

  bool share_machine(uint32_t one, uint32_t other) const {
    const auto& machines = options_.machines;
    return one == other || (!machines.empty() && machines[one] == machines[other]);
  }
  std::optional<uint32_t> loopback_listener(uint32_t caller, uint16_t port) const {
    auto found = loopback_.find(port);
    if (found == loopback_.end() || !share_machine(caller, found->second)) return std::nullopt;
    return found->second;
  }
  // The port; none if it is taken.
  std::optional<uint16_t> listen_on_loopback(uint32_t rank, uint16_t port) {
    if (port == 0) port = next_loopback_port_++;
    if (!loopback_.emplace(port, rank).second) return std::nullopt;
    return port;
  }
  void leave_loopback(uint16_t port) { loopback_.erase(port); }

  Wire& wire() { return wire_; }
  Memories& memories() { return memories_; }
  const Options& options() const { return options_; }
  std::vector<std::unique_ptr<Network>> networks;  // by rank

 private:
  void die(uint32_t rank, bool silently) {
    wire_.die(rank, silently);
    memories_.die(rank);
  }
  Place& add_place(uint32_t rank);
  void prepare(Place& place, std::function<void()> body);
  bool sleep(uint32_t rank, SimReactor* reactor, const Place* awaited, Nanos timeout);
  bool is_ready(Place& place);
  bool stopped(const Place& place, bool for_ever) const;
  void resume(Place& place);
  void end(const char* why, Outcome& outcome);

  Options options_;
  Wire wire_;
  Memories memories_;
  std::vector<std::unique_ptr<Place>> places_;           // the ranks' first
  std::vector<uint64_t> waits_;                          // by rank: also those of its tasks
  std::vector<Nanos> ahead_;                             // by rank: a dead rank's clock runs away
  std::vector<uint64_t> asked_;                          // by rank
  std::vector<bool> refused_;                            // by rank
  std::vector<Account> accounts_;                        // by rank
  std::vector<uint64_t> file_requests_;                  // by rank
  std::vector<std::vector<Files::Call>> refused_files_;  // by rank
  std::map<uint16_t, uint32_t> loopback_;                // who listens, by port
  uint16_t next_loopback_port_ = kLoopbackPorts;
  Place* current_ = nullptr;
  std::string lost_process_;  // a task did what ends a process
};

// ---- what a rank sees --------------------------------------------------------------------

class StreamSocket final : public Socket, public Source {
 public:
  StreamSocket(World::Impl& world, std::shared_ptr<Connection> connection, size_t side)
      : world_(world), connection_(std::move(connection)), side_(side) {}
  ~StreamSocket() override { shut(); }
  ssize_t send(const iovec* parts, size_t count) override {
    Charge nobody(nullptr);
    return world_.wire().send(*connection_, side_, parts, count);
  }
  ssize_t receive(const iovec* parts, size_t count) override {
    Charge nobody(nullptr);
    return world_.wire().receive(*connection_, side_, parts, count);
  }
  int connect_outcome() override { return connection_->failures[side_]; }
  std::string local_host() const override { return address_of(side_); }
  std::string peer() const override { return address_of(1 - side_); }
  void shut() override {
    Charge nobody(nullptr);
    world_.wire().close(*connection_, side_);
  }
  uint32_t events() const override { return world_.wire().events(*connection_, side_); }

 private:
  std::string address_of(size_t side) const {
    return connection_->loopback ? kLoopback : World::address_of({connection_->ranks[side]});
  }

  World::Impl& world_;
  std::shared_ptr<Connection> connection_;
  size_t side_;
};

class ListenSocket final : public Socket, public Source {
 public:
  ListenSocket(World::Impl& world, uint32_t rank, uint16_t port, bool loopback)
      : world_(world), rank_(rank), port_(port), loopback_(loopback) {}
  ~ListenSocket() override {
    Charge nobody(nullptr);
    if (loopback_) world_.leave_loopback(port_);
    world_.wire().stop_listening(rank_, port_);
  }
  ssize_t send(const iovec*, size_t) override { return -ENOTCONN; }
  ssize_t receive(const iovec*, size_t) override { return -ENOTCONN; }
  Result<std::unique_ptr<Socket>> accept() override {
    Charge nobody(nullptr);
    if (!world_.wire().has_caller(rank_, port_)) return std::unique_ptr<Socket>();
    if (!world_.may_have(rank_)) return own_error(EMFILE, "cannot take a connection");
    auto connection = world_.wire().accept(rank_, port_);
    if (!connection) return std::unique_ptr<Socket>();
    return std::unique_ptr<Socket>(
        std::make_unique<StreamSocket>(world_, std::move(connection), 1));
  }
  std::string local_host() const override {
    return loopback_ ? kLoopback : World::address_of({rank_});
  }
  uint16_t local_port() const override { return port_; }
  std::string peer() const override { return "nobody"; }
  uint32_t events() const override {
    return world_.wire().has_caller(rank_, port_) ? static_cast<uint32_t>(EPOLLIN) : 0u;
  }

 private:
  World::Impl& world_;
  uint32_t rank_;
  uint16_t port_;
  bool loopback_;
};

class SimReactor final : public Reactor {
 public:
  SimReactor(World::Impl& world, uint32_t rank) : world_(world), rank_(rank) {}

  Result<void> add(Socket& socket, uint32_t events, Handler* handler) override {
    Charge nobody(nullptr);
    auto* known = dynamic_cast<Source*>(&socket.carrier());
    WEFT_CHECK(known != nullptr);
    if (!world_.may_have(rank_)) return own_error(ENOSPC, "cannot watch a connection");
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
  // As the kernel's: what waits in memory is asked for before the wait, and during it only bells
  // are heard.
  bool run_once(Nanos timeout) override {
    Charge nobody(nullptr);
    Account* caller = nobody.before();
    bool any = world_.alive(rank_) && ask_memory(false, caller);
    if (!any && timeout.count > 0 && world_.alive(rank_)) any = ask_memory(true, caller);
    if (!world_.wait(rank_, *this, any ? Nanos{0} : timeout)) return any;
    woken_ = false;
    return call_handlers([](const Place& place) { return kernel_events(place); }, caller) || any;
  }
  void wake() override { woken_ = true; }

  bool has_reason_to_run() const {
    return woken_ || std::any_of(places_.begin(), places_.end(),
                                 [](const Place& place) { return kernel_events(place) != 0; });
  }

 private:
  struct Place {
    Socket* socket;
    Source* carrier;
    uint32_t events;
    Handler* handler;
  };
  // The connection beside shared memory only rings: its room does not matter.
  static uint32_t kernel_events(const Place& place) {
    uint32_t wanted = place.socket->shared() ? static_cast<uint32_t>(EPOLLIN) : place.events;
    return place.carrier->events() & (wanted | EPOLLERR | EPOLLHUP);
  }
  bool ask_memory(bool sleeping, Account* caller) {
    return call_handlers(
        [&](const Place& place) {
          return place.socket->in_memory() ? place.socket->memory_events(place.events, sleeping)
                                           : 0u;
        },
        caller);
  }
  template <typename Ready>
  bool call_handlers(const Ready& ready_events, Account* caller) {
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
      {
        Charge again(caller);
        place.handler->on_events(ready);
      }
      if (generation != generation_) return true;
    }
    return any;
  }

  World::Impl& world_;
  uint32_t rank_;
  std::vector<Place> places_;
  uint64_t generation_ = 0;
  std::atomic<bool> woken_ = false;
};

class SimBell final : public Bell, public Source {
 public:
  void ring() override { rung_ = true; }
  void quiet() override { rung_ = false; }
  uint32_t events() const override { return rung_ ? static_cast<uint32_t>(EPOLLIN) : 0u; }

 private:
  bool rung_ = false;
};

class SimTask final : public Task {
 public:
  SimTask(World::Impl& world, World::Impl::Place& place, uint32_t number)
      : world_(world), place_(place), number_(number) {}
  std::string name() const override { return text("task %u", number_); }
  bool finish(Nanos patience) override {
    Charge nobody(nullptr);
    return world_.finish(place_, patience);
  }

 private:
  World::Impl& world_;
  World::Impl::Place& place_;
  uint32_t number_;
};

class SimFiles final : public Files {
 public:
  SimFiles(World::Impl& world, uint32_t rank) : world_(world), rank_(rank) {}

 private:
  int refusal(Call call, size_t& bytes) override {
    Charge nobody(nullptr);
    return world_.refuse_file(rank_, call, bytes);
  }

  World::Impl& world_;
  uint32_t rank_;
};

class RankNetwork final : public Network, private System, private Clock {
 public:
  RankNetwork(World::Impl& world, uint32_t rank)
      : world_(world), rank_(rank), files_(world, rank) {}

  Result<std::unique_ptr<Socket>> listen(const std::string& host, uint16_t port) override {
    Charge nobody(nullptr);
    bool loopback = host == kLoopback;
    if ((!loopback && host != World::address_of({rank_})) || !world_.alive(rank_))
      return io_error(EADDRNOTAVAIL, "cannot listen on %s", host.c_str());
    if (!world_.may_have(rank_)) return own_error(EMFILE, "cannot make a socket");
    std::optional<uint16_t> own = port;
    if (loopback)
      own = world_.listen_on_loopback(rank_, port);
    else if (port == 0)
      own = world_.wire().free_port(rank_);
    if (!own || !world_.wire().listen(rank_, *own))
      return io_error(EADDRINUSE, "cannot listen on %s:%u", host.c_str(), unsigned{port});
    return std::unique_ptr<Socket>(std::make_unique<ListenSocket>(world_, rank_, *own, loopback));
  }
  Result<std::unique_ptr<Socket>> connect(const std::string& host, uint16_t port) override {
    Charge nobody(nullptr);
    if (!world_.alive(rank_)) return io_error(ENETDOWN, "cannot connect to %s", host.c_str());
    if (!world_.may_have(rank_)) return own_error(EMFILE, "cannot make a socket");
    auto called = [&](uint32_t other) {
      auto connection = world_.wire().call(rank_, other, port);
      connection->loopback = host == kLoopback;
      return std::unique_ptr<Socket>(
          std::make_unique<StreamSocket>(world_, std::move(connection), 0));
    };
    // Where nobody listens, this machine itself says so.
    if (host == kLoopback) return called(world_.loopback_listener(rank_, port).value_or(rank_));
    for (uint32_t other = 0; other < world_.options().ranks; ++other)
      if (host == World::address_of({other})) return called(other);
    return error(Code::not_found, "cannot find host \"%s\"", host.c_str());
  }
  Result<std::unique_ptr<Reactor>> reactor() override {
    Charge nobody(nullptr);
    if (!world_.may_have(rank_)) return own_error(EMFILE, "cannot wait for connections");
    return std::unique_ptr<Reactor>(std::make_unique<SimReactor>(world_, rank_));
  }
  const Clock& clock() const override { return *this; }
  std::string machine() const override { return world_.memories().machine_of(rank_); }
  System& system() override { return *this; }

 private:
  Result<std::unique_ptr<Bell>> bell() override {
    Charge nobody(nullptr);
    if (!world_.may_have(rank_)) return own_error(EMFILE, "cannot make a bell");
    return std::unique_ptr<Bell>(std::make_unique<SimBell>());
  }
  Result<std::unique_ptr<Task>> start(std::function<void()> body) override {
    Charge nobody(nullptr);
    if (!world_.alive(rank_) || !world_.may_have(rank_))
      return own_error(EAGAIN, "cannot start a task");
    World::Impl::Place& place = world_.start_task(rank_, std::move(body));
    return std::unique_ptr<Task>(std::make_unique<SimTask>(world_, place, tasks_++));
  }
  Result<std::unique_ptr<SharedMemory>> make_memory() override {
    Charge nobody(nullptr);
    WEFT_ASSIGN(std::string name, shm::random_name(*this));
    if (!world_.may_have(rank_)) return own_error(ENOSPC, "cannot make shared memory");
    return world_.memories().make(rank_, name);
  }
  Result<std::unique_ptr<SharedMemory>> attach_memory(const std::string& name) override {
    Charge nobody(nullptr);
    if (!world_.may_have(rank_)) return own_error(EMFILE, "cannot open shared memory");
    return world_.memories().attach(rank_, name);
  }
  Result<void> random(std::span<std::byte> out) override {
    Charge nobody(nullptr);
    if (!world_.may_have(rank_)) return io_error(EAGAIN, "no random numbers");
    for (std::byte& one : out) one = static_cast<std::byte>(world_.wire().rng().below(256));
    return {};
  }
  Files& files() override { return files_; }
  Nanos now() const override { return world_.now(rank_); }

  World::Impl& world_;
  uint32_t rank_;
  SimFiles files_;
  uint32_t tasks_ = 0;
};

// ---- turns -------------------------------------------------------------------------------

World::Impl::Place& World::Impl::add_place(uint32_t rank) {
  places_.push_back(std::make_unique<Place>());
  places_.back()->rank = rank;
  return *places_.back();
}

void World::Impl::prepare(Place& place, std::function<void()> body) {
  // A rank is charged where it says so, and its tasks for all that they do.
  Account* account = place.task ? &accounts_[place.rank] : nullptr;
  place.fiber = std::make_unique<Fiber>([this, &place, account, run = std::move(body)] {
    try {
      Charge own(account);
      run();
    } catch (const Gone&) {
      return;
    } catch (const std::bad_alloc&) {
      // On a real machine this would have been the end of the process.
      if (!place.task) throw;
      lost_process_ = text("memory ran out in a task of rank %u, and nobody caught it", place.rank);
    }
  });
}

World::Impl::Place& World::Impl::start_task(uint32_t rank, std::function<void()> body) {
  Place& place = add_place(rank);
  place.task = true;
  prepare(place, std::move(body));
  wire_.note("task", rank, places_.size());
  return place;
}

// Its owner waits. A dead process has no tasks: they end here and now.
bool World::Impl::finish(Place& task, Nanos patience) {
  Nanos until = wire_.now() + patience;
  while (!task.fiber->finished() && wire_.now() < until && wire_.alive(task.rank))
    if (!sleep(task.rank, nullptr, &task, until - wire_.now())) break;
  if (!wire_.alive(task.rank) && !task.fiber->finished()) {
    task.ends = true;
    resume(task);
    WEFT_CHECK(task.fiber->finished());
  }
  return task.fiber->finished();
}

bool World::Impl::sleep(uint32_t rank, SimReactor* reactor, const Place* awaited, Nanos timeout) {
  bool inside = current_ != nullptr && current_->rank == rank;
  Place& place = inside ? *current_ : *places_[rank];
  if (inside && wire_.alive(rank)) {
    ++waits_[rank];
    ++place.waits;
    for (const Fault& fault : options_.faults) {
      if (fault.rank != rank) continue;
      if ((fault.kind == Fault::Kind::death || fault.kind == Fault::Kind::power_loss) &&
          fault.at == waits_[rank])
        die(rank, fault.kind == Fault::Kind::power_loss);
      if (fault.kind == Fault::Kind::task_end && place.task && fault.at == place.waits)
        place.ends = true;
    }
  }
  if (inside && wire_.alive(rank) && !place.ends) {
    place.waiting = reactor;
    place.awaited = awaited;
    bool never = timeout.count >= kForever.count - wire_.now().count;
    place.deadline = never ? kForever : wire_.now() + std::max(timeout, Nanos{0});
    place.fiber->yield();
    place.waiting = nullptr;
    place.awaited = nullptr;
  }
  if (place.ends || (place.task && !wire_.alive(rank))) throw Gone{};
  if (wire_.alive(rank)) return true;
  ahead_[rank] += std::clamp(timeout, kTurn, Nanos::from_seconds(1));
  if (inside && ++place.waits_after_death > kWaitsAfterDeath) throw Gone{};
  return false;
}

bool World::Impl::is_ready(Place& place) {
  if (place.fiber->finished()) return false;
  // Whoever died while it slept finds out.
  if (wire_.alive(place.rank)) {
    bool due = place.deadline <= wire_.now();
    if (place.waiting != nullptr && !due && !place.waiting->has_reason_to_run()) return false;
    if (place.awaited != nullptr && !due && !place.awaited->fiber->finished()) return false;
  }
  if (stopped(place, false)) return false;
  const Fault* slow = wire_.active(Fault::Kind::slow, place.rank);
  if (slow != nullptr && !std::exchange(place.delayed, true)) {
    auto bound = static_cast<uint64_t>(slow->amount.count) + 1;
    Nanos delay{static_cast<int64_t>(wire_.rng().below(bound))};
    place.not_before = wire_.now() + delay;
    wire_.after(delay, [] {});
  }
  return slow == nullptr || wire_.now() >= place.not_before;
}

bool World::Impl::stopped(const Place& place, bool for_ever) const {
  auto holds = [&](const Fault* fault) {
    return fault != nullptr && (!for_ever || fault->until == kForever);
  };
  return holds(wire_.active(Fault::Kind::stop, place.rank)) ||
         (place.task && holds(wire_.active(Fault::Kind::task_stop, place.rank)));
}

// From outside, or from another stack.
void World::Impl::resume(Place& place) {
  place.delayed = false;
  Place* before = std::exchange(current_, &place);
  place.fiber->resume();
  current_ = before;
  if (place.fiber->finished()) wire_.note("returns", place.rank, place.task ? 1 : 0);
}

// Nobody can go on, or it took too long: says who waits, and lets everyone find out that the
// world is gone.
void World::Impl::end(const char* why, Outcome& outcome) {
  outcome.complete = false;
  outcome.report = text("%s after %s and %llu turns:", why, format_duration(outcome.took).c_str(),
                        static_cast<unsigned long long>(outcome.steps));
  for (const auto& place : places_) {
    if (place->fiber->finished()) continue;
    outcome.report += text(" %s rank %u is in its wait %llu;", place->task ? "a task of" : "",
                           place->rank, static_cast<unsigned long long>(place->waits));
  }
}

Outcome World::Impl::run(std::vector<std::function<void()>> bodies) {
  WEFT_CHECK(bodies.size() == options_.ranks && current_ == nullptr);
  for (uint32_t rank = 0; rank < options_.ranks; ++rank)
    prepare(*places_[rank], std::move(bodies[rank]));
  Outcome outcome;
  outcome.complete = true;
  Nanos began = wire_.now();
  std::vector<Place*> ready;
  for (;;) {
    outcome.took = wire_.now() - began;
    bool unfinished = false;
    ready.clear();
    for (const auto& place : places_) {
      unfinished = unfinished || (!place->fiber->finished() && !stopped(*place, true));
      if (is_ready(*place)) ready.push_back(place.get());
    }
    if (!unfinished) break;
    if (++outcome.steps > options_.steps_max || outcome.took > options_.time_max) {
      end("not finished", outcome);
      break;
    }
    if (!ready.empty()) {
      wire_.advance_to(wire_.now() + kTurn +
                       Nanos{static_cast<int64_t>(wire_.rng().below(kTurnChance))});
      resume(*ready[wire_.rng().below(ready.size())]);
      continue;
    }
    Nanos next = wire_.next_event().value_or(kForever);
    for (const auto& place : places_)
      if (!place->fiber->finished() && (place->waiting != nullptr || place->awaited != nullptr) &&
          place->deadline > wire_.now())
        next = std::min(next, place->deadline);
    if (next == kForever) {
      end("everyone waits for ever", outcome);
      break;
    }
    wire_.advance_to(next);
  }
  for (uint32_t rank = 0; rank < options_.ranks; ++rank)
    outcome.died.push_back(!wire_.alive(rank) || !places_[rank]->fiber->finished());
  // Ranks first: they end their tasks. What is left then was left behind.
  for (size_t i = 0; i < places_.size(); ++i) {
    Place& place = *places_[i];
    if (place.fiber->finished()) continue;
    if (place.task)
      place.ends = true;
    else
      die(place.rank, false);
    resume(place);
    WEFT_CHECK(place.fiber->finished());
  }
  if (!lost_process_.empty()) {
    outcome.complete = false;
    outcome.report = lost_process_;
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
bool World::refused(Rank rank) const { return impl_->refused(rank.index); }
const std::vector<Files::Call>& World::refused_files(Rank rank) const {
  return impl_->refused_files(rank.index);
}
uint64_t World::file_requests(Rank rank) const { return impl_->file_requests(rank.index); }
uint64_t World::allocations(Rank rank) const { return impl_->account_of(rank.index).asked; }
std::optional<std::pair<Rank, Rank>> World::ends_of(uint64_t connection) const {
  return impl_->wire().ends_of(connection);
}
uint64_t World::course() const { return impl_->wire().course(); }
std::string World::lines() const { return impl_->wire().lines(); }

// ---- memory ------------------------------------------------------------------------------

namespace {
thread_local Account* charged = nullptr;
}  // namespace

Charge::Charge(Account* account) : before_(std::exchange(charged, account)) {}
Charge::~Charge() { charged = before_; }

Scarce::Scarce(World& world, Rank rank)
    : before_(std::exchange(charged, &world.impl_->account_of(rank.index))) {}
Scarce::~Scarce() { charged = static_cast<Account*>(before_); }

bool refuses_memory() noexcept {
  if (charged == nullptr) return false;
  Charge nobody(nullptr);
  return !nobody.before()->world->may_allocate(*nobody.before());
}

// ---- faults ------------------------------------------------------------------------------

std::string to_text(const Fault& fault) {
  static constexpr const char* kNames[] = {
      "spike", "partition",  "stop",      "slow",     "reset",   "half_open", "corrupt",
      "death", "power_loss", "task_stop", "task_end", "refusal", "memory",    "file"};
  std::string out = kNames[static_cast<size_t>(fault.kind)];
  switch (fault.kind) {
    case Fault::Kind::spike:
    case Fault::Kind::partition:
    case Fault::Kind::stop:
    case Fault::Kind::slow:
    case Fault::Kind::task_stop:
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
    case Fault::Kind::task_end:
    case Fault::Kind::refusal:
      return out + text(" of rank %u at %s %llu", fault.rank,
                        fault.kind == Fault::Kind::refusal ? "request" : "wait",
                        static_cast<unsigned long long>(fault.at));
    case Fault::Kind::memory:
    case Fault::Kind::file:
      out += text(" of rank %u at %s %llu", fault.rank,
                  fault.kind == Fault::Kind::file ? "request" : "allocation",
                  static_cast<unsigned long long>(fault.at));
      if (fault.kind == Fault::Kind::file)
        out += text(" (%s)", fault.failure == 0 ? "short" : std::strerror(fault.failure));
      if (fault.count == UINT64_MAX) return out + " and all after it";
      return fault.count == 1 ? out
                              : out + text(" and %llu after it",
                                           static_cast<unsigned long long>(fault.count - 1));
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
