// Whatever the bytes: no crash, no endless work, and nothing that a user of the result could
// trip over.
#include <cstddef>
#include <cstdint>

#include "format.h"
#include "weft/trace.h"

namespace weft::trace {
namespace {

void check(const ReadFile& file) {
  const Process& process = file.process;
  for (const Event& event : process.events) {
    WEFT_CHECK(flaw_of(event) == nullptr);
    WEFT_CHECK(event.track < process.tracks.size());
    WEFT_CHECK(event.name == kNone || event.name < process.names.size());
    WEFT_CHECK(event.layer == kNone16 || event.layer < process.model.layers.size());
    WEFT_CHECK(event.tensor == kNone || event.tensor < process.model.tensors.size());
    WEFT_CHECK(!process.label(event).empty() || event.name != kNone);
  }
  WEFT_CHECK(process.environment.rank < process.environment.ranks);
  WEFT_CHECK(file.damage.bytes_lost <= file.facts.bytes);
}

// A fuzzer cannot guess a checksum: give it blocks whose checksums are right.
void reseal(std::string& bytes) {
  if (bytes.size() < kFileHeaderBytes) return;
  FileHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  header.checksum = checksum_of(header);
  std::memcpy(bytes.data(), &header, sizeof header);
  for (size_t at = kFileHeaderBytes; at + kBlockHeaderBytes <= bytes.size();) {
    BlockHeader block;
    std::memcpy(&block, bytes.data() + at, sizeof block);
    const size_t left = bytes.size() - at - kBlockHeaderBytes;
    if (block.magic != kBlockMagic || block.payload_bytes > left) return;
    block.checksum = hash64(std::string_view(bytes).substr(
        at + kBlockHashedFrom, kBlockHeaderBytes - kBlockHashedFrom + block.payload_bytes));
    std::memcpy(bytes.data() + at, &block, sizeof block);
    at += kBlockHeaderBytes + block.payload_bytes;
  }
}

}  // namespace
}  // namespace weft::trace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using weft::trace::read_process;
  const auto bytes = std::as_bytes(std::span(data, size));
  if (auto file = read_process(bytes, "fuzz")) weft::trace::check(*file);
  std::string sealed(reinterpret_cast<const char*>(data), size);
  weft::trace::reseal(sealed);
  if (auto file = read_process(std::as_bytes(std::span(sealed)), "sealed"))
    weft::trace::check(*file);
  if (auto file = read_process(std::as_bytes(std::span(sealed)), "sealed", {.events = false}))
    weft::trace::check(*file);
  return 0;
}
