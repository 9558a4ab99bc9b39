#include <algorithm>

#include "handshake.h"
#include "weft/join.h"

namespace weft::join {

struct Links::Opening {
  Rank peer;
  uint16_t lane;
  std::shared_ptr<lane::shm::Segment> shared;
  Dial dial;
};

Links::Links(Mesh& mesh, Callbacks callbacks) : mesh_(mesh), callbacks_(std::move(callbacks)) {
  if (!mesh_.acceptor) return;
  mesh_.acceptor->set_on_connection([this](std::unique_ptr<net::Socket>& socket,
                                           const Hello& hello) { return accept(socket, hello); });
  for (auto& [hello, socket] : std::exchange(*mesh_.early, {}))
    if (auto taken = accept(socket, hello); !taken)
      WEFT_LOG(join, warn, "refused a lane of rank %u: %s", hello.rank,
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
  if (hello.purpose != Purpose::lane) return refuse("the group is complete");
  std::shared_ptr<lane::shm::Segment> shared;
  if (!hello.shared.empty() && mesh_.members[hello.rank].shares_memory) {
    auto attached = lane::shm::attach(hello.shared);
    if (attached)
      shared = std::move(*attached);
    else
      WEFT_LOG(join, info, "rank %u: no shared memory, so TCP: %s", hello.rank,
               attached.error().message().c_str());
  }
  callbacks_.accepted({hello.rank}, hello.lane, std::move(socket), std::move(shared));
  return {};
}

Links::~Links() {
  if (!mesh_.acceptor) return;
  mesh_.acceptor->set_on_connection(
      [](std::unique_ptr<net::Socket>&, const Hello&) -> Result<void> {
        return error(Code::cancelled, "the group is closing");
      });
}

void Links::open(Rank peer, uint16_t lane) {
  const Member& member = mesh_.members[peer.index];
  Hello hello;
  hello.purpose = Purpose::lane;
  hello.rank = mesh_.rank.index;
  hello.ranks = mesh_.ranks;
  hello.lane = lane;
  hello.agreement = mesh_.agreement;
  std::shared_ptr<lane::shm::Segment> shared;
  if (member.shares_memory) {
    auto made = lane::shm::make();
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
  openings_.push_back(
      std::unique_ptr<Opening>(new Opening{peer, lane, std::move(shared),
                                           Dial(*mesh_.network, *mesh_.reactor, member.address,
                                                member.port, mesh_.secret, std::move(hello))}));
}

void Links::close(Rank peer) {
  std::erase_if(openings_, [&](const auto& opening) { return opening->peer == peer; });
}

void Links::tick(Nanos now) {
  if (mesh_.acceptor) mesh_.acceptor->tick(now);
  for (size_t i = 0; i < openings_.size();) {
    openings_[i]->dial.tick(now);
    if (!openings_[i]->dial.done()) {
      ++i;
      continue;
    }
    std::unique_ptr<Opening> opening = std::move(openings_[i]);
    openings_.erase(openings_.begin() + static_cast<ptrdiff_t>(i));
    callbacks_.opened(opening->peer, opening->lane, opening->dial.take(),
                      std::move(opening->shared));
  }
}

std::string Links::problem(Rank peer) const {
  for (const auto& opening : openings_)
    if (opening->peer == peer) return opening->dial.last_problem();
  return {};
}

}  // namespace weft::join
