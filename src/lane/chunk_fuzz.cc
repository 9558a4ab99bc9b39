// Anything a stranger or a damaged link may put where a chunk's header is expected.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "weft/lane.h"

namespace weft::lane {

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  if (size < kChunkHeaderBytes) return 0;
  auto header = decode(bytes.first<kChunkHeaderBytes>());
  if (!header) return 0;
  // What decodes must encode to the same bytes: there is one way to write a header.
  std::array<std::byte, kChunkHeaderBytes> again;
  encode(*header, again);
  if (std::memcmp(again.data(), bytes.data(), again.size()) != 0 || header->length > kMaxChunkBytes)
    __builtin_trap();
  return 0;
}

}  // namespace weft::lane
