#include "weft/cost.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace weft::cost {
namespace {

using trace::PingSample;
using trace::ProbeResult;
using trace::ProbeScope;
using trace::ProbeType;

// A cluster whose constants are known, and what its probe would record.
struct World {
  uint32_t ranks = 4;
  double link = 1.25e9;
  double pair_link = 1.5e9;
  double flow = 0.4e9;
  double cpu_per_byte = 0.25;
  double cpu_per_chunk = 9000;
  double noise = 0.02;  // each measurement is off by up to this share, either way
  std::vector<uint16_t> flows = {1, 2, 4, 8};
  std::vector<uint32_t> chunk_sizes = {64 << 10, 256 << 10};
  uint64_t seed = 1;

  trace::Trace probe() const {
    Rng rng(seed);
    const auto noisy = [&](double value) { return value * (1 + noise * (2 * rng.uniform() - 1)); };
    trace::Trace trace;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      trace::Process process;
      for (const ProbeScope scope : {ProbeScope::pair, ProbeScope::ring}) {
        for (const uint16_t n : flows) {
          for (const uint32_t chunk : chunk_sizes) {
            const double top = scope == ProbeScope::ring ? link : pair_link;
            const double rate = noisy(std::min(n * flow, top));
            ProbeResult result;
            result.type = ProbeType::rate;
            result.scope = scope;
            result.flows = n;
            result.chunk_bytes = chunk;
            result.bytes = 64 << 20;
            result.chunks = result.bytes / chunk;
            result.duration_ns =
                static_cast<int64_t>(static_cast<double>(result.bytes) / rate * 1e9);
            const double cpu = noisy(static_cast<double>(result.bytes) * cpu_per_byte +
                                     static_cast<double>(result.chunks) * cpu_per_chunk);
            result.cpu_send_ns = static_cast<int64_t>(cpu * 0.4);
            result.cpu_receive_ns = static_cast<int64_t>(cpu * 0.6);
            process.probe.push_back(result);
          }
        }
      }
      for (int i = 0; i < 20; ++i) {
        for (const uint32_t loaded : {0u, 1u}) {
          const double trip = noisy(loaded != 0 ? 900e3 : 60e3);
          PingSample ping{.peer = rank ^ 1, .loaded = loaded, .t0 = 1'000'000, .t1 = -70'000'000};
          ping.t2 = ping.t1 + 5000;
          ping.t3 = ping.t0 + 5000 + static_cast<int64_t>(trip);
          process.pings.push_back(ping);
        }
        process.probe.push_back(local(ProbeType::copy, noisy(0.1)));
        process.probe.push_back(local(ProbeType::reduce, noisy(0.3)));
        process.probe.push_back(local(ProbeType::checksum, noisy(0.05)));
      }
      trace.processes.push_back(std::move(process));
    }
    return trace;
  }

  static ProbeResult local(ProbeType type, double ns_per_byte) {
    ProbeResult result;
    result.type = type;
    result.bytes = 16 << 20;
    result.duration_ns = static_cast<int64_t>(ns_per_byte * static_cast<double>(result.bytes));
    return result;
  }
};

void expect_near(const std::optional<Fitted>& fitted, double truth, double share,
                 const char* what) {
  ASSERT_TRUE(fitted.has_value()) << what;
  EXPECT_NEAR(fitted->value, truth, truth * share) << what;
  EXPECT_GT(fitted->samples, 0u) << what;
  EXPECT_LE(fitted->low, fitted->high) << what;
}

TEST(Fit, FindsTheConstantsOfAKnownCluster) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    World world;
    world.seed = seed;
    const Costs costs = fit(world.probe());
    expect_near(costs.link_bytes_per_s, world.link, 0.03, "link");
    expect_near(costs.pair_link_bytes_per_s, world.pair_link, 0.03, "pair link");
    expect_near(costs.flow_bytes_per_s, world.flow, 0.03, "flow");
    expect_near(costs.round_trip_idle_ns, 60e3, 0.03, "idle");
    expect_near(costs.round_trip_loaded_ns, 900e3, 0.03, "loaded");
    expect_near(costs.cpu_ns_per_byte, world.cpu_per_byte, 0.05, "cpu a byte");
    expect_near(costs.cpu_ns_per_chunk, world.cpu_per_chunk, 0.15, "cpu a chunk");
    expect_near(costs.copy_ns_per_byte, 0.1, 0.03, "copy");
    expect_near(costs.reduce_ns_per_byte, 0.3, 0.03, "reduce");
    expect_near(costs.checksum_ns_per_byte, 0.05, 0.03, "checksum");
    EXPECT_FALSE(costs.link_is_lower_bound);
    ASSERT_EQ(costs.ring_rates.size(), 4u);
    EXPECT_EQ(costs.ring_rates[2].flows, 4u);
    EXPECT_NEAR(costs.ring_rates[1].bytes_per_s.value, 2 * world.flow, 0.03 * world.flow * 2);
    EXPECT_NEAR(*rate_of_flows(costs, 2), 2 * world.flow, 0.03 * world.flow * 2);
    EXPECT_NEAR(*rate_of_flows(costs, 16), world.link, 0.03 * world.link);
  }
}

TEST(Fit, WithoutNoiseIsExact) {
  World world;
  world.noise = 0;
  const Costs costs = fit(world.probe());
  expect_near(costs.cpu_ns_per_byte, world.cpu_per_byte, 1e-6, "cpu a byte");
  expect_near(costs.cpu_ns_per_chunk, world.cpu_per_chunk, 1e-6, "cpu a chunk");
  expect_near(costs.flow_bytes_per_s, world.flow, 1e-6, "flow");
  EXPECT_NEAR(costs.link_bytes_per_s->low, costs.link_bytes_per_s->high, 1e3);
}

TEST(Fit, OneFlowThatFillsTheLinkHasNoRateOfItsOwn) {
  World world;
  world.flow = 0.95 * world.link;
  const Costs costs = fit(world.probe());
  expect_near(costs.link_bytes_per_s, world.link, 0.03, "link");
  EXPECT_FALSE(costs.flow_bytes_per_s.has_value());
  EXPECT_FALSE(costs.link_is_lower_bound);
  EXPECT_NEAR(*rate_of_flows(costs, 1), world.link, 0.03 * world.link);
}

TEST(Fit, DoesNotSayWhatMoreFlowsWouldCarry) {
  World world;
  world.flows = {1};
  Costs costs = fit(world.probe());
  EXPECT_TRUE(costs.link_is_lower_bound);
  EXPECT_FALSE(costs.flow_bytes_per_s.has_value());
  EXPECT_NEAR(*rate_of_flows(costs, 1), world.flow, 0.03 * world.flow);
  EXPECT_EQ(rate_of_flows(costs, 4), std::nullopt);
  EXPECT_EQ(ring_all_reduce_seconds(costs, 1e6, 4, 4), std::nullopt);

  world.flows = {1, 2};  // still growing
  costs = fit(world.probe());
  EXPECT_TRUE(costs.link_is_lower_bound);
  expect_near(costs.flow_bytes_per_s, world.flow, 0.03, "flow");
  EXPECT_NEAR(*rate_of_flows(costs, 2), 2 * world.flow, 0.06 * world.flow);
  EXPECT_EQ(rate_of_flows(costs, 3), std::nullopt);
}

TEST(Fit, SmallChunksDoNotLowerTheLink) {
  trace::Trace trace = World().probe();
  for (ProbeResult& result : trace.processes[0].probe) {
    if (result.chunk_bytes == 64 << 10) result.duration_ns *= 3;
  }
  for (size_t rank = 1; rank < trace.processes.size(); ++rank) {
    trace.processes[rank].probe = trace.processes[0].probe;
  }
  expect_near(fit(trace).link_bytes_per_s, World().link, 0.03, "link");
}

TEST(Fit, OneChunkSizeCannotTellBytesFromChunks) {
  World world;
  world.chunk_sizes = {256 << 10};
  const Costs costs = fit(world.probe());
  EXPECT_FALSE(costs.cpu_ns_per_byte.has_value());
  EXPECT_FALSE(costs.cpu_ns_per_chunk.has_value());
  EXPECT_TRUE(costs.link_bytes_per_s.has_value());
}

TEST(Fit, ProcessorCostsAreNotNegative) {
  // Larger chunks cost more a byte: no cost of a chunk explains that.
  World world;
  world.noise = 0;
  world.cpu_per_chunk = 0;
  trace::Trace trace = world.probe();
  for (auto& process : trace.processes) {
    for (ProbeResult& result : process.probe) {
      if (result.chunk_bytes == 256 << 10) result.cpu_send_ns *= 2;
    }
  }
  Costs costs = fit(trace);
  EXPECT_EQ(costs.cpu_ns_per_chunk->value, 0);
  EXPECT_GT(costs.cpu_ns_per_byte->value, 0);
  // And the other way round: all of it is chunks, and more than all of it.
  world.cpu_per_byte = 0;
  world.cpu_per_chunk = 9000;
  trace = world.probe();
  for (auto& process : trace.processes) {
    for (ProbeResult& result : process.probe) {
      if (result.chunk_bytes == 64 << 10) result.cpu_send_ns *= 2;
    }
  }
  costs = fit(trace);
  EXPECT_EQ(costs.cpu_ns_per_byte->value, 0);
  EXPECT_GT(costs.cpu_ns_per_chunk->value, 9000);
}

TEST(Fit, OneMishapDoesNotMove) {
  World world;
  world.seed = 7;
  trace::Trace trace = world.probe();
  for (ProbeResult& result : trace.processes[0].probe) {
    if (result.type == ProbeType::rate && result.flows == 2) {
      result.cpu_send_ns *= 1000;
      result.duration_ns *= 1000;
    }
  }
  trace.processes[1].pings[0].t3 += 1'000'000'000'000;
  const Costs costs = fit(trace);
  expect_near(costs.link_bytes_per_s, world.link, 0.03, "link");
  expect_near(costs.cpu_ns_per_byte, world.cpu_per_byte, 0.1, "cpu a byte");
  expect_near(costs.round_trip_idle_ns, 60e3, 0.03, "idle");
}

// One number of flows that was measured in a bad moment does not discredit the others.
TEST(Fit, ASlowMomentIsOutvoted) {
  for (const int held_up : {1, 2, 4, 8, 16}) {
    World world;
    world.flows = {1, 2, 4, 8, 16};
    trace::Trace trace = world.probe();
    for (auto& process : trace.processes) {
      for (ProbeResult& result : process.probe) {
        if (result.type == ProbeType::rate && result.flows == held_up) result.duration_ns *= 20;
      }
    }
    const Costs costs = fit(trace);
    EXPECT_FALSE(costs.link_is_lower_bound) << held_up;
    EXPECT_NEAR(*rate_of_flows(costs, 18), world.link, 0.03 * world.link) << held_up;
    if (held_up > 2) {
      EXPECT_NEAR(*rate_of_flows(costs, 1), world.flow, 0.03 * world.flow) << held_up;
    }
  }
}

TEST(Fit, NothingMeasuredIsUnknown) {
  trace::Trace trace;
  for (int i = 0; i < 2; ++i) {
    const Costs costs = fit(trace);
    EXPECT_FALSE(costs.link_bytes_per_s || costs.pair_link_bytes_per_s || costs.flow_bytes_per_s);
    EXPECT_FALSE(costs.round_trip_idle_ns || costs.round_trip_loaded_ns);
    EXPECT_FALSE(costs.cpu_ns_per_byte || costs.cpu_ns_per_chunk);
    EXPECT_FALSE(costs.copy_ns_per_byte || costs.reduce_ns_per_byte || costs.checksum_ns_per_byte);
    EXPECT_TRUE(costs.ring_rates.empty());
    EXPECT_EQ(rate_of_flows(costs, 1), std::nullopt);
    EXPECT_EQ(ring_all_reduce_seconds(costs, 1e6, 4, 1), std::nullopt);
    // The same with a record of nothing.
    trace.processes.emplace_back();
    trace.processes[0].probe.emplace_back();
    trace.processes[0].pings.emplace_back();
  }
}

TEST(Fit, WithdrawsNothingButTheUnmeasured) {
  World world;
  trace::Trace trace = world.probe();
  for (auto& process : trace.processes) {
    std::erase_if(process.probe,
                  [](const ProbeResult& result) { return result.scope == ProbeScope::ring; });
    std::erase_if(process.pings, [](const PingSample& ping) { return ping.loaded == 1; });
  }
  const Costs costs = fit(trace);
  EXPECT_FALSE(costs.link_bytes_per_s.has_value());
  EXPECT_FALSE(costs.round_trip_loaded_ns.has_value());
  EXPECT_TRUE(costs.round_trip_idle_ns.has_value());
  expect_near(costs.pair_link_bytes_per_s, world.pair_link, 0.03, "pair link");
  expect_near(costs.flow_bytes_per_s, world.flow, 0.03, "flow");
}

// Whatever a file says, constants are numbers that make sense.
TEST(Fit, HostileRecordsGiveNoNonsense) {
  const auto check = [](const std::optional<Fitted>& fitted) {
    if (!fitted) return;
    for (const double value : {fitted->value, fitted->low, fitted->high}) {
      EXPECT_TRUE(std::isfinite(value));
      EXPECT_GE(value, 0);
    }
    EXPECT_LE(fitted->low, fitted->high);
    EXPECT_GT(fitted->samples, 0u);
  };
  Rng rng(5);
  const auto number = [&]() -> uint64_t {
    constexpr uint64_t kCorners[] = {
        0, 1, 2, ~uint64_t{0}, uint64_t{1} << 63, (uint64_t{1} << 63) - 1};
    return rng.below(3) == 0 ? kCorners[rng.below(std::size(kCorners))]
                             : rng.next() >> rng.below(64);
  };
  for (int round = 0; round < 500; ++round) {
    trace::Trace trace;
    trace.processes.resize(1 + rng.below(3));
    for (auto& process : trace.processes) {
      for (uint64_t i = rng.below(12); i > 0; --i) {
        ProbeResult result;
        result.type = static_cast<ProbeType>(rng.below(6));
        result.scope = static_cast<ProbeScope>(rng.below(4));
        result.flows = static_cast<uint16_t>(rng.below(2) == 0 ? rng.below(4) : number());
        result.chunk_bytes = static_cast<uint32_t>(number());
        result.bytes = number();
        result.chunks = number();
        result.duration_ns = static_cast<int64_t>(number());
        result.cpu_send_ns = static_cast<int64_t>(number());
        result.cpu_receive_ns = static_cast<int64_t>(number());
        process.probe.push_back(result);
        PingSample ping;
        ping.loaded = static_cast<uint32_t>(rng.below(3));
        for (int64_t* t : {&ping.t0, &ping.t1, &ping.t2, &ping.t3}) {
          *t = static_cast<int64_t>(number());
        }
        process.pings.push_back(ping);
      }
    }
    const Costs costs = fit(trace);
    for (const auto& fitted :
         {costs.link_bytes_per_s, costs.pair_link_bytes_per_s, costs.flow_bytes_per_s,
          costs.round_trip_idle_ns, costs.round_trip_loaded_ns, costs.cpu_ns_per_byte,
          costs.cpu_ns_per_chunk, costs.copy_ns_per_byte, costs.reduce_ns_per_byte,
          costs.checksum_ns_per_byte}) {
      check(fitted);
    }
    for (const auto& point : costs.ring_rates) check(point.bytes_per_s);
    for (const uint32_t lanes : {0u, 1u, 8u, 0xffffffffu}) {
      EXPECT_TRUE(std::isfinite(rate_of_flows(costs, lanes).value_or(0)));
      if (const auto time = ring_all_reduce_seconds(costs, 1e9, 4, lanes)) {
        EXPECT_FALSE(std::isnan(*time));
        EXPECT_GE(*time, 0);
      }
    }
  }
}

// ---- equations -----------------------------------------------------------------------------

TEST(Equations, RateIsTheLesserOfFlowsAndLink) {
  Costs costs;
  costs.link_bytes_per_s = Fitted{.value = 10};
  EXPECT_EQ(rate_of_flows(costs, 3), 10);
  costs.flow_bytes_per_s = Fitted{.value = 4};
  EXPECT_EQ(rate_of_flows(costs, 0), 0);
  EXPECT_EQ(rate_of_flows(costs, 1), 4);
  EXPECT_EQ(rate_of_flows(costs, 2), 8);
  EXPECT_EQ(rate_of_flows(costs, 3), 10);
}

TEST(Equations, RingBytesAreThoseThatEachRankSends) {
  for (const uint32_t ranks : {2u, 3u, 5u, 8u, 64u}) {
    // p - 1 steps of reduce-scatter and as many of all-gather, each of one part in p.
    double sent = 0;
    for (uint32_t step = 0; step < 2 * (ranks - 1); ++step) sent += 1e6 / ranks;
    EXPECT_NEAR(ring_bytes_per_rank(1e6, ranks), sent, 1e-3);
    EXPECT_NEAR(ring_wire_seconds(1e6, ranks, 2e6), sent / 2e6, 1e-9);
  }
  EXPECT_EQ(ring_bytes_per_rank(1e6, 1), 0);
  EXPECT_EQ(ring_bytes_per_rank(1e6, 0), 0);
  EXPECT_EQ(ring_wire_seconds(1e6, 1, 0), 0);
  EXPECT_EQ(ring_wire_seconds(0, 4, 0), 0);
  EXPECT_EQ(ring_wire_seconds(1, 4, 0), std::numeric_limits<double>::infinity());
}

TEST(Equations, RingAllReduceIsTheSumOfItsSteps) {
  Costs costs;
  costs.link_bytes_per_s = Fitted{.value = 1e9};
  costs.flow_bytes_per_s = Fitted{.value = 0.3e9};
  costs.round_trip_idle_ns = Fitted{.value = 40e3};
  costs.reduce_ns_per_byte = Fitted{.value = 0.25};
  for (const uint32_t ranks : {2u, 3u, 7u, 16u}) {
    for (const uint32_t lanes : {1u, 2u, 8u}) {
      const double bytes = 25e6;
      const double rate = std::min(lanes * 0.3e9, 1e9);
      double seconds = 0;
      for (uint32_t step = 0; step < 2 * (ranks - 1); ++step) {
        seconds += 20e-6 + bytes / ranks / rate;
        if (step < ranks - 1) seconds += bytes / ranks * 0.25e-9;
      }
      EXPECT_NEAR(*ring_all_reduce_seconds(costs, bytes, ranks, lanes), seconds, seconds * 1e-9);
    }
  }
  EXPECT_EQ(ring_all_reduce_seconds(costs, 1e6, 1, 1), 0);
  EXPECT_EQ(ring_all_reduce_seconds(costs, 1e6, 4, 0), std::nullopt);
  // What is not known is left out.
  costs.round_trip_idle_ns.reset();
  costs.reduce_ns_per_byte.reset();
  EXPECT_NEAR(*ring_all_reduce_seconds(costs, 1e6, 4, 8), 1.5e6 / 1e9, 1e-12);
}

TEST(Equations, AnIterationIsNoShorterThanEither) {
  EXPECT_EQ(iteration_floor_seconds(0.5, 1e9, 4, 1e9), 1.5);
  EXPECT_EQ(iteration_floor_seconds(2.0, 1e9, 4, 1e9), 2.0);
  EXPECT_EQ(iteration_floor_seconds(2.0, 1e9, 1, 1e9), 2.0);
}

Costs simple_costs() {
  Costs costs;
  costs.link_bytes_per_s = Fitted{1e9, 1e9, 1e9, 1};
  costs.round_trip_idle_ns = Fitted{20'000, 20'000, 20'000, 1};
  costs.reduce_ns_per_byte = Fitted{0.5, 0.5, 0.5, 1};
  return costs;
}

// Steps of 10 us, 1 ns a byte sent, 0.5 ns a byte added.
TEST(Equations, EveryAllReduceIsItsStepsItsBytesAndItsSums) {
  const Costs costs = simple_costs();
  const double n = 1e6;
  auto us = [](std::optional<double> seconds) { return *seconds * 1e6; };
  EXPECT_NEAR(us(halving_doubling_all_reduce_seconds(costs, n, {8})), 60 + 1750 + 437.5, 1e-6);
  // Three of seven ranks hand everything over first, and get everything back.
  EXPECT_NEAR(us(halving_doubling_all_reduce_seconds(costs, n, {7})),
              40 + 1500 + 375 + 20 + 2000 + 500, 1e-6);
  EXPECT_NEAR(us(doubling_all_reduce_seconds(costs, n, {8})), 30 + 3000 + 1500, 1e-6);
  EXPECT_NEAR(us(tree_all_reduce_seconds(costs, n, {8})), 60 + 2000 + 500, 1e-6);
  EXPECT_NEAR(us(direct_all_reduce_seconds(costs, n, {8})), 20 + 1750 + 437.5, 1e-6);
}

TEST(Equations, AHierarchyCopiesInsideHostsAndIsARingBetweenThem) {
  Costs costs = simple_costs();
  EXPECT_FALSE(hierarchical_all_reduce_seconds(costs, 1e6, {8, 1, 2}));
  costs.copy_ns_per_byte = Fitted{0.1, 0.1, 0.1, 1};
  const double inside = 0.75e6 * (4 * 0.1 + 0.5) * 1e-9;
  EXPECT_NEAR(*hierarchical_all_reduce_seconds(costs, 1e6, {8, 1, 2}),
              *ring_all_reduce_seconds(costs, 0.25e6, 2, 1) + inside, 1e-12);
  EXPECT_FALSE(hierarchical_all_reduce_seconds(costs, 1e6, {8, 1, 8}));
  EXPECT_FALSE(hierarchical_all_reduce_seconds(costs, 1e6, {8, 1, 3}));
}

TEST(Equations, NoAllReduceIsKnownWithoutARateAndOneRankNeedsNone) {
  for (auto* seconds :
       {&halving_doubling_all_reduce_seconds, &doubling_all_reduce_seconds,
        &tree_all_reduce_seconds, &direct_all_reduce_seconds, &hierarchical_all_reduce_seconds}) {
    EXPECT_FALSE(seconds({}, 1e6, {4, 1, 2}));
    EXPECT_EQ(seconds({}, 1e6, {1}), 0.0);
  }
}

TEST(Equations, PeersAreFlowsToo) {
  Costs costs = simple_costs();
  costs.reduce_ns_per_byte.reset();
  costs.flow_bytes_per_s = Fitted{0.25e9, 0.25e9, 0.25e9, 1};
  // Three peers carry three times as much as the one of a ring.
  EXPECT_NEAR(*ring_all_reduce_seconds(costs, 1e9, 4, 1) /
                  *direct_all_reduce_seconds(costs, 1e9, {4, 1, 4}),
              3, 0.01);
}

}  // namespace
}  // namespace weft::cost
