// What understanding a run needs of probes beside weft/analysis.h.
#pragma once

#include "weft/analysis.h"

namespace weft::analysis {

// Somebody measured what connections carry.
bool has_probe(const trace::Trace& trace);

// Numbers hosts by their names where nobody did: without weft's job no rank knows the others'.
void tell_hosts_apart(trace::Trace& trace);

}  // namespace weft::analysis
