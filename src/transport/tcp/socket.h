// Small steps with sockets that lanes, control channels and joining share.
#pragma once

#include <netinet/in.h>

#include "weft/transport.h"

namespace weft::transport::tcp {

// "10.0.0.1:4000" -> an IPv4 socket address. Names are looked up.
Result<sockaddr_in> resolve(const std::string& address);
Result<sockaddr_in> resolve(const std::string& host, uint16_t port);
std::string to_text(const sockaddr_in& address);

Result<Fd> listen_on(const sockaddr_in& address);
// Starts a connection that does not block; it is open, or failed, when the socket is writable.
Result<Fd> start_connect(const sockaddr_in& address);
// The error of a connection attempt that has ended, 0 if it is open.
int connect_outcome(int fd);
void tune(int fd);  // no delay, keep-alive
sockaddr_in local_address_of(int fd);
std::string peer_text(int fd);

}  // namespace weft::transport::tcp
