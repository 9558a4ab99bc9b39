// The kernel's sockets behind transport's interfaces.
#pragma once

#include <sys/socket.h>

#include "weft/transport.h"

namespace weft::transport::tcp {

// An IPv4 or IPv6 address with a port.
struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

struct HostPort {
  std::string host;
  uint16_t port = 0;
};
// "10.0.0.1:4000", "[::1]:4000" or "name:4000".
Result<HostPort> split(const std::string& address);
Result<Address> resolve(const std::string& host, uint16_t port);
std::string host_of(const Address& address);
std::string to_text(const Address& address);
// The first address of an interface, of the family that `like` resolves to.
Result<std::string> address_of_interface(const std::string& interface, const std::string& like);

std::unique_ptr<Reactor> make_reactor();

}  // namespace weft::transport::tcp
