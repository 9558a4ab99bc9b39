#include "weft/collective.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>

#include "testing.h"

namespace weft::collective {
namespace {

using schedule::Collective;
using testing::HasSubstr;
using namespace testing_support;  // NOLINT(google-build-using-namespace): this module's own

// ---- buffers -----------------------------------------------------------------------------

TEST(Buffer, a_slice_is_the_stretch_of_its_parts) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Rng rng(seed);
    std::vector<std::vector<std::byte>> memory;
    Buffer buffer;
    std::vector<std::byte*> places;  // of each byte
    for (uint64_t i = 0; i < 1 + rng.below(8); ++i)
      memory.emplace_back(rng.below(4) == 0 ? 0 : rng.below(40));
    for (auto& part : memory) {
      buffer.add(part);
      for (std::byte& byte : part) places.push_back(&byte);
    }
    ASSERT_EQ(buffer.bytes(), places.size());
    for (int round = 0; round < 30; ++round) {
      uint64_t first = rng.below(places.size() + 1);
      uint64_t count = rng.below(places.size() - first + 1);
      std::vector<std::byte*> sliced;
      buffer.slice(first, count, [&](std::span<std::byte> part) {
        EXPECT_FALSE(part.empty());
        for (std::byte& byte : part) sliced.push_back(&byte);
      });
      auto begin = places.begin() + static_cast<ptrdiff_t>(first);
      EXPECT_EQ(sliced, std::vector<std::byte*>(begin, begin + static_cast<ptrdiff_t>(count)))
          << "seed " << seed << ", " << first << " + " << count;
    }
  }
}

TEST(Buffer, of_nothing_has_nothing_to_slice) {
  Buffer buffer;
  buffer.add({});
  EXPECT_EQ(buffer.bytes(), 0u);
  buffer.slice(0, 0, [](std::span<std::byte>) { FAIL(); });
}

// ---- engines over real connections -------------------------------------------------------

TEST(Engine, runs_several_operations_at_a_time) {
  for (bool shared : {false, true})
    for (uint32_t ranks : {1u, 2u, 3u, 4u}) {
      Job job{.ranks = ranks, .lanes = 3, .chunk_bytes = 4000, .shared_memory = shared};
      run_nodes(job, [&](Node& node) {
        std::vector<std::unique_ptr<Work>> all;
        for (uint32_t number = 0; number < 8; ++number) {
          all.push_back(std::make_unique<Work>(number, number * 9973 % 50000, node));
          Operation& operation = all.back()->operation;
          operation.priority = 8 - number;
          operation.shape.algorithm = schedule::kAlgorithms[number % 6];
          node.start(operation);
        }
        EXPECT_TRUE(node.turn_until([&] { return node.done.size() == 8; }));
        for (auto& work : all)
          EXPECT_EQ(work->wrong(), std::nullopt)
              << "rank " << work->rank << ", operation " << work->operation.number;
        EXPECT_TRUE(node.engine->idle());
        EXPECT_TRUE(node.engine->flights().empty());
        for (const LaneStatus& lane : node.engine->lanes()) {
          EXPECT_TRUE(lane.alive);
          EXPECT_EQ(lane.shared_memory, shared);
        }
      });
    }
}

TEST(Engine, keeps_chunks_that_come_before_their_operation) {
  // Rank 1 starts when rank 0 has sent all that it can.
  std::atomic<bool> handed_over = false;
  run_nodes({}, [&](Node& node) {
    Work work(5, 1u << 20, node);
    if (node.mesh.rank.index == 0) {
      node.start(work.operation);
      EXPECT_TRUE(node.turn_until(
          [&] { return !node.engine->progress(monotonic_clock().now()).foremost.cannot_send_to; }));
      Progress progress = node.engine->progress(monotonic_clock().now());
      EXPECT_EQ(progress.operations, 1u);
      EXPECT_EQ(progress.foremost.key.number, 5u);
      EXPECT_EQ(progress.foremost.bytes_done, 0u);
      EXPECT_EQ(progress.foremost.bytes_total, 4u << 20);
      EXPECT_EQ(progress.foremost.waits_for, 1u);
      EXPECT_EQ(progress.foremost.signature, "all_reduce of 1048576 float32 (sum)");
      handed_over = true;
    } else {
      EXPECT_TRUE(node.turn_until([&] { return handed_over.load(); }));
      node.turn_for(Nanos::from_millis(50));
      EXPECT_TRUE(node.engine->idle());
      node.start(work.operation);
    }
    EXPECT_TRUE(node.finish(work.key()));
    EXPECT_EQ(work.wrong(), std::nullopt);
  });
}

TEST(Engine, stops_reading_when_too_much_comes_early_and_goes_on_after) {
  // More than sockets hold, and a bound that is soon reached.
  for (bool shared : {false, true}) {
    std::atomic<bool> may_start = false;
    Job job{.lanes = 3, .early_bytes_limit = 100000, .shared_memory = shared};
    run_nodes(job, [&](Node& node) {
      Work first(0, 12u << 20, node), second(1, 1u << 18, node);
      if (node.mesh.rank.index == 0) {
        node.start(first.operation);
        node.start(second.operation);
        // Stays full: rank 1 does not take it all.
        node.turn_for(Nanos::from_millis(300));
        EXPECT_EQ(node.engine->progress(monotonic_clock().now()).foremost.cannot_send_to, 1u);
        may_start = true;
      } else {
        EXPECT_TRUE(node.turn_until([&] { return may_start.load(); }));
        node.start(first.operation);
        node.turn_for(Nanos::from_millis(50));
        node.start(second.operation);
      }
      EXPECT_TRUE(node.finish(0));
      EXPECT_TRUE(node.finish(1));
      EXPECT_EQ(first.wrong(), std::nullopt);
      EXPECT_EQ(second.wrong(), std::nullopt);
    });
  }
}

TEST(Engine, operations_that_differ_are_refused_by_both_names) {
  struct {
    std::function<void(Operation&)> change;
    const char* words;
  } cases[] = {
      {[](Operation& o) { o.shape.elements = 999; }, "all_reduce of 999 float32 (sum) on rank 1"},
      {[](Operation& o) { o.shape.collective = Collective::reduce_scatter; },
       "reduce_scatter of 1000 float32 (sum) on rank 1"},
      {[](Operation& o) {
         o.shape.collective = Collective::broadcast;
         o.shape.root = 1;
       },
       "broadcast of 1000 float32 with root 1 on rank 1"},
      {[](Operation& o) { o.op = reduce::Op::max; }, "all_reduce of 1000 float32 (max) on rank 1"},
      {[](Operation& o) { o.type = reduce::Type::int32; },
       "all_reduce of 1000 int32 (sum) on rank 1"},
  };
  for (auto& other : cases) {
    for (bool early : {false, true}) {
      SCOPED_TRACE(text("%s, early %d", other.words, early));
      std::atomic<bool> seen = false;
      run_nodes({}, [&](Node& node) {
        bool differs = node.mesh.rank.index == 1;
        Work work(3, 1000, node);
        if (differs) other.change(work.operation);
        // Its chunks are here before it says what it expects.
        if (early && !differs) node.turn_for(Nanos::from_millis(30));
        node.start(work.operation);
        // Either sees it first; one that only sends may have ended by then.
        node.turn_until([&] { return seen.load(); });
        if (node.lost.empty()) return;
        seen = true;
        EXPECT_THAT(node.lost[0], HasSubstr(text("rank %u: operation 3 is ", differs ? 0 : 1)));
        EXPECT_THAT(node.lost[0], HasSubstr(other.words));
        EXPECT_THAT(node.lost[0], HasSubstr("all_reduce of 1000 float32 (sum) on rank 0"));
      });
      EXPECT_TRUE(seen);
    }
  }
}

TEST(Engine, that_is_halted_leaves_memory_alone) {
  constexpr size_t kBytes = 8u << 20;
  for (bool shared : {false, true}) {
    std::atomic<bool> halted = false;
    run_nodes({.shared_memory = shared}, [&](Node& node) {
      Work work(0, kBytes / 4, node);
      // Pages that can be taken away: whoever reads or writes them then ends the test.
      void* pages =
          ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      ASSERT_NE(pages, MAP_FAILED);
      work.operation.output = Buffer();
      work.operation.output.add({static_cast<std::byte*>(pages), kBytes});
      work.operation.input = work.operation.output;
      node.start(work.operation);
      if (node.mesh.rank.index == 0) {
        EXPECT_TRUE(node.turn_until([&] { return halted.load(); }));
        node.turn_for(Nanos::from_millis(100));
        EXPECT_TRUE(node.lost.empty()) << node.lost[0];
        node.engine->halt();
      } else {
        EXPECT_TRUE(node.turn_until([&] {
          return node.engine->progress(monotonic_clock().now()).foremost.bytes_done > 0;
        }));
        node.engine->halt();
      }
      ASSERT_EQ(::mprotect(pages, kBytes, PROT_NONE), 0);
      halted = true;
      node.turn_for(Nanos::from_millis(100));
      EXPECT_TRUE(node.done.empty());
      EXPECT_TRUE(node.lost.empty()) << node.lost[0];
      ::munmap(pages, kBytes);
    });
  }
}

// ---- what is recorded --------------------------------------------------------------------

TEST(Trace, has_both_halves_of_every_chunk_and_every_operation) {
  constexpr uint32_t kRanks = 3;
  constexpr std::array<uint64_t, 4> kElements = {100003, 2, 50000, 0};
  std::string folder = testing::TempDir() + text("weft-collective-%d", ::getpid());
  ASSERT_EQ(::system(("rm -rf " + folder + " && mkdir -p " + folder).c_str()), 0);
  run_nodes({.ranks = kRanks, .lanes = 2, .chunk_bytes = 12000, .folder = folder}, [&](Node& node) {
    std::vector<std::unique_ptr<Work>> all;
    for (uint32_t number = 0; number < kElements.size(); ++number) {
      all.push_back(std::make_unique<Work>(number, kElements[number], node));
      all.back()->operation.group = kExchangeGroup;
      all.back()->operation.iteration = 7;
      all.back()->operation.bucket = number;
      all.back()->operation.partition = 1;
      // One of them late on one rank: its first chunks come early.
      if (number == 2 && node.mesh.rank.index == 1) {
        node.turn_for(Nanos::from_millis(30));
      }
      node.start(all.back()->operation);
    }
    EXPECT_TRUE(node.turn_until([&] { return node.done.size() == kElements.size(); }));
    node.engine->record_tcp_info();
    for (auto& work : all) EXPECT_EQ(work->wrong(), std::nullopt);
  });
  auto trace = trace::read(folder);
  ASSERT_TRUE(trace) << trace.error().message();
  EXPECT_TRUE(trace->damage.empty());
  ASSERT_EQ(trace->processes.size(), kRanks);

  std::map<uint64_t, std::pair<const trace::Event*, uint32_t>> sends;
  size_t receives = 0;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    const trace::Process& process = trace->processes[rank];
    EXPECT_EQ(process.dropped, 0u);
    std::set<uint32_t> operations;
    std::map<uint32_t, double> sent_bytes, added_bytes;
    size_t counters = 0;
    for (const trace::Event& event : process.events) {
      if (event.shape == trace::Shape::counter) {
        EXPECT_EQ(event.kind, trace::Kind::tcp_info);
        ++counters;
        continue;
      }
      EXPECT_EQ(event.iteration, 7u);
      EXPECT_EQ(event.bucket, event.operation);
      EXPECT_EQ(event.partition, 1);
      if (event.kind == trace::Kind::operation) {
        EXPECT_TRUE(operations.insert(event.operation).second);
        EXPECT_EQ(event.bytes, kElements[event.operation] * 4);
        continue;
      }
      if (event.kind == trace::Kind::reduce) {
        EXPECT_EQ(event.shape, trace::Shape::span);
        EXPECT_EQ(event.peer, (rank + kRanks - 1) % kRanks);
        EXPECT_EQ(process.tracks[event.track].type, trace::TrackType::thread);
        added_bytes[event.operation] += static_cast<double>(event.bytes);
        continue;
      }
      EXPECT_EQ(event.kind, trace::Kind::chunk);
      EXPECT_NE(event.message, 0u);
      EXPECT_GE(event.duration_ns, 0);
      const trace::Track& track = process.tracks[event.track];
      EXPECT_EQ(track.lane, event.lane);
      EXPECT_EQ(track.peer, event.peer);
      if (event.shape == trace::Shape::send) {
        EXPECT_EQ(track.type, trace::TrackType::lane_out);
        EXPECT_EQ(event.peer, (rank + 1) % kRanks);
        EXPECT_TRUE(sends.emplace(event.message, std::pair(&event, rank)).second)
            << "message ids are unique in the run";
        sent_bytes[event.operation] += static_cast<double>(event.bytes);
      } else {
        EXPECT_EQ(event.shape, trace::Shape::receive);
        EXPECT_EQ(track.type, trace::TrackType::lane_in);
        ++receives;
      }
    }
    EXPECT_EQ(operations.size(), kElements.size());
    EXPECT_EQ(counters, 2u * 5u) << "lanes times fields";
    for (const auto& [operation, bytes] : sent_bytes) {
      double expected = 2.0 * (kRanks - 1) / kRanks * static_cast<double>(kElements[operation]) * 4;
      EXPECT_NEAR(bytes, expected, kRanks * 4) << "operation " << operation;
      // The first half of what is received is added.
      EXPECT_NEAR(added_bytes[operation], expected / 2, kRanks * 4) << "operation " << operation;
    }
  }
  EXPECT_EQ(receives, sends.size());
  for (uint32_t rank = 0; rank < kRanks; ++rank)
    for (const trace::Event& event : trace->processes[rank].events) {
      if (event.shape != trace::Shape::receive) continue;
      auto found = sends.find(event.message);
      ASSERT_NE(found, sends.end());
      const auto& [send, sender] = found->second;
      EXPECT_EQ(sender, event.peer);
      EXPECT_EQ(sender, (rank + kRanks - 1) % kRanks);
      EXPECT_EQ(send->bytes, event.bytes);
      EXPECT_EQ(send->operation, event.operation);
      EXPECT_EQ(send->step, event.step);
      EXPECT_EQ(send->chunk, event.chunk);
      EXPECT_EQ(send->lane, event.lane);
      // One machine, one clock: nothing arrives before it leaves.
      EXPECT_LE(send->start_ns, event.end_ns());
    }
  EXPECT_EQ(::system(("rm -rf " + folder).c_str()), 0);
}

}  // namespace
}  // namespace weft::collective
