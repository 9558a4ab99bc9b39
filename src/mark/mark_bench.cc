// What marking costs the thread that marks: a span with the times of clock and processor and its
// two records, and what is left of it with recording off.
//
//   mark_bench --benchmark_repetitions=9

#include <benchmark/benchmark.h>
#include <unistd.h>

#include <filesystem>

#include "weft/mark.h"

namespace weft::mark {
namespace {

constexpr uint32_t kRing = 1u << 14;
constexpr uint32_t kBatch = kRing / 8;  // two records a span, in a quarter of the ring

void spans(Marks& marks) {
  for (uint32_t i = 0; i < kBatch; ++i) marks.forward(i & 1).end();
}

trace::Model two_layers() {
  trace::Model model;
  model.layers = {{"a"}, {"b"}};
  return model;
}

// Only the batches are timed; between them the background thread empties the ring.
void mark_on(benchmark::State& state) {
  std::string path = std::filesystem::temp_directory_path() / "weft-bench-XXXXXX";
  close(mkstemp(path.data()));
  capture::Options options;
  options.path = path;
  options.ring_events = kRing;
  auto started = capture::Recorder::start(options);
  if (!started) return state.SkipWithError(started.error().message().c_str());
  std::shared_ptr<capture::Recorder> recorder = std::move(*started);
  Marks marks(recorder);
  if (!marks.model(two_layers()) || !marks.begin_iteration(0))
    return state.SkipWithError("refused");
  const Clock& clock = monotonic_clock();
  Nanos spent;
  uint64_t batches = 0;
  for (auto unused : state) {
    (void)unused;
    const Nanos start = clock.now();
    spans(marks);
    const Nanos took = clock.now() - start;
    state.SetIterationTime(took.seconds());
    spent += took;
    if (!recorder->flush()) return state.SkipWithError("cannot write");
    // The file would grow with the patience of whoever runs this.
    if (++batches % 128 == 0 && truncate(path.c_str(), 0) != 0)
      return state.SkipWithError("cannot truncate the file");
  }
  state.counters["ns_per_span"] =
      static_cast<double>(spent.count) / static_cast<double>(batches * kBatch);
  if (!recorder->stop()) return state.SkipWithError("cannot write");
  if (recorder->dropped() != 0 || marks.refused() != 0) state.SkipWithError("marks were lost");
  std::filesystem::remove(path);
}
BENCHMARK(mark_on)->Name("mark/span")->UseManualTime();

void mark_off(benchmark::State& state) {
  Marks marks(capture::Recorder::off());
  for (auto unused : state) {
    (void)unused;
    marks.forward(0).end();
    benchmark::ClobberMemory();
  }
}
BENCHMARK(mark_off)->Name("mark/off");

}  // namespace
}  // namespace weft::mark
