// The door: who is let in, and what those who are not may cost.
//
// Whoever has not proved the secret is a stranger, and strangers have little: a bounded number of
// places, by the address that they come from and in all; a bounded number of admissions a second,
// beyond which they wait in the kernel's queue; a few lines of the log. When there is no place, the
// one goes that has been silent for longest. A member proves itself within a round trip, so it is
// hardly ever the one; and if it is, it calls again.
#include <sys/epoll.h>
#include <sys/resource.h>

#include <algorithm>
#include <map>
#include <utility>

#include "handshake.h"
#include "weft/join.h"

namespace weft::join {
namespace {

constexpr Nanos kPatience = Nanos::from_seconds(3);  // with a stranger
// The part of the driving thread's time that strangers may cost. Beyond it they wait in the
// kernel's queue, and when that is full, members have to call several times. Whoever proves the
// secret costs nothing; all members may call at once, so a part is kept in hand.
constexpr double kShareOfStrangers = 0.03;
constexpr Nanos kInHand = Nanos::from_millis(25);
// What takes longer was not work: another thread had the processor meanwhile.
constexpr Nanos kLongestWork = Nanos::from_micros(100);
// For so long after the last stranger the door is not watched but looked at now and then, in turns
// that are taken anyway: whoever knocks wakes nobody.
constexpr Nanos kSiege = Nanos::from_seconds(2);
constexpr Nanos kLook = Nanos::from_millis(20);
constexpr Nanos kWithoutDescriptors = Nanos::from_millis(100);

// A stranger may not take the descriptors that the program needs.
size_t places_in_all() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return 64;
  return std::clamp<size_t>(files.rlim_cur / 8, 64, 1024);
}

}  // namespace

class Acceptor::Pending final : public net::Reactor::Handler {
 public:
  Pending(Acceptor& owner, std::unique_ptr<net::Socket> socket)
      : owner_(owner),
        socket_(std::move(socket)),
        handshake_(owner.network_.system(), Handshake::Role::acceptor, owner.secret_, Hello{},
                   &owner.identity_),
        since_(owner.network_.clock().now()) {}

  // Goes on as far as the connection allows; true when it is over, one way or the other.
  bool advance() {
    auto finished = handshake_.advance(*socket_);
    if (finished && !*finished) return false;
    owner_.finish(this, finished ? Result<Hello>(handshake_.hello()) : std::move(finished).error());
    return true;
  }

  void on_events(uint32_t) override {
    Nanos began = owner_.network_.clock().now();
    if (!advance()) owner_.reactor_.modify(*socket_, wanted_events(), this);
    cost(owner_.network_.clock().now() - began);
  }
  // It took so much of the driving thread's time.
  void cost(Nanos time) {
    time = std::min(time, kLongestWork);
    spent_ += time;
    owner_.in_hand_ -= time;
    if (proved_) owner_.in_hand_ += std::exchange(spent_, Nanos{0});
  }
  uint32_t wanted_events() const {
    return EPOLLIN | (handshake_.wants_write() ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  }

  Acceptor& owner_;
  std::unique_ptr<net::Socket> socket_;
  size_t source_ = 0;  // a number for the address that it came from
  Handshake handshake_;
  Nanos since_;
  Nanos spent_{0};
  bool proved_ = false;
};

Acceptor::Acceptor(net::Network& network, net::Reactor& reactor,
                   std::shared_ptr<net::Socket> listener, std::string secret, Identity identity,
                   OnConnection on_connection)
    : network_(network),
      reactor_(reactor),
      listener_(std::move(listener)),
      secret_(std::move(secret)),
      identity_(std::move(identity)),
      on_connection_(std::move(on_connection)),
      places_(places_in_all()),
      in_hand_(kInHand),
      counted_at_(network.clock().now()) {
  watch();
}

Acceptor::~Acceptor() {
  if (watched_) reactor_.remove(*listener_);
  for (auto& pending : pending_) reactor_.remove(*pending->socket_);
  refusals_.sum_up();
}

uint16_t Acceptor::port() const { return listener_->local_port(); }

void Acceptor::watch() {
  if (watched_) return;
  auto added = reactor_.add(*listener_, EPOLLIN, this);
  watched_ = added.ok();
  if (!added) lack(std::move(added).error());
}

void Acceptor::rest(Nanos time) {
  rests_until_ = network_.clock().now() + time;
  if (watched_) reactor_.remove(*listener_);
  watched_ = false;
}

// This process may not have more. Whoever calls waits in the kernel's queue meanwhile.
void Acceptor::lack(Error error) {
  if (!problem_) WEFT_LOG(join, warn, "%s; whoever calls has to wait", error.message().c_str());
  problem_ = std::move(error);
  rest(kWithoutDescriptors);
}

void Acceptor::on_events(uint32_t) {
  Nanos now = network_.clock().now();
  take_callers(now);
  if (now < besieged_until_ && !rests_until_) rest(kLook);
}

void Acceptor::take_callers(Nanos now) {
  Nanos passed = std::max(Nanos{0}, now - counted_at_);
  in_hand_ =
      std::min(kInHand, in_hand_ + Nanos::from_seconds(passed.seconds() * kShareOfStrangers));
  counted_at_ = now;
  // As many as there are and may be. Were it a fixed number a turn, a thread that comes to a turn
  // late, on a machine with other work, would let the kernel's queue grow to seconds.
  for (;;) {
    if (in_hand_ <= Nanos{0}) return rest(kLook);
    Nanos began = network_.clock().now();
    auto accepted = listener_->accept();
    // A stranger who says nothing has what is missing here.
    if (!accepted && evict(std::nullopt)) accepted = listener_->accept();
    if (!accepted) return lack(std::move(accepted).error());
    if (!*accepted) return;
    Pending* caller = admit(std::move(*accepted));
    Nanos took = network_.clock().now() - began;
    if (caller != nullptr)
      caller->cost(took);
    else
      in_hand_ -= std::min(took, kLongestWork);
    if (rests_until_) return;
  }
}

// Null for one that is gone already.
Acceptor::Pending* Acceptor::admit(std::unique_ptr<net::Socket> socket) {
  pending_.push_back(std::make_unique<Pending>(*this, std::move(socket)));
  Pending* raw = pending_.back().get();
  // The challenge goes out at once, and whoever has hung up already is never watched.
  if (raw->advance()) return nullptr;
  raw->source_ = std::hash<std::string>{}(raw->socket_->peer_host());
  make_room(raw->source_);
  if (pending_.back().get() != raw) return nullptr;
  auto added = reactor_.add(*raw->socket_, raw->wanted_events(), raw);
  if (added) {
    problem_.reset();
    return raw;
  }
  std::erase_if(pending_, [&](const auto& held) { return held.get() == raw; });
  lack(std::move(added).error());
  return nullptr;
}

void Acceptor::make_room(size_t source) {
  auto own = static_cast<size_t>(std::count_if(
      pending_.begin(), pending_.end(), [&](auto& held) { return held->source_ == source; }));
  if (own > places_ / 2) {
    evict(source);
    return;
  }
  if (pending_.size() <= places_) return;
  std::map<size_t, size_t> held;
  for (auto& pending : pending_) ++held[pending->source_];
  auto most = std::max_element(held.begin(), held.end(),
                               [](auto& a, auto& b) { return a.second < b.second; });
  evict(most->first);
}

// The one goes that came first of those that have said nothing; if all have spoken, the first.
// Without a source: of all, and only one that is silent.
bool Acceptor::evict(std::optional<size_t> source) {
  Pending* victim = nullptr;
  for (auto& pending : pending_) {
    if (source && pending->source_ != *source) continue;
    if (pending->handshake_.silent()) {
      victim = pending.get();
      break;
    }
    if (source && victim == nullptr) victim = pending.get();
  }
  if (victim == nullptr) return false;
  finish(victim, error(Code::timeout, "did not prove the secret, and others came"));
  return true;
}

void Acceptor::finish(Pending* pending, Result<Hello> outcome) {
  auto found = std::find_if(pending_.begin(), pending_.end(),
                            [&](const auto& held) { return held.get() == pending; });
  WEFT_CHECK(found != pending_.end());
  // The caller is a member function of *pending: it must outlive this call. If there is no memory
  // for its place, it stays as it is.
  ended_.emplace_back();
  ended_.back() = std::move(*found);
  pending_.erase(found);
  reactor_.remove(*pending->socket_);
  std::unique_ptr<net::Socket> socket = std::move(pending->socket_);
  if (outcome) socket = pending->handshake_.finished(std::move(socket));
  if (!outcome) {
    besieged_until_ = network_.clock().now() + kSiege;
    refuse(*socket, "", "it " + outcome.error().message());
    return;
  }
  pending->proved_ = true;
  if (auto taken = on_connection_(socket, *outcome); !taken) {
    // Who refuses does not take it.
    refuse(*socket, text(" (rank %u)", outcome->rank), taken.error().message());
  }
}

void Acceptor::refuse(const net::Socket& socket, const std::string& rank, const std::string& why) {
  ++refused_;
  if (refusals_.may_say(network_.clock().now()))
    WEFT_LOG(join, warn, "refused a connection from %s%s: %s", socket.peer().c_str(), rank.c_str(),
             why.c_str());
  else
    refusals_.count(socket.peer_host());
}

void Acceptor::tick(Nanos now) {
  ended_.clear();
  // They are in the order in which they came. If it was this thread that did not come to them,
  // their proof is here by now.
  while (!pending_.empty() && now - pending_.front()->since_ > kPatience) {
    Pending* first = pending_.front().get();
    if (!first->advance())
      finish(first, error(Code::timeout, "did not prove the secret within %s",
                          format_duration(kPatience).c_str()));
  }
  if (rests_until_ && now >= *rests_until_) {
    rests_until_.reset();
    if (now < besieged_until_) {
      take_callers(now);
      if (!rests_until_) rest(kLook);
    } else {
      watch();
    }
  }
  refusals_.tick(now);
  log_flush();
}

// ---- what the log says of them -----------------------------------------------------------

bool Refusals::may_say(Nanos now) {
  tick(now);
  if (!since_) since_ = now;
  return said_++ < kLinesPerSecond;
}

void Refusals::count(std::string host) {
  ++more_;
  if (hosts_.size() < kHosts) hosts_.insert(std::move(host));
}

void Refusals::tick(Nanos now) {
  if (!since_ || now - *since_ < Nanos::from_seconds(1)) return;
  sum_up();
  since_.reset();
  said_ = 0;
}

void Refusals::sum_up() {
  if (more_ == 0) return;
  WEFT_LOG(join, warn, "refused %llu more connections from %s%zu address%s within a second",
           static_cast<unsigned long long>(more_), hosts_.size() < kHosts ? "" : "at least ",
           hosts_.size(), hosts_.size() == 1 ? "" : "es");
  more_ = 0;
  hosts_.clear();
}

}  // namespace weft::join
