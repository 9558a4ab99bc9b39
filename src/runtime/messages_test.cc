// Messages with tags, and from whichever rank sends one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

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

Call message(std::vector<float>& data, uint32_t peer, uint32_t tag, bool sends) {
  Call call;
  call.collective = Collective::point_to_point;
  call.output = sends ? nullptr : data.data();
  call.input = sends ? data.data() : nullptr;
  call.count = data.size();
  call.root = peer;
  call.tag = tag;
  call.sends = sends;
  return call;
}

Result<void> holds(const std::vector<float>& data, float value) {
  for (float element : data)
    if (element != value)
      return error(Code::corrupt, "%g instead of %g", double{element}, double{value});
  return {};
}

TEST(Messages, of_one_tag_do_not_wait_for_those_of_another) {
  for (size_t count : {size_t{3}, size_t{300000}})
    expect_ok(run_ranks(2, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
      std::vector<float> one(count), two(count), three(count);
      if (group.rank().index == 0) {
        std::fill(one.begin(), one.end(), 1.0f);
        std::fill(two.begin(), two.end(), 2.0f);
        std::fill(three.begin(), three.end(), 3.0f);
        WEFT_ASSIGN(Work first, group.start(message(one, 1, 7, true)));
        WEFT_ASSIGN(Work second, group.start(message(two, 1, 7, true)));
        WEFT_ASSIGN(Work other, group.start(message(three, 1, 0xffffffff, true)));
        WEFT_TRY(other.wait());
        WEFT_TRY(second.wait());
        return first.wait();
      }
      WEFT_TRY(group.run(message(three, 0, 0xffffffff, false)));
      WEFT_TRY(holds(three, 3));
      WEFT_TRY(group.run(message(one, 0, 7, false)));
      WEFT_TRY(group.run(message(two, 0, 7, false)));
      WEFT_TRY(holds(one, 1));
      return holds(two, 2);
    }));
}

TEST(Messages, in_a_subgroup_do_not_wait_for_those_in_the_group) {
  expect_ok(run_ranks(3, plan::Plan(), [](Group& group, capture::Recorder&) -> Result<void> {
    if (group.rank().index == 1) return {};
    std::vector<uint32_t> ranks = {2, 0};
    WEFT_ASSIGN(auto part, group.subgroup(ranks));
    std::vector<float> whole(10), inner(10);
    if (group.rank().index == 0) {
      std::fill(whole.begin(), whole.end(), 1.0f);
      std::fill(inner.begin(), inner.end(), 2.0f);
      WEFT_ASSIGN(Work first, group.start(message(whole, 2, 0, true)));
      WEFT_ASSIGN(Work second, part->start(message(inner, 0, 0, true)));
      WEFT_TRY(first.wait());
      return second.wait();
    }
    WEFT_TRY(part->run(message(inner, 1, 0, false)));
    WEFT_TRY(holds(inner, 2));
    WEFT_TRY(group.run(message(whole, 0, 0, false)));
    return holds(whole, 1);
  }));
}

// Rank 0 asks for as many as there are, before they are sent and after; each rank sends two, of
// which the first must come first.
TEST(Messages, are_received_from_any_rank) {
  for (size_t count : {size_t{1}, size_t{200000}})
    expect_ok(run_ranks(4, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
      uint32_t rank = group.rank().index;
      if (rank > 0) {
        std::vector<float> first(count, static_cast<float>(10 * rank));
        std::vector<float> second(count, static_cast<float>(10 * rank + 1));
        std::vector<float> other(count, -1);
        WEFT_TRY(group.run(message(other, 0, 4, true)));
        WEFT_TRY(group.run(message(first, 0, 5, true)));
        WEFT_TRY(group.run(message(second, 0, 5, true)));
        return group.barrier();
      }
      std::vector<uint32_t> seen(4);
      auto judge = [&](const Work& work, const std::vector<float>& data) -> Result<void> {
        auto from = work.source();
        if (!from || from->index == 0 || from->index > 3)
          return error(Code::corrupt, "no source is known");
        return holds(data, static_cast<float>(10 * from->index + seen[from->index]++));
      };
      std::vector<std::vector<float>> data(6, std::vector<float>(count));
      std::vector<Work> works;
      for (int i = 0; i < 3; ++i) {
        WEFT_ASSIGN(Work work, group.start(message(data[works.size()], kAnyRank, 5, false)));
        if (work.source()) return error(Code::corrupt, "a source is known before its time");
        works.push_back(std::move(work));
      }
      for (int i = 0; i < 3; ++i) {
        WEFT_ASSIGN(Work work, group.start(message(data[works.size()], kAnyRank, 5, false)));
        works.push_back(std::move(work));
      }
      for (size_t i = 0; i < works.size(); ++i) {
        WEFT_TRY(works[i].wait());
        WEFT_TRY(judge(works[i], data[i]));
      }
      std::vector<float> other(count);
      for (uint32_t from = 1; from < 4; ++from) WEFT_TRY(group.run(message(other, from, 4, false)));
      return group.barrier();
    }));
}

TEST(Messages, that_nobody_sends_are_not_waited_for_without_end) {
  auto outcomes = run_ranks(2, plan::Plan(), [](Group& group, capture::Recorder&) -> Result<void> {
    if (group.rank().index == 1) return group.barrier();
    std::vector<float> data(1);
    Call call = message(data, kAnyRank, 9, false);
    call.deadline = Nanos::from_millis(100);
    return group.run(call);
  });
  for (const Result<void>& outcome : outcomes) {
    ASSERT_FALSE(outcome.ok());
    EXPECT_EQ(outcome.error().code(), Code::timeout);
    EXPECT_THAT(outcome.error().message(), HasSubstr("a message with tag 9 from any rank"));
  }
}

TEST(Messages, are_sent_to_somebody) {
  expect_ok(run_ranks(2, plan::Plan(), [](Group& group, capture::Recorder&) -> Result<void> {
    std::vector<float> data(1);
    auto refused = group.run(message(data, kAnyRank, 0, true));
    if (refused) return error(Code::corrupt, "a message to any rank was sent");
    return {};
  }));
}

// The ranks tell each other where rank 0 listens, in a way that weft knows nothing of.
TEST(Messages, of_the_callers_own_can_be_how_ranks_meet) {
  std::promise<std::string> place;
  std::shared_future<std::string> told = place.get_future().share();
  expect_ok(run_ranks(
      3, plan::Plan(),
      [](Group& group, capture::Recorder&) -> Result<void> { return group.barrier(); },
      [&](Options& options) {
        if (options.rank.index > 0) {
          options.rendezvous = told.get();
          return;
        }
        options.rendezvous = "127.0.0.1";
        options.listening = [&](const std::string& where) -> Result<void> {
          place.set_value(where);
          return {};
        };
      }));
}

}  // namespace
}  // namespace weft::runtime
