// base: the few words that every other module speaks.
//
// Errors come in three kinds that are never mixed:
//   1. the world failed   -> a function returns Result<T>: a value, or Error{code, message};
//   2. we are wrong       -> WEFT_CHECK ends the process, in release builds too;
//   3. the observer failed-> capture drops and counts; it never uses either of the above.
//
// Units are types: Nanos and Bytes do not mix, a Rank is not an index by accident. Time and
// randomness are arguments (Clock, Rng), so a test can own both. Nothing here holds a global
// except the log sink.
//
// Threads: everything here is safe from any thread unless it says otherwise.
#pragma once

#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

struct stat;

namespace weft {

// The version of the library, "major.minor.patch".
const char* version();

// ---- units -------------------------------------------------------------------------------

// A duration, or a moment on some host's clock, in nanoseconds.
struct Nanos {
  int64_t count = 0;

  static constexpr Nanos from_micros(double us) { return {static_cast<int64_t>(us * 1e3)}; }
  static constexpr Nanos from_millis(double ms) { return {static_cast<int64_t>(ms * 1e6)}; }
  static constexpr Nanos from_seconds(double s) { return {static_cast<int64_t>(s * 1e9)}; }
  constexpr double micros() const { return static_cast<double>(count) * 1e-3; }
  constexpr double millis() const { return static_cast<double>(count) * 1e-6; }
  constexpr double seconds() const { return static_cast<double>(count) * 1e-9; }

  friend constexpr auto operator<=>(Nanos, Nanos) = default;
  friend constexpr Nanos operator+(Nanos a, Nanos b) { return {a.count + b.count}; }
  friend constexpr Nanos operator-(Nanos a, Nanos b) { return {a.count - b.count}; }
  constexpr Nanos& operator+=(Nanos b) { return count += b.count, *this; }
  constexpr Nanos& operator-=(Nanos b) { return count -= b.count, *this; }
  constexpr Nanos scaled(double factor) const {
    double product = static_cast<double>(count) * factor;
    return {static_cast<int64_t>(product + (product < 0 ? -0.5 : 0.5))};
  }
};

// A number of bytes.
struct Bytes {
  uint64_t count = 0;

  friend constexpr auto operator<=>(Bytes, Bytes) = default;
  friend constexpr Bytes operator+(Bytes a, Bytes b) { return {a.count + b.count}; }
  friend constexpr Bytes operator-(Bytes a, Bytes b) { return {a.count - b.count}; }
  constexpr Bytes& operator+=(Bytes b) { return count += b.count, *this; }
  constexpr Bytes& operator-=(Bytes b) { return count -= b.count, *this; }
};

constexpr Bytes kib(uint64_t n) { return {n << 10}; }
constexpr Bytes mib(uint64_t n) { return {n << 20}; }

// A member of a group, 0 to size - 1.
struct Rank {
  uint32_t index = 0;
  friend constexpr auto operator<=>(Rank, Rank) = default;
};

// ---- errors ------------------------------------------------------------------------------

// Codes reach other processes and languages: append, never renumber.
enum class Code : uint8_t {
  invalid_argument = 1,
  not_found = 2,
  corrupt = 3,
  unsupported = 4,
  io = 5,
  peer_lost = 6,
  timeout = 7,
  cancelled = 8,
  exhausted = 9,  // memory or descriptors of this process
};

const char* code_name(Code code);
// From another process, which may have sent anything: one of the above.
Code code_from(uint8_t number);

// What failed, said once where it was first seen; each layer above adds where with in().
class [[nodiscard]] Error {
 public:
  Error(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  Code code() const { return code_; }
  const std::string& message() const { return message_; }

  // The same error, seen from one layer further out: "where: message".
  Error in(std::string_view where) &&;

 private:
  Code code_;
  std::string message_;
};

// printf into a string, with the format checked by the compiler.
[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...);

[[gnu::format(printf, 2, 3)]] Error error(Code code, const char* format, ...);
// An io error that carries the text of `error_number` (an errno value).
[[gnu::format(printf, 2, 3)]] Error io_error(int error_number, const char* format, ...);

// A value or an Error. Result<void> is success or an Error.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value)
      : state_(std::in_place_index<0>, std::move(value)) {}  // NOLINT(google-explicit-constructor)
  Result(Error error)
      : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  // REQUIRES: ok().
  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  T* operator->() { return &std::get<0>(state_); }
  const T* operator->() const { return &std::get<0>(state_); }
  T& operator*() & { return std::get<0>(state_); }
  const T& operator*() const& { return std::get<0>(state_); }
  T&& operator*() && { return std::get<0>(std::move(state_)); }

  // REQUIRES: !ok().
  const Error& error() const& { return std::get<1>(state_); }
  Error&& error() && { return std::get<1>(std::move(state_)); }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return !error_.has_value(); }
  explicit operator bool() const { return ok(); }
  const Error& error() const& { return *error_; }
  Error&& error() && { return *std::move(error_); }

 private:
  std::optional<Error> error_;
};

// Returns the error of `expression` from the enclosing function, if it has one.
#define WEFT_TRY(expression)                                   \
  do {                                                         \
    if (auto weft_try_result = (expression); !weft_try_result) \
      return std::move(weft_try_result).error();               \
  } while (false)

#define WEFT_CONCAT_(a, b) a##b
#define WEFT_CONCAT(a, b) WEFT_CONCAT_(a, b)
// `WEFT_ASSIGN(auto x, f());` declares x from a Result, or returns its error.
#define WEFT_ASSIGN(declaration, expression) \
  WEFT_ASSIGN_(WEFT_CONCAT(weft_assign_, __LINE__), declaration, expression)
#define WEFT_ASSIGN_(temporary, declaration, expression) \
  auto temporary = (expression);                         \
  if (!temporary) return std::move(temporary).error();   \
  declaration = std::move(temporary).value()

// Ends the process with file, line and the last log lines. For broken invariants only: nothing
// that a user, a file or a peer can cause may reach it.
#define WEFT_CHECK(condition)                               \
  do {                                                      \
    if (!(condition)) [[unlikely]]                          \
      ::weft::check_failed(__FILE__, __LINE__, #condition); \
  } while (false)

[[noreturn]] void check_failed(const char* file, int line, const char* condition);

// ---- log ---------------------------------------------------------------------------------

enum class Level : uint8_t { debug, info, warn, error };

// `WEFT_LOG(join, info, "peer %u joined in %s", ...)`: lowercase, the exact cause, never on
// the hot path. What is shown is set by the environment variable WEFT_LOG, for example
// "join:debug,*:warn"; the default is "*:warn". Nobody waits for whoever reads stderr: lines that
// it has no room for are kept, up to a bound, then left out and counted; so are more than 500 in a
// second.
#define WEFT_LOG(module, level, ...)                                 \
  do {                                                               \
    if (::weft::log_enabled(#module, ::weft::Level::level))          \
      ::weft::log_write(#module, ::weft::Level::level, __VA_ARGS__); \
  } while (false)

bool log_enabled(std::string_view module, Level level);
[[gnu::format(printf, 3, 4)]] void log_write(const char* module, Level level, const char* format,
                                             ...);
// What every line starts with after the time, "rank 3" for instance. Set once at start.
void log_set_prefix(std::string prefix);
// Tries again to write the lines that stderr had no room for. Never blocks.
void log_flush();
// Replaces stderr as the place where lines go; an empty function restores it.
void log_set_sink(std::function<void(std::string_view line)> sink);

// ---- time and chance ---------------------------------------------------------------------

// A host's clock. now() never goes back within a process; two hosts' clocks need not agree.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual Nanos now() const = 0;
};

// The kernel's monotonic clock, read without a system call and unmoved by time adjustment.
const Clock& monotonic_clock();

// Another clock, wrong by a known amount: offset + (1 + drift) * (now - start).
class SkewedClock final : public Clock {
 public:
  SkewedClock(const Clock& truth, Nanos offset, double drift_ppm);
  Nanos now() const override;

 private:
  const Clock& truth_;
  Nanos start_;
  Nanos offset_;
  double drift_;
};

// The wall clock, for stamping files and clock samples; never for measuring.
Nanos wall_time();

// A small seeded generator (xoshiro256**): the same numbers on every machine.
class Rng {
 public:
  explicit Rng(uint64_t seed);
  uint64_t next();
  // Uniform in [0, bound). REQUIRES: bound > 0.
  uint64_t below(uint64_t bound);
  // Uniform in [0, 1).
  double uniform();

  template <typename T>
  void shuffle(std::span<T> items) {
    for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
  }

 private:
  uint64_t state_[4];
};

// Fills `out` with bytes that nobody can guess (for nonces and secrets).
void random_bytes(std::span<std::byte> out);

// ---- text --------------------------------------------------------------------------------

// "256KiB", "25MiB", "1MB", "17" -> bytes. Decimal and binary units are told apart.
Result<Bytes> parse_bytes(std::string_view input);
// "25gbit", "100mbit", "1.5gbit" -> bits a second.
Result<double> parse_rate(std::string_view input);
// "250ms", "+3us", "-1s", "20ns" -> nanoseconds.
Result<Nanos> parse_duration(std::string_view input);

// The shortest exact form that parse_bytes reads back: 26214400 -> "25MiB", 17 -> "17B".
std::string format_bytes(Bytes bytes);
// For people: "1.25 Gb/s", "318.2 ms", "411.0 MB".
std::string format_rate(double bits_per_second);
std::string format_duration(Nanos duration);
std::string format_size(double bytes);

// The candidate nearest to `word` by edit distance, if one is near enough to be meant.
std::optional<std::string> nearest(std::string_view word, std::span<const std::string> candidates);

// The value below which a share `q` (0 to 1) of `values` lies, by linear interpolation.
// REQUIRES: !values.empty().
double quantile(std::vector<double> values, double q);
// A value with what lies around it: quartiles of what was measured, or bounds of what is predicted.
struct Interval {
  double value = 0;
  double low = 0;
  double high = 0;
};
// The median with the quartiles. REQUIRES: !values.empty().
Interval median_of(const std::vector<double>& values);

// ---- bytes and characters ----------------------------------------------------------------

// XXH3-64: what blocks of files are checked by and plans are named by. No protection from someone
// who wants two things to look equal.
uint64_t hash64(std::span<const std::byte> bytes);
uint64_t hash64(std::string_view bytes);

// A character of UTF-8.
struct Character {
  size_t length = 0;  // in bytes; 0: there is none
  char32_t point = 0;
};
// The one that `input` starts with. Overlong forms, surrogates and what is beyond U+10FFFF are
// none.
Character first_character(std::string_view input);
// What stands for bytes that are no character.
inline constexpr std::string_view kReplacementCharacter = "\xef\xbf\xbd";
// Of ASCII or of Latin-1: terminals obey both.
bool is_control(char32_t point);

// Text of others, made fit for one line of a terminal: control characters and broken UTF-8 become
// escapes, and what is longer than `limit` bytes ends in "...".
std::string printable(std::string_view input, size_t limit = 80);

// Appends `raw` as a JSON string with its quotes, fit to stand in a page's script too. Bytes that
// are not UTF-8 become U+FFFD.
void append_json_string(std::string& out, std::string_view raw);

// What a text may hold before it is given to a parser, which makes a tree of it: a deep one ends
// the stack of whoever walks it, and a small text can make a vast one.
struct JsonLimits {
  size_t depth = 0;   // of brackets outside strings
  size_t values = 0;  // objects, arrays, strings that are no keys, numbers, words
};
// Exact for valid JSON; what is no JSON passes or not, for the parser to refuse.
Result<void> check_json(std::string_view json, const JsonLimits& limits);

// Puts numbers and strings behind each other, little-endian.
class Packer {
 public:
  template <typename T>
  Packer& number(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    return raw(std::as_bytes(std::span(&value, 1)));
  }
  Packer& string(std::string_view value);  // its length as 32 bits, then its bytes
  Packer& raw(std::span<const std::byte> bytes);
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

// Takes them out again. Once something was not there, everything is zero and failed().
class Unpacker {
 public:
  explicit Unpacker(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  T number() {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    T value{};
    if (const auto from = raw(sizeof value); !from.empty())
      std::memcpy(&value, from.data(), sizeof value);
    return value;
  }
  std::string string() { return std::string(text()); }
  // Views of what is unpacked.
  std::string_view text() { return text(number<uint32_t>()); }
  std::string_view text(size_t size);
  std::span<const std::byte> raw(size_t size);

  bool failed() const { return failed_; }
  bool more() const { return !failed_ && !bytes_.empty(); }
  size_t left() const { return failed_ ? 0 : bytes_.size(); }
  // Everything was there, and nothing is left.
  bool complete() const { return !failed_ && bytes_.empty(); }

 private:
  std::span<const std::byte> bytes_;
  bool failed_ = false;
};

// ---- files -------------------------------------------------------------------------------

// A file descriptor that closes itself.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset();

 private:
  int fd_ = -1;
};

// What is asked of the system about files, in one place: a test can stand in front of it and refuse
// any of it. As the kernel's calls: no Fd, or -1, and errno when it fails. What a signal
// interrupted is asked again.
class Files {
 public:
  enum class Call : uint8_t {
    open,
    read,
    write,
    status,
    sync,
    close,
    rename,
    link,
    unlink,
    make_folder
  };
  static constexpr int kHere = -100;  // AT_FDCWD: for a folder, the one that this process is in

  virtual ~Files() = default;
  Fd open(const std::string& path, int flags, unsigned mode = 0, int folder = kHere);
  // The next bytes: 0 at the end.
  ssize_t read(int fd, std::span<std::byte> out);
  // The beginning of the file, wherever others who share it have read to: as many bytes as there
  // is room for, or all that there are.
  ssize_t read_beginning(int fd, std::span<std::byte> out);
  // All of them. 0, or the errno of the write that failed.
  int write_all(int fd, std::span<const std::byte> bytes);
  int status(int fd, struct stat& facts);
  // Of what has the name: a link itself, unless it is followed.
  int status(const std::string& path, struct stat& facts, bool follow_link);
  int sync(int fd);
  // It is closed also when this fails: what was written may not be on the disk then.
  int close(Fd file);
  int rename(const std::string& from, const std::string& to, bool replaces = true);
  int link(int folder, const std::string& from, const std::string& to);
  int unlink(const std::string& path, int folder = kHere);
  int make_folder(const std::string& path, unsigned mode);

 private:
  // Called first. An errno that is told instead of asking the system; 0: it is asked. Of a read or
  // a write `bytes` may be made less, and then only so many are tried.
  virtual int refusal(Call call, size_t& bytes);
  bool refused(Call call);
};
// The kernel's.
Files& kernel_files();

// The whole of a file. Fails with not_found, io, or invalid_argument when over `limit`.
Result<std::string> read_file(const std::string& path, Bytes limit, Files& files = kernel_files());
enum class Readers : uint8_t { everyone, owner };  // who may read a new file, within the umask
// Writes beside the target and renames, so that a reader sees the old text or the new. A link is
// replaced, not followed; what is no regular file (a device, a folder) is left alone.
Result<void> write_file(const std::string& path, std::string_view content,
                        Readers readers = Readers::everyone, Files& files = kernel_files());
// A file that was not there before, open for writing. No Fd, and errno, when it cannot be made or
// when anything has its name, be it a link to nowhere.
Fd create_file(const std::string& path, Readers readers, Files& files = kernel_files());
// 0, or the errno of the write that failed.
int write_all(int fd, std::span<const std::byte> bytes);

// A file that weft brings along (share/weft/NAME), found relative to the running program.
Result<std::string> data_path(const std::string& name);
// The path of the running program.
std::string self_path();

}  // namespace weft
