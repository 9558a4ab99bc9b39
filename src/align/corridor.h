// A corridor: all lines that pass above some points and below others. Private to the module.
//
// A line is w = c + d * u, where u is a time on a host's clock and w is what must be added to it.
// Only the corners of the points' hulls can touch a line, so only they are kept. Hulls are built
// with 128-bit products and are exact; lines are doubles, which is enough because u and w count
// from the host's first record and |d| is small.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace weft::align {

// Products and sums of times that no 64 bits hold.
__extension__ using Wide = __int128;

// Both within 2^62 of zero, so that products of differences fit 128 bits.
struct Point {
  int64_t u = 0;
  int64_t w = 0;
};

struct Line {
  double c = 0;
  double d = 0;
  double at(double u) const { return c + d * u; }
};

// The corners that a line can touch from above (those of floor points), by u.
std::vector<Point> upper_hull(std::vector<Point> points);
// The corners that a line can touch from below (those of ceiling points), by u.
std::vector<Point> lower_hull(std::vector<Point> points);

class Corridor {
 public:
  // All lines with |d| <= drift_max: nothing is known.
  explicit Corridor(double drift_max = 0) : drift_low_(-drift_max), drift_high_(drift_max) {}
  // The one line w = 0.
  static Corridor exact();
  // The lines at or above `floor`, at or below `ceiling`, with |d| <= drift_max; none: nullopt.
  static std::optional<Corridor> between(std::vector<Point> floor, std::vector<Point> ceiling,
                                         double drift_max);

  bool has_floor() const { return !floor_.empty(); }
  bool has_ceiling() const { return !ceiling_.empty(); }
  double drift_low() const { return drift_low_; }
  double drift_high() const { return drift_high_; }

  // The least and the greatest w that a line of the corridor has at `u`; infinite without a floor
  // or a ceiling.
  double low(double u) const;
  double high(double u) const;
  // A line inside, half-way between low and high at u = 0. With a floor or a ceiling only, the
  // line without drift that touches it; with neither, w = 0.
  Line middle() const;

 private:
  bool narrow_drift();
  Line lowest(double u) const;
  Line highest(double u) const;

  std::vector<Point> floor_;    // an upper hull
  std::vector<Point> ceiling_;  // a lower hull
  double drift_low_ = 0;
  double drift_high_ = 0;
};

// By how much every point must give way so that some line with |d| <= drift_max passes; 0 when one
// does already. REQUIRES: neither is empty.
double contradiction(std::vector<Point> floor, std::vector<Point> ceiling, double drift_max);

}  // namespace weft::align
