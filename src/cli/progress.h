// Private to cli: one line on standard error that says how far a long verb has come.
//
// Shown only on a terminal, and only once the verb has taken a second: a quick answer is not worth
// a flicker, and a log file is no place for it. The line is wiped when the object goes.
//
//   Progress progress("reading", monotonic_clock());
//   for (...) progress.update(done, total);
//
// Threads: one.
#pragma once

#include <string>

#include "weft/base.h"

namespace weft::cli {

class Progress {
 public:
  // `terminal`: whether standard error is one; found out when not given.
  Progress(std::string label, const Clock& clock, std::optional<bool> terminal = std::nullopt);
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `total` 0: not known. Cheap enough for every step of a loop: it draws ten times a second.
  void update(uint64_t done, uint64_t total);
  // Wipes the line, before other output goes to the terminal.
  void finish();

 private:
  std::string label_;
  const Clock& clock_;
  bool terminal_;
  Nanos next_;
  bool drawn_ = false;
};

}  // namespace weft::cli
