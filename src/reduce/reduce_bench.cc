// How fast arrays are combined, in bytes of the result, beside memcpy of as many:
//
//   reduce_bench --benchmark_repetitions=9 --benchmark_report_aggregates_only=true
//
// WEFT_INSTRUCTIONS=plain or avx2 shows the other instruction sets.

#include <benchmark/benchmark.h>

#include <cstring>
#include <vector>

#include "weft/reduce.h"

namespace weft::reduce {
namespace {

void sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->Arg(16 << 10)->Arg(256 << 10)->Arg(64 << 20);
}

void finish_run(benchmark::State& state) {
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * state.range(0));
  state.SetLabel(instruction_set());
}

void copy(benchmark::State& state) {
  const auto bytes = static_cast<size_t>(state.range(0));
  const std::vector<char> from(bytes, 1);
  std::vector<char> to(bytes);
  for (auto unused : state) {
    (void)unused;
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::ClobberMemory();
  }
  if (to != from) state.SkipWithError("the copy differs");
  finish_run(state);
}
BENCHMARK(copy)->Name("memcpy")->Apply(sizes);

// to = to op from, as a collective does with what arrives. Zeros stay zeros under every operation,
// however often it is repeated.
void combine_in_place(benchmark::State& state, Op op, Type type) {
  const auto bytes = static_cast<size_t>(state.range(0));
  const std::vector<char> from(bytes);
  std::vector<char> to(bytes);
  for (auto unused : state) {
    (void)unused;
    combine(op, type, to.data(), to.data(), from.data(), bytes / size_of(type));
    benchmark::ClobberMemory();
  }
  if (to != from) state.SkipWithError("the result is wrong");
  finish_run(state);
}
BENCHMARK_CAPTURE(combine_in_place, sum / float32, Op::sum, Type::float32)->Apply(sizes);
BENCHMARK_CAPTURE(combine_in_place, sum / float64, Op::sum, Type::float64)->Apply(sizes);
BENCHMARK_CAPTURE(combine_in_place, sum / float16, Op::sum, Type::float16)->Apply(sizes);
BENCHMARK_CAPTURE(combine_in_place, sum / bfloat16, Op::sum, Type::bfloat16)->Apply(sizes);
BENCHMARK_CAPTURE(combine_in_place, max / float32, Op::max, Type::float32)->Apply(sizes);
BENCHMARK_CAPTURE(combine_in_place, sum / int8, Op::sum, Type::int8)->Apply(sizes);
BENCHMARK_CAPTURE(combine_in_place, product / int8, Op::product, Type::int8)->Apply(sizes);
BENCHMARK_CAPTURE(combine_in_place, max / int64, Op::max, Type::int64)->Apply(sizes);

// The bytes are those of the 16-bit floats.
void accumulate_wide(benchmark::State& state, Type type) {
  const auto bytes = static_cast<size_t>(state.range(0));
  const std::vector<char> from(bytes);
  std::vector<float> to(bytes / 2);
  for (auto unused : state) {
    (void)unused;
    accumulate(Op::sum, type, to.data(), from.data(), to.size());
    benchmark::ClobberMemory();
  }
  if (to != std::vector<float>(to.size())) state.SkipWithError("the result is wrong");
  finish_run(state);
}
BENCHMARK_CAPTURE(accumulate_wide, float16, Type::float16)->Apply(sizes);
BENCHMARK_CAPTURE(accumulate_wide, bfloat16, Type::bfloat16)->Apply(sizes);

void divide(benchmark::State& state, Type type) {
  const auto bytes = static_cast<size_t>(state.range(0));
  std::vector<char> data(bytes);
  for (auto unused : state) {
    (void)unused;
    finish(Op::mean, type, data.data(), bytes / size_of(type), 3);
    benchmark::ClobberMemory();
  }
  if (data != std::vector<char>(bytes)) state.SkipWithError("the result is wrong");
  finish_run(state);
}
BENCHMARK_CAPTURE(divide, float32, Type::float32)->Apply(sizes);
BENCHMARK_CAPTURE(divide, float16, Type::float16)->Apply(sizes);
BENCHMARK_CAPTURE(divide, int32, Type::int32)->Apply(sizes);

}  // namespace
}  // namespace weft::reduce
