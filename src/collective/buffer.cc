#include <algorithm>

#include "weft/collective.h"

namespace weft::collective {

void Buffer::add(std::span<std::byte> part) {
  if (part.empty()) return;
  starts_.push_back(bytes_);
  parts_.push_back(part);
  bytes_ += part.size();
}

size_t Buffer::find(uint64_t byte) const {
  if (parts_.size() == 1) return 0;
  auto after = std::upper_bound(starts_.begin(), starts_.end(), byte);
  return static_cast<size_t>(after - starts_.begin()) - 1;
}

}  // namespace weft::collective
