#include <gtest/gtest.h>

#include "weft/schedule.h"

namespace weft::schedule {
namespace {

cost::Costs measured(double link, double round_trip_ns) {
  cost::Costs costs;
  costs.link_bytes_per_s = {link, link, link, 9};
  costs.round_trip_idle_ns = {round_trip_ns, round_trip_ns, round_trip_ns, 9};
  costs.cpu_ns_per_chunk = {5e3, 5e3, 5e3, 9};
  costs.reduce_ns_per_byte = {0.1, 0.1, 0.1, 9};
  return costs;
}

TEST(Choice, small_operations_take_few_steps_and_large_ones_few_bytes) {
  for (uint32_t p : {2u, 4u, 8u, 16u}) {
    Choice choice = choose_all_reduce(measured(1.25e9, 60e3), {p, 1, 1});
    EXPECT_EQ(choice.at(1024), Algorithm::doubling) << p;
    EXPECT_EQ(choice.at(1ull << 33), Algorithm::ring) << p;
    for (size_t i = 1; i < choice.by_size.size(); ++i)
      EXPECT_LT(choice.by_size[i - 1].first, choice.by_size[i].first);
  }
}

// No algorithm that is not chosen is clearly better by its own equation.
TEST(Choice, is_the_cheapest_by_the_equations) {
  cost::Costs costs = measured(1.25e9, 60e3);
  cost::Group group{8, 1, 2};
  costs.copy_ns_per_byte = {0.1, 0.1, 0.1, 9};
  Choice choice = choose_all_reduce(costs, group);
  for (uint64_t bytes = 256; bytes <= 1u << 30; bytes *= 2) {
    auto size = static_cast<double>(bytes);
    double chosen = *all_reduce_seconds(costs, choice.at(bytes), size, group);
    for (Algorithm algorithm : kAlgorithms)
      EXPECT_LE(0.95 * chosen, *all_reduce_seconds(costs, algorithm, size, group))
          << name_of(algorithm) << " at " << bytes;
  }
}

TEST(Choice, is_the_default_where_nothing_was_measured) {
  for (uint32_t p : {3u, 4u}) {
    Choice choice = choose_all_reduce({}, {p, 4, 1});
    EXPECT_EQ(choice.at(1), Algorithm::doubling);
    EXPECT_EQ(choice.at(256u << 10), p == 4 ? Algorithm::halving_doubling : Algorithm::ring);
    EXPECT_EQ(choice.at(64u << 20), Algorithm::ring);
  }
}

TEST(AlgorithmFor, takes_the_rule_for_the_size_and_asks_the_choice_for_auto) {
  plan::Plan plan;
  plan.algorithm = {{kib(4), "direct"}, {mib(1), "auto"}, {std::nullopt, "tree"}};
  Choice choice = default_choice(4);
  EXPECT_EQ(algorithm_for(plan, 4096, choice), Algorithm::direct);
  EXPECT_EQ(algorithm_for(plan, 4097, choice), Algorithm::doubling);
  EXPECT_EQ(algorithm_for(plan, 512u << 10, choice), Algorithm::halving_doubling);
  EXPECT_EQ(algorithm_for(plan, 2u << 20, choice), Algorithm::tree);
}

TEST(AlgorithmFor, every_word_of_a_plan_is_known) {
  for (const std::string& word : plan::algorithm_names())
    EXPECT_TRUE(word == "auto" || algorithm_named(word)) << word;
  EXPECT_FALSE(algorithm_named("rung"));
}

}  // namespace
}  // namespace weft::schedule
