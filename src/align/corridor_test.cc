#include "corridor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "weft/base.h"

namespace weft::align {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

struct Points {
  std::vector<Point> floor, ceiling;
};

bool fits(const Points& points, const Line& line, double drift_max, double tolerance) {
  if (std::abs(line.d) > drift_max + 1e-15) return false;
  for (const Point& p : points.floor) {
    if (line.at(static_cast<double>(p.u)) < static_cast<double>(p.w) - tolerance) return false;
  }
  for (const Point& p : points.ceiling) {
    if (line.at(static_cast<double>(p.u)) > static_cast<double>(p.w) + tolerance) return false;
  }
  return true;
}

// Every corner of the set of lines that fit: through two points, or through one at a limit of d.
std::vector<Line> corner_lines(const Points& points, double drift_max) {
  std::vector<Point> all = points.floor;
  all.insert(all.end(), points.ceiling.begin(), points.ceiling.end());
  std::vector<Line> lines;
  const auto consider = [&](const Point& through, double d) {
    const Line line{static_cast<double>(through.w) - d * static_cast<double>(through.u), d};
    if (fits(points, line, drift_max, 1e-6)) lines.push_back(line);
  };
  for (const Point& a : all) {
    consider(a, drift_max);
    consider(a, -drift_max);
    for (const Point& b : all) {
      if (a.u != b.u) consider(a, static_cast<double>(b.w - a.w) / static_cast<double>(b.u - a.u));
    }
  }
  return lines;
}

// Points on both sides of a known line, some of them near.
Points random_points(Rng& rng, size_t count, int64_t least) {
  Points points;
  const Line truth{rng.uniform() * 2000 - 1000, rng.uniform() * 0.01 - 0.005};
  for (size_t i = 0; i < count; ++i) {
    const auto u = static_cast<int64_t>(rng.below(200'000));
    const auto delay = least + static_cast<int64_t>(rng.below(rng.below(4) == 0 ? 20 : 2000));
    const auto w = std::llround(truth.at(static_cast<double>(u)));
    if (rng.below(2) == 0)
      points.floor.push_back({u, w - delay});
    else
      points.ceiling.push_back({u, w + delay});
  }
  return points;
}

TEST(Corridor, AgreesWithTryingEveryLine) {
  Rng rng(7);
  int bounded = 0;
  for (int round = 0; round < 400; ++round) {
    const double drift_max = round % 2 == 0 ? 0.02 : 0.006;
    const Points points = random_points(rng, 2 + rng.below(12), round % 3 == 0 ? 30 : 1);
    if (points.floor.empty() || points.ceiling.empty()) continue;
    ++bounded;
    const auto corridor = Corridor::between(points.floor, points.ceiling, drift_max);
    ASSERT_TRUE(corridor.has_value()) << round;
    const auto corners = corner_lines(points, drift_max);
    ASSERT_FALSE(corners.empty());
    double steepest = -1;
    double shallowest = 1;
    for (const Line& line : corners) {
      steepest = std::max(steepest, line.d);
      shallowest = std::min(shallowest, line.d);
    }
    EXPECT_NEAR(corridor->drift_high(), steepest, 1e-9) << round;
    EXPECT_NEAR(corridor->drift_low(), shallowest, 1e-9) << round;
    for (const double u : {-50'000.0, 0.0, 33'333.0, 100'000.0, 260'000.0}) {
      double low = kInfinite;
      double high = -kInfinite;
      for (const Line& line : corners) {
        low = std::min(low, line.at(u));
        high = std::max(high, line.at(u));
      }
      EXPECT_NEAR(corridor->low(u), low, 1e-3) << round << " at " << u;
      EXPECT_NEAR(corridor->high(u), high, 1e-3) << round << " at " << u;
    }
    EXPECT_TRUE(fits(points, corridor->middle(), drift_max, 1e-6)) << round;
    EXPECT_NEAR(corridor->middle().c, (corridor->low(0) + corridor->high(0)) / 2, 1e-6);
  }
  EXPECT_GT(bounded, 300);
}

TEST(Corridor, HasNoLineWhenPointsCross) {
  Rng rng(11);
  int crossed = 0;
  for (int round = 0; round < 400; ++round) {
    const Points points = random_points(rng, 6, -60);
    if (points.floor.empty() || points.ceiling.empty()) continue;
    const auto corridor = Corridor::between(points.floor, points.ceiling, 0.01);
    const double wrong = contradiction(points.floor, points.ceiling, 0.01);
    EXPECT_EQ(corridor.has_value(), !corner_lines(points, 0.01).empty()) << round;
    EXPECT_EQ(corridor.has_value(), wrong < 1e-6) << round;
    if (corridor) continue;
    ++crossed;
    Points loose = points;
    for (Point& p : loose.floor) p.w -= static_cast<int64_t>(std::ceil(wrong)) + 1;
    for (Point& p : loose.ceiling) p.w += static_cast<int64_t>(std::ceil(wrong)) + 1;
    EXPECT_TRUE(Corridor::between(loose.floor, loose.ceiling, 0.01).has_value()) << round;
  }
  EXPECT_GT(crossed, 20);
}

TEST(Corridor, OneSideIsOpen) {
  const auto floor = Corridor::between({{1000, 5}, {2000, 7}}, {}, 0.001);
  ASSERT_TRUE(floor.has_value());
  EXPECT_EQ(floor->high(1500), kInfinite);
  EXPECT_NEAR(floor->low(2000), 7, 1e-9);
  EXPECT_NEAR(floor->low(3000), 6, 1e-9);
  EXPECT_EQ(floor->middle().c, 7);
  EXPECT_EQ(floor->middle().d, 0);
  const auto ceiling = Corridor::between({}, {{1000, 5}}, 0.001);
  ASSERT_TRUE(ceiling.has_value());
  EXPECT_EQ(ceiling->low(0), -kInfinite);
  EXPECT_NEAR(ceiling->high(0), 6, 1e-9);
  EXPECT_EQ(Corridor(0.001).low(0), -kInfinite);
  EXPECT_EQ(Corridor::exact().low(1e9), 0);
  EXPECT_EQ(Corridor::exact().high(-1e9), 0);
}

// Products of these differences do not fit 64 bits; the middle one is inside by one nanosecond.
TEST(Corridor, HullsOfLongSpansAreExact) {
  const int64_t far = int64_t{1} << 60;
  const std::vector<Point> points = {{0, 0}, {far, far + 1}, {2 * far, 2 * far}};
  EXPECT_EQ(upper_hull(points).size(), 3u);
  EXPECT_EQ(lower_hull(points).size(), 2u);
  const std::vector<Point> line = {{0, 0}, {far, far}, {2 * far, 2 * far}};
  EXPECT_EQ(upper_hull(line).size(), 2u);
  EXPECT_EQ(lower_hull(line).size(), 2u);
}

TEST(Corridor, OfPointsAtOneMomentOnlyTheNearestCounts) {
  EXPECT_EQ(upper_hull({{5, 1}, {5, 3}, {5, 2}}).front().w, 3);
  EXPECT_EQ(lower_hull({{5, 2}, {5, 1}, {5, 3}}).front().w, 1);
  EXPECT_TRUE(lower_hull({}).empty());
}

}  // namespace
}  // namespace weft::align
