#include "weft/launch.h"

#include <cstdlib>

#include "weft/membership.h"

namespace weft::launch {

using membership::kRanksMax;

namespace {

constexpr const char* kHere = "127.0.0.1";

}  // namespace

Result<Variables> parse_variables(const std::vector<std::string>& list) {
  Variables out;
  for (const std::string& item : list) {
    const size_t equals = item.find('=');
    const std::string name = item.substr(0, equals);
    if (name.empty()) {
      return error(Code::invalid_argument, "\"%s\" is no variable: expected NAME or NAME=VALUE",
                   membership::shown(item).c_str());
    }
    if (equals != std::string::npos) {
      out[name] = item.substr(equals + 1);
    } else if (const char* value = std::getenv(name.c_str())) {
      out[name] = value;
    } else {
      return error(Code::not_found, "the variable %s is not set here; NAME=VALUE gives it a value",
                   membership::shown(name).c_str());
    }
  }
  return out;
}

Variables torch_variables(const Seat& seat, const std::string& store_address, uint16_t store_port) {
  return {{"RANK", std::to_string(seat.rank)},
          {"WORLD_SIZE", std::to_string(seat.ranks)},
          {"LOCAL_RANK", std::to_string(seat.local_rank)},
          {"LOCAL_WORLD_SIZE", std::to_string(seat.local_ranks)},
          {"MASTER_ADDR", store_address},
          {"MASTER_PORT", std::to_string(store_port)}};
}

Result<std::vector<Process>> local_job(uint32_t ranks, const std::vector<std::string>& argv,
                                       const Variables& added) {
  if (ranks < 1 || ranks > kRanksMax) {
    return error(Code::invalid_argument, "%u ranks: expected 1 to %u", ranks, kRanksMax);
  }
  if (argv.empty() || argv[0].empty()) {
    return error(Code::invalid_argument, "no program to start");
  }
  WEFT_ASSIGN(const uint16_t port, free_port(kHere));
  WEFT_ASSIGN(const uint16_t store, free_port_beside(kHere, port));
  const std::string secret = membership::new_secret();
  std::vector<Process> processes;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    Process process;
    process.rank = rank;
    process.argv = argv;
    process.environment = {{"WEFT_RANK", std::to_string(rank)},
                           {"WEFT_SIZE", std::to_string(ranks)},
                           {"WEFT_LOCAL_RANK", std::to_string(rank)},
                           {"WEFT_LOCAL_SIZE", std::to_string(ranks)},
                           {"WEFT_RENDEZVOUS", kHere + (":" + std::to_string(port))},
                           {"WEFT_SECRET", secret}};
    process.environment.merge(torch_variables({rank, ranks, rank, ranks}, kHere, store));
    process.environment.insert(added.begin(), added.end());
    processes.push_back(std::move(process));
  }
  return processes;
}

}  // namespace weft::launch
