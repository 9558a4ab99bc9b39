// Ranks as threads of one process, over real sockets on loopback.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <functional>
#include <thread>

#include "weft/runtime.h"

namespace weft::runtime::testing_support {

inline uint16_t free_port() {
  Fd fd(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  WEFT_CHECK(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  socklen_t size = sizeof address;
  getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin_port);
}

inline Options options_for(uint32_t rank, uint32_t ranks, uint16_t port, const plan::Plan& plan) {
  Options options;
  options.rank = {rank};
  options.ranks = ranks;
  options.rendezvous = text("127.0.0.1:%u", unsigned{port});
  options.secret = "a secret of the test";
  options.plan = plan;
  options.probe = false;
  options.check_inside_machine = true;  // as between machines: tests damage what travels
  options.join_deadline = Nanos::from_seconds(10);
  return options;
}

// Runs `body` once a rank, each in a thread; returns what each returned.
inline std::vector<Result<void>> run_ranks(
    uint32_t ranks, const plan::Plan& plan,
    const std::function<Result<void>(Group&, capture::Recorder&)>& body,
    const std::function<void(Options&)>& change = {}) {
  uint16_t port = free_port();
  std::vector<Result<void>> outcomes(ranks);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      Options options = options_for(rank, ranks, port, plan);
      if (change) change(options);
      auto recorder = capture::Recorder::off();
      auto group = Group::join(options, *recorder);
      if (!group) {
        outcomes[rank] = std::move(group).error();
        return;
      }
      outcomes[rank] = body(**group, *recorder);
      if (outcomes[rank]) outcomes[rank] = (*group)->leave();
    });
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

}  // namespace weft::runtime::testing_support
