#include "simulator.h"

#include <algorithm>
#include <bit>
#include <map>

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
  for (uint32_t r = 0; r < (job.folded() ? 1 : job.ranks); ++r) {
    Host& host = hosts_.emplace_back();
    host.lanes_to.resize(job.ranks);
    host.running.resize(operations);
    host.steps_done.assign(job.model->tensors.size(), 0);
    host.pieces_left = pieces_of_;
    host.next_message = (uint64_t{r} + 1) << 40;
  }
  count_frames();
  devices_.resize(job.compute.size());
  make_processors();
  for (size_t i = 0; i < devices_.size(); ++i) readiness_.emplace_back(layout);
  summed_.assign(job.model->tensors.size(), 0);
  carried_.assign(layout.buckets.size(), 0);
  iteration_of_.reserve(operations);
  result_.starts.resize(devices_.size());
  result_.computing_ns.resize(devices_.size());
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
  const double cores = network_.cores * static_cast<double>(processors_.size());
  if (now_ > 0) result_.processor_busy = worked_ns_ / (cores * static_cast<double>(now_));
  return std::move(result_);
}

void Simulator::handle(const Event& event) {
  uint32_t r = event.rank;
  switch (event.what) {
    case What::nothing: return;
    case What::device: return advance(r);
    case What::computes: return computes(r);
    case What::computed: return computed(r);
    case What::handed: return handed(r, event.a, event.b);
    case What::carried: return carried(r, event.a, event.b);
    case What::report: return read_report(r, event.a, event.b);
    case What::reported: return reported(r, event.a, event.b);
    case What::told: return told(r, event.a, event.b != 0);
    case What::tells: return tells(r, event.a, event.b != 0);
    case What::begin: return begin(r, event.a);
    case What::ended: return ended(event.a);
    case What::turn: hosts_[r].turn_is_due = false; return turn(r);
    case What::hands:
      if (hands(event.a, event.b)) filled(event.a);
      return;
    case What::filled: return filled(event.a);
    case What::egress:
      if (event.at == hosts_[r].egress_at) {
        hosts_[r].egress_at = kNever;
        send_packets(r);
      }
      return;
    case What::arrived: return arrived(lanes_[event.a], event.a, event.b);
    case What::copied: return copied(event.a, event.b);
    case What::absorb: return absorb(event.a);
    case What::patience: return end_of_patience(r);
    case What::thanks:
      return push(now_ + network_.latency_ns, What::receipt, lanes_[event.a].from, event.a,
                  event.b);
    case What::receipt: return receipt(event.a, event.b);
    case What::receipted: return read_receipts(r);
    case What::processor:
      if (event.at == look_at_[event.a]) {
        look_at_[event.a] = kNever;
        look(event.a);
      }
      return;
    case What::breaks: return breaks(network_.odd_lanes[event.a]);
    case What::returns: return returns(network_.odd_lanes[event.a]);
  }
}

// A lab has one for all hosts. The devices of a folded job each stand for ranks on hosts that are
// busy as the one that is simulated.
void Simulator::make_processors() {
  std::map<uint32_t, uint32_t> of_host;
  for (uint32_t r = 0; r < hosts_.size(); ++r) {
    const uint32_t number = network_.shared_processor ? 0
                            : job_.host_of.empty()    ? r
                                                      : job_.host_of[r];
    auto [found, made] = of_host.try_emplace(number, static_cast<uint32_t>(processors_.size()));
    if (made) processors_.emplace_back(network_.cores, network_.most_credit_ns);
    Host& host = hosts_[r];
    host.processor = found->second;
    Processor& processor = processors_[host.processor];
    host.thread = processor.add_thread();
    for (uint32_t i = 0; i < network_.lane_workers; ++i)
      host.workers.push_back(processor.add_thread());
    for (uint32_t d = r; d < (job_.folded() ? devices_.size() : r + 1); ++d)
      devices_[d].thread =
          d == r ? processor.add_thread() : processor.add_instead_of(devices_[r].thread);
  }
  look_at_.assign(processors_.size(), kNever);
}

void Simulator::work(const Host& host, uint32_t thread, double ns, Then then) {
  if (worked(host, thread, ns, then) && then.what != What::nothing)
    push(now_, then.what, then.rank, then.a, then.b);
}

bool Simulator::worked(const Host& host, uint32_t thread, double ns, Then then) {
  worked_ns_ += std::max(0.0, ns);
  if (!(ns >= 1)) {
    processors_[host.processor].advance(now_);
    if (processors_[host.processor].idle(thread)) return true;
  }
  submit(host.processor, thread, ns, then);
  return false;
}

void Simulator::submit(uint32_t processor, uint32_t thread, double ns, Then then) {
  processors_[processor].submit(thread, ns, then, now_);
  watch(processor);
}

void Simulator::spin_while_owed(Host& host) {
  if (std::exchange(host.spins, host.owed.any()) == host.owed.any()) return;
  processors_[host.processor].spin(host.thread, host.spins, now_);
  watch(host.processor);
}

void Simulator::look(uint32_t processor) {
  processors_[processor].advance(now_);
  while (auto then = processors_[processor].finished())
    handle({now_, 0, then->what, then->rank, then->a, then->b});
  watch(processor);
}

void Simulator::watch(uint32_t processor) {
  const int64_t next = processors_[processor].next_at();
  if (next >= look_at_[processor]) return;
  look_at_[processor] = next;
  push(next, What::processor, 0, processor);
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
    WEFT_CHECK(network.odd_lanes.empty() && job.taken == nullptr);
    for (schedule::Algorithm algorithm : algorithms) WEFT_CHECK(folds(algorithm, job.ranks));
  }
  return Simulator(job, layout, algorithms, network, recording, witness).run();
}

}  // namespace weft::replay
