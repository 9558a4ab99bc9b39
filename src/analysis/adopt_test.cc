#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "weft/analysis.h"

namespace weft::analysis {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using trace::Event;
using trace::Kind;
using trace::Shape;

constexpr uint32_t kCalled = 1u << 31;

// Two ranks, two buckets of one tensor each, in iterations of 100 us; each bucket an operation that
// the framework called, 5 us after its gradient, with a message. Before, and once in between,
// something else is summed.
class Called {
 public:
  Called() {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      trace::Process& process = trace.processes.emplace_back();
      process.environment.rank = rank;
      process.environment.ranks = 2;
      process.environment.plan_text = plan::canonical(*plan::preset("default"));
      process.model.layers = {{"first"}, {"last"}};
      process.model.tensors = {{"first.weight", 4000, 0, 0, 0}, {"last.weight", 8000, 1, 1, 1}};
      process.tracks = {{trace::TrackType::thread, "thread", trace::kNone16, trace::kNone16}};
      sum(process, 1, 4000);
      for (uint32_t i = 0; i < 3; ++i) {
        const int64_t begin = 100'000 * (i + 1);
        compute(process, Kind::forward, i, 0, begin);
        compute(process, Kind::forward, i, 1, begin + 10'000);
        compute(process, Kind::backward, i, 1, begin + 20'000);
        ready(process, i, 1, 0, begin + 30'000);
        sum(process, begin + 35'000, 8000);
        if (i == 1) sum(process, begin + 36'000, 12);
        compute(process, Kind::backward, i, 0, begin + 30'000);
        ready(process, i, 0, 1, begin + 40'000);
        sum(process, begin + 45'000, 4000);
        compute(process, Kind::update, i, trace::kNone, begin + 70'000);
      }
      Event& span = add(process, Kind::iteration, 300'000, 100'000);
      span.iteration = 2;
    }
  }

  Event& add(trace::Process& process, Kind kind, int64_t start, int64_t duration) {
    Event& event = process.events.emplace_back();
    event.kind = kind;
    event.start_ns = start;
    event.duration_ns = duration;
    return event;
  }
  void compute(trace::Process& process, Kind kind, uint32_t iteration, uint32_t layer,
               int64_t start) {
    Event& event = add(process, kind, start, 10'000);
    event.iteration = iteration;
    event.layer = static_cast<uint16_t>(layer);
  }
  void ready(trace::Process& process, uint32_t iteration, uint32_t tensor, uint32_t bucket,
             int64_t at) {
    Event& event = add(process, Kind::gradient_ready, at, 0);
    event.shape = Shape::instant;
    event.iteration = iteration;
    event.tensor = tensor;
    event.bucket = bucket;
    event.bytes = process.model.tensors[tensor].bytes;
  }
  void sum(trace::Process& process, int64_t start, uint64_t bytes) {
    const uint32_t number = kCalled + calls_[process.environment.rank]++;
    Event& event = add(process, Kind::operation, start, 10'000);
    event.operation = number;
    event.bytes = bytes;
    for (Shape shape : {Shape::send, Shape::receive}) {
      Event& chunk = add(process, Kind::chunk, start + 1'000, 8'000);
      chunk.shape = shape;
      chunk.operation = number;
      chunk.bytes = bytes / 2;
      chunk.step = 0;
      chunk.chunk = 0;
      chunk.lane = 0;
      chunk.peer = static_cast<uint16_t>(1 - process.environment.rank);
      chunk.message = 1 + (number - kCalled) * 2 +
                      ((shape == Shape::send) == (process.environment.rank == 0) ? 0 : 1);
    }
  }

  trace::Trace trace;

 private:
  uint32_t calls_[2] = {0, 0};
};

std::vector<Event> of(const trace::Process& process, Kind kind) {
  std::vector<Event> out;
  for (const Event& event : process.events)
    if (event.kind == kind && event.iteration != trace::kNone) out.push_back(event);
  return out;
}

TEST(Adopt, SumsThatAFrameworkCalledBecomeThoseOfItsBuckets) {
  Called run;
  EXPECT_THAT(adopt_called_sums(run.trace), ElementsAre(HasSubstr("2 in an iteration, from")));
  for (const trace::Process& process : run.trace.processes) {
    std::vector<std::array<uint32_t, 3>> found;
    for (const Event& event : of(process, Kind::operation))
      found.push_back({event.operation, event.iteration, event.bucket});
    EXPECT_THAT(
        found, ElementsAre(std::array{0u, 0u, 0u}, std::array{1u, 0u, 1u}, std::array{2u, 1u, 0u},
                           std::array{3u, 1u, 1u}, std::array{4u, 2u, 0u}, std::array{5u, 2u, 1u}));
    EXPECT_EQ(of(process, Kind::chunk).size(), 12u) << "and so do their messages";
    const std::vector<Event> done = of(process, Kind::tensor_done);
    ASSERT_EQ(done.size(), 6u);
    EXPECT_EQ(done[0].tensor, 1u);
    EXPECT_EQ(done[0].start_ns, 145'000) << "when its operation ended";
    const auto plan = plan::parse(process.environment.plan_text);
    ASSERT_TRUE(plan.ok());
    ASSERT_EQ(plan->buckets.size(), 2u);
    EXPECT_THAT(plan->buckets[0].tensors, ElementsAre("last.weight"));
    EXPECT_THAT(plan->buckets[1].tensors, ElementsAre("first.weight"));
    EXPECT_EQ(plan->barrier, plan::Barrier::all);
    EXPECT_FALSE(plan->partition || plan->credit);
    EXPECT_EQ(plan->lanes, plan::preset("default")->lanes) << "as the plan in force says";
    EXPECT_EQ(process.environment.plan_hash, plan::hash(*plan));
  }
}

TEST(Adopt, TheGraphOfSuchARunKnowsWhatEachWaitedFor) {
  auto understood = understand(Called().trace);
  ASSERT_TRUE(understood.ok()) << understood.error().message();
  EXPECT_TRUE(framework_cuts(understood->trace));
  const graph::Graph& graph = understood->graph;
  EXPECT_EQ(graph.operations.size(), 6u);
  EXPECT_EQ(graph.iterations.size(), 3u);
  const graph::Predecessors predecessors(graph);
  size_t begun = 0;
  for (uint32_t n = 0; n < graph.nodes.size(); ++n) {
    if (graph.nodes[n].type != graph::NodeType::operation) continue;
    ++begun;
    const auto causes = predecessors.of(n);
    ASSERT_EQ(causes.size(), 1u) << "each rank starts when its own bucket is there";
    EXPECT_EQ(graph.nodes[causes[0].from].type, graph::NodeType::bucket);
    EXPECT_EQ(graph.nodes[causes[0].from].rank, graph.nodes[n].rank);
  }
  EXPECT_EQ(begun, 12u);
  EXPECT_THAT(graph.remarks, ::testing::Not(::testing::Contains(HasSubstr("admission"))));
}

TEST(Adopt, AnIterationThatNotAllRanksAgreeOnIsLeftOut) {
  Called run;
  for (Event& event : run.trace.processes[1].events)
    if (event.kind == Kind::operation && event.start_ns == 235'000) event.bytes = 9;
  EXPECT_THAT(adopt_called_sums(run.trace), ElementsAre(HasSubstr("from iteration 0")));
  for (const trace::Process& process : run.trace.processes) {
    EXPECT_EQ(of(process, Kind::operation).size(), 4u);
    for (const Event& event : of(process, Kind::gradient_ready)) EXPECT_NE(event.iteration, 1u);
  }
}

TEST(Adopt, ANumberThatTwoGroupsUsedIsNobodys) {
  Called run;
  for (trace::Process& process : run.trace.processes) {
    Event& other = run.add(process, Kind::operation, 140'000, 5'000);
    other.operation = kCalled + 1;  // the first bucket's
    other.bytes = 77;
  }
  EXPECT_THAT(adopt_called_sums(run.trace), ElementsAre(HasSubstr("from iteration 1")));
}

TEST(Adopt, ARunWithAnExchangeOrWithoutBucketsStaysAsItIs) {
  Called exchange;
  exchange.add(exchange.trace.processes[0], Kind::operation, 5, 5).operation = 3;
  Called unknown;
  for (trace::Process& process : unknown.trace.processes)
    for (Event& event : process.events)
      if (event.kind == Kind::gradient_ready) event.bucket = trace::kNone;
  for (Called* run : {&exchange, &unknown}) {
    const trace::Trace before = run->trace;
    EXPECT_THAT(adopt_called_sums(run->trace), IsEmpty());
    EXPECT_FALSE(framework_cuts(run->trace));
    for (size_t p = 0; p < 2; ++p)
      EXPECT_EQ(run->trace.processes[p].events, before.processes[p].events);
  }
}

TEST(Adopt, BucketsThatNobodySummedAreSaid) {
  Called run;
  for (trace::Process& process : run.trace.processes)
    std::erase_if(process.events,
                  [](const Event& event) { return event.operation != trace::kNone; });
  EXPECT_THAT(adopt_called_sums(run.trace), ElementsAre(HasSubstr("how they travelled")));
}

TEST(Adopt, ThePassesThatAreLeftToTheFrameworkAreOnesOfTheSearch) {
  const std::vector<std::string>& all = optimize::pass_names();
  for (const std::string& pass : passes_of_an_exchange())
    EXPECT_NE(std::find(all.begin(), all.end(), pass), all.end()) << pass;
}

}  // namespace
}  // namespace weft::analysis
