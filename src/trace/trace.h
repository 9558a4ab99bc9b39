// trace: what happened. The first of weft's two nouns; docs/trace_format.md is its contract.
//
// A run is a folder with one file a process. A file holds records of one process on one host, in
// blocks that stand alone: each has a length, a checksum and the names that it uses, so that a
// killed writer or a damaged disk costs the blocks that were hit and no others. A measured and a
// predicted run are the same type.
//
//   run/                  a Trace
//     rank-0.weft         a Process: environment, model, events, clock samples, probe, notes
//     rank-1.weft
//
// Times are nanoseconds on the clock of the process's host, as they were read; nothing is aligned
// here. Bytes are the bytes that were really moved. When a lab scaled either, `Environment` holds
// the factors, and only presentation converts (Environment::to_target).
//
// Threads: Writer and Reader are used by one thread at a time. Values are plain data.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/base.h"

namespace weft::trace {

// The format that this library writes. A reader refuses a newer one by name.
inline constexpr uint16_t kFormatVersion = 1;

inline constexpr uint32_t kNone = 0xffffffff;  // "not said", for the 32-bit fields of an Event
inline constexpr uint16_t kNone16 = 0xffff;    // the same for the 16-bit ones

// The first iterations of a run find connections and queues cold: they are recorded, and do not
// count.
inline constexpr uint32_t kWarmUpIterations = 2;

// The shape of a record. Reaches disk: append, never renumber.
enum class Shape : uint8_t {
  span = 1,     // [start, start + duration)
  instant = 2,  // a moment; duration is 0
  counter = 3,  // a value at a moment; `value` holds it
  send = 4,     // the sending half of a message: a span from the first byte handed to the kernel
                // to the last
  receive = 5,  // the receiving half: a span from the first byte taken from the kernel to the
                // last; shares `message` with its send
};

// What a record is about. Reaches disk: append, never renumber.
enum class Kind : uint8_t {
  other = 0,
  iteration = 1,        // one training step of this rank, from start of forward to the next
  forward = 2,          // device compute of one layer, forward
  backward = 3,         // device compute of one layer, backward
  update = 4,           // the optimizer's step for one layer or tensor
  gradient_ready = 5,   // instant: the framework handed over a gradient
  tensor_done = 6,      // instant: the reduced gradient may be used
  operation = 7,        // one collective operation (a partition of a bucket), start to end
  chunk = 8,            // one chunk of an operation, as a send or a receive
  wait = 9,             // a thread of the program waits for communication
  barrier = 10,         // an explicit barrier
  broadcast = 11,       // a broadcast operation
  control = 12,         // instant: a message of the protocol itself was handed over or taken
  tcp_info = 13,        // counter: one field of TCP_INFO of a lane
  reduce = 14,          // adding received data to local data
  probe = 15,           // the probe's own traffic
  admitted = 16,        // instant: an operation was put in the common order
  processor_time = 17,  // counter: how much of a compute span was processor time
  data_loading = 18,    // a thread of the program fetches or prepares its next data
  host = 19,            // other work of a thread of the program, which it gave a name
  memory = 20,          // counter: bytes that the program has of the memory that `name` names
};

const char* name_of(Shape shape);
const char* name_of(Kind kind);

// The key of the note that says how many marks of the program made no sense (weft/mark.h).
inline constexpr const char* kMarksRefused = "marks_refused";

// Index into Process::names.
using NameId = uint32_t;
using TrackId = uint16_t;

// One record. 72 bytes, written as they stand (little-endian), so a field is never reused with
// another meaning.
struct Event {
  int64_t start_ns = 0;
  int64_t duration_ns = 0;  // counters: the value
  uint64_t message = 0;     // 0: none; the same for a send and its receive, unique in the run
  uint64_t bytes = 0;
  NameId name = kNone;  // free name; most events are named by kind, layer and tensor
  uint32_t iteration = kNone;
  uint32_t tensor = kNone;  // index into Process::model.tensors
  uint32_t bucket = kNone;
  uint32_t operation = kNone;    // place in the common order of operations
  uint32_t chunk = kNone;        // within its operation and step
  uint16_t layer = kNone16;      // index into Process::model.layers
  uint16_t partition = kNone16;  // within its bucket
  uint16_t step = kNone16;       // step of the operation's algorithm
  TrackId track = 0;             // index into Process::tracks
  uint16_t lane = kNone16;
  uint16_t peer = kNone16;  // the other rank of a message
  Shape shape = Shape::span;
  Kind kind = Kind::other;
  uint16_t reserved = 0;

  int64_t end_ns() const { return shape == Shape::counter ? start_ns : start_ns + duration_ns; }
  friend bool operator==(const Event&, const Event&) = default;
};
static_assert(sizeof(Event) == 72);

// The record that says that the work of `span` (forward, backward, update) is the processor's, and
// took so many nanoseconds of its time: more than the span lasted if several threads worked, less
// if they waited for a core. It has the span's track, start, iteration, layer and tensor.
Event processor_time_of(const Event& span, int64_t ns);

// Why `event` may not stand in a trace, or null: a negative duration, an instant that lasts, an
// unknown shape, a time further than 2^62 ns from zero. Cheap enough for every record.
const char* flaw_of(const Event& event);

// A row of a timeline: a thread, a device stream, or one direction of a lane.
enum class TrackType : uint8_t { thread = 1, stream = 2, lane_out = 3, lane_in = 4, control = 5 };
const char* name_of(TrackType type);

struct Track {
  TrackType type = TrackType::thread;
  std::string name;  // "device", "lane 2 to rank 1"
  uint16_t lane = kNone16;
  uint16_t peer = kNone16;
  friend bool operator==(const Track&, const Track&) = default;
};

struct Layer {
  std::string name;
  friend bool operator==(const Layer&, const Layer&) = default;
};

// One gradient: which layer's backward produces it, which update consumes it, and which layer's
// next forward needs that update.
struct Tensor {
  std::string name;
  uint64_t bytes = 0;
  uint32_t produced_by = kNone;  // layer index
  uint32_t updated_by = kNone;   // layer index of the update that consumes it
  uint32_t consumed_by = kNone;  // layer index of the forward that waits for that update
  friend bool operator==(const Tensor&, const Tensor&) = default;
};

struct Model {
  std::string name;
  std::vector<Layer> layers;  // in forward order
  std::vector<Tensor> tensors;
  friend bool operator==(const Model&, const Model&) = default;
};

// The host's trace clock and its wall clock, read together.
struct ClockSample {
  int64_t trace_ns = 0;
  int64_t wall_ns = 0;
  friend bool operator==(const ClockSample&, const ClockSample&) = default;
};

// A question to `peer` and its answer: t0 and t3 on this host's clock, t1 and t2 on the peer's.
// The true offset lies within half of (t3 - t0) - (t2 - t1) of ((t1 - t0) + (t2 - t3)) / 2.
struct PingSample {
  uint32_t peer = 0;
  uint32_t loaded = 0;  // 1: taken while the link was busy
  int64_t t0 = 0, t1 = 0, t2 = 0, t3 = 0;
  friend bool operator==(const PingSample&, const PingSample&) = default;
};

// What one step of the probe measured. Reaches disk: append, never renumber.
enum class ProbeType : uint8_t {
  rate = 1,      // bytes moved in `duration_ns` over `flows` connections from this rank to peer
  copy = 2,      // memory to memory, bytes in duration
  reduce = 3,    // adding fp32 to fp32
  checksum = 4,  // the chunk checksum
};
enum class ProbeScope : uint8_t {
  local = 0,
  pair = 1,
  ring = 2
};  // alone; or all neighbours at once
const char* name_of(ProbeType type);
const char* name_of(ProbeScope scope);

struct ProbeResult {
  ProbeType type = ProbeType::rate;
  ProbeScope scope = ProbeScope::local;
  uint16_t flows = 0;
  uint16_t reverse = 0;  // 1: against the ring's direction
  uint16_t reserved = 0;
  uint32_t peer = kNone;
  uint32_t chunk_bytes = 0;
  uint64_t bytes = 0;  // received (rate) or processed
  int64_t duration_ns = 0;
  uint64_t chunks = 0;
  int64_t cpu_send_ns = 0;  // processor time of the sending thread for this
  int64_t cpu_receive_ns = 0;
  friend bool operator==(const ProbeResult&, const ProbeResult&) = default;
};

// Where and how the process ran.
struct Environment {
  std::string weft_version;
  std::string host;  // name of the host; one clock domain a host
  uint32_t host_index = 0;
  uint32_t rank = 0;
  uint32_t ranks = 1;
  uint32_t cores = 0;
  std::string kernel;
  std::string congestion_control;
  std::map<std::string, std::string> sysctls;  // net.ipv4.tcp_wmem and others that matter
  std::string plan_name;
  std::string plan_hash;
  std::string plan_text;   // the canonical plan, so that a run explains itself
  bool predicted = false;  // made by the replayer, not by a run
  // A lab divides time and bytes by known factors; both are 1 outside a lab.
  double dilation = 1;
  double shrink = 1;
  bool emulated_compute = false;
  std::map<std::string, std::string> lab;  // link, flow, hosts, seed, slow, clock, ...

  // Wall nanoseconds of this run as nanoseconds of the target cluster, and bytes likewise.
  double to_target_ns(double wall_ns) const { return wall_ns / dilation * shrink; }
  double to_target_bytes(double real_bytes) const { return real_bytes * shrink; }
  friend bool operator==(const Environment&, const Environment&) = default;
};

// A rare fact, as text: {"lane 2 reconnected", "after 3 ms"}.
struct Note {
  int64_t time_ns = 0;
  std::string key;
  std::string value;
  friend bool operator==(const Note&, const Note&) = default;
};

// Everything that one process recorded.
struct Process {
  Environment environment;
  Model model;
  std::vector<std::string> names;  // interned; Event::name indexes it
  std::vector<Track> tracks;
  std::vector<Event> events;  // in order of start within a block; sort() orders them all
  std::vector<ClockSample> clock_samples;
  std::vector<PingSample> pings;
  std::vector<ProbeResult> probe;
  std::vector<Note> notes;
  uint64_t dropped = 0;  // records that capture had no room for

  void sort();  // by (start, longer first)
  // The name to show for an event: its own, or kind with layer or tensor.
  std::string label(const Event& event) const;
};

// What a reader could not use, in words and in numbers. Empty means that the file is whole.
struct Damage {
  std::string file;
  uint64_t blocks_lost = 0;  // damaged or missing by their sequence numbers
  uint64_t bytes_lost = 0;
  bool unfinished = false;  // no closing block: the writer was killed, or the end is cut off
  std::vector<std::string> details;  // bounded; the first few, each with its offset
  bool any() const { return blocks_lost != 0 || bytes_lost != 0 || unfinished; }
};

// A file as a file.
struct FileFacts {
  std::string path;
  uint16_t format = 0;
  std::string written_by;  // version of the weft that wrote it; empty when its header is lost
  uint64_t bytes = 0;
  uint64_t blocks = 0;  // whole ones
  uint64_t events = 0;  // in those, also when ReadOptions::events is false
};

struct Trace {
  std::vector<Process> processes;  // by rank
  std::vector<Damage> damage;      // one a file that is not whole, or that holds newer records
  std::vector<FileFacts> files;    // of `processes`, in the same order; empty when made in memory
  const Process* of_rank(uint32_t rank) const;
};

// ---- writing -----------------------------------------------------------------------------

// Writes one process's file, block by block. A block is on disk (handed to the kernel) when the
// call that filled it returns; close() adds the counts that prove the file complete. Destroyed
// without close(), a writer keeps what it was given, and the file says that it is unfinished.
//
// Fails with invalid_argument, and takes nothing of that call, when a value may not stand in a
// file: an event with a flaw_of(), with a track, name, layer or tensor that was not defined before.
// Fails with io when a write does; the block is lost then, a reader will know, and later calls may
// work.
class Writer {
 public:
  // The file is its owner's alone (0600). An older trace of this user is replaced; anything else
  // that has the name, and every link, is refused and stays as it is. `files` outlives the writer.
  static Result<std::unique_ptr<Writer>> create(const std::string& path,
                                                const Environment& environment,
                                                Files& files = kernel_files());
  virtual ~Writer() = default;

  // Definitions may come at any time before the events that use them, and are repeated by the
  // writer now and then, so that losing one copy loses nothing.
  virtual Result<void> model(const Model& model) = 0;
  virtual Result<void> track(TrackId id, const Track& track) = 0;
  virtual Result<void> name(NameId id, std::string_view name) = 0;

  // Buffers up to a block (64 KiB); flush() ends the block early. The others write at once.
  virtual Result<void> events(std::span<const Event> events) = 0;
  virtual Result<void> clock_samples(std::span<const ClockSample> samples) = 0;
  virtual Result<void> pings(std::span<const PingSample> samples) = 0;
  virtual Result<void> probe(std::span<const ProbeResult> results) = 0;
  virtual Result<void> note(const Note& note) = 0;
  virtual Result<void> dropped(uint64_t total) = 0;
  virtual Result<void> flush() = 0;
  virtual Result<void> close() = 0;
};

// Writes a whole Process (used by the replayer, tools and tests).
Result<void> write(const std::string& path, const Process& process);
// The file name of a rank inside a run folder.
std::string file_name(uint32_t rank);

// ---- reading -----------------------------------------------------------------------------

struct ReadOptions {
  uint64_t max_file_bytes = 64ULL << 30;
  bool events = true;  // false: only what describes the run (weft info on a large one)
};

struct ReadFile {
  Process process;
  Damage damage;
  FileFacts facts;
};

// Reads what can be trusted and says what was lost. Fails when nothing can: not a trace, a newer
// version, no environment left.
Result<ReadFile> read_process(const std::string& path, const ReadOptions& options = {});
// The same from memory (fuzzing, pipes). `label` stands for the path in messages.
Result<ReadFile> read_process(std::span<const std::byte> bytes, const std::string& label,
                              const ReadOptions& options = {});
// A run folder (all *.weft files in it) or a single file. Fails when two files claim one rank or
// no file can be read; a file that cannot be read while others can is told in Trace::damage.
Result<Trace> read(const std::string& path, const ReadOptions& options = {});

// ---- what was not said ---------------------------------------------------------------------

// Where a process's compute, or its operations, have no iterations, finds them: by the first
// layer's forward coming again after gradients or updates; without marks of compute by the steps of
// the exchange, or by the operations repeating. Events get the numbers, and spans of iterations are
// added. Returns what was inferred, and by what, for people; empty: nothing was.
std::vector<std::string> infer_iterations(Trace& trace);

// ---- other formats -----------------------------------------------------------------------

struct ChromeSummary {
  uint64_t slices = 0;
  uint64_t instants = 0;
  uint64_t counters = 0;
  uint64_t flows = 0;     // arrows: messages with both halves present
  uint64_t halves = 0;    // message halves without exactly one other half: no arrow
  uint64_t backward = 0;  // of `flows`: received before it was sent, because clocks disagree;
                          // the arrow starts at the receive, since viewers refuse others
  uint64_t rows = 0;      // threads in the file: tracks, and what overlaps made of them
  uint64_t joined = 0;    // events of profiles
};

// What torch.profiler recorded of a process of the run, to be shown beside it.
struct Profile {
  std::string path;              // of the JSON that it exported
  std::optional<uint32_t> rank;  // otherwise the one that the file names
};

struct ChromeOptions {
  // Nanoseconds to add to each process's times, in the order of Trace::processes; empty: the clocks
  // as they were read, shifted by one common amount so that the first event is at 0.
  std::vector<int64_t> shift_ns{};
  bool target_time = false;  // show the target cluster's time instead of the lab's
  // Each becomes processes of their own, on the clock of its rank's trace: profiles count by the
  // wall clock, of which traces have samples.
  std::vector<Profile> profiles{};
};

// Chrome trace-event JSON: a process a rank, a thread a track, an arrow a message. Fails with
// invalid_argument when a profile is of no rank of the run, or not of its time.
Result<ChromeSummary> write_chrome(const Trace& trace, const std::string& path,
                                   const ChromeOptions& options = {});

struct TablesOptions {
  bool target_time = false;  // the target cluster's time and bytes instead of the lab's
};

struct TablesSummary {
  std::vector<std::pair<std::string, uint64_t>> rows;  // of each table
  uint64_t halves = 0;  // message halves without exactly one other half: not among the messages
};

// Arrays that NumPy reads as they stand, in a folder that is absent or empty: a file NAME.npy a
// table, and the texts of all in strings.json (docs/python.md). Times are on the clocks that the
// trace has: put it on one first.
Result<TablesSummary> write_tables(const Trace& trace, const std::string& folder,
                                   const TablesOptions& options = {});

// ---- summaries ---------------------------------------------------------------------------

// What one row of a summary stands for.
enum class By : uint8_t { iteration, layer, tensor, lane, peer, kind };
const char* name_of(By by);
Result<By> parse_by(std::string_view word);

// Times and bytes are the target's (Environment::to_target_ns).
struct SummaryRow {
  std::string what;       // "3", "conv1", "lane 0 to rank 1", "send chunk"
  uint32_t rank = kNone;  // lane and peer: whose; kNone: all ranks together
  uint64_t count = 0;     // durations below; iteration: ranks; tensor: reductions
  double total_ns = 0;
  double mean_ns = 0;
  double p50_ns = 0;
  double p95_ns = 0;
  double bytes = 0;       // moved; tensor: of the gradient, once
  double busy_ns = 0;     // lane and peer: when at least one message was under way
  double rate_bps = 0;    // lane and peer: bits from first message to last; 0: unknown
  double compute_ns = 0;  // iteration: forward, backward or update under way; mean over ranks
  double wait_ns = 0;     // iteration, layer: training waits for communication; mean over ranks
  double forward_ns = 0;  // layer: in one iteration of one rank, mean
  double backward_ns = 0;
  double update_ns = 0;
  uint32_t slowest = kNone;  // iteration: the rank that took longest
};

struct Summary {
  By by = By::kind;
  double dilation = 1;  // of the run: what the times were divided by, ...
  double shrink = 1;    // ... and multiplied by
  std::vector<SummaryRow> rows;
};

// Durations by kind or iteration; by layer and by tensor from gradient_ready to tensor_done; by
// lane or peer from sends and receives. `rank`: of that one only.
Summary summarize(const Trace& trace, By by, std::optional<uint32_t> rank = {});

// All probe results of one sort together, in bits a second of wall time.
struct ProbeSummary {
  ProbeType type = ProbeType::rate;
  ProbeScope scope = ProbeScope::local;
  uint16_t flows = 0;
  uint16_t reverse = 0;
  uint64_t count = 0;
  double slowest_bps = 0;
  double median_bps = 0;
  double fastest_bps = 0;
};
std::vector<ProbeSummary> summarize_probe(const Trace& trace);

}  // namespace weft::trace
