#include "remote.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstring>

#include "weft/launch.h"
#include "weft/membership.h"

extern char** environ;

namespace weft::launch {

using membership::is_address_and_port;
using membership::kRanksMax;

namespace {

constexpr std::string_view kGreeting = "weft-remote 1 ";
constexpr size_t kItemsBytesMax = 16 << 20;  // several times what the kernel passes to a program
// Where ports for rank 0 on another host are taken from: below those that kernels give away.
constexpr uint64_t kFirstPort = 20000, kPorts = 12000;

template <typename Number>
bool parse_number(std::string_view digits, Number& number) {
  const char* end = digits.data() + digits.size();
  const auto [stopped, failure] = std::from_chars(digits.data(), end, number);
  return failure == std::errc{} && stopped == end;
}

void put(std::string& out, char kind, std::string_view value) {
  out += kind;
  out += value.substr(0, value.find('\0'));
  out += '\0';
}

Result<void> read_exactly(int fd, std::span<char> out) {
  while (!out.empty()) {
    const ssize_t n = read(fd, out.data(), out.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return io_error(errno, "cannot read what to start");
    if (n == 0) return error(Code::peer_lost, "the launcher's end came before what to start");
    out = out.subspan(static_cast<size_t>(n));
  }
  return {};
}

Result<void> take(RemoteStart& start, std::string_view item) {
  const auto bad = [&] { return error(Code::corrupt, "an item of what to start is unknown"); };
  if (item.empty()) return bad();
  const std::string_view value = item.substr(1);
  switch (item[0]) {
    case 'r':
      if (!parse_number(value, start.rank) || start.rank >= kRanksMax) return bad();
      return {};
    case 'g':
      if (!parse_number(value, start.grace.count) || start.grace.count < 0) return bad();
      return {};
    case 'd': start.folder = value; return {};
    case 'a': start.argv.emplace_back(value); return {};
    case 'e': {
      const size_t equals = value.find('=');
      if (equals == std::string_view::npos || equals == 0) return bad();
      start.environment[std::string(value.substr(0, equals))] = value.substr(equals + 1);
      return {};
    }
    default: return bad();
  }
}

}  // namespace

std::string encode(const RemoteStart& start) {
  std::string items;
  put(items, 'r', std::to_string(start.rank));
  put(items, 'd', start.folder);
  put(items, 'g', std::to_string(start.grace.count));
  for (const auto& [name, value] : start.environment)
    put(items, 'e', text("%s=%s", name.c_str(), value.c_str()));
  for (const std::string& word : start.argv) put(items, 'a', word);
  return std::string(kGreeting) + std::to_string(items.size()) + "\n" + items;
}

Result<RemoteStart> decode(std::string_view items) {
  RemoteStart start;
  while (!items.empty()) {
    const size_t end = items.find('\0');
    if (end == std::string_view::npos) {
      return error(Code::corrupt, "what to start breaks off in the middle of an item");
    }
    WEFT_TRY(take(start, items.substr(0, end)));
    items.remove_prefix(end + 1);
  }
  if (start.argv.empty() || start.argv[0].empty()) {
    return error(Code::corrupt, "what to start names no program");
  }
  return start;
}

Result<RemoteStart> read_remote_start(int input) {
  std::string line;
  for (char c = 0; c != '\n'; line += c) {
    if (line.size() > kGreeting.size() + 20) break;
    WEFT_TRY(read_exactly(input, {&c, 1}));
  }
  size_t size = 0;
  if (!line.starts_with(kGreeting) || !line.ends_with('\n') ||
      !parse_number(
          std::string_view(line).substr(kGreeting.size(), line.size() - kGreeting.size() - 1),
          size) ||
      size > kItemsBytesMax) {
    return error(Code::corrupt,
                 "what comes is not from `weft run` of this version; this verb is for it alone");
  }
  std::string items(size, '\0');
  WEFT_TRY(read_exactly(input, items));
  return decode(items);
}

// A list of what goes, not of what stays: whatever else a shell holds (keys, tokens, sockets of
// agents, LD_PRELOAD) is nobody's business on another host unless it is asked for.
std::map<std::string, std::string> environment_for_others() {
  constexpr std::string_view kNames[] = {
      // Where programs, libraries and packages are: the same paths are expected on every host.
      "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV",
      // Which devices a job may see.
      "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
      // How text and time are written.
      "LANG", "TZ"};
  // How libraries that a job computes and communicates with work.
  constexpr std::string_view kBeginnings[] = {"WEFT_", "PYTHON", "OMP_",      "MKL_",
                                              "KMP_",  "GOMP_",  "OPENBLAS_", "NCCL_",
                                              "GLOO_", "UCX_",   "FI_",       "LC_"};
  // Of a host: its name, its files, its descriptors.
  constexpr std::string_view kOwn[] = {"WEFT_HOST", "WEFT_SECRET_FILE", "WEFT_SECRET_FD"};
  std::map<std::string, std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view line(*entry);
    const size_t equals = line.find('=');
    if (equals == std::string_view::npos || equals == 0) continue;
    const std::string_view name = line.substr(0, equals);
    const auto is_name = [&](std::string_view known) { return name == known; };
    const bool goes =
        std::any_of(std::begin(kNames), std::end(kNames), is_name) ||
        std::any_of(std::begin(kBeginnings), std::end(kBeginnings),
                    [&](std::string_view beginning) { return name.starts_with(beginning); });
    if (goes && std::none_of(std::begin(kOwn), std::end(kOwn), is_name)) {
      out[std::string(name)] = line.substr(equals + 1);
    }
  }
  return out;
}

// ---- ranks on hosts ------------------------------------------------------------------------

namespace {

Result<std::string> address_of_interface(const std::string& interface) {
  std::string found;
  for (const InterfaceAddress& entry : interface_addresses()) {
    if (entry.interface != interface || entry.link_local) continue;
    if (found.empty() || entry.family == AF_INET) found = entry.address;
  }
  if (found.empty()) {
    return error(Code::not_found, "the interface %s has no address on this host",
                 interface.c_str());
  }
  return found;
}

// An address of this host that the first of the others can reach.
Result<std::string> address_towards(const std::vector<Host>& hosts) {
  for (const Host& host : hosts) {
    if (is_this_host(host.name)) continue;
    const auto addresses = addresses_of(without_user(host.name));
    if (!addresses) {
      return error(Code::not_found,
                   "%s, so the way to it is unknown; say with --rendezvous ADDRESS:PORT where the "
                   "others find rank 0",
                   addresses.error().message().c_str());
    }
    return source_towards(addresses->front());
  }
  return std::string("127.0.0.1");
}

std::string with_port(const std::string& address, uint64_t port) {
  const bool v6 = address.find(':') != std::string::npos;
  return text(v6 ? "[%s]:%llu" : "%s:%llu", address.c_str(), static_cast<unsigned long long>(port));
}

Result<std::string> meeting_place(const Placement& placement) {
  if (!placement.rendezvous.empty()) {
    if (is_address_and_port(placement.rendezvous)) return placement.rendezvous;
    return error(Code::invalid_argument,
                 "the rendezvous \"%s\" is not ADDRESS:PORT, such as 10.0.0.1:29400 or "
                 "[fd00::1]:29400",
                 placement.rendezvous.c_str());
  }
  const std::string first = without_user(placement.hosts[0].name);
  if (is_this_host(first)) {
    WEFT_ASSIGN(const std::string address, placement.interface.empty()
                                               ? address_towards(placement.hosts)
                                               : address_of_interface(placement.interface));
    WEFT_ASSIGN(const uint16_t port, free_port(address));
    return with_port(address, port);
  }
  // Whether a port is free over there shows when rank 0 takes it.
  std::array<std::byte, 8> random{};
  random_bytes(random);
  uint64_t number = 0;
  std::memcpy(&number, random.data(), sizeof(number));
  const auto addresses = addresses_of(first);
  return with_port(addresses ? addresses->front() : first, kFirstPort + number % kPorts);
}

// Where torch's store of rank 0 can listen: beside weft.
Result<std::pair<std::string, uint16_t>> store_beside(const std::string& rendezvous) {
  const size_t colon = rendezvous.rfind(':');
  std::string address = rendezvous.substr(0, colon);
  if (address.size() > 2 && address.front() == '[') address = address.substr(1, address.size() - 2);
  uint16_t taken = 0;
  WEFT_CHECK(parse_number(std::string_view(rendezvous).substr(colon + 1), taken));
  WEFT_ASSIGN(const uint16_t port, free_port_beside(address, taken));
  return std::pair(std::move(address), port);
}

Result<std::string> present_folder() {
  std::array<char, PATH_MAX> path{};
  if (getcwd(path.data(), path.size()) == nullptr) {
    return io_error(errno, "the present folder has no path");
  }
  return std::string(path.data());
}

Result<Process> remote_process(Process process, const Placement& placement,
                               const std::string& folder) {
  RemoteStart start;
  start.rank = process.rank;
  start.folder = folder;
  start.grace = placement.grace;
  start.environment = environment_for_others();
  for (const auto& [name, value] : process.environment) start.environment[name] = value;
  start.argv = std::move(process.argv);
  process.input = encode(start);
  process.environment.clear();
  const std::string weft = placement.remote_weft.empty() ? self_path() : placement.remote_weft;
  WEFT_ASSIGN(process.argv, agent_command(placement.agent, process.host, {weft, "remote-child"}));
  return process;
}

}  // namespace

Result<std::vector<Process>> job_on_hosts(uint32_t ranks, const std::vector<std::string>& argv,
                                          const Placement& placement) {
  uint32_t slots = 0;
  for (const Host& host : placement.hosts) slots += host.slots;
  if (ranks < 1 || ranks > slots) {
    return error(Code::invalid_argument, "%u ranks do not fit: the hosts have %u slots", ranks,
                 slots);
  }
  if (argv.empty() || argv[0].empty()) {
    return error(Code::invalid_argument, "no program to start");
  }
  WEFT_ASSIGN(const std::string rendezvous, meeting_place(placement));
  WEFT_ASSIGN(const auto store, store_beside(rendezvous));
  WEFT_ASSIGN(const std::string folder, present_folder());
  const std::string secret = membership::new_secret();
  std::vector<Process> processes;
  for (const Host& host : placement.hosts) {
    const uint32_t here = std::min(host.slots, ranks - static_cast<uint32_t>(processes.size()));
    for (uint32_t local = 0; local < here; ++local) {
      Process process;
      process.rank = static_cast<uint32_t>(processes.size());
      process.host = host.name;
      process.argv = argv;
      process.environment = {{"WEFT_RANK", std::to_string(process.rank)},
                             {"WEFT_SIZE", std::to_string(ranks)},
                             {"WEFT_LOCAL_RANK", std::to_string(local)},
                             {"WEFT_LOCAL_SIZE", std::to_string(here)},
                             {"WEFT_RENDEZVOUS", rendezvous},
                             {"WEFT_SECRET", secret}};
      process.environment.merge(
          torch_variables({process.rank, ranks, local, here}, store.first, store.second));
      if (!placement.interface.empty()) process.environment["WEFT_INTERFACE"] = placement.interface;
      process.environment.insert(placement.added.begin(), placement.added.end());
      if (!is_this_host(host.name)) {
        WEFT_ASSIGN(process, remote_process(std::move(process), placement, folder));
      }
      processes.push_back(std::move(process));
    }
  }
  return processes;
}

Result<int> remote_child(int input) {
  WEFT_ASSIGN(RemoteStart start, read_remote_start(input));
  if (!start.folder.empty() && chdir(start.folder.c_str()) != 0) {
    return io_error(errno, "cannot enter %s, the folder of the job", start.folder.c_str());
  }
  Process process;
  process.rank = start.rank;
  process.argv = std::move(start.argv);
  process.environment = std::move(start.environment);
  Options options;
  options.prefix_output = false;
  options.grace = start.grace;
  options.control_fd = input;
  WEFT_ASSIGN(const Report report, run({process}, options));
  const Outcome& outcome = report.outcomes.at(0);
  return outcome.signal != 0 ? 128 + outcome.signal : outcome.exit_code;
}

}  // namespace weft::launch
