// A test program that is its own auxiliary process: started as `PROGRAM lane-worker`, as weft is,
// it serves lanes and never comes to its tests.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "weft/lane.h"

namespace weft::lane {

inline const char* own_program() { return "/proc/self/exe"; }

// The variable that names what a worker does in place of its work.
inline constexpr const char* kInstead = "WEFT_TEST_INSTEAD";

// Called while the program starts, before main(). True if it was not started as a worker.
inline bool serve_lanes_if_asked(int (*instead)(const std::string& what) = nullptr) {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string words((std::istreambuf_iterator<char>(file)), {});
  size_t end = words.find('\0');
  if (end == std::string::npos || std::strcmp(words.c_str() + end + 1, "lane-worker") != 0)
    return true;
  const char* what = std::getenv(kInstead);
  ::_exit(what != nullptr && instead != nullptr ? instead(what)
                                                : run_lane_worker(100, 101, 102, 103));
}

}  // namespace weft::lane
