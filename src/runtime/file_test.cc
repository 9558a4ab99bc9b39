// Files that fail: whichever request of a rank to its files is refused, a trace disturbs nobody,
// and ranks that meet by a file meet, or are told which file it was and what it met.
#include <gtest/gtest.h>

#include <cstring>

#include "sim_verdict.h"

namespace weft::runtime {
namespace {

using namespace simulated;  // NOLINT(google-build-using-namespace): this module's own

class FailingFiles : public testing::Test {
 protected:
  FailingFiles() {
    log_set_sink([](std::string_view) {});
  }
  ~FailingFiles() override { log_set_sink({}); }

  static Scene scene(bool by_file, bool traced) {
    Scene out;
    out.seed = out.world.seed = 1;
    out.ranks = out.world.ranks = 3;
    out.plan.chunk = kib(4);
    out.thinks.resize(3);
    out.world.time_max = Nanos::from_seconds(600);
    out.by_file = by_file;
    out.traced = traced;
    out.shares = false;
    if (by_file) out.world.machines = {0, 0, 0};
    Act act;
    act.calls.push_back({Collective::all_reduce, Algorithm::ring, Type::float32, 3000, 0, true});
    out.acts = {act, act};
    return out;
  }
  static Scene with(Scene scene, uint32_t rank, uint64_t at, uint64_t count, int failure) {
    Fault fault;
    fault.kind = Fault::Kind::file;
    fault.rank = rank;
    fault.at = at;
    fault.count = count;
    fault.failure = failure;
    scene.world.faults = {fault};
    return scene;
  }
};

TEST_F(FailingFiles, of_a_meeting_end_it_in_time_with_their_name) {
  size_t failed = 0, met = 0;
  for (uint32_t rank : {0u, 2u})
    for (int failure : {ENOSPC, EACCES, EIO, EMFILE})
      for (uint64_t count : {uint64_t{1}, UINT64_MAX})
        for (uint64_t at = 1;; ++at) {
          Scene one = with(scene(true, false), rank, at, count, failure);
          Played played = play(one);
          ASSERT_EQ(verdict(one, played), "") << describe(one) << "\n" << told(played);
          const Report& report = played.reports[rank];
          if (played.file_requests[rank] < at) {
            for (const Report& each : played.reports) EXPECT_FALSE(each.error()) << told(played);
            break;
          }
          ASSERT_FALSE(report.refused_joining.empty());
          ++(report.joined() ? met : failed);
          // To remove the file is the last thing that is done with it: the meeting does not need
          // it.
          Files::Call first = report.refused_joining[0];
          if (report.joined()) {
            EXPECT_TRUE(first == Files::Call::unlink || first == Files::Call::status)
                << describe(one);
            continue;
          }
          EXPECT_NE(report.error()->message().find(std::strerror(failure)), std::string::npos)
              << report.error()->message();
          EXPECT_LT((report.chapters[0].ended - report.chapters[0].began).seconds(), 2.0);
          EXPECT_TRUE(played.left.empty() || count > 1) << played.left[0];
        }
  EXPECT_GT(failed, 20u);
  EXPECT_GT(met, 4u);
}

TEST_F(FailingFiles, of_a_trace_disturb_nobody) {
  size_t told_of = 0;
  for (uint32_t rank : {0u, 1u})
    for (int failure : {ENOSPC, EIO})
      for (uint64_t count : {uint64_t{1}, UINT64_MAX})
        for (uint64_t at = 1;; ++at) {
          Scene one = with(scene(false, true), rank, at, count, failure);
          Played played = play(one);
          ASSERT_EQ(verdict(one, played), "") << describe(one) << "\n" << told(played);
          for (const Report& each : played.reports) EXPECT_FALSE(each.error()) << told(played);
          if (played.file_requests[rank] < at) break;
          const Recording& recording = played.reports[rank].recording;
          ASSERT_TRUE(recording.error) << at;
          EXPECT_NE(recording.error->message().find(std::strerror(failure)), std::string::npos);
          ++told_of;
        }
  EXPECT_GT(told_of, 40u);
}

TEST_F(FailingFiles, that_are_interrupted_or_moved_in_pieces_are_no_reason_to_fail) {
  for (uint32_t rank = 0; rank < 3; ++rank)
    for (int failure : {EINTR, 0})
      for (uint64_t at = 1; at < 30; ++at) {
        Scene one = with(scene(true, true), rank, at, 3, failure);
        Played played = play(one);
        ASSERT_EQ(verdict(one, played), "") << describe(one) << "\n" << told(played);
        for (const Report& each : played.reports) {
          EXPECT_FALSE(each.error()) << told(played);
          EXPECT_FALSE(each.recording.error) << each.recording.error->message();
        }
      }
}

// Rank 0 dies at every wait of the meeting, also between two requests to its files: the others say
// who did not come, and a group that comes to the same place later is not disturbed by what is
// left.
TEST_F(FailingFiles, of_a_rank_that_died_are_never_taken_for_whole) {
  for (uint64_t wait = 1; wait < 60; ++wait) {
    Scene one = scene(true, true);
    Fault fault;
    fault.kind = Fault::Kind::death;
    fault.rank = 0;
    fault.at = wait;
    one.world.faults = {fault};
    Played played = play(one);
    ASSERT_EQ(verdict(one, played), "") << describe(one) << "\n" << told(played);
  }
}

}  // namespace
}  // namespace weft::runtime
