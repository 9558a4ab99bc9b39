#include "weft/base.h"

#include <sys/random.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace weft {

const char* version() { return WEFT_VERSION; }

// ---- errors ------------------------------------------------------------------------------

Code code_from(uint8_t number) {
  auto last = static_cast<uint8_t>(Code::exhausted);
  return static_cast<Code>(std::clamp<uint8_t>(number, 1, last));
}

const char* code_name(Code code) {
  switch (code) {
    case Code::invalid_argument: return "invalid_argument";
    case Code::not_found: return "not_found";
    case Code::corrupt: return "corrupt";
    case Code::unsupported: return "unsupported";
    case Code::io: return "io";
    case Code::peer_lost: return "peer_lost";
    case Code::timeout: return "timeout";
    case Code::cancelled: return "cancelled";
    case Code::exhausted: return "exhausted";
  }
  return "unknown";
}

Error Error::in(std::string_view where) && {
  message_.insert(0, ": ").insert(0, where);
  return std::move(*this);
}

namespace {

std::string vtext(const char* format, va_list arguments) {
  va_list copy;
  va_copy(copy, arguments);
  int length = std::vsnprintf(nullptr, 0, format, copy);
  va_end(copy);
  if (length < 0) return format;
  std::string out(static_cast<size_t>(length), '\0');
  std::vsnprintf(out.data(), out.size() + 1, format, arguments);
  return out;
}

}  // namespace

std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string out = vtext(format, arguments);
  va_end(arguments);
  return out;
}

Error error(Code code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string out = vtext(format, arguments);
  va_end(arguments);
  return {code, std::move(out)};
}

Error io_error(int error_number, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string out = vtext(format, arguments);
  va_end(arguments);
  out += ": ";
  out += std::strerror(error_number);
  return {error_number == ENOENT ? Code::not_found : Code::io, std::move(out)};
}

// ---- time --------------------------------------------------------------------------------

namespace {

Nanos read_clock(clockid_t id) {
  timespec now;
  clock_gettime(id, &now);
  return {static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec};
}

class MonotonicClock final : public Clock {
 public:
  // Not CLOCK_MONOTONIC: that one is slewed by time daemons, which would look like drift.
  Nanos now() const override { return read_clock(CLOCK_MONOTONIC_RAW); }
};

}  // namespace

const Clock& monotonic_clock() {
  static const MonotonicClock clock;
  return clock;
}

SkewedClock::SkewedClock(const Clock& truth, Nanos offset, double drift_ppm)
    : truth_(truth), start_(truth.now()), offset_(offset), drift_(drift_ppm * 1e-6) {}

Nanos SkewedClock::now() const {
  Nanos true_now = truth_.now();
  return true_now + offset_ + (true_now - start_).scaled(drift_);
}

Nanos wall_time() { return read_clock(CLOCK_REALTIME); }

// ---- chance ------------------------------------------------------------------------------

namespace {
uint64_t rotate_left(uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }
}  // namespace

Rng::Rng(uint64_t seed) {
  // splitmix64 spreads a small seed over the whole state.
  for (uint64_t& word : state_) {
    seed += 0x9e3779b97f4a7c15;
    uint64_t z = seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    word = z ^ (z >> 31);
  }
}

uint64_t Rng::next() {
  uint64_t result = rotate_left(state_[1] * 5, 7) * 9;
  uint64_t t = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= t;
  state_[3] = rotate_left(state_[3], 45);
  return result;
}

uint64_t Rng::below(uint64_t bound) {
  WEFT_CHECK(bound > 0);
  // Values under the threshold would make small results a little more likely: draw again.
  uint64_t threshold = (0 - bound) % bound;
  for (;;) {
    uint64_t value = next();
    if (value >= threshold) return value % bound;
  }
}

double Rng::uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

void random_bytes(std::span<std::byte> out) {
  while (!out.empty()) {
    ssize_t got = getrandom(out.data(), out.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    WEFT_CHECK(got > 0);
    out = out.subspan(static_cast<size_t>(got));
  }
}

// ---- text --------------------------------------------------------------------------------

namespace {

struct Number {
  double value;
  std::string_view unit;
};

std::optional<Number> split_number(std::string_view input) {
  std::string_view digits = input;
  bool negative = false;
  if (!digits.empty() && (digits[0] == '+' || digits[0] == '-')) {
    negative = digits[0] == '-';
    digits.remove_prefix(1);
  }
  if (digits.empty() || (!std::isdigit(static_cast<unsigned char>(digits[0])) && digits[0] != '.'))
    return std::nullopt;
  double value = 0;
  auto [end, failure] = std::from_chars(digits.data(), digits.data() + digits.size(), value,
                                        std::chars_format::fixed);
  if (failure != std::errc()) return std::nullopt;
  auto used = static_cast<size_t>(end - digits.data());
  std::string_view unit = digits.substr(used);
  while (!unit.empty() && unit[0] == ' ') unit.remove_prefix(1);
  return Number{negative ? -value : value, unit};
}

struct Unit {
  std::string_view name;
  double factor;
};

std::optional<double> unit_factor(std::string_view name, std::span<const Unit> units) {
  for (const Unit& unit : units)
    if (unit.name == name) return unit.factor;
  return std::nullopt;
}

constexpr std::array<Unit, 9> kByteUnits = {{{"", 1},
                                             {"B", 1},
                                             {"KiB", 0x1p10},
                                             {"MiB", 0x1p20},
                                             {"GiB", 0x1p30},
                                             {"kB", 1e3},
                                             {"KB", 1e3},
                                             {"MB", 1e6},
                                             {"GB", 1e9}}};
constexpr std::array<Unit, 8> kRateUnits = {{{"bit", 1},
                                             {"kbit", 1e3},
                                             {"mbit", 1e6},
                                             {"gbit", 1e9},
                                             {"b/s", 1},
                                             {"Kb/s", 1e3},
                                             {"Mb/s", 1e6},
                                             {"Gb/s", 1e9}}};
constexpr std::array<Unit, 5> kTimeUnits = {
    {{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}, {"m", 60e9}}};

std::string quoted(std::string_view input) {
  return "\"" + std::string(input.substr(0, 60)) + "\"";
}

}  // namespace

Result<Bytes> parse_bytes(std::string_view input) {
  auto number = split_number(input);
  auto factor = number ? unit_factor(number->unit, kByteUnits) : std::nullopt;
  if (!factor || number->value < 0 || number->value * *factor > 0x1p62)
    return error(Code::invalid_argument,
                 "%s is not a size; expected a number with B, KiB, MiB, GiB, kB, MB or GB",
                 quoted(input).c_str());
  return Bytes{static_cast<uint64_t>(std::llround(number->value * *factor))};
}

Result<double> parse_rate(std::string_view input) {
  auto number = split_number(input);
  auto factor = number ? unit_factor(number->unit, kRateUnits) : std::nullopt;
  if (!factor || !(number->value > 0) || number->value * *factor > 1e15)
    return error(Code::invalid_argument,
                 "%s is not a rate; expected a number with kbit, mbit or gbit, such as 25gbit",
                 quoted(input).c_str());
  return number->value * *factor;
}

Result<Nanos> parse_duration(std::string_view input) {
  auto number = split_number(input);
  auto factor = number ? unit_factor(number->unit, kTimeUnits) : std::nullopt;
  if (!factor || std::abs(number->value * *factor) > 1e18)
    return error(Code::invalid_argument,
                 "%s is not a duration; expected a number with ns, us, ms, s or m",
                 quoted(input).c_str());
  return Nanos{std::llround(number->value * *factor)};
}

std::string format_bytes(Bytes bytes) {
  uint64_t n = bytes.count;
  if (n != 0 && n % (1ULL << 30) == 0)
    return text("%lluGiB", static_cast<unsigned long long>(n >> 30));
  if (n != 0 && n % (1ULL << 20) == 0)
    return text("%lluMiB", static_cast<unsigned long long>(n >> 20));
  if (n != 0 && n % (1ULL << 10) == 0)
    return text("%lluKiB", static_cast<unsigned long long>(n >> 10));
  return text("%lluB", static_cast<unsigned long long>(n));
}

std::string format_rate(double rate) {
  if (rate >= 1e9) return text("%.2f Gb/s", rate * 1e-9);
  if (rate >= 1e6) return text("%.1f Mb/s", rate * 1e-6);
  return text("%.1f kb/s", rate * 1e-3);
}

std::string format_duration(Nanos duration) {
  double ns = static_cast<double>(duration.count);
  double size = std::abs(ns);
  if (size >= 1e9) return text("%.2f s", ns * 1e-9);
  if (size >= 1e6) return text("%.1f ms", ns * 1e-6);
  if (size >= 1e3) return text("%.1f us", ns * 1e-3);
  return text("%.0f ns", ns);
}

std::string format_size(double bytes) {
  if (bytes >= 1e9) return text("%.2f GB", bytes * 1e-9);
  if (bytes >= 1e6) return text("%.1f MB", bytes * 1e-6);
  if (bytes >= 1e3) return text("%.1f kB", bytes * 1e-3);
  return text("%.0f B", bytes);
}

std::optional<std::string> nearest(std::string_view word, std::span<const std::string> candidates) {
  constexpr size_t kLongest = 64;  // names are short; hostile input is not worth a long table
  if (word.empty() || word.size() > kLongest) return std::nullopt;
  std::optional<std::string> best;
  size_t best_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    if (candidate.size() > kLongest) continue;
    // Edits are a letter added, dropped or changed, or two neighbours swapped.
    std::vector<size_t> before, above, row(candidate.size() + 1);
    for (size_t j = 0; j < row.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= word.size(); ++i) {
      before = std::exchange(above, row);
      row[0] = i;
      for (size_t j = 1; j <= candidate.size(); ++j) {
        size_t changed = above[j - 1] + (word[i - 1] == candidate[j - 1] ? 0 : 1);
        row[j] = std::min({above[j] + 1, row[j - 1] + 1, changed});
        if (i > 1 && j > 1 && word[i - 1] == candidate[j - 2] && word[i - 2] == candidate[j - 1])
          row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    if (row.back() < best_distance) {
      best_distance = row.back();
      best = candidate;
    }
  }
  return best;
}

double quantile(std::vector<double> values, double q) {
  WEFT_CHECK(!values.empty());
  std::sort(values.begin(), values.end());
  double position = q * static_cast<double>(values.size() - 1);
  auto below = static_cast<size_t>(position);
  if (below + 1 >= values.size()) return values.back();
  double share = position - static_cast<double>(below);
  return values[below] + share * (values[below + 1] - values[below]);
}

Interval median_of(const std::vector<double>& values) {
  return {quantile(values, 0.5), quantile(values, 0.25), quantile(values, 0.75)};
}

}  // namespace weft
