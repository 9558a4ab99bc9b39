// No environment or list may crash those who read it; what they accept is sound, and what they
// refuse is refused in words that a terminal can show.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "nodelist.h"
#include "weft/membership.h"

namespace weft::membership {
namespace {

void expect_words(const Error& error) {
  WEFT_CHECK(!error.message().empty());
  for (const char c : error.message()) WEFT_CHECK(static_cast<unsigned char>(c) >= 0x20);
}

// Lines of NAME=VALUE. What names files is left out: a fuzzer must not open what it likes.
void try_environment(std::string_view input) {
  std::map<std::string, std::string> variables;
  while (!input.empty()) {
    const std::string_view line = input.substr(0, input.find('\n'));
    input.remove_prefix(std::min(line.size() + 1, input.size()));
    const size_t equals = line.find('=');
    if (equals == std::string_view::npos) continue;
    variables[std::string(line.substr(0, equals))] = line.substr(equals + 1);
  }
  for (const char* name : {"WEFT_SECRET_FILE", "WEFT_SECRET_FD", "HOME", "XDG_RUNTIME_DIR"}) {
    variables.erase(name);
  }
  variables["TMPDIR"] = std::filesystem::temp_directory_path();
  const auto membership = from_environment([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
  if (!membership) return expect_words(membership.error());
  WEFT_CHECK(membership->rank < membership->size);
  WEFT_CHECK(membership->local_size <= membership->size);
  WEFT_CHECK(membership->local_size == 0 || membership->local_rank < membership->local_size);
  WEFT_CHECK(membership->rendezvous.find(':') != std::string::npos);
  WEFT_CHECK(membership->secret.size() >= 32);
}

}  // namespace
}  // namespace weft::membership

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft::membership;  // NOLINT(google-build-using-namespace)
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  try_environment(input);
  if (const auto nodes = expand_nodes(input); !nodes) expect_words(nodes.error());
  if (const auto counts = expand_counts(input); !counts) expect_words(counts.error());
  return 0;
}
