#include <gtest/gtest.h>

#include "sample.h"
#include "weft/trace.h"

namespace weft::trace {
namespace {

// dilation 8 and shrink 4: target time is half of wall time, target bytes are fourfold.
Trace sample() {
  Trace trace;
  for (uint32_t rank : {0u, 1u}) trace.processes.push_back(sample_process(rank, 2, 3));
  return trace;
}

const SummaryRow* find(const Summary& summary, const std::string& what, uint32_t rank = kNone) {
  for (const SummaryRow& row : summary.rows) {
    if (row.what == what && row.rank == rank) return &row;
  }
  ADD_FAILURE() << "no row " << what;
  return nullptr;
}

TEST(Summary, iterations_say_duration_compute_and_wait) {
  Trace trace = sample();
  trace.processes[1].events[0].duration_ns = 1'000'000;  // rank 1 is slower in iteration 0
  Event wait;
  wait.kind = Kind::wait;
  wait.iteration = 0;
  wait.duration_ns = 50'000;
  trace.processes[0].events.push_back(wait);
  const Summary summary = summarize(trace, By::iteration);
  EXPECT_EQ(summary.dilation, 8);
  EXPECT_EQ(summary.shrink, 4);
  ASSERT_EQ(summary.rows.size(), 3u);
  const SummaryRow& row = summary.rows[0];
  EXPECT_EQ(row.what, "0");
  EXPECT_EQ(row.count, 2u);
  EXPECT_DOUBLE_EQ(row.mean_ns, 475'000);
  EXPECT_EQ(row.slowest, 1u);
  EXPECT_DOUBLE_EQ(row.compute_ns, 50'000);
  EXPECT_DOUBLE_EQ(row.wait_ns, 12'500);  // 25 us on one of two ranks
  EXPECT_DOUBLE_EQ(row.bytes, 2 * 2 * 65536 * 4);
  EXPECT_DOUBLE_EQ(summarize(trace, By::iteration, 0).rows[0].mean_ns, 450'000);
}

TEST(Summary, overlapping_compute_counts_once) {
  Trace trace = sample();
  Event backward = trace.processes[0].events[1];
  backward.kind = Kind::backward;
  backward.start_ns += 50'000;
  trace.processes[0].events.push_back(backward);
  EXPECT_DOUBLE_EQ(summarize(trace, By::iteration, 0).rows[0].compute_ns, 75'000);
}

TEST(Summary, tensors_say_how_long_a_reduction_took) {
  const Summary summary = summarize(sample(), By::tensor);
  ASSERT_EQ(summary.rows.size(), 2u);
  EXPECT_EQ(summary.rows[0].count, 0u);  // conv1.w is never reduced in the sample
  EXPECT_EQ(summary.rows[1].what, "fc.w");
  EXPECT_EQ(summary.rows[1].count, 6u);
  EXPECT_DOUBLE_EQ(summary.rows[1].p50_ns, 175'000);
  EXPECT_DOUBLE_EQ(summary.rows[1].bytes, 4 << 20);
}

TEST(Summary, lanes_say_what_they_carried_and_how_fast) {
  const Summary summary = summarize(sample(), By::lane);
  EXPECT_EQ(summary.rows.size(), 4u);
  const SummaryRow* row = find(summary, "lane 0 to rank 1", 0);
  ASSERT_NE(row, nullptr);
  EXPECT_EQ(row->count, 6u);
  EXPECT_DOUBLE_EQ(row->bytes, 6.0 * 65536 * 4);
  EXPECT_DOUBLE_EQ(row->busy_ns, 6 * 30'000);
  EXPECT_DOUBLE_EQ(row->rate_bps, 6.0 * 65536 * 4 * 8 / 1080e-6);  // from first to last message
  EXPECT_NE(find(summarize(sample(), By::peer), "from rank 0", 1), nullptr);
}

TEST(Summary, kinds_and_layers_are_counted) {
  const Summary kinds = summarize(sample(), By::kind);
  EXPECT_EQ(find(kinds, "send chunk")->count, 12u);
  EXPECT_EQ(find(kinds, "instant gradient_ready")->count, 6u);
  EXPECT_EQ(find(kinds, "counter tcp_info")->total_ns, 0);
  const Summary layers = summarize(sample(), By::layer);
  ASSERT_EQ(layers.rows.size(), 1u);
  EXPECT_EQ(layers.rows[0].what, "conv1");
  EXPECT_DOUBLE_EQ(layers.rows[0].forward_ns, 50'000);
  EXPECT_EQ(layers.rows[0].count, 0u);  // no gradient of it travels in the sample
}

TEST(Summary, layers_say_how_long_their_gradients_travel_and_what_waits_for_them) {
  Trace trace;
  Process& process = trace.processes.emplace_back();
  process.model.layers = {{"conv1"}, {"fc"}};
  process.model.tensors = {{"fc.w", 4000, 1, 1, 1}, {"fc.b", 40, 1, 1, 1}};
  auto add = [&](Kind kind, Shape shape, uint32_t tensor, int64_t start, int64_t duration) {
    Event event;
    event.kind = kind;
    event.shape = shape;
    event.layer = 1;
    event.tensor = tensor;
    event.iteration = 0;
    event.start_ns = start;
    event.duration_ns = duration;
    process.events.push_back(event);
  };
  add(Kind::forward, Shape::span, kNone, 0, 10);
  add(Kind::backward, Shape::span, kNone, 10, 20);
  add(Kind::gradient_ready, Shape::instant, 0, 30, 0);
  add(Kind::gradient_ready, Shape::instant, 1, 35, 0);
  add(Kind::wait, Shape::span, 0, 40, 50);
  add(Kind::tensor_done, Shape::instant, 1, 80, 0);
  add(Kind::tensor_done, Shape::instant, 0, 90, 0);
  const Summary layers = summarize(trace, By::layer);
  ASSERT_EQ(layers.rows.size(), 1u);
  EXPECT_EQ(layers.rows[0].what, "fc");
  EXPECT_DOUBLE_EQ(layers.rows[0].backward_ns, 20);
  EXPECT_DOUBLE_EQ(layers.rows[0].wait_ns, 50);
  EXPECT_DOUBLE_EQ(layers.rows[0].p50_ns, 60);
  EXPECT_DOUBLE_EQ(layers.rows[0].bytes, 4040);
}

TEST(Summary, of_nothing_is_nothing) {
  for (By by : {By::iteration, By::layer, By::tensor, By::lane, By::peer, By::kind}) {
    EXPECT_TRUE(summarize(Trace{}, by).rows.empty());
    EXPECT_TRUE(summarize(sample(), by, 9).rows.empty());
    EXPECT_EQ(*parse_by(name_of(by)), by);
  }
  EXPECT_FALSE(parse_by("color"));
}

TEST(Summary, probe_results_of_one_sort_stand_together) {
  const auto rows = summarize_probe(sample());
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].type, ProbeType::rate);
  EXPECT_EQ(rows[0].count, 2u);
  EXPECT_DOUBLE_EQ(rows[0].median_bps, (1 << 24) * 8 / 9e-3);
}

}  // namespace
}  // namespace weft::trace
