// Agreement along trees, over real sockets: sums, how many frames a rank handles, and who is named
// when a bucket never comes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "testing.h"
#include "weft/runtime.h"

namespace weft::runtime {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace): this module's own
using Json = nlohmann::json;

constexpr uint64_t kSteps = 4;
constexpr uint32_t kTensors = 6;

plan::Plan plan_of_tensors() {
  plan::Plan plan;
  plan.bucket_rule = {Bytes{1}, Bytes{1}, false};  // a bucket for each tensor
  plan.partition = kib(8);
  plan.credit = kib(24);
  plan.order = plan::Order::layer;
  return plan;
}

// Every rank in an order of its own; the sums are looked at.
Result<void> exchange_steps(Group& group) {
  std::vector<std::vector<float>> data(kTensors, std::vector<float>(3000));
  std::vector<Tensor> tensors;
  for (uint32_t t = 0; t < kTensors; ++t) tensors.push_back({text("t%u", t), data[t], t});
  WEFT_ASSIGN(auto exchange, group.exchange(tensors));
  Rng rng(group.rank().index);
  std::vector<uint32_t> order(kTensors);
  for (uint32_t t = 0; t < kTensors; ++t) order[t] = t;
  for (uint64_t step = 0; step < kSteps; ++step) {
    rng.shuffle(std::span(order));
    for (uint32_t t : order) {
      std::fill(data[t].begin(), data[t].end(), static_cast<float>(group.rank().index + t + step));
      WEFT_TRY(exchange->ready(t, step));
    }
    WEFT_TRY(exchange->wait_all(step));
    for (uint32_t t : order) {
      uint64_t sum = 0;
      for (uint32_t r = 0; r < group.ranks(); ++r) sum += r + t + step;
      for (float value : data[t])
        if (value != static_cast<float>(sum))
          return error(Code::corrupt, "tensor %u of step %llu is wrong", t,
                       static_cast<unsigned long long>(step));
    }
  }
  return {};
}

TEST(Agreement, along_any_tree_makes_the_right_sums_with_frames_in_proportion_to_the_fan_out) {
  for (uint32_t ranks : {2u, 3u, 7u})
    for (uint32_t fan_out : {1u, 2u, 3u, 6u}) {
      SCOPED_TRACE(text("%u ranks, fan-out %u", ranks, fan_out));
      const schedule::Tree tree{ranks, fan_out};
      auto outcomes = run_ranks(
          ranks, plan_of_tensors(),
          [&](Group& group, capture::Recorder&) -> Result<void> {
            WEFT_TRY(exchange_steps(group));
            WEFT_TRY(group.barrier());  // all frames were heard
            Json agreement = Json::parse(group.status())["agreement"];
            EXPECT_EQ(agreement["fan_out"], fan_out);
            const uint32_t rank = group.rank().index;
            const uint64_t reports = kTensors * kSteps, pieces = 2 * reports;
            const uint64_t below = tree.below(rank);
            // What rank 0 starts together is one frame.
            const uint64_t heard = agreement["frames_heard"], told = agreement["frames_told"];
            if (rank == 0) {
              EXPECT_EQ(heard, below * reports);
              EXPECT_EQ(told % below, 0u);
              EXPECT_LE(told, below * pieces);
            } else {
              EXPECT_GT(heard, below * reports);
              EXPECT_LE(heard, below * reports + pieces);
              EXPECT_EQ(told, reports + below * (heard - below * reports));
            }
            return {};
          },
          [&](Options& options) { options.fan_out = options.rank.index == 0 ? fan_out : 0; });
      for (const auto& outcome : outcomes) EXPECT_TRUE(outcome) << outcome.error().message();
    }
}

// The one that lacks it is named, wherever it is in the tree, and also when nobody else in that
// part of the tree has the bucket.
TEST(Agreement, names_the_rank_that_owes_a_bucket) {
  struct {
    uint32_t fan_out;
    std::vector<uint32_t> owing;
  } cases[] = {{1, {0}}, {1, {2}}, {1, {4}}, {2, {1}}, {2, {3}}, {2, {1, 3, 4}}, {1, {0, 3}}};
  for (const auto& one : cases) {
    SCOPED_TRACE(text("fan-out %u, rank %u", one.fan_out, one.owing[0]));
    auto outcomes = run_ranks(
        5, plan_of_tensors(),
        [&](Group& group, capture::Recorder&) -> Result<void> {
          std::vector<float> had(10), missed(10);
          WEFT_ASSIGN(auto exchange, group.exchange({{"had", had, 0}, {"missed", missed, 1}}));
          WEFT_TRY(exchange->ready(0, 0));
          WEFT_TRY(exchange->wait(0, 0));
          const uint32_t rank = group.rank().index;
          if (std::count(one.owing.begin(), one.owing.end(), rank) == 0)
            WEFT_TRY(exchange->ready(1, 0));
          return exchange->wait(1, 0);
        },
        [&](Options& options) {
          options.ready_deadline = Nanos::from_millis(300);
          options.fan_out = one.fan_out;
        });
    std::string words;
    for (auto& outcome : outcomes) {
      ASSERT_FALSE(outcome);
      EXPECT_EQ(outcome.error().code(), Code::timeout);
      EXPECT_EQ(words.empty() ? outcome.error().message() : words, outcome.error().message());
      words = outcome.error().message();
    }
    // Rank 0 may see first that it waits for itself.
    bool named = false;
    for (uint32_t rank : one.owing)
      for (const char* lacks : {"has no gradients of bucket 0", "waits for tensor \"missed\""})
        named = named || words.starts_with(text("rank %u on localhost %s", rank, lacks));
    EXPECT_TRUE(named) << words;
  }
}

// It is nobody's failure if a rank needs longer than others to come to an exchange.
TEST(Agreement, waits_for_a_slow_rank_below_others) {
  auto outcomes = run_ranks(
      4, plan_of_tensors(),
      [](Group& group, capture::Recorder&) -> Result<void> {
        std::vector<float> data(10);
        WEFT_ASSIGN(auto exchange, group.exchange({{"t", data, 0}}));
        for (uint64_t step = 0; step < 3; ++step) {
          if (group.rank().index == 3) std::this_thread::sleep_for(std::chrono::milliseconds(200));
          WEFT_TRY(exchange->ready(0, step));
          WEFT_TRY(exchange->wait(0, step));
        }
        return {};
      },
      [](Options& options) {
        options.ready_deadline = Nanos::from_millis(1500);
        options.fan_out = 1;
      });
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome) << outcome.error().message();
}

}  // namespace
}  // namespace weft::runtime
