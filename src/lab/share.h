// share: what each flow of a network may carry, when links are shared fairly.
//
// Max-min: all flows grow alike until a link or a flow's own cap is full; whoever is held back by
// that stays, the others go on. Hosts have one link for each direction. No clock and no socket.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft::lab {

struct Flow {
  uint32_t from = 0;
  uint32_t to = 0;
  double cap = 0;  // bytes a second; above 0
  bool active = false;
};

// Bytes a second for each of `flows`. Active ones share the links; an idle one takes nothing from
// them, and is given what it would get at most if it began now.
// REQUIRES: from and to are below `hosts`, link_bytes_per_s is above 0.
std::vector<double> share_out(std::span<const Flow> flows, uint32_t hosts, double link_bytes_per_s);

}  // namespace weft::lab
