#include "weft/diagnose.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "gain_estimator.h"

namespace weft::diagnose {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

// A small job, run by the replayer: its trace is that of a run, and all about it is known.
struct Job {
  uint32_t ranks = 4;
  uint32_t layers = 3;
  uint64_t elements = 1'000'000;  // of the one tensor of each layer
  int64_t forward_ns = 2'000'000;
  int64_t backward_ns = 4'000'000;
  int64_t gap_ns = 0;  // before each backward
  uint32_t iterations = 8;
  plan::Plan plan;
  std::vector<double> speed;      // by rank; 1 where absent
  std::vector<uint32_t> host_of;  // by rank; empty: each on its own
};

// Layers whose compute hides their wire time (9 ms each), if it is let: the default plan suits it.
Job large_job() {
  Job job;
  job.layers = 6;
  job.elements = 1'500'000;
  job.forward_ns = 8'000'000;
  job.backward_ns = 16'000'000;
  job.iterations = 4;
  job.plan = plan::preset("default").value();
  return job;
}

cost::Fitted exactly(double value) { return {value, value, value, 8}; }

// A link of 1 GB/s; flows of 0.25 GB/s if it is capped.
cost::Costs costs_of(bool capped) {
  cost::Costs costs;
  costs.link_bytes_per_s = exactly(1e9);
  if (capped) costs.flow_bytes_per_s = exactly(0.25e9);
  costs.ring_rates = {{1, exactly(capped ? 0.25e9 : 1e9)}, {4, exactly(1e9)}, {8, exactly(1e9)}};
  costs.round_trip_idle_ns = exactly(40'000);
  costs.cpu_ns_per_byte = exactly(0.05);
  costs.cpu_ns_per_chunk = exactly(2'000);
  costs.report_ns = exactly(30'000);
  costs.begin_ns = exactly(30'000);
  costs.hand_over_ns = exactly(5'000);
  costs.wake_up_ns = exactly(10'000);
  costs.sending.cores = 4;
  return costs;
}

graph::Graph compute_of(const Job& job) {
  graph::Graph graph;
  graph.ranks = graph.environment.ranks = job.ranks;
  graph.host_of = job.host_of;
  graph.environment.cores = 4;
  graph.environment.plan_text = plan::canonical(job.plan);
  graph.model.name = "small";
  for (uint32_t l = 0; l < job.layers; ++l) {
    graph.model.layers.push_back({text("layer%u", l)});
    graph.model.tensors.push_back(
        {text("tensor%u", l), job.elements * schedule::kElementBytes, l, l, l});
  }
  for (uint32_t i = 0; i < job.iterations; ++i) {
    graph::Iteration iteration;
    iteration.number = i;
    for (uint32_t r = 0; r < job.ranks; ++r) {
      double slower = 1 / (r < job.speed.size() ? job.speed[r] : 1);
      iteration.layers.emplace_back(
          job.layers,
          graph::LayerTimes{Nanos{job.forward_ns}.scaled(slower).count,
                            Nanos{job.backward_ns}.scaled(slower).count, 100'000, 0, job.gap_ns});
      iteration.start_ns.push_back(int64_t{i} * 1'000'000'000);
      iteration.end_ns.push_back(int64_t{i + 1} * 1'000'000'000);
    }
    graph.iterations.push_back(std::move(iteration));
  }
  return graph;
}

struct Recorded {
  graph::Graph graph;
  replay::Replayer replayer;
};

Recorded run_of(const Job& job, const cost::Costs& costs) {
  auto maker = replay::Replayer::make(compute_of(job), costs);
  EXPECT_TRUE(maker.ok()) << maker.error().message();
  replay::Question question;
  question.make_trace = true;
  question.interval = false;
  question.iterations = job.iterations;
  auto made = maker->predict(question);
  EXPECT_TRUE(made.ok()) << made.error().message();
  auto graph = graph::build(*made->trace);
  EXPECT_TRUE(graph.ok()) << graph.error().message();
  auto replayer = replay::Replayer::make(*graph, costs);
  EXPECT_TRUE(replayer.ok()) << replayer.error().message();
  return {std::move(*graph), std::move(*replayer)};
}

Diagnosis diagnosed(const Recorded& run) {
  auto out = diagnose(run.graph, run.replayer);
  EXPECT_TRUE(out.ok()) << out.error().message();
  return std::move(*out);
}

Diagnosis diagnosed(const Job& job, bool capped = true) {
  return diagnosed(run_of(job, costs_of(capped)));
}

plan::Plan preset(const char* name) { return plan::preset(name).value(); }

std::vector<std::string> names_of(const Diagnosis& diagnosis) {
  std::vector<std::string> out;
  for (const Finding& finding : diagnosis.findings) out.push_back(finding.name);
  return out;
}

const Finding* find(const Diagnosis& diagnosis, const std::string& name, uint32_t rank = 0) {
  for (const Finding& finding : diagnosis.findings)
    if (finding.name == name && finding.rank.value_or(rank) == rank) return &finding;
  return nullptr;
}

double iteration_of(const replay::Replayer& replayer, const replay::WhatIf& what_if) {
  replay::Question question;
  question.what_if = what_if;
  question.iterations = 4;
  question.interval = false;
  return replayer.predict(question).value().iteration_ns;
}

TEST(Diagnose, one_flow_limit_is_named_where_flows_are_capped) {
  Job job;
  job.plan = preset("ddp");
  Diagnosis diagnosis = diagnosed(job);
  ASSERT_THAT(diagnosis.findings, Not(IsEmpty()));
  const Finding& first = diagnosis.findings.front();
  EXPECT_EQ(first.name, "one_flow_limit");
  EXPECT_THAT(first.remedy, HasSubstr("Use 4 lanes"));
  EXPECT_THAT(first.evidence, Contains(HasSubstr("one connection 2.00 Gb/s, the link 8.00 Gb/s")));
  // 18 MB a rank: 72 ms at the flow's rate, 18 at the link's, beside at least 18 of compute.
  EXPECT_GT(first.gain_percent, 45);
  EXPECT_LT(first.gain_percent, 75);
  EXPECT_LT(first.low, first.gain_percent);
  EXPECT_GT(first.high, first.gain_percent);
}

TEST(Diagnose, one_flow_limit_is_not_named_where_one_flow_fills_the_link) {
  Job job;
  job.plan = preset("ddp");
  Diagnosis diagnosis = diagnosed(job, false);
  EXPECT_THAT(names_of(diagnosis), Not(Contains("one_flow_limit")));
  EXPECT_THAT(diagnosis.rejected, Not(Contains(HasSubstr("one_flow_limit"))));
  for (const Bound& bound : diagnosis.bounds) EXPECT_NE(bound.name, "one flow may fill the link");
}

TEST(Diagnose, a_slow_rank_is_named_with_what_healing_it_gains) {
  Job job;
  job.plan = preset("default");
  job.elements = 10'000;
  job.speed = {1, 1, 0.5, 1};
  Recorded run = run_of(job, costs_of(true));
  Diagnosis diagnosis = diagnosed(run);
  ASSERT_THAT(diagnosis.findings, Not(IsEmpty()));
  const Finding& first = diagnosis.findings.front();
  EXPECT_EQ(first.name, "straggler");
  EXPECT_EQ(first.rank, 2u);
  replay::WhatIf healed;
  healed.healed = Rank{2};
  double before = iteration_of(run.replayer, {}), after = iteration_of(run.replayer, healed);
  EXPECT_NEAR(first.gain_percent, 100 * (before - after) / before, 0.01);
  EXPECT_NEAR(first.gain_percent, 50, 3);
  EXPECT_THAT(first.title, HasSubstr("2.00 times"));
}

TEST(Diagnose, ranks_that_are_equally_slow_are_each_named) {
  Job job;
  job.plan = preset("default");
  job.elements = 10'000;
  job.speed = {1, 0.5, 1, 0.5};
  Diagnosis diagnosis = diagnosed(job);
  for (uint32_t rank : {1u, 3u}) {
    const Finding* finding = find(diagnosis, "straggler", rank);
    ASSERT_NE(finding, nullptr) << rank;
    EXPECT_NEAR(finding->gain_percent, 50, 3);
    EXPECT_THAT(finding->evidence, Contains(HasSubstr("rank 1, rank 3")));
  }
  EXPECT_EQ(find(diagnosis, "straggler", 0), nullptr);
  EXPECT_EQ(find(diagnosis, "straggler", 2), nullptr);
}

TEST(Diagnose, a_slow_rank_behind_a_slower_one_has_what_is_left) {
  Job job;
  job.plan = preset("default");
  job.elements = 10'000;
  job.speed = {1, 0.25, 1, 0.5};  // iterations of about 4, then 2, then 1
  Diagnosis diagnosis = diagnosed(job);
  const Finding* slowest = find(diagnosis, "straggler", 1);
  const Finding* next = find(diagnosis, "straggler", 3);
  ASSERT_TRUE(slowest != nullptr && next != nullptr);
  EXPECT_NEAR(slowest->gain_percent, 50, 3);
  EXPECT_NEAR(next->gain_percent, 25, 3);
  EXPECT_THAT(next->evidence, Contains(HasSubstr("slower: rank 1")));
}

TEST(Diagnose, a_well_planned_run_has_no_finding) {
  Job job = large_job();
  for (bool capped : {true, false}) {
    Diagnosis diagnosis = diagnosed(job, capped);
    EXPECT_THAT(names_of(diagnosis), IsEmpty()) << capped;
    EXPECT_THAT(diagnosis.rejected, Not(IsEmpty())) << capped;
  }
}

TEST(Diagnose, late_hosts_are_named) {
  Job job;
  job.plan = preset("default");
  job.elements = 10'000;
  job.gap_ns = 2'000'000;
  Diagnosis diagnosis = diagnosed(job);
  const Finding* finding = find(diagnosis, "host_gaps");
  ASSERT_NE(finding, nullptr);
  // 6 of 24 ms.
  EXPECT_NEAR(finding->gain_percent, 25, 3);
}

TEST(Diagnose, a_barrier_that_keeps_compute_from_hiding_the_wire_is_named) {
  Job job = large_job();
  job.elements = 4'000'000;  // 24 ms of wire each, more than a backward
  job.forward_ns = 16'000'000;
  job.plan.barrier = plan::Barrier::all;
  job.plan.order = plan::Order::ready;
  job.plan.credit = mib(8);
  Diagnosis diagnosis = diagnosed(job);
  const Finding* finding = find(diagnosis, "not_overlapped");
  ASSERT_NE(finding, nullptr);
  EXPECT_THAT(finding->remedy, HasSubstr("barrier from all to tensor"));
}

TEST(Diagnose, findings_are_sorted_and_none_may_be_error) {
  Job job;
  job.plan = preset("ddp");
  job.plan.chunk = kib(16);
  job.speed = {1, 1, 1, 0.4};
  Diagnosis diagnosis = diagnosed(job);
  ASSERT_THAT(diagnosis.findings, SizeIs(::testing::Ge(2u)));
  for (size_t i = 0; i < diagnosis.findings.size(); ++i) {
    const Finding& finding = diagnosis.findings[i];
    EXPECT_GT(finding.gain_percent, std::max(1.0, std::abs(diagnosis.fidelity_error_percent)));
    EXPECT_GT(finding.low, 0);
    EXPECT_LE(finding.high, 100);
    EXPECT_FALSE(finding.title.empty() || finding.remedy.empty() || finding.evidence.empty());
    if (i == 0) continue;
    EXPECT_LE(finding.gain_percent, diagnosis.findings[i - 1].gain_percent);
  }
}

TEST(Diagnose, a_run_that_does_not_replay_has_no_small_findings) {
  Job job;
  job.plan = preset("default");
  job.elements = 10'000;
  job.speed = {1, 1, 0.9, 1};
  graph::Graph graph = run_of(job, costs_of(true)).graph;
  // The whole run took twice as long as its parts explain.
  for (graph::Iteration& iteration : graph.iterations)
    for (uint32_t r = 0; r < graph.ranks; ++r)
      iteration.end_ns[r] += iteration.end_ns[r] - iteration.start_ns[r];
  auto replayer = replay::Replayer::make(graph, costs_of(true));
  ASSERT_TRUE(replayer.ok());
  EXPECT_LT(replayer->fidelity().error_percent, -30);
  auto diagnosis = diagnose(graph, *replayer);
  ASSERT_TRUE(diagnosis.ok());
  EXPECT_THAT(diagnosis->findings, IsEmpty());
  EXPECT_THAT(diagnosis->rejected, Contains(HasSubstr("straggler (rank 2)")));
}

TEST(Diagnose, the_path_adds_up_to_the_iteration) {
  Job job;
  job.plan = preset("ddp");
  Recorded run = run_of(job, costs_of(true));
  Diagnosis diagnosis = diagnosed(run);
  ASSERT_THAT(diagnosis.path, SizeIs(7));
  double ns = 0, percent = 0;
  for (const Share& share : diagnosis.path) {
    EXPECT_TRUE(words_of(share.what).has_value()) << share.what;
    ns += share.ns;
    percent += share.percent;
  }
  EXPECT_NEAR(percent, 100, 1e-6);
  EXPECT_NEAR(ns, diagnosis.iteration_ns, 1);
  EXPECT_NEAR(diagnosis.iteration_ns, run.replayer.measured_iteration_ns(),
              0.01 * diagnosis.iteration_ns);
}

TEST(Diagnose, the_path_says_what_was_waited_for) {
  auto percent = [](const Diagnosis& diagnosis, const char* what) {
    for (const Share& share : diagnosis.path)
      if (share.what == what) return share.percent;
    return -1.0;
  };
  Job job;
  job.plan = preset("ddp");
  job.plan.bucket_rule = {kib(1), kib(1), true};  // a bucket a tensor
  Diagnosis full = diagnosed(job);
  EXPECT_GT(percent(full, "wait_for_lane"), 30);
  EXPECT_EQ(percent(full, "wait_for_credit"), 0);
  job.plan.credit = mib(1);  // one operation at a time
  Diagnosis held = diagnosed(job);
  EXPECT_EQ(percent(held, "wait_for_lane"), 0);
  EXPECT_GT(percent(held, "wait_for_credit"), 30);
  EXPECT_STREQ(words_of("wait_for_lane")->name, "waiting for a full connection");
  EXPECT_FALSE(words_of("queue").has_value());
}

TEST(Diagnose, overlap_is_within_what_is_possible) {
  Job job;
  job.plan = preset("ddp");
  Diagnosis diagnosis = diagnosed(job);
  EXPECT_GT(diagnosis.overlapped_ns, 0);
  EXPECT_LE(diagnosis.overlapped_ns, diagnosis.overlap_possible_ns);
  EXPECT_LE(diagnosis.overlap_possible_ns, diagnosis.communication_ns);
  EXPECT_LE(diagnosis.exposed_ns + diagnosis.overlapped_ns, diagnosis.communication_ns + 1);
  // 18 MB at 0.25 GB/s.
  EXPECT_NEAR(diagnosis.communication_ns, 72e6, 4e6);
}

TEST(Diagnose, parts_have_their_bytes_times_and_rates) {
  Job job;
  job.plan = preset("ddp");
  job.plan.bucket_rule = {kib(1), kib(1), true};  // a bucket a tensor
  Diagnosis diagnosis = diagnosed(job);
  ASSERT_THAT(diagnosis.layers, SizeIs(3));
  ASSERT_THAT(diagnosis.tensors, SizeIs(3));
  double waited = 0;
  for (const Detail& layer : diagnosis.layers) {
    EXPECT_NEAR(layer.compute_ns, 6.1e6, 1e3);
    EXPECT_EQ(layer.bytes, 4e6);
  }
  for (const Detail& tensor : diagnosis.tensors) {
    EXPECT_GE(tensor.transfer_ns, 20e6);  // 6 MB at 0.25 GB/s, less a burst
    waited += tensor.waited_ns;
  }
  // Layer 0's backward comes last, behind two that are on the way.
  EXPECT_GT(diagnosis.tensors[0].waited_ns, diagnosis.tensors[2].waited_ns);
  EXPECT_GE(waited, diagnosis.exposed_ns - 1);
  ASSERT_THAT(diagnosis.lanes, SizeIs(4));
  for (const LaneUse& lane : diagnosis.lanes) {
    EXPECT_NEAR(lane.bytes_per_s, 0.25e9, 0.02e9);
    EXPECT_GT(lane.busy_percent, 50);
  }
}

TEST(Diagnose, a_tensor_that_waits_for_credit_is_queued) {
  Job job;
  job.plan = preset("ddp");
  job.plan.bucket_rule = {kib(1), kib(1), true};
  job.plan.credit = mib(1);  // one operation at a time
  Diagnosis diagnosis = diagnosed(job);
  EXPECT_LT(diagnosis.tensors[2].queued_ns, 1e6);
  EXPECT_GT(diagnosis.tensors[0].queued_ns, 20e6);
}

TEST(Diagnose, a_slow_lane_is_replayed_and_named) {
  Job job;
  job.plan = preset("default");
  job.plan.lanes = 4;
  const double usual = diagnosed(run_of(job, costs_of(true))).iteration_ns;
  cost::Costs costs = costs_of(true);
  const double flow = costs.flow_bytes_per_s->value;
  costs.slow_lanes = {{1, 2, 2, {0.1 * flow, 0.1 * flow, 0.1 * flow, 60}, flow}};
  Recorded run = run_of(job, costs);
  Diagnosis diagnosis = diagnosed(run);
  const double slowed = diagnosis.iteration_ns;
  EXPECT_GT(slowed, 1.02 * usual);
  const Finding* finding = find(diagnosis, "slow_lane", 1);
  ASSERT_NE(finding, nullptr);
  EXPECT_THAT(finding->title, HasSubstr("Lane 2 from rank 1 to rank 2"));
  // The run that had no such lane is known here: that much is gained.
  EXPECT_NEAR(finding->gain_percent, 100 * (1 - usual / slowed), 0.5);
  EXPECT_EQ(find(diagnosed(run_of(job, costs_of(true))), "slow_lane", 1), nullptr);
}

TEST(Diagnose, bounds_are_never_worse_than_what_they_bound) {
  Job job;
  job.plan = preset("ddp");
  job.speed = {1, 0.8, 1, 1};
  Diagnosis diagnosis = diagnosed(job);
  ASSERT_THAT(diagnosis.bounds, SizeIs(3));
  EXPECT_EQ(diagnosis.bounds[0].name, "communication is free");
  EXPECT_EQ(diagnosis.bounds[1].name, "no stragglers");
  EXPECT_EQ(diagnosis.bounds[2].name, "one flow may fill the link");
  const Finding* limit = find(diagnosis, "one_flow_limit");
  ASSERT_NE(limit, nullptr);
  EXPECT_GE(diagnosis.bounds[2].gain_percent, limit->gain_percent - 2);
  for (const Bound& bound : diagnosis.bounds) EXPECT_GT(bound.gain_percent, 0) << bound.name;
}

TEST(Diagnose, without_a_probe_it_says_what_cannot_be_judged) {
  Job job;
  job.plan = preset("ddp");
  Recorded run = run_of(job, costs_of(true));
  auto blind = replay::Replayer::make(run.graph, cost::Costs{});
  ASSERT_TRUE(blind.ok());
  auto diagnosis = diagnose(run.graph, *blind);
  ASSERT_TRUE(diagnosis.ok());
  EXPECT_GT(diagnosis->iteration_ns, 0);
  EXPECT_THAT(diagnosis->findings, IsEmpty());
  EXPECT_THAT(diagnosis->remarks, Contains(HasSubstr("no cause can be judged")));
}

// What is supposed about compute is compared with the recorded run, hosts and all.
TEST(Gains, other_compute_is_judged_with_the_ranks_on_their_hosts) {
  Job job;
  job.ranks = 8;
  job.plan = preset("ddp");
  job.plan.algorithm = {{std::nullopt, "hierarchical"}};
  job.host_of = {0, 0, 0, 0, 1, 1, 1, 1};
  Recorded run = run_of(job, costs_of(true));
  EXPECT_EQ(run.graph.host_of, job.host_of);
  auto gains = GainEstimator::make(run.graph, run.replayer);
  ASSERT_TRUE(gains.ok()) << gains.error().message();
  auto same = gains->of_compute(run.graph.iterations);
  ASSERT_TRUE(same.ok()) << same.error().message();
  EXPECT_EQ(same->iteration_ns, gains->recorded_ns());
}

// By its interval alone a gain of 38 % would be sure where half of the run is not explained.
TEST(Gains, a_gain_within_the_error_of_the_replay_is_not_sure) {
  Job job;
  job.plan = preset("default");
  graph::Graph graph = run_of(job, costs_of(true)).graph;
  for (graph::Iteration& iteration : graph.iterations)
    for (uint32_t r = 0; r < graph.ranks; ++r)
      iteration.end_ns[r] += iteration.end_ns[r] - iteration.start_ns[r];
  auto replayer = replay::Replayer::make(graph, costs_of(true));
  ASSERT_TRUE(replayer.ok());
  ASSERT_NEAR(replayer->fidelity().error_percent, -50, 2);
  auto gains = GainEstimator::make(graph, *replayer);
  ASSERT_TRUE(gains.ok()) << gains.error().message();
  Verdict within = gains->of_time(0.62 * gains->recorded_ns(), true);
  EXPECT_GT(within.low, 0);
  EXPECT_FALSE(gains->is_sure(within));
  EXPECT_TRUE(gains->is_sure(gains->of_time(0.4 * gains->recorded_ns(), true)));
}

TEST(Diagnose, lanes_that_the_probe_did_not_cover_are_not_promised) {
  Job job;
  job.plan = preset("ddp");
  cost::Costs costs = costs_of(true);
  costs.link_is_lower_bound = true;
  costs.link_bytes_per_s = exactly(0.5e9);
  costs.ring_rates = {{1, exactly(0.25e9)}, {2, exactly(0.5e9)}};
  Diagnosis diagnosis = diagnosed(run_of(job, costs));
  const Finding* limit = find(diagnosis, "one_flow_limit");
  ASSERT_NE(limit, nullptr);
  EXPECT_THAT(limit->remedy, HasSubstr("Use 2 lanes"));
  EXPECT_THAT(limit->evidence, Contains(HasSubstr("or more")));
}

TEST(Diagnose, one_rank_has_a_path_and_no_findings) {
  Job job;
  job.ranks = 1;
  job.plan = preset("ddp");
  Diagnosis diagnosis = diagnosed(job);
  EXPECT_NEAR(diagnosis.iteration_ns, 18.3e6, 0.2e6);
  EXPECT_THAT(diagnosis.findings, IsEmpty());
  EXPECT_THAT(diagnosis.remarks, Contains(HasSubstr("one rank")));
}

TEST(Diagnose, one_iteration_has_a_path_and_no_findings) {
  Job job;
  job.plan = preset("ddp");
  Recorded run = run_of(job, costs_of(true));
  run.graph.iterations.resize(1);
  Diagnosis diagnosis = diagnosed(run);
  EXPECT_GT(diagnosis.iteration_ns, 0);
  EXPECT_THAT(diagnosis.findings, IsEmpty());
  EXPECT_THAT(diagnosis.remarks, Contains(HasSubstr("one iteration")));
}

TEST(Diagnose, a_graph_of_compute_alone_has_no_findings) {
  Job job;
  job.plan = preset("ddp");
  graph::Graph graph = compute_of(job);
  auto replayer = replay::Replayer::make(graph, costs_of(true));
  ASSERT_TRUE(replayer.ok());
  auto diagnosis = diagnose(graph, *replayer);
  ASSERT_TRUE(diagnosis.ok());
  EXPECT_THAT(diagnosis->findings, IsEmpty());
  EXPECT_THAT(diagnosis->path, SizeIs(7));
  EXPECT_EQ(diagnosis->communication_ns, 0);
  EXPECT_THAT(diagnosis->remarks, Contains(HasSubstr("nothing was communicated")));
}

TEST(Diagnose, an_empty_or_foreign_graph_is_refused) {
  Job job;
  job.plan = preset("ddp");
  Recorded run = run_of(job, costs_of(true));
  EXPECT_FALSE(diagnose(graph::Graph{}, run.replayer).ok());
  Job other = job;
  other.ranks = 2;
  auto refused = diagnose(run_of(other, costs_of(true)).graph, run.replayer);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::invalid_argument);
  other = job;
  other.layers = 2;
  refused = diagnose(run_of(other, costs_of(true)).graph, run.replayer);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.error().message(), HasSubstr("3 layers, the graph of 2"));
}

TEST(Diagnose, equal_runs_have_equal_diagnoses) {
  Job job;
  job.plan = preset("ddp");
  Diagnosis one = diagnosed(job), two = diagnosed(job);
  ASSERT_EQ(names_of(one), names_of(two));
  for (size_t i = 0; i < one.findings.size(); ++i)
    EXPECT_EQ(one.findings[i].gain_percent, two.findings[i].gain_percent);
  EXPECT_EQ(one.rejected, two.rejected);
}

}  // namespace
}  // namespace weft::diagnose
