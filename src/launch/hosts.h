// Names and addresses: which host is meant, and how it is reached from here.
#pragma once

#include <sys/socket.h>

#include <string>
#include <string_view>
#include <vector>

#include "weft/base.h"

namespace weft::launch {

// An address of an interface of this host.
struct InterfaceAddress {
  std::string interface;
  std::string address;  // numeric
  int family = 0;       // AF_INET or AF_INET6
  bool up = false;
  bool loopback = false;
  bool link_local = false;
};
std::vector<InterfaceAddress> interface_addresses();

// The numeric addresses of a name, as far as this host can tell. Fails with why not.
Result<std::vector<std::string>> addresses_of(const std::string& name);

// The address from which this host would send to `address` (numeric).
Result<std::string> source_towards(const std::string& address);

// "localhost", this host's name, short or long, or one of its addresses.
bool is_this_host(const std::string& name);

// "me@gpu1" -> "gpu1".
std::string without_user(const std::string& host);

// A port that was free a moment ago on `address` (numeric). Another program may take it before
// rank 0 does; then rank 0 says so and the job is started again.
Result<uint16_t> free_port(const std::string& address);

// An agent's command line for a command on a host: "ssh" -> ssh -o BatchMode=yes -T HOST COMMAND.
// The words of the command must mean themselves to a shell, since ssh hands them to one.
Result<std::vector<std::string>> agent_command(const std::string& agent, const std::string& host,
                                               const std::vector<std::string>& command);

// A socket address from numeric text.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};
Result<SocketAddress> socket_address(const std::string& address, uint16_t port);

}  // namespace weft::launch
