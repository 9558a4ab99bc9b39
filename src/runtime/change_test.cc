// A plan that changes while the job runs: exact sums before, between and after, and one answer on
// all ranks where it cannot.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>

#include "known_sums.h"
#include "testing.h"

namespace weft::runtime {
namespace {

using testing::HasSubstr;
using testing_support::expect_ok;
using testing_support::run_ranks;
using testing_support::sum;
using testing_support::value;

constexpr uint64_t kChanges = 20;

const std::vector<std::string> kAlgorithms = {"ring", "direct", "auto", "halving_doubling",
                                              "hierarchical"};

// Everything that a plan may say and the runtime can do, by chance.
plan::Plan random_plan(Rng& rng, uint64_t number) {
  plan::Plan plan;
  plan.name = text("plan %llu", static_cast<unsigned long long>(number));
  plan.bucket_rule = {kib(4 + rng.below(200)), kib(4 + rng.below(1000)), rng.below(2) == 0};
  if (rng.below(3) == 0) plan.buckets = {{{"t1", "t0"}, {}, {}}};
  if (rng.below(2) == 0) plan.partition = kib(4 + rng.below(200));
  if (rng.below(2) == 0) plan.credit = kib(1 + rng.below(500));
  plan.order = rng.below(2) == 0 ? plan::Order::layer : plan::Order::ready;
  plan.barrier = rng.below(2) == 0 ? plan::Barrier::all : plan::Barrier::tensor;
  plan.algorithm = {{std::nullopt, kAlgorithms[rng.below(kAlgorithms.size())]}};
  plan.lanes = 1 + static_cast<uint32_t>(rng.below(6));
  if (rng.below(2) == 0) plan.chunk = kib(4 + rng.below(300));
  if (plan.lanes > 1 && rng.below(3) == 0) plan.lane_workers = 2;
  return plan;
}

// Tensors of a rank, and a step over them that checks every element.
struct Training {
  uint32_t rank, ranks;
  Rng rng;
  std::vector<std::vector<float>> data;
  std::unique_ptr<Exchange> exchange;

  static Result<Training> make(Group& group, const std::vector<uint64_t>& sizes, uint64_t seed) {
    Training out{group.rank().index, group.ranks(), Rng(seed * 100 + group.rank().index), {}, {}};
    std::vector<Tensor> tensors;
    for (uint64_t size : sizes) out.data.emplace_back(size);
    for (uint32_t t = 0; t < sizes.size(); ++t)
      tensors.push_back({text("t%u", t), out.data[t], t / 2});
    WEFT_ASSIGN(out.exchange, group.exchange(std::move(tensors)));
    return out;
  }
  Result<void> ready(uint64_t step, uint32_t t) {
    for (size_t i = 0; i < data[t].size(); ++i) data[t][i] = value(i, t, step, rank);
    return exchange->ready(t, step);
  }
  Result<void> step(uint64_t step) {
    std::vector<uint32_t> order(data.size());
    for (uint32_t t = 0; t < order.size(); ++t) order[t] = t;
    rng.shuffle(std::span(order));
    for (uint32_t t : order) WEFT_TRY(ready(step, t));
    WEFT_TRY(exchange->wait_all(step));
    for (uint32_t t : order)
      for (size_t i = 0; i < data[t].size(); ++i)
        if (data[t][i] != sum(i, t, step, ranks))
          return error(Code::corrupt, "tensor %u, element %zu, step %llu: %g", t, i,
                       static_cast<unsigned long long>(step), double{data[t][i]});
    return {};
  }
};

const std::vector<uint64_t> kSizes = {10000, 7, 0, 20001, 1, 4345, 250, 13000};

TEST(Change, sums_are_exact_under_20_plans_in_one_run) {
  for (uint32_t ranks : {2u, 3u, 4u})
    for (bool memory : {false, true}) {
      SCOPED_TRACE(text("%u ranks%s", ranks, memory ? ", shared memory" : ""));
      Rng rng(ranks * 2 + memory);
      std::vector<plan::Plan> plans;
      for (uint64_t c = 0; c <= kChanges; ++c) plans.push_back(random_plan(rng, c));
      std::atomic<uint32_t> lanes_seen{0};
      expect_ok(run_ranks(
          ranks, plans[0],
          [&](Group& group, capture::Recorder&) -> Result<void> {
            WEFT_ASSIGN(auto training, Training::make(group, kSizes, ranks));
            uint64_t step = 0;
            // A group's own operations go on between the changes, cut as they were, and one of
            // them is under way while each plan changes.
            std::vector<float> own(50000, 1);
            for (uint64_t c = 0; c <= kChanges; ++c) {
              if (c > 0) {
                Call call;
                call.output = own.data();
                call.count = own.size();
                std::fill(own.begin(), own.end(), 1.0f);
                WEFT_ASSIGN(Work work, group.start(call));
                WEFT_TRY(training.exchange->change_plan(plans[c]));
                WEFT_TRY(work.wait());
                for (float element : own)
                  if (element != static_cast<float>(ranks))
                    return error(Code::corrupt, "a sum of its own is %g", double{element});
              }
              if (training.exchange->plan() != plans[c] ||
                  training.exchange->barrier() != plans[c].barrier)
                return error(Code::corrupt, "another plan is in force");
              for (uint64_t last = step + 1 + c % 2; step <= last; ++step)
                WEFT_TRY(training.step(step));
            }
            // The lanes that are there at the end are those of the last plan.
            for (int i = 0; !memory && group.rank().index == 0 && i < 1000; ++i) {
              const std::string status = group.status();
              uint32_t most = 0;
              for (uint32_t lane = 0; lane < 6; ++lane)
                if (status.find(text("\"lane\":%u,", lane)) != std::string::npos) most = lane + 1;
              lanes_seen = most;
              if (most == plans[kChanges].lanes) break;
              std::this_thread::sleep_for(std::chrono::milliseconds(10));  // they open and close
            }
            return {};
          },
          [&](Options& options) { options.shared_memory = memory; }));
      if (!memory) {
        EXPECT_EQ(lanes_seen.load(), plans[kChanges].lanes);
      }
    }
}

TEST(Change, what_a_rank_cannot_take_is_refused_on_all_and_the_old_plan_goes_on) {
  struct Case {
    const char* reason;
    std::function<void(Result<plan::Plan>& plan, uint32_t rank)> change;
  };
  auto broken = [](uint32_t at, const char* codec) {
    return [=](Result<plan::Plan>& plan, uint32_t rank) {
      if (rank == at) plan->codec = codec;
    };
  };
  const std::vector<Case> cases = {
      {"rank 2 on localhost cannot take plan \"other\": plan /codec", broken(2, "qsgd")},
      {"rank 1 on localhost cannot take plan \"other\": ",
       [](auto& plan, uint32_t rank) {
         if (rank >= 1) plan->lanes = 65;
       }},
      {"rank 0 on localhost cannot take another plan: no such file",
       [](auto& plan, uint32_t rank) {
         if (rank == 0) plan = error(Code::not_found, "no such file");
       }},
      {"the job has no tensor \"t99\"",
       [](auto& plan, uint32_t) {
         plan->buckets = {{{"t99"}, {}, {}}};
       }},
      {"rank 2 on localhost was given plan \"other\"",
       [](auto& plan, uint32_t rank) {
         if (rank == 2) plan->lanes = 3;
       }},
  };
  constexpr uint32_t kRanks = 3;
  std::vector<std::vector<std::string>> said(kRanks);
  plan::Plan first;
  first.name = "first";
  first.lanes = 2;
  first.chunk = kib(16);
  expect_ok(run_ranks(
      kRanks, first,
      [&](Group& group, capture::Recorder&) -> Result<void> {
        WEFT_ASSIGN(auto training, Training::make(group, kSizes, 1));
        uint64_t step = 0;
        WEFT_TRY(training.step(step++));
        for (const Case& one : cases) {
          plan::Plan other = first;
          other.name = "other";
          other.lanes = 4;
          other.lane_workers = 2;
          Result<plan::Plan> plan = other;
          one.change(plan, group.rank().index);
          auto refused = training.exchange->change_plan(std::move(plan));
          if (refused) return error(Code::corrupt, "it was taken: %s", one.reason);
          said[group.rank().index].push_back(refused.error().message());
          if (training.exchange->plan() != first)
            return error(Code::corrupt, "another plan is in force");
          WEFT_TRY(training.step(step++));
        }
        plan::Plan good = first;
        good.lanes = 3;
        WEFT_TRY(training.exchange->change_plan(good));
        return training.step(step);
      },
      [&](Options& options) { options.shared_memory = false; }));
  ASSERT_EQ(said[0].size(), cases.size());
  for (size_t c = 0; c < cases.size(); ++c) {
    EXPECT_THAT(said[0][c], HasSubstr(cases[c].reason));
    EXPECT_THAT(said[0][c], HasSubstr("the plan before goes on"));
    for (uint32_t rank = 1; rank < kRanks; ++rank) EXPECT_EQ(said[rank][c], said[0][c]);
  }
}

TEST(Change, in_the_middle_of_a_step_or_between_different_steps_is_refused) {
  std::vector<std::vector<std::string>> said(2);
  expect_ok(run_ranks(2, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
    WEFT_ASSIGN(auto training, Training::make(group, kSizes, 1));
    const uint32_t rank = group.rank().index;
    WEFT_TRY(training.step(0));
    // One rank has a gradient of the next step ready.
    if (rank == 1) WEFT_TRY(training.ready(1, 3));
    plan::Plan other;
    other.lanes = 2;
    auto early = training.exchange->change_plan(other);
    if (early) return error(Code::corrupt, "it was taken in the middle of a step");
    said[rank].push_back(early.error().message());
    for (uint32_t t = 0; t < kSizes.size(); ++t)
      if (rank == 0 || t != 3) WEFT_TRY(training.ready(1, t));
    WEFT_TRY(training.exchange->wait_all(1));
    WEFT_TRY(training.exchange->change_plan(other));
    return training.step(2);
  }));
  EXPECT_THAT(said[0].at(0),
              HasSubstr("rank 1 on localhost cannot take plan \"unnamed\": step 1 is "
                        "not over"));
  EXPECT_EQ(said[0], said[1]);
}

TEST(Change, a_rank_that_dies_in_it_is_named_to_the_others_and_the_rest_rebuild) {
  constexpr uint32_t kRanks = 4;
  for (bool joins_in : {false, true}) {
    SCOPED_TRACE(joins_in);
    std::vector<std::string> said(kRanks);
    std::barrier all(kRanks);
    auto outcomes =
        run_ranks(kRanks, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
          const uint32_t rank = group.rank().index;
          {
            WEFT_ASSIGN(auto training, Training::make(group, kSizes, 1));
            WEFT_TRY(training.step(0));
            plan::Plan other;
            other.lanes = 3;
            other.chunk = kib(8);
            all.arrive_and_wait();
            if (rank == 2) {
              // It ends without a word, before it says what it thinks of the plan or after.
              if (joins_in) static_cast<void>(training.exchange->change_plan(other));
              return error(Code::cancelled, "died");
            }
            auto changed = training.exchange->change_plan(other);
            if (changed && joins_in) changed = training.step(1);
            if (changed) return error(Code::corrupt, "it went on without rank 2");
            said[rank] = changed.error().message();
          }
          WEFT_ASSIGN(auto left, group.rebuild());
          WEFT_ASSIGN(auto training, Training::make(*left, kSizes, 2));
          WEFT_TRY(training.step(0));
          plan::Plan next;
          next.lanes = 2;
          WEFT_TRY(training.exchange->change_plan(next));
          WEFT_TRY(training.step(1));
          WEFT_TRY(left->leave());
          return error(Code::cancelled, "went on");
        });
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      ASSERT_FALSE(outcomes[rank].ok());
      EXPECT_THAT(outcomes[rank].error().message(), HasSubstr(rank == 2 ? "died" : "went on"));
      if (rank != 2) {
        EXPECT_THAT(said[rank], HasSubstr("rank 2"));
      }
    }
  }
}

TEST(Change, no_gradient_is_taken_while_it_lasts) {
  std::barrier both(2);
  expect_ok(run_ranks(2, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
    WEFT_ASSIGN(auto training, Training::make(group, kSizes, 1));
    WEFT_TRY(training.step(0));
    if (group.rank().index == 1) {
      both.arrive_and_wait();  // the other is in the middle of it, and waits for this rank
      WEFT_TRY(training.exchange->change_plan(plan::Plan()));
      return training.step(1);
    }
    Result<void> changed;
    std::thread changer([&] { changed = training.exchange->change_plan(plan::Plan()); });
    // Before it has begun, the refusal is that this step is not due.
    std::string refusal;
    while (refusal.find("another plan is being taken") == std::string::npos) {
      auto taken = training.exchange->ready(0, 99);
      if (taken) return error(Code::corrupt, "a gradient of step 99 was taken");
      refusal = taken.error().message();
    }
    auto twice = training.exchange->change_plan(plan::Plan());
    if (twice) return error(Code::corrupt, "two threads changed it at once");
    both.arrive_and_wait();
    changer.join();
    WEFT_TRY(changed);
    return training.step(1);
  }));
}

}  // namespace
}  // namespace weft::runtime
