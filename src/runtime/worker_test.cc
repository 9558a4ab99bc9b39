// Jobs whose lane workers are killed or stopped in the middle: they go on, exactly, and no rank is
// blamed.
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "testing.h"
#include "weft_testing/lane_worker.h"

namespace weft::runtime {
namespace {

using testing_support::run_ranks;

// Processes that any thread of this one started.
std::vector<pid_t> children() {
  std::vector<pid_t> out;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "children");
    for (pid_t child; file >> child;) out.push_back(child);
  }
  return out;
}

struct Blow {
  int signal;
  uint32_t workers;
  bool sealed;
};

class Workers : public testing::TestWithParam<Blow> {};

TEST_P(Workers, that_are_struck_do_not_end_the_job) {
  const Blow blow = GetParam();
  ::setenv("WEFT_PROGRAM", lane::own_program(), 1);
  constexpr uint32_t kRanks = 3;
  constexpr uint64_t kCount = 300'000;
  plan::Plan plan;
  plan.lanes = 4;
  plan.chunk = kib(32);
  plan.lane_worker = plan::LaneWorker::process;
  plan.lane_workers = blow.workers;
  std::atomic<uint32_t> round{0}, struck{0};
  std::atomic<bool> over{false};
  std::thread hand([&] {
    Rng rng(static_cast<uint64_t>(blow.signal) + blow.workers);
    // One worker of some rank, a few rounds into the job.
    while (round < 30 && !over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::vector<pid_t> all = children();
    if (all.empty()) return;
    if (::kill(all[rng.below(all.size())], blow.signal) == 0) ++struck;
  });
  Nanos begin = monotonic_clock().now();
  auto outcomes = run_ranks(
      kRanks, plan,
      [&](Group& group, capture::Recorder&) -> Result<void> {
        // Long enough for the blow to be noticed, and some rounds after it. All ranks must do as
        // many: rank 0's clock decides.
        for (uint32_t i = 0;; ++i) {
          std::vector<float> data(kCount);
          for (uint64_t k = 0; k < kCount; ++k)
            data[k] = static_cast<float>((k + i) % 13 + group.rank().index);
          Call call;
          call.output = data.data();
          call.count = kCount;
          WEFT_TRY(group.run(call));
          for (uint64_t k = 0; k < kCount; ++k)
            if (data[k] != static_cast<float>(3 * ((k + i) % 13) + 3))
              return error(Code::corrupt, "a wrong sum in round %u", i);
          int32_t stop = i > 150 && struck > 0 && (blow.signal != SIGSTOP || i > 300) ? 1 : 0;
          Call agree;
          agree.collective = Collective::broadcast;
          agree.type = Type::int32;
          agree.count = 1;
          agree.output = &stop;
          WEFT_TRY(group.run(agree));
          if (group.rank().index == 0) round = i;
          if (stop != 0) return {};
        }
      },
      [&](Options& options) {
        options.shared_memory = false;
        options.sealed = blow.sealed;
        options.progress_deadline = Nanos::from_seconds(15);
      });
  over = true;
  hand.join();
  for (uint32_t r = 0; r < kRanks; ++r)
    EXPECT_TRUE(outcomes[r].ok()) << "rank " << r << ": "
                                  << (outcomes[r].ok() ? "" : outcomes[r].error().message());
  EXPECT_EQ(struck, 1u);
  EXPECT_LT(monotonic_clock().now() - begin, Nanos::from_seconds(100));
  EXPECT_TRUE(children().empty()) << "nothing is left";
}

INSTANTIATE_TEST_SUITE_P(, Workers,
                         testing::Values(Blow{SIGKILL, 1, false}, Blow{SIGKILL, 2, true},
                                         Blow{SIGSTOP, 1, true}, Blow{SIGSTOP, 2, false}),
                         [](const auto& given) {
                           return text("%s_%u%s",
                                       given.param.signal == SIGKILL ? "killed" : "stopped",
                                       given.param.workers, given.param.sealed ? "_sealed" : "");
                         });

}  // namespace
}  // namespace weft::runtime
