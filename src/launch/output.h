// The way of a child's output to the launcher's own: line by line, behind a prefix.
//
//   pipe of rank 2 --> Lines "[2] " --.
//   pipe of rank 3 --> Lines "[3] " ---+--> Sink (stdout)
//
// A Sink never blocks: a reader that has stopped (a paused terminal) must not keep the launcher
// from minding its children. It says when it is full, and then the pipes are left unread, so that
// the children wait, as they would for the terminal itself.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace weft::launch {

class Sink {
 public:
  explicit Sink(int fd) : fd_(fd) {}

  int fd() const { return fd_; }
  bool pending() const { return !pending_.empty(); }
  bool full() const { return pending_.size() >= kFullBytes; }
  void append(std::string_view text);
  // Writes as much as goes without waiting.
  void write_some();
  void discard() { pending_.clear(); }

 private:
  static constexpr size_t kFullBytes = 1 << 20;

  int fd_;
  bool broken_ = false;  // nobody reads any more; the rest goes nowhere
  std::string pending_;
};

class Lines {
 public:
  // A line longer than this comes out in several.
  static constexpr size_t kLineBytesMax = 64 << 10;

  Lines(std::string prefix, Sink& sink) : prefix_(std::move(prefix)), sink_(&sink) {}

  void feed(std::string_view text);
  // The child is done: a last line without an end gets one.
  void finish();

 private:
  void put(std::string_view line);

  std::string prefix_;
  Sink* sink_;
  std::string partial_;
};

}  // namespace weft::launch
