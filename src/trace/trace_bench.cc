#include <benchmark/benchmark.h>
#include <unistd.h>

#include <filesystem>

#include "sample.h"
#include "weft/trace.h"

namespace weft::trace {
namespace {

std::string scratch(const char* name) {
  return (std::filesystem::temp_directory_path() / text("weft-bench-%d-%s", ::getpid(), name))
      .string();
}

void set_events(benchmark::State& state, size_t events) {
  state.SetItemsProcessed(static_cast<int64_t>(events) * state.iterations());
}

void write_events(benchmark::State& state) {
  const Process process = sample_process(0, 2, static_cast<size_t>(state.range(0)));
  const std::string path = scratch("write.weft");
  for (auto _ : state) {
    if (!write(path, process)) state.SkipWithError("not written");
  }
  set_events(state, process.events.size());
  std::filesystem::remove(path);
}
BENCHMARK(write_events)->Arg(10'000)->Unit(benchmark::kMillisecond);

void read_events(benchmark::State& state) {
  const Process process = sample_process(0, 2, static_cast<size_t>(state.range(0)));
  const std::string path = scratch("read.weft");
  if (!write(path, process)) return state.SkipWithError("not written");
  for (auto _ : state) {
    auto file = read_process(path);
    if (!file || file->damage.any() || file->process.events.size() != process.events.size())
      state.SkipWithError("not read");
  }
  set_events(state, process.events.size());
  std::filesystem::remove(path);
}
BENCHMARK(read_events)->Arg(10'000)->Unit(benchmark::kMillisecond);

void export_events(benchmark::State& state) {
  Trace trace;
  for (uint32_t rank : {0u, 1u})
    trace.processes.push_back(sample_process(rank, 2, static_cast<size_t>(state.range(0))));
  const std::string path = scratch("chrome.json");
  const size_t events = 2 * trace.processes[0].events.size();
  for (auto _ : state) {
    auto summary = write_chrome(trace, path);
    if (!summary || summary->slices + summary->instants + summary->counters != events)
      state.SkipWithError("not exported");
  }
  set_events(state, events);
  std::filesystem::remove(path);
}
BENCHMARK(export_events)->Arg(10'000)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace weft::trace
