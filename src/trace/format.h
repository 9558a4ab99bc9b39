// The bytes of a trace file, as docs/trace_format.md describes them. Private to the module.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>

#include "weft/trace.h"

namespace weft::trace {

static_assert(std::endian::native == std::endian::little, "records are written as they stand");
static_assert(offsetof(Event, message) == 16 && offsetof(Event, name) == 32 &&
              offsetof(Event, chunk) == 52 && offsetof(Event, layer) == 56 &&
              offsetof(Event, track) == 62 && offsetof(Event, peer) == 66 &&
              offsetof(Event, shape) == 68 && offsetof(Event, reserved) == 70);
static_assert(sizeof(ClockSample) == 16 && std::is_trivially_copyable_v<ClockSample>);
static_assert(sizeof(PingSample) == 40 && offsetof(PingSample, t0) == 8);
static_assert(sizeof(ProbeResult) == 56 && offsetof(ProbeResult, bytes) == 16);

// The first eight bytes of a file. They do not survive a transfer as text, nor as 7-bit data.
inline constexpr char kFileMagic[8] = {'\x89', 'W', 'E', 'F', 'T', '\r', '\n', '\x1a'};
inline constexpr size_t kFileHeaderBytes = 64;

// Frozen in all versions of the format, so that a newer file can be refused by name.
struct FileHeader {
  char magic[8];
  uint16_t version;
  uint16_t zero16;
  uint32_t zero32;
  char writer[40];    // version of the weft that wrote the file, padded with zero bytes
  uint64_t checksum;  // XXH3-64 of the 56 bytes before it
};
static_assert(sizeof(FileHeader) == kFileHeaderBytes);
inline uint64_t checksum_of(const FileHeader& header) {
  return hash64(std::as_bytes(std::span(&header, 1)).first(offsetof(FileHeader, checksum)));
}

inline constexpr uint32_t kBlockMagic = 0xb17c57ae;  // ae 57 7c b1 on disk
inline constexpr size_t kBlockHeaderBytes = 32;
inline constexpr size_t kBlockHashedFrom = 16;  // the checksum covers all that follows it
inline constexpr uint16_t kBlockVersion = 1;
inline constexpr uint32_t kMaxPayloadBytes = 16u << 20;

struct BlockHeader {
  uint32_t magic;
  uint32_t payload_bytes;
  uint64_t checksum;  // XXH3-64 of the 16 bytes that follow and the payload
  uint64_t sequence;
  uint32_t count;
  uint16_t type;
  uint16_t version;
};
static_assert(sizeof(BlockHeader) == kBlockHeaderBytes);

// Reaches disk: append, never renumber.
enum class BlockType : uint16_t {
  environment = 1,
  model = 2,
  events = 3,
  clock_samples = 4,
  pings = 5,
  probe = 6,
  notes = 7,
  definitions = 8,
  closing = 9,
};

// Fields of the environment block. Reaches disk: append, never renumber.
enum class Field : uint16_t {
  weft_version = 1,
  host = 2,
  host_index = 3,
  rank = 4,
  ranks = 5,
  cores = 6,
  kernel = 7,
  congestion_control = 8,
  sysctl = 9,
  plan_name = 10,
  plan_hash = 11,
  plan_text = 12,
  predicted = 13,
  dilation = 14,
  shrink = 15,
  emulated_compute = 16,
  lab = 17,
};

struct Closing {
  uint64_t events = 0;
  uint64_t clock_samples = 0;
  uint64_t pings = 0;
  uint64_t probe = 0;
  uint64_t notes = 0;
  uint64_t dropped = 0;
  friend bool operator==(const Closing&, const Closing&) = default;
};
static_assert(sizeof(Closing) == 48);

inline constexpr size_t kMaxNameBytes = 16u << 10;
// Times further than this from zero are refused, so that start + duration never overflows.
inline constexpr int64_t kMaxTime = int64_t{1} << 62;
inline constexpr int64_t kMaxDuration = int64_t{1} << 61;
// What a lab may scale by; below 1 it would be no lab.
inline constexpr double kMaxFactor = 1e6;

// Why a value may not stand in a file; null when it may. The writer refuses what the reader would.
const char* flaw_of(const Environment& environment);
const char* flaw_of(const Model& model);
const char* flaw_of(const PingSample& ping);
const char* flaw_of(const ProbeResult& result);
bool is_known(Shape shape);
bool is_known(Kind kind);
bool is_known(TrackType type);
bool is_known(ProbeType type);
bool is_known(ProbeScope scope);

// Read a file from wherever its bytes are, or from a path; `label` stands for it in messages. Throw
// std::bad_alloc, which is no fault of the file.
class Source;
Result<ReadFile> read_from(Source& source, const std::string& label, const ReadOptions& options);
Result<ReadFile> read_from(const std::string& path, const ReadOptions& options);
Error no_memory_for(const std::string& what);

struct WriterOptions {
  size_t block_bytes = 64u << 10;     // payload of an events block; tests use small ones
  uint64_t repeat_bytes = 16u << 20;  // environment and model are repeated after so many
  Files* files = &kernel_files();
};

Result<std::unique_ptr<Writer>> create_writer(const std::string& path,
                                              const Environment& environment,
                                              const WriterOptions& options);
Result<void> write_process(Writer& writer, const Process& process);

}  // namespace weft::trace
