// measure_lanes(): the same all-reduce under plans that differ in the count of lanes only.
#include <algorithm>
#include <cmath>
#include <thread>

#include "machine.h"
#include "weft/bench.h"
#include "weft/runtime.h"

namespace weft::bench {
namespace {

constexpr uint64_t kTrialBytes = 4 << 20;
constexpr double kOperationSeconds = 0.5;  // at most, where the network is slow
constexpr uint32_t kOperations = 3;        // in one repeat
constexpr double kSame = 0.97;             // of the best rate: not worth more lanes, nor a loss

class Sweep {
 public:
  Sweep(const membership::Membership& member, const LanesOptions& options)
      : member_(member), options_(options) {}

  Result<LanesResult> run() {
    const auto cpu_from = stolen_time();
    LanesResult result;
    result.ranks = member_.size;
    WEFT_ASSIGN(meeting_, join(member_.rendezvous, 1));
    for (uint32_t lanes = 1; lanes <= options_.max; lanes *= 2) {
      WEFT_ASSIGN(std::string rendezvous, another_rendezvous());
      WEFT_ASSIGN(auto group, join(rendezvous, lanes));
      groups_.push_back(std::move(group));
      result.rows.push_back({lanes, {}, {}, {}, {}, {}});
    }
    WEFT_ASSIGN(result.bytes, affordable());
    std::vector<std::vector<double>> times(groups_.size());
    for (uint32_t repeat = 0; repeat < options_.repeats; ++repeat)
      for (size_t i = 0; i < groups_.size(); ++i) {
        const size_t at = (i + repeat) % groups_.size();
        WEFT_ASSIGN(double seconds, time_of(*groups_[at], result.bytes, kOperations));
        times[at].push_back(seconds * 1e6);
      }
    for (size_t i = 0; i < times.size(); ++i) {
      LanesRow& row = result.rows[i];
      row.time_us = quantile(times[i], 0.5);
      row.time_us_low = quantile(times[i], 0.25);
      row.time_us_high = quantile(times[i], 0.75);
      row.algbw = static_cast<double>(result.bytes) / row.time_us * 1e-3;
      row.busbw = row.algbw * bus_factor("allreduce", member_.size);
    }
    judge(result);
    result.cores = std::max(1u, std::thread::hardware_concurrency());
    result.steal_percent = steal_percent(cpu_from, stolen_time());
    for (auto& group : groups_) WEFT_TRY(group->leave());
    WEFT_TRY(meeting_->leave());
    return result;
  }

 private:
  using Group = runtime::Group;

  Result<std::unique_ptr<Group>> join(const std::string& rendezvous, uint32_t lanes) {
    runtime::Options options;
    WEFT_ASSIGN(options.plan, plan::preset("default"));
    options.plan_was_named = false;
    options.plan.lanes = lanes;
    options.rank = {member_.rank};
    options.ranks = member_.size;
    options.rendezvous = rendezvous;
    options.interface = member_.interface;
    options.secret = member_.secret;
    if (!member_.host.empty()) options.host = member_.host;
    options.probe = false;
    options.shared_memory = false;  // lanes are what goes between hosts
    return Group::join(options, *recorder_);
  }

  // The same number on all ranks: the largest that any has.
  static Result<double> largest(Group& group, double number) {
    runtime::Call call;
    call.output = &number;
    call.count = 1;
    call.type = runtime::Type::float64;
    call.op = runtime::Op::max;
    WEFT_TRY(group.run(call));
    return number;
  }

  // Where one more group of the same ranks can meet: beside the first one.
  Result<std::string> another_rendezvous() {
    if (member_.rendezvous.rfind("file:", 0) == 0)
      return text("%s.%zu", member_.rendezvous.c_str(), groups_.size());
    double port = 0;
    if (member_.rank == 0) {
      WEFT_ASSIGN(port, free_port());
    }
    WEFT_ASSIGN(port, largest(*meeting_, port));
    const std::string address = member_.rendezvous.substr(0, member_.rendezvous.rfind(':'));
    return text("%s:%.0f", address.c_str(), port);
  }

  // Seconds of one all-reduce, those of the slowest rank; the same answer on all ranks.
  Result<double> time_of(Group& group, uint64_t bytes, uint32_t operations) {
    data_.resize(bytes / sizeof(float));
    WEFT_TRY(group.all_reduce(data_));
    WEFT_TRY(group.barrier());
    const Nanos begin = monotonic_clock().now();
    for (uint32_t i = 0; i < operations; ++i) WEFT_TRY(group.all_reduce(data_));
    return largest(group, (monotonic_clock().now() - begin).seconds() / operations);
  }

  // As much as was asked, or what one lane moves in the time that an operation may take.
  Result<uint64_t> affordable() {
    const uint64_t trial = std::min<uint64_t>(kTrialBytes, options_.bytes.count);
    WEFT_ASSIGN(double seconds, time_of(*groups_.front(), trial, 1));
    const double share =
        std::min(1.0, kOperationSeconds / std::max(seconds, 1e-9) * static_cast<double>(trial) /
                          static_cast<double>(options_.bytes.count));
    const auto bytes = static_cast<uint64_t>(share * static_cast<double>(options_.bytes.count));
    return std::max<uint64_t>(bytes / 4096 * 4096, 4096);
  }

  // The fewest lanes that are as fast as the fastest, and from where on more lose.
  static void judge(LanesResult& result) {
    double most = 0;
    for (const LanesRow& row : result.rows) most = std::max(most, row.algbw);
    for (const LanesRow& row : result.rows) {
      if (result.best == 0 && row.algbw >= kSame * most) result.best = row.lanes;
      if (result.best == 0 || row.lanes <= result.best) continue;
      if (row.algbw >= kSame * most) {
        result.losing_from.reset();  // more lanes made up for it
      } else if (!result.losing_from) {
        result.losing_from = row.lanes;
        result.loss_percent = 100 * (1 - row.algbw / most);
      }
    }
    if (!result.losing_from) result.loss_percent = 0;
  }

  const membership::Membership& member_;
  const LanesOptions& options_;
  std::unique_ptr<capture::Recorder> recorder_ = capture::Recorder::off();
  std::unique_ptr<Group> meeting_;
  std::vector<std::unique_ptr<Group>> groups_;  // one for each count
  std::vector<float> data_;
};

}  // namespace

Result<LanesResult> measure_lanes(const membership::Membership& member,
                                  const LanesOptions& options) {
  if (options.max < 1 || options.max > 64 || options.repeats < 1 || options.bytes.count < 4096 ||
      options.bytes.count > (1ull << 32))
    return error(Code::invalid_argument,
                 "up to %u lanes, %u repeats of %s; expected 1 to 64, at least 1, 4 KiB to 4 GiB",
                 options.max, options.repeats, format_bytes(options.bytes).c_str());
  return Sweep(member, options).run();
}

}  // namespace weft::bench
