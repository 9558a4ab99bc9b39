#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <unordered_map>

#include "format.h"

namespace weft::trace {
namespace {

// One entry of a dictionary, and the last events block that carries it.
template <typename Value>
struct Defined {
  Value value;
  uint64_t block = ~uint64_t{0};
};

std::string_view text_of(const Packer& packed) {
  return {reinterpret_cast<const char*>(packed.bytes().data()), packed.bytes().size()};
}

void pack_track(Packer& out, TrackId id, const Track& track) {
  out.number(id).number(track.type).number(uint8_t{0});
  out.number(track.lane).number(track.peer).string(track.name);
}

// What stands at `path` may be replaced if it is an older trace of this user, or an empty file. A
// trace tells much of a job, and a link or a pipe with the name of one may have been put there by
// someone else.
Result<void> check_replaced(const std::string& path, Files& files) {
  const auto stays = [&](const char* why) {
    return error(Code::invalid_argument,
                 "%s: there is something already, and it is %s; it was left as it is: remove it, "
                 "or name another file",
                 path.c_str(), why);
  };
  const auto unreadable = [&] {
    return io_error(errno, "%s: reading what is there already", path.c_str());
  };
  // Non-blocking, so that a named pipe is refused instead of waited for.
  const Fd fd = files.open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  if (!fd && errno == ELOOP) return stays("a link");
  if (!fd && errno == ENXIO) return stays("no regular file");  // a socket
  if (!fd) return unreadable();
  struct stat status {};
  if (files.status(fd.get(), status) != 0) return unreadable();
  if (!S_ISREG(status.st_mode)) return stays("no regular file");
  if (status.st_uid != ::geteuid()) return stays("another user's");
  char magic[sizeof kFileMagic];
  const ssize_t got = files.read_beginning(fd.get(), std::as_writable_bytes(std::span(magic)));
  if (got < 0) return unreadable();
  const bool trace =
      got == ssize_t{sizeof magic} && std::memcmp(magic, kFileMagic, sizeof magic) == 0;
  if (got != 0 && !trace) return stays("not a weft trace");
  return {};
}

// A new file, which nobody else can read. One that is replaced is removed and not emptied: whoever
// still reads or writes it keeps what it has.
Result<Fd> new_file(const std::string& path, Files& files) {
  Fd fd = create_file(path, Readers::owner, files);
  if (!fd && errno == EEXIST) {
    WEFT_TRY(check_replaced(path, files));
    if (files.unlink(path) != 0) return io_error(errno, "%s: replacing", path.c_str());
    fd = create_file(path, Readers::owner, files);
  }
  if (!fd) return io_error(errno, "%s: creating", path.c_str());
  return fd;
}

class FileWriter final : public Writer {
 public:
  FileWriter(std::string path, const Environment& environment, const WriterOptions& options)
      : path_(std::move(path)), options_(options) {
    pack_environment(environment);
  }

  ~FileWriter() override {
    if (!started_) {
      // A file that says nothing is of no use to anyone.
      if (fd_) options_.files->unlink(path_);
      return;
    }
    // Without close() the file stays unfinished, and says so; what was handed over is still kept.
    try {
      if (!closed_) (void)write_events();
    } catch (const std::bad_alloc&) {
      return;  // nor is there memory for it
    }
  }

  Result<void> start() {
    FileHeader header{};
    std::memcpy(header.magic, kFileMagic, sizeof header.magic);
    header.version = kFormatVersion;
    const std::string_view written_by = version();
    std::memcpy(header.writer, written_by.data(),
                std::min(written_by.size(), sizeof header.writer - 1));
    header.checksum = checksum_of(header);
    WEFT_ASSIGN(fd_, new_file(path_, *options_.files));
    WEFT_TRY(write_out(std::as_bytes(std::span(&header, 1))));
    WEFT_TRY(repeat_descriptions());
    started_ = true;
    return {};
  }

  Result<void> model(const Model& model) override {
    WEFT_TRY(check_open());
    if (const char* flaw = flaw_of(model)) return refuse("model", flaw);
    if (model.layers.size() < layers_ || model.tensors.size() < tensors_)
      return refuse("model", "it is smaller than the one before it, which events may refer to");
    Packer payload;
    payload.string(model.name).number(static_cast<uint32_t>(model.layers.size()));
    for (const Layer& layer : model.layers) payload.string(layer.name);
    for (const Tensor& tensor : model.tensors) {
      payload.string(tensor.name).number(tensor.bytes);
      payload.number(tensor.produced_by).number(tensor.updated_by).number(tensor.consumed_by);
    }
    if (payload.bytes().size() > kMaxPayloadBytes)
      return refuse("model", "its description is too long");
    WEFT_TRY(write_events());  // events stand behind the model that they refer to
    model_ = std::move(payload);
    layers_ = model.layers.size();
    tensors_ = model.tensors.size();
    return write_model();
  }

  Result<void> track(TrackId id, const Track& track) override {
    WEFT_TRY(check_open());
    if (!is_known(track.type)) return refuse("track", "unknown type");
    if (track.name.size() > kMaxNameBytes) return refuse("track", "its name is too long");
    if (tracks_.size() <= id) tracks_.resize(size_t{id} + 1);
    auto& slot = tracks_[id];
    if (slot && slot->value != track)
      return error(Code::invalid_argument, "%s: track %u is already \"%s\"", path_.c_str(), id,
                   slot->value.name.c_str());
    if (!slot) slot = Defined<Track>{track};
    return {};
  }

  Result<void> name(NameId id, std::string_view name) override {
    WEFT_TRY(check_open());
    if (id == kNone) return refuse("name", "its id means \"none\"");
    if (name.size() > kMaxNameBytes) return refuse("name", "it is too long");
    auto [slot, added] = names_.try_emplace(id, Defined<std::string>{std::string(name)});
    if (!added && slot->second.value != name)
      return error(Code::invalid_argument, "%s: name %u is already \"%s\"", path_.c_str(), id,
                   slot->second.value.c_str());
    return {};
  }

  Result<void> events(std::span<const Event> events) override {
    WEFT_TRY(check_open());
    for (size_t i = 0; i < events.size(); ++i) WEFT_TRY(check_event(events[i], i));
    for (const Event& event : events) WEFT_TRY(add_event(event));
    return {};
  }

  Result<void> clock_samples(std::span<const ClockSample> samples) override {
    return write_records(BlockType::clock_samples, samples, totals_.clock_samples);
  }

  Result<void> pings(std::span<const PingSample> samples) override {
    for (const PingSample& sample : samples) {
      if (const char* flaw = flaw_of(sample)) return refuse("ping", flaw);
    }
    return write_records(BlockType::pings, samples, totals_.pings);
  }

  Result<void> probe(std::span<const ProbeResult> results) override {
    for (const ProbeResult& result : results) {
      if (const char* flaw = flaw_of(result)) return refuse("probe result", flaw);
    }
    return write_records(BlockType::probe, results, totals_.probe);
  }

  Result<void> note(const Note& note) override {
    WEFT_TRY(check_open());
    Packer payload;
    payload.number(note.time_ns).string(note.key).string(note.value);
    if (payload.bytes().size() > kMaxPayloadBytes) return refuse("note", "it is too long");
    totals_.notes += 1;
    return write_block(BlockType::notes, 1, payload.bytes());
  }

  Result<void> dropped(uint64_t total) override {
    WEFT_TRY(check_open());
    totals_.dropped = total;
    return {};
  }

  Result<void> flush() override {
    WEFT_TRY(check_open());
    return write_events();
  }

  Result<void> close() override {
    WEFT_TRY(check_open());
    WEFT_TRY(write_events());
    WEFT_TRY(write_definitions());
    WEFT_TRY(repeat_descriptions());
    WEFT_TRY(write_block(BlockType::closing, 1, std::as_bytes(std::span(&totals_, 1))));
    closed_ = true;
    // Some file systems say only here that the disk is full.
    if (options_.files->close(std::move(fd_)) != 0)
      return io_error(errno, "%s: closing", path_.c_str());
    return {};
  }

  size_t environment_bytes() const { return environment_.bytes().size(); }

 private:
  void pack_environment(const Environment& environment) {
    const auto field = [this](Field id, std::string_view value) {
      environment_.number(id).number(uint16_t{0}).string(value);
      ++environment_fields_;
    };
    const auto number = [&](Field id, auto value) {
      field(id, {reinterpret_cast<const char*>(&value), sizeof value});
    };
    const auto pairs = [&](Field id, const std::map<std::string, std::string>& map) {
      for (const auto& [key, value] : map) {
        Packer pair;
        pair.string(key).raw(std::as_bytes(std::span(value)));
        field(id, text_of(pair));
      }
    };
    field(Field::weft_version, environment.weft_version);
    field(Field::host, environment.host);
    number(Field::host_index, environment.host_index);
    number(Field::rank, environment.rank);
    number(Field::ranks, environment.ranks);
    number(Field::cores, environment.cores);
    field(Field::kernel, environment.kernel);
    field(Field::congestion_control, environment.congestion_control);
    pairs(Field::sysctl, environment.sysctls);
    field(Field::plan_name, environment.plan_name);
    field(Field::plan_hash, environment.plan_hash);
    field(Field::plan_text, environment.plan_text);
    number(Field::predicted, static_cast<uint8_t>(environment.predicted));
    number(Field::dilation, environment.dilation);
    number(Field::shrink, environment.shrink);
    number(Field::emulated_compute, static_cast<uint8_t>(environment.emulated_compute));
    pairs(Field::lab, environment.lab);
  }

  Error refuse(const char* what, const char* why) const {
    return error(Code::invalid_argument, "%s: %s: %s", path_.c_str(), what, why);
  }

  Result<void> check_open() const {
    if (closed_) return error(Code::invalid_argument, "%s: already closed", path_.c_str());
    return {};
  }

  Result<void> check_event(const Event& event, size_t index) const {
    const char* flaw = flaw_of(event);
    if (flaw == nullptr) {
      if (!is_known(event.kind)) {
        flaw = "unknown kind";
      } else if (event.track >= tracks_.size() || !tracks_[event.track]) {
        flaw = "its track is not defined";
      } else if (event.layer != kNone16 && event.layer >= layers_) {
        flaw = "its layer is not in the model";
      } else if (event.tensor != kNone && event.tensor >= tensors_) {
        flaw = "its tensor is not in the model";
      } else if (event.name != kNone && !names_.contains(event.name)) {
        flaw = "its name is not defined";
      }
    }
    if (flaw == nullptr) return {};
    return error(Code::invalid_argument, "%s: event %zu of %zu given (%s on track %u): %s",
                 path_.c_str(), index, totals_.events + index, name_of(event.kind), event.track,
                 flaw);
  }

  Result<void> add_event(const Event& event) {
    if (records_.empty()) pending_bytes_ = 16;  // what stands before the dictionary
    const uint64_t block = events_blocks_;
    Defined<Track>& track = *tracks_[event.track];
    if (track.block != block) {
      track.block = block;
      block_tracks_.push_back(event.track);
      pending_bytes_ += 12 + track.value.name.size();
    }
    if (event.name != kNone) {
      Defined<std::string>& name = names_.find(event.name)->second;
      if (name.block != block) {
        name.block = block;
        block_names_.push_back(event.name);
        pending_bytes_ += 8 + name.value.size();
      }
    }
    records_.push_back(event);
    pending_bytes_ += sizeof event;
    totals_.events += 1;
    if (pending_bytes_ + sizeof event > options_.block_bytes) return write_events();
    return {};
  }

  // Ends the pending events block. An empty one is written only to tell of more drops.
  Result<void> write_events() {
    if (records_.empty() && totals_.dropped == dropped_written_) return {};
    std::sort(block_names_.begin(), block_names_.end());
    std::sort(block_tracks_.begin(), block_tracks_.end());
    Packer payload;
    payload.number(totals_.dropped);
    payload.number(static_cast<uint32_t>(block_names_.size()));
    payload.number(static_cast<uint32_t>(block_tracks_.size()));
    for (NameId id : block_names_) payload.number(id).string(names_.find(id)->second.value);
    for (TrackId id : block_tracks_) pack_track(payload, id, tracks_[id]->value);
    payload.raw(std::as_bytes(std::span(records_)));
    const auto count = static_cast<uint32_t>(records_.size());
    records_.clear();
    block_names_.clear();
    block_tracks_.clear();
    ++events_blocks_;
    dropped_written_ = totals_.dropped;
    WEFT_TRY(write_block(BlockType::events, count, payload.bytes()));
    // Descriptions cost a sixteenth of the file at most, however long the model is.
    const uint64_t descriptions = environment_.bytes().size() + model_.bytes().size();
    if (bytes_since_repeat_ >= std::max(options_.repeat_bytes, 16 * descriptions))
      return repeat_descriptions();
    return {};
  }

  Result<void> repeat_descriptions() {
    WEFT_TRY(write_block(BlockType::environment, environment_fields_, environment_.bytes()));
    if (!model_.bytes().empty()) WEFT_TRY(write_model());
    bytes_since_repeat_ = 0;
    return {};
  }

  Result<void> write_model() {
    return write_block(BlockType::model, static_cast<uint32_t>(layers_ + tensors_), model_.bytes());
  }

  // Names and tracks once more, for those that no event used.
  Result<void> write_definitions() {
    std::vector<NameId> ids;
    ids.reserve(names_.size());
    for (const auto& [id, name] : names_) ids.push_back(id);
    std::sort(ids.begin(), ids.end());
    size_t next_name = 0;
    size_t next_track = 0;
    while (next_name < ids.size() || next_track < tracks_.size()) {
      Packer names;
      Packer tracks;
      uint32_t name_count = 0;
      uint32_t track_count = 0;
      const auto has_room = [this](const Packer& part) {
        return part.bytes().size() < options_.block_bytes;
      };
      for (; next_name < ids.size() && has_room(names); ++next_name) {
        names.number(ids[next_name]).string(names_.find(ids[next_name])->second.value);
        ++name_count;
      }
      for (; next_track < tracks_.size() && has_room(tracks); ++next_track) {
        if (!tracks_[next_track]) continue;
        pack_track(tracks, static_cast<TrackId>(next_track), tracks_[next_track]->value);
        ++track_count;
      }
      if (name_count + track_count == 0) break;
      Packer payload;
      payload.number(name_count).number(track_count).raw(names.bytes()).raw(tracks.bytes());
      WEFT_TRY(write_block(BlockType::definitions, name_count + track_count, payload.bytes()));
    }
    return {};
  }

  template <typename Record>
  Result<void> write_records(BlockType type, std::span<const Record> records, uint64_t& total) {
    WEFT_TRY(check_open());
    const size_t most = std::max<size_t>(1, options_.block_bytes / sizeof(Record));
    while (!records.empty()) {
      const auto now = records.first(std::min(most, records.size()));
      records = records.subspan(now.size());
      total += now.size();
      WEFT_TRY(write_block(type, static_cast<uint32_t>(now.size()), std::as_bytes(now)));
    }
    return {};
  }

  // One block, one write. The number of a block that could not be written is spent, so that a
  // reader of what follows sees that it is missing.
  Result<void> write_block(BlockType type, uint32_t count, std::span<const std::byte> payload) {
    BlockHeader header{};
    header.magic = kBlockMagic;
    header.payload_bytes = static_cast<uint32_t>(payload.size());
    header.sequence = sequence_++;
    header.count = count;
    header.type = static_cast<uint16_t>(type);
    header.version = kBlockVersion;
    const auto header_bytes = std::as_bytes(std::span(&header, 1));
    block_.assign(header_bytes.begin(), header_bytes.end());
    block_.insert(block_.end(), payload.begin(), payload.end());
    const uint64_t checksum = hash64(std::span<const std::byte>(block_).subspan(kBlockHashedFrom));
    std::memcpy(block_.data() + offsetof(BlockHeader, checksum), &checksum, sizeof checksum);
    bytes_since_repeat_ += block_.size();
    return write_out(block_);
  }

  Result<void> write_out(std::span<const std::byte> bytes) {
    const int failed = options_.files->write_all(fd_.get(), bytes);
    if (failed != 0) return io_error(failed, "%s: writing", path_.c_str());
    return {};
  }

  std::string path_;
  Fd fd_;
  WriterOptions options_;
  bool started_ = false;
  bool closed_ = false;

  Packer environment_;  // payloads, kept to be repeated
  uint32_t environment_fields_ = 0;
  Packer model_;
  size_t layers_ = 0;
  size_t tensors_ = 0;
  std::unordered_map<NameId, Defined<std::string>> names_;
  std::vector<std::optional<Defined<Track>>> tracks_;

  std::vector<Event> records_;  // the pending events block
  std::vector<NameId> block_names_;
  std::vector<TrackId> block_tracks_;
  size_t pending_bytes_ = 16;
  uint64_t events_blocks_ = 0;

  std::vector<std::byte> block_;
  uint64_t sequence_ = 0;
  uint64_t bytes_since_repeat_ = 0;
  uint64_t dropped_written_ = 0;
  Closing totals_;
};

}  // namespace

Result<std::unique_ptr<Writer>> create_writer(const std::string& path,
                                              const Environment& environment,
                                              const WriterOptions& options) {
  if (const char* flaw = flaw_of(environment))
    return error(Code::invalid_argument, "%s: environment: %s", path.c_str(), flaw);
  auto writer = std::make_unique<FileWriter>(path, environment, options);
  if (writer->environment_bytes() > kMaxPayloadBytes)
    return error(Code::invalid_argument, "%s: environment: too long", path.c_str());
  WEFT_TRY(writer->start());
  return std::unique_ptr<Writer>(std::move(writer));
}

Result<std::unique_ptr<Writer>> Writer::create(const std::string& path,
                                               const Environment& environment, Files& files) {
  WriterOptions options;
  options.files = &files;
  return create_writer(path, environment, options);
}

Result<void> write_process(Writer& writer, const Process& process) {
  if (process.model != Model{}) WEFT_TRY(writer.model(process.model));
  if (process.tracks.size() > size_t{kNone16} + 1)
    return error(Code::invalid_argument, "more than 65536 tracks");
  for (size_t i = 0; i < process.tracks.size(); ++i)
    WEFT_TRY(writer.track(static_cast<TrackId>(i), process.tracks[i]));
  for (size_t i = 0; i < process.names.size(); ++i)
    WEFT_TRY(writer.name(static_cast<NameId>(i), process.names[i]));
  WEFT_TRY(writer.dropped(process.dropped));
  WEFT_TRY(writer.probe(process.probe));
  WEFT_TRY(writer.clock_samples(process.clock_samples));
  WEFT_TRY(writer.pings(process.pings));
  WEFT_TRY(writer.events(process.events));
  for (const Note& note : process.notes) WEFT_TRY(writer.note(note));
  return writer.close();
}

Result<void> write(const std::string& path, const Process& process) {
  WEFT_ASSIGN(auto writer, Writer::create(path, process.environment));
  return write_process(*writer, process);
}

}  // namespace weft::trace
