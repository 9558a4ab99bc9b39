// recording: what a training step does beside communication, for the trace in which that is.
//
// Hooks of torch tell moments, all on the thread that trains; of two moments a span is made:
//
//   begins()        the model's forward pre-hook         an iteration, if the last one is over
//   layer(l)        a layer's forward pre-hook           the forward of the layer before ends
//   forwarded()     the model's forward hook             so does that of the last one
//   (a hook on what the model returned)                  backward begins
//   (a hook where a gradient is accumulated)             the backward of its layer ends
//   (callbacks at the end of backward)                   DDP's wait for its all-reduces
//   update_*(), loading_*()                              around the optimizer and the data loader
//   waits(l)        a late update of a layer             neither it nor its wait is of a forward
//
// A layer is a module that has parameters of its own. What stands between two layers' forwards
// (activations, pooling, the softmax of an attention) belongs to the one before, as in backward
// what stands before a gradient belongs to the layer that it is of.
//
// An iteration is over when its gradients have been handed over, or applied: several passes without
// that are one, which is what accumulating gradients is. What DDP is given is recorded here; what
// an exchange is given, by weft's runtime.
//
// Threads: any, one at a time; a span whose ends are told by two threads has no processor time.
// Nothing here raises, waits or needs Python's lock: recording never disturbs training.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include "weft/mark.h"

namespace weft::torch_backend {

class Recording : public std::enable_shared_from_this<Recording> {
 public:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    uint32_t layer = 0;
  };
  // Raises when the marks know another model.
  static std::shared_ptr<Recording> start(const std::shared_ptr<mark::Marks>& marks,
                                          std::vector<std::string> layers,
                                          std::vector<Parameter> parameters);
  // The same where weft has no job: into a file of its own, until stop(). Raises.
  static std::shared_ptr<Recording> start_alone(const std::string& folder, uint32_t rank,
                                                uint32_t ranks, std::vector<std::string> layers,
                                                std::vector<Parameter> parameters);
  ~Recording() { stop(); }
  // Hears nothing any more, and ends the iteration under way where it was last heard of.
  void stop();

  // Of a pass: who sums its gradients.
  enum class Carrier : uint8_t { nobody = 0, ddp = 1, exchange = 2 };
  // `step` of the exchange is the iteration; without one they are counted.
  void begins(Carrier carrier, std::optional<uint32_t> step);
  // In which bucket DDP puts each parameter, and in which order. Empty: not known.
  void buckets(std::vector<uint32_t> of_parameter);
  void layer(uint32_t layer);
  void forwarded(const std::vector<at::Tensor>& outputs);
  // Within a forward, for sums of `layer`, until its update ends.
  void waits(uint32_t layer);
  void update_begins();
  void update_ends(uint32_t layer);  // trace::kNone: of all layers
  void loading_begins();
  void loading_ends();
  // An all-reduce of another backend that was called at `began`, of now(), is over. From any
  // thread.
  int64_t now() const;
  void summed(uint32_t number, uint64_t bytes, int64_t began);

 private:
  struct Moment {
    int64_t ns = 0;
    int64_t processor_ns = 0;  // of `thread`
    const void* thread = nullptr;
  };
  struct Pending {
    uint32_t layer = trace::kNone;
    Moment start, end;
  };
  enum class Phase : uint8_t { between, forward, backward };
  class GradientHook;

  Recording() = default;
  void hook_parameters();
  void backward_begins();
  void gradient(uint32_t parameter);
  void backward_ends();
  void waited();

  // What follows: with the mutex held.
  Moment now(const mark::Marks& marks) const;
  void add(mark::Marks& marks, mark::What what, const mark::Place& place, const Moment& start,
           const Moment& end) const;
  void end_pending(mark::Marks& marks);
  void interrupt(mark::Marks& marks, uint32_t layer, const Moment& at);

  // The job may be over before the model is.
  std::weak_ptr<mark::Marks> marks_;
  std::shared_ptr<mark::Marks> own_;  // where there is none
  std::vector<Parameter> parameters_;
  std::vector<decltype(torch::autograd::impl::grad_accumulator(at::Tensor()))> accumulators_;
  int resident_ = -1;  // a file that says how much memory the process has

  std::mutex mutex_;
  bool stopped_ = false;
  Carrier carrier_ = Carrier::nobody;
  std::vector<uint32_t> bucket_of_;
  bool over_ = true;  // the next pass begins an iteration
  uint32_t iteration_ = trace::kNone;
  uint32_t next_ = 0;
  Phase phase_ = Phase::between;
  Pending pending_;                      // forward or backward of a layer
  uint32_t interrupted_ = trace::kNone;  // whose forward goes on after an update
  Moment last_;                          // that was heard of
  std::optional<Moment> update_, loading_;
};

}  // namespace weft::torch_backend
