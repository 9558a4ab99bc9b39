// The simulated network itself, and joining on it under many seeds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <cerrno>

#include "weft/join.h"
#include "weft_testing/chunks.h"

namespace weft::join {
namespace {

using net::sim::Fault;
using net::sim::World;
using testing::AnyOf;
using testing::HasSubstr;

constexpr uint16_t kPort = 4000;

Options join_options(World& world, uint32_t rank, uint32_t ranks) {
  Options options;
  options.rank = {rank};
  options.ranks = ranks;
  options.rendezvous = World::address_of({0}) + ":" + std::to_string(kPort);
  options.secret = "a secret of the test";
  options.host = text("host%u", rank);
  options.agreement = "the same";
  options.probe = false;
  options.network = &world.network_of({rank});
  return options;
}

struct Joined {
  net::sim::Outcome outcome;
  std::vector<std::optional<Error>> errors;  // by rank; none: it joined
  uint64_t course = 0;
  std::string lines;
};

// Everyone joins, and opens a lane to everyone else.
Joined join_all(const net::sim::Options& options, bool with_lanes = true) {
  World world(options);
  uint32_t ranks = options.ranks;
  Joined joined;
  joined.errors.resize(ranks);
  std::vector<std::function<void()>> bodies;
  std::vector<size_t> opened(ranks, 0), accepted(ranks, 0);
  for (uint32_t rank = 0; rank < ranks; ++rank)
    bodies.emplace_back([&, rank] {
      auto mesh = meet(join_options(world, rank, ranks));
      if (!mesh) {
        joined.errors[rank] = mesh.error();
        return;
      }
      if (!with_lanes) return;
      std::vector<std::unique_ptr<net::Socket>> sockets;
      Links::Callbacks callbacks;
      callbacks.opened = [&](Rank, uint16_t, auto socket, auto) {
        sockets.push_back(std::move(socket));
        ++opened[rank];
      };
      callbacks.accepted = [&](Rank, uint16_t, auto socket, auto) {
        sockets.push_back(std::move(socket));
        ++accepted[rank];
      };
      Links links(*mesh, std::move(callbacks));
      for (uint32_t other = 0; other < ranks; ++other)
        if (other != rank) links.open({other}, 0);
      while (opened[rank] < ranks - 1 || accepted[rank] < ranks - 1) {
        mesh->reactor->run_once(Nanos::from_millis(5));
        links.tick(world.network_of({rank}).clock().now());
      }
      // The others may still be in the last words of a handshake with us.
      Nanos until = world.network_of({rank}).clock().now() + Nanos::from_seconds(1);
      while (world.network_of({rank}).clock().now() < until)
        mesh->reactor->run_once(Nanos::from_millis(100));
    });
  joined.outcome = world.run(std::move(bodies));
  joined.course = world.course();
  joined.lines = world.lines();
  return joined;
}

// What is refused here is refused on purpose.
class Simulated : public testing::Test {
 protected:
  Simulated() {
    log_set_sink([](std::string_view) {});
  }
  ~Simulated() override { log_set_sink({}); }
};

net::sim::Options world_of(uint32_t ranks, uint64_t seed) {
  net::sim::Options options;
  options.ranks = ranks;
  options.seed = seed;
  return options;
}

TEST_F(Simulated, joins_groups_of_every_size_under_200_seeds) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(text("seed %llu", static_cast<unsigned long long>(seed)));
    auto joined = join_all(world_of(2 + static_cast<uint32_t>(seed % 4), seed));
    ASSERT_TRUE(joined.outcome.complete) << joined.outcome.report;
    for (auto& error : joined.errors) ASSERT_FALSE(error) << error->message();
    EXPECT_LT(joined.outcome.took.seconds(), 3);
  }
}

TEST_F(Simulated, the_same_seed_gives_the_same_course_and_another_seed_another) {
  auto run = [](uint64_t seed) {
    net::sim::Options options = world_of(4, seed);
    options.keep_lines = true;
    Rng rng(seed);
    for (int i = 0; i < 2; ++i)
      options.faults.push_back(net::sim::random_fault(rng, 4, Nanos::from_millis(20), 12, 400));
    return join_all(options, false);
  };
  std::vector<uint64_t> courses;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Joined first = run(seed), second = run(seed);
    EXPECT_EQ(first.course, second.course) << seed;
    EXPECT_EQ(first.lines, second.lines) << seed;
    EXPECT_FALSE(first.lines.empty());
    courses.push_back(first.course);
  }
  std::sort(courses.begin(), courses.end());
  EXPECT_EQ(std::unique(courses.begin(), courses.end()), courses.end());
}

TEST_F(Simulated, a_rank_that_dies_while_joining_is_named_by_the_others) {
  size_t named = 0;
  for (Fault::Kind kind : {Fault::Kind::death, Fault::Kind::power_loss})
    for (uint64_t round = 0; round < 60; ++round) {
      uint64_t wait = 1 + round % 12;
      SCOPED_TRACE(
          text("%d at wait %llu", static_cast<int>(kind), static_cast<unsigned long long>(wait)));
      net::sim::Options options = world_of(4, round);
      Fault fault;
      fault.kind = kind;
      fault.rank = 2;
      fault.at = wait;
      options.faults = {fault};
      auto joined = join_all(options, false);
      ASSERT_TRUE(joined.outcome.complete) << joined.outcome.report;
      EXPECT_LT(joined.outcome.took.seconds(), 33);
      if (!joined.outcome.died[2]) continue;  // it was through before
      ASSERT_TRUE(joined.errors[2]);
      // Rank 0 may have seen it complete, a moment before its end.
      for (uint32_t rank : {0u, 1u, 3u}) {
        if (!joined.errors[rank]) continue;
        EXPECT_THAT(joined.errors[rank]->message(), HasSubstr("rank 2")) << rank;
        ++named;
      }
      EXPECT_EQ(joined.errors[0].has_value(), joined.errors[1].has_value());
      EXPECT_EQ(joined.errors[0].has_value(), joined.errors[3].has_value());
    }
  EXPECT_GT(named, 30u);
}

TEST_F(Simulated, a_partition_ends_joining_at_its_deadline_and_a_short_one_does_not) {
  for (bool for_ever : {true, false}) {
    net::sim::Options options = world_of(3, 7);
    Fault fault;
    fault.kind = Fault::Kind::partition;
    fault.rank = 0;
    fault.other = 2;
    fault.until = for_ever ? net::sim::kForever : Nanos::from_seconds(9);
    options.faults = {fault};
    auto joined = join_all(options, false);
    ASSERT_TRUE(joined.outcome.complete) << joined.outcome.report;
    if (!for_ever) {
      for (auto& error : joined.errors) EXPECT_FALSE(error) << error->message();
      EXPECT_GT(joined.outcome.took.seconds(), 9);
      continue;
    }
    for (auto& error : joined.errors) {
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code(), Code::timeout);
    }
    EXPECT_THAT(joined.errors[0]->message(), HasSubstr("rank 2 did not come"));
    EXPECT_THAT(joined.errors[1]->message(),
                AnyOf(HasSubstr("rank 2 did not come"), HasSubstr("other ranks did not come")));
    EXPECT_THAT(
        joined.errors[2]->message(),
        HasSubstr("rank 0 at 10.0.0.1:4000 was not reached: 10.0.0.1:4000 does not answer"));
    EXPECT_LT(joined.outcome.took.seconds(), 33);
  }
}

TEST_F(Simulated, joining_survives_what_a_network_does_or_ends_in_time_for_everyone) {
  size_t complete = 0, failed = 0;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(text("seed %llu", static_cast<unsigned long long>(seed)));
    auto ranks = 2 + static_cast<uint32_t>(seed % 4);
    net::sim::Options options = world_of(ranks, seed);
    Rng rng(seed);
    options.faults = {net::sim::random_fault(rng, ranks, Nanos::from_millis(20), ranks, 600)};
    SCOPED_TRACE(net::sim::to_text(options.faults[0]));
    auto joined = join_all(options, false);
    ASSERT_TRUE(joined.outcome.complete) << joined.outcome.report;
    EXPECT_LT(joined.outcome.took.seconds(), 50);
    for (auto& error : joined.errors) ++(error ? failed : complete);
  }
  EXPECT_GT(complete, 100u);
  EXPECT_GT(failed, 50u);
}

}  // namespace
}  // namespace weft::join
