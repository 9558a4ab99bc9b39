#include "processor.h"

#include <algorithm>
#include <cmath>

namespace weft::replay {
namespace {

// Less is what adding up shares of nanoseconds loses.
constexpr double kDone = 1e-3;

}  // namespace

uint32_t Processor::add_thread() {
  seats_.emplace_back();
  return add_instead_of(kNone);
}

uint32_t Processor::add_instead_of(uint32_t thread) {
  auto seat = static_cast<uint32_t>(seats_.size() - 1);
  if (thread != kNone) seat = threads_[thread].seat;
  Thread& added = threads_.emplace_back();
  added.seat = seat;
  added.credit = most_credit_;
  return static_cast<uint32_t>(threads_.size() - 1);
}

void Processor::submit(uint32_t thread, double ns, Then then, int64_t now) {
  advance(now);
  Thread& own = threads_[thread];
  const bool slept = !runs(own);
  own.queue.push({std::max(0.0, std::trunc(ns)), then});
  if (then.what != What::nothing) ++own.heard;
  if (slept) enter(thread);
  clear_done();
}

void Processor::spin(uint32_t thread, bool spins, int64_t now) {
  advance(now);
  Thread& own = threads_[thread];
  const bool slept = !runs(own);
  own.spins = spins;
  if (slept && spins) enter(thread);
  clear_done();
}

void Processor::advance(int64_t now) {
  const auto end = static_cast<double>(now);
  while (now_ < end) {
    const double change = until_change();
    const double ns = std::min(change, end - now_);
    run(ns);
    now_ = ns < change ? end : now_ + ns;
    clear_done();
  }
}

void Processor::enter(uint32_t thread) {
  Thread& own = threads_[thread];
  own.credit = std::min(most_credit_, own.credit + now_ - own.slept_since);
  take_seat(own);
  runnable_.push_back(thread);
  share();
}

void Processor::leave(uint32_t thread) {
  Thread& own = threads_[thread];
  leave_seat(own);
  own.slept_since = now_;
}

void Processor::take_seat(const Thread& thread) {
  Seat& seat = seats_[thread.seat];
  if ((is_first(thread) ? seat.first : seat.other)++ == 0)
    ++(is_first(thread) ? taken_.first : taken_.other);
}

void Processor::leave_seat(const Thread& thread) {
  Seat& seat = seats_[thread.seat];
  if (--(is_first(thread) ? seat.first : seat.other) == 0)
    --(is_first(thread) ? taken_.first : taken_.other);
}

void Processor::share() {
  const double first = taken_.first, other = taken_.other;
  crowded_ = first + other > cores_;
  const double of_first = first > cores_ ? cores_ / first : 1;
  const double left = std::max(0.0, cores_ - first);
  const double of_other = other > left ? left / other : 1;
  for (uint32_t thread : runnable_)
    threads_[thread].rate = is_first(threads_[thread]) ? of_first : of_other;
}

double Processor::until_change() {
  double change = std::numeric_limits<double>::infinity();
  for (uint32_t thread : runnable_) {
    Thread& own = threads_[thread];
    if (own.rate <= 0) continue;
    double left =
        own.queue.empty() ? std::numeric_limits<double>::infinity() : own.queue.front().left;
    if (crowded_ && is_first(own)) left = std::min(left, own.credit);
    change = std::min(change, left / own.rate);
  }
  return change;
}

void Processor::run(double ns) {
  bool used_up = false;
  for (uint32_t thread : runnable_) {
    Thread& own = threads_[thread];
    const double done = ns * own.rate;
    if (!own.queue.empty()) own.queue.front().left -= done;
    if (!is_first(own)) continue;
    if (own.credit - done > kDone) {
      own.credit -= done;
      continue;
    }
    leave_seat(own);
    own.credit = 0;
    take_seat(own);
    used_up = true;
  }
  if (used_up) share();
}

void Processor::clear_done() {
  bool left = false;
  for (size_t i = 0; i < runnable_.size();) {
    Thread& own = threads_[runnable_[i]];
    while (!own.queue.empty() && own.queue.front().left <= kDone) {
      const Then then = own.queue.front().then;
      own.queue.pop();
      if (then.what == What::nothing) continue;
      --own.heard;
      happened_.push(then);
    }
    if (runs(own)) {
      ++i;
      continue;
    }
    leave(runnable_[i]);
    runnable_.erase(runnable_.begin() + static_cast<ptrdiff_t>(i));
    left = true;
  }
  if (left) share();
}

std::optional<Then> Processor::finished() {
  if (happened_.empty()) return std::nullopt;
  const Then then = happened_.front();
  happened_.pop();
  return then;
}

int64_t Processor::next_at() {
  if (!happened_.empty()) return static_cast<int64_t>(now_);
  double change = std::numeric_limits<double>::infinity();
  if (crowded_) {
    change = until_change();
  } else {
    // With room for all, the end of one piece changes nothing for the others.
    for (uint32_t thread : runnable_) {
      Thread& own = threads_[thread];
      if (own.heard == 0) continue;
      double until_heard = 0;
      for (size_t i = 0;; ++i) {
        until_heard += own.queue[i].left;
        if (own.queue[i].then.what != What::nothing) break;
      }
      change = std::min(change, until_heard);
    }
  }
  if (std::isinf(change)) return kNever;
  return static_cast<int64_t>(std::ceil(now_ + change - kDone));
}

}  // namespace weft::replay
