#include "shaper.h"

#include <algorithm>
#include <cmath>

namespace weft::lab {
namespace {

// htb's class of the link, and of what is no TCP flow (ARP, ICMP). Flow classes stand above them.
constexpr uint32_t kLinkClass = 1;
constexpr uint32_t kOtherClass = 2;
// With few hosts flows get many classes, so that two of a job hardly ever share one; each costs
// about 60 us of set-up.
constexpr uint32_t kManyClasses = 1024;
constexpr uint32_t kFewClasses = 256;
constexpr uint32_t kHostsWithManyClasses = 8;

// A timer that fires late loses what exceeds the burst; what the burst allows comes over-fast at
// the start of a transfer.
constexpr double kBurstSeconds = 0.0005;
// What a sender has spaced out passes the port of its receiver without waiting again, which
// halves the timers, the greatest part of what shaping costs.
constexpr double kPortBurstSeconds = 0.002;

// A packet costs up to three timers, and timers are most of what shaping costs; large ones make
// short transfers over-fast. So packets are as large as holds their number, over all hosts, to one
// in 104 us: 32 kB for 2.5 Gb/s.
constexpr double kPacketSeconds = 104e-6;
constexpr double kPacketMax = 65536;

uint64_t bits(double bits_per_s) { return static_cast<uint64_t>(std::llround(bits_per_s)); }

}  // namespace

ShaperSettings shaper_settings(const ClusterSpec& spec) {
  ShaperSettings settings;
  settings.hosts = spec.hosts;
  settings.mtu = spec.mtu;
  settings.link_bits_per_s = spec.link_bits_per_s;
  const bool capped = spec.flow_bits_per_s > 0 && spec.flow_bits_per_s < spec.link_bits_per_s;
  settings.flow_bits_per_s = capped ? spec.flow_bits_per_s : 0;
  // Without a cap the classes still give each flow its fair share of the link.
  settings.flow_classes = spec.hosts <= kHostsWithManyClasses ? kManyClasses : kFewClasses;
  const double packet = spec.hosts * spec.link_bits_per_s / 8 * kPacketSeconds;
  settings.gso_bytes = static_cast<uint32_t>(std::clamp(
      packet > 0 ? packet : kPacketMax, 2.0 * spec.mtu, std::max(kPacketMax, 2.0 * spec.mtu)));
  const double flow = capped ? spec.flow_bits_per_s : spec.link_bits_per_s;
  // One packet, or a millisecond where that is more: less and a fast flow waits for its own sender.
  settings.flow_queue_bytes = std::max(settings.gso_bytes, static_cast<uint32_t>(flow * 1e-3 / 8));
  settings.link_burst_bytes =
      std::max<uint64_t>(spec.mtu, static_cast<uint64_t>(spec.link_bits_per_s * kBurstSeconds / 8));
  settings.flow_burst_bytes =
      std::max<uint64_t>(spec.mtu, static_cast<uint64_t>(flow * kBurstSeconds / 8));
  settings.port_burst_bytes = std::max<uint64_t>(
      spec.mtu, static_cast<uint64_t>(spec.link_bits_per_s * kPortBurstSeconds / 8));
  settings.port_queue_bytes = 1 << 20;
  settings.send_queue_packets = 1000;
  return settings;
}

std::string host_address(uint32_t host) { return text("10.77.0.%u", host + 1); }

std::string host_name(uint32_t host) { return text("host%u", host); }

std::string hosts_file(uint32_t hosts) {
  std::string content = "127.0.0.1 localhost\n";
  for (uint32_t host = 0; host < hosts; ++host)
    content += host_address(host) + " " + host_name(host) + "\n";
  return content;
}

std::string bridge_commands(const ShaperSettings& settings, const std::vector<int>& namespaces) {
  std::string lines = "link add br0 type bridge mcast_snooping 0\n";
  lines += text("link set br0 mtu %u up\n", settings.mtu);
  for (uint32_t host = 0; host < settings.hosts; ++host) {
    lines += text("link add port%u type veth peer name eth0 netns /proc/self/fd/%d\n", host,
                  namespaces[host]);
    lines += text("link set port%u mtu %u txqueuelen %u gso_max_size %u master br0 up\n", host,
                  settings.mtu, settings.send_queue_packets, settings.gso_bytes);
  }
  return lines;
}

std::string address_commands(const ShaperSettings& settings, uint32_t host) {
  std::string lines = "link set lo up\n";
  lines +=
      text("link set eth0 address 02:77:00:00:00:%02x mtu %u txqueuelen %u gso_max_size %u up\n",
           host + 1, settings.mtu, settings.send_queue_packets, settings.gso_bytes);
  lines += text("addr add %s/24 dev eth0\n", host_address(host).c_str());
  // Neighbours are known from the start: no first message waits for ARP.
  for (uint32_t other = 0; other < settings.hosts; ++other) {
    if (other == host) continue;
    lines += text("neigh add %s lladdr 02:77:00:00:00:%02x dev eth0 nud permanent\n",
                  host_address(other).c_str(), other + 1);
  }
  return lines;
}

std::string flow_filter(uint32_t classes) {
  // The class is the sum of both ports, modulo their number, and not a mixing hash: the kernel
  // gives successive connections to one address ports that lie close together and differ, so the
  // lanes between two hosts never meet in one class. A sum is the same seen from both sides.
  return text(
      "12,"
      "40 0 0 12,21 0 9 2048,"  // not IPv4: no class
      "48 0 0 23,21 0 7 6,"     // not TCP: no class
      "40 0 0 34,7 0 0 0,"      // X = source port
      "40 0 0 36,12 0 0 0,"     // A = destination port + X
      "84 0 0 %u,4 0 0 %u,"     // A = class 1:<classes + A mod classes>
      "22 0 0 0,6 0 0 0",       // return A; return 0
      classes - 1, 0x10000 + classes);
}

std::string egress_commands(const ShaperSettings& settings) {
  if (settings.link_bits_per_s <= 0) return "";
  const unsigned long long link = bits(settings.link_bits_per_s);
  const unsigned long long flow =
      settings.flow_bits_per_s > 0 ? bits(settings.flow_bits_per_s) : link;
  const unsigned long long share = std::max<unsigned long long>(link / settings.flow_classes, 1000);
  const unsigned long long link_burst = settings.link_burst_bytes;
  const unsigned long long flow_burst = settings.flow_burst_bytes;
  std::string lines = text("qdisc add dev eth0 root handle 1: htb default %x\n", kOtherClass);
  lines += text(
      "class add dev eth0 parent 1: classid 1:%x htb rate %llubit ceil %llubit "
      "burst %llub cburst %llub quantum %u\n",
      kLinkClass, link, link, link_burst, link_burst, settings.gso_bytes);
  lines += text(
      "class add dev eth0 parent 1:%x classid 1:%x htb rate %llubit ceil %llubit "
      "burst %ub cburst %llub quantum %u\n",
      kLinkClass, kOtherClass, share, link, settings.mtu, link_burst, settings.gso_bytes);
  for (uint32_t i = 0; i < settings.flow_classes; ++i)
    lines += text(
        "class add dev eth0 parent 1:%x classid 1:%x htb rate %llubit ceil %llubit "
        "burst %ub cburst %llub quantum %u\n",
        kLinkClass, settings.flow_classes + i, share, flow, settings.mtu, flow_burst,
        settings.gso_bytes);
  lines += text("filter add dev eth0 parent 1: prio 1 bpf bytecode '%s'\n",
                flow_filter(settings.flow_classes).c_str());
  return lines;
}

std::string ingress_commands(const ShaperSettings& settings) {
  if (settings.link_bits_per_s <= 0) return "";
  const unsigned long long link = bits(settings.link_bits_per_s);
  const unsigned long long burst = settings.port_burst_bytes;
  std::string lines;
  for (uint32_t host = 0; host < settings.hosts; ++host) {
    lines += text("qdisc add dev port%u root handle 1: htb default %x\n", host, kLinkClass);
    lines += text(
        "class add dev port%u parent 1: classid 1:%x htb rate %llubit ceil %llubit "
        "burst %llub cburst %llub quantum %u\n",
        host, kLinkClass, link, link, burst, burst, settings.gso_bytes);
    lines += text("qdisc add dev port%u parent 1:%x bfifo limit %llu\n", host, kLinkClass,
                  static_cast<unsigned long long>(settings.port_queue_bytes));
  }
  return lines;
}

std::vector<std::pair<std::string, std::string>> sysctls(const ClusterSpec& spec,
                                                         const ShaperSettings& settings) {
  return {
      {"net.ipv4.tcp_congestion_control", spec.congestion_control},
      // A lane that waited for the next iteration starts at the rate it had.
      {"net.ipv4.tcp_slow_start_after_idle", "0"},
      // No connection inherits what an earlier one learned.
      {"net.ipv4.tcp_no_metrics_save", "1"},
      // What a flow may have waiting in the host's own queue before TCP holds back: with one packet
      // there is always another one queued (TCP lets a second through), and a message that is
      // written now gets out within a few milliseconds although 16 flows share the link.
      {"net.ipv4.tcp_limit_output_bytes", std::to_string(settings.flow_queue_bytes)},
      // No address of its own making, and none of its traffic.
      {"net.ipv6.conf.all.disable_ipv6", "1"},
      {"net.ipv6.conf.default.disable_ipv6", "1"},
  };
}

}  // namespace weft::lab
