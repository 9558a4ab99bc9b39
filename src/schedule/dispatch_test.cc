#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "weft/schedule.h"

namespace weft::schedule {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint32_t kLarge = kKeptBytes + 1;

// Lanes that have room for so many chunks more.
struct Lanes {
  Room room(uint32_t peer, uint16_t lane) const {
    auto found = left.find({peer, lane});
    return found != left.end() && found->second > 0 ? kind : Room::none;
  }
  std::map<std::pair<uint32_t, uint16_t>, int> left;
  Room kind = Room::connection;
};

// A turn, as "peer.lane:operation/send"; '!' behind what goes again.
std::vector<std::string> turn(Dispatcher& dispatcher, Lanes& lanes) {
  std::vector<std::string> out;
  dispatcher.begin_turn();
  while (auto next = dispatcher.next([&](uint32_t p, uint16_t l) { return lanes.room(p, l); })) {
    --lanes.left[{next->peer, next->lane}];
    out.push_back(text("%u.%u:%llu/%u%s", next->peer, unsigned{next->lane},
                       static_cast<unsigned long long>(next->chunk.operation), next->chunk.send,
                       next->again ? "!" : ""));
  }
  return out;
}

TEST(Dispatcher, hands_over_the_most_urgent_chunk_first) {
  Dispatcher dispatcher;
  dispatcher.connect(1, 1);
  for (const Chunk& chunk : {Chunk{5, 1, 0, 8}, {5, 0, 9, 8}, {5, 0, 3, 8}, {2, 9, 0, 8}})
    dispatcher.offer(1, chunk);
  Lanes lanes{{{{1, 0}, 10}}};
  EXPECT_THAT(turn(dispatcher, lanes), ElementsAre("1.0:9/0", "1.0:0/3", "1.0:0/9", "1.0:1/0"));
  EXPECT_FALSE(dispatcher.waiting());
}

TEST(Dispatcher, peers_take_turns_by_rank_and_lanes_by_number) {
  Dispatcher dispatcher;
  dispatcher.connect(7, 2);
  dispatcher.connect(2, 2);
  for (uint32_t send = 0; send < 3; ++send)
    for (uint32_t peer : {7u, 2u}) dispatcher.offer(peer, {0, 0, send, 8});
  Lanes lanes{{{{2, 0}, 9}, {{2, 1}, 9}, {{7, 0}, 9}, {{7, 1}, 9}}};
  EXPECT_THAT(turn(dispatcher, lanes),
              ElementsAre("2.0:0/0", "7.0:0/0", "2.1:0/1", "7.1:0/1", "2.0:0/2", "7.0:0/2"));
  // Whose turn it is does not depend on turns: 2 is next, and its lane 1.
  dispatcher.offer(7, {0, 1, 0, 8});
  dispatcher.offer(2, {0, 1, 0, 8});
  EXPECT_THAT(turn(dispatcher, lanes), ElementsAre("2.1:1/0", "7.1:1/0"));
}

TEST(Dispatcher, whose_turn_it_is_does_not_depend_on_when_a_peer_was_connected) {
  for (bool late : {false, true}) {
    Dispatcher dispatcher;
    dispatcher.connect(4, 1);
    if (!late) dispatcher.connect(3, 1), dispatcher.connect(5, 1);
    Lanes lanes{{{{3, 0}, 9}, {{4, 0}, 9}, {{5, 0}, 9}}};
    dispatcher.offer(4, {0, 0, 0, 8});
    EXPECT_THAT(turn(dispatcher, lanes), ElementsAre("4.0:0/0"));
    if (late) dispatcher.connect(3, 1), dispatcher.connect(5, 1);
    for (uint32_t peer : {3u, 4u, 5u}) dispatcher.offer(peer, {0, 1, 0, 8});
    EXPECT_THAT(turn(dispatcher, lanes), ElementsAre("5.0:1/0", "3.0:1/0", "4.0:1/0"));
  }
}

TEST(Dispatcher, lanes_without_room_are_passed_over) {
  Dispatcher dispatcher;
  dispatcher.connect(1, 3);
  dispatcher.connect(2, 1);
  for (uint32_t send = 0; send < 5; ++send)
    for (uint32_t peer : {1u, 2u}) dispatcher.offer(peer, {0, 0, send, 8});
  Lanes lanes{{{{1, 0}, 1}, {{1, 2}, 2}}};
  EXPECT_THAT(turn(dispatcher, lanes), ElementsAre("1.0:0/0", "1.2:0/1", "1.2:0/2"));
  EXPECT_FALSE(dispatcher.cut_short()) << "there was no room";
  EXPECT_TRUE(dispatcher.waiting());
}

TEST(Dispatcher, a_turn_ends_after_four_rounds) {
  Dispatcher dispatcher;
  dispatcher.connect(1, 2);
  dispatcher.connect(2, 1);
  for (uint32_t send = 0; send < 10; ++send)
    for (uint32_t peer : {1u, 2u}) dispatcher.offer(peer, {0, 0, send, 8});
  Lanes lanes{{{{1, 0}, 99}, {{1, 1}, 99}, {{2, 0}, 99}}};
  EXPECT_EQ(turn(dispatcher, lanes).size(), 8u + 4u);
  EXPECT_TRUE(dispatcher.cut_short());
  EXPECT_EQ(turn(dispatcher, lanes).size(), 2u + 4u);
  EXPECT_TRUE(dispatcher.cut_short());
  EXPECT_EQ(turn(dispatcher, lanes).size(), 2u);
  EXPECT_FALSE(dispatcher.cut_short());
}

TEST(Dispatcher, settles_by_size_and_by_what_carries) {
  struct {
    Room room;
    uint32_t bytes;
    bool keep, when_left, when_receipted;
  } cases[] = {
      {Room::connection, kKeptBytes, true, true, false},
      {Room::connection, kLarge, false, false, true},
      {Room::worker, 1, false, false, true},
      {Room::memory, kLarge, false, true, false},
  };
  for (const auto& one : cases) {
    Dispatcher dispatcher;
    dispatcher.connect(0, 1);
    dispatcher.offer(0, {0, 3, 4, one.bytes});
    dispatcher.begin_turn();
    auto next = dispatcher.next([&](uint32_t, uint16_t) { return one.room; });
    ASSERT_TRUE(next);
    EXPECT_EQ(next->keep, one.keep);
    auto left = dispatcher.left(0, 0);
    ASSERT_EQ(left.has_value(), one.when_left);
    EXPECT_TRUE(!left || (left->first && left->chunk.operation == 3 && left->chunk.send == 4));
    if (one.room == Room::memory) continue;
    auto receipted = dispatcher.receipted(0, 0);
    ASSERT_EQ(receipted.has_value(), one.when_receipted);
    EXPECT_TRUE(!receipted || (receipted->first && receipted->ticket == next->ticket));
  }
}

TEST(Dispatcher, what_a_broken_lane_carried_goes_first_and_is_told_once) {
  Dispatcher dispatcher;
  dispatcher.connect(1, 2);
  dispatcher.offer(1, {0, 0, 0, 8});       // kept: has left
  dispatcher.offer(1, {0, 0, 1, kLarge});  // over the other lane
  dispatcher.offer(1, {0, 0, 2, kLarge});  // has not left whole
  dispatcher.offer(1, {0, 1, 0, 8});
  Lanes lanes{{{{1, 0}, 2}, {{1, 1}, 1}}};
  EXPECT_THAT(turn(dispatcher, lanes), ElementsAre("1.0:0/0", "1.1:0/1", "1.0:0/2"));
  auto kept = dispatcher.left(1, 0);
  ASSERT_TRUE(kept && kept->first);
  EXPECT_FALSE(dispatcher.left(1, 1));
  auto lost = dispatcher.broke(1, 0);
  ASSERT_EQ(lost.size(), 2u);
  EXPECT_EQ(lost[0].first, kept->ticket);
  EXPECT_EQ(lost[1].second.send, 2u);
  EXPECT_THAT(turn(dispatcher, lanes), IsEmpty());
  lanes.left = {{{1, 1}, 3}};
  EXPECT_THAT(turn(dispatcher, lanes), ElementsAre("1.1:0/0!", "1.1:0/2!", "1.1:1/0"));
  auto again = dispatcher.left(1, 1);
  ASSERT_TRUE(again);
  EXPECT_FALSE(again->first) << "its operation knows";
  EXPECT_EQ(again->ticket, kept->ticket);
  EXPECT_FALSE(dispatcher.left(1, 1)) << "large";
  EXPECT_EQ(dispatcher.receipted(1, 1)->chunk.send, 1u);
  EXPECT_FALSE(dispatcher.receipted(1, 1)) << "settled when it left";
  auto last = dispatcher.receipted(1, 1);
  ASSERT_TRUE(last);
  EXPECT_TRUE(last->first);
  EXPECT_EQ(last->chunk.send, 2u);
}

TEST(Dispatcher, what_is_withdrawn_never_goes) {
  Dispatcher dispatcher;
  for (uint32_t peer : {1u, 2u}) {
    dispatcher.connect(peer, 1);
    for (uint64_t operation : {0u, 1u}) dispatcher.offer(peer, {0, operation, 0, 8});
  }
  dispatcher.withdraw(0);
  Lanes lanes{{{{1, 0}, 9}, {{2, 0}, 9}}};
  EXPECT_THAT(turn(dispatcher, lanes), ElementsAre("1.0:1/0", "2.0:1/0"));
  EXPECT_FALSE(dispatcher.waiting());
}

// Any course of events: each chunk is handed over, settled once, and nothing is left.
TEST(Dispatcher, settles_everything_once_whatever_happens) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(seed);
    Dispatcher dispatcher;
    uint32_t peers = 1 + static_cast<uint32_t>(rng.below(4));
    auto lanes = static_cast<uint16_t>(1 + rng.below(4));
    struct Line {
      size_t leaving = 0, flying = 0;
    };
    std::map<std::pair<uint32_t, uint16_t>, Line> lines;
    for (uint32_t peer = 0; peer < peers; ++peer) {
      dispatcher.connect(peer, lanes);
      for (uint16_t lane = 0; lane < lanes; ++lane) lines[{peer, lane}] = {};
    }
    std::set<uint32_t> unsettled;
    uint32_t offered = 0;
    auto note = [&](const std::optional<Dispatcher::Settled>& settled) {
      EXPECT_EQ(settled && settled->first ? unsettled.erase(settled->chunk.send) : 1u, 1u) << seed;
    };
    for (int round = 0; round < 400 || !unsettled.empty() || dispatcher.waiting(); ++round) {
      ASSERT_LT(round, 4000) << "seed " << seed;
      if (round < 300) {
        unsettled.insert(offered);
        dispatcher.offer(static_cast<uint32_t>(rng.below(peers)),
                         {static_cast<int64_t>(rng.below(3)), rng.below(4), offered++,
                          rng.below(2) == 0 ? kLarge : 100});
      }
      dispatcher.begin_turn();
      while (auto next = dispatcher.next([&](uint32_t peer, uint16_t lane) {
        return lines[{peer, lane}].leaving == 0 ? Room::connection : Room::none;
      }))
        ++lines[{next->peer, next->lane}].leaving;
      for (auto& [name, line] : lines) {
        if (line.leaving > 0 && rng.below(2) == 0) {
          --line.leaving, ++line.flying;
          note(dispatcher.left(name.first, name.second));
        }
        for (; line.flying > 0 && rng.below(3) > 0; --line.flying)
          note(dispatcher.receipted(name.first, name.second));
        if (round < 300 && rng.below(40) == 0) {
          EXPECT_EQ(dispatcher.broke(name.first, name.second).size(), line.leaving + line.flying);
          line = {};
        }
      }
    }
  }
}

TEST(Receipts, are_due_when_wanted_and_asked_or_worth_it) {
  Receipts receipts;
  EXPECT_FALSE(receipts.due(true));
  receipts.arrived(100, false);
  EXPECT_FALSE(receipts.due(true));
  receipts.arrived(100, true);
  EXPECT_FALSE(receipts.due(false));
  EXPECT_TRUE(receipts.due(true));
  EXPECT_EQ(receipts.take(), 2u);
  EXPECT_FALSE(receipts.due(true));
  receipts.want_all();
  EXPECT_FALSE(receipts.due(true)) << "there is nothing to tell";
  for (int i = 0; i < 64; ++i) {
    EXPECT_FALSE(receipts.due(false)) << i;
    receipts.arrived(10, false);
  }
  EXPECT_TRUE(receipts.due(false));
  EXPECT_EQ(receipts.take(), 66u);
  receipts.arrived((4u << 20) - 1, true);
  EXPECT_FALSE(receipts.due(false));
  receipts.arrived(1, false);
  EXPECT_TRUE(receipts.due(false));
}

TEST(Owed, is_told_with_the_last_chunk_of_an_operation_or_without_patience) {
  Owed owed;
  owed.received_all();
  EXPECT_FALSE(owed.due(true)) << "nobody waits";
  EXPECT_TRUE(owed.wanted());
  EXPECT_FALSE(owed.wanted());
  EXPECT_FALSE(owed.due(false));
  EXPECT_TRUE(owed.any());
  EXPECT_TRUE(owed.due(true));
  EXPECT_FALSE(owed.any());
  EXPECT_TRUE(owed.wanted());
  owed.received_all();
  EXPECT_TRUE(owed.due(false));
  EXPECT_FALSE(owed.due(false));
}

}  // namespace
}  // namespace weft::schedule
