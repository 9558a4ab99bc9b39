// How operations and chunks are named inside the engine.
#pragma once

#include "weft/collective.h"

namespace weft::collective {

inline Key pair_key(uint32_t group, uint32_t peer, bool outgoing, uint64_t number) {
  return {group, (peer + 1) << 1 | (outgoing ? 1u : 0u), number};
}

inline Key chunk_key(const lane::ChunkHeader& header, uint32_t peer, bool outgoing) {
  if (header.collective == static_cast<uint8_t>(schedule::Collective::point_to_point))
    return pair_key(header.group, peer, outgoing, header.operation);
  return {header.group, 0, header.operation};
}

}  // namespace weft::collective
