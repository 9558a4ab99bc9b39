// A run whose plan changes, recorded by the runtime and read by analysis, which do not know each
// other: each plan's steps are a run of their own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "weft/analysis.h"
#include "weft/api.h"

namespace weft {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr uint32_t kRanks = 2, kLayers = 3;
constexpr uint64_t kStepsEach = 4;

plan::Plan named(const std::string& name, uint32_t lanes, uint64_t chunk_kib) {
  plan::Plan plan;
  plan.name = name;
  plan.bucket_rule = {kib(4), kib(4), true};
  plan.lanes = lanes;
  plan.chunk = kib(chunk_kib);
  return plan;
}

const std::vector<plan::Plan>& plans() {
  static const std::vector<plan::Plan> all = {named("first", 1, 256), named("second", 3, 256),
                                              named("third", 2, 16)};
  return all;
}

Result<void> train(api::Job& job) {
  std::vector<std::vector<float>> data(kLayers, std::vector<float>(20'000));
  std::vector<Tensor> tensors;
  for (uint32_t l = 0; l < kLayers; ++l) tensors.emplace_back(text("w%u", l), data[l], l);
  WEFT_ASSIGN(auto exchange, job.exchange(std::move(tensors)));
  mark::Marks& marks = job.marks();
  for (uint64_t step = 0; step < plans().size() * kStepsEach; ++step) {
    if (step > 0 && step % kStepsEach == 0)
      WEFT_TRY(exchange->change_plan(plans()[step / kStepsEach]));
    WEFT_TRY(marks.begin_iteration(step));
    for (uint32_t l = 0; l < kLayers; ++l) marks.forward(l).end();
    for (uint32_t l = kLayers; l-- > 0;) {
      {
        auto span = marks.backward(l);
        std::fill(data[l].begin(), data[l].end(), 1.0f);
      }
      WEFT_TRY(exchange->ready(l, step));
    }
    WEFT_TRY(exchange->wait_all(step));
    marks.update().end();
    for (const auto& sums : data)
      for (float sum : sums)
        if (sum != kRanks) return error(Code::corrupt, "a sum is %g", double{sum});
  }
  WEFT_TRY(marks.end_iteration());
  exchange.reset();
  WEFT_TRY(job.leave());
  return job.recorder().stop();
}

TEST(PlanChange, each_plans_steps_are_understood_as_a_run_of_their_own) {
  const std::string folder = testing::TempDir() + "/weft_plan_change_" + membership::new_secret();
  std::filesystem::create_directories(folder);
  std::vector<Result<void>> outcomes(kRanks);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < kRanks; ++rank)
    threads.emplace_back([&, rank] {
      api::JoinOptions options;
      options.membership.emplace();
      options.membership->rank = rank;
      options.membership->size = kRanks;
      options.membership->host = "here";
      options.membership->rendezvous = "file:" + folder + "/meeting";
      options.membership->secret = "00112233445566778899aabbccddeeff";
      options.plan = plans()[0];
      options.shared_memory = false;
      options.trace = folder;
      options.probe = false;
      options.environment = [](const char*) { return std::nullopt; };
      auto job = api::join(options);
      outcomes[rank] = job ? train(**job) : Result<void>(job.error());
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& outcome : outcomes) ASSERT_TRUE(outcome.ok()) << outcome.error().message();

  for (size_t p = 0; p < plans().size(); ++p) {
    SCOPED_TRACE(plans()[p].name);
    const bool last = p + 1 == plans().size();
    auto run = analysis::understand(folder, last ? "" : plans()[p].name);
    ASSERT_TRUE(run.ok()) << run.error().message();
    EXPECT_EQ(run->environment().plan_name, plans()[p].name);
    EXPECT_EQ(run->environment().plan_hash, plan::hash(plans()[p]));
    EXPECT_THAT(run->remarks, Contains(HasSubstr("the plan changed 2 times in this run")));
    for (const graph::Iteration& iteration : run->graph.iterations)
      EXPECT_EQ(iteration.number / kStepsEach, p);
    EXPECT_GE(run->graph.iterations.size(), kStepsEach - 1);
    // Every chunk went over a lane that this plan has.
    uint32_t lanes = 0;
    for (const trace::Process& process : run->trace.processes)
      for (const trace::Event& event : process.events)
        if (event.kind == trace::Kind::chunk && event.shape == trace::Shape::send)
          lanes = std::max(lanes, event.lane + 1u);
    EXPECT_LE(lanes, plans()[p].lanes);
    EXPECT_GE(lanes, 1u);
  }
  auto none = analysis::understand(folder, "fourth");
  ASSERT_FALSE(none.ok());
  EXPECT_THAT(none.error().message(), HasSubstr("no plan \"fourth\" was in force"));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace weft
