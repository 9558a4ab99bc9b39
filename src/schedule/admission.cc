#include "weft/schedule.h"

namespace weft::schedule {

Readiness::Readiness(const Layout& layout, uint64_t first_step)
    : layout_(layout), next_step_(layout.bucket_of.size(), first_step) {
  for (const Bucket& bucket : layout.buckets)
    missing_.push_back(static_cast<uint32_t>(bucket.tensors.size()));
}

std::vector<uint32_t> Readiness::lacking(uint32_t tensor, uint64_t step) const {
  std::vector<uint32_t> out;
  for (uint32_t other : layout_.buckets[layout_.bucket_of[tensor]].tensors)
    if (next_step_[other] <= step) out.push_back(other);
  return out;
}

Result<void> Readiness::may_be_ready(uint32_t tensor, uint64_t step) const {
  if (tensor >= next_step_.size())
    return error(Code::invalid_argument, "tensor %u is not registered (there are %zu)", tensor,
                 next_step_.size());
  if (step != next_step_[tensor])
    return error(Code::invalid_argument, "tensor %u is ready for step %llu, but step %llu is due",
                 tensor, static_cast<unsigned long long>(step),
                 static_cast<unsigned long long>(next_step_[tensor]));
  uint32_t bucket = layout_.bucket_of[tensor];
  // A tensor that is a step ahead of a bucket-mate would be counted for the wrong step.
  for (uint32_t mate : layout_.buckets[bucket].tensors)
    if (next_step_[mate] < step)
      return error(Code::invalid_argument,
                   "tensor %u is ready for step %llu before tensor %u of its bucket for step %llu",
                   tensor, static_cast<unsigned long long>(step), mate,
                   static_cast<unsigned long long>(next_step_[mate]));
  return {};
}

Result<std::optional<uint32_t>> Readiness::ready(uint32_t tensor, uint64_t step) {
  WEFT_TRY(may_be_ready(tensor, step));
  uint32_t bucket = layout_.bucket_of[tensor];
  ++next_step_[tensor];
  if (--missing_[bucket] > 0) return std::optional<uint32_t>();
  missing_[bucket] = static_cast<uint32_t>(layout_.buckets[bucket].tensors.size());
  return std::optional<uint32_t>(bucket);
}

Admission::Admission(const Layout& layout, const Tree& tree, const Beginning& from)
    : layout_(layout), reports_(layout, tree, {0}, from.step), next_operation_(from.operation) {}

Result<void> Admission::ready(Rank rank, uint32_t bucket, uint64_t step) {
  WEFT_ASSIGN(bool all_have_it, reports_.ready(rank, bucket, step));
  if (!all_have_it) return {};
  const Bucket& laid = layout_.buckets[bucket];
  for (uint32_t k = 0; k < laid.pieces; ++k)
    eligible_.push({laid.priority, eligible_count_++, laid.first_piece + k, step});
  return {};
}

Result<void> Admission::finished(uint64_t operation) {
  auto found = running_.find(operation);
  if (found == running_.end())
    return error(Code::invalid_argument, "operation %llu ended but is not running",
                 static_cast<unsigned long long>(operation));
  in_flight_ -= found->second;
  running_.erase(found);
  return {};
}

std::optional<Start> Admission::next() {
  if (eligible_.empty()) return std::nullopt;
  const Eligible& front = eligible_.top();
  uint64_t elements = layout_.pieces[front.piece].words;
  uint64_t credit = layout_.credit_elements;
  // A piece larger than the credit may still run alone; a smaller one behind it may not pass it.
  if (credit != 0 && !running_.empty() && in_flight_ + elements > credit) return std::nullopt;
  Start start{next_operation_++, front.piece, front.step};
  eligible_.pop();
  running_.emplace(start.operation, elements);
  in_flight_ += elements;
  return start;
}

}  // namespace weft::schedule
