// engine_processes: those of one engine, started once and asked many times.
//
// While they are not asked, they take no processor time: the ranks wait in read(). An engine that
// would not rest even then (Horovod's background threads talk all the time) is stopped by signals
// between requests.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "protocol.h"
#include "weft/base.h"
#include "weft/process.h"

namespace weft::bench {

// How an engine is started: every command line once, each a rank, or one line that starts them all.
struct Start {
  struct Line {
    std::vector<std::string> argv;
    std::vector<std::string> environment;  // "NAME=value", beside the caller's
  };
  std::vector<Line> lines;
  uint32_t ranks = 0;
  bool restless = false;  // must be stopped while idle
};

class EngineProcesses {
 public:
  // Starts all and waits until every rank has said hello. `folder` is for the socket and for what
  // the processes print. Fails with the last words of the process that failed.
  static Result<std::unique_ptr<EngineProcesses>> start(const std::string& name, const Start& start,
                                                        const std::string& folder);
  ~EngineProcesses();
  EngineProcesses(const EngineProcesses&) = delete;
  EngineProcesses& operator=(const EngineProcesses&) = delete;

  const std::string& version() const { return version_; }

  // The slowest rank's time for all iterations, and the elements that were wrong on any rank.
  // Unsupported: this engine cannot do it, and lives. Any other error: it is lost.
  Result<Answer> measure(const Request& request);

 private:
  EngineProcesses(std::string name, std::string folder)
      : name_(std::move(name)), folder_(std::move(folder)) {}
  Result<void> greet(int listener, uint32_t ranks, Nanos deadline);
  Result<void> start_line(const Start::Line& line, size_t index);
  // The exit of a process that should not have ended, if one did.
  std::optional<Error> ended() const;
  std::string last_words() const;
  void signal_ranks(int signal) const;

  std::string name_, folder_, version_;
  bool restless_ = false, stopped_ = false;
  std::vector<process::Child> processes_;  // what we started
  std::vector<int> rank_pids_;
  std::vector<std::unique_ptr<Lines>> ranks_;
};

}  // namespace weft::bench
