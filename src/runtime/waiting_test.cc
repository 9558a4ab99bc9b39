// Waiting costs no processor: who waits long sleeps, however it waits, and leaves the machine to
// those who have work. Processor time is measured, not time, so a busy machine changes nothing.
#include <gtest/gtest.h>

#include <atomic>
#include <ctime>

#include "testing.h"

namespace weft::runtime {
namespace {

using testing_support::run_ranks;

constexpr Nanos kLate = Nanos::from_millis(400);
// Of the wait that may be spent on it. What is spent is about 0.01; a sanitizer makes the operation
// itself, which ends the wait, ten times as costly.
constexpr double kShare = 0.2;

Nanos clock_now(clockid_t clock) {
  timespec now{};
  WEFT_CHECK(::clock_gettime(clock, &now) == 0);
  return Nanos::from_seconds(static_cast<double>(now.tv_sec)) + Nanos{now.tv_nsec};
}

// The rank that comes late comes kLate after all others have begun to wait.
class Late {
 public:
  explicit Late(uint32_t others) : others_(others) {}
  void begin_to_wait() { waiting_.fetch_add(1); }
  void come() {
    while (waiting_.load() < others_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    waiting_.store(0);
    std::this_thread::sleep_for(std::chrono::nanoseconds(kLate.count));
  }

 private:
  uint32_t others_;
  std::atomic<uint32_t> waiting_{0};
};

// Processor time of `clock` that goes by during `wait`, as a share of the time that it takes.
Result<double> share_spent(clockid_t clock, const std::function<Result<void>()>& wait) {
  Nanos begin = monotonic_clock().now(), spent = clock_now(clock);
  WEFT_TRY(wait());
  spent = clock_now(clock) - spent;
  Nanos took = monotonic_clock().now() - begin;
  EXPECT_GE(took, kLate) << "there was something to wait for";
  return spent.seconds() / took.seconds();
}

// What a rank does that all others must do too.
struct Way {
  const char* name;
  std::function<Result<void>(Group&)> wait;
};

std::vector<Way> ways() {
  return {
      {"a barrier", [](Group& group) { return group.barrier(); }},
      {"a small all-reduce",
       [](Group& group) {
         std::vector<float> data(16, 1.0f);
         return group.all_reduce(data);
       }},
      {"a large all-reduce",
       [](Group& group) {
         std::vector<float> data(100000, 1.0f);
         return group.all_reduce(data);
       }},
      {"a handle",
       [](Group& group) -> Result<void> {
         std::vector<float> data(1000, 1.0f);
         Call call;
         call.output = data.data();
         call.count = data.size();
         WEFT_ASSIGN(Work work, group.start(call));
         return work.wait();
       }},
      {"two threads with a handle each",
       [](Group& group) -> Result<void> {
         std::vector<float> one(1000, 1.0f), two(1000, 1.0f);
         Call call;
         call.count = one.size();
         call.output = one.data();
         WEFT_ASSIGN(Work first, group.start(call));
         call.output = two.data();
         WEFT_ASSIGN(Work second, group.start(call));
         Result<void> other;
         std::thread thread([&] { other = first.wait(); });
         Result<void> own = second.wait();
         thread.join();
         if (!own) return own;
         return other;
       }},
  };
}

void expect_ok(const std::vector<Result<void>>& outcomes) {
  for (const auto& outcome : outcomes)
    EXPECT_TRUE(outcome.ok()) << (outcome.ok() ? "" : outcome.error().message());
}

// The last rank comes late, in each of the ways; what do the others spend?
void expect_little(uint32_t ranks, bool shared_memory) {
  Late late(ranks - 1);
  auto body = [&](Group& group, capture::Recorder&) -> Result<void> {
    for (const Way& way : ways()) {
      WEFT_TRY(group.barrier());
      if (group.rank().index + 1 == ranks) {
        late.come();
        WEFT_TRY(way.wait(group));
        continue;
      }
      WEFT_ASSIGN(double share, share_spent(CLOCK_THREAD_CPUTIME_ID, [&] {
                    late.begin_to_wait();
                    return way.wait(group);
                  }));
      EXPECT_LT(share, kShare) << "rank " << group.rank().index << " in " << way.name;
    }
    return {};
  };
  expect_ok(run_ranks(ranks, plan::Plan(), body,
                      [&](Options& options) { options.shared_memory = shared_memory; }));
}

TEST(Waiting, over_tcp_leaves_the_processor_to_others) { expect_little(2, false); }
TEST(Waiting, through_shared_memory_leaves_the_processor_to_others) { expect_little(2, true); }
TEST(Waiting, of_several_ranks_leaves_the_processor_to_others) { expect_little(4, true); }

TEST(Waiting, for_gradients_leaves_the_processor_to_others) {
  Late late(1);
  expect_ok(run_ranks(2, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
    std::vector<float> data(1000);
    WEFT_ASSIGN(auto exchange, group.exchange({{"t", data, 0}}));
    if (group.rank().index == 1) {
      late.come();
      WEFT_TRY(exchange->ready(0, 0));
      return exchange->wait(0, 0);
    }
    WEFT_TRY(exchange->ready(0, 0));
    WEFT_ASSIGN(double share, share_spent(CLOCK_THREAD_CPUTIME_ID, [&] {
                  late.begin_to_wait();
                  return exchange->wait(0, 0);
                }));
    EXPECT_LT(share, kShare);
    return {};
  }));
}

// All threads together: the progress threads do not spin for callers that sleep.
TEST(Waiting, costs_little_in_the_whole_process) {
  constexpr uint32_t kRanks = 4;
  plan::Plan plan;
  plan.lanes = 3;
  Late late(kRanks - 1);
  expect_ok(run_ranks(kRanks, plan, [&](Group& group, capture::Recorder&) -> Result<void> {
    WEFT_TRY(group.barrier());
    if (group.rank().index + 1 < kRanks) {
      late.begin_to_wait();
      return group.barrier();
    }
    WEFT_ASSIGN(double share, share_spent(CLOCK_PROCESS_CPUTIME_ID, [&]() -> Result<void> {
                  late.come();
                  return {};
                }));
    EXPECT_LT(share, kShare);
    return group.barrier();
  }));
}

}  // namespace
}  // namespace weft::runtime
