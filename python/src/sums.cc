#include "sums.h"

#include <algorithm>

#include "elements.h"
#include "job.h"

namespace weft::torch_backend {
namespace {

// Where a slot begins: no two share what a processor reads at once.
constexpr int64_t kAlignment = 64;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Gradients lie as their parameters do, where these have no holes.
std::vector<int64_t> strides_for(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return parameter.strides().vec();
  std::vector<int64_t> strides(static_cast<size_t>(parameter.dim()), 1);
  for (size_t d = strides.size(); d-- > 1;)
    strides[d - 1] = strides[d] * std::max<int64_t>(parameter.size(static_cast<int64_t>(d)), 1);
  return strides;
}

bool fits(const at::Tensor& slot, const at::Tensor& parameter) {
  return slot.scalar_type() == parameter.scalar_type() && slot.sizes() == parameter.sizes() &&
         slot.strides().vec() == strides_for(parameter);
}

}  // namespace

Sums::Sums(api::Job& job, Gradients gradients, const std::vector<at::Tensor>& parameters)
    : gradients_(std::move(gradients)), said_(parameters.size()), there_(parameters.size()) {
  place(parameters);
  trace::Model model = job.marks().model();
  if (model.layers.empty()) {
    for (const std::string& layer : gradients_.layers) model.layers.push_back({layer});
    if (auto said = job.marks().model(model); !said) raise(said.error());
  }
  std::vector<Tensor> tensors;
  for (size_t t = 0; t < slots_.size(); ++t) {
    Elements elements = elements_of(slots_[t].scalar_type());
    tensors.emplace_back(gradients_.names[t], slots_[t].mutable_data_ptr(),
                         static_cast<uint64_t>(slots_[t].numel()) * elements.each, elements.type,
                         gradients_.layer_of[t]);
  }
  auto made = job.exchange(std::move(tensors));
  if (!made) raise(made.error());
  exchange_ = std::move(*made);
  look_at_plan();
}

void Sums::look_at_plan() {
  by_tensor_ = exchange_->barrier() == plan::Barrier::tensor;
  buckets_ = exchange_->buckets();
}

plan::Plan Sums::plan() const {
  if (ended_) raise(*ended_);
  return exchange_->plan();
}

void Sums::change_plan(Result<plan::Plan> plan) {
  if (ended_) raise(*ended_);
  if (auto done = exchange_->change_plan(std::move(plan)); !done) {
    const Code code = done.error().code();
    const bool refused =
        code == Code::invalid_argument || code == Code::not_found || code == Code::unsupported;
    TORCH_CHECK_VALUE(!refused, "weft: ", done.error().message());
    raise(done.error());
  }
  look_at_plan();
}

void Sums::place(const std::vector<at::Tensor>& parameters) {
  std::vector<int64_t> offsets;
  int64_t bytes = 0;
  for (const at::Tensor& parameter : parameters) {
    check_dense(parameter, "an exchange of gradients");
    TORCH_CHECK_VALUE(parameter.is_cpu(), "weft: an exchange of gradients got a parameter on ",
                      parameter.device(), "; it takes those in the processor's memory only");
    offsets.push_back(bytes);
    bytes += aligned(static_cast<int64_t>(parameter.nbytes()));
  }
  memory_ = at::zeros({bytes + kAlignment}, at::kByte);
  auto address = reinterpret_cast<uintptr_t>(memory_.mutable_data_ptr());
  int64_t first = aligned(static_cast<int64_t>(address)) - static_cast<int64_t>(address);
  for (size_t t = 0; t < parameters.size(); ++t) {
    const at::Tensor& parameter = parameters[t];
    int64_t size = static_cast<int64_t>(parameter.element_size());
    at::Tensor slot = at::empty({0}, at::TensorOptions().dtype(parameter.scalar_type()));
    // Offsets count elements from an address that the allocator aligned for all types.
    slot.set_(memory_.storage(), (first + offsets[t]) / size, parameter.sizes(),
              strides_for(parameter));
    slots_.push_back(std::move(slot));
  }
}

// Others of the same memory: what Python knows, Python owns.
std::vector<at::Tensor> Sums::slots() const {
  std::vector<at::Tensor> views;
  for (const at::Tensor& slot : slots_) views.push_back(slot.detach());
  return views;
}

bool Sums::is_of(const Gradients& gradients, const std::vector<at::Tensor>& parameters) const {
  return gradients == gradients_ &&
         std::equal(slots_.begin(), slots_.end(), parameters.begin(), parameters.end(), fits);
}

uint64_t Sums::next_step() const {
  for (size_t t = 0; t < said_.size(); ++t)
    TORCH_CHECK(said_[t] == said_[0], "weft: a step of the exchange was left when \"",
                gradients_.names[said_[t] < said_[0] ? t : 0],
                "\" had no gradient yet; the process group has to be destroyed and made again");
  return said_.empty() ? 0 : said_[0].load();
}

void Sums::ready(uint32_t tensor, uint64_t step, bool has_gradient) {
  if (ended_) raise(*ended_);
  auto done =
      has_gradient ? exchange_->ready(tensor, step) : exchange_->ready_without(tensor, step);
  if (!done) raise(done.error());
  said_[tensor] = step + 1;
}

void Sums::wait(uint32_t tensor, uint64_t step) {
  if (there_.at(tensor) > step) return;
  if (ended_) raise(*ended_);
  if (auto done = exchange_->wait(tensor, step); !done) raise(done.error());
  there_[tensor] = step + 1;
}

bool Sums::in_the_middle() const {
  return std::any_of(said_.begin(), said_.end(), [&](uint64_t said) { return said != said_[0]; });
}

void Sums::settle() {
  const uint64_t steps = said_.empty() ? 0 : said_[0].load();
  if (steps == 0 || in_the_middle()) return;
  for (uint32_t t = 0; t < there_.size(); ++t) {
    if (there_[t] == steps) continue;
    if (auto done = exchange_->wait(t, steps - 1); !done) return;
    there_[t] = steps;
  }
}

void Sums::end(const Error& reason) {
  ended_ = reason;
  exchange_.reset();
}

}  // namespace weft::torch_backend
