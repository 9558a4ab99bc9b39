#pragma once

#include <cstdint>

namespace weft::schedule {

// Where part `index` of `count` nearly equal parts of `total` begins: total * index / count,
// without the product, which may pass 64 bits. REQUIRES: index <= count < 2^32.
constexpr uint64_t cut(uint64_t total, uint64_t index, uint64_t count) {
  return total / count * index + total % count * index / count;
}

}  // namespace weft::schedule
