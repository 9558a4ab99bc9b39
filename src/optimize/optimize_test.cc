#include "weft/optimize.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "edits.h"
#include "testing.h"

namespace weft::optimize {
namespace {

using plan::Plan;
using testing::costs_of;
using testing::replayer_of;
using testing::SmallJob;

constexpr Nanos kEnough = Nanos::from_seconds(600);

Options enough() {
  Options options;
  options.budget = kEnough;
  return options;
}

Plan ddp() { return *plan::preset("ddp"); }

// A link of which one flow carries a quarter.
replay::Replayer capped() {
  SmallJob job;
  job.ranks = 4;
  job.tensor_bytes = {1u << 20, 512u << 10, 256u << 10};
  job.plan = ddp();
  auto made = replayer_of(job, costs_of(1e9, 0.25e9));
  EXPECT_TRUE(made) << made.error().message();
  return std::move(*made);
}

TEST(Optimize, MoreLanesWhereOneFlowCannotFillTheLink) {
  auto replayer = capped();
  auto found = optimize(replayer, enough());
  ASSERT_TRUE(found) << found.error().message();
  EXPECT_TRUE(found->finished);
  EXPECT_EQ(found->plan.lanes, 5u);  // four fill it, and one more makes up for a slow one
  EXPECT_LT(found->after.iteration_ns, 0.7 * found->before.iteration_ns);
  EXPECT_LE(found->after.low_ns, found->after.iteration_ns);
  EXPECT_GE(found->after.high_ns, found->after.iteration_ns);
  EXPECT_EQ(found->plan.name, "optimized");
  EXPECT_EQ(found->plan.comment.find('\n'), std::string::npos);
  EXPECT_NE(found->plan.comment.find("small"), std::string::npos);
  EXPECT_NE(found->plan.comment.find(plan::hash(ddp())), std::string::npos);
  EXPECT_TRUE(plan::validate(found->plan));
  EXPECT_TRUE(schedule::supported(found->plan));
  EXPECT_GE(found->after.iteration_ns, found->bound_ns * 0.999);
  EXPECT_DOUBLE_EQ(found->floor_ns, *replayer.floor_ns());
  EXPECT_GT(found->replays, 10u);
  EXPECT_LE(found->replay_seconds, found->seconds);
}

// By replay alone four lanes and whole buckets would do.
TEST(Optimize, MarginsAreTakenForWhatReplayDoesNotSee) {
  SmallJob job;
  job.ranks = 4;
  job.tensor_bytes = {1u << 20, 512u << 10, 256u << 10};
  job.plan = ddp();
  job.plan.order = plan::Order::layer;
  auto replayer = replayer_of(job, costs_of(1e9, 0.25e9));
  ASSERT_TRUE(replayer) << replayer.error().message();
  auto found = optimize(*replayer, enough());
  ASSERT_TRUE(found) << found.error().message();
  EXPECT_EQ(found->plan.lanes, 5u);
  EXPECT_TRUE(found->plan.partition.has_value());
  EXPECT_TRUE(found->plan.credit.has_value());
}

TEST(Optimize, NotMoreLanesForNothing) {
  SmallJob job;
  job.ranks = 4;
  job.plan = ddp();
  job.plan.lanes = 8;
  auto replayer = replayer_of(job, costs_of(0.5e9, 0.5e9));
  ASSERT_TRUE(replayer);
  auto found = optimize(*replayer, enough());
  ASSERT_TRUE(found) << found.error().message();
  EXPECT_NE(found->plan, job.plan);  // buckets, order or barrier pay here
  EXPECT_EQ(found->plan.lanes, 1u);
  Plan one = found->plan;
  one.lanes = 1;
  replay::Question question;
  question.plan = one;
  question.interval = false;
  auto with_one = replayer->predict(question);
  ASSERT_TRUE(with_one);
  EXPECT_EQ(with_one->iteration_ns, found->after.iteration_ns);
}

TEST(Optimize, LanesStayWithinTheLimit) {
  auto replayer = capped();
  Options options = enough();
  options.max_lanes = 3;
  auto found = optimize(replayer, options);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->plan.lanes, 3u);
}

TEST(Optimize, TheSameSeedGivesTheSamePlan) {
  auto replayer = capped();
  Options options = enough();
  options.seed = 7;
  auto first = optimize(replayer, options);
  auto second = optimize(replayer, options);
  ASSERT_TRUE(first);
  ASSERT_TRUE(second);
  EXPECT_TRUE(first->finished);
  EXPECT_EQ(first->plan, second->plan);
  EXPECT_EQ(first->replays, second->replays);
  EXPECT_EQ(first->after.iteration_ns, second->after.iteration_ns);
  ASSERT_EQ(first->passes.size(), second->passes.size());
  for (size_t i = 0; i < first->passes.size(); ++i) {
    EXPECT_EQ(first->passes[i].tried, second->passes[i].tried);
    EXPECT_EQ(first->passes[i].kept, second->passes[i].kept);
  }
}

TEST(Optimize, WhatAPassDecidesStaysAsRecordedWithoutIt) {
  auto replayer = capped();
  for (const std::string& name : pass_names()) {
    SCOPED_TRACE(name);
    Options options = enough();
    options.without = {name};
    auto found = optimize(replayer, options);
    ASSERT_TRUE(found) << found.error().message();
    EXPECT_TRUE(same_in(name, found->plan, replayer.recorded_plan()));
    EXPECT_EQ(found->passes.size(), pass_names().size() - 1);
    for (const PassUse& use : found->passes) EXPECT_NE(use.name, name);
  }
  Options none = enough();
  none.without = pass_names();
  auto found = optimize(replayer, none);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->plan, replayer.recorded_plan());
  EXPECT_TRUE(found->decisions.empty());
}

TEST(Optimize, APassThatIsNotIsRefusedWithANearName) {
  auto replayer = capped();
  Options options;
  options.without = {"lane"};
  auto found = optimize(replayer, options);
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code(), Code::invalid_argument);
  EXPECT_NE(found.error().message().find("did you mean lanes?"), std::string::npos)
      << found.error().message();
}

TEST(Optimize, WithoutABudgetThePlanIsValidAndNotWorse) {
  auto replayer = capped();
  Options options;
  options.budget = {0};
  auto found = optimize(replayer, options);
  ASSERT_TRUE(found) << found.error().message();
  EXPECT_FALSE(found->finished);
  EXPECT_TRUE(plan::validate(found->plan));
  EXPECT_EQ(found->plan, replayer.recorded_plan());
  EXPECT_EQ(found->after.iteration_ns, found->before.iteration_ns);
  EXPECT_FALSE(found->remarks.empty());
}

TEST(Optimize, NeverWorseThanRecorded) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed);
    SmallJob job;
    job.shrink = 1;
    job.ranks = static_cast<uint32_t>(1 + rng.below(4));
    for (uint64_t& bytes : job.tensor_bytes) bytes = 4 * (1 + rng.below(200'000));
    job.plan.lanes = static_cast<uint32_t>(1 + rng.below(8));
    job.plan.chunk = kib(uint64_t{16} << rng.below(6));
    job.plan.partition = kib(uint64_t{64} << rng.below(6));
    job.plan.order = rng.below(2) == 0 ? plan::Order::ready : plan::Order::layer;
    auto replayer = replayer_of(job, costs_of(1e9, 1e9 / static_cast<double>(1 + rng.below(5))));
    ASSERT_TRUE(replayer);
    Options options = enough();
    options.seed = seed;
    auto found = optimize(*replayer, options);
    ASSERT_TRUE(found) << found.error().message();
    EXPECT_LE(found->after.iteration_ns, found->before.iteration_ns);
    // Small chunks are not trusted, unless they were recorded.
    EXPECT_GE(found->plan.chunk, std::min(kib(128), job.plan.chunk));
    // What was found, over more lanes: there is nothing left to gain, and a search that gives
    // lanes back and takes margins ends at plans that are a little worse than the recorded one.
    for (uint32_t more : {0u, 1u, 8u}) {
      job.plan = found->plan;
      job.plan.lanes += more;
      auto best = replayer_of(job, replayer->costs());
      ASSERT_TRUE(best) << best.error().message();
      auto again = optimize(*best, options);
      ASSERT_TRUE(again) << again.error().message();
      EXPECT_LE(again->after.iteration_ns, again->before.iteration_ns) << more;
    }
  }
}

TEST(Optimize, KeepsARecordedPlanThatCannotBeBeaten) {
  auto replayer = capped();
  auto first = optimize(replayer, enough());
  ASSERT_TRUE(first);
  SmallJob job;
  job.ranks = 4;
  job.tensor_bytes = {1u << 20, 512u << 10, 256u << 10};
  job.plan = first->plan;
  auto again = replayer_of(job, costs_of(1e9, 0.25e9));
  ASSERT_TRUE(again);
  auto second = optimize(*again, enough());
  ASSERT_TRUE(second);
  EXPECT_EQ(second->plan, first->plan);
  EXPECT_TRUE(second->decisions.empty());
  EXPECT_TRUE(std::any_of(second->remarks.begin(), second->remarks.end(), [](const auto& line) {
    return line.find("the recorded plan is kept") != std::string::npos;
  }));
}

TEST(Optimize, EveryDifferenceIsExplained) {
  auto replayer = capped();
  auto found = optimize(replayer, enough());
  ASSERT_TRUE(found);
  Plan before = replayer.recorded_plan();
  before.name = found->plan.name;
  before.comment = found->plan.comment;
  auto differences = plan::diff(before, found->plan);
  EXPECT_FALSE(differences.empty());
  for (const plan::Difference& difference : differences) {
    auto explained = std::find_if(found->decisions.begin(), found->decisions.end(),
                                  [&](const Decision& decision) {
                                    return difference.path == decision.field ||
                                           difference.path.starts_with(decision.field + "/");
                                  });
    ASSERT_NE(explained, found->decisions.end()) << difference.path;
    EXPECT_NE(explained->why.find("undone"), explained->why.find("no difference"));
    EXPECT_EQ(explained->why.find('\n'), std::string::npos);
  }
  auto lanes = std::find_if(found->decisions.begin(), found->decisions.end(),
                            [](const Decision& decision) { return decision.field == "/lanes"; });
  ASSERT_NE(lanes, found->decisions.end());
  EXPECT_NE(lanes->why.find("% longer"), std::string::npos) << lanes->why;
  EXPECT_NE(lanes->why.find("one flow carries 2.00 Gb/s of the link's 8.00 Gb/s"),
            std::string::npos)
      << lanes->why;
}

TEST(Optimize, LanesThatWereNotMeasuredAreLeftOutAndCounted) {
  SmallJob job;
  job.ranks = 4;
  job.plan = ddp();
  cost::Costs costs = costs_of(1e9, 0.25e9);
  costs.link_bytes_per_s = testing::exactly(0.5e9);
  costs.ring_rates = {{1, testing::exactly(0.25e9)}, {2, testing::exactly(0.5e9)}};
  costs.link_is_lower_bound = true;
  auto replayer = replayer_of(job, costs);
  ASSERT_TRUE(replayer);
  auto found = optimize(*replayer, enough());
  ASSERT_TRUE(found) << found.error().message();
  EXPECT_EQ(found->plan.lanes, 2u);
  EXPECT_TRUE(std::any_of(found->remarks.begin(), found->remarks.end(), [](const auto& line) {
    return line.find("cannot be replayed") != std::string::npos;
  }));
}

TEST(Optimize, FailsAsTheReplayerFails) {
  SmallJob job;
  job.plan.lanes = 4;
  cost::Costs nothing;
  auto replayer = replayer_of(job, nothing);
  ASSERT_TRUE(replayer);
  auto found = optimize(*replayer, enough());
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code(), Code::unsupported);
}

TEST(Space, WhatAutoMeansFollowsFromTheHosts) {
  SmallJob job;
  job.ranks = 8;
  job.host_of = {0, 0, 0, 0, 1, 1, 1, 1};
  cost::Costs costs = costs_of(1e9, 1e9);
  costs.copy_ns_per_byte = testing::exactly(0.05);
  costs.agreed = std::make_shared<const cost::Costs>(costs);
  auto replayer = replayer_of(job, costs);
  ASSERT_TRUE(replayer.ok()) << replayer.error().message();
  constexpr uint64_t kLarge = 64u << 20;
  auto space = make_space(*replayer, {});
  ASSERT_TRUE(space.ok()) << space.error().message();
  EXPECT_EQ(space->choice.at(kLarge), schedule::Algorithm::hierarchical);
  Options apart;
  apart.cluster.hosts = 8;
  space = make_space(*replayer, apart);
  ASSERT_TRUE(space.ok()) << space.error().message();
  EXPECT_NE(space->choice.at(kLarge), schedule::Algorithm::hierarchical);
}

// A job whose wire time is beyond its compute on both clusters, so that the link shows everywhere.
TEST(Optimize, AnotherClusterIsOptimizedForItself) {
  SmallJob job;
  job.ranks = 4;
  job.shrink = 1;
  job.tensor_bytes = {4u << 20, 8u << 20, 16u << 20};
  job.plan = ddp();
  auto replayer = replayer_of(job, costs_of(1e9, 0.25e9));
  ASSERT_TRUE(replayer) << replayer.error().message();
  Options options = enough();
  options.without = {"algorithm"};  // a ring fills a link by lanes alone
  auto here = optimize(*replayer, options);
  ASSERT_TRUE(here) << here.error().message();
  options.cluster.link_bits_per_s = 16e9;  // twice the link: eight flows fill it
  auto there = optimize(*replayer, options);
  ASSERT_TRUE(there) << there.error().message();
  EXPECT_NEAR(there->floor_ns / here->floor_ns, 0.5, 0.001);
  EXPECT_LT(here->plan.lanes, 8u);
  EXPECT_GE(there->plan.lanes, 8u);
  auto on_it = [&](const Plan& plan) {
    replay::Question question;
    question.plan = plan;
    question.cluster = options.cluster;
    return replayer->predict(question).value().iteration_ns;
  };
  EXPECT_EQ(there->before.iteration_ns, on_it(job.plan));
  EXPECT_EQ(there->after.iteration_ns, on_it(there->plan));
  EXPECT_LT(there->after.iteration_ns, 0.8 * on_it(here->plan));
}

TEST(Optimize, SaysWhatItDoes) {
  auto replayer = capped();
  Options options = enough();
  std::vector<std::string> lines;
  options.progress = [&](const std::string& line) { lines.push_back(line); };
  ASSERT_TRUE(optimize(replayer, options));
  ASSERT_GE(lines.size(), 3u);
  EXPECT_EQ(lines.front().rfind("as recorded", 0), 0u) << lines.front();
}

// ---- edits -----------------------------------------------------------------------------------

Space space_of_capped() {
  auto replayer = capped();
  auto space = make_space(replayer, Options{});
  EXPECT_TRUE(space);
  return *space;
}

TEST(Edits, AreValidAndDifferFromThePlan) {
  Space space = space_of_capped();
  for (const char* preset : {"ddp", "default", "horovod"}) {
    Plan plan = *plan::preset(preset);
    for (const std::string& pass : pass_names()) {
      SCOPED_TRACE(pass);
      auto made = pass == "boundaries" ? boundary_edits(plan, groups_of(plan, space), {0}, space)
                                       : edits(pass, plan, space);
      for (const Plan& edit : made) {
        EXPECT_TRUE(plan::validate(edit));
        EXPECT_NE(edit, plan);
        EXPECT_TRUE(schedule::make_layout(edit, space.tensors));
      }
      if (pass != "boundaries") {
        EXPECT_FALSE(made.empty());
      }
    }
  }
}

// Many ranks, high latency, small tensors: fewer steps win, and by far more than the caution asks.
TEST(Optimize, FewerStepsWhereStepsAreWhatCosts) {
  testing::SmallJob job;
  job.ranks = 8;
  job.tensor_bytes = {16384, 16384, 16384};
  job.plan.lanes = 1;
  auto replayer = replayer_of(job, testing::costs_of(1e9, 1e9, 2'000'000));
  ASSERT_TRUE(replayer) << replayer.error().message();
  Options options;
  options.budget = Nanos::from_seconds(600);
  auto found = optimize(*replayer, options);
  ASSERT_TRUE(found) << found.error().message();
  EXPECT_NE(found->plan.algorithm, job.plan.algorithm);
  bool explained = std::any_of(found->decisions.begin(), found->decisions.end(),
                               [](const Decision& each) { return each.field == "/algorithm"; });
  EXPECT_TRUE(explained);
  options.without = {"algorithm"};
  auto ring = optimize(*replayer, options);
  ASSERT_TRUE(ring) << ring.error().message();
  EXPECT_EQ(ring->plan.algorithm, job.plan.algorithm);
  EXPECT_LT(found->after.iteration_ns, 0.9 * ring->after.iteration_ns);
}

// What the processor costs is all that lanes wait for here.
TEST(Optimize, WorkersWhereOneThreadIsTheBottleneck) {
  testing::SmallJob job;
  job.plan.lanes = 4;
  cost::Costs costs = testing::costs_of(10e9, 10e9);
  costs.cpu_ns_per_byte = testing::exactly(8);
  costs.copy_ns_per_byte = testing::exactly(0.1);
  auto replayer = replayer_of(job, costs);
  ASSERT_TRUE(replayer) << replayer.error().message();
  Options options;
  options.budget = Nanos::from_seconds(600);
  auto found = optimize(*replayer, options);
  ASSERT_TRUE(found) << found.error().message();
  EXPECT_GT(found->plan.lane_workers, 1u);
  EXPECT_LE(found->plan.lane_workers, found->plan.lanes);
}

TEST(Edits, BoundariesMergeSplitAndMove) {
  Space space = space_of_capped();
  Plan plan;
  plan.buckets = {{{"tensor2", "tensor1"}, {}, {}}, {{"tensor0"}, {}, {}}};
  auto groups = groups_of(plan, space);
  EXPECT_EQ(groups, plan.buckets);
  std::vector<std::vector<plan::BucketSpec>> expected = {
      {{{"tensor2"}, {}, {}}, {{"tensor1"}, {}, {}}, {{"tensor0"}, {}, {}}},  // split
      {{{"tensor2", "tensor1", "tensor0"}, {}, {}}},                          // merged
      {{{"tensor2"}, {}, {}}, {{"tensor1", "tensor0"}, {}, {}}},              // moved
      {},                                                                     // by rule again
  };
  auto made = boundary_edits(plan, groups, {0}, space);
  ASSERT_EQ(made.size(), expected.size());
  for (size_t i = 0; i < made.size(); ++i) EXPECT_EQ(made[i].buckets, expected[i]) << i;
}

TEST(Edits, GroupsOfARuleAreItsBucketsInBackwardOrder) {
  Space space = space_of_capped();
  Plan plan;
  plan.bucket_rule = {kib(512), mib(1), true};
  auto groups = groups_of(plan, space);
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].tensors, std::vector<std::string>{"tensor2"});
  EXPECT_EQ(groups[2].tensors, std::vector<std::string>{"tensor0"});
}

}  // namespace
}  // namespace weft::optimize
