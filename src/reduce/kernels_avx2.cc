#define WEFT_VECTOR_BYTES 32
#include "loops.h"

namespace weft::reduce {

constinit const Kernels kAvx2Kernels = table("AVX2");

}  // namespace weft::reduce
