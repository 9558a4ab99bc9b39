#include "weft/launch.h"

#include "weft/membership.h"

namespace weft::launch {

using membership::kRanksMax;

Result<std::vector<Process>> local_job(uint32_t ranks, const std::vector<std::string>& argv) {
  if (ranks < 1 || ranks > kRanksMax) {
    return error(Code::invalid_argument, "%u ranks: expected 1 to %u", ranks, kRanksMax);
  }
  if (argv.empty() || argv[0].empty()) {
    return error(Code::invalid_argument, "no program to start");
  }
  WEFT_ASSIGN(const uint16_t port, free_port("127.0.0.1"));
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
                           {"WEFT_RENDEZVOUS", "127.0.0.1:" + std::to_string(port)},
                           {"WEFT_SECRET", secret}};
    processes.push_back(std::move(process));
  }
  return processes;
}

}  // namespace weft::launch
