#include "simulation.h"

#include <algorithm>
#include <cmath>

namespace weft::replay {
namespace {

int64_t later(int64_t from, double bytes, double rate) {
  return from + static_cast<int64_t>(std::llround(bytes / rate));
}

}  // namespace

void Simulator::connect(uint32_t r, uint32_t to) {
  std::vector<uint32_t>& lanes = hosts_[r].lanes_to[to];
  if (!lanes.empty()) return;
  hosts_[r].dispatcher.connect(to, static_cast<uint16_t>(layout_.lanes));
  lanes.assign(layout_.lanes, kNone);
  for (uint32_t number = 0; number < layout_.lanes; ++number)
    open_lane(r, to, static_cast<uint16_t>(number));
}

void Simulator::open_lane(uint32_t r, uint32_t to, uint16_t number) {
  auto index = static_cast<uint32_t>(lanes_.size());
  hosts_[r].lanes_to[to][number] = index;
  hosts_[r].lanes.push_back(index);
  hosts_[played_by(to)].incoming.push_back(index);
  Lane& lane = lanes_.emplace_back();
  lane.from = r;
  lane.to = played_by(to);
  lane.peer = to;
  lane.index = number;
  lane.flow = network_.flow_bytes_per_ns;
  for (const OddLane& odd : network_.odd_lanes)
    if (odd.from == r && odd.to == to && odd.lane == number)
      lane.flow = std::min(lane.flow, odd.bytes_per_ns);
}

void Simulator::breaks(const OddLane& odd) {
  Host& host = hosts_[odd.from];
  if (host.lanes_to[odd.to].empty()) return;
  uint32_t index = std::exchange(host.lanes_to[odd.to][odd.lane], kNone);
  if (index == kNone) return;
  saw({Seen::What::breaks, odd.from, odd.to, odd.lane});
  lanes_[index].broken = true;
  std::erase(host.lanes, index);
  std::erase(hosts_[odd.to].incoming, index);
  if (host.next_to_send >= host.lanes.size()) host.next_to_send = 0;
  host.dispatcher.broke(odd.to, odd.lane);
  turn(odd.from);
}

void Simulator::returns(const OddLane& odd) {
  Host& host = hosts_[odd.from];
  if (host.lanes_to[odd.to].empty() || host.lanes_to[odd.to][odd.lane] != kNone) return;
  saw({Seen::What::returns, odd.from, odd.to, odd.lane});
  open_lane(odd.from, odd.to, odd.lane);
  turn(odd.from);
}

Room Simulator::room_of(const Host& host, uint32_t to, uint16_t number) const {
  uint32_t index = host.lanes_to[to][number];
  if (index == kNone || lanes_[index].blocked) return Room::none;
  return host.workers.empty() ? Room::connection : Room::worker;
}

void Simulator::turn(uint32_t r) {
  Host& host = hosts_[r];
  saw({Seen::What::turn, r});
  host.dispatcher.begin_turn();
  bool filled = false;
  auto room = [&](uint32_t to, uint16_t number) { return room_of(host, to, number); };
  while (auto next = host.dispatcher.next(room)) {
    take(r, *next);
    filled = true;
  }
  // What has arrived meanwhile comes before the next turn.
  if (host.dispatcher.cut_short() && !std::exchange(host.turn_is_due, true))
    work(host, host.thread, 0, {What::turn, static_cast<uint16_t>(r)});
  if (filled) wake_egress(r);
}

void Simulator::take(uint32_t r, const Dispatcher::HandOver& what) {
  Host& host = hosts_[r];
  const uint32_t index = host.lanes_to[what.peer][what.lane];
  Lane& lane = lanes_[index];
  auto operation = static_cast<uint32_t>(what.chunk.operation);
  auto bytes = static_cast<uint32_t>(what.chunk.bytes + cost::kHeaderBytes);
  ++lane.filling;
  const bool there =
      network_.copy_ns_per_byte <= 0 ||
      worked(host, host.thread, network_.copy_ns_per_byte * bytes, {What::hands, 0, index, bytes});
  if (there && hands(index, bytes)) --lane.filling;
  if (lane.chunks.empty()) lane.head_left = bytes;
  // One that goes again may be of an operation that has ended here.
  const std::optional<schedule::Steps>& steps = host.running[operation].steps;
  const schedule::Program& program = steps ? steps->program() : *program_of(r, operation);
  schedule::ChunkId id = program.sends()[what.chunk.send].id;
  QueuedChunk chunk{operation, what.chunk.send, id, bytes, now_, host.next_message++, !what.keep};
  lane.chunks.push(chunk);
  lane.held = bytes;
  bool whole = give_to_socket(lane);
  saw({Seen::What::hands_over, r, what.peer, what.lane, operation, id, whole ? 1u : 0u});
  if (whole)
    left(lane, chunk);
  else
    lane.rest = chunk;
}

bool Simulator::hands(uint32_t index, uint32_t bytes) {
  const Host& host = hosts_[lanes_[index].from];
  return worked(host, server_of(host, lanes_[index]),
                network_.send_ns_per_chunk + network_.send_ns_per_byte * bytes,
                {What::filled, 0, index});
}

void Simulator::filled(uint32_t index) {
  Lane& lane = lanes_[index];
  if (--lane.filling > 0) return;
  for (; !lane.filled.empty(); lane.filled.pop()) record_sent(lane, lane.filled.front());
  if (!lane.broken) send_packets(lane.from);
}

bool Simulator::give_to_socket(Lane& lane) const {
  while (lane.held > 0 && lane.unsent < unsent_limit_) {
    double segment = std::min(lane.held, network_.packet_bytes);
    lane.held -= segment;
    lane.unsent += segment;
    make_packets(lane);
  }
  lane.blocked = lane.held > 0;
  return !lane.blocked;
}

void Simulator::left(Lane& lane, const QueuedChunk& chunk) {
  if (recording_ != nullptr && lane.filling > 0)
    lane.filled.push(chunk);
  else
    record_sent(lane, chunk);
  settle(lane.from, hosts_[lane.from].dispatcher.left(lane.peer, lane.index));
}

void Simulator::record_sent(const Lane& lane, const QueuedChunk& chunk) {
  if (recording_ != nullptr)
    recording_->sent(lane.from, lane.peer, lane.index, recorded(chunk), chunk.taken, now_);
}

void Simulator::settle(uint32_t r, const std::optional<Dispatcher::Settled>& settled) {
  if (!settled || !settled->first) return;
  auto operation = static_cast<uint32_t>(settled->chunk.operation);
  hosts_[r].running[operation].steps->sent(settled->chunk.send);
  finish_if_done(r, operation);
}

Recording::Chunk Simulator::recorded(const QueuedChunk& chunk) const {
  return {chunk.operation, chunk.id, chunk.bytes - cost::kHeaderBytes,
          iteration_of_[chunk.operation], chunk.message};
}

void Simulator::make_packets(Lane& lane) const {
  while (lane.unsent > 0 && lane.queued < network_.queue_bytes) {
    double packet = std::min(lane.unsent, network_.packet_bytes);
    lane.unsent -= packet;
    lane.queued += packet;
    lane.packets.push(packet);
  }
}

void Simulator::wake_egress(uint32_t r) {
  Host& host = hosts_[r];
  int64_t next = kNever;
  for (uint32_t index : host.lanes) {
    const Lane& lane = lanes_[index];
    if (!lane.packets.empty() && lane.filling == 0) next = std::min(next, lane.ready);
  }
  if (next == kNever) return;
  next = std::max({next, host.link_ready, now_});
  if (next >= host.egress_at) return;
  host.egress_at = next;
  push(next, What::egress, r);
}

void Simulator::send_packets(uint32_t r) {
  Host& host = hosts_[r];
  size_t count = host.lanes.size();
  size_t tried = 0;
  while (host.link_ready <= now_ && tried < count) {
    size_t index = host.next_to_send;
    host.next_to_send = (index + 1) % count;
    Lane& lane = lanes_[host.lanes[index]];
    if (lane.packets.empty() || lane.ready > now_ || lane.filling > 0) {
      ++tried;
      continue;
    }
    tried = 0;
    send_packet(lane, host.lanes[index]);
  }
  wake_egress(r);
}

void Simulator::send_packet(Lane& lane, uint32_t index) {
  Host& host = hosts_[lane.from];
  double bytes = lane.packets.front();
  lane.packets.pop();
  double link = network_.link_bytes_per_ns, flow = lane.flow;
  auto from = [&](int64_t ready, double burst, double rate) {
    return std::max(ready, now_ - static_cast<int64_t>(burst / rate));
  };
  if (std::isfinite(flow))
    lane.ready = later(from(lane.ready, network_.flow_burst_bytes, flow), bytes, flow);
  host.link_ready = later(from(host.link_ready, network_.link_burst_bytes, link), bytes, link);

  // Through the receiver's own link.
  Host& receiver = hosts_[lane.to];
  int64_t through = std::max(now_, receiver.ingress_ready);
  receiver.ingress_ready =
      later(from(receiver.ingress_ready, network_.link_burst_bytes, link), bytes, link);
  int64_t arrival = through + network_.latency_ns + (network_.shaped ? 0 : later(0, bytes, link));

  lane.queued -= bytes;
  uint32_t complete = 0;
  for (double left = bytes; left > 0;) {
    double part = std::min(left, lane.head_left);
    left -= part;
    lane.head_left -= part;
    if (lane.head_left > 0) break;
    lane.flying.push(lane.chunks.front());
    lane.chunks.pop();
    ++complete;
    if (lane.chunks.empty()) break;
    lane.head_left = lane.chunks.front().bytes;
  }
  if (complete > 0) push(arrival, What::arrived, lane.to, index, complete);

  make_packets(lane);
  if (lane.blocked && 2 * lane.unsent < unsent_limit_) {
    ++lane.filling;
    if (worked(host, server_of(host, lane), 0, {What::filled, 0, index})) --lane.filling;
    if (!give_to_socket(lane)) return;
    saw({Seen::What::room, lane.from, lane.peer, lane.index});
    left(lane, lane.rest);
    turn(lane.from);
  }
}

}  // namespace weft::replay
