// Trees. An all-reduce uses two binary trees, each for half of the data, made so that a rank that
// passes things on in one is a leaf in the other: every rank then sends and receives about as much
// as in a ring, in a number of steps that grows as the logarithm of the ranks.

#include <bit>
#include <optional>

#include "compile.h"
#include "cut.h"

namespace weft::schedule {
namespace {

// The tree over 0 to n - 1 in which odd numbers are leaves and 0 is the root, with one child: the
// parent of a number clears its lowest set bit and sets the next one, or only clears it where that
// would be too large.
std::optional<uint32_t> parent_in_tree(uint32_t node, uint32_t nodes) {
  if (node == 0) return std::nullopt;
  uint32_t bit = node & (~node + 1);
  uint64_t up = (node ^ bit) | uint64_t{bit} << 1;
  return up < nodes ? static_cast<uint32_t>(up) : node ^ bit;
}

// The second tree is the first one mirrored, or shifted by one where a mirror would leave the same
// ranks in the middle.
uint32_t to_node(uint32_t tree, uint32_t rank, uint32_t ranks) {
  if (tree == 0) return rank;
  return ranks % 2 == 0 ? ranks - 1 - rank : (rank + ranks - 1) % ranks;
}

uint32_t to_rank(uint32_t tree, uint32_t node, uint32_t ranks) {
  if (tree == 0) return node;
  return ranks % 2 == 0 ? ranks - 1 - node : (node + 1) % ranks;
}

// A leaf has everything it sends from the start. Without a limit it fills its parent's link with
// chunks that cannot be added yet, while those of the other child, which could, wait behind them.
// So it runs ahead of what has come back by a few chunks for each link on the way to the root and
// back, which keeps all of them busy.
constexpr uint32_t kAheadForLink = 5;

struct Family {
  std::optional<uint32_t> parent;
  uint32_t depth = 0;  // links to the root
  std::vector<uint32_t> children;
};

Family family_of(uint32_t tree, const OperationShape& shape) {
  Family family;
  uint32_t self = to_node(tree, shape.rank, shape.ranks);
  if (auto up = parent_in_tree(self, shape.ranks)) family.parent = to_rank(tree, *up, shape.ranks);
  for (auto up = parent_in_tree(self, shape.ranks); up; up = parent_in_tree(*up, shape.ranks))
    ++family.depth;
  for (uint32_t node = 1; node < shape.ranks; ++node)
    if (parent_in_tree(node, shape.ranks) == self)
      family.children.push_back(to_rank(tree, node, shape.ranks));
  return family;
}

// The binomial tree of a rooted operation, with ranks counted from the root: a rank's parent clears
// its lowest set bit. Children by distance.
Family binomial_family(const OperationShape& shape) {
  Family family;
  uint32_t self = (shape.rank + shape.ranks - shape.root) % shape.ranks;
  auto absolute = [&](uint64_t relative) {
    return static_cast<uint32_t>((relative + shape.root) % shape.ranks);
  };
  if (self > 0) family.parent = absolute(self & (self - 1));
  for (uint64_t bit = 1; self + bit < shape.ranks && (self & bit) == 0; bit <<= 1)
    family.children.push_back(absolute(self + bit));
  return family;
}

}  // namespace

std::shared_ptr<const Program> tree_all_reduce(const OperationShape& shape) {
  Compiler out(shape);
  Range whole{0, shape.elements};
  std::vector<Range> halves = parts_of(whole, 2);
  for (uint32_t tree = 0; tree < 2; ++tree) {
    Range half = halves[tree];
    Place place{Space::output, half.first};
    uint32_t up = 2 * tree, down = up + 1;
    Family family = family_of(tree, shape);
    for (uint32_t child : family.children) out.combine(child, up, half, place);
    if (family.parent) {
      out.send(*family.parent, up, half);
      out.store(*family.parent, down, half, place);
      if (family.children.empty()) out.hold_back(up, down, 2 * family.depth * kAheadForLink);
    }
    for (uint32_t child : family.children) out.send(child, down, half);
  }
  out.interleave();
  out.result(whole, 0);
  return out.finish({shape.elements, shape.elements, 0, 0});
}

// The farthest child has the largest part of the tree behind it, so it is served first.
std::shared_ptr<const Program> tree_broadcast(const OperationShape& shape) {
  Compiler out(shape);
  Range whole{0, shape.elements};
  Family family = binomial_family(shape);
  if (family.parent) out.store(*family.parent, 0, whole, {Space::output, 0});
  for (size_t i = family.children.size(); i-- > 0;) out.send(family.children[i], 0, whole);
  out.result(whole, 0);
  return out.finish({family.parent ? 0 : shape.elements, shape.elements, 0, 0});
}

std::shared_ptr<const Program> tree_reduce(const OperationShape& shape) {
  Compiler out(shape);
  Range whole{0, shape.elements};
  Family family = binomial_family(shape);
  Place place{family.parent ? Space::temporary : Space::output, 0};
  for (uint32_t child : family.children) out.combine(child, 0, whole, place);
  if (family.parent) out.send(*family.parent, 0, whole);
  if (!family.parent) out.result(whole, 0);
  bool keeps = family.parent && !family.children.empty();
  return out.finish(
      {shape.elements, family.parent ? 0 : shape.elements, keeps ? shape.elements : 0, 0});
}

}  // namespace weft::schedule
