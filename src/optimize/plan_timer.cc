#include "plan_timer.h"

namespace weft::optimize {
namespace {

// Enough that queues from one iteration reach into the next; more would tell nothing new.
constexpr uint32_t kIterations = 4;

}  // namespace

Result<replay::Prediction> PlanTimer::predict(const replay::Question& question) {
  Nanos start = monotonic_clock().now();
  auto answer = replayer_.predict(question);
  seconds_ += (monotonic_clock().now() - start).seconds();
  ++replays_;
  return answer;
}

std::optional<double> PlanTimer::time_of(const plan::Plan& plan) {
  std::string hash = plan::hash(plan);
  auto found = known_.find(hash);
  if (found != known_.end()) return found->second;
  replay::Question question;
  question.plan = plan;
  question.cluster = cluster_;
  question.iterations = kIterations;
  question.interval = false;
  auto answer = predict(question);
  std::optional<double> time;
  if (answer) {
    time = answer->iteration_ns;
  } else {
    if (refused_ == 0) first_refusal_ = answer.error().message();
    ++refused_;
  }
  known_.emplace(std::move(hash), time);
  return time;
}

std::vector<double> PlanTimer::waited_ns(const plan::Plan& plan) {
  std::vector<double> waited(replayer_.model().tensors.size(), 0);
  replay::Question question;
  question.plan = plan;
  question.cluster = cluster_;
  question.iterations = kIterations;
  question.interval = false;
  question.make_trace = true;
  auto answer = predict(question);
  if (!answer || !answer->trace) return waited;
  for (const trace::Process& process : answer->trace->processes)
    for (const trace::Event& event : process.events)
      if (event.kind == trace::Kind::wait && event.tensor < waited.size())
        waited[event.tensor] += static_cast<double>(event.duration_ns);
  return waited;
}

}  // namespace weft::optimize
