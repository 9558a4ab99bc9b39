// Whatever a run's files say: it is aligned, fitted, drawn, replayed, diagnosed, or refused;
// nothing crashes, and nothing takes for ever.
#include <cstddef>
#include <cstdint>
#include <span>

#include "weft/analysis.h"

namespace weft::analysis {
namespace {

// A fuzzer cannot guess checksums, so most of what it makes is refused by the reader. What a reader
// lets pass is changed here, by chance, within what it would have let pass.
void disturb(trace::Process& process, Rng& rng) {
  auto strange = [&]() -> int64_t {
    int64_t value = static_cast<int64_t>(rng.next() >> (2 + rng.below(60)));
    return rng.below(2) == 0 ? value : -value;
  };
  for (uint64_t left = rng.below(12); left > 0 && !process.events.empty(); --left) {
    trace::Event& event = process.events[rng.below(process.events.size())];
    trace::Event changed = event;
    switch (rng.below(8)) {
      case 0: changed.start_ns = strange(); break;
      case 1: changed.duration_ns = strange(); break;
      case 2: changed.iteration = static_cast<uint32_t>(rng.next()); break;
      case 3: changed.operation = static_cast<uint32_t>(rng.next()); break;
      case 4: changed.bucket = static_cast<uint32_t>(rng.next()); break;
      case 5: changed.lane = static_cast<uint16_t>(rng.next()); break;
      case 6: changed.message = rng.below(100); break;
      default: changed.kind = static_cast<trace::Kind>(rng.below(17)); break;
    }
    if (trace::flaw_of(changed) == nullptr) event = changed;
  }
  if (rng.below(4) == 0)
    for (trace::ProbeResult& result : process.probe)
      if (rng.below(3) == 0) {
        result.bytes = rng.next() >> rng.below(64);
        result.duration_ns = strange();
        result.cpu_send_ns = strange();
      }
  if (rng.below(4) == 0 && !process.model.tensors.empty())
    // Much too large, or small: what is only just replayed would take the fuzzer's time.
    process.model.tensors[rng.below(process.model.tensors.size())].bytes =
        rng.next() >> (rng.below(2) == 0 ? 8 : 46);
}

void follow(const trace::Process& process) {
  uint32_t ranks = process.environment.ranks;
  if (ranks > 4) return;
  // As many ranks as it claims, all with the same events, so that messages and iterations meet.
  trace::Trace trace;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    trace.processes.push_back(process);
    trace.processes.back().environment.rank = rank;
    trace.processes.back().environment.host_index = rank;
  }
  auto recorded = understand(std::move(trace));
  if (!recorded) return;
  auto analysis = analyze(std::move(*recorded));
  if (!analysis) return;
  auto diagnosis = diagnose::diagnose(analysis->recorded.graph, analysis->replayer);
  if (diagnosis) WEFT_CHECK(diagnosis->iteration_ns >= 0);
}

}  // namespace
}  // namespace weft::analysis

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto file = weft::trace::read_process(std::as_bytes(std::span(data, size)), "fuzz");
  if (!file) return 0;
  weft::analysis::follow(file->process);
  uint64_t seed = size;
  for (size_t i = 0; i < size; i += 97) seed = seed * 31 + data[i];
  weft::Rng rng(seed);
  for (int round = 0; round < 4; ++round) {
    weft::trace::Process process = file->process;
    weft::analysis::disturb(process, rng);
    weft::analysis::follow(process);
  }
  return 0;
}
