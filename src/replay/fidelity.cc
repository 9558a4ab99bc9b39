#include "fidelity.h"

#include <algorithm>
#include <map>

namespace weft::replay {
namespace {

using graph::Node;
using graph::NodeType;

// Nanoseconds of one iteration and rank, by kind of work.
std::map<std::string, double> kinds_of(const graph::Graph& graph) {
  std::map<std::string, double> sums;
  double iterations = 0, standing = 0;
  size_t first = graph.first_counted();
  for (size_t i = first; i < graph.iterations.size(); ++i) {
    const graph::Iteration& iteration = graph.iterations[i];
    for (uint32_t r = 0; r < graph.ranks; ++r) {
      double busy = 0;
      for (const graph::LayerTimes& layer : iteration.layers[r]) {
        sums["forward"] += static_cast<double>(layer.forward_ns);
        sums["backward"] += static_cast<double>(layer.backward_ns);
        sums["update"] += static_cast<double>(layer.update_ns);
        busy += static_cast<double>(layer.forward_ns + layer.backward_ns + layer.update_ns);
      }
      standing += static_cast<double>(iteration.end_ns[r] - iteration.start_ns[r]) - busy;
      ++iterations;
    }
  }
  sums["device stands still"] = standing;
  if (graph.iterations.empty()) return sums;
  // From being handed to a lane to being received: queues of the lane, the flow and the link.
  uint32_t low = graph.iterations[first].number, high = graph.iterations.back().number;
  double messages = 0, transit = 0;
  for (const Node& node : graph.nodes) {
    if (node.iteration < low || node.iteration > high) continue;
    if (node.type == NodeType::send) transit -= static_cast<double>(node.start_ns);
    if (node.type == NodeType::receive) {
      transit += static_cast<double>(node.end_ns());
      ++messages;
    }
  }
  for (auto& [kind, ns] : sums) ns = iterations > 0 ? ns / iterations : 0;
  if (messages > 0) sums["a message's way"] = transit / messages;
  return sums;
}

}  // namespace

Fidelity compare(const graph::Graph& measured, const graph::Graph& replayed) {
  Fidelity out;
  graph::IterationTimes was = graph::iteration_times(measured),
                        is = graph::iteration_times(replayed);
  if (was.of_slowest_ns.empty() || is.of_slowest_ns.empty()) return out;
  out.measured_ns = quantile(was.of_slowest_ns, 0.5);
  out.replayed_ns = quantile(is.of_slowest_ns, 0.5);
  if (out.measured_ns > 0)
    out.error_percent = 100 * (out.replayed_ns - out.measured_ns) / out.measured_ns;
  for (size_t r = 0; r < std::min(was.median_ns.size(), is.median_ns.size()); ++r)
    out.ranks.push_back({text("rank %zu", r), was.median_ns[r], is.median_ns[r]});
  auto before = kinds_of(measured), after = kinds_of(replayed);
  for (const auto& [kind, ns] : before) out.kinds.push_back({kind, ns, after[kind]});
  return out;
}

}  // namespace weft::replay
