#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <new>
#include <set>
#include <unordered_map>

#include "format.h"
#include "source.h"

namespace weft::trace {
namespace {

constexpr size_t kMaxDetails = 16;

// Reads one file. Blocks are found first, by header and checksum; only then is a payload decoded,
// completely or not at all, so that a bad block never leaves half of itself behind.
class FileReader {
 public:
  FileReader(Source& source, std::string label, const ReadOptions& options)
      : source_(source), label_(std::move(label)), options_(options) {
    damage_.file = label_;
    facts_.path = label_;
    facts_.bytes = source_.size();
    // Candidates for a block that fail their checksum may cost this much reading and hashing in
    // all, so that a file made of false headers is given up in time linear to its size.
    hash_budget_ = 4 * source_.size() + (uint64_t{64} << 20);
  }

  Result<ReadFile> read() {
    WEFT_TRY(read_file_header());
    read_blocks();
    return finish();
  }

 private:
  struct Block {
    BlockHeader header;
    std::span<const std::byte> payload;
    uint64_t size() const { return kBlockHeaderBytes + payload.size(); }
  };

  // ---- finding blocks --------------------------------------------------------------------

  Result<void> read_file_header() {
    const auto bytes = source_.view(0, kFileHeaderBytes);
    if (source_.size() == 0)
      return error(Code::corrupt, "%s: empty: its writer ended before it wrote", label_.c_str());
    FileHeader header{};
    std::memcpy(&header, bytes.data(), bytes.size());
    const bool magic_ok = std::memcmp(header.magic, kFileMagic, sizeof header.magic) == 0;
    if (bytes.size() < kFileHeaderBytes) {
      if (magic_ok) return error(Code::corrupt, "%s: cut off in its first bytes", label_.c_str());
      return error(Code::corrupt, "%s: not a weft trace", label_.c_str());
    }
    if (header.checksum == checksum_of(header) && magic_ok) {
      facts_.format = header.version;
      facts_.written_by = printable({header.writer, strnlen(header.writer, sizeof header.writer)});
      if (header.version > kFormatVersion)
        return error(Code::unsupported,
                     "%s was written in format %u by weft %s; this weft (%s) reads up to %u: "
                     "upgrade weft",
                     label_.c_str(), header.version, facts_.written_by.c_str(), version(),
                     kFormatVersion);
      if (header.version == kFormatVersion && header.zero16 == 0 && header.zero32 == 0) return {};
    }
    // Blocks do not need the header. It is passed over if this is plainly a trace all the same.
    if (!magic_ok && !block_at(kFileHeaderBytes))
      return error(Code::corrupt, "%s: not a weft trace", label_.c_str());
    facts_.format = kFormatVersion;
    damage_.bytes_lost += kFileHeaderBytes;
    tell("the file header is damaged");
    return {};
  }

  // The block that starts at `offset`, if its header and checksum say that one does.
  std::optional<Block> block_at(uint64_t offset) {
    const auto start = source_.view(offset, kBlockHeaderBytes);
    if (start.size() < kBlockHeaderBytes) return {};
    Block block{};
    std::memcpy(&block.header, start.data(), kBlockHeaderBytes);
    const uint32_t length = block.header.payload_bytes;
    if (block.header.magic != kBlockMagic || length > kMaxPayloadBytes) return {};
    if (length > source_.size() - offset - kBlockHeaderBytes) return {};
    if (hash_budget_ < length) return {};
    const auto whole = source_.view(offset, kBlockHeaderBytes + length);
    if (whole.size() < kBlockHeaderBytes + length) return {};
    if (hash64(whole.subspan(kBlockHashedFrom)) != block.header.checksum) {
      hash_budget_ -= std::min<uint64_t>(hash_budget_, whole.size());
      return {};
    }
    block.payload = whole.subspan(kBlockHeaderBytes);
    return block;
  }

  // Where the next whole block starts, at `offset` or after it; the end if there is none.
  uint64_t find_block(uint64_t offset) {
    while (offset < source_.size()) {
      if (hash_budget_ < kBlockHeaderBytes) {
        tell("given up: too many false blocks");
        return source_.size();
      }
      const auto window = source_.at_hand(offset, sizeof kBlockMagic);
      if (window.size() < sizeof kBlockMagic) return source_.size();
      const void* hit = ::memmem(window.data(), window.size(), &kBlockMagic, sizeof kBlockMagic);
      if (hit == nullptr) {
        offset += window.size() - (sizeof kBlockMagic - 1);
        continue;
      }
      offset += static_cast<uint64_t>(static_cast<const std::byte*>(hit) - window.data());
      if (block_at(offset)) return offset;
      ++offset;
    }
    return source_.size();
  }

  void read_blocks() {
    uint64_t offset = kFileHeaderBytes;
    uint64_t expected = 0;
    bool after_loss = false;  // a gap right behind lost bytes was told with them
    while (offset < source_.size()) {
      const std::optional<Block> block = closing_ ? std::nullopt : block_at(offset);
      if (!block) {
        const uint64_t next = closing_ ? source_.size() : find_block(offset + 1);
        lose(offset, next - offset, closing_ ? "bytes after the closing block" : "no valid block");
        after_loss = true;
        offset = next;
        continue;
      }
      const uint64_t sequence = block->header.sequence;
      if (sequence < expected || sequence == ~uint64_t{0}) {
        lose(offset, block->size(), "a block out of sequence");
        damage_.blocks_lost += 1;
      } else {
        damage_.blocks_lost += sequence - expected;
        if (sequence != expected && !after_loss)
          tell(text("%" PRIu64 " blocks are missing before byte %" PRIu64, sequence - expected,
                    offset));
        expected = sequence + 1;
        facts_.blocks += 1;
        if (const char* why = decode(*block)) {
          lose(offset, block->size(), why);
          damage_.blocks_lost += 1;
        }
      }
      after_loss = false;
      offset += block->size();
    }
    // A gap in the numbers tells of every other damaged block; behind the last there is none.
    if (after_loss && !closing_) damage_.blocks_lost += 1;
    damage_.unfinished = !closing_;
    if (!source_.trouble().empty()) tell(source_.trouble());
    if (damage_.unfinished) tell("no closing block: the writer was killed or the end is cut off");
  }

  void lose(uint64_t offset, uint64_t bytes, const char* why) {
    damage_.bytes_lost += bytes;
    tell(text("byte %" PRIu64 ": %" PRIu64 " bytes lost: %s", offset, bytes, why));
  }

  void tell(std::string what) {
    if (damage_.details.size() < kMaxDetails) damage_.details.push_back(std::move(what));
  }

  // ---- decoding --------------------------------------------------------------------------

  // Returns why the block is unusable, or null.
  const char* decode(const Block& block) {
    if (block.header.version != kBlockVersion) {
      ++skipped_blocks_;
      return nullptr;
    }
    const uint32_t count = block.header.count;
    switch (static_cast<BlockType>(block.header.type)) {
      case BlockType::environment: return decode_environment(block.payload, count);
      case BlockType::model: return decode_model(block.payload, count);
      case BlockType::events: return decode_events(block.payload, count);
      case BlockType::clock_samples:
        return decode_records(block.payload, count, process_.clock_samples, totals_.clock_samples,
                              [](const ClockSample&) { return static_cast<const char*>(nullptr); });
      case BlockType::pings:
        return decode_records(block.payload, count, process_.pings, totals_.pings,
                              [](const PingSample& ping) { return flaw_of(ping); });
      case BlockType::probe: return decode_probe(block.payload, count);
      case BlockType::notes: return decode_notes(block.payload, count);
      case BlockType::definitions: return decode_definitions(block.payload, count);
      case BlockType::closing: return decode_closing(block.payload, count);
    }
    ++skipped_blocks_;
    return nullptr;
  }

  const char* decode_environment(std::span<const std::byte> payload, uint32_t count) {
    Environment e;
    Unpacker in(payload);
    std::set<Field> seen;
    const auto number = [](std::string_view value, auto& out) {
      if (value.size() != sizeof out) return false;
      std::memcpy(&out, value.data(), sizeof out);
      return true;
    };
    const auto flag = [&](std::string_view value, bool& out) {
      uint8_t byte = 0;
      if (!number(value, byte) || byte > 1) return false;
      out = byte == 1;
      return true;
    };
    const auto pair = [](std::string_view value, std::map<std::string, std::string>& out) {
      Unpacker inner(std::as_bytes(std::span(value)));
      const std::string_view key = inner.text();
      if (inner.failed()) return false;
      return out.emplace(key, inner.text(inner.left())).second;
    };
    for (uint32_t i = 0; i < count && !in.failed(); ++i) {
      const auto field = in.number<Field>();
      if (in.number<uint16_t>() != 0) return "environment: a reserved field is not 0";
      const std::string_view value = in.text();
      bool ok = field == Field::sysctl || field == Field::lab || seen.insert(field).second;
      switch (field) {
        case Field::weft_version: e.weft_version = value; break;
        case Field::host: e.host = value; break;
        case Field::host_index: ok = ok && number(value, e.host_index); break;
        case Field::rank: ok = ok && number(value, e.rank); break;
        case Field::ranks: ok = ok && number(value, e.ranks); break;
        case Field::cores: ok = ok && number(value, e.cores); break;
        case Field::kernel: e.kernel = value; break;
        case Field::congestion_control: e.congestion_control = value; break;
        case Field::sysctl: ok = ok && pair(value, e.sysctls); break;
        case Field::plan_name: e.plan_name = value; break;
        case Field::plan_hash: e.plan_hash = value; break;
        case Field::plan_text: e.plan_text = value; break;
        case Field::predicted: ok = ok && flag(value, e.predicted); break;
        case Field::dilation: ok = ok && number(value, e.dilation); break;
        case Field::shrink: ok = ok && number(value, e.shrink); break;
        case Field::emulated_compute: ok = ok && flag(value, e.emulated_compute); break;
        case Field::lab: ok = ok && pair(value, e.lab); break;
        default: break;  // from a newer writer
      }
      if (!ok && !in.failed()) return "environment: a field has the wrong size, value or number";
    }
    if (!in.complete()) return "environment: malformed";
    if (flaw_of(e) != nullptr) return flaw_of(e);
    if (has_environment_ && e != process_.environment)
      return "environment: differs from the one before it";
    process_.environment = std::move(e);
    has_environment_ = true;
    return nullptr;
  }

  const char* decode_model(std::span<const std::byte> payload, uint32_t count) {
    Model model;
    Unpacker in(payload);
    model.name = in.text();
    const auto layers = in.number<uint32_t>();
    if (layers > count || layers >= kNone16) return "model: malformed";
    for (uint32_t i = 0; i < layers && !in.failed(); ++i)
      model.layers.push_back({std::string(in.text())});
    for (uint32_t i = layers; i < count && !in.failed(); ++i) {
      Tensor tensor;
      tensor.name = in.text();
      tensor.bytes = in.number<uint64_t>();
      tensor.produced_by = in.number<uint32_t>();
      tensor.updated_by = in.number<uint32_t>();
      tensor.consumed_by = in.number<uint32_t>();
      model.tensors.push_back(std::move(tensor));
    }
    if (!in.complete()) return "model: malformed";
    if (const char* flaw = flaw_of(model)) return flaw;
    process_.model = std::move(model);
    return nullptr;
  }

  // Fills `names` and `tracks` and checks their order; the caller commits them if all is well.
  struct Dictionary {
    std::vector<std::pair<NameId, std::string_view>> names;
    std::vector<std::pair<TrackId, Track>> tracks;
  };

  const char* unpack_dictionary(Unpacker& in, uint32_t names, uint32_t tracks, Dictionary& out) {
    for (uint32_t i = 0; i < names && !in.failed(); ++i) {
      const auto id = in.number<NameId>();
      const std::string_view name = in.text();
      if (in.failed()) break;
      if (id == kNone || (!out.names.empty() && id <= out.names.back().first))
        return "names are not in ascending order";
      if (auto known = names_.find(id); known != names_.end() && known->second != name)
        return "a name is defined twice";
      out.names.emplace_back(id, name);
    }
    for (uint32_t i = 0; i < tracks && !in.failed(); ++i) {
      const auto id = in.number<TrackId>();
      Track track;
      track.type = in.number<TrackType>();
      const auto zero = in.number<uint8_t>();
      track.lane = in.number<uint16_t>();
      track.peer = in.number<uint16_t>();
      track.name = in.text();
      if (in.failed()) break;
      if (zero != 0) return "a reserved field is not 0";
      if (!is_known(track.type)) track.type = TrackType::thread;  // from a newer writer
      if (!out.tracks.empty() && id <= out.tracks.back().first)
        return "tracks are not in ascending order";
      if (id < tracks_.size() && tracks_[id] && *tracks_[id] != track)
        return "a track is defined twice";
      out.tracks.emplace_back(id, std::move(track));
    }
    return in.failed() ? "dictionary: malformed" : nullptr;
  }

  void commit(Dictionary& dictionary) {
    for (const auto& [id, name] : dictionary.names) names_.try_emplace(id, name);
    for (auto& [id, track] : dictionary.tracks) {
      if (tracks_.size() <= id) tracks_.resize(size_t{id} + 1);
      if (!tracks_[id]) tracks_[id] = std::move(track);
    }
  }

  const char* decode_events(std::span<const std::byte> payload, uint32_t count) {
    Unpacker in(payload);
    const auto dropped = in.number<uint64_t>();
    const auto names = in.number<uint32_t>();
    const auto tracks = in.number<uint32_t>();
    Dictionary dictionary;
    if (const char* flaw = unpack_dictionary(in, names, tracks, dictionary)) return flaw;
    if (in.left() != uint64_t{count} * sizeof(Event)) return "events: malformed";
    const auto records = in.raw(in.left());
    const size_t before = process_.events.size();
    if (options_.events) {
      process_.events.resize(before + count);
      if (count > 0) std::memcpy(process_.events.data() + before, records.data(), records.size());
      if (const char* flaw = check_events(before, dictionary)) {
        process_.events.resize(before);
        return flaw;
      }
    }
    commit(dictionary);
    totals_.events += count;
    process_.dropped = std::max(process_.dropped, dropped);
    return nullptr;
  }

  const char* check_events(size_t from, const Dictionary& dictionary) {
    std::vector<Event>& events = process_.events;
    size_t kept = from;
    NameId last_name = kNone;
    TrackId last_track = 0;
    bool any_track = false;
    for (size_t i = from; i < events.size(); ++i) {
      Event event = events[i];
      if (!is_known(event.shape)) {  // from a newer writer: nothing true can be said about it
        ++skipped_events_;
        continue;
      }
      if (!is_known(event.kind)) event.kind = Kind::other;
      if (const char* flaw = flaw_of(event)) return flaw;
      if (event.name != kNone && event.name != last_name) {
        const auto at =
            std::lower_bound(dictionary.names.begin(), dictionary.names.end(), event.name,
                             [](const auto& entry, NameId id) { return entry.first < id; });
        if (at == dictionary.names.end() || at->first != event.name)
          return "an event's name is not in its block";
        last_name = event.name;
      }
      if (!any_track || event.track != last_track) {
        const auto at =
            std::lower_bound(dictionary.tracks.begin(), dictionary.tracks.end(), event.track,
                             [](const auto& entry, TrackId id) { return entry.first < id; });
        if (at == dictionary.tracks.end() || at->first != event.track)
          return "an event's track is not in its block";
        last_track = event.track;
        any_track = true;
      }
      events[kept++] = event;
    }
    events.resize(kept);
    return nullptr;
  }

  template <typename Record, typename Flaw>
  const char* decode_records(std::span<const std::byte> payload, uint32_t count,
                             std::vector<Record>& out, uint64_t& total, Flaw flaw) {
    if (payload.size() != uint64_t{count} * sizeof(Record)) return "malformed records";
    std::vector<Record> records(count);
    if (count > 0) std::memcpy(records.data(), payload.data(), payload.size());
    for (const Record& record : records) {
      if (const char* why = flaw(record)) return why;
    }
    out.insert(out.end(), records.begin(), records.end());
    total += count;
    return nullptr;
  }

  const char* decode_probe(std::span<const std::byte> payload, uint32_t count) {
    std::vector<ProbeResult> results;
    if (const char* why = decode_records(payload, count, results, totals_.probe,
                                         [](const ProbeResult& result) -> const char* {
                                           if (!is_known(result.type) || !is_known(result.scope))
                                             return nullptr;
                                           return flaw_of(result);
                                         }))
      return why;
    for (const ProbeResult& result : results) {
      if (is_known(result.type) && is_known(result.scope)) {
        process_.probe.push_back(result);
      } else {
        ++skipped_events_;
      }
    }
    return nullptr;
  }

  const char* decode_notes(std::span<const std::byte> payload, uint32_t count) {
    Unpacker in(payload);
    std::vector<Note> notes;
    for (uint32_t i = 0; i < count && !in.failed(); ++i) {
      Note note;
      note.time_ns = in.number<int64_t>();
      note.key = in.text();
      note.value = in.text();
      notes.push_back(std::move(note));
    }
    if (!in.complete()) return "notes: malformed";
    totals_.notes += count;
    for (Note& note : notes) process_.notes.push_back(std::move(note));
    return nullptr;
  }

  const char* decode_definitions(std::span<const std::byte> payload, uint32_t count) {
    Unpacker in(payload);
    const auto names = in.number<uint32_t>();
    const auto tracks = in.number<uint32_t>();
    Dictionary dictionary;
    if (const char* flaw = unpack_dictionary(in, names, tracks, dictionary)) return flaw;
    if (!in.complete() || uint64_t{names} + tracks != count) return "definitions: malformed";
    commit(dictionary);
    return nullptr;
  }

  const char* decode_closing(std::span<const std::byte> payload, uint32_t count) {
    if (payload.size() != sizeof(Closing) || count != 1) return "closing: malformed";
    Closing closing;
    std::memcpy(&closing, payload.data(), sizeof closing);
    closing_ = closing;
    process_.dropped = std::max(process_.dropped, closing.dropped);
    return nullptr;
  }

  // ---- the end ---------------------------------------------------------------------------

  Result<ReadFile> finish() {
    if (!has_environment_)
      return error(Code::corrupt, "%s: nothing is left that says which rank this was",
                   label_.c_str());
    totals_.dropped = closing_ ? closing_->dropped : 0;
    if (closing_ && damage_.blocks_lost == 0 && *closing_ != totals_) {
      damage_.blocks_lost += 1;
      tell("the closing block counts records that are not there");
    }
    if (skipped_blocks_ > 0)
      tell(text("%" PRIu64 " blocks of a newer weft were passed over", skipped_blocks_));
    if (skipped_events_ > 0)
      tell(text("%" PRIu64 " records of a newer weft were passed over", skipped_events_));
    facts_.events = totals_.events;
    for (auto& track : tracks_) process_.tracks.push_back(track ? std::move(*track) : Track{});
    number_names();
    clear_dangling();
    process_.events.shrink_to_fit();
    return ReadFile{std::move(process_), std::move(damage_), std::move(facts_)};
  }

  // Ids become places in Process::names. They stay what they were, unless so few of them are
  // known that a table of all would be out of proportion to the file.
  void number_names() {
    std::vector<NameId> ids;
    ids.reserve(names_.size());
    for (const auto& [id, name] : names_) ids.push_back(id);
    std::sort(ids.begin(), ids.end());
    if (ids.empty()) return;
    if (ids.back() < 2 * ids.size() + 4096) {
      process_.names.resize(size_t{ids.back()} + 1);
      for (auto& [id, name] : names_) process_.names[id] = std::move(name);
      return;
    }
    for (NameId id : ids) process_.names.push_back(std::move(names_[id]));
    for (Event& event : process_.events) {
      if (event.name == kNone) continue;
      const auto at = std::lower_bound(ids.begin(), ids.end(), event.name);
      event.name = static_cast<NameId>(at - ids.begin());
    }
  }

  // Users index the model with what events say, so events must not say more than it holds. This
  // happens when every copy of the model was lost.
  void clear_dangling() {
    uint64_t cleared = 0;
    for (Event& event : process_.events) {
      const bool layer = event.layer != kNone16 && event.layer >= process_.model.layers.size();
      const bool tensor = event.tensor != kNone && event.tensor >= process_.model.tensors.size();
      if (layer) event.layer = kNone16;
      if (tensor) event.tensor = kNone;
      cleared += layer || tensor;
    }
    if (cleared == 0) return;
    if (damage_.blocks_lost == 0) damage_.blocks_lost = 1;
    tell(text("%" PRIu64 " events name layers or tensors whose description is lost", cleared));
  }

  Source& source_;
  std::string label_;
  ReadOptions options_;
  uint64_t hash_budget_ = 0;

  Process process_;
  Damage damage_;
  FileFacts facts_;
  bool has_environment_ = false;
  std::unordered_map<NameId, std::string> names_;
  std::vector<std::optional<Track>> tracks_;
  Closing totals_;
  std::optional<Closing> closing_;
  uint64_t skipped_blocks_ = 0;
  uint64_t skipped_events_ = 0;
};

}  // namespace

Result<ReadFile> read_from(Source& source, const std::string& label, const ReadOptions& options) {
  return FileReader(source, label, options).read();
}

Result<ReadFile> read_from(const std::string& path, const ReadOptions& options) {
  // Non-blocking, so that a named pipe is refused instead of waited for.
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) {
    if (errno == ENOENT) return error(Code::not_found, "%s: no such file", path.c_str());
    return io_error(errno, "%s: opening", path.c_str());
  }
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return io_error(errno, "%s", path.c_str());
  if (!S_ISREG(status.st_mode))
    return error(Code::invalid_argument, "%s: not a regular file", path.c_str());
  const auto size = static_cast<uint64_t>(status.st_size);
  if (size > options.max_file_bytes)
    return error(Code::invalid_argument, "%s: %" PRIu64 " bytes are over the limit of %" PRIu64,
                 path.c_str(), size, options.max_file_bytes);
  FileSource source(fd.get(), size);
  return read_from(source, path, options);
}

Error no_memory_for(const std::string& what) {
  return error(Code::io,
               "%s: not enough memory to hold it; give it less at a time (fewer ranks, a shorter "
               "run), or more memory",
               what.c_str());
}

Result<ReadFile> read_process(std::span<const std::byte> bytes, const std::string& label,
                              const ReadOptions& options) {
  if (bytes.size() > options.max_file_bytes)
    return error(Code::invalid_argument, "%s: %zu bytes are over the limit of %" PRIu64,
                 label.c_str(), bytes.size(), options.max_file_bytes);
  MemorySource source(bytes);
  try {
    return read_from(source, label, options);
  } catch (const std::bad_alloc&) {
    return no_memory_for(label);
  }
}

Result<ReadFile> read_process(const std::string& path, const ReadOptions& options) {
  try {
    return read_from(path, options);
  } catch (const std::bad_alloc&) {
    return no_memory_for(path);
  }
}

}  // namespace weft::trace
