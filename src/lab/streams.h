// streams: TCP flows that carry nothing but bytes, to see what the network lets through. They are
// weft's own, for a network that limits no others.
#pragma once

#include <string>
#include <vector>

#include "station.h"
#include "weft/base.h"

namespace weft::lab {

// What one host does. Its process receives from whoever calls.
struct StreamJob {
  struct Call {
    std::string address;
    uint32_t flows = 1;
    bool reverse = false;  // the one that is called sends
  };
  Station station;
  std::vector<Call> calls;
  Nanos from{0}, until{0};  // what counts, on the machine's clock; then it ends
};
std::string write_stream_job(const StreamJob& job);
// What a process says that has ended well: bytes a second that it received.
Result<double> read_stream_result(const std::string& said);

}  // namespace weft::lab
