// engines: how each engine is started on this machine.
#pragma once

#include <string>

#include "engine_processes.h"
#include "weft/bench.h"

namespace weft::bench {

struct Entrant {
  std::string name;
  Transport transport = Transport::tcp;  // that it will use
  std::string how;                       // settings, for people
  Start start;
};

// Sets a peer up if it is missing. Fails with why it cannot be had.
Result<Entrant> peer(const std::string& name, const CollectiveOptions& options,
                     const std::string& folder);
// This program: weft itself, and the bytes alone.
Entrant weft(const CollectiveOptions& options, const std::string& folder, bool sealed = false);
Entrant wire(const CollectiveOptions& options, const std::string& folder);

}  // namespace weft::bench
