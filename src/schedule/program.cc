#include <algorithm>
#include <numeric>

#include "compile.h"

namespace weft::schedule {
namespace {

constexpr size_t kProgramsKept = 512;
constexpr uint64_t kChunksKept = 1u << 20;

// The algorithm that there is for the collective, nearest to the one that was asked for.
Algorithm available(Collective collective, Algorithm asked) {
  switch (collective) {
    case Collective::all_reduce: return asked;
    case Collective::reduce_scatter:
    case Collective::all_gather:
      return asked == Algorithm::direct ? Algorithm::direct : Algorithm::ring;
    case Collective::reduce:
      if (asked == Algorithm::direct) return Algorithm::direct;
      [[fallthrough]];
    case Collective::broadcast: return asked == Algorithm::ring ? Algorithm::ring : Algorithm::tree;
    case Collective::barrier: return Algorithm::doubling;
    case Collective::gather:
    case Collective::scatter:
    case Collective::all_to_all:
    case Collective::point_to_point: break;
  }
  return Algorithm::direct;
}

std::shared_ptr<const Program> make_all_reduce(const OperationShape& shape) {
  switch (shape.algorithm) {
    case Algorithm::ring: return ring_all_reduce(shape);
    case Algorithm::halving_doubling: return halving_doubling_all_reduce(shape);
    case Algorithm::tree: return tree_all_reduce(shape);
    case Algorithm::hierarchical: return hierarchical_all_reduce(shape);
    case Algorithm::doubling: return doubling_all_reduce(shape);
    case Algorithm::direct: break;
  }
  return direct_all_reduce(shape);
}

void check(const OperationShape& shape) {
  auto one_a_rank = [&](const auto& list) { return list.empty() || list.size() == shape.ranks; };
  WEFT_CHECK(shape.ranks > 0 && shape.rank < shape.ranks && shape.root < shape.ranks);
  WEFT_CHECK(shape.chunk_elements > 0);
  WEFT_CHECK(one_a_rank(shape.counts) && one_a_rank(shape.host_of));
  if (shape.collective == Collective::all_to_all) {
    WEFT_CHECK(one_a_rank(shape.receive_counts));
    WEFT_CHECK(shape.counts.empty() == shape.receive_counts.empty());
    WEFT_CHECK(shape.counts.empty() ||
               shape.counts[shape.rank] == shape.receive_counts[shape.rank]);
  }
  if (shape.collective == Collective::point_to_point) WEFT_CHECK(shape.rank != shape.root);
}

}  // namespace

const char* name_of(Collective collective) {
  switch (collective) {
    case Collective::all_reduce: return "all_reduce";
    case Collective::reduce_scatter: return "reduce_scatter";
    case Collective::all_gather: return "all_gather";
    case Collective::broadcast: return "broadcast";
    case Collective::reduce: return "reduce";
    case Collective::gather: return "gather";
    case Collective::scatter: return "scatter";
    case Collective::all_to_all: return "all_to_all";
    case Collective::barrier: return "barrier";
    case Collective::point_to_point: return "point_to_point";
  }
  return "unknown";
}

const char* name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::ring: return "ring";
    case Algorithm::halving_doubling: return "halving_doubling";
    case Algorithm::tree: return "tree";
    case Algorithm::hierarchical: return "hierarchical";
    case Algorithm::doubling: return "doubling";
    case Algorithm::direct: return "direct";
  }
  return "unknown";
}

std::optional<Algorithm> algorithm_named(std::string_view name) {
  for (Algorithm algorithm : kAlgorithms)
    if (name == name_of(algorithm)) return algorithm;
  return std::nullopt;
}

std::shared_ptr<const Program> Program::make(const OperationShape& asked) {
  check(asked);
  OperationShape shape = asked;
  shape.algorithm = available(asked.collective, asked.algorithm);
  bool ring = shape.algorithm == Algorithm::ring;
  switch (shape.collective) {
    case Collective::all_reduce: return make_all_reduce(shape);
    case Collective::reduce_scatter:
      return ring ? ring_reduce_scatter(shape) : direct_reduce_scatter(shape);
    case Collective::all_gather: return ring ? ring_all_gather(shape) : direct_all_gather(shape);
    case Collective::broadcast: return ring ? chain_broadcast(shape) : tree_broadcast(shape);
    case Collective::reduce:
      if (shape.algorithm == Algorithm::direct) return direct_reduce(shape);
      return ring ? chain_reduce(shape) : tree_reduce(shape);
    case Collective::barrier: return doubling_all_reduce(shape);
    case Collective::gather: return direct_gather(shape);
    case Collective::scatter: return direct_scatter(shape);
    case Collective::all_to_all: return direct_all_to_all(shape);
    case Collective::point_to_point: break;
  }
  return direct_message(shape);
}

bool Program::in_place() const {
  return shape_.ranks == 1 ||
         (shape_.algorithm != Algorithm::doubling && shape_.collective != Collective::all_to_all);
}

std::optional<uint32_t> Program::find(uint32_t peer, ChunkId id) const {
  auto before = [&](const Message& message) {
    return message.peer != peer ? message.peer < peer : message.step < id.step;
  };
  auto found = std::partition_point(messages_.begin(), messages_.end(), before);
  if (found == messages_.end() || found->peer != peer || found->step != id.step ||
      id.chunk >= found->chunks)
    return std::nullopt;
  return found->first_receive + id.chunk;
}

size_t Programs::Hash::operator()(const OperationShape& shape) const {
  uint64_t hash = 0;
  auto mix = [&](uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
    hash ^= hash >> 29;
  };
  mix(static_cast<uint64_t>(shape.collective) << 32 | static_cast<uint64_t>(shape.algorithm) << 16 |
      (shape.sends ? 2u : 0u) | (shape.wide ? 1u : 0u));
  mix(uint64_t{shape.rank} << 32 | shape.ranks);
  mix(shape.root);
  mix(shape.elements);
  mix(shape.chunk_elements);
  for (uint64_t count : shape.counts) mix(count);
  for (uint64_t count : shape.receive_counts) mix(count);
  for (uint32_t host : shape.host_of) mix(host);
  return hash;
}

std::shared_ptr<const Program> Programs::get(const OperationShape& shape) {
  auto found = made_.find(shape);
  if (found != made_.end()) return found->second;
  auto program = Program::make(shape);
  uint64_t chunks = program->sends().size() + program->receives().size();
  // A job uses few shapes; one that uses more than are kept starts again, which costs little.
  if (made_.size() >= kProgramsKept || chunks_ + chunks > kChunksKept) {
    made_.clear();
    chunks_ = 0;
  }
  chunks_ += chunks;
  made_.emplace(shape, program);
  return program;
}

}  // namespace weft::schedule
