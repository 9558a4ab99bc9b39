// A recorder whose process runs out of memory: the job goes on, what is missing is counted.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <new>

#include "weft/capture.h"

namespace {

// Counts down in all threads: at 0 it refuses, `refusals` times.
std::atomic<int64_t> left{std::numeric_limits<int64_t>::max()};
std::atomic<int64_t> refusals{0};

void* allocate(size_t size) {
  if (left.fetch_sub(1) <= 0 && refusals.fetch_sub(1) > 0) throw std::bad_alloc();
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// Not where it is called: there it would look as if memory of one kind were freed as another.
[[gnu::noinline]] void release(void* memory) noexcept { std::free(memory); }

}  // namespace

// The forms that are not replaced call these.
void* operator new(size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, size_t) noexcept { release(memory); }

namespace weft::capture {
namespace {

constexpr int kEvents = 200;

struct Recorded {
  bool started = false, threw = false;
  uint64_t dropped = 0;
  int64_t needed = 0;
};

Recorded record(const Options& options, int64_t first_refused, int64_t how_often) {
  Recorded out;
  Options copy = options;
  const trace::Track track{trace::TrackType::thread, "a name that needs memory", trace::kNone16,
                           trace::kNone16};
  left = first_refused;
  refusals = how_often;
  try {
    auto recorder = Recorder::start(std::move(copy));
    out.started = recorder.ok();
    if (recorder) {
      trace::Event event;
      event.track = (*recorder)->track(track);
      event.kind = trace::Kind::other;
      event.name = (*recorder)->name("another name that needs memory");
      for (int i = 0; i < kEvents; ++i) {
        event.start_ns = i;
        (*recorder)->record(event);
        if (i % 50 == 0) (*recorder)->ping({});
        if (i % 70 == 0) static_cast<void>((*recorder)->flush());
      }
      (*recorder)->note("a key that needs memory", "and a value that needs some as well");
      static_cast<void>((*recorder)->stop());
      out.dropped = (*recorder)->dropped();
    }
  } catch (const std::bad_alloc&) {
    out.threw = true;
  }
  out.needed = first_refused - left.exchange(std::numeric_limits<int64_t>::max());
  refusals = 0;
  return out;
}

TEST(CaptureMemory, that_runs_out_costs_records_and_not_the_process) {
  log_set_sink([](std::string_view) {});
  std::string folder = std::filesystem::temp_directory_path() / "weft-capture-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  Options options;
  options.path = folder + "/" + trace::file_name(0);
  options.environment.rank = 0;
  options.environment.ranks = 1;
  const int64_t many = 1'000'000;
  int64_t needed = record(options, many, 0).needed;
  ASSERT_GT(needed, 50);
  size_t started = 0, incomplete = 0;
  for (int64_t how_often : {int64_t{1}, int64_t{3}, many})
    for (int64_t at = 0; at < needed; ++at) {
      Recorded recorded = record(options, at, how_often);
      ASSERT_FALSE(recorded.threw) << at << ", " << how_often << " times";
      if (!recorded.started) continue;
      ++started;
      auto read = trace::read_process(options.path);
      size_t kept = read ? read->process.events.size() : 0;
      EXPECT_GE(kept + recorded.dropped, size_t{kEvents}) << at << ", " << how_often << " times";
      incomplete += kept < kEvents ? 1 : 0;
    }
  EXPECT_GT(started, 0u);
  EXPECT_GT(incomplete, 0u);
  std::filesystem::remove_all(folder);
  log_set_sink({});
}

}  // namespace
}  // namespace weft::capture
