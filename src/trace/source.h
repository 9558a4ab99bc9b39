// Where a reader takes its bytes from: memory, or a file through one moving window.
//
// A file is not mapped: another process may cut it short while it is read, and a page that went
// away would end this process. Private to the module.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>

#include "weft/base.h"

namespace weft::trace {

class Source {
 public:
  virtual ~Source() = default;
  virtual uint64_t size() const = 0;
  // The bytes from `offset`, `length` of them or as many as there are. Valid until the next call.
  virtual std::span<const std::byte> view(uint64_t offset, size_t length) = 0;
  // The same, of `least` bytes or as many more as there are without reading. A search that asks for
  // no more than this reads every byte once.
  virtual std::span<const std::byte> at_hand(uint64_t offset, size_t least) = 0;
  // What went wrong below, if anything; the bytes behind it count as not there.
  virtual std::string trouble() const { return {}; }
};

class MemorySource final : public Source {
 public:
  explicit MemorySource(std::span<const std::byte> bytes) : bytes_(bytes) {}
  uint64_t size() const override { return bytes_.size(); }
  std::span<const std::byte> view(uint64_t offset, size_t length) override {
    if (offset >= bytes_.size()) return {};
    const auto rest = bytes_.subspan(offset);
    return rest.first(std::min(length, rest.size()));
  }
  std::span<const std::byte> at_hand(uint64_t offset, size_t) override {
    return view(offset, bytes_.size());
  }

 private:
  std::span<const std::byte> bytes_;
};

class FileSource final : public Source {
 public:
  FileSource(int fd, uint64_t size) : fd_(fd), size_(size) {}
  uint64_t size() const override { return size_; }
  uint64_t bytes_read() const { return bytes_read_; }
  std::string trouble() const override { return trouble_; }

  std::span<const std::byte> view(uint64_t offset, size_t length) override {
    if (offset >= size_) return {};
    length = static_cast<size_t>(std::min<uint64_t>(length, size_ - offset));
    if (offset < start_ || offset + length > start_ + filled_) fill(offset, length);
    if (offset >= start_ + filled_) return {};
    const size_t from = static_cast<size_t>(offset - start_);
    return std::span<const std::byte>(window_).subspan(from, std::min(length, filled_ - from));
  }

  std::span<const std::byte> at_hand(uint64_t offset, size_t least) override {
    if (view(offset, least).empty()) return {};
    return view(offset, static_cast<size_t>(start_ + filled_ - offset));
  }

 private:
  static constexpr size_t kWindowBytes = 1u << 20;

  void fill(uint64_t offset, size_t length) {
    const size_t want =
        static_cast<size_t>(std::min<uint64_t>(std::max(length, kWindowBytes), size_ - offset));
    if (window_.size() < want) window_.resize(want);
    start_ = offset;
    filled_ = 0;
    while (filled_ < want) {
      const ssize_t n = ::pread(fd_, window_.data() + filled_, want - filled_,
                                static_cast<off_t>(offset + filled_));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) {
        if (trouble_.empty())
          trouble_ =
              text("byte %" PRIu64 ": %s", offset + filled_,
                   n < 0 ? std::strerror(errno) : "the file became shorter while it was read");
        return;
      }
      filled_ += static_cast<size_t>(n);
      bytes_read_ += static_cast<size_t>(n);
    }
  }

  int fd_;
  uint64_t size_;
  uint64_t start_ = 0;
  size_t filled_ = 0;
  uint64_t bytes_read_ = 0;
  std::vector<std::byte> window_;
  std::string trouble_;
};

}  // namespace weft::trace
