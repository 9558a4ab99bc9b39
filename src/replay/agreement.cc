#include "simulation.h"

#include <algorithm>
#include <numeric>

namespace weft::replay {

void Simulator::count_frames() {
  uint32_t first = 0;
  for (size_t i = 0; i < job_.compute.size(); ++i) {
    uint32_t end = first + (job_.folded() ? job_.alike[i] : 1);
    frames_of_.push_back(end - std::clamp(network_.ranks_in_delays, first, end));
    first = end;
  }
  frames_ = std::accumulate(frames_of_.begin(), frames_of_.end(), uint64_t{0});
}

void Simulator::handed(uint32_t r, uint32_t layer, uint32_t iteration) {
  for (uint32_t t : produced_[layer]) {
    if (recording_ != nullptr)
      recording_->ready(r, t, layer, layout_.bucket_of[t], iteration, now_);
    if (network_.free) {
      if (++summed_[t] % devices_.size() == 0)
        for (uint32_t other = 0; other < hosts_.size(); ++other) sum_is_there(other, t, iteration);
      continue;
    }
    auto bucket = readiness_[r].ready(t, iteration);
    WEFT_CHECK(bucket.ok());
    if (!*bucket) continue;
    // Rank 0 tells itself; the others' report crosses the network.
    bool itself = r == 0 && (!job_.folded() || job_.alike[0] == 1);
    int64_t delay = itself ? network_.report_ns / 2 : network_.report_ns;
    push(now_ + delay, frames_of_[r] > 0 ? What::report : What::reported, r, **bucket, iteration);
  }
}

void Simulator::read_report(uint32_t r, uint32_t bucket, uint32_t iteration) {
  int64_t read = work(hosts_[0].thread_free, now_, network_.receive_ns_per_chunk * frames_of_[r]);
  push(read, What::reported, r, bucket, iteration);
}

void Simulator::reported(uint32_t r, uint32_t bucket, uint32_t iteration) {
  auto noted = admission_.ready({r}, bucket, iteration);
  WEFT_CHECK(noted.ok());
  admit();
}

void Simulator::admit() {
  int64_t told = now_;
  for (bool first = true; auto start = admission_.next(); first = false) {
    WEFT_CHECK(start->operation == iteration_of_.size());
    auto operation = static_cast<uint32_t>(start->operation);  // a simulation has few
    iteration_of_.push_back(static_cast<uint32_t>(start->step));
    result_.order.push_back(start->piece);
    if (recording_ != nullptr)
      recording_->admitted(operation, layout_.pieces[start->piece], iteration_of_.back(), now_);
    if (first && frames_ > 0)
      told = work(hosts_[0].thread_free, now_,
                  network_.send_ns_per_chunk * static_cast<double>(frames_));
    // An operation ends when the rank that began last lets it: that one stands for all.
    if (job_.folded()) {
      push(told + network_.begin_ns, What::begin, 0, operation);
      continue;
    }
    for (uint32_t r = 1; r < job_.ranks; ++r)
      push(told + network_.begin_ns, What::begin, r, operation);
    if (told > now_)
      push(told, What::begin, 0, operation);
    else
      begin(0, operation);
  }
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
