#include "factors.h"

#include <gtest/gtest.h>

namespace weft::lab {
namespace {

constexpr Workload kVgg16{{138'357'544 * 4ull}, {136'240'000}};
const FactorLimits kTwoCores{.cores = 2};

TEST(Factors, SlowTheTargetDownToWhatTheMachineCarries) {
  // 4 hosts at 25 Gb/s are 100; two cores carry 2.5.
  const Target target{4, 25e9, 5e9};
  const Result<Factors> factors = choose_factors(target, kVgg16, kTwoCores);
  ASSERT_TRUE(factors);
  EXPECT_EQ(factors->dilation, 40);
  // 1.5 * 553 MB at 5 Gb/s and the compute take 1.464 s, 58.6 s dilated: over 23.4 to be 2.5 s.
  EXPECT_EQ(factors->shrink, 25);
  EXPECT_DOUBLE_EQ(factors->to_real_rate(25e9), 0.625e9);
  EXPECT_NEAR(factors->to_wall(one_flow_iteration(target, kVgg16)).seconds(), 2.34, 0.01);
}

TEST(Factors, LeaveASmallTargetAlone) {
  const Result<Factors> factors =
      choose_factors({2, 1e9, 0}, {{1'000'000}, {1'000'000}}, kTwoCores);
  ASSERT_TRUE(factors);
  EXPECT_EQ(factors->dilation, 1);
  EXPECT_EQ(factors->shrink, 1);
}

TEST(Factors, NeverShrinkMoreThanTheyDilate) {
  for (const double link : {1e9, 10e9, 25e9, 100e9, 400e9}) {
    for (const uint32_t hosts : {1u, 2u, 4u, 8u, 64u}) {
      for (const uint64_t bytes : {1ull, 1ull << 20, 1ull << 30, 1ull << 40}) {
        const Target target{hosts, link, link / 5};
        const Result<Factors> factors = choose_factors(target, {{bytes}, {50'000'000}}, kTwoCores);
        ASSERT_TRUE(factors);
        EXPECT_GE(factors->shrink, 1);
        EXPECT_LE(factors->shrink, factors->dilation);
        if (hosts > 1) {
          EXPECT_LE(hosts * factors->to_real_rate(link), 2.5e9 * (1 + 1e-6));
        }
      }
    }
  }
}

TEST(Factors, CanBeAskedFor) {
  const Target target{4, 25e9, 5e9};
  const Result<Factors> doubled = choose_factors(target, kVgg16, kTwoCores, 80.0, 25.0);
  ASSERT_TRUE(doubled);
  EXPECT_EQ(doubled->dilation, 80);
  EXPECT_EQ(doubled->shrink, 25);
  // A shrink alone brings the dilation that it needs.
  const Result<Factors> shrunk = choose_factors(target, kVgg16, kTwoCores, {}, 64.0);
  ASSERT_TRUE(shrunk);
  EXPECT_EQ(shrunk->dilation, 64);
}

TEST(Factors, RefuseWhatIsNoFactor) {
  const Target target{4, 25e9, 5e9};
  EXPECT_FALSE(choose_factors(target, kVgg16, kTwoCores, 0.5));
  EXPECT_FALSE(choose_factors(target, kVgg16, kTwoCores, 20.0, 21.0));
  EXPECT_FALSE(choose_factors(target, kVgg16, kTwoCores, 20.0, 0.0));
  EXPECT_FALSE(choose_factors(target, kVgg16, kTwoCores, {}, 1e300));
  EXPECT_FALSE(choose_factors({4, 0, 0}, kVgg16, kTwoCores));
  const Result<Factors> refused = choose_factors(target, kVgg16, kTwoCores, 20.0, 21.0);
  EXPECT_NE(refused.error().message().find("shrink is 21"), std::string::npos);
}

TEST(Factors, DivideSizesButNeverToNothing) {
  const Factors factors{20, 16};
  EXPECT_EQ(factors.to_real(Bytes{0}).count, 0u);
  EXPECT_EQ(factors.to_real(Bytes{1}).count, 1u);
  EXPECT_EQ(factors.to_real(kib(256)).count, 16384u);
  EXPECT_EQ(factors.to_real_elements(102'760'448), 6'422'528u);
  EXPECT_EQ(factors.to_wall(Nanos::from_millis(100)), Nanos::from_millis(125));
  EXPECT_EQ(factors.to_target(Nanos::from_millis(125)), Nanos::from_millis(100));
}

TEST(Factors, SayWhatTheyDo) {
  const std::string said = explain({20, 16}, {4, 25e9, 5e9});
  EXPECT_NE(said.find("100 us here counts as 80 us"), std::string::npos) << said;
  EXPECT_NE(said.find("counts 0.05 times"), std::string::npos) << said;
  EXPECT_NE(explain({1, 1}, {2, 1e9, 0}).find("in full"), std::string::npos);
}

}  // namespace
}  // namespace weft::lab
