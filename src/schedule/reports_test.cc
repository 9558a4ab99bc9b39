// The way to rank 0: the tree, who has to say what in it, and when it is worth its connections.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>

#include "weft/schedule.h"

namespace weft::schedule {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Layout buckets_of(uint32_t count) {
  plan::Plan plan;
  plan.bucket_rule = {Bytes{1}, Bytes{1}, false};  // a bucket for each tensor
  std::vector<Tensor> tensors;
  for (uint32_t i = 0; i < count; ++i) tensors.push_back({text("t%u", i), 1000, i});
  auto layout = make_layout(plan, tensors);
  WEFT_CHECK(layout.ok());
  return *layout;
}

TEST(Tree, every_rank_has_one_above_and_no_more_below_than_the_fan_out) {
  for (uint32_t ranks : {1u, 2u, 3u, 7u, 8u, 40u, 1024u})
    for (uint32_t fan_out : {1u, 2u, 3u, 32u, 5000u}) {
      Tree tree{ranks, fan_out};
      std::vector<uint32_t> above(ranks, ranks);
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        EXPECT_LE(tree.below(rank), fan_out);
        for (uint32_t i = 0; i < tree.below(rank); ++i) {
          const uint32_t below = tree.first_below(rank) + i;
          ASSERT_LT(below, ranks);
          EXPECT_EQ(above[below], ranks) << "it has two above it";
          above[below] = rank;
          EXPECT_EQ(tree.above(below), rank);
          EXPECT_EQ(tree.depth(below), tree.depth(rank) + 1);
        }
        EXPECT_LE(tree.depth(rank), tree.depth());
      }
      EXPECT_EQ(std::count(above.begin(), above.end(), ranks), 1) << "only rank 0 has none";
      EXPECT_EQ(tree.is_flat(), tree.depth() <= 1);
    }
  EXPECT_EQ(Tree({1024, 32}).depth(), 2u);
  EXPECT_EQ(Tree({1024, 2}).depth(), 10u);
  EXPECT_EQ(Tree::flat(1024).below(0), 1023u);
  EXPECT_TRUE(Tree::flat(1).is_flat() && Tree::flat(2).is_flat() && Tree::flat(3).is_flat());
}

cost::Costs costs_of(double round_trip_us, double message_us) {
  auto exactly = [](double value) { return cost::Fitted{value, value, value, 1}; };
  cost::Costs costs;
  costs.round_trip_idle_ns = exactly(round_trip_us * 1e3);
  costs.cpu_ns_per_chunk = exactly(message_us * 1e3);
  return costs;
}

// A level takes a round trip and a message for each rank below: 60 us + 2 us * fan-out.
TEST(Tree, is_chosen_where_it_halves_the_time_of_an_agreement) {
  const cost::Costs costs = costs_of(60, 2);
  EXPECT_NEAR(*cost::agreement_seconds(costs, 1023, 1), 2106e-6, 1e-12);
  EXPECT_NEAR(*cost::agreement_seconds(costs, 32, 2), 248e-6, 1e-12);
  EXPECT_EQ(cost::agreement_seconds({}, 32, 2), std::nullopt);
  // Three levels of 10 would be 240 us: what they save is no level's worth.
  EXPECT_EQ(choose_tree(costs, 1024), (Tree{1024, 32}));
  // 127 below are 314 us, two levels of 11 are 164: not half. 159 are 378, and two of 13 are 172.
  EXPECT_TRUE(choose_tree(costs, 128).is_flat());
  EXPECT_EQ(choose_tree(costs, 160), (Tree{160, 13}));
  // Where messages cost nothing, more levels are only slower.
  EXPECT_TRUE(choose_tree(costs_of(60, 0), 4096).is_flat());
  // What is not known is typical().
  EXPECT_EQ(choose_tree({}, 1024), choose_tree(cost::typical(), 1024));
  EXPECT_EQ(choose_tree({}, 1024), (Tree{1024, 32}));
  // By typical() 19 are 280 us, and two levels of 4 are 140.
  for (uint32_t ranks = 1; ranks <= 19; ++ranks) EXPECT_TRUE(choose_tree({}, ranks).is_flat());
  EXPECT_EQ(choose_tree({}, 20), (Tree{20, 4}));
  cost::Costs fitted = costs_of(1, 1);
  EXPECT_EQ(tree_of_run(fitted, 1024), choose_tree(cost::typical(), 1024));
  fitted.agreed = std::make_shared<cost::Costs>(costs);
  EXPECT_EQ(tree_of_run(fitted, 1024), choose_tree(costs, 1024));
}

TEST(Reports, pass_on_a_bucket_that_a_rank_and_all_below_it_have) {
  Layout layout = buckets_of(2);
  Reports reports(layout, {9, 2}, {1});  // below it are 3 and 4
  EXPECT_FALSE(*reports.ready({3}, 0, 0));
  EXPECT_FALSE(*reports.ready({1}, 0, 0));
  EXPECT_FALSE(*reports.ready({4}, 1, 0));
  ASSERT_TRUE(reports.lacking());
  EXPECT_EQ(reports.lacking()->bucket, 0u);
  EXPECT_THAT(reports.lacking()->missing, ElementsAre(Rank{4}));
  EXPECT_THAT(reports.missing(1, 0), ElementsAre(Rank{1}, Rank{3}));
  EXPECT_TRUE(*reports.ready({4}, 0, 0));
  EXPECT_THAT(reports.missing(0, 0), IsEmpty());
  EXPECT_FALSE(*reports.ready({3}, 1, 0));
  EXPECT_TRUE(*reports.ready({1}, 1, 0));
  EXPECT_FALSE(reports.lacking());
  EXPECT_FALSE(*reports.ready({3}, 0, 1));
}

TEST(Reports, refuse_whoever_is_not_right_below_and_steps_that_are_not_due) {
  Layout layout = buckets_of(2);
  Reports reports(layout, {9, 2}, {1});
  for (uint32_t stranger : {0u, 2u, 5u, 7u, 9u, 0xffffffffu})
    EXPECT_FALSE(reports.ready({stranger}, 0, 0)) << stranger;
  EXPECT_FALSE(reports.ready({3}, 2, 0));  // no such bucket
  EXPECT_FALSE(reports.ready({3}, 0, 1));
  ASSERT_TRUE(reports.ready({3}, 0, 0));
  EXPECT_FALSE(reports.ready({3}, 0, 0));
  Reports leaf(layout, {9, 2}, {8});
  EXPECT_TRUE(*leaf.ready({8}, 0, 0));
  for (uint32_t stranger : {0u, 7u, 9u, 17u, 18u}) EXPECT_FALSE(leaf.ready({stranger}, 0, 0));
}

// Whatever the tree, an operation starts when the last rank has its data, in the order that rank 0
// chooses without one; and nobody handles more than a frame for each rank below.
TEST(Reports, of_any_tree_make_the_order_of_a_flat_one) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed);
    const auto ranks = static_cast<uint32_t>(1 + rng.below(40));
    const Tree tree{ranks, static_cast<uint32_t>(1 + rng.below(6))};
    const auto buckets = static_cast<uint32_t>(1 + rng.below(5));
    constexpr uint64_t kSteps = 3;
    Layout layout = buckets_of(buckets);
    Admission flat(layout, Tree::flat(ranks)), admission(layout, tree);
    std::vector<Reports> reports;
    for (uint32_t rank = 0; rank < ranks; ++rank) reports.emplace_back(layout, tree, Rank{rank});
    std::vector<std::deque<std::pair<uint32_t, uint64_t>>> due(ranks);
    for (auto& own : due)
      for (uint64_t step = 0; step < kSteps; ++step) {
        std::vector<uint32_t> order(buckets);
        for (uint32_t b = 0; b < buckets; ++b) order[b] = b;
        rng.shuffle(std::span(order));
        for (uint32_t b : order) own.emplace_back(b, step);
      }
    uint64_t started = 0, frames = 0;
    for (uint64_t left = ranks * kSteps * buckets; left > 0; --left) {
      uint32_t rank;
      do rank = static_cast<uint32_t>(rng.below(ranks));
      while (due[rank].empty());
      auto [bucket, step] = due[rank].front();
      due[rank].pop_front();
      ASSERT_TRUE(flat.ready({rank}, bucket, step));
      uint32_t at = rank, from = rank;
      for (;; from = at, at = tree.above(at), ++frames) {
        if (at == 0) {
          ASSERT_TRUE(admission.ready({from}, bucket, step));
          break;
        }
        auto all = reports[at].ready({from}, bucket, step);
        ASSERT_TRUE(all.ok()) << all.error().message();
        if (!*all) break;
      }
      for (;;) {
        auto one = flat.next(), other = admission.next();
        ASSERT_EQ(one.has_value(), other.has_value());
        if (!one) break;
        ++started;
        EXPECT_EQ(one->operation, other->operation);
        EXPECT_EQ(one->piece, other->piece);
        EXPECT_EQ(one->step, other->step);
        ASSERT_TRUE(flat.finished(one->operation) && admission.finished(one->operation));
      }
    }
    EXPECT_EQ(started, layout.pieces.size() * kSteps);
    EXPECT_EQ(frames, (ranks - 1) * kSteps * buckets);
    EXPECT_FALSE(admission.lacking());
  }
}

}  // namespace
}  // namespace weft::schedule
