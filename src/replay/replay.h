// replay: what would have happened under another plan, on another cluster.
//
// The replayer drives the runtime's own schedule objects (Readiness, Admission, Steps, Dispatcher,
// Receipts) in simulated time, so that what is predicted is what the runtime would do. Only compute
// durations come from the trace; everything about communication comes from cost::Costs, the same
// for replaying the recorded plan and for predicting another. A collective is a rendezvous:
// waiting is a result, never an input.
//
//   Graph (compute, required edges) + Costs ──► Replayer ──predict(Question)──► Prediction
//                                                                └► a Trace like a measured one
//
// Resources: each rank's device, each host's egress and ingress, the cap of a flow, the queue of a
// lane, the thread that serves the lanes, the processor. A run of a lab has two answers: what the
// cluster that it stands for would take, where each host has its own processor, and what the lab
// would measure, where all hosts share one machine's (Cluster::of). Of many ranks that do the same
// one is simulated for all. docs/cost_model.md has every equation and what it leaves out.
//
// Times are wall nanoseconds of the run that the graph was made from; Environment::to_target_ns
// converts. Deterministic: equal questions have equal answers, bit for bit.
// Threads: a Replayer is immutable after make(); predict() may be called from several threads.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/cost.h"
#include "weft/graph.h"
#include "weft/schedule.h"

namespace weft::replay {

// Whose time is asked for; the same but for runs of a lab. Who compares with what a lab measured
// asks for the lab's.
enum class Of : uint8_t { target, lab };

// A cluster that differs from the recorded one. Rates are of the target, as people say them.
struct Cluster {
  Of of = Of::target;
  std::optional<uint32_t> hosts;
  std::optional<double> link_bits_per_s;
  std::optional<double> flow_bits_per_s;  // infinite: no cap
  friend bool operator==(const Cluster&, const Cluster&) = default;
};
// "link=10gbit", "flow=none", "hosts=6" -> the change it makes. Fails naming what is wrong.
Result<void> set(Cluster& cluster, const std::string& assignment);

// A world that cannot be had, to learn what something costs.
struct WhatIf {
  bool free_communication = false;  // a sum is there as soon as all gradients are
  bool no_stragglers = false;  // each layer takes on every rank what it takes on the median one
  std::optional<Rank> healed;  // this rank computes as the median of the others does
  bool no_flow_cap = false;    // one flow may fill the link
  bool no_slow_lanes = false;  // every lane carries what the median lane of its rank does
  bool no_overhead = false;    // messages and agreements cost no latency and no processor
  friend bool operator==(const WhatIf&, const WhatIf&) = default;
};

struct Question {
  std::optional<plan::Plan> plan;  // absent: the recorded one
  Cluster cluster;
  WhatIf what_if;
  // Of a run whose gradients somebody else summed: each sum takes as long as it was measured to,
  // and compute what it took beside them. Neither a plan nor another cluster may be asked for then.
  bool sums_as_measured = false;
  // How many to simulate; 0: as many as the trace has, fewer if they have very many messages, and
  // at least 4.
  uint32_t iterations = 0;
  bool make_trace = false;  // also the events, for other verbs
  bool interval = true;     // also low and high; costs a few more simulations
};

struct Prediction {
  // One iteration, on the rank that ends it last: the median over the simulated ones that count.
  double iteration_ns = 0;
  double low_ns = 0, high_ns = 0;     // equal to iteration_ns when no interval was asked for
  std::vector<double> iterations_ns;  // those that count
  std::vector<double> of_rank_ns;     // median by rank
  std::vector<std::string> unknown;   // what this answer needs and no record measured
  std::vector<std::string> assumed;   // what it takes for granted, for people
  double processor_busy = 0;          // share of the cores that serves lanes, 0 to 1
  uint64_t events = 0;                // simulated: compute, messages, decisions
  bool folded = false;                // one rank was simulated for all
  std::vector<uint32_t> order;        // pieces in the order in which operations were admitted
  std::optional<trace::Trace> trace;
};

// How well the recorded plan replays: comes before any prediction.
struct Fidelity {
  // What kept the recorded plan from being replayed. Then only `measured_ns` is known, and that
  // the error is 0 says nothing.
  std::optional<Error> unknown;
  // Somebody else summed the gradients, and each sum was taken to last as it was measured: this
  // says how well compute and waiting are understood, and nothing about a network.
  bool sums_as_measured = false;
  double measured_ns = 0;
  double replayed_ns = 0;
  double error_percent = 0;  // (replayed - measured) / measured
  struct Row {
    std::string what;        // "rank 2", "forward", "wait", "transfer"
    double measured_ns = 0;  // per iteration
    double replayed_ns = 0;
  };
  std::vector<Row> ranks;
  std::vector<Row> kinds;  // forward, backward, update, wait, transfer (busy time of lanes)
};

class Replayer {
 public:
  // Fails with unsupported when the trace lacks what every replay needs, saying what. When only the
  // recorded plan cannot be replayed, fidelity() says why, and other questions may have answers.
  // Where the costs say that the run overruled its probe, what makes the recorded run come out
  // worse is taken back: costs() says what was used.
  static Result<Replayer> make(const graph::Graph& graph, const cost::Costs& costs);
  // The same run, as if the devices had computed like this. The fidelity stays that of the record.
  // REQUIRES: !counted.empty(); each has the layers of every rank.
  Replayer with_compute(std::vector<graph::Iteration> counted) const;
  Replayer(Replayer&&) noexcept;
  Replayer& operator=(Replayer&&) noexcept;
  ~Replayer();

  // Fails with invalid_argument when plan or cluster cannot be, with unsupported when the answer
  // would need what the probe did not measure (the message says what).
  Result<Prediction> predict(const Question& question) const;

  const Fidelity& fidelity() const;
  // Where somebody else summed the gradients: what weft would do with the same buckets.
  const plan::Plan& recorded_plan() const;
  const std::string& sums_by() const;  // who did, if not weft
  const trace::Environment& environment() const;
  const trace::Model& model() const;
  uint32_t ranks() const;
  uint32_t hosts() const;  // that the ranks were on
  double measured_iteration_ns() const;
  // Quartiles of the measured iterations.
  double measured_low_ns() const;
  double measured_high_ns() const;
  const cost::Costs& costs() const;
  double compute_ns() const;  // forward, backward and update of one iteration on the median rank
  double gradient_bytes() const;  // real
  // max(compute, wire at the rate of the link): what no plan passes; unknown without a probe.
  std::optional<double> floor_ns() const;

 private:
  struct Impl;
  static Result<Replayer> with_costs(const graph::Graph& graph, const cost::Costs& costs);
  explicit Replayer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft::replay
