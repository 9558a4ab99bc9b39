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
  std::string secret;     // of weft's group
  uint32_t lanes = 0;     // of weft; 0: what its default plan says
  std::string algorithm;  // of weft; empty: its own choice
  bool sealed = false;    // of weft: its connections
};

Result<std::unique_ptr<Engine>> make_weft(const Place& place, bool shm);
Result<std::unique_ptr<Engine>> make_wire(const Place& place, bool shm);

}  // namespace weft::bench
