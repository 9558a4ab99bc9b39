// Anything a stranger or a damaged link may put where a header, a proof or a frame is expected.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tcp/handshake.h"
#include "weft/transport.h"

namespace weft::transport {

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  if (size >= kChunkHeaderBytes) {
    auto header = decode(bytes.first<kChunkHeaderBytes>());
    if (header) {
      // What decodes must encode to the same bytes: there is one way to write a header.
      std::array<std::byte, kChunkHeaderBytes> again;
      encode(*header, again);
      if (std::memcmp(again.data(), bytes.data(), again.size()) != 0 ||
          header->length > kMaxChunkBytes)
        __builtin_trap();
    }
  }
  if (size >= tcp::kHello) {
    auto hello = tcp::decode_hello(bytes.first<tcp::kHello>());
    if (hello && (hello->agreement.size() > kMaxAgreement || hello->shared.size() > 40))
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

}  // namespace weft::transport
