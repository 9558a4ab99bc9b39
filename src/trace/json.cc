#include "json.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace weft::trace {

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
  if (failed_ == 0) failed_ = write_all(fd_.get(), std::as_bytes(std::span(buffer_)));
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
