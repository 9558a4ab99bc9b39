// One rank for all: what a folded job takes is what the whole one takes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "simulator.h"
#include "testing.h"

namespace weft::replay {
namespace {

using schedule::Algorithm;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

// A job small enough to be simulated rank by rank.
struct Case {
  uint32_t ranks = 4;
  Algorithm algorithm = Algorithm::ring;
  plan::Plan plan;
  std::vector<uint64_t> tensor_elements = {240'240, 720'720, 480'480};
  std::vector<double> slowness;  // of the first ranks; 1 for all others
  Network network;
  uint32_t iterations = 3;
  uint32_t fan_out = 0;  // all report to rank 0
  bool burns = false;    // compute is processor time
};

// Rank 0 is as the others: it neither hears of a bucket nor begins earlier than they.
Network without_agreement() {
  Network out;
  out.link_bytes_per_ns = 1;
  out.flow_bytes_per_ns = 0.25;
  out.packet_bytes = 16384;
  out.latency_ns = 20'000;
  out.hand_over_ns = 5'000;
  out.wake_up_ns = 10'000;
  out.send_ns_per_chunk = out.receive_ns_per_chunk = 1'500;
  out.send_ns_per_byte = out.receive_ns_per_byte = 0.05;
  out.reduce_ns_per_byte = 0.1;
  return out;
}

Case case_of(Algorithm algorithm, uint32_t ranks, uint32_t lanes, uint64_t chunk) {
  Case out;
  out.algorithm = algorithm;
  out.ranks = ranks;
  out.plan.bucket_rule = {Bytes{1}, Bytes{1}, false};  // a bucket for each tensor
  out.plan.lanes = lanes;
  out.plan.chunk = Bytes{chunk};
  out.plan.barrier = plan::Barrier::tensor;
  out.plan.order = plan::Order::layer;
  out.network = without_agreement();
  return out;
}

struct Answer {
  std::vector<int64_t> starts;  // of the first rank
  std::vector<uint32_t> order;
  uint64_t events = 0;
  double iteration_ns() const {
    return static_cast<double>(starts.back() - starts.front()) /
           static_cast<double>(starts.size() - 1);
  }
};

Answer answer_of(const Case& one, bool folded) {
  trace::Model model;
  std::vector<schedule::Tensor> tensors;
  for (uint32_t l = 0; l < one.tensor_elements.size(); ++l) {
    uint64_t elements = one.tensor_elements[l];
    model.layers.push_back({text("layer%u", l)});
    model.tensors.push_back({text("tensor%u", l), elements * schedule::kElementBytes, l, l, l});
    tensors.push_back({text("tensor%u", l), elements, l});
  }
  auto layout = schedule::make_layout(one.plan, tensors);
  WEFT_CHECK(layout.ok());
  std::vector<std::vector<graph::LayerTimes>> times;
  for (size_t r = 0; r < one.slowness.size() + 1; ++r) {
    double slow = r < one.slowness.size() ? one.slowness[r] : 1;
    auto ns = [&](double value) { return static_cast<int64_t>(value * slow); };
    graph::LayerTimes layer{ns(300'000), ns(700'000), ns(50'000), 0, 0};
    if (one.burns) {
      layer.forward_cpu_ns = layer.forward_ns;
      layer.backward_cpu_ns = layer.backward_ns;
      layer.update_cpu_ns = layer.update_ns;
    }
    times.emplace_back(tensors.size(), layer);
  }
  Job job;
  job.ranks = one.ranks;
  job.fan_out = one.fan_out;
  job.host_of.resize(one.ranks);
  std::iota(job.host_of.begin(), job.host_of.end(), 0u);
  job.iterations = one.iterations;
  job.model = &model;
  for (uint32_t r = 0; r < one.ranks; ++r) {
    if (r > one.slowness.size() && folded) {
      ++job.alike.back();
      continue;
    }
    job.compute.push_back({&times[std::min<size_t>(r, one.slowness.size())]});
    if (folded) job.alike.push_back(1);
  }
  std::vector<Algorithm> algorithms(layout->pieces.size(), one.algorithm);
  Simulated run = simulate(job, *layout, algorithms, one.network, nullptr);
  return {run.starts[0], run.order, run.events};
}

// ---- the premise ---------------------------------------------------------------------------

// What a rank sends is what rank 0 sends, to others; and what it gets from whom it sends to is as
// large.
TEST(Fold, ranks_do_the_same_up_to_a_renaming) {
  for (Algorithm algorithm : schedule::kAlgorithms)
    for (uint32_t ranks = 2; ranks <= 17; ++ranks) {
      if (!folds(algorithm, ranks)) continue;
      bool rotates = algorithm == Algorithm::ring || algorithm == Algorithm::direct;
      schedule::OperationShape shape;
      shape.algorithm = algorithm;
      shape.ranks = ranks;
      shape.elements = uint64_t{ranks} * 1000;
      shape.chunk_elements = 300;
      auto first = schedule::Program::make(shape);
      for (shape.rank = 0; shape.rank < ranks; ++shape.rank) {
        auto other = schedule::Program::make(shape);
        ASSERT_EQ(other->sends().size(), first->sends().size());
        for (const schedule::Send& send : first->sends()) {
          uint32_t to = rotates ? (shape.rank + send.peer) % ranks : shape.rank ^ send.peer;
          uint32_t from = rotates ? (shape.rank + ranks - send.peer) % ranks : to;
          bool sends = std::any_of(
              other->sends().begin(), other->sends().end(), [&](const schedule::Send& its) {
                return its.peer == to && its.id == send.id && its.elements == send.elements;
              });
          EXPECT_TRUE(sends) << schedule::name_of(algorithm) << " of " << ranks;
          auto receive = other->find(from, send.id);
          ASSERT_TRUE(receive.has_value()) << schedule::name_of(algorithm) << " of " << ranks;
          EXPECT_EQ(other->receives()[*receive].elements, send.elements);
        }
      }
    }
}

TEST(Fold, what_has_a_root_or_ranks_to_spare_does_not_fold) {
  for (uint32_t ranks : {4u, 7u, 1024u}) {
    EXPECT_FALSE(folds(Algorithm::tree, ranks));
    EXPECT_FALSE(folds(Algorithm::hierarchical, ranks));
    EXPECT_TRUE(folds(Algorithm::ring, ranks));
    EXPECT_EQ(folds(Algorithm::halving_doubling, ranks), ranks != 7);
    EXPECT_EQ(folds(Algorithm::doubling, ranks), ranks != 7);
  }
}

// ---- folded against full -------------------------------------------------------------------

constexpr uint32_t kSomeRanks[] = {2, 3, 4, 7, 8, 13, 16};

// Every way in which jobs of so many ranks differ, but for the algorithm.
std::vector<Case> cases_of(Algorithm algorithm, uint32_t ranks) {
  std::vector<Case> out;
  for (uint32_t lanes : {1u, 3u})
    for (uint64_t chunk : {16384u, 98304u})
      for (bool credit : {false, true})
        for (bool stragglers : {false, true})
          for (bool capped : {false, true}) {
            Case one = case_of(algorithm, ranks, lanes, chunk);
            // Parts of equal size among 2 to 16 ranks.
            one.tensor_elements = {720'720, 1'441'440, 720'720};
            if (credit) {
              one.plan.partition = Bytes{720'720 * schedule::kElementBytes};
              one.plan.credit = Bytes{2 * one.plan.partition->count};
            }
            if (stragglers) one.slowness = {1.0, 1.5};
            if (!capped) one.network.flow_bytes_per_ns = std::numeric_limits<double>::infinity();
            out.push_back(one);
          }
  return out;
}

double percent_off(const Case& one) {
  return 100 * (answer_of(one, true).iteration_ns() / answer_of(one, false).iteration_ns() - 1);
}

// A rank of a ring has one peer on each side, and one that doubles sends whole pieces: every rank
// does the same at the same time, if rank 0 has nothing to say.
TEST(Fold, is_exact_for_ring_and_doubling_but_for_rank_0) {
  for (Algorithm algorithm : {Algorithm::ring, Algorithm::doubling})
    for (uint32_t ranks : kSomeRanks) {
      if (!folds(algorithm, ranks)) continue;
      for (const Case& one : cases_of(algorithm, ranks)) {
        Answer full = answer_of(one, false), folded = answer_of(one, true);
        EXPECT_EQ(folded.starts, full.starts) << schedule::name_of(algorithm) << " of " << ranks;
        EXPECT_EQ(folded.order, full.order);
      }
    }
}

// Hosts with one core, on which training and a rank's thread take turns.
TEST(Fold, training_that_burns_slows_the_lanes_of_its_host) {
  double timers = 0, burning = 0;
  for (uint32_t ranks : kSomeRanks)
    for (Case one : cases_of(Algorithm::ring, ranks)) {
      one.network.send_ns_per_byte = one.network.receive_ns_per_byte = 0.2;
      Answer timed = answer_of(one, true);
      one.burns = true;
      Answer full = answer_of(one, false), folded = answer_of(one, true);
      timers += timed.iteration_ns();
      burning += folded.iteration_ns();
      if (one.slowness.empty())
        EXPECT_EQ(folded.starts, full.starts) << ranks;
      else
        EXPECT_NEAR(percent_off(one), 0, 10) << ranks;
    }
  EXPECT_GT(burning, 1.01 * timers);
}

// The part of one rank has an element more: the ranks drift apart by nanoseconds, which decides
// which chunk finds which lane free, and so what the last lane of a small job has to do.
TEST(Fold, is_near_where_parts_differ_by_an_element) {
  for (uint32_t ranks : kSomeRanks)
    for (Case one : cases_of(Algorithm::ring, ranks)) {
      one.tensor_elements = {1'001, 777'777, 1'333'331};
      EXPECT_NEAR(percent_off(one), 0, one.plan.lanes == 1 ? 1 : 10) << ranks;
    }
}

// Rank 0 hears of its own buckets earlier and begins earlier: the same.
TEST(Fold, is_near_where_rank_0_is_earlier) {
  for (uint32_t ranks : kSomeRanks)
    for (Case one : cases_of(Algorithm::ring, ranks)) {
      one.network.report_ns = one.network.begin_ns = 30'000;
      EXPECT_NEAR(percent_off(one), 0, 10) << ranks;
    }
}

// With several peers ranks are alike in what they send, not in the order: whom a rank serves first
// depends on its number, and with halving_doubling so does which half of what it got goes on.
TEST(Fold, is_near_where_ranks_have_several_peers) {
  for (Algorithm algorithm : {Algorithm::direct, Algorithm::halving_doubling})
    for (uint32_t ranks : kSomeRanks) {
      if (!folds(algorithm, ranks)) continue;
      for (const Case& one : cases_of(algorithm, ranks))
        EXPECT_NEAR(percent_off(one), 0, algorithm == Algorithm::direct ? 12 : 25)
            << schedule::name_of(algorithm) << " of " << ranks;
    }
}

// ---- what grows with the ranks -------------------------------------------------------------

TEST(Fold, rank_0_reads_and_answers_a_frame_of_every_rank) {
  Case one = case_of(Algorithm::doubling, 1024, 1, 65536);
  one.tensor_elements = {10'000};
  double before = answer_of(one, true).iteration_ns();
  one.network.below_in_delays = 3;
  double frames = 1020 * (one.network.receive_ns_per_chunk + one.network.send_ns_per_chunk);
  EXPECT_NEAR(answer_of(one, true).iteration_ns() - before, frames, 1);
}

// Two levels, each with the frames of 32 ranks, 3 of which are in the delays, and with its delays.
TEST(Fold, along_a_tree_every_level_reads_and_answers_its_own) {
  Case one = case_of(Algorithm::doubling, 1024, 1, 65536);
  one.tensor_elements = {10'000};
  one.network.report_ns = 11'000;
  one.network.begin_ns = 7'000;
  double before = answer_of(one, true).iteration_ns();
  one.network.below_in_delays = 3;
  one.fan_out = 32;
  double frames = 2 * 29 * (one.network.receive_ns_per_chunk + one.network.send_ns_per_chunk);
  EXPECT_NEAR(answer_of(one, true).iteration_ns() - before, frames + 11'000 + 7'000, 1);
}

// The same rank by rank, in a chain.
TEST(Fold, in_full_a_report_passes_every_level) {
  Case one = case_of(Algorithm::doubling, 4, 1, 65536);
  one.tensor_elements = {10'000};
  one.network.report_ns = 11'000;
  one.network.begin_ns = 7'000;
  double flat = answer_of(one, false).iteration_ns();
  one.fan_out = 1;  // 0 <- 1 <- 2 <- 3
  double chain = answer_of(one, false).iteration_ns();
  const double chunk = one.network.send_ns_per_chunk + one.network.receive_ns_per_chunk;
  // Two reports more. The last rank is told two levels later, and what it waits for comes from
  // ranks that were told before it: as much of that as is hidden there is not lost.
  EXPECT_GE(chain - flat, 2 * 11'000 - chunk);
  EXPECT_LE(chain - flat, 2 * (11'000 + 7'000) + chunk);
  one.network.below_in_delays = 0;
  EXPECT_NEAR(answer_of(one, false).iteration_ns() - chain, 3 * chunk, chunk);
}

TEST(Fold, is_near_along_trees) {
  for (uint32_t fan_out : {1u, 2u, 4u})
    for (Case one : cases_of(Algorithm::ring, 16)) {
      one.fan_out = fan_out;
      one.network.below_in_delays = 1;
      one.network.report_ns = one.network.begin_ns = 20'000;
      EXPECT_NEAR(percent_off(one), 0, 10) << fan_out;
    }
}

// In full, frames hold up rank 0 alone, and the others wait for it.
TEST(Fold, frames_hold_up_all_as_they_hold_up_rank_0) {
  for (Case one : cases_of(Algorithm::ring, 16)) {
    one.network.below_in_delays = 1;
    EXPECT_NEAR(percent_off(one), 0, 8);
  }
}

TEST(Fold, a_thousand_ranks_cost_what_one_does) {
  Case one = case_of(Algorithm::ring, 1024, 4, 65536);
  one.slowness = {1.0, 1.5, 1.0, 1.1};
  Answer answer = answer_of(one, true);
  double messages = 2.0 * 1023 * 3 * one.iterations;  // of one rank: three buckets
  EXPECT_GT(static_cast<double>(answer.events), 2 * messages);
  EXPECT_LT(static_cast<double>(answer.events), 8 * messages);
  // A part passes 2 * 1023 links, one after the other.
  EXPECT_GT(answer.iteration_ns(), 2.0 * 1023 * static_cast<double>(one.network.latency_ns));
}

// ---- as it is asked for --------------------------------------------------------------------

testing::SmallJob job_under(const char* algorithm) {
  testing::SmallJob job;
  job.tensor_elements.assign(12, 1'000'000);
  job.plan = plan::preset("default").value();
  job.plan.algorithm = {{std::nullopt, algorithm}};
  return job;
}

Replayer replayer_of(const testing::SmallJob& job, const cost::Costs& costs) {
  auto made = Replayer::make(testing::graph_of(job), costs);
  EXPECT_TRUE(made.ok()) << made.error().message();
  return std::move(*made);
}

Question on_hosts(uint32_t hosts) {
  Question question;
  question.cluster.hosts = hosts;
  question.iterations = 6;
  question.interval = false;
  return question;
}

// A trace has every rank, so whoever asks for one has the full answer.
TEST(Fold, is_nearer_for_a_whole_job) {
  for (const char* algorithm : {"ring", "direct", "halving_doubling"}) {
    Replayer replayer = replayer_of(job_under(algorithm), testing::costs_of_capped_link());
    for (uint32_t hosts : {20u, 32u}) {
      Question question = on_hosts(hosts);
      auto folded = replayer.predict(question);
      ASSERT_TRUE(folded.ok()) << folded.error().message();
      question.make_trace = true;
      auto full = replayer.predict(question);
      ASSERT_TRUE(full.ok()) << full.error().message();
      EXPECT_EQ(folded->of_rank_ns.size(), hosts);
      // Along a tree, as 20 and 32 ranks agree, those in full begin at three different times.
      EXPECT_NEAR(folded->iteration_ns / full->iteration_ns, 1, 0.10) << algorithm << " " << hosts;
      const bool folds_there = algorithm != std::string_view("halving_doubling") || hosts == 32;
      EXPECT_EQ(folded->folded, folds_there);
      EXPECT_EQ(8 * folded->events < full->events, folds_there);
      EXPECT_FALSE(full->folded);
    }
  }
}

TEST(Fold, a_thousand_hosts_have_an_answer) {
  Replayer replayer = replayer_of(job_under("ring"), testing::costs_of_capped_link());
  Question question = on_hosts(1024);
  question.iterations = 0;
  auto answer = replayer.predict(question);
  ASSERT_TRUE(answer.ok()) << answer.error().message();
  EXPECT_EQ(answer->of_rank_ns.size(), 1024u);
  EXPECT_THAT(answer->assumed, Contains(HasSubstr("one rank stands for all 1024")));
  EXPECT_LT(answer->events, 4'000'000u);
  EXPECT_GT(answer->iteration_ns, replayer.compute_ns());
}

TEST(Fold, what_does_not_fold_is_refused_with_what_would) {
  auto refusal = [](const char* algorithm, const Question& question) {
    auto answer =
        replayer_of(job_under(algorithm), testing::costs_of_capped_link()).predict(question);
    EXPECT_FALSE(answer.ok());
    return answer.ok() ? std::string() : answer.error().message();
  };
  EXPECT_THAT(refusal("tree", on_hosts(4096)), HasSubstr("ranks fold under ring"));
  Question traced = on_hosts(4096);
  traced.make_trace = true;
  EXPECT_THAT(refusal("ring", traced), HasSubstr("without one, ranks fold"));
  EXPECT_THAT(refusal("direct", on_hosts(4096)), HasSubstr("connections"));
}

// ---- two questions, two answers ------------------------------------------------------------

TEST(Fold, hosts_share_processors_in_the_lab_and_have_their_own_in_the_target) {
  cost::Costs costs = testing::costs_of_capped_link();
  costs.sending.shared_processor = true;
  costs.sending.cores = 2;
  costs.cpu_ns_per_byte = testing::exactly(0.5);
  Replayer replayer = replayer_of(job_under("ring"), costs);
  auto asked = [&](Of of, uint32_t hosts) {
    Question question = on_hosts(hosts);
    question.cluster.of = of;
    auto answer = replayer.predict(question);
    EXPECT_TRUE(answer.ok()) << answer.error().message();
    return std::move(*answer);
  };
  Prediction target = asked(Of::target, 16), lab = asked(Of::lab, 16);
  EXPECT_GT(lab.iteration_ns, 2 * target.iteration_ns);
  EXPECT_THAT(target.assumed, Contains(HasSubstr("every host has 2 cores of its own")));
  EXPECT_THAT(lab.assumed, Not(Contains(HasSubstr("of its own"))));
  // What was measured was measured in the lab.
  Question same;
  same.cluster.of = Of::lab;
  same.interval = false;
  EXPECT_NEAR(replayer.predict(same).value().iteration_ns / replayer.fidelity().replayed_ns, 1,
              0.001);
  // Twice the hosts of the target take what 2(p-1)/p says.
  EXPECT_LT(asked(Of::target, 32).iteration_ns, 1.1 * target.iteration_ns);
  EXPECT_GT(asked(Of::lab, 32).iteration_ns, 1.8 * lab.iteration_ns);
}

}  // namespace
}  // namespace weft::replay
