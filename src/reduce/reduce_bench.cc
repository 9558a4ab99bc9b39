// How fast arrays are combined, in bytes of the result, beside memcpy of as many:
//
//   reduce_bench --benchmark_repetitions=9 --benchmark_report_aggregates_only=true
//
// WEFT_INSTRUCTIONS=plain or avx2 shows the other instruction sets.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "weft/reduce.h"

namespace weft::reduce {
namespace {

// Where tensors begin.
struct alignas(64) Line {
  char bytes[64] = {};
};

// Zeros, which stay zeros under every operation, however often it is repeated.
class Zeros {
 public:
  explicit Zeros(size_t bytes) : lines_(bytes / sizeof(Line)) {}
  void* data() { return lines_.data(); }
  bool unchanged() const {
    return std::all_of(lines_.begin(), lines_.end(), [](const Line& line) {
      return std::all_of(line.bytes, line.bytes + sizeof line, [](char c) { return c == 0; });
    });
  }

 private:
  std::vector<Line> lines_;
};

void sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->Arg(16 << 10)->Arg(256 << 10)->Arg(64 << 20);
}

void finish_run(benchmark::State& state) {
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * state.range(0));
  state.SetLabel(instruction_set());
}

void copy(benchmark::State& state) {
  const auto bytes = static_cast<size_t>(state.range(0));
  Zeros from(bytes);
  Zeros to(bytes);
  for (auto unused : state) {
    (void)unused;
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::ClobberMemory();
  }
  if (!to.unchanged()) state.SkipWithError("the copy differs");
  finish_run(state);
}
BENCHMARK(copy)->Name("memcpy")->Apply(sizes);

// to = to op from, as a collective does with what arrives.
void combine_in_place(benchmark::State& state, Op op, Type type) {
  const auto bytes = static_cast<size_t>(state.range(0));
  Zeros from(bytes);
  Zeros to(bytes);
  for (auto unused : state) {
    (void)unused;
    combine(op, type, to.data(), to.data(), from.data(), bytes / size_of(type));
    benchmark::ClobberMemory();
  }
  if (!to.unchanged()) state.SkipWithError("the result is wrong");
  finish_run(state);
}
BENCHMARK_CAPTURE(combine_in_place, sum_float32, Op::sum, Type::float32)->Apply(sizes);
BENCHMARK_CAPTURE(combine_in_place, sum_float64, Op::sum, Type::float64)->Apply(sizes);
BENCHMARK_CAPTURE(combine_in_place, sum_float16, Op::sum, Type::float16)->Apply(sizes);
BENCHMARK_CAPTURE(combine_in_place, sum_bfloat16, Op::sum, Type::bfloat16)->Apply(sizes);
BENCHMARK_CAPTURE(combine_in_place, max_float32, Op::max, Type::float32)->Apply(sizes);
BENCHMARK_CAPTURE(combine_in_place, sum_int8, Op::sum, Type::int8)->Apply(sizes);
BENCHMARK_CAPTURE(combine_in_place, product_int8, Op::product, Type::int8)->Apply(sizes);
BENCHMARK_CAPTURE(combine_in_place, max_int64, Op::max, Type::int64)->Apply(sizes);

// The bytes are those of the 16-bit floats.
void accumulate_wide(benchmark::State& state, Type type) {
  const auto bytes = static_cast<size_t>(state.range(0));
  Zeros from(bytes);
  Zeros to(2 * bytes);
  for (auto unused : state) {
    (void)unused;
    accumulate(Op::sum, type, static_cast<float*>(to.data()), from.data(), bytes / 2);
    benchmark::ClobberMemory();
  }
  if (!to.unchanged()) state.SkipWithError("the result is wrong");
  finish_run(state);
}
BENCHMARK_CAPTURE(accumulate_wide, float16, Type::float16)->Apply(sizes);
BENCHMARK_CAPTURE(accumulate_wide, bfloat16, Type::bfloat16)->Apply(sizes);

void divide(benchmark::State& state, Type type) {
  const auto bytes = static_cast<size_t>(state.range(0));
  Zeros data(bytes);
  for (auto unused : state) {
    (void)unused;
    finish(Op::mean, type, data.data(), bytes / size_of(type), 3);
    benchmark::ClobberMemory();
  }
  if (!data.unchanged()) state.SkipWithError("the result is wrong");
  finish_run(state);
}
BENCHMARK_CAPTURE(divide, float32, Type::float32)->Apply(sizes);
BENCHMARK_CAPTURE(divide, float16, Type::float16)->Apply(sizes);
BENCHMARK_CAPTURE(divide, int32, Type::int32)->Apply(sizes);

}  // namespace
}  // namespace weft::reduce
