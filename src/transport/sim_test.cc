// The simulated network itself, and joining on it under many seeds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <cerrno>

#include "chunk_testing.h"
#include "weft/transport.h"

namespace weft::transport {
namespace {

using sim::Fault;
using sim::World;
using testing::AnyOf;
using testing::HasSubstr;

constexpr uint16_t kPort = 4000;

JoinOptions join_options(World& world, uint32_t rank, uint32_t ranks) {
  JoinOptions options;
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
  sim::Outcome outcome;
  std::vector<std::optional<Error>> errors;  // by rank; none: it joined
  uint64_t course = 0;
  std::string lines;
};

// Everyone joins, and opens a lane to everyone else.
Joined join_all(const sim::Options& options, bool with_lanes = true) {
  World world(options);
  uint32_t ranks = options.ranks;
  Joined joined;
  joined.errors.resize(ranks);
  std::vector<std::function<void()>> bodies;
  std::vector<size_t> opened(ranks, 0), accepted(ranks, 0);
  for (uint32_t rank = 0; rank < ranks; ++rank)
    bodies.emplace_back([&, rank] {
      auto mesh = join(join_options(world, rank, ranks));
      if (!mesh) {
        joined.errors[rank] = mesh.error();
        return;
      }
      if (!with_lanes) return;
      std::vector<std::unique_ptr<Socket>> sockets;
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

sim::Options world_of(uint32_t ranks, uint64_t seed) {
  sim::Options options;
  options.ranks = ranks;
  options.seed = seed;
  return options;
}

TEST_F(Simulated, bytes_of_a_connection_arrive_in_order_however_they_are_cut) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    World world(world_of(2, seed));
    std::vector<std::byte> message = noise(1u << 20, seed);
    std::vector<std::byte> heard;
    size_t pieces = 0;
    auto turn_with = [](Reactor& reactor, Socket& socket, uint32_t events, auto step) {
      struct Step final : Reactor::Handler {
        explicit Step(decltype(step)& given) : body(given) {}
        void on_events(uint32_t) override { more = body(); }
        decltype(step)& body;
        bool more = true;
      } handler(step);
      reactor.add(socket, events, &handler);
      while (handler.more) reactor.run_once(Nanos::from_seconds(1));
      reactor.remove(socket);
    };
    auto outcome = world.run({[&] {
                                Network& network = world.network_of({0});
                                auto listener = network.listen(World::address_of({0}), kPort);
                                auto reactor = network.reactor();
                                std::unique_ptr<Socket> socket;
                                turn_with(*reactor, **listener, EPOLLIN, [&] {
                                  return (socket = (*listener)->accept()) == nullptr;
                                });
                                turn_with(*reactor, *socket, EPOLLIN, [&] {
                                  std::array<std::byte, 50000> bytes;
                                  iovec part{bytes.data(), bytes.size()};
                                  ssize_t got = socket->receive(&part, 1);
                                  if (got > 0)
                                    heard.insert(heard.end(), bytes.begin(), bytes.begin() + got);
                                  ++pieces;
                                  return got != 0;
                                });
                              },
                              [&] {
                                Network& network = world.network_of({1});
                                auto reactor = network.reactor();
                                reactor->run_once(Nanos::from_millis(1));
                                auto socket = network.connect(World::address_of({0}), kPort);
                                size_t sent = 0;
                                turn_with(*reactor, **socket, EPOLLOUT, [&] {
                                  iovec part{message.data() + sent, message.size() - sent};
                                  ssize_t put = (*socket)->send(&part, 1);
                                  if (put > 0) sent += static_cast<size_t>(put);
                                  return sent < message.size();
                                });
                              }});
    ASSERT_TRUE(outcome.complete) << outcome.report;
    EXPECT_EQ(heard, message);
    EXPECT_GT(pieces, 20u);
  }
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
    sim::Options options = world_of(4, seed);
    options.keep_lines = true;
    Rng rng(seed);
    for (int i = 0; i < 2; ++i)
      options.faults.push_back(sim::random_fault(rng, 4, Nanos::from_millis(20), 12, 400));
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
      sim::Options options = world_of(4, round);
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
    sim::Options options = world_of(3, 7);
    Fault fault;
    fault.kind = Fault::Kind::partition;
    fault.rank = 0;
    fault.other = 2;
    fault.until = for_ever ? sim::kForever : Nanos::from_seconds(9);
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
    sim::Options options = world_of(ranks, seed);
    Rng rng(seed);
    options.faults = {sim::random_fault(rng, ranks, Nanos::from_millis(20), ranks, 600)};
    SCOPED_TRACE(sim::to_text(options.faults[0]));
    auto joined = join_all(options, false);
    ASSERT_TRUE(joined.outcome.complete) << joined.outcome.report;
    EXPECT_LT(joined.outcome.took.seconds(), 50);
    for (auto& error : joined.errors) ++(error ? failed : complete);
  }
  EXPECT_GT(complete, 100u);
  EXPECT_GT(failed, 50u);
}

TEST_F(Simulated, says_who_waits_when_nobody_can_go_on) {
  World world(world_of(2, 1));
  auto wait_for_ever = [&](uint32_t rank) {
    auto reactor = world.network_of({rank}).reactor();
    // Until the world ends; then it is told at once.
    while (!world.died({rank})) reactor->run_once(sim::kForever);
  };
  auto outcome = world.run({[&] { wait_for_ever(0); }, [&] { wait_for_ever(1); }});
  EXPECT_FALSE(outcome.complete);
  EXPECT_THAT(outcome.report, HasSubstr("everyone waits for ever"));
  EXPECT_THAT(outcome.report, HasSubstr("rank 1 is in its wait 1"));
  sim::Options bounded = world_of(1, 1);
  bounded.steps_max = 1000;
  World busy(bounded);
  outcome = busy.run({[&] {
    auto reactor = busy.network_of({0}).reactor();
    for (;;) reactor->run_once(Nanos{0});  // ended by force
  }});
  EXPECT_FALSE(outcome.complete);
  EXPECT_THAT(outcome.report, HasSubstr("not finished"));
}

}  // namespace
}  // namespace weft::transport
