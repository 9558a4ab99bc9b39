// No text may crash parse(); what it accepts must be valid and survive the canonical text.

#include <cstddef>
#include <cstdint>

#include "weft/plan.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const auto plan = weft::plan::parse(input);
  if (!plan) {
    // One line that a terminal can show, whatever the input held.
    WEFT_CHECK(!plan.error().message().empty());
    for (char c : plan.error().message()) WEFT_CHECK(static_cast<unsigned char>(c) >= 0x20);
    return 0;
  }
  WEFT_CHECK(weft::plan::validate(*plan).ok());
  const auto again = weft::plan::parse(weft::plan::canonical(*plan));
  WEFT_CHECK(again.ok());
  WEFT_CHECK(*again == *plan);
  WEFT_CHECK(weft::plan::hash(*again) == weft::plan::hash(*plan));
  WEFT_CHECK(weft::plan::diff(*plan, *again).empty());
  return 0;
}
