#include "weft/analysis.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

namespace weft::analysis {
namespace {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

cost::Fitted exactly(double value) { return {value, value, value, 8}; }

// A job of three layers on a link of 1 GB/s whose flows carry a quarter of it.
graph::Graph small_job(uint32_t ranks, const plan::Plan& plan) {
  graph::Graph graph;
  graph.ranks = ranks;
  graph.environment.ranks = ranks;
  graph.environment.cores = 4;
  graph.environment.plan_text = plan::canonical(plan);
  graph.model.name = "small";
  for (uint32_t l = 0; l < 3; ++l) {
    graph.model.layers.push_back({text("layer%u", l)});
    graph.model.tensors.push_back({text("tensor%u", l), 4'000'000, l, l, l});
  }
  for (uint32_t i = 0; i < 4; ++i) {
    graph::Iteration iteration;
    iteration.number = i;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      iteration.layers.emplace_back(3, graph::LayerTimes{2'000'000, 4'000'000, 100'000, 0, 0});
      iteration.start_ns.push_back(int64_t{i} * 1'000'000'000);
      iteration.end_ns.push_back(int64_t{i + 1} * 1'000'000'000);
    }
    graph.iterations.push_back(std::move(iteration));
  }
  return graph;
}

cost::Costs capped_link() {
  cost::Costs costs;
  costs.link_bytes_per_s = exactly(1e9);
  costs.flow_bytes_per_s = exactly(0.25e9);
  costs.ring_rates = {{1, exactly(0.25e9)}, {4, exactly(1e9)}};
  costs.round_trip_idle_ns = exactly(40'000);
  costs.cpu_ns_per_byte = exactly(0.05);
  costs.cpu_ns_per_chunk = exactly(2'000);
  costs.sending.cores = 4;
  return costs;
}

// What a run under `plan` would record.
trace::Trace predicted(const plan::Plan& plan, uint32_t ranks = 2) {
  auto replayer = replay::Replayer::make(small_job(ranks, plan), capped_link());
  EXPECT_TRUE(replayer.ok());
  replay::Question question;
  question.make_trace = true;
  question.interval = false;
  auto prediction = replayer->predict(question);
  EXPECT_TRUE(prediction.ok());
  return std::move(*prediction->trace);
}

// The same, as if it had been measured, with a probe that saw the link.
trace::Trace measured(const plan::Plan& plan, uint32_t ranks = 2) {
  trace::Trace trace = predicted(plan, ranks);
  for (trace::Process& process : trace.processes) {
    process.environment.predicted = false;
    for (uint32_t flows : {1u, 4u, 8u}) {
      trace::ProbeResult rate;
      rate.scope = trace::ProbeScope::ring;
      rate.flows = static_cast<uint16_t>(flows);
      rate.peer = (process.environment.rank + 1) % ranks;
      rate.chunk_bytes = 1 << 18;
      rate.bytes = uint64_t{std::min(flows, 4u)} * 25'000'000;
      rate.duration_ns = 100'000'000;
      process.probe.push_back(rate);
    }
  }
  return trace;
}

class Understanding : public ::testing::Test {
 protected:
  Understanding()
      : folder_(fs::path(::testing::TempDir()) /
                text("weft-analysis-%s-%d",
                     ::testing::UnitTest::GetInstance()->current_test_info()->name(), getpid())) {
    fs::remove_all(folder_);
  }
  ~Understanding() override { fs::remove_all(folder_); }

  std::string path(const char* name) const { return (folder_ / name).string(); }

  fs::path folder_;
};

TEST_F(Understanding, ARunIsReadBackAndReplaysAsItWas) {
  ASSERT_TRUE(write_run(measured(plan::Plan{}), path("run")).ok());
  auto analysis = analyze(path("run"));
  ASSERT_TRUE(analysis.ok()) << analysis.error().message();
  EXPECT_FALSE(analysis->recorded.predicted());
  EXPECT_GT(analysis->recorded.iteration_ms().value, 0);
  EXPECT_NEAR(analysis->replayer.fidelity().error_percent, 0, 1);
}

TEST_F(Understanding, ATraceWithoutAProbeIsReplayedByWhatItsLanesDid) {
  trace::Trace trace = measured(plan::Plan{});
  for (trace::Process& process : trace.processes) process.probe.clear();
  ASSERT_TRUE(write_run(trace, path("run")).ok());
  auto analysis = analyze(path("run"));
  ASSERT_TRUE(analysis.ok()) << analysis.error().message();
  EXPECT_THAT(analysis->recorded.remarks, Contains(HasSubstr("no probe")));
  replay::Question more;
  more.plan = plan::Plan{};
  more.plan->lanes = 8;
  auto prediction = analysis->replayer.predict(more);
  ASSERT_FALSE(prediction.ok());
  EXPECT_EQ(prediction.error().code(), Code::unsupported);
}

TEST_F(Understanding, WhatCannotBeReplayedIsSaidWithTheRun) {
  trace::Trace trace = measured(plan::Plan{});
  for (trace::Process& process : trace.processes) {
    process.probe.clear();
    std::erase_if(process.events,
                  [](const trace::Event& event) { return event.kind == trace::Kind::chunk; });
  }
  ASSERT_TRUE(write_run(trace, path("run")).ok());
  auto analysis = analyze(path("run"));
  ASSERT_FALSE(analysis.ok());
  EXPECT_THAT(analysis.error().message(), HasSubstr(path("run") + ": the trace has no probe"));
}

TEST_F(Understanding, ARunWhoseReplayIsTooLargeToRecordSaysSo) {
  auto recorded = understand(measured(plan::Plan{}));
  ASSERT_TRUE(recorded.ok()) << recorded.error().message();
  plan::Plan small_chunks;
  small_chunks.chunk = plan::kChunkMin;
  recorded->graph.environment.plan_text = plan::canonical(small_chunks);
  recorded->graph.model.tensors[0].bytes = 8'000'000'000;
  auto analysis = analyze(std::move(*recorded));
  ASSERT_FALSE(analysis.ok());
  EXPECT_THAT(analysis.error().message(), HasSubstr("too many to replay"));
}

TEST_F(Understanding, APredictedRunKeepsItsClockAndSaysWhatItIs) {
  trace::Trace trace = predicted(plan::Plan{});
  const trace::Process before = trace.processes[1];
  auto recorded = understand(std::move(trace));
  ASSERT_TRUE(recorded.ok()) << recorded.error().message();
  EXPECT_EQ(recorded->trace.processes[1].events, before.events);
  EXPECT_TRUE(recorded->predicted());
  EXPECT_THAT(recorded->remarks, Contains(HasSubstr("a prediction")));
  for (const align::HostClock& host : recorded->alignment.hosts) EXPECT_EQ(host.offset_ns, 0);
}

TEST_F(Understanding, AMissingRankIsNamedWithTheRun) {
  ASSERT_TRUE(write_run(measured(plan::Plan{}, 3), path("run")).ok());
  fs::remove(path("run") + "/" + trace::file_name(1));
  auto recorded = understand(path("run"));
  ASSERT_FALSE(recorded.ok());
  EXPECT_EQ(recorded.error().code(), Code::invalid_argument);
  EXPECT_THAT(recorded.error().message(), HasSubstr(path("run") + ": the trace of rank 1"));
}

TEST_F(Understanding, OneFileOfARunIsAnsweredWithWhatToName) {
  ASSERT_TRUE(write_run(measured(plan::Plan{}), path("run")).ok());
  auto recorded = understand(path("run") + "/" + trace::file_name(0));
  ASSERT_FALSE(recorded.ok());
  EXPECT_THAT(recorded.error().message(), HasSubstr("name the folder of the run"));
}

TEST_F(Understanding, NoSuchRunIsNotFound) {
  auto recorded = understand(path("nothing"));
  ASSERT_FALSE(recorded.ok());
  EXPECT_THAT(recorded.error().message(), HasSubstr("nothing"));
}

TEST_F(Understanding, OneIterationIsEnoughAndIsSaid) {
  trace::Trace trace = measured(plan::Plan{});
  for (trace::Process& process : trace.processes) {
    // The next one begins, and then the record ends.
    std::erase_if(process.events, [](const trace::Event& event) {
      bool begins = event.iteration == 1 && event.kind == trace::Kind::forward && event.layer == 0;
      return event.iteration != trace::kNone && event.iteration > 0 && !begins &&
             event.kind != trace::Kind::update;
    });
  }
  auto recorded = understand(std::move(trace));
  ASSERT_TRUE(recorded.ok()) << recorded.error().message();
  EXPECT_EQ(recorded->graph.iterations.size(), 1u);
  EXPECT_THAT(recorded->remarks, Contains(HasSubstr("only 1 iteration")));
  auto analysis = analyze(std::move(*recorded));
  ASSERT_TRUE(analysis.ok()) << analysis.error().message();
  EXPECT_GT(analysis->replayer.fidelity().measured_ns, 0);
}

TEST_F(Understanding, NoIterationIsAnError) {
  trace::Trace trace = measured(plan::Plan{});
  for (trace::Process& process : trace.processes) process.events.clear();
  auto recorded = understand(std::move(trace));
  ASSERT_FALSE(recorded.ok());
  EXPECT_THAT(recorded.error().message(), HasSubstr("no forward and no backward of any layer"));
}

TEST_F(Understanding, ARunWithoutCommunicationIsReplayedAsCompute) {
  trace::Trace trace = measured(plan::Plan{});
  for (trace::Process& process : trace.processes)
    std::erase_if(process.events, [](const trace::Event& event) {
      switch (event.kind) {
        case trace::Kind::forward:
        case trace::Kind::backward:
        case trace::Kind::update:
        case trace::Kind::iteration: return false;
        default: return true;
      }
    });
  auto recorded = understand(std::move(trace));
  ASSERT_TRUE(recorded.ok()) << recorded.error().message();
  auto analysis = analyze(std::move(*recorded));
  ASSERT_TRUE(analysis.ok()) << analysis.error().message();
  EXPECT_THAT(analysis->recorded.remarks, Contains(HasSubstr("moved no gradient")));
  EXPECT_GT(analysis->replayer.fidelity().replayed_ns, 0);
  EXPECT_EQ(analysis->replayer.gradient_bytes(), 0);
}

TEST_F(Understanding, ATraceWithoutAPlanCannotBeReplayedButCompared) {
  trace::Trace trace = measured(plan::Plan{});
  for (trace::Process& process : trace.processes) process.environment.plan_text.clear();
  auto recorded = understand(std::move(trace));
  ASSERT_TRUE(recorded.ok());
  EXPECT_FALSE(compare(*recorded, *recorded).plan.has_value());
  auto analysis = analyze(std::move(*recorded));
  ASSERT_FALSE(analysis.ok());
  EXPECT_EQ(analysis.error().code(), Code::unsupported);
  EXPECT_THAT(analysis.error().message(), HasSubstr("the plan that was in force"));
}

TEST_F(Understanding, ARunDoesNotDifferFromItself) {
  auto recorded = understand(measured(plan::Plan{}));
  ASSERT_TRUE(recorded.ok());
  Comparison found = compare(*recorded, *recorded);
  EXPECT_EQ(found.percent(), 0);
  EXPECT_THAT(*found.plan, IsEmpty());
  for (const auto* rows : {&found.kinds, &found.ranks, &found.layers}) {
    EXPECT_FALSE(rows->empty());
    for (const Row& row : *rows) EXPECT_EQ(row.before, row.after) << row.what;
  }
}

TEST_F(Understanding, PlansThatDifferAreComparedWithTheirTimes) {
  plan::Plan faster;
  faster.lanes = 4;
  auto before = understand(measured(plan::Plan{}, 4)), after = understand(measured(faster, 3));
  ASSERT_TRUE(before.ok() && after.ok());
  Comparison found = compare(*before, *after);
  EXPECT_LT(found.percent(), -10);
  ASSERT_EQ(found.plan->size(), 1u);
  EXPECT_EQ(found.plan->front().path, "/lanes");
  ASSERT_EQ(found.ranks.size(), 4u);
  EXPECT_TRUE(found.ranks[3].before.has_value());
  EXPECT_FALSE(found.ranks[3].after.has_value());
  double work = 0;
  for (size_t i = 0; i < 4; ++i) work += *found.kinds[i].before;
  EXPECT_NEAR(work, found.before.value, 0.05 * found.before.value);
}

TEST_F(Understanding, ARunIsNotWrittenOverSomethingElse) {
  fs::create_directories(path("run"));
  ASSERT_TRUE(write_file(path("run") + "/precious", "kept").ok());
  auto written = write_run(measured(plan::Plan{}), path("run"));
  ASSERT_FALSE(written.ok());
  EXPECT_EQ(written.error().code(), Code::invalid_argument);
}

}  // namespace
}  // namespace weft::analysis
