// The loops, written once over vectors of kVectorBytes.
//
// Each kernels_*.cc defines WEFT_VECTOR_BYTES, includes this, and is compiled for its instruction
// set. Everything here is private to that source (see kernels.h for why). Arrays whose length is
// no multiple of a vector end with one that is filled up with zeros, so that there is one way to
// compute an element.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"
#include "weft/reduce.h"

namespace weft::reduce {
namespace {

constexpr size_t kVectorBytes = WEFT_VECTOR_BYTES;

template <typename T, size_t bytes = kVectorBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));  // NOLINT(modernize-use-using)
};
template <typename T>
using Vector = typename VectorOf<T>::type;

using Floats = Vector<float>;
using Words = Vector<uint32_t>;
// As many 16-bit values as there are floats in a vector.
using Halves = typename VectorOf<uint16_t, kVectorBytes / 2>::type;

#define WEFT_INLINE [[gnu::always_inline]] inline

template <typename To, typename From>
WEFT_INLINE To bits_as(From from) {
  return __builtin_bit_cast(To, from);
}

// ---- types: how a vector of elements is read and written -----------------------------------

template <typename T>
struct Native {
  using Value = Vector<T>;
  static constexpr size_t kSize = sizeof(T);
  static constexpr size_t kLanes = kVectorBytes / kSize;

  WEFT_INLINE static Value load(const char* from) {
    Value value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
  }
  WEFT_INLINE static void store(char* to, Value value) {
    __builtin_memcpy(to, &value, sizeof value);
  }
};

// Compilers convert between 16 and 32 bits in more steps than it takes.
WEFT_INLINE Words zero_extended(Halves halves) {
#if WEFT_VECTOR_BYTES == 64
  return bits_as<Words>(_mm512_cvtepu16_epi32(bits_as<__m256i>(halves)));
#elif WEFT_VECTOR_BYTES == 32
  return bits_as<Words>(_mm256_cvtepu16_epi32(bits_as<__m128i>(halves)));
#elif defined(__x86_64__)
  const __m128i low = _mm_cvtsi64_si128(bits_as<int64_t>(halves));
  return bits_as<Words>(_mm_unpacklo_epi16(low, _mm_setzero_si128()));
#else
  return __builtin_convertvector(halves, Words);
#endif
}

// REQUIRES: every value fits.
WEFT_INLINE Halves truncated(Words words) {
#if WEFT_VECTOR_BYTES == 64
  return bits_as<Halves>(_mm512_cvtepi32_epi16(bits_as<__m512i>(words)));
#elif WEFT_VECTOR_BYTES == 32
  const __m256i packed = _mm256_packus_epi32(bits_as<__m256i>(words), bits_as<__m256i>(words));
  return bits_as<Halves>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#elif defined(__x86_64__)
  // Only signed values can be packed: extended from 16 bits, they are neither too large nor
  // changed.
  const __m128i extended = _mm_srai_epi32(_mm_slli_epi32(bits_as<__m128i>(words), 16), 16);
  return bits_as<Halves>(int64_t{_mm_cvtsi128_si64(_mm_packs_epi32(extended, extended))});
#else
  return __builtin_convertvector(words, Halves);
#endif
}

// The upper half of a float.
struct Bfloat16 {
  WEFT_INLINE static Floats widened(Halves halves) {
    return bits_as<Floats>(zero_extended(halves) << 16);
  }
  // Adds just less than half of the last place, or just half if the value is odd. REQUIRES: a NaN
  // is the canonical one, which this does not carry over into zero.
  WEFT_INLINE static Halves narrowed(Floats floats) {
    const Words bits = bits_as<Words>(floats);
    return truncated((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

#if WEFT_VECTOR_BYTES > 16

struct Float16 {
  WEFT_INLINE static Floats widened(Halves halves) {
#if WEFT_VECTOR_BYTES == 64
    return bits_as<Floats>(_mm512_cvtph_ps(bits_as<__m256i>(halves)));
#else
    return bits_as<Floats>(_mm256_cvtph_ps(bits_as<__m128i>(halves)));
#endif
  }
  WEFT_INLINE static Halves narrowed(Floats floats) {
#if WEFT_VECTOR_BYTES == 64
    return bits_as<Halves>(_mm512_cvtps_ph(bits_as<__m512>(floats), _MM_FROUND_TO_NEAREST_INT));
#else
    return bits_as<Halves>(_mm256_cvtps_ph(bits_as<__m256>(floats), _MM_FROUND_TO_NEAREST_INT));
#endif
  }
};

#else

// What the processor's own conversion does, in integers. A half float has 5 bits of exponent with
// a bias of 15 and 10 of mantissa, a float 8 with 127 and 23. Magnitudes are signed, because that
// is what old processors compare.
struct Float16 {
  using Integers = Vector<int32_t>;
  static constexpr int32_t kRebias = (127 - 15) << 23;

  WEFT_INLINE static Floats widened(Halves halves) {
    const Words wide = zero_extended(halves);
    const Integers magnitude = bits_as<Integers>((wide & 0x7fff) << 13);
    const Integers normal = magnitude + kRebias;
    // Infinite or not a number: the exponent is all ones in both; the latter becomes quiet.
    const Integers quiet = (magnitude > (0x7c00 << 13)) & (1 << 22);
    const Integers special = (normal + kRebias) | quiet;
    // Subnormal: with the exponent of the smallest normal number the mantissa gets a leading one
    // too many, which a subtraction takes away exactly.
    const Integers least = Integers{} + (kRebias + (1 << 23));
    const Integers subnormal =
        bits_as<Integers>(bits_as<Floats>(magnitude + least) - bits_as<Floats>(least));
    Integers result = magnitude < (1 << 23) ? subnormal : normal;
    result = magnitude >= (0x7c00 << 13) ? special : result;
    return bits_as<Floats>(bits_as<Words>(result) | ((wide & 0x8000) << 16));
  }

  WEFT_INLINE static Halves narrowed(Floats floats) {
    const Words bits = bits_as<Words>(floats);
    const Integers magnitude = bits_as<Integers>(bits & 0x7fffffff);
    // What is too large for an exponent overflows into that of infinity, as it should.
    const Integers normal = (magnitude - kRebias + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 1/2 leaves the mantissa of a subnormal half float in the lowest bits, rounded.
    const Integers half = Integers{} + (126 << 23);
    const Integers subnormal =
        bits_as<Integers>(bits_as<Floats>(magnitude) + bits_as<Floats>(half)) - half;
    const Integers special = ((magnitude > 0x7f800000) & 0x200) | 0x7c00;
    Integers result = magnitude < (kRebias + (1 << 23)) ? subnormal : normal;
    result = magnitude >= ((127 + 16) << 23) ? special : result;
    return truncated(bits_as<Words>(result) | ((bits >> 16) & 0x8000));
  }
};

#endif

// 16-bit floats, as the floats that they are computed in.
template <typename Format>
struct Short {
  using Value = Floats;
  static constexpr size_t kSize = 2;
  static constexpr size_t kLanes = kVectorBytes / sizeof(float);

  WEFT_INLINE static Value load(const char* from) {
    Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    return Format::widened(halves);
  }
  WEFT_INLINE static void store(char* to, Value value) {
    const Halves halves = Format::narrowed(value);
    __builtin_memcpy(to, &halves, sizeof halves);
  }
};

// ---- operations on vectors -------------------------------------------------------------------

WEFT_INLINE Vector<float> one_nan(Vector<float> value) {
  return value == value ? value : Vector<float>{} + __builtin_nanf("");
}
WEFT_INLINE Vector<double> one_nan(Vector<double> value) {
  return value == value ? value : Vector<double>{} + __builtin_nan("");
}
// Integers are numbers.
template <typename V>
WEFT_INLINE V one_nan(V value) {
  return value;
}

struct Sum {
  template <typename V>
  WEFT_INLINE static V of(V a, V b) {
    return one_nan(a + b);
  }
};
struct Product {
  template <typename V>
  WEFT_INLINE static V of(V a, V b) {
    return one_nan(a * b);
  }
};
// A comparison with what is not a number is false: then the first one is taken, and the second
// has to be looked at.
struct Min {
  template <typename V>
  WEFT_INLINE static V of(V a, V b) {
    const V least = b < a ? b : a;
    return one_nan(b == b ? least : b);
  }
};
struct Max {
  template <typename V>
  WEFT_INLINE static V of(V a, V b) {
    const V most = b > a ? b : a;
    return one_nan(b == b ? most : b);
  }
};
struct BitAnd {
  template <typename V>
  WEFT_INLINE static V of(V a, V b) {
    return a & b;
  }
};
struct BitOr {
  template <typename V>
  WEFT_INLINE static V of(V a, V b) {
    return a | b;
  }
};
struct BitXor {
  template <typename V>
  WEFT_INLINE static V of(V a, V b) {
    return a ^ b;
  }
};

// ---- loops over arrays -----------------------------------------------------------------------

// The bytes of fewer elements than a vector has.
template <typename Element>
struct Few {
  alignas(kVectorBytes) char bytes[Element::kLanes * Element::kSize] = {};

  Few() = default;
  Few(const char* from, size_t count) { __builtin_memcpy(bytes, from, count * Element::kSize); }
};

// How many elements to do first, so that vectors are then written to whole cache lines; none if
// the array is too short to gain by it.
template <typename To>
WEFT_INLINE size_t elements_to_alignment(const char* to, size_t count) {
  constexpr size_t kBytes = To::kLanes * To::kSize;
  const size_t past = reinterpret_cast<uintptr_t>(to) % kBytes;
  if (count < 32 * To::kLanes || past % To::kSize != 0) return 0;
  return (kBytes - past) % kBytes / To::kSize;
}

template <typename To, typename A, typename B, typename Operation>
WEFT_INLINE void combine_few(char* to, const char* a, const char* b, size_t count) {
  Few<To> few;
  const Few<A> few_a(a, count);
  const Few<B> few_b(b, count);
  To::store(few.bytes, Operation::of(A::load(few_a.bytes), B::load(few_b.bytes)));
  __builtin_memcpy(to, few.bytes, count * To::kSize);
}

// to[i] = a[i] op b[i].
template <typename To, typename A, typename B, typename Operation>
void combine_arrays(void* to_start, const void* a_start, const void* b_start, size_t count) {
  static_assert(To::kLanes == A::kLanes && To::kLanes == B::kLanes);
  char* to = static_cast<char*>(to_start);
  const char* a = static_cast<const char*>(a_start);
  const char* b = static_cast<const char*>(b_start);
  size_t i = elements_to_alignment<To>(to, count);
  if (i > 0) combine_few<To, A, B, Operation>(to, a, b, i);
  for (; count - i >= To::kLanes; i += To::kLanes) {
    const auto value = Operation::of(A::load(a + i * A::kSize), B::load(b + i * B::kSize));
    To::store(to + i * To::kSize, value);
  }
  if (i == count) return;
  combine_few<To, A, B, Operation>(to + i * To::kSize, a + i * A::kSize, b + i * B::kSize,
                                   count - i);
}

// to[i] = f(from[i]).
template <typename To, typename From, typename Function>
WEFT_INLINE void map_array(void* to_start, const void* from_start, size_t count, Function f) {
  static_assert(To::kLanes == From::kLanes);
  char* to = static_cast<char*>(to_start);
  const char* from = static_cast<const char*>(from_start);
  size_t i = 0;
  for (; count - i >= To::kLanes; i += To::kLanes) {
    To::store(to + i * To::kSize, f(From::load(from + i * From::kSize)));
  }
  if (i == count) return;
  Few<To> few;
  To::store(few.bytes, f(From::load(Few<From>(from + i * From::kSize, count - i).bytes)));
  __builtin_memcpy(to + i * To::kSize, few.bytes, (count - i) * To::kSize);
}

template <typename Element, typename Scalar>
void divide_floats(void* to, const void* from, size_t count, uint32_t divisor) {
  using Value = typename Element::Value;
  const Value by = Value{} + static_cast<Scalar>(divisor);
  map_array<Element, Element>(to, from, count, [by](Value value) { return one_nan(value / by); });
}

// There are no vectors of integer quotients. The quotient of doubles is exact enough for up to 32
// bits: its error is below the distance of a fraction from the next integer.
template <typename T>
struct Quotient {
  using Wide = double;
};
template <>
struct Quotient<int64_t> {
  using Wide = int64_t;
};

template <typename T>
void divide_integers(void* to_start, const void* from_start, size_t count, uint32_t divisor) {
  using Wide = typename Quotient<T>::Wide;
  char* to = static_cast<char*>(to_start);
  const char* from = static_cast<const char*>(from_start);
  for (size_t i = 0; i < count; ++i) {
    T value;
    __builtin_memcpy(&value, from + i * sizeof(T), sizeof(T));
    value = static_cast<T>(static_cast<Wide>(value) / static_cast<Wide>(divisor));
    __builtin_memcpy(to + i * sizeof(T), &value, sizeof(T));
  }
}

template <typename Format>
void widen_array(void* to, const void* from, size_t count) {
  map_array<Native<float>, Short<Format>>(to, from, count, [](Floats value) { return value; });
}

template <typename Format>
void narrow_array(void* to, const void* from, size_t count) {
  map_array<Short<Format>, Native<float>>(to, from, count,
                                          [](Floats value) { return one_nan(value); });
}

// ---- the table -------------------------------------------------------------------------------

constexpr size_t at(Op op) { return static_cast<size_t>(op); }
constexpr size_t at(Type type) { return static_cast<size_t>(type); }

// `Plain` is the type as it is; `Ring` what it is added and multiplied in: unsigned for integers,
// because that is how they wrap around.
template <typename Plain, typename Ring>
constexpr void set_arithmetic(Kernels& kernels, Type type) {
  auto& combine = kernels.combine;
  combine[at(Op::sum)][at(type)] = combine_arrays<Ring, Ring, Ring, Sum>;
  combine[at(Op::mean)][at(type)] = combine_arrays<Ring, Ring, Ring, Sum>;
  combine[at(Op::product)][at(type)] = combine_arrays<Ring, Ring, Ring, Product>;
  combine[at(Op::min)][at(type)] = combine_arrays<Plain, Plain, Plain, Min>;
  combine[at(Op::max)][at(type)] = combine_arrays<Plain, Plain, Plain, Max>;
}

template <typename T, typename Unsigned>
constexpr void set_integer(Kernels& kernels, Type type) {
  using Ring = Native<Unsigned>;
  set_arithmetic<Native<T>, Ring>(kernels, type);
  kernels.combine[at(Op::bit_and)][at(type)] = combine_arrays<Ring, Ring, Ring, BitAnd>;
  kernels.combine[at(Op::bit_or)][at(type)] = combine_arrays<Ring, Ring, Ring, BitOr>;
  kernels.combine[at(Op::bit_xor)][at(type)] = combine_arrays<Ring, Ring, Ring, BitXor>;
  kernels.divide[at(type)] = divide_integers<T>;
}

template <typename Element, typename Scalar>
constexpr void set_float(Kernels& kernels, Type type) {
  set_arithmetic<Element, Element>(kernels, type);
  kernels.divide[at(type)] = divide_floats<Element, Scalar>;
}

template <typename Format>
constexpr void set_short_float(Kernels& kernels, Type type) {
  using From = Short<Format>;
  using Wide = Native<float>;
  set_float<From, float>(kernels, type);
  auto& accumulate = kernels.accumulate;
  accumulate[at(Op::sum)][at(type)] = combine_arrays<Wide, Wide, From, Sum>;
  accumulate[at(Op::mean)][at(type)] = combine_arrays<Wide, Wide, From, Sum>;
  accumulate[at(Op::product)][at(type)] = combine_arrays<Wide, Wide, From, Product>;
  accumulate[at(Op::min)][at(type)] = combine_arrays<Wide, Wide, From, Min>;
  accumulate[at(Op::max)][at(type)] = combine_arrays<Wide, Wide, From, Max>;
  kernels.widen[at(type)] = widen_array<Format>;
  kernels.narrow[at(type)] = narrow_array<Format>;
}

constexpr Kernels table(const char* name) {
  Kernels kernels;
  kernels.name = name;
  set_float<Native<float>, float>(kernels, Type::float32);
  set_float<Native<double>, double>(kernels, Type::float64);
  set_short_float<Float16>(kernels, Type::float16);
  set_short_float<Bfloat16>(kernels, Type::bfloat16);
  set_integer<int8_t, uint8_t>(kernels, Type::int8);
  set_integer<int16_t, uint16_t>(kernels, Type::int16);
  set_integer<int32_t, uint32_t>(kernels, Type::int32);
  set_integer<int64_t, uint64_t>(kernels, Type::int64);
  set_integer<uint8_t, uint8_t>(kernels, Type::uint8);
  return kernels;
}

}  // namespace
}  // namespace weft::reduce
