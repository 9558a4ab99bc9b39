#include "share.h"

#include <algorithm>
#include <limits>

namespace weft::lab {
namespace {

// One direction of a host's link.
struct Link {
  double left = 0;
  uint32_t growing = 0;  // flows that nothing holds back yet
  uint32_t active = 0;
};

// Rounding must not leave a flow that is as full as the others to a round of its own.
constexpr double kSame = 1 + 1e-9;

}  // namespace

std::vector<double> share_out(std::span<const Flow> flows, uint32_t hosts,
                              double link_bytes_per_s) {
  std::vector<Link> sends(hosts, {link_bytes_per_s, 0, 0}), receives = sends;
  std::vector<double> rates(flows.size());
  std::vector<size_t> growing;
  for (size_t i = 0; i < flows.size(); ++i) {
    if (!flows[i].active) continue;
    growing.push_back(i);
    for (Link* link : {&sends[flows[i].from], &receives[flows[i].to]})
      ++link->growing, ++link->active;
  }
  while (!growing.empty()) {
    // How far each could go if all went on alike; whoever ends first ends now.
    const auto bound = [&](size_t i) {
      const Link& out = sends[flows[i].from];
      const Link& in = receives[flows[i].to];
      return std::min({flows[i].cap, out.left / out.growing, in.left / in.growing});
    };
    double level = std::numeric_limits<double>::infinity();
    for (size_t i : growing) level = std::min(level, bound(i));
    std::vector<size_t> held, others;
    for (size_t i : growing) (bound(i) <= level * kSame ? held : others).push_back(i);
    for (size_t i : held) {
      rates[i] = level;
      for (Link* link : {&sends[flows[i].from], &receives[flows[i].to]}) {
        link->left = std::max(0.0, link->left - level);
        --link->growing;
      }
    }
    growing = std::move(others);
  }
  for (size_t i = 0; i < flows.size(); ++i) {
    if (flows[i].active) continue;
    const uint32_t others = std::max(sends[flows[i].from].active, receives[flows[i].to].active);
    rates[i] = std::min(flows[i].cap, link_bytes_per_s / (others + 1));
  }
  return rates;
}

}  // namespace weft::lab
