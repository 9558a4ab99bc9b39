// Many operations at a time: handles, threads, priorities, and groups within the group.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <numeric>

#include "testing.h"

namespace weft::runtime {
namespace {

using testing::HasSubstr;
using testing_support::run_ranks;

void expect_ok(const std::vector<Result<void>>& outcomes) {
  for (size_t r = 0; r < outcomes.size(); ++r)
    EXPECT_TRUE(outcomes[r].ok()) << "rank " << r << ": "
                                  << (outcomes[r].ok() ? "" : outcomes[r].error().message());
}

// One all-reduce of integers that differ by place, rank in the group and round.
struct Sum {
  Sum(const Group& group, size_t count, uint64_t round)
      : ranks(group.ranks()), salt(round), data(count) {
    for (size_t i = 0; i < count; ++i) data[i] = at(i, group.rank().index);
  }
  int64_t at(size_t i, uint32_t rank) const {
    return static_cast<int64_t>((i * 31 + salt * 7) % 1000 + 100000 * rank);
  }
  Call call() {
    Call out;
    out.type = Type::int64;
    out.output = data.data();
    out.count = data.size();
    return out;
  }
  Result<void> check() const {
    for (size_t i = 0; i < data.size(); ++i) {
      int64_t expected = 0;
      for (uint32_t rank = 0; rank < ranks; ++rank) expected += at(i, rank);
      if (data[i] != expected)
        return error(Code::corrupt, "round %llu, element %zu: %lld instead of %lld",
                     static_cast<unsigned long long>(salt), i, static_cast<long long>(data[i]),
                     static_cast<long long>(expected));
    }
    return {};
  }
  uint32_t ranks;
  uint64_t salt;
  std::vector<int64_t> data;
};

plan::Plan small_chunks() {
  plan::Plan plan;
  plan.chunk = kib(16);
  plan.lanes = 2;
  return plan;
}

// ---- handles -----------------------------------------------------------------------------

TEST(Work, many_in_flight_end_in_any_order_of_waiting) {
  for (bool thread : {true, false})
    expect_ok(run_ranks(
        3, small_chunks(),
        [&](Group& group, capture::Recorder&) -> Result<void> {
          Rng rng(7);
          std::vector<Sum> sums;
          std::vector<Work> works;
          for (uint64_t i = 0; i < 60; ++i) sums.emplace_back(group, rng.below(20000), i);
          for (size_t i = 0; i < sums.size(); ++i) {
            Call call = sums[i].call();
            call.priority = static_cast<int64_t>(rng.below(5));
            WEFT_ASSIGN(Work work, group.start(call));
            works.push_back(std::move(work));
          }
          std::vector<size_t> order(works.size());
          std::iota(order.begin(), order.end(), 0);
          Rng own(group.rank().index);
          own.shuffle(std::span(order));
          for (size_t i : order) {
            if (own.below(2) == 0)
              while (!works[i].test()) std::this_thread::yield();
            WEFT_TRY(works[i].wait());
            WEFT_TRY(sums[i].check());
          }
          return {};
        },
        [&](Options& options) { options.progress_thread = thread; }));
}

TEST(Work, goes_on_without_its_handle_and_without_a_waiter) {
  expect_ok(run_ranks(3, small_chunks(), [](Group& group, capture::Recorder&) -> Result<void> {
    std::atomic<int> called{0};
    std::vector<Sum> sums;
    for (uint64_t i = 0; i < 10; ++i) sums.emplace_back(group, 30000, i);
    for (Sum& sum : sums) {
      WEFT_ASSIGN(Work work, group.start(sum.call()));
      work.then([&](const Result<void>& outcome) { called += outcome.ok() ? 1 : 1000; });
    }
    for (int i = 0; i < 5000 && called < 10; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (called != 10) return error(Code::timeout, "called %d times", called.load());
    for (const Sum& sum : sums) WEFT_TRY(sum.check());
    // One that is done calls back at once.
    Sum last(group, 5, 99);
    WEFT_ASSIGN(Work work, group.start(last.call()));
    WEFT_TRY(work.wait());
    bool at_once = false;
    work.then([&](const Result<void>& outcome) { at_once = outcome.ok(); });
    if (!at_once) return error(Code::corrupt, "not called");
    return {};
  }));
}

TEST(Work, that_was_never_started_is_done) {
  Work work;
  EXPECT_TRUE(work.test());
  EXPECT_TRUE(work.wait());
  bool called = false;
  work.then([&](const Result<void>& outcome) { called = outcome.ok(); });
  EXPECT_TRUE(called);
}

TEST(Work, of_a_group_that_fails_ends_with_its_reason) {
  auto outcomes =
      run_ranks(3, small_chunks(), [](Group& group, capture::Recorder&) -> Result<void> {
        std::vector<Sum> sums;
        std::vector<Work> works;
        std::atomic<int> failed{0};
        // Rank 2 does not take part, and then ends it.
        if (group.rank().index == 2) {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          group.abort("no more");
          while (!group.failure()) std::this_thread::yield();
          return *group.failure();
        }
        for (uint64_t i = 0; i < 5; ++i) sums.emplace_back(group, 30000, i);
        for (Sum& sum : sums) {
          auto work = group.start(sum.call());
          if (!work) return std::move(work).error();
          work->then([&](const Result<void>& outcome) { failed += outcome.ok() ? 1000 : 1; });
          works.push_back(std::move(*work));
        }
        Result<void> first;
        for (Work& work : works) {
          auto outcome = work.wait();
          EXPECT_FALSE(outcome);
          EXPECT_TRUE(work.test());
          if (first) first = outcome;
        }
        for (int i = 0; i < 2000 && failed < 5; ++i)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_EQ(failed, 5);
        bool told = false;
        works[0].then([&](const Result<void>& outcome) { told = !outcome; });
        EXPECT_TRUE(told);
        return first;
      });
  for (auto& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_THAT(outcome.error().message(),
                HasSubstr("rank 2 on localhost ended the group: no more"));
  }
}

TEST(Work, an_urgent_one_overtakes_those_before_it) {
  // Ordered by when each is found finished: the small urgent one is not the last.
  std::atomic<int> overtook{0};
  expect_ok(run_ranks(2, small_chunks(), [&](Group& group, capture::Recorder&) -> Result<void> {
    std::vector<Sum> bulk;
    for (uint64_t i = 0; i < 4; ++i) bulk.emplace_back(group, 2u << 20, i);
    Sum urgent(group, 50000, 9);
    std::vector<Work> works;
    std::atomic<int> ended{0};
    for (Sum& sum : bulk) {
      WEFT_ASSIGN(Work work, group.start(sum.call()));
      work.then([&](const Result<void>&) { ++ended; });
      works.push_back(std::move(work));
    }
    Call call = urgent.call();
    call.priority = -1;
    WEFT_ASSIGN(Work first, group.start(call));
    WEFT_TRY(first.wait());
    if (ended < 4) ++overtook;
    for (Work& work : works) WEFT_TRY(work.wait());
    WEFT_TRY(urgent.check());
    for (const Sum& sum : bulk) WEFT_TRY(sum.check());
    return {};
  }));
  EXPECT_EQ(overtook, 2);
}

// ---- groups within the group ---------------------------------------------------------------

TEST(Subgroup, has_its_own_ranks_and_results) {
  expect_ok(run_ranks(5, small_chunks(), [](Group& group, capture::Recorder&) -> Result<void> {
    uint32_t rank = group.rank().index;
    // In an order of its own: 4, 2, 0.
    const uint32_t even[] = {4, 2, 0};
    const uint32_t odd[] = {1, 3};
    WEFT_ASSIGN(auto mine, rank % 2 == 0 ? group.subgroup(even) : group.subgroup(odd));
    if (mine->ranks() != (rank % 2 == 0 ? 3u : 2u)) return error(Code::corrupt, "wrong size");
    if (rank % 2 == 0 && mine->rank().index != 2 - rank / 2)
      return error(Code::corrupt, "wrong rank");
    for (uint64_t round = 0; round < 20; ++round) {
      Sum inside(*mine, 1000 * round, round), outside(group, 700 * round, round);
      WEFT_TRY(mine->run(inside.call()));
      WEFT_TRY(inside.check());
      WEFT_TRY(group.run(outside.call()));
      WEFT_TRY(outside.check());
      std::vector<float> from_first(100, static_cast<float>(rank));
      WEFT_TRY(mine->broadcast(from_first, {0}));
      if (from_first[50] != (rank % 2 == 0 ? 4 : 1)) return error(Code::corrupt, "wrong root");
      WEFT_TRY(mine->barrier());
    }
    return {};
  }));
}

TEST(Subgroup, overlapping_ones_run_at_the_same_time_from_several_threads) {
  for (bool shared : {false, true})
    expect_ok(run_ranks(
        4, small_chunks(),
        [](Group& group, capture::Recorder&) -> Result<void> {
          uint32_t rank = group.rank().index;
          const std::vector<std::vector<uint32_t>> sets = {{0, 1, 2},    {1, 2, 3}, {3, 0},
                                                           {2, 0, 1, 3}, {0, 1, 2}, {2}};
          std::vector<std::unique_ptr<Group>> groups;
          for (const std::vector<uint32_t>& set : sets)
            if (std::find(set.begin(), set.end(), rank) != set.end()) {
              WEFT_ASSIGN(auto made, group.subgroup(set));
              groups.push_back(std::move(made));
            }
          // A thread for each, and this one uses the parent.
          std::vector<Result<void>> outcomes(groups.size());
          std::vector<std::thread> threads;
          for (size_t g = 0; g < groups.size(); ++g)
            threads.emplace_back([&, g] {
              outcomes[g] = [&]() -> Result<void> {
                for (uint64_t round = 0; round < 25; ++round) {
                  std::vector<Sum> sums;
                  std::vector<Work> works;
                  for (size_t i = 0; i < 3; ++i) sums.emplace_back(*groups[g], 9000 * i + 1, round);
                  for (Sum& sum : sums) {
                    WEFT_ASSIGN(Work work, groups[g]->start(sum.call()));
                    works.push_back(std::move(work));
                  }
                  for (Work& work : works) WEFT_TRY(work.wait());
                  for (const Sum& sum : sums) WEFT_TRY(sum.check());
                }
                return {};
              }();
            });
          Result<void> parent;
          for (uint64_t round = 0; round < 25 && parent; ++round) {
            Sum sum(group, 20000, round);
            parent = group.run(sum.call());
            if (parent) parent = sum.check();
          }
          for (std::thread& thread : threads) thread.join();
          for (Result<void>& outcome : outcomes) WEFT_TRY(outcome);
          return parent;
        },
        [&](Options& options) { options.shared_memory = shared; }));
}

TEST(Subgroup, of_a_subgroup_and_after_its_parent_is_gone) {
  expect_ok(run_ranks(4, small_chunks(), [](Group& group, capture::Recorder&) -> Result<void> {
    if (group.rank().index == 0) return {};
    const uint32_t upper[] = {1, 2, 3};
    WEFT_ASSIGN(auto parent, group.subgroup(upper));
    if (parent->rank().index == 1) return {};
    const uint32_t ends[] = {2, 0};  // ranks 3 and 1 of the job
    WEFT_ASSIGN(auto child, parent->subgroup(ends));
    parent.reset();
    Sum sum(*child, 5000, 1);
    WEFT_TRY(child->run(sum.call()));
    WEFT_TRY(sum.check());
    // Messages name ranks of the group.
    int32_t word = child->rank().index == 0 ? 41 : 0;
    if (child->rank().index == 0) return child->send(&word, 1, Type::int32, {1});
    WEFT_TRY(child->receive(&word, 1, Type::int32, {0}));
    if (word != 41) return error(Code::corrupt, "got %d", word);
    return {};
  }));
}

TEST(Subgroup, that_cannot_be_is_refused) {
  expect_ok(run_ranks(3, small_chunks(), [](Group& group, capture::Recorder&) -> Result<void> {
    const uint32_t unknown[] = {0, 1, 2, 3};
    const uint32_t twice[] = {0, 1, 2, 1};
    std::vector<uint32_t> others;
    for (uint32_t r = 0; r < 3; ++r)
      if (r != group.rank().index) others.push_back(r);
    for (auto [set, words] :
         {std::pair<std::span<const uint32_t>, const char*>(unknown, "there is no rank 3 among 3"),
          {twice, "rank 1 is named twice"},
          {others, "is not in the new group"},
          {{}, "is not in the new group"}}) {
      auto made = group.subgroup(set);
      if (made) return error(Code::corrupt, "made, though %s", words);
      EXPECT_THAT(made.error().message(), HasSubstr(words));
    }
    return group.barrier();
  }));
}

TEST(Subgroup, fails_with_the_whole) {
  auto outcomes =
      run_ranks(4, small_chunks(), [](Group& group, capture::Recorder&) -> Result<void> {
        const uint32_t lower[] = {0, 1};
        if (group.rank().index == 3) return error(Code::cancelled, "left");
        std::unique_ptr<Group> mine;
        if (group.rank().index < 2) {
          WEFT_ASSIGN(mine, group.subgroup(lower));
        }
        for (;;) {
          Sum sum(mine ? *mine : group, 100, 1);
          if (auto outcome = (mine ? *mine : group).run(sum.call()); !outcome) return outcome;
        }
      });
  for (uint32_t r : {0u, 1u, 2u}) {
    ASSERT_FALSE(outcomes[r]);
    EXPECT_THAT(outcomes[r].error().message(), HasSubstr("rank 3 on localhost is lost"));
  }
}

}  // namespace
}  // namespace weft::runtime
