// probe: what the network and the processor can do, measured by a group that has just met.
//
// Round trips idle and loaded, the rate of one flow and of several, for one pair and for all
// neighbours at once, and what copying, reducing and a chunk cost the processor; within a second.
// What was not measured is said to be unknown.
//
// Threads: the one that drives the mesh. measure() blocks, and has a deadline.
#pragma once

#include <vector>

#include "weft/capture.h"
#include "weft/join.h"

namespace weft::probe {

struct Options {
  Nanos budget = Nanos::from_millis(900);  // never longer than this, and a little
  uint32_t chunk_bytes = 256u << 10;       // the chunk size that the plan will use
  uint32_t other_chunk_bytes = 64u << 10;  // and one more, to tell bytes from chunks
};

// Measures the group's network and this processor, into `recorder`. All ranks call it together,
// right after join::meet() and before anything else uses the mesh; its connections are closed.
Result<std::vector<trace::ProbeResult>> measure(join::Mesh& mesh, const Options& options,
                                                capture::Recorder& recorder);
}  // namespace weft::probe
