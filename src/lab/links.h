// links: limits on what flows and hosts carry, where the kernel lets us shape nothing.
//
// Hosts are addresses on the loopback interface. The kernel paces any socket whose owner asks for
// it (SO_MAX_PACING_RATE), so a cap on a flow needs no right. A host's link is shared out: each
// process gives a copy of every socket of its network to the lab, which looks a thousand times a
// second which of them have bytes to send, divides the links among those (share.h), and sets the
// rates.
//
//   process of host 0                                   the lab's first process
//   network at a Station ──socket, made or closed──►    Links: looks, shares out, paces
//
// It does not matter who serves a socket afterwards, a thread or another process. As long as the
// lab has its copy a connection is not closed: a process tells when it closes one, and the copies
// of a process that ends are dropped at once.
//
// Not here: flows of programs that know nothing of this, and hosts that see each other's files and
// processes. Threads: Links has one of its own; its functions are for any.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cluster.h"
#include "share.h"

namespace weft::lab {

class Links {
 public:
  // Fails with unsupported if the kernel does not know `congestion_control`, or lets us not use it.
  static Result<std::unique_ptr<Links>> start(const ClusterSpec& spec);
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  uint32_t block() const { return block_; }
  // What a process on `host` is told; `channel` is the number that its end has there.
  Station station(uint32_t host, int channel) const;
  // The end of a channel for one more process.
  Result<Fd> open_channel();
  // How many sockets could not be taken: then links carry more than they should.
  uint64_t lost() const { return lost_; }

 private:
  struct Socket;
  struct Channel;
  explicit Links(const ClusterSpec& spec);
  Result<void> begin();
  void run();
  bool hear(Channel& channel);
  void look(Nanos now);
  void set_rates();

  ClusterSpec spec_;
  double link_rate_ = 0;  // bytes a second; 0: no limit
  double flow_rate_ = 0;  // of a flow alone; 0: no limit
  uint32_t block_ = 0;
  Fd claim_;  // on the block: no other lab has it
  Fd epoll_, stop_;
  std::mutex mutex_;  // guards what follows
  std::map<int, std::unique_ptr<Channel>> channels_;
  bool changed_ = false;  // since the rates were set
  std::atomic<uint64_t> lost_{0};
  std::thread thread_;
};

}  // namespace weft::lab
