#include <algorithm>
#include <limits>

#include "weft/schedule.h"

namespace weft::schedule {
namespace {

constexpr uint32_t kUnknown = std::numeric_limits<uint32_t>::max();
// What a receipt is worth, where nobody waits for it.
constexpr uint64_t kReceiptChunks = 64;
constexpr uint64_t kReceiptBytes = 4u << 20;

}  // namespace

void Dispatcher::connect(uint32_t peer, uint16_t lanes) {
  WEFT_CHECK(lanes > 0 && (peer >= index_of_.size() || index_of_[peer] == kUnknown));
  auto at = std::lower_bound(peers_.begin(), peers_.end(), peer,
                             [](const Peer& one, uint32_t rank) { return one.rank < rank; });
  at = peers_.emplace(at);
  at->rank = peer;
  at->lanes.resize(lanes);
  if (peer >= index_of_.size()) index_of_.resize(peer + size_t{1}, kUnknown);
  for (uint32_t i = 0; i < peers_.size(); ++i) index_of_[peers_[i].rank] = i;
  // Whose turn it is depends on whom it was before, never on when somebody was connected.
  next_peer_ = 0;
  while (served_ && next_peer_ < peers_.size() && peers_[next_peer_].rank <= *served_) ++next_peer_;
  if (next_peer_ == peers_.size()) next_peer_ = 0;
}

void Dispatcher::change_lanes(uint32_t peer, uint16_t lanes) {
  WEFT_CHECK(lanes > 0);
  Peer& to = peers_[index_of_[peer]];
  for (size_t lane = lanes; lane < to.lanes.size(); ++lane)
    WEFT_CHECK(to.lanes[lane].carries.empty());
  to.lanes.resize(lanes);
  to.next_lane %= lanes;
}

void Dispatcher::offer(uint32_t peer, const Chunk& chunk) {
  peers_[index_of_[peer]].wanted.push(chunk);
  ++waiting_;
}

void Dispatcher::withdraw(uint64_t operation) {
  for (Peer& peer : peers_) {
    std::vector<Chunk> others;
    for (; !peer.wanted.empty(); peer.wanted.pop(), --waiting_)
      if (peer.wanted.top().operation != operation) others.push_back(peer.wanted.top());
    for (const Chunk& chunk : others) offer(peer.rank, chunk);
  }
}

void Dispatcher::begin_turn() {
  ++turn_;
  cut_short_ = false;
}

Dispatcher::HandOver Dispatcher::hand_over(Peer& peer, uint16_t lane, Room room) {
  peer.next_lane = (lane + 1u) % static_cast<uint32_t>(peer.lanes.size());
  --waiting_;
  HandOver out;
  out.peer = peer.rank;
  out.lane = lane;
  bool settled = false;
  if (!peer.again.empty()) {
    const Carried& before = peer.again.front();
    out.ticket = before.ticket;
    out.chunk = before.chunk;
    out.again = true;
    settled = before.settled;
    peer.again.pop();
  } else {
    out.ticket = next_ticket_++;
    out.chunk = peer.wanted.top();
    peer.wanted.pop();
  }
  out.keep = room == Room::connection && out.chunk.bytes <= kKeptBytes;
  peer.lanes[lane].carries.push({out.ticket, out.chunk, room, out.keep, settled});
  return out;
}

Dispatcher::Lane& Dispatcher::lane_of(uint32_t peer, uint16_t lane) {
  return peers_[index_of_[peer]].lanes[lane];
}

std::optional<Dispatcher::Settled> Dispatcher::left(uint32_t peer, uint16_t lane) {
  Lane& on = lane_of(peer, lane);
  Carried& carried = on.carries[on.left++];
  if (!carried.keep && carried.over != Room::memory) return std::nullopt;
  Settled out{carried.ticket, carried.chunk, !std::exchange(carried.settled, true)};
  if (carried.over == Room::memory) {
    on.carries.pop();
    --on.left;
  }
  return out;
}

std::optional<Dispatcher::Settled> Dispatcher::receipted(uint32_t peer, uint16_t lane) {
  Lane& on = lane_of(peer, lane);
  WEFT_CHECK(on.left > 0);
  Carried carried = on.carries.front();
  on.carries.pop();
  --on.left;
  if (carried.keep) return std::nullopt;
  return Settled{carried.ticket, carried.chunk, !carried.settled};
}

std::vector<std::pair<uint64_t, Chunk>> Dispatcher::broke(uint32_t peer, uint16_t lane) {
  Lane& on = lane_of(peer, lane);
  std::vector<std::pair<uint64_t, Chunk>> out;
  for (; !on.carries.empty(); on.carries.pop(), ++waiting_) {
    out.emplace_back(on.carries.front().ticket, on.carries.front().chunk);
    peers_[index_of_[peer]].again.push(on.carries.front());
  }
  on.left = 0;
  return out;
}

void Receipts::arrived(uint64_t bytes, bool wanted) {
  ++arrived_;
  bytes_ += bytes;
  wanted_ = wanted_ || wanted;
}

bool Receipts::due(bool asked) const {
  return (asked && wanted_) || arrived_ - told_ >= kReceiptChunks || bytes_ >= kReceiptBytes;
}

uint64_t Receipts::take() {
  told_ = arrived_;
  bytes_ = 0;
  wanted_ = false;
  return told_;
}

bool Owed::due(bool out_of_patience) {
  bool all = std::exchange(all_, false);
  if (!owed_ || (!all && !out_of_patience)) return false;
  owed_ = false;
  return true;
}

}  // namespace weft::schedule
