#ifdef WEFT_X86_KERNELS
#include <cpuid.h>
#endif

#include <algorithm>
#include <string_view>

#include "kernels.h"
#include "weft/base.h"

namespace weft::reduce {
namespace {

#ifdef WEFT_X86_KERNELS
// Not every compiler that we use lets __builtin_cpu_supports ask for it.
bool converts_half_floats() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && converts_half_floats(); }

// Some compilers take FMA for granted where they are told of AVX-512.
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}
#endif

}  // namespace

Available available_kernels() {
  Available available = {{&kPlainKernels}, 1};
#ifdef WEFT_X86_KERNELS
  __builtin_cpu_init();
  if (has_avx2()) available.tables[available.count++] = &kAvx2Kernels;
  if (has_avx512()) available.tables[available.count++] = &kAvx512Kernels;
#endif
  return available;
}

const Kernels& choose_kernels(const char* limit) {
  const Available available = available_kernels();
  const std::string_view word = limit == nullptr ? "" : limit;
  size_t wanted = available.count;
  if (word == "plain") {
    wanted = 1;
  } else if (word == "avx2") {
    wanted = 2;
  } else if (!word.empty() && word != "avx512") {
    WEFT_LOG(reduce, warn, "ignores WEFT_INSTRUCTIONS=%.32s: set it to plain, avx2 or avx512",
             limit);
  }
  return *available.tables[std::min(wanted, available.count) - 1];
}

}  // namespace weft::reduce
