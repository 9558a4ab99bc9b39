// Iterations that nobody marked.
#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>

#include "weft/trace.h"

namespace weft::trace {
namespace {

// Operations that a program called itself; those of the exchange have numbers below, and steps.
constexpr uint32_t kCalled = 1u << 31;
// A sequence that repeats so often is no chance.
constexpr size_t kRepeats = 3;

bool is_compute(const Event& event) {
  return event.shape == Shape::span && (event.kind == Kind::forward ||
                                        event.kind == Kind::backward || event.kind == Kind::update);
}

bool is_called(const Event& event) {
  return event.shape == Shape::span && event.operation != kNone && event.operation >= kCalled &&
         (event.kind == Kind::operation || event.kind == Kind::broadcast);
}

void add_iterations(Process& process, const std::vector<std::pair<uint32_t, int64_t>>& starts,
                    TrackId track) {
  // Where the last one ends is not known.
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    Event event;
    event.start_ns = starts[i].second;
    if (__builtin_sub_overflow(starts[i + 1].second, starts[i].second, &event.duration_ns))
      continue;
    event.kind = Kind::iteration;
    event.iteration = starts[i].first;
    event.track = track;
    if (flaw_of(event) == nullptr) process.events.push_back(event);
  }
}

// The iteration under way at `ns`; none before the first.
std::optional<uint32_t> at(const std::vector<std::pair<uint32_t, int64_t>>& starts, int64_t ns) {
  auto after =
      std::upper_bound(starts.begin(), starts.end(), ns,
                       [](int64_t time, const auto& start) { return time < start.second; });
  if (after == starts.begin()) return std::nullopt;
  return std::prev(after)->first;
}

class OfProcess {
 public:
  explicit OfProcess(Process& process) : process_(process) {}

  // How iterations were found; empty: they were there, or could not be found.
  std::string run() {
    bool compute = false;
    for (const Event& event : process_.events) {
      if (flaw_of(event) != nullptr) continue;
      if (event.kind == Kind::iteration && event.shape == Shape::span) return {};
      if (!is_compute(event)) continue;
      compute = true;
      if (event.iteration != kNone) return {};
    }
    if (compute) return by_compute();
    std::string how = by_steps();
    return how.empty() ? by_operations() : how;
  }

 private:
  using Starts = std::vector<std::pair<uint32_t, int64_t>>;  // number, moment; both rise

  std::vector<Event*> sorted(bool (*wanted)(const Event&)) {
    std::vector<Event*> out;
    for (Event& event : process_.events)
      if (flaw_of(event) == nullptr && wanted(event)) out.push_back(&event);
    std::stable_sort(out.begin(), out.end(),
                     [](const Event* a, const Event* b) { return a->start_ns < b->start_ns; });
    return out;
  }

  static bool is_ready(const Event& event) { return event.kind == Kind::gradient_ready; }
  static bool matters(const Event& event) { return is_compute(event) || is_ready(event); }

  // A step begins with the first layer's forward, once the step before has got so far that it has
  // gradients, or updates, or at least a backward: several forwards of one step are one iteration.
  std::string by_compute() {
    std::vector<Event*> all = sorted(&matters);
    auto has = [&](Kind kind) {
      return std::any_of(all.begin(), all.end(), [&](const Event* e) { return e->kind == kind; });
    };
    const Kind turn = has(Kind::gradient_ready) ? Kind::gradient_ready
                      : has(Kind::update)       ? Kind::update
                      : has(Kind::backward)     ? Kind::backward
                                                : Kind::forward;
    auto first = std::find_if(all.begin(), all.end(),
                              [](const Event* event) { return event->kind == Kind::forward; });
    if (first == all.end()) return {};
    const uint16_t anchor = (*first)->layer;
    const TrackId track = (*first)->track;
    Starts starts;
    bool turned = true;
    std::optional<uint32_t> step;  // of the exchange, in the iteration at hand
    for (const Event* event : all) {
      if (!starts.empty() && starts.back().first >= kNone - 1) break;  // no number is left
      if (event->kind == Kind::forward && event->layer == anchor && turned) {
        starts.emplace_back(starts.empty() ? 0 : starts.back().first + 1, event->start_ns);
        turned = turn == Kind::forward;
        step.reset();
        continue;
      }
      turned = turned || event->kind == turn;
      if (!is_ready(*event) || event->iteration == kNone || step || starts.empty()) continue;
      step = event->iteration;
      // The steps of the exchange are numbered, and these are the same.
      const uint32_t before = starts.size() > 1 ? starts[starts.size() - 2].first : 0;
      if (starts.size() == 1 || *step > before) starts.back().first = *step;
    }
    std::unordered_map<uint16_t, uint32_t> last_backward;
    std::optional<uint32_t> last_of_any;
    std::map<std::tuple<int64_t, uint16_t, TrackId>, uint32_t> of_span;
    for (Event* event : all) {
      if (!is_compute(*event)) continue;
      std::optional<uint32_t> number = at(starts, event->start_ns);
      if (event->kind == Kind::backward && number) {
        last_backward[event->layer] = *number;
        last_of_any = number;
      } else if (event->kind == Kind::update) {
        // Of the gradients that it applies, whenever that is.
        auto of_layer = last_backward.find(event->layer);
        number = of_layer != last_backward.end() ? of_layer->second : last_of_any;
      }
      if (!number) continue;
      event->iteration = *number;
      of_span[{event->start_ns, event->layer, event->track}] = *number;
    }
    for (Event& event : process_.events) {
      if (event.kind != Kind::processor_time || event.iteration != kNone) continue;
      auto span = of_span.find({event.start_ns, event.layer, event.track});
      if (span != of_span.end()) event.iteration = span->second;
    }
    if (starts.size() < 2) return {};
    add_iterations(process_, starts, track);
    const std::string layer = anchor < process_.model.layers.size()
                                  ? "\"" + process_.model.layers[anchor].name + "\""
                                  : text("layer %u", anchor);
    return "each begins with the forward of " + layer;
  }

  // Without marks of compute: from the first gradient of a step to the first of the next.
  std::string by_steps() {
    Starts starts;
    TrackId track = 0;
    for (const Event* event : sorted(&is_ready)) {
      if (event->iteration == kNone) continue;
      if (!starts.empty() && event->iteration <= starts.back().first) continue;
      starts.emplace_back(event->iteration, event->start_ns);
      track = event->track;
    }
    if (starts.size() < 2) return {};
    add_iterations(process_, starts, track);
    return "each begins with the first gradient of a step";
  }

  // Without an exchange: what the program calls, in the order in which it does, repeats.
  std::string by_operations() {
    std::vector<Event*> calls = sorted(&is_called);
    const size_t count = calls.size();
    auto same = [&](size_t a, size_t b) {  // counted from the end
      const Event &x = *calls[count - 1 - a], &y = *calls[count - 1 - b];
      return x.name == y.name && x.bytes == y.bytes && x.kind == y.kind;
    };
    // How far the end of the sequence agrees with itself, moved by so many (the Z function).
    std::vector<size_t> agrees(count, 0);
    for (size_t i = 1, left = 0, right = 0; i < count; ++i) {
      if (i < right) agrees[i] = std::min(right - i, agrees[i - left]);
      while (i + agrees[i] < count && same(agrees[i], i + agrees[i])) ++agrees[i];
      if (i + agrees[i] > right) left = i, right = i + agrees[i];
    }
    for (size_t period = 1; period * kRepeats <= count; ++period) {
      const size_t covered = agrees[period] + period;
      if (covered < kRepeats * period || 2 * covered < count) continue;
      Starts starts;
      for (size_t i = count - covered; i < count; i += period)
        starts.emplace_back(static_cast<uint32_t>(starts.size()), calls[i]->start_ns);
      std::unordered_map<uint32_t, uint32_t> of_operation;
      for (Event* call : calls)
        if (auto number = at(starts, call->start_ns)) of_operation[call->operation] = *number;
      for (Event& event : process_.events) {
        if (event.iteration != kNone || event.operation == kNone) continue;
        auto known = of_operation.find(event.operation);
        if (known != of_operation.end()) event.iteration = known->second;
      }
      const TrackId track = calls[count - covered]->track;
      add_iterations(process_, starts, track);
      return text("%zu operation%s repeat%s", period, period == 1 ? "" : "s",
                  period == 1 ? "s" : "");
    }
    return {};
  }

  Process& process_;
};

}  // namespace

std::vector<std::string> infer_iterations(Trace& trace) {
  // Ranks of one program are told apart only where they differ.
  std::map<std::string, std::vector<uint32_t>> by_how;
  for (Process& process : trace.processes) {
    std::string how = OfProcess(process).run();
    if (!how.empty()) by_how[how].push_back(process.environment.rank);
  }
  std::vector<std::string> out;
  for (const auto& [how, ranks] : by_how)
    out.push_back(
        text("iterations are inferred%s: %s",
             ranks.size() == trace.processes.size()
                 ? ""
                 : text(" on %zu of %zu ranks", ranks.size(), trace.processes.size()).c_str(),
             how.c_str()));
  return out;
}

}  // namespace weft::trace
