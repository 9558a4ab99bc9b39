#include "weft/launch.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>

namespace weft::launch {

namespace {

// Ranks travel in 16 bits, of which one value means "none".
constexpr uint32_t kRanksMax = 65535;
constexpr size_t kSecretBytes = 32;

// A port that was free a moment ago. Another program may take it before rank 0 does; then rank 0
// says so and the job is started again.
Result<uint16_t> free_port() {
  Fd socket_fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket_fd) return io_error(errno, "cannot make a socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (bind(socket_fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      getsockname(socket_fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return io_error(errno, "cannot find a free port on 127.0.0.1");
  }
  return ntohs(address.sin_port);
}

Result<std::string> variable(const char* name, const char* expected) {
  const char* value = std::getenv(name);
  if (value == nullptr) {
    return error(Code::not_found, "%s is not set: expected %s (`weft run -n N -- PROGRAM` sets it)",
                 name, expected);
  }
  return std::string(value);
}

Result<uint32_t> number_variable(const char* name, const char* expected, uint32_t low,
                                 uint32_t high) {
  WEFT_ASSIGN(const std::string value, variable(name, expected));
  uint32_t number = 0;
  const char* end = value.data() + value.size();
  const auto [stopped, failure] = std::from_chars(value.data(), end, number);
  if (failure != std::errc{} || stopped != end || number < low || number > high) {
    return error(Code::invalid_argument, "%s is \"%s\": expected %s", name, value.c_str(),
                 expected);
  }
  return number;
}

bool is_address_and_port(std::string_view value) {
  const size_t colon = value.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  const std::string_view address = value.substr(0, colon);
  // An IPv6 address has colons of its own and stands in brackets.
  if (address.find(':') != std::string_view::npos &&
      (address.front() != '[' || address.back() != ']')) {
    return false;
  }
  uint32_t port = 0;
  const char* end = value.data() + value.size();
  const auto [stopped, failure] = std::from_chars(value.data() + colon + 1, end, port);
  return failure == std::errc{} && stopped == end && port >= 1 && port <= 65535;
}

}  // namespace

Result<Membership> membership_from_environment() {
  Membership membership;
  WEFT_ASSIGN(membership.size,
              number_variable("WEFT_SIZE", "the number of ranks, 1 to 65535", 1, kRanksMax));
  const std::string below = text("a whole number below WEFT_SIZE (%u)", membership.size);
  WEFT_ASSIGN(membership.rank, number_variable("WEFT_RANK", below.c_str(), 0, membership.size - 1));

  const char* expected = "ADDRESS:PORT of rank 0, such as 10.0.0.1:29400 or [fd00::1]:29400";
  WEFT_ASSIGN(membership.rendezvous, variable("WEFT_RENDEZVOUS", expected));
  if (!is_address_and_port(membership.rendezvous)) {
    return error(Code::invalid_argument, "WEFT_RENDEZVOUS is \"%s\": expected %s",
                 membership.rendezvous.c_str(), expected);
  }

  expected = "an even number of hexadecimal digits, 32 at least, the same on every rank";
  WEFT_ASSIGN(membership.secret, variable("WEFT_SECRET", expected));
  const std::string& secret = membership.secret;
  if (secret.size() < 32 || secret.size() % 2 != 0 ||
      secret.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
    // Messages end up in logs, so the value itself is not told.
    return error(Code::invalid_argument, "WEFT_SECRET has %zu characters%s: expected %s",
                 secret.size(),
                 secret.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos
                     ? ", not all of them hexadecimal"
                     : "",
                 expected);
  }
  return membership;
}

Result<std::vector<Process>> local_job(uint32_t ranks, const std::vector<std::string>& argv) {
  if (ranks < 1 || ranks > kRanksMax) {
    return error(Code::invalid_argument, "%u ranks: expected 1 to %u", ranks, kRanksMax);
  }
  if (argv.empty() || argv[0].empty()) {
    return error(Code::invalid_argument, "no program to start");
  }
  WEFT_ASSIGN(const uint16_t port, free_port());
  const std::string secret = new_secret();
  std::vector<Process> processes;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    Process process;
    process.rank = rank;
    process.argv = argv;
    process.environment = {{"WEFT_RANK", std::to_string(rank)},
                           {"WEFT_SIZE", std::to_string(ranks)},
                           {"WEFT_RENDEZVOUS", "127.0.0.1:" + std::to_string(port)},
                           {"WEFT_SECRET", secret}};
    processes.push_back(std::move(process));
  }
  return processes;
}

std::string new_secret() {
  std::array<std::byte, kSecretBytes> bytes;
  random_bytes(bytes);
  std::string hex;
  for (std::byte byte : bytes) hex += text("%02x", std::to_integer<unsigned>(byte));
  return hex;
}

}  // namespace weft::launch
