// worker: one rank of an engine that is part of this program: weft itself, and the wire.
#pragma once

#include <memory>
#include <string>

#include "protocol.h"
#include "weft/base.h"

namespace weft::bench {

// A rank of an engine, connected to the others.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual Result<Answer> measure(const Request& request) = 0;
  virtual std::string version() const = 0;
};

struct Place {
  uint32_t rank = 0, ranks = 1;
  std::string store;
};

Result<std::unique_ptr<Engine>> make_wire(const Place& place, bool shm);

}  // namespace weft::bench
