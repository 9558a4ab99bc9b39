#define WEFT_VECTOR_BYTES 64
#include "loops.h"

namespace weft::reduce {

constinit const Kernels kAvx512Kernels = table("AVX-512");

}  // namespace weft::reduce
