// work: an operation between its call and the moment when everyone who waits for it is told.
//
//   call ──► Flight ──weft's callback──► Completer's thread ──► Outcome ◄── Work, Future
//
// A Flight holds the tensors for as long as weft may touch their memory. The network's thread only
// puts it into the Completer's queue; the Completer copies what is still to be copied, lets go of
// all tensors, and only then tells the Outcome, so that nobody who was told can be overtaken by a
// thread that still holds something of Python's while Python ends. A Work is a handle on the
// Outcome, which no thread holds.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "staging.h"
#include "weft/api.h"

namespace weft::torch_backend {

// How an operation ended, once it has. Threads: any.
class Outcome {
 public:
  // `devices`: where the results are copied to by queued copies.
  explicit Outcome(std::vector<at::Tensor> results, std::vector<c10::Device> devices = {});
  // Once; later ones are ignored: who is shut down is told so before the network is done. Results
  // on devices are there when `arrivals` are.
  void settle(std::exception_ptr failure, int source = -1, std::vector<ArrivalPtr> arrivals = {});
  // False when `timeout` (0: none) has passed before.
  bool wait(std::chrono::milliseconds timeout);
  bool completed();
  // Lets what the calling thread queues on its streams from now on wait for the results.
  void synchronize();
  std::vector<ArrivalPtr> arrivals();
  std::exception_ptr failure();
  int source();
  const c10::intrusive_ptr<c10::ivalue::Future>& future() const { return future_; }
  const std::vector<at::Tensor>& results() const { return results_; }
  const std::vector<c10::Device>& devices() const { return devices_; }
  // Called when it has ended, before anyone is told.
  void on_end(std::function<void()> callback) { on_end_ = std::move(callback); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool settled_ = false;    // somebody tells how it ended
  bool completed_ = false;  // and has
  std::exception_ptr failure_;
  int source_ = -1;
  std::vector<ArrivalPtr> arrivals_;
  std::vector<at::Tensor> results_;
  const std::vector<c10::Device> devices_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::function<void()> on_end_;
};

// What torch's callers hold.
class Handle final : public c10d::Work {
 public:
  Handle(int rank, c10d::OpType type, const char* title,
         const std::optional<std::vector<at::Tensor>>& inputs, std::shared_ptr<Outcome> outcome);
  bool isCompleted() override { return outcome_->completed(); }
  bool isSuccess() const override;
  std::exception_ptr exception() const override { return outcome_->failure(); }
  int sourceRank() const override { return outcome_->source(); }
  std::vector<at::Tensor> result() override { return outcome_->results(); }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { outcome_->synchronize(); }
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return outcome_->future(); }
  const std::shared_ptr<Outcome>& outcome() const { return outcome_; }

 private:
  std::shared_ptr<Outcome> outcome_;
};

struct Flight {
  std::shared_ptr<Outcome> outcome;
  std::vector<at::Tensor> held;
  std::function<void()> finish;      // copies results to where they belong
  std::shared_ptr<Passage> passage;  // of tensors on a device
  std::atomic<size_t> pending{1};
  std::mutex mutex;
  std::optional<Error> error;      // the first; guarded by mutex
  std::optional<weft::Work> work;  // of a receive from any rank
  std::string device_name() const;
};

// The thread on which a process group's operations end, in the order in which they are done.
// REQUIRES: stop() is called before the last reference goes.
class Completer : public std::enable_shared_from_this<Completer> {
 public:
  static std::shared_ptr<Completer> start();
  // One part of the flight is done: the last one ends it.
  void done(const std::shared_ptr<Flight>& flight, Result<void> result);
  // Nothing of the flight was started, and nothing will be.
  void fail(const std::shared_ptr<Flight>& flight, std::exception_ptr failure);
  // Runs `task` on the thread; not after stop().
  bool post(std::function<void()> task);
  // Does what was posted before, and joins the thread, unless it is the caller.
  void stop();
  // All of this process, when it ends.
  static void stop_all();

 private:
  Completer() = default;
  void loop();
  static void end(Flight& flight, std::exception_ptr failure);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::mutex joining_;
  std::thread thread_;
  pid_t process_ = 0;
};

}  // namespace weft::torch_backend
