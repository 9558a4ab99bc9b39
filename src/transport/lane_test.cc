// Chunks over lanes: real connections, and what a damaged or a dead peer does to them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "testing.h"
#include "weft/transport.h"

namespace weft::transport {
namespace {

using testing::HasSubstr;

// Sends what is queued, keeps what arrives.
class TestHandler final : public ChunkHandler {
 public:
  void queue(uint32_t operation, uint32_t chunk, std::vector<std::vector<std::byte>> parts) {
    ChunkHeader header;
    header.operation = operation;
    header.chunk = chunk;
    header.step = 2;
    header.message = 1000 + chunk;
    for (auto& part : parts) header.length += static_cast<uint32_t>(part.size());
    queue_.push_back({header, std::move(parts)});
  }

  bool take(uint16_t, OutgoingChunk& out) override {
    if (queue_.empty()) return false;
    // Payload stays valid until sent(): by message, because lanes send at the same time.
    auto [place, inserted] =
        sending_.emplace(queue_.front().header.message, std::move(queue_.front()));
    queue_.pop_front();
    out.header = place->second.header;
    for (auto& part : place->second.parts) out.payload.push_back(part);
    return true;
  }
  void sent(uint16_t lane, const ChunkHeader& header, Moment when) override {
    EXPECT_LE(when.first, when.last);
    sending_.erase(header.message);
    ++sent_by_lane[lane];
  }
  Result<Landing> arriving(uint16_t, const ChunkHeader& header) override {
    ++offers;
    if (header.operation >= first_unknown) return Landing{true, {}};
    if (refuse) return error(Code::invalid_argument, "not wanted");
    Arrived& place = arriving_[header.message];
    place.header = header;
    // In uneven parts, some empty.
    Landing landing;
    place.payload.resize(header.length);
    for (size_t from = 0, size = 0; from < header.length; from += size, size = size * 2 + 1) {
      size_t here = std::min<size_t>(size, header.length - from);
      landing.payload.push_back(std::span(place.payload).subspan(from, here));
      size = here;
    }
    return landing;
  }
  Result<void> arrived(uint16_t lane, const ChunkHeader& header, Moment when) override {
    EXPECT_LE(when.first, when.last);
    arrived_.push_back(std::move(arriving_.at(header.message)));
    arriving_.erase(header.message);
    ++arrived_by_lane[lane];
    return {};
  }

  struct Arrived {
    ChunkHeader header;
    std::vector<std::byte> payload;
  };
  std::vector<Arrived> arrived_;
  std::map<uint16_t, size_t> sent_by_lane, arrived_by_lane;
  size_t offers = 0;
  uint32_t first_unknown = 0xffffffff;
  bool refuse = false;

 private:
  struct Queued {
    ChunkHeader header;
    std::vector<std::vector<std::byte>> parts;
  };
  std::deque<Queued> queue_;
  std::map<uint64_t, Queued> sending_;
  std::map<uint64_t, Arrived> arriving_;
};

std::vector<std::byte> noise(size_t size, uint64_t seed) {
  std::vector<std::byte> out(size);
  Rng rng(seed);
  for (std::byte& b : out) b = std::byte(rng.below(256));
  return out;
}

// A lane with its own handler and the error that ended it.
struct End {
  End(Reactor& reactor, Fd socket, uint16_t index = 0)
      : lane(reactor, std::move(socket), index, handler, monotonic_clock(),
             cost::unsent_limit(64u << 10), [this](uint16_t, Error told) {
               EXPECT_FALSE(error) << "told twice";
               error = std::move(told);
             }) {}
  TestHandler handler;
  std::optional<Error> error;
  Lane lane;
};

// The bytes of a chunk as a lane writes them.
std::vector<std::byte> as_sent(uint32_t operation, uint32_t chunk,
                               std::vector<std::vector<std::byte>> parts) {
  auto [one, two] = tcp_pair();
  Reactor reactor;
  End sender(reactor, std::move(one));
  size_t size = kChunkHeaderBytes;
  for (auto& part : parts) size += part.size();
  sender.handler.queue(operation, chunk, std::move(parts));
  EXPECT_TRUE(sender.lane.send_one());
  std::vector<std::byte> out(size);
  EXPECT_EQ(::recv(two.get(), out.data(), size, MSG_WAITALL), static_cast<ssize_t>(size));
  return out;
}

TEST(Lane, carries_chunks_of_many_parts_and_of_none) {
  auto [one, two] = tcp_pair();
  Reactor reactor;
  End from(reactor, std::move(one)), to(reactor, std::move(two));
  Rng rng(3);
  std::vector<std::vector<std::byte>> expected;
  for (uint32_t chunk = 0; chunk < 40; ++chunk) {
    std::vector<std::vector<std::byte>> parts;
    // Up to more parts than one call takes.
    size_t count = chunk % 10 == 9 ? 3000 : rng.below(20);
    std::vector<std::byte> whole;
    for (size_t i = 0; i < count; ++i) {
      parts.push_back(noise(rng.below(count > 100 ? 90 : 20000), chunk * 1000 + i));
      whole.insert(whole.end(), parts.back().begin(), parts.back().end());
    }
    expected.push_back(std::move(whole));
    from.handler.queue(chunk % 3, chunk, std::move(parts));
  }
  from.handler.queue(1, 40, {});  // nothing but a header
  expected.emplace_back();
  ASSERT_TRUE(turn_until(reactor, [&] {
    while (from.lane.send_one()) {
    }
    return to.handler.arrived_.size() == expected.size();
  })) << (to.error ? to.error->message() : "");
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(to.handler.arrived_[i].header.chunk, i);
    EXPECT_EQ(to.handler.arrived_[i].payload, expected[i]) << i;
  }
  EXPECT_EQ(from.lane.counters().chunks_sent, 41u);
  EXPECT_EQ(to.lane.counters().chunks_received, 41u);
  EXPECT_EQ(from.lane.counters().bytes_sent, to.lane.counters().bytes_received);
  ASSERT_TRUE(from.lane.tcp_info());
  EXPECT_GT(from.lane.tcp_info()->congestion_window, 0u);
}

TEST(Lane, carries_both_directions_at_once) {
  auto [one, two] = tcp_pair();
  Reactor reactor;
  End left(reactor, std::move(one)), right(reactor, std::move(two));
  for (uint32_t chunk = 0; chunk < 64; ++chunk) {
    left.handler.queue(0, chunk, {noise(300000, chunk)});
    right.handler.queue(0, chunk, {noise(200000, chunk)});
  }
  ASSERT_TRUE(turn_until(reactor, [&] {
    while (left.lane.send_one() || right.lane.send_one()) {
    }
    return left.handler.arrived_.size() == 64 && right.handler.arrived_.size() == 64;
  }));
  EXPECT_EQ(right.handler.arrived_[63].payload, noise(300000, 63));
}

TEST(Lane, stops_at_a_chunk_that_is_not_due_and_goes_on_when_it_is) {
  auto [one, two] = tcp_pair();
  Reactor reactor;
  End from(reactor, std::move(one)), to(reactor, std::move(two));
  to.handler.first_unknown = 1;
  for (uint32_t chunk = 0; chunk < 6; ++chunk)
    from.handler.queue(chunk / 2, chunk, {noise(100000, chunk)});
  auto turns = [&] {
    for (int i = 0; i < 30; ++i) {
      while (from.lane.send_one()) {
      }
      reactor.run_once(Nanos::from_millis(1));
    }
  };
  turns();
  EXPECT_EQ(to.handler.arrived_.size(), 2u);
  EXPECT_EQ(to.handler.offers, 3u);
  to.lane.resume();  // still not due
  turns();
  EXPECT_EQ(to.handler.arrived_.size(), 2u);
  EXPECT_EQ(to.handler.offers, 4u);
  to.handler.first_unknown = 2;
  to.lane.resume();
  turns();
  EXPECT_EQ(to.handler.arrived_.size(), 4u);
  to.handler.first_unknown = 3;
  to.lane.resume();
  turns();
  ASSERT_EQ(to.handler.arrived_.size(), 6u);
  for (uint32_t chunk = 0; chunk < 6; ++chunk)
    EXPECT_EQ(to.handler.arrived_[chunk].payload, noise(100000, chunk));
  to.lane.resume();  // nothing is held: no effect
  EXPECT_FALSE(to.error);
}

TEST(Lane, damage_to_any_byte_of_a_chunk_is_noticed_and_named) {
  std::vector<std::byte> good = as_sent(7, 31, {noise(100, 1), noise(50, 2)});
  for (size_t at = 0; at < good.size(); ++at) {
    SCOPED_TRACE(at);
    auto [one, two] = tcp_pair();
    Reactor reactor;
    End to(reactor, std::move(one));
    std::vector<std::byte> bad = good;
    bad[at] ^= std::byte{0x10};
    ASSERT_TRUE(send_all(two.get(), bad));
    ASSERT_TRUE(turn_until(reactor, [&] { return to.error.has_value(); }));
    EXPECT_TRUE(to.handler.arrived_.empty());
    EXPECT_TRUE(to.lane.failed());
    if (at >= kChunkHeaderBytes) {
      EXPECT_EQ(to.error->code(), Code::corrupt);
      EXPECT_EQ(to.error->message(),
                "payload of operation 7, step 2, chunk 31 was damaged on the way");
    } else {
      EXPECT_THAT(to.error->message(), HasSubstr("chunk header: "));
    }
  }
}

TEST(Lane, a_length_beyond_the_bound_is_refused_before_anyone_is_asked) {
  for (uint32_t length : {kMaxChunkBytes + 1, 0xffffffffu}) {
    auto [one, two] = tcp_pair();
    Reactor reactor;
    End to(reactor, std::move(one));
    ChunkHeader header;
    header.length = length;
    std::array<std::byte, kChunkHeaderBytes> bytes;
    encode(header, bytes);
    ASSERT_TRUE(send_all(two.get(), bytes));
    ASSERT_TRUE(turn_until(reactor, [&] { return to.error.has_value(); }));
    EXPECT_EQ(to.error->code(), Code::corrupt);
    EXPECT_THAT(to.error->message(), HasSubstr("at most 67108864"));
    EXPECT_EQ(to.handler.offers, 0u);
  }
}

TEST(Lane, a_peer_that_dies_anywhere_in_a_chunk_is_lost) {
  std::vector<std::byte> good = as_sent(1, 1, {noise(5000, 1)});
  for (size_t size : {size_t{0}, size_t{1}, kChunkHeaderBytes - 1, kChunkHeaderBytes, size_t{2500},
                      good.size()}) {
    SCOPED_TRACE(size);
    auto [one, two] = tcp_pair();
    Reactor reactor;
    End to(reactor, std::move(one));
    ASSERT_TRUE(send_all(two.get(), std::span(good).first(size)));
    two.reset();
    ASSERT_TRUE(turn_until(reactor, [&] { return to.error.has_value(); }));
    EXPECT_EQ(to.error->code(), Code::peer_lost);
    EXPECT_EQ(to.handler.arrived_.size(), size == good.size() ? 1u : 0u);
  }
}

TEST(Lane, a_peer_that_dies_is_noticed_by_the_sender) {
  auto [one, two] = tcp_pair();
  Reactor reactor;
  End from(reactor, std::move(one));
  for (uint32_t chunk = 0; chunk < 500; ++chunk)
    from.handler.queue(0, chunk, {noise(60000, chunk)});
  while (from.lane.send_one()) {
  }
  two.reset();
  ASSERT_TRUE(turn_until(reactor, [&] { return from.error.has_value(); }));
  EXPECT_EQ(from.error->code(), Code::peer_lost);
  EXPECT_FALSE(from.lane.send_one());
}

TEST(Lane, what_the_handler_refuses_ends_the_lane_with_its_words) {
  auto [one, two] = tcp_pair();
  Reactor reactor;
  End to(reactor, std::move(one));
  to.handler.refuse = true;
  ASSERT_TRUE(send_all(two.get(), as_sent(1, 1, {noise(10, 1)})));
  ASSERT_TRUE(turn_until(reactor, [&] { return to.error.has_value(); }));
  EXPECT_EQ(to.error->message(), "not wanted");
}

TEST(Lane, that_is_halted_touches_nothing_more) {
  auto [one, two] = tcp_pair();
  Reactor reactor;
  End to(reactor, std::move(one));
  std::vector<std::byte> good = as_sent(1, 1, {noise(5000, 1)});
  ASSERT_TRUE(send_all(two.get(), std::span(good).first(2500)));
  ASSERT_TRUE(turn_until(reactor, [&] { return to.lane.counters().bytes_received == 2500; }));
  to.lane.halt();
  ASSERT_TRUE(send_all(two.get(), std::span(good).subspan(2500)));
  two.reset();
  for (int i = 0; i < 20; ++i) reactor.run_once(Nanos::from_millis(1));
  EXPECT_EQ(to.lane.counters().bytes_received, 2500u);
  EXPECT_FALSE(to.error);
  EXPECT_TRUE(to.lane.failed());
}

TEST(Lane, one_that_is_not_served_does_not_hold_up_the_others) {
  auto [fast_out, fast_in] = tcp_pair();
  auto [stuck_out, stuck_in] = tcp_pair();
  Reactor reactor;
  TestHandler source;
  std::optional<Error> failure;
  auto on_error = [&](uint16_t, Error told) { failure = std::move(told); };
  Lane fast(reactor, std::move(fast_out), 0, source, monotonic_clock(),
            cost::unsent_limit(64u << 10), on_error);
  Lane stuck(reactor, std::move(stuck_out), 1, source, monotonic_clock(),
             cost::unsent_limit(64u << 10), on_error);
  End to(reactor, std::move(fast_in));
  constexpr uint32_t kChunks = 1024;
  std::vector<std::byte> payload = noise(64u << 10, 1);
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) source.queue(0, chunk, {payload});
  // As the engine does: a chunk each, round and round.
  auto fill = [&] {
    for (bool more = true; more;) {
      more = false;
      for (Lane* lane : {&fast, &stuck}) more = lane->send_one() || more;
    }
  };
  Nanos last_change = monotonic_clock().now();
  size_t seen = 0;
  ASSERT_TRUE(turn_until(reactor, [&] {
    fill();
    if (to.handler.arrived_.size() != seen) {
      seen = to.handler.arrived_.size();
      last_change = monotonic_clock().now();
    }
    return monotonic_clock().now() - last_change > Nanos::from_millis(200);
  }));
  EXPECT_FALSE(failure);
  // Everything went, but for what the stuck lane took before it was full: the kernel's buffers,
  // and one chunk that it is in the middle of.
  size_t taken = source.sent_by_lane[1];
  EXPECT_EQ(source.sent_by_lane[0] + taken + 1, kChunks);
  EXPECT_EQ(to.handler.arrived_.size(), source.sent_by_lane[0]);
  EXPECT_LT(taken, kChunks / 4);
}

}  // namespace
}  // namespace weft::transport
