// capture: events on hot threads -> a trace file, without disturbing them.
//
// Every thread that records owns a ring of fixed-size records with one writer (the thread) and
// one reader (the recorder's background thread, which writes blocks to the file):
//
//   thread A --record()--> ring A --.
//   thread B --record()--> ring B ---+--> background writer --> rank-0.weft
//   rare facts --mutex-----------------^
//
// record() never waits, allocates or fails: when the ring is full the record is dropped and
// counted, and the count is in the trace. If the file cannot be written (full disk), recording
// goes on dropping and counting; the first error is told by stop(), never to the training.
//
// A process that is killed loses what it recorded in the last flush interval and nothing else. In
// a child made by fork() the recorder is inert: the file belongs to the parent.
//
// Threads: record() and now() from any thread; the rest from any thread, off the hot path. A thread
// may use several recorders, and may outlive them. A clock and files given in Options outlive the
// recorder. Not here: what the records mean (trace), when to record (everyone else).
#pragma once

#include <memory>
#include <string>

#include "weft/trace.h"

namespace weft::capture {

struct Options {
  std::string path;  // the file to write
  trace::Environment environment;
  const Clock* clock = nullptr;     // null: monotonic_clock()
  uint32_t ring_events = 1u << 14;  // per thread, rounded up to a power of two
  Nanos flush_interval = Nanos::from_millis(50);
  // False: there is no thread, and what is recorded is written by flush() and stop(), in the thread
  // that calls them. For tests that own time.
  bool background = true;
  Files* files = nullptr;  // null: kernel_files()
};

class Recorder {
 public:
  static Result<std::unique_ptr<Recorder>> start(Options options);
  // A recorder that keeps nothing: record() returns at once. For runs with recording off.
  static std::unique_ptr<Recorder> off();
  ~Recorder();  // stops without telling errors
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  bool on() const;
  Nanos now() const;  // the clock that all records are stamped with

  // Hot path: copies 72 bytes into this thread's ring.
  void record(const trace::Event& event) noexcept;

  // Cold path.
  void model(const trace::Model& model);
  trace::TrackId track(const trace::Track& track);
  trace::NameId name(std::string_view name);
  // The track of the calling thread, made at its first call; cheap afterwards. Threads beyond the
  // first 256 share one.
  trace::TrackId thread_track() noexcept;
  void clock_sample();  // reads both clocks; also done now and then by itself
  void ping(const trace::PingSample& sample);
  void probe(const trace::ProbeResult& result);
  void note(std::string_view key, std::string_view value);
  uint64_t dropped() const;

  // Waits until everything recorded before the call is in the file, and tells the first error
  // that writing met. Recording goes on.
  Result<void> flush();
  // Drains everything, closes the file, and tells the first error that writing met. What other
  // threads record meanwhile or later is ignored. May be called again: the same answer.
  Result<void> stop();

 private:
  struct Impl;
  explicit Recorder(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Fills in what can be read from this machine: kernel, cores, congestion control, sysctls.
trace::Environment describe_machine();

}  // namespace weft::capture
