// runtime: a Plan goes in, work is done, a Trace comes out.
//
// A Group is this process's membership in a job: it joins, measures the network once, and then
// serves collectives and one gradient exchange. An Exchange is what training uses: tensors are
// registered once; "gradient t of step s is ready" may come from any thread; the next forward
// waits for one tensor or for all. The plan decides everything between.
//
//   training threads                    progress thread                       other ranks
//   ready(t, s) ──Readiness──► queue ──► bucket complete ──control──► rank 0: Admission
//   wait(t, s)  ◄── condition ◄───────── Engine ◄────────── start(operation) ──┘
//
// A thread that waits for an operation moves it along itself: nothing small takes a detour through
// another thread. It looks often for a short while, then sleeps until something happens.
//
// Failure: every wait ends with a reason that names a rank. The first reason wins, reaches all
// ranks, and stays: the group then refuses work with the same words, until it is rebuilt with
// those that are left. The process is never ended by weft, and nothing is thrown: memory that runs
// out is the error of the call that needed it, with the code exhausted, and if others take part in
// that call, the end of the group.
//
// Threads: all functions from any thread, except that a Group and its Exchange are destroyed by
// one thread when nobody waits on them. A process that was forked has no part in the group of its
// parent: its calls are refused, and it keeps no connection open.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "weft/capture.h"
#include "weft/collective.h"
#include "weft/plan.h"

namespace weft::runtime {

using reduce::Op;
using reduce::Type;
using schedule::Algorithm;
using schedule::Collective;

struct Options {
  Rank rank;
  uint32_t ranks = 1;
  // "address:port" or "[v6 address]:port" of rank 0, or "file:PATH" for ranks on one host.
  std::string rendezvous;
  // Rank 0, where the ranks have a way of their own to tell each other something: it listens at a
  // free port of the address that `rendezvous` is, and says which. The others are given what it
  // said.
  std::function<Result<void>(const std::string& rendezvous)> listening;
  std::string interface;  // whose address to use; empty: the one that reaches rank 0
  std::string secret;
  std::string host = "localhost";  // name of this host in messages and traces
  plan::Plan plan;
  // Calls that name no algorithm take the one that the plan names for their size. Where nobody
  // named a plan, this is false, and they take the one that costs least.
  bool plan_was_named = true;
  double shrink = 1;          // a lab's divisor for every size in the plan
  bool probe = true;          // measure the network when joining, for at most a second
  bool shared_memory = true;  // with ranks on the same host
  // Control channels, lanes and the probe encrypted and proved, with keys made from the secret.
  // Alike on all ranks. Shared memory, which leaves no host, is as it was.
  bool sealed = false;
  // Checksums of payloads also over TCP inside one machine, where no link can damage them.
  bool check_inside_machine = false;
  // What all-reduces cost here, as `weft bench algorithms` fits it: which one is used for which
  // size follows from it. Rank 0's count for all; cost::typical() if it has none.
  std::optional<cost::Costs> costs;
  // How many ranks report to one and hear from it what starts (schedule::Tree); 0: by the costs.
  // Rank 0's counts for all.
  uint32_t fan_out = 0;
  std::map<uint16_t, double> lane_rate;  // most bytes a second of a lane, for experiments
  Nanos join_deadline = Nanos::from_seconds(30);
  Nanos progress_deadline = Nanos::from_seconds(30);  // an operation in flight does not move
  Nanos ready_deadline = Nanos::from_seconds(600);    // a gradient is waited for and not ready
  Nanos silence_deadline = Nanos::from_seconds(15);   // no sign of life from a rank
  // How long a waiting thread looks again and again before it sleeps.
  Nanos spin = Nanos::from_micros(1000);
  // Without it, work moves only while a thread waits or tests: for simulated networks.
  bool progress_thread = true;
  net::Network* network = nullptr;  // null: the kernel's
};

// What a trace of this rank says of it and of the machine that it is on. Whether two ranks share a
// clock is not known before they meet: each counts as a host.
trace::Environment describe_rank(const Options& options);

// One gradient: where it lies, of which floating-point type its elements are, and which layer's
// forward needs the result first. Listed in forward order, the same on all ranks.
struct Tensor {
  std::string name;
  std::span<std::byte> data;
  uint32_t layer = 0;
  Type type = Type::float32;

  Tensor(std::string its_name, std::span<float> its_data, uint32_t its_layer = 0)
      : name(std::move(its_name)), data(std::as_writable_bytes(its_data)), layer(its_layer) {}
  Tensor(std::string its_name, void* its_data, uint64_t elements, Type its_type,
         uint32_t its_layer = 0)
      : name(std::move(its_name)),
        data(static_cast<std::byte*>(its_data), elements * reduce::size_of(its_type)),
        layer(its_layer),
        type(its_type) {}
  uint64_t elements() const { return data.size() / reduce::size_of(type); }
};

// A message may be received from whichever rank sends one.
inline constexpr uint32_t kAnyRank = 0xffffffff;

// An operation of all ranks of a group. Counts are elements.
//
//                   count                    input           output
//   all_reduce      of the array             count           count; may be the same memory
//   reduce_scatter  of all blocks together   count           own block; may be its place in input
//   all_gather      of all blocks together   own block       count; input may be its place in it
//   broadcast       of the array             root: count     count
//   reduce          of the array             count           root: count
//   gather          of all blocks together   own block       root: count
//   scatter         of all blocks together   root: count     own block
//   all_to_all      sent by this rank        count           sum of receive_counts
//   send, receive   of the message           count           count
//
// Blocks are as equal as can be (the first ones larger), or as `counts` says, one a rank. An
// input that is null is the output's memory.
//
// Messages between two ranks are received in the order in which they were sent, separately for each
// tag and group. One that nobody has asked for yet waits in memory, within a bound (256 MiB for all
// together); beyond it nothing more is read from whoever sends. A receive from any rank takes the
// oldest message of the first rank that has one; a named receive of the same tag that is called
// while it waits may be served before it.
struct Call {
  Collective collective = Collective::all_reduce;
  const void* input = nullptr;
  void* output = nullptr;
  uint64_t count = 0;
  Type type = Type::float32;
  Op op = Op::sum;
  uint32_t root = 0;  // of the group; point to point: the other rank; receive: or kAnyRank
  bool sends = true;  // point to point
  uint32_t tag = 0;   // point to point
  std::span<const uint64_t> counts = {};
  std::span<const uint64_t> receive_counts = {};
  std::optional<Algorithm> algorithm = {};  // absent: by the plan and the size
  int64_t priority = 0;                     // smaller goes first
  Nanos deadline = {0};  // that it may stand still; 0: Options::progress_deadline
};

// An operation that was started. It goes on without the handle.
class Work {
 public:
  Work() = default;
  // Returns when the result is there, or with the group's failure.
  Result<void> wait();
  bool test();  // moves things along; true when done or failed
  // Calls `done` once, from the thread that finds it finished; at once if it is already. It may
  // start operations, and may not wait: it is what others wait for.
  void then(std::function<void(Result<void>)> done);
  // Of a message that was received: the rank that sent it, in the group.
  std::optional<Rank> source() const;

  struct State;

 private:
  friend class Group;
  Work(std::shared_ptr<State> state, std::shared_ptr<void> group)
      : state_(std::move(state)), group_(std::move(group)) {}
  std::shared_ptr<State> state_;
  std::shared_ptr<void> group_;  // lives as long as its handles
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
  // The same for a tensor on which this rank has nothing to say in this step: it counts as zeros,
  // and its memory is set to them. All ranks may say so; the sum is zeros then.
  Result<void> ready_without(uint32_t tensor, uint64_t step);
  // Returns when the sum is there, or with the group's failure.
  Result<void> wait(uint32_t tensor, uint64_t step);
  Result<void> wait_all(uint64_t step);

  // Another plan from the next step on. All ranks call it between the same two steps, with no
  // gradient ready that was not waited for: every wait for the last step has returned on this rank.
  // Returns when all have taken it. If one cannot (the plan is invalid, does not fit the tensors,
  // or could not be read, which is why a result is taken; or a worker that it asks for cannot be
  // had), or if ranks have different plans or are at different steps, it is refused on all ranks in
  // the same words, and the plan before goes on.
  //
  // It is the exchange's plan, and the lanes'. What a program calls itself stays cut as the plan
  // says with which the group was joined, and a group that is rebuilt begins with that one.
  Result<void> change_plan(Result<plan::Plan> plan);
  plan::Plan plan() const;  // in force

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

  Rank rank() const;  // in this group
  uint32_t ranks() const;
  uint32_t hosts() const;                            // that they are on
  uint32_t epoch() const;                            // how often it was rebuilt; 0: the first group
  const std::vector<join::Member>& members() const;  // of the whole job

  // All ranks of the group call the same operations in the same order; results are the same bits
  // on every rank. Many may be in flight.
  Result<Work> start(const Call& call);
  Result<void> run(const Call& call);

  // The usual ones in short, in place.
  Result<void> all_reduce(std::span<float> data);
  Result<void> broadcast(std::span<float> data, Rank root);
  Result<void> barrier();
  Result<void> send(const void* data, uint64_t count, Type type, Rank to);
  Result<void> receive(void* data, uint64_t count, Type type, Rank from);

  // Some of this group's ranks as a group of their own, in the order given. The members call it
  // alike, in the same order; others need not. It may outlive this one.
  Result<std::unique_ptr<Group>> subgroup(std::span<const uint32_t> ranks);

  // Registers the tensors, whose elements are fp64, fp32, fp16 or bf16. All ranks call it once; a
  // rank whose tensors differ is named, with the first one that does.
  Result<std::unique_ptr<Exchange>> exchange(std::vector<Tensor> tensors);

  // Ends the group for everyone, with this reason. All waits end.
  void abort(const std::string& reason);
  // Why the group is unusable, if it is.
  std::optional<Error> failure() const;
  // The rank that the failure is blamed on, if one is.
  std::optional<Rank> culprit() const;
  // After a failure: the ranks that are left form a new group, in their old order, whichever are
  // lost. All survivors call it; once there are enough, others are waited for until `settle` has
  // passed. Enough are more than half of the old group, so that two groups can never form, or the
  // least number that the caller states. Fewer end with the reason. What belonged to the old group
  // is refused.
  Result<std::unique_ptr<Group>> rebuild(Nanos settle = Nanos::from_seconds(5), uint32_t least = 0);
  // Waits until all ranks want to leave, and closes. Call it when all work is done.
  Result<void> leave();
  // Operations in flight, lanes and their counts, who waits for whom: one JSON object. Any thread
  // may ask at any time. If a callback holds up the group for a second, the object says only who
  // this is, and "busy": true; without memory it is empty.
  std::string status();
  // Processor time that lane workers have used so far, and whether they are processes.
  Nanos workers_processor_time() const;
  bool has_auxiliary_processes() const;

  struct Impl;  // known to the module only

 private:
  Group(std::shared_ptr<Impl> impl, collective::Members members, uint32_t id);
  Result<std::unique_ptr<Exchange>> make_exchange(std::vector<Tensor> tensors);
  Result<void> compare_with_root(const std::vector<Tensor>& tensors);
  std::shared_ptr<Impl> impl_;
  collective::Members members_;  // null: all ranks of the job
  uint32_t id_ = 0;
  uint32_t rank_ = 0;
  uint32_t hosts_ = 1;
};

// Asks the job whose rank 0 is at `address` how it is doing: one JSON object with all ranks that
// answered.
Result<std::string> ask_status(const std::string& address, const std::string& secret,
                               Nanos deadline);

}  // namespace weft::runtime
