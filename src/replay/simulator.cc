#include "simulator.h"

#include <algorithm>
#include <bit>

#include "simulation.h"

namespace weft::replay {

Simulator::Simulator(const Job& job, const schedule::Layout& layout,
                     const std::vector<schedule::Algorithm>& algorithms, const Network& network,
                     Recording* recording, const Witness& witness)
    : job_(job),
      layout_(layout),
      algorithms_(algorithms),
      network_(network),
      recording_(recording),
      witness_(witness),
      tree_(job.folded() ? schedule::Tree::flat(static_cast<uint32_t>(job.compute.size()))
                         : job.tree()),
      admission_(layout, tree_),
      unsent_limit_(cost::unsent_limit(layout.chunk_elements * schedule::kElementBytes)) {
  make_program();
  find_pieces();
  shape_.ranks = job.ranks;
  shape_.chunk_elements = layout.chunk_elements;
  if (!job.folded()) shape_.host_of = job.host_of;
  size_t operations = layout.pieces.size() * job.iterations;
  cores_.assign(network.shared_processor ? network.cores : 0, 0);
  for (uint32_t r = 0; r < (job.folded() ? 1 : job.ranks); ++r) {
    Host& host = hosts_.emplace_back();
    host.lanes_to.resize(job.ranks);
    host.workers_free.assign(network.lane_workers, 0);
    host.running.resize(operations);
    host.steps_done.assign(job.model->tensors.size(), 0);
    host.pieces_left = pieces_of_;
    host.next_message = (uint64_t{r} + 1) << 40;
  }
  count_frames();
  devices_.resize(job.compute.size());
  for (size_t i = 0; i < devices_.size(); ++i) readiness_.emplace_back(layout);
  summed_.assign(job.model->tensors.size(), 0);
  iteration_of_.reserve(operations);
  result_.starts.resize(devices_.size());
}

Simulated Simulator::run() {
  for (uint32_t d = 0; d < devices_.size(); ++d) push(0, What::device, d);
  for (uint32_t i = 0; i < network_.odd_lanes.size(); ++i) {
    const OddLane& odd = network_.odd_lanes[i];
    if (odd.breaks_ns < 0) continue;
    push(odd.breaks_ns, What::breaks, odd.from, i);
    push(odd.returns_ns, What::returns, odd.from, i);
  }
  while (!events_.empty()) {
    Event event = events_.top();
    events_.pop();
    ++result_.events;
    now_ = event.at;
    handle(event);
  }
  double cores = network_.cores;
  if (!network_.shared_processor) cores *= static_cast<double>(hosts_.size());
  if (now_ > 0) result_.processor_busy = worked_ns_ / (cores * static_cast<double>(now_));
  return std::move(result_);
}

void Simulator::handle(const Event& event) {
  uint32_t r = event.rank;
  switch (event.what) {
    case What::device: return advance(r);
    case What::handed: return handed(r, event.a, event.b);
    case What::report: return read_report(r, event.a, event.b);
    case What::reported: return reported(r, event.a, event.b);
    case What::told: return told(r, event.a, event.b != 0);
    case What::begin: return begin(r, event.a);
    case What::ended: return ended(event.a);
    case What::turn: hosts_[r].turn_at = kNever; return turn(r);
    case What::egress:
      if (event.at == hosts_[r].egress_at) {
        hosts_[r].egress_at = kNever;
        send_packets(r);
      }
      return;
    case What::arrived: return arrived(lanes_[event.a], event.a, event.b);
    case What::absorb: return absorb(event.a);
    case What::patience: return end_of_patience(r);
    case What::receipt: return receipt(event.a, event.b);
    case What::receipted: return read_receipts(r);
    case What::breaks: return breaks(network_.odd_lanes[event.a]);
    case What::returns: return returns(network_.odd_lanes[event.a]);
  }
}

int64_t Simulator::work(int64_t& thread_free, int64_t from, double ns) {
  int64_t start = std::max(from, thread_free);
  if (ns <= 0) return start;
  worked_ns_ += ns;
  if (!cores_.empty()) {
    auto core = std::min_element(cores_.begin(), cores_.end());
    start = std::max(start, *core);
    *core = start + static_cast<int64_t>(ns);
  }
  thread_free = start + static_cast<int64_t>(ns);
  return thread_free;
}

bool folds(schedule::Algorithm algorithm, uint32_t ranks) {
  bool halves = algorithm == schedule::Algorithm::halving_doubling ||
                algorithm == schedule::Algorithm::doubling;
  return rotates(algorithm) || (halves && std::has_single_bit(ranks));
}

Simulated simulate(const Job& job, const schedule::Layout& layout,
                   const std::vector<schedule::Algorithm>& algorithms, const Network& network,
                   Recording* recording, const Witness& witness) {
  if (job.folded()) {
    WEFT_CHECK(recording == nullptr && !witness && !network.shared_processor);
    WEFT_CHECK(network.odd_lanes.empty());
    for (schedule::Algorithm algorithm : algorithms) WEFT_CHECK(folds(algorithm, job.ranks));
  }
  return Simulator(job, layout, algorithms, network, recording, witness).run();
}

}  // namespace weft::replay
