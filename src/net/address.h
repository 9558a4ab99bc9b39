// Addresses as the kernel has them.
#pragma once

#include <sys/socket.h>

#include "weft/net.h"

namespace weft::net {

// An IPv4 or IPv6 address with a port.
struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Result<Address> resolve(const std::string& host, uint16_t port);
std::string host_of(const Address& address);
std::string to_text(const Address& address);
Result<std::unique_ptr<Reactor>> make_reactor();

}  // namespace weft::net
