#include <algorithm>

#include "handshake.h"
#include "weft/join.h"

namespace weft::join {

namespace {
// Handshakes that this rank carries out at a time. All ranks of a large group may call one at once,
// and its door must have a place for each.
constexpr size_t kTogether = 32;
constexpr size_t kTogetherToOne = 4;
}  // namespace

struct Links::Opening {
  Rank peer;
  std::optional<uint16_t> lane;  // none: a branch
  std::shared_ptr<lane::shm::Segment> shared;
  Dial dial;
};

Links::Links(Mesh& mesh, Callbacks callbacks) : mesh_(mesh), callbacks_(std::move(callbacks)) {
  if (!mesh_.acceptor) return;
  mesh_.acceptor->set_on_connection([this](std::unique_ptr<net::Socket>& socket,
                                           const Hello& hello) { return accept(socket, hello); });
  for (auto& [hello, socket] : std::exchange(*mesh_.early, {}))
    if (auto taken = accept(socket, hello); !taken)
      WEFT_LOG(join, warn, "refused a connection of rank %u: %s", hello.rank,
               taken.error().message().c_str());
}

Result<void> Links::accept(std::unique_ptr<net::Socket>& socket, const Hello& hello) {
  auto refuse = [](const char* why) { return error(Code::invalid_argument, "%s", why); };
  if (hello.purpose == Purpose::status) {
    if (!callbacks_.asked) return refuse("nobody here answers questions");
    callbacks_.asked(std::move(socket));
    return {};
  }
  if (hello.rank >= mesh_.ranks || hello.rank == mesh_.rank.index)
    return refuse("it is not one of the other ranks");
  if (hello.agreement != mesh_.agreement) return refuse("it belongs to another group");
  if (hello.sealed != mesh_.sealed) return refuse(sealed_differs(hello.sealed));
  const bool branch = hello.purpose == Purpose::branch && callbacks_.branched;
  if (hello.purpose != Purpose::lane && !branch) return refuse("the group is complete");
  if (hello.to != mesh_.rank.index) return refuse("it means another rank");
  if (branch) {
    WEFT_TRY(is_latest(hello, kBranch));
    callbacks_.branched({hello.rank}, std::move(socket));
    return {};
  }
  if (hello.lane >= mesh_.lanes) {
    Error none = error(Code::invalid_argument, "rank %u opened lane %u; the plan has %u lanes",
                       hello.rank, unsigned{hello.lane}, unsigned{mesh_.lanes});
    if (callbacks_.misbehaved) callbacks_.misbehaved({hello.rank}, none);
    return none;
  }
  WEFT_TRY(is_latest(hello, hello.lane));
  std::shared_ptr<lane::shm::Segment> shared;
  if (!hello.shared.empty() && mesh_.members[hello.rank].shares_memory) {
    auto attached = lane::shm::attach(mesh_.network->system(), hello.shared);
    if (attached)
      shared = std::move(*attached);
    else
      WEFT_LOG(join, info, "rank %u: no shared memory, so TCP: %s", hello.rank,
               attached.error().message().c_str());
  }
  callbacks_.accepted({hello.rank}, hello.lane, std::move(socket), std::move(shared));
  return {};
}

// A lane is opened again when it broke, which this side may not know yet: the later attempt is the
// one that its sender uses. An earlier one that comes late was given up on the way.
Result<void> Links::is_latest(const Hello& hello, uint16_t lane) {
  const std::string what = lane == kBranch ? "its branch" : text("lane %u", unsigned{lane});
  auto [place, first] = accepted_.try_emplace({hello.rank, lane}, hello.attempt);
  if (first) return {};
  if (hello.attempt == place->second) {
    Error twice = error(Code::invalid_argument, "rank %u opened %s twice in one attempt",
                        hello.rank, what.c_str());
    if (callbacks_.misbehaved) callbacks_.misbehaved({hello.rank}, twice);
    return twice;
  }
  if (hello.attempt < place->second)
    return error(Code::invalid_argument, "it was given up: a later connection is %s", what.c_str());
  place->second = hello.attempt;
  return {};
}

Links::~Links() {
  if (!mesh_.acceptor) return;
  mesh_.acceptor->set_on_connection(
      [](std::unique_ptr<net::Socket>&, const Hello&) -> Result<void> {
        return error(Code::cancelled, "the group is closing");
      });
}

Hello Links::hello_to(Rank peer, Purpose purpose) const {
  const Member& member = mesh_.members[peer.index];
  Hello hello;
  hello.purpose = purpose;
  hello.rank = mesh_.rank.index;
  hello.ranks = mesh_.ranks;
  hello.agreement = mesh_.agreement;
  hello.to = peer.index;
  hello.place = place_of(member.address, member.port);
  hello.sealed = mesh_.sealed;
  return hello;
}

void Links::open_branch(Rank peer) {
  const Member& member = mesh_.members[peer.index];
  openings_.push_back(std::unique_ptr<Opening>(
      new Opening{peer, std::nullopt, nullptr,
                  Dial(*mesh_.network, *mesh_.reactor, member.address, member.port, mesh_.secret,
                       hello_to(peer, Purpose::branch), mesh_.attempts)}));
  begin_some(mesh_.network->clock().now());
}

void Links::open(Rank peer, uint16_t lane) {
  const Member& member = mesh_.members[peer.index];
  Hello hello = hello_to(peer, Purpose::lane);
  hello.lane = lane;
  std::shared_ptr<lane::shm::Segment> shared;
  if (member.shares_memory) {
    auto made = lane::shm::make(mesh_.network->system());
    if (made) {
      shared = std::move(*made);
      hello.shared = lane::shm::name_of(*shared);
    } else {
      // It works, only slower: said once and not for every lane.
      if (!std::exchange(told_no_memory_, true))
        WEFT_LOG(join, warn, "rank %u: no shared memory, so TCP: %s", peer.index,
                 made.error().message().c_str());
    }
  }
  openings_.push_back(std::unique_ptr<Opening>(
      new Opening{peer, lane, std::move(shared),
                  Dial(*mesh_.network, *mesh_.reactor, member.address, member.port, mesh_.secret,
                       std::move(hello), mesh_.attempts)}));
  begin_some(mesh_.network->clock().now());
}

void Links::begin_some(Nanos now) {
  std::map<uint32_t, size_t> to_one;
  size_t together = 0;
  for (const auto& opening : openings_) {
    if (!opening->dial.trying()) continue;
    ++together;
    ++to_one[opening->peer.index];
  }
  for (auto& opening : openings_) {
    bool tried = opening->dial.trying();
    size_t& others = to_one[opening->peer.index];
    opening->dial.tick(now, together < kTogether && others < kTogetherToOne);
    if (tried || !opening->dial.trying()) continue;
    ++together;
    ++others;
  }
}

void Links::close(Rank peer, uint16_t from) {
  std::erase_if(openings_, [&](const auto& opening) {
    return opening->peer == peer && opening->lane && *opening->lane >= from;
  });
}

void Links::tick(Nanos now) {
  if (mesh_.acceptor) mesh_.acceptor->tick(now);
  if (!openings_.empty()) begin_some(now);
  for (size_t i = 0; i < openings_.size();) {
    if (!openings_[i]->dial.done()) {
      ++i;
      continue;
    }
    std::unique_ptr<Opening> opening = std::move(openings_[i]);
    openings_.erase(openings_.begin() + static_cast<ptrdiff_t>(i));
    if (opening->lane)
      callbacks_.opened(opening->peer, *opening->lane, opening->dial.take(),
                        std::move(opening->shared));
    else
      callbacks_.branched(opening->peer, opening->dial.take());
  }
}

Links::Attempts Links::attempts(Rank peer) const {
  Attempts out;
  bool begun = false, any = false;
  for (const auto& opening : openings_) {
    if (opening->peer != peer) continue;
    const Dial& dial = opening->dial;
    any = true;
    begun = begun || dial.begun();
    out.refused = out.refused || dial.refused();
    if (out.problem.empty()) out.problem = dial.last_problem();
    if (!out.own) out.own = dial.own_problem();
  }
  out.waiting = any && !begun;
  return out;
}

}  // namespace weft::join
