// Recursive halving and doubling. Ranks beyond a power of two are folded in: each of the first
// pairs sends to its odd one, which takes part for both and sends the result back.

#include <bit>

#include "compile.h"

namespace weft::schedule {
namespace {

struct Fold {
  uint32_t power = 1;   // of two, the largest that fits
  uint32_t folded = 0;  // pairs that fold: ranks 0 to 2 * folded - 1
  bool waits = false;   // this rank hands its data over and waits for the result
  bool stands_in = false;
  uint32_t partner = 0;  // of the pair
  uint32_t index = 0;    // among those that take part
  uint32_t rounds = 0;

  uint32_t rank_of(uint32_t taking_part) const {
    return taking_part < folded ? 2 * taking_part + 1 : taking_part + folded;
  }
};

Fold fold_of(const OperationShape& shape) {
  Fold fold;
  fold.power = std::bit_floor(shape.ranks);
  fold.folded = shape.ranks - fold.power;
  fold.rounds = static_cast<uint32_t>(std::bit_width(fold.power) - 1);
  if (shape.rank < 2 * fold.folded) {
    fold.stands_in = shape.rank % 2 == 1;
    fold.waits = !fold.stands_in;
    fold.partner = shape.rank ^ 1u;
    fold.index = shape.rank / 2;
  } else {
    fold.index = shape.rank - fold.folded;
  }
  return fold;
}

void hand_over_and_wait(Compiler& out, const Fold& fold, Range whole, uint32_t last_step) {
  out.send(fold.partner, 0, whole);
  out.store(fold.partner, last_step, whole, {Space::output, 0});
}

}  // namespace

// Each round halves the segments that a rank is responsible for, nearest partner first, until one
// is left; then the rounds run backwards and double them.
std::shared_ptr<const Program> halving_doubling_all_reduce(const OperationShape& shape) {
  Compiler out(shape);
  Range whole{0, shape.elements};
  Fold fold = fold_of(shape);
  std::vector<Range> segments = parts_of(whole, fold.power);
  auto span = [&](uint32_t first, uint32_t count) {
    const Range& last = segments[first + count - 1];
    return Range{segments[first].first, last.first + last.elements - segments[first].first};
  };
  uint32_t last_step = 2 * fold.rounds + 1;
  if (fold.waits) hand_over_and_wait(out, fold, whole, last_step);
  if (fold.stands_in) out.combine(fold.partner, 0, whole, {Space::output, 0});

  if (!fold.waits) {
    uint32_t first = 0;
    for (uint32_t round = 0; round < fold.rounds; ++round) {
      uint32_t half = fold.power >> (round + 1);
      uint32_t peer = fold.rank_of(fold.index ^ (1u << round));
      bool upper = (fold.index >> round & 1) != 0;
      Range kept = span(first + (upper ? half : 0), half);
      out.send(peer, 1 + round, span(first + (upper ? 0 : half), half));
      out.combine(peer, 1 + round, kept, {Space::output, kept.first});
      if (upper) first += half;
    }
    for (uint32_t round = fold.rounds; round-- > 0;) {
      uint32_t half = fold.power >> (round + 1);
      uint32_t peer = fold.rank_of(fold.index ^ (1u << round));
      bool upper = (fold.index >> round & 1) != 0;
      uint32_t step = 2 * fold.rounds - round;
      Range missing = span(upper ? first - half : first + half, half);
      out.send(peer, step, span(first, half));
      out.store(peer, step, missing, {Space::output, missing.first});
      if (upper) first -= half;
    }
  }
  if (fold.stands_in) out.send(fold.partner, last_step, whole);
  out.result(whole, 0);
  return out.finish({shape.elements, shape.elements, 0, 0});
}

// All data in every round. What a round makes is put where nothing was before, because what the
// round before made may not have reached its partner yet: here nobody's data waits for it. For the
// same reason the input must not be the output's memory (Program::in_place).
std::shared_ptr<const Program> doubling_all_reduce(const OperationShape& shape) {
  Compiler out(shape);
  Range whole{0, shape.elements};
  Fold fold = fold_of(shape);
  uint64_t temporary = 0;
  auto next_place = [&] {
    Place place{Space::temporary, temporary};
    temporary += shape.elements;
    return place;
  };
  uint32_t last_step = fold.rounds + 1;
  if (fold.waits) hand_over_and_wait(out, fold, whole, last_step);
  if (fold.stands_in) out.combine(fold.partner, 0, whole, next_place(), true);
  for (uint32_t round = 0; round < fold.rounds && !fold.waits; ++round) {
    uint32_t peer = fold.rank_of(fold.index ^ (1u << round));
    bool last = round + 1 == fold.rounds;
    out.send(peer, 1 + round, whole);
    out.combine(peer, 1 + round, whole, last ? Place{Space::output, 0} : next_place(),
                peer < shape.rank);
  }
  if (fold.stands_in) out.send(fold.partner, last_step, whole);
  out.result(whole, 0);
  return out.finish({shape.elements, shape.elements, temporary, 0});
}

}  // namespace weft::schedule
