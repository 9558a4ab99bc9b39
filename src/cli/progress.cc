#include "progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace weft::cli {

namespace {
constexpr Nanos kQuiet = Nanos::from_seconds(1);
constexpr Nanos kInterval = Nanos::from_millis(100);
}  // namespace

Progress::Progress(std::string label, const Clock& clock, std::optional<bool> terminal)
    : label_(std::move(label)),
      clock_(clock),
      terminal_(terminal.value_or(::isatty(STDERR_FILENO) == 1)),
      next_(clock.now() + kQuiet) {}

void Progress::update(uint64_t done, uint64_t total) {
  if (!terminal_) return;
  const Nanos now = clock_.now();
  if (now < next_) return;
  next_ = now + kInterval;
  drawn_ = true;
  std::string line = "\r\x1b[K" + label_;
  if (total > 0) {
    const double share = std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
    line += text(" %3.0f%%", share * 100);
  } else {
    line += text(" %llu", static_cast<unsigned long long>(done));
  }
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
}

void Progress::finish() {
  if (!drawn_) return;
  drawn_ = false;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
}

}  // namespace weft::cli
