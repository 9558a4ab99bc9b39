// Writes JSON as text, without a tree of it in memory. Private to the module.
#pragma once

#include <charconv>
#include <concepts>
#include <string>
#include <string_view>

#include "weft/base.h"

namespace weft::trace {

template <std::integral T>
void append_number(std::string& out, T value) {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  out.append(digits, end);
}

// As a JSON string in hexadecimal, "0x1f": a number beyond 2^53 loses digits in a browser.
void append_hex_string(std::string& out, uint64_t value);

// Nanoseconds as microseconds with three decimals, "12.345", without a double on the way.
void append_micros(std::string& out, uint64_t ns);

// A file that is written through one buffer. The first failure is kept; later calls do nothing.
class TextFile {
 public:
  static Result<TextFile> create(const std::string& path);

  // Append to this, then call spill() now and then.
  std::string& buffer() { return buffer_; }
  void spill() {
    if (buffer_.size() >= kSpillBytes) write_out();
  }
  Result<void> close();

 private:
  static constexpr size_t kSpillBytes = 1u << 20;

  TextFile(std::string path, Fd fd) : path_(std::move(path)), fd_(std::move(fd)) {}
  void write_out();

  std::string path_;
  Fd fd_;
  std::string buffer_;
  int failed_ = 0;  // errno
};

}  // namespace weft::trace
