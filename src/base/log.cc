#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <mutex>
#include <new>

#include "weft/base.h"

namespace weft {
namespace {

constexpr size_t kKeptLines = 32;  // printed when a check fails

struct Rule {
  std::string module;
  Level level;
};

std::vector<Rule> parse_rules(std::string_view spec) {
  std::vector<Rule> rules;
  while (!spec.empty()) {
    size_t comma = spec.find(',');
    std::string_view item = spec.substr(0, comma);
    spec = comma == std::string_view::npos ? std::string_view() : spec.substr(comma + 1);
    size_t colon = item.find(':');
    std::string_view module = colon == std::string_view::npos ? "*" : item.substr(0, colon);
    std::string_view level = colon == std::string_view::npos ? item : item.substr(colon + 1);
    Level parsed = Level::warn;
    if (level == "debug") parsed = Level::debug;
    if (level == "info") parsed = Level::info;
    if (level == "error") parsed = Level::error;
    rules.push_back({std::string(module), parsed});
  }
  return rules;
}

// Writes what can be written now: bytes, or -errno. The file's own flags are shared with other
// processes and stay as they are, so whether it would block is asked and not set.
ssize_t write_now(int fd, std::string_view words) {
  struct stat facts {};
  if (::fstat(fd, &facts) != 0) return -errno;
  auto outcome = [](ssize_t put) { return put >= 0 ? put : -errno; };
  if (S_ISREG(facts.st_mode)) return outcome(::write(fd, words.data(), words.size()));
  if (S_ISSOCK(facts.st_mode))
    return outcome(::send(fd, words.data(), words.size(), MSG_DONTWAIT | MSG_NOSIGNAL));
  pollfd ready{fd, POLLOUT, 0};
  if (::poll(&ready, 1, 0) <= 0) return -EAGAIN;
  if ((ready.revents & (POLLERR | POLLHUP | POLLNVAL)) != 0) return -EPIPE;
  if ((ready.revents & POLLOUT) == 0) return -EAGAIN;
  if (S_ISFIFO(facts.st_mode)) {
    iovec part{const_cast<char*>(words.data()), words.size()};
    ssize_t put = ::pwritev2(fd, &part, 1, -1, RWF_NOWAIT);
    if (put >= 0 || (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL))
      return outcome(put);
    // A kernel that cannot promise it. Others may fill the pipe between asking and writing, so a
    // good part of it must be free.
    int unread = 0, size = ::fcntl(fd, F_GETPIPE_SZ);
    if (::ioctl(fd, FIONREAD, &unread) != 0 || unread > size / 2) return -EAGAIN;
  }
  return outcome(::write(fd, words.data(), words.size()));
}

// Lines on their way to stderr. Nobody waits for its reader: what cannot be written stays here, and
// what there is no place or time for is counted.
class Output {
 public:
  void put(std::string line, Nanos now) {
    flush(now);
    if (waiting_.size() >= kWaitingLines || !may_write(now)) {
      ++left_out_;
      return;
    }
    if (left_out_ > 0) say_left_out();
    waiting_.push_back(std::move(line));
    write_waiting();
  }

  void leave_out() { ++left_out_; }

  void flush(Nanos now) {
    write_waiting();
    if (waiting_.empty() && left_out_ > 0 && may_write(now)) {
      say_left_out();
      write_waiting();
    }
  }

 private:
  static constexpr size_t kWaitingLines = 256;
  static constexpr double kLinesPerSecond = 500;  // and as many at once

  bool may_write(Nanos now) {
    budget_ = std::min(kLinesPerSecond,
                       budget_ + std::max(0.0, (now - counted_).seconds()) * kLinesPerSecond);
    counted_ = now;
    if (budget_ < 1) return false;
    budget_ -= 1;
    return true;
  }

  void say_left_out() {
    waiting_.push_back(
        text("weft: %llu lines of the log were left out: they came faster than they "
             "were read, or more than %.0f in a second\n",
             static_cast<unsigned long long>(left_out_), kLinesPerSecond));
    left_out_ = 0;
  }

  void write_waiting() {
    while (!waiting_.empty()) {
      // One write a line, so that lines of several processes do not mix.
      std::string_view rest = std::string_view(waiting_.front()).substr(done_);
      ssize_t put = write_now(STDERR_FILENO, rest);
      if (put == -EAGAIN || put == -EWOULDBLOCK || put == -EINTR) return;
      done_ += put > 0 ? static_cast<size_t>(put) : rest.size();  // nobody will ever read it
      if (done_ < waiting_.front().size()) continue;
      waiting_.pop_front();
      done_ = 0;
    }
  }

  std::deque<std::string> waiting_;
  size_t done_ = 0;  // bytes of the first
  uint64_t left_out_ = 0;
  double budget_ = kLinesPerSecond;
  Nanos counted_{0};
};

struct Log {
  std::mutex mutex;
  std::vector<Rule> rules;
  std::string prefix;
  std::function<void(std::string_view)> sink;
  std::array<std::string, kKeptLines> kept;
  size_t written = 0;
  Output output;

  Log() {
    const char* spec = std::getenv("WEFT_LOG");
    rules = parse_rules(spec != nullptr ? spec : "*:warn");
    static_cast<void>(monotonic_clock());  // made before, it goes after what needs it in the end
    std::atexit(log_flush);
  }
};

Log& the_log() {
  static Log* log = new Log;  // never destroyed: other threads may log while the process ends
  return *log;
}

}  // namespace

bool log_enabled(std::string_view module, Level level) {
  for (const Rule& rule : the_log().rules)
    if (rule.module == module || rule.module == "*") return level >= rule.level;
  return level >= Level::warn;
}

void log_write(const char* module, Level level, const char* format, ...) {
  static constexpr const char* kNames[] = {"debug", "info", "warn", "error"};
  std::array<char, 1024> message;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message.data(), message.size(), format, arguments);
  va_end(arguments);

  Nanos now = wall_time();
  auto seconds = static_cast<time_t>(now.count / 1'000'000'000);
  tm parts;
  gmtime_r(&seconds, &parts);
  Log& log = the_log();
  std::lock_guard lock(log.mutex);
  try {
    std::string line = text("%02d:%02d:%02d.%06d %s%s%s %s: %s", parts.tm_hour, parts.tm_min,
                            parts.tm_sec, static_cast<int>(now.count / 1000 % 1'000'000),
                            log.prefix.c_str(), log.prefix.empty() ? "" : " ", module,
                            kNames[static_cast<size_t>(level)], message.data());
    log.kept[log.written % kKeptLines] = line;
    ++log.written;
    if (log.sink) {
      log.sink(line);
      return;
    }
    line += '\n';
    log.output.put(std::move(line), monotonic_clock().now());
  } catch (const std::bad_alloc&) {
    // Whoever says that something is missing must not fail of it.
    log.output.leave_out();
  }
}

void log_flush() {
  Log& log = the_log();
  std::lock_guard lock(log.mutex);
  try {
    log.output.flush(monotonic_clock().now());
  } catch (const std::bad_alloc&) {
    return;  // the number of lines that were left out is said later
  }
}

void log_set_prefix(std::string prefix) {
  Log& log = the_log();
  std::lock_guard lock(log.mutex);
  log.prefix = std::move(prefix);
}

void log_set_sink(std::function<void(std::string_view)> sink) {
  Log& log = the_log();
  std::lock_guard lock(log.mutex);
  log.sink = std::move(sink);
}

void check_failed(const char* file, int line, const char* condition) {
  // An unread stderr must not keep the process from ending.
  std::string words = text("weft: broken invariant at %s:%d: %s\n", file, line, condition);
  write_now(STDERR_FILENO, words);
  Log& log = the_log();
  size_t first = log.written > kKeptLines ? log.written - kKeptLines : 0;
  for (size_t i = first; i < log.written; ++i)
    write_now(STDERR_FILENO, "  " + log.kept[i % kKeptLines] + "\n");
  std::abort();
}

}  // namespace weft
