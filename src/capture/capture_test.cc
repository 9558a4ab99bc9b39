#include "weft/capture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>

namespace weft::capture {
namespace {

using trace::Event;
using trace::Kind;

class CaptureTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = std::filesystem::temp_directory_path() / "weft-capture-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name = "rank-0.weft") const { return folder_ + "/" + name; }

  std::unique_ptr<Recorder> start(Options options) {
    if (options.path.empty()) options.path = path();
    auto recorder = Recorder::start(std::move(options));
    EXPECT_TRUE(recorder.ok()) << recorder.error().message();
    return recorder.ok() ? std::move(recorder).value() : Recorder::off();
  }

  trace::ReadFile read(const std::string& file) const {
    auto read = trace::read_process(file);
    EXPECT_TRUE(read.ok()) << read.error().message();
    return read.ok() ? std::move(read).value() : trace::ReadFile{};
  }

  std::string folder_;
};

// The n-th event of a track: times rise, so order in the file can be compared with order of n.
Event numbered(trace::TrackId track, uint64_t n) {
  Event event;
  event.track = track;
  event.start_ns = static_cast<int64_t>(n);
  event.duration_ns = 1;
  event.bytes = n;
  event.kind = Kind::other;
  return event;
}

trace::Track thread_track(const std::string& name) {
  return {.type = trace::TrackType::thread, .name = name};
}

// The numbers of a track's events, in the order of the file.
std::vector<uint64_t> numbers_of(const trace::Process& process, trace::TrackId track) {
  std::vector<uint64_t> numbers;
  for (const Event& event : process.events) {
    if (event.track == track) numbers.push_back(event.bytes);
  }
  return numbers;
}

TEST_F(CaptureTest, KeepsEverythingThatIsRecorded) {
  Options options;
  options.environment = describe_machine();
  options.environment.rank = 3;
  options.environment.ranks = 4;
  auto recorder = start(options);
  EXPECT_TRUE(recorder->on());
  recorder->model(
      {.name = "net", .layers = {{"a"}, {"b"}}, .tensors = {{.name = "w", .bytes = 8}}});
  const auto device = recorder->track(thread_track("device"));
  const auto other = recorder->track(thread_track("other"));
  EXPECT_NE(device, other);
  EXPECT_EQ(recorder->track(thread_track("device")), device);
  const auto name = recorder->name("warm-up");
  EXPECT_EQ(recorder->name("warm-up"), name);
  EXPECT_NE(recorder->name("run"), name);

  Event event = numbered(device, 5);
  event.name = name;
  event.layer = 1;
  event.tensor = 0;
  event.kind = Kind::backward;
  recorder->record(event);
  recorder->ping({.peer = 1, .t0 = 1, .t1 = 2, .t2 = 3, .t3 = 4});
  recorder->probe({.type = trace::ProbeType::copy, .bytes = 10, .duration_ns = 20});
  recorder->note("lane 2 reconnected", "after 3 ms");
  recorder->clock_sample();
  ASSERT_TRUE(recorder->stop().ok());
  EXPECT_TRUE(recorder->stop().ok());  // again: the same answer

  const auto file = read(path());
  const trace::Process& process = file.process;
  EXPECT_FALSE(file.damage.any());
  EXPECT_EQ(process.environment.rank, 3u);
  EXPECT_EQ(process.model.layers.size(), 2u);
  ASSERT_EQ(process.events.size(), 1u);
  EXPECT_EQ(process.events[0], event);
  EXPECT_EQ(process.names.at(name), "warm-up");
  EXPECT_EQ(process.tracks.at(device).name, "device");
  EXPECT_EQ(process.tracks.at(other).name, "other");
  EXPECT_EQ(process.pings.size(), 1u);
  EXPECT_EQ(process.probe.size(), 1u);
  ASSERT_EQ(process.notes.size(), 1u);
  EXPECT_EQ(process.notes[0].key, "lane 2 reconnected");
  EXPECT_EQ(process.dropped, 0u);
  EXPECT_EQ(process.clock_samples.size(), 3u);  // at start, asked for, at stop
}

TEST_F(CaptureTest, ClockSamplesTieTheTwoClocks) {
  SkewedClock clock(monotonic_clock(), Nanos::from_seconds(-20), 0);
  Options options;
  options.clock = &clock;
  auto recorder = start(options);
  EXPECT_LT(recorder->now(), monotonic_clock().now());
  ASSERT_TRUE(recorder->stop().ok());
  const int64_t offset = wall_time().count - clock.now().count;
  const auto file = read(path());
  ASSERT_EQ(file.process.clock_samples.size(), 2u);
  for (const trace::ClockSample& sample : file.process.clock_samples) {
    // Generous: another process may hold the core, and the wall clock may be steered meanwhile.
    EXPECT_NEAR(static_cast<double>(sample.wall_ns - sample.trace_ns), static_cast<double>(offset),
                50e6);
  }
}

TEST_F(CaptureTest, OffKeepsNothing) {
  auto recorder = Recorder::off();
  EXPECT_FALSE(recorder->on());
  recorder->record(numbered(recorder->track(thread_track("t")), 1));
  recorder->note("key", "value");
  recorder->clock_sample();
  recorder->model({});
  EXPECT_EQ(recorder->name("x"), trace::kNone);
  EXPECT_GT(recorder->now().count, 0);
  EXPECT_EQ(recorder->dropped(), 0u);
  EXPECT_TRUE(recorder->flush().ok());
  EXPECT_TRUE(recorder->stop().ok());
}

TEST_F(CaptureTest, StartTellsWhatItCannotOpen) {
  Options options;
  options.path = folder_ + "/absent/rank-0.weft";
  const auto recorder = Recorder::start(options);
  ASSERT_FALSE(recorder.ok());
  EXPECT_THAT(recorder.error().message(), ::testing::HasSubstr("absent/rank-0.weft"));
  options.path = path();
  options.flush_interval = {0};
  EXPECT_EQ(Recorder::start(options).error().code(), Code::invalid_argument);
}

TEST_F(CaptureTest, ManyThreadsArriveOnceAndInOrder) {
  constexpr uint64_t kThreads = 8;
  constexpr uint64_t kEvents = 20'000;
  Options options;
  options.ring_events = 1 << 10;  // goes round many times
  auto recorder = start(options);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto track = recorder->track(thread_track("thread " + std::to_string(t)));
      for (uint64_t n = 0; n < kEvents; ++n) {
        recorder->record(numbered(track, n));
        // Never more on the way than a ring holds.
        if (n % 512 == 511) {
          ASSERT_TRUE(recorder->flush().ok());
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(recorder->dropped(), 0u);
  ASSERT_TRUE(recorder->stop().ok());

  const auto file = read(path());
  EXPECT_EQ(file.process.events.size(), kThreads * kEvents);
  EXPECT_EQ(file.process.dropped, 0u);
  for (trace::TrackId track = 0; track < kThreads; ++track) {
    const auto numbers = numbers_of(file.process, track);
    ASSERT_EQ(numbers.size(), kEvents);
    for (uint64_t n = 0; n < kEvents; ++n) ASSERT_EQ(numbers[n], n) << "track " << track;
  }
}

TEST_F(CaptureTest, DropsAreCountedAndInTheFile) {
  constexpr uint64_t kThreads = 4;
  constexpr uint64_t kEvents = 50'000;
  Options options;
  options.ring_events = 16;
  auto recorder = start(options);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto track = recorder->track(thread_track("thread " + std::to_string(t)));
      for (uint64_t n = 0; n < kEvents; ++n) recorder->record(numbered(track, n));
    });
  }
  for (auto& thread : threads) thread.join();
  ASSERT_TRUE(recorder->stop().ok());
  const auto file = read(path());
  EXPECT_GT(file.process.dropped, 0u);
  EXPECT_EQ(file.process.dropped, recorder->dropped());
  EXPECT_EQ(file.process.events.size() + file.process.dropped, kThreads * kEvents);
  for (trace::TrackId track = 0; track < kThreads; ++track) {
    const auto numbers = numbers_of(file.process, track);
    EXPECT_TRUE(std::is_sorted(numbers.begin(), numbers.end()));
    EXPECT_EQ(std::adjacent_find(numbers.begin(), numbers.end()), numbers.end());
  }
}

TEST_F(CaptureTest, ThreadsThatEndLeaveTheirRings) {
  auto recorder = start({});
  const auto track = recorder->track(thread_track("short"));
  constexpr uint64_t kThreads = 300;
  for (uint64_t t = 0; t < kThreads; ++t) {
    std::thread([&, t] {
      for (uint64_t n = 0; n < 3; ++n) recorder->record(numbered(track, t * 3 + n));
    }).join();
    if (t % 50 == 0) {
      ASSERT_TRUE(recorder->flush().ok());
    }
  }
  ASSERT_TRUE(recorder->stop().ok());
  auto numbers = numbers_of(read(path()).process, track);
  std::sort(numbers.begin(), numbers.end());
  ASSERT_EQ(numbers.size(), kThreads * 3);
  for (uint64_t n = 0; n < numbers.size(); ++n) EXPECT_EQ(numbers[n], n);
}

TEST_F(CaptureTest, OneThreadUsesSeveralRecorders) {
  constexpr int kRecorders = 3;
  std::vector<std::unique_ptr<Recorder>> recorders;
  for (int i = 0; i < kRecorders; ++i) {
    Options options;
    options.path = path(std::to_string(i));
    options.environment.ranks = kRecorders;
    options.environment.rank = static_cast<uint32_t>(i);
    recorders.push_back(start(options));
    recorders.back()->track(thread_track("t"));
  }
  for (uint64_t n = 0; n < 100; ++n) {
    for (int i = 0; i < kRecorders; ++i) {
      recorders[static_cast<size_t>(i)]->record(numbered(0, n * 10 + static_cast<uint64_t>(i)));
    }
  }
  for (int i = 0; i < kRecorders; ++i) {
    ASSERT_TRUE(recorders[static_cast<size_t>(i)]->stop().ok());
    const auto numbers = numbers_of(read(path(std::to_string(i))).process, 0);
    ASSERT_EQ(numbers.size(), 100u);
    for (uint64_t n = 0; n < 100; ++n) EXPECT_EQ(numbers[n], n * 10 + static_cast<uint64_t>(i));
  }
}

TEST_F(CaptureTest, AThreadOutlivesItsRecorders) {
  // A new recorder may get the address of a dead one; the thread must not mistake them.
  for (uint64_t round = 0; round < 50; ++round) {
    Options options;
    options.ring_events = 64;
    auto recorder = start(options);
    recorder->track(thread_track("t"));
    recorder->record(numbered(0, round));
    ASSERT_TRUE(recorder->stop().ok());
    recorder->record(numbered(0, 999));  // after stop: ignored
    recorder.reset();
    EXPECT_THAT(numbers_of(read(path()).process, 0), ::testing::ElementsAre(round));
  }
}

TEST_F(CaptureTest, ARecorderDiesWhileItsThreadsLive) {
  std::atomic<int> phase{0};
  auto first = start({});
  first->track(thread_track("t"));
  Options options;
  options.path = path("second");
  auto second = start(options);
  second->track(thread_track("t"));
  std::thread thread([&] {
    first->record(numbered(0, 1));
    phase = 1;
    phase.notify_all();
    phase.wait(1);
    second->record(numbered(0, 2));
  });
  phase.wait(0);
  first.reset();
  phase = 2;
  phase.notify_all();
  thread.join();
  ASSERT_TRUE(second->stop().ok());
  EXPECT_THAT(numbers_of(read(path()).process, 0), ::testing::ElementsAre(1));
  EXPECT_THAT(numbers_of(read(path("second")).process, 0), ::testing::ElementsAre(2));
}

TEST_F(CaptureTest, StopRacesWithRecording) {
  for (int round = 0; round < 20; ++round) {
    auto recorder = start({});
    recorder->track(thread_track("t"));
    std::atomic<bool> enough{false};
    std::vector<std::thread> threads;
    threads.reserve(3);
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        for (uint64_t n = 0; !enough; ++n) recorder->record(numbered(0, n));
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(recorder->stop().ok());
    enough = true;
    for (auto& thread : threads) thread.join();
    EXPECT_FALSE(read(path()).damage.any());
  }
}

TEST_F(CaptureTest, ARefusedRecordCostsOnlyItself) {
  auto recorder = start({});
  const auto track = recorder->track(thread_track("t"));
  recorder->record(numbered(track, 0));
  recorder->record(numbered(static_cast<trace::TrackId>(track + 7), 1));  // no such track
  recorder->record(numbered(track, 2));
  const auto stopped = recorder->stop();
  ASSERT_FALSE(stopped.ok());
  EXPECT_EQ(stopped.error().code(), Code::invalid_argument);
  const auto file = read(path());
  EXPECT_FALSE(file.damage.any());
  EXPECT_THAT(numbers_of(file.process, track), ::testing::ElementsAre(0, 2));
  EXPECT_EQ(file.process.dropped, 1u);
}

TEST_F(CaptureTest, AFullDiskIsToldAtTheEnd) {
  // The limit is the process's, so it is set in a child.
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit limit{.rlim_cur = 64 << 10, .rlim_max = 64 << 10};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(10);
    Options options;
    options.path = path();
    auto recorder = Recorder::start(options);
    if (!recorder.ok()) _exit(11);
    const auto track = (*recorder)->track(thread_track("t"));
    constexpr uint64_t kEvents = 10'000;  // 720 kB
    for (uint64_t n = 0; n < kEvents; ++n) (*recorder)->record(numbered(track, n));
    if ((*recorder)->flush().ok()) _exit(12);
    for (uint64_t n = 0; n < 100; ++n) (*recorder)->record(numbered(track, kEvents + n));
    const auto stopped = (*recorder)->stop();
    if (stopped.ok()) _exit(13);
    if (stopped.error().code() != Code::io) _exit(14);
    if ((*recorder)->dropped() < 100) _exit(15);
    const auto file = trace::read_process(path());
    if (!file.ok() || !file->damage.unfinished) _exit(16);
    if (file->process.events.size() + (*recorder)->dropped() < kEvents + 100) _exit(17);
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(CaptureTest, AKilledProcessLosesOnlyTheLastMoments) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Options options;
    options.path = path();
    options.flush_interval = Nanos::from_millis(20);
    auto recorder = Recorder::start(options);
    if (!recorder.ok()) _exit(1);
    const auto track = (*recorder)->track(thread_track("t"));
    for (uint64_t n = 0; n < 1000; ++n) (*recorder)->record(numbered(track, n));
    for (;;) pause();
  }
  // Nobody asks for a flush: it comes by itself.
  size_t seen = 0;
  for (int i = 0; i < 500 && seen < 1000; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (auto file = trace::read_process(path()); file.ok()) seen = file->process.events.size();
  }
  kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  const auto file = read(path());
  EXPECT_TRUE(file.damage.unfinished);
  EXPECT_EQ(file.damage.blocks_lost, 0u);
  EXPECT_EQ(file.process.events.size(), 1000u);
  EXPECT_GE(file.process.clock_samples.size(), 1u);
}

TEST_F(CaptureTest, AForkedChildLeavesTheFileAlone) {
  auto recorder = start({});
  const auto track = recorder->track(thread_track("t"));
  recorder->record(numbered(track, 1));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    recorder->record(numbered(track, 2));
    recorder->note("from", "the child");
    const bool ok = recorder->flush().ok() && recorder->stop().ok();
    recorder.reset();
    _exit(ok ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  recorder->record(numbered(track, 3));
  ASSERT_TRUE(recorder->stop().ok());
  const auto file = read(path());
  EXPECT_FALSE(file.damage.any());
  EXPECT_THAT(numbers_of(file.process, track), ::testing::ElementsAre(1, 3));
  EXPECT_TRUE(file.process.notes.empty());
}

TEST(Machine, IsDescribed) {
  const trace::Environment environment = describe_machine();
  EXPECT_FALSE(environment.kernel.empty());
  EXPECT_FALSE(environment.host.empty());
  EXPECT_GE(environment.cores, 1u);
  EXPECT_EQ(environment.weft_version, version());
  for (const auto& [name, value] : environment.sysctls) {
    EXPECT_THAT(name, ::testing::StartsWith("net."));
    EXPECT_EQ(value.find_first_of("\t\n"), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace weft::capture
