// What a seed decides: a group, what it does, and what goes wrong meanwhile.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <numeric>

#include "weft/runtime.h"

namespace weft::runtime::simulated {

namespace sim = net::sim;
using sim::Fault;

struct OneCall {
  Collective collective = Collective::all_reduce;
  Algorithm algorithm = Algorithm::ring;
  Type type = Type::float32;
  uint64_t count = 0;
  uint32_t root = 0;
  bool in_place = false;
};

// One thing that the ranks do together.
struct Act {
  enum class Kind : uint8_t {
    call,      // all, one operation
    together,  // all, several operations at once, waited for in an order of each rank's own
    subgroup,  // `members` only, one operation among them
    pair,      // members[0] sends to members[1]
    shift,     // everyone sends to the next and receives from the one before, at once
    exchange,  // gradients of `tensors`, in `steps`
    abort,     // members[0] ends the group
    quit,      // members[0] is gone without a word, and its process lives
  };
  Kind kind = Kind::call;
  std::vector<OneCall> calls;
  std::vector<uint32_t> members;
  std::vector<uint64_t> tensors;  // elements
  uint64_t steps = 0;
};

// A rank dies a few waits after it has begun something.
struct Doom {
  enum class When : uint8_t { leaving, rebuilding, rebuilt };
  uint32_t rank = 0;
  When when = When::leaving;
  uint64_t waits = 1;
  bool silently = false;
};

struct Scene {
  uint64_t seed = 0;
  uint32_t ranks = 2;
  uint32_t hosts = 1;
  bool sealed = false;
  bool by_file = false;  // where rank 0 listens is said by a file
  bool shares = true;    // memory, with those on the same machine
  bool traced = false;
  uint32_t fan_out = 0;  // of agreement; 0: as costs say, so that all report to rank 0
  Nanos spin;
  plan::Plan plan;
  std::vector<Act> acts;
  std::vector<Doom> dooms;
  std::vector<Nanos> thinks;  // by rank: between a failure and the rebuilding
  sim::Options world;
};

inline OneCall random_call(Rng& rng, uint32_t ranks, uint64_t largest) {
  OneCall call;
  call.collective = static_cast<Collective>(1 + rng.below(9));
  call.algorithm = schedule::kAlgorithms[rng.below(std::size(schedule::kAlgorithms))];
  call.type = std::array{Type::float32, Type::int32, Type::int64}[rng.below(3)];
  call.count = rng.below(std::max<uint64_t>(largest >> rng.below(17), 1));
  if (call.collective == Collective::all_to_all) call.count -= call.count % ranks;
  call.root = static_cast<uint32_t>(rng.below(ranks));
  call.in_place = call.collective == Collective::all_reduce && rng.below(2) == 0;
  return call;
}

template <typename T>
void shuffle(Rng& rng, std::vector<T>& values) {
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[rng.below(i)]);
}

inline Act random_act(Rng& rng, uint32_t ranks, uint64_t largest, bool may_exchange) {
  Act act;
  act.members.resize(ranks);
  std::iota(act.members.begin(), act.members.end(), 0u);
  shuffle(rng, act.members);
  switch (rng.below(may_exchange ? 12 : 10)) {
    case 0:
    case 1:
      act.kind = Act::Kind::together;
      for (uint64_t i = 0; i < 2 + rng.below(3); ++i)
        act.calls.push_back(random_call(rng, ranks, largest / 4));
      return act;
    case 2:
    case 3:
      act.kind = Act::Kind::subgroup;
      act.members.resize(1 + rng.below(ranks));
      act.calls.push_back(random_call(rng, static_cast<uint32_t>(act.members.size()), largest / 2));
      return act;
    case 4:
      act.kind = Act::Kind::pair;
      act.calls.push_back(random_call(rng, ranks, largest));
      return act;
    case 5:
      act.kind = Act::Kind::shift;
      act.calls.push_back(random_call(rng, ranks, largest / 2));
      return act;
    case 10:
    case 11:
      act.kind = Act::Kind::exchange;
      act.steps = 1 + rng.below(3);
      for (uint64_t i = 0; i < 1 + rng.below(8); ++i)
        act.tensors.push_back(1 + rng.below(std::max<uint64_t>((largest / 2) >> rng.below(12), 1)));
      return act;
    default: act.calls.push_back(random_call(rng, ranks, largest)); return act;
  }
}

// How the network is cut, who stands still and who dies: faults that belong together.
inline void add_trouble(Rng& rng, Scene& scene) {
  auto fault = [&](Fault::Kind kind, uint32_t rank, Nanos from, Nanos until) {
    Fault made;
    made.kind = kind;
    made.rank = rank;
    made.from = from;
    made.until = until;
    return made;
  };
  auto any = [&] { return static_cast<uint32_t>(rng.below(scene.ranks)); };
  auto millis = [&](uint64_t bound) {
    return Nanos::from_millis(
        static_cast<double>(1 + rng.below(std::max<uint64_t>(bound >> rng.below(8), 1))));
  };
  auto& faults = scene.world.faults;
  Nanos from = millis(1000);
  switch (rng.below(8)) {
    case 0: {  // a cut through the middle, which may heal
      Nanos until = rng.below(4) == 0 ? sim::kForever : from + millis(60'000);
      std::vector<uint32_t> side(scene.ranks);
      for (uint32_t& half : side) half = static_cast<uint32_t>(rng.below(2));
      for (uint32_t one = 0; one < scene.ranks; ++one)
        for (uint32_t two = one + 1; two < scene.ranks; ++two) {
          if (side[one] == side[two]) continue;
          faults.push_back(fault(Fault::Kind::partition, one, from, until));
          faults.back().other = two;
        }
      return;
    }
    case 1: {  // everyone is stopped, and goes on at about the same time
      Nanos until = from + millis(100'000);
      for (uint32_t rank = 0; rank < scene.ranks; ++rank)
        faults.push_back(fault(Fault::Kind::stop, rank, from + millis(50), until + millis(500)));
      return;
    }
    case 2: {  // one is stopped, perhaps for too long
      faults.push_back(fault(Fault::Kind::stop, any(), from, from + millis(60'000)));
      return;
    }
    case 3:
    case 4: {  // several die
      for (uint64_t i = 0; i < 2 + rng.below(2); ++i) {
        faults.push_back(fault(rng.below(4) == 0 ? Fault::Kind::power_loss : Fault::Kind::death,
                               any(), from, sim::kForever));
        faults.back().at = 1 + rng.below(uint64_t{1} << rng.below(12));
      }
      return;
    }
    case 5: {  // someone ends it for all
      Act act;
      act.kind = rng.below(2) == 0 ? Act::Kind::abort : Act::Kind::quit;
      act.members = {any()};
      auto place = static_cast<ptrdiff_t>(rng.below(scene.acts.size() + 1));
      scene.acts.insert(scene.acts.begin() + place, act);
      return;
    }
    case 6:
      scene.dooms.push_back(
          {any(), Doom::When::leaving, 1 + rng.below(uint64_t{1} << rng.below(6)), false});
      return;
    default: {  // one dies, and another when the rest meet again
      faults.push_back(fault(Fault::Kind::death, any(), from, sim::kForever));
      faults.back().at = 1 + rng.below(uint64_t{1} << rng.below(12));
      scene.dooms.push_back({any(),
                             rng.below(2) == 0 ? Doom::When::rebuilding : Doom::When::rebuilt,
                             1 + rng.below(uint64_t{1} << rng.below(10)), rng.below(4) == 0});
      return;
    }
  }
}

// Lanes that others serve, who stand still or end now and then.
inline void add_workers(Rng& rng, Scene& scene) {
  scene.plan.lane_workers = 2 + static_cast<uint32_t>(rng.below(2));
  scene.plan.lanes = std::max(scene.plan.lanes, scene.plan.lane_workers);
  if (rng.below(3) != 0) return;
  Fault fault;
  fault.kind = rng.below(2) == 0 ? Fault::Kind::task_stop : Fault::Kind::task_end;
  fault.rank = static_cast<uint32_t>(rng.below(scene.ranks));
  fault.from = Nanos::from_micros(static_cast<double>(rng.below(uint64_t{1} << rng.below(18))));
  if (rng.below(2) == 0)
    fault.until = fault.from + Nanos::from_millis(static_cast<double>(rng.below(8000)));
  fault.at = 1 + rng.below(uint64_t{1} << rng.below(9));
  scene.world.faults.push_back(fault);
}

// The system of one rank refuses it something, once.
inline void add_refusal(Rng& rng, Scene& scene) {
  Fault fault;
  fault.kind = Fault::Kind::refusal;
  fault.rank = static_cast<uint32_t>(rng.below(scene.ranks));
  fault.at = 1 + rng.below(uint64_t{1} << rng.below(7));
  scene.world.faults.push_back(fault);
}

// Ranks of one host share memory, unless they are in containers that keep them apart. Rings are
// small enough to be full now and then, and may be smaller than a chunk.
inline void add_shared_memory(Rng& rng, Scene& scene) {
  bool apart = rng.below(4) == 0;
  for (uint32_t rank = 0; rank < scene.ranks; ++rank)
    scene.world.machines.push_back(rank % scene.hosts +
                                   (apart ? scene.hosts * static_cast<uint32_t>(rng.below(2)) : 0));
  scene.world.ring = 4096u << rng.below(8);
}

// One rank finds no memory: once, a few times in a row, or never again. Small numbers as often as
// large ones, so that every phase is met.
inline void add_memory(Rng rng, Scene& scene) {
  if (rng.below(8) != 0) return;
  Fault fault;
  fault.kind = Fault::Kind::memory;
  fault.rank = static_cast<uint32_t>(rng.below(scene.ranks));
  fault.at = 1 + rng.below(uint64_t{1} << rng.below(13));
  switch (rng.below(4)) {
    case 0: fault.count = 2 + rng.below(8); break;
    case 1: fault.count = UINT64_MAX; break;
    default: break;
  }
  scene.world.faults.push_back(fault);
}

// Ranks of one machine that find each other by a file, and ranks that write traces; one of them
// gets an error for what it asks of its files, or is only interrupted, or gets half of it.
inline void add_files(Rng rng, Scene& scene) {
  scene.by_file = rng.below(4) == 0;
  scene.traced = rng.below(4) == 0;
  if (scene.by_file) {
    scene.shares = !scene.world.machines.empty();
    scene.world.machines.assign(scene.ranks, 0);
    scene.hosts = 1;
  }
  if ((!scene.by_file && !scene.traced) || rng.below(2) == 0) return;
  Fault fault;
  fault.kind = Fault::Kind::file;
  fault.rank = static_cast<uint32_t>(rng.below(scene.ranks));
  fault.at = 1 + rng.below(uint64_t{1} << rng.below(7));
  fault.failure = std::array{ENOSPC, EACCES, EIO, EMFILE, EINTR, 0}[rng.below(6)];
  switch (rng.below(4)) {
    case 0: fault.count = 2 + rng.below(8); break;
    case 1: fault.count = fault.failure == EINTR ? 20 : UINT64_MAX; break;
    default: break;
  }
  scene.world.faults.push_back(fault);
}

// Some agree along a tree, or a chain.
inline void add_tree(Rng rng, Scene& scene) {
  if (rng.below(2) == 0) scene.fan_out = 1 + static_cast<uint32_t>(rng.below(3));
}

inline Scene scene_of(uint64_t seed) {
  Rng rng(seed);
  Scene scene;
  scene.seed = seed;
  scene.sealed = seed % 4 == 3;
  scene.ranks = 2 + static_cast<uint32_t>(rng.below(rng.below(4) == 0 ? 6 : 3));
  scene.hosts = 1 + static_cast<uint32_t>(rng.below(scene.ranks));
  scene.spin = Nanos::from_micros(rng.below(2) == 0 ? 0 : 30);
  scene.plan.lanes = 1 + static_cast<uint32_t>(rng.below(4));
  // Up to four times of what a lane keeps until its receipt, with operations that need several.
  scene.plan.chunk = kib(uint64_t{4} << rng.below(7));
  uint64_t largest = uint64_t{1} << (scene.plan.chunk > Bytes{schedule::kKeptBytes} ? 18 : 15);
  scene.plan.bucket_rule.first = kib(1 + rng.below(64));
  scene.plan.bucket_rule.size = kib(1 + rng.below(256));
  if (rng.below(2) == 0) scene.plan.partition = kib(4 + rng.below(64));
  if (rng.below(2) == 0) scene.plan.credit = kib(4 + rng.below(256));
  if (rng.below(2) == 0) scene.plan.order = plan::Order::layer;
  if (rng.below(2) == 0) scene.plan.barrier = plan::Barrier::tensor;
  bool exchanged = false;
  for (uint64_t i = 0; i <= rng.below(4); ++i) {
    scene.acts.push_back(random_act(rng, scene.ranks, largest, !exchanged));
    exchanged = exchanged || scene.acts.back().kind == Act::Kind::exchange;
  }
  scene.world.ranks = scene.ranks;
  scene.world.seed = seed;
  scene.world.delay_max = Nanos::from_micros(10 + static_cast<double>(rng.below(2000)));
  scene.world.buffer = 4096u << rng.below(8);
  scene.world.time_max = Nanos::from_seconds(600);
  uint64_t connections = scene.ranks - 1 + uint64_t{scene.ranks} * scene.plan.lanes;
  for (uint64_t i = 0, count = rng.below(3); i < count; ++i)
    scene.world.faults.push_back(sim::random_fault(rng, scene.ranks, Nanos::from_seconds(2),
                                                   connections, uint64_t{1} << 20));
  if (rng.below(3) == 0) add_trouble(rng, scene);
  if (rng.below(3) == 0) add_workers(rng, scene);
  if (rng.below(8) == 0) add_refusal(rng, scene);
  if (rng.below(2) == 0) add_shared_memory(rng, scene);
  for (uint32_t rank = 0; rank < scene.ranks; ++rank)
    scene.thinks.push_back(Nanos::from_millis(static_cast<double>(rng.below(300))));
  // By numbers of their own: what else the seed decides stays.
  add_memory(Rng(~seed), scene);
  add_files(Rng(seed ^ 0xf11e5), scene);
  add_tree(Rng(seed ^ 0x7ee), scene);
  return scene;
}

inline std::string describe(const Scene& scene) {
  static constexpr const char* kActs[] = {"call",  "together", "subgroup", "pair",
                                          "shift", "exchange", "abort",    "quit"};
  static constexpr const char* kWhen[] = {"leaving", "rebuilding", "rebuilt"};
  std::string out =
      text("%u ranks on %u hosts, %u lanes, %u workers, chunks of %s", scene.ranks, scene.hosts,
           scene.plan.lanes, scene.plan.lane_workers, format_bytes(scene.plan.chunk).c_str());
  if (!scene.world.machines.empty()) {
    out += text(", rings of %s on machines", format_bytes(Bytes{scene.world.ring}).c_str());
    for (uint32_t machine : scene.world.machines) out += text(" %u", machine);
  }
  if (scene.by_file) out += scene.shares ? ", by a file" : ", by a file, sharing nothing";
  if (scene.traced) out += ", traced";
  if (scene.fan_out > 0) out += text(", fan-out %u", scene.fan_out);
  for (const Act& act : scene.acts) {
    out += text("; %s", kActs[static_cast<size_t>(act.kind)]);
    if (act.kind != Act::Kind::call && act.kind != Act::Kind::exchange)
      for (uint32_t member : act.members) out += text(" %u", member);
    for (const OneCall& call : act.calls)
      out += text(", %s by %s of %llu", schedule::name_of(call.collective),
                  schedule::name_of(call.algorithm), static_cast<unsigned long long>(call.count));
    if (act.steps > 0)
      out += text(" of %zu tensors, %llu steps", act.tensors.size(),
                  static_cast<unsigned long long>(act.steps));
  }
  for (const Fault& fault : scene.world.faults) out += "; " + sim::to_text(fault);
  for (const Doom& doom : scene.dooms)
    out += text("; rank %u %s at wait %llu of %s", doom.rank, doom.silently ? "goes dark" : "dies",
                static_cast<unsigned long long>(doom.waits), kWhen[static_cast<size_t>(doom.when)]);
  return out;
}

}  // namespace weft::runtime::simulated
