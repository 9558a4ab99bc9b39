// The worked example of docs/trace_format.md is what this library writes, and it reads it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "format.h"
#include "weft/trace.h"

namespace weft::trace {
namespace {

Process example() {
  Process p;
  p.environment.weft_version = "0.1.0";
  p.environment.host = "a";
  p.environment.sysctls = {{"key", "value"}};
  p.model = {"m", {{"l0"}}, {{"w", 64, 0, 0, kNone}}};
  p.names = {"hello"};
  p.tracks = {{TrackType::stream, "device", kNone16, kNone16}, {TrackType::lane_out, "lane", 0, 1}};
  Event forward;
  forward.start_ns = 1000;
  forward.duration_ns = 500;
  forward.kind = Kind::forward;
  forward.iteration = 0;
  forward.layer = 0;
  Event send;
  send.shape = Shape::send;
  send.kind = Kind::chunk;
  send.start_ns = 1500;
  send.duration_ns = 20;
  send.message = 7;
  send.bytes = 64;
  send.name = 0;
  send.track = 1;
  send.lane = 0;
  send.peer = 1;
  p.events = {forward, send};
  p.notes = {{1600, "k", "v"}};
  return p;
}

// The bytes of the example: lines of "offset  bytes  meaning".
std::string bytes_of_document(const std::string& document) {
  std::string bytes;
  std::istringstream lines(document);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (word.size() != 6 || word.find_first_not_of("0123456789abcdef") != std::string::npos)
      continue;
    EXPECT_EQ(std::strtoul(word.c_str(), nullptr, 16), bytes.size()) << line;
    // Two spaces and more stand between the bytes and what they mean.
    const size_t start = line.find_first_not_of(' ', word.size());
    std::istringstream hex(line.substr(start, line.find("  ", start) - start));
    while (hex >> word) bytes += static_cast<char>(std::strtoul(word.c_str(), nullptr, 16));
  }
  return bytes;
}

std::string dump(std::string_view bytes) {
  std::string out;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i % 16 == 0) out += text("\n%06zx ", i);
    out += text(" %02x", static_cast<unsigned char>(bytes[i]));
  }
  return out;
}

TEST(Document, worked_example_is_what_the_library_writes_and_reads) {
  const char* source = std::getenv("WEFT_SOURCE_DIR");
  if (source == nullptr) GTEST_SKIP() << "WEFT_SOURCE_DIR is not set";
  auto document = read_file(std::string(source) + "/docs/trace_format.md", mib(1));
  ASSERT_TRUE(document) << document.error().message();
  const std::string expected = bytes_of_document(*document);

  const std::string path =
      (std::filesystem::temp_directory_path() / text("weft-doc-%d.weft", ::getpid())).string();
  ASSERT_TRUE(write(path, example()));
  std::string written = *read_file(path, mib(1));
  std::filesystem::remove(path);
  ASSERT_GE(expected.size(), kFileHeaderBytes) << dump(written);
  // The example keeps the version of weft that it was made with.
  FileHeader header;
  std::memcpy(&header, written.data(), sizeof header);
  std::memcpy(header.writer, expected.data() + offsetof(FileHeader, writer), sizeof header.writer);
  header.checksum = checksum_of(header);
  std::memcpy(written.data(), &header, sizeof header);
  EXPECT_EQ(dump(written), dump(expected));

  auto file = read_process(std::as_bytes(std::span(expected)), "example");
  ASSERT_TRUE(file) << file.error().message();
  EXPECT_FALSE(file->damage.any());
  const Process p = example();
  EXPECT_EQ(file->process.environment, p.environment);
  EXPECT_EQ(file->process.model, p.model);
  EXPECT_EQ(file->process.events, p.events);
  EXPECT_EQ(file->process.names, p.names);
  EXPECT_EQ(file->process.tracks, p.tracks);
  EXPECT_EQ(file->process.notes, p.notes);
}

}  // namespace
}  // namespace weft::trace
