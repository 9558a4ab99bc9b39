// No list of hosts or start message may crash those who read it; what is accepted is written back
// as it was, and what is refused is refused in words that a terminal can show.

#include <cstddef>
#include <cstdint>
#include <string>

#include "remote.h"
#include "weft/launch.h"

namespace weft::launch {
namespace {

void expect_words(const Error& error) {
  WEFT_CHECK(!error.message().empty());
  for (const char c : error.message()) WEFT_CHECK(static_cast<unsigned char>(c) >= 0x20);
}

}  // namespace
}  // namespace weft::launch

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft::launch;  // NOLINT(google-build-using-namespace)
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  if (const auto hosts = parse_hosts(input); !hosts) expect_words(hosts.error());
  const auto start = decode(input);
  if (!start) {
    expect_words(start.error());
  } else {
    const std::string again = encode(*start);
    const auto read_back = decode(std::string_view(again).substr(again.find('\n') + 1));
    WEFT_CHECK(read_back.ok() && read_back->argv == start->argv &&
               read_back->environment == start->environment);
  }
  return 0;
}
