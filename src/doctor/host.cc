// What the machine itself gives to a job: processors, memory, limits, clock, kernel settings.

#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <time.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <sstream>

#include "checks.h"

namespace weft::doctor {

std::optional<std::string> KernelFiles::text(const std::string& path) const {
  auto content = read_file(root + path, kib(64));
  if (!content) return std::nullopt;
  return content->substr(0, content->find('\n'));
}

std::optional<uint64_t> KernelFiles::number(const std::string& path) const {
  const auto line = text(path);
  uint64_t value = 0;
  if (!line) return std::nullopt;
  const auto [end, failure] = std::from_chars(line->data(), line->data() + line->size(), value);
  return failure == std::errc{} ? std::optional(value) : std::nullopt;
}

namespace {

std::string size_text(uint64_t bytes) { return format_size(static_cast<double>(bytes)); }

uint32_t usable_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return static_cast<uint32_t>(std::max(1, CPU_COUNT(&set)));
}

// Processors' worth of time that the control group allows, or none if it does not say.
std::optional<double> processor_quota(const KernelFiles& files) {
  const auto line = files.text("/sys/fs/cgroup/cpu.max");  // "200000 100000" or "max 100000"
  if (!line) return std::nullopt;
  std::istringstream words(*line);
  double quota = 0, period = 0;
  if (!(words >> quota >> period) || period <= 0) return std::nullopt;
  return quota / period;
}

// A line such as "MemAvailable:   123 kB" of /proc/meminfo, in bytes.
std::optional<uint64_t> memory_line(const KernelFiles& files, const std::string& name) {
  const auto content = read_file(files.root + "/proc/meminfo", kib(64));
  if (!content) return std::nullopt;
  std::istringstream lines(*content);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(name + ":")) continue;
    std::istringstream words(line.substr(name.size() + 1));
    uint64_t kilobytes = 0;
    if (words >> kilobytes && kilobytes < (UINT64_MAX >> 10)) return kilobytes << 10;
  }
  return std::nullopt;
}

}  // namespace

void check_processors(Checks& checks, const KernelFiles& files, uint32_t ranks) {
  uint32_t usable = usable_processors();
  std::string found = text("%u usable", usable);
  if (const auto quota = processor_quota(files)) {
    found += text(", of which the control group allows %.1f at a time", *quota);
    usable = std::min(usable, static_cast<uint32_t>(std::max(1.0, *quota)));
  }
  if (ranks > usable) {
    checks.note(
        "processors", text("%s, for %u ranks", found.c_str(), ranks),
        text("start at most %u ranks on this host, or expect them to wait for each other", usable));
    return;
  }
  checks.ok("processors", ranks == 0 ? found : text("%s, for %u ranks", found.c_str(), ranks));
}

void check_memory(Checks& checks, const KernelFiles& files) {
  const auto available = memory_line(files, "MemAvailable");
  if (!available) {
    checks.note("memory", "/proc/meminfo does not say how much is available",
                "look with `free -m`");
    return;
  }
  const std::string found = size_text(*available) + " available";
  if (*available < mib(256).count) {
    checks.problem("memory", found, "end other programs: `ps aux --sort=-rss | head` shows them");
  } else if (*available < mib(1024).count) {
    checks.note("memory", found, "end other programs: `ps aux --sort=-rss | head` shows them");
  } else {
    checks.ok("memory", found);
  }
}

void check_shared_memory(Checks& checks, uint64_t size_bytes, uint64_t free_bytes) {
  const std::string found = text("/dev/shm has %s free of %s", size_text(free_bytes).c_str(),
                                 size_text(size_bytes).c_str());
  const char* remedy =
      "mount -o remount,size=1G /dev/shm (a container: docker run --shm-size=1g ...)";
  if (free_bytes < mib(32).count) {
    checks.problem("shared memory", found, remedy);
  } else if (free_bytes < mib(256).count) {
    checks.note("shared memory", found, remedy);
  } else {
    checks.ok("shared memory", found);
  }
}

void check_limits(Checks& checks, uint64_t open_files, uint64_t open_files_max,
                  uint64_t locked_bytes, uint32_t ranks) {
  // A rank may hold a few connections to every other.
  const uint64_t needed = std::max<uint64_t>(256, 64 + 16 * uint64_t{ranks});
  const auto count = [](uint64_t limit) {
    return limit == RLIM_INFINITY ? std::string("unlimited") : std::to_string(limit);
  };
  const std::string found =
      text("%s, at most %s", count(open_files).c_str(), count(open_files_max).c_str());
  const uint64_t wanted = std::max<uint64_t>(4096, needed);
  const std::string remedy =
      open_files_max >= wanted
          ? text("ulimit -n %llu", static_cast<unsigned long long>(wanted))
          : text("raise `nofile` to %llu in /etc/security/limits.conf, then log in again",
                 static_cast<unsigned long long>(wanted));
  if (open_files < needed) {
    checks.problem("open files", found, remedy);
  } else if (open_files < std::min<uint64_t>(1024, wanted)) {
    checks.note("open files", found, remedy);
  } else {
    checks.ok("open files", found);
  }
  const std::string locked = locked_bytes == RLIM_INFINITY ? "unlimited" : size_text(locked_bytes);
  if (locked_bytes < kib(64).count) {
    checks.note("locked memory", locked, "ulimit -l unlimited");
  } else {
    checks.ok("locked memory", locked);
  }
}

void check_clock(Checks& checks, const KernelFiles& files) {
  constexpr int kReads = 1000;
  const auto raw = [] {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC_RAW, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  };
  int64_t steps_back = 0, before = raw();
  const int64_t start = before;
  for (int i = 0; i < kReads; ++i) {
    const int64_t now = raw();
    if (now < before) ++steps_back;
    before = now;
  }
  const double read_ns = static_cast<double>(before - start) / kReads;
  const std::string source =
      files.text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
          .value_or("unknown");
  const std::string found = text("source %s, read in %.0f ns", source.c_str(), read_ns);
  if (steps_back > 0) {
    checks.problem("clock",
                   found + text(", went back %lld times", static_cast<long long>(steps_back)),
                   "boot with another source, such as clocksource=hpet");
  } else if (read_ns > 1000) {
    checks.note("clock", found + ": slow, so that tracing costs more",
                "cat /sys/devices/system/clocksource/clocksource0/available_clocksource, and boot "
                "with clocksource=tsc if it is listed");
  } else {
    checks.ok("clock", found);
  }
  timex state{};
  if (adjtimex(&state) < 0) {
    checks.note("time of day", text("the kernel does not say: %s", strerror(errno)),
                "timedatectl status");
  } else if ((state.status & STA_UNSYNC) != 0) {
    checks.note("time of day",
                "not synchronised; weft aligns the clocks of a job by itself, but "
                "logs of several hosts will not match",
                "timedatectl set-ntp true");
  } else {
    checks.ok("time of day", text("synchronised, within %ld us", state.maxerror));
  }
}

void check_tcp_settings(Checks& checks, const KernelFiles& files) {
  constexpr uint64_t kBufferWanted = 4 << 20;
  checks.ok("congestion control",
            files.text("/proc/sys/net/ipv4/tcp_congestion_control").value_or("unknown"));
  for (const char* name : {"tcp_rmem", "tcp_wmem"}) {
    const std::string path = text("/proc/sys/net/ipv4/%s", name);
    std::istringstream words(files.text(path).value_or(""));
    uint64_t least = 0, first = 0, most = 0;
    if (!(words >> least >> first >> most)) {
      checks.note(name, path + " cannot be read", text("sysctl net.ipv4.%s", name));
      continue;
    }
    const std::string found = text("a connection may buffer %s", size_text(most).c_str());
    if (most < kBufferWanted) {
      checks.note(
          name, found + ", which limits it on a fast or long way",
          text("sysctl -w net.ipv4.%s=\"%llu %llu %llu\"", name,
               static_cast<unsigned long long>(least), static_cast<unsigned long long>(first),
               static_cast<unsigned long long>(kBufferWanted)));
    } else {
      checks.ok(name, found);
    }
  }
  const auto backlog = files.number("/proc/sys/net/core/somaxconn");
  if (backlog && *backlog < 128) {
    checks.note(
        "somaxconn",
        text("%llu connections may wait to be accepted", static_cast<unsigned long long>(*backlog)),
        "sysctl -w net.core.somaxconn=4096");
  } else {
    checks.ok("somaxconn", backlog ? std::to_string(*backlog) : "unknown");
  }
  const auto restart = files.number("/proc/sys/net/ipv4/tcp_slow_start_after_idle");
  if (restart && *restart != 0) {
    checks.note("slow start after idle",
                "connections begin slowly after each pause, and training "
                "pauses them in every step",
                "sysctl -w net.ipv4.tcp_slow_start_after_idle=0");
  } else {
    checks.ok("slow start after idle", restart ? "off" : "unknown");
  }
}

void check_ptrace(Checks& checks, const KernelFiles& files) {
  const auto scope = files.number("/proc/sys/kernel/yama/ptrace_scope");
  if (!scope || *scope == 0) {
    checks.ok("ptrace scope", scope ? "0" : "not restricted");
    return;
  }
  checks.note(
      "ptrace scope",
      text("%llu: a debugger or profiler cannot attach to a running rank",
           static_cast<unsigned long long>(*scope)),
      *scope >= 3 ? "it stays so until the next boot" : "sysctl -w kernel.yama.ptrace_scope=0");
}

void check_host(Checks& checks, const Options& options) {
  const KernelFiles files{};
  check_processors(checks, files, options.ranks);
  check_memory(checks, files);
  struct statvfs space {};
  if (statvfs("/dev/shm", &space) == 0) {
    check_shared_memory(checks, uint64_t{space.f_blocks} * space.f_frsize,
                        uint64_t{space.f_bavail} * space.f_frsize);
  } else {
    checks.problem("shared memory", text("/dev/shm: %s", strerror(errno)),
                   "mount -t tmpfs -o size=1G tmpfs /dev/shm");
  }
  rlimit files_limit{}, locked{};
  getrlimit(RLIMIT_NOFILE, &files_limit);
  getrlimit(RLIMIT_MEMLOCK, &locked);
  check_limits(checks, files_limit.rlim_cur, files_limit.rlim_max, locked.rlim_cur, options.ranks);
  check_clock(checks, files);
  check_tcp_settings(checks, files);
  check_ptrace(checks, files);
}

}  // namespace weft::doctor
