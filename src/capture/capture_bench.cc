// What recording costs the thread that records. ns/event is one of the product's three numbers:
//
//   capture_bench --benchmark_filter=record/steady --benchmark_repetitions=9

#include <benchmark/benchmark.h>
#include <unistd.h>

#include <filesystem>

#include "weft/capture.h"

namespace weft::capture {
namespace {

// A quarter of the ring, so that the background thread has always room made by the time the next
// batch comes, and no event of the measurement is a drop.
constexpr uint32_t kRing = 1u << 14;
constexpr uint32_t kBatch = kRing / 4;

struct File {
  std::string path = std::filesystem::temp_directory_path() / "weft-bench-XXXXXX";
  File() { close(mkstemp(path.data())); }
  ~File() { std::filesystem::remove(path); }
};

trace::Event chunk_sent() {
  trace::Event event;
  event.shape = trace::Shape::send;
  event.kind = trace::Kind::chunk;
  event.message = 1;
  event.bytes = 256 << 10;
  event.operation = 7;
  event.chunk = 3;
  event.lane = 2;
  event.peer = 1;
  event.iteration = 12;
  event.duration_ns = 100;
  return event;
}

// Only the batches are timed; between them the background thread empties the ring.
template <typename Batch>
void run_batches(benchmark::State& state, Batch batch) {
  const File file;
  Options options;
  options.path = file.path;
  options.ring_events = kRing;
  auto recorder = Recorder::start(options);
  if (!recorder) return state.SkipWithError(recorder.error().message().c_str());
  (*recorder)->track({.type = trace::TrackType::thread, .name = "bench"});
  const Clock& clock = monotonic_clock();
  Nanos spent;
  uint64_t batches = 0;
  for (auto unused : state) {
    (void)unused;
    const Nanos start = clock.now();
    batch(**recorder);
    const Nanos took = clock.now() - start;
    state.SetIterationTime(took.seconds());
    spent += took;
    if (auto flushed = (*recorder)->flush(); !flushed) {
      return state.SkipWithError(flushed.error().message().c_str());
    }
    // The file would grow with the patience of whoever runs this.
    if (++batches % 256 == 0 && truncate(file.path.c_str(), 0) != 0) {
      return state.SkipWithError("cannot truncate the file");
    }
  }
  state.counters["ns_per_event"] =
      static_cast<double>(spent.count) / static_cast<double>(batches * kBatch);
  if (auto stopped = (*recorder)->stop(); !stopped) {
    return state.SkipWithError(stopped.error().message().c_str());
  }
  if ((*recorder)->dropped() != 0) state.SkipWithError("events were dropped");
}

// An event whose times are known already.
void record_steady(benchmark::State& state) {
  trace::Event event = chunk_sent();
  run_batches(state, [&](Recorder& recorder) {
    for (uint32_t i = 0; i < kBatch; ++i) {
      event.start_ns += 1;
      recorder.record(event);
    }
  });
}
BENCHMARK(record_steady)->Name("record/steady")->UseManualTime();

// With the two clock readings that a span needs.
void record_span(benchmark::State& state) {
  trace::Event event = chunk_sent();
  run_batches(state, [&](Recorder& recorder) {
    for (uint32_t i = 0; i < kBatch; ++i) {
      event.start_ns = recorder.now().count;
      event.duration_ns = recorder.now().count - event.start_ns;
      recorder.record(event);
    }
  });
}
BENCHMARK(record_span)->Name("record/span_with_clock")->UseManualTime();

void record_off(benchmark::State& state) {
  const auto recorder = Recorder::off();
  const trace::Event event = chunk_sent();
  for (auto unused : state) {
    (void)unused;
    recorder->record(event);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(record_off)->Name("record/off");

// A ring that is full: what a thread pays while the disk cannot keep up.
void record_dropped(benchmark::State& state) {
  const File file;
  Options options;
  options.path = file.path;
  options.ring_events = 16;
  auto recorder = Recorder::start(options);
  if (!recorder) return state.SkipWithError(recorder.error().message().c_str());
  (*recorder)->track({.type = trace::TrackType::thread, .name = "bench"});
  const trace::Event event = chunk_sent();
  for (auto unused : state) {
    (void)unused;
    (*recorder)->record(event);
  }
  if (auto stopped = (*recorder)->stop(); !stopped) {
    state.SkipWithError(stopped.error().message().c_str());
  }
}
BENCHMARK(record_dropped)->Name("record/ring_full");

}  // namespace
}  // namespace weft::capture
