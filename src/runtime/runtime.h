// runtime: a Plan goes in, work is done, a Trace comes out.
//
// A Group is this process's membership in a job: it joins, measures the network once, and then
// serves collectives and one gradient exchange from a thread of its own. An Exchange is what
// training uses: tensors are registered once; "gradient t of step s is ready" may come from any
// thread; the next forward waits for one tensor or for all. The plan decides everything between.
//
//   training threads                    progress thread                       other ranks
//   ready(t, s) ──Readiness──► queue ──► bucket complete ──control──► rank 0: Admission
//   wait(t, s)  ◄── condition ◄───────── Engine ◄────────── start(operation) ──┘
//
// Failure: every wait ends with a reason that names a rank. The first reason wins, reaches all
// ranks, and stays: the group then refuses work with the same words. The process is never ended
// by weft.
//
// Threads: all functions from any thread, except that a Group and its Exchange are destroyed by
// one thread when nobody waits on them.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "weft/capture.h"
#include "weft/plan.h"

namespace weft::runtime {

struct Options {
  Rank rank;
  uint32_t ranks = 1;
  std::string rendezvous;  // "address:port" of rank 0
  std::string secret;
  std::string host = "localhost";  // name of this host in messages and traces
  plan::Plan plan;
  double shrink = 1;  // a lab's divisor for every size in the plan
  bool probe = true;  // measure the network when joining, for at most a second
  Nanos join_deadline = Nanos::from_seconds(30);
  Nanos progress_deadline = Nanos::from_seconds(30);  // operations in flight, and nothing moves
  Nanos ready_deadline = Nanos::from_seconds(600);    // some ranks wait for gradients of others
  Nanos silence_deadline = Nanos::from_seconds(15);   // no sign of life from a rank
};

// One gradient: where it lies, and which layer's forward needs the result first. Listed in
// forward order, the same on all ranks.
struct Tensor {
  std::string name;
  std::span<float> data;
  uint32_t layer = 0;
};

class Group;

class Exchange {
 public:
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // The gradient of `tensor` in `step` (0, 1, 2, ...) is in its memory, which belongs to the
  // exchange until the wait for it returns. When all are done it holds the sum over all ranks.
  Result<void> ready(uint32_t tensor, uint64_t step);
  // Returns when the sum is there, or with the group's failure.
  Result<void> wait(uint32_t tensor, uint64_t step);
  Result<void> wait_all(uint64_t step);

  // What the next step waits for: the plan's `barrier`.
  plan::Barrier barrier() const;
  size_t buckets() const;

  struct Impl;  // known to the module only

 private:
  friend class Group;
  explicit Exchange(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

class Group {
 public:
  // `recorder` must outlive the group.
  static Result<std::unique_ptr<Group>> join(const Options& options, capture::Recorder& recorder);
  ~Group();  // leaves without ceremony: the others see this rank as lost unless leave() was called
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  Rank rank() const;
  uint32_t ranks() const;

  // All ranks call these in the same order; sums are the same bits on every rank.
  Result<void> all_reduce(std::span<float> data);
  Result<void> broadcast(std::span<float> data, Rank root);
  Result<void> barrier();

  // Registers the tensors. All ranks call it once; a rank whose tensors differ is named.
  Result<std::unique_ptr<Exchange>> exchange(std::vector<Tensor> tensors);

  // Ends the group for everyone, with this reason.
  void abort(const std::string& reason);
  // Why the group is unusable, if it is.
  std::optional<Error> failure() const;
  // Waits until all ranks want to leave, and closes. Call it when all work is done.
  Result<void> leave();

  struct Impl;  // known to the module only

 private:
  explicit Group(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft::runtime
