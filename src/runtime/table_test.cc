// The table: every collective and algorithm, over every transport, whoever serves the lanes, sealed
// or not, for any number of ranks, size, type and operation, in place or not, against a reference
// that is exact.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <numeric>

#include "testing.h"
#include "weft_testing/lane_worker.h"

namespace weft::runtime {
namespace {

// This program is also the auxiliary process of its ranks.
[[maybe_unused]] const bool kServes = lane::serve_lanes_if_asked();

using testing_support::run_ranks;

constexpr Type kTypes[] = {Type::float32, Type::float64, Type::float16, Type::bfloat16, Type::int8,
                           Type::int16,   Type::int32,   Type::int64,   Type::uint8};
constexpr Op kOps[] = {Op::sum,     Op::mean,    Op::min,    Op::max,
                       Op::product, Op::bit_and, Op::bit_or, Op::bit_xor};
constexpr Collective kMoving[] = {Collective::all_gather, Collective::broadcast, Collective::gather,
                                  Collective::scatter, Collective::all_to_all};
constexpr Collective kReducing[] = {Collective::all_reduce, Collective::reduce_scatter,
                                    Collective::reduce};

bool reduces(Collective collective) {
  return std::find(std::begin(kReducing), std::end(kReducing), collective) != std::end(kReducing);
}

// ---- values ------------------------------------------------------------------------------

template <typename T>
std::vector<std::byte> pack(const std::vector<int64_t>& values) {
  std::vector<std::byte> out(values.size() * sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    T one = static_cast<T>(values[i]);
    std::memcpy(out.data() + i * sizeof(T), &one, sizeof one);
  }
  return out;
}

std::vector<std::byte> encode(Type type, const std::vector<int64_t>& values) {
  switch (type) {
    case Type::float32: return pack<float>(values);
    case Type::float64: return pack<double>(values);
    case Type::int8: return pack<int8_t>(values);
    case Type::int16: return pack<int16_t>(values);
    case Type::int32: return pack<int32_t>(values);
    case Type::int64: return pack<int64_t>(values);
    case Type::uint8: return pack<uint8_t>(values);
    case Type::float16:
    case Type::bfloat16: break;
  }
  std::vector<std::byte> floats = pack<float>(values), out(values.size() * 2);
  reduce::narrow(type, out.data(), reinterpret_cast<const float*>(floats.data()), values.size());
  return out;
}

struct Case {
  Collective collective = Collective::all_reduce;
  std::optional<Algorithm> algorithm;
  Type type = Type::float32;
  Op op = Op::sum;
  uint64_t count = 0;
  uint32_t root = 0;
  bool in_place = false;
  bool uneven = false;
  uint64_t salt = 0;

  std::string words() const {
    return text("%s %s of %llu %s, %s, root %u%s%s, salt %llu", schedule::name_of(collective),
                algorithm ? schedule::name_of(*algorithm) : "auto",
                static_cast<unsigned long long>(count), reduce::name_of(type), reduce::name_of(op),
                root, in_place ? ", in place" : "", uneven ? ", uneven" : "",
                static_cast<unsigned long long>(salt));
  }
};

// Small enough that any result of eight ranks is exact in every type, or wraps as integers do.
int64_t value(const Case& what, uint32_t rank, uint64_t i) {
  uint64_t mixed = i * 7 + rank * 11 + what.salt;
  if (what.op == Op::product && reduces(what.collective)) return mixed % 3 == 0 ? 2 : 1;
  return static_cast<int64_t>(mixed % 16) - (what.type == Type::uint8 ? 0 : 5);
}

int64_t reduced(const Case& what, uint32_t ranks, uint64_t i) {
  int64_t out = value(what, 0, i);
  for (uint32_t rank = 1; rank < ranks; ++rank) {
    int64_t next = value(what, rank, i);
    switch (what.op) {
      case Op::sum:
      case Op::mean: out += next; break;
      case Op::min: out = std::min(out, next); break;
      case Op::max: out = std::max(out, next); break;
      case Op::product: out *= next; break;
      case Op::bit_and: out &= next; break;
      case Op::bit_or: out |= next; break;
      case Op::bit_xor: out ^= next; break;
    }
  }
  return out;
}

// ---- one case on one rank ------------------------------------------------------------------

// Memory with a margin on both sides, which nobody may touch.
class Guarded {
 public:
  static constexpr size_t kMargin = 64;
  static constexpr std::byte kMark{0xa5};
  explicit Guarded(size_t bytes) : memory_(bytes + 2 * kMargin, kMark) {}
  std::byte* data() { return memory_.data() + kMargin; }
  size_t size() const { return memory_.size() - 2 * kMargin; }
  void set(size_t at, const std::vector<std::byte>& bytes) {
    std::copy(bytes.begin(), bytes.end(), memory_.begin() + static_cast<ptrdiff_t>(kMargin + at));
  }
  bool holds(size_t at, const std::vector<std::byte>& bytes) const {
    return std::equal(bytes.begin(), bytes.end(),
                      memory_.begin() + static_cast<ptrdiff_t>(kMargin + at));
  }
  bool margins_hold() const {
    auto marked = [](std::byte b) { return b == kMark; };
    return std::all_of(memory_.begin(), memory_.begin() + kMargin, marked) &&
           std::all_of(memory_.end() - kMargin, memory_.end(), marked);
  }

 private:
  std::vector<std::byte> memory_;
};

std::vector<uint64_t> blocks_of(const Case& what, uint32_t ranks) {
  std::vector<uint64_t> out(ranks);
  for (uint32_t r = 0; r < ranks; ++r)
    out[r] = what.uneven ? (r * 131 + what.salt * 17) % 5 * (what.count / (2 * ranks) + 1)
                         : what.count / ranks + (r < what.count % ranks ? 1 : 0);
  return out;
}
uint64_t total(const std::vector<uint64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}
uint64_t before(const std::vector<uint64_t>& counts, uint32_t rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, uint64_t{0});
}
// all_to_all: what `from` sends to `to`.
uint64_t between(const Case& what, uint32_t ranks, uint32_t from, uint32_t to) {
  if (!what.uneven) return what.count / ranks;
  return (from * 7 + to * 13 + what.salt) % 4 * (what.count / (2 * ranks) + 1);
}

// What goes in and what must come out of a rank, as elements.
struct Sides {
  std::vector<int64_t> input, output;
  std::vector<uint64_t> counts, receive_counts;
  uint64_t count = 0;
  int64_t output_at = 0;  // where the output lies in the input, or, negative, the other way round
};

Sides all_to_all_sides(const Case& what, uint32_t rank, uint32_t ranks) {
  Sides out;
  for (uint32_t peer = 0; peer < ranks; ++peer) {
    out.counts.push_back(between(what, ranks, rank, peer));
    out.receive_counts.push_back(between(what, ranks, peer, rank));
    for (uint64_t i = 0; i < out.counts.back(); ++i)
      out.input.push_back(value(what, rank, peer * 1000 + i));
    for (uint64_t i = 0; i < out.receive_counts.back(); ++i)
      out.output.push_back(value(what, peer, rank * 1000 + i));
  }
  out.count = out.input.size();
  if (!what.uneven) out.counts.clear(), out.receive_counts.clear();
  return out;
}

Sides sides_of(const Case& what, uint32_t rank, uint32_t ranks) {
  if (what.collective == Collective::all_to_all) return all_to_all_sides(what, rank, ranks);
  Sides out;
  std::vector<uint64_t> blocks = blocks_of(what, ranks);
  bool blocked = what.collective != Collective::all_reduce &&
                 what.collective != Collective::broadcast && what.collective != Collective::reduce;
  out.count = blocked ? total(blocks) : what.count;
  if (blocked && what.uneven) out.counts = blocks;
  bool root = rank == what.root;
  auto fill = [](std::vector<int64_t>& to, uint64_t first, uint64_t count, auto&& f) {
    for (uint64_t i = first; i < first + count; ++i) to.push_back(f(i));
  };
  auto mine = [&](uint64_t i) { return value(what, rank, i); };
  auto roots = [&](uint64_t i) { return value(what, what.root, i); };
  auto result = [&](uint64_t i) { return reduced(what, ranks, i); };
  auto owners = [&](std::vector<int64_t>& to) {
    for (uint32_t r = 0; r < ranks; ++r)
      fill(to, before(blocks, r), blocks[r], [&](uint64_t i) { return value(what, r, i); });
  };
  uint64_t first = before(blocks, rank), own = blocks[rank];
  switch (what.collective) {
    case Collective::all_reduce:
      fill(out.input, 0, out.count, mine);
      fill(out.output, 0, out.count, result);
      break;
    case Collective::reduce_scatter:
      fill(out.input, 0, out.count, mine);
      fill(out.output, first, own, result);
      out.output_at = static_cast<int64_t>(first);
      break;
    case Collective::all_gather:
      fill(out.input, first, own, mine);
      owners(out.output);
      out.output_at = -static_cast<int64_t>(first);
      break;
    case Collective::broadcast:
      if (root) fill(out.input, 0, out.count, mine);
      fill(out.output, 0, out.count, roots);
      break;
    case Collective::reduce:
      fill(out.input, 0, out.count, mine);
      if (root) fill(out.output, 0, out.count, result);
      break;
    case Collective::gather:
      fill(out.input, first, own, mine);
      if (root) owners(out.output);
      out.output_at = -static_cast<int64_t>(first);
      break;
    case Collective::scatter:
      if (root) fill(out.input, 0, out.count, mine);
      fill(out.output, first, own, roots);
      out.output_at = static_cast<int64_t>(first);
      break;
    default: WEFT_CHECK(false);
  }
  return out;
}

Result<void> run_case(Group& group, const Case& what) {
  uint32_t rank = group.rank().index, ranks = group.ranks();
  Sides sides = sides_of(what, rank, ranks);
  size_t size = reduce::size_of(what.type);
  std::vector<std::byte> in = encode(what.type, sides.input);
  std::vector<std::byte> expected = encode(what.type, sides.output);
  if (reduces(what.collective))
    reduce::finish(what.op, what.type, expected.data(), sides.output.size(), ranks);
  // In place: one of the two lies in the other, unless this rank has only one.
  bool shares = what.in_place && !in.empty() && !expected.empty();
  size_t at_in = shares && sides.output_at < 0 ? static_cast<size_t>(-sides.output_at) * size : 0;
  size_t at_out = shares && sides.output_at > 0 ? static_cast<size_t>(sides.output_at) * size : 0;
  Guarded input(shares ? std::max(in.size() + at_in, expected.size() + at_out) : in.size());
  Guarded output(shares ? 0 : expected.size());
  input.set(at_in, in);
  Call call;
  call.collective = what.collective;
  call.input = in.empty() ? nullptr : input.data() + at_in;
  call.output = shares ? input.data() + at_out : expected.empty() ? nullptr : output.data();
  // Half of what is in place is said by leaving one out.
  if (shares && what.salt % 2 == 0) {
    bool in_input =
        what.collective == Collective::reduce_scatter || what.collective == Collective::scatter;
    if (in_input)
      call.output = nullptr;
    else
      call.input = nullptr;
  }
  call.count = sides.count;
  call.type = what.type;
  call.op = what.op;
  call.root = what.root;
  call.counts = sides.counts;
  call.receive_counts = sides.receive_counts;
  call.algorithm = what.algorithm;
  if (auto done = group.run(call); !done) return std::move(done).error().in(what.words());
  Guarded& result = shares ? input : output;
  if (!result.holds(at_out, expected))
    return error(Code::corrupt, "rank %u: wrong result of %s", rank, what.words().c_str());
  if (!shares && !input.holds(0, in))
    return error(Code::corrupt, "rank %u: input changed by %s", rank, what.words().c_str());
  if (!input.margins_hold() || !output.margins_hold())
    return error(Code::corrupt, "rank %u: wrote beyond the end: %s", rank, what.words().c_str());
  return {};
}

// ---- the cases -----------------------------------------------------------------------------

std::vector<uint64_t> small_sizes(uint32_t ranks) {
  return {0, 1, ranks - 1, ranks, 3 * ranks + 1, 4999};
}

void add_sizes(std::vector<Case>& out, Case base, uint32_t ranks, Rng& rng) {
  for (uint64_t count : small_sizes(ranks)) {
    base.count = count;
    if (base.collective == Collective::all_to_all) base.count = count * ranks;
    base.root = static_cast<uint32_t>(rng.below(ranks));
    base.in_place = rng.below(2) == 0;
    base.salt = rng.below(100);
    bool has_counts = base.collective == Collective::reduce_scatter ||
                      (!reduces(base.collective) && base.collective != Collective::broadcast);
    base.uneven = has_counts && rng.below(2) == 0;
    // Blocks of other sizes cannot lie in each other's place.
    if (base.uneven && base.collective == Collective::all_to_all) base.in_place = false;
    out.push_back(base);
  }
}

// All pairs of collective and algorithm, with all types and operations: whole or a sample.
std::vector<Case> cases_for(uint32_t ranks, uint64_t seed, size_t limit) {
  Rng rng(seed);
  std::vector<Case> all;
  std::vector<std::optional<Algorithm>> algorithms(std::begin(schedule::kAlgorithms),
                                                   std::end(schedule::kAlgorithms));
  algorithms.push_back(std::nullopt);
  for (const auto& algorithm : algorithms)
    for (Type type : kTypes) {
      for (Collective collective : kReducing)
        for (Op op : kOps)
          if (reduce::supports(op, type))
            add_sizes(all, {collective, algorithm, type, op}, ranks, rng);
      for (Collective collective : kMoving)
        add_sizes(all, {collective, algorithm, type}, ranks, rng);
    }
  rng.shuffle(std::span(all));
  if (all.size() > limit) all.resize(limit);
  // A few large ones of each, in many chunks.
  for (Collective collective : {Collective::all_reduce, Collective::reduce_scatter,
                                Collective::all_gather, Collective::broadcast, Collective::reduce,
                                Collective::gather, Collective::scatter, Collective::all_to_all}) {
    Case large{collective, algorithms[rng.below(algorithms.size())], kTypes[rng.below(9)]};
    large.count = collective == Collective::all_to_all ? 100003u * ranks : 1000003u;
    large.root = static_cast<uint32_t>(rng.below(ranks));
    large.in_place = rng.below(2) == 0;
    large.salt = rng.below(100);
    if (rng.below(3) == 0 || collective == Collective::all_reduce) all.push_back(large);
  }
  return all;
}

// ---- the groups ----------------------------------------------------------------------------

struct Setting {
  const char* name;
  bool shared_memory;
  uint32_t ranks_per_host;
  uint32_t lanes;
  Bytes chunk;
  plan::LaneWorker worker = plan::LaneWorker::thread;
  uint32_t workers = 1;  // one thread is the one that drives
  bool sealed = false;
};
constexpr Setting kSettings[] = {
    {"tcp", false, 100, 1, kib(16)},
    {"tcp_lanes", false, 100, 4, kib(256)},
    {"shm", true, 100, 1, kib(64)},
    {"hosts", true, 2, 4, kib(8)},
    // Chunks on both sides of what a lane keeps a copy of.
    {"threads", false, 100, 4, kib(16), plan::LaneWorker::thread, 2},
    {"threads_hosts", true, 2, 3, kib(256), plan::LaneWorker::thread, 3},
    {"processes", false, 100, 4, kib(256), plan::LaneWorker::process, 2},
    {"processes_hosts", true, 2, 2, kib(16), plan::LaneWorker::process, 1},
    {"sealed", false, 100, 4, kib(64), plan::LaneWorker::thread, 1, true},
    {"sealed_threads", false, 100, 2, kib(256), plan::LaneWorker::thread, 2, true},
    {"sealed_processes", true, 2, 4, kib(64), plan::LaneWorker::process, 2, true},
};
constexpr size_t kServedHere = 4;  // of the settings: the rest is tried with a sample

std::vector<Result<void>> run_setting(
    const Setting& setting, uint32_t ranks,
    const std::function<Result<void>(Group&, capture::Recorder&)>& body) {
  plan::Plan plan;
  plan.lanes = setting.lanes;
  plan.chunk = setting.chunk;
  plan.lane_worker = setting.worker;
  plan.lane_workers = setting.workers;
  ::setenv("WEFT_PROGRAM", lane::own_program(), 1);
  return run_ranks(ranks, plan, body, [&](Options& options) {
    options.shared_memory = setting.shared_memory;
    options.sealed = setting.sealed;
    options.host = text("host%u", options.rank.index / setting.ranks_per_host);
  });
}

void expect_ok(const std::vector<Result<void>>& outcomes) {
  for (size_t r = 0; r < outcomes.size(); ++r)
    EXPECT_TRUE(outcomes[r].ok()) << "rank " << r << ": "
                                  << (outcomes[r].ok() ? "" : outcomes[r].error().message());
}

class Table : public testing::TestWithParam<std::tuple<size_t, uint32_t>> {};

TEST_P(Table, every_result_is_exact) {
  const auto which = std::get<size_t>(GetParam());
  const auto ranks = std::get<uint32_t>(GetParam());
  size_t limit = which >= kServedHere ? 250 : ranks <= 3 ? 2200 : 700;
  std::vector<Case> cases = cases_for(ranks, 1000 * which + ranks, limit);
  expect_ok(
      run_setting(kSettings[which], ranks, [&](Group& group, capture::Recorder&) -> Result<void> {
        for (const Case& one : cases) WEFT_TRY(run_case(group, one));
        return {};
      }));
}

TEST_P(Table, sixteen_bit_sums_are_rounded_once) {
  // The large value hides a single one in sixteen bits, but not all of them together.
  const auto which = std::get<size_t>(GetParam());
  const auto ranks = std::get<uint32_t>(GetParam());
  expect_ok(
      run_setting(kSettings[which], ranks, [&](Group& group, capture::Recorder&) -> Result<void> {
        for (Type type : {Type::float16, Type::bfloat16})
          for (Collective collective :
               {Collective::all_reduce, Collective::reduce, Collective::reduce_scatter}) {
            uint64_t large = type == Type::float16 ? 2048 : 256;
            std::vector<int64_t> own(ranks * 3u, 1), sums(own.size());
            for (size_t i = 0; i < own.size(); ++i) {
              if (i % ranks == group.rank().index) own[i] = static_cast<int64_t>(large);
              sums[i] = static_cast<int64_t>(large) + group.ranks() - 1;
            }
            std::vector<std::byte> data = encode(type, own), expected = encode(type, sums);
            Call call;
            call.collective = collective;
            call.input = data.data();
            std::vector<std::byte> result(collective == Collective::reduce_scatter ? 6
                                                                                   : data.size());
            call.output = result.data();
            call.count = own.size();
            call.type = type;
            call.root = collective == Collective::reduce ? ranks - 1 : 0;
            WEFT_TRY(group.run(call));
            if (collective == Collective::reduce && group.rank().index != call.root) continue;
            expected.resize(result.size());
            if (result != expected)
              return error(Code::corrupt, "%s of %s is not the nearest to the exact sum",
                           schedule::name_of(collective), reduce::name_of(type));
          }
        return {};
      }));
}

TEST_P(Table, messages_from_rank_to_rank_arrive_in_order) {
  const auto which = std::get<size_t>(GetParam());
  const auto ranks = std::get<uint32_t>(GetParam());
  expect_ok(
      run_setting(kSettings[which], ranks, [&](Group& group, capture::Recorder&) -> Result<void> {
        uint32_t rank = group.rank().index;
        int32_t nothing = 0;
        EXPECT_FALSE(group.send(&nothing, 1, Type::int32, {rank})) << "nobody sends to itself";
        std::vector<Work> works;
        std::vector<std::vector<int32_t>> sent, received;
        constexpr uint64_t kCounts[] = {0, 1, 100003, 17};
        // To and from everyone, several of different sizes at a time.
        for (uint32_t distance = 1; distance < ranks; ++distance)
          for (uint64_t count : kCounts) {
            uint32_t to = (rank + distance) % ranks, from = (rank + ranks - distance) % ranks;
            sent.emplace_back(count, static_cast<int32_t>(1000 * rank + to + 100000 * count));
            received.emplace_back(count, -1);
            Call call;
            call.collective = Collective::point_to_point;
            call.type = Type::int32;
            call.count = count;
            call.input = sent.back().data();
            call.root = to;
            WEFT_ASSIGN(Work send, group.start(call));
            call.input = nullptr;
            call.output = received.back().data();
            call.root = from;
            call.sends = false;
            WEFT_ASSIGN(Work receive, group.start(call));
            works.push_back(std::move(send));
            works.push_back(std::move(receive));
          }
        for (Work& work : works) WEFT_TRY(work.wait());
        size_t index = 0;
        for (uint32_t distance = 1; distance < ranks; ++distance)
          for (uint64_t count : kCounts) {
            uint32_t from = (rank + ranks - distance) % ranks;
            std::vector<int32_t> expected(
                count, static_cast<int32_t>(1000 * from + rank + 100000 * count));
            if (received[index++] != expected)
              return error(Code::corrupt, "a wrong message from rank %u", from);
          }
        return {};
      }));
}

TEST_P(Table, a_barrier_lets_nobody_through_before_all_have_come) {
  const auto which = std::get<size_t>(GetParam());
  const auto ranks = std::get<uint32_t>(GetParam());
  std::atomic<uint32_t> came{0};
  expect_ok(run_setting(kSettings[which], ranks,
                        [&, all = ranks](Group& group, capture::Recorder&) -> Result<void> {
                          for (uint32_t round = 1; round <= 20; ++round) {
                            ++came;
                            WEFT_TRY(group.barrier());
                            if (came < round * all) return error(Code::corrupt, "too early");
                            WEFT_TRY(group.barrier());
                          }
                          return {};
                        }));
}

std::string name_of(const testing::TestParamInfo<std::tuple<size_t, uint32_t>>& given) {
  return text("%s_%u", kSettings[std::get<0>(given.param)].name, std::get<1>(given.param));
}
INSTANTIATE_TEST_SUITE_P(All, Table,
                         testing::Combine(testing::Range(size_t{0}, kServedHere),
                                          testing::Values(1u, 2u, 3u, 4u, 5u, 7u, 8u)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Served, Table,
                         testing::Combine(testing::Range(kServedHere, std::size(kSettings)),
                                          testing::Values(2u, 3u, 5u)),
                         name_of);

// Sums that are not exact: every rank has the same bits, and so has every way to carry them.
TEST(Bits, are_the_same_on_all_ranks_and_whatever_the_lanes) {
  constexpr uint64_t kCount = 20011;
  for (uint32_t ranks : {2u, 3u, 5u, 8u}) {
    std::map<std::string, std::vector<std::byte>> first;
    for (const Setting& setting : kSettings) {
      if (ranks == 8 && &setting >= kSettings + kServedHere) continue;  // many processes
      std::vector<std::map<std::string, std::vector<std::byte>>> by_rank(ranks);
      expect_ok(run_setting(setting, ranks, [&](Group& group, capture::Recorder&) -> Result<void> {
        for (Type type : {Type::float32, Type::float64, Type::float16, Type::bfloat16})
          for (Algorithm algorithm : schedule::kAlgorithms)
            for (Op op : {Op::sum, Op::mean, Op::product}) {
              Rng rng(group.rank().index * 31 + 5);
              std::vector<float> random(kCount);
              for (float& x : random) x = static_cast<float>(rng.uniform() * 3 - 1.5);
              std::vector<std::byte> data(kCount * reduce::size_of(type));
              if (type == Type::float32)
                std::memcpy(data.data(), random.data(), data.size());
              else if (type == Type::float64)
                std::copy(random.begin(), random.end(), reinterpret_cast<double*>(data.data()));
              else
                reduce::narrow(type, data.data(), random.data(), kCount);
              Call call;
              call.output = data.data();
              call.count = kCount;
              call.type = type;
              call.op = op;
              call.algorithm = algorithm;
              WEFT_TRY(group.run(call));
              // What hosts there are decides how the hierarchical one adds.
              bool comparable = algorithm != Algorithm::hierarchical;
              by_rank[group.rank().index]
                     [text("%s %s %s %s", reduce::name_of(type), schedule::name_of(algorithm),
                           reduce::name_of(op), comparable ? "" : setting.name)] = std::move(data);
            }
        return {};
      }));
      for (uint32_t r = 1; r < ranks; ++r)
        for (const auto& [what, bits] : by_rank[0])
          EXPECT_TRUE(by_rank[r][what] == bits) << what << ", ranks 0 and " << r;
      for (auto& [what, bits] : by_rank[0]) {
        auto [place, is_new] = first.emplace(what, bits);
        EXPECT_TRUE(is_new || place->second == bits) << what << " over " << setting.name;
      }
    }
  }
}

}  // namespace
}  // namespace weft::runtime
