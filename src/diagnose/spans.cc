#include "spans.h"

#include <algorithm>

namespace weft::diagnose {

std::vector<Span> united(std::vector<Span> spans) {
  std::erase_if(spans, [](const Span& span) { return span.end_ns <= span.start_ns; });
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.start_ns < b.start_ns; });
  std::vector<Span> out;
  for (const Span& span : spans) {
    if (!out.empty() && span.start_ns <= out.back().end_ns)
      out.back().end_ns = std::max(out.back().end_ns, span.end_ns);
    else
      out.push_back(span);
  }
  return out;
}

std::vector<Span> within(const std::vector<Span>& spans, Span window) {
  auto at = std::lower_bound(spans.begin(), spans.end(), window.start_ns,
                             [](const Span& span, int64_t time) { return span.end_ns <= time; });
  std::vector<Span> out;
  for (; at != spans.end() && at->start_ns < window.end_ns; ++at)
    out.push_back({std::max(at->start_ns, window.start_ns), std::min(at->end_ns, window.end_ns)});
  return out;
}

std::vector<Span> intersection(const std::vector<Span>& a, const std::vector<Span>& b) {
  std::vector<Span> out;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    Span common = {std::max(a[i].start_ns, b[j].start_ns), std::min(a[i].end_ns, b[j].end_ns)};
    if (common.start_ns < common.end_ns) out.push_back(common);
    ++(a[i].end_ns < b[j].end_ns ? i : j);
  }
  return out;
}

double length(const std::vector<Span>& spans) {
  double sum = 0;
  for (const Span& span : spans) sum += span.length();
  return sum;
}

}  // namespace weft::diagnose
