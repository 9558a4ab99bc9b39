#include "machine.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>

#include <nlohmann/json.hpp>
#include <string>

#include "weft/process.h"

namespace weft::bench {
namespace {

constexpr Nanos kIperfPatience = Nanos::from_seconds(30);

}  // namespace

StolenTime stolen_time() {
  auto stat = read_file("/proc/stat", mib(4));
  uint64_t t[8] = {};
  if (!stat || sscanf(stat->c_str(),
                      "cpu %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64
                      " %" SCNu64 " %" SCNu64,
                      &t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7]) < 7)
    return {};
  StolenTime out{t[7], 0};
  for (uint64_t ticks : t) out.total += ticks;
  return out;
}

double steal_percent(StolenTime from, StolenTime to) {
  if (to.total <= from.total || to.stolen < from.stolen) return 0;
  return 100.0 * static_cast<double>(to.stolen - from.stolen) /
         static_cast<double>(to.total - from.total);
}

Result<uint16_t> free_port() {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t length = sizeof address;
  auto* plain = reinterpret_cast<sockaddr*>(&address);
  if (!fd || ::bind(fd.get(), plain, length) != 0 || ::getsockname(fd.get(), plain, &length) != 0)
    return io_error(errno, "finding a free port");
  return ntohs(address.sin_port);
}

std::optional<double> iperf3_gb_per_s() {
  // One server for one client; it picks a port that is unlikely to be taken, and says so if it is.
  const char* command =
      "command -v iperf3 >/dev/null || exit 1; port=$((20000 + $$ % 20000)); "
      "iperf3 -s -1 -B 127.0.0.1 -p $port >/dev/null 2>&1 & sleep 0.3; "
      "iperf3 -c 127.0.0.1 -p $port --bidir -t 2 -O 1 -l 512K -J 2>/dev/null; "
      "kill $! 2>/dev/null; wait";
  process::Command shell;
  shell.argv = {"sh", "-c", command};
  shell.own_group = true;
  shell.dies_with_parent = true;
  const auto finished = process::run(shell, kIperfPatience);
  if (!finished) return std::nullopt;
  try {
    const nlohmann::json end = nlohmann::json::parse(finished->output).at("end");
    const double there = end.at("sum_received").at("bits_per_second");
    const double back = end.at("sum_received_bidir_reverse").at("bits_per_second");
    return (there + back) / 2 / 8e9;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

}  // namespace weft::bench
