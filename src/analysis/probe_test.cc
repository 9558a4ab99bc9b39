// Runs whose gradients somebody else summed, understood with a probe that was taken apart.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "weft/analysis.h"

namespace weft::analysis {
namespace {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using trace::Event;
using trace::Kind;
using trace::Shape;

constexpr uint32_t kCalled = 1u << 31;
constexpr int64_t kMs = 1'000'000;
constexpr uint64_t kBytes = 4'000'000;  // of each of two gradients

// Two ranks, two layers, a bucket each, as DDP over Gloo. Forward takes 1 ms a layer, backward 2
// ms, the update 0.5 ms. The first sum ends within backward, the second `exposed` after it, and DDP
// then copies for 0.1 ms.
struct OverGloo {
  uint32_t iterations = 8;
  int64_t exposed = 3 * kMs;
  double forward_on_a_core = 1, backward_on_a_core = 1;  // share of its time in which it had one
  bool processor_times = false;

  trace::Trace trace() const {
    trace::Trace out;
    for (uint32_t rank = 0; rank < 2; ++rank) out.processes.push_back(process(rank));
    return out;
  }
  int64_t iteration_ns() const { return 2 * kMs + 4 * kMs + exposed + kMs / 10 + kMs / 2; }

 private:
  trace::Process process(uint32_t rank) const {
    trace::Process out;
    out.environment.rank = rank;
    out.environment.ranks = 2;
    out.environment.host = "here";
    out.environment.cores = 4;
    out.environment.plan_text = plan::canonical(*plan::preset("ddp"));
    out.model.layers = {{"first"}, {"last"}};
    out.model.tensors = {{"first.weight", kBytes, 0, 0, 0}, {"last.weight", kBytes, 1, 1, 1}};
    out.tracks = {{trace::TrackType::thread, "thread", trace::kNone16, trace::kNone16}};
    out.clock_samples.push_back({0, 1'000'000'000'000});
    for (uint32_t i = 0; i < iterations; ++i) {
      int64_t at = int64_t{i} * iteration_ns();
      add(out, Kind::iteration, i, at, iteration_ns());
      for (uint32_t layer : {0u, 1u})
        at = compute(out, Kind::forward, i, layer, at, kMs, forward_on_a_core);
      for (uint32_t layer : {1u, 0u}) {
        at = compute(out, Kind::backward, i, layer, at, 2 * kMs, backward_on_a_core);
        Event& ready = add(out, Kind::gradient_ready, i, at, 0);
        ready.shape = Shape::instant;
        ready.tensor = layer;
        ready.layer = static_cast<uint16_t>(layer);
        ready.bucket = 1 - layer;
        ready.bytes = kBytes;
        Event& sum = add(out, Kind::operation, trace::kNone, at, layer == 1 ? kMs : exposed);
        sum.operation = kCalled + 2 * i + (1 - layer);
        sum.bytes = kBytes;
      }
      const int64_t copied = at + exposed + kMs / 10;
      add(out, Kind::wait, i, at, copied - at);
      compute(out, Kind::update, i, trace::kNone16, copied, kMs / 2, 1);
    }
    return out;
  }

  static Event& add(trace::Process& process, Kind kind, uint32_t iteration, int64_t start,
                    int64_t duration) {
    Event& event = process.events.emplace_back();
    event.kind = kind;
    event.iteration = iteration;
    event.start_ns = start;
    event.duration_ns = duration;
    return event;
  }
  int64_t compute(trace::Process& process, Kind kind, uint32_t iteration, uint32_t layer,
                  int64_t start, int64_t ns, double on_a_core) const {
    Event& event = add(process, kind, iteration, start, ns);
    event.layer = static_cast<uint16_t>(layer);
    if (processor_times) {
      const Event span = event;
      process.events.push_back(trace::processor_time_of(span, Nanos{ns}.scaled(on_a_core).count));
    }
    return start + ns;
  }
};

// A link of 1 GB/s, which one connection fills.
trace::Trace probed(uint32_t ranks = 2) {
  trace::Trace out;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    trace::Process& process = out.processes.emplace_back();
    process.environment.rank = rank;
    process.environment.ranks = ranks;
    process.environment.host = "here";
    process.clock_samples.push_back({500, 1'000'000'000'600});
    process.pings.push_back({1 - rank % 2, 0, 0, 10'000, 11'000, 41'000});
    for (uint32_t chunk_bytes : {1u << 18, 1u << 20})
      for (uint32_t flows : {1u, 4u, 8u}) {
        trace::ProbeResult rate;
        rate.scope = trace::ProbeScope::ring;
        rate.flows = static_cast<uint16_t>(flows);
        rate.peer = (rank + 1) % ranks;
        rate.chunk_bytes = chunk_bytes;
        rate.bytes = 100'000'000;
        rate.duration_ns = 100'000'000;
        rate.chunks = rate.bytes / chunk_bytes;
        // 10 us a chunk, and 0.8 ns a byte, at both ends together.
        rate.cpu_send_ns = rate.cpu_receive_ns =
            static_cast<int64_t>(5'000 * rate.chunks + rate.bytes * 2 / 5);
        process.probe.push_back(rate);
      }
  }
  return out;
}

Result<Analysis> analyzed(const OverGloo& run) {
  trace::Trace trace = run.trace();
  WEFT_TRY(add_probe(trace, probed()));
  WEFT_ASSIGN(Recorded recorded, understand(std::move(trace)));
  return analyze(std::move(recorded));
}

TEST(OtherSums, WithoutAProbeNothingSaysWhatWeftWouldCarry) {
  auto recorded = understand(OverGloo().trace());
  ASSERT_TRUE(recorded.ok()) << recorded.error().message();
  EXPECT_EQ(recorded->graph.sums_by, "another backend");
  auto analysis = analyze(std::move(*recorded));
  ASSERT_FALSE(analysis.ok());
  EXPECT_THAT(analysis.error().message(), HasSubstr("another backend carried its sums"));
  EXPECT_THAT(analysis.error().message(), HasSubstr("weft probe -o"));
}

TEST(OtherSums, TheRunReplaysWithSumsAsTheyWere) {
  OverGloo run;
  auto analysis = analyzed(run);
  ASSERT_TRUE(analysis.ok()) << analysis.error().message();
  const replay::Replayer& replayer = analysis->replayer;
  EXPECT_TRUE(replayer.fidelity().sums_as_measured);
  EXPECT_NEAR(replayer.fidelity().measured_ns, static_cast<double>(run.iteration_ns()), 1);
  EXPECT_NEAR(replayer.fidelity().error_percent, 0, 0.5);
  EXPECT_THAT(analysis->recorded.remarks,
              Contains(HasSubstr("another backend summed them, not weft")));
}

TEST(OtherSums, TheSameBucketsOverWeftTakeWhatTheProbeSays) {
  OverGloo run;
  auto analysis = analyzed(run);
  ASSERT_TRUE(analysis.ok()) << analysis.error().message();
  const plan::Plan& plan = analysis->replayer.recorded_plan();
  EXPECT_EQ(plan.lanes, plan::preset("default")->lanes);
  ASSERT_THAT(plan.buckets, SizeIs(2));
  EXPECT_THAT(plan.buckets[0].tensors, ElementsAre("last.weight"));
  auto answer = analysis->replayer.predict({});
  ASSERT_TRUE(answer.ok()) << answer.error().message();
  // The first bucket of 4 MB is summed beside backward, which takes half as long as the second
  // takes after it; what DDP copied stays.
  const double compute = 6.5 * kMs + kMs / 10;
  const double wire = 1e9 * cost::ring_wire_seconds(2 * kBytes, 2, 1e9) - 2 * kMs;
  EXPECT_GT(answer->iteration_ns, compute + wire);
  EXPECT_LT(answer->iteration_ns, 1.1 * (compute + wire));
  EXPECT_THAT(answer->unknown, Contains(HasSubstr("another backend carried them")));
  EXPECT_LT(answer->low_ns, 0.9 * answer->iteration_ns);
}

TEST(OtherSums, WhatTheyTookOfTheCoresIsNotTheComputesOwn) {
  OverGloo run;
  run.processor_times = true;
  replay::Question free;
  free.what_if.free_communication = true;
  for (double share : {1.0, 0.5}) {
    run.backward_on_a_core = share;
    auto analysis = analyzed(run);
    ASSERT_TRUE(analysis.ok()) << analysis.error().message();
    EXPECT_NEAR(analysis->replayer.fidelity().error_percent, 0, 0.5) << "as it was, beside them";
    auto answer = analysis->replayer.predict(free);
    ASSERT_TRUE(answer.ok()) << answer.error().message();
    EXPECT_NEAR(answer->iteration_ns, 2.6 * kMs + 4 * kMs * share, 0.02 * kMs);
  }
}

TEST(OtherSums, WhatElseTookTheCoresIsSaidAndWidensTheInterval) {
  OverGloo run;
  run.processor_times = true;
  double highest = 0;  // of a value as 1
  for (double share : {1.0, 0.5}) {
    run.forward_on_a_core = share;
    auto analysis = analyzed(run);
    ASSERT_TRUE(analysis.ok()) << analysis.error().message();
    auto answer = analysis->replayer.predict({});
    ASSERT_TRUE(answer.ok()) << answer.error().message();
    // Of 2.5 ms beside no sums 1.5 ms were on a core.
    const auto said = HasSubstr("waited 0.67 s for each second that they had a core");
    if (share < 1)
      EXPECT_THAT(answer->unknown, Contains(said));
    else
      EXPECT_THAT(answer->unknown, Not(Contains(HasSubstr("other programs"))));
    EXPECT_GT(answer->high_ns / answer->iteration_ns, highest + 0.01);
    highest = answer->high_ns / answer->iteration_ns;
  }
}

TEST(OtherSums, NeitherPlanNorClusterGoesWithSumsAsTheyWere) {
  auto analysis = analyzed({});
  ASSERT_TRUE(analysis.ok()) << analysis.error().message();
  replay::Question question;
  question.sums_as_measured = true;
  EXPECT_TRUE(analysis->replayer.predict(question).ok());
  question.cluster.hosts = 8;
  EXPECT_FALSE(analysis->replayer.predict(question).ok());
  question.cluster.hosts.reset();
  question.plan = plan::preset("default").value();
  EXPECT_FALSE(analysis->replayer.predict(question).ok());
}

TEST(OtherSums, DiagnosisSaysWhatIsWaitedForAndWhatWeftWouldTake) {
  OverGloo run;
  run.exposed = 12 * kMs;
  run.processor_times = true;
  run.backward_on_a_core = 0.5;
  auto analysis = analyzed(run);
  ASSERT_TRUE(analysis.ok()) << analysis.error().message();
  auto diagnosis = diagnose::diagnose(analysis->recorded.graph, analysis->replayer);
  ASSERT_TRUE(diagnosis.ok()) << diagnosis.error().message();
  EXPECT_NEAR(diagnosis->exposed_ns, 12 * kMs, 0.1 * kMs);
  EXPECT_NEAR(diagnosis->communication_ns, 13 * kMs, 0.1 * kMs);
  ASSERT_THAT(diagnosis->alternatives, SizeIs(2));
  for (const diagnose::Alternative& way : diagnosis->alternatives) {
    EXPECT_GT(way.gain_percent, 20) << way.name;
    EXPECT_LT(way.iteration_ns, static_cast<double>(run.iteration_ns())) << way.name;
  }
  ASSERT_FALSE(diagnosis->bounds.empty());
  for (const diagnose::Alternative& way : diagnosis->alternatives)
    EXPECT_LE(diagnosis->bounds.front().iteration_ns, way.iteration_ns) << way.name;
  ASSERT_FALSE(diagnosis->findings.empty());
  EXPECT_EQ(diagnosis->findings.front().name, "other_backend");
  EXPECT_THAT(diagnosis->findings.front().title, HasSubstr("until another backend has summed"));
}

TEST(OtherSums, WhereSumsAreQuickWeftIsNoFinding) {
  OverGloo run;
  run.exposed = kMs / 10;
  auto analysis = analyzed(run);
  ASSERT_TRUE(analysis.ok()) << analysis.error().message();
  auto diagnosis = diagnose::diagnose(analysis->recorded.graph, analysis->replayer);
  ASSERT_TRUE(diagnosis.ok()) << diagnosis.error().message();
  for (const diagnose::Finding& finding : diagnosis->findings)
    EXPECT_NE(finding.name, "other_backend");
  EXPECT_THAT(diagnosis->rejected, Contains(HasSubstr("other_backend")));
}

TEST(Probe, OfAnotherJobIsRefused) {
  const trace::Trace run = OverGloo().trace();
  auto complaint = [&](trace::Trace trace, const trace::Trace& probe) {
    auto added = add_probe(trace, probe);
    return added.ok() ? std::string() : added.error().message();
  };
  EXPECT_EQ(complaint(run, probed()), "");
  trace::Trace with_probe = run;
  ASSERT_TRUE(add_probe(with_probe, probed()).ok());
  EXPECT_THAT(complaint(with_probe, probed()), HasSubstr("a probe of its own"));
  EXPECT_THAT(complaint(run, run), HasSubstr("no rate was measured"));
  EXPECT_THAT(complaint(run, probed(3)), HasSubstr("it is of 3 ranks, the run of 2"));
  trace::Trace elsewhere = probed();
  elsewhere.processes[1].environment.host = "there";
  EXPECT_THAT(complaint(run, elsewhere),
              HasSubstr("rank 1 was on here in the run and is on there"));
  trace::Trace restarted = probed();
  restarted.processes[0].clock_samples[0].trace_ns += 60'000 * kMs;
  EXPECT_THAT(complaint(run, restarted), HasSubstr("started anew"));
}

TEST(Probe, LiesBesideTheRunOrInItsFolder) {
  const fs::path folder = fs::path(::testing::TempDir()) / text("weft-probe-%d", getpid());
  fs::remove_all(folder);
  const std::string run = folder / "run", probe = folder / "apart";
  ASSERT_TRUE(write_run(OverGloo().trace(), run).ok());
  ASSERT_TRUE(write_run(probed(), probe).ok());
  auto without = analyze(run);
  ASSERT_FALSE(without.ok());
  EXPECT_THAT(without.error().message(), HasSubstr("--probe"));
  auto beside = analyze(run, "", probe);
  EXPECT_TRUE(beside.ok()) << beside.error().message();
  auto wrong = analyze(run, "", run);
  ASSERT_FALSE(wrong.ok());
  EXPECT_THAT(wrong.error().message(), HasSubstr("the probe " + run));
  fs::rename(probe, run + "/probe");
  auto inside = analyze(run);
  EXPECT_TRUE(inside.ok()) << inside.error().message();
  fs::remove_all(folder);
}

TEST(Probe, HostsAreToldApartByTheirNames) {
  trace::Trace trace = OverGloo().trace();
  trace.processes[1].environment.host = "there";
  auto recorded = understand(std::move(trace));
  ASSERT_TRUE(recorded.ok()) << recorded.error().message();
  EXPECT_THAT(recorded->graph.host_of, ElementsAre(0u, 1u));
}

}  // namespace
}  // namespace weft::analysis
