// process: starts a program, perhaps in other namespaces, and collects what it says.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "cluster.h"
#include "weft/base.h"

namespace weft::lab {

struct ProcessPlace {
  std::vector<int> namespaces;  // entered before the program starts
  std::vector<int> kept;        // descriptors that stay open in it
  bool dies_with_parent = false;
};

Result<pid_t> start_process(const Command& command, const ProcessPlace& place);
// Starts it, reads its output and errors to the end, and waits. `command`'s output descriptors are
// not used. After `patience` it is killed and the result is timeout.
Result<Finished> finish_process(Command command, const ProcessPlace& place, Nanos patience);
// A descriptor from which `content` can be read.
Result<Fd> readable(std::string_view content);
// "ip -batch -", for messages.
std::string command_line(const std::vector<std::string>& arguments);

}  // namespace weft::lab
