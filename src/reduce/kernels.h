// The loops of one instruction set, as a table.
//
// The sources that fill it are compiled for processors that the running one may not be. They call
// no inline function or template that others use too, the standard library's included: the linker
// keeps one copy of such a function, and it could be the one with the wrong instructions.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace weft::reduce {

struct Kernels {
  using Combine = void (*)(void* to, const void* a, const void* b, size_t count);
  using Divide = void (*)(void* to, const void* from, size_t count, uint32_t divisor);
  using Convert = void (*)(void* to, const void* from, size_t count);

  // By the numbers of Op and Type; null where there is no such operation.
  static constexpr size_t kOps = 9;
  static constexpr size_t kTypes = 10;

  const char* name = nullptr;
  Combine combine[kOps][kTypes] = {};
  Divide divide[kTypes] = {};
  // 16-bit floats only. `a` and `to` are float32, `b` is not.
  Combine accumulate[kOps][kTypes] = {};
  Convert widen[kTypes] = {};
  Convert narrow[kTypes] = {};
};

extern const Kernels kPlainKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

// The tables that this processor can run, the plain one first and the best one last.
struct Available {
  const Kernels* tables[3];
  size_t count;
};
Available available_kernels();

// The best table not above `limit` (a value of WEFT_INSTRUCTIONS; null for none).
const Kernels& choose_kernels(const char* limit);

}  // namespace weft::reduce
