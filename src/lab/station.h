// station: the place of a process on a host of the lab, where hosts are addresses on loopback.
//
// Its network is the kernel's, except that connections leave from the host's own address, memory is
// shared with nobody, and the lab has a copy of every socket, to pace it (links.h).
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "weft/net.h"

namespace weft::lab {

// What a process needs to be on one of the lab's hosts.
struct Station {
  uint32_t block = 0;  // of addresses: those of the lab are 127.77.block.(host + 1)
  uint32_t host = 0;
  int channel = -1;      // to Links; a descriptor of the process
  double flow_rate = 0;  // bytes a second that one flow may have
  uint32_t segment = 0;  // most bytes of a TCP segment
  std::string congestion_control;
};
std::string station_address(uint32_t block, uint32_t host);
nlohmann::json to_json(const Station& station);
// Throws nlohmann::json::exception.
Station station_from(const nlohmann::json& in);

// The network of a process there. The channel is the network's from now on.
std::unique_ptr<net::Network> network_at(const Station& station);

}  // namespace weft::lab
