#include "weft/diagnose.h"

#include "activity.h"
#include "findings.h"

namespace weft::diagnose {
namespace {

// Why no cause can be looked for, if so.
const char* reason_to_stop(const graph::Graph& graph, const Activity& activity) {
  if (graph.ranks < 2) return "one rank: nothing is communicated, so no cause is looked for";
  if (graph.operations.empty())
    return "nothing was communicated in this run, so no cause is looked for";
  if (activity.counted.size() < 2)
    return "one iteration is too little to tell a cause from chance: record at least four";
  return nullptr;
}

}  // namespace

Result<Diagnosis> diagnose(const graph::Graph& graph, const replay::Replayer& replayer) {
  if (graph.iterations.empty() || graph.ranks == 0)
    return error(Code::invalid_argument, "no iteration is whole on all ranks: nothing to diagnose");
  if (replayer.ranks() != graph.ranks)
    return error(Code::invalid_argument, "the replayer is of %u ranks, the graph of %u",
                 replayer.ranks(), graph.ranks);
  if (replayer.model().layers.size() != graph.model.layers.size())
    return error(Code::invalid_argument, "the replayer is of %zu layers, the graph of %zu",
                 replayer.model().layers.size(), graph.model.layers.size());
  Diagnosis out;
  out.remarks = graph.remarks;
  out.fidelity_error_percent = replayer.fidelity().error_percent;
  graph::Predecessors predecessors(graph);
  Activity activity = activity_of(graph, predecessors);
  share_path(graph, predecessors, activity, out);
  measure_overlap(graph, activity, out);
  detail_tensors(graph, replayer.recorded_plan(), activity, out);
  detail_lanes(graph, activity, out);
  if (const char* reason = reason_to_stop(graph, activity)) {
    out.remarks.emplace_back(reason);
    return out;
  }
  auto gains = GainEstimator::make(graph, replayer);
  if (!gains) {
    out.remarks.push_back("no cause can be judged: " + gains.error().message());
    return out;
  }
  find_causes(graph, activity, *gains, out);
  return out;
}

std::optional<Words> words_of(const std::string& what) {
  using graph::Spent;
  static constexpr std::pair<Spent, Words> kWords[] = {
      {Spent::compute, {"compute", "forward, backward and update of the devices"}},
      {Spent::transfer, {"transfer", "messages on their way, and what is done with them"}},
      {Spent::wait_for_rank,
       {"waiting for a slow rank", "all others had computed what this one still computed"}},
      {Spent::wait_for_lane,
       {"waiting for a full connection",
        "there to be sent, but every connection was full of other tensors: more lanes or a faster "
        "link carry more, order and credit decide who waits"}},
      {Spent::wait_for_credit,
       {"waiting for credit", "ready on all ranks, but others had taken the plan's credit"}},
      {Spent::control, {"agreeing on the order", "between ready and begun, through rank 0"}},
      {Spent::host, {"late hosts", "nothing that was recorded explains it"}}};
  for (const auto& [spent, words] : kWords)
    if (what == graph::name_of(spent)) return words;
  return std::nullopt;
}

}  // namespace weft::diagnose
