// The timeline's data: the events of a few iterations of each run, as JSON for page.js.
//
//   {"names": ["forward conv1", ...], "kinds": ["forward", ...],
//    "runs": [{"label", "ms", "predicted", "to", "iterations": [{"n", "t"}], "rows": [ROW]}]}
//   ROW: {"rank", "part", "track", "sub", "lane", "peer",
//         "t": starts, each less the one before, "d": durations, "n": index into names,
//         "k": index into kinds, "b": bytes, "i": iterations}
//
// Times are whole nanoseconds of the target, 0 at the start of the run's first shown iteration, so
// that runs stand one above the other from the same moment. A column whose values are all equal is
// that one number.
#pragma once

#include <string>
#include <vector>

#include "weft/report.h"

namespace weft::report {

// Events of one run that go on the page at most.
inline constexpr size_t kEventsMax = 60'000;

struct Timeline {
  std::string json;                // may stand in a <script>
  bool empty = true;               // no run has an event to show
  std::vector<std::string> notes;  // what is shown and what was left out, a line a run
};

Timeline timeline_of(const Page& page);

}  // namespace weft::report
