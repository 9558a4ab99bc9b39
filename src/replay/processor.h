// The cores of a machine and the threads that share them, as a fair scheduler lets them.
//
// A thread does one piece of work after another. Of n that can run at a time each gets min(1,
// cores / n) of a core. One that slept before it woke is served before those that never do, until
// it has used up what it slept, `most_credit_ns` at most: then it shares like them.
//
//   submit(thread, ns, then, now) ──► queue of the thread ──► finished(): what is to happen, in
//   order; next_at() says when to advance() again at the latest. Between events nothing but what
//   was submitted ends, so pieces of which nobody wants to hear cost no event while there is room.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "event.h"
#include "weft/schedule.h"

namespace weft::replay {

class Processor {
 public:
  // REQUIRES: cores >= 1.
  Processor(uint32_t cores, double most_credit_ns) : cores_(cores), most_credit_(most_credit_ns) {}

  uint32_t add_thread();
  // One of several of which each stands for another host: together they count as one thread that
  // runs when any of them does. They do not slow each other.
  uint32_t add_instead_of(uint32_t thread);

  // Nothing to do, and nothing queued; perhaps it spins.
  bool idle(uint32_t thread) const { return threads_[thread].queue.empty(); }
  // `ns` of a core's time after all that the thread was given before; then `then` happens, if it is
  // anything. REQUIRES: now does not go back.
  void submit(uint32_t thread, double ns, Then then, int64_t now);
  // A thread that looks again and again, beside its work, for something to do: it takes a core, and
  // nothing of it is ever done. REQUIRES: as submit().
  void spin(uint32_t thread, bool spins, int64_t now);
  // Lets the threads run until `now`.
  void advance(int64_t now);
  // What has happened by the last advance(), oldest first; nothing: no more.
  std::optional<Then> finished();
  // When something happens next, if nothing is submitted before; kNever: nothing will.
  int64_t next_at();

 private:
  struct Piece {
    double ns;
    Then then;
  };
  struct Thread {
    uint32_t seat = 0;       // those on one seat count as one
    double credit = 0;       // ns of a core that it may have before others, when it slept
    double slept_since = 0;  // then
    bool spins = false;
    schedule::Fifo<Piece> queue;
    uint32_t heard = 0;  // pieces in it after which something happens
  };
  // A thread that can run, as it was at settled_at().
  struct Running {
    uint32_t thread;
    double left;  // of its first piece; infinite: it spins
    double credit;
    double rate;  // of a core
    bool is_first() const { return credit > 0; }
  };
  // How many threads of a seat can run, with credit and without.
  struct Seat {
    uint32_t first = 0, other = 0;
  };

  static bool runs(const Thread& thread) { return thread.spins || !thread.queue.empty(); }
  void enter(uint32_t thread);
  void take_seat(const Running& one, uint32_t change);
  // Lets all run for as long as nothing changes.
  void run(double ns);
  // Takes what is done off the queues, and shares the cores among who can still run.
  void settle();
  void share();
  double until_heard(Running& one);
  double settled_at() const { return static_cast<double>(looked_) - passed_; }

  double cores_;
  double most_credit_;
  std::vector<Thread> threads_;
  std::vector<Seat> seats_;
  Seat taken_;                     // seats on which there are any
  std::vector<Running> runnable_;  // in the order in which they woke
  bool crowded_ = false;           // not all of these have a core
  schedule::Fifo<Then> happened_;
  int64_t looked_ = 0;  // the last advance()
  // What has passed by then since anything changed. A difference, because where a double holds a
  // time of years it has no room for shares of a nanosecond.
  double passed_ = 0;
  double change_ = kNoChange;  // from that change until a piece ends, or a credit

  static constexpr double kNoChange = std::numeric_limits<double>::infinity();
};

}  // namespace weft::replay
