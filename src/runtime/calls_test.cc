// Calls that make no sense, alone or together: refused with clear words, never a hang.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "testing.h"

namespace weft::runtime {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::run_ranks;

void expect_ok(const std::vector<Result<void>>& outcomes) {
  for (size_t r = 0; r < outcomes.size(); ++r)
    EXPECT_TRUE(outcomes[r].ok()) << "rank " << r << ": "
                                  << (outcomes[r].ok() ? "" : outcomes[r].error().message());
}

// What rank 0 knows decides for all: ranks that chose by themselves would not understand each
// other.
TEST(Costs, of_rank_0_decide_which_all_reduce_everyone_uses) {
  cost::Costs slow = cost::typical();
  slow.round_trip_idle_ns = {1e12, 1e12, 1e12, 1};  // nothing but the number of steps counts
  ASSERT_EQ(schedule::choose_all_reduce(slow, {5, 1, 1}).at(4u << 20), schedule::Algorithm::direct);
  ASSERT_EQ(schedule::choose_all_reduce(cost::typical(), {5, 1, 1}).at(4u << 20),
            schedule::Algorithm::ring);
  auto body = [](Group& group, capture::Recorder&) -> Result<void> {
    std::vector<float> data(1u << 20, static_cast<float>(group.rank().index));
    WEFT_TRY(group.all_reduce(data));
    for (float value : data)
      if (value != 10) return error(Code::corrupt, "%g instead of 10", double{value});
    return {};
  };
  for (uint32_t who : {0u, 3u})
    expect_ok(run_ranks(5, plan::Plan(), body, [&](Options& options) {
      options.plan_was_named = false;
      if (options.rank.index == who) options.costs = slow;
    }));
}

// The ranks to which rank 0 has sent after an all-reduce of four elements among four.
std::set<uint32_t> peers_of_rank_0(const plan::Plan& plan, bool named) {
  std::set<uint32_t> peers;
  expect_ok(run_ranks(
      4, plan,
      [&](Group& group, capture::Recorder&) -> Result<void> {
        std::vector<float> data(4, 1);
        WEFT_TRY(group.all_reduce(data));
        if (group.rank().index != 0) return {};
        const auto status = nlohmann::json::parse(group.status());
        for (const auto& lane : status["lanes"])
          if (lane["direction"] == "out" && lane["bytes"] > 0)
            peers.insert(lane["peer"].get<uint32_t>());
        return {};
      },
      [&](Options& options) { options.plan_was_named = named; }));
  return peers;
}

TEST(Call, takes_the_algorithm_that_the_plan_says) {
  plan::Plan plan;
  EXPECT_EQ(peers_of_rank_0(plan, false), (std::set<uint32_t>{1, 2}));  // few steps: doubling
  EXPECT_EQ(peers_of_rank_0(plan, true), (std::set<uint32_t>{1})) << "it says ring";
  plan.algorithm = {{std::nullopt, "auto"}};
  EXPECT_EQ(peers_of_rank_0(plan, true), (std::set<uint32_t>{1, 2}));
  plan.algorithm = {{std::nullopt, "direct"}};
  EXPECT_EQ(peers_of_rank_0(plan, true), (std::set<uint32_t>{1, 2, 3}));
}

// ---- refused before anything is sent -----------------------------------------------------

TEST(Call, that_makes_no_sense_is_refused_and_the_group_goes_on) {
  std::array<uint64_t, 3> three = {1, 2, 3};
  std::array<uint64_t, 2> two = {4, 6}, other = {5, 6}, huge = {~uint64_t{0}, 11};
  struct {
    std::function<void(Call&)> change;
    const char* words;
  } cases[] = {
      {[&](Call& c) { c.output = nullptr; }, "all_reduce: the input is null"},
      {[&](Call& c) { c.collective = Collective::broadcast, c.output = nullptr; }, "is null"},
      {[&](Call& c) {
         c.collective = Collective::reduce_scatter;
         c.input = nullptr;
       },
       "reduce_scatter: the input is null"},
      {[&](Call& c) { c.root = 2, c.collective = Collective::broadcast; },
       "broadcast: there is no rank 2 among 2"},
      {[&](Call& c) { c.op = Op::bit_and; }, "all_reduce: bit_and of float32 is not possible"},
      {[&](Call& c) { c.type = static_cast<Type>(77); }, "no such type or operation"},
      {[&](Call& c) { c.op = static_cast<Op>(0); }, "no such type or operation"},
      {[&](Call& c) { c.count = ~uint64_t{0}; }, "too many elements"},
      {[&](Call& c) { c.collective = Collective::all_gather, c.counts = three; },
       "all_gather: 3 counts for 2 ranks"},
      {[&](Call& c) { c.collective = Collective::all_gather, c.counts = other; },
       "all_gather: the counts do not add up to the count"},
      {[&](Call& c) { c.collective = Collective::all_gather, c.counts = huge; },
       "all_gather: the counts do not add up to the count"},
      {[&](Call& c) { c.collective = Collective::all_to_all, c.count = 9; },
       "all_to_all: 9 elements cannot be cut into 2 equal blocks"},
      {[&](Call& c) { c.collective = Collective::all_to_all, c.counts = two; },
       "all_to_all: it needs both kinds of counts, or none"},
      {[&](Call& c) {
         c.collective = Collective::all_to_all;
         c.counts = two;
         c.receive_counts = huge;
       },
       "all_to_all: "},
  };
  expect_ok(run_ranks(2, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
    std::vector<float> own(64, 1);
    for (auto& [change, words] : cases) {
      Call call;
      call.output = own.data();
      call.count = 10;
      change(call);
      auto refused = group.start(call);
      EXPECT_FALSE(refused) << words;
      if (refused) return error(Code::corrupt, "started: %s", words);
      EXPECT_EQ(refused.error().code(), Code::invalid_argument);
      EXPECT_THAT(refused.error().message(), HasSubstr(words));
    }
    EXPECT_FALSE(group.send(own.data(), 1, Type::float32, group.rank())) << "to itself";
    WEFT_TRY(group.all_reduce(own));
    EXPECT_EQ(own[5], 2);
    return {};
  }));
}

TEST(Call, of_nothing_needs_no_memory) {
  expect_ok(run_ranks(3, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
    for (Collective collective :
         {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
          Collective::broadcast, Collective::reduce, Collective::gather, Collective::scatter,
          Collective::all_to_all}) {
      Call call;
      call.collective = collective;
      WEFT_TRY(group.run(call));
    }
    return {};
  }));
}

// ---- ranks that do not call the same -----------------------------------------------------

struct Difference {
  const char* name;
  std::function<void(Call&)> one, other;
  const char* one_words;
  const char* other_words;
};

const std::vector<Difference>& differences() {
  static const std::vector<Difference> all = {
      {"operation", [](Call&) {}, [](Call& c) { c.collective = Collective::reduce_scatter; },
       "all_reduce of 5000 float32 (sum)", "reduce_scatter of 5000 float32 (sum)"},
      {"type", [](Call&) {}, [](Call& c) { c.type = Type::int32; },
       "all_reduce of 5000 float32 (sum)", "all_reduce of 5000 int32 (sum)"},
      {"op", [](Call&) {}, [](Call& c) { c.op = Op::max; }, "all_reduce of 5000 float32 (sum)",
       "all_reduce of 5000 float32 (max)"},
      {"count", [](Call&) {}, [](Call& c) { c.count = 4999; }, "all_reduce of 5000 float32 (sum)",
       "all_reduce of 4999 float32 (sum)"},
      {"root", [](Call& c) { c.collective = Collective::reduce; },
       [](Call& c) { c.collective = Collective::reduce, c.root = 1; },
       "reduce of 5000 float32 (sum) with root 0", "reduce of 5000 float32 (sum) with root 1"},
      {"root of which both wait", [](Call& c) { c.collective = Collective::broadcast, c.root = 1; },
       [](Call& c) { c.collective = Collective::broadcast; },
       "broadcast of 5000 float32 with root 1", "broadcast of 5000 float32 with root 0"},
      {"barrier", [](Call&) {},
       [](Call& c) {
         c.collective = Collective::barrier;
         c.type = Type::uint8;
         c.count = 1;
       },
       "all_reduce of 5000 float32 (sum)", "barrier of 1 uint8"},
  };
  return all;
}

TEST(Mismatch, of_any_part_of_the_signature_names_both_sides_on_all_ranks) {
  for (uint32_t ranks : {2u, 4u})
    for (uint32_t odd : {1u, ranks - 1})
      for (const Difference& difference : differences()) {
        SCOPED_TRACE(text("%s, rank %u of %u", difference.name, odd, ranks));
        auto outcomes =
            run_ranks(ranks, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
              std::vector<float> in(5000, 1), out(5000);
              Call call;
              call.input = in.data();
              call.output = out.data();
              call.count = 5000;
              (group.rank().index == odd ? difference.other : difference.one)(call);
              WEFT_TRY(group.run(call));
              // A rank that only sends may be through before the other one sees its data.
              for (;;) WEFT_TRY(group.barrier());
            });
        for (auto& outcome : outcomes) {
          ASSERT_FALSE(outcome);
          const std::string& words = outcome.error().message();
          EXPECT_EQ(outcome.error().code(), Code::invalid_argument) << words;
          EXPECT_THAT(words, HasSubstr(difference.one_words));
          EXPECT_THAT(words, HasSubstr(difference.other_words));
          EXPECT_THAT(words, HasSubstr(text("%s on rank %u", difference.other_words, odd)));
          EXPECT_THAT(words, HasSubstr(text("%s on rank ", difference.one_words)));
        }
      }
}

TEST(Mismatch, of_a_message_names_both_sides) {
  auto outcomes = run_ranks(3, plan::Plan(), [](Group& group, capture::Recorder&) -> Result<void> {
    std::vector<float> data(300);
    if (group.rank().index == 2) WEFT_TRY(group.send(data.data(), 300, Type::float32, {1}));
    if (group.rank().index == 1) WEFT_TRY(group.receive(data.data(), 200, Type::float32, {2}));
    for (;;) WEFT_TRY(group.barrier());
  });
  for (auto& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_THAT(outcome.error().message(),
                AllOf(HasSubstr("point_to_point of 300 float32 on rank 2"),
                      HasSubstr("point_to_point of 200 float32 on rank 1")));
  }
}

TEST(Mismatch, of_one_pair_of_an_uneven_exchange_is_named) {
  auto outcomes = run_ranks(3, plan::Plan(), [](Group& group, capture::Recorder&) -> Result<void> {
    std::vector<int32_t> in(30), out(60);
    std::vector<uint64_t> send(3, 10), receive(3, 10);
    if (group.rank().index == 0) receive[2] = 11;  // but rank 2 sends 10
    Call call;
    call.collective = Collective::all_to_all;
    call.type = Type::int32;
    call.input = in.data();
    call.output = out.data();
    call.count = 30;
    call.counts = send;
    call.receive_counts = receive;
    WEFT_TRY(group.run(call));
    for (;;) WEFT_TRY(group.barrier());
  });
  for (auto& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_THAT(outcome.error().message(), AllOf(HasSubstr("all_to_all of 10 int32 on rank 2"),
                                                 HasSubstr("all_to_all of 11 int32 on rank 0")));
  }
}

}  // namespace
}  // namespace weft::runtime
