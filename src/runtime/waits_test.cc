// Waits that end, by a deadline of their own and with the right name; and processes that were
// suspended, forked or short of memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <latch>

#include "processes.h"

namespace weft::runtime {
namespace {

using testing::HasSubstr;
using namespace testing_support;  // NOLINT(google-build-using-namespace): this module's own

void wait_for_failure(Group& group) {
  while (!group.failure()) sleep_ms(5);
}

TEST(Deadline, of_an_operation_passes_while_others_move) {
  auto outcomes = run_ranks(
      2, plan::Plan(),
      [](Group& group, capture::Recorder&) -> Result<void> {
        Nanos began = monotonic_clock().now();
        float never = 0;
        Work lonely;
        if (group.rank().index == 0) {
          Call call;
          call.collective = Collective::point_to_point;
          call.output = &never;
          call.count = 1;
          call.root = 1;
          call.sends = false;
          WEFT_ASSIGN(lonely, group.start(call));
        }
        std::vector<float> data(1000);
        Result<void> moved;
        while (moved && monotonic_clock().now() - began < Nanos::from_seconds(8))
          moved = group.all_reduce(data);
        EXPECT_LT(monotonic_clock().now() - began, Nanos::from_seconds(5));
        return moved;
      },
      [](Options& options) { options.progress_deadline = Nanos::from_millis(500); });
  for (auto& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_EQ(outcome.error().code(), Code::timeout);
    EXPECT_THAT(outcome.error().message(), HasSubstr("rank 1 on localhost"));
  }
}

TEST(Deadline, of_a_call_may_differ_from_that_of_the_group) {
  auto outcomes = run_ranks(2, plan::Plan(), [](Group& group, capture::Recorder&) -> Result<void> {
    if (group.rank().index == 1) {
      wait_for_failure(group);
      return *group.failure();
    }
    float none = 0;
    Call call;
    call.output = &none;
    call.count = 1;
    call.deadline = Nanos::from_millis(200);
    return group.run(call);
  });
  for (auto& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_THAT(outcome.error().message(), HasSubstr("rank 1 on localhost has not come"));
  }
}

TEST(Deadline, of_a_gradient_that_no_rank_makes_ready_names_it) {
  auto outcomes = run_ranks(
      3, plan::Plan(),
      [](Group& group, capture::Recorder&) -> Result<void> {
        std::vector<float> a(10), b(10);
        WEFT_ASSIGN(auto exchange, group.exchange({{"seen", a, 0}, {"forgotten", b, 1}}));
        WEFT_TRY(exchange->ready(0, 0));
        return exchange->wait(0, 0);  // in one bucket with the other
      },
      [](Options& options) { options.ready_deadline = Nanos::from_millis(300); });
  for (auto& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_EQ(outcome.error().code(), Code::timeout);
    EXPECT_THAT(outcome.error().message(), HasSubstr("waits for tensor \"seen\" of step 0"));
    EXPECT_THAT(outcome.error().message(), HasSubstr("\"forgotten\""));
    EXPECT_EQ(outcome.error().message(), outcomes[0].error().message());
  }
}

TEST(Deadline, of_leaving_blames_the_one_that_does_not_want_to) {
  for (uint32_t late : {0u, 2u}) {
    auto outcomes = run_ranks(
        3, plan::Plan(),
        [&](Group& group, capture::Recorder&) -> Result<void> {
          // The root comes to leave later than rank 1, which must not blame it.
          if (group.rank().index != 1) sleep_ms(300);
          if (group.rank().index != late) return group.leave();
          wait_for_failure(group);
          return *group.failure();
        },
        [](Options& options) { options.progress_deadline = Nanos::from_millis(300); });
    for (auto& outcome : outcomes) {
      ASSERT_FALSE(outcome);
      EXPECT_THAT(outcome.error().message(),
                  HasSubstr(text("rank %u on localhost did not want to leave", late)));
      EXPECT_EQ(outcome.error().message(), outcomes[0].error().message());
    }
  }
}

TEST(Reason, is_the_same_on_all_ranks_when_several_give_one_at_once) {
  for (int round = 0; round < 20; ++round) {
    std::atomic<uint32_t> at_once{0};
    auto outcomes =
        run_ranks(4, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
          WEFT_TRY(group.barrier());
          at_once.fetch_add(1);
          while (at_once.load() < 4) std::this_thread::yield();
          group.abort(text("reason of %u", group.rank().index));
          wait_for_failure(group);
          return *group.failure();
        });
    for (auto& outcome : outcomes) {
      ASSERT_FALSE(outcome);
      EXPECT_EQ(outcome.error().message(), outcomes[0].error().message());
    }
  }
}

TEST(Callback, may_start_an_operation_and_may_not_wait) {
  std::latch both_listen(2);
  auto outcomes = run_ranks(2, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
    float first = 0;
    std::vector<float> second(100, 2);
    std::atomic<bool> done{false};
    std::string refused;
    Rank other{1 - group.rank().index};
    Call call;
    call.collective = Collective::point_to_point;
    call.output = &first;
    call.count = 1;
    call.root = other.index;
    call.sends = false;
    WEFT_ASSIGN(Work work, group.start(call));
    // Nothing has come yet, so it is called by whoever drives.
    work.then([&](const Result<void>& outcome) {
      EXPECT_TRUE(outcome);
      auto waited = group.barrier();
      refused = waited ? "nothing" : waited.error().message();
      Call next;
      next.output = second.data();
      next.count = second.size();
      auto started = group.start(next);
      EXPECT_TRUE(started);
      if (started) started->then([&](const Result<void>& end) { done = end.ok(); });
    });
    both_listen.arrive_and_wait();
    float word = 1;
    WEFT_TRY(group.send(&word, 1, Type::float32, other));
    Nanos until = monotonic_clock().now() + Nanos::from_seconds(10);
    while (!done && monotonic_clock().now() < until) sleep_ms(1);
    EXPECT_TRUE(done);
    EXPECT_THAT(refused, HasSubstr("a callback may start operations, and may not wait"));
    EXPECT_EQ(second[7], 4);
    return {};
  });
  for (auto& outcome : outcomes) EXPECT_TRUE(outcome) << outcome.error().message();
}

TEST(Leave, is_waited_for_by_several_threads_at_once) {
  // Without a progress thread the callers drive in turns, and look while others do.
  auto outcomes = run_ranks(
      2, plan::Plan(),
      [](Group& group, capture::Recorder&) -> Result<void> {
        std::vector<float> data(10);
        WEFT_ASSIGN(auto exchange, group.exchange({{"t", data, 0}}));
        std::vector<std::thread> threads;
        std::atomic<int> ended{0};
        for (int i = 0; i < 4; ++i)
          threads.emplace_back([&] {
            EXPECT_TRUE(exchange->wait(0, 0));
            ++ended;
          });
        sleep_ms(50);
        WEFT_TRY(exchange->ready(0, 0));
        for (std::thread& thread : threads) thread.join();
        EXPECT_EQ(ended, 4);
        return {};
      },
      [](Options& options) { options.progress_thread = false; });
  for (auto& outcome : outcomes) EXPECT_TRUE(outcome) << outcome.error().message();
}

// ---- processes -----------------------------------------------------------------------------

// A rank that works until it fails or has worked for so long, and tells.
void work_for(uint32_t rank, uint32_t ranks, uint16_t port, Nanos time, Nanos silence,
              const Child::Say& say, const std::function<void(Group&)>& first = {},
              bool shared_memory = true) {
  Options options = options_for(rank, ranks, port, plan::Plan());
  options.silence_deadline = silence;
  options.shared_memory = shared_memory;
  auto recorder = capture::Recorder::off();
  auto group = Group::join(options, *recorder);
  if (!group) return say("error " + group.error().message());
  if (first) first(**group);
  say("working");
  std::vector<float> data(10000);
  Nanos until = monotonic_clock().now() + time;
  Result<void> outcome;
  float stop = 0;
  // Rank 0 decides when it is enough, for all.
  while (outcome && stop == 0) {
    outcome = (*group)->all_reduce(data);
    sleep_ms(5);
    if (rank == 0) stop = monotonic_clock().now() > until ? 1 : 0;
    if (outcome) outcome = (*group)->broadcast(std::span(&stop, 1), {0});
  }
  if (outcome) outcome = (*group)->leave();
  say(text("time %lld", static_cast<long long>(monotonic_clock().now().count)));
  say(text("culprit %u", (*group)->culprit().value_or(Rank{99}).index));
  say(outcome ? "ended well" : "ended " + outcome.error().message());
}

TEST(Suspension, of_all_ranks_for_longer_than_the_silence_deadline_is_survived) {
  uint16_t port = free_port();
  std::vector<Child> ranks;
  for (uint32_t rank = 0; rank < 3; ++rank)
    ranks.emplace_back([&, rank](const Child::Say& say) {
      work_for(rank, 3, port, Nanos::from_seconds(3), Nanos::from_seconds(2), say);
    });
  for (Child& rank : ranks) ASSERT_TRUE(rank.hear("working", Nanos::from_seconds(20)));
  sleep_ms(200);
  for (Child& rank : ranks) rank.signal(SIGSTOP);
  sleep_ms(5000);
  // Not all at once, as a shell or a container runtime would.
  for (Child& rank : ranks) {
    rank.signal(SIGCONT);
    sleep_ms(300);
  }
  for (Child& rank : ranks) {
    auto end = rank.hear("ended ", Nanos::from_seconds(20));
    ASSERT_TRUE(end);
    EXPECT_EQ(*end, "well");
  }
}

TEST(Forked, children_do_not_hide_the_death_of_a_rank) {
  Nanos slowest{0};
  for (bool shared : {false, true}) {
    uint16_t port = free_port();
    std::vector<Child> ranks;
    for (uint32_t rank = 0; rank < 3; ++rank)
      ranks.emplace_back([&, rank](const Child::Say& say) {
        work_for(
            rank, 3, port, Nanos::from_seconds(30), Nanos::from_seconds(15), say,
            [&](Group& group) {
              if (rank != 1) return;
              // A data loader's worker: it outlives its parent, and exits by itself.
              pid_t child = ::fork();
              if (child == 0) {
                auto refused = group.barrier();
                say(refused ? "child nothing" : "child " + refused.error().message());
                sleep_ms(6000);
                ::_exit(0);
              }
            },
            shared);
      });
    for (Child& rank : ranks) ASSERT_TRUE(rank.hear("working", Nanos::from_seconds(20)));
    sleep_ms(300);
    Nanos killed = monotonic_clock().now();
    ranks[1].signal(SIGKILL);
    for (uint32_t rank : {0u, 2u}) {
      auto when = ranks[rank].hear("time ", Nanos::from_seconds(10));
      ASSERT_TRUE(when);
      slowest = std::max(slowest, Nanos{std::stoll(*when)} - killed);
      EXPECT_LT(Nanos{std::stoll(*when)} - killed, Nanos::from_seconds(2));
      EXPECT_EQ(ranks[rank].hear("culprit ", Nanos::from_seconds(1)), "1");
    }
    auto child = ranks[1].hear("child ", Nanos::from_seconds(1));
    EXPECT_THAT(child.value_or(ranks[1].else_heard()), HasSubstr("this process was forked"));
  }
  RecordProperty("seen", text("named after %.2f s at the latest", slowest.seconds()));
}

// From here on this process gets nothing, in any size. Returns what it took.
void* take_all_memory() {
  rlimit limit{};
  ::getrlimit(RLIMIT_AS, &limit);
  std::ifstream("/proc/self/statm") >> limit.rlim_cur;
  limit.rlim_cur *= 4096;
  ::setrlimit(RLIMIT_AS, &limit);
  void* taken = nullptr;
  for (size_t size = 1u << 20; size >= sizeof taken; size = size > 1024 ? size / 2 : size - 16)
    while (void* more = std::malloc(size)) {
      std::memcpy(more, &taken, sizeof taken);
      taken = more;
    }
  return taken;
}

void give_back_memory(void* taken) {
  rlimit limit{};
  ::getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_AS, &limit);
  while (taken != nullptr) {
    void* next = nullptr;
    std::memcpy(&next, taken, sizeof next);
    std::free(std::exchange(taken, next));
  }
}

// Sanitizers have allocators of their own, which end a process whose memory is limited. What they
// would see here they see under the seed, where memory is refused without a limit (memory_test.cc).
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define WEFT_SKIP_WHERE_MEMORY_CANNOT_BE_LIMITED() \
  GTEST_SKIP() << "the sanitizer's allocator ends a process without memory"
#else
#define WEFT_SKIP_WHERE_MEMORY_CANNOT_BE_LIMITED() static_cast<void>(0)
#endif

// The process lives on, so it is not its death that tells the others.
TEST(Memory, that_is_gone_to_the_last_byte_is_told_to_all) {
  WEFT_SKIP_WHERE_MEMORY_CANNOT_BE_LIMITED();
  for (bool progress_thread : {true, false})
    for (bool sealed : {true, false}) {
      SCOPED_TRACE(text("progress thread %d, sealed %d", progress_thread, sealed));
      uint16_t port = free_port();
      std::vector<Child> ranks;
      for (uint32_t rank = 0; rank < 3; ++rank)
        ranks.emplace_back([&, rank](const Child::Say& say) {
          Options options = options_for(rank, 3, port, plan::Plan());
          options.progress_thread = progress_thread;
          options.sealed = sealed;
          auto recorder = capture::Recorder::off();
          auto group = Group::join(options, *recorder);
          if (!group) return say("error " + group.error().message());
          for (int round = 0; round < 5; ++round) static_cast<void>((*group)->barrier());
          void* taken = rank == 1 ? take_all_memory() : nullptr;
          Nanos began = monotonic_clock().now();
          bool threw = false;
          try {
            while (!(*group)->failure()) static_cast<void>((*group)->barrier());
          } catch (const std::bad_alloc&) {
            threw = true;
          }
          Nanos took = monotonic_clock().now() - began;
          give_back_memory(taken);
          say(threw ? "wrong: it threw" : text("took %g", took.seconds()));
          say(text("culprit %u", (*group)->culprit().value_or(Rank{99}).index));
          for (;;) ::pause();
        });
      for (Child& rank : ranks) {
        auto took = rank.hear("took ", Nanos::from_seconds(5));
        ASSERT_TRUE(took) << rank.else_heard();
        EXPECT_LT(std::stod(*took), 1.0);
        EXPECT_EQ(rank.hear("culprit ", Nanos::from_seconds(1)), "1");
      }
    }
}

TEST(Memory, that_runs_out_is_the_operations_error_and_names_the_rank) {
  WEFT_SKIP_WHERE_MEMORY_CANNOT_BE_LIMITED();
  uint16_t port = free_port();
  std::vector<Child> ranks;
  for (uint32_t rank = 0; rank < 3; ++rank)
    ranks.emplace_back([&, rank](const Child::Say& say) {
      Options options = options_for(rank, 3, port, plan::Plan());
      auto recorder = capture::Recorder::off();
      auto group = Group::join(options, *recorder);
      if (!group) return say("error " + group.error().message());
      std::vector<float> data(48u << 20);
      if (rank == 1) {
        // Enough for small things, and not for a copy of the data.
        rlimit limit{};
        std::ifstream("/proc/self/statm") >> limit.rlim_cur;
        limit.rlim_cur = limit.rlim_cur * 4096 + (4u << 20);
        limit.rlim_max = limit.rlim_cur;
        ::setrlimit(RLIMIT_AS, &limit);
      }
      // In place it needs a copy of what it sends.
      Call call;
      call.collective = Collective::all_to_all;
      call.output = data.data();
      call.count = data.size();
      auto outcome = (*group)->barrier();
      if (outcome) outcome = (*group)->run(call);
      say(text("culprit %u", (*group)->culprit().value_or(Rank{99}).index));
      say(outcome ? "ended well" : "ended " + outcome.error().message());
    });
  for (Child& rank : ranks) {
    EXPECT_EQ(rank.hear("culprit ", Nanos::from_seconds(20)), "1") << rank.else_heard();
    auto end = rank.hear("ended ", Nanos::from_seconds(5));
    ASSERT_TRUE(end);
    EXPECT_THAT(*end, HasSubstr("memory"));
  }
}

}  // namespace
}  // namespace weft::runtime
