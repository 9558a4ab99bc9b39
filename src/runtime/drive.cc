// Callers: how an operation is started, and who moves it along while they wait.
#include <sched.h>

#include "group.h"

namespace weft::runtime {
namespace {

constexpr Nanos kTurn = Nanos::from_millis(20);
// After a caller drove, the next one usually comes soon; the progress thread would only be in the
// way until then.
constexpr Nanos kStayAway = Nanos::from_millis(2);

}  // namespace

void Group::Impl::post(std::function<void()> command) {
  {
    std::lock_guard lock(mutex);
    commands.push_back(std::move(command));
    has_commands.store(true, std::memory_order_release);
  }
  want_progress_thread();
  mesh.reactor->wake();
}

void Group::Impl::want_progress_thread() {
  last_call.store(0);
  if (parked.load()) unpark.notify_one();
}

std::optional<Error> Group::Impl::current_failure() {
  std::lock_guard lock(mutex);
  if (!failure) return std::nullopt;
  return copy_of(*failure);
}

Error Group::Impl::copy_of(const Error& error) noexcept {
  try {
    return error;
  } catch (const std::bad_alloc&) {
    return {error.code(), kNoMemory};
  }
}

// Whoever drives ends the group. A callback cannot wait for that, because it is what is waited for.
Error Group::Impl::end_without_memory() noexcept {
  ran_out.store(true);
  mesh.reactor->wake();
  if (driven_by_this_thread()) return copy_of(no_memory);
  drive_until([] { return false; });
  return *current_failure();
}

Group::Impl::Seat::Seat(Impl& impl, std::unique_lock<std::mutex> lock)
    : impl_(&impl), lock_(std::move(lock)) {
  impl.driver.store(std::this_thread::get_id());
}

void Group::Impl::Seat::leave() {
  if (impl_ == nullptr) return;
  impl_->driver.store({});
  lock_.unlock();
  impl_ = nullptr;
}

Group::Impl::Seat Group::Impl::try_seat() {
  // A thread that sits already, in a callback, is not asked twice.
  if (driven_by_this_thread()) return {};
  std::unique_lock sits(seat, std::try_to_lock);
  return sits ? Seat(*this, std::move(sits)) : Seat();
}

void Group::Impl::once() {
  if (Seat sits = try_seat()) turn(Nanos{0});
}

// The progress thread would sit down again before anyone else could, unless it sees that someone
// wants to.
Group::Impl::Seat Group::Impl::take_seat() {
  callers.fetch_add(1);
  if (options.progress_thread) mesh.reactor->wake();
  std::unique_lock sits(seat);
  callers.fetch_sub(1);
  return {*this, std::move(sits)};
}

Result<void> Group::Impl::same_process() const {
  if (in_same_process()) return {};
  return error(Code::cancelled,
               "this process was forked: the group belongs to its parent; join in the child if it "
               "is to be a rank of its own");
}

Result<void> Group::Impl::may_wait() const {
  WEFT_TRY(same_process());
  if (driven_by_this_thread())
    return error(Code::invalid_argument,
                 "a callback may start operations, and may not wait for any: it would wait for "
                 "itself");
  return {};
}

// Takes the seat if it is free, and turns; otherwise waits for the one who sits there.
void Group::Impl::drive_until(const std::function<bool()>& done) {
  auto over = [&] { return done() || has_failed.load(std::memory_order_acquire); };
  if (over()) return;
  callers.fetch_add(1);
  if (options.progress_thread && !parked.load()) mesh.reactor->wake();
  bool more = true;  // in flight, for all that is known to one who never sat
  while (!over()) {
    std::unique_lock free(seat, std::defer_lock);
    // The progress thread leaves at once; another caller may stay for long.
    if (callers.load() == 1)
      free.lock();
    else if (!free.try_lock()) {
      std::unique_lock lock(mutex);
      changed.wait_for(lock, std::chrono::milliseconds(1), over);
      continue;
    }
    Seat sits(*this, std::move(free));
    Nanos sleep_from = now() + options.spin;
    for (bool first = true; !over(); first = false) {
      bool looks = now() < sleep_from && options.spin.count > 0;
      // An event may be what this thread waits for: look before sleeping.
      bool moved = turn(looks || first ? Nanos{0} : kTurn);
      // While things move, the next one is near: to sleep for it costs more than to look.
      if (moved) sleep_from = now() + options.spin;
      if (!looks) continue;
      // Nothing came: whoever has work goes first, perhaps it is what this thread waits for.
      if (!moved && !over()) ::sched_yield();
    }
    more = !engine->idle();  // the engine is only for the one who sits
  }
  last_call.store(now().count);
  if (callers.fetch_sub(1) > 1) {
    std::lock_guard lock(mutex);
    changed.notify_all();
  } else if (parked.load() && more) {
    want_progress_thread();  // others are in flight: somebody has to go on
  }
}

void Group::Impl::loop() {
  for (;;) {
    {
      std::unique_lock lock(mutex);
      auto wanted = [&] {
        return stopping || (callers.load() == 0 && now() - Nanos{last_call.load()} > kStayAway);
      };
      if (!wanted()) {
        parked.store(true);
        while (!wanted())
          unpark.wait_for(lock,
                          std::chrono::nanoseconds((callers.load() > 0 ? kTurn : kStayAway).count));
        parked.store(false);
      }
    }
    {
      Seat sits(*this, std::unique_lock(seat));
      turn(kTurn);
    }
    std::lock_guard lock(mutex);
    if (stopping && commands.empty()) return;
  }
}

void Group::Impl::number(collective::Operation& operation) {
  if (operation.shape.collective != Collective::point_to_point) {
    operation.number = next_number[operation.group]++;
    return;
  }
  // The high half is the tag.
  operation.number &= uint64_t{0xffffffff} << 32;
  operation.number |= next_message[collective::key_of(operation)]++;
}

Result<std::shared_ptr<Work::State>> Group::Impl::launch(collective::Operation operation) {
  if (operation.deadline.count == 0) operation.deadline = options.progress_deadline;
  auto state = std::make_shared<Work::State>();
  state->group = this;
  state->source = operation.shape.root;
  auto begin = [this, &state](collective::Operation& what) {
    number(what);
    state->operation = collective::trace_number(collective::key_of(what));
    works[collective::key_of(what)] = state;
  };
  // With the seat free it starts here and now; else whoever drives will start it.
  Seat sits = try_seat();
  {
    std::lock_guard lock(mutex);
    if (failure) return *failure;
    if (sits && failed) sits.leave();  // the reason is being decided on
    // Commands that were posted before come first, or numbers would not be the order of starts.
    if (sits && !commands.empty()) sits.leave();
    if (!sits) {
      auto shared = std::make_shared<collective::Operation>();
      commands.reserve(commands.size() + 1);
      begin(operation);
      *shared = std::move(operation);
      commands.push_back([this, shared] { start(std::move(*shared)); });
      has_commands.store(true, std::memory_order_release);
      mesh.reactor->wake();
      return state;
    }
    begin(operation);
  }
  start(std::move(operation));
  if (!failed)
    for (const collective::Key& key : engine->poll(now())) finished(key);
  return state;
}

void Group::Impl::record_wait(Nanos begin, uint32_t operation) {
  trace::Event event;
  event.start_ns = begin.count;
  event.duration_ns = std::max<int64_t>(0, (recorder.now() - begin).count);
  event.kind = trace::Kind::wait;
  event.track = recorder.thread_track();
  event.operation = operation;
  recorder.record(event);
}

void Group::Impl::start(collective::Operation operation) {
  auto started = engine->start(std::move(operation));
  if (started) return;
  Code code = started.error().code();
  fail(error(code, "%s: %s", describe(mesh.rank).c_str(), started.error().message().c_str()),
       mesh.rank);
}

// ---- handles -----------------------------------------------------------------------------

Result<void> Work::wait() {
  if (!state_ || state_->done.load(std::memory_order_acquire)) return {};
  Group::Impl& group = *state_->group;
  return group.alone([&]() -> Result<void> {
    WEFT_TRY(group.may_wait());
    const Nanos begin = group.recorder.on() ? group.recorder.now() : Nanos{0};
    group.drive_until([&] { return state_->done.load(std::memory_order_acquire); });
    if (group.recorder.on()) group.record_wait(begin, state_->operation);
    if (state_->done.load(std::memory_order_acquire)) return {};
    return *group.current_failure();
  });
}

bool Work::test() {
  if (!state_ || state_->done.load(std::memory_order_acquire)) return true;
  if (!state_->group->in_same_process()) return true;
  state_->group->once();
  return state_->done.load(std::memory_order_acquire) || state_->group->has_failed.load();
}

void Work::then(std::function<void(Result<void>)> done) {
  if (!state_) return done({});
  Group::Impl& group = *state_->group;
  // An operation that nobody would be told of cannot go on.
  auto kept = group.together([&]() -> Result<bool> {
    std::lock_guard lock(group.mutex);
    if (state_->done.load()) return false;
    if (group.failure) return Group::Impl::copy_of(*group.failure);
    state_->callbacks.push_back(std::move(done));
    return true;
  });
  if (!kept) return done(std::move(kept).error());
  if (!*kept) done({});
}

}  // namespace weft::runtime
