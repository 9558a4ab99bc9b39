// Memory in /dev/shm, and how its pages are laid out.
#pragma once

#include "weft/net.h"

namespace weft::net::shm {

Result<std::unique_ptr<SharedMemory>> make();
Result<std::unique_ptr<SharedMemory>> attach(const std::string& name);

// The pages of a file: its head, and the rest of it twice in a row.
class Mapping {
 public:
  static Result<Mapping> of(const Fd& file, size_t capacity);
  Mapping(Mapping&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), capacity_(other.capacity_) {}
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping();
  std::byte* head() const { return base_; }
  std::byte* ring() const { return base_ + SharedMemory::kHeadBytes; }
  size_t capacity() const { return capacity_; }
  // From now on what is written here stays here.
  Result<void> make_private(const Fd& file);

 private:
  Mapping(std::byte* base, size_t capacity) : base_(base), capacity_(capacity) {}
  bool put(const Fd& file, int kind);

  std::byte* base_;
  size_t capacity_;
};

}  // namespace weft::net::shm
