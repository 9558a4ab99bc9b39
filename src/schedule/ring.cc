// Rings, and what is made of rings: the chain and the hierarchy.

#include <algorithm>

#include "compile.h"

namespace weft::schedule {
namespace {

// Members of a ring that this rank is one of, in the order of the ring.
struct Ring {
  std::vector<uint32_t> members;
  uint32_t self = 0;  // index in members

  uint32_t size() const { return static_cast<uint32_t>(members.size()); }
  uint32_t to() const { return members[(self + 1) % size()]; }
  uint32_t from() const { return members[(self + size() - 1) % size()]; }
  // The index `back` places before self, `shift` after it.
  uint32_t index(uint32_t shift, uint32_t back) const {
    return (self + shift + 2 * size() - back) % size();
  }
};

Ring ring_of_all(const OperationShape& shape) {
  Ring ring;
  ring.self = shape.rank;
  for (uint32_t r = 0; r < shape.ranks; ++r) ring.members.push_back(r);
  return ring;
}

// Segment i ends summed up on member i - shift; partial sums, and the sum, go where `place` says.
// Takes one step less than there are members, from `step` on.
template <typename PlaceOf>
void reduce_scatter(Compiler& out, const Ring& ring, const std::vector<Range>& segments,
                    uint32_t shift, uint32_t step, PlaceOf&& place) {
  for (uint32_t s = 0; s + 1 < ring.size(); ++s) {
    out.send(ring.to(), step + s, segments[ring.index(shift, s + 1)]);
    const Range& arriving = segments[ring.index(shift, s + 2)];
    out.combine(ring.from(), step + s, arriving, place(arriving, s + 2 == ring.size()));
  }
}

// Segment i begins on member i - shift and ends on all, at its own address in the output.
void all_gather(Compiler& out, const Ring& ring, const std::vector<Range>& segments, uint32_t shift,
                uint32_t step) {
  for (uint32_t s = 0; s + 1 < ring.size(); ++s) {
    out.send(ring.to(), step + s, segments[ring.index(shift, s)]);
    const Range& arriving = segments[ring.index(shift, s + 1)];
    out.store(ring.from(), step + s, arriving, {Space::output, arriving.first});
  }
}

Place in_output(const Range& range, bool) { return {Space::output, range.first}; }

void all_reduce(Compiler& out, const Ring& ring, Range whole, uint32_t step) {
  std::vector<Range> segments = parts_of(whole, ring.size());
  reduce_scatter(out, ring, segments, 1, step, in_output);
  all_gather(out, ring, segments, 1, step + ring.size() - 1);
}

}  // namespace

std::shared_ptr<const Program> ring_all_reduce(const OperationShape& shape) {
  Compiler out(shape);
  Range whole{0, shape.elements};
  all_reduce(out, ring_of_all(shape), whole, 0);
  out.result(whole, 0);
  return out.finish({shape.elements, shape.elements, 0, 0});
}

std::shared_ptr<const Program> ring_reduce_scatter(const OperationShape& shape) {
  Compiler out(shape);
  std::vector<Range> blocks = blocks_of(shape);
  uint64_t elements = blocks.back().first + blocks.back().elements;
  reduce_scatter(out, ring_of_all(shape), blocks, 0, 0, [](const Range& range, bool last) {
    return last ? Place{Space::output, 0} : Place{Space::temporary, range.first};
  });
  const Range& own = blocks[shape.rank];
  out.result(own, 0);
  // With two ranks there are no partial sums.
  return out.finish({elements, own.elements, shape.ranks > 2 ? elements : 0, 0});
}

std::shared_ptr<const Program> ring_all_gather(const OperationShape& shape) {
  std::vector<Range> blocks = blocks_of(shape);
  const Range& own = blocks[shape.rank];
  Range whole{0, blocks.back().first + blocks.back().elements};
  Compiler out(shape, own.first);
  all_gather(out, ring_of_all(shape), blocks, 0, 0);
  out.result(whole, 0);
  return out.finish({own.elements, whole.elements, 0, 0});
}

// The rank at distance d from the root receives in step d - 1 and sends in step d. The last one
// of the chain sends nothing.
std::shared_ptr<const Program> chain_broadcast(const OperationShape& shape) {
  Compiler out(shape);
  Ring ring = ring_of_all(shape);
  Range whole{0, shape.elements};
  uint32_t distance = (shape.rank + shape.ranks - shape.root) % shape.ranks;
  if (distance > 0) out.store(ring.from(), distance - 1, whole, {Space::output, 0});
  if (distance + 1 < shape.ranks) out.send(ring.to(), distance, whole);
  out.result(whole, 0);
  return out.finish({distance == 0 ? shape.elements : 0, shape.elements, 0, 0});
}

// The root's successor begins; the sum comes round to the root.
std::shared_ptr<const Program> chain_reduce(const OperationShape& shape) {
  Compiler out(shape);
  Ring ring = ring_of_all(shape);
  Range whole{0, shape.elements};
  uint32_t distance = (shape.rank + shape.ranks - shape.root) % shape.ranks;
  bool root = distance == 0;
  if (root && shape.ranks > 1) out.combine(ring.from(), shape.ranks - 2, whole, {Space::output, 0});
  if (distance > 1) out.combine(ring.from(), distance - 2, whole, {Space::temporary, 0});
  if (!root) out.send(ring.to(), distance - 1, whole);
  if (root) out.result(whole, 0);
  return out.finish(
      {shape.elements, root ? shape.elements : 0, distance > 1 ? shape.elements : 0, 0});
}

namespace {

struct Hosts {
  std::vector<std::vector<uint32_t>> members;  // ranks by host, hosts in order of their first rank
  uint32_t own = 0;
  uint32_t local = 0;    // this rank's index on its host
  uint32_t leaders = 0;  // ranks of each host that talk to other hosts: as many as the smallest has
};

Hosts hosts_of(const OperationShape& shape) {
  Hosts hosts;
  std::vector<uint32_t> names;
  for (uint32_t r = 0; r < shape.ranks; ++r) {
    uint32_t name = shape.host_of.empty() ? 0 : shape.host_of[r];
    auto found = static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    if (found == names.size()) {
      names.push_back(name);
      hosts.members.emplace_back();
    }
    if (r == shape.rank) {
      hosts.own = static_cast<uint32_t>(found);
      hosts.local = static_cast<uint32_t>(hosts.members[found].size());
    }
    hosts.members[found].push_back(r);
  }
  hosts.leaders = shape.ranks;
  for (const auto& members : hosts.members)
    hosts.leaders = std::min(hosts.leaders, static_cast<uint32_t>(members.size()));
  return hosts;
}

}  // namespace

// Inside each host a reduce-scatter onto its leaders; between hosts an all-reduce of each leader's
// part with the leaders of the same index; inside each host an all-gather. A host with more ranks
// than leaders has a ring with empty segments for the others.
std::shared_ptr<const Program> hierarchical_all_reduce(const OperationShape& shape) {
  Compiler out(shape);
  Hosts hosts = hosts_of(shape);
  Range whole{0, shape.elements};
  Ring inside{hosts.members[hosts.own], hosts.local};
  std::vector<Range> parts = parts_of(whole, hosts.leaders);
  parts.resize(inside.size(), Range{shape.elements, 0});

  // Step numbers leave room for the largest host, so that all hosts agree on those between them.
  size_t largest = 0;
  for (const auto& members : hosts.members) largest = std::max(largest, members.size());
  auto between_from = static_cast<uint32_t>(largest);
  auto inside_again = static_cast<uint32_t>(largest + 2 * hosts.members.size());

  reduce_scatter(out, inside, parts, 0, 0, in_output);
  if (hosts.local < hosts.leaders) {
    Ring between{{}, hosts.own};
    for (const auto& members : hosts.members) between.members.push_back(members[hosts.local]);
    all_reduce(out, between, parts[hosts.local], between_from);
  }
  all_gather(out, inside, parts, 0, inside_again);
  out.result(whole, 0);
  return out.finish({shape.elements, shape.elements, 0, 0});
}

}  // namespace weft::schedule
