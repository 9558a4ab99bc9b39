// A reactor that a test drives.
#pragma once

#include "weft/net.h"

namespace weft {

inline std::unique_ptr<net::Reactor> new_reactor() {
  return std::move(net::kernel_network().reactor()).value();
}

// Turns the reactor until `done` says so; false after ten seconds.
inline bool turn_until(net::Reactor& reactor, const std::function<bool()>& done) {
  Nanos deadline = monotonic_clock().now() + Nanos::from_seconds(10);
  while (!done()) {
    if (monotonic_clock().now() > deadline) return false;
    reactor.run_once(Nanos::from_millis(2));
  }
  return true;
}

}  // namespace weft
