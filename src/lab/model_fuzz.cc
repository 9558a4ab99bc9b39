// Whatever bytes a model file has, it is read or refused, and what is read adds up.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "model.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto model = weft::lab::parse_model({reinterpret_cast<const char*>(data), size});
  if (model) {
    WEFT_CHECK(model->parameters() > 0);
    WEFT_CHECK(model->compute().count >= 0);
  }
  return 0;
}
