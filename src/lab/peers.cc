// set_up_peer(): other systems, installed when they are missing.
#include "lab.h"
#include "weft/process.h"

namespace weft::lab {
namespace {

constexpr Nanos kSetUpPatience = Nanos::from_seconds(3600);

}  // namespace

Result<std::string> set_up_peer(const std::string& name) {
  WEFT_ASSIGN(std::string script, data_path("lab/peers.sh"));
  process::Command command;
  command.argv = {"bash", script, name};
  WEFT_ASSIGN(const process::Finished finished, process::run(command, kSetUpPatience));
  // One line is the answer; the rest is talk.
  for (size_t from = 0; from < finished.output.size();) {
    const size_t to = std::min(finished.output.find('\n', from), finished.output.size());
    const std::string line = finished.output.substr(from, to - from);
    from = to + 1;
    for (const char* word : {"ready ", "absent "}) {
      const std::string head = word + name + " ";
      if (line.rfind(head, 0) != 0) continue;
      const std::string rest = line.substr(head.size());
      if (word[0] == 'r') return rest;
      return error(Code::unsupported, "%s is not to be had here: %s", name.c_str(), rest.c_str());
    }
  }
  return error(Code::unsupported, "%s is not to be had here: %s ended with code %d: %s",
               name.c_str(), script.c_str(), finished.ending.code(), finished.errors.c_str());
}

}  // namespace weft::lab
