#include "weft/capture.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <new>
#include <optional>
#include <system_error>
#include <thread>
#include <unordered_map>

#include "ring.h"

namespace weft::capture {

namespace {

constexpr Nanos kClockSampleInterval = Nanos::from_seconds(1);
constexpr int kClockSampleTries = 5;
constexpr uint32_t kRingEventsMin = 16;
constexpr uint32_t kRingEventsMax = 1u << 24;
// Rare facts wait in memory for the writer; a disk that hangs must not make that grow for ever.
constexpr size_t kRareFactsMax = 1u << 16;
constexpr size_t kTracksMax = trace::kNone16;
constexpr uint32_t kThreadsMax = 256;                // with a track of their own
constexpr const char* kNoMemory = "no memory left";  // fits into a string itself

// Recorders are numbered once in a process and never again, so a number kept by a thread can go
// stale but can never come to mean another recorder.
uint64_t next_recorder_id() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

// ---- a thread's handles --------------------------------------------------------------------

// The recorder that this thread used last. Plain data without a destructor, so that the hot path
// reads it without asking whether it was constructed, also while the thread is being torn down.
struct LastUsed {
  uint64_t recorder = 0;
  Ring* ring = nullptr;
  bool ended = false;
};
constinit thread_local LastUsed last_used;

// The track that this thread has in the recorder whose track it asked for last.
struct LastTrack {
  uint64_t recorder = 0;
  trace::TrackId track = 0;
};
constinit thread_local LastTrack last_track;

// Every ring that this thread owns. Rings are shared with their recorder, so whichever of the two
// ends first leaves the other something valid.
struct Handles {
  struct Entry {
    uint64_t recorder;
    std::shared_ptr<Ring> ring;
    std::optional<trace::TrackId> track = {};
  };
  std::vector<Entry> entries;

  ~Handles() {
    last_used = {.recorder = 0, .ring = nullptr, .ended = true};
    for (Entry& entry : entries) entry.ring->disown();
  }

  Entry* entry_of(uint64_t recorder) {
    for (Entry& entry : entries) {
      if (entry.recorder == recorder) return &entry;
    }
    return nullptr;
  }
  Ring* find(uint64_t recorder) {
    Entry* entry = entry_of(recorder);
    return entry != nullptr ? entry->ring.get() : nullptr;
  }

  void add(uint64_t recorder, std::shared_ptr<Ring> ring) {
    // A long-lived thread must not collect the rings of every recorder there ever was.
    std::erase_if(entries, [](const Entry& entry) { return entry.ring->closed(); });
    entries.push_back({recorder, std::move(ring), {}});
  }
};
thread_local Handles handles;

// ---- waking the writer ---------------------------------------------------------------------

// A counter that one thread sleeps on. std::atomic has no wait with a timeout, and a condition
// variable would make the hot path take a mutex.
class Doorbell {
 public:
  uint32_t rings() const { return rings_.load(std::memory_order_acquire); }

  void ring() noexcept {
    rings_.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, address(), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  }

  // Returns when the bell rang since `seen` was read, or after the timeout.
  void wait(uint32_t seen, Nanos timeout) {
    if (timeout.count <= 0) return;
    timespec relative{.tv_sec = timeout.count / 1'000'000'000,
                      .tv_nsec = timeout.count % 1'000'000'000};
    syscall(SYS_futex, address(), FUTEX_WAIT_PRIVATE, seen, &relative, nullptr, 0);
  }

 private:
  uint32_t* address() { return reinterpret_cast<uint32_t*>(&rings_); }

  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  std::atomic<uint32_t> rings_{0};
};

// Signals of the process belong to the threads of the training. It also means that a file size
// limit (SIGXFSZ) is met as an error of write() and not as the end of the process.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

// ---- the recorder --------------------------------------------------------------------------

struct Recorder::Impl {
  // Read on the hot path and written once each.
  const uint64_t id = next_recorder_id();
  std::atomic<bool> open{true};
  const Clock* clock = nullptr;

  alignas(kCacheLine) Doorbell doorbell;
  std::atomic<bool> stopping{false};
  pid_t process = 0;
  uint64_t ring_events = 0;
  Nanos flush_interval;
  bool background = true;
  std::thread thread;
  std::once_flag stopped;

  // Used by the background thread only, once it runs; without one, by whoever has `turn`.
  std::mutex turn;
  std::unique_ptr<trace::Writer> writer;
  bool broken = false;  // the file could not be written; never tried again
  uint64_t dropped_told = 0;
  uint64_t unflushed = 0;  // events handed to the writer since its last flush

  // Guards what follows. Held for moments: never while writing to the file.
  std::mutex mutex;
  std::condition_variable cycle_done;
  uint64_t cycles_begun = 0;
  uint64_t cycles_done = 0;
  bool finished = false;
  std::optional<Error> first_error;
  std::vector<std::shared_ptr<Ring>> rings;  // all that ever were; those without owner are free
  std::vector<Ring*> free_rings;
  uint64_t lost = 0;  // records that never reached a ring, or reached one and not the file

  // Rare facts on their way to the writer.
  struct Queue {
    std::optional<trace::Model> model;
    std::vector<std::pair<trace::TrackId, trace::Track>> tracks;
    std::vector<std::pair<trace::NameId, std::string>> names;
    std::vector<trace::ClockSample> clock_samples;
    std::vector<trace::PingSample> pings;
    std::vector<trace::ProbeResult> probe;
    std::vector<trace::Note> notes;
  };
  Queue queue;
  std::vector<trace::Track> tracks;
  std::unordered_map<std::string, trace::NameId> names;
  uint32_t threads = 0;  // that have a track

  bool forked() const { return getpid() != process; }

  [[gnu::noinline, gnu::cold]] void record_slowly(const trace::Event& event) noexcept;
  void push(Ring& ring, const trace::Event& event) noexcept {
    if (ring.push(event) == Ring::Push::stored_and_filling) [[unlikely]]
      doorbell.ring();
  }
  Ring* own_ring() noexcept;
  std::shared_ptr<Ring> take_ring();
  [[gnu::noinline, gnu::cold]] trace::TrackId find_thread_track(Recorder& recorder) noexcept;

  template <typename T>
  void enqueue(std::vector<T> Queue::*member, T fact);
  trace::ClockSample sample_clocks() const;

  uint64_t dropped_locked() const;
  void work();
  void write_drained(bool last, uint64_t asked);
  void write_here(bool last);
  void drain();
  void write_rare(Queue& facts);
  template <typename Call>
  bool attempt(Call call);
  template <typename Call>
  void unless_memory_runs_out(Call call);
  Result<void> outcome();  // the first error, if there was one
  void write_events(std::span<const trace::Event> events);
};

std::shared_ptr<Ring> Recorder::Impl::take_ring() {
  std::lock_guard lock(mutex);
  if (!free_rings.empty()) {
    Ring* ring = free_rings.back();
    free_rings.pop_back();
    ring->adopt();
    auto at = std::find_if(rings.begin(), rings.end(),
                           [ring](const auto& candidate) { return candidate.get() == ring; });
    return *at;
  }
  // Room for the free list is made here, so that the background thread never has to allocate for
  // a thread that ends.
  free_rings.reserve(rings.size() + 1);
  rings.push_back(std::make_shared<Ring>(ring_events));
  return rings.back();
}

// The ring of the calling thread; null without memory, in a child, and when the thread's variables
// are gone.
Ring* Recorder::Impl::own_ring() noexcept {
  if (last_used.ended || forked()) return nullptr;
  Ring* ring = handles.find(id);
  if (ring != nullptr) return ring;
  try {
    std::shared_ptr<Ring> taken = take_ring();
    ring = taken.get();
    handles.add(id, std::move(taken));
  } catch (...) {  // no memory; a ring that was taken all the same goes back
    if (ring != nullptr) ring->disown();
    ring = nullptr;
  }
  return ring;
}

void Recorder::Impl::record_slowly(const trace::Event& event) noexcept {
  if (Ring* ring = own_ring()) {
    last_used.recorder = id;
    last_used.ring = ring;
    push(*ring, event);
    return;
  }
  if (forked()) return;
  std::lock_guard lock(mutex);
  ++lost;
}

trace::TrackId Recorder::Impl::find_thread_track(Recorder& recorder) noexcept {
  // One that nobody defined: what is recorded on it is refused and counted.
  auto found = static_cast<trace::TrackId>(kTracksMax - 1);
  if (own_ring() == nullptr) return found;
  std::optional<trace::TrackId>& kept = handles.entry_of(id)->track;
  if (!kept) {
    try {
      char name[16] = {};  // as long as the kernel's are
      pthread_getname_np(pthread_self(), name, sizeof name);
      uint32_t number = 0;
      {
        std::lock_guard lock(mutex);
        number = std::min(++threads, kThreadsMax + 1);
      }
      std::string words =
          number > kThreadsMax ? "other threads" : text("thread %u (%s)", number, name);
      kept = recorder.track(
          {trace::TrackType::thread, std::move(words), trace::kNone16, trace::kNone16});
    } catch (...) {
      return found;
    }
  }
  last_track = {id, *kept};
  return *kept;
}

trace::ClockSample Recorder::Impl::sample_clocks() const {
  trace::ClockSample best;
  int64_t best_width = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < kClockSampleTries; ++i) {
    const int64_t before = clock->now().count;
    const int64_t wall = wall_time().count;
    const int64_t after = clock->now().count;
    if (after - before < best_width) {
      best_width = after - before;
      best = {.trace_ns = before + (after - before) / 2, .wall_ns = wall};
    }
  }
  return best;
}

template <typename T>
void Recorder::Impl::enqueue(std::vector<T> Queue::*member, T fact) {
  if (forked()) return;
  unless_memory_runs_out([&] {
    auto& facts = queue.*member;
    if (finished) return;
    if (facts.size() >= kRareFactsMax)
      ++lost;
    else
      facts.push_back(std::move(fact));
  });
}

// The observer fails alone: what it has no memory for is dropped and counted like anything else.
template <typename Call>
void Recorder::Impl::unless_memory_runs_out(Call call) {
  std::lock_guard lock(mutex);
  try {
    call();
  } catch (const std::bad_alloc&) {
    ++lost;
  }
}

Result<void> Recorder::Impl::outcome() {
  std::lock_guard lock(mutex);
  if (!first_error) return {};
  try {
    return Error(*first_error);
  } catch (const std::bad_alloc&) {
    return Error(first_error->code(), kNoMemory);
  }
}

uint64_t Recorder::Impl::dropped_locked() const {
  uint64_t total = lost;
  for (const auto& ring : rings) total += ring->drops();
  return total;
}

// ---- the background thread -----------------------------------------------------------------

// Calls the writer unless it has failed before. A record that it refuses is the recording code's
// mistake and costs that record; anything else is the file's, and costs the rest of the run.
// Returns whether the call was refused.
template <typename Call>
bool Recorder::Impl::attempt(Call call) {
  if (broken) return false;
  Result<void> result;
  try {
    result = call();
  } catch (const std::bad_alloc&) {
    result = Error(Code::exhausted, kNoMemory);
  }
  if (result) return false;
  const bool refused = result.error().code() == Code::invalid_argument;
  std::lock_guard lock(mutex);
  if (!refused) {
    broken = true;
    // Some of these may have reached the disk in whole blocks; nobody can tell any more. What is
    // counted are the records that are not known to be in the file.
    lost += unflushed;
    WEFT_LOG(capture, warn, "recording ends early, and the job goes on without it: %s",
             result.error().message().c_str());
  }
  if (!first_error) first_error = std::move(result).error();
  return refused;
}

void Recorder::Impl::write_events(std::span<const trace::Event> events) {
  unflushed += events.size();
  if (!attempt([&] { return writer->events(events); })) return;
  // The writer takes a span as a whole or not at all: find the ones that it does not want.
  uint64_t refused = 0;
  for (const trace::Event& event : events) {
    if (attempt([&] { return writer->events({&event, 1}); })) ++refused;
  }
  unflushed -= refused;
  if (broken) return;  // counted as unflushed
  std::lock_guard lock(mutex);
  lost += refused;
}

void Recorder::Impl::write_rare(Queue& facts) {
  if (facts.model) attempt([&] { return writer->model(*facts.model); });
  for (const auto& [track_id, track] : facts.tracks) {
    attempt([&, id = track_id, &value = track] { return writer->track(id, value); });
  }
  for (const auto& [name_id, name] : facts.names) {
    attempt([&, id = name_id, &value = name] { return writer->name(id, value); });
  }
  if (!facts.clock_samples.empty()) {
    attempt([&] { return writer->clock_samples(facts.clock_samples); });
  }
  if (!facts.pings.empty()) attempt([&] { return writer->pings(facts.pings); });
  if (!facts.probe.empty()) attempt([&] { return writer->probe(facts.probe); });
  for (const trace::Note& note : facts.notes) {
    attempt([&] { return writer->note(note); });
  }
}

// Takes what is there now, once; what comes meanwhile waits for the next round.
void Recorder::Impl::drain() {
  struct Part {
    std::shared_ptr<Ring> ring;
    uint64_t end = 0;
    bool owned = true;
  };
  std::vector<Part> parts;
  Queue facts;
  {
    std::lock_guard lock(mutex);
    try {
      parts.reserve(rings.size());
    } catch (const std::bad_alloc&) {
      for (const auto& ring : rings) {
        const uint64_t end = ring->end();
        lost += end - ring->begin();
        ring->release_to(end);
      }
      return;
    }
    for (const auto& ring : rings) {
      // First the owner, then the end: without an owner nothing can come after that end.
      const bool owned = ring->owned();
      parts.push_back({.ring = ring, .end = ring->end(), .owned = owned});
    }
    // The facts after the ends of the rings: who defines a track and then records on it finds the
    // definition written first.
    std::swap(facts, queue);
  }

  write_rare(facts);
  for (const Part& part : parts) {
    for (uint64_t at = part.ring->begin(); at != part.end;) {
      const auto piece = part.ring->piece(at, part.end);
      if (broken) {
        std::lock_guard lock(mutex);
        lost += piece.size();
      } else {
        write_events(piece);
      }
      at += piece.size();
      part.ring->release_to(at);
    }
  }

  std::lock_guard lock(mutex);
  for (const Part& part : parts) {
    if (part.owned) continue;
    // Still without owner: only take_ring() gives one, and only to what is in free_rings.
    if (std::find(free_rings.begin(), free_rings.end(), part.ring.get()) == free_rings.end() &&
        !part.ring->owned())
      free_rings.push_back(part.ring.get());
  }
}

// What was drained goes to the file. Here and not in the destructor: the last writes must not bring
// a signal to the caller of stop().
void Recorder::Impl::write_drained(bool last, uint64_t asked) {
  uint64_t dropped = 0;
  {
    std::lock_guard lock(mutex);
    dropped = dropped_locked();
  }
  if (dropped != dropped_told) {
    attempt([&] { return writer->dropped(dropped); });
    dropped_told = dropped;
  }
  attempt([&] { return last ? writer->close() : writer->flush(); });
  unflushed = 0;
  if (last) writer.reset();
  std::lock_guard lock(mutex);
  cycles_done = asked;
  finished = last;
  cycle_done.notify_all();
}

// Without a thread: whoever wants it written writes it.
void Recorder::Impl::write_here(bool last) {
  std::lock_guard one_at_a_time(turn);
  if (!writer) return;
  SignalsBlocked blocked;
  if (last) enqueue(&Queue::clock_samples, sample_clocks());
  drain();
  write_drained(last, cycles_done);
}

void Recorder::Impl::work() {
  const Clock& real = monotonic_clock();  // `clock` may be one that a test moves by hand
  Nanos next_flush = real.now() + flush_interval;
  Nanos next_sample = real.now() + kClockSampleInterval;
  for (;;) {
    const uint32_t rings_seen = doorbell.rings();
    const bool stop_now = stopping.load(std::memory_order_acquire);
    uint64_t asked = 0;
    {
      std::lock_guard lock(mutex);
      asked = cycles_begun;
    }
    const bool sample_now = stop_now || real.now() >= next_sample;
    if (sample_now) {
      enqueue(&Queue::clock_samples, sample_clocks());
      next_sample = real.now() + kClockSampleInterval;
    }
    drain();
    if (stop_now || asked != cycles_done || real.now() >= next_flush) {
      write_drained(stop_now, asked);
      if (stop_now) return;
      next_flush = real.now() + flush_interval;
    }
    doorbell.wait(rings_seen, next_flush - real.now());
  }
}

// ---- the public face -----------------------------------------------------------------------

Recorder::Recorder(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<Recorder>> Recorder::start(Options options) {
  if (options.flush_interval.count <= 0) {
    return error(Code::invalid_argument, "the flush interval of a recorder must be positive");
  }
  try {
    if (options.environment.weft_version.empty()) options.environment.weft_version = version();
    std::unique_ptr<Recorder> recorder(new Recorder(std::make_unique<Impl>()));
    Impl& impl = *recorder->impl_;
    impl.clock = options.clock != nullptr ? options.clock : &monotonic_clock();
    impl.process = getpid();
    impl.ring_events =
        std::bit_ceil(std::clamp(options.ring_events, kRingEventsMin, kRingEventsMax));
    impl.flush_interval = options.flush_interval;
    impl.background = options.background;
    WEFT_ASSIGN(impl.writer,
                trace::Writer::create(options.path, options.environment,
                                      options.files != nullptr ? *options.files : kernel_files()));
    impl.enqueue(&Impl::Queue::clock_samples, impl.sample_clocks());
    if (!impl.background) return recorder;
    SignalsBlocked blocked;  // inherited by the new thread
    impl.thread = std::thread([state = &impl] {
      pthread_setname_np(pthread_self(), "weft-capture");
      state->work();
    });
    return recorder;
  } catch (const std::system_error& failure) {
    return io_error(failure.code().value(), "cannot start the recorder's thread");
  } catch (const std::bad_alloc&) {
    return Error(Code::exhausted, kNoMemory);
  }
}

std::unique_ptr<Recorder> Recorder::off() {
  return std::unique_ptr<Recorder>(new Recorder(nullptr));
}

Recorder::~Recorder() { (void)stop(); }

bool Recorder::on() const { return impl_ != nullptr; }

Nanos Recorder::now() const {
  return impl_ != nullptr ? impl_->clock->now() : monotonic_clock().now();
}

void Recorder::record(const trace::Event& event) noexcept {
  Impl* impl = impl_.get();
  if (impl == nullptr || !impl->open.load(std::memory_order_relaxed)) return;
  const LastUsed& last = last_used;
  if (last.recorder == impl->id) [[likely]] {
    impl->push(*last.ring, event);
  } else {
    impl->record_slowly(event);
  }
}

void Recorder::model(const trace::Model& model) {
  if (!impl_ || impl_->forked()) return;
  impl_->unless_memory_runs_out([&] {
    trace::Model copy = model;
    impl_->queue.model = std::move(copy);
  });
}

trace::TrackId Recorder::track(const trace::Track& track) {
  if (!impl_ || impl_->forked()) return 0;
  // One that nobody defined: what is recorded on it is refused and counted.
  auto id = static_cast<trace::TrackId>(kTracksMax - 1);
  impl_->unless_memory_runs_out([&] {
    auto& known = impl_->tracks;
    if (auto at = std::find(known.begin(), known.end(), track); at != known.end()) {
      id = static_cast<trace::TrackId>(at - known.begin());
      return;
    }
    if (known.size() >= kTracksMax) return;
    const auto fresh = static_cast<trace::TrackId>(known.size());
    // Both or neither: a track that is known is defined in the file.
    impl_->queue.tracks.emplace_back(fresh, track);
    try {
      known.push_back(track);
    } catch (const std::bad_alloc&) {
      impl_->queue.tracks.pop_back();
      throw;
    }
    id = fresh;
  });
  return id;
}

trace::TrackId Recorder::thread_track() noexcept {
  if (!impl_) return 0;
  if (last_track.recorder == impl_->id) return last_track.track;
  return impl_->find_thread_track(*this);
}

trace::NameId Recorder::name(std::string_view name) {
  if (!impl_ || impl_->forked()) return trace::kNone;
  auto id = trace::kNone;
  impl_->unless_memory_runs_out([&] {
    const auto next = static_cast<trace::NameId>(impl_->names.size());
    const auto [at, is_new] = impl_->names.try_emplace(std::string(name), next);
    try {
      if (is_new) impl_->queue.names.emplace_back(next, at->first);
    } catch (const std::bad_alloc&) {
      impl_->names.erase(at);
      throw;
    }
    id = at->second;
  });
  return id;
}

void Recorder::clock_sample() {
  if (impl_) impl_->enqueue(&Impl::Queue::clock_samples, impl_->sample_clocks());
}

void Recorder::ping(const trace::PingSample& sample) {
  if (impl_) impl_->enqueue(&Impl::Queue::pings, sample);
}

void Recorder::probe(const trace::ProbeResult& result) {
  if (impl_) impl_->enqueue(&Impl::Queue::probe, result);
}

void Recorder::note(std::string_view key, std::string_view value) {
  if (!impl_ || impl_->forked()) return;
  std::optional<trace::Note> made;
  impl_->unless_memory_runs_out([&] {
    made =
        trace::Note{.time_ns = now().count, .key = std::string(key), .value = std::string(value)};
  });
  if (made) impl_->enqueue(&Impl::Queue::notes, *std::move(made));
}

uint64_t Recorder::dropped() const {
  if (!impl_ || impl_->forked()) return 0;
  std::lock_guard lock(impl_->mutex);
  return impl_->dropped_locked();
}

Result<void> Recorder::flush() {
  if (!impl_ || impl_->forked()) return {};
  if (!impl_->background) {
    impl_->write_here(false);
    return impl_->outcome();
  }
  std::unique_lock lock(impl_->mutex);
  const uint64_t mine = ++impl_->cycles_begun;
  impl_->doorbell.ring();
  impl_->cycle_done.wait(lock, [&] { return impl_->cycles_done >= mine || impl_->finished; });
  lock.unlock();
  return impl_->outcome();
}

Result<void> Recorder::stop() {
  if (!impl_) return {};
  impl_->open.store(false, std::memory_order_relaxed);
  if (impl_->forked()) {
    // The thread stayed in the parent, and so did the file: let go of both without touching them.
    // Even the mutex may have been copied while held.
    if (impl_->thread.joinable()) impl_->thread.detach();
    (void)impl_.release();
    return {};
  }
  std::call_once(impl_->stopped, [this] {
    impl_->stopping.store(true, std::memory_order_release);
    impl_->doorbell.ring();
    if (impl_->thread.joinable()) impl_->thread.join();  // it may never have begun
    if (!impl_->background) impl_->write_here(true);
    std::lock_guard lock(impl_->mutex);
    for (const auto& ring : impl_->rings) ring->close();
  });
  return impl_->outcome();
}

}  // namespace weft::capture
