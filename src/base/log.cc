#include <unistd.h>

#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <mutex>

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

struct Log {
  std::mutex mutex;
  std::vector<Rule> rules;
  std::string prefix;
  std::function<void(std::string_view)> sink;
  std::array<std::string, kKeptLines> kept;
  size_t written = 0;

  Log() {
    const char* spec = std::getenv("WEFT_LOG");
    rules = parse_rules(spec != nullptr ? spec : "*:warn");
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
  std::string line = text("%02d:%02d:%02d.%06d %s%s%s %s: %s", parts.tm_hour, parts.tm_min,
                          parts.tm_sec, static_cast<int>(now.count / 1000 % 1'000'000),
                          log.prefix.c_str(), log.prefix.empty() ? "" : " ", module,
                          kNames[static_cast<size_t>(level)], message.data());
  log.kept[log.written++ % kKeptLines] = line;
  if (log.sink) {
    log.sink(line);
    return;
  }
  line += '\n';
  // One write a line, so that lines of several processes do not mix.
  [[maybe_unused]] ssize_t ignored = ::write(STDERR_FILENO, line.data(), line.size());
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
  std::fprintf(stderr, "weft: broken invariant at %s:%d: %s\n", file, line, condition);
  Log& log = the_log();
  size_t first = log.written > kKeptLines ? log.written - kKeptLines : 0;
  for (size_t i = first; i < log.written; ++i)
    std::fprintf(stderr, "  %s\n", log.kept[i % kKeptLines].c_str());
  std::abort();
}

}  // namespace weft
