#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <sstream>

#include "weft/launch.h"
#include "weft/membership.h"

namespace weft::launch {

using membership::host_name;
using membership::kRanksMax;
using membership::shown;

namespace {

constexpr uint16_t kDiscardPort = 9;  // any: nothing is sent there

std::string numeric(const sockaddr* address, socklen_t size) {
  std::array<char, NI_MAXHOST> name{};
  if (getnameinfo(address, size, name.data(), name.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return "";
  }
  return name.data();
}

bool is_plain(std::string_view word, std::string_view also) {
  return !word.empty() && std::all_of(word.begin(), word.end(), [&](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           also.find(c) != std::string_view::npos;
  });
}

}  // namespace

// ---- names and addresses -------------------------------------------------------------------

std::vector<InterfaceAddress> interface_addresses() {
  std::vector<InterfaceAddress> out;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return out;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    InterfaceAddress found;
    found.interface = entry->ifa_name;
    found.family = family;
    found.up = (entry->ifa_flags & IFF_UP) != 0 && (entry->ifa_flags & IFF_RUNNING) != 0;
    found.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    found.address = numeric(entry->ifa_addr, size);
    if (family == AF_INET6) {
      sockaddr_in6 address{};
      std::memcpy(&address, entry->ifa_addr, sizeof(address));
      found.link_local = IN6_IS_ADDR_LINKLOCAL(&address.sin6_addr);
    }
    out.push_back(std::move(found));
  }
  return out;
}

Result<std::vector<std::string>> addresses_of(const std::string& name) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (const int failure = getaddrinfo(name.c_str(), nullptr, &hints, &list); failure != 0) {
    return error(Code::not_found, "the name %s does not resolve: %s", name.c_str(),
                 gai_strerror(failure));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, freeaddrinfo);
  std::vector<std::string> out;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    std::string address = numeric(entry->ai_addr, entry->ai_addrlen);
    if (!address.empty() && std::find(out.begin(), out.end(), address) == out.end()) {
      out.push_back(std::move(address));
    }
  }
  return out;
}

Result<SocketAddress> socket_address(const std::string& address, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list) != 0) {
    return error(Code::invalid_argument, "\"%s\" is no address", address.c_str());
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, freeaddrinfo);
  SocketAddress out;
  std::memcpy(&out.storage, list->ai_addr, list->ai_addrlen);
  out.size = list->ai_addrlen;
  return out;
}

Result<std::string> source_towards(const std::string& address) {
  WEFT_ASSIGN(SocketAddress to, socket_address(address, kDiscardPort));
  const Fd probe(socket(to.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!probe) return io_error(errno, "cannot make a socket");
  // Connecting a datagram socket sends nothing: the kernel only looks for the route.
  if (connect(probe.get(), to.get(), to.size) != 0) {
    return io_error(errno, "no route to %s", address.c_str());
  }
  SocketAddress from;
  from.size = sizeof(from.storage);
  if (getsockname(probe.get(), from.get(), &from.size) != 0) {
    return io_error(errno, "no address towards %s", address.c_str());
  }
  return numeric(from.get(), from.size);
}

Result<uint16_t> free_port(const std::string& address) {
  WEFT_ASSIGN(SocketAddress local, socket_address(address, 0));
  const Fd listener(socket(local.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!listener) return io_error(errno, "cannot make a socket");
  if (bind(listener.get(), local.get(), local.size) != 0 ||
      getsockname(listener.get(), local.get(), &local.size) != 0) {
    return io_error(errno, "cannot find a free port on %s", address.c_str());
  }
  // The port is at the same place for both families.
  sockaddr_in6 bound{};
  std::memcpy(&bound, &local.storage, sizeof(bound));
  return ntohs(bound.sin6_port);
}

Result<uint16_t> free_port_beside(const std::string& address, uint16_t taken) {
  constexpr uint16_t kFirst = 1024, kLast = 65535;
  constexpr int kTries = 8;  // the kernel seldom gives the same one twice in a row
  if (is_this_host(address)) {
    for (int i = 0; i < kTries; ++i) {
      WEFT_ASSIGN(const uint16_t port, free_port(address));
      if (port != taken) return port;
    }
  }
  return taken == kLast ? kFirst : static_cast<uint16_t>(taken + 1);
}

std::string without_user(const std::string& host) { return host.substr(host.rfind('@') + 1); }

bool is_this_host(const std::string& name) {
  const std::string own = host_name();
  if (name == "localhost" || name == own || name == own.substr(0, own.find('.'))) return true;
  const auto addresses = interface_addresses();
  return std::any_of(addresses.begin(), addresses.end(),
                     [&](const InterfaceAddress& entry) { return entry.address == name; });
}

// ---- the list of hosts ---------------------------------------------------------------------

namespace {

Error host_flaw(std::string_view item, const char* what) {
  return error(Code::invalid_argument, "\"%s\" is no host with slots such as gpu1:4: %s",
               shown(item).c_str(), what);
}

Result<Host> parse_host(std::string_view item) {
  Host host;
  std::string_view rest;
  if (item.starts_with('[')) {
    const size_t close = item.find(']');
    if (close == std::string_view::npos) return host_flaw(item, "a [ without its ]");
    host.name = item.substr(1, close - 1);
    rest = item.substr(close + 1);
  } else {
    const size_t colon = item.find(':');
    host.name = item.substr(0, colon);
    rest = item.substr(host.name.size());
    if (rest.find(':', 1) != std::string_view::npos) {
      return host_flaw(item, "an IPv6 address stands in brackets, [fd00::1]:4");
    }
  }
  if (!is_plain(host.name, "._-:%@") || host.name.front() == '-') {
    return host_flaw(item, "a name has letters, digits, dots and dashes");
  }
  if (rest.empty()) return host;
  const char* end = rest.data() + rest.size();
  const auto [stopped, failure] = std::from_chars(rest.data() + 1, end, host.slots);
  if (rest.front() != ':' || failure != std::errc{} || stopped != end || host.slots < 1 ||
      host.slots > kRanksMax) {
    return host_flaw(item, "slots are a number from 1 to 65535");
  }
  return host;
}

}  // namespace

Result<std::vector<Host>> parse_hosts(std::string_view list) {
  std::vector<Host> hosts;
  uint64_t slots = 0;
  for (size_t begin = 0;;) {
    const size_t comma = std::min(list.find(',', begin), list.size());
    WEFT_ASSIGN(Host host, parse_host(list.substr(begin, comma - begin)));
    slots += host.slots;
    const auto known = std::find_if(hosts.begin(), hosts.end(),
                                    [&](const Host& other) { return other.name == host.name; });
    if (known != hosts.end()) {
      known->slots += host.slots;
    } else {
      hosts.push_back(std::move(host));
    }
    if (slots > kRanksMax) return host_flaw(list, "more than 65535 slots together");
    if (comma == list.size()) return hosts;
    begin = comma + 1;
  }
}

Result<std::vector<std::string>> agent_command(const std::string& agent, const std::string& host,
                                               const std::vector<std::string>& command) {
  std::vector<std::string> words;
  std::istringstream stream(agent);
  for (std::string word; stream >> word;) words.push_back(word);
  if (words.empty()) return error(Code::invalid_argument, "the agent is empty; ssh is one");
  // A question about passwords could not be answered.
  if (words[0] == "ssh" || words[0].ends_with("/ssh")) {
    words.insert(words.begin() + 1, {"-o", "BatchMode=yes", "-T"});
  }
  words.push_back(host);
  for (const std::string& word : command) {
    if (!is_plain(word, "_./+=:@%,-")) {
      return error(Code::invalid_argument,
                   "the path \"%s\" has characters that a shell on %s would read otherwise; name "
                   "the program there with --weft",
                   shown(word).c_str(), host.c_str());
    }
    words.push_back(word);
  }
  return words;
}

}  // namespace weft::launch
