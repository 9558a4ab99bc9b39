#include "compile.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "cut.h"

namespace weft::schedule {

Compiler::Compiler(const OperationShape& shape, uint64_t input_at)
    : program_(std::make_shared<Program>()), input_at_(input_at) {
  program_->shape_ = shape;
}

template <typename Visit>
void Compiler::each_chunk(Range range, Visit&& visit) const {
  uint64_t size = program_->shape_.chunk_elements;
  uint32_t chunk = 0;
  for (uint64_t offset = 0; offset < range.elements; offset += size, ++chunk)
    visit(chunk, offset, Range{range.first + offset, std::min(size, range.elements - offset)});
}

// A chunk must lie in one piece. Algorithms move ranges that were written alike, so this holds.
Place Compiler::locate(Range range) {
  writers_.clear();
  uint64_t end = range.first + range.elements;
  auto at = written_.upper_bound(range.first);
  if (at != written_.begin() && std::prev(at)->second.end > range.first) --at;
  if (at == written_.end() || at->first >= end) return {Space::input, range.first - input_at_};
  WEFT_CHECK(at->first <= range.first);
  const Written& head = at->second;
  Place place{head.space, range.first - head.origin + head.base};
  uint64_t reached = range.first;
  for (; reached < end; ++at) {
    WEFT_CHECK(at != written_.end() && at->first <= reached);
    const Written& part = at->second;
    WEFT_CHECK(part.space == place.space &&
               reached - part.origin + part.base == place.first + (reached - range.first));
    if (std::find(writers_.begin(), writers_.end(), part.receive) == writers_.end())
      writers_.push_back(part.receive);
    reached = part.end;
  }
  return place;
}

void Compiler::write(Range range, Place into, uint32_t receive) {
  uint64_t end = range.first + range.elements;
  auto at = written_.upper_bound(range.first);
  if (at != written_.begin() && std::prev(at)->second.end > range.first) --at;
  while (at != written_.end() && at->first < end) {
    uint64_t first = at->first;
    Written old = at->second;
    at = written_.erase(at);
    if (old.end > end) written_.emplace(end, old);
    if (first < range.first) {
      uint64_t old_end = std::exchange(old.end, range.first);
      written_.emplace(first, old);
      if (old_end >= end) break;
    }
  }
  written_[range.first] = {end, receive, into.space, into.first, range.first};
}

void Compiler::add_edges(uint32_t to, bool to_receive) {
  for (uint32_t writer : writers_) edges_.push_back({writer, to, to_receive});
}

void Compiler::send(uint32_t peer, uint32_t step, Range range) {
  each_chunk(range, [&](uint32_t chunk, uint64_t offset, Range part) {
    Place from = locate(part);
    auto index = static_cast<uint32_t>(program_->sends_.size());
    program_->sends_.push_back({peer,
                                {static_cast<uint16_t>(step), chunk},
                                from.space,
                                from.first,
                                part.elements,
                                offset});
    program_->send_needs_.push_back(static_cast<uint32_t>(writers_.size()));
    add_edges(index, false);
  });
}

void Compiler::receive(uint32_t peer, uint32_t step, Range range, Place into, Receive how) {
  WEFT_CHECK(step <= std::numeric_limits<uint16_t>::max());
  if (range.elements == 0) return;
  auto first = static_cast<uint32_t>(program_->receives_.size());
  each_chunk(range, [&](uint32_t chunk, uint64_t offset, Range part) {
    Place with = locate(part);
    Receive one = how;
    one.peer = peer;
    one.id = {static_cast<uint16_t>(step), chunk};
    one.space = into.space;
    one.first = into.first + offset;
    one.elements = part.elements;
    one.offset = offset;
    if (one.combine) {
      one.with = with.space;
      one.with_first = with.first;
    }
    if (one.wide) one.wide_at = offset;
    auto index = static_cast<uint32_t>(program_->receives_.size());
    program_->receives_.push_back(one);
    program_->receive_needs_.push_back(static_cast<uint32_t>(writers_.size()));
    add_edges(index, true);
    write(part, {one.space, one.first}, index);
  });
  auto chunks = static_cast<uint32_t>(program_->receives_.size()) - first;
  program_->messages_.push_back({peer, static_cast<uint16_t>(step), first, chunks});
}

void Compiler::store(uint32_t peer, uint32_t step, Range range, Place into) {
  receive(peer, step, range, into, {});
}

void Compiler::combine(uint32_t peer, uint32_t step, Range range, Place into, bool received_first) {
  Receive how;
  how.combine = true;
  how.received_first = received_first;
  receive(peer, step, range, into, how);
}

void Compiler::combine_wide(uint32_t peer, uint32_t step, Range range, Place into, Wide wide) {
  Receive how;
  how.combine = true;
  how.wide = true;
  how.wide_opens = wide.opens;
  how.wide_closes = wide.closes;
  receive(peer, step, range, into, how);
}

void Compiler::copy(Copy copy) {
  if (copy.elements > 0) program_->copies_.push_back(copy);
}

void Compiler::hold_back(uint32_t step, uint32_t behind, uint32_t chunks) {
  auto message = std::find_if(program_->messages_.begin(), program_->messages_.end(),
                              [&](const auto& one) { return one.step == behind; });
  if (message == program_->messages_.end()) return;
  for (uint32_t send = 0; send < program_->sends_.size(); ++send) {
    const ChunkId id = program_->sends_[send].id;
    if (id.step != step || id.chunk < chunks) continue;
    edges_.push_back({message->first_receive + id.chunk - chunks, send, false});
    ++program_->send_needs_[send];
  }
}

void Compiler::interleave() {
  std::vector<uint32_t> order(program_->sends_.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return program_->sends_[a].id.chunk < program_->sends_[b].id.chunk;
  });
  std::vector<Send> sends;
  std::vector<uint32_t> needs, place(order.size());
  for (uint32_t old : order) {
    place[old] = static_cast<uint32_t>(sends.size());
    sends.push_back(program_->sends_[old]);
    needs.push_back(program_->send_needs_[old]);
  }
  program_->sends_ = std::move(sends);
  program_->send_needs_ = std::move(needs);
  for (Edge& edge : edges_)
    if (!edge.to_receive) edge.to = place[edge.to];
}

void Compiler::result(Range range, uint64_t output_first) {
  uint64_t end = range.first + range.elements;
  uint64_t reached = range.first;
  auto copy_until = [&](uint64_t until) {
    copy({reached - input_at_, reached - range.first + output_first, until - reached});
  };
  for (const auto& [first, written] : written_) {
    if (written.end <= reached || first >= end) continue;
    if (first > reached) copy_until(first);
    reached = written.end;
  }
  if (reached < end) copy_until(end);
}

std::shared_ptr<const Program> Compiler::finish(Sizes sizes) {
  Program& program = *program_;
  program.input_elements_ = sizes.input;
  program.output_elements_ = sizes.output;
  program.temporary_elements_ = sizes.temporary;
  program.wide_elements_ = sizes.wide;
  constexpr uint64_t kMost = std::numeric_limits<uint32_t>::max();
  WEFT_CHECK(program.sends_.size() + program.receives_.size() < kMost && edges_.size() < kMost);
  auto sends = static_cast<uint32_t>(program.sends_.size());

  program.allows_first_.assign(program.receives_.size() + 1, 0);
  for (const Edge& edge : edges_) ++program.allows_first_[edge.receive + 1u];
  for (size_t i = 1; i < program.allows_first_.size(); ++i)
    program.allows_first_[i] += program.allows_first_[i - 1];
  program.allows_.resize(edges_.size());
  std::vector<uint32_t> next(program.allows_first_.begin(), program.allows_first_.end() - 1);
  for (const Edge& edge : edges_)
    program.allows_[next[edge.receive]++] = edge.to_receive ? edge.to + sends : edge.to;

  std::sort(program.messages_.begin(), program.messages_.end(), [](const auto& a, const auto& b) {
    return a.peer != b.peer ? a.peer < b.peer : a.step < b.step;
  });
  for (size_t i = 1; i < program.messages_.size(); ++i)
    WEFT_CHECK(program.messages_[i].peer != program.messages_[i - 1].peer ||
               program.messages_[i].step != program.messages_[i - 1].step);
  return std::move(program_);
}

std::vector<Range> blocks_of(const OperationShape& shape) {
  std::vector<Range> blocks(shape.ranks);
  uint64_t first = 0;
  for (uint32_t r = 0; r < shape.ranks; ++r) {
    uint64_t equal = shape.elements / shape.ranks + (r < shape.elements % shape.ranks ? 1 : 0);
    blocks[r] = {first, shape.counts.empty() ? equal : shape.counts[r]};
    first += blocks[r].elements;
  }
  return blocks;
}

std::vector<Range> parts_of(Range whole, uint32_t parts) {
  std::vector<Range> out(parts);
  for (uint32_t i = 0; i < parts; ++i) {
    uint64_t first = cut(whole.elements, i, parts);
    out[i] = {whole.first + first, cut(whole.elements, i + 1u, parts) - first};
  }
  return out;
}

}  // namespace weft::schedule
