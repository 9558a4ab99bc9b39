#include "weft/collective.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <barrier>
#include <map>
#include <set>
#include <thread>

namespace weft::collective {
namespace {

using schedule::Collective;
using testing::HasSubstr;
using transport::ChunkHeader;

// ---- buffers -----------------------------------------------------------------------------

TEST(Buffer, a_slice_is_the_stretch_of_its_parts) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Rng rng(seed);
    std::vector<std::vector<float>> memory;
    Buffer buffer;
    std::vector<float*> places;  // of each element
    for (uint64_t i = 0; i < 1 + rng.below(8); ++i)
      memory.emplace_back(rng.below(4) == 0 ? 0 : rng.below(40));
    for (auto& part : memory) {
      buffer.add(part);
      for (float& element : part) places.push_back(&element);
    }
    ASSERT_EQ(buffer.elements(), places.size());
    for (int round = 0; round < 30; ++round) {
      uint64_t first = rng.below(places.size() + 1);
      uint64_t count = rng.below(places.size() - first + 1);
      std::vector<float*> sliced;
      buffer.slice(first, count, [&](std::span<float> part) {
        EXPECT_FALSE(part.empty());
        for (float& element : part) sliced.push_back(&element);
      });
      auto begin = places.begin() + static_cast<ptrdiff_t>(first);
      EXPECT_EQ(sliced, std::vector<float*>(begin, begin + static_cast<ptrdiff_t>(count)))
          << "seed " << seed << ", " << first << " + " << count;
    }
  }
}

TEST(Buffer, of_nothing_has_nothing_to_slice) {
  Buffer buffer;
  buffer.add({});
  EXPECT_EQ(buffer.elements(), 0u);
  buffer.slice(0, 0, [](std::span<float>) { FAIL(); });
}

TEST(AddTo, adds_every_element_whatever_the_length_and_alignment) {
  std::vector<float> from(300), to(300);
  for (size_t offset = 0; offset < 9; ++offset)
    for (size_t count = 0; count < 200; ++count) {
      for (size_t i = 0; i < 300; ++i) {
        from[i] = static_cast<float>(i);
        to[i] = static_cast<float>(1000 * i);
      }
      add_to(std::span(to).subspan(offset, count), from.data() + 3);
      for (size_t i = 0; i < 300; ++i) {
        bool inside = i >= offset && i < offset + count;
        ASSERT_EQ(to[i], static_cast<float>(1000 * i + (inside ? i - offset + 3 : 0)));
      }
    }
}

// ---- engines over real connections -------------------------------------------------------

uint16_t free_port() {
  Fd fd(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  WEFT_CHECK(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  socklen_t size = sizeof address;
  getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin_port);
}

// One rank: its connections and its engine, driven by the thread that owns it.
struct Node {
  transport::Mesh mesh;
  capture::Recorder& recorder;
  std::unique_ptr<Engine> engine;
  std::vector<std::string> lost;
  std::set<uint32_t> done;

  // Turns until `until` says so; false after ten seconds or when a lane was lost.
  bool turn_until(const std::function<bool()>& until) {
    Nanos deadline = monotonic_clock().now() + Nanos::from_seconds(10);
    while (!until()) {
      if (!lost.empty() || monotonic_clock().now() > deadline) return false;
      mesh.reactor->run_once(Nanos::from_millis(2));
      for (uint32_t number : engine->poll())
        EXPECT_TRUE(done.insert(number).second) << "told twice";
    }
    return true;
  }
  bool finish(uint32_t number) {
    return turn_until([&] { return done.contains(number); });
  }
};

struct Setup {
  uint32_t ranks = 2;
  uint16_t lanes = 2;
  uint64_t chunk_elements = 4096;
  uint64_t early_bytes_limit = 256u << 20;
  std::string folder{};  // for traces; none when empty
};

void run_nodes(const Setup& setup, const std::function<void(Node&)>& body) {
  uint16_t port = free_port();
  // Nobody closes before all are done: an end of a connection is a loss to the other side.
  std::barrier all_done(setup.ranks);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < setup.ranks; ++rank)
    threads.emplace_back([&, rank] {
      transport::JoinOptions join;
      join.rank = {rank};
      join.ranks = setup.ranks;
      join.rendezvous = text("127.0.0.1:%u", unsigned{port});
      join.secret = "a secret of the test";
      join.host = "localhost";
      join.lanes = setup.lanes;
      join.probe = false;
      auto mesh = transport::join(join);
      WEFT_CHECK(mesh.ok());
      std::unique_ptr<capture::Recorder> recorder = capture::Recorder::off();
      if (!setup.folder.empty()) {
        capture::Options options;
        options.path = setup.folder + "/" + trace::file_name(rank);
        options.environment.rank = rank;
        options.environment.ranks = setup.ranks;
        auto started = capture::Recorder::start(options);
        WEFT_CHECK(started.ok());
        recorder = std::move(*started);
      }
      Node node{std::move(*mesh), *recorder, nullptr, {}, {}};
      Engine::Options options;
      options.rank = {rank};
      options.ranks = setup.ranks;
      options.chunk_elements = setup.chunk_elements;
      options.early_bytes_limit = setup.early_bytes_limit;
      node.engine = std::make_unique<Engine>(
          options, *node.mesh.reactor, std::move(node.mesh.lanes_out),
          std::move(node.mesh.lanes_in), *recorder, [&](Rank peer, const Error& error) {
            node.lost.push_back(text("rank %u: %s", peer.index, error.message().c_str()));
          });
      body(node);
      all_done.arrive_and_wait();
      node.engine.reset();
      EXPECT_TRUE(recorder->stop());
    });
  for (std::thread& thread : threads) thread.join();
}

float value(uint64_t i, uint32_t rank, uint32_t operation) {
  return static_cast<float>((i * 7 + operation * 13) % 97 + rank);
}
float sum(uint64_t i, uint32_t ranks, uint32_t operation) {
  uint64_t of_ranks = ranks * (ranks - 1) / 2;
  return static_cast<float>(ranks * ((i * 7 + operation * 13) % 97) + of_ranks);
}

// An all-reduce in uneven parts.
struct Work {
  Work(uint32_t number, uint64_t elements, const Node& node) : data(elements) {
    rank = node.mesh.rank.index;
    ranks = node.mesh.ranks;
    operation.number = number;
    for (uint64_t i = 0; i < elements; ++i) data[i] = value(i, rank, number);
    Rng rng(number);
    for (uint64_t from = 0; from < elements;) {
      uint64_t size = std::min<uint64_t>(elements - from, 1 + rng.below(elements));
      operation.buffer.add(std::span(data).subspan(from, size));
      from += size;
    }
  }
  void expect_sum() const {
    for (uint64_t i = 0; i < data.size(); ++i)
      ASSERT_EQ(data[i], sum(i, ranks, operation.number))
          << "rank " << rank << ", operation " << operation.number << ", element " << i;
  }
  Operation operation;
  std::vector<float> data;
  uint32_t rank, ranks;
};

TEST(Engine, runs_several_operations_at_a_time) {
  for (uint32_t ranks : {2u, 3u, 4u}) {
    run_nodes({.ranks = ranks, .lanes = 3, .chunk_elements = 1000}, [&](Node& node) {
      std::vector<std::unique_ptr<Work>> all;
      for (uint32_t number = 0; number < 8; ++number) {
        all.push_back(std::make_unique<Work>(number, number * 9973 % 50000, node));
        all.back()->operation.priority = 8 - number;
        node.engine->start(all.back()->operation);
      }
      EXPECT_FALSE(node.engine->idle());
      EXPECT_TRUE(node.turn_until([&] { return node.done.size() == 8; }));
      for (auto& work : all) work->expect_sum();
      EXPECT_TRUE(node.engine->idle());
    });
  }
}

TEST(Engine, keeps_chunks_that_come_before_their_operation) {
  // Rank 1 starts when rank 0 has sent all that it can.
  std::atomic<bool> handed_over = false;
  run_nodes({}, [&](Node& node) {
    Work work(5, 1u << 20, node);
    if (node.mesh.rank.index == 0) {
      node.engine->start(work.operation);
      EXPECT_TRUE(node.turn_until([&] { return !node.engine->progress().waits_for_next; }));
      Progress progress = node.engine->progress();
      EXPECT_EQ(progress.operations, 1u);
      EXPECT_EQ(progress.oldest, 5u);
      EXPECT_EQ(progress.bytes_total, 4u << 20);
      EXPECT_TRUE(progress.waits_for_previous);
      handed_over = true;
    } else {
      EXPECT_TRUE(node.turn_until([&] { return handed_over.load(); }));
      for (int i = 0; i < 50; ++i) node.mesh.reactor->run_once(Nanos::from_millis(1));
      EXPECT_TRUE(node.engine->idle());
      node.engine->start(work.operation);
    }
    EXPECT_TRUE(node.finish(5));
    work.expect_sum();
  });
}

TEST(Engine, stops_reading_when_too_much_comes_early_and_goes_on_after) {
  // More than sockets hold, and a bound that is soon reached.
  std::atomic<bool> may_start = false;
  run_nodes({.lanes = 3, .early_bytes_limit = 100000}, [&](Node& node) {
    Work first(0, 12u << 20, node), second(1, 1u << 18, node);
    if (node.mesh.rank.index == 0) {
      node.engine->start(first.operation);
      node.engine->start(second.operation);
      // Stays full: rank 1 does not take it all.
      Nanos until = monotonic_clock().now() + Nanos::from_millis(300);
      EXPECT_TRUE(node.turn_until([&] { return monotonic_clock().now() > until; }));
      EXPECT_TRUE(node.engine->progress().waits_for_next);
      may_start = true;
    } else {
      EXPECT_TRUE(node.turn_until([&] { return may_start.load(); }));
      node.engine->start(first.operation);
      Nanos until = monotonic_clock().now() + Nanos::from_millis(50);
      EXPECT_TRUE(node.turn_until([&] { return monotonic_clock().now() > until; }));
      node.engine->start(second.operation);
    }
    EXPECT_TRUE(node.finish(0));
    EXPECT_TRUE(node.finish(1));
    first.expect_sum();
    second.expect_sum();
  });
}

TEST(Engine, operations_that_differ_are_refused_by_both_names) {
  struct {
    Collective collective;
    uint64_t elements;
    uint32_t root;
    const char* words;
  } cases[] = {
      {Collective::all_reduce, 2000, 0, "all_reduce of 2000 elements on rank 1"},
      {Collective::reduce_scatter, 1000, 0, "reduce_scatter of 1000 elements on rank 1"},
      {Collective::broadcast, 1000, 1, "broadcast of 1000 elements from rank 1 on rank 1"},
  };
  for (auto& other : cases) {
    for (bool early : {false, true}) {
      std::atomic<bool> seen = false;
      run_nodes({}, [&](Node& node) {
        bool differs = node.mesh.rank.index == 1;
        Work work(3, differs ? other.elements : 1000, node);
        if (differs) {
          work.operation.collective = other.collective;
          work.operation.root = {other.root};
        }
        if (early && !differs) {
          // Its chunks are here before it says what it expects.
          for (int i = 0; i < 30; ++i) node.mesh.reactor->run_once(Nanos::from_millis(1));
        }
        node.engine->start(work.operation);
        if (differs) {
          // It may see the difference too, or, if it only sends, have ended by then.
          node.turn_until([&] { return seen.load(); });
          return;
        }
        EXPECT_FALSE(node.finish(3));
        seen = true;
        ASSERT_FALSE(node.lost.empty());
        EXPECT_THAT(node.lost[0], HasSubstr("rank 1: operation 3 is "));
        EXPECT_THAT(node.lost[0], HasSubstr(other.words));
        EXPECT_THAT(node.lost[0], HasSubstr("but all_reduce of 1000 elements on rank 0"));
      });
    }
  }
}

TEST(Engine, that_is_halted_leaves_memory_alone) {
  std::atomic<bool> halted = false;
  run_nodes({}, [&](Node& node) {
    Work work(0, 8u << 20, node);
    node.engine->start(work.operation);
    if (node.mesh.rank.index == 0) {
      EXPECT_TRUE(node.turn_until([&] { return halted.load(); }));
      Nanos until = monotonic_clock().now() + Nanos::from_millis(100);
      node.turn_until([&] { return monotonic_clock().now() > until; });
      EXPECT_TRUE(node.lost.empty()) << node.lost[0];
      return;
    }
    EXPECT_TRUE(node.turn_until([&] { return node.engine->progress().bytes_done > 0; }));
    node.engine->halt();
    std::fill(work.data.begin(), work.data.end(), 77.0f);
    halted = true;
    Nanos until = monotonic_clock().now() + Nanos::from_millis(100);
    node.turn_until([&] { return monotonic_clock().now() > until; });
    EXPECT_TRUE(std::all_of(work.data.begin(), work.data.end(), [](float x) { return x == 77; }));
    EXPECT_TRUE(node.done.empty());
  });
}

// ---- a peer whose bytes we write ---------------------------------------------------------

std::pair<Fd, Fd> tcp_pair() {
  Fd listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  WEFT_CHECK(::bind(listener.get(), raw, size) == 0 && ::listen(listener.get(), 1) == 0);
  getsockname(listener.get(), raw, &size);
  Fd one(::socket(AF_INET, SOCK_STREAM, 0));
  WEFT_CHECK(::connect(one.get(), raw, sizeof address) == 0);
  Fd two(::accept4(listener.get(), nullptr, nullptr, 0));
  WEFT_CHECK(bool(two));
  return {std::move(one), std::move(two)};
}

// Rank 1 of 2 with two lanes; rank 0 is the test.
struct Alone {
  Alone() {
    std::vector<Fd> out, in;
    for (int lane = 0; lane < 2; ++lane) {
      auto [from_engine, to_us] = tcp_pair();
      auto [from_us, to_engine] = tcp_pair();
      out.push_back(std::move(from_engine));
      theirs.push_back(std::move(to_us));
      in.push_back(std::move(to_engine));
      ours.push_back(std::move(from_us));
    }
    Engine::Options options;
    options.rank = {1};
    options.ranks = 2;
    options.chunk_elements = 256;
    engine = std::make_unique<Engine>(options, reactor, std::move(out), std::move(in), *recorder,
                                      [this](Rank peer, const Error& error) {
                                        EXPECT_EQ(peer.index, 0u);
                                        lost.push_back(error.message());
                                      });
    data.resize(1000);
    operation.number = 4;
    operation.buffer.add(data);
  }

  // A chunk as a correct rank 0 would send it: 2 segments of 500 elements, in chunks of 256.
  static ChunkHeader chunk_of(uint16_t step, uint32_t chunk) {
    ChunkHeader header;
    header.collective = static_cast<uint8_t>(Collective::all_reduce);
    header.operation = 4;
    header.step = step;
    header.chunk = chunk;
    header.elements = 1000;
    header.first = (step == 0 ? 0 : 500) + 256 * chunk;
    header.length = 4 * (chunk == 0 ? 256 : 244);
    header.message = 1 + chunk + 10 * uint64_t{step};
    return header;
  }
  // `share`: how much of the payload to send.
  void send(size_t lane, ChunkHeader header, float fill = 1, double share = 1) {
    std::vector<float> payload(header.length / 4, fill);
    std::span<const std::byte> bytes = std::as_bytes(std::span(payload));
    header.checksum = transport::checksum({&bytes, 1});
    std::array<std::byte, transport::kChunkHeaderBytes> head;
    transport::encode(header, head);
    auto size = static_cast<size_t>(static_cast<double>(bytes.size()) * share);
    ASSERT_EQ(::send(ours[lane].get(), head.data(), head.size(), 0),
              static_cast<ssize_t>(head.size()));
    ASSERT_EQ(::send(ours[lane].get(), bytes.data(), size, 0), static_cast<ssize_t>(size));
    turns();
  }
  void turns() {
    for (int i = 0; i < 10; ++i) {
      reactor.run_once(Nanos::from_millis(1));
      for (uint32_t number : engine->poll()) done.insert(number);
    }
  }

  transport::Reactor reactor;
  std::unique_ptr<capture::Recorder> recorder = capture::Recorder::off();
  std::vector<Fd> ours, theirs;
  std::unique_ptr<Engine> engine;
  std::vector<float> data;
  Operation operation;
  std::vector<std::string> lost;
  std::set<uint32_t> done;
};

TEST(Peer, that_sends_what_is_due_completes_the_operation) {
  Alone alone;
  alone.engine->start(alone.operation);
  for (uint16_t step : {uint16_t{0}, uint16_t{1}})
    for (uint32_t chunk : {1u, 0u})
      alone.send(chunk, Alone::chunk_of(step, chunk), step == 0 ? 3 : 5);
  EXPECT_TRUE(alone.lost.empty()) << alone.lost[0];
  EXPECT_TRUE(alone.done.contains(4));
  for (size_t i = 0; i < 1000; ++i) EXPECT_EQ(alone.data[i], i < 500 ? 3 : 5) << i;
}

TEST(Peer, that_sends_a_chunk_twice_is_refused) {
  for (bool early : {false, true}) {
    Alone alone;
    if (!early) alone.engine->start(alone.operation);
    alone.send(0, Alone::chunk_of(0, 0));
    alone.send(1, Alone::chunk_of(0, 0));
    if (early) alone.engine->start(alone.operation);
    ASSERT_EQ(alone.lost.size(), 1u);
    EXPECT_EQ(alone.lost[0], "chunk 0 of step 0 came twice");
    EXPECT_EQ(alone.data[0], 1) << "it was added once";
  }
}

TEST(Peer, that_sends_a_chunk_on_two_lanes_at_once_is_refused) {
  for (uint16_t step : {uint16_t{0}, uint16_t{1}}) {
    Alone alone;
    alone.engine->start(alone.operation);
    alone.send(0, Alone::chunk_of(step, 0), 1, 0.5);
    alone.send(1, Alone::chunk_of(step, 0), 2, 0.5);
    ASSERT_EQ(alone.lost.size(), 1u);
    EXPECT_EQ(alone.lost[0],
              text("operation 4: chunk 0 of step %u comes on two lanes at once", unsigned{step}));
  }
}

TEST(Peer, that_begins_a_chunk_early_and_repeats_it_later_is_refused) {
  Alone alone;
  alone.send(0, Alone::chunk_of(1, 0), 1, 0.5);  // lands aside: the operation is not known
  alone.engine->start(alone.operation);
  alone.send(1, Alone::chunk_of(1, 0), 2);
  EXPECT_TRUE(alone.lost.empty());
  std::vector<float> rest(128, 1);
  ASSERT_EQ(::send(alone.ours[0].get(), rest.data(), 512, 0), 512);
  alone.turns();
  ASSERT_EQ(alone.lost.size(), 1u);
  EXPECT_EQ(alone.lost[0], "chunk 0 of step 1 came twice");
  EXPECT_EQ(alone.data[500], 2);
}

TEST(Peer, that_sends_what_is_not_due_is_refused) {
  struct {
    std::function<void(ChunkHeader&)> change;
    const char* words;
  } cases[] = {
      {[](ChunkHeader& h) { h.step = 2; }, "step 2 of an operation of 2 steps"},
      {[](ChunkHeader& h) { h.step = 0xffff; }, "step 65535 of an operation of 2 steps"},
      {[](ChunkHeader& h) { h.chunk = 2; }, "chunk 2 of step 0, which has 2"},
      {[](ChunkHeader& h) { h.chunk = 0xffffffff; }, "chunk 4294967295 of step 0, which has 2"},
      {[](ChunkHeader& h) { h.first = 1; }, "not cut as it is here"},
      {[](ChunkHeader& h) { h.first = ~uint64_t{0}; }, "not cut as it is here"},
      {[](ChunkHeader& h) { h.length = 2048; }, "not cut as it is here"},
      {[](ChunkHeader& h) { h.length = 0; }, "not cut as it is here"},
      {[](ChunkHeader& h) { h.elements = 999; }, "all_reduce of 999 elements on rank 0"},
      {[](ChunkHeader& h) { h.collective = 200; }, "unknown of 1000 elements on rank 0"},
      {[](ChunkHeader& h) { h.root = 1; }, "all ranks must call the same"},
  };
  for (auto& [change, words] : cases)
    for (bool early : {false, true}) {
      SCOPED_TRACE(text("%s, early %d", words, early));
      Alone alone;
      if (!early) alone.engine->start(alone.operation);
      ChunkHeader header = Alone::chunk_of(0, 0);
      change(header);
      alone.send(0, header);
      if (early) alone.engine->start(alone.operation);
      ASSERT_EQ(alone.lost.size(), 1u);
      EXPECT_THAT(alone.lost[0], HasSubstr(words));
      EXPECT_TRUE(
          std::all_of(alone.data.begin(), alone.data.end(), [](float x) { return x == 0; }));
    }
}

TEST(Peer, that_sends_data_against_the_ring_is_refused) {
  Alone alone;
  alone.engine->start(alone.operation);
  std::array<std::byte, transport::kChunkHeaderBytes> head;
  transport::encode(Alone::chunk_of(0, 0), head);
  ASSERT_EQ(::send(alone.theirs[0].get(), head.data(), head.size(), 0),
            static_cast<ssize_t>(head.size()));
  alone.turns();
  ASSERT_EQ(alone.lost.size(), 1u);
  EXPECT_EQ(alone.lost[0], "data on a lane that only sends");
}

// ---- what is recorded --------------------------------------------------------------------

TEST(Trace, has_both_halves_of_every_chunk_and_every_operation) {
  constexpr uint32_t kRanks = 3;
  constexpr std::array<uint64_t, 4> kElements = {100003, 2, 50000, 0};
  std::string folder = testing::TempDir() + text("weft-collective-%d", ::getpid());
  ASSERT_EQ(::system(("rm -rf " + folder + " && mkdir -p " + folder).c_str()), 0);
  run_nodes({.ranks = kRanks, .lanes = 2, .chunk_elements = 3000, .folder = folder},
            [&](Node& node) {
              std::vector<std::unique_ptr<Work>> all;
              for (uint32_t number = 0; number < kElements.size(); ++number) {
                all.push_back(std::make_unique<Work>(number, kElements[number], node));
                all.back()->operation.iteration = 7;
                all.back()->operation.bucket = number;
                all.back()->operation.partition = 1;
                // One of them late on one rank: its first chunks come early.
                if (number == 2 && node.mesh.rank.index == 1) {
                  for (int i = 0; i < 30; ++i) node.mesh.reactor->run_once(Nanos::from_millis(1));
                }
                node.engine->start(all.back()->operation);
              }
              EXPECT_TRUE(node.turn_until([&] { return node.done.size() == kElements.size(); }));
              node.engine->record_tcp_info();
              for (auto& work : all) work->expect_sum();
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
    std::map<uint32_t, double> sent_bytes;
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
