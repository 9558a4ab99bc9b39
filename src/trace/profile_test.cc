#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "sample.h"
#include "weft/trace.h"

namespace weft::trace {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr int64_t kWall = 1'700'000'000'000'000'000;  // of the trace's moment 0

class ProfileTest : public ::testing::Test {
 protected:
  ProfileTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "weft-profile-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
    for (uint32_t rank : {0u, 1u}) {
      Process process;
      process.environment.rank = rank;
      process.environment.ranks = 2;
      process.tracks = {{TrackType::thread, "t", kNone16, kNone16}};
      Event event;
      event.start_ns = 5'000'000;
      event.duration_ns = 1'000'000;
      process.events = {event};
      // The wall clock of rank 1 is a second ahead, and was put back by a millisecond later.
      const int64_t ahead = rank * 1'000'000'000LL;
      process.clock_samples = {{0, kWall + ahead}, {10'000'000'000, kWall + ahead + 9'999'000'000}};
      trace_.processes.push_back(std::move(process));
    }
  }
  ~ProfileTest() override { std::filesystem::remove_all(folder_); }

  std::string file(const std::string& content) {
    std::string path = (folder_ / std::to_string(files_++)).string();
    EXPECT_TRUE(write_file(path, content));
    return path;
  }
  json joined(std::vector<Profile> profiles, ChromeOptions options = {}) {
    options.profiles = std::move(profiles);
    const std::string path = (folder_ / "out.json").string();
    auto written = write_chrome(trace_, path, options);
    EXPECT_TRUE(written) << written.error().message();
    if (!written) return {};
    summary_ = *written;
    return json::parse(*read_file(path, Bytes{1u << 20}));
  }
  std::string refusal(const Profile& profile, ChromeOptions options = {}) {
    options.profiles = {profile};
    auto written = write_chrome(trace_, (folder_ / "out.json").string(), options);
    return written ? "" : written.error().message();
  }
  static json find(const json& trace, const std::string& name) {
    for (const json& event : trace.at("traceEvents"))
      if (event.value("name", "") == name) return event;
    return {};
  }

  std::filesystem::path folder_;
  int files_ = 0;
  Trace trace_;
  ChromeSummary summary_;
};

// As torch 2 writes them: relative to a base, which may stand behind the events.
std::string profile(int rank, const std::string& events, int64_t base = kWall) {
  return R"({"schemaVersion": 1, "distributedInfo": {"backend": "weft", "rank": )" +
         std::to_string(rank) + R"(}, "deviceProperties": [{"id": 0}], "traceEvents": [)" + events +
         R"(], "baseTimeNanoseconds": )" + std::to_string(base) + "}";
}

TEST_F(ProfileTest, stands_on_the_clock_of_its_ranks_trace) {
  const std::string path = file(profile(
      1,
      R"({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 1006000.25,
          "dur": 12.5, "args": {"External id": 3}},
         {"ph": "X", "name": "late", "pid": 77, "tid": 78, "ts": 11004000.000, "dur": 1})"));
  const json out = joined({{path, {}}});
  EXPECT_EQ(summary_.joined, 2u);
  const json op = find(out, "aten::mm");
  // 1,006,000.25 us after the base, less the second: 6 ms after moment 0, 1 ms after the span.
  EXPECT_DOUBLE_EQ(op.at("ts").get<double>(), 1000.25);
  EXPECT_DOUBLE_EQ(op.at("dur").get<double>(), 12.5);
  EXPECT_EQ(op.at("args").at("External id"), 3);
  // Later the wall clock is a millisecond behind: the sample beside it counts.
  EXPECT_DOUBLE_EQ(find(out, "late").at("ts").get<double>(), 10'000'000.0);
}

TEST_F(ProfileTest, has_processes_and_threads_of_its_own) {
  const std::string events =
      R"({"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}},
         {"ph": "X", "name": "op", "pid": 1, "tid": 1, "ts": 6000, "dur": 1},
         {"ph": "X", "name": "other op", "pid": "Spans", "tid": "x", "ts": 6000, "dur": 1},
         {"ph": "s", "name": "fwdbwd", "id": 4, "pid": 1, "tid": 1, "ts": 6000, "cat": "fwdbwd"})";
  const json out = joined(
      {{file(profile(0, events)), {}}, {file(profile(7, events, kWall + 1'000'000'000)), {1}}});
  std::set<uint64_t> of_profiles;
  std::set<std::string> arrows, names;
  for (const json& event : out.at("traceEvents")) {
    const bool joined = event.value("name", "").ends_with("op") || event.contains("id");
    if (joined) of_profiles.insert(event.at("pid").get<uint64_t>());
    if (event.contains("id")) arrows.insert(event.at("id").get<std::string>());
    if (event.value("name", "") == "process_name") {
      names.insert(event.at("args").at("name").get<std::string>());
      EXPECT_FALSE(event.contains("ts"));
    }
  }
  for (uint64_t pid : of_profiles) EXPECT_GT(pid, 2u);  // 1 and 2 are the ranks' own
  EXPECT_EQ(of_profiles.size(), 4u);
  EXPECT_EQ(arrows, (std::set<std::string>{"0/4", "1/4"}));
  EXPECT_TRUE(names.contains("rank 0, profiler: python"));
  EXPECT_TRUE(names.contains("rank 1, profiler: python"));
}

TEST_F(ProfileTest, may_begin_before_the_trace) {
  const json out =
      joined({{file(profile(
                   0, R"({"ph": "X", "name": "early", "pid": 1, "tid": 1, "ts": 1000, "dur": 1})")),
               {}}});
  EXPECT_DOUBLE_EQ(find(out, "early").at("ts").get<double>(), 0);
  int others = 0;
  for (const json& event : out.at("traceEvents")) {
    if (event.value("ph", "") != "X" || event.value("name", "") == "early") continue;
    EXPECT_DOUBLE_EQ(event.at("ts").get<double>(), 4000);
    ++others;
  }
  EXPECT_EQ(others, 2);
}

TEST_F(ProfileTest, of_old_has_absolute_times_and_may_be_one_array) {
  const std::string event =
      R"({"ph": "X", "name": "old", "pid": 1, "tid": 1, "ts": 1700000000006000, "dur": 1})";
  for (const std::string& content : {R"({"traceEvents": [)" + event + "]}", "[" + event + "]"}) {
    const json out = joined({{file(content), {0}}});
    EXPECT_DOUBLE_EQ(find(out, "old").at("ts").get<double>(), 1000);
  }
}

TEST_F(ProfileTest, that_is_none_is_refused) {
  const auto words = [&](const std::string& content) { return refusal({file(content), {0}}); };
  EXPECT_THAT(refusal({(folder_ / "absent").string(), {0}}), HasSubstr("cannot read"));
  EXPECT_THAT(words("\x1f\x8b..."), HasSubstr("gunzip"));
  EXPECT_THAT(words("not json"), HasSubstr("torch.profiler"));
  EXPECT_THAT(words(R"({"traceEvents": [{"ts": 1}, {"ts":)"), HasSubstr("ends too early"));
  EXPECT_THAT(words("{}"), HasSubstr("no event"));
  EXPECT_THAT(words("7"), HasSubstr("no event"));
  EXPECT_THAT(words(R"({"traceEvents": [1, "x", [], {"ts": "soon"}, {"ts": 1e300}]})"),
              HasSubstr("no event"));
  EXPECT_THAT(words(std::string(1 << 20, '[')), HasSubstr("ends too early"));
}

TEST_F(ProfileTest, of_another_run_or_rank_is_refused) {
  const std::string event = R"({"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 0, "dur": 1})";
  EXPECT_THAT(refusal({file(profile(5, event)), {}}), HasSubstr("no trace"));
  EXPECT_THAT(refusal({file("[" + event + "]"), {}}), HasSubstr("RANK=FILE"));
  const int64_t hour = 3'600'000'000'000;
  for (int64_t base : {kWall - hour, kWall + hour, int64_t{0}})
    EXPECT_THAT(refusal({file(profile(0, event, base)), {}}), HasSubstr("not of this run")) << base;
  trace_.processes[0].clock_samples.clear();
  EXPECT_THAT(refusal({file(profile(0, event)), {}}), HasSubstr("wall clock"));
  ChromeOptions options;
  options.target_time = true;
  EXPECT_THAT(refusal({file(profile(1, event)), {}}, options), HasSubstr("target"));
}

TEST_F(ProfileTest, with_odd_values_is_survived) {
  const std::string deep = std::string(5000, '[') + std::string(5000, ']');
  const std::string path = file(profile(
      0, R"({"ph": "X", "name": "a", "pid": {"x": []}, "tid": null, "ts": 6000, "args": )" + deep +
             R"(}, {"ph": 3, "ts": 6000}, {"ph": "M", "name": 5, "ts": 1, "args": 3},
                {"ph": "X", "name": ")"
             "\\ud800"
             R"(", "ts": 6000}, {"ph": "i", "ts": 6000})"));
  ChromeOptions options;
  options.profiles = {{path, {}}};
  // A lone surrogate is no JSON: either way nothing else happens.
  auto written = write_chrome(trace_, (folder_ / "out.json").string(), options);
  EXPECT_FALSE(written);
  const json out = joined(
      {{file(profile(
            0, R"({"ph": "X", "name": "a", "pid": {"x": []}, "tid": null, "ts": 6000, "args": )" +
                   deep +
                   R"(}, {"ph": 3, "ts": 6000}, {"ph": "M", "name": 5, "ts": 1, "args": 3},
                {"ph": "i", "ts": 6000})")),
        {}}});
  EXPECT_EQ(summary_.joined, 2u);
  EXPECT_FALSE(out.empty());
}

}  // namespace
}  // namespace weft::trace
