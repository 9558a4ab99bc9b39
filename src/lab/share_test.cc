#include "share.h"

#include <gtest/gtest.h>

#include "weft/base.h"

namespace weft::lab {
namespace {

constexpr double kLink = 100;
constexpr double kNoCap = 1e9;

std::vector<double> shares(const std::vector<Flow>& flows, uint32_t hosts = 4) {
  return share_out(flows, hosts, kLink);
}

TEST(Share, OneFlowHasItsCapOrTheLink) {
  EXPECT_EQ(shares({{0, 1, 20, true}}), std::vector<double>{20});
  EXPECT_EQ(shares({{0, 1, kNoCap, true}}), std::vector<double>{kLink});
}

TEST(Share, LanesOfAPairShareTheLink) {
  EXPECT_EQ(shares(std::vector<Flow>(4, {0, 1, 20, true})), std::vector<double>(4, 20));
  EXPECT_EQ(shares(std::vector<Flow>(10, {0, 1, 20, true})), std::vector<double>(10, 10));
}

TEST(Share, ARingFillsEveryLink) {
  std::vector<Flow> ring;
  for (uint32_t host = 0; host < 4; ++host) ring.push_back({host, (host + 1) % 4, kNoCap, true});
  EXPECT_EQ(shares(ring), std::vector<double>(4, kLink));
}

TEST(Share, DirectionsOfALinkAreTwo) {
  EXPECT_EQ(shares({{0, 1, kNoCap, true}, {1, 0, kNoCap, true}}), std::vector<double>(2, kLink));
}

TEST(Share, AReceiverHasALimitToo) {
  EXPECT_EQ(shares({{0, 3, kNoCap, true}, {1, 3, kNoCap, true}}), std::vector<double>(2, 50));
}

TEST(Share, WhatOneCannotUseIsLeftToOthers) {
  // By its cap.
  EXPECT_EQ(shares({{0, 1, 10, true}, {0, 2, kNoCap, true}}), (std::vector<double>{10, 90}));
  // By a receiver that three others fill: 25 each there, and the sender's other flow has 75.
  EXPECT_EQ(shares({{0, 3, kNoCap, true},
                    {1, 3, kNoCap, true},
                    {2, 3, kNoCap, true},
                    {2, 3, kNoCap, true},
                    {0, 1, kNoCap, true}}),
            (std::vector<double>{25, 25, 25, 25, 75}));
}

TEST(Share, AnIdleFlowTakesNothingAndMayBegin) {
  const std::vector<double> rates =
      shares({{0, 1, kNoCap, true}, {0, 2, kNoCap, false}, {2, 3, 30, false}, {2, 1, 70, false}});
  EXPECT_EQ(rates, (std::vector<double>{100, 50, 30, 50}));
}

// Fair and full: no link carries more than it can, and every flow has a reason not to have more:
// its cap, or a full link on which no other flow has more than it.
TEST(Share, IsMaxMinForAnyFlows) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed);
    const auto hosts = static_cast<uint32_t>(2 + rng.below(6));
    std::vector<Flow> flows(1 + rng.below(40));
    for (Flow& flow : flows) {
      flow.from = static_cast<uint32_t>(rng.below(hosts));
      flow.to = (flow.from + 1 + static_cast<uint32_t>(rng.below(hosts - 1))) % hosts;
      flow.cap = rng.below(2) == 0 ? kNoCap : 1 + static_cast<double>(rng.below(100));
      flow.active = rng.below(4) != 0;
    }
    const std::vector<double> rates = shares(flows, hosts);
    std::vector<double> sent(hosts), received(hosts), most_sent(hosts), most_received(hosts);
    for (size_t i = 0; i < flows.size(); ++i) {
      ASSERT_GT(rates[i], 0);
      ASSERT_LE(rates[i], flows[i].cap);
      ASSERT_LE(rates[i], kLink);
      if (!flows[i].active) continue;
      sent[flows[i].from] += rates[i];
      received[flows[i].to] += rates[i];
      most_sent[flows[i].from] = std::max(most_sent[flows[i].from], rates[i]);
      most_received[flows[i].to] = std::max(most_received[flows[i].to], rates[i]);
    }
    constexpr double kSlack = 1e-6;
    for (uint32_t host = 0; host < hosts; ++host) {
      ASSERT_LE(sent[host], kLink + kSlack);
      ASSERT_LE(received[host], kLink + kSlack);
    }
    for (size_t i = 0; i < flows.size(); ++i) {
      if (!flows[i].active) continue;
      const uint32_t from = flows[i].from, to = flows[i].to;
      const bool capped = rates[i] >= flows[i].cap - kSlack;
      const bool sender = sent[from] > kLink - kSlack && rates[i] > most_sent[from] - kSlack;
      const bool receiver = received[to] > kLink - kSlack && rates[i] > most_received[to] - kSlack;
      ASSERT_TRUE(capped || sender || receiver) << "flow " << i << " has " << rates[i];
    }
  }
}

}  // namespace
}  // namespace weft::lab
