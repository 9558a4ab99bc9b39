// Whole groups in one thread under a seed: random operations on a network that does what networks
// do. Either every rank has the right result, or every survivor knows who is to blame.
//
// WEFT_SIM_SEEDS says how many seeds (1000 unless told), WEFT_SIM_SEED runs one of them alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <regex>
#include <set>

#include "weft/runtime.h"

namespace weft::runtime {
namespace {

namespace sim = net::sim;
using sim::Fault;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kSeeds = 100;  // sanitizers watch every switch of stacks
#else
constexpr uint64_t kSeeds = 1000;
#endif

struct OneCall {
  Collective collective = Collective::all_reduce;
  Algorithm algorithm = Algorithm::ring;
  Type type = Type::float32;
  uint64_t count = 0;
  uint32_t root = 0;
  bool in_place = false;
};

// Everything that a seed decides.
struct Scene {
  uint64_t seed = 0;
  uint32_t ranks = 2;
  uint32_t hosts = 1;
  Nanos spin;
  plan::Plan plan;
  std::vector<OneCall> calls;
  sim::Options world;
};

Scene scene_of(uint64_t seed) {
  Rng rng(seed);
  Scene scene;
  scene.seed = seed;
  scene.ranks = 2 + static_cast<uint32_t>(rng.below(rng.below(4) == 0 ? 6 : 3));
  scene.hosts = 1 + static_cast<uint32_t>(rng.below(scene.ranks));
  scene.spin = Nanos::from_micros(rng.below(2) == 0 ? 0 : 30);
  scene.plan.lanes = 1 + static_cast<uint32_t>(rng.below(4));
  scene.plan.chunk = kib(uint64_t{4} << rng.below(5));
  for (uint64_t i = 0; i <= rng.below(4); ++i) {
    OneCall call;
    call.collective = static_cast<Collective>(1 + rng.below(9));
    call.algorithm = schedule::kAlgorithms[rng.below(std::size(schedule::kAlgorithms))];
    call.type = std::array{Type::float32, Type::int32, Type::int64}[rng.below(3)];
    call.count = rng.below(uint64_t{1} << rng.below(17));
    if (call.collective == Collective::all_to_all) call.count -= call.count % scene.ranks;
    call.root = static_cast<uint32_t>(rng.below(scene.ranks));
    call.in_place = call.collective == Collective::all_reduce && rng.below(2) == 0;
    scene.calls.push_back(call);
  }
  scene.world.ranks = scene.ranks;
  scene.world.seed = seed;
  scene.world.delay_max = Nanos::from_micros(10 + static_cast<double>(rng.below(2000)));
  scene.world.buffer = 4096u << rng.below(8);
  uint64_t connections = scene.ranks - 1 + uint64_t{scene.ranks} * scene.plan.lanes;
  for (uint64_t i = 0, count = rng.below(3); i < count; ++i)
    scene.world.faults.push_back(sim::random_fault(rng, scene.ranks, Nanos::from_seconds(2),
                                                   connections, uint64_t{1} << 20));
  return scene;
}

// What a rank has to say afterwards.
struct Report {
  std::optional<Error> error;
  std::optional<Rank> culprit;
  std::string wrong;  // a result that is not what it must be
  bool joined = false;
  size_t calls_done = 0;
  Nanos ended;
};

// Small integers that differ by rank, place and call: sums are exact in every type.
uint64_t number(uint32_t rank, uint64_t i, size_t call) {
  return (i * 7 + rank * 13 + call * 31) % 97;
}

struct Block {
  uint64_t first, count;
};
Block block_of(uint32_t rank, uint32_t ranks, uint64_t count) {
  uint64_t each = count / ranks, more = count % ranks;
  return {rank * each + std::min<uint64_t>(rank, more), each + (rank < more ? 1 : 0)};
}

template <typename T>
Result<std::string> run_call(Group& group, const OneCall& what, size_t index) {
  uint32_t rank = group.rank().index, ranks = group.ranks();
  Block own = block_of(rank, ranks, what.count);
  bool is_root = rank == what.root;
  Block in{0, what.count}, out{0, what.count};
  switch (what.collective) {
    case Collective::reduce_scatter: out = own; break;
    case Collective::all_gather: in = own; break;
    case Collective::broadcast: in.count = is_root ? what.count : 0; break;
    case Collective::reduce: out.count = is_root ? what.count : 0; break;
    case Collective::gather: in = own, out.count = is_root ? what.count : 0; break;
    case Collective::scatter: in.count = is_root ? what.count : 0, out = own; break;
    default: break;
  }
  std::vector<T> input(in.count), output(out.count, T(-1));
  for (uint64_t i = 0; i < in.count; ++i)
    input[i] = static_cast<T>(number(rank, in.first + i, index));
  if (what.in_place) output = input;
  T none{};
  Call call;
  call.collective = what.collective;
  call.algorithm = what.algorithm;
  call.type = what.type;
  call.count = what.count;
  call.root = what.root;
  call.input = what.in_place ? nullptr : (input.empty() ? &none : input.data());
  call.output = output.empty() ? &none : output.data();
  if (what.collective == Collective::barrier) {
    WEFT_TRY(group.barrier());
    return std::string();
  }
  WEFT_TRY(group.run(call));
  auto expected = [&](uint64_t i) -> uint64_t {
    uint64_t at = out.first + i, sum = 0;
    switch (what.collective) {
      case Collective::all_reduce:
      case Collective::reduce_scatter:
      case Collective::reduce:
        for (uint32_t r = 0; r < ranks; ++r) sum += number(r, at, index);
        return sum;
      case Collective::all_gather:
      case Collective::gather:
        for (uint32_t r = 0; r < ranks; ++r) {
          Block block = block_of(r, ranks, what.count);
          if (at >= block.first && at < block.first + block.count) return number(r, at, index);
        }
        return 0;
      case Collective::all_to_all: {
        uint64_t each = what.count / ranks;
        return number(static_cast<uint32_t>(at / each), rank * each + at % each, index);
      }
      default: return number(what.root, at, index);
    }
  };
  for (uint64_t i = 0; i < output.size(); ++i)
    if (output[i] != static_cast<T>(expected(i)))
      return text("%s by %s, element %llu of %llu", schedule::name_of(what.collective),
                  schedule::name_of(what.algorithm), static_cast<unsigned long long>(i),
                  static_cast<unsigned long long>(output.size()));
  return std::string();
}

Result<void> use(Group& group, const Scene& scene, Report& report) {
  for (size_t i = 0; i < scene.calls.size(); ++i) {
    const OneCall& call = scene.calls[i];
    auto wrong = call.type == Type::float32 ? run_call<float>(group, call, i)
                 : call.type == Type::int32 ? run_call<int32_t>(group, call, i)
                                            : run_call<int64_t>(group, call, i);
    WEFT_TRY(wrong);
    if (!wrong->empty()) report.wrong = *wrong;
    ++report.calls_done;
  }
  return group.leave();
}

struct Played {
  sim::Outcome outcome;
  std::vector<Report> reports;
  std::vector<std::optional<Nanos>> died;
  std::vector<std::set<uint32_t>> suspects;  // by rank: who it may blame
  bool harmless = true;                      // nothing that a group may fail of
  uint64_t course = 0;
  std::string lines;
};

// Whom each rank may blame, and whether the group must live with what happened.
void judge(const Scene& scene, const sim::World& world, Played& played) {
  played.suspects.resize(scene.ranks);
  auto touches = [&](uint32_t rank) {
    for (auto& suspects : played.suspects) suspects.insert(rank);
  };
  for (const Fault& fault : scene.world.faults) {
    auto ends = world.ends_of(fault.connection);
    switch (fault.kind) {
      case Fault::Kind::spike:
      case Fault::Kind::slow: break;
      case Fault::Kind::partition:
        if (fault.until != sim::kForever) break;
        played.harmless = false;
        touches(fault.rank);
        if (fault.other != sim::kEveryone) touches(fault.other);
        // Who is cut off from everyone cannot know that it is not the others.
        for (uint32_t rank = 0; rank < scene.ranks; ++rank)
          played.suspects[fault.rank].insert(rank);
        break;
      case Fault::Kind::stop:
        if (fault.until != sim::kForever) break;
        played.harmless = false;
        touches(fault.rank);
        break;
      case Fault::Kind::reset:
      case Fault::Kind::half_open:
      case Fault::Kind::corrupt:
        if (!ends) break;
        // A lane is opened again; the channel to rank 0 is not.
        if (fault.kind == Fault::Kind::reset && ends->second.index != 0) break;
        played.harmless = false;
        touches(ends->first.index);
        touches(ends->second.index);
        break;
      case Fault::Kind::death:
      case Fault::Kind::power_loss:
        if (!world.died({fault.rank})) break;
        played.harmless = false;
        touches(fault.rank);
        break;
    }
  }
}

Played play(const Scene& scene, bool keep_lines = false) {
  sim::Options options = scene.world;
  options.keep_lines = keep_lines;
  sim::World world(options);
  Played played;
  played.reports.resize(scene.ranks);
  std::vector<std::function<void()>> bodies;
  for (uint32_t rank = 0; rank < scene.ranks; ++rank)
    bodies.emplace_back([&, rank] {
      Report& report = played.reports[rank];
      Options joining;
      joining.rank = {rank};
      joining.ranks = scene.ranks;
      joining.rendezvous = sim::World::address_of({0}) + ":4000";
      joining.secret = "a secret of the test";
      joining.host = text("host%u", rank % scene.hosts);
      joining.plan = scene.plan;
      joining.probe = false;
      joining.shared_memory = false;
      joining.sealed = scene.seed % 4 == 3;
      joining.spin = scene.spin;
      joining.progress_thread = false;
      joining.network = &world.network_of({rank});
      auto recorder = capture::Recorder::off();
      auto group = Group::join(joining, *recorder);
      if (!group) {
        report.error = group.error();
      } else {
        report.joined = true;
        if (auto used = use(**group, scene, report); !used) report.error = used.error();
        report.culprit = (*group)->culprit();
      }
      report.ended = world.network_of({rank}).clock().now();
    });
  played.outcome = world.run(std::move(bodies));
  for (uint32_t rank = 0; rank < scene.ranks; ++rank) played.died.push_back(world.died({rank}));
  judge(scene, world, played);
  played.course = world.course();
  played.lines = world.lines();
  return played;
}

// Whether the words speak of one of the ranks: "rank 3", "ranks 1, 3 and 4".
bool names(const std::string& words, const std::set<uint32_t>& ranks) {
  static const std::regex kList("ranks? ((\\d+)(, \\d+)*( and \\d+)?)");
  static const std::regex kNumber("\\d+");
  for (std::sregex_iterator list(words.begin(), words.end(), kList), end; list != end; ++list) {
    std::string numbers = (*list)[1];
    for (std::sregex_iterator one(numbers.begin(), numbers.end(), kNumber); one != end; ++one)
      if (ranks.contains(static_cast<uint32_t>(std::stoul(one->str())))) return true;
  }
  return false;
}

// What is not as it must be; empty if all is well.
std::string verdict(const Scene& scene, const Played& played) {
  if (!played.outcome.complete) return "it hangs: " + played.outcome.report;
  if (played.outcome.took.seconds() > 120) return "it took " + format_duration(played.outcome.took);
  size_t failed = 0, well = 0;
  size_t least_done = scene.calls.size();
  for (uint32_t rank = 0; rank < scene.ranks; ++rank) {
    const Report& report = played.reports[rank];
    if (!report.wrong.empty()) return text("rank %u: wrong: %s", rank, report.wrong.c_str());
    if (played.outcome.died[rank]) continue;
    if (!report.error) {
      ++well;
      continue;
    }
    ++failed;
    least_done = std::min(least_done, report.calls_done);
    std::string told = text("rank %u: %s", rank, report.error->message().c_str());
    if (played.harmless) return "failed of something harmless: " + told;
    if (report.joined && !report.culprit) return "blames nobody: " + told;
    if (report.joined && !played.suspects[rank].contains(report.culprit->index))
      return text("blames rank %u: %s", report.culprit->index, told.c_str());
    if (!names(report.error->message(), played.suspects[rank])) return "names nobody: " + told;
  }
  // Some may be through when it happens to the others, but then all the work was done.
  if (failed > 0 && well > 0 && least_done < scene.calls.size())
    return text("%zu ranks failed, and %zu did not notice", failed, well);
  return {};
}

std::string describe(const Scene& scene) {
  std::string out = text("%u ranks on %u hosts, %u lanes, chunks of %s", scene.ranks, scene.hosts,
                         scene.plan.lanes, format_bytes(scene.plan.chunk).c_str());
  for (const OneCall& call : scene.calls)
    out += text("; %s by %s of %llu", schedule::name_of(call.collective),
                schedule::name_of(call.algorithm), static_cast<unsigned long long>(call.count));
  for (const Fault& fault : scene.world.faults) out += "; " + sim::to_text(fault);
  return out;
}

std::optional<uint64_t> from_environment(const char* name) {
  const char* words = std::getenv(name);
  if (words == nullptr) return std::nullopt;
  return std::strtoull(words, nullptr, 10);
}

// What is refused here is refused on purpose.
class Simulation : public testing::Test {
 protected:
  Simulation() {
    if (!from_environment("WEFT_SIM_SEED")) log_set_sink([](std::string_view) {});
  }
  ~Simulation() override { log_set_sink({}); }
};

TEST_F(Simulation, ends_right_or_with_a_culprit_under_every_seed) {
  std::optional<uint64_t> alone = from_environment("WEFT_SIM_SEED");
  uint64_t first = alone.value_or(1);
  uint64_t last = alone.value_or(from_environment("WEFT_SIM_SEEDS").value_or(kSeeds));
  size_t right = 0, failed = 0, wrong = 0;
  for (uint64_t seed = first; seed <= last && wrong < 20; ++seed) {
    Scene scene = scene_of(seed);
    Played played = play(scene, alone.has_value());
    std::string problem = verdict(scene, played);
    if (!problem.empty()) {
      ++wrong;
      ADD_FAILURE() << "WEFT_SIM_SEED=" << seed << ": " << problem << "\n  " << describe(scene);
    }
    if (alone) std::fputs(played.lines.c_str(), stderr);
    bool any = std::any_of(played.reports.begin(), played.reports.end(),
                           [](const Report& report) { return report.error.has_value(); });
    ++(any ? failed : right);
  }
  if (alone) return;
  EXPECT_GT(right, (last - first + 1) / 4);
  EXPECT_GT(failed, (last - first + 1) / 20);
}

TEST_F(Simulation, replays_exactly) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    Scene scene = scene_of(seed);
    Played one = play(scene, true), two = play(scene, true);
    EXPECT_EQ(one.course, two.course) << seed;
    EXPECT_EQ(one.lines, two.lines) << seed;
    EXPECT_EQ(one.outcome.took, two.outcome.took) << seed;
  }
}

TEST_F(Simulation, death_of_a_rank_reaches_the_others_within_a_second) {
  size_t seen = 0;
  std::optional<uint64_t> alone = from_environment("WEFT_SIM_SEED");
  for (uint64_t seed = alone.value_or(1); seed <= alone.value_or(300); ++seed) {
    Scene scene = scene_of(seed);
    Rng rng(seed);
    Fault fault;
    fault.kind = Fault::Kind::death;
    fault.rank = static_cast<uint32_t>(rng.below(scene.ranks));
    fault.at = 20 + rng.below(200);
    scene.world.faults = {fault};
    Played played = play(scene, alone.has_value());
    if (alone) std::fputs(played.lines.c_str(), stderr);
    EXPECT_EQ(verdict(scene, played), "") << "WEFT_SIM_SEED=" << seed << "\n  " << describe(scene);
    for (uint32_t rank = 0; rank < scene.ranks; ++rank) {
      const Report& report = played.reports[rank];
      if (!played.died[fault.rank] || rank == fault.rank || !report.joined || !report.error)
        continue;
      ++seen;
      EXPECT_LE((report.ended - *played.died[fault.rank]).seconds(), 1.0)
          << seed << " rank " << rank << ": " << report.error->message();
    }
  }
  EXPECT_TRUE(alone || seen > 100) << seen;
}

}  // namespace
}  // namespace weft::runtime
