// A peer that knows the secret and sends what it likes: what is not due is refused, by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "testing.h"

namespace weft::collective {
namespace {

using lane::ChunkHeader;
using schedule::Collective;
using testing::HasSubstr;
using namespace testing_support;  // NOLINT(google-build-using-namespace): this module's own

constexpr uint64_t kElements = 1000;
constexpr uint32_t kReceiptMagic = 0x6b634177;

// The engine is rank 1 of 2; rank 0 is the test, which has two lanes to it.
struct Alone {
  Alone() {
    Job job{.chunk_bytes = 1024};
    uint16_t port = free_port();
    std::optional<Result<join::Mesh>> joined;
    std::thread root([&] { joined = join::meet(join_options(0, job, port)); });
    auto own = join::meet(join_options(1, job, port));
    root.join();
    WEFT_CHECK(joined->ok() && own.ok());
    theirs = std::move(**joined);
    mesh = std::move(*own);
    join::Links::Callbacks callbacks;
    callbacks.opened = [this](Rank, uint16_t, auto socket, auto) {
      to_engine.push_back(std::move(socket));
    };
    callbacks.accepted = [this](Rank, uint16_t, auto socket, auto) {
      from_engine.push_back(std::move(socket));
      // The greeting: from now on the engine may send here.
      std::array<uint32_t, 4> greeting = {kReceiptMagic, 0, 0, 0};
      put(*from_engine.back(), std::as_bytes(std::span(greeting)));
    };
    links = std::make_unique<join::Links>(theirs, std::move(callbacks));
    Engine::Options options;
    options.lanes = 2;
    options.chunk_bytes = job.chunk_bytes;
    engine = std::make_unique<Engine>(
        options, mesh, *recorder,
        [this](Rank peer, const Error& error) {
          EXPECT_EQ(peer.index, 0u);
          lost.push_back(error.message());
          engine->halt();
        },
        [](std::unique_ptr<net::Socket>) {});
    WEFT_CHECK(engine->begin().ok());
    operation = of_rank(1);
    data.resize(kElements);
    operation.output.add(std::as_writable_bytes(std::span(data)));
    operation.input = operation.output;
    links->open({1}, 0);
    links->open({1}, 1);
    WEFT_CHECK(turn_until([this] { return to_engine.size() == 2; }));
  }

  static Operation of_rank(uint32_t rank) {
    Operation out;
    out.number = 4;
    out.shape.rank = rank;
    out.shape.ranks = 2;
    out.shape.elements = kElements;
    return out;
  }

  // A chunk as a correct rank 0 would send it.
  static ChunkHeader chunk_of(uint16_t step, uint32_t chunk) {
    schedule::OperationShape shape = of_rank(0).shape;
    shape.chunk_elements = 256;
    auto program = schedule::Program::make(shape);
    ChunkHeader header;
    header.collective = static_cast<uint8_t>(Collective::all_reduce);
    header.type = static_cast<uint8_t>(reduce::Type::float32);
    header.op = static_cast<uint8_t>(reduce::Op::sum);
    header.operation = 4;
    header.elements = kElements;
    header.message = 1 + chunk + 10 * uint64_t{step};
    for (const schedule::Send& send : program->sends())
      if (send.id == schedule::ChunkId{step, chunk}) {
        header.step = step;
        header.chunk = chunk;
        header.first = send.offset;
        header.length = static_cast<uint32_t>(4 * send.elements);
        return header;
      }
    WEFT_CHECK(false);
  }
  // Which elements of the engine's result that chunk brings.
  static std::pair<uint64_t, uint64_t> place_of(uint16_t step, uint32_t chunk) {
    schedule::OperationShape shape = of_rank(1).shape;
    shape.chunk_elements = 256;
    auto program = schedule::Program::make(shape);
    const schedule::Receive& receive = program->receives()[*program->find(0, {step, chunk})];
    return {receive.first, receive.elements};
  }

  static void put(net::Socket& socket, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
      ssize_t sent = socket.send(&part, 1);
      WEFT_CHECK(sent > 0);
      bytes = bytes.subspan(static_cast<size_t>(sent));
    }
  }
  // `share`: how much of the payload to send.
  void send(size_t lane, ChunkHeader header, float fill = 1, double share = 1) {
    std::vector<float> payload(header.length / 4, fill);
    std::span<const std::byte> bytes = std::as_bytes(std::span(payload));
    header.checksum = lane::checksum({&bytes, 1});
    std::array<std::byte, lane::kChunkHeaderBytes> head;
    lane::encode(header, head);
    put(*to_engine[lane], head);
    put(*to_engine[lane],
        bytes.first(static_cast<size_t>(static_cast<double>(bytes.size()) * share)));
    turns();
  }
  void send_rest(size_t lane, ChunkHeader header, float fill) {
    std::vector<float> payload(header.length / 8, fill);
    put(*to_engine[lane], std::as_bytes(std::span(payload)));
    turns();
  }
  // All that is due, from lane 1, with 3 to be added and then 5 as the sum of the other half.
  void send_all() {
    for (uint16_t step : {uint16_t{0}, uint16_t{1}})
      for (uint32_t chunk : {1u, 0u}) send(1, chunk_of(step, chunk), step == 0 ? 3 : 5);
  }

  void turn() {
    theirs.reactor->run_once(Nanos{0});
    links->tick(monotonic_clock().now());
    mesh.reactor->run_once(Nanos::from_millis(1));
    for (const Key& key : engine->poll(monotonic_clock().now())) done.insert(key.number);
  }
  void turns() {
    for (int i = 0; i < 10; ++i) turn();
  }
  bool turn_until(const std::function<bool()>& until) {
    for (int i = 0; i < 5000 && !until(); ++i) turn();
    return until();
  }

  std::unique_ptr<capture::Recorder> recorder = capture::Recorder::off();
  join::Mesh theirs, mesh;
  std::vector<std::unique_ptr<net::Socket>> to_engine, from_engine;
  std::unique_ptr<join::Links> links;
  std::unique_ptr<Engine> engine;
  std::vector<float> data;
  Operation operation;
  std::vector<std::string> lost;
  std::set<uint64_t> done;
};

void expect_result(const Alone& alone) {
  EXPECT_TRUE(alone.lost.empty()) << alone.lost[0];
  for (uint16_t step : {uint16_t{0}, uint16_t{1}})
    for (uint32_t chunk : {0u, 1u}) {
      auto [first, count] = Alone::place_of(step, chunk);
      for (uint64_t i = first; i < first + count; ++i)
        ASSERT_EQ(alone.data[i], step == 0 ? 3 : 5) << i;
    }
}

TEST(Peer, that_sends_what_is_due_completes_the_operation) {
  for (bool early : {false, true}) {
    Alone alone;
    if (!early) {
      EXPECT_TRUE(alone.engine->start(alone.operation));
    }
    alone.send_all();
    if (early) {
      EXPECT_TRUE(alone.engine->start(alone.operation));
    }
    EXPECT_TRUE(alone.turn_until([&] { return alone.done.contains(4); }));
    expect_result(alone);
  }
}

TEST(Peer, that_sends_a_chunk_again_changes_nothing) {
  for (bool early : {false, true}) {
    Alone alone;
    if (!early) {
      EXPECT_TRUE(alone.engine->start(alone.operation));
    }
    for (uint16_t step : {uint16_t{0}, uint16_t{1}}) {
      alone.send(0, Alone::chunk_of(step, 0), step == 0 ? 3 : 5);
      alone.send(1, Alone::chunk_of(step, 0), step == 0 ? 3 : 5);
    }
    alone.send_all();
    if (early) {
      EXPECT_TRUE(alone.engine->start(alone.operation));
    }
    EXPECT_TRUE(alone.turn_until([&] { return alone.done.contains(4); }));
    // Also when it is over.
    alone.send(0, Alone::chunk_of(0, 0), 100);
    alone.send(0, Alone::chunk_of(1, 1), 100);
    expect_result(alone);
  }
}

TEST(Peer, that_sends_a_chunk_again_with_other_bytes_is_named) {
  for (bool early : {false, true}) {
    Alone alone;
    if (!early) {
      EXPECT_TRUE(alone.engine->start(alone.operation));
    }
    alone.send(0, Alone::chunk_of(0, 0), 3);
    alone.send(1, Alone::chunk_of(0, 0), 100);
    if (early) {
      alone.turns();
      EXPECT_TRUE(alone.engine->start(alone.operation));
    }
    EXPECT_TRUE(alone.turn_until([&] { return !alone.lost.empty(); }));
    EXPECT_THAT(alone.lost[0], HasSubstr("twice, with different bytes"));
  }
}

TEST(Peer, that_sends_a_chunk_on_two_lanes_at_once_is_heard_once) {
  for (uint16_t step : {uint16_t{0}, uint16_t{1}}) {
    Alone alone;
    EXPECT_TRUE(alone.engine->start(alone.operation));
    ChunkHeader header = Alone::chunk_of(step, 0);
    float right = step == 0 ? 3 : 5;
    alone.send(0, header, right, 0.5);
    alone.send(1, header, right, 0.5);
    alone.send_rest(0, header, right);
    alone.send_rest(1, header, right);
    alone.send_all();
    EXPECT_TRUE(alone.turn_until([&] { return alone.done.contains(4); }));
    expect_result(alone);
  }
}

TEST(Peer, that_begins_a_chunk_early_and_repeats_it_later_is_heard_once) {
  Alone alone;
  ChunkHeader header = Alone::chunk_of(0, 0);
  alone.send(0, header, 3, 0.5);  // lands aside: the operation is not known
  EXPECT_TRUE(alone.engine->start(alone.operation));
  alone.send_all();
  alone.send_rest(0, header, 3);
  EXPECT_TRUE(alone.turn_until([&] { return alone.done.contains(4); }));
  expect_result(alone);
}

TEST(Peer, cannot_write_into_memory_that_its_owner_has_back) {
  // Half of a chunk has come over one lane, straight to its place, when the whole of it comes over
  // another one and the operation ends. Then the other half comes.
  Alone alone;
  EXPECT_TRUE(alone.engine->start(alone.operation));
  ChunkHeader header = Alone::chunk_of(1, 0);
  alone.send(0, header, 5, 0.5);
  alone.send_all();
  EXPECT_TRUE(alone.turn_until([&] { return alone.done.contains(4); }));
  expect_result(alone);
  std::fill(alone.data.begin(), alone.data.end(), 77.0f);
  std::vector<float> rest(header.length / 8, 5);
  iovec part{rest.data(), rest.size() * 4};
  alone.to_engine[0]->send(&part, 1);  // it may be closed by now
  alone.turns();
  EXPECT_TRUE(std::all_of(alone.data.begin(), alone.data.end(), [](float x) { return x == 77; }));
}

TEST(Peer, cannot_write_through_a_lane_that_it_opens_when_all_is_over) {
  Alone alone;
  EXPECT_TRUE(alone.engine->start(alone.operation));
  alone.engine->halt();
  std::fill(alone.data.begin(), alone.data.end(), 77.0f);
  alone.links->open({1}, 5);
  ASSERT_TRUE(alone.turn_until([&] { return alone.to_engine.size() == 3; }));
  ChunkHeader header = Alone::chunk_of(1, 0);
  std::vector<std::byte> bytes(lane::kChunkHeaderBytes + header.length);
  lane::encode(header, std::span(bytes).first<lane::kChunkHeaderBytes>());
  iovec part{bytes.data(), bytes.size()};
  alone.to_engine[2]->send(&part, 1);
  alone.turns();
  EXPECT_TRUE(std::all_of(alone.data.begin(), alone.data.end(), [](float x) { return x == 77; }));
}

TEST(Peer, that_opens_a_lane_again_has_one_of_that_number) {
  Alone alone;
  EXPECT_TRUE(alone.engine->start(alone.operation));
  alone.send(1, Alone::chunk_of(0, 0), 9, 0.5);  // and no more of it will come
  alone.turns();
  alone.links->open({1}, 1);
  ASSERT_TRUE(alone.turn_until([&] { return alone.to_engine.size() == 3; }));
  alone.turns();
  auto lanes = alone.engine->lanes();
  auto open = std::count_if(lanes.begin(), lanes.end(), [](const LaneStatus& lane) {
    return !lane.outgoing && lane.number == 1 && lane.alive;
  });
  EXPECT_EQ(open, 1);
  std::byte late{};
  iovec part{&late, 1};
  alone.to_engine[1]->send(&part, 1);  // into the one that was replaced
  alone.turns();
  alone.to_engine.erase(alone.to_engine.begin() + 1);
  alone.send_all();
  EXPECT_TRUE(alone.turn_until([&] { return alone.done.contains(4); }));
  EXPECT_TRUE(alone.lost.empty());
  expect_result(alone);
}

TEST(Peer, that_opens_a_lane_beyond_the_plan_is_lost) {
  Alone alone;
  alone.links->open({1}, 6);
  ASSERT_TRUE(alone.turn_until([&] { return !alone.lost.empty(); }));
  EXPECT_EQ(alone.lost[0], "rank 0 opened lane 6; the plan has 6 lanes");
}

TEST(Peer, that_sends_what_is_not_due_is_refused) {
  struct {
    std::function<void(ChunkHeader&)> change;
    const char* words;
  } cases[] = {
      {[](ChunkHeader& h) { h.step = 2; }, "chunk 0 of step 2 is not due from rank 0"},
      {[](ChunkHeader& h) { h.step = 0xffff; }, "chunk 0 of step 65535 is not due from rank 0"},
      {[](ChunkHeader& h) { h.chunk = 2; }, "chunk 2 of step 0 is not due from rank 0"},
      {[](ChunkHeader& h) { h.chunk = 0xffffffff; }, "chunk 4294967295 of step 0 is not due"},
      {[](ChunkHeader& h) { h.first = 1; }, "not cut as it is here"},
      {[](ChunkHeader& h) { h.first = ~uint64_t{0}; }, "not cut as it is here"},
      {[](ChunkHeader& h) { h.length = 2048; }, "not cut as it is here"},
      {[](ChunkHeader& h) { h.length = 0; }, "not cut as it is here"},
      {[](ChunkHeader& h) { h.elements = 999; }, "all_reduce of 999 float32 (sum) on rank 0"},
      {[](ChunkHeader& h) { h.type = 7; }, "all_reduce of 1000 int32 (sum) on rank 0"},
      {[](ChunkHeader& h) { h.op = 4; }, "all_reduce of 1000 float32 (max) on rank 0"},
      {[](ChunkHeader& h) { h.collective = 2; }, "reduce_scatter of 1000 float32 (sum) on rank 0"},
      {[](ChunkHeader& h) { h.root = 1; }, "all ranks must call the same"},
  };
  for (auto& [change, words] : cases)
    for (bool early : {false, true}) {
      SCOPED_TRACE(text("%s, early %d", words, early));
      Alone alone;
      if (!early) {
        EXPECT_TRUE(alone.engine->start(alone.operation));
      }
      ChunkHeader header = Alone::chunk_of(0, 0);
      change(header);
      alone.send(0, header);
      if (early) {
        EXPECT_TRUE(alone.engine->start(alone.operation));
      }
      ASSERT_EQ(alone.lost.size(), 1u);
      EXPECT_THAT(alone.lost[0], HasSubstr(words));
      EXPECT_TRUE(
          std::all_of(alone.data.begin(), alone.data.end(), [](float x) { return x == 0; }));
    }
}

TEST(Peer, that_differs_is_named_even_when_the_operation_has_ended_here) {
  Alone alone;
  EXPECT_TRUE(alone.engine->start(alone.operation));
  alone.send_all();
  EXPECT_TRUE(alone.turn_until([&] { return alone.done.contains(4); }));
  ChunkHeader header = Alone::chunk_of(0, 0);
  header.elements = 2000;
  alone.send(0, header);
  ASSERT_EQ(alone.lost.size(), 1u);
  EXPECT_EQ(alone.lost[0],
            "operation 4 is all_reduce of 2000 float32 (sum) on rank 0, but all_reduce of 1000 "
            "float32 (sum) on rank 1: all ranks must call the same");
}

TEST(Peer, that_is_not_in_the_group_of_an_operation_is_refused) {
  Alone alone;
  alone.operation.group = 9;
  alone.operation.members = std::make_shared<const std::vector<uint32_t>>(1, 1u);
  alone.operation.shape.rank = 0;
  alone.operation.shape.ranks = 1;
  ChunkHeader header = Alone::chunk_of(0, 0);
  header.group = 9;
  alone.send(0, header);
  EXPECT_TRUE(alone.engine->start(alone.operation));
  ASSERT_EQ(alone.lost.size(), 1u);
  EXPECT_THAT(alone.lost[0], HasSubstr("rank 0 is not in its group"));
}

TEST(Peer, that_sends_data_against_the_direction_of_a_lane_is_refused) {
  Alone alone;
  EXPECT_TRUE(alone.engine->start(alone.operation));
  ASSERT_TRUE(alone.turn_until([&] { return alone.from_engine.size() == 2; }));
  std::array<std::byte, lane::kChunkHeaderBytes> head;
  lane::encode(Alone::chunk_of(0, 0), head);
  Alone::put(*alone.from_engine[0], head);
  alone.turns();
  ASSERT_EQ(alone.lost.size(), 1u);
  EXPECT_EQ(alone.lost[0], "a receipt for chunks that were not sent");
}

TEST(Peer, that_acknowledges_what_was_not_sent_is_refused) {
  Alone alone;
  EXPECT_TRUE(alone.engine->start(alone.operation));
  ASSERT_TRUE(alone.turn_until([&] { return alone.from_engine.size() == 2; }));
  std::array<uint32_t, 4> receipt = {kReceiptMagic, 0, 1000, 0};
  Alone::put(*alone.from_engine[1], std::as_bytes(std::span(receipt)));
  alone.turns();
  ASSERT_EQ(alone.lost.size(), 1u);
  EXPECT_EQ(alone.lost[0], "a receipt for chunks that were not sent");
}

TEST(Peer, that_closes_while_its_early_chunk_is_half_here_leaves_room_for_others) {
  // What did not come whole must not count against the bound of what waits.
  Alone alone;
  for (int round = 0; round < 5; ++round) {
    ChunkHeader header = Alone::chunk_of(0, 0);
    header.length = 60u << 20;
    std::array<std::byte, lane::kChunkHeaderBytes> head;
    lane::encode(header, head);
    Alone::put(*alone.to_engine.back(), head);
    alone.turns();
    alone.to_engine.pop_back();
    alone.links->open({1}, 5);
    size_t before = alone.to_engine.size();
    ASSERT_TRUE(alone.turn_until([&] { return alone.to_engine.size() == before + 1; }));
  }
  ASSERT_EQ(alone.to_engine.size(), 2u);
  for (int round = 0; round < 3; ++round) alone.send(1, Alone::chunk_of(0, 1), 3);
  alone.send_all();
  EXPECT_TRUE(alone.engine->start(alone.operation));
  EXPECT_TRUE(alone.turn_until([&] { return alone.done.contains(4); }));
  expect_result(alone);
}

}  // namespace
}  // namespace weft::collective
