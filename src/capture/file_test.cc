// A recorder whose file fails at any moment: the job goes on, it is said once, and stop() tells
// what the file met.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "weft/capture.h"

namespace weft::capture {
namespace {

using ::testing::HasSubstr;

constexpr size_t kEvents = 300;

// Refuses requests from the `at`-th on, `count` of them; failure 0: half of the bytes.
class Refusing final : public Files {
 public:
  Refusing(uint64_t at, uint64_t count, int failure) : at_(at), count_(count), failure_(failure) {}
  bool met() const { return asked_ >= at_; }

 private:
  int refusal(Call call, size_t& bytes) override {
    const uint64_t number = ++asked_;
    if (number < at_ || number - at_ >= count_) return 0;
    const bool moves = call == Call::read || call == Call::write;
    if (failure_ == 0 && moves) bytes = (bytes + 1) / 2;
    if (failure_ == EINTR && !moves && call != Call::open) return 0;
    return failure_;
  }

  std::atomic<uint64_t> asked_{0};
  const uint64_t at_, count_;
  const int failure_;
};

class CaptureFiles : public ::testing::TestWithParam<bool> {
 protected:
  CaptureFiles() {
    std::string pattern = std::filesystem::temp_directory_path() / "weft-capture-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
    path_ = folder_ + "/" + trace::file_name(0);
    log_set_sink([this](std::string_view line) {
      if (line.find("recording ends early") != std::string_view::npos) ++said_;
    });
  }
  ~CaptureFiles() override {
    log_set_sink({});
    std::filesystem::remove_all(folder_);
  }

  // What start() or stop() tells.
  Result<void> record(Files& files) {
    Options options;
    options.path = path_;
    options.environment.rank = 0;
    options.environment.ranks = 1;
    options.background = GetParam();
    options.flush_interval = Nanos::from_seconds(100);  // only when it is asked for
    options.files = &files;
    WEFT_ASSIGN(auto recorder, Recorder::start(options));
    started_ = true;
    trace::Event event;
    event.track =
        recorder->track({trace::TrackType::thread, "here", trace::kNone16, trace::kNone16});
    event.kind = trace::Kind::other;
    for (size_t i = 0; i < kEvents; ++i) {
      event.start_ns = static_cast<int64_t>(i);
      recorder->record(event);
      if (i % 100 == 99) static_cast<void>(recorder->flush());
    }
    auto stopped = recorder->stop();
    dropped_ = recorder->dropped();
    EXPECT_EQ(stopped.ok(), recorder->stop().ok()) << "the same answer";
    return stopped;
  }

  std::string folder_, path_;
  std::atomic<int> said_{0};
  bool started_ = false;
  uint64_t dropped_ = 0;
};

TEST_P(CaptureFiles, that_fail_at_any_request_cost_the_trace_and_nothing_else) {
  size_t began = 0, never_began = 0;
  for (const int failure : {ENOSPC, EACCES, EIO, EMFILE})
    for (const uint64_t count : {uint64_t{1}, UINT64_MAX})
      for (const bool replaces : {false, true}) {
        for (uint64_t at = 1;; ++at) {
          std::filesystem::remove(path_);
          if (replaces) {
            ASSERT_TRUE(record(kernel_files()));
          }
          said_ = 0;
          started_ = false;
          Refusing files(at, count, failure);
          const auto told = record(files);
          const auto read = trace::read_process(path_);
          if (!files.met()) {
            ASSERT_TRUE(told) << told.error().message();
            ASSERT_TRUE(read);
            EXPECT_FALSE(read->damage.any());
            EXPECT_EQ(read->process.events.size(), kEvents);
            break;
          }
          ASSERT_FALSE(told) << at;
          EXPECT_EQ(told.error().code(), Code::io) << told.error().message();
          EXPECT_THAT(told.error().message(), HasSubstr(path_));
          EXPECT_THAT(told.error().message(), HasSubstr(std::strerror(failure)));
          EXPECT_EQ(said_, started_ ? 1 : 0) << at;
          ++(started_ ? began : never_began);
          if (!started_) {
            // What was there before is there still, or is gone; nothing half-written is.
            EXPECT_TRUE(count > 1 || !std::filesystem::exists(path_) ||
                        (replaces && read && !read->damage.any()))
                << at;
            continue;
          }
          const size_t kept = read ? read->process.events.size() : 0;
          EXPECT_GE(kept + dropped_, kEvents) << at;
        }
      }
  EXPECT_GT(began, 20u);
  EXPECT_GT(never_began, 20u);
}

TEST_P(CaptureFiles, that_are_interrupted_or_moved_in_pieces_are_whole) {
  for (const int failure : {EINTR, 0})
    for (uint64_t at = 1; at < 12; ++at) {
      Refusing files(at, 3, failure);
      const auto told = record(files);
      ASSERT_TRUE(told) << told.error().message();
      const auto read = trace::read_process(path_);
      ASSERT_TRUE(read);
      EXPECT_FALSE(read->damage.any()) << at;
      EXPECT_EQ(read->process.events.size(), kEvents);
    }
}

INSTANTIATE_TEST_SUITE_P(All, CaptureFiles, ::testing::Bool(), [](const auto& of) {
  return std::string(of.param ? "in_the_background" : "when_asked");
});

}  // namespace
}  // namespace weft::capture
