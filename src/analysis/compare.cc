// Two runs side by side, measured or predicted.
#include <algorithm>
#include <map>

#include "weft/analysis.h"

namespace weft::analysis {
namespace {

struct Window {
  uint32_t first = 0, last = 0;  // numbers of the iterations that count
  double count = 0;

  explicit Window(const graph::Graph& graph) {
    first = graph.iterations[graph.first_counted()].number;
    last = graph.iterations.back().number;
    count = static_cast<double>(graph.iterations.size() - graph.first_counted());
  }
  bool has(uint32_t iteration) const { return iteration >= first && iteration <= last; }
};

// Time in which at least one operation was in flight, in one iteration of one rank.
double in_flight_ns(const Recorded& run, const Window& window) {
  double sum = 0;
  for (const trace::Process& process : run.trace.processes) {
    std::vector<std::pair<int64_t, int64_t>> spans;
    for (const trace::Event& event : process.events)
      if (event.kind == trace::Kind::operation && window.has(event.iteration))
        spans.emplace_back(event.start_ns, event.end_ns());
    std::sort(spans.begin(), spans.end());
    int64_t covered = INT64_MIN;
    for (const auto& [start, end] : spans) {
      int64_t from = std::max(start, covered);
      if (end > from) sum += static_cast<double>(end - from);
      covered = std::max(covered, end);
    }
  }
  return sum / window.count / run.graph.ranks;
}

// Milliseconds of the target, of one iteration of one rank, by kind of work.
std::vector<std::pair<std::string, double>> kinds_of(const Recorded& run) {
  const graph::Graph& graph = run.graph;
  Window window(graph);
  double forward = 0, backward = 0, update = 0, whole = 0;
  for (size_t i = graph.first_counted(); i < graph.iterations.size(); ++i)
    for (uint32_t rank = 0; rank < graph.ranks; ++rank) {
      const graph::Iteration& iteration = graph.iterations[i];
      whole += static_cast<double>(iteration.end_ns[rank] - iteration.start_ns[rank]);
      for (const graph::LayerTimes& layer : iteration.layers[rank]) {
        forward += static_cast<double>(layer.forward_ns);
        backward += static_cast<double>(layer.backward_ns);
        update += static_cast<double>(layer.update_ns);
      }
    }
  double share = 1 / (window.count * graph.ranks);
  auto ms = [&](double ns) { return run.environment().to_target_ns(ns) * 1e-6; };
  return {{"forward", ms(forward * share)},
          {"backward", ms(backward * share)},
          {"update", ms(update * share)},
          {"device stands still", ms((whole - forward - backward - update) * share)},
          {"communication in flight", ms(in_flight_ns(run, window))}};
}

std::vector<std::pair<std::string, double>> ranks_of(const Recorded& run) {
  std::vector<std::pair<std::string, double>> out;
  const graph::Graph& graph = run.graph;
  for (uint32_t rank = 0; rank < graph.ranks; ++rank) {
    std::vector<double> own;
    for (size_t i = graph.first_counted(); i < graph.iterations.size(); ++i)
      own.push_back(static_cast<double>(graph.iterations[i].end_ns[rank] -
                                        graph.iterations[i].start_ns[rank]));
    out.emplace_back(text("rank %u", rank),
                     run.environment().to_target_ns(quantile(own, 0.5)) * 1e-6);
  }
  return out;
}

std::vector<std::pair<std::string, double>> waits_of(const Recorded& run) {
  std::vector<std::pair<std::string, double>> out;
  for (const trace::SummaryRow& row : trace::summarize(run.trace, trace::By::layer).rows)
    out.emplace_back(row.what, row.wait_ns * 1e-6);
  return out;
}

// Rows of both, in the order of the first; what only the second has comes last.
std::vector<Row> side_by_side(const std::vector<std::pair<std::string, double>>& before,
                              const std::vector<std::pair<std::string, double>>& after) {
  std::vector<Row> out;
  std::map<std::string, size_t> place;
  for (const auto& [what, value] : before) {
    if (place.emplace(what, out.size()).second) out.push_back({what, value, {}});
  }
  for (const auto& [what, value] : after) {
    auto [found, fresh] = place.emplace(what, out.size());
    if (fresh) out.push_back({what, {}, {}});
    out[found->second].after = value;
  }
  return out;
}

}  // namespace

double Comparison::percent() const {
  return before.value > 0 ? 100 * (after.value - before.value) / before.value : 0;
}

Comparison compare(const Recorded& before, const Recorded& after) {
  Comparison out;
  out.before = before.iteration_ms();
  out.after = after.iteration_ms();
  out.kinds = side_by_side(kinds_of(before), kinds_of(after));
  out.ranks = side_by_side(ranks_of(before), ranks_of(after));
  out.layers = side_by_side(waits_of(before), waits_of(after));
  auto plan_before = plan::parse(before.environment().plan_text);
  auto plan_after = plan::parse(after.environment().plan_text);
  if (plan_before && plan_after) out.plan = plan::diff(*plan_before, *plan_after);
  return out;
}

}  // namespace weft::analysis
