// Chrome trace-event JSON, as Perfetto and chrome://tracing read it.
//
// Viewers keep one stack of slices a thread. A slice that overlaps another without lying inside
// it is moved or dropped, and an arrow ends at whatever slice is on top of the stack. So a track
// becomes as many threads as its overlaps need, and while a message is on a thread, nothing else
// starts there: the arrows can only meet their own slices. An operation that lies inside another by
// chance is beside it all the same, not called by it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <queue>

#include "json.h"
#include "profile.h"
#include "weft/trace.h"

namespace weft::trace {
namespace {

bool is_message(const Event& event) {
  return (event.shape == Shape::send || event.shape == Shape::receive) && event.message != 0;
}

bool is_operation(const Event& event) {
  return event.shape == Shape::span &&
         (event.kind == Kind::operation || event.kind == Kind::broadcast ||
          event.kind == Kind::barrier);
}

// Spreads slices, given in order of (start, longer first), over rows on which they nest.
class Rows {
 public:
  size_t place(uint64_t start, uint64_t end, bool message, bool operation) {
    // A message needs its moment for itself even when it took no time.
    const uint64_t until = message ? std::max(end, start + 1) : end;
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (fits(rows_[i], start, until, operation)) {
        rows_[i].push_back({until, message, operation});
        return i;
      }
    }
    if (rows_.size() < kNesting) {
      rows_.push_back({{until, message, operation}});
      return rows_.size() - 1;
    }
    // So many at once: further rows are flat, the first to become free is taken, and the work
    // stays n log n.
    size_t row = rows_.size() + flat_count_;
    if (!flat_.empty() && flat_.top().first <= start) {
      row = flat_.top().second;
      flat_.pop();
    } else {
      ++flat_count_;
    }
    flat_.emplace(std::max(until, start + 1), row);
    return row;
  }

 private:
  static constexpr size_t kNesting = 64;
  struct Open {
    uint64_t until;
    bool message;
    bool operation;
  };
  using Row = std::vector<Open>;
  using Free = std::pair<uint64_t, size_t>;

  static bool fits(Row& row, uint64_t start, uint64_t until, bool operation) {
    while (!row.empty() && row.back().until <= start) row.pop_back();
    if (row.empty()) return true;
    const Open& around = row.back();
    return until <= around.until && !around.message && !(around.operation && operation);
  }

  std::vector<Row> rows_;
  std::priority_queue<Free, std::vector<Free>, std::greater<>> flat_;
  size_t flat_count_ = 0;
};

// One half of a message, on its row.
struct Half {
  uint64_t message;
  uint64_t start;
  uint64_t last;  // the last moment inside the slice
  uint64_t pid;
  uint64_t tid;
  bool send;
};

class ChromeWriter {
 public:
  ChromeWriter(const Trace& trace, const ChromeOptions& options, TextFile file)
      : trace_(trace), options_(options), file_(std::move(file)) {}

  Result<ChromeSummary> write() {
    for (const Profile& profile : options_.profiles) WEFT_TRY(open_profile(profile));
    find_base();
    std::string& out = file_.buffer();
    out += "{\"displayTimeUnit\":\"ns\",\"otherData\":{";
    put_other_data();
    out += "},\n\"traceEvents\":[";
    // Never equal to a pid, which would make the row the process's main thread.
    uint64_t last_pid = 0;
    for (size_t i = 0; i < trace_.processes.size(); ++i) last_pid = std::max(last_pid, pid_of(i));
    next_tid_ = last_pid + 1;
    for (size_t i = 0; i < trace_.processes.size(); ++i) put_process(i);
    put_arrows();
    for (const Joined& joined : joined_) WEFT_TRY(put_profile(joined));
    file_.buffer() += "\n]}\n";
    WEFT_TRY(file_.close());
    return summary_;
  }

 private:
  // ---- time ------------------------------------------------------------------------------

  // Shifts come from outside, so sums stop at the ends of the scale instead of going around.
  static int64_t sum(int64_t a, int64_t b) {
    int64_t out = 0;
    if (!__builtin_add_overflow(a, b, &out)) return out;
    return a < 0 ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
  }

  int64_t shifted(size_t process, int64_t ns) const {
    return options_.shift_ns.empty() ? ns : sum(ns, options_.shift_ns[process]);
  }

  void find_base() {
    bool any = false;
    for (size_t i = 0; i < trace_.processes.size(); ++i) {
      for (const Event& event : trace_.processes[i].events) {
        const int64_t at = shifted(i, event.start_ns);
        if (!any || at < base_) base_ = at;
        any = true;
      }
    }
    for (const Joined& joined : joined_)
      base_ = std::min(base_, shifted(joined.process, trace_time(joined, joined.head.first_ns)));
  }

  // A moment of process `process` as the file shows it: never before the base, hence unsigned.
  uint64_t time(size_t process, int64_t ns) const {
    const auto at = static_cast<uint64_t>(shifted(process, ns)) - static_cast<uint64_t>(base_);
    if (!options_.target_time) return at;
    const Environment& environment = trace_.processes[process].environment;
    const double target = environment.to_target_ns(static_cast<double>(at));
    return static_cast<uint64_t>(std::min(std::round(target), 1.8e19));
  }

  uint64_t bytes(size_t process, uint64_t count) const {
    if (!options_.target_time) return count;
    const double target =
        trace_.processes[process].environment.to_target_bytes(static_cast<double>(count));
    return static_cast<uint64_t>(std::min(std::round(target), 9e18));
  }

  // ---- parts -----------------------------------------------------------------------------

  uint64_t pid_of(size_t process) const {
    return uint64_t{trace_.processes[process].environment.rank} + 1;
  }

  void put_other_data() {
    std::string& out = file_.buffer();
    const auto field = [&out](const char* key, std::string_view value, const char* before = ",") {
      out += before;
      append_json_string(out, key);
      out += ':';
      append_json_string(out, value);
    };
    field("weft", version(), "");
    if (trace_.processes.empty()) return;
    const Environment& environment = trace_.processes.front().environment;
    field("plan", environment.plan_name);
    field("plan_hash", environment.plan_hash);
    field("made", environment.predicted ? "predicted" : "measured");
    field("time", options_.target_time ? "target" : "wall");
    field("dilation", text("%.17g", environment.dilation));
    field("shrink", text("%.17g", environment.shrink));
    field("ranks", text("%u", environment.ranks));
  }

  // Starts an event; the caller adds fields and calls end().
  std::string& begin(char phase, uint64_t pid) {
    std::string& out = file_.buffer();
    out += first_ ? "\n{\"ph\":\"" : ",\n{\"ph\":\"";
    first_ = false;
    out += phase;
    out += "\",\"pid\":";
    append_number(out, pid);
    return out;
  }

  void end() {
    file_.buffer() += '}';
    file_.spill();
  }

  void put_time(const char* key, uint64_t ns) {
    file_.buffer() += key;
    append_micros(file_.buffer(), ns);
  }

  void put_tid(uint64_t tid) {
    file_.buffer() += ",\"tid\":";
    append_number(file_.buffer(), tid);
  }

  void put_metadata(uint64_t pid, uint64_t tid, const char* what, const char* key,
                    std::string_view json) {
    std::string& out = begin('M', pid);
    if (tid != 0) put_tid(tid);
    out += ",\"name\":\"";
    out += what;
    out += "\",\"args\":{\"";
    out += key;
    out += "\":";
    out += json;
    out += '}';
    end();
  }

  static std::string quoted(std::string_view raw) {
    std::string out;
    append_json_string(out, raw);
    return out;
  }

  void put_process(size_t index) {
    const Process& process = trace_.processes[index];
    const Environment& environment = process.environment;
    const uint64_t pid = pid_of(index);
    put_metadata(pid, 0, "process_name", "name",
                 quoted(text("rank %u on %s%s", environment.rank,
                             environment.host.empty() ? "unnamed host" : environment.host.c_str(),
                             environment.predicted ? " (predicted)" : "")));
    put_metadata(pid, 0, "process_sort_index", "sort_index", std::to_string(environment.rank));
    layers_.clear();
    tensors_.clear();
    for (const Layer& layer : process.model.layers) layers_.push_back(quoted(layer.name));
    for (const Tensor& tensor : process.model.tensors) tensors_.push_back(quoted(tensor.name));

    // Slices by track, in the order that Rows wants. Stable: what was recorded first stays outside.
    std::vector<uint32_t> order;
    std::vector<uint64_t> starts(process.events.size());
    std::vector<uint64_t> ends(process.events.size());
    for (size_t i = 0; i < process.events.size(); ++i) {
      const Event& event = process.events[i];
      starts[i] = time(index, event.start_ns);
      ends[i] = time(index, event.end_ns());
      if (event.shape == Shape::counter) {
        put_counter(index, event, starts[i]);
      } else {
        order.push_back(static_cast<uint32_t>(i));
      }
    }
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      const TrackId track_a = process.events[a].track;
      const TrackId track_b = process.events[b].track;
      if (track_a != track_b) return track_a < track_b;
      if (starts[a] != starts[b]) return starts[a] < starts[b];
      return ends[a] > ends[b];
    });

    for (size_t from = 0; from < order.size();) {
      const TrackId track = process.events[order[from]].track;
      Rows rows;
      std::vector<uint64_t> tids;
      for (; from < order.size() && process.events[order[from]].track == track; ++from) {
        const Event& event = process.events[order[from]];
        const uint64_t start = starts[order[from]];
        const uint64_t stop = ends[order[from]];
        const size_t row = rows.place(start, stop, is_message(event), is_operation(event));
        if (row == tids.size()) tids.push_back(put_row(index, track, row));
        put_slice(index, event, start, stop - start, tids[row]);
        if (is_message(event))
          halves_.push_back({event.message, start, std::max(start, stop - (stop > start)), pid,
                             tids[row], event.shape == Shape::send});
      }
    }
  }

  uint64_t put_row(size_t index, TrackId track, size_t row) {
    const Process& process = trace_.processes[index];
    const uint64_t tid = next_tid_++;
    std::string name = track < process.tracks.size() ? process.tracks[track].name : "";
    if (name.empty()) name = text("track %u", track);
    if (row > 0) name += text(" (%zu)", row + 1);
    put_metadata(pid_of(index), tid, "thread_name", "name", quoted(name));
    put_metadata(pid_of(index), tid, "thread_sort_index", "sort_index", std::to_string(tid));
    summary_.rows += 1;
    return tid;
  }

  void put_slice(size_t index, const Event& event, uint64_t start, uint64_t duration,
                 uint64_t tid) {
    const bool instant = event.shape == Shape::instant;
    std::string& out = begin(instant ? 'i' : 'X', pid_of(index));
    put_tid(tid);
    put_time(",\"ts\":", start);
    if (instant) {
      out += ",\"s\":\"t\"";
      summary_.instants += 1;
    } else {
      put_time(",\"dur\":", duration);
      summary_.slices += 1;
    }
    out += ",\"cat\":\"";
    out += name_of(event.kind);
    out += "\",\"name\":";
    append_json_string(out, trace_.processes[index].label(event));
    put_args(index, event);
    end();
  }

  void put_args(size_t index, const Event& event) {
    std::string& out = file_.buffer();
    const char* before = ",\"args\":{";
    const auto key = [&](const char* name) {
      out += before;
      out += '"';
      out += name;
      out += "\":";
      before = ",";
    };
    const auto number = [&](const char* name, auto value, auto none) {
      if (value == none) return;
      key(name);
      append_number(out, value);
    };
    number("iteration", event.iteration, kNone);
    if (event.layer < layers_.size()) key("layer"), out += layers_[event.layer];
    if (event.tensor < tensors_.size()) key("tensor"), out += tensors_[event.tensor];
    number("bucket", event.bucket, kNone);
    number("partition", event.partition, kNone16);
    number("operation", event.operation, kNone);
    number("step", event.step, kNone16);
    number("chunk", event.chunk, kNone);
    number("lane", event.lane, kNone16);
    number("peer", event.peer, kNone16);
    number("bytes", bytes(index, event.bytes), uint64_t{0});
    if (event.message != 0) key("message"), append_hex_string(out, event.message);
    if (*before == ',' && before[1] == '\0') out += '}';
  }

  void put_counter(size_t index, const Event& event, uint64_t at) {
    const Process& process = trace_.processes[index];
    std::string& out = begin('C', pid_of(index));
    put_time(",\"ts\":", at);
    // A counter belongs to a process, not to a thread, so its name says whose it is; viewers show
    // it as the name and the key of its value.
    out += ",\"name\":";
    append_json_string(out, event.track < process.tracks.size() ? process.tracks[event.track].name
                                                                : std::string("counter"));
    out += ",\"args\":{";
    append_json_string(out, process.label(event));
    out += ':';
    append_number(out, event.duration_ns);
    out += '}';
    summary_.counters += 1;
    end();
  }

  // ---- arrows ----------------------------------------------------------------------------

  void put_arrow_end(char phase, const Half& half, uint64_t at) {
    std::string& out = begin(phase, half.pid);
    put_tid(half.tid);
    put_time(",\"ts\":", at);
    out += ",\"cat\":\"message\",\"name\":\"message\",\"id\":";
    append_hex_string(out, half.message);
    if (phase == 'f') out += ",\"bp\":\"e\"";
    end();
  }

  // All starts stand before all ends, so that of two at the same moment the start is read first.
  void put_arrows() {
    std::sort(halves_.begin(), halves_.end(), [](const Half& a, const Half& b) {
      return a.message != b.message ? a.message < b.message : a.send > b.send;
    });
    std::vector<Half> arrows;  // sends and receives, taking turns
    for (size_t from = 0; from < halves_.size();) {
      size_t to = from;
      while (to < halves_.size() && halves_[to].message == halves_[from].message) ++to;
      if (to - from == 2 && halves_[from].send && !halves_[from + 1].send) {
        arrows.push_back(halves_[from]);
        arrows.push_back(halves_[from + 1]);
        summary_.flows += 1;
      } else {
        summary_.halves += to - from;
      }
      from = to;
    }
    for (size_t i = 0; i < arrows.size(); i += 2) {
      // Clocks that disagree can put all of the receive before the send.
      if (arrows[i + 1].last < arrows[i].start) {
        std::swap(arrows[i], arrows[i + 1]);
        summary_.backward += 1;
      }
      put_arrow_end('s', arrows[i], arrows[i].start);
    }
    for (size_t i = 0; i < arrows.size(); i += 2)
      put_arrow_end('f', arrows[i + 1], std::max(arrows[i].start, arrows[i + 1].start));
  }

  // ---- profiles --------------------------------------------------------------------------

  struct Joined {
    std::string path;
    size_t process = 0;
    ProfileHead head;
  };

  Result<void> open_profile(const Profile& profile) {
    // Two programs of one run are seldom further apart than this; a profile of another run is.
    constexpr int64_t kBesideNs = 60'000'000'000;
    Joined joined{profile.path, 0, {}};
    WEFT_ASSIGN(joined.head, read_profile_head(profile.path));
    const std::optional<uint32_t> rank = profile.rank ? profile.rank : joined.head.rank;
    if (!rank)
      return error(Code::invalid_argument,
                   "%s does not say of which rank it is; name it as RANK=FILE",
                   profile.path.c_str());
    while (joined.process < trace_.processes.size() &&
           trace_.processes[joined.process].environment.rank != *rank)
      ++joined.process;
    if (joined.process == trace_.processes.size())
      return error(Code::invalid_argument, "%s is of rank %u, of which the run has no trace",
                   profile.path.c_str(), *rank);
    const Process& process = trace_.processes[joined.process];
    if (process.clock_samples.empty())
      return error(Code::invalid_argument,
                   "the trace of rank %u has no samples of the wall clock, by which profiles count",
                   *rank);
    int64_t first = 0, last = 0;
    for (const Event& event : process.events) {
      first = last == 0 ? event.start_ns : std::min(first, event.start_ns);
      last = std::max(last, event.end_ns());
    }
    if (trace_time(joined, joined.head.last_ns) < sum(first, -kBesideNs) ||
        trace_time(joined, joined.head.first_ns) > sum(last, kBesideNs))
      return error(Code::invalid_argument,
                   "%s is not of this run: it was recorded more than a minute before or after it",
                   profile.path.c_str());
    joined_.push_back(std::move(joined));
    return {};
  }

  // By the sample that was taken next to it: a wall clock may be steered meanwhile.
  int64_t trace_time(const Joined& joined, int64_t wall_ns) const {
    const auto& samples = trace_.processes[joined.process].clock_samples;
    const auto distance = [wall_ns](const ClockSample& sample) {
      return std::abs(static_cast<double>(wall_ns) - static_cast<double>(sample.wall_ns));
    };
    const ClockSample& near =
        *std::min_element(samples.begin(), samples.end(),
                          [&](const auto& a, const auto& b) { return distance(a) < distance(b); });
    return sum(near.trace_ns, sum(wall_ns, -near.wall_ns));
  }

  Result<void> put_profile(const Joined& joined) {
    const uint32_t rank = trace_.processes[joined.process].environment.rank;
    std::map<std::string, uint64_t> numbers;  // its processes and threads have others here
    const auto number = [&](const std::string& of) {
      const auto [at, made] = numbers.try_emplace(of, next_tid_);
      if (made) ++next_tid_;
      return at->second;
    };
    const auto put = [&](nlohmann::json& event, std::optional<int64_t> wall_ns) {
      const auto phase = event.find("ph");
      if (phase == event.end() || !phase->is_string()) return;
      const bool metadata = *phase == "M";
      if (!metadata && !wall_ns) return;
      const std::string pid = event.contains("pid") ? event["pid"].dump() : "";
      event["pid"] = number(pid);
      if (event.contains("tid")) event["tid"] = number(pid + "/" + event["tid"].dump());
      // Arrows of two profiles may have the same numbers.
      if (event.contains("id")) event["id"] = text("%u/", rank) + event["id"].dump();
      if (metadata && event.contains("args") && event["args"].is_object()) {
        auto& words = event["args"];
        if (event.contains("name") && event["name"] == "process_name" && words.contains("name") &&
            words["name"].is_string())
          words["name"] = text("rank %u, profiler: ", rank) + words["name"].get<std::string>();
      }
      event.erase("ts");
      std::string& out = file_.buffer();
      out += first_ ? "\n" : ",\n";
      first_ = false;
      out += event.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
      if (wall_ns && !metadata) {
        out.pop_back();
        put_time(",\"ts\":", time(joined.process, trace_time(joined, *wall_ns)));
        out += '}';
      }
      summary_.joined += metadata ? 0 : 1;
      file_.spill();
    };
    return read_profile(joined.path, joined.head, put);
  }

  const Trace& trace_;
  const ChromeOptions& options_;
  TextFile file_;
  std::vector<Joined> joined_;
  ChromeSummary summary_;
  int64_t base_ = 0;
  bool first_ = true;
  uint64_t next_tid_ = 1;
  std::vector<std::string> layers_;  // of the process at hand, as JSON strings
  std::vector<std::string> tensors_;
  std::vector<Half> halves_;
};

}  // namespace

Result<ChromeSummary> write_chrome(const Trace& trace, const std::string& path,
                                   const ChromeOptions& options) {
  if (!options.shift_ns.empty() && options.shift_ns.size() != trace.processes.size())
    return error(Code::invalid_argument, "%zu shifts for %zu processes", options.shift_ns.size(),
                 trace.processes.size());
  if (!options.profiles.empty() && options.target_time)
    return error(Code::invalid_argument,
                 "a profile has the time of the machine that it was recorded on: it is joined to "
                 "the run's own time, not to the target's");
  WEFT_ASSIGN(TextFile file, TextFile::create(path));
  return ChromeWriter(trace, options, std::move(file)).write();
}

}  // namespace weft::trace
