// Lanes through shared memory: the ring, its bells, and peers that die or lie.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "shm/segment.h"
#include "weft/lane.h"
#include "weft_testing/chunks.h"
#include "weft_testing/loopback.h"

namespace weft::lane {
namespace {

using testing::HasSubstr;
using Role = Lane::Role;

bool has_name(const std::string& name) {
  Fd file(::shm_open(name.c_str(), O_RDONLY | O_CLOEXEC, 0));
  return static_cast<bool>(file);
}

// Where the positions are that the two sides write (as segment.cc lays them out).
enum class Word : uint8_t { written = 0, writer_sleeps = 8, read = 64, reader_sleeps = 72 };
std::atomic<uint64_t>& position(shm::Segment& segment, Word word) {
  auto* base = reinterpret_cast<std::byte*>(&segment.head());
  return *reinterpret_cast<std::atomic<uint64_t>*>(base + static_cast<size_t>(word));
}

// Both mappings of one segment.
struct Both {
  Both() {
    auto first = shm::Segment::make(net::kernel_system());
    WEFT_CHECK(first.ok());
    made = *first;
    auto second = shm::Segment::attach(net::kernel_system(), made->name());
    WEFT_CHECK(second.ok());
    attached = *second;
  }
  std::shared_ptr<shm::Segment> made, attached;
};

// The two sockets of a lane, without the lane.
struct Ends {
  explicit Ends(const Both& both) {
    auto [one, two] = tcp_pair();
    auto bell = net::adopt(std::move(one)), other = net::adopt(std::move(two));
    out = shm::writer(bell, both.made);
    in = shm::reader(other, both.attached);
  }
  static size_t bells(net::Socket& socket) {
    std::array<std::byte, 64> bytes;
    iovec part{bytes.data(), bytes.size()};
    // Loopback delivers before send() returns, but leave it a moment.
    for (int attempt = 0; attempt < 20; ++attempt) {
      ssize_t got = socket.receive(&part, 1);
      if (got > 0) return static_cast<size_t>(got);
      pause_ms(1);
    }
    return 0;
  }
  std::unique_ptr<net::Socket> out, in;
};

ssize_t put(net::Socket& socket, std::span<const std::byte> bytes) {
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  return socket.send(&part, 1);
}

// ---- segments ----------------------------------------------------------------------------

TEST(Segment, is_the_same_memory_on_both_sides_and_twice_in_a_row) {
  Both both;
  EXPECT_EQ(both.made->capacity(), both.attached->capacity());
  size_t capacity = both.made->capacity();
  both.made->data()[capacity - 1] = std::byte{7};
  both.made->data()[0] = std::byte{9};
  EXPECT_EQ(both.attached->data()[capacity - 1], std::byte{7});
  EXPECT_EQ(both.attached->data()[capacity], std::byte{9});
  EXPECT_EQ(both.attached->data()[2 * capacity - 1], std::byte{7});
}

TEST(Segment, leaves_no_name_behind) {
  std::string name;
  {
    auto made = shm::Segment::make(net::kernel_system());
    ASSERT_TRUE(made);
    name = (*made)->name();
    EXPECT_TRUE(has_name(name));
  }
  EXPECT_FALSE(has_name(name)) << "never attached";
  Both both;
  name = both.made->name();
  EXPECT_TRUE(has_name(name));
  Ends ends(both);
  EXPECT_FALSE(has_name(name)) << "in use";
  both = Both();
  EXPECT_TRUE(has_name(both.made->name()));
}

TEST(Segment, is_not_attached_under_a_name_or_of_a_size_that_is_not_ours) {
  for (const char* name : {"", "/", "weft-1", "/other-1", "/weft-/../x", "/weft-0/1"}) {
    auto attached = shm::Segment::attach(net::kernel_system(), name);
    ASSERT_FALSE(attached) << name;
    EXPECT_EQ(attached.error().code(), Code::invalid_argument) << name;
  }
  EXPECT_FALSE(shm::Segment::attach(net::kernel_system(), "/weft-lane-" + std::string(200, 'a')));
  EXPECT_FALSE(shm::Segment::attach(net::kernel_system(), "/weft-lane-" + std::string(24, '0')));
  for (off_t size : {off_t{0}, off_t{4096}, off_t{1} << 20, off_t{1} << 30}) {
    std::string name = text("/weft-lane-%024x", static_cast<unsigned>(::getpid()));
    Fd file(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    ASSERT_TRUE(file && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0);
    ASSERT_EQ(::ftruncate(file.get(), size), 0);
    auto attached = shm::Segment::attach(net::kernel_system(), name);
    ::shm_unlink(name.c_str());
    ASSERT_FALSE(attached) << size;
    EXPECT_THAT(attached.error().message(), HasSubstr("is not a lane's"));
  }
}

TEST(Segment, whose_name_was_taken_away_is_an_error_and_not_a_crash) {
  auto made = shm::Segment::make(net::kernel_system());
  ASSERT_TRUE(made);
  ::shm_unlink((*made)->name().c_str());
  auto attached = shm::Segment::attach(net::kernel_system(), (*made)->name());
  ASSERT_FALSE(attached);
  EXPECT_THAT(attached.error().message(), HasSubstr("cannot open shared memory"));
  made->reset();  // its own unlink finds nothing
}

// ---- bells -------------------------------------------------------------------------------

TEST(Bells, ring_only_for_a_reader_that_sleeps) {
  Both both;
  Ends ends(both);
  std::vector<std::byte> bytes = noise(100, 1);
  ASSERT_EQ(put(*ends.out, bytes), 100);
  EXPECT_EQ(Ends::bells(*ends.in), 0u);
  EXPECT_EQ(ends.in->memory_events(EPOLLIN, true), uint32_t{EPOLLIN}) << "it was written before";
  ends.in->consume(100);
  EXPECT_EQ(ends.in->memory_events(EPOLLIN, true), 0u);
  ASSERT_EQ(put(*ends.out, bytes), 100);
  ASSERT_EQ(put(*ends.out, bytes), 100);
  EXPECT_EQ(Ends::bells(*ends.in), 1u) << "once is enough";
  EXPECT_EQ(ends.in->peek().size(), 200u);
  EXPECT_EQ(ends.in->memory_events(0, true), 0u) << "not asked for";
}

TEST(Bells, ring_for_a_writer_that_waits_for_room) {
  Both both;
  Ends ends(both);
  std::vector<std::byte> bytes(both.made->capacity());
  EXPECT_EQ(put(*ends.out, bytes), static_cast<ssize_t>(bytes.size()));
  EXPECT_EQ(put(*ends.out, bytes), -EAGAIN);
  EXPECT_EQ(ends.out->memory_events(EPOLLOUT, false), 0u);
  EXPECT_EQ(ends.out->memory_events(EPOLLOUT, true), 0u);
  ends.in->consume(bytes.size() / 4);
  EXPECT_EQ(Ends::bells(*ends.out), 0u) << "not worth waking for";
  ends.in->consume(bytes.size() / 4);
  EXPECT_EQ(Ends::bells(*ends.out), 1u);
  ends.in->consume(bytes.size() / 4);
  EXPECT_EQ(Ends::bells(*ends.out), 0u);
  EXPECT_EQ(ends.out->memory_events(EPOLLOUT, false), uint32_t{EPOLLOUT});
  EXPECT_EQ(put(*ends.out, bytes), static_cast<ssize_t>(bytes.size() / 4 * 3));
}

// ---- lanes -------------------------------------------------------------------------------

struct SharedLane {
  SharedLane() : SharedLane(tcp_pair()) {}
  explicit SharedLane(std::pair<Fd, Fd> ends)
      : out(std::make_unique<End>(Role::out, *world, net::adopt(std::move(ends.first)), both.made)),
        in(std::make_unique<End>(Role::in, *world, net::adopt(std::move(ends.second)),
                                 both.attached)) {
    EXPECT_TRUE(turn_until(*world, [&] { return out->lane.ready(); }));
    EXPECT_TRUE(out->lane.shared());
    EXPECT_TRUE(in->lane.shared());
  }
  Both both;
  std::unique_ptr<net::Reactor> world = new_reactor();
  std::unique_ptr<End> out, in;
};

TEST(SharedLane, carries_chunks_round_and_round_in_place_or_not) {
  for (bool in_place : {true, false}) {
    SharedLane lane;
    EXPECT_FALSE(has_name(lane.both.made->name()));
    lane.in->handler.prefer_in_place = in_place;
    Rng rng(in_place ? 1 : 2);
    std::vector<size_t> sizes;
    for (uint32_t chunk = 0; chunk < 150; ++chunk) {
      sizes.push_back(chunk % 7 == 0 ? 0 : rng.below(chunk % 5 == 0 ? 700000 : 50000));
      size_t part = sizes.back() / 3;
      lane.out->handler.queue(0, chunk,
                              {noise(part, chunk), noise(sizes.back() - part, chunk + 1)});
    }
    ASSERT_TRUE(turn_until(*lane.world, [&] {
      lane.out->send_all();
      return lane.in->handler.arrived_.size() == sizes.size();
    })) << lane.in->handler.arrived_.size();
    for (uint32_t chunk = 0; chunk < sizes.size(); ++chunk) {
      std::vector<std::byte> expected = noise(sizes[chunk] / 3, chunk);
      std::vector<std::byte> rest = noise(sizes[chunk] - sizes[chunk] / 3, chunk + 1);
      expected.insert(expected.end(), rest.begin(), rest.end());
      EXPECT_EQ(lane.in->handler.arrived_[chunk].payload, expected) << chunk;
    }
    EXPECT_EQ(lane.in->handler.in_place, in_place ? sizes.size() : 0u);
    EXPECT_EQ(lane.out->handler.settled_.size(), sizes.size());
    EXPECT_EQ(lane.out->handler.held(), 0u);
    lane.out->lane.halt();
    EXPECT_TRUE(lane.out->lane.take_unsettled().empty());
    EXPECT_EQ(lane.out->lane.counters().bytes_sent, lane.in->lane.counters().bytes_received);
  }
}

TEST(SharedLane, carries_chunks_that_are_larger_than_the_ring) {
  SharedLane lane;
  size_t capacity = lane.both.made->capacity();
  std::vector<size_t> sizes = {capacity / 2, capacity / 2 + 1, capacity, 3 * capacity + 17, 5};
  for (uint32_t chunk = 0; chunk < sizes.size(); ++chunk)
    lane.out->handler.queue(0, chunk, {noise(sizes[chunk], chunk)});
  ASSERT_TRUE(turn_until(*lane.world, [&] {
    lane.out->send_all();
    return lane.in->handler.arrived_.size() == sizes.size();
  })) << lane.in->handler.arrived_.size();
  EXPECT_EQ(lane.in->handler.offered_in_place, 2u) << "the first and the last";
  for (uint32_t chunk = 0; chunk < sizes.size(); ++chunk)
    EXPECT_EQ(lane.in->handler.arrived_[chunk].payload, noise(sizes[chunk], chunk)) << chunk;
}

TEST(SharedLane, stops_at_a_chunk_that_is_not_due_and_goes_on_when_it_is) {
  SharedLane lane;
  lane.in->handler.first_unknown = 1;
  for (uint32_t chunk = 0; chunk < 40; ++chunk)
    lane.out->handler.queue(chunk / 20, chunk, {noise(200000, chunk)});
  auto turns = [&] {
    for (int i = 0; i < 100; ++i) {
      lane.out->send_all();
      lane.world->run_once(Nanos{0});
    }
  };
  turns();
  EXPECT_EQ(lane.in->handler.arrived_.size(), 20u);
  EXPECT_GT(lane.out->handler.waiting(), 0u) << "the ring is full";
  lane.in->handler.first_unknown = 2;
  lane.in->lane.resume();
  turns();
  ASSERT_EQ(lane.in->handler.arrived_.size(), 40u);
  EXPECT_EQ(lane.in->handler.arrived_[39].payload, noise(200000, 39));
}

TEST(SharedLane, whose_sides_sleep_are_woken) {
  // Two threads, each with waits so long that a bell that does not ring is seen as an empty turn.
  constexpr Nanos kLong = Nanos::from_seconds(20);
  constexpr uint32_t kChunks = 60;
  Both both;
  auto ends = tcp_pair();
  std::atomic<bool> all_arrived = false;
  std::thread reading([&, fd = std::make_shared<Fd>(std::move(ends.second))] {
    auto world = new_reactor();
    End in(Role::in, *world, net::adopt(std::move(*fd)), both.attached);
    while (in.handler.arrived_.size() < kChunks) {
      EXPECT_TRUE(world->run_once(kLong)) << "nobody woke the reader";
      if (in.handler.arrived_.size() % 10 == 5) pause_ms(5);  // so that the writer must wait
    }
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk)
      EXPECT_EQ(in.handler.arrived_[chunk].payload, noise(900000, chunk));
    all_arrived = true;
  });
  auto world = new_reactor();
  End out(Role::out, *world, net::adopt(std::move(ends.first)), both.made);
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk)
    out.handler.queue(0, chunk, {noise(900000, chunk)});
  while (out.handler.sent_.size() < kChunks && !out.error) {
    if (out.handler.sent_.size() % 20 == 10) pause_ms(5);  // so that the reader must wait
    if (out.lane.send_one()) continue;
    EXPECT_TRUE(world->run_once(kLong)) << "nobody woke the writer";
  }
  reading.join();
  EXPECT_TRUE(all_arrived);
}

TEST(SharedLane, a_writer_that_is_always_ahead_does_not_keep_the_reader_in_one_turn) {
  // Heartbeats, deadlines and other lanes have their turn in between.
  constexpr uint32_t kChunks = 60;
  constexpr uint64_t kMostInATurn = 8u << 20;
  for (bool in_place : {true, false}) {
    SharedLane lane;
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk)
      lane.out->handler.queue(0, chunk, {noise(500000, chunk)});
    lane.in->handler.prefer_in_place = in_place;
    // Two chunks are always there, and there is room for a third.
    lane.in->handler.on_arrival = [&] { lane.out->lane.send_one(); };
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(lane.out->lane.send_one());
    size_t turns = 0;
    for (; lane.in->handler.arrived_.size() < kChunks && turns < 1000; ++turns) {
      uint64_t before = lane.in->lane.counters().bytes_received;
      lane.world->run_once(Nanos{0});
      EXPECT_LE(lane.in->lane.counters().bytes_received - before, kMostInATurn);
    }
    EXPECT_EQ(lane.in->handler.arrived_.size(), kChunks) << "what is left is announced again";
    EXPECT_LT(turns, 100u);
  }
}

TEST(SharedLane, a_peer_that_is_gone_is_noticed_and_its_last_words_are_read) {
  SharedLane lane;
  lane.out->handler.queue(0, 0, {noise(1000, 1)});
  lane.out->handler.queue(0, 1, {noise(1000, 2)});
  lane.out->send_all();
  lane.out.reset();
  ASSERT_TRUE(turn_until(*lane.world, [&] { return lane.in->error.has_value(); }));
  EXPECT_EQ(lane.in->error->code(), Code::peer_lost);
  EXPECT_EQ(lane.in->handler.arrived_.size(), 2u);

  SharedLane other;
  std::vector<std::byte> much = noise(5u << 20, 1);
  other.out->handler.queue(0, 0, {much});
  other.out->send_all();
  other.in.reset();
  ASSERT_TRUE(turn_until(*other.world, [&] { return other.out->error.has_value(); }));
  EXPECT_EQ(other.out->error->code(), Code::peer_lost);
  auto kept = other.out->lane.take_unsettled();
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_FALSE(kept[0].retained);
}

TEST(SharedLane, positions_that_cannot_be_do_no_harm) {
  uint64_t capacity = Both().made->capacity();
  for (uint64_t mad : {capacity + 1, uint64_t{1} << 40, ~uint64_t{0}, uint64_t{0} - capacity}) {
    SCOPED_TRACE(mad);
    {  // A writer that claims to have written what does not fit.
      SharedLane lane;
      position(*lane.both.made, Word::written) = mad;
      for (int i = 0; i < 20; ++i) lane.world->run_once(Nanos{0});
      EXPECT_TRUE(lane.in->handler.arrived_.empty());
      lane.out.reset();
      ASSERT_TRUE(turn_until(*lane.world, [&] { return lane.in->error.has_value(); }));
    }
    {  // A reader that claims to have read what was not written.
      SharedLane lane;
      position(*lane.both.attached, Word::read) = mad;
      lane.out->handler.queue(0, 0, {noise(5u << 20, 1)});
      for (int i = 0; i < 20; ++i) {
        lane.out->send_all();
        lane.world->run_once(Nanos{0});
      }
      EXPECT_TRUE(lane.in->handler.arrived_.empty() || mad == ~uint64_t{0})
          << "one byte is possible";
      lane.in.reset();
      ASSERT_TRUE(turn_until(*lane.world, [&] { return lane.out->error.has_value(); }));
    }
  }
}

TEST(SharedLane, garbage_in_the_ring_is_refused) {
  SharedLane lane;
  std::vector<std::byte> garbage = noise(5000, 3);
  std::memcpy(lane.both.made->data(), garbage.data(), garbage.size());
  position(*lane.both.made, Word::written) = garbage.size();
  ASSERT_TRUE(turn_until(*lane.world, [&] { return lane.in->error.has_value(); }));
  EXPECT_EQ(lane.in->error->code(), Code::corrupt);
  EXPECT_EQ(lane.in->handler.offers, 0u);
}

TEST(SharedLane, is_an_ordinary_one_when_the_memory_is_not_attached) {
  auto [one, two] = tcp_pair();
  auto world = new_reactor();
  auto made = shm::Segment::make(net::kernel_system());
  ASSERT_TRUE(made);
  std::string name = (*made)->name();
  End out(Role::out, *world, net::adopt(std::move(one)), std::move(*made));
  End in(Role::in, *world, net::adopt(std::move(two)), nullptr);
  out.handler.queue(0, 0, {noise(1000, 1)});
  ASSERT_TRUE(turn_until(*world, [&] {
    out.send_all();
    return in.handler.arrived_.size() == 1;
  }));
  EXPECT_FALSE(out.lane.shared());
  EXPECT_FALSE(has_name(name));
}

}  // namespace
}  // namespace weft::lane
