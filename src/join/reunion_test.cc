// Those that are left of a group, whichever they are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "meeting.h"
#include "testing.h"

namespace weft::join {
namespace {

using testing::HasSubstr;

// A group that was: every rank has its listener still.
struct Old {
  explicit Old(uint32_t ranks) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      auto listener = net::kernel_network().listen("127.0.0.1", 0);
      WEFT_CHECK(listener.ok());
      listeners.push_back(std::move(*listener));
      members.push_back(
          {rank, text("host%u", rank), rank, "127.0.0.1", listeners.back()->local_port()});
    }
  }
  ReunionOptions options_of(uint32_t rank) const {
    ReunionOptions options;
    options.rank = {rank};
    options.ranks = static_cast<uint32_t>(members.size());
    options.members = members;
    options.listener = listeners[rank];
    options.secret = kSecret;
    options.host = members[rank].host;
    options.agreement = "the second";
    options.lanes = 2;
    options.shared_memory = false;
    options.settle = Nanos::from_millis(300);
    options.deadline = Nanos::from_seconds(5);
    return options;
  }
  // Those that come, each in a thread, `delay_ms` one after the other.
  std::vector<Result<Mesh>> meet(const std::vector<uint32_t>& ranks, int delay_ms = 0,
                                 const std::function<void(ReunionOptions&)>& change = {}) const {
    std::vector<std::optional<Result<Mesh>>> outcomes(ranks.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < ranks.size(); ++i)
      threads.emplace_back([&, i] {
        pause_ms(static_cast<int>(i) * delay_ms);
        ReunionOptions options = options_of(ranks[i]);
        if (change) change(options);
        outcomes[i] = meet_again(options);
      });
    for (std::thread& thread : threads) thread.join();
    std::vector<Result<Mesh>> out;
    for (auto& outcome : outcomes) out.push_back(std::move(*outcome));
    return out;
  }
  std::vector<std::shared_ptr<net::Socket>> listeners;
  std::vector<Member> members;
};

void expect_one_group(std::vector<Result<Mesh>>& meshes) {
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  for (uint32_t rank = 0; rank < meshes.size(); ++rank) {
    EXPECT_EQ(meshes[rank]->rank.index, rank) << "the order of the old group";
    EXPECT_EQ(meshes[rank]->ranks, meshes.size());
  }
  if (meshes.size() > 1) expect_data_flows(meshes);
}

TEST(Reunion, takes_in_all_that_come_whichever_are_lost) {
  for (const std::vector<uint32_t>& left : std::vector<std::vector<uint32_t>>{
           {0, 1, 2}, {1, 2, 3}, {2, 3, 4}, {0, 2, 4}, {1, 2, 3, 4}}) {
    Old old(5);
    auto meshes = old.meet(left);
    expect_one_group(meshes);
  }
}

TEST(Reunion, does_not_wait_when_all_but_the_lost_one_are_here) {
  Old old(4);
  Nanos began = monotonic_clock().now();
  auto meshes = old.meet({0, 1, 3}, 0, [](ReunionOptions& options) {
    options.lost = Rank{2};
    options.settle = Nanos::from_seconds(4);
  });
  expect_one_group(meshes);
  EXPECT_LT(monotonic_clock().now() - began, Nanos::from_seconds(3));
}

// A rank that was stopped and goes on, while one of those that blame it is not there yet.
TEST(Reunion, leaves_nobody_out_for_the_lost_one_that_comes_after_all) {
  Old old(4);
  auto meshes = old.meet({0, 1, 2, 3}, 0, [](ReunionOptions& options) {
    options.settle = Nanos::from_seconds(3);
    if (options.rank.index != 1) options.lost = Rank{1};
    if (options.rank.index == 3) pause_ms(300);
  });
  expect_one_group(meshes);
}

// Rank 5 calls, perhaps says where it is, and stops. It is given up, and nobody else with it.
TEST(Reunion, goes_on_without_one_that_called_and_fell_silent) {
  for (bool registers : {true, false}) {
    SCOPED_TRACE(registers);
    Old old(6);
    std::atomic<bool> over{false};
    std::thread silent([&] {
      net::Network& network = net::kernel_network();
      auto reactor = network.reactor();
      Hello hello = hello_of(5, 6, Purpose::control, "");
      hello.agreement = "the second";
      hello.lanes = 2;
      uint64_t attempts = 0;
      Dial dial(network, **reactor, "127.0.0.1", old.members[0].port, kSecret, hello, attempts);
      while (!dial.done() && !over) {
        dial.tick(network.clock().now());
        (*reactor)->run_once(Nanos::from_millis(5));
      }
      if (over) return;
      ControlChannel channel(**reactor, dial.take(), Rank{0});
      Packer where;
      pack_place(where, "host5", old.members[5], "");
      if (registers) channel.send(Control::register_, where);
      while (!over) pause_ms(5);
    });
    auto meshes = old.meet({0, 1, 2, 3, 4}, 0, [](ReunionOptions& options) {
      options.deadline = Nanos::from_seconds(8);
    });
    over = true;
    silent.join();
    expect_one_group(meshes);
  }
}

// Rank 0 lets all others in, and stops: the next one leads.
TEST(Reunion, goes_on_without_a_leader_that_fell_silent) {
  Old old(5);
  std::atomic<bool> over{false};
  std::thread silent([&] {
    net::Network& network = net::kernel_network();
    auto reactor = network.reactor();
    Identity self;
    self.control = 0;
    std::vector<std::unique_ptr<net::Socket>> let_in;
    Acceptor acceptor(network, **reactor, old.listeners[0], kSecret, self,
                      [&](std::unique_ptr<net::Socket>& socket, const Hello&) -> Result<void> {
                        let_in.push_back(std::move(socket));
                        return {};
                      });
    while (let_in.size() < 4 && !over) (*reactor)->run_once(Nanos::from_millis(5));
    while (!over) pause_ms(5);
  });
  auto meshes = old.meet(
      {1, 2, 3, 4}, 0, [](ReunionOptions& options) { options.deadline = Nanos::from_seconds(15); });
  over = true;
  silent.join();
  expect_one_group(meshes);
}

// Rank 0 is of another epoch: it answers everyone who calls, and hangs up.
TEST(Reunion, goes_on_without_one_that_lets_nobody_in) {
  Old old(4);
  std::atomic<bool> over{false};
  std::thread other([&] {
    net::Network& network = net::kernel_network();
    auto reactor = network.reactor();
    Identity self;
    self.control = 0;
    Acceptor acceptor(network, **reactor, old.listeners[0], kSecret, self,
                      [](std::unique_ptr<net::Socket>&, const Hello&) -> Result<void> {
                        return error(Code::invalid_argument, "it belongs to another group");
                      });
    while (!over) (*reactor)->run_once(Nanos::from_millis(5));
  });
  auto meshes = old.meet({1, 2, 3});
  over = true;
  other.join();
  expect_one_group(meshes);
}

TEST(Reunion, of_those_that_come_one_after_the_other_is_one_group) {
  for (bool downwards : {false, true}) {
    Old old(4);
    std::vector<uint32_t> order = {0, 1, 2, 3};
    if (downwards) std::reverse(order.begin(), order.end());
    auto meshes = old.meet(order, 60);
    if (downwards) std::reverse(meshes.begin(), meshes.end());
    expect_one_group(meshes);
  }
}

TEST(Reunion, of_a_minority_is_refused_with_the_reason) {
  Old old(4);
  auto meshes = old.meet(
      {1, 3}, 0, [](ReunionOptions& options) { options.deadline = Nanos::from_seconds(1); });
  for (auto& mesh : meshes) {
    ASSERT_FALSE(mesh);
    EXPECT_THAT(mesh.error().message(), HasSubstr("3 are needed so that there is only one"));
  }
}

TEST(Reunion, of_fewer_is_possible_where_the_caller_says_so) {
  Old old(4);
  auto meshes = old.meet({3}, 0, [](ReunionOptions& options) { options.least = 1; });
  ASSERT_TRUE(meshes[0]) << meshes[0].error().message();
  EXPECT_EQ(meshes[0]->ranks, 1u);
}

TEST(Reunion, of_two_parts_that_do_not_hear_each_other_is_at_most_one_group) {
  // Ranks 0 and 1 call where nobody is, as after a partition.
  Old old(5);
  auto meshes = old.meet({0, 1, 2, 3, 4}, 0, [](ReunionOptions& options) {
    options.deadline = Nanos::from_seconds(2);
    bool one_side = options.rank.index < 2;
    for (Member& member : options.members)
      if ((member.rank < 2) != one_side) member.port = 1;
  });
  EXPECT_FALSE(meshes[0]);
  EXPECT_FALSE(meshes[1]);
  for (uint32_t rank : {2u, 3u, 4u}) {
    ASSERT_TRUE(meshes[rank]) << meshes[rank].error().message();
    EXPECT_EQ(meshes[rank]->ranks, 3u);
  }
}

}  // namespace
}  // namespace weft::join
