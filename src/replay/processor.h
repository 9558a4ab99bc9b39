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
    double left;  // ns of a core
    Then then;
  };
  struct Thread {
    uint32_t seat;  // those on one seat count as one
    double credit;  // ns of a core that it may have before others
    double slept_since = 0;
    schedule::Fifo<Piece> queue;
    bool spins = false;
    uint32_t heard = 0;  // pieces in it after which something happens
    double rate = 0;     // of a core, now
  };
  // How many threads of a seat can run, with credit and without.
  struct Seat {
    uint32_t first = 0, other = 0;
  };

  bool is_first(const Thread& thread) const { return thread.credit > 0; }
  static bool runs(const Thread& thread) { return thread.spins || !thread.queue.empty(); }
  void take_seat(const Thread& thread);
  void leave_seat(const Thread& thread);
  void enter(uint32_t thread);
  void leave(uint32_t thread);
  // Shares the cores among those that can run.
  void share();
  // ns until something changes: a piece ends, or a credit.
  double until_change();
  void run(double ns);
  // Takes pieces that are done off the queues.
  void clear_done();

  double cores_;
  double most_credit_;
  std::vector<Thread> threads_;
  std::vector<Seat> seats_;
  Seat taken_;                      // seats on which there are any
  std::vector<uint32_t> runnable_;  // in the order in which they woke
  bool crowded_ = false;            // not all that can run have a core
  schedule::Fifo<Then> happened_;
  double now_ = 0;
};

}  // namespace weft::replay
