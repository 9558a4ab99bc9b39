#include "weft/runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "known_sums.h"
#include "testing.h"

namespace weft::runtime {
namespace {

using testing::HasSubstr;
using testing_support::expect_ok;
using testing_support::run_ranks;
using testing_support::sum;
using testing_support::value;

plan::Plan random_plan(Rng& rng) {
  plan::Plan plan;
  plan.bucket_rule = {kib(4 + rng.below(200)), kib(4 + rng.below(2000)), rng.below(2) == 0};
  if (rng.below(2) == 0) plan.partition = kib(4 + rng.below(400));
  if (rng.below(2) == 0) plan.credit = kib(1 + rng.below(1000));
  plan.order = rng.below(2) == 0 ? plan::Order::layer : plan::Order::ready;
  plan.barrier = rng.below(2) == 0 ? plan::Barrier::all : plan::Barrier::tensor;
  plan.lanes = 1 + static_cast<uint32_t>(rng.below(6));
  plan.chunk = kib(4 + rng.below(300));
  return plan;
}

TEST(Group, sums_broadcasts_and_waits_for_any_number_of_ranks) {
  for (uint32_t ranks : {1u, 2u, 3u, 5u}) {
    plan::Plan plan;
    plan.lanes = ranks;
    plan.chunk = kib(16);
    expect_ok(run_ranks(ranks, plan, [&](Group& group, capture::Recorder&) -> Result<void> {
      for (size_t n : {size_t{0}, size_t{1}, size_t{ranks - 1}, size_t{1003}, size_t{300000}}) {
        std::vector<float> data(n);
        for (size_t i = 0; i < n; ++i) data[i] = value(i, 0, 0, group.rank().index);
        WEFT_TRY(group.all_reduce(data));
        for (size_t i = 0; i < n; ++i)
          if (data[i] != sum(i, 0, 0, ranks)) return error(Code::corrupt, "wrong sum at %zu", i);
        for (uint32_t root = 0; root < ranks; ++root) {
          for (size_t i = 0; i < n; ++i) data[i] = value(i, root, 1, group.rank().index);
          WEFT_TRY(group.broadcast(data, {root}));
          for (size_t i = 0; i < n; ++i)
            if (data[i] != value(i, root, 1, root))
              return error(Code::corrupt, "wrong copy at %zu", i);
        }
        WEFT_TRY(group.barrier());
      }
      return {};
    }));
  }
}

TEST(Group, gives_the_same_bits_whatever_the_lanes) {
  constexpr uint32_t kRanks = 3;
  std::vector<std::vector<float>> results;
  for (uint32_t lanes : {1u, 7u}) {
    plan::Plan plan;
    plan.lanes = lanes;
    plan.chunk = kib(4);
    std::vector<std::vector<float>> by_rank(kRanks);
    expect_ok(run_ranks(kRanks, plan, [&](Group& group, capture::Recorder&) -> Result<void> {
      Rng rng(group.rank().index + 5);
      std::vector<float> data(100003);
      for (float& x : data) x = static_cast<float>(rng.uniform() * 1e3 - 500);  // inexact sums
      WEFT_TRY(group.all_reduce(data));
      by_rank[group.rank().index] = std::move(data);
      return {};
    }));
    EXPECT_EQ(by_rank[0], by_rank[1]);
    EXPECT_EQ(by_rank[0], by_rank[2]);
    results.push_back(by_rank[0]);
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(Exchange, is_exact_under_random_plans_and_random_ready_orders) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(text("seed %llu", static_cast<unsigned long long>(seed)));
    Rng rng(seed);
    plan::Plan plan = random_plan(rng);
    uint32_t ranks = 2 + static_cast<uint32_t>(rng.below(4));
    std::vector<uint64_t> sizes;
    for (uint64_t i = 0; i < 1 + rng.below(14); ++i)
      sizes.push_back(rng.below(5) == 0 ? rng.below(3) : rng.below(60000));
    expect_ok(run_ranks(ranks, plan, [&](Group& group, capture::Recorder&) -> Result<void> {
      uint32_t rank = group.rank().index;
      Rng own(seed * 100 + rank);
      std::vector<std::vector<float>> data;
      std::vector<Tensor> tensors;
      for (uint32_t t = 0; t < sizes.size(); ++t) data.emplace_back(sizes[t]);
      for (uint32_t t = 0; t < sizes.size(); ++t)
        tensors.push_back({text("t%u", t), data[t], t / 2});
      WEFT_ASSIGN(auto exchange, group.exchange(tensors));
      for (uint64_t step = 0; step < 4; ++step) {
        std::vector<uint32_t> order(sizes.size());
        for (uint32_t t = 0; t < order.size(); ++t) order[t] = t;
        own.shuffle(std::span(order));
        for (uint32_t t : order) {
          for (size_t i = 0; i < data[t].size(); ++i) data[t][i] = value(i, t, step, rank);
          WEFT_TRY(exchange->ready(t, step));
        }
        own.shuffle(std::span(order));
        for (uint32_t t : order) WEFT_TRY(exchange->wait(t, step));
        WEFT_TRY(exchange->wait_all(step));
        for (uint32_t t : order)
          for (size_t i = 0; i < data[t].size(); ++i)
            if (data[t][i] != sum(i, t, step, ranks))
              return error(Code::corrupt, "tensor %u, element %zu, step %llu: %g", t, i,
                           static_cast<unsigned long long>(step), double{data[t][i]});
      }
      return {};
    }));
  }
}

// Small whole numbers, which every type holds and adds exactly.
double whole(size_t i, uint32_t t, uint64_t step, uint32_t rank) {
  return static_cast<double>((i * 3 + t * 5 + step * 7 + rank * 2) % 16);
}

// As bytes of a type, and back.
void put(Type type, std::byte* at, double value) {
  auto narrow = static_cast<float>(value);
  if (type == Type::float64) {
    std::memcpy(at, &value, sizeof value);
  } else if (type == Type::float32) {
    std::memcpy(at, &narrow, sizeof narrow);
  } else {
    reduce::narrow(type, at, &narrow, 1);
  }
}

double get(Type type, const std::byte* at) {
  double value = 0;
  float narrow = 0;
  if (type == Type::float64) {
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  if (type == Type::float32)
    std::memcpy(&narrow, at, sizeof narrow);
  else
    reduce::widen(type, &narrow, at, 1);
  return double{narrow};
}

TEST(Exchange, takes_every_floating_point_type_and_mixes_none) {
  constexpr Type kTypes[] = {Type::float64, Type::float32, Type::float16, Type::bfloat16};
  for (uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(text("seed %llu", static_cast<unsigned long long>(seed)));
    Rng rng(seed);
    plan::Plan plan = random_plan(rng);
    uint32_t ranks = 2 + static_cast<uint32_t>(rng.below(3));
    std::vector<std::pair<uint64_t, Type>> made;
    for (uint64_t i = 0; i < 2 + rng.below(8); ++i)
      made.emplace_back(rng.below(30000), kTypes[rng.below(4)]);
    expect_ok(run_ranks(ranks, plan, [&](Group& group, capture::Recorder&) -> Result<void> {
      uint32_t rank = group.rank().index;
      std::vector<std::vector<std::byte>> data;
      std::vector<Tensor> tensors;
      for (auto [elements, type] : made) data.emplace_back(elements * reduce::size_of(type));
      for (uint32_t t = 0; t < made.size(); ++t)
        tensors.emplace_back(text("t%u", t), data[t].data(), made[t].first, made[t].second, t);
      WEFT_ASSIGN(auto exchange, group.exchange(tensors));
      for (uint64_t step = 0; step < 3; ++step) {
        // In one step in three a rank has nothing to say of a tensor; in one, none has.
        auto has = [&](uint32_t t, uint32_t r) { return step != 1 || (t + r) % 2 == 0; };
        auto any = [&](uint32_t t) { return step != 2 || t != 0 ? has(t, 0) || has(t, 1) : false; };
        for (uint32_t t = 0; t < made.size(); ++t) {
          auto [elements, type] = made[t];
          size_t size = reduce::size_of(type);
          for (size_t i = 0; i < elements; ++i)
            put(type, data[t].data() + i * size, whole(i, t, step, rank));
          const bool says = any(t) && has(t, rank);
          WEFT_TRY(says ? exchange->ready(t, step) : exchange->ready_without(t, step));
        }
        WEFT_TRY(exchange->wait_all(step));
        for (uint32_t t = 0; t < made.size(); ++t) {
          auto [elements, type] = made[t];
          for (size_t i = 0; i < elements; ++i) {
            double sum = 0;
            for (uint32_t r = 0; r < ranks; ++r)
              if (any(t) && has(t, r)) sum += whole(i, t, step, r);
            double found = get(type, data[t].data() + i * reduce::size_of(type));
            if (found != sum)
              return error(Code::corrupt, "tensor %u (%s), element %zu, step %llu: %g, not %g", t,
                           reduce::name_of(type), i, static_cast<unsigned long long>(step), found,
                           sum);
          }
        }
      }
      return {};
    }));
  }
}

TEST(Exchange, the_set_of_tensors_stays) {
  expect_ok(run_ranks(2, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
    std::vector<float> data(10, 1);
    std::vector<int32_t> whole_numbers(10);
    auto refused = group.exchange({Tensor("t", whole_numbers.data(), 10, Type::int32)});
    EXPECT_FALSE(refused);
    if (!refused) {
      EXPECT_THAT(refused.error().message(), HasSubstr("its elements are int32"));
    }
    WEFT_ASSIGN(auto exchange, group.exchange({{"t", data, 0}}));
    auto again = group.exchange({{"t", data, 0}, {"u", data, 0}});
    EXPECT_FALSE(again);
    if (!again) {
      EXPECT_THAT(again.error().message(), HasSubstr("ready_without"));
    }
    EXPECT_FALSE(exchange->ready_without(1, 0));
    EXPECT_FALSE(exchange->ready_without(0, 1));
    EXPECT_EQ(data[0], 1) << "what was refused changes nothing";
    WEFT_TRY(exchange->ready(0, 0));
    return exchange->wait_all(0);
  }));
}

TEST(Exchange, refuses_calls_that_make_no_sense) {
  expect_ok(run_ranks(2, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
    std::vector<float> data(10);
    WEFT_ASSIGN(auto exchange, group.exchange({{"t", data, 0}}));
    EXPECT_FALSE(exchange->ready(1, 0));
    EXPECT_FALSE(exchange->ready(0, 5));
    EXPECT_FALSE(exchange->wait(3, 0));
    EXPECT_FALSE(group.exchange({{"t", data, 0}}));
    WEFT_TRY(exchange->ready(0, 0));
    return exchange->wait_all(0);
  }));
}

TEST(Failure, names_the_rank_with_another_plan) {
  auto outcomes = run_ranks(
      3, plan::Plan(), [](Group&, capture::Recorder&) -> Result<void> { return {}; },
      [](Options& options) {
        if (options.rank.index == 2) options.plan.chunk = kib(64);
      });
  for (auto& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_THAT(outcome.error().message(), HasSubstr("rank 2 differs"));
  }
}

TEST(Failure, names_the_rank_with_other_tensors) {
  auto outcomes = run_ranks(3, plan::Plan(), [](Group& group, capture::Recorder&) -> Result<void> {
    std::vector<float> data(group.rank().index == 1 ? 11 : 10);
    auto exchange = group.exchange({{"t", data, 0}});
    if (!exchange) return std::move(exchange).error();
    return (*exchange)->wait(0, 0);
  });
  for (auto& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_THAT(outcome.error().message(), HasSubstr("rank 1 on localhost differs"));
  }
}

TEST(Failure, names_the_tensor_that_differs) {
  for (int how = 0; how < 3; ++how) {
    auto outcomes =
        run_ranks(3, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
          const bool other = group.rank().index == 2;
          std::vector<float> data(10);
          std::vector<Tensor> tensors = {{"same", data, 0}, {"mine", data, 1}};
          if (other && how == 0) tensors[1].layer = 2;
          if (other && how == 1) tensors[1] = Tensor("mine", data.data(), 20, Type::float16, 1);
          if (other && how == 2) tensors.emplace_back("more", data, 1);
          auto exchange = group.exchange(tensors);
          if (!exchange) return std::move(exchange).error();
          return (*exchange)->wait(0, 0);
        });
    for (auto& outcome : outcomes) {
      ASSERT_FALSE(outcome);
      EXPECT_THAT(outcome.error().message(), HasSubstr("rank 2 on localhost differs"));
      EXPECT_THAT(outcome.error().message(),
                  HasSubstr(how == 2   ? "3 here, 2 there"
                            : how == 1 ? "tensor 1 here is \"mine\", 20 float16 of layer 1"
                                       : "tensor 1 here is \"mine\", 10 float32 of layer 2"));
    }
  }
}

TEST(Failure, names_the_rank_that_does_not_come) {
  uint16_t port = testing_support::free_port();
  Options options = testing_support::options_for(0, 3, port, plan::Plan());
  options.join_deadline = Nanos::from_millis(300);
  auto recorder = capture::Recorder::off();
  auto group = Group::join(options, *recorder);
  ASSERT_FALSE(group);
  EXPECT_EQ(group.error().code(), Code::timeout);
  EXPECT_THAT(group.error().message(), HasSubstr("ranks 1 and 2 did not come"));
}

TEST(Failure, a_signature_that_differs_names_both_sides) {
  auto outcomes = run_ranks(2, plan::Plan(), [](Group& group, capture::Recorder&) -> Result<void> {
    std::vector<float> data(group.rank().index == 0 ? 1000 : 2000);
    return group.all_reduce(data);
  });
  for (auto& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_THAT(outcome.error().message(), HasSubstr("all_reduce of 1000 float32"));
    EXPECT_THAT(outcome.error().message(), HasSubstr("all_reduce of 2000 float32"));
  }
}

TEST(Failure, a_rank_that_leaves_in_the_middle_is_named_by_all_others) {
  auto outcomes = run_ranks(4, plan::Plan(), [](Group& group, capture::Recorder&) -> Result<void> {
    if (group.rank().index == 2) return error(Code::cancelled, "left");
    std::vector<float> data(100000);
    auto begin = std::chrono::steady_clock::now();
    auto outcome = group.all_reduce(data);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
    EXPECT_TRUE(group.failure());
    EXPECT_FALSE(group.barrier()) << "a failed group refuses work";
    return outcome;
  });
  for (uint32_t r : {0u, 1u, 3u}) {
    ASSERT_FALSE(outcomes[r]);
    EXPECT_EQ(outcomes[r].error().code(), Code::peer_lost);
    EXPECT_THAT(outcomes[r].error().message(), HasSubstr("rank 2 on localhost is lost"));
  }
}

TEST(Failure, abort_reaches_everyone_with_its_words) {
  auto outcomes = run_ranks(3, plan::Plan(), [](Group& group, capture::Recorder&) -> Result<void> {
    if (group.rank().index == 1) group.abort("loss is NaN");
    std::vector<float> data(10);
    for (;;)
      if (auto outcome = group.all_reduce(data); !outcome) return outcome;
  });
  for (auto& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_THAT(outcome.error().message(),
                HasSubstr("rank 1 on localhost ended the group: loss is NaN"));
  }
}

TEST(Failure, gives_memory_back_with_the_error) {
  // Rank 0 ends the group in the middle of a transfer; the others' callers then use their memory
  // for something else, while more data is on its way to it.
  auto outcomes = run_ranks(3, plan::Plan(), [](Group& group, capture::Recorder&) -> Result<void> {
    std::vector<float> data(16u << 20);
    std::thread spoiler([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(15));
      if (group.rank().index == 0) group.abort("enough");
    });
    Result<void> outcome;
    while (outcome) outcome = group.all_reduce(data);
    std::fill(data.begin(), data.end(), 77.0f);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_TRUE(std::all_of(data.begin(), data.end(), [](float x) { return x == 77; }));
    spoiler.join();
    return outcome;
  });
  for (auto& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_THAT(outcome.error().message(), HasSubstr("ended the group: enough"));
  }
}

TEST(Failure, gradients_that_never_come_name_the_rank_that_owes_them) {
  auto outcomes = run_ranks(
      3, plan::Plan(),
      [](Group& group, capture::Recorder&) -> Result<void> {
        std::vector<float> data(10);
        WEFT_ASSIGN(auto exchange, group.exchange({{"t", data, 0}}));
        if (group.rank().index != 1) WEFT_TRY(exchange->ready(0, 0));
        return exchange->wait(0, 0);
      },
      [](Options& options) { options.ready_deadline = Nanos::from_millis(300); });
  for (auto& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_EQ(outcome.error().code(), Code::timeout);
    EXPECT_THAT(outcome.error().message(),
                HasSubstr("rank 1 on localhost has no gradients of bucket 0"));
  }
}

TEST(Failure, data_that_stops_moving_names_the_neighbour) {
  // Rank 1 never starts the operation: its neighbours see nothing move.
  auto outcomes = run_ranks(
      2, plan::Plan(),
      [](Group& group, capture::Recorder&) -> Result<void> {
        std::vector<float> data(10);
        if (group.rank().index == 1) {
          while (!group.failure()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
          return *group.failure();
        }
        return group.all_reduce(data);
      },
      [](Options& options) { options.progress_deadline = Nanos::from_millis(300); });
  for (auto& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_EQ(outcome.error().code(), Code::timeout);
    EXPECT_THAT(outcome.error().message(),
                HasSubstr("rank 1 on localhost has not come to operation 0"));
  }
}

}  // namespace
}  // namespace weft::runtime
