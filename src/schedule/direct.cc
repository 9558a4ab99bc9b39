// Everyone with everyone. Partners are taken in rotated order, so that no rank is everyone's first.

#include "compile.h"

namespace weft::schedule {
namespace {

uint32_t after(const OperationShape& shape, uint32_t distance) {
  return (shape.rank + distance) % shape.ranks;
}

uint64_t end_of(const std::vector<Range>& blocks) {
  return blocks.back().first + blocks.back().elements;
}

// Sends each its block of the input, and adds up this rank's own at `into`: first what is here,
// then what the next ranks send, in their order.
void scatter_and_sum(Compiler& out, const OperationShape& shape, const std::vector<Range>& blocks,
                     Place into) {
  for (uint32_t d = 1; d < shape.ranks; ++d) {
    uint32_t peer = after(shape, d);
    out.send(peer, 0, blocks[peer]);
  }
  for (uint32_t d = 1; d < shape.ranks; ++d) {
    if (shape.wide) {
      out.combine_wide(after(shape, d), 0, blocks[shape.rank], into,
                       {d == 1, d + 1 == shape.ranks});
    } else {
      out.combine(after(shape, d), 0, blocks[shape.rank], into);
    }
  }
}

void gather_from_all(Compiler& out, const OperationShape& shape, const std::vector<Range>& blocks,
                     uint32_t step) {
  for (uint32_t d = 1; d < shape.ranks; ++d) out.send(after(shape, d), step, blocks[shape.rank]);
  for (uint32_t d = 1; d < shape.ranks; ++d) {
    uint32_t peer = after(shape, shape.ranks - d);
    out.store(peer, step, blocks[peer], {Space::output, blocks[peer].first});
  }
}

uint64_t wide_size(const OperationShape& shape, const std::vector<Range>& blocks) {
  return shape.wide && shape.ranks > 1 ? blocks[shape.rank].elements : 0;
}

}  // namespace

std::shared_ptr<const Program> direct_all_reduce(const OperationShape& shape) {
  Compiler out(shape);
  Range whole{0, shape.elements};
  std::vector<Range> segments = parts_of(whole, shape.ranks);
  scatter_and_sum(out, shape, segments, {Space::output, segments[shape.rank].first});
  gather_from_all(out, shape, segments, 1);
  out.result(whole, 0);
  return out.finish({shape.elements, shape.elements, 0, wide_size(shape, segments)});
}

std::shared_ptr<const Program> direct_reduce_scatter(const OperationShape& shape) {
  Compiler out(shape);
  std::vector<Range> blocks = blocks_of(shape);
  scatter_and_sum(out, shape, blocks, {Space::output, 0});
  const Range& own = blocks[shape.rank];
  out.result(own, 0);
  return out.finish({end_of(blocks), own.elements, 0, wide_size(shape, blocks)});
}

// The root adds up what all others send it, in the order of ranks behind it.
std::shared_ptr<const Program> direct_reduce(const OperationShape& shape) {
  Compiler out(shape);
  Range whole{0, shape.elements};
  if (shape.rank != shape.root) {
    out.send(shape.root, 0, whole);
    return out.finish({shape.elements, 0, 0, 0});
  }
  for (uint32_t d = 1; d < shape.ranks; ++d) {
    if (shape.wide)
      out.combine_wide(after(shape, d), 0, whole, {Space::output, 0},
                       {d == 1, d + 1 == shape.ranks});
    else
      out.combine(after(shape, d), 0, whole, {Space::output, 0});
  }
  out.result(whole, 0);
  uint64_t wide = shape.wide && shape.ranks > 1 ? shape.elements : 0;
  return out.finish({shape.elements, shape.elements, 0, wide});
}

std::shared_ptr<const Program> direct_all_gather(const OperationShape& shape) {
  std::vector<Range> blocks = blocks_of(shape);
  const Range& own = blocks[shape.rank];
  Compiler out(shape, own.first);
  gather_from_all(out, shape, blocks, 0);
  out.result({0, end_of(blocks)}, 0);
  return out.finish({own.elements, end_of(blocks), 0, 0});
}

std::shared_ptr<const Program> direct_gather(const OperationShape& shape) {
  std::vector<Range> blocks = blocks_of(shape);
  const Range& own = blocks[shape.rank];
  Compiler out(shape, own.first);
  if (shape.rank != shape.root) {
    out.send(shape.root, 0, own);
    return out.finish({own.elements, 0, 0, 0});
  }
  for (uint32_t d = 1; d < shape.ranks; ++d) {
    uint32_t peer = after(shape, d);
    out.store(peer, 0, blocks[peer], {Space::output, blocks[peer].first});
  }
  out.result({0, end_of(blocks)}, 0);
  return out.finish({own.elements, end_of(blocks), 0, 0});
}

std::shared_ptr<const Program> direct_scatter(const OperationShape& shape) {
  std::vector<Range> blocks = blocks_of(shape);
  const Range& own = blocks[shape.rank];
  Compiler out(shape);
  if (shape.rank != shape.root) {
    out.store(shape.root, 0, own, {Space::output, 0});
    return out.finish({0, own.elements, 0, 0});
  }
  for (uint32_t d = 1; d < shape.ranks; ++d) {
    uint32_t peer = after(shape, d);
    out.send(peer, 0, blocks[peer]);
  }
  out.result(own, 0);
  return out.finish({end_of(blocks), own.elements, 0, 0});
}

std::shared_ptr<const Program> direct_all_to_all(const OperationShape& shape) {
  std::vector<Range> outgoing = blocks_of(shape);
  std::vector<Range> arriving(shape.ranks);
  uint64_t first = 0;
  for (uint32_t r = 0; r < shape.ranks; ++r) {
    uint64_t elements =
        shape.receive_counts.empty() ? outgoing[shape.rank].elements : shape.receive_counts[r];
    arriving[r] = {first, elements};
    first += elements;
  }
  Compiler out(shape);
  // What arrives are other values than those that leave, so they have addresses behind them.
  uint64_t behind = end_of(outgoing);
  for (uint32_t d = 1; d < shape.ranks; ++d) {
    uint32_t to = after(shape, d), from = after(shape, shape.ranks - d);
    out.send(to, 0, outgoing[to]);
    out.store(from, 0, {behind + arriving[from].first, arriving[from].elements},
              {Space::output, arriving[from].first});
  }
  out.copy({outgoing[shape.rank].first, arriving[shape.rank].first, outgoing[shape.rank].elements});
  return out.finish({end_of(outgoing), end_of(arriving), 0, 0});
}

std::shared_ptr<const Program> direct_message(const OperationShape& shape) {
  Compiler out(shape);
  Range whole{0, shape.elements};
  if (shape.sends) {
    out.send(shape.root, 0, whole);
    return out.finish({shape.elements, 0, 0, 0});
  }
  out.store(shape.root, 0, whole, {Space::output, 0});
  return out.finish({0, shape.elements, 0, 0});
}

}  // namespace weft::schedule
