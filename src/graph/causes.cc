#include "causes.h"

#include <algorithm>
#include <numeric>

namespace weft::graph {
namespace {

// Chunks and ranks that are looked at while programs are made.
constexpr uint64_t kMostWork = 50'000'000;

std::tuple<uint32_t, uint16_t, uint32_t> name_of(const schedule::Send& send) {
  return {send.peer, send.id.step, send.id.chunk};
}

bool sends_all(const Causes& causes, std::span<const Half> sends) {
  return std::all_of(sends.begin(), sends.end(), [&](const Half& half) {
    return causes.find(half.peer, {half.step(), half.chunk}).has_value();
  });
}

}  // namespace

Causes::Causes(std::shared_ptr<const schedule::Program> program) : program_(std::move(program)) {
  std::span<const schedule::Send> sends = program_->sends();
  by_name_.resize(sends.size());
  std::iota(by_name_.begin(), by_name_.end(), 0u);
  std::sort(by_name_.begin(), by_name_.end(),
            [&](uint32_t a, uint32_t b) { return name_of(sends[a]) < name_of(sends[b]); });
  first_.assign(sends.size() + 1, 0);
  std::span<const schedule::Receive> receives = program_->receives();
  for (uint32_t r = 0; r < receives.size(); ++r)
    for (uint32_t allowed : program_->allowed_by(r))
      if (allowed < sends.size()) ++first_[allowed + 1u];
  for (size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];
  receives_.resize(first_.back());
  std::vector<uint32_t> next(first_.begin(), first_.end() - 1);
  for (uint32_t r = 0; r < receives.size(); ++r)
    for (uint32_t allowed : program_->allowed_by(r))
      if (allowed < sends.size()) receives_[next[allowed]++] = &receives[r];
}

std::optional<uint32_t> Causes::find(uint32_t peer, schedule::ChunkId id) const {
  std::span<const schedule::Send> sends = program_->sends();
  const std::tuple sought(peer, id.step, id.chunk);
  auto found = std::partition_point(by_name_.begin(), by_name_.end(),
                                    [&](uint32_t i) { return name_of(sends[i]) < sought; });
  if (found == by_name_.end() || name_of(sends[*found]) != sought) return std::nullopt;
  return *found;
}

std::span<const schedule::Receive* const> Causes::of(uint32_t send) const {
  return std::span(receives_).subspan(first_[send], first_[send + 1u] - first_[send]);
}

Programs::Programs(const std::vector<uint32_t>& host_of, const trace::Environment& environment)
    : work_left_(kMostWork) {
  if (environment.plan_text.empty() || !(environment.shrink >= 1)) return;
  auto plan = plan::parse(environment.plan_text);
  if (!plan) return;
  plan_ = schedule::scaled(*plan, environment.shrink);
  shape_.ranks = static_cast<uint32_t>(host_of.size());
  shape_.host_of = host_of;
  shape_.chunk_elements = schedule::chunk_elements(*plan_);
}

const Causes* Programs::made(uint32_t rank, uint64_t bytes, schedule::Algorithm algorithm) {
  auto [at, added] = made_.try_emplace({rank, bytes, algorithm});
  if (!added) return at->second.get();
  shape_.algorithm = algorithm;
  shape_.rank = rank;
  shape_.elements = bytes / schedule::kElementBytes;
  uint64_t work = (shape_.elements / shape_.chunk_elements + 1) * 8 + 4ull * shape_.ranks;
  if (work > work_left_) return nullptr;
  work_left_ -= work;
  at->second = std::make_unique<Causes>(schedule::Program::make(shape_));
  return at->second.get();
}

const Causes* Programs::of(uint32_t rank, uint64_t bytes, std::span<const Half> sends) {
  if (!plan_ || sends.empty() || shape_.ranks < 2) return nullptr;
  // An operation sends at least its size once; one that has far fewer records is not understood.
  uint64_t chunks = bytes / schedule::kElementBytes / shape_.chunk_elements;
  if (chunks / 4 > sends.size() + 16) return nullptr;
  auto fits = [&](schedule::Algorithm algorithm) -> const Causes* {
    const Causes* causes = made(rank, bytes, algorithm);
    return causes != nullptr && sends_all(*causes, sends) ? causes : nullptr;
  };
  auto likely = last_.try_emplace(bytes, schedule::algorithm_for(*plan_, bytes, {})).first;
  if (const Causes* causes = fits(likely->second)) return causes;
  for (schedule::Algorithm algorithm : schedule::kAlgorithms) {
    if (algorithm == likely->second) continue;
    if (const Causes* causes = fits(algorithm)) {
      likely->second = algorithm;
      return causes;
    }
  }
  return nullptr;
}

}  // namespace weft::graph
