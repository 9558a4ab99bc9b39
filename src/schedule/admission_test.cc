#include <gtest/gtest.h>

#include <algorithm>
#include <deque>

#include "weft/schedule.h"

namespace weft::schedule {
namespace {

Layout layout_of(const plan::Plan& plan, uint32_t tensors, uint64_t elements) {
  std::vector<Tensor> list;
  for (uint32_t i = 0; i < tensors; ++i) list.push_back({text("t%u", i), elements, i});
  auto layout = make_layout(plan, list);
  WEFT_CHECK(layout.ok());
  return *layout;
}

TEST(Readiness, tells_when_a_bucket_is_complete_and_refuses_nonsense) {
  plan::Plan plan;
  plan.bucket_rule = {kib(8), kib(8), true};
  Layout layout = layout_of(plan, 4, 1024);  // 4 KiB each: {3, 2}, {1, 0}
  Readiness readiness(layout);
  EXPECT_EQ(*readiness.ready(3, 0), std::nullopt);
  EXPECT_EQ(*readiness.ready(0, 0), std::nullopt);
  EXPECT_EQ(*readiness.ready(2, 0), 0u);
  EXPECT_FALSE(readiness.ready(2, 0));  // twice
  EXPECT_FALSE(readiness.ready(4, 0));  // unknown
  EXPECT_FALSE(readiness.ready(1, 1));  // skips a step
  EXPECT_FALSE(readiness.ready(0, 1));  // its bucket-mate 1 is not there for step 0
  EXPECT_EQ(*readiness.ready(1, 0), 1u);
  EXPECT_EQ(*readiness.ready(2, 1), std::nullopt);
  EXPECT_EQ(*readiness.ready(3, 1), 0u);
}

TEST(Admission, decides_the_example_of_the_document) {
  plan::Plan plan;
  plan.bucket_rule = {kib(1), kib(1), false};  // a bucket a tensor: 2, 1, 0
  plan.partition = mib(2);
  plan.credit = mib(4);
  plan.order = plan::Order::layer;
  Layout layout = layout_of(plan, 3, 1u << 20);
  Admission admission(layout, Tree::flat(2));
  // What starts now, as "0a".
  auto starts = [&] {
    std::string out;
    while (auto start = admission.next()) {
      const Piece& piece = layout.pieces[start->piece];
      uint32_t tensor = layout.buckets[piece.bucket].tensors[0];
      out += text("%s%u%c", out.empty() ? "" : " ", tensor, 'a' + piece.partition);
    }
    return out;
  };
  auto complete = [&](uint32_t rank, uint32_t tensor) {
    ASSERT_TRUE(admission.ready({rank}, layout.bucket_of[tensor], 0));
  };
  complete(0, 2);
  EXPECT_EQ(starts(), "");
  complete(1, 2);
  EXPECT_EQ(starts(), "2a 2b");
  for (uint32_t tensor : {1u, 0u}) {
    for (uint32_t rank : {0u, 1u}) complete(rank, tensor);
    EXPECT_EQ(starts(), "");
  }
  const char* expected[] = {"0a", "0b", "1a", "1b"};
  for (uint32_t operation = 0; operation < 4; ++operation) {
    ASSERT_TRUE(admission.finished(operation));
    EXPECT_EQ(starts(), expected[operation]);
  }
}

TEST(Admission, waits_for_the_last_rank_and_names_it) {
  Layout layout = layout_of(plan::Plan(), 1, 1000);
  Admission admission(layout, Tree::flat(3));
  ASSERT_TRUE(admission.ready({0}, 0, 0));
  ASSERT_TRUE(admission.ready({2}, 0, 0));
  EXPECT_FALSE(admission.next());
  auto lacking = admission.lacking();
  ASSERT_TRUE(lacking);
  EXPECT_EQ(lacking->missing, (std::vector<Rank>{{1}}));
  ASSERT_TRUE(admission.ready({1}, 0, 0));
  EXPECT_FALSE(admission.lacking());
  auto start = admission.next();
  ASSERT_TRUE(start);
  EXPECT_EQ(start->operation, 0u);
  EXPECT_FALSE(admission.next());
  EXPECT_FALSE(admission.ready({3}, 0, 1));
  EXPECT_FALSE(admission.ready({0}, 9, 1));
  EXPECT_FALSE(admission.ready({0}, 0, 2));
  EXPECT_FALSE(admission.finished(7));
  EXPECT_TRUE(admission.finished(0));
}

TEST(Admission, first_ready_goes_first_unless_the_plan_orders_by_layer) {
  for (bool by_layer : {false, true}) {
    plan::Plan plan;
    plan.bucket_rule = {kib(4), kib(4), true};
    plan.order = by_layer ? plan::Order::layer : plan::Order::ready;
    plan.credit = kib(4);
    Layout layout = layout_of(plan, 3, 1024);  // buckets 0, 1, 2 hold t2, t1, t0
    Admission admission(layout, Tree::flat(1));
    for (uint32_t bucket : {1u, 0u, 2u}) ASSERT_TRUE(admission.ready({0}, bucket, 0));
    std::vector<uint32_t> order;
    while (auto start = admission.next()) {
      order.push_back(layout.pieces[start->piece].bucket);
      ASSERT_TRUE(admission.finished(start->operation));
    }
    EXPECT_EQ(order,
              by_layer ? (std::vector<uint32_t>{2, 1, 0}) : (std::vector<uint32_t>{1, 0, 2}));
  }
}

// Random plans, random readiness on every rank, operations that end in random order: everything
// is sent once, the credit holds, and the most urgent eligible piece is never passed by another.
TEST(Admission, never_hangs_and_never_holds_up_an_urgent_tensor_by_more_than_the_credit) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(text("seed %llu", static_cast<unsigned long long>(seed)));
    Rng rng(seed);
    plan::Plan plan;
    uint32_t tensors = 1 + static_cast<uint32_t>(rng.below(12));
    uint64_t elements = 1024 * (1 + rng.below(32));
    plan.bucket_rule = {kib(4 + rng.below(128)), kib(4 + rng.below(256)), rng.below(2) == 0};
    plan.partition = kib(4 + rng.below(64));
    plan.order = rng.below(2) == 0 ? plan::Order::layer : plan::Order::ready;
    bool single = rng.below(2) == 0;  // credit for one partition only
    plan.credit = single ? *plan.partition : Bytes{plan.partition->count * (1 + rng.below(8))};
    uint32_t ranks = 1 + static_cast<uint32_t>(rng.below(5));
    Layout layout = layout_of(plan, tensors, elements);
    Admission admission(layout, Tree::flat(ranks));
    constexpr uint64_t kSteps = 3;

    // Each rank reports its buckets in an order of its own; a bucket's steps in order.
    std::vector<std::deque<std::pair<uint32_t, uint64_t>>> reports(ranks);
    for (auto& mine : reports)
      for (uint64_t step = 0; step < kSteps; ++step) {
        std::vector<uint32_t> buckets(layout.buckets.size());
        for (uint32_t b = 0; b < buckets.size(); ++b) buckets[b] = b;
        rng.shuffle(std::span(buckets));
        for (uint32_t b : buckets) mine.emplace_back(b, step);
      }

    std::vector<uint64_t> running;
    size_t started = 0, total = layout.pieces.size() * kSteps;
    uint64_t largest = 0;
    for (const Piece& piece : layout.pieces) largest = std::max(largest, piece.elements);
    std::vector<std::vector<uint64_t>> reported(ranks,
                                                std::vector<uint64_t>(layout.buckets.size(), 0));
    std::vector<uint64_t> sent(layout.pieces.size(), 0);
    for (uint64_t turns = 0; started < total || !running.empty(); ++turns) {
      ASSERT_LT(turns, 100000u) << "hangs";
      uint32_t rank = static_cast<uint32_t>(rng.below(ranks));
      if (rng.below(2) == 0 && !reports[rank].empty()) {
        auto [bucket, step] = reports[rank].front();
        reports[rank].pop_front();
        ++reported[rank][bucket];
        ASSERT_TRUE(admission.ready({rank}, bucket, step));
      } else if (!running.empty()) {
        size_t which = rng.below(running.size());
        ASSERT_TRUE(admission.finished(running[which]));
        running.erase(running.begin() + static_cast<ptrdiff_t>(which));
      }
      while (auto start = admission.next()) {
        EXPECT_EQ(start->operation, started);
        EXPECT_EQ(start->step, sent[start->piece]) << "a piece goes once a step, in order";
        // No more urgent piece was eligible and passed over.
        int64_t urgency = layout.buckets[layout.pieces[start->piece].bucket].priority;
        for (uint32_t p = 0; p < layout.pieces.size(); ++p) {
          uint32_t bucket = layout.pieces[p].bucket;
          uint64_t everywhere = kSteps;
          for (auto& of_rank : reported) everywhere = std::min(everywhere, of_rank[bucket]);
          if (sent[p] < everywhere) {
            EXPECT_LE(urgency, layout.buckets[bucket].priority);
          }
        }
        ++sent[start->piece];
        ++started;
        running.push_back(start->operation);
        EXPECT_LE(admission.in_flight_elements(), std::max(layout.credit_elements, largest));
      }
    }
    EXPECT_EQ(admission.in_flight_elements(), 0u);
    EXPECT_FALSE(admission.lacking());
  }
}

}  // namespace
}  // namespace weft::schedule
