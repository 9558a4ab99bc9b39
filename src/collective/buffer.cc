#include <algorithm>

#include "weft/collective.h"

namespace weft::collective {

void Buffer::add(std::span<float> part) {
  if (part.empty()) return;
  parts_.push_back(part);
  starts_.push_back(elements_);
  elements_ += part.size();
}

size_t Buffer::find(uint64_t element) const {
  auto after = std::upper_bound(starts_.begin(), starts_.end(), element);
  return static_cast<size_t>(after - starts_.begin()) - (after == starts_.begin() ? 0 : 1);
}

// Compiled for several instruction sets and chosen when the library is loaded. Sanitizers cannot
// follow the loader's choice, so they get the plain one.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__clang__)
[[gnu::target_clones("default", "avx2", "avx512f"), gnu::optimize("O3")]]
#endif
void add_to(std::span<float> to, const float* from) {
  float* out = to.data();
  size_t count = to.size();
  for (size_t i = 0; i < count; ++i) out[i] += from[i];
}

}  // namespace weft::collective
