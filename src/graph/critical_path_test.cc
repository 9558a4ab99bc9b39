#include <gtest/gtest.h>

#include <map>

#include "sample.h"

namespace weft::graph {
namespace {

struct Walked {
  Graph graph;
  std::vector<Stretch> path;

  int64_t spent(Spent what) const {
    int64_t sum = 0;
    for (const Stretch& stretch : path)
      if (stretch.spent == what) sum += stretch.end_ns - stretch.start_ns;
    return sum;
  }
};

// Walks iteration `index`, and sees that the path covers it.
Walked walk(const trace::Trace& trace, size_t index) {
  Walked out;
  auto graph = build(trace);
  EXPECT_TRUE(graph.ok()) << graph.error().message();
  if (!graph) return out;
  out.graph = std::move(*graph);
  out.path = critical_path(out.graph, Predecessors(out.graph), index);
  const Iteration& iteration = out.graph.iterations.at(index);
  auto last = std::max_element(iteration.end_ns.begin(), iteration.end_ns.end());
  EXPECT_FALSE(out.path.empty());
  if (out.path.empty()) return out;
  EXPECT_EQ(out.path.front().start_ns,
            iteration.start_ns[static_cast<size_t>(last - iteration.end_ns.begin())]);
  EXPECT_EQ(out.path.back().end_ns, *last);
  for (size_t i = 0; i < out.path.size(); ++i) {
    EXPECT_LT(out.path[i].start_ns, out.path[i].end_ns);
    if (i > 0) {
      EXPECT_EQ(out.path[i - 1].end_ns, out.path[i].start_ns);
    }
  }
  return out;
}

TEST(CriticalPath, covers_every_iteration_of_every_sort_of_run) {
  for (uint32_t ranks : {1u, 2u, 3u})
    for (plan::Barrier barrier : {plan::Barrier::all, plan::Barrier::tensor})
      for (bool credit : {false, true})
        for (bool updates : {false, true})
          for (size_t index : {0u, 1u, 2u}) {
            Sample sample;
            sample.ranks = ranks;
            sample.barrier = barrier;
            sample.credit = credit;
            sample.updates = updates;
            sample.slower = {0, 3'000};
            Walked walked = walk(sample.make(), index);
            EXPECT_GT(walked.spent(Spent::compute), 0);
          }
}

TEST(CriticalPath, of_compute_alone_is_compute) {
  Sample sample;
  sample.communicates = false;
  for (size_t index : {0u, 1u, 2u}) {
    Walked walked = walk(sample.make(), index);
    EXPECT_EQ(walked.spent(Spent::compute), 3 * (10'000 + 20'000 + 5'000));
  }
}

// One tensor, so that nothing can queue: every part is known.
TEST(CriticalPath, of_one_tensor_adds_up_from_known_parts) {
  Sample sample;
  sample.layers = 1;
  Walked walked = walk(sample.make(), 1);
  EXPECT_EQ(walked.spent(Spent::compute), 10'000 + 20'000 + 5'000);
  // Two steps, each 5 us to send and 30 us to arrive.
  EXPECT_EQ(walked.spent(Spent::transfer), 2 * (5'000 + 30'000));
  // 2 us to admit, 1 us to start elsewhere, 0.3 us to end and 0.1 us to tell.
  EXPECT_EQ(walked.spent(Spent::control), 2'000 + 1'000 + 400);
  EXPECT_EQ(walked.spent(Spent::host), 1'000);
  EXPECT_EQ(walked.spent(Spent::wait_for_lane), 0);
  EXPECT_EQ(walked.spent(Spent::wait_for_credit), 0);
  EXPECT_EQ(walked.spent(Spent::wait_for_rank), 0);
}

TEST(CriticalPath, blames_the_rank_that_was_slow) {
  Sample sample;
  sample.ranks = 3;
  sample.slower = {0, 0, 40'000};
  Walked walked = walk(sample.make(), 1);
  EXPECT_EQ(walked.spent(Spent::wait_for_rank), 3 * 40'000);
  for (const Stretch& stretch : walked.path)
    if (stretch.spent == Spent::wait_for_rank) {
      EXPECT_EQ(stretch.rank, 2);
    }
}

TEST(CriticalPath, says_that_other_tensors_hold_the_credit) {
  Sample sample;
  sample.credit = true;
  sample.message = 60'000;
  Walked walked = walk(sample.make(), 1);
  // The first layer's tensor is ready last and waits for both others.
  const Graph& graph = walked.graph;
  int64_t ready = std::max(graph.nodes[find(graph, NodeType::bucket, 0, 1, 2)].end_ns(),
                           graph.nodes[find(graph, NodeType::bucket, 1, 1, 2)].end_ns());
  int64_t admitted = graph.nodes[find(graph, NodeType::admitted, 0, 1, 5)].end_ns();
  EXPECT_GT(admitted - ready, 100'000);
  EXPECT_EQ(walked.spent(Spent::wait_for_credit), admitted - ready);
  EXPECT_EQ(walked.spent(Spent::wait_for_lane), 0);
}

TEST(CriticalPath, says_that_other_tensors_fill_the_lane) {
  Sample sample;
  sample.message = 60'000;
  Walked walked = walk(sample.make(), 1);
  EXPECT_GT(walked.spent(Spent::wait_for_lane), 0);
  EXPECT_EQ(walked.spent(Spent::wait_for_credit), 0);
  for (const Stretch& stretch : walked.path)
    if (stretch.spent == Spent::wait_for_lane) {
      EXPECT_EQ(walked.graph.nodes[stretch.node].type, NodeType::send);
    }

  // The same wait behind chunks of the same bucket is a part of its transfer.
  Sample again;
  again.message = 60'000;
  trace::Trace trace = again.make();
  for (trace::Process& process : trace.processes)
    for (trace::Event& event : process.events)
      if (event.bucket != trace::kNone) event.bucket = 0;
  Walked together = walk(trace, 1);
  EXPECT_EQ(together.spent(Spent::wait_for_lane), 0);
  EXPECT_GT(together.spent(Spent::transfer), walked.spent(Spent::transfer));
}

TEST(CriticalPath, goes_on_through_earlier_pieces_of_the_same_bucket) {
  Sample sample;
  sample.credit = true;
  sample.message = 60'000;
  trace::Trace trace = sample.make();
  for (trace::Process& process : trace.processes)
    for (trace::Event& event : process.events)
      if (event.bucket != trace::kNone) event.bucket = 0;
  Walked walked = walk(trace, 1);
  EXPECT_EQ(walked.spent(Spent::wait_for_credit), 0);
  std::set<uint32_t> operations;
  for (const Stretch& stretch : walked.path) {
    const Node& node = walked.graph.nodes[stretch.node];
    if (node.type == NodeType::send) operations.insert(node.subject);
  }
  EXPECT_TRUE(operations.contains(5));
  EXPECT_TRUE(operations.contains(4));
}

TEST(CriticalPath, gives_the_host_what_nothing_explains) {
  Sample sample;
  sample.layers = 1;
  sample.ranks = 1;
  sample.late_before_backward = 9'000;
  EXPECT_EQ(walk(sample.make(), 1).spent(Spent::host), 9'000 + 1'000);
}

TEST(CriticalPath, takes_what_left_no_messages_for_transfer) {
  Sample sample;
  sample.layers = 1;
  trace::Trace trace = sample.make();
  for (trace::Process& process : trace.processes)
    std::erase_if(process.events, [](const trace::Event& event) {
      return event.kind == trace::Kind::chunk || event.kind == trace::Kind::operation ||
             event.kind == trace::Kind::admitted;
    });
  EXPECT_EQ(walk(trace, 1).spent(Spent::transfer), 2'000 + 1'000 + 70'000 + 400);
}

TEST(CriticalPath, covers_an_iteration_whose_clocks_disagree) {
  for (int64_t shift : {-80'000, -20'000, 20'000, 80'000})
    for (bool credit : {false, true}) {
      Sample sample;
      sample.ranks = 3;
      sample.credit = credit;
      trace::Trace trace = sample.make();
      for (trace::Event& event : trace.processes[1].events) event.start_ns += shift;
      for (size_t index : {0u, 1u, 2u}) EXPECT_FALSE(walk(trace, index).path.empty());
    }
}

TEST(CriticalPath, of_no_iteration_is_empty) {
  Walked walked = walk(Sample().make(), 0);
  EXPECT_TRUE(critical_path(walked.graph, Predecessors(walked.graph), 3).empty());
}

TEST(Predecessors, gives_required_ones_first_and_none_out_of_range) {
  Walked walked = walk(Sample().make(), 0);
  Predecessors predecessors(walked.graph);
  uint32_t update = find(walked.graph, NodeType::update, 0, 0, 0);
  std::vector<Predecessors::In> in = predecessors.of(update);
  // Its own tensor; by the barrier the two others; and the device's work before it.
  ASSERT_EQ(in.size(), 4u);
  EXPECT_TRUE(in[0].required);
  EXPECT_EQ(in[0].from, find(walked.graph, NodeType::done, 0, 0, 0));
  for (size_t i = 1; i < in.size(); ++i) EXPECT_FALSE(in[i].required);
  EXPECT_TRUE(predecessors.of(static_cast<uint32_t>(walked.graph.nodes.size())).empty());
  EXPECT_TRUE(predecessors.of(0xffffffff).empty());
}

}  // namespace
}  // namespace weft::graph
