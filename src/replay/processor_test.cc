// Threads that share cores: who is done when, by hand.

#include "processor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "weft/base.h"

namespace weft::replay {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Done = std::pair<int64_t, uint32_t>;  // when, what

// A machine that is looked at when it asks for it, as the simulator does.
class Machine {
 public:
  explicit Machine(uint32_t cores, double most_credit_ns = 0) : processor_(cores, most_credit_ns) {}

  uint32_t thread() { return processor_.add_thread(); }
  uint32_t instead_of(uint32_t thread) { return processor_.add_instead_of(thread); }

  // `what` 0: nobody wants to hear of it.
  void give(uint32_t thread, double ns, uint32_t what) {
    processor_.submit(thread, ns, {what == 0 ? What::nothing : What::absorb, 0, what}, now_);
  }

  void spin(uint32_t thread, bool spins) { processor_.spin(thread, spins, now_); }

  std::vector<Done> run_until(int64_t end) {
    std::vector<Done> out;
    for (;;) {
      const int64_t next = processor_.next_at();
      EXPECT_GE(next, now_);
      if (next > end) break;
      now_ = next;
      processor_.advance(now_);
      while (auto then = processor_.finished()) out.emplace_back(now_, then->a);
      ++looks_;
    }
    now_ = end;
    return out;
  }

  int looks() const { return looks_; }
  bool idle(uint32_t thread) {
    processor_.advance(now_);
    return processor_.idle(thread);
  }

 private:
  Processor processor_;
  int64_t now_ = 0;
  int looks_ = 0;
};

TEST(Processor, who_has_a_core_for_himself_takes_as_long_as_his_work) {
  Machine machine(2);
  uint32_t a = machine.thread(), b = machine.thread();
  machine.give(a, 10, 1);
  EXPECT_THAT(machine.run_until(4), IsEmpty());
  machine.give(b, 10, 2);
  EXPECT_THAT(machine.run_until(100), ElementsAre(Done{10, 1}, Done{14, 2}));
  EXPECT_TRUE(machine.idle(a) && machine.idle(b));
}

TEST(Processor, two_threads_have_half_a_core_each) {
  Machine machine(1);
  uint32_t a = machine.thread(), b = machine.thread();
  machine.give(a, 10, 1);
  machine.give(b, 10, 2);
  EXPECT_THAT(machine.run_until(100), ElementsAre(Done{20, 1}, Done{20, 2}));
}

TEST(Processor, time_goes_on_however_late_it_is) {
  const int64_t late = int64_t{1} << 60;
  Machine machine(2);
  uint32_t a = machine.thread(), b = machine.thread(), c = machine.thread();
  EXPECT_THAT(machine.run_until(late), IsEmpty());
  for (uint32_t thread : {a, b, c}) machine.give(thread, 10, thread + 1);
  EXPECT_THAT(machine.run_until(late + 100),
              ElementsAre(Done{late + 15, 1}, Done{late + 15, 2}, Done{late + 15, 3}));
  machine.give(a, 1e19, 4);
  machine.give(a, 1e19, 5);
  EXPECT_THAT(machine.run_until(kNever - 1), IsEmpty());
}

TEST(Processor, three_threads_on_two_cores_have_two_thirds) {
  Machine machine(2);
  for (uint32_t what : {1, 2, 3}) machine.give(machine.thread(), what < 3 ? 20 : 30, what);
  // The third has done 20 when the others end, and then a core for itself.
  EXPECT_THAT(machine.run_until(100), ElementsAre(Done{30, 1}, Done{30, 2}, Done{40, 3}));
}

TEST(Processor, who_comes_in_the_middle_slows_whom_he_finds) {
  Machine machine(1);
  uint32_t a = machine.thread(), b = machine.thread();
  machine.give(a, 10, 1);
  EXPECT_THAT(machine.run_until(4), IsEmpty());
  machine.give(b, 4, 2);
  EXPECT_THAT(machine.run_until(100), ElementsAre(Done{12, 2}, Done{14, 1}));
}

TEST(Processor, a_thread_does_one_thing_after_another) {
  Machine machine(4);
  uint32_t a = machine.thread();
  machine.give(a, 5, 1);
  machine.give(a, 3, 0);
  machine.give(a, 2, 3);
  machine.give(a, 0, 4);
  EXPECT_THAT(machine.run_until(7), ElementsAre(Done{5, 1}));
  machine.give(a, 1, 5);
  EXPECT_THAT(machine.run_until(100), ElementsAre(Done{10, 3}, Done{10, 4}, Done{11, 5}));
}

TEST(Processor, a_queue_counts_as_one_thread) {
  Machine machine(1);
  uint32_t a = machine.thread(), b = machine.thread();
  for (uint32_t what : {1, 2, 3}) machine.give(a, 10, what);
  machine.give(b, 10, 4);
  EXPECT_THAT(machine.run_until(100),
              ElementsAre(Done{20, 1}, Done{20, 4}, Done{30, 2}, Done{40, 3}));
}

// Work of which nobody wants to hear still takes its share from the others.
TEST(Processor, silent_work_slows_others) {
  Machine machine(1);
  uint32_t a = machine.thread(), b = machine.thread();
  machine.give(a, 3, 0);
  machine.give(b, 10, 1);
  EXPECT_THAT(machine.run_until(100), ElementsAre(Done{13, 1}));
}

TEST(Processor, while_there_is_room_silent_work_is_not_looked_at) {
  Machine machine(2);
  uint32_t a = machine.thread(), b = machine.thread();
  for (int i = 0; i < 10; ++i) machine.give(a, 1, 0);
  machine.give(b, 30, 1);
  EXPECT_THAT(machine.run_until(100), ElementsAre(Done{30, 1}));
  EXPECT_EQ(machine.looks(), 1);
}

TEST(Processor, who_slept_goes_first) {
  Machine machine(1, 10);
  uint32_t burns = machine.thread(), sleeps = machine.thread();
  machine.give(burns, 1000, 1);
  EXPECT_THAT(machine.run_until(100), IsEmpty());
  machine.give(sleeps, 6, 2);
  EXPECT_THAT(machine.run_until(110), ElementsAre(Done{106, 2}));
  // It has slept 4 since, so it may have 8 before the other; of the rest each has half.
  machine.give(sleeps, 11, 3);
  EXPECT_THAT(machine.run_until(2000), ElementsAre(Done{124, 3}, Done{1017, 1}));
}

TEST(Processor, those_who_slept_share_among_themselves) {
  Machine machine(2, 100);
  uint32_t burns[] = {machine.thread(), machine.thread()};
  for (uint32_t burner : burns) machine.give(burner, 1000, 1 + burner);
  EXPECT_THAT(machine.run_until(500), IsEmpty());
  for (uint32_t what : {11, 12, 13}) machine.give(machine.thread(), 20, what);
  EXPECT_THAT(machine.run_until(2000), ElementsAre(Done{530, 11}, Done{530, 12}, Done{530, 13},
                                                   Done{1030, 1}, Done{1030, 2}));
}

TEST(Processor, who_looks_for_work_takes_a_core_and_works_at_once) {
  Machine machine(1);
  uint32_t burns = machine.thread(), looks = machine.thread();
  machine.give(burns, 100, 1);
  machine.run_until(10);
  machine.spin(looks, true);
  EXPECT_TRUE(machine.idle(looks));
  machine.run_until(30);  // the other has done 20
  machine.give(looks, 5, 2);
  EXPECT_THAT(machine.run_until(40), ElementsAre(Done{40, 2}));  // and 25
  machine.spin(looks, false);
  EXPECT_THAT(machine.run_until(1000), ElementsAre(Done{115, 1}));
}

// Of a folded job: each stands for a host of its own, and slows what all hosts do.
TEST(Processor, those_on_one_seat_do_not_slow_each_other) {
  Machine machine(1);
  uint32_t lane = machine.thread(), device = machine.thread();
  uint32_t other = machine.instead_of(device);
  machine.give(lane, 10, 1);
  machine.give(device, 10, 2);
  machine.give(other, 20, 3);
  EXPECT_THAT(machine.run_until(100), ElementsAre(Done{20, 1}, Done{20, 2}, Done{30, 3}));
}

// However work comes: nothing is lost, nothing is done twice, and no core stands still while a
// thread waits.
TEST(Processor, a_full_processor_does_what_its_cores_can) {
  Rng rng(7);
  for (int round = 0; round < 50; ++round) {
    const auto cores = static_cast<uint32_t>(1 + rng.below(4));
    Machine machine(cores, static_cast<double>(rng.below(3) * 50));
    std::vector<uint32_t> threads;
    for (uint32_t i = 0; i < cores; ++i) threads.push_back(machine.thread());
    for (uint32_t burner : threads) machine.give(burner, 5'000, 0);
    double work = 5'000.0 * cores;
    for (uint64_t i = rng.below(6); i > 0; --i) threads.push_back(machine.thread());
    uint32_t given = 0, heard = 0;
    for (; given < 40; ++given) {
      const auto ns = static_cast<double>(rng.below(100));
      work += ns;
      machine.give(threads[rng.below(threads.size())], ns, 1);
      heard += static_cast<uint32_t>(machine.run_until(int64_t{20} * (given + 1)).size());
    }
    // The burners alone last longer than all that came, so until they end every core is busy.
    const auto least = static_cast<int64_t>(work / cores);
    heard += static_cast<uint32_t>(machine.run_until(least - 2).size());
    uint32_t idle = 0;
    for (uint32_t thread : threads) idle += machine.idle(thread) ? 1 : 0;
    EXPECT_LT(idle, threads.size());
    heard += static_cast<uint32_t>(machine.run_until(1'000'000).size());
    EXPECT_EQ(heard, given);
    for (uint32_t thread : threads) EXPECT_TRUE(machine.idle(thread));
  }
}

}  // namespace
}  // namespace weft::replay
