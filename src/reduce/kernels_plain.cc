#define WEFT_VECTOR_BYTES 16
#include "loops.h"

namespace weft::reduce {

constinit const Kernels kPlainKernels = table("plain");

}  // namespace weft::reduce
