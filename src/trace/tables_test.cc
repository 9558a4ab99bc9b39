#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>

#include "sample.h"
#include "weft/trace.h"

namespace weft::trace {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int64_t kFarthest = (int64_t{1} << 62) - 1;

// A table as its file says it: rows of columns of 8 or 4 bytes.
struct Table {
  std::string header;
  std::map<std::string, std::vector<int64_t>> columns;
  size_t rows = 0;
};

Table parse(const std::string& bytes) {
  Table out;
  EXPECT_EQ(bytes.substr(0, 8), std::string("\x93NUMPY\x01\x00", 8));
  uint16_t length = 0;
  std::memcpy(&length, bytes.data() + 8, 2);
  EXPECT_EQ((10 + length) % 64, 0);
  out.header = bytes.substr(10, length);
  EXPECT_EQ(out.header.back(), '\n');
  std::vector<std::pair<std::string, size_t>> fields;
  size_t width = 0;
  for (size_t at = 0; (at = out.header.find("('", at)) != std::string::npos;) {
    const size_t end = out.header.find('\'', at + 2);
    fields.emplace_back(out.header.substr(at + 2, end - at - 2), out.header[end + 6] - '0');
    width += fields.back().second;
    at = end;
  }
  EXPECT_EQ((bytes.size() - 10 - length) % width, 0u);
  for (size_t at = 10 + size_t{length}; at < bytes.size(); ++out.rows)
    for (const auto& [name, size] : fields) {
      int64_t value = 0;
      std::memcpy(&value, bytes.data() + at, size);
      out.columns[name].push_back(value);
      at += size;
    }
  return out;
}

class TablesTest : public ::testing::Test {
 protected:
  TablesTest() {
    std::string pattern = (fs::temp_directory_path() / "weft-tables-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~TablesTest() override { fs::remove_all(folder_); }

  std::string path(const char* name) const { return (folder_ / "out" / name).string(); }

  TablesSummary write(const Trace& trace, const TablesOptions& options = {}) {
    fs::remove_all(folder_ / "out");
    auto summary = write_tables(trace, (folder_ / "out").string(), options);
    EXPECT_TRUE(summary) << summary.error().message();
    strings_ = *read_file(path("strings.json"), Bytes{1u << 30});
    return *summary;
  }
  Table table(const std::string& name) const {
    return parse(*read_file(path((name + ".npy").c_str()), Bytes{1u << 30}));
  }
  // The text of a code, as JSON.
  std::string text_of(int64_t code) const {
    size_t at = 1;
    for (; code > 0; --code) at = strings_.find(",\n", at) + 2;
    return strings_.substr(at, strings_.find_first_of(",]", at) - at);
  }

  fs::path folder_;
  std::string strings_;
};

Trace sample() {
  Trace trace;
  for (uint32_t rank : {0u, 1u}) trace.processes.push_back(sample_process(rank, 2, 3));
  return trace;
}

Trace one_event(Event event) {
  Trace trace;
  trace.processes.emplace_back().events = {event};
  return trace;
}

TEST_F(TablesTest, every_record_is_in_the_table_of_its_kind) {
  const Trace trace = sample();
  std::map<std::string, uint64_t> rows;
  const TablesSummary summary = write(trace);
  for (const auto& [name, count] : summary.rows) {
    EXPECT_EQ(table(name).rows, count) << name;
    EXPECT_TRUE(rows.emplace(name, count).second) << name;
  }
  std::map<std::string, uint64_t> expected;
  for (const Process& process : trace.processes)
    for (const Event& event : process.events) ++expected[name_of(event.kind)];
  for (const auto& [name, count] : expected) EXPECT_EQ(rows[name], count) << name;
  EXPECT_EQ(rows["update"], 0u);
  EXPECT_EQ(rows["messages"], 2u * 3 * 2);
  EXPECT_EQ(rows["processes"], 2u);
  EXPECT_EQ(rows["layers"], 4u);
  EXPECT_EQ(rows["tensors"], 4u);
  EXPECT_EQ(summary.halves, 0u);
}

TEST_F(TablesTest, what_is_not_said_is_minus_one_and_no_text) {
  write(one_event({}));
  const Table other = table("other");
  for (const char* name : {"iteration", "layer_index", "tensor_index", "bucket", "partition",
                           "operation", "step", "chunk", "lane", "peer"})
    EXPECT_THAT(other.columns.at(name), ElementsAre(-1)) << name;
  for (const char* name : {"name", "layer", "tensor", "track", "track_type", "host", "message"})
    EXPECT_THAT(other.columns.at(name), ElementsAre(0)) << name;
  EXPECT_EQ(text_of(0), "\"\"");
  EXPECT_EQ(text_of(other.columns.at("shape")[0]), "\"span\"");
}

TEST_F(TablesTest, names_are_those_of_the_process) {
  Trace trace = sample();
  trace.processes[1].model.layers = {{"other conv"}, {"fc"}};
  write(trace);
  const Table forward = table("forward");
  std::vector<std::string> layers;
  for (size_t i = 0; i < 2; ++i) layers.push_back(text_of(forward.columns.at("layer")[i]));
  EXPECT_THAT(forward.columns.at("rank"), ElementsAre(0, 1, 0, 1, 0, 1));
  EXPECT_THAT(layers, ElementsAre("\"conv1\"", "\"other conv\""));
  EXPECT_EQ(text_of(forward.columns.at("host")[1]), "\"host-1\"");
  EXPECT_EQ(text_of(forward.columns.at("track")[0]), "\"device\"");
  EXPECT_EQ(text_of(forward.columns.at("track_type")[0]), "\"stream\"");
}

TEST_F(TablesTest, rows_stand_in_order_of_time) {
  Trace trace = one_event({});
  for (int64_t start : {7, 3, 5}) {
    Event event;
    event.start_ns = start;
    trace.processes[0].events.push_back(event);
  }
  write(trace);
  EXPECT_THAT(table("other").columns.at("start_ns"), ElementsAre(0, 3, 5, 7));
}

TEST_F(TablesTest, a_counter_has_a_value_and_no_duration) {
  Event counter;
  counter.shape = Shape::counter;
  counter.kind = Kind::memory;
  counter.duration_ns = -5;
  write(one_event(counter));
  EXPECT_THAT(table("memory").columns.at("value"), ElementsAre(-5));
  EXPECT_THAT(table("memory").columns.at("duration_ns"), ElementsAre(0));
}

TEST_F(TablesTest, the_target_has_other_times_and_bytes) {
  Event event;
  event.start_ns = 1001;
  event.duration_ns = 3;
  event.bytes = 10;
  Trace trace = one_event(event);
  trace.processes[0].environment.dilation = 8;
  trace.processes[0].environment.shrink = 4;
  write(trace);
  EXPECT_THAT(table("other").columns.at("start_ns"), ElementsAre(1001));
  EXPECT_THAT(table("other").columns.at("bytes"), ElementsAre(10));
  TablesOptions target;
  target.target_time = true;
  write(trace, target);
  EXPECT_THAT(table("other").columns.at("start_ns"), ElementsAre(501));  // 500.5 to 502
  EXPECT_THAT(table("other").columns.at("duration_ns"), ElementsAre(1));
  EXPECT_THAT(table("other").columns.at("bytes"), ElementsAre(40));
}

TEST_F(TablesTest, times_at_the_end_of_the_scale_stay_on_it) {
  Event event;
  event.start_ns = -(int64_t{1} << 62);
  event.duration_ns = int64_t{1} << 61;
  event.bytes = ~uint64_t{0};
  Trace trace = one_event(event);
  TablesOptions target;
  target.target_time = true;
  write(trace, target);
  EXPECT_THAT(table("other").columns.at("start_ns"), ElementsAre(event.start_ns));
  EXPECT_THAT(table("other").columns.at("duration_ns"), ElementsAre(event.duration_ns));
  trace.processes[0].environment.shrink = 1e6;
  write(trace, target);
  EXPECT_THAT(table("other").columns.at("start_ns"), ElementsAre(-kFarthest));
  EXPECT_THAT(table("other").columns.at("duration_ns"), ElementsAre(0));
  EXPECT_THAT(table("other").columns.at("bytes"), ElementsAre(-1));  // all bits
}

TEST_F(TablesTest, messages_have_one_send_and_one_receive) {
  Trace trace = sample();
  Event more = trace.processes[0].events.front();
  more.shape = Shape::receive;
  for (const Event& event : trace.processes[0].events)
    if (event.shape == Shape::send) more.message = event.message;
  trace.processes[0].events.push_back(more);
  Event half = more;
  half.message = 1'000'000;
  trace.processes[1].events.push_back(half);
  Event none = more;
  none.message = 0;
  trace.processes[1].events.push_back(none);
  const TablesSummary summary = write(trace);
  EXPECT_EQ(summary.halves, 4u);  // three that claim one number, and one alone
  const Table messages = table("messages");
  EXPECT_EQ(messages.rows, 2u * 3 * 2 - 1);
  for (size_t i = 0; i < messages.rows; ++i) {
    EXPECT_NE(messages.columns.at("sender")[i], messages.columns.at("receiver")[i]);
    EXPECT_NE(messages.columns.at("message")[i], static_cast<int64_t>(more.message));
    EXPECT_EQ(text_of(messages.columns.at("kind")[i]), "\"chunk\"");
  }
}

TEST_F(TablesTest, what_is_there_already_stays) {
  fs::create_directories(folder_ / "out");
  ASSERT_TRUE(write_file(path("mine"), "x"));
  auto refused = write_tables(sample(), (folder_ / "out").string());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Code::invalid_argument);
  EXPECT_THAT(refused.error().message(), HasSubstr("is not an empty folder"));
  EXPECT_FALSE(fs::exists(path("other.npy")));
  refused = write_tables(sample(), path("mine"));
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), StartsWith("cannot make the folder"));
}

}  // namespace
}  // namespace weft::trace
