// What goes over an agent's standard input to start a process on another host:
//
//   weft-remote 1 SIZE\n       then SIZE bytes: items that end with a zero byte,
//   rRANK dFOLDER gGRACE_NS eNAME=VALUE... aWORD...
//
// and after that one byte for each signal to pass on.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base.h"

namespace weft::launch {

struct RemoteStart {
  uint32_t rank = 0;
  std::string folder;
  Nanos grace;
  std::map<std::string, std::string> environment;
  std::vector<std::string> argv;
};

std::string encode(const RemoteStart& start);
// Reads exactly one, so that the signals behind it stay in `input`.
Result<RemoteStart> read_remote_start(int input);
Result<RemoteStart> decode(std::string_view items);

// What of the caller's environment a job needs elsewhere too: see the list in remote.cc.
std::map<std::string, std::string> environment_for_others();

}  // namespace weft::launch
