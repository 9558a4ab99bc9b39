#include "weft/mark.h"

#include <time.h>

#include <algorithm>

namespace weft::mark {

using trace::kNone;
using trace::kNone16;

namespace {

constexpr size_t kOpenMax = 65'536;
constexpr size_t kModelsMax = 64;  // that differ; each is kept, because a hot thread may look at it

// One address a thread: a span that ends in another one has no processor time.
const void* this_thread() {
  static thread_local char here;
  return &here;
}

int64_t processor_time_of_thread() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

trace::Kind kind_of(What what) {
  switch (what) {
    case What::forward: return trace::Kind::forward;
    case What::backward: return trace::Kind::backward;
    case What::update: return trace::Kind::update;
    case What::data_loading: return trace::Kind::data_loading;
    case What::host: return trace::Kind::host;
  }
  return trace::Kind::other;
}

bool is_compute(What what) { return what <= What::update; }

bool known_layer(uint32_t layer, size_t layers) { return layer == kNone || layer < layers; }

// What was said before must still be true.
template <typename T>
bool extends(const std::vector<T>& more, const std::vector<T>& before) {
  return more.size() >= before.size() && std::equal(before.begin(), before.end(), more.begin());
}

}  // namespace

const char* name_of(What what) {
  switch (what) {
    case What::forward: return "forward";
    case What::backward: return "backward";
    case What::update: return "update";
    case What::data_loading: return "data loading";
    case What::host: return "host";
  }
  return "unknown";
}

// Which layers there are, and in which iteration each had its last backward.
struct Marks::Layers {
  uint32_t layers = 0;
  uint32_t tensors = 0;
  std::vector<uint32_t> updated_by;  // by tensor
  mutable std::vector<std::atomic<uint32_t>> last_backward;
  mutable std::atomic<uint32_t> last_of_any{kNone};

  explicit Layers(const trace::Model& model)
      : layers(static_cast<uint32_t>(model.layers.size())),
        tensors(static_cast<uint32_t>(model.tensors.size())),
        last_backward(model.layers.size()) {
    for (const trace::Tensor& tensor : model.tensors) updated_by.push_back(tensor.updated_by);
    for (std::atomic<uint32_t>& last : last_backward) last.store(kNone);
  }
};

// ---- spans ---------------------------------------------------------------------------------

void Span::end() noexcept {
  if (Marks* marks = std::exchange(marks_, nullptr)) marks->record(begun_);
}

void Span::drop() noexcept { marks_ = nullptr; }

Result<Span> Marks::begin(What what, const Place& place) {
  if (!on_) return Span();
  auto begun = placed(what, place);
  if (!begun) return refuse(std::move(begun).error());
  begun->thread = this_thread();
  begun->start_ns = recorder_->now().count;
  if (is_compute(what)) begun->processor_ns = processor_time_of_thread();
  return Span(this, *begun);
}

Span Marks::begin_or_count(What what, const Place& place) {
  if (!on_) return {};
  auto span = begin(what, place);
  return span ? std::move(*span) : Span();
}

Result<Span::Begun> Marks::placed(What what, const Place& place) {
  if (what < What::forward || what > What::host)
    return error(Code::invalid_argument, "there is no mark %u", static_cast<unsigned>(what));
  const Layers* layers = layers_.load(std::memory_order_acquire);
  uint32_t layer = place.layer;
  if (place.tensor != kNone && (layers == nullptr || place.tensor >= layers->tensors))
    return error(Code::invalid_argument, "%s of tensor %u: the model has %u", name_of(what),
                 place.tensor, layers == nullptr ? 0u : layers->tensors);
  if (layer == kNone && what == What::update && place.tensor != kNone)
    layer = layers->updated_by[place.tensor];
  if (layer == kNone && (what == What::forward || what == What::backward))
    return error(Code::invalid_argument, "%s of no layer: say which", name_of(what));
  if (layer != kNone && layers == nullptr)
    return error(Code::invalid_argument,
                 "%s of layer %u before anyone said which layers there are: make the exchange "
                 "first, or name them with model()",
                 name_of(what), layer);
  if (layer != kNone && layer >= layers->layers)
    return error(Code::invalid_argument, "%s of layer %u: the model has %u", name_of(what), layer,
                 layers->layers);
  Span::Begun begun;
  begun.what = what;
  begun.layer = layer == kNone ? kNone16 : static_cast<uint16_t>(layer);
  begun.tensor = place.tensor;
  begun.iteration =
      place.iteration != kNone ? place.iteration : iteration_.load(std::memory_order_relaxed);
  if (what == What::backward && begun.iteration != kNone) {
    layers->last_backward[layer].store(begun.iteration, std::memory_order_relaxed);
    layers->last_of_any.store(begun.iteration, std::memory_order_relaxed);
  } else if (what == What::update && place.iteration == kNone && layers != nullptr) {
    // Whose gradients it applies.
    const std::atomic<uint32_t>& last =
        layer != kNone ? layers->last_backward[layer] : layers->last_of_any;
    const uint32_t of = last.load(std::memory_order_relaxed);
    if (of != kNone) begun.iteration = of;
  }
  if (!place.name.empty()) begun.name = recorder_->name(place.name);
  return begun;
}

void Marks::record(const Span::Begun& begun) noexcept {
  // The reading of the processor's time lies outside of the span, as far as it can.
  const bool same_thread = begun.thread == this_thread();
  const int64_t used =
      is_compute(begun.what) && same_thread ? processor_time_of_thread() - begun.processor_ns : -1;
  record(begun, recorder_->now().count, used);
}

void Marks::record(const Span::Begun& begun, int64_t end_ns, int64_t used_ns) noexcept {
  trace::Event event;
  event.start_ns = begun.start_ns;
  event.duration_ns = std::max<int64_t>(0, end_ns - begun.start_ns);
  event.kind = kind_of(begun.what);
  event.name = begun.name;
  event.iteration = begun.iteration;
  event.tensor = begun.tensor;
  event.layer = begun.layer;
  event.track = recorder_->thread_track();
  recorder_->record(event);
  if (used_ns >= 0) recorder_->record(trace::processor_time_of(event, used_ns));
}

Result<void> Marks::add(What what, const Place& place, const Past& past) {
  if (!on_) return {};
  if (past.end_ns < past.start_ns)
    return refuse(error(Code::invalid_argument, "%s ended before it began", name_of(what)));
  auto begun = placed(what, place);
  if (!begun) return refuse(std::move(begun).error());
  begun->start_ns = past.start_ns;
  record(*begun, past.end_ns, is_compute(what) ? past.processor_ns : -1);
  return {};
}

Result<uint64_t> Marks::open(What what, const Place& place) {
  if (!on_) return uint64_t{0};
  WEFT_ASSIGN(Span span, begin(what, place));
  std::unique_lock lock(mutex_);
  if (open_.size() >= kOpenMax) {
    span.drop();
    lock.unlock();
    return refuse(error(Code::invalid_argument, "%zu spans are open: end some", kOpenMax));
  }
  const uint64_t number = next_span_++;
  open_.emplace(number, std::move(span));
  return number;
}

Result<void> Marks::close(uint64_t span) {
  if (!on_) return {};
  Span found;
  {
    std::lock_guard lock(mutex_);
    auto at = open_.find(span);
    if (at != open_.end()) {
      found = std::move(at->second);
      open_.erase(at);
    }
  }
  if (!found.open())
    return refuse(error(Code::invalid_argument,
                        "no span %llu is open: it never began, or has ended",
                        static_cast<unsigned long long>(span)));
  found.end();
  return {};
}

void Marks::memory(std::string_view what, uint64_t bytes) {
  if (!on_) return;
  trace::Event event;
  event.start_ns = recorder_->now().count;
  event.duration_ns = static_cast<int64_t>(std::min<uint64_t>(bytes, INT64_MAX));
  event.shape = trace::Shape::counter;
  event.kind = trace::Kind::memory;
  event.iteration = iteration_.load(std::memory_order_relaxed);
  event.name = recorder_->name(what.empty() ? std::string_view("memory") : what);
  event.track = recorder_->thread_track();
  recorder_->record(event);
}

// ---- iterations ----------------------------------------------------------------------------

void Marks::record_iteration(int64_t end) {
  trace::Event event;
  event.start_ns = began_ns_;
  event.duration_ns = std::max<int64_t>(0, end - began_ns_);
  event.kind = trace::Kind::iteration;
  event.iteration = begun_;
  event.track = recorder_->thread_track();
  recorder_->record(event);
}

Result<void> Marks::begin_iteration(uint64_t number) {
  if (!on_) return {};
  std::unique_lock lock(mutex_);
  if (number >= kNone || (begun_ != kNone && number <= begun_)) {
    const std::string before = begun_ == kNone ? "" : text(", after %u", begun_);
    lock.unlock();
    return refuse(error(Code::invalid_argument,
                        "iteration %llu%s: iterations are numbered upwards, below %u",
                        static_cast<unsigned long long>(number), before.c_str(), kNone));
  }
  const int64_t now = recorder_->now().count;
  if (iteration_.load(std::memory_order_relaxed) != kNone) record_iteration(now);
  begun_ = static_cast<uint32_t>(number);
  began_ns_ = now;
  iteration_.store(begun_, std::memory_order_relaxed);
  return {};
}

Result<void> Marks::end_iteration(std::optional<Nanos> at) {
  if (!on_) return {};
  std::unique_lock lock(mutex_);
  if (iteration_.load(std::memory_order_relaxed) == kNone) {
    lock.unlock();
    return refuse(error(Code::invalid_argument, "no iteration is under way that could end"));
  }
  if (at && at->count < began_ns_) {
    lock.unlock();
    return refuse(error(Code::invalid_argument, "iteration %u ended before it began", begun_));
  }
  record_iteration(at ? at->count : recorder_->now().count);
  iteration_.store(kNone, std::memory_order_relaxed);
  return {};
}

// ---- the model -----------------------------------------------------------------------------

Result<void> Marks::model(const trace::Model& model) {
  if (model.layers.size() >= kNone16)
    return error(Code::invalid_argument, "%zu layers: there may be %u", model.layers.size(),
                 kNone16 - 1u);
  for (const trace::Tensor& tensor : model.tensors)
    for (uint32_t layer : {tensor.produced_by, tensor.updated_by, tensor.consumed_by})
      if (!known_layer(layer, model.layers.size()))
        return error(Code::invalid_argument, "tensor \"%s\" is of layer %u; the model has %zu",
                     tensor.name.c_str(), layer, model.layers.size());
  std::lock_guard lock(mutex_);
  if (model == model_) return {};
  if (!extends(model.layers, model_.layers) || !extends(model.tensors, model_.tensors))
    return error(Code::invalid_argument,
                 "the model was said before, with %zu layers and %zu tensors, and differs now; it "
                 "may only have more",
                 model_.layers.size(), model_.tensors.size());
  if (known_.size() >= kModelsMax)
    return error(Code::invalid_argument, "the model was changed %zu times: say it once",
                 known_.size());
  auto layers = std::make_unique<Layers>(model);
  if (!known_.empty()) {
    const Layers& before = *known_.back();
    layers->last_of_any.store(before.last_of_any.load());
    for (uint32_t l = 0; l < before.layers; ++l)
      layers->last_backward[l].store(before.last_backward[l].load());
  }
  known_.push_back(std::move(layers));
  model_ = model;
  // The recorder first: what names a layer must find it in the file.
  recorder_->model(model_);
  layers_.store(known_.back().get(), std::memory_order_release);
  return {};
}

trace::Model Marks::model() const {
  std::lock_guard lock(mutex_);
  return model_;
}

// ---- what made no sense ----------------------------------------------------------------------

Marks::Marks(std::shared_ptr<capture::Recorder> recorder)
    : recorder_(std::move(recorder)), on_(recorder_->on()) {}

Marks::~Marks() {
  {
    std::lock_guard lock(mutex_);
    for (auto& [number, span] : open_) span.drop();
  }
  tell_refused();
}

Error Marks::refuse(Error error) {
  std::lock_guard lock(mutex_);
  if (refused_++ == 0) first_refusal_ = error.message();
  return error;
}

uint64_t Marks::refused() const {
  std::lock_guard lock(mutex_);
  return refused_;
}

void Marks::tell_refused() {
  std::lock_guard lock(mutex_);
  if (refused_ == told_) return;
  told_ = refused_;
  recorder_->note(trace::kMarksRefused,
                  text("%llu; the first: %s", static_cast<unsigned long long>(refused_),
                       first_refusal_.c_str()));
}

}  // namespace weft::mark
