// backend: torch's process group over weft.
//
// Each collective is one or more calls of weft, started in the order in which torch calls them,
// and done on the Completer's thread. Memory that weft can use as it is is used as it is; the rest
// goes through copies, that of an accelerator through pinned memory (staging.h): such a call is
// started when the copy is there, and so is what was called after it.
//
// Threads: any, as torch has it: the ranks of a group agree on the order of calls. Called without
// Python's lock; the destructor may have it.
#pragma once

#include <list>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "elements.h"
#include "job.h"
#include "staging.h"
#include "work.h"

namespace weft::torch_backend {

using std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class ProcessGroupWeft final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(milliseconds limit) : c10d::Backend::Options("weft", limit) {}
    c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
      return c10::make_intrusive<Options>(*this);
    }
  };

  // The first group of these ranks meets through the store; later ones are sub-groups of it.
  static c10::intrusive_ptr<ProcessGroupWeft> make(const c10::intrusive_ptr<c10d::Store>& store,
                                                   int rank, int size, milliseconds timeout,
                                                   std::vector<int64_t> global);
  ProcessGroupWeft(std::shared_ptr<Job> job, uint64_t part, int rank, std::vector<int64_t> global,
                   milliseconds timeout);
  ~ProcessGroupWeft() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;

  const std::string getBackendName() const override { return "weft"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  void setTimeout(milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  // Ends what this process has of it; a job's first group waits so long for the other ranks.
  void close(milliseconds patience);

  const std::shared_ptr<Job>& job() const { return job_; }
  // Memory for copies from and to devices.
  HostMemory::Figures staging() { return roads_.memory().figures(); }
  // Whether it has the ranks of its job, all and in that order.
  bool is_whole_job() const { return job_->has_exactly(global_); }

 private:
  // What a collective is to weft.
  struct Task {
    c10d::OpType type;
    const char* title;
    Tensors inputs;   // for the profiler
    Tensors results;  // of the future
    Tensors held;     // beside them
    milliseconds timeout{-1};
    std::vector<Call> calls = {};
    std::list<std::vector<uint64_t>> counts = {};  // of the calls
    std::function<void()> finish = {};
    bool collective = true;
    uint64_t part = 0;  // that it runs in; 0: of this group
    std::span<const uint64_t> keep(std::vector<uint64_t> list) {
      return counts.emplace_back(std::move(list));
    }
  };
  WorkPtr start(Task task, std::shared_ptr<Passage> passage = nullptr);
  // REQUIRES: mutex_ is held, as for the next.
  void start_now(const std::shared_ptr<Flight>& flight, const Task& task);
  void start_when_there(const std::shared_ptr<Flight>& flight, std::shared_ptr<const Task> task,
                        Nanos deadline);
  std::exception_ptr wait_for_copies(const Flight& flight, Nanos deadline);
  WorkPtr start_sparse(at::Tensor tensor, const c10d::AllreduceOptions& options);
  void sum_sparse(const at::Tensor& tensor, bool mean, Nanos deadline);
  void run_and_wait(const Call& call);
  WorkPtr gather_into(Task task, const Tensors& outputs, const at::Tensor& input);
  WorkPtr message(Tensors& tensors, uint32_t peer, int tag, bool sends, c10d::OpType type,
                  const char* title);
  void check_rank(int64_t rank, const char* what) const;
  std::shared_ptr<Outcome> remember(Tensors results, std::vector<c10::Device> devices = {});
  Nanos deadline_of(milliseconds timeout) const;
  uint32_t ranks() const { return static_cast<uint32_t>(size_); }

  std::shared_ptr<Job> job_;
  const uint64_t part_;
  const std::vector<int64_t> global_;
  uint64_t side_part_ = 0;  // the same ranks, for what asks before it knows how much there is
  std::shared_ptr<Completer> completer_;
  std::shared_ptr<Completer> stepper_;  // for what takes several steps; made when first needed
  // For what has to be copied from a device first, and what was called after it: in the order of
  // calls. Made when first needed.
  std::shared_ptr<Completer> starter_;
  size_t waiting_ = 0;  // for starter_
  Roads roads_;
  // The group is about to end, and devices are not waited for as long as else.
  std::shared_ptr<std::atomic<bool>> hurry_ = std::make_shared<std::atomic<bool>>(false);
  std::mutex mutex_;  // the order of calls
  c10::intrusive_ptr<Options> options_;
  std::atomic<uint64_t> sequence_{0};
  std::list<std::weak_ptr<Outcome>> outcomes_;  // that were not told yet
  uint32_t barriers_ = 0;                       // monitored ones
  bool coalescing_ = false;
  std::vector<std::shared_ptr<Outcome>> coalesced_;
  bool closed_ = false;
};

}  // namespace weft::torch_backend
