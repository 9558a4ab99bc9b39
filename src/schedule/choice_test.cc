#include <gtest/gtest.h>

#include <random>

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

TEST(Choice, is_by_typical_costs_where_nothing_was_measured) {
  for (uint32_t p : {1u, 2u, 3u, 4u, 7u, 64u})
    EXPECT_EQ(choose_all_reduce({}, {p, 4, 1}).by_size,
              choose_all_reduce(cost::typical(), {p, 4, 1}).by_size);
  Choice choice = choose_all_reduce({}, {4, 1, 1});
  EXPECT_EQ(choice.at(1), Algorithm::doubling);
  EXPECT_EQ(choice.at(256u << 10), Algorithm::halving_doubling);
  EXPECT_EQ(choice.at(64u << 20), Algorithm::ring);
}

// What the equations say with known constants, with some noise, gives the constants back.
TEST(Fit, finds_the_constants_behind_the_times) {
  std::mt19937_64 rng(7);
  std::uniform_real_distribution<double> noise(0.98, 1.02);
  for (cost::Group group : {cost::Group{4, 1, 1}, cost::Group{7, 1, 1}, cost::Group{8, 1, 2}}) {
    cost::Costs truth = measured(2e9, 40e3);
    truth.copy_ns_per_byte = {0.3, 0.3, 0.3, 1};
    std::vector<Timed> timed;
    for (Algorithm algorithm : kAlgorithms)
      for (double bytes = 1024; bytes <= 64e6; bytes *= 4)
        if (auto seconds = all_reduce_seconds(truth, algorithm, bytes, group))
          timed.push_back({algorithm, bytes, *seconds * noise(rng)});
    auto costs = fit_all_reduces(timed, group);
    ASSERT_TRUE(costs) << costs.error().message();
    EXPECT_NEAR(costs->link_bytes_per_s->value, 2e9, 0.1e9);
    EXPECT_NEAR(costs->round_trip_idle_ns->value, 40e3, 4e3);
    for (const Timed& one : timed)
      EXPECT_NEAR(*all_reduce_seconds(*costs, one.algorithm, one.bytes, group), one.seconds,
                  0.05 * one.seconds)
          << name_of(one.algorithm) << " of " << one.bytes << " among " << group.ranks;
    EXPECT_EQ(costs->copy_ns_per_byte.has_value(), group.hosts > 1);
  }
}

TEST(Fit, of_nothing_or_of_nonsense_is_an_error) {
  EXPECT_FALSE(fit_all_reduces({}, {4, 1, 1}));
  std::vector<Timed> same = {{Algorithm::ring, 1024, 0}, {Algorithm::ring, 1024, -1}};
  EXPECT_FALSE(fit_all_reduces(same, {4, 1, 1}));
}

TEST(AlgorithmFor, takes_the_rule_for_the_size_and_asks_the_choice_for_auto) {
  plan::Plan plan;
  plan.algorithm = {{kib(4), "direct"}, {mib(1), "auto"}, {std::nullopt, "tree"}};
  Choice choice{{{256u << 10, Algorithm::doubling}, {UINT64_MAX, Algorithm::halving_doubling}}};
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
