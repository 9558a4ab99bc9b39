#include "recording.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include "job.h"

namespace weft::torch_backend {

using mark::What;
using trace::kNone;

namespace {

const void* this_thread() {
  static thread_local char here;
  return &here;
}

int64_t processor_time_of_thread() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// Bytes of memory that the process has; 0: not known. `file` is /proc/self/statm.
uint64_t resident_bytes(int file) {
  char words[128];
  const ssize_t got = file < 0 ? -1 : ::pread(file, words, sizeof words - 1, 0);
  if (got <= 0) return 0;
  words[got] = '\0';
  char* second = nullptr;
  std::strtoull(words, &second, 10);
  return std::strtoull(second, nullptr, 10) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

// Where a gradient is accumulated, before it is: nobody has it yet.
class Recording::GradientHook final : public torch::autograd::FunctionPreHook {
 public:
  GradientHook(std::weak_ptr<Recording> of, uint32_t parameter)
      : of_(std::move(of)), parameter_(parameter) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    if (auto recording = of_.lock()) recording->gradient(parameter_);
    return gradients;
  }

 private:
  std::weak_ptr<Recording> of_;
  uint32_t parameter_;
};

std::shared_ptr<Recording> Recording::start(const std::shared_ptr<mark::Marks>& marks,
                                            std::vector<std::string> layers,
                                            std::vector<Parameter> parameters) {
  trace::Model model;
  for (std::string& name : layers) model.layers.push_back({std::move(name)});
  for (const Parameter& one : parameters)
    model.tensors.push_back({one.name, one.tensor.nbytes(), one.layer, one.layer, one.layer});
  if (auto said = marks->model(model); !said) raise(said.error());
  std::shared_ptr<Recording> made(new Recording);
  made->marks_ = marks;
  made->parameters_ = std::move(parameters);
  made->resident_ = ::open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  made->hook_parameters();
  return made;
}

std::shared_ptr<Recording> Recording::start_alone(const std::string& folder, uint32_t rank,
                                                  uint32_t ranks, std::vector<std::string> layers,
                                                  std::vector<Parameter> parameters) {
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  if (failure) raise(io_error(failure.value(), "cannot make %s for the trace", folder.c_str()));
  capture::Options options;
  options.path = folder + "/" + trace::file_name(rank);
  options.environment = capture::describe_machine();
  options.environment.weft_version = version();
  options.environment.host = membership::host_name();
  options.environment.rank = rank;
  options.environment.ranks = ranks;
  // What such a backend does, said as a plan: DDP's limits of buckets, whole, over one connection.
  if (auto plan = plan::preset("ddp")) {
    options.environment.plan_name = plan->name;
    options.environment.plan_hash = plan::hash(*plan);
    options.environment.plan_text = plan::canonical(*plan);
  }
  auto recorder = capture::Recorder::start(std::move(options));
  if (!recorder) raise(recorder.error());
  auto marks =
      std::make_shared<mark::Marks>(std::shared_ptr<capture::Recorder>(std::move(*recorder)));
  auto made = start(marks, std::move(layers), std::move(parameters));
  made->own_ = std::move(marks);
  return made;
}

void Recording::hook_parameters() {
  for (uint32_t p = 0; p < parameters_.size(); ++p) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[p].tensor);
    accumulator->add_pre_hook(std::make_unique<GradientHook>(weak_from_this(), p));
    accumulators_.push_back(std::move(accumulator));
  }
}

void Recording::buckets(std::vector<uint32_t> of_parameter) {
  std::lock_guard lock(mutex_);
  bucket_of_ = std::move(of_parameter);
  bucket_of_.resize(parameters_.size(), kNone);
}

void Recording::stop() {
  auto marks = marks_.lock();
  std::lock_guard lock(mutex_);
  if (std::exchange(stopped_, true)) return;
  if (resident_ >= 0) ::close(std::exchange(resident_, -1));
  if (!marks) return;
  if (phase_ == Phase::backward) end_pending(*marks);
  if (iteration_ != kNone) static_cast<void>(marks->end_iteration(Nanos{last_.ns}));
  own_.reset();
}

Recording::Moment Recording::now(const mark::Marks& marks) const {
  return {marks.now().count, processor_time_of_thread(), this_thread()};
}

void Recording::add(mark::Marks& marks, What what, const mark::Place& place, const Moment& start,
                    const Moment& end) const {
  const int64_t used = start.thread == end.thread ? end.processor_ns - start.processor_ns : -1;
  // What is refused is counted, and told in the trace.
  static_cast<void>(marks.add(what, place, {start.ns, end.ns, used}));
}

void Recording::end_pending(mark::Marks& marks) {
  if (pending_.layer == kNone) return;
  const What what = phase_ == Phase::forward ? What::forward : What::backward;
  add(marks, what, {.layer = pending_.layer}, pending_.start, pending_.end);
  pending_.layer = kNone;
}

// ---- forward -------------------------------------------------------------------------------

void Recording::begins(Carrier carrier, std::optional<uint32_t> step) {
  auto marks = marks_.lock();
  std::lock_guard lock(mutex_);
  if (!marks || stopped_) return;
  // What is computed again in backward (checkpointing) is a part of backward. But one that failed
  // has never ended.
  if (phase_ == Phase::backward && torch::autograd::get_current_graph_task_id() != -1) return;
  pending_.layer = interrupted_ = kNone;  // of a pass that was given up
  carrier_ = carrier;
  // An exchange that came later than the first iteration counts from 0, and its steps are others.
  const bool counts = step && (iteration_ == kNone || *step >= iteration_);
  if (counts ? iteration_ != *step : over_) {
    over_ = false;
    iteration_ = counts ? *step : next_;
    next_ = iteration_ + 1;
    static_cast<void>(marks->begin_iteration(iteration_));
    if (const uint64_t bytes = resident_bytes(resident_)) marks->memory("resident", bytes);
  }
  phase_ = Phase::forward;
  last_ = now(*marks);
}

void Recording::layer(uint32_t layer) {
  auto marks = marks_.lock();
  std::lock_guard lock(mutex_);
  if (!marks || stopped_ || phase_ != Phase::forward) return;
  last_ = now(*marks);
  pending_.end = last_;
  end_pending(*marks);
  pending_ = {layer, last_, last_};
  interrupted_ = kNone;
}

void Recording::forwarded(const std::vector<at::Tensor>& outputs) {
  auto marks = marks_.lock();
  std::lock_guard lock(mutex_);
  if (!marks || stopped_ || phase_ != Phase::forward) return;
  last_ = now(*marks);
  pending_.end = last_;
  end_pending(*marks);
  phase_ = Phase::between;
  for (const at::Tensor& output : outputs)
    if (output.defined() && output.requires_grad())
      output.register_hook([of = weak_from_this()](const at::Tensor&) {
        if (auto recording = of.lock()) recording->backward_begins();
      });
}

// ---- backward ------------------------------------------------------------------------------

void Recording::backward_begins() {
  auto marks = marks_.lock();
  std::lock_guard lock(mutex_);
  if (!marks || stopped_ || phase_ != Phase::between) return;
  phase_ = Phase::backward;
  const Moment begun = now(*marks);
  add(*marks, What::host, {.name = "loss"}, last_, begun);
  last_ = begun;
  torch::autograd::Engine::get_default_engine().queue_callback([of = weak_from_this()] {
    if (auto recording = of.lock()) recording->backward_ends();
  });
}

void Recording::gradient(uint32_t parameter) {
  auto marks = marks_.lock();
  std::lock_guard lock(mutex_);
  if (!marks || stopped_ || phase_ != Phase::backward) return;
  const Moment begun = last_;
  last_ = now(*marks);
  const uint32_t layer = parameters_[parameter].layer;
  if (pending_.layer != layer) {
    end_pending(*marks);
    pending_ = {layer, begun, last_};
  }
  pending_.end = last_;
  if (carrier_ != Carrier::ddp) return;
  trace::Event event;
  event.start_ns = last_.ns;
  event.shape = trace::Shape::instant;
  event.kind = trace::Kind::gradient_ready;
  event.track = marks->recorder().thread_track();
  event.tensor = parameter;
  if (!bucket_of_.empty()) event.bucket = bucket_of_[parameter];
  event.layer = static_cast<uint16_t>(layer);
  event.iteration = iteration_;
  event.bytes = parameters_[parameter].tensor.nbytes();
  marks->recorder().record(event);
}

// Callbacks run in the order in which they were queued, DDP's before the one that is queued here.
void Recording::backward_ends() {
  auto marks = marks_.lock();
  std::lock_guard lock(mutex_);
  if (!marks || stopped_ || phase_ != Phase::backward) return;
  end_pending(*marks);
  last_ = now(*marks);
  torch::autograd::Engine::get_default_engine().queue_callback([of = weak_from_this()] {
    if (auto recording = of.lock()) recording->waited();
  });
}

void Recording::waited() {
  auto marks = marks_.lock();
  std::lock_guard lock(mutex_);
  if (!marks || stopped_ || phase_ != Phase::backward) return;
  phase_ = Phase::between;
  const Moment begun = last_;
  last_ = now(*marks);
  over_ = over_ || carrier_ != Carrier::nobody;
  if (carrier_ != Carrier::ddp) return;
  trace::Event event;
  event.start_ns = begun.ns;
  event.duration_ns = std::max<int64_t>(0, last_.ns - begun.ns);
  event.kind = trace::Kind::wait;
  event.track = marks->recorder().thread_track();
  event.iteration = iteration_;
  marks->recorder().record(event);
}

// ---- around it -----------------------------------------------------------------------------

void Recording::interrupt(mark::Marks& marks, uint32_t layer, const Moment& at) {
  if (phase_ != Phase::forward || pending_.layer == kNone) return;
  interrupted_ = pending_.layer;
  pending_.end = at;
  // A layer that has not got its parameters yet has not computed.
  if (pending_.layer == layer)
    pending_.layer = kNone;
  else
    end_pending(marks);
}

void Recording::waits(uint32_t layer) {
  auto marks = marks_.lock();
  std::lock_guard lock(mutex_);
  if (!marks || stopped_) return;
  interrupt(*marks, layer, now(*marks));
}

void Recording::update_begins() {
  auto marks = marks_.lock();
  std::lock_guard lock(mutex_);
  if (!marks || stopped_ || iteration_ == kNone) return;
  update_ = now(*marks);
  interrupt(*marks, kNone, *update_);
}

void Recording::update_ends(uint32_t layer) {
  auto marks = marks_.lock();
  std::lock_guard lock(mutex_);
  if (!marks || stopped_ || !update_) return;
  const Moment ended = now(*marks);
  add(*marks, What::update, {.layer = layer}, *update_, ended);
  update_.reset();
  if (interrupted_ != kNone) pending_ = {std::exchange(interrupted_, kNone), ended, ended};
  if (phase_ != Phase::between) return;
  last_ = ended;
  over_ = true;
}

int64_t Recording::now() const {
  auto marks = marks_.lock();
  return marks ? marks->now().count : 0;
}

void Recording::summed(uint32_t number, uint64_t bytes, int64_t began) {
  constexpr uint32_t kCalled = 1u << 31;  // by the program, in no common order
  auto marks = marks_.lock();
  if (!marks) return;
  trace::Event event;
  event.start_ns = began;
  event.duration_ns = std::max<int64_t>(0, marks->now().count - began);
  event.kind = trace::Kind::operation;
  event.name = marks->recorder().name("all_reduce");
  event.track = marks->recorder().track(
      {trace::TrackType::stream, "operations", trace::kNone16, trace::kNone16});
  event.operation = kCalled | number;
  event.bytes = bytes;
  marks->recorder().record(event);
}

void Recording::loading_begins() {
  auto marks = marks_.lock();
  std::lock_guard lock(mutex_);
  if (!marks || stopped_) return;
  loading_ = now(*marks);
}

void Recording::loading_ends() {
  auto marks = marks_.lock();
  std::lock_guard lock(mutex_);
  if (!marks || stopped_ || !loading_) return;
  // It is for the pass that follows.
  const uint32_t iteration = over_ ? next_ : iteration_;
  add(*marks, What::data_loading, {.iteration = iteration}, *loading_, now(*marks));
  loading_.reset();
}

}  // namespace weft::torch_backend
