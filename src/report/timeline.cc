#include "timeline.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <unordered_map>

#include "text.h"

namespace weft::report {
namespace {

using trace::Event;
using trace::Kind;
using trace::Process;
using trace::Shape;

constexpr size_t kNameMax = 120;      // bytes of a name in a tooltip
constexpr size_t kDepthMax = 12;      // rows that overlaps make of one track
constexpr double kTimeMax = 9.0e15;   // exact in a browser's numbers
constexpr size_t kIterationMax = 64;  // that one timeline shows

// Which rows stand first within a rank.
enum class Part : uint8_t { device, iterations, training, operations, lane_out, lane_in, marks };

const char* name_of(Part part) {
  static constexpr const char* kNames[] = {"device",   "iterations", "training", "operations",
                                           "lane_out", "lane_in",    "marks"};
  return kNames[static_cast<size_t>(part)];
}

Part part_of(const Event& event) {
  if (event.shape == Shape::instant) return Part::marks;
  if (event.shape == Shape::send) return Part::lane_out;
  if (event.shape == Shape::receive) return Part::lane_in;
  switch (event.kind) {
    case Kind::forward:
    case Kind::backward:
    case Kind::update: return Part::device;
    case Kind::iteration: return Part::iterations;
    case Kind::operation:
    case Kind::broadcast:
    case Kind::barrier:
    case Kind::reduce: return Part::operations;
    default: return Part::training;
  }
}

const char* kind_name(const Event& event) {
  if (event.kind == Kind::chunk) return event.shape == Shape::receive ? "receive" : "send";
  return trace::name_of(event.kind);
}

// What goes first when not everything can: spans, sends, receives, marks. Messages are many, and a
// send tells nearly what its receive does.
constexpr size_t kClasses = 4;

size_t class_of(const Event& event) {
  const Part part = part_of(event);
  if (part == Part::lane_out) return 1;
  if (part == Part::lane_in) return 2;
  return part == Part::marks ? 3 : 0;
}

// A part of the run's time, on its clock.
struct Window {
  int64_t from = 0;
  int64_t to = 0;
  std::vector<std::pair<uint32_t, int64_t>> iterations;  // number and start
};

struct Span {
  int64_t from = std::numeric_limits<int64_t>::max();
  int64_t to = std::numeric_limits<int64_t>::min();
  void take(const Event& event) {
    from = std::min(from, event.start_ns);
    to = std::max(to, event.end_ns());
  }
};

// Where each iteration lies: by the records of iterations, else by what names one.
std::map<uint32_t, Span> iterations_of(const trace::Trace& trace) {
  std::map<uint32_t, Span> recorded;
  std::map<uint32_t, Span> implied;
  for (const Process& process : trace.processes) {
    for (const Event& event : process.events) {
      if (event.iteration == trace::kNone || trace::flaw_of(event) != nullptr) continue;
      if (event.kind == Kind::iteration && event.shape == Shape::span)
        recorded[event.iteration].take(event);
      else if (recorded.empty())
        implied[event.iteration].take(event);
    }
  }
  return recorded.empty() ? implied : recorded;
}

Window window_of(const trace::Trace& trace, uint32_t wanted) {
  Window window;
  const std::map<uint32_t, Span> all = iterations_of(trace);
  if (all.empty()) {
    Span whole;
    for (const Process& process : trace.processes)
      for (const Event& event : process.events)
        if (trace::flaw_of(event) == nullptr) whole.take(event);
    if (whole.from <= whole.to) window.from = whole.from, window.to = whole.to;
    return window;
  }
  const size_t count = std::min({all.size(), size_t{std::max(wanted, 1U)}, kIterationMax});
  auto first = std::next(all.begin(), static_cast<std::ptrdiff_t>((all.size() - count) / 2));
  window.from = first->second.from;
  window.to = first->second.to;
  for (size_t i = 0; i < count; ++i, ++first) {
    window.iterations.emplace_back(first->first, first->second.from);
    window.from = std::min(window.from, first->second.from);
    window.to = std::max(window.to, first->second.to);
  }
  return window;
}

// An event that is shown: which process, which of its events.
struct Shown {
  uint32_t process;
  uint32_t event;
};

// Equal names share an index.
class Names {
 public:
  size_t of(const std::string& name) {
    const auto [at, added] = index_.emplace(name, order_.size());
    if (added) order_.push_back(name);
    return at->second;
  }
  void append(std::string& out) const {
    out += '[';
    for (size_t i = 0; i < order_.size(); ++i) {
      if (i > 0) out += ',';
      append_json_string(out, order_[i], kNameMax);
    }
    out += ']';
  }

 private:
  std::unordered_map<std::string, size_t> index_;
  std::vector<std::string> order_;
};

// Numbers of one sort, a value an event.
void append_column(std::string& out, const char* key, const std::vector<int64_t>& values) {
  out += ",\"";
  out += key;
  out += "\":";
  const bool constant =
      std::all_of(values.begin(), values.end(), [&](int64_t v) { return v == values.front(); });
  if (constant) {
    append_number(out, values.front());
    return;
  }
  out += '[';
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) out += ',';
    append_number(out, values[i]);
  }
  out += ']';
}

class Builder {
 public:
  explicit Builder(const Page& page) : page_(page) {}

  Timeline build() {
    std::string runs;
    for (const Run& run : page_.runs) {
      if (run.trace == nullptr) continue;
      if (!runs.empty()) runs += ",\n";
      put_run(runs, run);
    }
    Timeline out = std::move(out_);
    out.json = "{\"names\":";
    names_.append(out.json);
    out.json += ",\n\"kinds\":";
    kinds_.append(out.json);
    out.json += ",\n\"runs\":[" + runs + "]}";
    return out;
  }

 private:
  const Process& process_of(const Shown& shown) const { return trace_->processes[shown.process]; }
  const Event& event_of(const Shown& shown) const { return process_of(shown).events[shown.event]; }

  // Hostile factors and far times end at the edge of what a browser can count.
  int64_t target(const trace::Environment& environment, double wall_ns) const {
    const double ns = environment.to_target_ns(wall_ns);
    if (!std::isfinite(ns)) return 0;
    return static_cast<int64_t>(std::llround(std::clamp(ns, -kTimeMax, kTimeMax)));
  }
  double since(int64_t ns) const {
    return static_cast<double>(ns) - static_cast<double>(window_.from);
  }

  void put_run(std::string& out, const Run& run) {
    trace_ = run.trace;
    window_ = window_of(*run.trace, page_.timeline_iterations);
    const std::vector<Shown> shown = choose(run);
    if (!shown.empty()) out_.empty = false;

    const trace::Environment none;
    const trace::Environment& environment =
        trace_->processes.empty() ? none : trace_->processes.front().environment;
    out += "{\"label\":";
    append_json_string(out, run.label, kNameMax);
    out += text(",\"ms\":%.17g", std::isfinite(run.iteration_ms) ? run.iteration_ms : 0.0);
    out += environment.predicted ? ",\"predicted\":true" : ",\"predicted\":false";
    out += ",\"to\":";
    append_number(out, target(environment, since(window_.to)));
    out += ",\"iterations\":[";
    for (size_t i = 0; i < window_.iterations.size(); ++i) {
      const auto& [number, start] = window_.iterations[i];
      if (i > 0) out += ',';
      out += text("{\"n\":%u,\"t\":", number);
      append_number(out, target(environment, since(start)));
      out += '}';
    }
    out += "],\"rows\":[";
    put_rows(out, shown);
    out += "]}";
  }

  bool in_window(const Event& event) const {
    if (event.shape == Shape::counter || trace::flaw_of(event) != nullptr) return false;
    if (event.start_ns > window_.to || event.end_ns() < window_.from) return false;
    if (event.kind == Kind::iteration && !is_chosen(event.iteration)) return false;
    // What only touches the edge belongs to the neighbour.
    const bool lasts = event.duration_ns > 0;
    return !lasts || (event.start_ns < window_.to && event.end_ns() > window_.from);
  }

  // Ranks are apart, so an iteration that was not chosen may reach into the window.
  bool is_chosen(uint32_t iteration) const {
    return window_.iterations.empty() ||
           std::any_of(window_.iterations.begin(), window_.iterations.end(),
                       [&](const auto& chosen) { return chosen.first == iteration; });
  }

  // The events to show, most telling first where there are too many, and the note about them.
  std::vector<Shown> choose(const Run& run) {
    std::array<std::vector<Shown>, kClasses> classes;
    for (size_t p = 0; p < trace_->processes.size(); ++p) {
      const std::vector<Event>& events = trace_->processes[p].events;
      const size_t count = std::min<size_t>(events.size(), std::numeric_limits<uint32_t>::max());
      for (size_t i = 0; i < count; ++i)
        if (in_window(events[i]))
          classes[class_of(events[i])].push_back(
              {static_cast<uint32_t>(p), static_cast<uint32_t>(i)});
    }
    std::vector<Shown> shown;
    std::array<size_t, kClasses> left_out{};
    for (size_t c = 0; c < kClasses; ++c) {
      const size_t room = kEventsMax - shown.size();
      if (classes[c].size() > room) {
        std::sort(classes[c].begin(), classes[c].end(), [this](const Shown& a, const Shown& b) {
          return event_of(a).start_ns < event_of(b).start_ns;
        });
        left_out[c] = classes[c].size() - room;
        classes[c].resize(room);
      }
      shown.insert(shown.end(), classes[c].begin(), classes[c].end());
    }
    note(run, shown.size(), left_out);
    return shown;
  }

  void note(const Run& run, size_t shown, const std::array<size_t, kClasses>& left_out) {
    static constexpr const char* kNames[] = {"spans", "sends", "receives", "marks"};
    std::string line = run.label + ": ";
    if (window_.iterations.empty())
      line += "no iterations recorded, the whole run";
    else if (window_.iterations.size() == 1)
      line += text("iteration %u", window_.iterations.front().first);
    else
      line += text("iterations %u to %u", window_.iterations.front().first,
                   window_.iterations.back().first);
    line += ", " + grouped(shown) + " events";
    std::string rest;
    for (size_t c = 0; c < kClasses; ++c)
      if (left_out[c] > 0)
        rest += (rest.empty() ? "" : ", ") + grouped(left_out[c]) + " " + kNames[c];
    if (!rest.empty()) line += "; left out, the latest of them: " + rest;
    out_.notes.push_back(std::move(line));
  }

  // Rows in order: by rank, by part, by track; within, what overlaps goes to rows of its own.
  void put_rows(std::string& out, const std::vector<Shown>& shown) {
    struct Key {
      uint32_t process;
      Part part;
      trace::TrackId track;
      auto operator<=>(const Key&) const = default;
    };
    std::map<Key, std::vector<Shown>> tracks;
    for (const Shown& s : shown) {
      const Event& event = event_of(s);
      const Part part = part_of(event);
      // Marks of a rank share one row, whichever thread set them.
      tracks[{s.process, part, part == Part::marks ? trace::TrackId{0} : event.track}].push_back(s);
    }
    bool first = true;
    for (auto& [key, events] : tracks) {
      std::sort(events.begin(), events.end(), [this](const Shown& a, const Shown& b) {
        const Event& x = event_of(a);
        const Event& y = event_of(b);
        if (x.start_ns != y.start_ns) return x.start_ns < y.start_ns;
        if (x.duration_ns != y.duration_ns) return x.duration_ns > y.duration_ns;
        return a.event < b.event;
      });
      const std::vector<std::vector<Shown>> rows =
          key.part == Part::marks ? std::vector<std::vector<Shown>>{events} : spread(events);
      for (size_t sub = 0; sub < rows.size(); ++sub) {
        if (!first) out += ",\n";
        first = false;
        put_row(out, rows[sub], key.part, key.track, sub);
      }
    }
  }

  // First row that is free; the last row takes what no other does. Timers are not exact: what
  // overlaps by a little of its own length still comes after.
  std::vector<std::vector<Shown>> spread(const std::vector<Shown>& events) const {
    std::vector<std::vector<Shown>> rows;
    std::vector<int64_t> until;
    for (const Shown& s : events) {
      const Event& event = event_of(s);
      size_t row = 0;
      while (row < rows.size() && until[row] > event.start_ns + event.duration_ns / 20) ++row;
      if (row == rows.size() && rows.size() < kDepthMax) {
        rows.emplace_back();
        until.push_back(event.end_ns());
      }
      row = std::min(row, rows.size() - 1);
      rows[row].push_back(s);
      until[row] = std::max(until[row], event.end_ns());
    }
    return rows;
  }

  std::string track_name(const Process& process, Part part, trace::TrackId track) const {
    if (part == Part::marks || part == Part::iterations) return name_of(part);
    if (track < process.tracks.size() && !process.tracks[track].name.empty())
      return process.tracks[track].name;
    return text("track %u", track);
  }

  void put_row(std::string& out, const std::vector<Shown>& events, Part part, trace::TrackId track,
               size_t sub) {
    const Process& process = process_of(events.front());
    const trace::Environment& environment = process.environment;
    const bool lane = part == Part::lane_out || part == Part::lane_in;
    const Event& head = event_of(events.front());
    out += text("{\"rank\":%u,\"part\":\"%s\",\"sub\":%zu,\"lane\":%d,\"peer\":%d,\"track\":",
                environment.rank, name_of(part), sub,
                lane && head.lane != trace::kNone16 ? head.lane : -1,
                lane && head.peer != trace::kNone16 ? head.peer : -1);
    append_json_string(out, track_name(process, part, track), kNameMax);
    std::vector<int64_t> starts, durations, names, kinds, bytes, iterations;
    int64_t last = 0;
    for (const Shown& s : events) {
      const Event& event = event_of(s);
      const int64_t start = target(environment, since(event.start_ns));
      starts.push_back(start - last);
      last = start;
      const auto length = static_cast<double>(event.end_ns()) - static_cast<double>(event.start_ns);
      durations.push_back(std::max<int64_t>(target(environment, length), 0));
      names.push_back(static_cast<int64_t>(names_.of(process.label(event))));
      kinds.push_back(static_cast<int64_t>(kinds_.of(kind_name(event))));
      const double moved = environment.to_target_bytes(static_cast<double>(event.bytes));
      bytes.push_back(std::isfinite(moved) ? std::llround(std::clamp(moved, 0.0, kTimeMax)) : 0);
      iterations.push_back(event.iteration == trace::kNone ? -1 : int64_t{event.iteration});
    }
    out += text(",\"count\":%zu", events.size());
    append_column(out, "t", starts);
    append_column(out, "d", durations);
    append_column(out, "n", names);
    append_column(out, "k", kinds);
    append_column(out, "b", bytes);
    append_column(out, "i", iterations);
    out += '}';
  }

  const Page& page_;
  const trace::Trace* trace_ = nullptr;
  Window window_;
  Names names_;
  Names kinds_;
  Timeline out_;
};

}  // namespace

Timeline timeline_of(const Page& page) { return Builder(page).build(); }

}  // namespace weft::report
