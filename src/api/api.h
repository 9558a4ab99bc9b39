// api: all that a C++ program includes to be a rank of a job.
//
//   auto job = weft::api::join();  // rank, size and meeting point: from the environment
//   if (!job) return complain(job.error());
//   weft::Group& group = (*job)->group();
//   if (auto done = group.all_reduce(data); !done) return complain(done.error());
//   if (auto left = (*job)->leave(); !left) return complain(left.error());
//
// The environment says who this process is and how it works; an option given here wins over it.
// docs/api.md has the tables.
//
//   the launcher's variables    rank, size, meeting point, secret (docs/launch.md); a process that
//                               no launcher started is a group of one
//   WEFT_PLAN                   a plan's file or a preset; "default" if not set
//   WEFT_TRACE                  a folder: each rank records into a file of its own there what weft
//                               does, and what the program says of its own work (weft/mark.h)
//   WEFT_LAB                    what `weft lab run` tells the trace of the lab
//   WEFT_INTERFACE              the network interface to use
//   WEFT_SHARED_MEMORY          0: no shared memory between ranks on one host
//   WEFT_SEAL                   1: what goes between hosts is encrypted and proved
//   WEFT_JOIN_TIMEOUT           how long to wait for the others at the start, "30s"
//   WEFT_PROGRESS_TIMEOUT       operations in flight and nothing moves for that long, "30s"
//   WEFT_READY_TIMEOUT          gradients that others wait for are not ready for that long, "600s"
//
// Lifetimes: a Job owns its Group and the recorder that the group writes to. Work handles,
// exchanges and sub-groups of it must be gone before the Job is. A Job that was rebuilt from
// another shares the recorder with it, and neither needs the other.
//
// Threads: as runtime.h says for a Group; a Job is destroyed by one thread when nobody uses it, and
// never inside a callback of Work::then().
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/capture.h"
#include "weft/mark.h"
#include "weft/membership.h"
#include "weft/plan.h"
#include "weft/runtime.h"

namespace weft {

// The runtime's words, without its name.
using runtime::Algorithm;
using runtime::Call;
using runtime::Collective;
using runtime::Exchange;
using runtime::Group;
using runtime::Op;
using runtime::Tensor;
using runtime::Type;
using runtime::Work;

}  // namespace weft

namespace weft::api {

// What is absent comes from the environment.
struct JoinOptions {
  std::optional<membership::Membership> membership;
  // Rank 0: listens at a free port of the address that membership->rendezvous is, and says which.
  std::function<Result<void>(const std::string& rendezvous)> listening;
  std::optional<plan::Plan> plan;
  std::optional<std::string> trace;  // a folder, made if need be; empty: no recording
  std::optional<std::string> interface;
  std::optional<bool> shared_memory;
  std::optional<bool> sealed;  // the same on all ranks
  std::optional<Nanos> join_timeout;
  std::optional<Nanos> progress_timeout;
  std::optional<Nanos> ready_timeout;
  // Measures the network when joining, for at most a second; absent: if a trace is recorded, which
  // is where the measurement goes. The same on all ranks.
  std::optional<bool> probe;
  membership::Lookup environment;  // empty: the environment of the process
};

class Job {
 public:
  ~Job();  // without leave(), the others see this rank as lost
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  Group& group() { return *group_; }
  // What the program computes and loads, for the trace: weft/mark.h. Inert without a trace.
  mark::Marks& marks() { return *marks_; }
  // For those who mark from threads that may outlive the job: they hold it weakly.
  const std::shared_ptr<mark::Marks>& shared_marks() { return marks_; }
  // The trace itself, for what has no mark.
  capture::Recorder& recorder() { return *recorder_; }
  const membership::Membership& membership() const { return membership_; }
  const plan::Plan& plan() const { return plan_; }

  // Group::exchange, and the trace learns which tensors there are. Where marks().model() has named
  // layers, they stand for the tensors' own; tensors that it has named must be these.
  Result<std::unique_ptr<Exchange>> exchange(std::vector<Tensor> tensors);
  // Group::rebuild: after a failure, a job of those that are left. This one stays as it is, failed.
  Result<std::unique_ptr<Job>> rebuild(Nanos settle = Nanos::from_seconds(5), uint32_t least = 0);
  // Waits until all ranks want to leave, and until all that was recorded is in the file.
  Result<void> leave();

 private:
  friend Result<std::unique_ptr<Job>> join(const JoinOptions& options);
  Job(std::shared_ptr<capture::Recorder> recorder, std::shared_ptr<mark::Marks> marks,
      std::unique_ptr<Group> group, membership::Membership membership, plan::Plan plan);

  // The group's thread records: the group goes first.
  std::shared_ptr<capture::Recorder> recorder_;
  std::shared_ptr<mark::Marks> marks_;
  std::unique_ptr<Group> group_;
  membership::Membership membership_;
  plan::Plan plan_;
};

// Becomes a member of the job that the environment and the options describe.
Result<std::unique_ptr<Job>> join(const JoinOptions& options = {});

}  // namespace weft::api
