// reduce: what elements are, and how two or many of them become one.
//
// A collective moves bytes; what they mean is said here: nine types, eight operations, and loops
// over arrays of them, vectorised and chosen for the processor at hand. Equal inputs give equal
// bits on every processor and with every instruction set. To that end
//
//   - operands are taken in the order given: a tie of min or max (-0 and +0) is the first one;
//   - a floating-point result that is not a number is always the same one (positive, quiet, no
//     payload): processors differ in whose payload survives, and compilers swap operands;
//   - 16-bit floats are computed in 32 bits and rounded to nearest, ties to even;
//   - integers wrap around.
//
// This holds while the calling thread rounds to nearest and keeps subnormals, as threads do unless
// told otherwise.
//
// Pointers need no alignment. A result may lie exactly over an operand of the same type;
// otherwise they may not overlap. Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace weft::reduce {

// On the wire: append, never renumber.
enum class Type : uint8_t {
  float32 = 1,
  float64 = 2,
  float16 = 3,
  bfloat16 = 4,
  int8 = 5,
  int16 = 6,
  int32 = 7,
  int64 = 8,
  uint8 = 9,
};

// On the wire: append, never renumber.
enum class Op : uint8_t {
  sum = 1,
  mean = 2,
  min = 3,  // not a number if either is not; so is max
  max = 4,
  product = 5,
  bit_and = 6,
  bit_or = 7,
  bit_xor = 8,
};

// Is a byte from a peer one of the values above? Everything below requires that it is.
bool known_type(uint8_t raw);
bool known_op(uint8_t raw);

size_t size_of(Type type);

// As the enumerators are spelled; "unknown" for anything else.
const char* name_of(Type type);
const char* name_of(Op op);
std::optional<Type> type_named(std::string_view name);
std::optional<Op> op_named(std::string_view name);

// Bitwise operations are for integers, all others for every type.
bool supports(Op op, Type type);

// to[i] = a[i] op b[i]. A mean is a sum until finish() divides it.
// REQUIRES: supports(op, type).
void combine(Op op, Type type, void* to, const void* a, const void* b, size_t count);

// Divides by `ranks` for a mean, integers toward zero; does nothing for other operations.
// REQUIRES: ranks > 0.
void finish(Op op, Type type, void* data, size_t count, uint32_t ranks);

// Many arrays of 16-bit floats become one with a single rounding at the end: widen the first,
// accumulate the others, finish() as float32, narrow.
// REQUIRES: type is float16 or bfloat16; op is not bitwise.
void widen(Type type, float* to, const void* from, size_t count);
// to[i] = to[i] op from[i].
void accumulate(Op op, Type type, float* to, const void* from, size_t count);
void narrow(Type type, void* to, const float* from, size_t count);

// "AVX-512", "AVX2" or "plain": what the functions above use in this process. The environment
// variable WEFT_INSTRUCTIONS (plain, avx2, avx512) lowers it; it is read once.
const char* instruction_set();

}  // namespace weft::reduce
