// job: the membership that the process groups of a process share.
//
// The first process group of some ranks meets through torch's own store: rank 0 puts there where it
// listens, and a random secret. Groups of some of these ranks are sub-groups of it, over the same
// lanes. So a process has one job, unless its groups have no ranks in common with the first.
//
//   init_process_group ──store──► Job ──subgroup──► Part of new_group, of split_group, ...
//
// A Job owns all that is of weft: whoever closes it may be sure that no thread of it is left.
//
// Threads: any. Nothing here needs Python's lock, and what waits must be called without it.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "sums.h"
#include "weft/api.h"

namespace weft::torch_backend {

// An error of weft as the exception that torch has for such a thing.
std::exception_ptr exception_of(const Error& error);
[[noreturn]] void raise(const Error& error);

class Job {
 public:
  // Ranks are numbered as the store's users number them; `global` is what torch calls them.
  static std::shared_ptr<Job> meet(c10d::Store& store, uint32_t rank, std::vector<int64_t> global,
                                   std::chrono::milliseconds timeout);
  // One of this process that has all these ranks and was not closed.
  static std::shared_ptr<Job> with(const std::vector<int64_t>& global);
  ~Job();

  // A sub-group of these ranks; the members call it alike. 0 stands for all.
  uint64_t part(const std::vector<int64_t>& global);
  void drop(uint64_t part);
  // Calls `use` with the group; raises if the job was closed.
  void use(uint64_t part, const std::function<void(Group&)>& use);

  // The exchange of these gradients: made, or the one that was made of them before. All ranks call
  // it alike; raises.
  void exchange(const Gradients& gradients, const std::vector<at::Tensor>& parameters);
  // Calls `use` with it, also when the job was closed.
  void use_sums(const std::function<void(Sums&)>& use);
  bool has_exactly(const std::vector<int64_t>& global) const { return global_ == global; }
  plan::Plan plan();  // in force

  // Why nothing can be done any more, if so.
  std::optional<Error> failure();
  // The rank that is to blame, as torch calls it.
  std::optional<int64_t> culprit();
  std::string status();

  // What the program says of its own work; null when nothing is recorded, or the job was closed.
  std::shared_ptr<mark::Marks> marks();
  // Called by whoever closes the job, while its trace is still written.
  void before_closing(std::function<void()> act);

  void abort(const std::string& reason);
  // Leaves when all do, or ends after `patience` with an abort; then nothing of weft is left.
  void close(std::chrono::milliseconds patience);
  static void close_all(std::chrono::milliseconds patience);

  // Whether this is the process that joined, and not a forked child, which must leave it alone.
  bool in_same_process() const;

 private:
  Job() = default;

  std::vector<int64_t> global_;
  std::shared_mutex gate_;  // held shared by who uses what follows
  std::unique_ptr<api::Job> job_;
  std::map<uint64_t, std::unique_ptr<Group>> parts_;
  std::vector<std::function<void()>> before_closing_;
  std::unique_ptr<Sums> sums_;
  std::mutex making_sums_;
  plan::Plan plan_;
  std::optional<Error> ended_;
  uint64_t next_part_ = 1;
  pid_t process_ = 0;
};

}  // namespace weft::torch_backend
