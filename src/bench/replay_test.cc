#include "weft/bench.h"

#include <gtest/gtest.h>

namespace weft::bench {
namespace {

// Figures of time are not tested; that the job is as large as asked, and that the parts add up, is.
TEST(ReplaySpeed, SimulatesAsManyOperationsAsAsked) {
  ReplayOptions options;
  options.operations = 200'000;
  options.search = Nanos::from_millis(300);
  auto speed = replay_speed(options, monotonic_clock());
  ASSERT_TRUE(speed.ok()) << speed.error().message();
  EXPECT_GE(speed->operations, options.operations);
  EXPECT_GT(speed->events, 0u);
  EXPECT_GT(speed->seconds, 0);
  EXPECT_DOUBLE_EQ(speed->operations_per_second,
                   static_cast<double>(speed->operations) / speed->seconds);
  EXPECT_GT(speed->search_replays, 0u);
  EXPECT_GT(speed->replay_share_percent, 0);
  EXPECT_LE(speed->replay_share_percent, 100);
}

TEST(ReplaySpeed, TheJobIsTheSameEveryTime) {
  ReplayOptions options;
  options.operations = 50'000;
  options.search = Nanos::from_millis(50);
  auto first = replay_speed(options, monotonic_clock());
  auto second = replay_speed(options, monotonic_clock());
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->operations, second->operations);
  EXPECT_EQ(first->events, second->events);
  EXPECT_EQ(first->iterations, second->iterations);
}

}  // namespace
}  // namespace weft::bench
