// The simulated network: the same course under the same seed, and bytes that arrive in order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <cerrno>

#include "weft/net.h"

namespace weft::net {
namespace {

using sim::World;
using testing::HasSubstr;

constexpr uint16_t kPort = 4000;

std::vector<std::byte> noise(size_t size, uint64_t seed) {
  std::vector<std::byte> out(size);
  Rng rng(seed);
  for (std::byte& b : out) b = std::byte(rng.below(256));
  return out;
}

sim::Options world_of(uint32_t ranks, uint64_t seed) {
  sim::Options options;
  options.ranks = ranks;
  options.seed = seed;
  return options;
}

TEST(Simulated, bytes_of_a_connection_arrive_in_order_however_they_are_cut) {
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
      EXPECT_TRUE(reactor.add(socket, events, &handler));
      while (handler.more) reactor.run_once(Nanos::from_seconds(1));
      reactor.remove(socket);
    };
    auto outcome = world.run({[&] {
                                Network& network = world.network_of({0});
                                auto listener = network.listen(World::address_of({0}), kPort);
                                auto reactor = std::move(network.reactor()).value();
                                std::unique_ptr<Socket> socket;
                                turn_with(*reactor, **listener, EPOLLIN, [&] {
                                  socket = std::move((*listener)->accept()).value();
                                  return socket == nullptr;
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
                                auto reactor = std::move(network.reactor()).value();
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

TEST(Simulated, says_who_waits_when_nobody_can_go_on) {
  World world(world_of(2, 1));
  auto wait_for_ever = [&](uint32_t rank) {
    auto reactor = std::move(world.network_of({rank}).reactor()).value();
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
    auto reactor = std::move(busy.network_of({0}).reactor()).value();
    for (;;) reactor->run_once(Nanos{0});  // ended by force
  }});
  EXPECT_FALSE(outcome.complete);
  EXPECT_THAT(outcome.report, HasSubstr("not finished"));
}

}  // namespace
}  // namespace weft::net
