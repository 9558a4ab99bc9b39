// What a reader of a trace must know about the machine to understand its network times.

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "weft/capture.h"

namespace weft::capture {

namespace {

// Cores that this process may use, which in a container are fewer than the machine has.
uint32_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return static_cast<uint32_t>(CPU_COUNT(&set));
  return std::thread::hardware_concurrency();
}

// "net.ipv4.tcp_wmem" -> the kernel's value on one line, or nothing where it has none.
std::optional<std::string> read_sysctl(const std::string& name) {
  std::string path = "/proc/sys/" + name;
  std::replace(path.begin() + sizeof("/proc/sys/") - 1, path.end(), '.', '/');
  Result<std::string> content = read_file(path, kib(4));
  if (!content) return std::nullopt;
  std::string value = std::move(content).value();
  std::replace(value.begin(), value.end(), '\t', ' ');
  while (!value.empty() && (value.back() == '\n' || value.back() == ' ')) value.pop_back();
  return value;
}

}  // namespace

trace::Environment describe_machine() {
  trace::Environment environment;
  environment.weft_version = version();
  environment.cores = usable_cores();
  if (utsname system{}; uname(&system) == 0) {
    environment.kernel = std::string(system.sysname) + " " + system.release;
    environment.host = system.nodename;
  }
  for (const char* name : {
           "net.ipv4.tcp_congestion_control",
           "net.ipv4.tcp_wmem",
           "net.ipv4.tcp_rmem",
           "net.ipv4.tcp_slow_start_after_idle",
           "net.ipv4.tcp_limit_output_bytes",
           "net.ipv4.tcp_no_metrics_save",
           "net.ipv4.tcp_mtu_probing",
           "net.core.wmem_max",
           "net.core.rmem_max",
           "net.core.default_qdisc",
       }) {
    // A network namespace of its own shows only some of these; what is not shown is not guessed.
    if (auto value = read_sysctl(name)) environment.sysctls.emplace(name, std::move(*value));
  }
  if (auto at = environment.sysctls.find("net.ipv4.tcp_congestion_control");
      at != environment.sysctls.end()) {
    environment.congestion_control = at->second;
  }
  return environment;
}

}  // namespace weft::capture
