// Sets of moments, as sorted spans that do not touch.
#pragma once

#include <cstdint>
#include <vector>

namespace weft::diagnose {

struct Span {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  // As a double: times lie within 2^62 of zero, so a difference may not fit an integer.
  double length() const {
    return end_ns > start_ns ? static_cast<double>(static_cast<uint64_t>(end_ns) -
                                                   static_cast<uint64_t>(start_ns))
                             : 0;
  }
  friend bool operator==(const Span&, const Span&) = default;
};

// Sorted, empty ones dropped, those that touch made one.
std::vector<Span> united(std::vector<Span> spans);
// What of a united set lies in `window`.
std::vector<Span> within(const std::vector<Span>& spans, Span window);
std::vector<Span> intersection(const std::vector<Span>& a, const std::vector<Span>& b);
double length(const std::vector<Span>& spans);

}  // namespace weft::diagnose
