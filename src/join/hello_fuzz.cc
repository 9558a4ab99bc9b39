// Anything a stranger may put where a proof or a frame is expected.
#include <cstddef>
#include <cstdint>

#include "handshake.h"
#include "weft/join.h"

namespace weft::join {

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  if (size >= kHello) {
    auto hello = decode_hello(bytes.first<kHello>());
    if (hello && (hello->agreement.size() > kMaxAgreement || hello->shared.size() > 40 ||
                  hello->place.size() > kMaxPlace))
      __builtin_trap();
  }
  Unpacker fields(bytes);
  size_t taken = 0;
  while (fields.more()) {
    taken += fields.string().size();
    fields.number<uint8_t>();
  }
  if (taken > size) __builtin_trap();
  return 0;
}

}  // namespace weft::join
