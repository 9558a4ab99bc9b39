// How operations and chunks are named inside the engine.
#pragma once

#include "weft/collective.h"

namespace weft::collective {

// Collectives are named by group and number; point-to-point operations by pair, direction and
// number.
inline constexpr Key kPair = Key{1} << 63;
inline constexpr Key kOutgoing = Key{1} << 62;

inline Key pair_key(uint32_t peer, bool outgoing, uint32_t number) {
  return kPair | (outgoing ? kOutgoing : 0) | (Key{peer} << 32) | number;
}

inline Key chunk_key(const lane::ChunkHeader& header, uint32_t peer, bool outgoing) {
  if (header.collective == static_cast<uint8_t>(schedule::Collective::point_to_point))
    return pair_key(peer, outgoing, header.operation);
  return (Key{header.group & 0x7fffffffu} << 32) | header.operation;
}

// Tokens of chunks that are sent again from a copy; all others are indices of sends.
inline constexpr uint64_t kResent = uint64_t{1} << 63;

}  // namespace weft::collective
