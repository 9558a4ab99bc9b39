#include "simulation.h"

#include <algorithm>

namespace weft::replay {

void Simulator::make_program() {
  const trace::Model& model = *job_.model;
  size_t layers = model.layers.size();
  produced_.resize(layers);
  std::vector<std::vector<uint32_t>> updated(layers);         // tensors by layer
  std::vector<std::vector<uint32_t>> updates_before(layers);  // layers by layer
  for (uint32_t t = 0; t < model.tensors.size(); ++t) {
    const trace::Tensor& tensor = model.tensors[t];
    produced_[std::min<size_t>(tensor.produced_by, layers - 1)].push_back(t);
    updated[std::min<size_t>(tensor.updated_by, layers - 1)].push_back(t);
    auto& before = updates_before[std::min<size_t>(tensor.consumed_by, layers - 1)];
    uint32_t update = static_cast<uint32_t>(std::min<size_t>(tensor.updated_by, layers - 1));
    if (std::find(before.begin(), before.end(), update) == before.end()) before.push_back(update);
  }
  for (auto& tensors : produced_) std::reverse(tensors.begin(), tensors.end());
  program_.push_back({Kind::host, 0, {}, false});
  std::vector<bool> placed(layers, false);
  bool by_tensor = layout_.barrier == plan::Barrier::tensor;
  if (!by_tensor) {
    std::vector<uint32_t> all(model.tensors.size());
    for (uint32_t t = 0; t < all.size(); ++t) all[t] = t;
    for (uint32_t l = 0; l < layers; ++l)
      program_.push_back({Kind::update, l, l == 0 ? all : std::vector<uint32_t>(), true});
  }
  for (uint32_t l = 0; l < layers; ++l) {
    if (by_tensor)
      for (uint32_t u : updates_before[l]) {
        if (placed[u]) continue;
        placed[u] = true;
        program_.push_back({Kind::update, u, updated[u], true});
      }
    program_.push_back({Kind::forward, l, {}, false});
  }
  for (uint32_t l = static_cast<uint32_t>(layers); l-- > 0;)
    program_.push_back({Kind::backward, l, {}, false});
}

const graph::LayerTimes& Simulator::times(uint32_t r, uint32_t iteration, uint32_t layer) const {
  const auto& recorded = job_.compute[r];
  return (*recorded[iteration % recorded.size()])[layer];
}

void Simulator::advance(uint32_t r) {
  Device& device = devices_[r];
  const Host& host = hosts_[played_by(r)];
  // Several sums may have woken it; the first one did.
  if (device.computes_since != kNever || (!device.waiting && now_ < device.free_at)) return;
  for (;;) {
    const Work& work = program_[device.next];
    // The last gradients are still applied; then the run is over.
    if (work.kind == Kind::backward && device.iteration == job_.iterations) return;
    bool applies = !work.from_second || device.iteration > 0;
    if (applies && !work.needs.empty()) {
      if (!device.waiting) device.wait_since = std::max(now_, device.free_at);
      for (uint32_t t : work.needs)
        if (host.steps_done[t] < device.iteration) {
          device.waiting = true;
          return;
        }
      // The thread that waits finds out a little after the device is free, or after the sum.
      int64_t seen = device.waiting ? now_ : device.free_at + network_.hand_over_ns;
      record_wait(r, work, device, seen);
      device.free_at = std::max(device.free_at, seen);
      device.waiting = false;
    }
    if (applies && run(r, device, work)) return;
    if (!go_on(r)) return;
  }
}

bool Simulator::go_on(uint32_t d) {
  Device& device = devices_[d];
  if (++device.next == program_.size()) {
    device.next = 0;
    ++device.iteration;
  } else if (device.free_at <= now_) {
    return true;
  }
  // Devices do not look ahead of the events around them.
  push(device.free_at, What::device, d);
  return false;
}

bool Simulator::run(uint32_t r, Device& device, const Work& work) {
  bool update = work.kind == Kind::update;
  const graph::LayerTimes& own =
      times(r, update ? device.iteration - 1 : device.iteration, work.layer);
  if (work.kind == Kind::host) {
    if (device.iteration > 0) device.free_at += own.before_wait_ns;
    return false;
  }
  int64_t duration = own.update_ns, cpu = own.update_cpu_ns;
  if (update) device.free_at += own.gap_before_update_ns;
  if (work.kind == Kind::forward) {
    device.free_at += own.gap_before_forward_ns;
    if (work.layer == 0) mark_start(r, device);
    if (device.iteration == job_.iterations) return false;
    duration = own.forward_ns;
    cpu = own.forward_cpu_ns;
  } else if (work.kind == Kind::backward) {
    device.free_at += own.gap_before_backward_ns;
    duration = own.backward_ns;
    cpu = own.backward_cpu_ns;
  }
  const int64_t start = device.free_at;
  if (cpu <= 0) {
    device.free_at += duration;
    end_work(r, work, start, cpu);
    return false;
  }
  // What of it is no processor time comes first.
  device.computes_since = start;
  device.free_at += std::max<int64_t>(0, duration - cpu);
  if (device.free_at > now_)
    push(device.free_at, What::computes, r);
  else
    computes(r);
  return true;
}

void Simulator::computes(uint32_t d) {
  const Device& device = devices_[d];
  submit(hosts_[played_by(d)].processor, device.thread,
         static_cast<double>(cpu_ns(d, program_[device.next])),
         {What::computed, static_cast<uint16_t>(d)});
}

void Simulator::computed(uint32_t d) {
  Device& device = devices_[d];
  const Work& work = program_[device.next];
  const int64_t start = std::exchange(device.computes_since, kNever);
  device.free_at = now_;
  end_work(d, work, start, cpu_ns(d, work));
  if (go_on(d)) advance(d);
}

int64_t Simulator::cpu_ns(uint32_t d, const Work& work) const {
  const Device& device = devices_[d];
  const bool update = work.kind == Kind::update;
  const graph::LayerTimes& own =
      times(d, update ? device.iteration - 1 : device.iteration, work.layer);
  return update                       ? own.update_cpu_ns
         : work.kind == Kind::forward ? own.forward_cpu_ns
                                      : own.backward_cpu_ns;
}

void Simulator::end_work(uint32_t d, const Work& work, int64_t start, int64_t cpu_ns) {
  const Device& device = devices_[d];
  const bool update = work.kind == Kind::update;
  result_.computing_ns[d] += static_cast<double>(device.free_at - start);
  if (recording_ != nullptr && (!update || device.free_at > start))
    recording_->compute(d, work.kind, work.layer, device.iteration - (update ? 1 : 0), start,
                        device.free_at, cpu_ns);
  if (work.kind == Kind::backward && !produced_[work.layer].empty())
    push(device.free_at + network_.hand_over_ns, What::handed, d, work.layer, device.iteration);
}

void Simulator::mark_start(uint32_t r, const Device& device) {
  std::vector<int64_t>& starts = result_.starts[r];
  if (recording_ != nullptr && !starts.empty())
    recording_->iteration(r, device.iteration - 1, starts.back(), device.free_at);
  starts.push_back(device.free_at);
}

void Simulator::record_wait(uint32_t r, const Work& work, const Device& device, int64_t end) {
  if (recording_ == nullptr) return;
  for (uint32_t t : work.needs)
    recording_->wait(r, t, job_.model->tensors[t].consumed_by, device.iteration - 1,
                     std::min(device.wait_since, end), end);
}

void Simulator::sum_is_there(uint32_t r, uint32_t tensor, uint32_t iteration) {
  Host& host = hosts_[r];
  ++host.steps_done[tensor];
  if (recording_ != nullptr)
    recording_->done(r, tensor, job_.model->tensors[tensor].consumed_by, iteration, now_);
  uint32_t first = job_.folded() ? 0 : r;
  uint32_t end = job_.folded() ? static_cast<uint32_t>(devices_.size()) : r + 1;
  for (uint32_t d = first; d < end; ++d)
    if (devices_[d].waiting) push(now_ + network_.wake_up_ns, What::device, d);
}

}  // namespace weft::replay
