// Survivors that find each other again: whole groups in one thread under a seed.
//
// WEFT_SIM_SEEDS says how many seeds (300 unless told), WEFT_SIM_SEED runs one of them alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "weft/runtime.h"

namespace weft::runtime {
namespace {

namespace sim = net::sim;
using sim::Fault;

// Less than what is lost by one call to the root that nobody answers.
constexpr Nanos kSettle = Nanos::from_millis(1500);

// Everything that a seed decides: who dies when, and how long each survivor takes to go on.
struct Scene {
  uint32_t ranks = 3;
  std::vector<Nanos> thinks;  // by rank
  sim::Options world;
};

Scene scene_of(uint64_t seed) {
  Rng rng(seed);
  Scene scene;
  scene.ranks = 3 + static_cast<uint32_t>(rng.below(4));
  scene.world.ranks = scene.ranks;
  scene.world.seed = seed;
  scene.world.delay_max = Nanos::from_micros(10 + static_cast<double>(rng.below(5000)));
  Fault death;
  death.kind = Fault::Kind::death;
  death.rank = static_cast<uint32_t>(rng.below(scene.ranks));
  death.at = 60 + rng.below(300);
  scene.world.faults = {death};
  for (uint32_t rank = 0; rank < scene.ranks; ++rank)
    scene.thinks.push_back(Nanos::from_millis(static_cast<double>(rng.below(300))));
  return scene;
}

struct Report {
  bool joined = false;
  std::optional<Error> error;
  uint32_t ranks = 0;  // of the new group
};

Result<void> survive(Group& group, Nanos thinks, net::Network& network, Report& report) {
  std::vector<float> data(1000, 1);
  while (group.all_reduce(data)) continue;
  (*network.reactor())->run_once(thinks);
  WEFT_ASSIGN(auto smaller, group.rebuild(kSettle));
  report.ranks = smaller->ranks();
  std::vector<float> sum(100, 1);
  WEFT_TRY(smaller->all_reduce(sum));
  if (sum[50] != static_cast<float>(smaller->ranks())) return error(Code::corrupt, "wrong sum");
  return smaller->leave();
}

Options options_for(uint32_t rank, const Scene& scene, sim::World& world) {
  Options joining;
  joining.rank = {rank};
  joining.ranks = scene.ranks;
  joining.rendezvous = sim::World::address_of({0}) + ":4000";
  joining.secret = "a secret of the test";
  joining.host = text("host%u", rank);
  joining.probe = false;
  joining.shared_memory = false;
  joining.progress_thread = false;
  joining.network = &world.network_of({rank});
  return joining;
}

void be_rank(uint32_t rank, const Scene& scene, sim::World& world, Report& report) {
  auto recorder = capture::Recorder::off();
  auto group = Group::join(options_for(rank, scene, world), *recorder);
  if (!group) return;
  report.joined = true;
  auto survived = survive(**group, scene.thinks[rank], world.network_of({rank}), report);
  if (!survived) report.error = survived.error();
}

uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* words = std::getenv(name);
  return words == nullptr ? otherwise : std::strtoull(words, nullptr, 10);
}

class SimulatedRebuild : public testing::Test {
 protected:
  // What is refused here is refused on purpose.
  SimulatedRebuild() {
    if (alone_ == 0) log_set_sink([](std::string_view) {});
  }
  ~SimulatedRebuild() override { log_set_sink({}); }

  uint64_t alone_ = from_environment("WEFT_SIM_SEED", 0);
};

TEST_F(SimulatedRebuild, takes_in_every_survivor_under_every_seed) {
  uint64_t first = std::max<uint64_t>(1, alone_);
  uint64_t last = alone_ > 0 ? alone_ : from_environment("WEFT_SIM_SEEDS", 300);
  uint64_t rebuilt = 0;
  for (uint64_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE(text("WEFT_SIM_SEED=%llu", static_cast<unsigned long long>(seed)));
    Scene scene = scene_of(seed);
    scene.world.keep_lines = alone_ > 0;
    sim::World world(scene.world);
    std::vector<Report> reports(scene.ranks);
    std::vector<std::function<void()>> bodies;
    for (uint32_t rank = 0; rank < scene.ranks; ++rank)
      bodies.emplace_back([&, rank] { be_rank(rank, scene, world, reports[rank]); });
    sim::Outcome outcome = world.run(std::move(bodies));
    if (alone_ > 0) std::fputs(world.lines().c_str(), stderr);
    ASSERT_TRUE(outcome.complete) << outcome.report;
    // It may die before there is a group.
    if (!std::all_of(reports.begin(), reports.end(), [](const auto& one) { return one.joined; }))
      continue;
    ++rebuilt;
    for (uint32_t rank = 0; rank < scene.ranks; ++rank) {
      if (outcome.died[rank]) continue;
      EXPECT_FALSE(reports[rank].error)
          << "rank " << rank << ": " << reports[rank].error->message();
      EXPECT_EQ(reports[rank].ranks, scene.ranks - 1) << "rank " << rank;
    }
  }
  EXPECT_GT(rebuilt, (last - first) / 2);
}

// One dies, and while the others meet again another one.
Scene scene_of_two(uint64_t seed) {
  Rng rng(seed);
  Scene scene = scene_of(seed);
  scene.ranks = 5 + static_cast<uint32_t>(rng.below(2));
  scene.world.ranks = scene.ranks;
  scene.thinks.assign(scene.ranks, Nanos{0});
  Fault& first = scene.world.faults.front();
  first.rank = static_cast<uint32_t>(rng.below(scene.ranks));
  Fault second = first;
  second.rank = (first.rank + 1 + static_cast<uint32_t>(rng.below(scene.ranks - 1))) % scene.ranks;
  second.at = first.at + 20 + rng.below(150);
  scene.world.faults.push_back(second);
  return scene;
}

TEST_F(SimulatedRebuild, begins_again_when_another_rank_is_lost_in_it) {
  uint64_t first = std::max<uint64_t>(1, alone_);
  uint64_t last = alone_ > 0 ? alone_ : from_environment("WEFT_SIM_SEEDS", 300) / 4;
  uint64_t struck = 0, whole = 0;
  for (uint64_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE(text("WEFT_SIM_SEED=%llu", static_cast<unsigned long long>(seed)));
    Scene scene = scene_of_two(seed);
    scene.world.keep_lines = alone_ > 0;
    sim::World world(scene.world);
    std::vector<Report> reports(scene.ranks);
    std::vector<std::function<void()>> bodies;
    for (uint32_t rank = 0; rank < scene.ranks; ++rank)
      bodies.emplace_back([&, rank] {
        auto recorder = capture::Recorder::off();
        auto joined = Group::join(options_for(rank, scene, world), *recorder);
        if (!joined) return;
        reports[rank].joined = true;
        auto group = std::move(*joined);
        std::vector<float> data(1000, 1);
        while (group->all_reduce(data)) continue;
        // The second one may die when the new group works.
        for (int again = 0; again < 2; ++again) {
          auto smaller = group->rebuild(kSettle);
          if (!smaller) {
            reports[rank].error = smaller.error();
            return;
          }
          group = std::move(*smaller);
          reports[rank].ranks = group->ranks();
          bool well = true;
          for (int round = 0; well && round < 20; ++round) well = group->all_reduce(data).ok();
          if (well && group->leave()) return;
        }
      });
    sim::Outcome outcome = world.run(std::move(bodies));
    if (alone_ > 0) std::fputs(world.lines().c_str(), stderr);
    ASSERT_TRUE(outcome.complete) << outcome.report;
    if (!std::all_of(reports.begin(), reports.end(), [](const auto& one) { return one.joined; }))
      continue;
    ++struck;
    bool all = true;
    for (uint32_t rank = 0; rank < scene.ranks; ++rank) {
      if (outcome.died[rank]) continue;
      all = all && !reports[rank].error;
      if (!reports[rank].error) continue;
      // Some had been told to go by a leader that told no others: then there are not enough.
      EXPECT_THAT(reports[rank].error->message(), testing::HasSubstr("no new group: "))
          << "rank " << rank;
    }
    whole += all ? 1 : 0;
  }
  EXPECT_GT(struck, (last - first) / 2);
  EXPECT_GE(whole, struck * 9 / 10);
}

// Rank 2 comes and does not wait for the others, who do with two.
TEST_F(SimulatedRebuild, goes_on_when_a_survivor_leaves_again) {
  Scene scene;
  scene.ranks = 4;
  scene.world.ranks = 4;
  Fault death;
  death.kind = Fault::Kind::death;
  death.rank = 3;
  death.at = 300;
  scene.world.faults = {death};
  sim::World world(scene.world);
  std::vector<Result<uint32_t>> left(4, Result<uint32_t>(0u));
  std::vector<std::function<void()>> bodies;
  for (uint32_t rank = 0; rank < 4; ++rank)
    bodies.emplace_back([&, rank] {
      Options joining = options_for(rank, scene, world);
      if (rank == 2) joining.join_deadline = Nanos::from_millis(100);
      auto recorder = capture::Recorder::off();
      left[rank] = [&]() -> Result<uint32_t> {
        WEFT_ASSIGN(auto group, Group::join(joining, *recorder));
        while (group->barrier()) continue;
        // The others come when it has given up.
        if (rank != 2) (*world.network_of({rank}).reactor())->run_once(Nanos::from_seconds(1));
        WEFT_ASSIGN(auto smaller, group->rebuild(Nanos::from_seconds(4), 2));
        WEFT_TRY(smaller->barrier());
        WEFT_TRY(smaller->leave());
        return smaller->ranks();
      }();
    });
  sim::Outcome outcome = world.run(std::move(bodies));
  ASSERT_TRUE(outcome.complete) << outcome.report;
  EXPECT_TRUE(outcome.died[3]);
  for (uint32_t rank : {0u, 1u}) {
    ASSERT_TRUE(left[rank]) << left[rank].error().message();
    EXPECT_EQ(*left[rank], 2u);
  }
  ASSERT_FALSE(left[2]);
  EXPECT_EQ(left[2].error().code(), Code::timeout) << left[2].error().message();
}

}  // namespace
}  // namespace weft::runtime
