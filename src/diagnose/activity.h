// What each rank did and when, by the records of a run, before anything is supposed.
#pragma once

#include <unordered_map>
#include <vector>

#include "spans.h"
#include "weft/diagnose.h"

namespace weft::diagnose {

// An operation on one rank: from its start to the end of the last message of it.
struct OperationSpan {
  Span span;
  uint32_t sends = 0;
};

// A device that stood still until a tensor was done.
struct Wait {
  Span span;
  uint32_t tensor = 0;
  uint32_t iteration = 0;
};

struct RankActivity {
  std::vector<Span> compute;                               // united
  std::vector<Span> communication;                         // united
  std::unordered_map<uint32_t, OperationSpan> operations;  // by number
  std::vector<Wait> waits;
  double waiting_ns = 0;     // of an iteration: its device stood still until a tensor was done
  double waited_for_ns = 0;  // of an iteration: the critical path waited for this rank
  double compute_ns = 0;     // of the median iteration: forward and backward, with their gaps
  double gaps_ns = 0;        // of that: the host was late
};

struct Activity {
  std::vector<RankActivity> ranks;
  std::vector<uint32_t> counted;  // numbers of the iterations that count, ascending
  double operations = 0;          // of an iteration
  bool counts(uint32_t iteration) const;
};

// REQUIRES: !graph.iterations.empty().
Activity activity_of(const graph::Graph& graph, const graph::Predecessors& predecessors);

// The parts of the critical path, all kinds. Also fills `waited_for_ns`.
void share_path(const graph::Graph& graph, const graph::Predecessors& predecessors,
                Activity& activity, Diagnosis& out);
// Communication, and how much of it compute hid.
void measure_overlap(const graph::Graph& graph, const Activity& activity, Diagnosis& out);

// By layer and tensor, by lane (parts.cc).
void detail_tensors(const graph::Graph& graph, const plan::Plan& plan, const Activity& activity,
                    Diagnosis& out);
void detail_lanes(const graph::Graph& graph, const Activity& activity, Diagnosis& out);

}  // namespace weft::diagnose
