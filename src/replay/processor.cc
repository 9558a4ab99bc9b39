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
  threads_.push_back({static_cast<uint32_t>(seats_.size() - 1), most_credit_, 0, false, {}, 0});
  return static_cast<uint32_t>(threads_.size() - 1);
}

uint32_t Processor::add_instead_of(uint32_t thread) {
  threads_.push_back({threads_[thread].seat, most_credit_, 0, false, {}, 0});
  return static_cast<uint32_t>(threads_.size() - 1);
}

void Processor::submit(uint32_t thread, double ns, Then then, int64_t now) {
  advance(now);
  run(passed_);
  Thread& own = threads_[thread];
  const bool slept = !runs(own);
  const bool first = own.queue.empty();
  ns = std::max(0.0, std::trunc(ns));
  own.queue.push({ns, then});
  if (then.what != What::nothing) ++own.heard;
  if (slept) {
    enter(thread);
  } else if (first) {  // it was spinning
    for (Running& one : runnable_)
      if (one.thread == thread) one.left = ns;
  }
  settle();
}

void Processor::spin(uint32_t thread, bool spins, int64_t now) {
  advance(now);
  run(passed_);
  Thread& own = threads_[thread];
  const bool slept = !runs(own);
  own.spins = spins;
  if (slept && spins) enter(thread);
  settle();
}

void Processor::advance(int64_t now) {
  passed_ += static_cast<double>(now - looked_);
  looked_ = now;
  while (change_ <= passed_ + kDone) {
    run(std::min(change_, std::max(0.0, passed_)));
    settle();
  }
}

void Processor::enter(uint32_t thread) {
  Thread& own = threads_[thread];
  const double credit = std::min(most_credit_, own.credit + settled_at() - own.slept_since);
  runnable_.push_back({thread, own.queue.empty() ? kNoChange : own.queue.front().ns, credit, 0});
  take_seat(runnable_.back(), 1);
}

// `change`: one more, or (wrapped around) one less.
void Processor::take_seat(const Running& one, uint32_t change) {
  Seat& seat = seats_[threads_[one.thread].seat];
  uint32_t& own = one.is_first() ? seat.first : seat.other;
  uint32_t& all = one.is_first() ? taken_.first : taken_.other;
  all -= own > 0 ? 1 : 0;
  own += change;
  all += own > 0 ? 1 : 0;
}

void Processor::run(double ns) {
  passed_ -= ns;
  for (Running& one : runnable_) {
    const double done = ns * one.rate;
    one.left -= done;
    if (!one.is_first()) continue;
    if (one.credit - done > kDone) {
      one.credit -= done;
      continue;
    }
    take_seat(one, ~0u);
    one.credit = 0;
    take_seat(one, 1);
  }
}

void Processor::settle() {
  for (size_t i = 0; i < runnable_.size();) {
    Running& one = runnable_[i];
    Thread& own = threads_[one.thread];
    while (!own.queue.empty() && one.left <= kDone) {
      const Then then = own.queue.front().then;
      own.queue.pop();
      one.left = own.queue.empty() ? kNoChange : own.queue.front().ns;
      if (then.what == What::nothing) continue;
      --own.heard;
      happened_.push(then);
    }
    if (runs(own)) {
      ++i;
      continue;
    }
    take_seat(one, ~0u);
    own.credit = one.credit;
    own.slept_since = settled_at();
    runnable_.erase(runnable_.begin() + static_cast<ptrdiff_t>(i));
  }
  share();
}

void Processor::share() {
  const double first = taken_.first, other = taken_.other;
  crowded_ = first + other > cores_;
  const double of_first = first > cores_ ? cores_ / first : 1;
  const double left = std::max(0.0, cores_ - first);
  const double of_other = other > left ? left / other : 1;
  change_ = kNoChange;
  for (Running& one : runnable_) {
    one.rate = one.is_first() ? of_first : of_other;
    if (one.rate <= 0) continue;
    double ns = one.left;
    if (crowded_ && one.is_first()) ns = std::min(ns, one.credit);
    change_ = std::min(change_, ns / one.rate);
  }
}

std::optional<Then> Processor::finished() {
  if (happened_.empty()) return std::nullopt;
  const Then then = happened_.front();
  happened_.pop();
  return then;
}

double Processor::until_heard(Running& one) {
  Thread& own = threads_[one.thread];
  if (own.heard == 0) return kNoChange;
  double ns = one.left;
  for (size_t i = 0; own.queue[i].then.what == What::nothing; ++i) ns += own.queue[i + 1].ns;
  return ns;
}

int64_t Processor::next_at() {
  if (!happened_.empty()) return looked_;
  double ns = change_;
  if (!crowded_) {
    // With room for all, the end of one piece changes nothing for the others.
    ns = kNoChange;
    for (Running& one : runnable_) ns = std::min(ns, until_heard(one));
  }
  if (std::isinf(ns)) return kNever;
  ns = std::ceil(ns - passed_ - kDone);
  if (ns >= static_cast<double>(kNever - looked_)) return kNever;
  // What was over when it was looked at has happened, so time goes on.
  return looked_ + std::max(static_cast<int64_t>(ns), int64_t{1});
}

}  // namespace weft::replay
