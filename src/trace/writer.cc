#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
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

void pack_track(Packer& out, TrackId id, const Track& track) {
  out.put(id);
  out.put(track.type);
  out.put(uint8_t{0});
  out.put(track.lane);
  out.put(track.peer);
  out.put_text(track.name);
}

class FileWriter final : public Writer {
 public:
  FileWriter(std::string path, Fd fd, const Environment& environment, const WriterOptions& options)
      : path_(std::move(path)), fd_(std::move(fd)), options_(options) {
    pack_environment(environment);
  }

  ~FileWriter() override {
    // Without close() the file stays unfinished, and says so; what was handed over is still kept.
    if (!closed_) (void)write_events();
  }

  Result<void> start() {
    FileHeader header{};
    std::memcpy(header.magic, kFileMagic, sizeof header.magic);
    header.version = kFormatVersion;
    const std::string_view written_by = version();
    std::memcpy(header.writer, written_by.data(),
                std::min(written_by.size(), sizeof header.writer - 1));
    header.checksum = hash_of(&header, offsetof(FileHeader, checksum));
    WEFT_TRY(write_all(&header, sizeof header));
    return repeat_descriptions();
  }

  Result<void> model(const Model& model) override {
    WEFT_TRY(check_open());
    if (const char* flaw = flaw_of(model)) return refuse("model", flaw);
    if (model.layers.size() < layers_ || model.tensors.size() < tensors_)
      return refuse("model", "it is smaller than the one before it, which events may refer to");
    std::string payload;
    Packer out(payload);
    out.put_text(model.name);
    out.put(static_cast<uint32_t>(model.layers.size()));
    for (const Layer& layer : model.layers) out.put_text(layer.name);
    for (const Tensor& tensor : model.tensors) {
      out.put_text(tensor.name);
      out.put(tensor.bytes);
      out.put(tensor.produced_by);
      out.put(tensor.updated_by);
      out.put(tensor.consumed_by);
    }
    if (payload.size() > kMaxPayloadBytes) return refuse("model", "its description is too long");
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
    std::string payload;
    Packer out(payload);
    out.put(note.time_ns);
    out.put_text(note.key);
    out.put_text(note.value);
    if (payload.size() > kMaxPayloadBytes) return refuse("note", "it is too long");
    totals_.notes += 1;
    return write_block(BlockType::notes, 1, payload);
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
    std::string payload;
    Packer(payload).put(totals_);
    WEFT_TRY(write_block(BlockType::closing, 1, payload));
    closed_ = true;
    // Some file systems say only here that the disk is full.
    if (::close(fd_.release()) != 0) return io_error(errno, "%s: closing", path_.c_str());
    return {};
  }

  size_t environment_bytes() const { return environment_.size(); }

 private:
  void pack_environment(const Environment& environment) {
    const auto field = [this](Field id, std::string_view value) {
      Packer out(environment_);
      out.put(id);
      out.put(uint16_t{0});
      out.put_text(value);
      ++environment_fields_;
    };
    const auto number = [&](Field id, auto value) {
      field(id, {reinterpret_cast<const char*>(&value), sizeof value});
    };
    const auto pairs = [&](Field id, const std::map<std::string, std::string>& map) {
      for (const auto& [key, value] : map) {
        std::string pair;
        Packer(pair).put_text(key);
        field(id, pair + value);
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
    records_.append(reinterpret_cast<const char*>(&event), sizeof event);
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
    std::string payload;
    payload.reserve(pending_bytes_);
    Packer out(payload);
    out.put(totals_.dropped);
    out.put(static_cast<uint32_t>(block_names_.size()));
    out.put(static_cast<uint32_t>(block_tracks_.size()));
    for (NameId id : block_names_) {
      out.put(id);
      out.put_text(names_.find(id)->second.value);
    }
    for (TrackId id : block_tracks_) pack_track(out, id, tracks_[id]->value);
    payload += records_;
    const auto count = static_cast<uint32_t>(records_.size() / sizeof(Event));
    records_.clear();
    block_names_.clear();
    block_tracks_.clear();
    ++events_blocks_;
    dropped_written_ = totals_.dropped;
    WEFT_TRY(write_block(BlockType::events, count, payload));
    // Descriptions cost a sixteenth of the file at most, however long the model is.
    const uint64_t descriptions = environment_.size() + model_.size();
    if (bytes_since_repeat_ >= std::max(options_.repeat_bytes, 16 * descriptions))
      return repeat_descriptions();
    return {};
  }

  Result<void> repeat_descriptions() {
    WEFT_TRY(write_block(BlockType::environment, environment_fields_, environment_));
    if (!model_.empty()) WEFT_TRY(write_model());
    bytes_since_repeat_ = 0;
    return {};
  }

  Result<void> write_model() {
    return write_block(BlockType::model, static_cast<uint32_t>(layers_ + tensors_), model_);
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
      std::string names;
      std::string tracks;
      uint32_t name_count = 0;
      uint32_t track_count = 0;
      Packer names_out(names);
      Packer tracks_out(tracks);
      for (; next_name < ids.size() && names.size() < options_.block_bytes; ++next_name) {
        names_out.put(ids[next_name]);
        names_out.put_text(names_.find(ids[next_name])->second.value);
        ++name_count;
      }
      for (; next_track < tracks_.size() && tracks.size() < options_.block_bytes; ++next_track) {
        if (!tracks_[next_track]) continue;
        pack_track(tracks_out, static_cast<TrackId>(next_track), tracks_[next_track]->value);
        ++track_count;
      }
      if (name_count + track_count == 0) break;
      std::string payload;
      Packer out(payload);
      out.put(name_count);
      out.put(track_count);
      payload += names;
      payload += tracks;
      WEFT_TRY(write_block(BlockType::definitions, name_count + track_count, payload));
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
      const std::string payload(reinterpret_cast<const char*>(now.data()), now.size_bytes());
      WEFT_TRY(write_block(type, static_cast<uint32_t>(now.size()), payload));
    }
    return {};
  }

  // One block, one write. The number of a block that could not be written is spent, so that a
  // reader of what follows sees that it is missing.
  Result<void> write_block(BlockType type, uint32_t count, std::string_view payload) {
    BlockHeader header{};
    header.magic = kBlockMagic;
    header.payload_bytes = static_cast<uint32_t>(payload.size());
    header.sequence = sequence_++;
    header.count = count;
    header.type = static_cast<uint16_t>(type);
    header.version = kBlockVersion;
    block_.assign(reinterpret_cast<const char*>(&header), sizeof header);
    block_ += payload;
    const uint64_t checksum =
        hash_of(block_.data() + kBlockHashedFrom, block_.size() - kBlockHashedFrom);
    std::memcpy(block_.data() + offsetof(BlockHeader, checksum), &checksum, sizeof checksum);
    bytes_since_repeat_ += block_.size();
    return write_all(block_.data(), block_.size());
  }

  Result<void> write_all(const void* data, size_t size) {
    const char* from = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t n = ::write(fd_.get(), from, size);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return io_error(n < 0 ? errno : EIO, "%s: writing", path_.c_str());
      from += n;
      size -= static_cast<size_t>(n);
    }
    return {};
  }

  std::string path_;
  Fd fd_;
  WriterOptions options_;
  bool closed_ = false;

  std::string environment_;  // payloads, kept to be repeated
  uint32_t environment_fields_ = 0;
  std::string model_;
  size_t layers_ = 0;
  size_t tensors_ = 0;
  std::unordered_map<NameId, Defined<std::string>> names_;
  std::vector<std::optional<Defined<Track>>> tracks_;

  std::string records_;  // the pending events block
  std::vector<NameId> block_names_;
  std::vector<TrackId> block_tracks_;
  size_t pending_bytes_ = 16;
  uint64_t events_blocks_ = 0;

  std::string block_;
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
  Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd) return io_error(errno, "%s: creating", path.c_str());
  auto writer = std::make_unique<FileWriter>(path, std::move(fd), environment, options);
  if (writer->environment_bytes() > kMaxPayloadBytes)
    return error(Code::invalid_argument, "%s: environment: too long", path.c_str());
  WEFT_TRY(writer->start());
  return std::unique_ptr<Writer>(std::move(writer));
}

Result<std::unique_ptr<Writer>> Writer::create(const std::string& path,
                                               const Environment& environment) {
  return create_writer(path, environment, {});
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
