#include <cstring>

// The library's own choice of instructions at run time: chunks are checked twice, and the plain
// form took a tenth of the processors at full rate.
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>
#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#endif

#include "weft/lane.h"

namespace weft::lane {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

// What the header's checksum starts from: bytes that are not a header do not carry it.
constexpr uint64_t kChunkSeed = 0x336b434877;  // "wHCk3"
constexpr uint8_t kChunkVersion = 3;
constexpr uint8_t kWantsReceipt = 0x80;  // in `op`
constexpr uint8_t kAgain = 0x40;         // the same

// As it stands on the wire.
struct WireChunk {
  uint64_t operation;
  uint8_t version;
  uint8_t collective;
  uint16_t step;
  uint32_t chunk;
  uint64_t elements;
  uint64_t first;
  uint32_t length;
  uint16_t root;
  uint8_t type;
  uint8_t op;
  uint64_t message;
  uint64_t checksum;
  uint32_t group;
  uint32_t header_checksum;
};
static_assert(sizeof(WireChunk) == kChunkHeaderBytes);

uint32_t header_checksum(const WireChunk& wire) {
  return static_cast<uint32_t>(
      XXH3_64bits_withSeed(&wire, offsetof(WireChunk, header_checksum), kChunkSeed));
}

}  // namespace

void encode(const ChunkHeader& header, std::span<std::byte, kChunkHeaderBytes> out) {
  WireChunk wire{};
  wire.version = kChunkVersion;
  wire.collective = header.collective;
  wire.step = header.step;
  wire.operation = header.operation;
  wire.chunk = header.chunk;
  wire.elements = header.elements;
  wire.first = header.first;
  wire.length = header.length;
  wire.root = header.root;
  wire.type = header.type;
  wire.op = static_cast<uint8_t>(header.op | (header.wants_receipt ? kWantsReceipt : 0) |
                                 (header.again ? kAgain : 0));
  wire.group = header.group;
  wire.message = header.message;
  wire.checksum = header.checksum;
  wire.header_checksum = header_checksum(wire);
  std::memcpy(out.data(), &wire, sizeof wire);
}

Result<ChunkHeader> decode(std::span<const std::byte, kChunkHeaderBytes> bytes) {
  WireChunk wire;
  std::memcpy(&wire, bytes.data(), sizeof wire);
  if (wire.header_checksum != header_checksum(wire))
    return error(Code::corrupt, "chunk header: it is none, or was damaged on the way");
  if (wire.version != kChunkVersion)
    return error(Code::unsupported, "chunk header: version %u, expected %u", unsigned{wire.version},
                 unsigned{kChunkVersion});
  if (wire.length > kMaxChunkBytes)
    return error(Code::corrupt, "chunk header: %u bytes; at most %u are allowed", wire.length,
                 kMaxChunkBytes);
  ChunkHeader header;
  header.collective = wire.collective;
  header.step = wire.step;
  header.operation = wire.operation;
  header.chunk = wire.chunk;
  header.elements = wire.elements;
  header.first = wire.first;
  header.length = wire.length;
  header.root = wire.root;
  header.type = wire.type;
  header.op = static_cast<uint8_t>(wire.op & ~(kWantsReceipt | kAgain));
  header.wants_receipt = (wire.op & kWantsReceipt) != 0;
  header.again = (wire.op & kAgain) != 0;
  header.group = wire.group;
  header.message = wire.message;
  header.checksum = wire.checksum;
  return header;
}

uint64_t checksum(std::span<const std::span<const std::byte>> parts) {
  if (parts.size() == 1) return XXH3_64bits(parts[0].data(), parts[0].size());
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (std::span<const std::byte> part : parts)
    XXH3_64bits_update(&state, part.data(), part.size());
  return XXH3_64bits_digest(&state);
}

}  // namespace weft::lane
