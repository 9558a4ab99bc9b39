#include <algorithm>

#include "cut.h"
#include "weft/schedule.h"

namespace weft::schedule {

Steps::Steps(std::shared_ptr<const Program> program)
    : program_(std::move(program)),
      send_needs_(program_->send_needs_),
      receive_needs_(program_->receive_needs_),
      taken_(program_->receives_.size(), false),
      to_send_(program_->sends_.size()),
      to_receive_(program_->receives_.size()) {}

void Steps::start(std::vector<uint32_t>& sends) const {
  for (uint32_t send = 0; send < send_needs_.size(); ++send)
    if (program_->send_needs_[send] == 0) sends.push_back(send);
}

bool Steps::take(uint32_t receive) {
  WEFT_CHECK(receive < taken_.size() && !taken_[receive]);
  taken_[receive] = true;
  return receive_needs_[receive] == 0;
}

void Steps::applied(uint32_t receive, std::vector<uint32_t>& sends,
                    std::vector<uint32_t>& receives) {
  WEFT_CHECK(receive < taken_.size() && taken_[receive] && to_receive_ > 0);
  --to_receive_;
  auto sends_in_all = static_cast<uint32_t>(send_needs_.size());
  for (uint32_t allowed : program_->allowed_by(receive)) {
    if (allowed < sends_in_all) {
      if (--send_needs_[allowed] == 0) sends.push_back(allowed);
    } else {
      allowed -= sends_in_all;
      if (--receive_needs_[allowed] == 0 && taken_[allowed]) receives.push_back(allowed);
    }
  }
}

void Steps::sent(uint32_t send) {
  WEFT_CHECK(send < send_needs_.size() && to_send_ > 0);
  --to_send_;
}

std::optional<uint32_t> Steps::waits_for() const {
  for (uint32_t receive = 0; receive < taken_.size(); ++receive)
    if (!taken_[receive]) return program_->receives_[receive].peer;
  return std::nullopt;
}

// Broadcast uses one segment (the whole) and a step a hop: the rank at distance d from the root
// receives in step d - 1 and sends in step d. The last rank of the chain sends nothing.
RingSteps::RingSteps(Collective collective, Rank rank, uint32_t ranks, uint64_t elements,
                     uint64_t chunk_elements, Rank root)
    : collective_(collective),
      rank_(rank.index),
      ranks_(ranks),
      elements_(elements),
      chunk_(chunk_elements),
      root_(root.index) {
  WEFT_CHECK(ranks > 0 && rank.index < ranks && root.index < ranks && chunk_elements > 0);
  steps_ = collective == Collective::all_reduce ? 2 * (ranks - 1) : ranks - 1;
  uint32_t bits = 0;
  arrived_first_.resize(steps_ + 1);
  for (uint32_t step = 0; step < steps_; ++step) {
    arrived_first_[step] = bits;
    if (collective == Collective::broadcast) {
      uint32_t distance = (rank_ + ranks_ - root_) % ranks_;
      if (distance == step + 1) bits += chunks_in(0);
      if (distance == step) to_send_ += chunks_in(0);
    } else {
      bits += chunks_in(received_segment(step));
      to_send_ += chunks_in(sent_segment(step));
    }
  }
  arrived_first_[steps_] = bits;
  arrived_.assign(bits, false);
  to_receive_ = bits;
}

RingSteps::Segment RingSteps::segment(uint32_t index) const {
  if (collective_ == Collective::broadcast) return {0, elements_};
  uint64_t first = cut(elements_, index, ranks_);
  return {first, cut(elements_, index + 1u, ranks_) - first};
}

uint32_t RingSteps::chunks_in(uint32_t index) const {
  return static_cast<uint32_t>((segment(index).elements + chunk_ - 1) / chunk_);
}

bool RingSteps::reduces(uint32_t step) const {
  return collective_ == Collective::reduce_scatter ||
         (collective_ == Collective::all_reduce && step + 1 < ranks_);
}

// In the scatter half a rank first sends its own segment; in the gather half it first sends the
// one that it completed, its successor's by number.
uint32_t RingSteps::sent_segment(uint32_t step) const {
  if (reduces(step)) return (rank_ + ranks_ - step) % ranks_;
  uint32_t gather_step = collective_ == Collective::all_reduce ? step - (ranks_ - 1) : step;
  return (rank_ + 1 + ranks_ - gather_step) % ranks_;
}

uint32_t RingSteps::received_segment(uint32_t step) const {
  if (reduces(step)) return (rank_ + ranks_ - step - 1) % ranks_;
  uint32_t gather_step = collective_ == Collective::all_reduce ? step - (ranks_ - 1) : step;
  return (rank_ + ranks_ - gather_step) % ranks_;
}

ChunkRange RingSteps::range(uint32_t index, uint32_t chunk) const {
  Segment whole = segment(index);
  uint64_t offset = uint64_t{chunk} * chunk_;
  return {whole.first + offset, std::min(chunk_, whole.elements - offset), false};
}

std::vector<ChunkId> RingSteps::start() {
  std::vector<ChunkId> sendable;
  if (steps_ == 0) return sendable;
  if (collective_ == Collective::broadcast && rank_ != root_) return sendable;
  uint32_t count = chunks_in(collective_ == Collective::broadcast ? 0 : sent_segment(0));
  for (uint32_t chunk = 0; chunk < count; ++chunk) sendable.push_back({0, chunk});
  return sendable;
}

ChunkRange RingSteps::outgoing(ChunkId id) const {
  WEFT_CHECK(id.step < steps_);
  uint32_t index = collective_ == Collective::broadcast ? 0 : sent_segment(id.step);
  WEFT_CHECK(id.chunk < chunks_in(index));
  return range(index, id.chunk);
}

Result<ChunkRange> RingSteps::arriving(ChunkId id) const {
  if (id.step >= steps_)
    return error(Code::corrupt, "step %u of an operation of %u steps", unsigned{id.step}, steps_);
  uint32_t due = arrived_first_[id.step + 1u] - arrived_first_[id.step];
  if (id.chunk >= due)
    return error(Code::corrupt, "chunk %u of step %u, which has %u", id.chunk, unsigned{id.step},
                 due);
  if (arrived_[arrived_first_[id.step] + id.chunk])
    return error(Code::corrupt, "chunk %u of step %u came twice", id.chunk, unsigned{id.step});
  uint32_t index = collective_ == Collective::broadcast ? 0 : received_segment(id.step);
  ChunkRange where = range(index, id.chunk);
  where.reduce = reduces(id.step);
  return where;
}

std::optional<ChunkId> RingSteps::received(ChunkId id) {
  uint32_t bit = arrived_first_[id.step] + id.chunk;
  WEFT_CHECK(id.step < steps_ && bit < arrived_first_[id.step + 1u] && !arrived_[bit]);
  arrived_[bit] = true;
  --to_receive_;
  // What arrived in one step is what goes out in the next.
  auto next = static_cast<uint16_t>(id.step + 1);
  if (next >= steps_) return std::nullopt;
  return ChunkId{next, id.chunk};
}

void RingSteps::sent(ChunkId id) {
  WEFT_CHECK(id.step < steps_ && to_send_ > 0);
  --to_send_;
}

ChunkRange RingSteps::owned() const {
  Segment own = segment((rank_ + 1) % ranks_);
  return {own.first, own.elements, false};
}

void Dispatch::push(const Entry& entry) { queue_.push(entry); }

std::optional<Dispatch::Entry> Dispatch::pop() {
  if (queue_.empty()) return std::nullopt;
  Entry front = queue_.top();
  queue_.pop();
  return front;
}

}  // namespace weft::schedule
