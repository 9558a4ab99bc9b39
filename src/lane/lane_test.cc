// Chunks over lanes: real connections, and what a damaged, a dying or a lying peer does to them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "weft/lane.h"
#include "weft_testing/chunks.h"
#include "weft_testing/loopback.h"

namespace weft::lane {
namespace {

using testing::HasSubstr;
using Role = Lane::Role;

// The bytes of a chunk as a lane writes them.
std::vector<std::byte> as_sent(uint32_t operation, uint32_t chunk,
                               std::vector<std::vector<std::byte>> parts) {
  auto [one, two] = tcp_pair();
  auto world = new_reactor();
  net::Reactor& reactor = *world;
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
  auto world = new_reactor();
  net::Reactor& reactor = *world;
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
  auto world = new_reactor();
  net::Reactor& reactor = *world;
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
  auto world = new_reactor();
  net::Reactor& reactor = *world;
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
    auto world = new_reactor();
    net::Reactor& reactor = *world;
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
    auto world = new_reactor();
    net::Reactor& reactor = *world;
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
    auto world = new_reactor();
    net::Reactor& reactor = *world;
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
  auto world = new_reactor();
  net::Reactor& reactor = *world;
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
  auto world = new_reactor();
  net::Reactor& reactor = *world;
  End to(reactor, std::move(one));
  to.handler.refuse = true;
  ASSERT_TRUE(send_all(two.get(), as_sent(1, 1, {noise(10, 1)})));
  ASSERT_TRUE(turn_until(reactor, [&] { return to.error.has_value(); }));
  EXPECT_EQ(to.error->message(), "not wanted");
}

TEST(Lane, that_is_halted_touches_nothing_more) {
  auto [one, two] = tcp_pair();
  auto world = new_reactor();
  net::Reactor& reactor = *world;
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
  auto world = new_reactor();
  net::Reactor& reactor = *world;
  TestHandler source;
  std::optional<Error> failure;
  auto on_error = [&](uint32_t, Error told) { failure = std::move(told); };
  Lane fast(Role::without_receipts, reactor, net::adopt(std::move(fast_out)), nullptr, 0, source,
            monotonic_clock(), cost::unsent_limit(64u << 10), on_error);
  Lane stuck(Role::without_receipts, reactor, net::adopt(std::move(stuck_out)), nullptr, 1, source,
             monotonic_clock(), cost::unsent_limit(64u << 10), on_error);
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

// ---- the two ends of a lane, and receipts ------------------------------------------------

std::vector<std::byte> receipt(uint64_t chunks, uint32_t flags = 0, const char* magic = "wAck") {
  std::vector<std::byte> out(16);
  std::memcpy(out.data(), magic, 4);
  std::memcpy(out.data() + 4, &flags, 4);
  std::memcpy(out.data() + 8, &chunks, 8);
  return out;
}

// An `out` lane, and the other end of its connection in our hands.
struct OutLane {
  OutLane() : OutLane(tcp_pair()) {}
  explicit OutLane(std::pair<Fd, Fd> ends)
      : world(new_reactor()),
        peer(std::move(ends.second)),
        end(Role::out, *world, net::adopt(std::move(ends.first))) {}
  void greet() {
    EXPECT_TRUE(send_all(peer.get(), receipt(0)));
    EXPECT_TRUE(turn_until(*world, [&] { return end.lane.ready(); }));
  }
  // Reads as many bytes as the lane has sent.
  void drain() {
    std::vector<std::byte> bytes(1u << 16);
    while (drained < end.lane.counters().bytes_sent) {
      ssize_t got = ::recv(peer.get(), bytes.data(), bytes.size(), 0);
      ASSERT_GT(got, 0);
      drained += static_cast<uint64_t>(got);
    }
  }
  std::unique_ptr<net::Reactor> world;
  Fd peer;
  End end;
  uint64_t drained = 0;
};

TEST(LaneEnds, nothing_is_sent_before_the_other_end_has_answered) {
  auto [one, two] = tcp_pair();
  auto world = new_reactor();
  End out(Role::out, *world, net::adopt(std::move(one)));
  out.handler.queue(0, 0, {noise(100, 1)});
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(out.lane.ready());
    EXPECT_FALSE(out.lane.send_one());
    world->run_once(Nanos::from_millis(1));
  }
  EXPECT_EQ(out.handler.waiting(), 1u);
  End in(Role::in, *world, net::adopt(std::move(two)));
  ASSERT_TRUE(turn_until(*world, [&] { return out.lane.ready(); }));
  EXPECT_TRUE(out.lane.send_one());
  ASSERT_TRUE(turn_until(*world, [&] { return in.handler.arrived_.size() == 1; }));
  EXPECT_EQ(in.handler.arrived_[0].payload, noise(100, 1));
}

TEST(LaneEnds, a_greeting_cut_into_bytes_is_a_greeting) {
  OutLane out;
  for (std::byte byte : receipt(0)) {
    EXPECT_FALSE(out.end.lane.ready());
    ASSERT_TRUE(send_all(out.peer.get(), std::span(&byte, 1)));
    for (int i = 0; i < 3; ++i) out.world->run_once(Nanos::from_millis(1));
  }
  EXPECT_TRUE(out.end.lane.ready());
}

TEST(LaneEnds, what_is_kept_may_change_when_it_has_left_and_receipts_are_told_for_all) {
  OutLane out;
  out.greet();
  out.end.handler.queue(0, 0, {noise(kKept, 1)});
  out.end.handler.queue(0, 1, {noise(kKept + 1, 2)});
  out.end.handler.queue(0, 2, {});
  out.end.handler.queue(0, 3, {noise(kKept + 1, 3)});
  ASSERT_TRUE(turn_until(*out.world, [&] {
    out.end.send_all();
    out.drain();
    return out.end.handler.sent_.size() == 4;
  }));
  EXPECT_THAT(out.end.handler.settled_, testing::ElementsAre(0, 2));
  EXPECT_EQ(out.end.handler.held(), 2u);
  ASSERT_TRUE(send_all(out.peer.get(), receipt(1)));
  ASSERT_TRUE(send_all(out.peer.get(), receipt(2)));
  ASSERT_TRUE(turn_until(*out.world, [&] { return out.end.handler.receipted_.size() == 2; }));
  EXPECT_THAT(out.end.handler.receipted_, testing::ElementsAre(0, 1));
  EXPECT_THAT(out.end.handler.settled_, testing::ElementsAre(0, 2, 1));
  ASSERT_TRUE(send_all(out.peer.get(), receipt(2)));  // again: allowed
  ASSERT_TRUE(send_all(out.peer.get(), receipt(4)));
  ASSERT_TRUE(turn_until(*out.world, [&] { return out.end.handler.settled_.size() == 4; }));
  EXPECT_THAT(out.end.handler.receipted_, testing::ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(out.end.handler.held(), 0u);
  EXPECT_FALSE(out.end.error);
}

TEST(LaneEnds, receipts_settle_all_that_is_large_and_what_is_kept_stays_bounded) {
  auto [one, two] = tcp_pair();
  auto world = new_reactor();
  End out(Role::out, *world, net::adopt(std::move(one)));
  End in(Role::in, *world, net::adopt(std::move(two)));
  Rng rng(11);
  std::vector<size_t> sizes;
  for (uint32_t chunk = 0; chunk < 600; ++chunk) {
    sizes.push_back(rng.below(10) == 0 ? 65000 + rng.below(200000) : rng.below(3000));
    out.handler.queue(0, chunk, {noise(sizes.back(), chunk)});
  }
  ASSERT_TRUE(turn_until(*world,
                         [&] {
                           out.send_all();
                           in.lane.send_receipts();
                           return in.handler.arrived_.size() == sizes.size() &&
                                  out.handler.held() == 0;
                         }))
      << in.handler.arrived_.size() << " " << out.handler.held();
  for (uint32_t chunk = 0; chunk < sizes.size(); ++chunk)
    EXPECT_EQ(in.handler.arrived_[chunk].payload, noise(sizes[chunk], chunk)) << chunk;
  EXPECT_EQ(out.handler.settled_.size(), sizes.size());
  out.lane.halt();
  size_t bytes = 0;
  auto kept = out.lane.take_unsettled();
  for (const auto& chunk : kept) bytes += chunk.payload.size();
  EXPECT_LT(kept.size(), 64u);
  EXPECT_LT(bytes, (4u << 20) + kKept);
}

TEST(LaneEnds, nothing_is_kept_once_all_was_acknowledged) {
  auto [one, two] = tcp_pair();
  auto world = new_reactor();
  End out(Role::out, *world, net::adopt(std::move(one)));
  std::optional<End> in(std::in_place, Role::in, *world, net::adopt(std::move(two)));
  for (uint32_t chunk = 0; chunk < 7; ++chunk) out.handler.queue(0, chunk, {noise(2000, chunk)});
  ASSERT_TRUE(turn_until(*world, [&] {
    out.send_all();
    in->lane.send_receipts();  // small chunks are not worth one
    return in->handler.arrived_.size() == 7;
  }));
  in->lane.send_receipts(true);
  in.reset();  // closes the connection
  ASSERT_TRUE(turn_until(*world, [&] { return out.lane.failed(); }));
  EXPECT_TRUE(out.lane.take_unsettled().empty());
}

// out ══ proxy ══ in; the proxy ends both connections when `limit` bytes have gone through.
struct CutLane {
  explicit CutLane(uint64_t limit) : left(limit) {
    auto [a, b] = tcp_pair();
    auto [c, d] = tcp_pair();
    out = std::make_unique<End>(Role::out, *world, net::adopt(std::move(a)));
    in = std::make_unique<End>(Role::in, *world, net::adopt(std::move(d)));
    here = std::move(b);
    there = std::move(c);
  }
  void turn() {
    out->send_all();
    world->run_once(Nanos::from_millis(left > 0 ? 0 : 1));
    if (!here) return;
    std::array<std::byte, 30000> bytes;
    ssize_t got =
        ::recv(here.get(), bytes.data(), std::min<uint64_t>(left, bytes.size()), MSG_DONTWAIT);
    if (got > 0) {
      left -= static_cast<uint64_t>(got);
      ASSERT_TRUE(send_all(there.get(), std::span(bytes).first(static_cast<size_t>(got))));
    }
    got = ::recv(there.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) send_all(here.get(), std::span(bytes).first(static_cast<size_t>(got)));
    // Not before the greeting was passed on.
    if (left > 0 || !out->lane.ready()) return;
    here.reset();
    there.reset();
  }
  uint64_t left;
  std::unique_ptr<net::Reactor> world = new_reactor();
  std::unique_ptr<End> out, in;
  Fd here, there;
};

TEST(LaneEnds, what_a_cut_at_any_byte_may_have_lost_is_known_and_can_be_sent_again) {
  const std::vector<size_t> sizes = {10, 0, 70000, 300, 65536, 65537, 1, 90000};
  std::vector<uint64_t> cuts = {0, 1};
  uint64_t total = 0;
  for (size_t size : sizes) {
    for (uint64_t at : {total + 63, total + 64, total + 65, total + 64 + size / 2})
      cuts.push_back(at);
    total += 64 + size;
    cuts.push_back(total - 1);
    cuts.push_back(total);
  }
  Rng rng(5);
  for (int i = 0; i < 20; ++i) cuts.push_back(rng.below(total));
  for (uint64_t cut : cuts) {
    SCOPED_TRACE(text("cut after %llu of %llu", static_cast<unsigned long long>(cut),
                      static_cast<unsigned long long>(total)));
    CutLane line(cut);
    for (uint32_t chunk = 0; chunk < sizes.size(); ++chunk)
      line.out->handler.queue(
          0, chunk,
          {noise(sizes[chunk] / 3, chunk), noise(sizes[chunk] - sizes[chunk] / 3, chunk + 100)});
    Nanos deadline = monotonic_clock().now() + Nanos::from_seconds(10);
    while (!line.out->error || !line.in->error) {
      ASSERT_NO_FATAL_FAILURE(line.turn());
      ASSERT_LT(monotonic_clock().now(), deadline);
    }
    std::vector<uint32_t> arrived;
    for (const auto& one : line.in->handler.arrived_) arrived.push_back(one.header.chunk);
    auto kept = line.out->lane.take_unsettled();
    auto taken = static_cast<uint32_t>(sizes.size() - line.out->handler.waiting());
    ASSERT_LE(kept.size(), taken);
    // The last ones, in order, and none that is certain to have arrived is missing from them.
    auto first = static_cast<uint32_t>(taken - kept.size());
    EXPECT_LE(first, arrived.size());
    for (uint32_t i = 0; i < kept.size(); ++i) {
      uint32_t chunk = first + i;
      EXPECT_EQ(kept[i].header.chunk, chunk);
      EXPECT_EQ(kept[i].token, (1000 + chunk) * 7);
      bool left_whole =
          std::count(line.out->handler.sent_.begin(), line.out->handler.sent_.end(), chunk) == 1;
      EXPECT_EQ(kept[i].retained, left_whole && sizes[chunk] <= kKept);
      bool settled = std::count(line.out->handler.settled_.begin(),
                                line.out->handler.settled_.end(), chunk) == 1;
      EXPECT_EQ(kept[i].retained, settled) << "either the lane has the bytes or the handler";
      if (!kept[i].retained) continue;
      std::vector<std::byte> expected = noise(sizes[chunk] / 3, chunk);
      std::vector<std::byte> rest = noise(sizes[chunk] - sizes[chunk] / 3, chunk + 100);
      expected.insert(expected.end(), rest.begin(), rest.end());
      EXPECT_EQ(kept[i].payload, expected);
    }
    EXPECT_TRUE(line.out->lane.take_unsettled().empty()) << "only once";
  }
}

TEST(LaneEnds, a_peer_that_lies_in_its_receipts_is_refused) {
  struct {
    const char* name;
    std::vector<std::byte> bytes;
    bool greeted;
  } lies[] = {
      {"more than was sent", receipt(3), true},
      {"far more", receipt(~uint64_t{0}), true},
      {"other words", receipt(1, 0, "wack"), true},
      {"chunks before any was sent", receipt(1), false},
      {"memory that was not offered", receipt(0, 1), false},
      {"a page", std::vector<std::byte>(200, std::byte{'<'}), false},
  };
  for (auto& lie : lies) {
    SCOPED_TRACE(lie.name);
    OutLane out;
    if (lie.greeted) {
      out.greet();
      out.end.handler.queue(0, 0, {noise(100, 1)});
      out.end.handler.queue(0, 1, {noise(70000, 1)});
      ASSERT_TRUE(turn_until(*out.world, [&] {
        out.end.send_all();
        out.drain();
        return out.end.handler.sent_.size() == 2;
      }));
    }
    ASSERT_TRUE(send_all(out.peer.get(), lie.bytes));
    ASSERT_TRUE(turn_until(*out.world, [&] { return out.end.error.has_value(); }));
    EXPECT_EQ(out.end.error->code(), Code::corrupt);
    EXPECT_THAT(out.end.error->message(), HasSubstr("receipt"));
    EXPECT_EQ(out.end.lane.take_unsettled().size(), lie.greeted ? 2u : 0u);
  }
  // Taking back what was confirmed.
  OutLane out;
  out.greet();
  out.end.handler.queue(0, 0, {noise(100, 1)});
  out.end.handler.queue(0, 1, {noise(70000, 1)});
  ASSERT_TRUE(turn_until(*out.world, [&] {
    out.end.send_all();
    out.drain();
    return out.end.handler.sent_.size() == 2;
  }));
  send_all(out.peer.get(), receipt(2));
  ASSERT_TRUE(turn_until(*out.world, [&] { return out.end.handler.settled_.size() == 2; }));
  send_all(out.peer.get(), receipt(1));
  ASSERT_TRUE(turn_until(*out.world, [&] { return out.end.error.has_value(); }));
  EXPECT_EQ(out.end.error->code(), Code::corrupt);
}

}  // namespace
}  // namespace weft::lane
