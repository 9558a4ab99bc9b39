// The log, as those who read it or do not read it see it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <array>

#include "weft/base.h"

namespace weft {
namespace {

using testing::HasSubstr;

// While it lives, stderr is a pipe that is read only when asked for.
class UnreadStderr {
 public:
  UnreadStderr() : before_(::dup(STDERR_FILENO)) {
    std::array<int, 2> ends;
    WEFT_CHECK(::pipe2(ends.data(), O_CLOEXEC) == 0);
    reader_ = Fd(ends[0]);
    Fd writer(ends[1]);
    ::dup2(writer.get(), STDERR_FILENO);
  }
  ~UnreadStderr() {
    drain();
    log_flush();
    ::dup2(before_.get(), STDERR_FILENO);
  }
  UnreadStderr(const UnreadStderr&) = delete;
  UnreadStderr& operator=(const UnreadStderr&) = delete;

  std::string drain() {
    std::string out;
    std::array<char, 65536> buffer;
    pollfd ready{reader_.get(), POLLIN, 0};
    while (::poll(&ready, 1, 0) == 1) {
      ssize_t got = ::read(reader_.get(), buffer.data(), buffer.size());
      if (got <= 0) break;
      out.append(buffer.data(), static_cast<size_t>(got));
    }
    return out;
  }
  void close_reader() { reader_.reset(); }

 private:
  Fd before_;
  Fd reader_;
};

void pause(Nanos time) {
  timespec left{0, static_cast<long>(time.count)};
  ::nanosleep(&left, nullptr);
}

size_t lines_with(const std::string& all, const std::string& words) {
  size_t count = 0;
  for (size_t at = all.find(words); at != std::string::npos; at = all.find(words, at + 1)) ++count;
  return count;
}

TEST(Log, does_not_wait_for_a_reader_and_counts_what_it_leaves_out) {
  UnreadStderr stderr_;
  std::string padding(400, 'x');
  int flags = ::fcntl(STDERR_FILENO, F_GETFL);
  constexpr size_t kLines = 1644;
  for (size_t i = 0; i < kLines; ++i) {
    if (i % 300 == 299) pause(Nanos::from_millis(700));  // within the rate
    WEFT_LOG(base, error, "line %zu %s", i, padding.c_str());
  }
  EXPECT_EQ(::fcntl(STDERR_FILENO, F_GETFL), flags) << "others share the file";
  std::string seen = stderr_.drain();
  size_t written = lines_with(seen, "base error: line ");
  EXPECT_GT(written, 50u);
  EXPECT_LT(written, 200u) << "a pipe holds 64 KiB";
  // What waited comes when there is room, then how much did not wait.
  for (int i = 0; i < 10; ++i) {
    log_flush();
    seen += stderr_.drain();
  }
  written = lines_with(seen, "base error: line ");
  EXPECT_THAT(seen, HasSubstr(text("weft: %zu lines of the log were left out", kLines - written)));
  for (size_t i = 0; i < written; ++i)
    EXPECT_THAT(seen, HasSubstr(text("line %zu x", i))) << "the first stay, in order";
  WEFT_LOG(base, error, "afterwards");
  EXPECT_THAT(stderr_.drain(), HasSubstr("afterwards\n"));
}

TEST(Log, has_a_greatest_rate) {
  UnreadStderr stderr_;
  pause(Nanos::from_millis(999));
  size_t seen = 0;
  Nanos began = monotonic_clock().now();
  for (int i = 0; i < 20000; ++i) {
    WEFT_LOG(base, error, "again");
    if (i % 64 == 0) seen += lines_with(stderr_.drain(), "again\n");
  }
  double seconds = (monotonic_clock().now() - began).seconds();
  seen += lines_with(stderr_.drain(), "again\n");
  EXPECT_GE(seen, 400u);
  EXPECT_LE(static_cast<double>(seen), 500 * (1 + seconds) + 1);
  pause(Nanos::from_millis(100));
  log_flush();
  EXPECT_THAT(stderr_.drain(), HasSubstr("lines of the log were left out"));
}

TEST(Log, goes_on_when_its_reader_is_gone) {
  UnreadStderr stderr_;
  stderr_.close_reader();
  WEFT_LOG(base, error, "nobody hears this, and no signal comes of it");
}

}  // namespace
}  // namespace weft
