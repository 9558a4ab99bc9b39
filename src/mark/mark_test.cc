#include "weft/mark.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <thread>

namespace weft::mark {
namespace {

using testing::HasSubstr;
using trace::Event;
using trace::Kind;
using trace::kNone16;

class MarkTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / "weft-mark-XXXXXX";
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    capture::Options options;
    options.path = folder_ + "/rank-0.weft";
    auto started = capture::Recorder::start(options);
    ASSERT_TRUE(started.ok()) << started.error().message();
    recorder_ = std::move(*started);
    marks_ = std::make_unique<Marks>(recorder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  static trace::Model model(uint32_t layers) {
    trace::Model out;
    for (uint32_t l = 0; l < layers; ++l) {
      out.layers.push_back({text("layer %u", l)});
      out.tensors.push_back({text("w%u", l), 400, l, l, l});
    }
    return out;
  }

  // Everything that was recorded; the marks are over.
  trace::Process read() {
    marks_.reset();
    EXPECT_TRUE(recorder_->stop().ok());
    EXPECT_EQ(recorder_->dropped(), 0u);
    auto file = trace::read_process(folder_ + "/rank-0.weft");
    EXPECT_TRUE(file.ok()) << file.error().message();
    file->process.sort();
    return std::move(file->process);
  }

  static std::vector<Event> of(const trace::Process& process, Kind kind) {
    std::vector<Event> out;
    for (const Event& event : process.events)
      if (event.kind == kind) out.push_back(event);
    return out;
  }

  std::string folder_;
  std::shared_ptr<capture::Recorder> recorder_;
  std::unique_ptr<Marks> marks_;
};

void burn() {
  volatile uint64_t sink = 0;
  for (uint64_t i = 0; i < 2'000'000; ++i) sink = sink + i;
}

TEST_F(MarkTest, spans_say_kind_layer_iteration_thread_and_processor_time) {
  ASSERT_TRUE(marks_->model(model(3)).ok());
  ASSERT_TRUE(marks_->begin_iteration(7).ok());
  {
    Span span = marks_->forward(2);
    burn();
  }
  { Span span = marks_->data_loading("batch"); }
  { Span span = marks_->host("log"); }
  marks_->memory("resident", 123'456);
  ASSERT_TRUE(marks_->end_iteration().ok());
  const trace::Process process = read();
  const auto forward = of(process, Kind::forward);
  ASSERT_EQ(forward.size(), 1u);
  EXPECT_EQ(forward[0].layer, 2);
  EXPECT_EQ(forward[0].iteration, 7u);
  EXPECT_GT(forward[0].duration_ns, 0);
  ASSERT_LT(forward[0].track, process.tracks.size());
  EXPECT_EQ(process.tracks[forward[0].track].type, trace::TrackType::thread);
  EXPECT_THAT(process.tracks[forward[0].track].name, HasSubstr("thread 1"));
  const auto used = of(process, Kind::processor_time);
  ASSERT_EQ(used.size(), 1u) << "of compute only";
  EXPECT_EQ(used[0].start_ns, forward[0].start_ns);
  EXPECT_EQ(used[0].layer, 2);
  EXPECT_GT(used[0].duration_ns, 0);
  EXPECT_LE(used[0].duration_ns, forward[0].duration_ns + 1'000'000);
  const auto loading = of(process, Kind::data_loading);
  ASSERT_EQ(loading.size(), 1u);
  EXPECT_EQ(process.label(loading[0]), "batch");
  EXPECT_EQ(of(process, Kind::host).size(), 1u);
  const auto memory = of(process, Kind::memory);
  ASSERT_EQ(memory.size(), 1u);
  EXPECT_EQ(memory[0].duration_ns, 123'456);
  EXPECT_EQ(process.label(memory[0]), "resident");
  const auto iterations = of(process, Kind::iteration);
  ASSERT_EQ(iterations.size(), 1u);
  EXPECT_LE(iterations[0].start_ns, forward[0].start_ns);
  EXPECT_GE(iterations[0].end_ns(), memory[0].start_ns);
}

TEST_F(MarkTest, an_iteration_lasts_until_the_next) {
  for (uint64_t i : {3, 4, 9}) ASSERT_TRUE(marks_->begin_iteration(i).ok());
  ASSERT_TRUE(marks_->end_iteration().ok());
  const auto iterations = of(read(), Kind::iteration);
  ASSERT_EQ(iterations.size(), 3u);
  EXPECT_EQ(iterations[0].iteration, 3u);
  EXPECT_EQ(iterations[0].end_ns(), iterations[1].start_ns);
  EXPECT_EQ(iterations[2].iteration, 9u);
}

TEST_F(MarkTest, an_update_belongs_to_the_gradients_that_it_applies) {
  ASSERT_TRUE(marks_->model(model(2)).ok());
  for (uint32_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(marks_->begin_iteration(i).ok());
    for (uint32_t l = 0; l < 2; ++l) {
      if (i > 0) marks_->update(l).end();  // of the step before
      marks_->forward(l).end();
    }
    for (uint32_t l = 2; l-- > 0;) marks_->backward(l).end();
  }
  marks_->update().end();  // at the end of the last
  const auto updates = of(read(), Kind::update);
  ASSERT_EQ(updates.size(), 5u);
  EXPECT_EQ(updates[0].iteration, 0u);
  EXPECT_EQ(updates[1].iteration, 0u);
  EXPECT_EQ(updates[3].iteration, 1u);
  EXPECT_EQ(updates[4].iteration, 2u);
  EXPECT_EQ(updates[4].layer, kNone16);
}

TEST_F(MarkTest, an_update_of_a_tensor_knows_its_layer) {
  ASSERT_TRUE(marks_->model(model(2)).ok());
  auto span = marks_->begin(What::update, {.tensor = 1});
  ASSERT_TRUE(span.ok());
  span->end();
  const auto updates = of(read(), Kind::update);
  ASSERT_EQ(updates.size(), 1u);
  EXPECT_EQ(updates[0].layer, 1);
  EXPECT_EQ(updates[0].tensor, 1u);
}

TEST_F(MarkTest, a_span_that_ends_in_another_thread_has_no_processor_time) {
  ASSERT_TRUE(marks_->model(model(1)).ok());
  Span span = marks_->forward(0);
  std::thread([&] { span.end(); }).join();
  const trace::Process process = read();
  EXPECT_EQ(of(process, Kind::forward).size(), 1u);
  EXPECT_TRUE(of(process, Kind::processor_time).empty());
}

TEST_F(MarkTest, a_span_may_be_told_when_it_is_over) {
  ASSERT_TRUE(marks_->model(model(2)).ok());
  ASSERT_TRUE(marks_->begin_iteration(4).ok());
  const int64_t start = marks_->now().count - 500;
  EXPECT_TRUE(marks_->add(What::backward, {.layer = 1}, {start, start + 300, 250}).ok());
  EXPECT_TRUE(marks_->add(What::forward, {.layer = 0}, {start, start + 200}).ok());
  EXPECT_TRUE(marks_->add(What::data_loading, {.iteration = 5}, {start, start + 9, 7}).ok());
  ASSERT_TRUE(marks_->begin_iteration(5).ok());
  EXPECT_TRUE(marks_->add(What::update, {}, {start, start + 400, 1000}).ok());
  EXPECT_FALSE(marks_->add(What::host, {}, {start, start - 1}).ok());
  EXPECT_FALSE(marks_->add(What::forward, {.layer = 2}, {start, start}).ok());
  EXPECT_EQ(marks_->refused(), 2u);
  const trace::Process process = read();
  const auto backward = of(process, Kind::backward);
  ASSERT_EQ(backward.size(), 1u);
  EXPECT_EQ(backward[0].start_ns, start);
  EXPECT_EQ(backward[0].duration_ns, 300);
  EXPECT_EQ(backward[0].layer, 1);
  EXPECT_EQ(backward[0].iteration, 4u);
  ASSERT_EQ(of(process, Kind::update).size(), 1u);
  EXPECT_EQ(of(process, Kind::update)[0].iteration, 4u) << "whose gradients it applies";
  EXPECT_EQ(of(process, Kind::data_loading)[0].iteration, 5u);
  EXPECT_TRUE(of(process, Kind::host).empty());
  std::vector<int64_t> used;
  for (const Event& event : of(process, Kind::processor_time)) used.push_back(event.duration_ns);
  EXPECT_THAT(used, testing::UnorderedElementsAre(250, 1000)) << "of compute that told it";
}

TEST_F(MarkTest, an_iteration_may_have_ended_before) {
  ASSERT_TRUE(marks_->begin_iteration(0).ok());
  const int64_t begun = marks_->now().count;
  EXPECT_FALSE(marks_->end_iteration(Nanos{begun - 1'000'000'000}).ok());
  ASSERT_TRUE(marks_->end_iteration(Nanos{begun + 5}).ok());
  const auto iterations = of(read(), Kind::iteration);
  ASSERT_EQ(iterations.size(), 1u);
  EXPECT_EQ(iterations[0].end_ns(), begun + 5);
}

TEST_F(MarkTest, threads_mark_at_once_and_each_has_a_row) {
  constexpr int kThreads = 4, kSpans = 500;
  ASSERT_TRUE(marks_->model(model(kThreads)).ok());
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < kSpans; ++i) {
        marks_->backward(t).end();
        auto open = marks_->open(What::host, {.name = "x"});
        ASSERT_TRUE(open.ok());
        EXPECT_TRUE(marks_->close(*open).ok());
        if (t == 0) {
          EXPECT_TRUE(marks_->begin_iteration(static_cast<uint64_t>(i)).ok());
        }
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(marks_->refused(), 0u);
  const auto spans = of(read(), Kind::backward);
  EXPECT_EQ(spans.size(), size_t{kThreads} * kSpans);
  std::vector<int> track_of(kThreads, -1);
  for (const Event& span : spans) {
    int& track = track_of[span.layer];
    if (track < 0) track = span.track;
    EXPECT_EQ(span.track, track);
  }
  std::sort(track_of.begin(), track_of.end());
  EXPECT_EQ(std::unique(track_of.begin(), track_of.end()), track_of.end());
}

TEST_F(MarkTest, what_makes_no_sense_is_refused_counted_and_told) {
  auto message = [](const auto& result) {
    return result.ok() ? std::string("accepted") : result.error().message();
  };
  EXPECT_THAT(message(marks_->begin(What::forward, {.layer = 0})), HasSubstr("model()"));
  ASSERT_TRUE(marks_->model(model(2)).ok());
  EXPECT_THAT(message(marks_->begin(What::forward, {.layer = 2})),
              HasSubstr("forward of layer 2: the model has 2"));
  EXPECT_THAT(message(marks_->begin(What::backward, {})), HasSubstr("of no layer"));
  EXPECT_THAT(message(marks_->begin(What::update, {.tensor = 9})), HasSubstr("tensor 9"));
  EXPECT_THAT(message(marks_->begin(static_cast<What>(77), {})), HasSubstr("no mark 77"));
  EXPECT_THAT(message(marks_->end_iteration()), HasSubstr("no iteration is under way"));
  ASSERT_TRUE(marks_->begin_iteration(5).ok());
  EXPECT_THAT(message(marks_->begin_iteration(5)), HasSubstr("after 5"));
  EXPECT_THAT(message(marks_->begin_iteration(uint64_t{1} << 40)), HasSubstr("upwards"));
  EXPECT_THAT(message(marks_->close(1)), HasSubstr("no span 1 is open"));
  auto open = marks_->open(What::host, {});
  ASSERT_TRUE(open.ok());
  EXPECT_TRUE(marks_->close(*open).ok());
  EXPECT_THAT(message(marks_->close(*open)), HasSubstr("has ended"));
  EXPECT_FALSE(marks_->forward(99).open());
  EXPECT_EQ(marks_->refused(), 11u);
  const trace::Process process = read();
  EXPECT_TRUE(of(process, Kind::forward).empty());
  ASSERT_EQ(process.notes.size(), 1u);
  EXPECT_EQ(process.notes[0].key, trace::kMarksRefused);
  EXPECT_THAT(process.notes[0].value, testing::StartsWith("11; the first: forward of layer 0"));
}

TEST_F(MarkTest, a_model_may_only_grow) {
  ASSERT_TRUE(marks_->model(model(2)).ok());
  ASSERT_TRUE(marks_->model(model(2)).ok());
  ASSERT_TRUE(marks_->model(model(3)).ok());
  EXPECT_FALSE(marks_->model(model(2)).ok());
  trace::Model other = model(3);
  other.layers[0].name = "another";
  EXPECT_FALSE(marks_->model(other).ok());
  other = model(4);
  other.tensors[3].consumed_by = 4;
  EXPECT_FALSE(marks_->model(other).ok());
  other.layers.resize(70'000);
  EXPECT_FALSE(marks_->model(other).ok());
  EXPECT_EQ(marks_->model().layers.size(), 3u);
  marks_->forward(2).end();
  EXPECT_EQ(of(read(), Kind::forward).size(), 1u);
}

TEST_F(MarkTest, open_spans_are_bounded_and_die_unrecorded) {
  uint64_t last = 0;
  for (int i = 0; i < 65'536; ++i) {
    auto open = marks_->open(What::host, {});
    ASSERT_TRUE(open.ok());
    last = *open;
  }
  EXPECT_FALSE(marks_->open(What::host, {}).ok());
  EXPECT_TRUE(marks_->close(last).ok());
  EXPECT_TRUE(marks_->open(What::host, {}).ok());
  EXPECT_EQ(of(read(), Kind::host).size(), 1u);
}

TEST(Off, marks_cost_nothing_and_refuse_nothing) {
  Marks marks(capture::Recorder::off());
  EXPECT_FALSE(marks.on());
  EXPECT_FALSE(marks.forward(9).open());
  EXPECT_TRUE(marks.begin(What::forward, {}).ok());
  EXPECT_TRUE(marks.end_iteration().ok());
  EXPECT_TRUE(marks.begin_iteration(0).ok());
  auto open = marks.open(What::forward, {.layer = 3});
  ASSERT_TRUE(open.ok());
  EXPECT_EQ(*open, 0u);
  EXPECT_TRUE(marks.close(*open).ok());
  marks.memory("x", 1);
  EXPECT_EQ(marks.refused(), 0u);
}

TEST_F(MarkTest, a_moved_span_ends_once) {
  ASSERT_TRUE(marks_->model(model(2)).ok());
  Span one = marks_->forward(0);
  Span two = std::move(one);
  EXPECT_TRUE(two.open());
  two = marks_->forward(1);  // ends the first
  one.end();  // NOLINT(bugprone-use-after-move): what is moved from has nothing to end
  two.end();
  two.end();
  EXPECT_EQ(of(read(), Kind::forward).size(), 2u);
}

}  // namespace
}  // namespace weft::mark
