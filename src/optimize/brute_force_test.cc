// The search against every plan of a grid, on jobs small enough to try them all.
#include <gtest/gtest.h>

#include <algorithm>

#include "testing.h"

namespace weft::optimize {
namespace {

using plan::Plan;

struct Problem {
  testing::SmallJob job;
  cost::Costs costs;
};

Problem random_problem(uint64_t seed) {
  Rng rng(seed);
  Problem out;
  out.job.ranks = static_cast<uint32_t>(2 + rng.below(3));
  size_t tensors = 3 + rng.below(3);
  out.job.tensor_bytes.clear();
  out.job.forward_ns.clear();
  out.job.backward_ns.clear();
  for (size_t t = 0; t < tensors; ++t) {
    // From 16 KiB to 1 MiB, small ones as often as large ones.
    out.job.tensor_bytes.push_back((uint64_t{16384} << rng.below(7)) + 4 * rng.below(1000));
    out.job.forward_ns.push_back(static_cast<int64_t>(50'000 + rng.below(1'500'000)));
    out.job.backward_ns.push_back(static_cast<int64_t>(100'000 + rng.below(3'000'000)));
  }
  // Less credit than the link needs is tried only where it was recorded.
  if (rng.below(2) == 0) out.job.plan.credit = mib(8);
  double link = 0.3e9 + 1.2e9 * rng.uniform();
  double flow = rng.below(3) == 0 ? link : link / (1.5 + 4 * rng.uniform());
  out.costs = testing::costs_of(link, flow, 20'000 + 200'000 * rng.uniform());
  return out;
}

// Every way to cut the tensors, in backward order, into groups of neighbours.
std::vector<std::vector<plan::BucketSpec>> groupings(size_t tensors) {
  std::vector<std::vector<plan::BucketSpec>> out;
  for (uint32_t cuts = 0; cuts < (1u << (tensors - 1)); ++cuts) {
    std::vector<plan::BucketSpec> groups(1);
    for (size_t i = 0; i < tensors; ++i) {
      if (i > 0 && (cuts >> (i - 1) & 1) != 0) groups.emplace_back();
      groups.back().tensors.push_back(text("tensor%zu", tensors - 1 - i));
    }
    out.push_back(std::move(groups));
  }
  return out;
}

std::vector<Plan> grid(size_t tensors, std::optional<Bytes> recorded_credit) {
  std::vector<std::optional<Bytes>> credits = {std::nullopt};
  if (recorded_credit) credits.push_back(recorded_credit);
  std::vector<Plan> out;
  for (const auto& groups : groupings(tensors))
    for (uint32_t lanes : {1u, 6u})
      for (auto order : {plan::Order::ready, plan::Order::layer})
        for (auto barrier : {plan::Barrier::all, plan::Barrier::tensor})
          for (std::optional<Bytes> partition : {std::optional<Bytes>(), {mib(2)}, {mib(4)}})
            for (std::optional<Bytes> credit : credits) {
              Plan plan;
              plan.buckets = groups;
              plan.lanes = lanes;
              plan.order = order;
              plan.barrier = barrier;
              plan.partition = partition;
              plan.credit = credit;
              plan.chunk = mib(2);
              out.push_back(std::move(plan));
            }
  return out;
}

double best_of_grid(const replay::Replayer& replayer, size_t tensors) {
  double best = 0;
  for (const Plan& plan : grid(tensors, replayer.recorded_plan().credit)) {
    replay::Question question;
    question.plan = plan;
    question.iterations = 4;
    question.interval = false;
    auto answer = replayer.predict(question);
    EXPECT_TRUE(answer) << answer.error().message();
    if (best == 0 || answer->iteration_ns < best) best = answer->iteration_ns;
  }
  return best;
}

TEST(BruteForce, TheSearchIsWithinTwoPercentOfTheBestOfAllPlans) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE(text("seed %llu", static_cast<unsigned long long>(seed)));
    Problem problem = random_problem(seed);
    auto replayer = testing::replayer_of(problem.job, problem.costs);
    ASSERT_TRUE(replayer) << replayer.error().message();
    Options options;
    options.budget = Nanos::from_seconds(600);
    auto found = optimize(*replayer, options);
    ASSERT_TRUE(found) << found.error().message();
    EXPECT_TRUE(found->finished);
    double best = best_of_grid(*replayer, problem.job.tensor_bytes.size());
    EXPECT_LE(found->after.iteration_ns, best * 1.02);
  }
}

}  // namespace
}  // namespace weft::optimize
