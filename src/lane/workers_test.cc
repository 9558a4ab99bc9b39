// Lanes that workers serve: the times that they tell.
#include <gtest/gtest.h>

#include "weft_testing/chunks.h"
#include "weft_testing/loopback.h"

namespace weft::lane {
namespace {

using Role = Lane::Role;

// A clock of its own time, whose reader is now and then interrupted just before or after he looks.
class InterruptedClock final : public Clock {
 public:
  explicit InterruptedClock(uint64_t seed) : rng_(seed) {}
  Nanos now() const override {
    uint64_t when = rng_.below(4);
    if (when == 0) pause_ms(kInterruptedMs);
    Nanos seen = monotonic_clock().now() + kAhead;
    if (when == 1) pause_ms(kInterruptedMs);
    return seen;
  }
  static constexpr Nanos kAhead = Nanos::from_seconds(20000);
  static constexpr int kInterruptedMs = 3;

 private:
  mutable Rng rng_;  // of the thread that drives
};

// `first` and `last` of a chunk come to the owner together, and are put on his clock together:
// an interruption between two looks at the clocks is not part of a chunk, and must not turn it
// around.
TEST(LaneWorkers, tell_times_in_order_on_the_clock_of_their_owner) {
  constexpr uint32_t kChunks = 60;
  InterruptedClock clock(7);
  TestHandler handler;
  for (uint32_t i = 0; i < kChunks; ++i) handler.queue(0, i, {noise(100 + i, i)});
  auto world = new_reactor();
  LaneWorkers::Options options;
  options.lanes = 2;
  options.chunk_bytes = 4096;
  std::optional<Error> failure;
  auto workers = LaneWorkers::start(options, *world, handler, clock,
                                    [&](uint32_t, Error error) { failure = std::move(error); });
  ASSERT_TRUE(workers);
  auto [one, two] = tcp_pair();
  const Nanos begin = monotonic_clock().now() + InterruptedClock::kAhead;
  auto in = (*workers)->serve(Role::in, net::adopt(std::move(two)), 0, 0, cost::unsent_limit(4096));
  auto out =
      (*workers)->serve(Role::out, net::adopt(std::move(one)), 0, 1, cost::unsent_limit(4096));
  ASSERT_TRUE(turn_until(*world, [&] {
    while (out->ready() && out->send_one()) {
    }
    return handler.arrived_.size() == kChunks && handler.settled_.size() == kChunks;
  })) << (failure ? failure->message() : "");
  const Nanos end = monotonic_clock().now() + InterruptedClock::kAhead;
  // A look that was interrupted moves all of a chunk by that; another clock would be hours away.
  const Nanos earliest = begin - Nanos::from_seconds(100);
  ASSERT_EQ(handler.moments.size(), 2 * kChunks);
  for (const Moment& when : handler.moments) {
    EXPECT_LE(when.first, when.last);
    EXPECT_GE(when.first, earliest);
    EXPECT_LE(when.last, end);
  }
}

}  // namespace
}  // namespace weft::lane
