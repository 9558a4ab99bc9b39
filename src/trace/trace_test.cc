#include "weft/trace.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>

#include "format.h"
#include "sample.h"
#include "source.h"

namespace weft::trace {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

// A folder of its own for each test, gone with it.
class TraceTest : public ::testing::Test {
 protected:
  TraceTest() {
    std::string pattern = (fs::temp_directory_path() / "weft-trace-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~TraceTest() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  void put(const std::string& name, std::string_view bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
  }
  std::string get(const std::string& name) const { return *read_file(path(name), Bytes{1u << 30}); }
  // The bytes of `process` in blocks of a few events.
  std::string small_blocks(const Process& process, size_t block_bytes = 400) const {
    auto writer = create_writer(path("small"), process.environment, {block_bytes, 2000});
    EXPECT_TRUE(writer);
    EXPECT_TRUE(write_process(**writer, process));
    return get("small");
  }

  fs::path folder_;
};

Result<ReadFile> parse(std::string_view bytes, const ReadOptions& options = {}) {
  return read_process(std::as_bytes(std::span(bytes)), "x.weft", options);
}

void expect_equal(const Process& a, const Process& b) {
  EXPECT_EQ(a.environment, b.environment);
  EXPECT_EQ(a.model, b.model);
  EXPECT_EQ(a.names, b.names);
  EXPECT_EQ(a.tracks, b.tracks);
  EXPECT_EQ(a.events, b.events);
  EXPECT_EQ(a.clock_samples, b.clock_samples);
  EXPECT_EQ(a.pings, b.pings);
  EXPECT_EQ(a.probe, b.probe);
  EXPECT_EQ(a.notes, b.notes);
  EXPECT_EQ(a.dropped, b.dropped);
}

// Where each block of a whole file starts.
std::vector<size_t> blocks_of(std::string_view bytes) {
  std::vector<size_t> starts;
  for (size_t at = kFileHeaderBytes; at < bytes.size();) {
    starts.push_back(at);
    BlockHeader header;
    std::memcpy(&header, bytes.data() + at, sizeof header);
    at += kBlockHeaderBytes + header.payload_bytes;
  }
  return starts;
}

BlockHeader header_at(std::string_view bytes, size_t at) {
  BlockHeader header;
  std::memcpy(&header, bytes.data() + at, sizeof header);
  return header;
}

// Makes the checksum of the block at `at` right again after an edit.
void reseal(std::string& bytes, size_t at) {
  BlockHeader header = header_at(bytes, at);
  header.checksum = hash64(std::string_view(bytes).substr(
      at + kBlockHashedFrom, kBlockHeaderBytes - kBlockHashedFrom + header.payload_bytes));
  std::memcpy(bytes.data() + at, &header, sizeof header);
}

TEST_F(TraceTest, what_is_written_is_read) {
  const Process process = sample_process(1, 3, 50);
  ASSERT_TRUE(write(path("a.weft"), process));
  auto file = read_process(path("a.weft"));
  ASSERT_TRUE(file) << file.error().message();
  EXPECT_FALSE(file->damage.any());
  EXPECT_TRUE(file->damage.details.empty());
  expect_equal(file->process, process);
  EXPECT_EQ(file->facts.format, kFormatVersion);
  EXPECT_EQ(file->facts.written_by, version());
  EXPECT_EQ(file->facts.events, process.events.size());
  EXPECT_EQ(file->facts.bytes, fs::file_size(path("a.weft")));

  auto described = read_process(path("a.weft"), {.events = false});
  ASSERT_TRUE(described);
  EXPECT_FALSE(described->damage.any());
  EXPECT_TRUE(described->process.events.empty());
  EXPECT_EQ(described->facts.events, process.events.size());
  EXPECT_EQ(described->process.tracks, process.tracks);
}

TEST_F(TraceTest, an_empty_process_is_a_trace) {
  ASSERT_TRUE(write(path("a.weft"), Process{}));
  auto file = read_process(path("a.weft"));
  ASSERT_TRUE(file);
  EXPECT_FALSE(file->damage.any());
  expect_equal(file->process, Process{});
}

TEST_F(TraceTest, many_blocks_read_through_a_window_as_from_memory) {
  Process process = sample_process(0, 2, 20'000);  // 14 MB
  ASSERT_TRUE(write(path("a.weft"), process));
  auto file = read_process(path("a.weft"));
  ASSERT_TRUE(file);
  EXPECT_FALSE(file->damage.any());
  EXPECT_EQ(file->process.events, process.events);
  auto same = parse(get("a.weft"));
  ASSERT_TRUE(same);
  EXPECT_EQ(same->process.events, process.events);
}

// ---- damage ------------------------------------------------------------------------------

// The promise of the format, for one file that is not what was written.
void expect_no_invention(const Process& process, std::string_view bytes, const std::string& what) {
  auto file = parse(bytes);
  if (!file) {
    EXPECT_FALSE(file.error().message().empty());
    return;
  }
  ASSERT_TRUE(file->damage.any()) << what;
  ASSERT_FALSE(file->damage.details.empty()) << what;
  const Process& read = file->process;
  ASSERT_EQ(read.environment, process.environment) << what;
  ASSERT_TRUE(read.model == process.model || read.model == Model{}) << what;
  ASSERT_TRUE(read.dropped == process.dropped || read.dropped == 0) << what;
  // What is left is what was written, in order, with holes.
  size_t at = 0;
  for (const Event& event : read.events) {
    while (at < process.events.size() && process.events[at] != event) ++at;
    ASSERT_LT(at, process.events.size()) << what << ": an event that nobody wrote";
    ++at;
    ASSERT_EQ(read.tracks.at(event.track), process.tracks.at(event.track)) << what;
    ASSERT_EQ(read.label(event), process.label(event)) << what;
  }
  ASSERT_LE(read.notes.size(), process.notes.size());
  ASSERT_LE(read.probe.size(), process.probe.size());
}

TEST_F(TraceTest, cut_off_at_any_byte_it_is_read_up_to_there) {
  const Process process = sample_process(0, 2, 4);
  const std::string whole = small_blocks(process);
  ASSERT_GT(blocks_of(whole).size(), 10u);
  size_t most = 0;
  for (size_t size = 0; size < whole.size(); ++size) {
    const std::string_view cut = std::string_view(whole).substr(0, size);
    expect_no_invention(process, cut, text("cut to %zu bytes", size));
    if (HasFatalFailure()) return;
    auto file = parse(cut);
    if (!file) {
      EXPECT_EQ(most, 0u) << "a longer file may not hold less";
      continue;
    }
    EXPECT_TRUE(file->damage.unfinished);
    EXPECT_GE(file->process.events.size(), most);
    most = file->process.events.size();
  }
  EXPECT_EQ(most, process.events.size());
  EXPECT_FALSE(parse(whole)->damage.any());
}

TEST_F(TraceTest, any_changed_byte_is_noticed_and_costs_one_block) {
  const Process process = sample_process(0, 2, 4);
  const std::string whole = small_blocks(process);
  const size_t most_in_a_block = 400 / sizeof(Event);
  std::string bytes = whole;
  for (size_t at = 0; at < whole.size(); ++at) {
    const auto original = static_cast<unsigned char>(whole[at]);
    for (unsigned value :
         {original ^ 0x01u, original ^ 0x02u, original ^ 0x04u, original ^ 0x08u, original ^ 0x10u,
          original ^ 0x20u, original ^ 0x40u, original ^ 0x80u, 0x00u, 0xffu}) {
      if (value == original) continue;
      bytes[at] = static_cast<char>(value);
      expect_no_invention(process, bytes, text("byte %zu is %#x", at, value));
      if (HasFatalFailure()) return;
      auto file = parse(bytes);
      ASSERT_TRUE(file) << "byte " << at << ": " << file.error().message();
      EXPECT_GE(file->process.events.size() + most_in_a_block, process.events.size());
      EXPECT_LE(file->damage.blocks_lost, 1u) << at;
      EXPECT_EQ(file->process.model, process.model);
    }
    bytes[at] = whole[at];
  }
}

TEST_F(TraceTest, lost_or_inserted_bytes_cost_only_what_they_hit) {
  const Process process = sample_process(0, 2, 4);
  const std::string whole = small_blocks(process);
  Rng rng(11);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes = whole;
    const size_t at = rng.below(bytes.size());
    if (round % 3 == 0) {
      bytes.erase(at, 1 + rng.below(200));
    } else if (round % 3 == 1) {
      bytes.insert(at, 1 + rng.below(50), static_cast<char>(rng.next()));
    } else {
      // A stretch of the file stands twice: no event may.
      bytes.insert(at, whole.substr(rng.below(whole.size()), 600));
    }
    if (bytes == whole) continue;
    expect_no_invention(process, bytes, text("round %d", round));
    if (HasFatalFailure()) return;
  }
}

TEST_F(TraceTest, losing_a_copy_of_environment_or_model_loses_nothing) {
  const Process process = sample_process(0, 2, 40);
  std::string bytes = small_blocks(process);
  std::map<uint16_t, int> copies;
  for (size_t at : blocks_of(bytes)) {
    const auto type = header_at(bytes, at).type;
    if (type > 2) continue;
    ++copies[type];
    std::string without = bytes;
    without.erase(at, kBlockHeaderBytes + header_at(bytes, at).payload_bytes);
    auto file = parse(without);
    ASSERT_TRUE(file);
    EXPECT_EQ(file->damage.blocks_lost, 1u);
    EXPECT_EQ(file->process.environment, process.environment);
    EXPECT_EQ(file->process.model, process.model);
    EXPECT_EQ(file->process.events, process.events);
  }
  EXPECT_GE(copies[1], 3);
  EXPECT_GE(copies[2], 3);
}

TEST_F(TraceTest, without_any_model_events_name_no_layer) {
  const Process process = sample_process(0, 2, 2);
  std::string bytes = small_blocks(process);
  const auto starts = blocks_of(bytes);
  for (size_t i = starts.size(); i-- > 0;) {
    const BlockHeader header = header_at(bytes, starts[i]);
    if (header.type == static_cast<uint16_t>(BlockType::model))
      bytes.erase(starts[i], kBlockHeaderBytes + header.payload_bytes);
  }
  auto file = parse(bytes);
  ASSERT_TRUE(file);
  EXPECT_TRUE(file->damage.any());
  EXPECT_EQ(file->process.events.size(), process.events.size());
  for (const Event& event : file->process.events) {
    EXPECT_EQ(event.layer, kNone16);
    EXPECT_EQ(event.tensor, kNone);
  }
}

TEST_F(TraceTest, a_killed_writer_leaves_what_it_flushed) {
  const Process process = sample_process(0, 2, 1);
  auto writer = Writer::create(path("a.weft"), process.environment);
  ASSERT_TRUE(writer);
  ASSERT_TRUE((*writer)->model(process.model));
  for (TrackId i = 0; i < 4; ++i) ASSERT_TRUE((*writer)->track(i, process.tracks[i]));
  for (NameId i = 0; i < 3; ++i) ASSERT_TRUE((*writer)->name(i, process.names[i]));
  ASSERT_TRUE((*writer)->events(process.events));
  ASSERT_TRUE((*writer)->dropped(3));
  ASSERT_TRUE((*writer)->flush());
  auto file = read_process(path("a.weft"));  // as a reader would find it after a kill
  ASSERT_TRUE(file);
  EXPECT_TRUE(file->damage.unfinished);
  EXPECT_EQ(file->damage.bytes_lost, 0u);
  EXPECT_EQ(file->process.events, process.events);
  EXPECT_EQ(file->process.dropped, 3u);
  ASSERT_TRUE((*writer)->dropped(9));  // more drops, no more events
  ASSERT_TRUE((*writer)->flush());
  EXPECT_EQ(read_process(path("a.weft"))->process.dropped, 9u);
  ASSERT_TRUE((*writer)->close());
  EXPECT_FALSE(read_process(path("a.weft"))->damage.any());
  EXPECT_FALSE((*writer)->events(process.events));
}

// ---- what others may have written --------------------------------------------------------

TEST_F(TraceTest, a_newer_format_is_refused_by_name) {
  std::string bytes = small_blocks(sample_process(0, 2, 1));
  FileHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  header.version = 2;
  std::memcpy(header.writer, "7.1.0\0", 6);
  header.checksum = checksum_of(header);
  std::memcpy(bytes.data(), &header, sizeof header);
  auto file = parse(bytes);
  ASSERT_FALSE(file);
  EXPECT_EQ(file.error().code(), Code::unsupported);
  EXPECT_EQ(file.error().message(),
            text("x.weft was written in format 2 by weft 7.1.0; this weft (%s) reads up to 1: "
                 "upgrade weft",
                 version()));
}

TEST_F(TraceTest, newer_records_are_passed_over_and_told) {
  Process process = sample_process(0, 2, 1);
  std::string bytes = small_blocks(process, 64 << 10);
  for (size_t at : blocks_of(bytes)) {
    if (header_at(bytes, at).type != static_cast<uint16_t>(BlockType::events)) continue;
    const size_t first = at + kBlockHeaderBytes + header_at(bytes, at).payload_bytes -
                         process.events.size() * sizeof(Event);
    bytes[first + offsetof(Event, kind)] = 99;
    bytes[first + sizeof(Event) + offsetof(Event, shape)] = 99;
    reseal(bytes, at);
  }
  auto file = parse(bytes);
  ASSERT_TRUE(file);
  EXPECT_FALSE(file->damage.any());
  EXPECT_THAT(file->damage.details, ElementsAre("1 records of a newer weft were passed over"));
  EXPECT_EQ(file->process.events.size(), process.events.size() - 1);
  EXPECT_EQ(file->process.events[0].kind, Kind::other);
  EXPECT_EQ(file->process.events[1], process.events[2]);

  bytes = small_blocks(process);
  const std::vector<size_t> starts = blocks_of(bytes);
  BlockHeader header = header_at(bytes, starts[5]);
  header.type = 77;
  std::memcpy(bytes.data() + starts[5], &header, sizeof header);
  reseal(bytes, starts[5]);
  file = parse(bytes);
  ASSERT_TRUE(file);
  EXPECT_THAT(file->damage.details,
              ::testing::Contains("1 blocks of a newer weft were passed over"));
}

TEST_F(TraceTest, wrong_contents_under_a_right_checksum_are_refused_block_by_block) {
  const Process process = sample_process(0, 2, 1);
  const std::string whole = small_blocks(process, 64 << 10);
  size_t events_at = 0;
  for (size_t at : blocks_of(whole)) {
    if (header_at(whole, at).type == static_cast<uint16_t>(BlockType::events)) events_at = at;
  }
  const size_t end = events_at + kBlockHeaderBytes + header_at(whole, events_at).payload_bytes;
  const size_t last = end - sizeof(Event);
  const auto with = [&](size_t at, auto value) {
    std::string bytes = whole;
    std::memcpy(bytes.data() + at, &value, sizeof value);
    reseal(bytes, events_at);
    auto file = parse(bytes);
    EXPECT_TRUE(file);
    EXPECT_EQ(file->damage.blocks_lost, 1u);
    EXPECT_TRUE(file->process.events.empty());
    return file->damage.details.at(0);
  };
  EXPECT_THAT(with(last + 62, uint16_t{500}), HasSubstr("track is not in its block"));
  EXPECT_THAT(with(last + 32, uint32_t{500}), HasSubstr("name is not in its block"));
  EXPECT_THAT(with(last - 72 + 8, int64_t{-1}), HasSubstr("negative duration"));
  EXPECT_THAT(with(last, std::numeric_limits<int64_t>::max()), HasSubstr("start out of range"));
  EXPECT_THAT(with(last + 70, uint16_t{1}), HasSubstr("reserved"));
  EXPECT_THAT(with(events_at + 24, uint32_t{1}), HasSubstr("malformed"));
  EXPECT_THAT(with(events_at + 32 + 8, ~uint32_t{0}), HasSubstr("dictionary"));
}

TEST_F(TraceTest, a_huge_name_id_costs_no_memory) {
  const Process process = sample_process(0, 1, 1);
  auto writer = Writer::create(path("a.weft"), process.environment);
  ASSERT_TRUE((*writer)->track(0, process.tracks[0]));
  ASSERT_TRUE((*writer)->name(0xfffffff0, "far"));
  ASSERT_TRUE((*writer)->name(3, "near"));
  Event event;
  event.name = 0xfffffff0;
  ASSERT_TRUE((*writer)->events(std::span(&event, 1)));
  ASSERT_TRUE((*writer)->close());
  auto file = read_process(path("a.weft"));
  ASSERT_TRUE(file);
  EXPECT_FALSE(file->damage.any());
  EXPECT_THAT(file->process.names, ElementsAre("near", "far"));
  EXPECT_EQ(file->process.label(file->process.events.at(0)), "far");
}

TEST_F(TraceTest, a_file_of_false_headers_is_given_up_in_time) {
  std::string bytes = small_blocks(sample_process(0, 2, 1));
  BlockHeader header{kBlockMagic, 8u << 20, 1, 1, 1, 3, 1};
  const std::string fake(reinterpret_cast<const char*>(&header), sizeof header);
  while (bytes.size() < (16u << 20)) bytes += fake;
  auto file = parse(bytes);  // 512 Ki candidates of 8 MiB each: 4 TiB to hash without a budget
  ASSERT_TRUE(file);
  EXPECT_TRUE(file->damage.any());
}

// Through a window, every false beginning once read a MiB again: 15 s.
TEST_F(TraceTest, searching_a_file_reads_every_byte_once) {
  const std::string bytes = small_blocks(sample_process(0, 2, 1));
  for (uint32_t promised : {0u, 100u, 1u << 16, 16u << 20, ~0u}) {
    BlockHeader header{kBlockMagic, promised, 1, 1, 1, 3, 1};
    const std::string fake(reinterpret_cast<const char*>(&header), sizeof header);
    std::string file = bytes;
    while (file.size() < (4u << 20)) file += fake.substr(0, 8);
    put("false", file);
    Fd fd(::open(path("false").c_str(), O_RDONLY | O_CLOEXEC));
    FileSource source(fd.get(), file.size());
    ASSERT_TRUE(read_from(source, "false", {}));
    // What failed may cost four times the file and 64 MiB; that which is only looked at, itself.
    const uint64_t most = promised <= 100 || promised > (4u << 20) ? 2 : 6 + 16;
    EXPECT_LE(source.bytes_read(), most * file.size()) << promised;
  }
}

TEST_F(TraceTest, what_is_not_a_trace_is_refused) {
  EXPECT_EQ(parse("").error().message(), "x.weft: empty: its writer ended before it wrote");
  EXPECT_EQ(parse("{}").error().message(), "x.weft: not a weft trace");
  EXPECT_EQ(parse(std::string(5000, 'x')).error().message(), "x.weft: not a weft trace");
  const std::string whole = small_blocks(sample_process(0, 2, 1));
  EXPECT_EQ(parse(whole.substr(0, 40)).error().message(), "x.weft: cut off in its first bytes");
  EXPECT_THAT(parse(whole.substr(0, 70)).error().message(), HasSubstr("nothing is left"));
  EXPECT_EQ(read_process(path("none")).error().code(), Code::not_found);
  EXPECT_THAT(read_process(folder_.string()).error().message(), HasSubstr("not a regular file"));
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(read_process(path("pipe")).error().message(), HasSubstr("not a regular file"));
  EXPECT_THAT(parse(whole, {.max_file_bytes = 100}).error().message(), HasSubstr("over the limit"));
}

TEST(Source, a_file_that_shrinks_under_the_reader_ends_there) {
  std::FILE* file = std::tmpfile();
  std::fputs("0123456789", file);
  std::fflush(file);
  FileSource source(::fileno(file), 100);  // it was 100 bytes long when it was opened
  EXPECT_EQ(source.view(8, 50).size(), 2u);
  EXPECT_TRUE(source.view(20, 1).empty());
  EXPECT_THAT(source.trouble(), HasSubstr("became shorter"));
  std::fclose(file);
}

// ---- writing -----------------------------------------------------------------------------

TEST_F(TraceTest, a_writer_refuses_what_a_reader_would) {
  const Process process = sample_process(0, 2, 1);
  Environment bad = process.environment;
  bad.rank = 2;
  EXPECT_THAT(Writer::create(path("a"), bad).error().message(), HasSubstr("rank is not below"));
  bad = process.environment;
  constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  for (double factor : {0.0, -0.0, -1.0, 0.5, 0.999999, 1e-300, 1000001.0, 1e300, kNoNumber,
                        kInfinite, -kInfinite}) {
    bad.dilation = factor;
    bad.shrink = 1;
    EXPECT_THAT(Writer::create(path("a"), bad).error().message(), HasSubstr("dilation is not a"));
    bad.dilation = 1;
    bad.shrink = factor;
    EXPECT_THAT(Writer::create(path("a"), bad).error().message(), HasSubstr("shrink is not a"));
  }
  EXPECT_FALSE(fs::exists(path("a"))) << "nothing is made for what is refused";
  EXPECT_EQ(Writer::create(path("no/such/folder"), process.environment).error().code(),
            Code::not_found);

  auto writer = *Writer::create(path("a"), process.environment);
  const auto refuses = [&](auto edit, const char* why) {
    Event events[2];
    edit(events[1]);
    auto result = writer->events(events);
    ASSERT_FALSE(result) << why;
    EXPECT_EQ(result.error().code(), Code::invalid_argument);
    EXPECT_THAT(result.error().message(), HasSubstr(why));
  };
  refuses([](Event&) {}, "track is not defined");
  ASSERT_TRUE(writer->track(0, process.tracks[0]));
  refuses([](Event& e) { e.name = 0; }, "name is not defined");
  refuses([](Event& e) { e.layer = 0; }, "layer is not in the model");
  refuses([](Event& e) { e.duration_ns = -1; }, "negative duration");
  refuses([](Event& e) { e.shape = static_cast<Shape>(9); }, "unknown shape");
  refuses([](Event& e) { e.kind = static_cast<Kind>(200); }, "unknown kind");
  ASSERT_TRUE(writer->model(process.model));
  refuses([](Event& e) { e.tensor = 2; }, "tensor is not in the model");
  EXPECT_FALSE(writer->model(Model{}));
  Model wrong = process.model;
  wrong.tensors[0].produced_by = 9;
  EXPECT_FALSE(writer->model(wrong));
  ASSERT_TRUE(writer->name(0, "a"));
  ASSERT_TRUE(writer->name(0, "a"));
  EXPECT_FALSE(writer->name(0, "b"));
  EXPECT_FALSE(writer->name(kNone, "b"));
  EXPECT_FALSE(writer->name(1, std::string(1 << 20, 'x')));
  EXPECT_FALSE(writer->track(0, process.tracks[1]));
  PingSample ping;
  ping.loaded = 2;
  EXPECT_FALSE(writer->pings(std::span(&ping, 1)));
  ASSERT_TRUE(writer->close());
  EXPECT_TRUE(read_process(path("a"))->process.events.empty()) << "a refused call takes nothing";
}

TEST_F(TraceTest, a_disk_that_fills_up_costs_what_did_not_fit) {
  const Process process = sample_process(0, 2, 2000);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{200'000, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  auto result = write(path("a.weft"), process);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code(), Code::io);
  EXPECT_THAT(result.error().message(), HasSubstr("File too large"));
  auto file = read_process(path("a.weft"));
  ASSERT_TRUE(file);
  EXPECT_TRUE(file->damage.unfinished);
  ASSERT_GT(file->process.events.size(), 1000u);
  for (size_t i = 0; i < file->process.events.size(); ++i)
    ASSERT_EQ(file->process.events[i], process.events[i]);
}

TEST_F(TraceTest, a_writer_goes_on_after_a_failed_block) {
  const Process process = sample_process(0, 2, 100);
  auto writer = *Writer::create(path("a.weft"), process.environment);
  ASSERT_TRUE(writer->track(0, process.tracks[0]));
  const Event event;
  ASSERT_TRUE(writer->events(std::span(&event, 1)));
  ASSERT_TRUE(writer->flush());
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{fs::file_size(path("a.weft")) + 10, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  ASSERT_TRUE(writer->events(std::span(&event, 1)));
  EXPECT_FALSE(writer->flush());
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  ASSERT_TRUE(writer->events(std::span(&event, 1)));
  ASSERT_TRUE(writer->close());
  auto file = read_process(path("a.weft"));
  ASSERT_TRUE(file);
  EXPECT_EQ(file->damage.blocks_lost, 1u);
  EXPECT_EQ(file->damage.bytes_lost, 10u);
  EXPECT_FALSE(file->damage.unfinished);
  EXPECT_EQ(file->process.events.size(), 2u);
}

// ---- where a trace may be written --------------------------------------------------------

TEST_F(TraceTest, a_trace_is_its_owners_alone) {
  const mode_t before = ::umask(0);
  const bool written = write(path("a.weft"), sample_process(0, 1, 1)).ok();
  ::umask(before);
  ASSERT_TRUE(written);
  struct stat status {};
  ASSERT_EQ(::stat(path("a.weft").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(TraceTest, only_an_older_trace_is_replaced) {
  ASSERT_TRUE(write(path("a.weft"), sample_process(0, 1, 1)));
  fs::permissions(path("a.weft"), fs::perms::all);
  std::ifstream reader(path("a.weft"));  // it keeps what it has opened
  ASSERT_TRUE(write(path("a.weft"), sample_process(0, 2, 3)));
  EXPECT_EQ(read_process(path("a.weft"))->process.environment.ranks, 2u);
  EXPECT_EQ(fs::status(path("a.weft")).permissions(),
            fs::perms::owner_read | fs::perms::owner_write);
  const std::string old{std::istreambuf_iterator<char>(reader), {}};
  EXPECT_EQ(parse(old)->process.environment.ranks, 1u);
  put("empty", "");
  EXPECT_TRUE(write(path("empty"), sample_process(0, 1, 1)));
}

TEST_F(TraceTest, what_is_not_ours_is_left_alone) {
  ASSERT_TRUE(write(path("trace"), sample_process(0, 1, 1)));
  const std::string trace = get("trace");
  put("thesis.tex", "years of work");
  put("short", "x");
  fs::create_symlink(path("thesis.tex"), path("link"));
  fs::create_symlink(path("trace"), path("link to trace"));
  fs::create_symlink(path("nowhere"), path("link to nowhere"));
  fs::create_directory(path("folder"));
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);  // nobody reads it: opening would wait
  const struct {
    const char* name;
    const char* why;
  } cases[] = {{"thesis.tex", "it is not a weft trace"},
               {"short", "it is not a weft trace"},
               {"link", "it is a link"},
               {"link to trace", "it is a link"},
               {"link to nowhere", "it is a link"},
               {"folder", "it is no regular file"},
               {"pipe", "it is no regular file"}};
  for (const auto& one : cases) {
    auto written = write(path(one.name), sample_process(0, 1, 1));
    ASSERT_FALSE(written) << one.name;
    EXPECT_EQ(written.error().code(), Code::invalid_argument);
    EXPECT_THAT(written.error().message(), HasSubstr(one.why));
    EXPECT_THAT(written.error().message(), HasSubstr("remove it, or name another file"));
  }
  EXPECT_EQ(get("thesis.tex"), "years of work");
  EXPECT_EQ(get("short"), "x");
  EXPECT_EQ(get("trace"), trace);
  EXPECT_FALSE(fs::exists(path("nowhere")));
}

// ---- runs --------------------------------------------------------------------------------

TEST_F(TraceTest, a_run_is_its_files_by_rank) {
  for (uint32_t rank : {10u, 2u, 0u}) {
    ASSERT_TRUE(write(path(file_name(rank)), sample_process(rank, 12, 1)));
  }
  put("notes.txt", "not a trace");
  auto trace = read(folder_.string());
  ASSERT_TRUE(trace) << trace.error().message();
  EXPECT_TRUE(trace->damage.empty());
  ASSERT_EQ(trace->processes.size(), 3u);
  EXPECT_EQ(trace->processes[1].environment.rank, 2u);
  EXPECT_EQ(trace->files[2].path, path("rank-10.weft"));
  EXPECT_EQ(trace->of_rank(10)->environment.host, "host-10");
  EXPECT_EQ(trace->of_rank(1), nullptr);
  EXPECT_EQ(read(path("rank-2.weft"))->processes.size(), 1u);

  put("rank-3.weft", "rubbish");
  trace = read(folder_.string());
  ASSERT_TRUE(trace);
  ASSERT_EQ(trace->damage.size(), 1u);
  EXPECT_TRUE(trace->damage[0].any());
  EXPECT_EQ(trace->damage[0].file, path("rank-3.weft"));
  EXPECT_THAT(trace->damage[0].details.at(0), HasSubstr("not a weft trace"));

  ASSERT_TRUE(write(path("copy.weft"), sample_process(2, 12, 1)));
  auto twice = read(folder_.string());
  ASSERT_FALSE(twice);
  EXPECT_EQ(twice.error().message(),
            path("copy.weft") + " and " + path("rank-2.weft") + " both claim rank 2");
}

TEST_F(TraceTest, a_run_of_nothing_is_refused) {
  EXPECT_EQ(read(folder_.string()).error().code(), Code::not_found);
  EXPECT_EQ(read(path("none")).error().code(), Code::not_found);
  put("rank-0.weft", "");
  EXPECT_THAT(read(folder_.string()).error().message(), HasSubstr("empty"));
}

// ---- values ------------------------------------------------------------------------------

TEST(Process, sorts_by_start_then_longer_first) {
  Process p;
  p.events.resize(4);
  p.events[0].start_ns = 5;
  p.events[1].duration_ns = 1;
  p.events[2].duration_ns = 10;
  p.events[3].start_ns = -2;
  p.sort();
  std::vector<std::pair<int64_t, int64_t>> order;
  for (const Event& e : p.events) order.emplace_back(e.start_ns, e.duration_ns);
  EXPECT_THAT(order,
              ElementsAre(std::pair(-2, 0), std::pair(0, 10), std::pair(0, 1), std::pair(5, 0)));
}

TEST(Process, labels_say_kind_and_subject) {
  const Process p = sample_process(0, 2, 1);
  EXPECT_EQ(p.label(p.events[0]), "iteration 0");
  EXPECT_EQ(p.label(p.events[1]), "forward conv1");
  EXPECT_EQ(p.label(p.events[2]), "load \"batch\"");
  EXPECT_EQ(p.label(p.events[3]), "gradient_ready fc.w");
  EXPECT_EQ(p.label(p.events[4]), "chunk bucket 0");
  Event wild;
  wild.name = 77;
  wild.layer = 99;
  wild.tensor = 99;
  EXPECT_EQ(p.label(wild), "other");
}

TEST(Names, every_value_has_one) {
  for (int i = 1; i <= 5; ++i) EXPECT_STRNE(name_of(static_cast<Shape>(i)), "unknown");
  for (int i = 0; i <= 20; ++i) EXPECT_STRNE(name_of(static_cast<Kind>(i)), "unknown");
  for (int i = 1; i <= 5; ++i) EXPECT_STRNE(name_of(static_cast<TrackType>(i)), "unknown");
  EXPECT_STREQ(name_of(static_cast<Kind>(21)), "unknown") << "extend is_known() too";
}

}  // namespace
}  // namespace weft::trace
