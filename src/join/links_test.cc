// Lanes that are opened when they are needed, and the ways to meet at first.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "testing.h"
#include "weft/join.h"
#include "weft_testing/chunks.h"

namespace weft::join {
namespace {

using lane::End;
using lane::noise;
using testing::HasSubstr;
using Role = lane::Lane::Role;

// A chunk goes over the lane that `from` opened to `to`, and arrives.
void expect_chunk_passes(LinkedGroup& group, LinkedGroup::Line& opened, LinkedGroup::Line& accepted,
                         uint32_t from, uint32_t to) {
  End out(Role::out, *group.meshes[from]->reactor, std::move(opened.socket),
          std::move(opened.shared));
  End in(Role::in, *group.meshes[to]->reactor, std::move(accepted.socket),
         std::move(accepted.shared));
  out.handler.queue(1, 0, {noise(100000, from)});
  ASSERT_TRUE(group.turn_until([&] {
    out.send_all();
    return in.handler.arrived_.size() == 1;
  }));
  EXPECT_EQ(in.handler.arrived_[0].payload, noise(100000, from));
}

TEST(Links, open_lanes_to_any_rank_and_from_any_rank) {
  auto meshes = join_all(3, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  LinkedGroup group(meshes);
  for (uint32_t from = 0; from < 3; ++from)
    for (uint32_t to = 0; to < 3; ++to)
      for (uint16_t lane = 0; lane < 4 && to != from; ++lane)
        group.sides[from].links->open({to}, lane);
  ASSERT_TRUE(group.turn_until([&] {
    return std::all_of(group.sides.begin(), group.sides.end(), [](const auto& side) {
      return side.opened.size() == 8 && side.accepted.size() == 8;
    });
  }));
  size_t pairs = 0;
  for (uint32_t from = 0; from < 3; ++from)
    for (auto& opened : group.sides[from].opened)
      for (auto& accepted : group.sides[opened.peer.index].accepted)
        if (accepted.peer.index == from && accepted.lane == opened.lane) {
          EXPECT_FALSE(opened.shared || accepted.shared);
          expect_chunk_passes(group, opened, accepted, from, opened.peer.index);
          ++pairs;
        }
  EXPECT_EQ(pairs, 24u);
}

TEST(Links, share_memory_between_ranks_of_one_host_only) {
  auto meshes = join_all(3, free_port(), [](Options& options) { options.shared_memory = true; });
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  // options_for() puts ranks 0 and 1 on one host and rank 2 on another.
  EXPECT_TRUE(meshes[0]->members[1].shares_memory);
  EXPECT_FALSE(meshes[0]->members[0].shares_memory);
  EXPECT_FALSE(meshes[0]->members[2].shares_memory);
  EXPECT_TRUE(meshes[1]->members[0].shares_memory);
  LinkedGroup group(meshes);
  group.sides[0].links->open({1}, 0);
  group.sides[0].links->open({2}, 0);
  ASSERT_TRUE(group.turn_until([&] {
    return group.sides[0].opened.size() == 2 && group.sides[1].accepted.size() == 1 &&
           group.sides[2].accepted.size() == 1;
  }));
  auto& first = group.sides[0].opened[0];
  auto& near = first.peer.index == 1 ? first : group.sides[0].opened[1];
  auto& far = first.peer.index == 1 ? group.sides[0].opened[1] : first;
  ASSERT_TRUE(near.shared && group.sides[1].accepted[0].shared);
  EXPECT_FALSE(far.shared || group.sides[2].accepted[0].shared);
  std::string name = lane::shm::name_of(*near.shared);
  expect_chunk_passes(group, near, group.sides[1].accepted[0], 0, 1);
  expect_chunk_passes(group, far, group.sides[2].accepted[0], 0, 2);
  struct stat facts {};
  EXPECT_NE(::stat(("/dev/shm" + name).c_str(), &facts), 0) << name << " was left behind";
}

TEST(Links, fall_back_to_the_connection_when_the_memory_is_gone) {
  auto meshes = join_all(2, free_port(), [](Options& options) { options.shared_memory = true; });
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  LinkedGroup group(meshes);
  std::atomic<bool> done = false;
  std::thread stranger([&] {
    Hello hello = lane_hello(*meshes[0], 1, 5, 0);
    for (const char* name : {"/weft-lane-000000000000000000000000", "/etc/passwd", "weft"}) {
      hello.shared = name;
      ++hello.attempt;
      Fd fd = connect_to(meshes[0]->members[0].port);
      EXPECT_TRUE(prove(fd.get(), kSecret, hello));
    }
    done = true;
  });
  EXPECT_TRUE(group.turn_until([&] { return done.load() && group.sides[0].accepted.size() == 3; }));
  stranger.join();
  for (auto& line : group.sides[0].accepted) {
    EXPECT_EQ(line.lane, 5);
    EXPECT_FALSE(line.shared);
  }
}

TEST(Links, open_branches_that_carry_frames_both_ways) {
  auto meshes = join_all(3, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  LinkedGroup group(meshes);
  group.sides[2].links->open_branch({1});
  ASSERT_TRUE(group.turn_until(
      [&] { return group.sides[1].branches.contains(2) && group.sides[2].branches.contains(1); }));
  ControlChannel lower(*meshes[1]->reactor, std::move(group.sides[1].branches[2]), Rank{2});
  ControlChannel upper(*meshes[2]->reactor, std::move(group.sides[2].branches[1]), Rank{1});
  lower.send(Control::start, Packer().number(uint64_t{7}));
  upper.send(Control::ready, Packer().number(uint32_t{5}));
  std::optional<Frame> down, up;
  ASSERT_TRUE(group.turn_until([&] {
    if (!down) down = upper.receive();
    if (!up) up = lower.receive();
    return down && up;
  }));
  EXPECT_EQ(down->type, Control::start);
  EXPECT_EQ(Unpacker(down->payload).number<uint64_t>(), 7u);
  EXPECT_EQ(up->type, Control::ready);
  EXPECT_EQ(Unpacker(up->payload).number<uint32_t>(), 5u);
  EXPECT_TRUE(group.sides[0].branches.empty());
}

TEST(Links, refuse_lanes_of_another_group_and_of_ranks_that_are_not) {
  LogLines log;
  auto meshes = join_all(2, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  LinkedGroup group(meshes);
  std::atomic<bool> done = false;
  std::thread strangers([&] {
    Hello hello = lane_hello(*meshes[0], 1, 0, 1);
    hello.agreement = "the group before";
    auto refused = [&] {
      Fd fd = connect_to(meshes[0]->members[0].port);
      EXPECT_TRUE(prove(fd.get(), kSecret, hello));
      EXPECT_TRUE(is_closed_by_peer(fd.get()));
    };
    refused();
    hello.agreement = "the same";
    for (uint32_t rank : {0u, 2u, 0xffffffffu}) {
      hello.rank = rank;
      refused();
    }
    hello.rank = 1;
    hello.purpose = Purpose::control;
    refused();
    hello.purpose = Purpose::branch;
    hello.agreement = "the group before";
    refused();
    done = true;
  });
  EXPECT_TRUE(group.turn_until([&] { return done.load(); }));
  strangers.join();
  EXPECT_TRUE(group.sides[0].accepted.empty());
  EXPECT_TRUE(group.sides[0].branches.empty());
  EXPECT_EQ(meshes[0]->acceptor->refused(), 6u);
  EXPECT_EQ(log.count("it belongs to another group"), 2u) << log.all();
  EXPECT_EQ(log.count("it is not one of the other ranks"), 3u) << log.all();
  EXPECT_EQ(log.count("the group is complete"), 1u) << log.all();
}

TEST(Links, open_a_lane_again_after_it_was_cut) {
  auto meshes = join_all(2, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  LinkedGroup group(meshes);
  for (int round = 0; round < 3; ++round) {
    group.sides[1].links->open({0}, 3);
    ASSERT_TRUE(group.turn_until(
        [&] { return group.sides[1].opened.size() == 1 && group.sides[0].accepted.size() == 1; }));
    EXPECT_EQ(group.sides[0].accepted[0].lane, 3);
    expect_chunk_passes(group, group.sides[1].opened[0], group.sides[0].accepted[0], 1, 0);
    group.sides[1].opened.clear();
    group.sides[0].accepted.clear();
  }
}

TEST(Links, keep_trying_until_told_to_stop_and_say_why) {
  auto meshes = join_all(2, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  std::string address = text("127.0.0.1:%u", unsigned{meshes[1]->members[1].port});
  Mesh& mesh = *meshes[0];
  meshes[1] = error(Code::cancelled, "left");
  size_t opened = 0;
  Links::Callbacks callbacks;
  callbacks.opened = [&](Rank, uint16_t, auto, auto) { ++opened; };
  Links links(mesh, std::move(callbacks));
  EXPECT_EQ(links.attempts({1}).problem, "");
  links.open({1}, 0);
  ASSERT_TRUE(turn_until(*mesh.reactor, [&] {
    links.tick(monotonic_clock().now());
    return !links.attempts({1}).problem.empty();
  }));
  Links::Attempts attempts = links.attempts({1});
  EXPECT_EQ(attempts.problem, "cannot connect to " + address + ": Connection refused");
  EXPECT_TRUE(attempts.refused);
  EXPECT_FALSE(attempts.own);
  EXPECT_FALSE(attempts.waiting);
  links.close({1}, 0);
  EXPECT_EQ(links.attempts({1}).problem, "");
  EXPECT_EQ(opened, 0u);
}

TEST(Links, take_lanes_that_came_before_them) {
  auto meshes = join_all(2, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  // Rank 1 is ready for work, rank 0 is still on its way out of meet().
  size_t opened = 0;
  {
    Links::Callbacks callbacks;
    callbacks.opened = [&](Rank, uint16_t, auto socket, auto) {
      EXPECT_TRUE(socket);
      ++opened;
    };
    Links fast(*meshes[1], std::move(callbacks));
    fast.open({0}, 0);
    fast.open({0}, 1);
    ASSERT_TRUE(turn_until(*meshes[1]->reactor, [&] {
      meshes[0]->reactor->run_once(Nanos{0});
      fast.tick(monotonic_clock().now());
      return opened == 2;
    }));
  }
  EXPECT_EQ(meshes[0]->acceptor->refused(), 0u);
  LinkedGroup group(meshes);
  ASSERT_EQ(group.sides[0].accepted.size(), 2u);
  EXPECT_EQ(group.sides[0].accepted[0].peer.index, 1u);
}

TEST(Links, pass_on_those_who_ask_how_it_goes) {
  auto meshes = join_all(2, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  LinkedGroup group(meshes);
  Fd visitor;
  std::thread asking([&] {
    Hello hello;
    hello.purpose = Purpose::status;
    visitor = connect_to(meshes[0]->members[0].port);
    EXPECT_TRUE(prove(visitor.get(), kSecret, hello));
  });
  EXPECT_TRUE(group.turn_until([&] { return group.sides[0].asked != nullptr; }));
  asking.join();
  std::byte word{42};
  iovec part{&word, 1};
  EXPECT_EQ(group.sides[0].asked->send(&part, 1), 1);
  std::byte heard{};
  EXPECT_EQ(::recv(visitor.get(), &heard, 1, 0), 1);
  EXPECT_EQ(heard, word);
}

// ---- where to meet -----------------------------------------------------------------------

bool has_ipv6() {
  auto listener = net::kernel_network().listen("::1", 0);
  return listener.ok();
}

TEST(Rendezvous, over_ipv6) {
  if (!has_ipv6()) GTEST_SKIP() << "this machine has no IPv6";
  uint16_t port = free_port();
  auto meshes = join_all(
      3, port, [&](Options& options) { options.rendezvous = text("[::1]:%u", unsigned{port}); });
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  for (auto& mesh : meshes)
    for (const Member& member : mesh->members) EXPECT_EQ(member.address, "::1");
  LinkedGroup group(meshes);
  group.sides[2].links->open({1}, 0);
  ASSERT_TRUE(group.turn_until(
      [&] { return group.sides[2].opened.size() == 1 && group.sides[1].accepted.size() == 1; }));
  expect_chunk_passes(group, group.sides[2].opened[0], group.sides[1].accepted[0], 2, 1);
}

TEST(Rendezvous, the_interface_can_be_chosen_and_a_wrong_one_is_named_with_the_others) {
  auto meshes = join_all(2, free_port(), [](Options& options) { options.interface = "lo"; });
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  EXPECT_EQ(meshes[0]->members[1].address, "127.0.0.1");
  meshes = join_all(2, free_port(), [](Options& options) {
    if (options.rank.index == 1) options.interface = "nosuch0";
  });
  ASSERT_FALSE(meshes[1]);
  EXPECT_EQ(meshes[1].error().code(), Code::not_found);
  EXPECT_THAT(
      meshes[1].error().message(),
      HasSubstr("no interface \"nosuch0\" with an address that reaches 127.0.0.1; there are "));
  EXPECT_THAT(meshes[1].error().message(), HasSubstr("lo"));
  ASSERT_FALSE(meshes[0]);
  EXPECT_THAT(meshes[0].error().message(), HasSubstr("rank 1 left while the group was forming"));
}

}  // namespace
}  // namespace weft::join
