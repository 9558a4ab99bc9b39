// What this host can say about its own network: interfaces, its name, the way to rank 0, ports.

#include <netinet/in.h>
#include <netinet/ip.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>

#include "checks.h"
#include "weft/launch.h"
#include "weft/membership.h"

namespace weft::doctor {

using launch::addresses_of;
using launch::InterfaceAddress;
using launch::socket_address;
using launch::SocketAddress;

namespace {

constexpr int kConnectMs = 2000;

bool usable(const InterfaceAddress& entry) {
  return entry.up && !entry.loopback && !entry.link_local;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

void check_interfaces(Checks& checks, const std::vector<InterfaceAddress>& all,
                      const Options& options) {
  std::map<std::string, std::string> by_name;
  for (const InterfaceAddress& entry : all) {
    if (usable(entry)) by_name[entry.interface] += " " + entry.address;
  }
  if (const char* wanted = std::getenv("WEFT_INTERFACE");
      wanted != nullptr && std::none_of(all.begin(), all.end(), [&](const auto& entry) {
        return entry.up && entry.interface == wanted;
      })) {
    checks.problem("interfaces", text("WEFT_INTERFACE is \"%s\", which is not up here", wanted),
                   "unset WEFT_INTERFACE, or set it to a name that `ip -br address` shows");
    return;
  }
  std::string found;
  for (const auto& [name, addresses] : by_name) {
    found += text("%s%s%s", found.empty() ? "" : "; ", name.c_str(), addresses.c_str());
  }
  if (by_name.empty()) {
    checks.note("interfaces", "only loopback: ranks can meet on this host alone",
                "ip link set IF up && ip address add ADDRESS/BITS dev IF");
  } else if (by_name.size() > 1 && options.rank0.empty()) {
    checks.note("interfaces", found,
                text("the one that routes to rank 0 is used; another: WEFT_INTERFACE=%s",
                     by_name.rbegin()->first.c_str()));
  } else {
    checks.ok("interfaces", found);
  }
}

void check_name(Checks& checks, const std::vector<InterfaceAddress>& all) {
  const std::string name = membership::host_name();
  const auto outside = std::find_if(all.begin(), all.end(), usable);
  const std::string own_address = outside == all.end() ? "127.0.0.1" : outside->address;
  const std::string remedy =
      text("echo \"%s %s\" >> /etc/hosts", own_address.c_str(), name.c_str());
  const auto addresses = addresses_of(name);
  if (!addresses) {
    checks.problem("name", addresses.error().message(), remedy);
    return;
  }
  std::string list, foreign;
  bool only_loopback = true;
  for (const std::string& address : *addresses) {
    list += (list.empty() ? "" : ", ") + address;
    only_loopback = only_loopback && is_loopback(address);
    // What a name service makes up has the interface behind it: fe80::1%eth0.
    const bool own = is_loopback(address) || std::any_of(all.begin(), all.end(), [&](auto& entry) {
                       return entry.address == address;
                     });
    if (!own && foreign.empty()) foreign = address;
  }
  const std::string found = name + " is " + list;
  if (!foreign.empty()) {
    checks.problem("name",
                   text("%s, but %s is no address of this host", found.c_str(), foreign.c_str()),
                   remedy);
  } else if (only_loopback && outside != all.end()) {
    checks.note("name", found + ": others that are told this name would reach themselves",
                text("WEFT_RENDEZVOUS=%s:PORT when rank 0 is here, or %s", own_address.c_str(),
                     remedy.c_str()));
  } else {
    checks.ok("name", found);
  }
}

// The most that a packet to there may carry, as far as the kernel knows.
std::optional<int> mtu_towards(const std::string& address) {
  auto to = socket_address(address, 9);
  if (!to) return std::nullopt;
  const int family = to->storage.ss_family;
  const Fd probe(socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!probe || connect(probe.get(), to->get(), to->size) != 0) return std::nullopt;
  int mtu = 0;
  socklen_t size = sizeof(mtu);
  const bool v4 = family == AF_INET;
  if (getsockopt(probe.get(), v4 ? IPPROTO_IP : IPPROTO_IPV6, v4 ? IP_MTU : IPV6_MTU, &mtu,
                 &size) != 0) {
    return std::nullopt;
  }
  return mtu;
}

void judge_mtu(Checks& checks, const std::string& interface, uint64_t mtu) {
  const KernelFiles files{};
  const std::string found =
      text("%llu bytes on %s", static_cast<unsigned long long>(mtu), interface.c_str());
  // Megabits a second; absent or negative where the driver does not know.
  const auto speed = files.number("/sys/class/net/" + interface + "/speed");
  if (mtu < 1500) {
    checks.note("MTU", found + ", less than Ethernet's 1500: a tunnel may be on the way",
                text("ip link set %s mtu 1500, if all on the way carry it", interface.c_str()));
  } else if (mtu < 9000 && speed && *speed >= 10'000) {
    checks.note(
        "MTU", found + ", on a link that is fast enough for larger packets",
        text("ip link set %s mtu 9000, on all hosts and switches alike", interface.c_str()));
  } else {
    checks.ok("MTU", found);
  }
}

void check_route(Checks& checks, const std::vector<InterfaceAddress>& all,
                 const std::string& rank0) {
  const auto addresses = addresses_of(rank0);
  if (!addresses) {
    checks.problem("route to rank 0", addresses.error().message(),
                   "set WEFT_RENDEZVOUS to rank 0's address instead of its name");
    return;
  }
  const std::string& address = addresses->front();
  const auto source = launch::source_towards(address);
  if (!source) {
    checks.problem("route to rank 0", source.error().message(),
                   text("ip route get %s must succeed; set WEFT_RENDEZVOUS to an address of rank 0 "
                        "that this host reaches",
                        address.c_str()));
    return;
  }
  std::string interface = "an unknown interface";
  for (const InterfaceAddress& entry : all) {
    if (entry.address == *source) interface = entry.interface;
  }
  checks.ok("route to rank 0", text("%s from %s on %s; WEFT_INTERFACE=NAME chooses another",
                                    address.c_str(), source->c_str(), interface.c_str()));
  if (const auto mtu = mtu_towards(address); mtu && *mtu > 0) {
    judge_mtu(checks, interface, static_cast<uint64_t>(*mtu));
  }
}

void check_mtu_of_interfaces(Checks& checks, const std::vector<InterfaceAddress>& all) {
  std::string last;
  for (const InterfaceAddress& entry : all) {
    if (!usable(entry) || entry.interface == last) continue;
    last = entry.interface;
    const KernelFiles files{};
    if (const auto mtu = files.number("/sys/class/net/" + last + "/mtu")) {
      judge_mtu(checks, last, *mtu);
    }
  }
}

// Listens on an address of this host and connects to it, as a rank does.
Result<void> reach_self(const std::string& address) {
  WEFT_ASSIGN(SocketAddress local, socket_address(address, 0));
  const int family = local.storage.ss_family;
  const Fd listener(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!listener) return io_error(errno, "no socket");
  if (bind(listener.get(), local.get(), local.size) != 0 || listen(listener.get(), 1) != 0 ||
      getsockname(listener.get(), local.get(), &local.size) != 0) {
    return io_error(errno, "cannot listen on %s", address.c_str());
  }
  const Fd caller(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!caller) return io_error(errno, "no socket");
  if (connect(caller.get(), local.get(), local.size) != 0 && errno != EINPROGRESS) {
    return io_error(errno, "cannot connect to %s, an own address", address.c_str());
  }
  pollfd ready{.fd = listener.get(), .events = POLLIN, .revents = 0};
  if (poll(&ready, 1, kConnectMs) != 1) {
    return error(Code::timeout, "a connection to %s, an own address, does not arrive",
                 address.c_str());
  }
  return {};
}

void check_ports(Checks& checks, const std::vector<InterfaceAddress>& all) {
  std::string reached;
  for (const InterfaceAddress& entry : all) {
    if (!entry.up || entry.link_local) continue;
    const auto result = reach_self(entry.address);
    if (!result) {
      checks.problem("ports", result.error().message(),
                     "a filter blocks it: look with `nft list ruleset` or `iptables -S`, and let "
                     "TCP between the hosts of the job pass");
      return;
    }
    reached += (reached.empty() ? "" : ", ") + entry.address;
  }
  const KernelFiles files{};
  std::string range = files.text("/proc/sys/net/ipv4/ip_local_port_range").value_or("unknown");
  std::replace(range.begin(), range.end(), '\t', '-');
  checks.ok("ports", text("listening and connecting works on %s; ranks use free ports in %s",
                          reached.c_str(), range.c_str()));
}

}  // namespace

void check_network(Checks& checks, const Options& options) {
  const auto all = launch::interface_addresses();
  check_interfaces(checks, all, options);
  check_name(checks, all);
  if (options.rank0.empty()) {
    check_mtu_of_interfaces(checks, all);
  } else {
    check_route(checks, all, options.rank0);
  }
  check_ports(checks, all);
}

}  // namespace weft::doctor
