#include "json.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace weft::trace {
namespace {

// The length of the UTF-8 sequence that `raw` starts with; 0 if it starts with none. Overlong
// forms, surrogates and what is beyond U+10FFFF are none.
size_t utf8_length(std::string_view raw) {
  const auto byte = [&](size_t i) -> unsigned {
    return i < raw.size() ? static_cast<unsigned char>(raw[i]) : 0;
  };
  const auto follows = [&](size_t i) { return (byte(i) & 0xc0) == 0x80; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4) return 0;
  if (!follows(1)) return 0;
  if (first < 0xe0) return 2;
  if (!follows(2)) return 0;
  if (first < 0xf0) {
    if (first == 0xe0 && byte(1) < 0xa0) return 0;
    if (first == 0xed && byte(1) > 0x9f) return 0;
    return 3;
  }
  if (!follows(3)) return 0;
  if (first == 0xf0 && byte(1) < 0x90) return 0;
  if (first == 0xf4 && byte(1) > 0x8f) return 0;
  return 4;
}

}  // namespace

void append_json_string(std::string& out, std::string_view raw) {
  out += '"';
  while (!raw.empty()) {
    size_t plain = 0;
    while (plain < raw.size() && raw[plain] >= ' ' && raw[plain] < 0x7f && raw[plain] != '"' &&
           raw[plain] != '\\')
      ++plain;
    out += raw.substr(0, plain);
    raw.remove_prefix(plain);
    if (raw.empty()) break;
    const char c = raw.front();
    const size_t length = utf8_length(raw);
    if (length != 1) {
      out += length == 0 ? std::string_view("\xef\xbf\xbd") : raw.substr(0, length);
      raw.remove_prefix(length == 0 ? 1 : length);
      continue;
    }
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else {
      out += text("\\u%04x", static_cast<unsigned>(c));
    }
    raw.remove_prefix(1);
  }
  out += '"';
}

void append_hex_string(std::string& out, uint64_t value) {
  char digits[16];
  const auto end = std::to_chars(digits, digits + sizeof digits, value, 16).ptr;
  out += "\"0x";
  out.append(digits, end);
  out += '"';
}

void append_micros(std::string& out, uint64_t ns) {
  append_number(out, ns / 1000);
  const auto rest = static_cast<unsigned>(ns % 1000);
  const char decimals[4] = {'.', static_cast<char>('0' + rest / 100),
                            static_cast<char>('0' + rest / 10 % 10),
                            static_cast<char>('0' + rest % 10)};
  out.append(decimals, sizeof decimals);
}

Result<TextFile> TextFile::create(const std::string& path) {
  Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd) return io_error(errno, "%s: creating", path.c_str());
  return TextFile(path, std::move(fd));
}

void TextFile::write_out() {
  std::string_view left = buffer_;
  while (!left.empty() && failed_ == 0) {
    const ssize_t n = ::write(fd_.get(), left.data(), left.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      failed_ = n < 0 ? errno : EIO;
    } else {
      left.remove_prefix(static_cast<size_t>(n));
    }
  }
  buffer_.clear();
}

Result<void> TextFile::close() {
  write_out();
  const bool closed = ::close(fd_.release()) == 0;
  if (failed_ == 0 && !closed) failed_ = errno;
  if (failed_ != 0) return io_error(failed_, "%s: writing", path_.c_str());
  return {};
}

}  // namespace weft::trace
