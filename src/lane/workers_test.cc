// Lanes that workers serve, threads and processes: chunks, halts, hand-overs that fail, and workers
// that die, stand still or say what makes no sense.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "weft_testing/chunks.h"
#include "weft_testing/lane_worker.h"
#include "weft_testing/loopback.h"
#include "worker/worker.h"

namespace weft::lane {
namespace {

// A worker that says something else than it should.
int lie(const std::string& which) {
  auto* place = ::mmap(nullptr, worker::buffers_at(), PROT_READ | PROT_WRITE, MAP_SHARED, 100, 0);
  if (place == MAP_FAILED) return 3;
  auto* head = static_cast<worker::Head*>(place);
  worker::RingWriter events(head->events);
  worker::Message event;
  event.what = worker::What::arrived;
  event.lane = 1;
  event.buffer = head->facts.send_buffers;
  if (which == "buffer") event.buffer = head->facts.send_buffers + head->facts.receive_buffers;
  if (which == "send buffer") event.buffer = 0;
  if (which == "length") event.header.length = head->facts.buffer_bytes + 1;
  if (which == "what") event.what = static_cast<worker::What>(77);
  if (which == "command") event.what = worker::What::open;
  if (which == "position")
    head->events.written = 1ull << 40;
  else
    events.push(event);
  for (uint64_t one = 1;; ++head->beats) {
    if (::write(103, &one, sizeof one) != 8) return 4;
    ::usleep(10000);
    if (::recv(101, &one, 0, MSG_DONTWAIT | MSG_PEEK) == 0 && ::getppid() == 1) return 0;
  }
}

[[maybe_unused]] const bool kServes = serve_lanes_if_asked(&lie);

using testing::HasSubstr;
using Role = Lane::Role;
using Kind = LaneWorkers::Kind;

constexpr uint32_t kChunkBytes = 200000;
const char* name_of(Kind kind) { return kind == Kind::thread ? "threads" : "processes"; }

std::vector<pid_t> children() {
  std::vector<pid_t> out;
  std::ifstream file(text("/proc/self/task/%d/children", ::gettid()));
  for (pid_t child; file >> child;) out.push_back(child);
  return out;
}

// Workers with a handler, and what ended which lane.
struct Crew {
  explicit Crew(Kind kind, uint32_t count = 1, const char* program = own_program())
      : world(new_reactor()) {
    LaneWorkers::Options options;
    options.kind = kind;
    options.count = count;
    options.lanes = 2;
    options.chunk_bytes = kChunkBytes;
    options.program = program;
    std::vector<pid_t> before = children();
    auto started = LaneWorkers::start(options, net::kernel_network(), *world, handler,
                                      monotonic_clock(), [this](uint32_t lane, Error error) {
                                        EXPECT_FALSE(errors.contains(lane)) << "told twice";
                                        errors.emplace(lane, std::move(error));
                                      });
    WEFT_CHECK(started.ok());
    workers = std::move(*started);
    for (pid_t child : children())
      if (std::find(before.begin(), before.end(), child) == before.end())
        processes.push_back(child);
  }
  // Both ends of a connection, the sender's under index `first`.
  using Ends = std::pair<std::unique_ptr<LanePort>, std::unique_ptr<LanePort>>;
  Ends open(uint32_t first, bool sealed = false) {
    auto [one, two] = tcp_pair();
    auto socket = [&](Fd fd, bool connector) {
      auto plain = net::adopt(std::move(fd));
      if (!sealed) return plain;
      return net::seal(std::move(plain), net::derive_seal("secret", {}, {}, {}, connector));
    };
    auto serve = [&](Role role, std::unique_ptr<net::Socket> end, uint32_t index) {
      return workers->serve(role, std::move(end), static_cast<uint16_t>(index / 2), index,
                            cost::unsent_limit(kChunkBytes));
    };
    auto in = serve(Role::in, socket(std::move(two), false), first + 1);
    return {serve(Role::out, socket(std::move(one), true), first), std::move(in)};
  }
  bool turn_until(const std::function<bool()>& done, Nanos patience = Nanos::from_seconds(15)) {
    Nanos deadline = monotonic_clock().now() + patience;
    while (!done()) {
      if (monotonic_clock().now() > deadline) return false;
      world->run_once(Nanos::from_millis(2));
      workers->watch(monotonic_clock().now());
    }
    return true;
  }
  // Sends `count` chunks over `lane` and checks that they arrive as they were.
  void expect_carries(Ends& lane, uint32_t count, uint64_t seed) {
    Rng rng(seed);
    std::map<uint32_t, std::vector<std::byte>> expected;
    size_t before = handler.arrived_.size();
    for (uint32_t i = 0; i < count; ++i) {
      uint32_t chunk = next_chunk++;
      TestHandler::Parts parts;
      size_t left = i % 5 == 4 ? rng.below(kChunkBytes) : rng.below(2000);
      for (uint64_t number = 1 + rng.below(9); number > 0; --number) {
        size_t here = number == 1 ? left : rng.below(left + 1);
        parts.push_back(noise(here, chunk * 100 + number));
        left -= here;
        auto& whole = expected[chunk];
        whole.insert(whole.end(), parts.back().begin(), parts.back().end());
      }
      handler.queue(0, chunk, std::move(parts));
    }
    ASSERT_TRUE(turn_until([&] {
      while (lane.first->ready() && lane.first->send_one()) {
      }
      lane.second->send_receipts(true);  // of one that is served here: its user says when
      return handler.arrived_.size() == before + count && handler.held() == 0;
    })) << handler.arrived_.size() - before
        << " of " << count << " arrived, " << handler.held() << " are held";
    for (size_t i = before; i < handler.arrived_.size(); ++i)
      EXPECT_TRUE(handler.arrived_[i].payload == expected[handler.arrived_[i].header.chunk]);
  }

  std::unique_ptr<net::Reactor> world;
  TestHandler handler;
  std::map<uint32_t, Error> errors;
  std::vector<pid_t> processes;
  std::unique_ptr<LaneWorkers> workers;
  uint32_t next_chunk = 0;
};

class LaneWorkersOf : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(, LaneWorkersOf, testing::Values(Kind::thread, Kind::process),
                         [](const auto& given) { return name_of(given.param); });

TEST_P(LaneWorkersOf, carry_chunks_plain_and_sealed) {
  for (bool sealed : {false, true}) {
    SCOPED_TRACE(sealed ? "sealed" : "plain");
    Crew crew(GetParam(), 2);
    auto first = crew.open(0, sealed);
    auto second = crew.open(2, sealed);
    crew.expect_carries(first, 80, 1);
    crew.expect_carries(second, 80, 2);
    for (const auto& arrived : crew.handler.arrived_)
      EXPECT_TRUE(!sealed || arrived.header.checksum == 0);
    EXPECT_TRUE(crew.errors.empty());
    EXPECT_EQ(first.first->counters().chunks_sent, 80u);
    EXPECT_EQ(first.second->counters().chunks_received, 80u);
  }
}

// An auxiliary process finds its descriptors at numbers from 100 on; here they may lie at each
// other's.
TEST_P(LaneWorkersOf, carry_chunks_wherever_their_descriptors_lie) {
  for (int lowest = 90; lowest < 106; ++lowest) {
    SCOPED_TRACE(lowest);
    std::vector<Fd> below;
    for (Fd next(::dup(0)); next.get() < lowest; next = Fd(::dup(0)))
      below.push_back(std::move(next));
    Crew crew(GetParam(), 1);
    auto lane = crew.open(0, false);
    crew.expect_carries(lane, 20, 1);
    EXPECT_TRUE(crew.errors.empty());
  }
}

// Chunks out of memory that is taken away in the moment of the halt.
class Lender final : public ChunkHandler {
 public:
  static constexpr size_t kSize = 1u << 20;
  Lender() {
    void* place =
        ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    WEFT_CHECK(place != MAP_FAILED);
    memory_ = static_cast<std::byte*>(place);
  }
  ~Lender() override { ::munmap(memory_, kSize); }
  void take_back() {
    WEFT_CHECK(::mprotect(memory_, kSize, PROT_NONE) == 0);
    gone = true;
  }
  bool take(uint32_t, OutgoingChunk& out) override {
    EXPECT_FALSE(gone);
    out.header = {};
    out.header.message = ++taken;
    out.header.length = kChunkBytes;
    out.payload = {{memory_, kChunkBytes / 2}, {memory_ + kSize / 2, kChunkBytes / 2}};
    return true;
  }
  void sent(uint32_t, const ChunkHeader&, uint64_t, Moment) override { EXPECT_FALSE(gone); }
  void receipted(uint32_t, const ChunkHeader&, uint64_t) override { EXPECT_FALSE(gone); }
  Result<Destination> arriving(uint32_t, const ChunkHeader& header, bool) override {
    EXPECT_FALSE(gone);
    return Destination{false, false, {{memory_, header.length}}};
  }
  Result<void> arrived(uint32_t, const ChunkHeader&, const std::byte*, Moment) override {
    EXPECT_FALSE(gone);
    ++arrivals;
    return {};
  }
  uint64_t taken = 0, arrivals = 0;
  bool gone = false;

 private:
  std::byte* memory_ = nullptr;
};

TEST_P(LaneWorkersOf, have_no_memory_of_a_lane_that_was_halted) {
  for (uint64_t after : {1u, 2u, 3u, 5u, 8u, 13u}) {
    Lender lender;
    auto world = new_reactor();
    LaneWorkers::Options options;
    options.kind = GetParam();
    options.lanes = 2;
    options.chunk_bytes = kChunkBytes;
    options.program = own_program();
    auto workers =
        LaneWorkers::start(options, net::kernel_network(), *world, lender, monotonic_clock(),
                           [](uint32_t, const Error& error) { FAIL() << error.message(); });
    ASSERT_TRUE(workers);
    auto [one, two] = tcp_pair();
    auto in = (*workers)->serve(Role::in, net::adopt(std::move(two)), 0, 0, 100000);
    auto out = (*workers)->serve(Role::out, net::adopt(std::move(one)), 0, 1, 100000);
    ASSERT_TRUE(turn_until(*world, [&] {
      while (out->ready() && out->send_one()) {
      }
      return lender.taken > after && lender.arrivals + 3 > after;
    }));
    out->halt();
    in->halt();
    lender.take_back();
    for (int i = 0; i < 20; ++i) {
      EXPECT_FALSE(out->send_one());
      in->resume();
      world->run_once(Nanos::from_millis(1));
    }
  }
}

// The place of a lane is used again at once, while the worker still has chunks, buffers and words
// of the one before.
TEST_P(LaneWorkersOf, never_take_a_new_lane_for_the_one_that_had_its_place) {
  Crew crew(GetParam());
  Rng rng(3);
  for (uint32_t round = 0; round < 60; ++round) {
    SCOPED_TRACE(round);
    auto lane = crew.open(0);
    if (rng.below(3) > 0) {
      ASSERT_TRUE(crew.turn_until([&] { return lane.first->ready(); }));
      // Not settled, and given up anyway.
      for (int i = 0; i < 2; ++i)
        crew.handler.queue(1, crew.next_chunk++, {noise(rng.below(kChunkBytes), round)});
      for (int i = 0; i < 2; ++i) lane.first->send_one();
      for (uint64_t turns = rng.below(4); turns > 0; --turns) crew.world->run_once(Nanos{0});
    }
    lane.first.reset();
    if (rng.below(2) == 0) crew.world->run_once(Nanos{0});
    lane.second.reset();
    // What was given up may have arrived; from now on nothing of it may.
    crew.handler = {};
    crew.errors.clear();
    auto fresh = crew.open(0);
    crew.expect_carries(fresh, 6, round);
    EXPECT_EQ(fresh.first->counters().chunks_sent, 6u);
    EXPECT_EQ(fresh.second->counters().chunks_received, 6u);
    EXPECT_TRUE(crew.errors.empty());
  }
}

TEST_P(LaneWorkersOf, keep_what_has_no_place_yet_and_lose_no_buffers) {
  Crew crew(GetParam());
  // Each round a lane goes while chunks wait that were refused: their buffers must come back.
  for (int round = 0; round < 20; ++round) {
    auto lane = crew.open(0);
    crew.handler = {};
    crew.handler.first_unknown = 1;
    for (int i = 0; i < 6; ++i) crew.handler.queue(1, crew.next_chunk++, {noise(500, 1)});
    ASSERT_TRUE(crew.turn_until([&] {
      while (lane.first->ready() && lane.first->send_one()) {
      }
      return crew.handler.offers > 0;
    }));
  }
  crew.handler = {};
  auto lane = crew.open(0);
  crew.expect_carries(lane, 40, 9);
}

TEST(LaneWorkers, of_which_one_died_are_named_and_leave_their_lanes_to_the_others) {
  for (uint32_t count : {1u, 2u}) {
    SCOPED_TRACE(count);
    Crew crew(Kind::process, count);
    ASSERT_EQ(crew.processes.size(), count);
    auto lane = crew.open(0);
    crew.expect_carries(lane, 10, 1);
    ASSERT_EQ(::kill(crew.processes[0], SIGKILL), 0);
    ASSERT_TRUE(crew.turn_until([&] { return crew.errors.size() == 2; }));
    for (const auto& [index, error] : crew.errors) {
      EXPECT_EQ(error.code(), Code::peer_lost) << "so that the lane is opened again";
      EXPECT_EQ(error.message(), text("lane worker 0 (process %d) of this rank was ended by signal "
                                      "9",
                                      crew.processes[0]));
    }
    EXPECT_FALSE(lane.first->send_one());
    lane = {};
    crew.errors.clear();
    lane = crew.open(0);
    crew.expect_carries(lane, 10, 2);
    EXPECT_TRUE(crew.errors.empty());
  }
}

TEST(LaneWorkers, that_are_stopped_are_named_and_replaced) {
  Crew crew(Kind::process, 2);
  auto lane = crew.open(0), other = crew.open(2);
  crew.expect_carries(lane, 10, 1);
  ASSERT_EQ(::kill(crew.processes[0], SIGSTOP), 0);
  Nanos begin = monotonic_clock().now();
  ASSERT_TRUE(crew.turn_until([&] { return crew.errors.size() == 2; }));
  EXPECT_LT(monotonic_clock().now() - begin, Nanos::from_seconds(9));
  EXPECT_THAT(
      crew.errors.at(0).message(),
      HasSubstr(text("lane worker 0 (process %d) of this rank stands still", crew.processes[0])));
  lane = {};
  crew.errors.clear();
  lane = crew.open(0);
  crew.expect_carries(lane, 10, 2);
  crew.expect_carries(other, 10, 3);
  EXPECT_TRUE(crew.errors.empty()) << "those of the other worker go on";
}

// Somebody holds one thread of this process, as a debugger does.
class Held {
 public:
  explicit Held(pid_t thread) {
    ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    int ends[2];
    WEFT_CHECK(::pipe(ends) == 0);
    holder_ = ::fork();
    if (holder_ == 0) {
      int status = 0;
      bool holds = ::ptrace(PTRACE_SEIZE, thread, nullptr, nullptr) == 0 &&
                   ::ptrace(PTRACE_INTERRUPT, thread, nullptr, nullptr) == 0 &&
                   ::waitpid(thread, &status, __WALL) == thread;
      char said = holds ? 'y' : 'n';
      if (::write(ends[1], &said, 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    ::close(ends[1]);
    char said = 'n';
    holds_ = ::read(ends[0], &said, 1) == 1 && said == 'y';
    ::close(ends[0]);
  }
  ~Held() { let_go(); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  // Its holder ends, and it runs on.
  void let_go() {
    if (holder_ <= 0) return;
    ::kill(holder_, SIGKILL);
    ::waitpid(std::exchange(holder_, 0), nullptr, 0);
  }
  bool holds() const { return holds_; }

 private:
  pid_t holder_ = 0;
  bool holds_ = false;
};

std::vector<pid_t> threads() {
  std::vector<pid_t> out;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    out.push_back(std::stoi(entry.path().filename().string()));
  return out;
}

TEST(LaneWorkers, that_are_threads_and_stand_still_are_named_and_replaced) {
  std::vector<pid_t> before = threads();
  Crew crew(Kind::thread);
  auto lane = crew.open(0);
  crew.expect_carries(lane, 10, 1);
  pid_t thread = 0;
  for (pid_t one : threads())
    if (std::find(before.begin(), before.end(), one) == before.end()) thread = one;
  ASSERT_NE(thread, 0);
  Held held(thread);
  if (!held.holds()) GTEST_SKIP() << "nobody may hold a thread here";
  // A connection that is in its hands already, and whose other end is in ours.
  ASSERT_TRUE(crew.turn_until([&] { return crew.errors.size() == 2; }));
  EXPECT_THAT(crew.errors.at(0).message(),
              HasSubstr(text("lane worker 0 (thread %d) of this rank stands still", thread)));
  lane = {};
  crew.errors.clear();
  lane = crew.open(0);
  crew.expect_carries(lane, 10, 2);  // served by this thread now
  // It comes back, finds that nobody needs it, and ends.
  held.let_go();
  lane = {};
  crew.workers.reset();
  std::vector<pid_t> after = threads();
  EXPECT_EQ(std::find(after.begin(), after.end(), thread), after.end());
}

TEST(LaneWorkers, that_were_stopped_together_with_their_rank_are_not_blamed) {
  Crew crew(Kind::process);
  auto lane = crew.open(0);
  crew.expect_carries(lane, 10, 1);
  ASSERT_EQ(::kill(crew.processes[0], SIGSTOP), 0);
  pause_ms(50);
  Nanos now = monotonic_clock().now();
  for (int i = 1; i < 5; ++i) crew.workers->watch(now + Nanos::from_seconds(20 * i));
  ASSERT_EQ(::kill(crew.processes[0], SIGCONT), 0);
  crew.expect_carries(lane, 10, 2);
  EXPECT_TRUE(crew.errors.empty());
}

TEST(LaneWorkers, that_can_take_no_more_descriptors_leave_the_lane_here) {
#if defined(__SANITIZE_ADDRESS__)
  // Without them it takes sound objects for unsound ones, now and then.
  GTEST_SKIP() << "the sanitizer of undefined behaviour needs descriptors of its own";
#endif
  LogLines log;
  Crew crew(Kind::process);
  auto lane = crew.open(0);
  crew.expect_carries(lane, 5, 1);
  rlimit few{4, 4};
  ASSERT_EQ(::prlimit(crew.processes[0], RLIMIT_NOFILE, &few, nullptr), 0);
  auto more = crew.open(2);
  crew.expect_carries(more, 20, 2);
  crew.expect_carries(lane, 5, 3);
  EXPECT_TRUE(crew.errors.empty());
  EXPECT_EQ(log.count("the worker has no descriptor left"), 2u) << log.all();
}

TEST(LaneWorkers, to_which_no_connection_can_be_sent_leave_the_lane_here) {
  LogLines log;
  Crew crew(Kind::process);
  auto warm = crew.open(0);
  crew.expect_carries(warm, 5, 1);
  // It reads nothing: at some point the channel is full.
  ASSERT_EQ(::kill(crew.processes[0], SIGSTOP), 0);
  std::vector<Crew::Ends> lanes;
  for (uint32_t i = 0; i < 400 && log.count("could not be sent") < 2; ++i)
    lanes.push_back(crew.open(2 + 2 * i));
  ASSERT_GE(log.count("could not be sent to lane worker 0"), 2u) << log.all();
  ASSERT_EQ(::kill(crew.processes[0], SIGCONT), 0);
  crew.expect_carries(lanes.back(), 10, 2);
  crew.expect_carries(lanes.front(), 10, 3);
  EXPECT_TRUE(crew.errors.empty());
}

TEST(LaneWorkers, are_told_everything_in_order_though_the_rings_are_full) {
  struct Listener final : worker::Worker::Listener {
    void said(worker::Worker&, const worker::Message& event) override {
      if (event.what == worker::What::closed) closed.push_back(event.lane);
    }
    void gone(worker::Worker&, const Error& why) override { FAIL() << why.message(); }
    std::vector<uint32_t> closed;
  } listener;
  auto world = new_reactor();
  worker::Worker worker(listener, net::kernel_network(), *world, 0);
  std::vector<pid_t> before = children();
  ASSERT_TRUE(worker.start(Kind::process, {worker::kFactsMagic, 4096, 2, 2}, own_program()));
  pid_t process = 0;
  for (pid_t child : children())
    if (std::find(before.begin(), before.end(), child) == before.end()) process = child;
  ASSERT_NE(process, 0);
  ASSERT_EQ(::kill(process, SIGSTOP), 0);
  constexpr uint32_t kMany = 3 * worker::kRingMessages + 17;
  for (uint32_t i = 0; i < kMany; ++i) {
    worker::Message command;
    command.what = worker::What::close;
    command.lane = i;
    worker.push(command);
  }
  ASSERT_EQ(::kill(process, SIGCONT), 0);
  pause_ms(200);  // nor are its own words read: it has to hold back too
  ASSERT_TRUE(turn_until(*world, [&] {
    worker.watch(monotonic_clock().now());
    return listener.closed.size() == kMany;
  })) << listener.closed.size();
  for (uint32_t i = 0; i < kMany; ++i) ASSERT_EQ(listener.closed[i], i);
}

TEST(LaneWorkers, that_say_what_makes_no_sense_are_not_believed) {
  for (const char* which : {"buffer", "send buffer", "length", "what", "command", "position"}) {
    SCOPED_TRACE(which);
    LogLines log;
    ::setenv(kInstead, which, 1);
    Crew crew(Kind::process);
    ::unsetenv(kInstead);
    auto lane = crew.open(0);
    ASSERT_TRUE(crew.turn_until([&] { return crew.errors.size() == 2; }));
    EXPECT_THAT(crew.errors.at(0).message(), HasSubstr("of this rank says what makes no sense"));
    EXPECT_EQ(crew.handler.offers, 0u);
    lane = {};
    crew.errors.clear();
    lane = crew.open(0);
    crew.expect_carries(lane, 10, 1);
  }
}

TEST(LaneWorkers, whose_program_is_not_weft_are_replaced) {
  LogLines log;
  Crew crew(Kind::process, 1, "false");
  // It may have ended before or after the connections were handed over.
  auto lane = crew.open(0);
  ASSERT_TRUE(crew.turn_until([&] { return log.count("of this rank ended with status 1") == 1; }))
      << log.all();
  lane = {};
  crew.errors.clear();
  lane = crew.open(0);
  crew.expect_carries(lane, 10, 1);
  LaneWorkers::Options options;
  options.kind = Kind::process;
  options.chunk_bytes = 4096;
  options.program = "/no/such/program";
  auto none = LaneWorkers::start(options, net::kernel_network(), *crew.world, crew.handler,
                                 monotonic_clock(), {});
  ASSERT_FALSE(none);
  EXPECT_THAT(none.error().message(), HasSubstr("WEFT_PROGRAM"));
}

// A clock of its own time, whose reader is now and then interrupted just before or after he looks.
class InterruptedClock final : public Clock {
 public:
  explicit InterruptedClock(uint64_t seed) : rng_(seed) {}
  Nanos now() const override {
    uint64_t when = rng_.below(4);
    if (when == 0) pause_ms(kInterruptedMs);
    Nanos seen = monotonic_clock().now() + kAhead;
    if (when == 1) pause_ms(kInterruptedMs);
    return seen;
  }
  static constexpr Nanos kAhead = Nanos::from_seconds(20000);
  static constexpr int kInterruptedMs = 3;

 private:
  mutable Rng rng_;  // of the thread that drives
};

// `first` and `last` of a chunk come to the owner together, and are put on his clock together:
// an interruption between two looks at the clocks is not part of a chunk, and must not turn it
// around.
TEST(LaneWorkers, tell_times_in_order_on_the_clock_of_their_owner) {
  constexpr uint32_t kChunks = 60;
  InterruptedClock clock(7);
  TestHandler handler;
  for (uint32_t i = 0; i < kChunks; ++i) handler.queue(0, i, {noise(100 + i, i)});
  auto world = new_reactor();
  LaneWorkers::Options options;
  options.lanes = 2;
  options.chunk_bytes = 4096;
  std::optional<Error> failure;
  auto workers = LaneWorkers::start(options, net::kernel_network(), *world, handler, clock,
                                    [&](uint32_t, Error error) { failure = std::move(error); });
  ASSERT_TRUE(workers);
  auto [one, two] = tcp_pair();
  const Nanos begin = monotonic_clock().now() + InterruptedClock::kAhead;
  auto in = (*workers)->serve(Role::in, net::adopt(std::move(two)), 0, 0, cost::unsent_limit(4096));
  auto out =
      (*workers)->serve(Role::out, net::adopt(std::move(one)), 0, 1, cost::unsent_limit(4096));
  ASSERT_TRUE(turn_until(*world, [&] {
    while (out->ready() && out->send_one()) {
    }
    return handler.arrived_.size() == kChunks && handler.settled_.size() == kChunks;
  })) << (failure ? failure->message() : "");
  const Nanos end = monotonic_clock().now() + InterruptedClock::kAhead;
  // A look that was interrupted moves all of a chunk by that; another clock would be hours away.
  const Nanos earliest = begin - Nanos::from_seconds(100);
  ASSERT_EQ(handler.moments.size(), 2 * kChunks);
  for (const Moment& when : handler.moments) {
    EXPECT_LE(when.first, when.last);
    EXPECT_GE(when.first, earliest);
    EXPECT_LE(when.last, end);
  }
}

}  // namespace
}  // namespace weft::lane
