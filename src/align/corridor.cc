#include "corridor.h"

#include <algorithm>
#include <limits>

namespace weft::align {

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
// Newton's method ends when it meets the same two corners again, which takes a few steps. Stopping
// it early is safe too: it comes from outside, so the corridor is at worst too wide.
constexpr int kMaxSteps = 200;

// Positive when a, b, c turn left.
Wide cross(const Point& a, const Point& b, const Point& c) {
  const Wide bu = static_cast<Wide>(b.u) - a.u;
  const Wide bw = static_cast<Wide>(b.w) - a.w;
  const Wide cu = static_cast<Wide>(c.u) - a.u;
  const Wide cw = static_cast<Wide>(c.w) - a.w;
  return bu * cw - bw * cu;
}

// `side` is 1 for the lower hull, -1 for the upper one.
std::vector<Point> hull(std::vector<Point> points, int side) {
  std::sort(points.begin(), points.end(), [side](const Point& a, const Point& b) {
    if (a.u != b.u) return a.u < b.u;
    return side > 0 ? a.w < b.w : a.w > b.w;
  });
  size_t kept = 0;
  for (const Point& point : points) {
    if (kept > 0 && points[kept - 1].u == point.u) continue;
    while (kept >= 2) {
      const Wide turn = cross(points[kept - 2], points[kept - 1], point);
      if (side > 0 ? turn > 0 : turn < 0) break;
      --kept;
    }
    points[kept++] = point;
  }
  points.resize(kept);
  points.shrink_to_fit();
  return points;
}

// Without the rounding of two large numbers, and without overflow.
double minus(int64_t a, int64_t b) { return static_cast<double>(static_cast<Wide>(a) - b); }

double intercept(const Point& point, double d) {
  return static_cast<double>(point.w) - d * static_cast<double>(point.u);
}

// The slope from corner `i` of a hull to the next.
double slope(const std::vector<Point>& hull, size_t i) {
  return minus(hull[i + 1].w, hull[i].w) / minus(hull[i + 1].u, hull[i].u);
}

// The first corner after which slopes are no longer on the near side of `d`: where a line of slope
// d touches. Slopes fall along an upper hull and rise along a lower one.
size_t touching(const std::vector<Point>& hull, double d, bool upper) {
  size_t from = 0;
  size_t to = hull.size() - 1;
  while (from < to) {
    const size_t middle = from + (to - from) / 2;
    const double s = slope(hull, middle);
    if (upper ? s > d : s < d)
      from = middle + 1;
    else
      to = middle;
  }
  return from;
}

const Point& floor_corner(const std::vector<Point>& floor, double d) {
  return floor[touching(floor, d, true)];
}
const Point& ceiling_corner(const std::vector<Point>& ceiling, double d) {
  return ceiling[touching(ceiling, d, false)];
}

// The room between floor and ceiling for lines of slope d: a concave function of d.
double room(const std::vector<Point>& floor, const std::vector<Point>& ceiling, double d) {
  return intercept(ceiling_corner(ceiling, d), d) - intercept(floor_corner(floor, d), d);
}

// From `d`, outside the corridor or on its edge, to the nearest slope that has room, going down
// (`down`) or up but not beyond `last`. Each step goes where the two corners that are in the way
// at d would just let a line pass; no slope before that has room.
std::optional<double> edge(const std::vector<Point>& floor, const std::vector<Point>& ceiling,
                           double d, double last, bool down) {
  for (int step = 0; step < kMaxSteps; ++step) {
    const Point& under = floor_corner(floor, d);
    const Point& over = ceiling_corner(ceiling, d);
    if (intercept(over, d) >= intercept(under, d)) return d;
    const double du = minus(over.u, under.u);
    if (down ? du <= 0 : du >= 0) return std::nullopt;
    const double next = minus(over.w, under.w) / du;
    if (down ? next < last : next > last) return std::nullopt;
    if (down ? next >= d : next <= d) return d;  // as near as doubles can tell
    d = next;
  }
  return d;
}

// The slope of the hull at `u`, within `before` and `after`, which are its slopes beyond its ends.
double slope_at(const std::vector<Point>& hull, double u, double before, double after) {
  const auto next = std::partition_point(hull.begin(), hull.end(), [u](const Point& point) {
    return static_cast<double>(point.u) <= u;
  });
  if (next == hull.begin()) return before;
  if (next == hull.end()) return after;
  const auto i = static_cast<size_t>(next - hull.begin()) - 1;
  return std::clamp(slope(hull, i), std::min(before, after), std::max(before, after));
}

}  // namespace

std::vector<Point> upper_hull(std::vector<Point> points) { return hull(std::move(points), -1); }
std::vector<Point> lower_hull(std::vector<Point> points) { return hull(std::move(points), 1); }

Corridor Corridor::exact() {
  Corridor corridor(0);
  corridor.floor_ = {{0, 0}};
  corridor.ceiling_ = {{0, 0}};
  return corridor;
}

std::optional<Corridor> Corridor::between(std::vector<Point> floor, std::vector<Point> ceiling,
                                          double drift_max) {
  Corridor corridor(drift_max);
  corridor.floor_ = upper_hull(std::move(floor));
  corridor.ceiling_ = lower_hull(std::move(ceiling));
  if (!corridor.narrow_drift()) return std::nullopt;
  return corridor;
}

// Finds the steepest and the shallowest line; false when there is none.
bool Corridor::narrow_drift() {
  if (!has_floor() || !has_ceiling()) return true;
  const auto steepest = edge(floor_, ceiling_, drift_high_, drift_low_, true);
  if (!steepest) return false;
  const auto shallowest = edge(floor_, ceiling_, drift_low_, *steepest, false);
  drift_high_ = *steepest;
  // With room for one line only, the two searches may miss each other by a rounding.
  drift_low_ = shallowest.value_or(*steepest);
  return true;
}

// The w of the lowest line at u is a convex function of its slope; it is least where the floor's
// hull has that slope at u, or at the nearest slope that the corridor has.
Line Corridor::lowest(double u) const {
  const double d = slope_at(floor_, u, drift_high_, drift_low_);
  return {intercept(floor_corner(floor_, d), d), d};
}

Line Corridor::highest(double u) const {
  const double d = slope_at(ceiling_, u, drift_low_, drift_high_);
  return {intercept(ceiling_corner(ceiling_, d), d), d};
}

double Corridor::low(double u) const { return has_floor() ? lowest(u).at(u) : -kInfinite; }
double Corridor::high(double u) const { return has_ceiling() ? highest(u).at(u) : kInfinite; }

Line Corridor::middle() const {
  if (has_floor() && has_ceiling()) {
    // A mean of two lines of the corridor is one of its lines.
    const Line low = lowest(0);
    const Line high = highest(0);
    return {low.c + (high.c - low.c) / 2, low.d + (high.d - low.d) / 2};
  }
  if (has_floor()) return {intercept(floor_corner(floor_, 0), 0), 0};
  if (has_ceiling()) return {intercept(ceiling_corner(ceiling_, 0), 0), 0};
  return {};
}

double contradiction(std::vector<Point> floor, std::vector<Point> ceiling, double drift_max) {
  floor = upper_hull(std::move(floor));
  ceiling = lower_hull(std::move(ceiling));
  double from = -drift_max;
  double to = drift_max;
  for (int step = 0; step < kMaxSteps; ++step) {
    const double a = from + (to - from) / 3;
    const double b = to - (to - from) / 3;
    if (room(floor, ceiling, a) < room(floor, ceiling, b))
      from = a;
    else
      to = b;
  }
  return std::max(0.0, -room(floor, ceiling, from + (to - from) / 2) / 2);
}

}  // namespace weft::align
