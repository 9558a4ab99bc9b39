// What a trace says about the clocks of its hosts, before anything is concluded. Private.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "weft/trace.h"

#include "corridor.h"

namespace weft::align {

// Stamps further than this (36 years) from the first record of their host are not used: what lies
// within leaves room for exact products.
inline constexpr int64_t kReach = int64_t{1} << 60;

struct EventPlace {
  uint32_t process = 0;
  size_t event = 0;
};

// A send and its receive.
struct Message {
  EventPlace send;
  EventPlace receive;
};

struct Matches {
  std::vector<Message> messages;
  uint64_t unmatched = 0;  // halves without exactly one other half
};
Matches match(const trace::Trace& trace);

inline const trace::Event& event_at(const trace::Trace& trace, const EventPlace& place) {
  return trace.processes[place.process].events[place.event];
}

// Something left one host at `sent` and was seen on another at `seen`, each counted from the first
// record of its own host.
struct Trip {
  int64_t sent = 0;
  int64_t seen = 0;
};

// All that went from one host to another; after reduce() only the trips that can matter.
struct Route {
  std::vector<Trip> trips;  // messages and pings
  std::vector<Trip> pings;  // of these
  void reduce();
};

struct Evidence {
  struct Host {
    std::string label;  // "host 1 (node7)"
    std::string name;
    uint32_t index = 0;    // Environment::host_index
    int64_t first_ns = 0;  // first record
    bool any = false;      // there is a record
    uint64_t bounds = 0;   // messages and pings with another host
  };
  std::vector<Host> hosts;                                // by index
  std::vector<uint32_t> of_process;                       // index into hosts
  std::map<uint32_t, uint32_t> of_rank;                   // index into hosts
  std::map<std::pair<uint32_t, uint32_t>, Route> routes;  // from, to: indices into hosts
  uint64_t unusable = 0;  // stamps out of reach, pings that cannot be true
};

Evidence gather(const trace::Trace& trace, const Matches& matches);

}  // namespace weft::align
