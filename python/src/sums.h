// sums: the gradients of a model as weft's own exchange carries them (runtime.h), for Python.
//
// A job has one exchange in its life, so it has one Sums. The memory in which gradients are summed
// is the exchange's own: a slot for each parameter, of its type and shape, which Python fills
// before ready() and reads after wait(). Slots are views of one allocation that no object of Python
// owns: who ends last may be a thread without Python.
//
// When the job is closed, sums that were under way are waited for before it leaves, so that what
// was already reduced can still be read.
//
// Threads: any, but a tensor is used by one at a time. Called without Python's lock.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "weft/api.h"

namespace weft::torch_backend {

// What the exchange is told of a model. Alike on all ranks.
struct Gradients {
  std::vector<std::string> layers;  // in forward order
  std::vector<std::string> names;   // of the parameters
  std::vector<uint32_t> layer_of;
  friend bool operator==(const Gradients&, const Gradients&) = default;
};

class Sums {
 public:
  // All ranks of the job call it, once. Raises.
  Sums(api::Job& job, Gradients gradients, const std::vector<at::Tensor>& parameters);

  // Whether it is of these.
  bool is_of(const Gradients& gradients, const std::vector<at::Tensor>& parameters) const;

  std::vector<at::Tensor> slots() const;
  bool by_tensor() const { return by_tensor_; }  // the plan's barrier
  size_t buckets() const { return buckets_; }
  plan::Plan plan() const;  // in force
  // All ranks call it between the same steps; an error says why this rank has no plan. Raises on
  // all ranks, where all then go on as before, if one of them cannot take it.
  void change_plan(Result<plan::Plan> plan);
  // The step that is next for all tensors. Raises if one was left in the middle.
  uint64_t next_step() const;
  bool in_the_middle() const;  // of a step, which the others cannot end without this rank

  // As runtime::Exchange has them; raise.
  void ready(uint32_t tensor, uint64_t step, bool has_gradient);
  void wait(uint32_t tensor, uint64_t step);

  // Before the job leaves: waits for the step under way, if this rank has said all of it.
  void settle();
  // Before the job goes; `reason` is what is said from then on.
  void end(const Error& reason);

 private:
  void place(const std::vector<at::Tensor>& parameters);
  void look_at_plan();

  const Gradients gradients_;
  at::Tensor memory_;
  std::vector<at::Tensor> slots_;
  std::vector<std::atomic<uint64_t>> said_;   // by tensor: steps that ready() was called for
  std::vector<std::atomic<uint64_t>> there_;  // by tensor: steps of which the sum came
  bool by_tensor_ = false;
  size_t buckets_ = 0;
  std::unique_ptr<Exchange> exchange_;
  std::optional<Error> ended_;
};

}  // namespace weft::torch_backend
