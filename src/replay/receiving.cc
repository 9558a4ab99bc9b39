#include "simulation.h"

namespace weft::replay {

void Simulator::arrived(Lane& lane, uint32_t index, uint32_t chunks) {
  if (lane.broken) return;
  Host& host = hosts_[lane.to];
  for (uint32_t i = 0; i < chunks; ++i) {
    double bytes = lane.flying[lane.landed++].bytes;
    const auto whole = static_cast<uint32_t>(bytes);
    work(host, server_of(host, lane),
         network_.receive_ns_per_chunk + network_.receive_ns_per_byte * bytes,
         {network_.copy_ns_per_byte > 0 ? What::copied : What::absorb, 0, index, whole});
  }
}

void Simulator::copied(uint32_t index, uint32_t bytes) {
  const Host& host = hosts_[lanes_[index].to];
  work(host, host.thread, network_.copy_ns_per_byte * bytes, {What::absorb, 0, index});
}

void Simulator::absorb(uint32_t index) {
  Lane& lane = lanes_[index];
  if (lane.broken) return;
  QueuedChunk chunk = lane.flying.front();
  lane.flying.pop();
  --lane.landed;
  uint32_t r = lane.to;
  Host& host = hosts_[r];
  saw({Seen::What::arrives, r, lane.from, lane.index, chunk.operation, chunk.id});
  if (recording_ != nullptr)
    recording_->received(r, lane.from, lane.index, recorded(chunk), now_, now_);
  lane.receipts.arrived(chunk.bytes - cost::kHeaderBytes, chunk.wants_receipt);
  // A worker tells at once; the engine's thread, when it is worth it.
  bool served = !host.workers.empty();
  if (chunk.wants_receipt && !served && host.owed.wanted()) {
    host.patience_ends = now_ + schedule::kReceiptPatience.count;
    if (!std::exchange(host.patience_is_watched, true)) push(host.patience_ends, What::patience, r);
  }
  Running& running = host.running[chunk.operation];
  Early arriving{sender_of(lane, chunk.operation), chunk.id};
  if (running.steps)
    take_in(r, chunk.operation, arriving);
  else if (!running.ended)
    running.early.push_back(arriving);
  turn(r);
  if (lane.receipts.due(served)) send_receipt(index);
  tell_arrivals(r, false);
}

uint32_t Simulator::sender_of(const Lane& lane, uint32_t operation) const {
  if (!job_.folded()) return lane.from;
  return rotates(algorithms_[result_.order[operation]]) ? job_.ranks - lane.peer : lane.peer;
}

void Simulator::end_of_patience(uint32_t r) {
  Host& host = hosts_[r];
  host.patience_is_watched = host.owed.any() && now_ < host.patience_ends;
  if (host.patience_is_watched)
    push(host.patience_ends, What::patience, r);
  else
    tell_arrivals(r, true);
}

void Simulator::tell_arrivals(uint32_t r, bool out_of_patience) {
  Host& host = hosts_[r];
  if (host.owed.due(out_of_patience))
    for (uint32_t index : host.incoming)
      if (lanes_[index].receipts.due(true)) send_receipt(index);
  spin_while_owed(host);
}

void Simulator::send_receipt(uint32_t index) {
  Lane& lane = lanes_[index];
  uint64_t chunks = lane.receipts.take();
  const auto told = static_cast<uint32_t>(chunks - std::exchange(lane.receipted, chunks));
  const Host& host = hosts_[lane.to];
  if (worked(host, server_of(host, lane), 0, {What::thanks, 0, index, told}))
    push(now_ + network_.latency_ns, What::receipt, lane.from, index, told);
}

void Simulator::receipt(uint32_t index, uint32_t chunks) {
  Lane& lane = lanes_[index];
  Host& host = hosts_[lane.from];
  bool first = host.unread.empty();
  host.unread.push({index, chunks});
  if (!first) return;
  if (worked(host, server_of(host, lane), 0, {What::receipted, static_cast<uint16_t>(lane.from)}))
    read_receipts(lane.from);
}

void Simulator::read_receipts(uint32_t r) {
  for (Fifo<Unread>& unread = hosts_[r].unread; !unread.empty(); unread.pop())
    receipted(lanes_[unread.front().lane], unread.front().chunks);
}

void Simulator::receipted(const Lane& lane, uint32_t chunks) {
  if (lane.broken) return;
  saw({Seen::What::receipt, lane.from, lane.peer, lane.index, 0, {}, chunks});
  for (uint32_t i = 0; i < chunks; ++i)
    settle(lane.from, hosts_[lane.from].dispatcher.receipted(lane.peer, lane.index));
  turn(lane.from);
}

}  // namespace weft::replay
