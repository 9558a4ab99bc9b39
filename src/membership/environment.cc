#include "environment.h"

#include <unistd.h>

#include <array>
#include <charconv>
#include <sstream>

#include "weft/membership.h"

namespace weft::membership {

bool is_address_and_port(std::string_view value) {
  const size_t colon = value.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  const std::string_view address = value.substr(0, colon);
  for (const char c : address) {
    if (c <= ' ' || c > '~' || c == '/') return false;
  }
  // An IPv6 address has colons of its own and stands in brackets.
  if (address.find(':') != std::string_view::npos &&
      (address.front() != '[' || address.back() != ']')) {
    return false;
  }
  uint32_t port = 0;
  const char* end = value.data() + value.size();
  const auto [stopped, failure] = std::from_chars(value.data() + colon + 1, end, port);
  return failure == std::errc{} && stopped == end && port >= 1 && port <= 65535;
}

std::string shown(std::string_view value) {
  std::string out;
  for (const char c : value.substr(0, 100)) out += c >= ' ' && c <= '~' ? c : '?';
  return value.size() > 100 ? out + "..." : out;
}

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "localhost";
  return name.data();
}

namespace {

struct ProcessStatus {
  std::string name;
  pid_t parent = 0;
  std::string started;
};

// /proc/PID/stat: "PID (NAME) STATE PARENT ..."; the start time is the 20th field after the name.
std::optional<ProcessStatus> status_of(pid_t pid) {
  const auto stat = read_file(text("/proc/%d/stat", static_cast<int>(pid)), kib(4));
  if (!stat) return std::nullopt;
  const size_t open = stat->find('('), close = stat->rfind(')');
  if (open == std::string::npos || close == std::string::npos || close < open) return std::nullopt;
  ProcessStatus status;
  status.name = stat->substr(open + 1, close - open - 1);
  std::istringstream fields(stat->substr(close + 1));
  std::string state;
  fields >> state >> status.parent;
  for (int field = 3; field <= 20; ++field) fields >> status.started;
  return fields ? std::optional(status) : std::nullopt;
}

}  // namespace

std::optional<std::string> ancestor_named(std::string_view ending) {
  constexpr int kGenerationsMax = 64;
  pid_t pid = getppid();
  for (int i = 0; i < kGenerationsMax && pid > 1; ++i) {
    const auto status = status_of(pid);
    if (!status) return std::nullopt;
    if (status->name.ends_with(ending)) {
      return text("%d@%s", static_cast<int>(pid), status->started.c_str());
    }
    pid = status->parent;
  }
  return std::nullopt;
}

}  // namespace weft::membership
