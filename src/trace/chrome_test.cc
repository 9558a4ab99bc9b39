#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "json.h"
#include "sample.h"
#include "weft/trace.h"

namespace weft::trace {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Json, times_keep_every_nanosecond) {
  const auto micros = [](uint64_t ns) {
    std::string out;
    append_micros(out, ns);
    return out;
  };
  EXPECT_EQ(micros(0), "0.000");
  EXPECT_EQ(micros(1), "0.001");
  EXPECT_EQ(micros(12'345'678), "12345.678");
  EXPECT_EQ(micros(~uint64_t{0}), "18446744073709551.615");
}

class ChromeTest : public ::testing::Test {
 protected:
  ChromeTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "weft-chrome-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~ChromeTest() override { std::filesystem::remove_all(folder_); }

  std::string write(const Trace& trace, const ChromeOptions& options = {}) {
    auto summary = write_chrome(trace, (folder_ / "x.json").string(), options);
    EXPECT_TRUE(summary);
    summary_ = *summary;
    return *read_file((folder_ / "x.json").string(), Bytes{1u << 30});
  }

  std::filesystem::path folder_;
  ChromeSummary summary_;
};

Event span(int64_t start, int64_t duration) {
  Event e;
  e.start_ns = start;
  e.duration_ns = duration;
  return e;
}

Trace one_process(std::vector<Event> events) {
  Trace trace;
  Process& process = trace.processes.emplace_back();
  process.tracks = {{TrackType::thread, "t", kNone16, kNone16}};
  process.events = std::move(events);
  return trace;
}

TEST_F(ChromeTest, everything_is_counted) {
  Trace trace;
  for (uint32_t rank : {0u, 1u, 2u}) trace.processes.push_back(sample_process(rank, 3, 2));
  const std::string json = write(trace);
  EXPECT_EQ(summary_.slices, 3u * 2 * 7);
  EXPECT_EQ(summary_.instants, 3u * 2 * 2);
  EXPECT_EQ(summary_.counters, 3u * 2);
  EXPECT_EQ(summary_.flows, 3u * 2 * 2);
  EXPECT_EQ(summary_.halves, 0u);
  EXPECT_EQ(summary_.backward, 0u);
  EXPECT_EQ(summary_.rows, 9u);
  EXPECT_THAT(json, HasSubstr("\"rank 2 on host-2\""));
  EXPECT_THAT(json, HasSubstr("\"tensor\":\"fc.w\""));
  EXPECT_THAT(json, HasSubstr("load \\\"batch\\\""));
  EXPECT_THAT(json, Not(HasSubstr("\"pid\":0")));

  trace.processes.pop_back();  // a rank is missing: its messages lose their other halves
  write(trace);
  EXPECT_EQ(summary_.flows, 2u * 2);
  EXPECT_EQ(summary_.halves, 2u * 2 * 2);
}

TEST_F(ChromeTest, what_overlaps_goes_to_rows_of_its_own) {
  EXPECT_EQ((write(one_process({span(0, 10), span(5, 10)})), summary_.rows), 2u);
  EXPECT_EQ((write(one_process({span(0, 10), span(10, 10), span(2, 8)})), summary_.rows), 1u);
  EXPECT_EQ((write(one_process({span(0, 10), span(0, 10), span(0, 0)})), summary_.rows), 1u);
  Event outer = span(0, 10);
  outer.kind = Kind::operation;
  Event inner = span(2, 5);
  inner.kind = Kind::operation;
  EXPECT_EQ((write(one_process({outer, inner})), summary_.rows), 2u) << "neither called the other";
  inner.kind = Kind::wait;
  EXPECT_EQ((write(one_process({outer, inner})), summary_.rows), 1u);
  Event a = span(0, 10);
  a.shape = Shape::send;
  a.message = 1;
  Event b = a;
  b.message = 2;
  EXPECT_EQ((write(one_process({a, b})), summary_.rows), 2u) << "arrows would meet the wrong one";
}

TEST_F(ChromeTest, a_hundred_thousand_overlaps_are_no_trouble) {
  std::vector<Event> events;
  for (int64_t i = 0; i < 100'000; ++i) events.push_back(span(i, 100'000));
  write(one_process(std::move(events)));
  EXPECT_EQ(summary_.slices, 100'000u);
  EXPECT_EQ(summary_.rows, 100'000u);
}

TEST_F(ChromeTest, a_message_received_before_it_was_sent_is_still_an_arrow) {
  Event sent = span(1000, 10);
  sent.shape = Shape::send;
  sent.message = ~uint64_t{0};
  Event received = span(500, 10);
  received.shape = Shape::receive;
  received.message = sent.message;
  const std::string json = write(one_process({sent, received}));
  EXPECT_EQ(summary_.flows, 1u);
  EXPECT_EQ(summary_.backward, 1u);
  EXPECT_THAT(json, HasSubstr("\"id\":\"0xffffffffffffffff\""));
  // With clocks set right, it points forward.
  Trace two;
  for (const Event& event : {sent, received}) {
    two.processes.push_back(one_process({event}).processes[0]);
    two.processes.back().environment.ranks = 2;
    two.processes.back().environment.rank = static_cast<uint32_t>(two.processes.size()) - 1;
  }
  write(two, {.shift_ns = {0, 600}});
  EXPECT_EQ(summary_.backward, 0u);
  EXPECT_FALSE(write_chrome(two, "x", {.shift_ns = {1}}));
}

TEST_F(ChromeTest, extreme_times_do_not_overflow) {
  const int64_t far = int64_t{1} << 62;
  const std::string json =
      write(one_process({span(-far, 1), span(far, far / 2)}), {.shift_ns = {far}});
  EXPECT_THAT(json, HasSubstr("\"ts\":0.000"));
  EXPECT_EQ(summary_.slices, 2u);
}

TEST_F(ChromeTest, target_time_divides_by_dilation_and_multiplies_by_shrink) {
  Trace trace = one_process({span(0, 10), span(8000, 16)});
  trace.processes[0].environment.dilation = 8;
  trace.processes[0].environment.shrink = 2;
  EXPECT_THAT(write(trace, {.target_time = true}), HasSubstr("\"ts\":2.000,\"dur\":0.004"));
}

TEST_F(ChromeTest, nothing_is_a_file_too_and_a_full_disk_is_an_error) {
  EXPECT_THAT(write(Trace{}), HasSubstr("\"traceEvents\":[\n]"));
  Trace trace = one_process(std::vector<Event>(100'000));
  EXPECT_THAT(write_chrome(trace, "/dev/full").error().message(), HasSubstr("No space left"));
  EXPECT_FALSE(write_chrome(trace, folder_ / "no" / "such"));
}

}  // namespace
}  // namespace weft::trace
