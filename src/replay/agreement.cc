#include "simulation.h"

#include <algorithm>

namespace weft::replay {

// What a rank reads and writes for those below it, beyond what the measured delays hold. In a
// folded job the rank that stands for all does what rank 0 does, and so does every rank that a
// report passes on its way.
void Simulator::count_frames() {
  const schedule::Tree tree = job_.tree();
  const uint32_t held = network_.below_in_delays;
  if (!job_.folded()) {
    for (uint32_t r = 0; r < job_.ranks; ++r) {
      const uint32_t below = tree.below(r);
      frames_below_.push_back(below > held ? below - held : 0);
      frames_of_.push_back(r > 0 && r - tree.first_below(tree.above(r)) >= held ? 1 : 0);
      if (r > 0) reports_.emplace_back(layout_, tree, Rank{r});
    }
    return;
  }
  const uint32_t reporting = 1 + tree.below(0);  // rank 0 and those right below it
  const uint32_t from = held < reporting ? held + 1 : reporting;
  uint32_t first = 0;
  for (uint32_t alike : job_.alike) {
    const uint32_t end = first + alike;
    frames_of_.push_back(std::clamp(end, from, reporting) - std::clamp(first, from, reporting));
    first = end;
  }
  frames_below_.push_back(reporting - from);
  const double passed = tree.depth() > 1 ? tree.depth() - 1 : 0;
  const auto frames = static_cast<double>(frames_below_[0]);
  report_passes_ns_ = static_cast<int64_t>(
      passed * (static_cast<double>(network_.report_ns) + frames * network_.receive_ns_per_chunk));
  begin_passes_ns_ = static_cast<int64_t>(
      passed * (static_cast<double>(network_.begin_ns) + frames * network_.send_ns_per_chunk));
}

void Simulator::handed(uint32_t r, uint32_t layer, uint32_t iteration) {
  for (uint32_t t : produced_[layer]) {
    if (recording_ != nullptr)
      recording_->ready(r, t, layer, layout_.bucket_of[t], iteration, now_);
    if (job_.taken != nullptr) {
      carry(t, iteration);
      continue;
    }
    if (network_.free) {
      if (++summed_[t] % devices_.size() == 0)
        for (uint32_t other = 0; other < hosts_.size(); ++other) sum_is_there(other, t, iteration);
      continue;
    }
    auto bucket = readiness_[r].ready(t, iteration);
    WEFT_CHECK(bucket.ok());
    if (!*bucket) continue;
    // A rank tells itself; a report crosses the network.
    if (job_.folded() || r == 0) {
      bool itself = r == 0 && (!job_.folded() || job_.alike[0] == 1);
      int64_t delay = itself ? network_.report_ns / 2 : network_.report_ns + report_passes_ns_;
      push(now_ + delay, frames_of_[r] > 0 ? What::report : What::reported, r, **bucket, iteration);
      continue;
    }
    auto all_have_it = reports_[r - 1].ready({r}, **bucket, iteration);
    WEFT_CHECK(all_have_it.ok());
    if (*all_have_it) report(r, **bucket, iteration);
  }
}

void Simulator::carry(uint32_t tensor, uint32_t iteration) {
  const uint32_t bucket = layout_.bucket_of[tensor];
  const uint64_t all = layout_.buckets[bucket].tensors.size() * devices_.size();
  if (++carried_[bucket] % all != 0) return;
  const std::vector<int64_t>& taken = (*job_.taken)[iteration % job_.taken->size()][bucket];
  for (uint32_t r = 0; r < hosts_.size(); ++r)
    push(now_ + taken[r], What::carried, r, bucket, iteration);
}

void Simulator::carried(uint32_t r, uint32_t bucket, uint32_t iteration) {
  for (uint32_t tensor : layout_.buckets[bucket].tensors) sum_is_there(r, tensor, iteration);
}

void Simulator::report(uint32_t r, uint32_t bucket, uint32_t iteration) {
  push(now_ + network_.report_ns, frames_of_[r] > 0 ? What::report : What::reported, r, bucket,
       iteration);
}

void Simulator::read_report(uint32_t r, uint32_t bucket, uint32_t iteration) {
  const uint32_t reader = job_.folded() || r == 0 ? 0 : tree_.above(r);
  work(hosts_[reader], hosts_[reader].thread, network_.receive_ns_per_chunk * frames_of_[r],
       {What::reported, static_cast<uint16_t>(r), bucket, iteration});
}

void Simulator::reported(uint32_t r, uint32_t bucket, uint32_t iteration) {
  const uint32_t reader = r == 0 ? 0 : tree_.above(r);
  if (reader > 0) {
    auto all_have_it = reports_[reader - 1].ready({r}, bucket, iteration);
    WEFT_CHECK(all_have_it.ok());
    if (*all_have_it) report(reader, bucket, iteration);
    return;
  }
  auto noted = admission_.ready({r}, bucket, iteration);
  WEFT_CHECK(noted.ok());
  admit();
}

void Simulator::admit() {
  for (bool first = true; auto start = admission_.next(); first = false) {
    WEFT_CHECK(start->operation == iteration_of_.size());
    auto operation = static_cast<uint32_t>(start->operation);  // a simulation has few
    iteration_of_.push_back(static_cast<uint32_t>(start->step));
    result_.order.push_back(start->piece);
    if (recording_ != nullptr)
      recording_->admitted(operation, layout_.pieces[start->piece], iteration_of_.back(), now_);
    told(0, operation, first);
  }
}

void Simulator::told(uint32_t r, uint32_t operation, bool first) {
  const double frames = first ? static_cast<double>(frames_below_[r]) : 0;
  if (frames_below_[r] == 0 ||
      worked(hosts_[r], hosts_[r].thread, network_.send_ns_per_chunk * frames,
             {What::tells, static_cast<uint16_t>(r), operation, first ? 1u : 0u}))
    tells(r, operation, first);
}

void Simulator::tells(uint32_t r, uint32_t operation, bool first) {
  // An operation ends when the rank that began last lets it: that one stands for all.
  if (job_.folded()) {
    push(now_ + network_.begin_ns + begin_passes_ns_, What::begin, 0, operation);
    return;
  }
  const uint32_t below = tree_.first_below(r);
  for (uint32_t other = below; other < below + tree_.below(r); ++other)
    push(now_ + network_.begin_ns, tree_.below(other) > 0 ? What::told : What::begin, other,
         operation, first ? 1 : 0);
  begin(r, operation);
}

void Simulator::begin(uint32_t r, uint32_t operation) {
  Host& host = hosts_[r];
  Running& running = host.running[operation];
  saw({Seen::What::begins, r, 0, 0, operation});
  running.begun = now_;
  running.steps.emplace(program_of(r, operation));
  running.to_receive = running.steps->program().receives().size();
  allowed_.clear();
  running.steps->start(allowed_);
  offer(r, operation);
  for (const Early& early : std::exchange(running.early, {})) take_in(r, operation, early);
  if (running.steps) finish_if_done(r, operation);
  turn(r);
  tell_arrivals(r, false);
}

void Simulator::ended(uint32_t operation) {
  auto returned = admission_.finished(operation);
  WEFT_CHECK(returned.ok());
  admit();
}

}  // namespace weft::replay
