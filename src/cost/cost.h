// cost: every equation about time on the wire, once.
//
// The runtime's choice of algorithm, the lab's bounds, the replayer and the optimizer ask here and
// nowhere else. Constants are fitted from records (probe results, pings, transfers), never from
// time that includes waiting for another rank. What no record measured stays absent: a caller
// sees std::nullopt and must say "unknown", not guess.
//
//   rate of n flows  = min(n * flow, link)                       (docs/cost_model.md)
//   ring all-reduce  = 2(p-1) * latency + 2(p-1)/p * bytes / rate + (p-1)/p * bytes * reduce
//
// Threads: plain values and pure functions.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/trace.h"

namespace weft::cost {

// A chunk's header on the wire (docs/wire.md).
inline constexpr uint64_t kHeaderBytes = 64;

// A constant with the spread of what it was fitted to.
struct Fitted {
  double value = 0;
  double low = 0;   // lower quartile of the samples
  double high = 0;  // upper quartile
  uint32_t samples = 0;
};

// What the wire and the processor cost, in real (not target) units.
struct Costs {
  std::optional<Fitted> link_bytes_per_s;       // a host's egress with all neighbours active
  std::optional<Fitted> pair_link_bytes_per_s;  // one pair alone
  std::optional<Fitted> flow_bytes_per_s;       // one connection; absent when one fills the link
  // The rate still grew with the last flow that was measured (or only one number of flows was):
  // link_bytes_per_s is what was seen, and more flows may carry more.
  bool link_is_lower_bound = false;
  // What the probe said, where the run's own messages overruled it: whoever replays the run tries
  // both, and takes back what makes the recorded run come out worse.
  std::optional<Fitted> probed_link_bytes_per_s, probed_flow_bytes_per_s;
  std::optional<Fitted> round_trip_idle_ns;
  std::optional<Fitted> round_trip_loaded_ns;
  std::optional<Fitted> cpu_ns_per_byte;  // sending + receiving
  std::optional<Fitted> cpu_ns_per_chunk;
  std::optional<Fitted> copy_ns_per_byte;
  std::optional<Fitted> reduce_ns_per_byte;
  std::optional<Fitted> checksum_ns_per_byte;
  // Measured rate for each number of flows (all neighbours at once), for what the model above
  // leaves out.
  struct RatePoint {
    uint32_t flows = 0;
    Fitted bytes_per_s;
  };
  std::vector<RatePoint> ring_rates;

  // From the run's own messages, never from time spent waiting for another rank.
  std::optional<Fitted> lane_bytes_per_s;  // one lane while it always had something to send
  uint32_t lanes = 0;                      // from one rank to another, then
  uint32_t connections = 0;                // of one rank with all others, one way, then
  std::optional<Fitted> hand_over_ns;      // end of a backward -> its gradient is handed over
  std::optional<Fitted> report_ns;         // last rank complete -> the operation is admitted
  std::optional<Fitted> begin_ns;          // admitted -> another rank begins it
  std::optional<Fitted> wake_up_ns;        // the sum is there -> the waiting thread goes on

  // By which the run chose its all-reduces, as it noted them; null: by typical().
  std::shared_ptr<const Costs> agreed;

  // How the hosts' kernels hand data to the network; recorded facts where there are any.
  struct Sending {
    double packet_bytes = 65536;    // the most that leaves a flow's queue at once
    double queue_bytes = 65536;     // of a flow, below the socket: no longer "unsent"
    double flow_burst_bytes = 0;    // what an idle flow may send above its cap
    double link_burst_bytes = 0;    // the same of a host's link
    bool shaped = false;            // a shaper lets a packet pass at once and then makes up for it;
                                    // otherwise a packet takes its time before it arrives
    bool shared_processor = false;  // all ranks run on one machine's cores
    uint32_t cores = 1;             // of that machine, or of each host
  } sending;
};

// Fits from what a run recorded: pings and probe results of all its processes, and the times of
// its messages, for which the trace must be on one clock (weft/align.h). Where the run's own
// messages say what a flow carries, they overrule the probe, which had only milliseconds for it.
Costs fit(const trace::Trace& trace);

// The same costs with one or all of the probe's words that the run overruled put back; none where
// it overruled nothing.
std::vector<Costs> without_corrections(const Costs& costs);

// Flows that carry this share of a link fill it: what is left is within the error of a probe.
inline constexpr double kFillsLink = 0.97;

// Bytes a second that n flows of one host carry together; nullopt when nothing was measured, or
// when n is more than was measured and the link was not yet full.
std::optional<double> rate_of_flows(const Costs& costs, uint32_t flows);

// How much may wait unsent in the kernel on a lane that carries chunks of this size: enough to
// keep it busy until the next turn, no more, because it can no longer be overtaken.
uint32_t unsent_limit(uint64_t chunk_bytes);

// Bytes that each rank sends (and receives) for a ring all-reduce of `bytes`: 2(p-1)/p * bytes.
double ring_bytes_per_rank(double bytes, uint32_t ranks);
// Seconds that a ring all-reduce needs at the least on links of that rate; infinite at rate 0.
double ring_wire_seconds(double bytes, uint32_t ranks, double bytes_per_s);
// The floor of an iteration: max(compute, wire). What a perfect plan approaches.
double iteration_floor_seconds(double compute_s, double gradient_bytes, uint32_t ranks,
                               double link_bytes_per_s);
// With latency (half of an idle round trip a step) and reduction; nullopt when the rate is unknown.
// Where another constant is unknown its term is left out, and the answer is a lower bound.
std::optional<double> ring_all_reduce_seconds(const Costs& costs, double bytes, uint32_t ranks,
                                              uint32_t lanes);

// The other all-reduces, under the same conditions (docs/cost_model.md).
struct Group {
  uint32_t ranks = 1;
  uint32_t lanes = 1;  // to each peer
  uint32_t hosts = 1;  // each with ranks / hosts of the ranks
};
std::optional<double> halving_doubling_all_reduce_seconds(const Costs& costs, double bytes,
                                                          const Group& group);
std::optional<double> doubling_all_reduce_seconds(const Costs& costs, double bytes,
                                                  const Group& group);
std::optional<double> tree_all_reduce_seconds(const Costs& costs, double bytes, const Group& group);
std::optional<double> direct_all_reduce_seconds(const Costs& costs, double bytes,
                                                const Group& group);
// nullopt too where copying was not measured, or hosts have no two ranks or are not alike.
std::optional<double> hierarchical_all_reduce_seconds(const Costs& costs, double bytes,
                                                      const Group& group);

// From when the last rank has a bucket until all may begin with it: reports go up a tree of that
// depth to rank 0, starts go down, and a rank reads and writes a frame for each of `fan_out` ranks
// below it, which costs what a chunk does without its bytes. nullopt when the latency or that cost
// is unknown.
std::optional<double> agreement_seconds(const Costs& costs, uint32_t fan_out, uint32_t depth);

// Under this key a run notes in its trace the constants by which it chose its all-reduces.
inline constexpr const char* kAgreedNote = "all_reduce_costs";
// The constants of these equations as text, for files and for other ranks; nothing else of `costs`.
std::string to_json(const Costs& costs);
// Fails with corrupt on what is not such text, or on a constant that no machine has.
Result<Costs> from_json(std::string_view text);
// As `weft bench algorithms` fitted them for ranks of one machine over TCP. For groups of which
// nothing was measured.
Costs typical();

}  // namespace weft::cost
