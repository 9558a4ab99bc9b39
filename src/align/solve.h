// From evidence to one line a host. Private to the module.
#pragma once

#include <string>
#include <vector>

#include "evidence.h"

namespace weft::align {

// How a host's clock becomes its anchor's, both counted from their first records: the moment u is
// u + line.at(u) there. The anchor is the reference, or, for hosts that nothing connects to it,
// the lowest host that they are connected to.
struct HostFit {
  uint32_t anchor = 0;  // index into Evidence::hosts
  Corridor corridor;    // all that is possible
  Line line;            // the one that is chosen
};

struct Fit {
  std::vector<HostFit> hosts;
  std::vector<std::string> remarks;
};

Fit solve(Evidence evidence);

}  // namespace weft::align
