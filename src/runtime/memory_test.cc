// Memory that runs out: whichever allocation of a rank is refused, no call of weft throws, the
// others learn whose memory it was, and afterwards a group can be made again.
//
// This program's operator new asks the simulation. WEFT_SIM_ALLOCATIONS says how many allocations
// of every scene are refused in turn, spread over its course (60 unless told; 0: each of them).
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <new>
#include <nlohmann/json.hpp>

#include "sim_verdict.h"

namespace {

void* allocate(size_t size, size_t alignment) noexcept {
  if (weft::net::sim::refuses_memory()) return nullptr;
  if (size == 0) size = 1;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(size);
  return std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

void* allocate_or_throw(size_t size, size_t alignment) {
  void* memory = allocate(size, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// Not where it is called: there it would look as if memory of one kind were freed as another.
[[gnu::noinline]] void release(void* memory) noexcept { std::free(memory); }

constexpr size_t kAlignment = alignof(std::max_align_t);

}  // namespace

void* operator new(size_t size) { return allocate_or_throw(size, kAlignment); }
void* operator new[](size_t size) { return allocate_or_throw(size, kAlignment); }
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return allocate(size, kAlignment);
}
void* operator new[](size_t size, const std::nothrow_t&) noexcept {
  return allocate(size, kAlignment);
}
void* operator new(size_t size, std::align_val_t alignment) {
  return allocate_or_throw(size, static_cast<size_t>(alignment));
}
void* operator new[](size_t size, std::align_val_t alignment) {
  return allocate_or_throw(size, static_cast<size_t>(alignment));
}
void* operator new(size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate(size, static_cast<size_t>(alignment));
}
void* operator new[](size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate(size, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, size_t) noexcept { release(memory); }
void operator delete[](void* memory, size_t) noexcept { release(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { release(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t, const std::nothrow_t&) noexcept {
  release(memory);
}
void operator delete[](void* memory, std::align_val_t, const std::nothrow_t&) noexcept {
  release(memory);
}

namespace weft::runtime {
namespace {

using namespace simulated;  // NOLINT(google-build-using-namespace): this module's own

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kRuns = 15;  // sanitizers watch every switch of stacks
#else
constexpr uint64_t kRuns = 60;
#endif

struct Case {
  const char* name;
  void (*set_up)(Scene&);
  uint32_t lacking;  // the rank that finds no memory
  uint64_t count;    // how often
};

void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

Act sum_of(uint64_t count) {
  Act act;
  act.calls.push_back({Collective::all_reduce, Algorithm::ring, Type::float32, count, 0, true});
  return act;
}

// Three ranks that do two small sums, and leave.
Scene small_scene(const Case& one) {
  Scene scene;
  scene.seed = scene.world.seed = 1;
  scene.ranks = scene.world.ranks = 3;
  scene.hosts = 3;
  scene.plan.chunk = kib(4);
  scene.thinks.resize(3);
  scene.world.time_max = Nanos::from_seconds(600);
  scene.acts = {sum_of(3000), sum_of(500)};
  one.set_up(scene);
  return scene;
}

void nothing_more(Scene&) {}
void sealed(Scene& scene) { scene.sealed = true; }
void shared_memory(Scene& scene) {
  scene.hosts = 1;
  scene.world.machines = {0, 0, 0};
}
void workers(Scene& scene) { scene.plan.lanes = scene.plan.lane_workers = 2; }
void messages(Scene& scene) {
  Act pair = sum_of(700), shift = sum_of(300), part = sum_of(400), together = sum_of(200);
  pair.kind = Act::Kind::pair;
  shift.kind = Act::Kind::shift;
  part.kind = Act::Kind::subgroup;
  together.kind = Act::Kind::together;
  pair.members = shift.members = together.members = {0, 1, 2};
  part.members = {1, 0};
  together.calls.push_back({Collective::all_to_all, Algorithm::direct, Type::int32, 90, 0, false});
  scene.acts = {pair, part, shift, together};
}
void exchange(Scene& scene) {
  Act act;
  act.kind = Act::Kind::exchange;
  act.tensors = {400, 1000, 30};
  act.steps = 2;
  scene.plan.bucket_rule.first = kib(1);
  scene.plan.bucket_rule.size = kib(4);
  scene.acts = {act};
}
void death(Scene& scene) {
  Fault fault;
  fault.kind = Fault::Kind::death;
  fault.rank = 2;
  fault.at = 60;
  scene.world.faults = {fault};
}
void abortion(Scene& scene) {
  Act end;
  end.kind = Act::Kind::abort;
  end.members = {2};
  scene.acts.push_back(end);
}

class ScarceMemory : public testing::TestWithParam<Case> {
 protected:
  ScarceMemory() {
    log_set_sink([](std::string_view) {});
  }
  ~ScarceMemory() override { log_set_sink({}); }
};

TEST_P(ScarceMemory, that_runs_out_anywhere_ends_no_process_and_names_its_rank) {
  const Case& one = GetParam();
  Scene scene = small_scene(one);
  Played without = play(scene);
  ASSERT_EQ(verdict(scene, without), "") << told(without);
  uint64_t needed = without.allocations[one.lacking];
  ASSERT_GT(needed, 200u);
  const char* words = std::getenv("WEFT_SIM_ALLOCATIONS");
  uint64_t runs = words != nullptr ? std::strtoull(words, nullptr, 10) : kRuns;
  if (runs == 0) runs = needed;
  size_t failed = 0, met_again = 0, wrong = 0;
  // A step that is no whole number: all of the course is met, and not what returns in it.
  for (uint64_t i = 0; i < runs && wrong < 5; ++i) {
    Fault fault;
    fault.kind = Fault::Kind::memory;
    fault.rank = one.lacking;
    fault.at = 1 + i * needed / runs;
    fault.count = one.count;
    Scene poor = scene;
    poor.world.faults.push_back(fault);
    Played played = play(poor);
    EXPECT_TRUE(played.refused[one.lacking]) << fault.at;
    std::string problem = verdict(poor, played);
    if (!problem.empty()) {
      ++wrong;
      ADD_FAILURE() << "allocation " << fault.at << " of " << needed << ": " << problem << "\n"
                    << told(played);
    }
    failed += played.reports[one.lacking].chapters[0].error ? 1 : 0;
    // Whoever lost the group by it meets again; the one that is blamed is not waited for.
    std::vector<const Report*> others;
    for (uint32_t rank = 0; rank < scene.ranks; ++rank) {
      const Report& report = played.reports[rank];
      bool lost = report.chapters[0].culprit == one.lacking && !played.outcome.died[rank];
      if (rank != one.lacking && lost) others.push_back(&report);
    }
    if (others.size() < 2) continue;
    ++met_again;
    for (const Report* report : others)
      EXPECT_TRUE(report->chapters.size() > 1 && !report->error())
          << "allocation " << fault.at << "\n"
          << told(played);
  }
  EXPECT_GT(failed, runs / 2);
  RecordProperty("needed", std::to_string(needed));
  RecordProperty("met_again", std::to_string(met_again));
}

constexpr uint64_t kAlways = UINT64_MAX;

INSTANTIATE_TEST_SUITE_P(
    All, ScarceMemory,
    testing::Values(
        Case{"of_the_root", nothing_more, 0, 1}, Case{"of_another", nothing_more, 1, 1},
        Case{"of_another_for_good", nothing_more, 1, kAlways},
        Case{"of_the_root_for_good", nothing_more, 0, kAlways}, Case{"sealed", sealed, 1, 1},
        Case{"shared", shared_memory, 1, 1}, Case{"shared_for_good", shared_memory, 0, kAlways},
        Case{"workers", workers, 1, 1}, Case{"workers_for_good", workers, 1, kAlways},
        Case{"messages", messages, 1, 1}, Case{"exchange_of_the_root", exchange, 0, 1},
        Case{"exchange", exchange, 1, 1}, Case{"exchange_for_good", exchange, 1, kAlways},
        Case{"while_another_dies", death, 1, 1},
        Case{"while_another_dies_for_the_root", death, 0, 3},
        Case{"after_an_abort", abortion, 1, 1}, Case{"of_one_that_aborts", abortion, 2, 1}),
    [](const auto& case_of) { return std::string(case_of.param.name); });

// ---- calls that scenes do not make -------------------------------------------------------------

struct Called {
  sim::Outcome outcome;
  bool threw = false;
  int started = 0, told = 0;  // callbacks: given to then(), and called
  uint64_t allocations = 0;
};

// Two ranks that make every other call there is; rank 1 finds no memory for its allocation `at`.
Called call_everything(uint64_t at) {
  sim::Options options;
  options.ranks = 2;
  Fault fault;
  fault.kind = Fault::Kind::memory;
  fault.rank = 1;
  fault.at = at;
  options.faults = {fault};
  sim::World world(options);
  Called out;
  auto use = [&](Group& group, uint32_t rank) {
    std::vector<float> data(300, 1);
    bool ok = group.all_reduce(data).ok() && group.broadcast(data, {0}).ok() &&
              group.barrier().ok() && group.hosts() == 2;
    if (rank == 0)
      ok = ok && group.send(data.data(), 10, Type::float32, {1}).ok();
    else
      ok = ok && group.receive(data.data(), 10, Type::float32, {0}).ok();
    Call call;
    call.output = data.data();
    call.count = data.size();
    for (int i = 0; i < 20 && ok; ++i) {
      auto work = group.start(call);
      ok = work.ok();
      if (!ok) break;
      // Twice, so that a list of them has to grow.
      for (int twice = 0; twice < 2; ++twice) {
        out.started += rank == 1 ? 1 : 0;
        work->then([&out, rank](const Result<void>&) { out.told += rank == 1 ? 1 : 0; });
      }
      for (int looks = 0; looks < 100 && !work->test();) ++looks;
      ok = work->wait().ok();
    }
    auto both = group.subgroup(std::array{0u, 1u});
    if (both) ok = (*both)->barrier().ok() && ok;
    std::string reason(100, 'x');
    group.abort(reason);
    while (!group.failure()) static_cast<void>(group.run(call));
  };
  std::vector<std::function<void()>> ranks;
  for (uint32_t rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      auto recorder = capture::Recorder::off();
      Options joining;
      joining.rank = {rank};
      joining.ranks = 2;
      joining.rendezvous = sim::World::address_of({0}) + ":4000";
      joining.secret = "a secret of the test";
      joining.host = text("host%u", rank);
      joining.probe = joining.progress_thread = false;
      joining.network = &world.network_of({rank});
      try {
        sim::Scarce scarce(world, {rank});
        auto group = Group::join(joining, *recorder);
        if (group) use(**group, rank);
      } catch (const std::bad_alloc&) {
        out.threw = true;
      }
    });
  out.outcome = world.run(std::move(ranks));
  out.allocations = world.allocations({1});
  return out;
}

TEST(ScarceCalls, throw_nothing_and_tell_every_callback) {
  log_set_sink([](std::string_view) {});
  uint64_t needed = call_everything(0).allocations, step = std::max<uint64_t>(1, needed / kRuns);
  ASSERT_GT(needed, 300u);
  for (uint64_t at = 1; at <= needed; at += step) {
    Called called = call_everything(at);
    EXPECT_TRUE(called.outcome.complete) << at << ": " << called.outcome.report;
    EXPECT_FALSE(called.threw) << at;
    EXPECT_EQ(called.told, called.started) << at;
  }
  log_set_sink({});
}

// ---- a status, at each of its allocations
// --------------------------------------------------------

struct Asked {
  std::string words;
  uint64_t first = 0, last = 0;  // allocations of status()
  bool complete = false, went_on = false, threw = false;
};

// Rank 1 waits for a sum that rank 0 is late for, and asks how it is doing.
Asked ask_status_with_memory_until(uint64_t at) {
  sim::Options options;
  options.ranks = 2;
  Fault fault;
  fault.kind = Fault::Kind::memory;
  fault.rank = 1;
  fault.at = at;
  fault.count = 3;
  options.faults = {fault};
  sim::World world(options);
  Asked out;
  bool went_on[2] = {};
  std::vector<std::function<void()>> ranks;
  for (uint32_t rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      auto recorder = capture::Recorder::off();
      Options joining;
      joining.rank = {rank};
      joining.ranks = 2;
      joining.rendezvous = sim::World::address_of({0}) + ":4000";
      joining.secret = "a secret of the test";
      joining.host = "a host whose name does not fit into a string by itself";
      joining.probe = joining.progress_thread = false;
      joining.network = &world.network_of({rank});
      auto group = Group::join(joining, *recorder);
      if (!group) return;
      std::vector<float> data(30'000, 1);
      Call call;
      call.output = data.data();
      call.count = data.size();
      // Once together, so that lanes are open.
      if (!(*group)->run(call)) return;
      if (rank == 0)
        if (auto alone = world.network_of({0}).reactor())
          (*alone)->run_once(Nanos::from_millis(50));
      auto work = (*group)->start(call);
      if (rank == 1) {
        out.first = world.allocations({1}) + 1;
        try {
          sim::Scarce scarce(world, {1});
          out.words = (*group)->status();
        } catch (const std::bad_alloc&) {
          out.threw = true;
        }
        out.last = world.allocations({1});
      }
      went_on[rank] = work && work->wait() && (*group)->leave();
    });
  out.complete = world.run(std::move(ranks)).complete;
  out.went_on = went_on[0] && went_on[1];
  return out;
}

TEST(ScarceStatus, is_empty_without_memory_and_the_group_goes_on) {
  log_set_sink([](std::string_view) {});
  Asked whole = ask_status_with_memory_until(UINT64_MAX);
  auto status = nlohmann::json::parse(whole.words, nullptr, false);
  ASSERT_TRUE(status.is_object()) << whole.words;
  EXPECT_EQ(status["rank"], 1);
  EXPECT_EQ(status["operations"].size(), 1u) << whole.words;
  EXPECT_GE(status["lanes"].size(), 2u) << whole.words;
  ASSERT_GT(whole.last, whole.first + 10);
  for (uint64_t at = whole.first; at <= whole.last; ++at) {
    Asked asked = ask_status_with_memory_until(at);
    EXPECT_EQ(asked.words, "{}") << at;
    EXPECT_FALSE(asked.threw) << at;
    EXPECT_TRUE(asked.complete && asked.went_on) << at;
  }
  log_set_sink({});
}

}  // namespace
}  // namespace weft::runtime
