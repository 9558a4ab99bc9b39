#include "weft/align.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

namespace weft::align {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;
using trace::Event;
using trace::Process;
using trace::Shape;
using trace::Trace;

constexpr double kMs = 1e6;
constexpr double kSecond = 1e9;

// Hosts whose clocks are wrong by known amounts, one process each, and what they would record.
struct World {
  struct Wrong {
    double offset_ns = 0;
    double drift_ppm = 0;
  };
  std::vector<Wrong> clocks;
  Rng rng;
  Trace trace{};
  uint64_t next_message = 1;

  World(std::vector<Wrong> wrong, uint64_t seed) : clocks(std::move(wrong)), rng(seed) {
    for (uint32_t host = 0; host < clocks.size(); ++host) {
      Process process;
      process.environment.host = text("node%u", host);
      process.environment.host_index = host;
      process.environment.rank = host;
      process.environment.ranks = static_cast<uint32_t>(clocks.size());
      trace.processes.push_back(process);
    }
  }

  int64_t read(uint32_t host, double truth) const {
    const Wrong& wrong = clocks[host];
    return std::llround(truth + wrong.offset_ns + wrong.drift_ppm * 1e-6 * truth);
  }
  // What the clock of `host` shows when its own shows `reading`, on the clock of host 0.
  double on_reference(uint32_t host, int64_t reading) const {
    const double truth = (static_cast<double>(reading) - clocks[host].offset_ns) /
                         (1 + clocks[host].drift_ppm * 1e-6);
    return truth * (1 + clocks[0].drift_ppm * 1e-6) + clocks[0].offset_ns;
  }
  // Long queues now and then, and longer ones to hosts of higher numbers.
  double delay(uint32_t from, uint32_t to) {
    const double mean = to > from ? 400e3 : 60e3;
    return 5e3 - mean * std::log(1 - rng.uniform());
  }
  Event& add(uint32_t host, Shape shape, int64_t start, int64_t duration) {
    Event event;
    event.shape = shape;
    event.kind = trace::Kind::chunk;
    event.start_ns = start;
    event.duration_ns = duration;
    return trace.processes[host].events.emplace_back(event);
  }
  void message(uint32_t from, uint32_t to, double truth) {
    add(from, Shape::send, read(from, truth), 30'000).message = next_message;
    add(to, Shape::receive, read(to, truth + delay(from, to)), 20'000).message = next_message;
    ++next_message;
  }
  void ping(uint32_t from, uint32_t to, double truth) {
    const double there = truth + delay(from, to);
    const double answered = there + 2e3;
    const double back = answered + delay(to, from);
    trace.processes[from].pings.push_back(
        {to, 0, read(from, truth), read(to, there), read(to, answered), read(from, back)});
  }
};

std::vector<World::Wrong> random_clocks(size_t hosts, uint64_t seed) {
  Rng rng(seed * 977 + hosts);
  std::vector<World::Wrong> clocks;
  for (size_t i = 0; i < hosts; ++i)
    clocks.push_back({(rng.uniform() - 0.5) * 1e13, (rng.uniform() - 0.5) * 300});
  return clocks;
}

uint64_t backward_in(const Trace& trace) {
  std::map<uint64_t, int64_t> sent;
  uint64_t backward = 0;
  for (const Process& process : trace.processes) {
    for (const Event& event : process.events) {
      if (event.shape == Shape::send && event.message != 0) sent[event.message] = event.start_ns;
    }
  }
  for (const Process& process : trace.processes) {
    for (const Event& event : process.events) {
      const auto send = sent.find(event.message);
      if (event.shape == Shape::receive && send != sent.end() && event.start_ns < send->second)
        ++backward;
    }
  }
  return backward;
}

void expect_truth_inside(const World& world, const Alignment& alignment) {
  const double drift_0 = world.clocks[0].drift_ppm * 1e-6;
  for (uint32_t host = 0; host < world.clocks.size(); ++host) {
    const HostClock& clock = alignment.hosts[host];
    const double offset = static_cast<double>(clock.at_ns) - world.on_reference(host, clock.at_ns);
    const double drift = ((1 + world.clocks[host].drift_ppm * 1e-6) / (1 + drift_0) - 1) * 1e6;
    SCOPED_TRACE(testing::Message()
                 << "host " << host << ", offset " << offset << ", drift " << drift);
    EXPECT_EQ(clock.quality, host == 0 ? Quality::reference : Quality::bounded);
    // The test computes the truth in doubles, of times near 1e13.
    EXPECT_LE(clock.low_ns, offset + 0.01);
    EXPECT_GE(clock.high_ns, offset - 0.01);
    EXPECT_LE(clock.low_ns, clock.offset_ns);
    EXPECT_GE(clock.high_ns, clock.offset_ns);
    EXPECT_LE(clock.drift_low_ppm, drift + 1e-6);
    EXPECT_GE(clock.drift_high_ppm, drift - 1e-6);
    EXPECT_LT(clock.high_ns - clock.low_ns, 5 * kMs);
  }
}

// Twice aligned is once aligned: nothing is left to move.
void expect_settled(Trace& trace, const Alignment& first) {
  auto again = align(trace);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->backward_before, 0u);
  EXPECT_EQ(again->backward_after, 0u);
  for (size_t host = 0; host < again->hosts.size(); ++host) {
    const double width = first.hosts[host].high_ns - first.hosts[host].low_ns;
    EXPECT_LE(again->hosts[host].low_ns, 1) << host;
    EXPECT_GE(again->hosts[host].high_ns, -1) << host;
    EXPECT_LE(std::abs(again->hosts[host].offset_ns), 2 + width / 20) << host;
  }
}

enum class Layout { pings_to_0, ring_both_ways, ring_one_way, chain, star_and_ring };

void fill(World& world, Layout layout) {
  const auto hosts = static_cast<uint32_t>(world.clocks.size());
  for (int i = 0; i < 300; ++i) {
    const double t = kSecond + i * 20 * kMs + world.rng.uniform() * kMs;
    for (uint32_t host = 0; host < hosts; ++host) {
      const uint32_t next = (host + 1) % hosts;
      const bool last = next == 0;
      if (layout == Layout::pings_to_0 || layout == Layout::star_and_ring) {
        if (host != 0) world.ping(host, 0, t);
      }
      if (layout == Layout::star_and_ring || layout == Layout::ring_one_way)
        world.message(host, next, t + 3 * kMs);
      if (layout == Layout::ring_both_ways || (layout == Layout::chain && !last)) {
        world.message(host, next, t);
        world.message(next, host, t + 5 * kMs);
      }
    }
  }
}

class Truth : public testing::TestWithParam<std::tuple<Layout, int, int>> {};

TEST_P(Truth, LiesInsideTheIntervalAndNoMessageGoesBack) {
  const auto [layout, hosts, seed] = GetParam();
  const auto count = static_cast<size_t>(hosts);
  World world(random_clocks(count, static_cast<uint64_t>(seed)), static_cast<uint64_t>(seed));
  fill(world, layout);
  auto alignment = align(world.trace);
  ASSERT_TRUE(alignment.ok());
  expect_truth_inside(world, *alignment);
  EXPECT_EQ(alignment->backward_after, 0u);
  EXPECT_THAT(alignment->remarks, IsEmpty());
  if (layout != Layout::pings_to_0) {
    EXPECT_GT(alignment->backward_before, 0u);
  }
  apply(*alignment, world.trace);
  EXPECT_EQ(backward_in(world.trace), 0u);
  expect_settled(world.trace, *alignment);
}

INSTANTIATE_TEST_SUITE_P(
    All, Truth,
    testing::Combine(testing::Values(Layout::pings_to_0, Layout::ring_both_ways,
                                     Layout::ring_one_way, Layout::chain, Layout::star_and_ring),
                     testing::Range(2, 6), testing::Range(1, 6)));

// Pings every few milliseconds while the run is probed, then every 250 ms, and chunks on a ring.
World lab_run(std::vector<World::Wrong> clocks) {
  World world(std::move(clocks), 42);
  const auto hosts = static_cast<uint32_t>(world.clocks.size());
  for (uint32_t host = 0; host < hosts; ++host)
    world.add(host, Shape::instant, world.read(host, 0), 0);
  for (int i = 0; i < 100; ++i) {
    for (uint32_t host = 1; host < hosts; ++host) world.ping(host, 0, 300 * kMs + i * 4 * kMs);
  }
  for (int i = 0; i < 40; ++i) {
    for (uint32_t host = 1; host < hosts; ++host) world.ping(host, 0, kSecond + i * 250 * kMs);
    for (uint32_t host = 0; host < hosts; ++host)
      world.message(host, (host + 1) % hosts, kSecond + i * 200 * kMs);
  }
  return world;
}

TEST(Align, ClockThatIsAheadHasAPositiveOffset) {
  const World world = lab_run({{}, {250 * kMs, 50}, {}, {}});
  auto alignment = align(world.trace);
  ASSERT_TRUE(alignment.ok());
  expect_truth_inside(world, *alignment);
  const HostClock& clock = alignment->hosts[1];
  EXPECT_EQ(clock.host, "node1");
  EXPECT_EQ(clock.at_ns, 250'000'000);
  EXPECT_LE(clock.low_ns, 250 * kMs);
  EXPECT_GE(clock.high_ns, 250 * kMs);
  EXPECT_LE(clock.high_ns - clock.low_ns, kMs);
  EXPECT_NEAR(clock.drift_ppm, 50, 20);
  EXPECT_EQ(clock.constraints, 140u + 80u);
  EXPECT_NEAR(static_cast<double>(alignment->to_reference(1, 250'000'000)), 0, kMs);
  EXPECT_EQ(alignment->to_reference(0, 12345), 12345);
}

// A year between two clocks, and an hour of run: products of such spans need 128 bits.
TEST(Align, LongSpansAndFarClocksLoseNothing) {
  World world({{}, {3.2e16, -80}, {-3.2e16, 120}}, 5);
  for (int i = 0; i < 3600; ++i) {
    for (uint32_t host = 0; host < 3; ++host) world.message(host, (host + 1) % 3, i * kSecond);
  }
  auto alignment = align(world.trace);
  ASSERT_TRUE(alignment.ok());
  EXPECT_EQ(alignment->backward_after, 0u);
  for (uint32_t host = 1; host < 3; ++host) {
    const HostClock& clock = alignment->hosts[host];
    EXPECT_EQ(clock.quality, Quality::bounded);
    EXPECT_NEAR(clock.drift_ppm, world.clocks[host].drift_ppm, 1);
    EXPECT_LT(clock.high_ns - clock.low_ns, 3 * kMs);
  }
  apply(*alignment, world.trace);
  EXPECT_EQ(backward_in(world.trace), 0u);
}

TEST(Align, OneDirectionBoundsOneSide) {
  for (const bool from_reference : {true, false}) {
    World world({{}, {70 * kMs, 20}}, 3);
    for (int i = 0; i < 100; ++i)
      world.message(from_reference ? 0 : 1, from_reference ? 1 : 0, i * kMs);
    auto alignment = align(world.trace);
    ASSERT_TRUE(alignment.ok());
    const HostClock& clock = alignment->hosts[1];
    EXPECT_EQ(clock.quality, Quality::one_sided);
    const double truth = static_cast<double>(clock.at_ns) - world.on_reference(1, clock.at_ns);
    EXPECT_LE(clock.low_ns, truth);
    EXPECT_GE(clock.high_ns, truth);
    EXPECT_EQ(std::isinf(clock.low_ns), from_reference);
    EXPECT_EQ(std::isinf(clock.high_ns), !from_reference);
    EXPECT_NEAR(clock.offset_ns, truth, 0.2 * kMs);
    EXPECT_THAT(alignment->remarks, Contains(HasSubstr("host 1 (node1): bounded from one side")));
    apply(*alignment, world.trace);
    EXPECT_EQ(backward_in(world.trace), 0u);
  }
}

// Host 2 only sends to host 1, which only hears: host 2 may be arbitrarily early.
TEST(Align, MessagesThatPointTheWrongWayBoundNothing) {
  World world({{}, {9 * kSecond, 0}, {-7 * kSecond, 0}}, 3);
  for (int i = 0; i < 50; ++i) {
    world.message(0, 1, i * kMs);
    world.message(2, 1, i * kMs);
  }
  auto alignment = align(world.trace);
  ASSERT_TRUE(alignment.ok());
  EXPECT_EQ(alignment->hosts[1].quality, Quality::one_sided);
  EXPECT_EQ(alignment->hosts[2].quality, Quality::one_sided);
  EXPECT_TRUE(std::isinf(alignment->hosts[2].low_ns) && std::isinf(alignment->hosts[2].high_ns));
  EXPECT_NEAR(alignment->hosts[2].offset_ns, -7 * kSecond, 5 * kMs);
  EXPECT_EQ(alignment->backward_after, 0u);
}

TEST(Align, HostsWithoutContactAreUnknown) {
  World world({{}, {5 * kMs, 0}, {kSecond, 0}, {-kSecond, 30}}, 8);
  for (int i = 0; i < 50; ++i) {
    world.message(2, 3, kSecond + i * kMs);
    world.message(3, 2, kSecond + i * kMs);
  }
  for (const uint32_t host : {0u, 1u, 2u}) {
    world.add(host, Shape::instant, world.read(host, kSecond), 0);
    world.trace.processes[host].clock_samples = {
        {world.read(host, kSecond), 1'700'000'000'000'000'000}};
  }
  auto alignment = align(world.trace);
  ASSERT_TRUE(alignment.ok());
  for (const uint32_t host : {1u, 2u, 3u}) {
    EXPECT_EQ(alignment->hosts[host].quality, Quality::unknown);
    EXPECT_TRUE(std::isinf(alignment->hosts[host].low_ns));
    EXPECT_TRUE(std::isinf(alignment->hosts[host].high_ns));
  }
  EXPECT_THAT(alignment->remarks,
              Contains(HasSubstr("host 1 (node1): no message or ping connects it to the reference; "
                                 "its clock is left as it is; wall clocks suggest an offset of "
                                 "5.000 ms, which is not relied on")));
  EXPECT_THAT(alignment->remarks, Contains(HasSubstr("its clock follows host 2 (node2)")));
  EXPECT_EQ(alignment->to_reference(1, 77), 77);
  EXPECT_EQ(alignment->to_reference(2, 77), 77);
  EXPECT_EQ(alignment->backward_before, 50u);
  EXPECT_EQ(alignment->backward_after, 0u);
}

TEST(Align, OneProcessIsItsOwnReference) {
  World world({{kSecond, 40}}, 1);
  world.add(0, Shape::span, 500, 20);
  auto alignment = align(world.trace);
  ASSERT_TRUE(alignment.ok());
  ASSERT_EQ(alignment->hosts.size(), 1u);
  EXPECT_EQ(alignment->hosts[0].quality, Quality::reference);
  EXPECT_EQ(alignment->hosts[0].offset_ns, 0);
  EXPECT_EQ(alignment->hosts[0].at_ns, 500);
  EXPECT_THAT(alignment->remarks, Contains("all processes share one clock"));
  apply(*alignment, world.trace);
  EXPECT_EQ(world.trace.processes[0].events[0].start_ns, 500);
  EXPECT_EQ(world.trace.processes[0].events[0].duration_ns, 20);
}

TEST(Align, NoProcessIsAnError) {
  auto alignment = align({});
  ASSERT_FALSE(alignment.ok());
  EXPECT_EQ(alignment.error().code(), Code::invalid_argument);
}

TEST(Align, ProcessesOfOneHostShareItsClock) {
  World world({{}, {}, {40 * kMs, 10}, {40 * kMs, 10}}, 4);
  for (uint32_t p = 0; p < 4; ++p) world.trace.processes[p].environment.host_index = 10 + p / 2;
  // Process 3 is bounded by what process 2 exchanged with process 1.
  world.add(3, Shape::instant, world.read(3, 0), 0);
  for (int i = 0; i < 200; ++i) {
    world.message(1, 2, i * kMs);
    world.message(2, 1, i * kMs);
    world.message(2, 3, i * kMs);
  }
  auto alignment = align(world.trace);
  ASSERT_TRUE(alignment.ok());
  ASSERT_EQ(alignment->hosts.size(), 2u);
  EXPECT_EQ(alignment->of_process, (std::vector<uint32_t>{0, 0, 1, 1}));
  EXPECT_EQ(alignment->hosts[1].host_index, 11u);
  EXPECT_EQ(alignment->hosts[1].constraints, 400u);
  EXPECT_EQ(alignment->to_reference(2, 123'456'789), alignment->to_reference(3, 123'456'789));
  EXPECT_NEAR(alignment->hosts[1].offset_ns, 40 * kMs, kMs);
  EXPECT_THAT(alignment->remarks, Contains(HasSubstr("host 10 (node0) is the reference")));
}

TEST(Align, HalvesWithoutExactlyOneOtherAreNotUsed) {
  World world({{}, {}}, 1);
  world.add(0, Shape::send, 100, 1).message = 1;  // no receive
  world.add(0, Shape::send, 100, 1).message = 2;  // two receives, both before it
  world.add(1, Shape::receive, 50, 1).message = 2;
  world.add(1, Shape::receive, 60, 1).message = 2;
  world.add(0, Shape::send, 100, 1).message = 3;  // two sends
  world.add(1, Shape::send, 100, 1).message = 3;
  world.add(1, Shape::receive, 10, 1).message = 0;  // no message at all
  world.add(0, Shape::send, 100, 1).message = 4;
  world.add(1, Shape::receive, 90, 1).message = 4;
  auto alignment = align(world.trace);
  ASSERT_TRUE(alignment.ok());
  EXPECT_EQ(alignment->messages, 1u);
  EXPECT_EQ(alignment->backward_before, 1u);
  EXPECT_EQ(alignment->hosts[1].constraints, 1u);
  EXPECT_THAT(alignment->remarks, Contains(HasSubstr("6 sends or receives are without")));
}

TEST(Align, MismatchedMessagesGiveWayToPings) {
  World world = lab_run({{}, {-3 * kMs, 10}});
  world.add(1, Shape::send, world.read(1, 2 * kSecond), 1).message = 999'999;
  world.add(0, Shape::receive, world.read(0, kSecond), 1).message = 999'999;
  auto alignment = align(world.trace);
  ASSERT_TRUE(alignment.ok());
  expect_truth_inside(world, *alignment);
  EXPECT_THAT(alignment->remarks, Contains(HasSubstr("only pings are used between them")));
  EXPECT_EQ(alignment->backward_after, 1u);
  EXPECT_THAT(alignment->remarks,
              Contains(HasSubstr("1 of 81 messages are still received before")));
  apply(*alignment, world.trace);
  EXPECT_EQ(backward_in(world.trace), 0u);
}

// The clock of host 1 is set forward by 8 ms in the middle of the run.
TEST(Align, ClockThatJumpsIsSaidAndTheIntervalWidened) {
  World world({{}, {}}, 6);
  for (int i = 0; i < 400; ++i) {
    world.clocks[1].offset_ns = i < 200 ? 0 : 8 * kMs;
    world.message(0, 1, i * kMs);
    world.message(1, 0, i * kMs);
  }
  auto alignment = align(world.trace);
  ASSERT_TRUE(alignment.ok());
  const HostClock& clock = alignment->hosts[1];
  EXPECT_THAT(alignment->remarks, Contains(HasSubstr("no pair of steady clocks")));
  EXPECT_THAT(alignment->remarks, Contains(HasSubstr("may not hold")));
  EXPECT_EQ(clock.quality, Quality::bounded);
  EXPECT_LE(clock.low_ns, 0);
  EXPECT_GE(clock.high_ns, 0);
  EXPECT_LT(clock.high_ns - clock.low_ns, 40 * kMs);
  apply(*alignment, world.trace);
  EXPECT_EQ(backward_in(world.trace), 0u);
}

// Each pair can be explained, but not the three of them together.
TEST(Align, ContradictionOverThreeHostsIsSaid) {
  World world({{}, {}, {}}, 6);
  const auto exchange = [&](uint32_t a, uint32_t b, int64_t ahead) {
    for (int i = 0; i < 20; ++i) {
      const int64_t t = i * 1'000'000;
      world.trace.processes[a].pings.push_back(
          {b, 0, t, t + ahead + 1000, t + ahead + 1000, t + 2000});
    }
  };
  exchange(0, 1, 0);
  exchange(0, 2, 0);
  exchange(1, 2, 500'000);
  auto alignment = align(world.trace);
  ASSERT_TRUE(alignment.ok());
  EXPECT_THAT(alignment->remarks, Contains(HasSubstr("contradicts")));
  for (const uint32_t host : {1u, 2u}) {
    EXPECT_EQ(alignment->hosts[host].quality, Quality::bounded);
    EXPECT_LE(std::abs(alignment->hosts[host].offset_ns), 1002);
    EXPECT_LE(alignment->hosts[host].high_ns - alignment->hosts[host].low_ns, 2100);
  }
}

TEST(Align, ApplyMovesEveryTimeButNoValue) {
  World world = lab_run({{}, {-kSecond, 0}});
  Process& process = world.trace.processes[1];
  process.notes.push_back({world.read(1, kSecond), "key", "value"});
  process.clock_samples.push_back({world.read(1, kSecond), 17});
  Event& counter = world.add(1, Shape::counter, world.read(1, kSecond), -12345);
  counter.kind = trace::Kind::tcp_info;
  world.add(1, Shape::span, world.read(1, kSecond), 4'000'000);
  auto alignment = align(world.trace);
  ASSERT_TRUE(alignment.ok());
  apply(*alignment, world.trace);
  EXPECT_NEAR(static_cast<double>(process.notes[0].time_ns), kSecond, kMs);
  EXPECT_NEAR(static_cast<double>(process.clock_samples[0].trace_ns), kSecond, kMs);
  EXPECT_EQ(process.clock_samples[0].wall_ns, 17);
  const Event& span = process.events.back();
  const Event& value = *(process.events.end() - 2);
  EXPECT_NEAR(static_cast<double>(span.start_ns), kSecond, kMs);
  EXPECT_NEAR(static_cast<double>(span.duration_ns), 4e6, 400);
  EXPECT_EQ(value.duration_ns, -12345);
  EXPECT_NEAR(static_cast<double>(value.start_ns), kSecond, kMs);
  for (const trace::PingSample& ping : process.pings) {
    EXPECT_LE(ping.t0, ping.t1);
    EXPECT_LE(ping.t1, ping.t2);
    EXPECT_LE(ping.t2, ping.t3);
  }
}

// What a hostile file can hold, and what only a trace made in memory can.
int64_t nasty_time(Rng& rng, int64_t far, bool from_file) {
  const int64_t small = static_cast<int64_t>(rng.below(2'000'000)) - 1'000'000;
  switch (rng.below(6)) {
    case 0: return far;
    case 1: return -far;
    case 2: return from_file ? far - 1 : std::numeric_limits<int64_t>::max();
    case 3: return from_file ? 1 - far : std::numeric_limits<int64_t>::min();
    case 4: return static_cast<int64_t>(rng.below(static_cast<uint64_t>(far)));
    default: return small;
  }
}

Trace nasty_trace(Rng& rng, bool from_file) {
  // Beyond reach, or just within it.
  const int64_t far = int64_t{1} << (from_file && rng.below(2) == 0 ? 59 : 62);
  World world(std::vector<World::Wrong>(1 + rng.below(5)), 1);
  for (Process& process : world.trace.processes) {
    process.environment.host_index = static_cast<uint32_t>(rng.below(4) * 1'000'000'007);
    for (uint64_t i = rng.below(40); i > 0; --i) {
      Event event;
      event.shape = static_cast<Shape>(1 + rng.below(5));
      event.start_ns = nasty_time(rng, far, from_file);
      if (event.shape != Shape::instant)
        event.duration_ns = rng.below(2) == 0 ? int64_t{1} << 61 : 5;
      event.message = rng.below(60);
      process.events.push_back(event);
    }
    for (uint64_t i = rng.below(10); i > 0; --i) {
      const auto time = [&] { return nasty_time(rng, far, from_file); };
      process.pings.push_back(
          {static_cast<uint32_t>(rng.below(7)), 0, time(), time(), time(), time()});
      process.clock_samples.push_back({time(), time()});
      process.notes.push_back({time(), "", ""});
    }
  }
  return world.trace;
}

TEST(Align, HostileTimesStayWithinATrace) {
  Rng rng(99);
  uint64_t bounded = 0;
  for (int round = 0; round < 3000; ++round) {
    const bool from_file = round % 2 == 0;
    Trace trace = nasty_trace(rng, from_file);
    auto alignment = align(trace);
    ASSERT_TRUE(alignment.ok());
    for (const HostClock& clock : alignment->hosts) {
      bounded += clock.quality == Quality::bounded ? 1 : 0;
      ASSERT_TRUE(std::isfinite(clock.offset_ns) && std::isfinite(clock.drift_ppm)) << round;
      ASSERT_LE(clock.low_ns, clock.high_ns) << round;
      ASSERT_LE(std::abs(clock.drift_ppm), kDriftMaxPpm * 1.002) << round;
    }
    apply(*alignment, trace);
    for (const Process& process : trace.processes) {
      for (const Event& event : process.events) {
        ASSERT_TRUE(!from_file || trace::flaw_of(event) == nullptr) << round;
      }
    }
    auto again = align(trace);
    ASSERT_TRUE(again.ok());
    ASSERT_EQ(again->backward_before, 0u) << round;
  }
  EXPECT_GT(bounded, 300u);
}

}  // namespace
}  // namespace weft::align
