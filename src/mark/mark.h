// mark: what a program says of its own work, for the trace in which weft's is already.
//
//   for (uint64_t step = 0; step < steps; ++step) {
//     marks.begin_iteration(step);
//     { auto span = marks.data_loading(); load(batch); }
//     for (uint32_t l = 0; l < layers; ++l) { auto span = marks.forward(l); forward(l); }
//     for (uint32_t l = layers; l-- > 0;) {
//       { auto span = marks.backward(l); backward(l); }
//       exchange.ready(l, step);             // recorded by the runtime, as every wait is
//     }
//     ...
//   }
//   marks.end_iteration();
//
// With these a trace is enough for graph, diagnose, replay and optimize. Which layers there are is
// said once: by the exchange, whose tensors name their layers, or by model().
//
// An update belongs to the iteration whose gradients it applies: to that of its layer's last
// backward, so that a program which applies sums one layer at a time, while the next forward goes
// on, has nothing to say. What a span took of the processor is recorded beside it, if it ends in
// the thread in which it began.
//
// A mark that makes no sense changes nothing: calls that return a Result refuse it, the others do
// nothing; both count it, and the trace says how many there were and what was wrong with the first.
// With recording off a mark costs a branch.
//
// Threads: all calls from any thread; a Span is used by one at a time. Marks outlive their spans.
// Not here: gradients, waits and operations, which the runtime records.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "weft/capture.h"
#include "weft/trace.h"

namespace weft::mark {

// What a span is about.
enum class What : uint8_t {
  forward = 1,
  backward = 2,
  update = 3,
  data_loading = 4,
  host = 5,
};
const char* name_of(What what);

// Where a span belongs. What is not said is found out, or not known.
struct Place {
  uint32_t layer = trace::kNone;  // forward and backward have one; an update of all layers has none
  uint32_t tensor = trace::kNone;     // of an update that goes tensor by tensor
  uint32_t iteration = trace::kNone;  // otherwise the one under way, or the update's
  std::string_view name = {};         // what viewers show; otherwise kind and layer
};

// When a span was, on the clock of Marks::now(), for those who know what it was only when it is
// over.
struct Past {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int64_t processor_ns = -1;  // that it took; negative: not known
};

class Marks;

// From its making to its end. Moved from, or refused, it is nothing.
class Span {
 public:
  Span() = default;
  Span(Span&& other) noexcept
      : marks_(std::exchange(other.marks_, nullptr)), begun_(other.begun_) {}
  Span& operator=(Span&& other) noexcept {
    end();
    marks_ = std::exchange(other.marks_, nullptr);
    begun_ = other.begun_;
    return *this;
  }
  ~Span() { end(); }

  bool open() const { return marks_ != nullptr; }
  void end() noexcept;   // the second time it does nothing
  void drop() noexcept;  // ends it unrecorded

 private:
  friend class Marks;
  struct Begun {
    int64_t start_ns = 0;
    int64_t processor_ns = 0;  // of `thread`
    const void* thread = nullptr;
    uint32_t iteration = trace::kNone;
    uint32_t tensor = trace::kNone;
    trace::NameId name = trace::kNone;
    uint16_t layer = trace::kNone16;
    What what = What::forward;
  };
  Span(Marks* marks, const Begun& begun) : marks_(marks), begun_(begun) {}

  Marks* marks_ = nullptr;
  Begun begun_;
};

class Marks {
 public:
  explicit Marks(std::shared_ptr<capture::Recorder> recorder);
  ~Marks();  // tells the trace what was refused
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;

  bool on() const { return on_; }

  // The layers, in forward order, and the gradients that belong to them, if they are known. It may
  // be said again with more of both; what was said before stays. Fails with invalid_argument.
  Result<void> model(const trace::Model& model);
  trace::Model model() const;

  // Ends the iteration under way and begins this one. Numbers rise, and are those of the steps of
  // the exchange. Fails with invalid_argument.
  Result<void> begin_iteration(uint64_t number);
  // It ended now, or when `at` says. Fails with invalid_argument when none is under way, and when
  // it had not begun then.
  Result<void> end_iteration(std::optional<Nanos> at = {});

  // Fails with invalid_argument when the model has no such layer or tensor.
  Result<Span> begin(What what, const Place& place);

  // The same in short; what makes no sense is counted.
  Span forward(uint32_t layer) { return begin_or_count(What::forward, {.layer = layer}); }
  Span backward(uint32_t layer) { return begin_or_count(What::backward, {.layer = layer}); }
  Span update(uint32_t layer) { return begin_or_count(What::update, {.layer = layer}); }
  Span update() { return begin_or_count(What::update, {}); }  // of all layers at once
  Span data_loading(std::string_view name = {}) {
    return begin_or_count(What::data_loading, {.name = name});
  }
  Span host(std::string_view name) { return begin_or_count(What::host, {.name = name}); }
  // `what` is the kind of memory ("resident", "device 0"), of which there are `bytes` now.
  void memory(std::string_view what, uint64_t bytes);

  // A span that is over, of the calling thread. An update finds its iteration as begin() does: the
  // backward before it was told. Fails as begin() does, and with invalid_argument when it ended
  // before it began.
  Result<void> add(What what, const Place& place, const Past& past);
  Nanos now() const { return recorder_->now(); }
  // The trace itself, for what has no mark.
  capture::Recorder& recorder() { return *recorder_; }

  // For those who cannot hold a Span: a number for it, never 0 unless recording is off. At most
  // 65,536 are open at a time. close() fails with invalid_argument when no such span is open.
  Result<uint64_t> open(What what, const Place& place);
  Result<void> close(uint64_t span);

  // Marks that made no sense, so far.
  uint64_t refused() const;
  // Says in the trace what was refused. When a job ends; more than once does no harm.
  void tell_refused();

 private:
  friend class Span;
  struct Layers;

  Result<Span::Begun> placed(What what, const Place& place);
  Span begin_or_count(What what, const Place& place);
  void record(const Span::Begun& begun) noexcept;
  void record(const Span::Begun& begun, int64_t end_ns, int64_t used_ns) noexcept;
  Error refuse(Error error);
  void record_iteration(int64_t end);  // with the mutex held

  const std::shared_ptr<capture::Recorder> recorder_;
  const bool on_;
  std::atomic<const Layers*> layers_{nullptr};  // the last of `known_`
  std::atomic<uint32_t> iteration_{trace::kNone};

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Layers>> known_;  // guarded by mutex_, as the rest
  trace::Model model_;
  uint32_t begun_ = trace::kNone;  // the last iteration that was begun
  int64_t began_ns_ = 0;
  std::unordered_map<uint64_t, Span> open_;
  uint64_t next_span_ = 1;
  uint64_t refused_ = 0;
  uint64_t told_ = 0;
  std::string first_refusal_;
};

}  // namespace weft::mark
