// A trace as arrays that NumPy reads as they stand: the format .npy, version 1.0, a structured
// array a table. What a row consists of is said once (columns_of, below): one sink makes the header
// of it, another one the bytes, so the two cannot differ.
#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <tuple>
#include <unordered_map>

#include "format.h"
#include "json.h"

namespace weft::trace {
namespace {

// Two moments within it have a difference.
constexpr int64_t kFarthest = (int64_t{1} << 62) - 1;

// ---- texts and numbers ---------------------------------------------------------------------

// A text of a table, as its place in strings.json.
using TextId = uint32_t;

class Texts {
 public:
  Texts() { id_of(""); }  // 0: no text

  TextId id_of(std::string_view text) {
    auto [entry, fresh] = ids_.try_emplace(std::string(text), static_cast<TextId>(texts_.size()));
    if (fresh) texts_.push_back(&entry->first);
    return entry->second;
  }

  Result<void> write(const std::string& path) const {
    WEFT_ASSIGN(TextFile file, TextFile::create(path));
    const char* before = "[";
    for (const std::string* text : texts_) {
      file.buffer() += before;
      append_json_string(file.buffer(), *text);
      file.spill();
      before = ",\n";
    }
    file.buffer() += "]\n";
    return file.close();
  }

 private:
  std::unordered_map<std::string, TextId> ids_;
  std::vector<const std::string*> texts_;  // by id; a map's keys stay where they are
};

// A place or a number that may not be said.
int64_t number_or_none(uint32_t value) { return value == kNone ? -1 : int64_t{value}; }
int64_t number_or_none(uint16_t value) { return value == kNone16 ? -1 : int64_t{value}; }

// Times and bytes of one process, as the tables have them. Exact where a lab scaled nothing.
class Scale {
 public:
  Scale(const Environment& environment, bool target)
      : dilation_(target ? environment.dilation : 1), shrink_(target ? environment.shrink : 1) {}

  int64_t time(int64_t ns) const {
    if (dilation_ == 1 && shrink_ == 1) return ns;
    const long double target = static_cast<long double>(ns) / dilation_ * shrink_;
    return std::llround(std::clamp(target, static_cast<long double>(-kFarthest),
                                   static_cast<long double>(kFarthest)));
  }
  uint64_t bytes(uint64_t count) const {
    if (shrink_ == 1) return count;
    const long double target = static_cast<long double>(count) * shrink_;
    return target < 1.8e19L ? static_cast<uint64_t>(target + 0.5L) : ~uint64_t{0};
  }
  // Both ends are converted, so that what touches or nests still does.
  int64_t duration(const Event& event) const { return time(event.end_ns()) - time(event.start_ns); }

 private:
  long double dilation_, shrink_;
};

// ---- rows ----------------------------------------------------------------------------------

// The names and types of a table's columns.
class Header {
 public:
  void number(const char* name, int64_t) { add(name, "<i8"); }
  void natural(const char* name, uint64_t) { add(name, "<u8"); }
  void text(const char* name, TextId) { add(name, "<u4"); }

  // The first bytes of the file: their length is a multiple of 64.
  std::string of_rows(size_t rows) const {
    std::string words = "{'descr': [" + columns_ + "], 'fortran_order': False, 'shape': (" +
                        std::to_string(rows) + ",), }";
    constexpr size_t kBefore = 10;
    words.append(63 - (kBefore + words.size()) % 64, ' ');
    words += '\n';
    std::string out("\x93NUMPY\x01\x00", 8);
    out += static_cast<char>(words.size() & 0xff);
    out += static_cast<char>(words.size() >> 8);
    return out + words;
  }

 private:
  void add(const char* name, const char* type) {
    columns_ += weft::text("('%s', '%s'), ", name, type);
  }

  std::string columns_;
};

// The bytes of rows.
class Body {
 public:
  explicit Body(std::string& out) : out_(out) {}
  void number(const char*, int64_t value) { raw(value); }
  void natural(const char*, uint64_t value) { raw(value); }
  void text(const char*, TextId value) { raw(value); }

 private:
  template <typename T>
  void raw(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  std::string& out_;
};

// What the rows of one process have in common.
struct Context {
  int64_t rank = 0;
  TextId host = 0;
  Scale scale;
  std::vector<TextId> names, tracks, track_types, layers, tensors;

  static TextId at(const std::vector<TextId>& ids, size_t place) {
    return place < ids.size() ? ids[place] : 0;
  }
};

Context context_of(const Process& process, bool target, Texts& texts) {
  Context out{process.environment.rank,
              texts.id_of(process.environment.host),
              Scale(process.environment, target),
              {},
              {},
              {},
              {},
              {}};
  for (const std::string& name : process.names) out.names.push_back(texts.id_of(name));
  for (const Track& track : process.tracks) {
    out.tracks.push_back(texts.id_of(track.name));
    out.track_types.push_back(texts.id_of(name_of(track.type)));
  }
  for (const Layer& layer : process.model.layers) out.layers.push_back(texts.id_of(layer.name));
  for (const Tensor& tensor : process.model.tensors)
    out.tensors.push_back(texts.id_of(tensor.name));
  return out;
}

// A counter's value; processor time is time.
int64_t value_of(const Event& event, const Scale& scale) {
  if (event.shape != Shape::counter) return 0;
  return event.kind == Kind::processor_time
             ? scale.time(std::clamp(event.duration_ns, -kFarthest, kFarthest))
             : event.duration_ns;
}

struct EventRow {
  const Context& of;
  const Event& event;
  TextId shape = 0;
};

template <typename Sink>
void columns_of(const EventRow& row, Sink& sink) {
  const auto& [of, event, shape] = row;
  sink.number("start_ns", of.scale.time(event.start_ns));
  sink.number("duration_ns", of.scale.duration(event));
  sink.number("value", value_of(event, of.scale));
  sink.natural("bytes", of.scale.bytes(event.bytes));
  sink.natural("message", event.message);
  sink.number("rank", of.rank);
  sink.number("iteration", number_or_none(event.iteration));
  sink.number("layer_index", number_or_none(event.layer));
  sink.number("tensor_index", number_or_none(event.tensor));
  sink.number("bucket", number_or_none(event.bucket));
  sink.number("partition", number_or_none(event.partition));
  sink.number("operation", number_or_none(event.operation));
  sink.number("step", number_or_none(event.step));
  sink.number("chunk", number_or_none(event.chunk));
  sink.number("lane", number_or_none(event.lane));
  sink.number("peer", number_or_none(event.peer));
  sink.text("shape", shape);
  sink.text("name", Context::at(of.names, event.name));
  sink.text("layer", Context::at(of.layers, event.layer));
  sink.text("tensor", Context::at(of.tensors, event.tensor));
  sink.text("track", Context::at(of.tracks, event.track));
  sink.text("track_type", Context::at(of.track_types, event.track));
  sink.text("host", of.host);
}

struct MessageRow {
  EventRow send, receive;
  TextId kind = 0;
};

template <typename Sink>
void columns_of(const MessageRow& row, Sink& sink) {
  const auto& [from, send, sent] = row.send;
  const auto& [to, receive, received] = row.receive;
  sink.number("send_start_ns", from.scale.time(send.start_ns));
  sink.number("send_duration_ns", from.scale.duration(send));
  sink.number("receive_start_ns", to.scale.time(receive.start_ns));
  sink.number("receive_duration_ns", to.scale.duration(receive));
  sink.natural("bytes", from.scale.bytes(send.bytes));
  sink.natural("message", send.message);
  sink.number("sender", from.rank);
  sink.number("receiver", to.rank);
  sink.number("iteration", number_or_none(send.iteration));
  sink.number("bucket", number_or_none(send.bucket));
  sink.number("operation", number_or_none(send.operation));
  sink.number("step", number_or_none(send.step));
  sink.number("chunk", number_or_none(send.chunk));
  sink.number("lane", number_or_none(send.lane));
  sink.text("kind", row.kind);
}

struct ProcessRow {
  const Context& of;
  const Process& process;
};

template <typename Sink>
void columns_of(const ProcessRow& row, Sink& sink) {
  const Environment& environment = row.process.environment;
  sink.number("rank", row.of.rank);
  sink.number("host_index", environment.host_index);
  sink.number("cores", environment.cores);
  sink.natural("events", row.process.events.size());
  sink.natural("dropped", row.process.dropped);
  sink.text("host", row.of.host);
}

struct LayerRow {
  const Context& of;
  size_t place;
};

template <typename Sink>
void columns_of(const LayerRow& row, Sink& sink) {
  sink.number("rank", row.of.rank);
  sink.number("layer_index", static_cast<int64_t>(row.place));
  sink.text("layer", Context::at(row.of.layers, row.place));
}

struct TensorRow {
  const Context& of;
  size_t place;
  const Tensor& tensor;
};

template <typename Sink>
void columns_of(const TensorRow& row, Sink& sink) {
  sink.natural("bytes", row.of.scale.bytes(row.tensor.bytes));
  sink.number("rank", row.of.rank);
  sink.number("tensor_index", static_cast<int64_t>(row.place));
  sink.number("produced_by", number_or_none(row.tensor.produced_by));
  sink.number("updated_by", number_or_none(row.tensor.updated_by));
  sink.number("consumed_by", number_or_none(row.tensor.consumed_by));
  sink.text("tensor", Context::at(row.of.tensors, row.place));
}

struct ClockRow {
  const Context& of;
  const ClockSample& sample;
};

template <typename Sink>
void columns_of(const ClockRow& row, Sink& sink) {
  sink.number("rank", row.of.rank);
  sink.number("trace_ns", row.of.scale.time(row.sample.trace_ns));
  sink.number("wall_ns", row.sample.wall_ns);
}

struct PingRow {
  const Context& of;
  const PingSample& ping;
};

template <typename Sink>
void columns_of(const PingRow& row, Sink& sink) {
  sink.number("rank", row.of.rank);
  sink.number("peer", row.ping.peer);
  sink.number("loaded", row.ping.loaded);
  sink.number("t0", row.of.scale.time(row.ping.t0));
  sink.number("t1", row.of.scale.time(row.ping.t1));
  sink.number("t2", row.of.scale.time(row.ping.t2));
  sink.number("t3", row.of.scale.time(row.ping.t3));
}

struct ProbeRow {
  const Context& of;
  const ProbeResult& result;
  TextId type = 0, scope = 0;
};

// As it was measured: a lab slows the network and not the processor.
template <typename Sink>
void columns_of(const ProbeRow& row, Sink& sink) {
  const ProbeResult& result = row.result;
  sink.number("rank", row.of.rank);
  sink.number("peer", number_or_none(result.peer));
  sink.number("flows", result.flows);
  sink.number("reverse", result.reverse);
  sink.number("chunk_bytes", result.chunk_bytes);
  sink.natural("bytes", result.bytes);
  sink.number("duration_ns", result.duration_ns);
  sink.natural("chunks", result.chunks);
  sink.number("cpu_send_ns", result.cpu_send_ns);
  sink.number("cpu_receive_ns", result.cpu_receive_ns);
  sink.text("type", row.type);
  sink.text("scope", row.scope);
}

struct NoteRow {
  const Context& of;
  int64_t time_ns = 0;
  TextId key = 0, value = 0;
};

template <typename Sink>
void columns_of(const NoteRow& row, Sink& sink) {
  sink.number("rank", row.of.rank);
  sink.number("time_ns", row.of.scale.time(row.time_ns));
  sink.text("key", row.key);
  sink.text("value", row.value);
}

// ---- tables --------------------------------------------------------------------------------

// An event of the trace, and where it stands in time.
struct Place {
  int64_t start_ns;
  uint32_t process;
  uint32_t event;

  friend bool operator<(const Place& a, const Place& b) {
    return std::tie(a.start_ns, a.process, a.event) < std::tie(b.start_ns, b.process, b.event);
  }
};

struct Half {
  uint64_t message;
  bool receive;
  Place place;
};

class TablesWriter {
 public:
  TablesWriter(const Trace& trace, const std::string& folder, const TablesOptions& options)
      : trace_(trace), folder_(folder) {
    for (const Process& process : trace.processes)
      contexts_.push_back(context_of(process, options.target_time, texts_));
    for (auto kind = Kind::other; is_known(kind); kind = static_cast<Kind>(kinds_.size()))
      kinds_.push_back(texts_.id_of(name_of(kind)));
    for (size_t i = 0; i < shapes_.size(); ++i)
      shapes_[i] = texts_.id_of(name_of(static_cast<Shape>(i)));
  }

  Result<TablesSummary> write() {
    WEFT_TRY(write_events());
    WEFT_TRY(write_messages());
    WEFT_TRY(write_processes());
    WEFT_TRY(write_models());
    WEFT_TRY(write_samples());
    WEFT_TRY(write_notes());
    WEFT_TRY(texts_.write(folder_ + "/strings.json"));
    return std::move(summary_);
  }

 private:
  // ---- one table ---------------------------------------------------------------------------

  // `fill` calls its argument with each row.
  template <typename Row, typename Fill>
  Result<void> table(const char* name, const Row& example, size_t rows, Fill fill) {
    WEFT_ASSIGN(TextFile file, TextFile::create(folder_ + "/" + name + ".npy"));
    Header header;
    columns_of(example, header);
    file.buffer() += header.of_rows(rows);
    Body body(file.buffer());
    size_t written = 0;
    fill([&](const Row& row) {
      columns_of(row, body);
      file.spill();
      ++written;
    });
    WEFT_CHECK(written == rows);
    WEFT_TRY(file.close());
    summary_.rows.emplace_back(name, rows);
    return {};
  }

  EventRow row_of(const Place& place) const {
    const Event& event = trace_.processes[place.process].events[place.event];
    return {contexts_[place.process], event, shapes_[static_cast<size_t>(event.shape)]};
  }

  // ---- events and messages -----------------------------------------------------------------

  Result<void> write_events() {
    std::vector<std::vector<Place>> kinds(kinds_.size());
    for (uint32_t p = 0; p < trace_.processes.size(); ++p) {
      const std::vector<Event>& events = trace_.processes[p].events;
      for (uint32_t e = 0; e < events.size(); ++e)
        kinds[static_cast<size_t>(events[e].kind)].push_back({events[e].start_ns, p, e});
    }
    for (size_t kind = 0; kind < kinds.size(); ++kind) {
      std::vector<Place>& places = kinds[kind];
      std::sort(places.begin(), places.end());
      WEFT_TRY(table(name_of(static_cast<Kind>(kind)), EventRow{nobody_, no_event_}, places.size(),
                     [&](auto put) {
                       for (const Place& place : places) put(row_of(place));
                     }));
      places = {};
    }
    return {};
  }

  // Those of which there is one send and one receive.
  Result<void> write_messages() {
    std::vector<Half> halves;
    for (uint32_t p = 0; p < trace_.processes.size(); ++p) {
      const std::vector<Event>& events = trace_.processes[p].events;
      for (uint32_t e = 0; e < events.size(); ++e) {
        const bool receive = events[e].shape == Shape::receive;
        if ((receive || events[e].shape == Shape::send) && events[e].message != 0)
          halves.push_back({events[e].message, receive, {events[e].start_ns, p, e}});
      }
    }
    std::sort(halves.begin(), halves.end(), [](const Half& a, const Half& b) {
      return std::tie(a.message, a.receive) < std::tie(b.message, b.receive);
    });
    std::vector<std::pair<Place, Place>> messages;
    for (size_t from = 0, to = 0; from < halves.size(); from = to) {
      while (to < halves.size() && halves[to].message == halves[from].message) ++to;
      if (to - from == 2 && !halves[from].receive && halves[from + 1].receive)
        messages.emplace_back(halves[from].place, halves[from + 1].place);
      else
        summary_.halves += to - from;
    }
    halves = {};
    std::sort(messages.begin(), messages.end());
    return table(
        "messages", MessageRow{{nobody_, no_event_}, {nobody_, no_event_}}, messages.size(),
        [&](auto put) {
          for (const auto& [sent, received] : messages) {
            const EventRow send = row_of(sent);
            put(MessageRow{send, row_of(received), kinds_[static_cast<size_t>(send.event.kind)]});
          }
        });
  }

  // ---- what else a process recorded --------------------------------------------------------

  Result<void> write_processes() {
    return table("processes", ProcessRow{nobody_, nothing_}, trace_.processes.size(),
                 [&](auto put) {
                   for (size_t p = 0; p < contexts_.size(); ++p)
                     put(ProcessRow{contexts_[p], trace_.processes[p]});
                 });
  }

  // `member` says which list of a process or its model.
  template <typename Member>
  size_t total(Member member) const {
    size_t sum = 0;
    for (const Process& process : trace_.processes) sum += member(process).size();
    return sum;
  }

  // A table with a row for each element of a list that every process has.
  template <typename Row, typename Member, typename Make>
  Result<void> lists(const char* name, const Row& example, Member member, Make make) {
    return table(name, example, total(member), [&](auto put) {
      for (size_t p = 0; p < contexts_.size(); ++p) {
        const auto& list = member(trace_.processes[p]);
        for (size_t i = 0; i < list.size(); ++i) put(make(contexts_[p], i, list[i]));
      }
    });
  }

  Result<void> write_models() {
    WEFT_TRY(lists(
        "layers", LayerRow{nobody_, 0},
        [](const Process& p) -> const auto& { return p.model.layers; },
        [](const Context& of, size_t i, const Layer&) {
          return LayerRow{of, i};
        }));
    return lists(
        "tensors", TensorRow{nobody_, 0, Tensor{}},
        [](const Process& p) -> const auto& { return p.model.tensors; },
        [](const Context& of, size_t i, const Tensor& tensor) {
          return TensorRow{of, i, tensor};
        });
  }

  Result<void> write_samples() {
    WEFT_TRY(lists(
        "clock_samples", ClockRow{nobody_, ClockSample{}},
        [](const Process& p) -> const auto& { return p.clock_samples; },
        [](const Context& of, size_t, const ClockSample& sample) {
          return ClockRow{of, sample};
        }));
    WEFT_TRY(lists(
        "pings", PingRow{nobody_, PingSample{}},
        [](const Process& p) -> const auto& { return p.pings; },
        [](const Context& of, size_t, const PingSample& ping) {
          return PingRow{of, ping};
        }));
    return lists(
        "probe_results", ProbeRow{nobody_, ProbeResult{}},
        [](const Process& p) -> const auto& { return p.probe; },
        [&](const Context& of, size_t, const ProbeResult& result) {
          return ProbeRow{of, result, texts_.id_of(name_of(result.type)),
                          texts_.id_of(name_of(result.scope))};
        });
  }

  Result<void> write_notes() {
    return lists(
        "notes", NoteRow{nobody_}, [](const Process& p) -> const auto& { return p.notes; },
        [&](const Context& of, size_t, const Note& note) {
          return NoteRow{of, note.time_ns, texts_.id_of(note.key), texts_.id_of(note.value)};
        });
  }

  const Trace& trace_;
  const std::string& folder_;
  Texts texts_;
  std::vector<Context> contexts_;   // by process
  std::vector<TextId> kinds_;       // by Kind, of those that are known
  std::array<TextId, 6> shapes_{};  // by Shape
  TablesSummary summary_;
  // Examples, from which headers are made.
  const Process nothing_;
  const Event no_event_;
  const Context nobody_{0, 0, Scale(nothing_.environment, false), {}, {}, {}, {}, {}};
};

Result<void> make_folder(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code failed;
  fs::create_directories(folder, failed);
  if (!failed && !fs::is_directory(folder, failed))
    failed = std::make_error_code(std::errc::file_exists);
  if (failed) return io_error(failed.value(), "cannot make the folder %s", folder.c_str());
  if (!fs::is_empty(folder, failed))
    return error(Code::invalid_argument, "%s is not an empty folder; name a new one",
                 folder.c_str());
  return {};
}

}  // namespace

Result<TablesSummary> write_tables(const Trace& trace, const std::string& folder,
                                   const TablesOptions& options) {
  WEFT_TRY(make_folder(folder));
  return TablesWriter(trace, folder, options).write();
}

}  // namespace weft::trace
