#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <numeric>

#include "testing.h"
#include "weft/schedule.h"

namespace weft::schedule {
namespace {

using testing::World;

constexpr uint32_t kRanks[] = {1, 2, 3, 4, 5, 7, 8, 12};
constexpr uint64_t kChunks[] = {1, 16, 4096};

std::vector<uint64_t> sizes_for(uint32_t p) { return {0, 1, p - 1u, p, 1000, 1003}; }

// A chunk of one element is slow for a thousand of them, and says nothing that 16 does not.
std::vector<uint64_t> chunks_for(uint64_t n) {
  std::vector<uint64_t> out;
  for (uint64_t chunk : kChunks)
    if (chunk > 1 || n < 100) out.push_back(chunk);
  return out;
}

int64_t whole_value(uint32_t rank, uint64_t i) {
  return static_cast<int64_t>(i * 1000 + rank * rank * 7 + 3);
}

// Sums of these depend on the order in which they are made.
float uneven_value(uint32_t rank, uint64_t i) {
  Rng rng(rank * 7919 + i);
  return static_cast<float>(rng.below(1000000)) / (1.0f + static_cast<float>(rng.below(997)));
}

template <typename T, typename Value>
World<T> world_of(const OperationShape& shape, Value&& value, bool in_place) {
  World<T> world;
  world.in_place = in_place;
  for (uint32_t r = 0; r < shape.ranks; ++r) {
    world.shapes.push_back(shape);
    world.shapes[r].rank = r;
    auto program = Program::make(world.shapes[r]);
    world.inputs.emplace_back();
    for (uint64_t i = 0; i < program->input_elements(); ++i) world.inputs[r].push_back(value(r, i));
  }
  return world;
}

std::vector<uint64_t> uneven_counts(uint32_t p, uint64_t n) {
  std::vector<uint64_t> counts(p, 0);
  Rng rng(n * 31 + p);
  uint64_t left = n;
  for (uint32_t r = 0; r + 1 < p; ++r) {
    counts[r] = r % 3 == 1 ? 0 : rng.below(left + 1);
    left -= counts[r];
  }
  counts[p - 1] = left;
  return counts;
}

std::vector<uint64_t> starts_of(const std::vector<uint64_t>& counts) {
  std::vector<uint64_t> out(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), out.begin() + 1);
  return out;
}

std::vector<uint64_t> equal_counts(uint32_t p, uint64_t n) {
  std::vector<uint64_t> counts(p, n / p);
  for (uint64_t r = 0; r < n % p; ++r) ++counts[r];
  return counts;
}

std::string said(const OperationShape& shape) {
  return text("%s %s p=%u n=%llu chunk=%llu root=%u", name_of(shape.collective),
              name_of(shape.algorithm), shape.ranks,
              static_cast<unsigned long long>(shape.elements),
              static_cast<unsigned long long>(shape.chunk_elements), shape.root);
}

// Calls `test` for every number of ranks, size and size of chunk, in place and not.
template <typename Test>
void each_case(Test&& test) {
  for (uint32_t p : kRanks)
    for (uint64_t n : sizes_for(p))
      for (uint64_t chunk : chunks_for(n))
        for (bool in_place : {false, true}) {
          OperationShape shape;
          shape.ranks = p;
          shape.elements = n;
          shape.chunk_elements = chunk;
          test(shape, in_place);
          if (::testing::Test::HasFatalFailure()) return;
        }
}

std::vector<std::vector<uint32_t>> placements(uint32_t p) {
  std::vector<uint32_t> pairs(p), round_robin(p), lopsided(p, 9), apart(p);
  for (uint32_t r = 0; r < p; ++r) {
    pairs[r] = r / 2;
    round_robin[r] = 100 - r % 3;
    apart[r] = r;
  }
  lopsided[p / 2] = 4;
  return {{}, pairs, round_robin, lopsided, apart};
}

class AllReduce : public ::testing::TestWithParam<Algorithm> {
 protected:
  // The shapes that differ only by what hosts the ranks are on.
  std::vector<std::vector<uint32_t>> hosts(uint32_t p) const {
    return GetParam() == Algorithm::hierarchical ? placements(p)
                                                 : std::vector<std::vector<uint32_t>>{{}};
  }
};

TEST_P(AllReduce, sums_exactly_on_every_rank) {
  each_case([&](OperationShape shape, bool in_place) {
    shape.algorithm = GetParam();
    for (const auto& host_of : hosts(shape.ranks)) {
      shape.host_of = host_of;
      SCOPED_TRACE(said(shape));
      auto world = world_of<int64_t>(shape, whole_value, in_place);
      world.run(shape.ranks * 1000 + shape.elements);
      for (uint32_t r = 0; r < shape.ranks; ++r) {
        ASSERT_EQ(world.outputs[r].size(), shape.elements);
        for (uint64_t i = 0; i < shape.elements; ++i) {
          int64_t sum = 0;
          for (uint32_t q = 0; q < shape.ranks; ++q) sum += whole_value(q, i);
          ASSERT_EQ(world.outputs[r][i], sum) << "rank " << r << " element " << i;
        }
      }
    }
  });
}

// Whatever the order of delivery, the size of chunks, and the rank.
TEST_P(AllReduce, gives_the_same_bits_everywhere) {
  for (uint32_t p : kRanks)
    for (bool wide : {false, true}) {
      std::vector<float> first;
      for (uint64_t seed = 0; seed < 6; ++seed) {
        OperationShape shape;
        shape.algorithm = GetParam();
        shape.ranks = p;
        shape.elements = 1003;
        shape.chunk_elements = seed % 2 == 0 ? 16 : 7 + seed * 100;
        shape.host_of = hosts(p).size() > 1 ? hosts(p)[1] : std::vector<uint32_t>{};
        shape.wide = wide;
        SCOPED_TRACE(said(shape));
        auto world = world_of<float>(shape, uneven_value, seed % 3 == 0);
        world.run(seed);
        if (first.empty()) first = world.outputs[0];
        for (uint32_t r = 0; r < p; ++r) {
          ASSERT_EQ(world.outputs[r].size(), first.size());
          ASSERT_EQ(
              std::memcmp(world.outputs[r].data(), first.data(), first.size() * sizeof(float)), 0)
              << "rank " << r << " seed " << seed;
        }
      }
    }
}

// Elements that all ranks together send.
uint64_t total_sent(const OperationShape& shape) {
  uint64_t p = shape.ranks, n = shape.elements;
  uint64_t power = std::bit_floor(p), folded = p - power;
  uint64_t rounds = static_cast<uint64_t>(std::bit_width(power)) - 1;
  switch (shape.algorithm) {
    case Algorithm::halving_doubling: return 2 * (power - 1) * n + 2 * folded * n;
    case Algorithm::doubling: return power * rounds * n + 2 * folded * n;
    default: return 2 * (p - 1) * n;
  }
}

TEST_P(AllReduce, moves_what_the_formula_says) {
  each_case([&](OperationShape shape, bool in_place) {
    shape.algorithm = GetParam();
    SCOPED_TRACE(said(shape));
    auto world = world_of<int64_t>(shape, whole_value, in_place);
    world.run(1);
    uint64_t total = 0, most = 0;
    for (uint64_t sent : world.sent_elements) {
      total += sent;
      most = std::max(most, sent);
    }
    EXPECT_EQ(total, total_sent(shape));
    if (shape.algorithm == Algorithm::tree) {
      EXPECT_LE(most, 2 * shape.elements + 2);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Algorithms, AllReduce, ::testing::ValuesIn(kAlgorithms),
                         [](const auto& made) { return std::string(name_of(made.param)); });

TEST(HalvingDoubling, each_rank_of_a_power_of_two_sends_its_share) {
  OperationShape shape;
  shape.algorithm = Algorithm::halving_doubling;
  shape.ranks = 8;
  shape.elements = 8000;
  for (uint32_t r = 0; r < 8; ++r) {
    shape.rank = r;
    uint64_t sent = 0;
    auto program = Program::make(shape);
    for (const Send& send : program->sends()) sent += send.elements;
    EXPECT_EQ(sent, 2u * 7 * 1000);
  }
}

OperationShape tree_of(uint32_t ranks, uint64_t chunks_of_each) {
  OperationShape shape;
  shape.algorithm = Algorithm::tree;
  shape.ranks = ranks;
  shape.chunk_elements = 10;
  shape.elements = 2 * chunks_of_each * shape.chunk_elements;
  return shape;
}

// Rank 1 of 4 is a leaf of the first tree, two links below its root.
TEST(Tree, a_leaf_runs_a_few_chunks_ahead_of_what_comes_back) {
  OperationShape shape = tree_of(4, 100);
  shape.rank = 1;
  Steps steps(Program::make(shape));
  std::vector<uint32_t> sends, receives;
  steps.start(sends);
  auto& program = steps.program();
  auto up = [&](uint32_t send) { return program.sends()[send].id.step == 0; };
  EXPECT_EQ(std::count_if(sends.begin(), sends.end(), up), 20);
  for (uint32_t chunk = 0; chunk < 80; ++chunk) {
    sends.clear();
    auto down = program.find(2, {1, chunk});
    ASSERT_TRUE(down && steps.take(*down)) << chunk;
    steps.applied(*down, sends, receives);
    ASSERT_EQ(sends.size(), 1u) << chunk;
    EXPECT_EQ(program.sends()[sends[0]].id, (ChunkId{0, chunk + 20}));
  }
}

TEST(Tree, neither_tree_goes_before_the_other) {
  OperationShape shape = tree_of(5, 50);
  shape.elements += 3;
  for (shape.rank = 0; shape.rank < shape.ranks; ++shape.rank) {
    auto program = Program::make(shape);
    EXPECT_TRUE(
        std::is_sorted(program->sends().begin(), program->sends().end(),
                       [](const Send& a, const Send& b) { return a.id.chunk < b.id.chunk; }));
  }
}

// Between hosts goes what a ring of hosts would send, however many ranks a host has.
TEST(Hierarchical, little_leaves_a_host) {
  OperationShape shape;
  shape.algorithm = Algorithm::hierarchical;
  shape.ranks = 12;
  shape.elements = 1200;
  for (uint32_t r = 0; r < 12; ++r) shape.host_of.push_back(r / 4);
  uint64_t between = 0, inside = 0;
  for (uint32_t r = 0; r < 12; ++r) {
    shape.rank = r;
    auto program = Program::make(shape);
    for (const Send& send : program->sends())
      (send.peer / 4 == r / 4 ? inside : between) += send.elements;
  }
  EXPECT_EQ(between, 2u * (3 - 1) * 1200);
  EXPECT_EQ(inside, 3u * 2 * (4 - 1) * 1200);
}

TEST(Blocks, reduce_scatter_leaves_each_rank_its_block_and_all_gather_joins_them) {
  each_case([&](OperationShape shape, bool in_place) {
    for (Algorithm algorithm : {Algorithm::ring, Algorithm::direct})
      for (bool uneven : {false, true}) {
        uint32_t p = shape.ranks;
        uint64_t n = shape.elements;
        shape.algorithm = algorithm;
        auto counts = uneven ? uneven_counts(p, n) : equal_counts(p, n);
        auto starts = starts_of(counts);
        shape.counts = uneven ? counts : std::vector<uint64_t>{};
        shape.collective = Collective::reduce_scatter;
        SCOPED_TRACE(said(shape));
        auto scatter = world_of<int64_t>(shape, whole_value, in_place);
        scatter.run(n + p);
        uint64_t sent = 0;
        for (uint32_t r = 0; r < p; ++r) {
          sent += scatter.sent_elements[r];
          ASSERT_EQ(scatter.outputs[r].size(), counts[r]);
          for (uint64_t i = 0; i < counts[r]; ++i) {
            int64_t sum = 0;
            for (uint32_t q = 0; q < p; ++q) sum += whole_value(q, starts[r] + i);
            ASSERT_EQ(scatter.outputs[r][i], sum);
          }
        }
        EXPECT_EQ(sent, (p - 1) * n);

        shape.collective = Collective::all_gather;
        auto gather = world_of<int64_t>(shape, whole_value, in_place);
        gather.run(n + 3 * p);
        for (uint32_t r = 0; r < p; ++r) {
          ASSERT_EQ(gather.outputs[r].size(), n);
          for (uint32_t q = 0; q < p; ++q)
            for (uint64_t i = 0; i < counts[q]; ++i)
              ASSERT_EQ(gather.outputs[r][starts[q] + i], whole_value(q, i));
        }
      }
  });
}

TEST(Rooted, broadcast_and_reduce_work_from_and_to_every_root) {
  each_case([&](OperationShape shape, bool in_place) {
    for (Algorithm algorithm : {Algorithm::ring, Algorithm::tree, Algorithm::direct})
      for (uint32_t root = 0; root < shape.ranks; root += 1 + shape.ranks / 4) {
        shape.algorithm = algorithm;
        shape.root = root;
        shape.collective = Collective::broadcast;
        SCOPED_TRACE(said(shape));
        auto broadcast = world_of<int64_t>(shape, whole_value, in_place);
        broadcast.run(root);
        shape.collective = Collective::reduce;
        auto reduce = world_of<int64_t>(shape, whole_value, in_place);
        reduce.run(root + 50);
        uint64_t sent = 0;
        for (uint32_t r = 0; r < shape.ranks; ++r) {
          sent += broadcast.sent_elements[r] + reduce.sent_elements[r];
          ASSERT_EQ(broadcast.outputs[r].size(), shape.elements);
          for (uint64_t i = 0; i < shape.elements; ++i)
            ASSERT_EQ(broadcast.outputs[r][i], whole_value(root, i));
          ASSERT_EQ(reduce.outputs[r].size(), r == root ? shape.elements : 0);
        }
        EXPECT_EQ(sent, 2 * (shape.ranks - 1) * shape.elements);
        for (uint64_t i = 0; i < shape.elements; ++i) {
          int64_t sum = 0;
          for (uint32_t q = 0; q < shape.ranks; ++q) sum += whole_value(q, i);
          ASSERT_EQ(reduce.outputs[root][i], sum);
        }
      }
  });
}

TEST(Rooted, gather_and_scatter_move_blocks_of_any_size) {
  each_case([&](OperationShape shape, bool in_place) {
    uint32_t p = shape.ranks;
    auto counts = uneven_counts(p, shape.elements);
    auto starts = starts_of(counts);
    shape.counts = counts;
    for (uint32_t root : {0u, p / 2, p - 1}) {
      shape.root = root;
      shape.collective = Collective::gather;
      SCOPED_TRACE(said(shape));
      auto gather = world_of<int64_t>(shape, whole_value, in_place);
      gather.run(root);
      shape.collective = Collective::scatter;
      auto scatter = world_of<int64_t>(shape, whole_value, in_place);
      scatter.run(root);
      for (uint32_t r = 0; r < p; ++r) {
        ASSERT_EQ(gather.outputs[r].size(), r == root ? shape.elements : 0);
        ASSERT_EQ(scatter.outputs[r].size(), counts[r]);
        for (uint64_t i = 0; i < counts[r]; ++i) {
          ASSERT_EQ(gather.outputs[root][starts[r] + i], whole_value(r, i));
          ASSERT_EQ(scatter.outputs[r][i], whole_value(root, starts[r] + i));
        }
      }
    }
  });
}

TEST(AllToAll, everyone_gets_from_everyone_what_was_meant_for_it) {
  for (uint32_t p : kRanks)
    for (uint64_t n : sizes_for(p))
      for (bool uneven : {false, true}) {
        OperationShape shape;
        shape.collective = Collective::all_to_all;
        shape.ranks = p;
        shape.elements = n;
        shape.chunk_elements = 16;
        SCOPED_TRACE(said(shape));
        std::vector<std::vector<uint64_t>> counts;
        for (uint32_t r = 0; r < p; ++r)
          counts.push_back(uneven ? uneven_counts(p, n + r) : equal_counts(p, n));
        World<int64_t> world;
        for (uint32_t r = 0; r < p; ++r) {
          shape.rank = r;
          shape.counts = uneven ? counts[r] : std::vector<uint64_t>{};
          shape.receive_counts.clear();
          for (uint32_t q = 0; q < p && uneven; ++q) shape.receive_counts.push_back(counts[q][r]);
          world.shapes.push_back(shape);
          world.inputs.emplace_back();
          for (uint64_t i = 0; i < starts_of(counts[r]).back(); ++i)
            world.inputs[r].push_back(whole_value(r, i));
        }
        world.run(n);
        for (uint32_t r = 0; r < p; ++r) {
          uint64_t at = 0;
          for (uint32_t q = 0; q < p; ++q)
            for (uint64_t i = 0; i < counts[q][r]; ++i)
              ASSERT_EQ(world.outputs[r].at(at++), whole_value(q, starts_of(counts[q])[r] + i));
          ASSERT_EQ(world.outputs[r].size(), at);
        }
      }
}

TEST(PointToPoint, one_sends_and_one_receives) {
  for (uint64_t n : {0u, 1u, 1003u}) {
    OperationShape shape;
    shape.collective = Collective::point_to_point;
    shape.ranks = 2;
    shape.elements = n;
    shape.chunk_elements = 100;
    World<int64_t> world;
    shape.root = 1;
    world.shapes.push_back(shape);
    shape.rank = 1;
    shape.root = 0;
    shape.sends = false;
    world.shapes.push_back(shape);
    world.inputs.resize(2);
    for (uint64_t i = 0; i < n; ++i) world.inputs[0].push_back(whole_value(5, i));
    world.run(n);
    EXPECT_EQ(world.outputs[1], world.inputs[0]);
    EXPECT_TRUE(world.outputs[0].empty());
  }
}

TEST(Barrier, ends_on_no_rank_before_it_began_on_all) {
  for (uint32_t p : kRanks) {
    OperationShape shape;
    shape.collective = Collective::barrier;
    shape.ranks = p;
    shape.elements = 1;
    auto world = world_of<int64_t>(
        shape, [](uint32_t, uint64_t) { return int64_t{1}; }, false);
    world.run(p);
    for (uint32_t r = 0; r < p; ++r) EXPECT_EQ(world.outputs[r], std::vector<int64_t>{p});
  }
}

// Steps and segments of the ring are what traces and predictions of it were made with.
TEST(Ring, all_reduce_has_the_segments_of_the_ring_in_its_steps) {
  OperationShape shape;
  shape.rank = 1;
  shape.ranks = 4;
  shape.elements = 1003;
  shape.chunk_elements = 100;
  auto program = Program::make(shape);
  auto segment = [](uint32_t index) { return 1003ull * (index % 4) / 4; };
  for (const Send& send : program->sends()) {
    EXPECT_EQ(send.peer, 2u);
    uint32_t index = send.id.step < 3 ? 1 + 4 - send.id.step : 1 + 1 + 4 - (send.id.step - 3u);
    EXPECT_EQ(send.first, segment(index) + 100 * send.id.chunk);
    EXPECT_EQ(send.space, send.id.step == 0 ? Space::input : Space::output);
  }
  for (const Receive& receive : program->receives()) {
    EXPECT_EQ(receive.peer, 0u);
    EXPECT_EQ(receive.combine, receive.id.step < 3);
    uint32_t index = receive.id.step < 3 ? 4u - receive.id.step : 1 + 4 - (receive.id.step - 3u);
    EXPECT_EQ(receive.first, segment(index) + 100 * receive.id.chunk);
  }
}

TEST(Program, finds_only_what_it_expects) {
  OperationShape shape;
  shape.ranks = 3;
  shape.elements = 100;
  shape.chunk_elements = 10;
  auto program = Program::make(shape);
  EXPECT_EQ(program->find(2, {0, 0}), 0u);
  EXPECT_FALSE(program->find(1, {0, 0}));     // comes from the other neighbour
  EXPECT_FALSE(program->find(2, {4, 0}));     // there are steps 0 to 3
  EXPECT_FALSE(program->find(2, {0, 1000}));  // and four chunks in each
  EXPECT_FALSE(program->find(70000, {0, 0}));
}

TEST(Program, replaces_an_algorithm_that_the_collective_lacks) {
  OperationShape shape;
  shape.ranks = 4;
  shape.elements = 8;
  shape.algorithm = Algorithm::tree;
  shape.collective = Collective::all_gather;
  EXPECT_EQ(Program::make(shape)->algorithm(), Algorithm::ring);
  shape.collective = Collective::gather;
  EXPECT_EQ(Program::make(shape)->algorithm(), Algorithm::direct);
  shape.collective = Collective::barrier;
  EXPECT_EQ(Program::make(shape)->algorithm(), Algorithm::doubling);
}

TEST(Programs, keeps_what_it_made_and_no_more_than_it_may) {
  Programs programs;
  OperationShape shape;
  shape.ranks = 2;
  auto first = programs.get(shape);
  EXPECT_EQ(programs.get(shape), first);
  shape.rank = 1;
  EXPECT_NE(programs.get(shape), first);
  for (uint64_t n = 1; n < 2000; ++n) {
    shape.elements = n;
    EXPECT_EQ(programs.get(shape)->shape().elements, n);
  }
  EXPECT_LT(programs.size(), 1000u);
}

}  // namespace
}  // namespace weft::schedule
