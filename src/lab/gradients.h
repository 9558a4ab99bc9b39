// Gradients whose sum is known: integers that differ by rank, element, tensor and step, small
// enough that fp32 adds them exactly.
//
//   value(i) = (7 i + 13 step + 31 tensor + seed) mod 97 + rank
//   sum over p ranks = p * ((7 i + 13 step + 31 tensor + seed) mod 97) + p (p - 1) / 2
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "weft/base.h"

namespace weft::lab {

class Gradients {
 public:
  Gradients(uint32_t rank, uint32_t ranks, uint64_t seed);

  void fill(std::span<float> data, uint32_t tensor, uint64_t step) const;
  // True if every element is the sum for `step`; leaves the values for `next_step`.
  bool verify_and_refill(std::span<float> data, uint32_t tensor, uint64_t step,
                         uint64_t next_step) const;

 private:
  const float* pattern(uint32_t tensor, uint64_t step) const;
  uint32_t rank_;
  uint32_t ranks_;
  uint64_t seed_;
  std::vector<float> table_;
};

// Verifies and refills in a thread of its own, so that a worker's emulated device never waits for
// work that a real one would not do. What backward needs first is done first.
class Checker {
 public:
  Checker(const Gradients& gradients, std::vector<std::span<float>> tensors);
  ~Checker();

  // The sum of `tensor` in `step` is there: verify it, then prepare the next step.
  void done(uint32_t tensor, uint64_t step);
  // Waits until `tensor` holds its values for `step`.
  void wait_filled(uint32_t tensor, uint64_t step);
  // Waits for everything, and says whether every sum was right.
  bool finish();

 private:
  void loop();
  const Gradients& gradients_;
  std::vector<std::span<float>> tensors_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::pair<int64_t, uint64_t>> queue_;  // (-tensor, step): the last tensor first
  std::vector<uint64_t> filled_;                  // by tensor: the step that it holds
  bool busy_ = false;
  bool stop_ = false;
  bool exact_ = true;
  std::thread thread_;
};

}  // namespace weft::lab
