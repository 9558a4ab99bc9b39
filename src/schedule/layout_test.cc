#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>

#include "weft/schedule.h"

namespace weft::schedule {
namespace {

// Tensors of so many KiB each, a layer each, in forward order: t0, t1, ...
std::vector<Tensor> tensors_of(std::vector<uint64_t> kibs) {
  std::vector<Tensor> tensors;
  for (uint32_t i = 0; i < kibs.size(); ++i) tensors.push_back({text("t%u", i), kibs[i] * 256, i});
  return tensors;
}

std::vector<std::vector<uint32_t>> groups(const Layout& layout) {
  std::vector<std::vector<uint32_t>> out;
  for (const Bucket& bucket : layout.buckets) out.push_back(bucket.tensors);
  return out;
}

TEST(Layout, ddp_closes_a_bucket_when_the_limit_is_crossed) {
  // Last layer first: 4 KiB + 1500 KiB pass 1 MiB; then 20 MiB + 10 MiB pass 25 MiB.
  auto tensors = tensors_of({5000, 10 * 1024, 20 * 1024, 1500, 4});
  auto layout = make_layout(*plan::preset("ddp"), tensors);
  ASSERT_TRUE(layout) << layout.error().message();
  EXPECT_EQ(groups(*layout), (std::vector<std::vector<uint32_t>>{{4, 3}, {2, 1}, {0}}));
  EXPECT_EQ(layout->buckets[1].offsets, (std::vector<uint64_t>{0, 20 * 1024 * 256}));
}

TEST(Layout, a_fusion_buffer_is_not_exceeded_unless_by_one_tensor) {
  auto tensors = tensors_of({100 * 1024, 40 * 1024, 200 * 1024, 8});
  auto layout = make_layout(*plan::preset("horovod"), tensors);
  ASSERT_TRUE(layout);
  EXPECT_EQ(groups(*layout), (std::vector<std::vector<uint32_t>>{{3}, {2}, {1}, {0}}));
}

TEST(Layout, explicit_buckets_come_first_and_the_rest_follows_the_rule) {
  plan::Plan plan;
  plan.buckets.push_back({{"t1", "t3"}, 7, std::nullopt});
  auto layout = make_layout(plan, tensors_of({1, 1, 1, 1}));
  ASSERT_TRUE(layout);
  EXPECT_EQ(groups(*layout), (std::vector<std::vector<uint32_t>>{{1, 3}, {2, 0}}));
  EXPECT_EQ(layout->buckets[0].priority, 7);
}

TEST(Layout, tensors_of_different_types_share_no_bucket) {
  plan::Plan plan;
  plan.bucket_rule = {kib(4), kib(4), true};
  std::vector<Tensor> tensors = tensors_of({2, 2, 2, 2, 2, 2});
  for (uint32_t t : {1, 3, 5}) {
    tensors[t].type = 4;
    tensors[t].element_bytes = 2;
    tensors[t].elements *= 2;  // as many bytes
  }
  auto layout = make_layout(plan, tensors);
  ASSERT_TRUE(layout);
  EXPECT_EQ(groups(*layout), (std::vector<std::vector<uint32_t>>{{5, 3}, {4, 2}, {1}, {0}}));
  EXPECT_EQ(layout->buckets[0].element_bytes, 2u);
  EXPECT_EQ(layout->buckets[1].element_bytes, 4u);
  EXPECT_EQ(layout->pieces[0].elements, 2048u);
  EXPECT_EQ(layout->pieces[0].words, layout->pieces[1].words);
  plan.buckets.push_back({{"t0", "t1"}, std::nullopt, std::nullopt});
  layout = make_layout(plan, tensors);
  ASSERT_FALSE(layout);
  EXPECT_THAT(layout.error().message(), testing::HasSubstr("\"t0\" and \"t1\""));
}

TEST(Layout, priority_is_the_layer_that_needs_it_first) {
  plan::Plan plan;
  plan.order = plan::Order::layer;
  plan.bucket_rule = {kib(2), kib(2), true};
  plan.priority["t1"] = -5;
  auto layout = make_layout(plan, tensors_of({1, 1, 1, 1, 1}));
  ASSERT_TRUE(layout);
  EXPECT_EQ(groups(*layout), (std::vector<std::vector<uint32_t>>{{4, 3}, {2, 1}, {0}}));
  EXPECT_EQ(layout->buckets[0].priority, 3);
  EXPECT_EQ(layout->buckets[1].priority, -5);
  EXPECT_EQ(layout->buckets[2].priority, 0);
}

TEST(Layout, pieces_cover_a_bucket_exactly) {
  Rng rng(1);
  for (int round = 0; round < 200; ++round) {
    plan::Plan plan;
    plan.partition = Bytes{4096 + rng.below(1 << 20)};
    std::vector<uint64_t> sizes;
    for (uint64_t i = 0; i <= rng.below(6); ++i) sizes.push_back(rng.below(3000));
    auto layout = make_layout(plan, tensors_of(sizes));
    ASSERT_TRUE(layout);
    std::set<uint32_t> seen;
    for (uint32_t b = 0; b < layout->buckets.size(); ++b) {
      const Bucket& bucket = layout->buckets[b];
      seen.insert(bucket.tensors.begin(), bucket.tensors.end());
      uint64_t covered = 0;
      for (uint32_t k = 0; k < bucket.pieces; ++k) {
        const Piece& piece = layout->pieces[bucket.first_piece + k];
        EXPECT_EQ(piece.bucket, b);
        EXPECT_EQ(piece.first, covered);
        EXPECT_LE(piece.elements * kElementBytes, plan.partition->count);
        covered += piece.elements;
      }
      EXPECT_EQ(covered, bucket.elements);
    }
    EXPECT_EQ(seen.size(), sizes.size());
  }
}

TEST(Layout, refuses_by_name_what_the_runtime_cannot_do) {
  auto refused = [](auto&& change) {
    plan::Plan plan;
    change(plan);
    auto layout = make_layout(plan, tensors_of({1}));
    EXPECT_FALSE(layout);
    return layout ? std::string()
                  : std::string(code_name(layout.error().code())) + " " + layout.error().message();
  };
  using testing::HasSubstr;
  EXPECT_THAT(refused([](plan::Plan& p) { p.codec = "qsgd"; }),
              HasSubstr("unsupported plan /codec: \"qsgd\""));
  EXPECT_THAT(refused([](plan::Plan& p) {
                p.buckets.push_back({{"t0"}, {}, "fp16"});
              }),
              HasSubstr("plan /buckets/0/codec: \"fp16\""));
  EXPECT_THAT(refused([](plan::Plan& p) { p.sync = plan::Sync::local_sgd; }),
              HasSubstr("plan /sync/mode: \"local_sgd\""));
  EXPECT_THAT(refused([](plan::Plan& p) {
                p.buckets.push_back({{"t00"}, {}, {}});
              }),
              HasSubstr("no tensor \"t00\"; did you mean \"t0\"?"));
  EXPECT_THAT(refused([](plan::Plan& p) { p.priority["nobody_knows"] = 1; }),
              HasSubstr("plan /priority: the job has no tensor"));
}

TEST(Layout, shrink_divides_every_size_and_keeps_the_grouping) {
  plan::Plan plan = *plan::preset("default");
  plan::Plan small = scaled(plan, 16);
  EXPECT_EQ(small.bucket_rule.size.count, plan.bucket_rule.size.count / 16);
  EXPECT_EQ(small.partition->count, plan.partition->count / 16);
  EXPECT_EQ(small.credit->count, plan.credit->count / 16);
  EXPECT_EQ(small.chunk.count, plan.chunk.count / 16);
  EXPECT_EQ(scaled(plan, 1), plan);

  std::vector<uint64_t> sizes = {64, 3200, 16, 160000, 64, 8000, 16};
  std::vector<uint64_t> smaller;
  for (uint64_t size : sizes) smaller.push_back(size / 16);
  auto full = make_layout(plan, tensors_of(sizes));
  auto shrunk = make_layout(small, tensors_of(smaller));
  ASSERT_TRUE(full && shrunk);
  EXPECT_EQ(groups(*full), groups(*shrunk));
  EXPECT_EQ(full->pieces.size(), shrunk->pieces.size());
}

TEST(Layout, pieces_know_the_tensors_that_lie_in_them) {
  plan::Plan plan;
  plan.bucket_rule = {mib(1), mib(1), true};
  plan.partition = kib(100);
  auto layout = make_layout(plan, tensors_of({30, 0, 150, 20}));
  ASSERT_TRUE(layout.ok());
  // Backward order: 3 (20), 2 (150), 1 (none), 0 (30): two pieces of 100 KiB.
  ASSERT_EQ(layout->pieces.size(), 2u);
  EXPECT_EQ(tensors_by_piece(*layout), (std::vector<std::vector<uint32_t>>{{3, 2, 1}, {2, 0}}));
}

// The row of docs/plan_format.md for a key whose words are these.
std::string row_of(const std::string& key, const std::vector<std::string>& words,
                   const std::function<void(plan::Plan&, const std::string&)>& set) {
  std::string taken, refused;
  for (const std::string& word : words) {
    plan::Plan plan;
    set(plan, word);
    EXPECT_TRUE(plan::validate(plan)) << word;
    std::string& list = supported(plan) ? taken : refused;
    list += (list.empty() ? "`" : ", `") + word + "`";
  }
  auto shown = [](const std::string& list) { return list.empty() ? "–" : list; };
  return "| `" + key + "` | " + shown(taken) + " | " + shown(refused) + " |\n";
}

TEST(Supported, is_what_the_page_of_the_format_says) {
  const char* root = std::getenv("WEFT_SOURCE_DIR");
  if (root == nullptr) GTEST_SKIP() << "WEFT_SOURCE_DIR is not set";
  std::ifstream file(std::string(root) + "/docs/plan_format.md");
  std::ostringstream page;
  page << file.rdbuf();
  auto algorithm = [](plan::Plan& plan, const std::string& word) {
    plan.algorithm = {{std::nullopt, word}};
  };
  auto codec = [](plan::Plan& plan, const std::string& word) { plan.codec = word; };
  using plan::LaneWorker;
  using plan::Sync;
  const std::vector<Sync> modes = {Sync::synchronous, Sync::asynchronous, Sync::bounded_stale,
                                   Sync::local_sgd, Sync::one_step_delay};
  std::vector<std::string> mode_names;
  for (Sync mode : modes) mode_names.emplace_back(plan::name_of(mode));
  auto sync = [&](plan::Plan& plan, const std::string& word) {
    for (Sync mode : modes)
      if (word == plan::name_of(mode)) plan.sync = mode;
    plan.staleness = plan.sync == Sync::local_sgd || plan.sync == Sync::bounded_stale ? 1 : 0;
  };
  auto worker = [](plan::Plan& plan, const std::string& word) {
    plan.lane_worker =
        word == plan::name_of(LaneWorker::process) ? LaneWorker::process : LaneWorker::thread;
  };
  EXPECT_THAT(page.str(),
              ::testing::HasSubstr(row_of("algorithm[].use", plan::algorithm_names(), algorithm)));
  EXPECT_THAT(page.str(), ::testing::HasSubstr(row_of("lane_worker",
                                                      {plan::name_of(LaneWorker::thread),
                                                       plan::name_of(LaneWorker::process)},
                                                      worker)));
  EXPECT_THAT(page.str(), ::testing::HasSubstr(row_of("codec", plan::codec_names(), codec)));
  EXPECT_THAT(page.str(), ::testing::HasSubstr(row_of("sync.mode", mode_names, sync)));
}

}  // namespace
}  // namespace weft::schedule
