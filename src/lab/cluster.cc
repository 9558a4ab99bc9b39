#include "cluster.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <thread>

#include "links.h"
#include "shaper.h"

namespace weft::lab {
namespace {

constexpr uint32_t kHostsMax = 64;
constexpr Nanos kCommandPatience = {30'000'000'000};
// The number of a process's channel to Links.
constexpr int kChannelNumber = 90;

struct Host {
  Fd network;
  Fd names;  // the host's name lives in a namespace of its own
};

// Makes a host's namespaces from a thread of its own, which ends in them: the process and its
// other threads stay where they are.
Result<Host> make_host(const ClusterSpec& spec, const ShaperSettings& settings, uint32_t index) {
  Result<Host> result = error(Code::io, "not made");
  std::thread([&] {
    Host host;
    if (unshare(CLONE_NEWNET | CLONE_NEWUTS) != 0) {
      result = io_error(errno, "making host%u's namespaces", index);
      return;
    }
    const std::string name = host_name(index);
    host.network = Fd(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
    host.names = Fd(open("/proc/thread-self/ns/uts", O_RDONLY | O_CLOEXEC));
    if (!host.network || !host.names || sethostname(name.data(), name.size()) != 0) {
      result = io_error(errno, "naming %s", name.c_str());
      return;
    }
    for (const auto& [key, value] : sysctls(spec, settings)) {
      std::string path = "/proc/sys/" + key;
      std::replace(path.begin() + 10, path.end(), '.', '/');
      Fd fd(open(path.c_str(), O_WRONLY | O_CLOEXEC));
      // A kernel without IPv6 has nothing to switch off.
      if (!fd && errno == ENOENT && key.find("ipv6") != std::string::npos) continue;
      if (!fd || write(fd.get(), value.data(), value.size()) < 0) {
        // A user namespace may only use what the machine allows everyone.
        const bool choice = key.ends_with("congestion_control");
        result = io_error(errno, "setting %s to %s%s", key.c_str(), value.c_str(),
                          choice ? " (see net.ipv4.tcp_allowed_congestion_control)" : "");
        return;
      }
    }
    result = std::move(host);
  }).join();
  return result;
}

// Puts a file that exists only in memory, and only for the lab, over /etc/hosts.
Result<void> cover_hosts_file(const std::string& content) {
  Fd filesystem(fsopen("tmpfs", FSOPEN_CLOEXEC));
  if (!filesystem || fsconfig(filesystem.get(), FSCONFIG_CMD_CREATE, nullptr, nullptr, 0) != 0)
    return io_error(errno, "making a file system in memory");
  Fd mounted(fsmount(filesystem.get(), FSMOUNT_CLOEXEC, 0));
  if (!mounted) return io_error(errno, "mounting a file system in memory");
  Fd file(openat(mounted.get(), "hosts", O_CREAT | O_WRONLY | O_CLOEXEC, 0644));
  if (!file || write(file.get(), content.data(), content.size()) < 0)
    return io_error(errno, "writing the hosts file");
  file.reset();
  // The whole file system has to be in the tree before one file of it can be bound elsewhere. It
  // stands on /etc for that moment, which nobody else sees.
  if (move_mount(mounted.get(), "", AT_FDCWD, "/etc", MOVE_MOUNT_F_EMPTY_PATH) != 0)
    return io_error(errno, "placing the hosts file");
  Fd single(open_tree(AT_FDCWD, "/etc/hosts", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC));
  const int opened = errno;
  if (umount2("/etc", MNT_DETACH) != 0) return io_error(errno, "placing the hosts file");
  if (!single) return io_error(opened, "placing the hosts file");
  if (move_mount(single.get(), "", AT_FDCWD, "/etc/hosts", MOVE_MOUNT_F_EMPTY_PATH) != 0)
    return io_error(errno, "placing the hosts file over /etc/hosts");
  return {};
}

// Where a process starts.
struct Place {
  std::vector<int> namespaces;  // entered before the program starts
  std::vector<int> kept;        // descriptors that it has under the same numbers
  bool dies_with_parent = false;

  process::Command put(process::Command command) const {
    for (const int fd : kept) command.descriptors.push_back({fd, fd});
    command.dies_with_parent = dies_with_parent;
    if (!namespaces.empty()) command.before_exec = entering();
    return command;
  }
  std::function<int()> entering() const {
    return [entered = namespaces] {
      for (const int fd : entered)
        if (setns(fd, 0) != 0) return errno;
      return 0;
    };
  }
};

std::string first_lines(const std::string& said) {
  std::string lines = said.substr(0, 300);
  while (!lines.empty() && lines.back() == '\n') lines.pop_back();
  std::replace(lines.begin(), lines.end(), '\n', ';');
  return lines;
}

// Runs ip or tc on a batch of lines.
Result<void> batch(const char* program, const std::string& lines, const Place& place,
                   const std::string& where) {
  if (lines.empty()) return {};
  Result<std::string> path = process::find_program(program);
  if (!path)
    return error(Code::unsupported, "%s: the lab needs it (Debian's package iproute2)",
                 path.error().message().c_str());
  process::Command command;
  command.argv = {*path, "-batch", "-"};
  command.input = lines;
  WEFT_ASSIGN(const process::Finished finished,
              process::run(place.put(std::move(command)), kCommandPatience));
  if (finished.ending.ok()) return {};
  // "Command failed -:12" names the line that failed; say that line, not its number.
  std::string line;
  const size_t at = finished.errors.find("Command failed -:");
  if (at != std::string::npos) {
    const int number = atoi(finished.errors.c_str() + at + 17);
    size_t from = 0;
    for (int i = 1; i < number && from != std::string::npos; ++i) from = lines.find('\n', from) + 1;
    line = lines.substr(from, lines.find('\n', from) - from);
  }
  return error(Code::io, "%s %s in %s failed: %s", program, line.c_str(), where.c_str(),
               first_lines(finished.errors).c_str());
}

Result<void> check_spec(const ClusterSpec& spec) {
  const auto refuse = [](const char* what, const std::string& found, const char* expected) {
    return error(Code::invalid_argument, "%s is %s; expected %s", what, found.c_str(), expected);
  };
  if (spec.hosts < 1 || spec.hosts > kHostsMax)
    return refuse("hosts", std::to_string(spec.hosts), "1 to 64");
  if (spec.mtu < 1280 || spec.mtu > 65000)
    return refuse("mtu", std::to_string(spec.mtu), "1280 to 65000");
  for (const auto& [what, rate] :
       {std::pair{"link rate", spec.link_bits_per_s}, std::pair{"flow rate", spec.flow_bits_per_s}})
    if (!std::isfinite(rate) || rate < 0 || (rate > 0 && rate < 1e5) || rate > 1e12)
      return refuse(what, format_rate(rate), "0 (not limited), or 100 kb/s to 1 Tb/s");
  if (spec.congestion_control.empty() || spec.congestion_control.size() > 15)
    return refuse("congestion control", "'" + spec.congestion_control + "'", "a name like reno");
  return {};
}

}  // namespace

struct Cluster::State {
  ClusterSpec spec;
  std::unique_ptr<Links> links;  // on loopback, and then there are no hosts
  std::vector<Host> hosts;
  std::vector<std::pair<std::string, std::string>> facts;

  Place place(uint32_t host) const {
    if (links) return {{}, {}, true};
    return {{hosts[host].network.get(), hosts[host].names.get()}, {}, false};
  }
  // On loopback the lab keeps its own end of the channel; the other lives with `theirs`.
  Result<process::Command> put(uint32_t host, process::Command command, Fd& theirs) const {
    if (links) {
      WEFT_ASSIGN(theirs, links->open_channel());
      command.descriptors.push_back({theirs.get(), kChannelNumber});
    }
    return place(host).put(std::move(command));
  }
};

Cluster::Cluster(std::unique_ptr<State> state) : state_(std::move(state)) {}
Cluster::Cluster(Cluster&&) noexcept = default;
Cluster& Cluster::operator=(Cluster&&) noexcept = default;
Cluster::~Cluster() = default;

Result<Cluster> Cluster::create(const ClusterSpec& spec, const Isolation& isolation) {
  WEFT_TRY(check_spec(spec));
  auto state = std::make_unique<State>();
  state->spec = spec;
  state->facts.emplace_back("lab.confinement", confinement_name(isolation.confinement));
  const auto fact = [&](const char* name, std::string value) {
    state->facts.emplace_back(name, std::move(value));
  };
  if (isolation.confinement == Confinement::loopback) {
    WEFT_ASSIGN(state->links, Links::start(spec));
    fact("lab.lost", isolation.lost);
    fact("lab.link_bits_per_s", text("%.0f", spec.link_bits_per_s));
    fact("lab.flow_bits_per_s", text("%.0f", spec.flow_bits_per_s));
    fact("lab.segment_bytes", std::to_string(state->links->station(0, -1).segment));
    fact("net.ipv4.tcp_congestion_control", spec.congestion_control);
    return Cluster(std::move(state));
  }
  const ShaperSettings settings = shaper_settings(spec);
  std::vector<int> networks;
  for (uint32_t i = 0; i < spec.hosts; ++i) {
    WEFT_ASSIGN(Host host, make_host(spec, settings, i));
    networks.push_back(host.network.get());
    state->hosts.push_back(std::move(host));
  }
  // Where the machine's bridges pass packets to its firewall, ours need not: it costs processor
  // time for each packet. Absent without that module, and then there is nothing to switch off.
  for (const char* name : {"iptables", "ip6tables", "arptables"}) {
    Fd setting(
        open(text("/proc/sys/net/bridge/bridge-nf-call-%s", name).c_str(), O_WRONLY | O_CLOEXEC));
    [[maybe_unused]] const ssize_t ignored = setting ? write(setting.get(), "0", 1) : 0;
  }
  WEFT_TRY(batch("ip", bridge_commands(settings, networks), {{}, networks, false}, "the bridge"));
  const std::string egress = egress_commands(settings);
  for (uint32_t i = 0; i < spec.hosts; ++i) {
    WEFT_TRY(batch("ip", address_commands(settings, i), state->place(i), host_name(i)));
    WEFT_TRY(batch("tc", egress, state->place(i), host_name(i)));
  }
  WEFT_TRY(batch("tc", ingress_commands(settings), {}, "the bridge"));
  if (Result<void> covered = cover_hosts_file(hosts_file(spec.hosts)); !covered)
    WEFT_LOG(lab, warn, "hosts do not know each other's names: %s",
             covered.error().message().c_str());

  fact("lab.mtu", std::to_string(settings.mtu));
  fact("lab.link_bits_per_s", text("%.0f", settings.link_bits_per_s));
  fact("lab.flow_bits_per_s", text("%.0f", settings.flow_bits_per_s));
  fact("lab.flow_classes", std::to_string(settings.flow_classes));
  fact("lab.gso_max_bytes", std::to_string(settings.gso_bytes));
  fact("lab.link_burst_bytes", std::to_string(settings.link_burst_bytes));
  fact("lab.flow_burst_bytes", std::to_string(settings.flow_burst_bytes));
  fact("lab.port_burst_bytes", std::to_string(settings.port_burst_bytes));
  fact("lab.port_queue_bytes", std::to_string(settings.port_queue_bytes));
  fact("lab.send_queue_packets", std::to_string(settings.send_queue_packets));
  for (const auto& [key, value] : sysctls(spec, settings)) fact(key.c_str(), value);
  return Cluster(std::move(state));
}

const ClusterSpec& Cluster::spec() const { return state_->spec; }
bool Cluster::shaped() const { return state_->spec.link_bits_per_s > 0; }

std::optional<Station> Cluster::station(uint32_t host) const {
  if (!state_->links) return std::nullopt;
  return state_->links->station(host, kChannelNumber);
}

uint64_t Cluster::unlimited_sockets() const { return state_->links ? state_->links->lost() : 0; }

std::string Cluster::address(uint32_t host) const {
  return state_->links ? station_address(state_->links->block(), host) : host_address(host);
}

std::string Cluster::name(uint32_t host) const { return host_name(host); }
std::string Cluster::interface() const { return state_->links ? "lo" : "eth0"; }

Result<process::Child> Cluster::spawn(uint32_t host, process::Command command) const {
  WEFT_CHECK(host < size());
  Fd channel;
  WEFT_ASSIGN(command, state_->put(host, std::move(command), channel));
  return process::Child::start(command);
}

Result<std::function<int()>> Cluster::entering(uint32_t host) const {
  WEFT_CHECK(host < size());
  if (state_->links)
    return error(Code::unsupported, "hosts are addresses on loopback here, and cannot be entered");
  return state_->place(host).entering();
}

Result<process::Finished> Cluster::run(uint32_t host, process::Command command,
                                       Nanos patience) const {
  WEFT_CHECK(host < size());
  Fd channel;
  WEFT_ASSIGN(command, state_->put(host, std::move(command), channel));
  return process::run(command, patience);
}

const std::vector<std::pair<std::string, std::string>>& Cluster::facts() const {
  return state_->facts;
}

Result<CpuTimes> cpu_times() {
  WEFT_ASSIGN(const std::string stat, read_file("/proc/stat", mib(4)));
  unsigned long long user, nice, system, idle, iowait, irq, softirq, steal = 0;
  if (sscanf(stat.c_str(), "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &user, &nice, &system,
             &idle, &iowait, &irq, &softirq, &steal) < 7)
    return error(Code::unsupported, "/proc/stat does not start with the processors' times");
  CpuTimes times;
  times.busy = user + nice + system + irq + softirq;
  times.steal = steal;
  times.total = times.busy + idle + iowait + steal;
  return times;
}

CpuLoad cpu_load(const CpuTimes& from, const CpuTimes& to) {
  const double total = static_cast<double>(to.total) - static_cast<double>(from.total);
  if (total <= 0) return {};
  const auto percent = [&](uint64_t before, uint64_t after) {
    return std::clamp(100 * (static_cast<double>(after) - static_cast<double>(before)) / total, 0.0,
                      100.0);
  };
  return {percent(from.busy, to.busy), percent(from.steal, to.steal)};
}

}  // namespace weft::lab
