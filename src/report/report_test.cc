#include "weft/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>

#include "text.h"
#include "timeline.h"

namespace weft::report {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using trace::Event;
using trace::Kind;
using trace::Shape;

constexpr const char* kAttack = "</script><img src=x onerror=\"window.hacked=1\"><!--'&";

Event span_of(Kind kind, trace::TrackId track, int64_t start, int64_t duration,
              uint32_t iteration) {
  Event event;
  event.kind = kind;
  event.track = track;
  event.start_ns = start;
  event.duration_ns = duration;
  event.iteration = iteration;
  return event;
}

Event chunk_of(bool send, int64_t start, int64_t duration, uint32_t iteration) {
  Event event = span_of(Kind::chunk, send ? 3 : 4, start, duration, iteration);
  event.shape = send ? Shape::send : Shape::receive;
  event.bytes = 65536;
  event.lane = 0;
  event.peer = 1;
  event.message = 1;
  return event;
}

// One rank: six layers forward and backward, one operation a layer, `chunks` messages in each.
trace::Process process_of(uint32_t rank, uint32_t iterations, int64_t pace, int chunks) {
  constexpr int kLayers = 6;
  trace::Process p;
  p.environment.rank = rank;
  p.environment.ranks = 2;
  p.environment.dilation = 4;
  p.environment.shrink = 2;
  p.environment.lab = {{"link_bits_per_s", "25000000000"}, {"flow_bits_per_s", "none"}};
  p.model.name = "sample";
  for (int i = 0; i < kLayers; ++i) p.model.layers.push_back({"layer" + std::to_string(i)});
  p.model.layers[1].name = kAttack;
  p.names = {kAttack};
  p.tracks = {{trace::TrackType::stream, "device"},
              {trace::TrackType::thread, "training"},
              {trace::TrackType::stream, "operations"},
              {trace::TrackType::lane_out, "lane 0 to rank 1", 0, 1},
              {trace::TrackType::lane_in, kAttack, 0, 1}};
  const int64_t length = pace * kLayers * 3;
  for (uint32_t n = 0; n < iterations; ++n) {
    const int64_t start = 1'000'000'000 + length * n + 1000 * rank;
    p.events.push_back(span_of(Kind::iteration, 1, start, length, n));
    for (int i = 0; i < kLayers; ++i) {
      const auto layer = static_cast<uint16_t>(i);
      p.events.push_back(span_of(Kind::forward, 0, start + pace * i, pace, n));
      p.events.back().layer = layer;
      const int64_t back = start + pace * (kLayers + i);
      p.events.push_back(span_of(Kind::backward, 0, back, pace, n));
      p.events.back().layer = static_cast<uint16_t>(kLayers - 1 - i);
      p.events.push_back(span_of(Kind::gradient_ready, 0, back + pace, 0, n));
      p.events.back().shape = Shape::instant;
      p.events.push_back(span_of(Kind::operation, 2, back + pace, pace * 2, n));
      for (int c = 0; c < chunks; ++c) {
        const int64_t at = back + pace + pace * c / chunks;
        p.events.push_back(chunk_of(true, at, pace / chunks / 2 + 1, n));
        p.events.push_back(chunk_of(false, at + 10, pace / chunks / 2 + 1, n));
      }
    }
    p.events.push_back(span_of(Kind::wait, 1, start + pace * kLayers * 2, pace * kLayers, n));
    p.events.push_back(span_of(Kind::other, 1, start, 5, n));
    p.events.back().name = 0;
  }
  p.sort();
  return p;
}

trace::Trace trace_of(uint32_t iterations, int64_t pace, int chunks = 8) {
  trace::Trace trace;
  for (uint32_t rank = 0; rank < 2; ++rank)
    trace.processes.push_back(process_of(rank, iterations, pace, chunks));
  return trace;
}

diagnose::Finding finding_of(const std::string& title, double gain) {
  diagnose::Finding finding;
  finding.name = "cause";
  finding.title = title;
  finding.gain_percent = gain;
  finding.low = gain - 1;
  finding.high = gain + 1;
  finding.evidence = {"seen in the records"};
  finding.remedy = "use more lanes";
  return finding;
}

// In wall nanoseconds: the target's are half of them.
diagnose::Diagnosis diagnosis_of() {
  diagnose::Diagnosis d;
  d.iteration_ns = 200e6;
  d.path = {{"compute", 80e6, 40}, {"transfer", 100e6, 50}, {"wait_for_rank", 20e6, 10}};
  d.communication_ns = 120e6;
  d.overlapped_ns = 30e6;
  d.overlap_possible_ns = 60e6;
  d.exposed_ns = 90e6;
  d.layers = {{"layer0", 1000, 2e6, 4e6, 6e6, 8e6}, {kAttack, 2000, 22e6, 24e6, 26e6, 28e6}};
  d.tensors = {{"layer0.w", 1000, 0, 4e6, 6e6, 8e6}};
  d.lanes = {{0, 0, 1e6, 50}, {1, 0, 2e6, 60}};
  d.findings = {finding_of("smaller cause", 5), finding_of("larger cause", 60)};
  d.rejected = {"hypothesis that failed"};
  d.bounds = {{"communication is free", 90e6, 55}};
  return d;
}

std::string page_of(const Page& page) {
  Result<std::string> made = html(page);
  EXPECT_TRUE(made.ok());
  return made.ok() ? *made : "";
}

size_t count(std::string_view text, std::string_view word) {
  size_t found = 0;
  for (size_t at = text.find(word); at != std::string_view::npos; at = text.find(word, at + 1))
    ++found;
  return found;
}

nlohmann::json data_of(const std::string& page) {
  const std::string_view open = "<script type=\"application/json\" id=\"weft-data\">";
  const size_t from = page.find(open) + open.size();
  return nlohmann::json::parse(page.substr(from, page.find("</script>", from) - from));
}

// Everything that a page can have.
struct Full {
  trace::Trace before = trace_of(7, 3'000'000);
  trace::Trace after = trace_of(7, 1'000'000);
  trace::Trace predicted = trace_of(5, 900'000);
  diagnose::Diagnosis diagnosis = diagnosis_of();
  optimize::Optimized optimized;
  Page page;

  Full() {
    for (trace::Process& p : predicted.processes) p.environment.predicted = true;
    optimized.decisions = {{"/lanes", "1", "8", "8 lanes fill the link"}};
    optimized.before.iteration_ns = 2800e6;
    optimized.after.iteration_ns = 540e6;
    optimized.passes = {{"lanes", 3, 1, 0.5}};
    optimized.remarks = {"the optimizer's remark"};
    page.title = "sample job";
    page.runs = {{"before, measured", &before, 1397.04, 1396.8, 1397.9, &diagnosis},
                 {"after, measured", &after, 275.6, 271.2, 277.3, &diagnosis},
                 {"after, predicted", &predicted, 271.2, 265, 278, nullptr}};
    page.plan = &optimized.plan;
    page.optimized = &optimized;
    page.prediction_error_percent = -1.6;
    page.self_replay_error_percent = 0.8;
    page.floor_ms = 265.6;
    page.remarks = {"compute is emulated", kAttack};
  }
};

// ---- the page --------------------------------------------------------------------------------

TEST(Report, RefusesAPageWithoutRuns) {
  const Result<std::string> made = html({});
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().code(), Code::invalid_argument);
}

TEST(Report, SaysTheVerdictInOneSentence) {
  const Full full;
  EXPECT_THAT(page_of(full.page),
              HasSubstr("275.6 ms an iteration instead of 1397 ms: 5.1 times faster; predicted "
                        "271.2 ms, off by -1.6 %."));
}

TEST(Report, VerdictFollowsFromTheRunsThatThereAre) {
  Full full;
  const std::vector<report::Run> all = full.page.runs;
  full.page.prediction_error_percent.reset();
  full.page.runs = {all[0]};
  EXPECT_THAT(page_of(full.page),
              HasSubstr("1397 ms an iteration; without its largest cause 60.0 % shorter: larger"));
  full.page.runs = {all[0], all[2]};
  EXPECT_THAT(page_of(full.page), HasSubstr("1397 ms an iteration; predicted 271.2 ms with the "
                                            "plan: 5.2 times faster, not measured yet."));
  full.page.runs = {all[2]};
  EXPECT_THAT(page_of(full.page), HasSubstr("Predicted: 271.2 ms an iteration."));
  full.page.runs = {all[1], all[0]};
  EXPECT_THAT(page_of(full.page), HasSubstr("instead of 275.6 ms: 5.1 times slower."));
  report::Run again = all[1];
  again.iteration_ms = 274;
  full.page.runs = {all[1], again};
  EXPECT_THAT(page_of(full.page), HasSubstr("no difference beyond the spread"));
}

TEST(Report, FiguresAreThoseOfTheTarget) {
  const Full full;
  const std::string page = page_of(full.page);
  EXPECT_THAT(page, HasSubstr("sample<span aria-hidden=\"true\"> · </span>2 ranks"));
  EXPECT_THAT(page, HasSubstr("link 25.00 Gb/s"));
  EXPECT_THAT(page, Not(HasSubstr("one flow")));  // "none" is no rate
  EXPECT_THAT(page, HasSubstr("<b>265.6</b>"));   // the floor
  EXPECT_THAT(page, HasSubstr("271.2 to 277.3"));
  EXPECT_THAT(page, HasSubstr("40.0 <span class=\"soft\">40.0 %"));  // compute, halved
  EXPECT_THAT(page, HasSubstr("communication is free"));
  EXPECT_THAT(page, HasSubstr("<td class=\"n\">45.0</td><td class=\"n\">55.0 %</td>"));
  EXPECT_THAT(page, HasSubstr("data-v=\"13\">13.00</td>"));  // a layer was waited for
  EXPECT_THAT(page, HasSubstr("32.0 Mb/s"));  // 1 MB a wall second, four times as fast
  EXPECT_THAT(page, HasSubstr("8 lanes fill the link"));
  EXPECT_THAT(page, HasSubstr("from 1400 ms to 270.0 ms"));
  EXPECT_THAT(page, HasSubstr("the optimizer&#39;s remark"));
  EXPECT_THAT(page, HasSubstr("slowed time by 4 and shrank sizes by 2"));
  EXPECT_THAT(page, HasSubstr("hypothesis that failed"));
}

TEST(Report, FindingsStandByGain) {
  const Full full;
  const std::string page = page_of(full.page);
  const size_t larger = page.find("<h3>larger cause");
  ASSERT_NE(larger, std::string::npos);
  EXPECT_LT(larger, page.find("<h3>smaller cause"));
  EXPECT_THAT(page, HasSubstr("838.2 ms to gain"));
  EXPECT_THAT(page, HasSubstr("<b>What to do:</b> use more lanes"));
}

TEST(Report, HostileNamesStayText) {
  Full full;
  full.page.title = kAttack;
  full.page.runs[0].label = kAttack;
  full.diagnosis.path.push_back({kAttack, 1e6, 1});
  full.diagnosis.findings[0] = finding_of(kAttack, 3);
  full.diagnosis.findings[0].evidence = {kAttack};
  full.diagnosis.findings[0].remedy = kAttack;
  full.diagnosis.bounds[0].name = kAttack;
  full.optimized.decisions[0] = {kAttack, kAttack, kAttack, kAttack};
  full.optimized.plan.name = kAttack;
  full.optimized.plan.comment = kAttack;
  full.before.processes[0].model.name = kAttack;
  const std::string page = page_of(full.page);
  EXPECT_EQ(count(page, "<img"), 0);
  EXPECT_EQ(count(page, "<!--"), 0);
  EXPECT_EQ(count(page, "<script"), 2);
  EXPECT_EQ(count(page, "</script"), 2);
  EXPECT_EQ(count(page, "onerror=\""), 0);
  // It is all there, as text.
  EXPECT_EQ(data_of(page)["runs"][0]["label"], kAttack);
  EXPECT_THAT(page, HasSubstr("<h1>&lt;/script&gt;&lt;img src=x onerror=&quot;window.hacked=1"));
}

TEST(Report, AsksForNothingElse) {
  const Full full;
  const std::string page = page_of(full.page);
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
  EXPECT_EQ(count(page, "http://") + count(page, "https://"), 0);
  EXPECT_EQ(count(page, " src="), count(page, "img src=x"));
}

TEST(Report, PartsThatAreMissingAreLeftOut) {
  Page page;
  page.runs = {{"lonely", nullptr, 12.5, 0, 0, nullptr}};
  const std::string made = page_of(page);
  EXPECT_THAT(made, HasSubstr("12.5 ms an iteration."));
  for (const char* heading : {"Findings", "The plan", "Timeline</h2>", "Where the time went</h2>",
                              "Details", "Remarks", "What could be gained"})
    EXPECT_THAT(made, Not(HasSubstr(std::string(">") + heading))) << heading;
  EXPECT_TRUE(data_of(made)["runs"].empty());
}

TEST(Report, AnEmptyDiagnosisSaysThatNothingWasFound) {
  const diagnose::Diagnosis none;
  const trace::Trace trace = trace_of(1, 1000);
  Page page;
  page.runs = {{"run", &trace, 1, 1, 1, &none}};
  EXPECT_THAT(page_of(page), HasSubstr("No cause whose removal would gain"));
}

TEST(Report, NumbersThatAreNoneAreCalledUnknown) {
  Full full;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  full.page.runs[0].iteration_ms = nan;
  full.page.runs[1].iteration_ms = 0;
  full.page.floor_ms = inf;
  full.diagnosis.path[0].ns = inf;
  full.diagnosis.findings[0].gain_percent = nan;
  full.diagnosis.layers[0].bytes = nan;
  full.diagnosis.lanes[0].bytes_per_s = inf;
  full.before.processes[0].environment.dilation = 0;
  full.after.processes[0].environment.shrink = nan;
  const std::string page = page_of(full.page);
  EXPECT_THAT(page, HasSubstr("unknown"));
  EXPECT_EQ(data_of(page)["runs"].size(), 3);
}

TEST(Report, AChosenPlanWithoutASearchShowsWhatItChanges) {
  Full full;
  full.page.optimized = nullptr;
  full.optimized.plan.lanes = 8;
  plan::Plan recorded;
  full.before.processes[0].environment.plan_text = plan::canonical(recorded);
  EXPECT_THAT(page_of(full.page), HasSubstr("<code>/lanes</code></th><td><code>1</code></td>"
                                            "<td><code>8</code>"));
}

TEST(Report, LongTablesAreCut) {
  Full full;
  full.diagnosis.tensors.assign(2500, {"tensor", 1, 0, 1, 1, 1});
  EXPECT_THAT(page_of(full.page), HasSubstr("500 rows left out."));
}

TEST(Report, LostRecordsAreTold) {
  Full full;
  full.before.processes[1].dropped = 1234;
  full.after.damage.emplace_back();
  const std::string page = page_of(full.page);
  EXPECT_THAT(page, HasSubstr("before, measured: 1,234 records had no room"));
  EXPECT_THAT(page, HasSubstr("after, measured: 1 of its files are not whole"));
}

// The browser's test (tests/system) opens this very page: it names the place.
TEST(Report, PageForTheBrowser) {
  const Full full;
  const std::string page = page_of(full.page);
  ASSERT_GT(page.size(), 50'000);
  if (const char* path = std::getenv("WEFT_REPORT_PAGE")) {
    ASSERT_TRUE(write_file(path, page).ok());
  }
}

// ---- the timeline ----------------------------------------------------------------------------

TEST(Timeline, ShowsTheMiddleFromTheStartOfAnIteration) {
  const Full full;
  const nlohmann::json data = nlohmann::json::parse(timeline_of(full.page).json);
  ASSERT_EQ(data["runs"].size(), 3);
  const nlohmann::json& run = data["runs"][0];
  ASSERT_EQ(run["iterations"].size(), 2);
  EXPECT_EQ(run["iterations"][0]["n"], 2);
  EXPECT_EQ(run["iterations"][0]["t"], 0);
  EXPECT_EQ(run["iterations"][1]["n"], 3);
  EXPECT_EQ(run["iterations"][1]["t"], 27'000'000);  // 54 ms of wall time, halved
  EXPECT_EQ(data["runs"][2]["predicted"], true);
  // The first row is the device of rank 0; its first span is forward of the first layer.
  const nlohmann::json& row = run["rows"][0];
  EXPECT_EQ(row["rank"], 0);
  EXPECT_EQ(row["part"], "device");
  EXPECT_EQ(row["count"], 25);  // rank 1 is late: the next iteration of rank 0 reaches in
  EXPECT_EQ(row["t"][0], 0);
  EXPECT_EQ(row["t"][1], 1'500'000);
  EXPECT_EQ(row["d"], 1'500'000);  // all alike: one number
  EXPECT_EQ(data["names"][row["n"][0].get<size_t>()], "forward layer0");
  EXPECT_EQ(data["kinds"][row["k"][0].get<size_t>()], "forward");
}

TEST(Timeline, ColumnsHaveAValueForEveryEvent) {
  const Full full;
  const nlohmann::json data = nlohmann::json::parse(timeline_of(full.page).json);
  size_t events = 0;
  for (const nlohmann::json& run : data["runs"]) {
    for (const nlohmann::json& row : run["rows"]) {
      events += row["count"].get<size_t>();
      for (const char* key : {"t", "d", "n", "k", "b", "i"})
        EXPECT_TRUE(row[key].is_number() || row[key].size() == row["count"]) << key;
    }
  }
  EXPECT_GT(events, 1000);
}

TEST(Timeline, OverlapsGetRowsOfTheirOwn) {
  const Full full;
  const nlohmann::json data = nlohmann::json::parse(timeline_of(full.page).json);
  size_t rows = 0;
  for (const nlohmann::json& row : data["runs"][0]["rows"])
    rows += row["rank"] == 0 && row["part"] == "operations";
  EXPECT_EQ(rows, 2);  // each lasts as long as two starts are apart
}

TEST(Timeline, KeepsToTheLimitAndSaysWhatIsLeftOut) {
  // Two iterations of two ranks with six operations: 2 * 2 * 6 * 2000 sends
  // and as many receives.
  const trace::Trace trace = trace_of(2, 10'000'000, 2000);
  Page page;
  page.runs = {{"many", &trace, 1, 1, 1, nullptr}};
  const Timeline timeline = timeline_of(page);
  size_t events = 0, spans = 0;
  const nlohmann::json data = nlohmann::json::parse(timeline.json);
  for (const nlohmann::json& row : data["runs"][0]["rows"]) {
    events += row["count"].get<size_t>();
    if (row["part"] == "device") spans += row["count"].get<size_t>();
  }
  EXPECT_EQ(events, kEventsMax);
  EXPECT_EQ(spans, 2 * 2 * 12);  // compute is never what goes
  ASSERT_EQ(timeline.notes.size(), 1);
  EXPECT_THAT(timeline.notes[0], HasSubstr("many: iterations 0 to 1, 60,000 events; left out"));
  EXPECT_THAT(timeline.notes[0], HasSubstr("receives, 24 marks"));
  EXPECT_THAT(timeline.notes[0], Not(HasSubstr("sends")));
}

TEST(Timeline, ARunWithoutIterationsIsShownWhole) {
  trace::Trace trace;
  trace.processes.emplace_back();
  trace.processes[0].events = {span_of(Kind::forward, 9, 1000, 500, trace::kNone)};
  Page page;
  page.runs = {{"bare", &trace, 1, 1, 1, nullptr}};
  const Timeline timeline = timeline_of(page);
  const nlohmann::json data = nlohmann::json::parse(timeline.json);
  EXPECT_EQ(data["runs"][0]["rows"][0]["track"], "track 9");
  EXPECT_EQ(data["runs"][0]["rows"][0]["t"], 0);
  EXPECT_THAT(timeline.notes[0], HasSubstr("no iterations recorded, the whole run"));
}

TEST(Timeline, FarTimesAndBadFactorsDoNoHarm) {
  trace::Trace trace = trace_of(3, 1000);
  const int64_t far = int64_t{1} << 61;
  trace.processes[0].events.push_back(span_of(Kind::forward, 0, -far, 2 * far - 1, 1));
  trace.processes[0].events.push_back(span_of(Kind::iteration, 0, -far, far, 0xfffffffe));
  Event flawed = span_of(Kind::forward, 0, std::numeric_limits<int64_t>::max(), -5, 1);
  trace.processes[0].events.push_back(flawed);
  Event strange = span_of(Kind::forward, 0xffff, 1'000'000'000, 5, 1);
  strange.layer = 999;
  strange.name = 999;
  strange.bytes = std::numeric_limits<uint64_t>::max();
  trace.processes[0].events.push_back(strange);
  for (const double factor : {0.0, -1.0, 1e-300, std::numeric_limits<double>::infinity()}) {
    trace.processes[0].environment.dilation = factor;
    trace.processes[1].environment.shrink = factor;
    Page page;
    page.timeline_iterations = std::numeric_limits<uint32_t>::max();
    page.runs = {{"odd", &trace, 1, 1, 1, nullptr}};
    const nlohmann::json data = nlohmann::json::parse(timeline_of(page).json);
    EXPECT_EQ(data["runs"][0]["iterations"].size(), 4);
    EXPECT_FALSE(data["runs"][0]["rows"].empty());
  }
}

TEST(Timeline, ATraceWithoutProcessesIsEmpty) {
  const trace::Trace trace;
  Page page;
  page.runs = {{"nothing", &trace, 1, 1, 1, nullptr}};
  const Timeline timeline = timeline_of(page);
  EXPECT_TRUE(timeline.empty);
  EXPECT_TRUE(nlohmann::json::parse(timeline.json)["runs"][0]["rows"].empty());
  EXPECT_THAT(page_of(page), Not(HasSubstr("timeline-canvas\" tabindex")));
}

// ---- text ------------------------------------------------------------------------------------

TEST(Text, WhatIsNoTextIsReplaced) {
  EXPECT_EQ(clean("plain ä € 😀\n"), "plain ä € 😀\n");
  EXPECT_EQ(clean(std::string_view("a\0b", 3)),
            "a\xef\xbf\xbd"
            "b");
  EXPECT_EQ(clean("\xff"), "\xef\xbf\xbd");
  EXPECT_EQ(clean("\xc0\x80"), "\xef\xbf\xbd\xef\xbf\xbd");                  // overlong
  EXPECT_EQ(clean("\xed\xa0\x80"), "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");  // a surrogate
  EXPECT_EQ(clean("a\xe2\x82"), "a\xef\xbf\xbd\xef\xbf\xbd");                // cut off
  EXPECT_EQ(clean("\xe2\x80\xae"
                  "evil"),
            "\xef\xbf\xbd"
            "evil");  // turns the direction
  EXPECT_EQ(clean("abcdef", 3), "abc…");
}

TEST(Text, EscapesForHtmlAndForScripts) {
  EXPECT_EQ(escaped("<a href=\"x\" b='y'>&"), "&lt;a href=&quot;x&quot; b=&#39;y&#39;&gt;&amp;");
  std::string out;
  append_json_string(out, "</script><!-- \"\\\n&");
  EXPECT_EQ(out, "\"\\u003c/script\\u003e\\u003c!-- \\\"\\\\\\u000a\\u0026\"");
  EXPECT_EQ(nlohmann::json::parse(out), "</script><!-- \"\\\n&");
}

TEST(Text, Figures) {
  EXPECT_EQ(figure(1397.04), "1397");
  EXPECT_EQ(figure(999.97), "1000");
  EXPECT_EQ(figure(275.61), "275.6");
  EXPECT_EQ(figure(12.345), "12.3");
  EXPECT_EQ(figure(1.2345), "1.23");
  EXPECT_EQ(figure(0.51234), "0.512");
  EXPECT_EQ(figure(-0.0001), "0");
  EXPECT_EQ(figure(1e300), "1e+300");
  EXPECT_EQ(fixed(-0.001, 2), "0.00");
  EXPECT_EQ(in_percent(-0.01), "0.0 %");
  EXPECT_EQ(grouped(1234567), "1,234,567");
  EXPECT_EQ(grouped(12), "12");
}

}  // namespace
}  // namespace weft::report
