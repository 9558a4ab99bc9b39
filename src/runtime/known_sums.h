// Gradients whose sums are known, for the tests of exchanges.
#pragma once

#include <gtest/gtest.h>

#include "weft/runtime.h"

namespace weft::runtime::testing_support {

inline void expect_ok(const std::vector<Result<void>>& outcomes) {
  for (size_t r = 0; r < outcomes.size(); ++r)
    EXPECT_TRUE(outcomes[r].ok()) << "rank " << r << ": "
                                  << (outcomes[r].ok() ? "" : outcomes[r].error().message());
}

// Integers that differ by rank, element, tensor and step; sums stay exact in fp32.
inline float value(uint64_t i, uint64_t tensor, uint64_t step, uint32_t rank) {
  return static_cast<float>((i * 7 + step * 13 + tensor * 31) % 97 + rank);
}
inline float sum(uint64_t i, uint64_t tensor, uint64_t step, uint32_t ranks) {
  uint64_t of_ranks = uint64_t{ranks} * (ranks - 1) / 2;
  return static_cast<float>(ranks * ((i * 7 + step * 13 + tensor * 31) % 97) + of_ranks);
}

}  // namespace weft::runtime::testing_support
