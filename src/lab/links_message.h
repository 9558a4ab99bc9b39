// What a process tells the lab of its sockets, one message each, over a channel of one machine.
#pragma once

#include <cstdint>

namespace weft::lab {

struct LinkMessage {
  enum class Kind : uint32_t {
    opened,   // comes with a copy of the socket
    limited,  // it may carry at most `rate`
    left,     // another process goes on with it: nobody will tell of its end
    closed,
  };
  Kind kind = Kind::opened;
  uint32_t from = 0, to = 0;  // hosts; of opened
  uint64_t socket = 0;        // a number of the process's own, never used twice
  double rate = 0;            // bytes a second
};

}  // namespace weft::lab
