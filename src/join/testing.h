// Strangers and others who come to a group's door.
#pragma once

#include "handshake.h"
#include "weft_testing/groups.h"

namespace weft::join {

// A lane as `from` would open it to the rank that `mesh` is of.
inline Hello lane_hello(const Mesh& mesh, uint32_t from, uint16_t lane, uint64_t attempt) {
  Hello hello;
  hello.purpose = Purpose::lane;
  hello.rank = from;
  hello.ranks = mesh.ranks;
  hello.lane = lane;
  hello.agreement = "the same";
  hello.attempt = attempt;
  const Member& self = mesh.members[mesh.rank.index];
  hello.to = self.rank;
  hello.place = place_of(self.address, self.port);
  return hello;
}

// What somebody says who is at a door, rank 0's unless said otherwise.
inline Hello hello_of(uint32_t rank, uint32_t ranks, Purpose purpose, const std::string& place,
                      uint16_t lane = 0, uint32_t to = 0) {
  Hello hello;
  hello.purpose = purpose;
  hello.rank = rank;
  hello.ranks = ranks;
  hello.lane = lane;
  hello.lanes = 8;
  hello.agreement = "the same";
  hello.to = to;
  hello.place = place;
  hello.attempt = 1;
  return hello;
}

// The connector's side of the handshake on a socket that blocks; true when both proved themselves.
inline bool prove(int fd, const std::string& secret, const Hello& hello) {
  Handshake handshake(net::kernel_system(), Handshake::Role::connector, secret, hello);
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
