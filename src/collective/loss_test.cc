// Lanes that break, stall or damage what they carry, while the ranks at their ends are well.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "testing.h"

namespace weft::collective {
namespace {

using testing::HasSubstr;
using namespace testing_support;  // NOLINT(google-build-using-namespace): this module's own

constexpr uint64_t kHandshake = 256;  // bytes that the opener of a lane sends before its chunks

TEST(Loss, a_lane_that_breaks_is_replaced_and_nothing_is_lost) {
  // At the greeting, in a header, in a payload, between chunks, late; small chunks, which the lane
  // keeps until they have arrived, and large ones, which are sent again from where they lie.
  for (Fault::Kind kind : {Fault::Kind::cut, Fault::Kind::reset})
    for (uint64_t chunk : {16384u, 262144u})
      for (uint64_t at : {uint64_t{0}, uint64_t{30}, uint64_t{64}, uint64_t{9000}, 3 * (chunk + 64),
                          uint64_t{1500000}}) {
        SCOPED_TRACE(text("%s, chunks of %llu, at %llu", kind == Fault::Kind::cut ? "cut" : "reset",
                          static_cast<unsigned long long>(chunk),
                          static_cast<unsigned long long>(at)));
        FaultyNetwork network({{0, kind, kHandshake + at}});
        Job job{.ranks = 3, .lanes = 1, .chunk_bytes = chunk, .network_of_0 = &network};
        run_nodes(job, [&](Node& node) {
          Work first(0, 700001, node), second(1, 200003, node);
          node.start(first.operation);
          node.start(second.operation);
          EXPECT_TRUE(node.finish(0)) << (node.lost.empty() ? "too late" : node.lost[0]);
          EXPECT_TRUE(node.finish(1)) << (node.lost.empty() ? "too late" : node.lost[0]);
          EXPECT_EQ(first.wrong(), std::nullopt);
          EXPECT_EQ(second.wrong(), std::nullopt);
        });
        EXPECT_TRUE(network.struck);
        EXPECT_GE(network.opened(), 2u) << "a new lane was opened";
      }
}

TEST(Loss, of_several_lanes_again_and_again_is_survived) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    Rng rng(seed);
    std::vector<Fault> faults;
    for (size_t connection = 0; connection < 12; ++connection)
      if (rng.below(3) > 0)
        faults.push_back({connection, rng.below(2) == 0 ? Fault::Kind::cut : Fault::Kind::reset,
                          kHandshake + rng.below(600000)});
    FaultyNetwork network(faults);
    Job job{.ranks = 3, .lanes = 3, .chunk_bytes = 1024u << rng.below(9), .network_of_0 = &network};
    schedule::Algorithm algorithm = schedule::kAlgorithms[seed % 6];
    run_nodes(job, [&](Node& node) {
      std::vector<std::unique_ptr<Work>> all;
      for (uint32_t number = 0; number < 6; ++number) {
        all.push_back(std::make_unique<Work>(number, 100003 * number, node));
        all.back()->operation.shape.algorithm = algorithm;
        node.start(all.back()->operation);
      }
      EXPECT_TRUE(node.turn_until([&] { return node.done.size() == 6; }))
          << "seed " << seed << ": " << (node.lost.empty() ? "too late" : node.lost[0]);
      for (auto& work : all) EXPECT_EQ(work->wrong(), std::nullopt) << "seed " << seed;
    });
    EXPECT_TRUE(network.struck);
  }
}

TEST(Loss, a_lane_that_stalls_keeps_only_its_own_chunks_waiting) {
  constexpr uint64_t kChunk = 16384;
  // The first chunk of lane 1 stays half on the way.
  FaultyNetwork network({{1, Fault::Kind::stall, kHandshake + 64 + kChunk / 2}});
  Job job{.lanes = 4, .chunk_bytes = kChunk, .network_of_0 = &network};
  run_nodes(job, [&](Node& node) {
    // A broadcast: what comes is what was sent, and nothing else waits for it.
    Work work(0, 1u << 20, node);
    work.operation.shape.collective = schedule::Collective::broadcast;
    if (node.mesh.rank.index == 1) work.operation.input = Buffer();
    node.start(work.operation);
    uint64_t total = work.data.size() * sizeof(float);
    if (node.mesh.rank.index == 1) {
      EXPECT_TRUE(node.turn_until([&] {
        return node.engine->progress(monotonic_clock().now()).foremost.bytes_done == total - kChunk;
      })) << node.engine->progress(monotonic_clock().now()).foremost.bytes_done;
      node.turn_for(Nanos::from_millis(50));
      EXPECT_EQ(node.engine->progress(monotonic_clock().now()).foremost.bytes_done, total - kChunk);
      EXPECT_TRUE(node.done.empty());
      network.released = true;
    }
    EXPECT_TRUE(node.finish(0));
    for (uint64_t i = 0; i < work.data.size(); ++i) ASSERT_EQ(work.data[i], value(i, 0, 0)) << i;
  });
  EXPECT_TRUE(network.struck);
}

TEST(Loss, a_byte_that_changes_on_the_way_is_seen_and_its_lane_named) {
  struct {
    uint64_t at;
    const char* words;
  } cases[] = {
      {kHandshake + 20, "header"},  // of the first chunk
      {kHandshake + 64 + 5000, "was damaged on the way"},
  };
  for (const auto& one : cases) {
    FaultyNetwork network({{0, Fault::Kind::corrupt, one.at}});
    std::atomic<bool> seen = false;
    run_nodes({.lanes = 1, .network_of_0 = &network}, [&](Node& node) {
      Work work(0, 100000, node);
      node.start(work.operation);
      if (node.mesh.rank.index == 0) {
        EXPECT_TRUE(node.turn_until([&] { return seen.load(); }));
        return;
      }
      EXPECT_FALSE(node.finish(0));
      seen = true;
      ASSERT_EQ(node.lost.size(), 1u);
      EXPECT_THAT(node.lost[0], HasSubstr("rank 0: "));
      EXPECT_THAT(node.lost[0], HasSubstr(one.words));
    });
    EXPECT_TRUE(network.struck);
  }
}

TEST(Loss, a_rank_that_is_gone_is_told_with_its_number) {
  uint16_t port = free_port();
  Job job;
  std::optional<Result<join::Mesh>> other;
  std::thread thread([&] { other = join::meet(join_options(1, job, port)); });
  auto mesh = join::meet(join_options(0, job, port));
  thread.join();
  ASSERT_TRUE(mesh && *other);
  auto recorder = capture::Recorder::off();
  Node node{std::move(*mesh), *recorder, nullptr, {}, {}};
  node.engine = std::make_unique<Engine>(
      Engine::Options(), node.mesh, *recorder,
      [&](Rank peer, const Error& error) {
        EXPECT_EQ(error.code(), Code::peer_lost);
        node.lost.push_back(text("rank %u: %s", peer.index, error.message().c_str()));
      },
      [](std::unique_ptr<net::Socket>) {});
  ASSERT_TRUE(node.engine->begin());
  other.reset();
  Work work(0, 1000, node);
  node.start(work.operation);
  EXPECT_FALSE(node.finish(0));
  ASSERT_EQ(node.lost.size(), 1u);
  EXPECT_THAT(node.lost[0], HasSubstr("rank 1: no lane to it could be opened"));
}

}  // namespace
}  // namespace weft::collective
