#include "gradients.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace weft::lab {
namespace {

constexpr uint64_t kPeriod = 97;
constexpr uint64_t kInverseOf7 = 14;  // 7 * 14 = 98 = 1 (mod 97)
constexpr size_t kBlock = kPeriod * 64;

#if defined(__GNUC__) && !defined(__clang__)
#define WEFT_VECTORISE [[gnu::optimize("O3")]]
#else
#define WEFT_VECTORISE
#endif

WEFT_VECTORISE void fill_block(float* data, const float* base, size_t count, float rank) {
  for (size_t i = 0; i < count; ++i) data[i] = base[i] + rank;
}

WEFT_VECTORISE bool check_block(const float* data, const float* base, size_t count, float ranks,
                                float constant) {
  int wrong = 0;
  for (size_t i = 0; i < count; ++i) wrong |= data[i] != base[i] * ranks + constant ? 1 : 0;
  return wrong == 0;
}

}  // namespace

Gradients::Gradients(uint32_t rank, uint32_t ranks, uint64_t seed)
    : rank_(rank), ranks_(ranks), seed_(seed), table_(kBlock + kPeriod) {
  for (size_t i = 0; i < table_.size(); ++i) table_[i] = static_cast<float>(i * 7 % kPeriod);
}

// (7 i + c) mod 97 = (7 (i + c / 7)) mod 97: the table, begun at another place.
const float* Gradients::pattern(uint32_t tensor, uint64_t step) const {
  uint64_t constant = (step * 13 + uint64_t{tensor} * 31 + seed_) % kPeriod;
  return table_.data() + constant * kInverseOf7 % kPeriod;
}

void Gradients::fill(std::span<float> data, uint32_t tensor, uint64_t step) const {
  const float* base = pattern(tensor, step);
  for (size_t at = 0; at < data.size(); at += kBlock)
    fill_block(data.data() + at, base, std::min(kBlock, data.size() - at),
               static_cast<float>(rank_));
}

bool Gradients::verify_and_refill(std::span<float> data, uint32_t tensor, uint64_t step,
                                  uint64_t next_step) const {
  const float* expected = pattern(tensor, step);
  const float* next = pattern(tensor, next_step);
  uint32_t of_ranks = ranks_ * (ranks_ - 1) / 2;
  auto constant = static_cast<float>(of_ranks);
  bool exact = true;
  for (size_t at = 0; at < data.size(); at += kBlock) {
    size_t count = std::min(kBlock, data.size() - at);
    exact = check_block(data.data() + at, expected, count, static_cast<float>(ranks_), constant) &&
            exact;
    fill_block(data.data() + at, next, count, static_cast<float>(rank_));
  }
  return exact;
}

Checker::Checker(const Gradients& gradients, std::vector<std::span<float>> tensors)
    : gradients_(gradients), tensors_(std::move(tensors)), filled_(tensors_.size(), 0) {
  for (uint32_t t = 0; t < tensors_.size(); ++t) gradients_.fill(tensors_[t], t, 0);
  thread_ = std::thread([this] { loop(); });
}

Checker::~Checker() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Checker::done(uint32_t tensor, uint64_t step) {
  std::lock_guard lock(mutex_);
  queue_.emplace(-int64_t{tensor}, step);
  changed_.notify_all();
}

void Checker::wait_filled(uint32_t tensor, uint64_t step) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return filled_[tensor] >= step; });
}

bool Checker::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
  return exact_;
}

void Checker::loop() {
  // Checking is the lab's own work: it yields to the job's.
  setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 10);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    auto [negative, step] = *queue_.begin();
    queue_.erase(queue_.begin());
    auto tensor = static_cast<uint32_t>(-negative);
    busy_ = true;
    lock.unlock();
    bool exact = gradients_.verify_and_refill(tensors_[tensor], tensor, step, step + 1);
    lock.lock();
    busy_ = false;
    exact_ = exact_ && exact;
    filled_[tensor] = step + 1;
    changed_.notify_all();
  }
}

}  // namespace weft::lab
