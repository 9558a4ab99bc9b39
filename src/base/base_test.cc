#include "weft/base.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace weft {
namespace {

TEST(Result, carries_a_value_or_where_it_failed) {
  auto half = [](int n) -> Result<int> {
    if (n % 2 != 0) return error(Code::invalid_argument, "%d is odd", n);
    return n / 2;
  };
  auto quarter = [&](int n) -> Result<int> {
    WEFT_ASSIGN(int once, half(n));
    auto twice = half(once);
    if (!twice) return std::move(twice).error().in("second half");
    return *twice;
  };
  EXPECT_EQ(*quarter(12), 3);
  EXPECT_EQ(quarter(3).error().message(), "3 is odd");
  EXPECT_EQ(quarter(6).error().message(), "second half: 3 is odd");
}

TEST(Text, sizes_and_rates_read_back) {
  EXPECT_EQ(parse_bytes("25MiB")->count, 25u << 20);
  EXPECT_EQ(parse_bytes("1MB")->count, 1000000u);
  EXPECT_EQ(parse_bytes("1.5KiB")->count, 1536u);
  for (uint64_t n : {0ULL, 1ULL, 1023ULL, 1024ULL, 26214400ULL, 5ULL << 30})
    EXPECT_EQ(parse_bytes(format_bytes({n}))->count, n);
  for (const char* bad : {"", "MiB", "-1", "1e3", "12 parsecs", "nan", "99999999999GiB"})
    EXPECT_FALSE(parse_bytes(bad)) << bad;
  EXPECT_DOUBLE_EQ(*parse_rate("25gbit"), 25e9);
  EXPECT_DOUBLE_EQ(*parse_rate("1.5gbit"), 1.5e9);
  for (const char* bad : {"25", "0gbit", "-1gbit", "gbit"}) EXPECT_FALSE(parse_rate(bad)) << bad;
  EXPECT_EQ(parse_duration("+250ms")->count, 250'000'000);
  EXPECT_EQ(parse_duration("-3us")->count, -3000);
  EXPECT_FALSE(parse_duration("3"));
}

TEST(Text, nearest_finds_a_slip_and_nothing_far) {
  std::vector<std::string> names = {"barrier", "buckets", "lanes"};
  EXPECT_EQ(nearest("barier", names), "barrier");
  EXPECT_EQ(nearest("lane", names), "lanes");
  EXPECT_EQ(nearest("laens", names), "lanes");
  EXPECT_EQ(nearest("colour", names), std::nullopt);
}

TEST(Quantile, interpolates) {
  EXPECT_DOUBLE_EQ(quantile({4, 1, 3, 2}, 0.5), 2.5);
  EXPECT_DOUBLE_EQ(quantile({7}, 0.25), 7);
  EXPECT_DOUBLE_EQ(quantile({1, 2, 3}, 1.0), 3);
}

TEST(Rng, is_the_same_everywhere_and_covers_its_range) {
  Rng a(7), b(7), c(8);
  EXPECT_EQ(a.next(), b.next());
  EXPECT_NE(a.next(), c.next());
  std::set<uint64_t> seen;
  for (int i = 0; i < 200; ++i) seen.insert(a.below(5));
  EXPECT_EQ(seen.size(), 5u);
}

TEST(SkewedClock, is_wrong_by_what_it_was_told) {
  struct Fake final : Clock {
    Nanos time;
    Nanos now() const override { return time; }
  } truth;
  truth.time = {1000};
  SkewedClock skewed(truth, Nanos::from_millis(250), 50);
  truth.time = Nanos{1000} + Nanos::from_seconds(2);
  EXPECT_EQ((skewed.now() - truth.now()).count, 250'000'000 + 100'000);
}

TEST(Log, goes_to_the_sink_with_its_prefix) {
  std::vector<std::string> lines;
  log_set_sink([&](std::string_view line) { lines.emplace_back(line); });
  log_set_prefix("rank 3");
  WEFT_LOG(base, error, "disk %d is on fire", 7);
  log_set_sink({});
  log_set_prefix("");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0], testing::HasSubstr("rank 3 base error: disk 7 is on fire"));
}

TEST(CheckDeathTest, says_what_was_broken) { EXPECT_DEATH(WEFT_CHECK(1 == 2), "1 == 2"); }

}  // namespace
}  // namespace weft
