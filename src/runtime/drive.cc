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
  return failure;
}

void Group::Impl::once() {
  std::unique_lock sits(seat, std::try_to_lock);
  if (sits) turn(Nanos{0});
}

// The progress thread would sit down again before anyone else could, unless it sees that someone
// wants to.
std::unique_lock<std::mutex> Group::Impl::take_seat() {
  callers.fetch_add(1);
  if (options.progress_thread) mesh.reactor->wake();
  std::unique_lock sits(seat);
  callers.fetch_sub(1);
  return sits;
}

// Takes the seat if it is free, and turns; otherwise waits for the one who sits there.
void Group::Impl::drive_until(const std::function<bool()>& done) {
  auto over = [&] { return done() || has_failed.load(std::memory_order_acquire); };
  if (over()) return;
  callers.fetch_add(1);
  if (options.progress_thread && !parked.load()) mesh.reactor->wake();
  bool more = true;  // in flight, for all that is known to one who never sat
  while (!over()) {
    std::unique_lock sits(seat, std::defer_lock);
    // The progress thread leaves at once; another caller may stay for long.
    if (callers.load() == 1)
      sits.lock();
    else if (!sits.try_lock()) {
      std::unique_lock lock(mutex);
      changed.wait_for(lock, std::chrono::milliseconds(1), over);
      continue;
    }
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
    std::lock_guard sits(seat);
    turn(kTurn);
    std::lock_guard lock(mutex);
    if (stopping && commands.empty()) return;
  }
}

Result<std::shared_ptr<Work::State>> Group::Impl::launch(collective::Operation operation) {
  auto state = std::make_shared<Work::State>();
  state->group = this;
  auto begin = [this, &state](collective::Operation& what) {
    bool pair = what.shape.collective == Collective::point_to_point;
    if (pair) {
      uint32_t peer = what.members ? (*what.members)[what.shape.root] : what.shape.root;
      what.number = next_pair[(uint64_t{what.shape.sends} << 32) | peer]++;
    } else {
      uint32_t first = what.group == 0 ? kDirectOperations : 0;
      what.number = next_number.try_emplace(what.group, first).first->second++;
    }
    works[collective::key_of(what)] = state;
  };
  // With the seat free it starts here and now; else whoever drives will start it.
  std::unique_lock sits(seat, std::try_to_lock);
  {
    std::lock_guard lock(mutex);
    if (failure) return *failure;
    begin(operation);
    // Commands that were posted before come first, or numbers would not be the order of starts.
    if (sits.owns_lock() && !commands.empty()) sits.unlock();
    if (!sits.owns_lock()) {
      auto shared = std::make_shared<collective::Operation>(std::move(operation));
      commands.push_back([this, shared] { engine->start(std::move(*shared)); });
      has_commands.store(true, std::memory_order_release);
      mesh.reactor->wake();
      return state;
    }
  }
  engine->start(std::move(operation));
  for (collective::Key key : engine->poll(now())) finished(key);
  return state;
}

// ---- handles -----------------------------------------------------------------------------

Result<void> Work::wait() {
  if (!state_) return {};
  Group::Impl& group = *state_->group;
  group.drive_until([&] { return state_->done.load(std::memory_order_acquire); });
  if (state_->done.load(std::memory_order_acquire)) return {};
  return *group.current_failure();
}

bool Work::test() {
  if (!state_ || state_->done.load(std::memory_order_acquire)) return true;
  state_->group->once();
  return state_->done.load(std::memory_order_acquire) || state_->group->has_failed.load();
}

void Work::then(std::function<void(Result<void>)> done) {
  if (!state_) return done({});
  std::optional<Error> failure;
  {
    std::lock_guard lock(state_->group->mutex);
    if (!state_->done.load()) {
      failure = state_->group->failure;
      if (!failure) {
        state_->callbacks.push_back(std::move(done));
        return;
      }
    }
  }
  if (failure) return done(*failure);
  done({});
}

}  // namespace weft::runtime
