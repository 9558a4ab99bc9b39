// shaper: what is said to ip, tc and the kernel's switches to make a cluster. Text only, so that a
// test can read it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cluster.h"
#include "weft/base.h"

namespace weft::lab {

// The numbers behind a ClusterSpec.
struct ShaperSettings {
  uint32_t hosts = 0;
  uint32_t mtu = 0;
  double link_bits_per_s = 0;     // 0: not shaped
  double flow_bits_per_s = 0;     // 0: no cap
  uint32_t flow_classes = 0;      // a power of two, or 0
  uint32_t gso_bytes = 0;         // the largest packet that is shaped as one
  uint32_t flow_queue_bytes = 0;  // what one flow may have waiting in its host
  uint64_t link_burst_bytes = 0;
  uint64_t flow_burst_bytes = 0;
  uint64_t port_burst_bytes = 0;
  uint64_t port_queue_bytes = 0;    // what waits for a host's link before packets are lost
  uint32_t send_queue_packets = 0;  // the same at the sender, for each flow
};

ShaperSettings shaper_settings(const ClusterSpec& spec);

std::string host_address(uint32_t host);
std::string host_name(uint32_t host);
std::string hosts_file(uint32_t hosts);

// For `ip -batch -` outside the hosts: the bridge and a pair a host, whose far end goes into the
// network namespace behind descriptor `namespaces[host]`.
std::string bridge_commands(const ShaperSettings& settings, const std::vector<int>& namespaces);
// For `ip -batch -` inside a host.
std::string address_commands(const ShaperSettings& settings, uint32_t host);
// For `tc -batch -` inside a host: what it sends.
std::string egress_commands(const ShaperSettings& settings);
// For `tc -batch -` outside: what each host receives.
std::string ingress_commands(const ShaperSettings& settings);
// The classic BPF program that chooses a flow's class, as tc reads it.
std::string flow_filter(uint32_t classes);

// Names below /proc/sys and what they are set to, in each host.
std::vector<std::pair<std::string, std::string>> sysctls(const ClusterSpec& spec,
                                                         const ShaperSettings& settings);

}  // namespace weft::lab
