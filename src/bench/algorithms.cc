// measure_algorithms(): every all-reduce at several sizes, and the constants that explain the
// times.
#include <algorithm>
#include <set>
#include <thread>

#include "machine.h"
#include "weft/bench.h"
#include "weft/runtime.h"

namespace weft::bench {
namespace {

using schedule::Algorithm;

constexpr double kRepeatSeconds = 0.05;
constexpr uint32_t kMostOperations = 500;  // in one repeat

class Trial {
 public:
  Trial(const membership::Membership& member, const AlgorithmsOptions& options)
      : member_(member), options_(options) {}

  Result<AlgorithmsResult> run() {
    const auto cpu_from = stolen_time();
    WEFT_TRY(join());
    result_.ranks = member_.size;
    result_.hosts = group_->hosts();
    const cost::Group group{member_.size, lanes_, result_.hosts};
    for (Algorithm algorithm : schedule::kAlgorithms) {
      // Without hosts that have several ranks it is the ring by another name.
      if (algorithm == Algorithm::hierarchical &&
          (result_.hosts < 2 || result_.hosts == member_.size || member_.size % result_.hosts != 0))
        continue;
      algorithms_.push_back(algorithm);
      result_.algorithms.emplace_back(schedule::name_of(algorithm));
    }
    std::vector<schedule::Timed> timed;
    for (uint64_t bytes = options_.from.count; bytes <= options_.to.count;
         bytes *= options_.factor) {
      WEFT_ASSIGN(AlgorithmsRow row, times_of(bytes));
      for (size_t i = 0; i < algorithms_.size(); ++i)
        timed.push_back({algorithms_[i], static_cast<double>(row.bytes), row.time_us[i] * 1e-6});
      result_.rows.push_back(std::move(row));
    }
    WEFT_ASSIGN(const cost::Costs costs, schedule::fit_all_reduces(timed, group));
    result_.costs = cost::to_json(costs);
    judge(costs, group);
    result_.cores = std::max(1u, std::thread::hardware_concurrency());
    result_.steal_percent = steal_percent(cpu_from, stolen_time());
    WEFT_TRY(group_->leave());
    return std::move(result_);
  }

 private:
  Result<void> join() {
    runtime::Options options;
    WEFT_ASSIGN(options.plan, plan::preset("default"));
    options.plan_was_named = false;
    lanes_ = options.plan.lanes;
    options.rank = {member_.rank};
    options.ranks = member_.size;
    options.rendezvous = member_.rendezvous;
    options.interface = member_.interface;
    options.secret = member_.secret;
    if (!member_.host.empty()) options.host = member_.host;
    options.probe = false;
    options.shared_memory = options_.shared_memory;
    WEFT_ASSIGN(group_, runtime::Group::join(options, *recorder_));
    return {};
  }

  // Seconds of one all-reduce, those of the slowest rank; the same answer on all ranks.
  Result<double> time_of(Algorithm algorithm, uint64_t bytes, uint32_t operations) {
    runtime::Call call;
    call.output = data_.data();
    call.count = bytes / sizeof(float);
    call.algorithm = algorithm;
    WEFT_TRY(group_->run(call));
    WEFT_TRY(group_->barrier());
    const Nanos begin = monotonic_clock().now();
    for (uint32_t i = 0; i < operations; ++i) WEFT_TRY(group_->run(call));
    double seconds = (monotonic_clock().now() - begin).seconds() / operations;
    runtime::Call most;
    most.output = &seconds;
    most.count = 1;
    most.type = runtime::Type::float64;
    most.op = runtime::Op::max;
    WEFT_TRY(group_->run(most));
    return seconds;
  }

  // All algorithms in turns, so that other load meets them alike.
  Result<AlgorithmsRow> times_of(uint64_t bytes) {
    data_.assign(bytes / sizeof(float), 1.0f);
    AlgorithmsRow row;
    row.bytes = data_.size() * sizeof(float);
    std::vector<uint32_t> operations;
    for (Algorithm algorithm : algorithms_) {
      WEFT_ASSIGN(double seconds, time_of(algorithm, bytes, 2));
      operations.push_back(static_cast<uint32_t>(
          std::clamp(kRepeatSeconds / std::max(seconds, 1e-9), 1.0, double{kMostOperations})));
    }
    std::vector<std::vector<double>> times(algorithms_.size());
    for (uint32_t repeat = 0; repeat < options_.repeats; ++repeat)
      for (size_t i = 0; i < algorithms_.size(); ++i) {
        const size_t at = (i + repeat) % algorithms_.size();
        WEFT_ASSIGN(double seconds, time_of(algorithms_[at], bytes, operations[at]));
        times[at].push_back(seconds * 1e6);
      }
    for (const auto& one : times) row.time_us.push_back(quantile(one, 0.5));
    return row;
  }

  void judge(const cost::Costs& costs, const cost::Group& group) {
    const schedule::Choice choice = schedule::choose_all_reduce(costs, group);
    for (AlgorithmsRow& row : result_.rows) {
      for (Algorithm algorithm : algorithms_)
        row.reckoned_us.push_back(1e6 * schedule::all_reduce_seconds(
                                            costs, algorithm, static_cast<double>(row.bytes), group)
                                            .value_or(0));
      const auto chosen = std::find(algorithms_.begin(), algorithms_.end(), choice.at(row.bytes));
      row.chosen = static_cast<uint32_t>(chosen - algorithms_.begin());
      row.loss_percent =
          100 *
          (row.time_us[row.chosen] / *std::min_element(row.time_us.begin(), row.time_us.end()) - 1);
    }
  }

  const membership::Membership& member_;
  const AlgorithmsOptions& options_;
  std::unique_ptr<capture::Recorder> recorder_ = capture::Recorder::off();
  std::unique_ptr<runtime::Group> group_;
  uint32_t lanes_ = 1;
  std::vector<Algorithm> algorithms_;
  std::vector<float> data_;
  AlgorithmsResult result_;
};

}  // namespace

Result<AlgorithmsResult> measure_algorithms(const membership::Membership& member,
                                            const AlgorithmsOptions& options) {
  if (options.from.count < 4 || options.to < options.from || options.to.count > (1ull << 30) ||
      options.factor < 2 || options.repeats < 1)
    return error(
        Code::invalid_argument,
        "%s to %s by a factor of %u, %u repeats; expected 4 bytes to 1 GiB, at least 2, at "
        "least 1",
        format_bytes(options.from).c_str(), format_bytes(options.to).c_str(), options.factor,
        options.repeats);
  if (member.size < 2)
    return error(Code::invalid_argument, "one rank has nobody to reduce with: start two or more");
  return Trial(member, options).run();
}

}  // namespace weft::bench
