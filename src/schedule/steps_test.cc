#include <gtest/gtest.h>

#include <algorithm>

#include "weft/schedule.h"

namespace weft::schedule {
namespace {

// All ranks of one operation in one thread; messages are delivered in a random order.
struct World {
  uint32_t ranks;
  std::vector<RingSteps> steps;
  std::vector<std::vector<double>> data;
  std::vector<uint64_t> sent_elements;
  struct Message {
    uint32_t to;
    ChunkId id;
    std::vector<double> values;
  };
  std::vector<Message> wire;

  World(Collective collective, uint32_t p, uint64_t n, uint64_t chunk, Rank root) : ranks(p) {
    for (uint32_t r = 0; r < p; ++r) {
      steps.emplace_back(collective, Rank{r}, p, n, chunk, root);
      data.emplace_back(n);
      for (uint64_t i = 0; i < n; ++i) data[r][i] = static_cast<double>(i * 10 + r);
    }
    sent_elements.resize(p);
  }

  void send(uint32_t rank, ChunkId id) {
    ChunkRange range = steps[rank].outgoing(id);
    auto first = data[rank].begin() + static_cast<ptrdiff_t>(range.first);
    wire.push_back(
        {(rank + 1) % ranks, id, {first, first + static_cast<ptrdiff_t>(range.elements)}});
    sent_elements[rank] += range.elements;
    steps[rank].sent(id);
  }

  void run(Rng& rng) {
    for (uint32_t r = 0; r < ranks; ++r)
      for (ChunkId id : steps[r].start()) send(r, id);
    while (!wire.empty()) {
      size_t which = rng.below(wire.size());
      Message message = std::move(wire[which]);
      wire.erase(wire.begin() + static_cast<ptrdiff_t>(which));
      auto range = steps[message.to].arriving(message.id);
      ASSERT_TRUE(range) << range.error().message();
      ASSERT_EQ(range->elements, message.values.size());
      for (uint64_t i = 0; i < range->elements; ++i) {
        double& value = data[message.to][range->first + i];
        value = range->reduce ? value + message.values[i] : message.values[i];
      }
      auto next = steps[message.to].received(message.id);
      EXPECT_FALSE(steps[message.to].arriving(message.id)) << "a second copy must be refused";
      if (next) send(message.to, *next);
    }
    for (uint32_t r = 0; r < ranks; ++r) EXPECT_TRUE(steps[r].finished()) << "rank " << r;
  }
};

// What element i of World::data adds up to over all ranks.
double summed(uint64_t i, uint32_t p) {
  uint64_t of_ranks = uint64_t{p} * (p - 1) / 2;
  return static_cast<double>(i * 10 * p + of_ranks);
}

class Ring : public testing::TestWithParam<std::tuple<uint32_t, uint64_t, uint64_t>> {};

TEST_P(Ring, all_reduce_sums_everywhere_and_moves_what_the_formula_says) {
  auto [p, n, chunk] = GetParam();
  Rng rng(p * 1000 + n);
  World world(Collective::all_reduce, p, n, chunk, {0});
  world.run(rng);
  uint64_t total_sent = 0;
  for (uint32_t r = 0; r < p; ++r) {
    total_sent += world.sent_elements[r];
    for (uint64_t i = 0; i < n; ++i) ASSERT_EQ(world.data[r][i], summed(i, p));
  }
  EXPECT_EQ(total_sent, 2 * (p - 1) * n);  // 2(p-1)/p * n a rank, on average
}

TEST_P(Ring, reduce_scatter_then_all_gather_is_all_reduce) {
  auto [p, n, chunk] = GetParam();
  Rng rng(p * 77 + n);
  World scatter(Collective::reduce_scatter, p, n, chunk, {0});
  scatter.run(rng);
  for (uint32_t r = 0; r < p; ++r) {
    ChunkRange own = scatter.steps[r].owned();
    for (uint64_t i = own.first; i < own.first + own.elements; ++i)
      ASSERT_EQ(scatter.data[r][i], summed(i, p));
  }
  World gather(Collective::all_gather, p, n, chunk, {0});
  gather.data = scatter.data;
  gather.run(rng);
  for (uint32_t r = 0; r < p; ++r)
    for (uint64_t i = 0; i < n; ++i) ASSERT_EQ(gather.data[r][i], summed(i, p));
}

TEST_P(Ring, broadcast_reaches_all_from_every_root) {
  auto [p, n, chunk] = GetParam();
  for (uint32_t root = 0; root < p; ++root) {
    Rng rng(root);
    World world(Collective::broadcast, p, n, chunk, {root});
    world.run(rng);
    for (uint32_t r = 0; r < p; ++r)
      for (uint64_t i = 0; i < n; ++i)
        ASSERT_EQ(world.data[r][i], static_cast<double>(i * 10 + root));
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Ring,
                         testing::Combine(testing::Values(1u, 2u, 3u, 5u, 8u),
                                          testing::Values(0u, 1u, 2u, 7u, 64u, 1003u),
                                          testing::Values(1u, 16u, 4096u)));

TEST(RingSteps, refuses_chunks_that_are_not_due) {
  RingSteps steps(Collective::all_reduce, {0}, 3, 100, 10);
  EXPECT_TRUE(steps.arriving({0, 0}));
  EXPECT_FALSE(steps.arriving({4, 0}));  // there are steps 0 to 3
  EXPECT_FALSE(steps.arriving({0, 1000}));
  steps.received({0, 0});
  EXPECT_FALSE(steps.arriving({0, 0}));
}

}  // namespace
}  // namespace weft::schedule
