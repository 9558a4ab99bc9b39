#include "work.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "job.h"

namespace weft::torch_backend {

// ---- Outcome -----------------------------------------------------------------------------

Outcome::Outcome(std::vector<at::Tensor> results, std::vector<c10::Device> devices)
    : results_(std::move(results)),
      devices_(std::move(devices)),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), devices_)) {}

void Outcome::settle(std::exception_ptr failure, int source, std::vector<ArrivalPtr> arrivals) {
  std::function<void()> ended;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(settled_, true)) return;
    ended = std::move(on_end_);
  }
  if (ended) ended();
  {
    std::lock_guard lock(mutex_);
    failure_ = failure;
    source_ = source;
    arrivals_ = arrivals;
    completed_ = true;
  }
  changed_.notify_all();
  if (failure) {
    future_->setError(failure);
    return;
  }
  if (arrivals.empty()) {
    future_->markCompleted(c10::IValue(results_));
    return;
  }
  // The future's own events are recorded on the streams that are current: one of each device, on
  // which all results of that device are there.
  std::vector<c10::Stream> streams;
  for (const ArrivalPtr& arrival : arrivals) {
    auto known = std::find_if(streams.begin(), streams.end(), [&](const c10::Stream& stream) {
      return stream.device() == arrival->stream.device();
    });
    if (known == streams.end())
      streams.push_back(arrival->stream);
    else
      arrival->event.block(*known);
  }
  c10::MultiStreamGuard guard(streams);
  future_->markCompleted(c10::IValue(results_));
}

bool Outcome::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  if (timeout.count() <= 0)
    changed_.wait(lock, [&] { return completed_; });
  else if (!changed_.wait_for(lock, timeout, [&] { return completed_; }))
    return false;
  return true;
}

bool Outcome::completed() {
  std::lock_guard lock(mutex_);
  return completed_ && std::all_of(arrivals_.begin(), arrivals_.end(),
                                   [](const ArrivalPtr& one) { return one->event.query(); });
}

std::vector<ArrivalPtr> Outcome::arrivals() {
  std::lock_guard lock(mutex_);
  return arrivals_;
}

void Outcome::synchronize() {
  for (const ArrivalPtr& arrival : arrivals()) {
    c10::impl::VirtualGuardImpl guard(arrival->stream.device_type());
    arrival->event.block(guard.getStream(arrival->stream.device()));
  }
}

std::exception_ptr Outcome::failure() {
  std::lock_guard lock(mutex_);
  return failure_;
}

int Outcome::source() {
  std::lock_guard lock(mutex_);
  return source_;
}

// ---- Handle ------------------------------------------------------------------------------

Handle::Handle(int rank, c10d::OpType type, const char* title,
               const std::optional<std::vector<at::Tensor>>& inputs,
               std::shared_ptr<Outcome> outcome)
    : Work(rank, type, title, inputs), outcome_(std::move(outcome)) {
  // It belongs to the operation, which may end after its handle.
  if (recordFunctionEndCallback_) outcome_->on_end(std::move(recordFunctionEndCallback_));
  recordFunctionEndCallback_ = nullptr;
}

bool Handle::isSuccess() const { return outcome_->completed() && !outcome_->failure(); }

bool Handle::wait(std::chrono::milliseconds timeout) {
  if (!outcome_->wait(timeout))
    TORCH_CHECK_WITH(DistBackendError, false, "weft: Operation timed out! ",
                     c10d::opTypeToString(opType_), " was not done within ", timeout.count(),
                     " ms; it goes on");
  if (std::exception_ptr failure = outcome_->failure()) std::rethrow_exception(failure);
  outcome_->synchronize();
  return true;
}

void Handle::abort() {
  TORCH_CHECK(false, "weft cannot abort one operation: abort the process group");
}

// ---- Completer ---------------------------------------------------------------------------

namespace {

// Never destroyed: who stops last may do so while the process ends.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Completer>> all;
};
Registry& registry() {
  static auto* one = new Registry;
  return *one;
}

}  // namespace

std::shared_ptr<Completer> Completer::start() {
  std::shared_ptr<Completer> self(new Completer);
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  self->thread_ = std::thread([self] { self->loop(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  self->process_ = ::getpid();
  std::lock_guard lock(registry().mutex);
  std::erase_if(registry().all, [](const auto& one) { return one.expired(); });
  registry().all.push_back(self);
  return self;
}

void Completer::done(const std::shared_ptr<Flight>& flight, Result<void> result) {
  if (!result) {
    std::lock_guard lock(flight->mutex);
    if (!flight->error) flight->error = std::move(result).error();
  }
  if (flight->pending.fetch_sub(1) > 1) return;
  // After stop() everyone has been told already, and what it holds goes here.
  post([flight] { end(*flight, nullptr); });
}

void Completer::fail(const std::shared_ptr<Flight>& flight, std::exception_ptr failure) {
  post([flight, failure = std::move(failure)] { end(*flight, failure); });
}

bool Completer::post(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return false;
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
  return true;
}

void Completer::stop() {
  if (process_ != ::getpid()) return;  // the thread is the parent's
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  std::lock_guard joins(joining_);
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id())
    thread_.detach();
  else
    thread_.join();
}

void Completer::stop_all() {
  std::vector<std::shared_ptr<Completer>> live;
  {
    std::lock_guard lock(registry().mutex);
    for (const auto& one : registry().all)
      if (auto completer = one.lock()) live.push_back(std::move(completer));
  }
  for (const auto& completer : live) completer->stop();
}

void Completer::loop() {
  pthread_setname_np(pthread_self(), "weft-complete");
  at::AutoDispatchBelowADInplaceOrView plain;  // copies into leaves are no operations of training
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

void Completer::end(Flight& flight, std::exception_ptr failure) {
  int source = -1;
  std::vector<ArrivalPtr> arrivals;
  try {
    if (!failure) {
      std::lock_guard lock(flight.mutex);
      if (flight.error) failure = exception_of(*flight.error);
    }
    if (flight.work)
      if (auto from = flight.work->source()) source = static_cast<int>(from->index);
    if (!failure && flight.passage) {
      if (ArrivalPtr arrival = flight.passage->come_back(flight.finish))
        arrivals.push_back(std::move(arrival));
    } else if (!failure && flight.finish) {
      flight.finish();
    }
  } catch (...) {
    failure = std::current_exception();
  }
  std::shared_ptr<Outcome> outcome = std::move(flight.outcome);
  flight.finish = nullptr;
  flight.passage.reset();
  flight.work.reset();
  flight.held.clear();
  outcome->settle(std::move(failure), source, std::move(arrivals));
}

std::string Flight::device_name() const {
  return passage ? passage->road().device.str() : std::string("the processor");
}

}  // namespace weft::torch_backend
