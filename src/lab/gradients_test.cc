#include "gradients.h"

#include <gtest/gtest.h>

namespace weft::lab {
namespace {

TEST(Gradients, are_what_the_formula_says_and_their_sum_is_recognised) {
  constexpr uint32_t kRanks = 3;
  constexpr uint64_t kSeed = 5;
  for (size_t n : {size_t{0}, size_t{1}, size_t{97 * 64}, size_t{20001}}) {
    std::vector<float> sum(n, 0);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      std::vector<float> data(n);
      Gradients(rank, kRanks, kSeed).fill(data, 4, 9);
      for (size_t i = 0; i < n; ++i) {
        ASSERT_EQ(data[i], static_cast<float>((7 * i + 13 * 9 + 31 * 4 + kSeed) % 97 + rank));
        sum[i] += data[i];
      }
    }
    Gradients mine(1, kRanks, kSeed);
    std::vector<float> wrong = sum;
    EXPECT_TRUE(mine.verify_and_refill(sum, 4, 9, 10));
    std::vector<float> next(n);
    mine.fill(next, 4, 10);
    EXPECT_EQ(sum, next);
    if (n == 0) continue;
    wrong[n - 1] += 1;
    EXPECT_FALSE(mine.verify_and_refill(wrong, 4, 9, 10)) << "one wrong element is seen";
  }
}

TEST(Checker, sees_one_wrong_sum_among_many) {
  for (bool damage : {false, true}) {
    Gradients gradients(0, 1, 7);  // of one rank: its own values are the sum
    std::vector<std::vector<float>> memory(5, std::vector<float>(1000));
    std::vector<std::span<float>> spans(memory.begin(), memory.end());
    Checker checker(gradients, spans);
    for (uint64_t step = 0; step < 3; ++step)
      for (uint32_t t = 0; t < 5; ++t) {
        checker.wait_filled(t, step);
        if (damage && step == 1 && t == 3) memory[t][500] += 1;
        checker.done(t, step);
      }
    EXPECT_EQ(checker.finish(), !damage);
  }
}

}  // namespace
}  // namespace weft::lab
