// Whole groups in one thread under a seed: random operations on a network that does what networks
// do. Either every rank has the right result, or every survivor knows who is to blame.
//
// WEFT_SIM_SEEDS says how many seeds (1000 unless told), WEFT_SIM_SEED runs one of them alone.
#include <gtest/gtest.h>

#include <cstdlib>

#include "sim_verdict.h"

namespace weft::runtime {
namespace {

using namespace simulated;  // NOLINT(google-build-using-namespace): this module's own

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kSeeds = 100;  // sanitizers watch every switch of stacks
#else
constexpr uint64_t kSeeds = 1000;
#endif

std::optional<uint64_t> from_environment(const char* name) {
  const char* words = std::getenv(name);
  if (words == nullptr) return std::nullopt;
  return std::strtoull(words, nullptr, 10);
}

// What is refused here is refused on purpose.
class Simulation : public testing::Test {
 protected:
  Simulation() {
    if (!from_environment("WEFT_SIM_SEED")) log_set_sink([](std::string_view) {});
  }
  ~Simulation() override { log_set_sink({}); }
};

TEST_F(Simulation, ends_right_or_with_a_culprit_under_every_seed) {
  std::optional<uint64_t> alone = from_environment("WEFT_SIM_SEED");
  uint64_t first = alone.value_or(1);
  uint64_t last = alone.value_or(from_environment("WEFT_SIM_SEEDS").value_or(kSeeds));
  size_t right = 0, failed = 0, rebuilt = 0, wrong = 0;
  for (uint64_t seed = first; seed <= last && wrong < 20; ++seed) {
    Scene scene = scene_of(seed);
    Played played = play(scene, alone.has_value());
    std::string problem = verdict(scene, played);
    if (!problem.empty()) {
      ++wrong;
      ADD_FAILURE() << "WEFT_SIM_SEED=" << seed << ": " << problem << "\n  " << describe(scene);
    }
    if (alone) std::fputs((played.lines + told(played)).c_str(), stderr);
    bool any = std::any_of(played.reports.begin(), played.reports.end(), [](const Report& report) {
      return report.chapters[0].error.has_value();
    });
    ++(any ? failed : right);
    rebuilt += std::any_of(played.reports.begin(), played.reports.end(), [](const Report& report) {
      return report.chapters.size() > 1 && !report.error();
    });
  }
  if (alone) return;
  EXPECT_GT(right, (last - first + 1) / 4);
  EXPECT_GT(failed, (last - first + 1) / 20);
  EXPECT_GT(rebuilt, (last - first + 1) / 50);
}

TEST_F(Simulation, replays_exactly) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    Scene scene = scene_of(seed);
    Played one = play(scene, true), two = play(scene, true);
    EXPECT_EQ(one.course, two.course) << seed;
    EXPECT_EQ(one.lines, two.lines) << seed;
    EXPECT_EQ(one.outcome.took, two.outcome.took) << seed;
  }
}

// The one that is blamed lives, and is the first to come: it takes nobody's place.
TEST_F(Simulation, a_rank_that_ends_the_group_and_comes_back_leaves_nobody_out) {
  for (uint32_t blamed = 1; blamed < 4; ++blamed) {
    Scene scene;
    scene.seed = scene.world.seed = blamed;
    scene.ranks = scene.world.ranks = 4;
    scene.plan.chunk = kib(16);
    Act end;
    end.kind = Act::Kind::abort;
    end.members = {blamed};
    Act meet;  // before that, some are still joining
    meet.calls.push_back({Collective::barrier, Algorithm::direct, Type::int32, 0, 0, false});
    scene.acts = {meet, end};
    for (uint32_t rank = 0; rank < 4; ++rank)
      scene.thinks.push_back(Nanos::from_millis(rank == blamed ? 1 : 50 + 50 * rank));
    Played played = play(scene);
    EXPECT_EQ(verdict(scene, played), "") << told(played);
    for (const Report& report : played.reports) {
      ASSERT_EQ(report.chapters.size(), 2u) << told(played);
      EXPECT_EQ(report.chapters[1].members, (std::vector<uint32_t>{0, 1, 2, 3})) << told(played);
    }
  }
}

// The others are through with their work, and have said that they want to leave. Rank 0 has to tell
// them why the group fails before it goes on to the next one.
TEST_F(Simulation, ranks_that_want_to_leave_hear_why_the_group_ends_instead) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Scene scene;
    scene.seed = scene.world.seed = seed;
    scene.ranks = scene.world.ranks = 4;
    scene.sealed = true;  // records leave in pieces
    scene.world.delay_max = Nanos::from_millis(2);
    scene.world.buffer = 4096u << seed % 8;
    Act work;
    work.kind = Act::Kind::exchange;
    work.steps = 1;
    work.tensors = {2000, 3000, 5000};
    Act end;
    end.kind = Act::Kind::abort;
    end.members = {1 + static_cast<uint32_t>(seed % 3)};
    scene.acts = {work, end};
    for (uint32_t rank = 0; rank < 4; ++rank)
      scene.thinks.push_back(Nanos::from_millis(rank == 0 ? 1 : 100));
    Played played = play(scene);
    EXPECT_EQ(verdict(scene, played), "") << seed << "\n" << told(played);
  }
}

// A branch of the tree of agreement is made by the one below and taken by the one above it: neither
// is to blame for what the other's system refuses.
TEST_F(Simulation, what_a_rank_lacks_for_a_branch_is_its_own_fault) {
  size_t refused = 0;
  for (uint64_t at = 1; at < 60; ++at) {
    for (uint32_t fan_out = 1; fan_out <= 3; ++fan_out) {
      for (uint32_t rank = 1; rank < 5; ++rank) {
        Scene scene;
        scene.seed = scene.world.seed = at;
        scene.ranks = scene.world.ranks = 5;
        scene.fan_out = fan_out;
        scene.plan.chunk = kib(16);
        Act work;
        work.kind = Act::Kind::exchange;
        work.steps = 1;
        work.tensors = {2000, 3000};
        scene.acts = {work};
        scene.thinks.resize(5);
        Fault fault;
        fault.kind = Fault::Kind::refusal;
        fault.rank = rank;
        fault.at = at;
        scene.world.faults = {fault};
        Played played = play(scene);
        EXPECT_EQ(verdict(scene, played), "") << at << " " << describe(scene) << told(played);
        refused += played.refused[rank] ? 1 : 0;
      }
    }
  }
  EXPECT_GT(refused, 300u);
}

// Its receipt is lost with the worker; what followed from it lies in its place when it is sent
// again.
TEST_F(Simulation, chunks_that_had_arrived_when_a_worker_ended_do_no_harm) {
  size_t ended = 0;
  for (uint64_t at = 1; at < 60; ++at) {
    Scene scene;
    scene.seed = scene.world.seed = at;
    scene.ranks = scene.world.ranks = 3;
    scene.plan.lanes = scene.plan.lane_workers = 2;
    scene.plan.chunk = kib(at % 2 == 0 ? 16 : 128);
    Act act;
    act.calls.push_back(
        {Collective::all_reduce, Algorithm::ring, Type::float32, 1u << 17, 0, true});
    scene.acts = {act};
    scene.thinks.resize(3);
    Fault fault;
    fault.kind = Fault::Kind::task_end;
    fault.rank = static_cast<uint32_t>(at % 3);
    fault.at = at;
    scene.world.faults = {fault};
    Played played = play(scene);
    EXPECT_EQ(verdict(scene, played), "") << at << "\n" << told(played);
    ended += played.outcome.took > Nanos::from_seconds(4) ? 1 : 0;
  }
  EXPECT_GT(ended, 20u) << "in how many a worker was missed";
}

// Three ranks of one machine with small rings, and one large sum.
Scene sum_through_memory(uint64_t seed) {
  Scene scene;
  scene.seed = scene.world.seed = seed;
  scene.ranks = scene.world.ranks = 3;
  scene.plan.chunk = kib(seed % 2 == 0 ? 4 : 128);
  scene.world.machines = {0, 0, 0};
  scene.world.ring = 4096u << seed % 6;
  Act act;
  act.calls.push_back({Collective::all_reduce, Algorithm::ring, Type::float32, 1u << 16, 0, true});
  scene.acts = {act, act};
  scene.thinks.resize(3);
  return scene;
}

TEST_F(Simulation, a_greeting_that_leaves_in_pieces_is_finished_before_memory_is_used) {
  for (uint64_t seed = 1; seed < 40; ++seed) {
    Scene scene = sum_through_memory(seed);
    scene.sealed = true;
    Played played = play(scene);
    EXPECT_EQ(verdict(scene, played), "") << seed << "\n" << told(played);
  }
}

TEST_F(Simulation, what_was_in_a_ring_whose_bells_break_is_not_lost) {
  for (uint64_t seed = 1; seed < 120; ++seed) {
    Scene scene = sum_through_memory(seed);
    Fault fault;
    fault.kind = Fault::Kind::reset;
    fault.connection = 2 + seed % 3;  // behind the two to the root
    fault.reverse = seed % 8 >= 4;
    // Behind what opens the lane there are bells only.
    fault.at = (fault.reverse ? 60 : 200) + seed % 40;
    scene.world.faults = {fault};
    Played played = play(scene);
    EXPECT_EQ(verdict(scene, played), "") << seed << "\n" << describe(scene) << told(played);
  }
}

TEST_F(Simulation, death_of_a_rank_reaches_the_others_within_a_second) {
  size_t seen = 0;
  std::optional<uint64_t> alone = from_environment("WEFT_SIM_SEED");
  for (uint64_t seed = alone.value_or(1); seed <= alone.value_or(300); ++seed) {
    Scene scene = scene_of(seed);
    Rng rng(seed);
    Fault fault;
    fault.kind = Fault::Kind::death;
    fault.rank = static_cast<uint32_t>(rng.below(scene.ranks));
    fault.at = 20 + rng.below(200);
    scene.world.faults = {fault};
    scene.dooms.clear();
    std::erase_if(scene.acts, [](const Act& act) {
      return act.kind == Act::Kind::abort || act.kind == Act::Kind::quit;
    });
    Played played = play(scene, alone.has_value());
    if (alone) std::fputs(played.lines.c_str(), stderr);
    EXPECT_EQ(verdict(scene, played), "") << "WEFT_SIM_SEED=" << seed << "\n  " << describe(scene);
    for (uint32_t rank = 0; rank < scene.ranks; ++rank) {
      const Report& report = played.reports[rank];
      const Chapter& chapter = report.chapters[0];
      if (!played.died[fault.rank] || rank == fault.rank || !report.joined() || !chapter.error)
        continue;
      ++seen;
      EXPECT_LE((chapter.ended - *played.died[fault.rank]).seconds(), 1.0)
          << seed << " rank " << rank << ": " << chapter.error->message();
    }
  }
  EXPECT_TRUE(alone || seen > 100) << seen;
}

}  // namespace
}  // namespace weft::runtime
