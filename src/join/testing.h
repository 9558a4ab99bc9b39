// Strangers and others who come to a group's door.
#pragma once

#include "handshake.h"
#include "weft_testing/groups.h"

namespace weft::join {

// The connector's side of the handshake on a socket that blocks; true when both proved themselves.
inline bool prove(int fd, const std::string& secret, const Hello& hello) {
  Handshake handshake(Handshake::Role::connector, secret, hello);
  std::unique_ptr<net::Socket> socket = net::adopt(Fd(::dup(fd)));
  for (int turn = 0; turn < 5000; ++turn) {
    auto finished = handshake.advance(*socket);
    if (!finished) return false;
    if (*finished) return true;
    pause_ms(1);
  }
  return false;
}

}  // namespace weft::join
