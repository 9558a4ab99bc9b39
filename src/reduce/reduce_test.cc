#include "weft/reduce.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"
#include "weft/base.h"

namespace weft::reduce {
namespace {

std::vector<Type> all_types() {
  std::vector<Type> types;
  for (uint8_t raw = 1; known_type(raw); ++raw) types.push_back(static_cast<Type>(raw));
  return types;
}

std::vector<Op> all_ops() {
  std::vector<Op> ops;
  for (uint8_t raw = 1; known_op(raw); ++raw) ops.push_back(static_cast<Op>(raw));
  return ops;
}

std::vector<const Kernels*> all_kernels() {
  const Available available = available_kernels();
  return {available.tables, available.tables + available.count};
}

// ---- the reference: one element at a time, nothing shared with the loops ---------------------

struct Format {
  int mantissa_bits;
  int exponent_min;  // of the smallest normal number
  int exponent_max;
};
constexpr Format kFloat16 = {10, -14, 15};
constexpr Format kBfloat16 = {7, -126, 127};

const Format& format_of(Type type) { return type == Type::float16 ? kFloat16 : kBfloat16; }

// From the definition: sign, exponent, mantissa.
float decoded(Type type, uint16_t bits) {
  const Format& format = format_of(type);
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = (bits & 0x7fff) >> format.mantissa_bits;
  const int biased = exponent + format.exponent_min - 1;
  double value = 0;
  if (biased > format.exponent_max) {
    value = mantissa != 0 ? std::nan("") : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, format.exponent_min - format.mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << format.mantissa_bits), biased - format.mantissa_bits);
  }
  return static_cast<float>((bits & 0x8000) != 0 ? -value : value);
}

// Counts in units of the last place, which depends on the exponent; nearbyint rounds to even.
uint16_t encoded(Type type, float value) {
  const Format& format = format_of(type);
  const int infinity = (format.exponent_max - format.exponent_min + 2) << format.mantissa_bits;
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) {
    return static_cast<uint16_t>(infinity | (1 << (format.mantissa_bits - 1)));
  }
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
  if (value == 0) return static_cast<uint16_t>(sign);
  const double magnitude = std::fabs(static_cast<double>(value));
  const int exponent = std::max(std::ilogb(magnitude), format.exponent_min);
  const auto units =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent)));
  const int bits = ((exponent - format.exponent_min) << format.mantissa_bits) + units;
  return static_cast<uint16_t>(sign | std::min(bits, infinity));
}

template <typename T>
T float_result(Op op, T a, T b) {
  T result = 0;
  switch (op) {
    case Op::sum:
    case Op::mean: result = a + b; break;
    case Op::product: result = a * b; break;
    case Op::min: result = std::isnan(a) || std::isnan(b) ? a + b : (b < a ? b : a); break;
    case Op::max: result = std::isnan(a) || std::isnan(b) ? a + b : (a < b ? b : a); break;
    default: ADD_FAILURE() << name_of(op) << " of floats";
  }
  return std::isnan(result) ? std::numeric_limits<T>::quiet_NaN() : result;
}

// All integers fit into 64 bits, and so do the low bits of what is computed with them.
template <typename T>
T integer_result(Op op, T a, T b) {
  const auto wide_a = static_cast<uint64_t>(int64_t{a});
  const auto wide_b = static_cast<uint64_t>(int64_t{b});
  switch (op) {
    case Op::sum:
    case Op::mean: return static_cast<T>(wide_a + wide_b);
    case Op::product: return static_cast<T>(wide_a * wide_b);
    case Op::min: return std::min(a, b);
    case Op::max: return std::max(a, b);
    case Op::bit_and: return static_cast<T>(wide_a & wide_b);
    case Op::bit_or: return static_cast<T>(wide_a | wide_b);
    case Op::bit_xor: return static_cast<T>(wide_a ^ wide_b);
  }
  ADD_FAILURE() << name_of(op);
  return 0;
}

// Calls f(T{}) with the C++ type; 16-bit floats are their bits.
template <typename F>
void with_type(Type type, F&& f) {
  switch (type) {
    case Type::float32: return f(float{});
    case Type::float64: return f(double{});
    case Type::float16:
    case Type::bfloat16: return f(uint16_t{});
    case Type::int8: return f(int8_t{});
    case Type::int16: return f(int16_t{});
    case Type::int32: return f(int32_t{});
    case Type::int64: return f(int64_t{});
    case Type::uint8: return f(uint8_t{});
  }
}

template <typename T>
T reference_combined(Op op, Type type, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return float_result(op, a, b);
  } else if constexpr (std::is_same_v<T, uint16_t>) {
    return encoded(type, float_result(op, decoded(type, a), decoded(type, b)));
  } else {
    return integer_result(op, a, b);
  }
}

template <typename T>
T reference_divided(Type type, T value, uint32_t ranks) {
  if constexpr (std::is_floating_point_v<T>) {
    const T result = value / static_cast<T>(ranks);
    return std::isnan(result) ? std::numeric_limits<T>::quiet_NaN() : result;
  } else if constexpr (std::is_same_v<T, uint16_t>) {
    return encoded(type, decoded(type, value) / static_cast<float>(ranks));
  } else {
    return static_cast<T>(static_cast<int64_t>(value) / static_cast<int64_t>(ranks));
  }
}

// ---- input -----------------------------------------------------------------------------------

using ByteArray = std::vector<char>;

template <typename T>
std::vector<T> special_values(Type type) {
  using Limits = std::numeric_limits<T>;
  if constexpr (std::is_floating_point_v<T>) {
    return {0,
            -T{0},
            1,
            -1,
            Limits::infinity(),
            -Limits::infinity(),
            Limits::quiet_NaN(),
            -Limits::quiet_NaN(),
            Limits::signaling_NaN(),
            Limits::max(),
            Limits::lowest(),
            Limits::min(),
            -Limits::min(),
            Limits::denorm_min(),
            -Limits::denorm_min()};
  } else if constexpr (std::is_same_v<T, uint16_t>) {
    const int infinity = type == Type::float16 ? 0x7c00 : 0x7f80;
    std::vector<T> values;
    for (const int bits : {0, 1, 2, 0x200, 0x3ff, 0x400, 0x401, 0x3c00, 0x3f80, infinity - 1,
                           infinity, infinity + 1, 0x7e00, 0x7fc1, 0x7fff}) {
      values.push_back(static_cast<T>(bits));
      values.push_back(static_cast<T>(bits | 0x8000));
    }
    return values;
  } else {
    return {0, 1, 2, static_cast<T>(-1), Limits::max(), Limits::min(), Limits::max() / 2 + 1};
  }
}

// Half of the values are any bits at all, which for floats are mostly far apart; a quarter is near
// one, so that their sums have something to round; a quarter is special.
template <typename T>
std::vector<T> random_values(Rng& rng, Type type, size_t count) {
  const auto specials = special_values<T>(type);
  std::vector<T> values(count);
  for (T& value : values) {
    const uint64_t bits = rng.next();
    std::memcpy(&value, &bits, sizeof value);
    const uint64_t kind = rng.below(4);
    if (kind == 0) value = specials[rng.below(specials.size())];
    if (kind != 1) continue;
    const double near_one = rng.uniform() * 4 - 2;
    if constexpr (std::is_floating_point_v<T>) value = static_cast<T>(near_one);
    if constexpr (std::is_same_v<T, uint16_t>) {
      value = encoded(type, static_cast<float>(near_one));
    }
  }
  return values;
}

// An array at an address that is as odd as asked for, between bytes that must not change.
class Placed {
 public:
  template <typename T>
  Placed(const std::vector<T>& values, size_t offset)
      : size_(values.size() * sizeof(T)),
        offset_(kGuard + offset),
        bytes_(size_ + offset + 2 * kGuard, '\x5a') {
    if (size_ > 0) std::memcpy(data(), values.data(), size_);
  }

  char* data() { return bytes_.data() + offset_; }

  template <typename T>
  std::vector<T> values() const {
    std::vector<T> values(size_ / sizeof(T));
    if (size_ > 0) std::memcpy(values.data(), bytes_.data() + offset_, size_);
    return values;
  }
  bool guards_hold() const {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if ((i < offset_ || i >= offset_ + size_) && bytes_[i] != '\x5a') return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;
  size_t size_;
  size_t offset_;
  ByteArray bytes_;
};

// Nothing if all bits are equal, otherwise where they first are not.
template <typename T>
std::string difference(const std::vector<T>& got, const std::vector<T>& expected) {
  if (got.size() != expected.size()) return "the lengths differ";
  for (size_t i = 0; i < got.size(); ++i) {
    uint64_t got_bits = 0;
    uint64_t expected_bits = 0;
    std::memcpy(&got_bits, &got[i], sizeof(T));
    std::memcpy(&expected_bits, &expected[i], sizeof(T));
    if (got_bits != expected_bits) {
      return text("element %zu is %#llx, not %#llx", i, static_cast<unsigned long long>(got_bits),
                  static_cast<unsigned long long>(expected_bits));
    }
  }
  return "";
}

struct Row {
  const Kernels* kernels;
  Type type;
};

std::string row_name(const testing::TestParamInfo<Row>& info) {
  const std::string set = info.param.kernels->name;
  return (set == "AVX-512" ? "AVX512" : set) + "_" + name_of(info.param.type);
}

std::vector<Row> all_rows() {
  std::vector<Row> rows;
  for (const Kernels* kernels : all_kernels()) {
    for (const Type type : all_types()) rows.push_back({kernels, type});
  }
  return rows;
}

// ---- every instruction set against the reference ---------------------------------------------

class KernelsOf : public testing::TestWithParam<Row> {
 protected:
  const Kernels& kernels() const { return *GetParam().kernels; }
  Type type() const { return GetParam().type; }
  size_t index() const { return static_cast<size_t>(type()); }
  Kernels::Combine combine_kernel(Op op) const {
    return kernels().combine[static_cast<size_t>(op)][index()];
  }
};

INSTANTIATE_TEST_SUITE_P(Reduce, KernelsOf, testing::ValuesIn(all_rows()), row_name);

TEST_P(KernelsOf, combine_every_length_and_offset) {
  with_type(type(), [&](auto zero) {
    using T = decltype(zero);
    Rng rng(1 + index());
    for (const Op op : all_ops()) {
      if (!supports(op, type())) continue;
      for (size_t count = 0; count <= 130; ++count) {
        const auto a = random_values<T>(rng, type(), count);
        const auto b = random_values<T>(rng, type(), count);
        std::vector<T> expected(count);
        for (size_t i = 0; i < count; ++i) {
          expected[i] = reference_combined(op, type(), a[i], b[i]);
        }
        Placed placed_a(a, rng.below(8));
        Placed placed_b(b, rng.below(8));
        Placed to(std::vector<T>(count), rng.below(8));
        combine_kernel(op)(to.data(), placed_a.data(), placed_b.data(), count);
        ASSERT_EQ(difference(to.values<T>(), expected), "") << name_of(op) << " of " << count;
        ASSERT_TRUE(to.guards_hold()) << name_of(op) << " of " << count;
        ASSERT_EQ(difference(placed_a.values<T>(), a), "") << "an operand changed";
        ASSERT_EQ(difference(placed_b.values<T>(), b), "") << "an operand changed";
      }
    }
  });
}

// Long enough for the loops to care where the result begins.
TEST_P(KernelsOf, combine_long_arrays_at_every_offset) {
  with_type(type(), [&](auto zero) {
    using T = decltype(zero);
    Rng rng(7 + index());
    const size_t count = 2101;
    const auto a = random_values<T>(rng, type(), count);
    const auto b = random_values<T>(rng, type(), count);
    std::vector<T> expected(count);
    for (size_t i = 0; i < count; ++i) {
      expected[i] = reference_combined(Op::max, type(), a[i], b[i]);
    }
    for (size_t offset = 0; offset < 65; ++offset) {
      Placed to(a, offset);
      Placed from(b, rng.below(65));
      combine_kernel(Op::max)(to.data(), to.data(), from.data(), count);
      ASSERT_EQ(difference(to.values<T>(), expected), "") << "at " << offset;
      ASSERT_TRUE(to.guards_hold());
      ASSERT_EQ(difference(from.values<T>(), b), "") << "an operand changed";
    }
  });
}

TEST_P(KernelsOf, combine_over_either_operand_or_both) {
  with_type(type(), [&](auto zero) {
    using T = decltype(zero);
    Rng rng(2 + index());
    for (const Op op : all_ops()) {
      if (!supports(op, type())) continue;
      for (const size_t count : {1, 7, 64, 129, 1000}) {
        const auto a = random_values<T>(rng, type(), count);
        const auto b = random_values<T>(rng, type(), count);
        std::vector<T> expected(count);
        std::vector<T> expected_same(count);
        for (size_t i = 0; i < count; ++i) {
          expected[i] = reference_combined(op, type(), a[i], b[i]);
          expected_same[i] = reference_combined(op, type(), a[i], a[i]);
        }
        Placed over_a(a, 1);
        Placed over_b(b, 3);
        Placed over_both(a, 2);
        combine_kernel(op)(over_a.data(), over_a.data(), over_b.data(), count);
        EXPECT_EQ(difference(over_a.values<T>(), expected), "") << name_of(op);
        Placed first(a, 5);
        combine_kernel(op)(over_b.data(), first.data(), over_b.data(), count);
        EXPECT_EQ(difference(over_b.values<T>(), expected), "") << name_of(op);
        combine_kernel(op)(over_both.data(), over_both.data(), over_both.data(), count);
        EXPECT_EQ(difference(over_both.values<T>(), expected_same), "") << name_of(op);
      }
    }
  });
}

TEST_P(KernelsOf, combine_every_pair_of_special_values) {
  with_type(type(), [&](auto zero) {
    using T = decltype(zero);
    const auto specials = special_values<T>(type());
    std::vector<T> a;
    std::vector<T> b;
    for (const T left : specials) {
      for (const T right : specials) {
        a.push_back(left);
        b.push_back(right);
      }
    }
    for (const Op op : all_ops()) {
      if (!supports(op, type())) continue;
      std::vector<T> expected(a.size());
      for (size_t i = 0; i < a.size(); ++i) {
        expected[i] = reference_combined(op, type(), a[i], b[i]);
      }
      std::vector<T> got(a.size());
      combine_kernel(op)(got.data(), a.data(), b.data(), a.size());
      EXPECT_EQ(difference(got, expected), "") << name_of(op);
    }
  });
}

TEST_P(KernelsOf, divide_every_length) {
  with_type(type(), [&](auto zero) {
    using T = decltype(zero);
    Rng rng(3 + index());
    for (const uint32_t ranks : {1u, 2u, 3u, 7u, 128u, 255u, 65536u, 4294967295u}) {
      for (size_t count = 0; count <= 130; ++count) {
        const auto values = random_values<T>(rng, type(), count);
        std::vector<T> expected(count);
        for (size_t i = 0; i < count; ++i) {
          expected[i] = reference_divided(type(), values[i], ranks);
        }
        Placed data(values, rng.below(8));
        kernels().divide[index()](data.data(), data.data(), count, ranks);
        ASSERT_EQ(difference(data.values<T>(), expected), "") << "by " << ranks;
        ASSERT_TRUE(data.guards_hold());
      }
    }
  });
}

// Bits against bits, with more of them than the reference has the time for.
TEST_P(KernelsOf, give_the_bits_of_the_plain_ones) {
  with_type(type(), [&](auto zero) {
    using T = decltype(zero);
    Rng rng(4 + index());
    const size_t count = 100'003;
    const auto a = random_values<T>(rng, type(), count);
    const auto b = random_values<T>(rng, type(), count);
    std::vector<T> got(count);
    std::vector<T> plain(count);
    for (const Op op : all_ops()) {
      if (!supports(op, type())) continue;
      combine_kernel(op)(got.data(), a.data(), b.data(), count);
      kPlainKernels.combine[static_cast<size_t>(op)][index()](plain.data(), a.data(), b.data(),
                                                              count);
      EXPECT_EQ(difference(got, plain), "") << name_of(op);
    }
  });
}

// ---- 16-bit floats ---------------------------------------------------------------------------

class ShortFloats : public KernelsOf {};

std::vector<Row> short_rows() {
  std::vector<Row> rows;
  for (const Kernels* kernels : all_kernels()) {
    for (const Type type : {Type::float16, Type::bfloat16}) rows.push_back({kernels, type});
  }
  return rows;
}

INSTANTIATE_TEST_SUITE_P(Reduce, ShortFloats, testing::ValuesIn(short_rows()), row_name);

std::vector<uint16_t> all_short_floats() {
  std::vector<uint16_t> values(65536);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i);
  return values;
}

TEST_P(ShortFloats, widen_every_value) {
  const auto values = all_short_floats();
  std::vector<float> wide(values.size());
  kernels().widen[index()](wide.data(), values.data(), values.size());
  std::vector<float> plain(values.size());
  kPlainKernels.widen[index()](plain.data(), values.data(), values.size());
  EXPECT_EQ(difference(wide, plain), "");
  for (size_t i = 0; i < values.size(); ++i) {
    const float expected = decoded(type(), values[i]);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(wide[i])) << i;
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(expected)) << i;
    }
  }
}

// Each value, the point halfway to the next one, and the floats beside both.
TEST_P(ShortFloats, narrow_around_every_value) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> wide;
  for (const uint16_t bits : all_short_floats()) {
    const float value = decoded(type(), bits);
    const auto next_bits = static_cast<uint16_t>(bits + 1);
    const float next = decoded(type(), next_bits);
    float halfway = value / 2 + next / 2;
    // Where the next one is infinite, as if it were finite.
    if (std::isinf(next) && !std::isinf(value)) {
      const float before = decoded(type(), static_cast<uint16_t>(bits - 1));
      halfway = value + (value / 2 - before / 2);
    }
    for (const float near : {value, halfway}) {
      wide.push_back(near);
      wide.push_back(std::nextafter(near, infinity));
      wide.push_back(std::nextafter(near, -infinity));
    }
  }
  std::vector<uint16_t> expected(wide.size());
  for (size_t i = 0; i < wide.size(); ++i) expected[i] = encoded(type(), wide[i]);
  std::vector<uint16_t> got(wide.size());
  kernels().narrow[index()](got.data(), wide.data(), wide.size());
  EXPECT_EQ(difference(got, expected), "");
}

TEST_P(ShortFloats, narrow_any_bits) {
  Rng rng(5);
  const auto wide = random_values<float>(rng, Type::float32, 300'001);
  std::vector<uint16_t> expected(wide.size());
  for (size_t i = 0; i < wide.size(); ++i) expected[i] = encoded(type(), wide[i]);
  std::vector<uint16_t> got(wide.size());
  kernels().narrow[index()](got.data(), wide.data(), wide.size());
  EXPECT_EQ(difference(got, expected), "");
}

TEST_P(ShortFloats, accumulate_and_convert_every_length) {
  Rng rng(6);
  for (size_t count = 0; count <= 130; ++count) {
    const auto start = random_values<float>(rng, Type::float32, count);
    const auto values = random_values<uint16_t>(rng, type(), count);
    for (const Op op : {Op::sum, Op::mean, Op::min, Op::max, Op::product}) {
      std::vector<float> expected(count);
      std::vector<uint16_t> expected_short(count);
      for (size_t i = 0; i < count; ++i) {
        expected[i] = float_result(op, start[i], decoded(type(), values[i]));
        expected_short[i] = encoded(type(), expected[i]);
      }
      Placed to(start, rng.below(8));
      Placed from(values, rng.below(8));
      kernels().accumulate[static_cast<size_t>(op)][index()](to.data(), to.data(), from.data(),
                                                             count);
      ASSERT_EQ(difference(to.values<float>(), expected), "") << name_of(op) << " of " << count;
      ASSERT_TRUE(to.guards_hold());
      kernels().narrow[index()](from.data(), to.data(), count);
      ASSERT_EQ(difference(from.values<uint16_t>(), expected_short), "") << count;
      ASSERT_TRUE(from.guards_hold());
      kernels().widen[index()](to.data(), from.data(), count);
      ASSERT_TRUE(to.guards_hold());
      for (size_t i = 0; i < count; ++i) expected[i] = decoded(type(), expected_short[i]);
      ASSERT_EQ(difference(to.values<float>(), expected), "") << count;
    }
  }
}

// ---- the public face -------------------------------------------------------------------------

// The sanitizers would say so; the count says that all were called.
TEST(Reduce, nothing_needs_no_memory) {
  size_t calls = 0;
  for (const Type type : all_types()) {
    combine(Op::sum, type, nullptr, nullptr, nullptr, 0);
    finish(Op::mean, type, nullptr, 0, 4);
    calls += 2;
  }
  EXPECT_EQ(calls, 18u);
  widen(Type::float16, nullptr, nullptr, 0);
  accumulate(Op::sum, Type::bfloat16, nullptr, nullptr, 0);
  narrow(Type::bfloat16, nullptr, nullptr, 0);
}

TEST(ReduceDeathTest, what_nobody_may_ask_for_ends_the_process) {
  float value = 0;
  EXPECT_DEATH(combine(Op::bit_or, Type::float32, &value, &value, &value, 1), "reduce.cc");
  EXPECT_DEATH(combine(static_cast<Op>(9), Type::float32, &value, &value, &value, 1), "known_op");
  EXPECT_DEATH(size_of(static_cast<Type>(0)), "known_type");
  EXPECT_DEATH(widen(Type::float32, &value, &value, 1), "kernel");
  EXPECT_DEATH(finish(Op::mean, Type::float32, &value, 1, 0), "ranks");
}

TEST(Reduce, names_are_read_back) {
  EXPECT_EQ(all_types().size(), 9u);
  EXPECT_EQ(all_ops().size(), 8u);
  for (const Type type : all_types()) EXPECT_EQ(type_named(name_of(type)), type);
  for (const Op op : all_ops()) EXPECT_EQ(op_named(name_of(op)), op);
  EXPECT_STREQ(name_of(Type::bfloat16), "bfloat16");
  EXPECT_STREQ(name_of(Op::bit_xor), "bit_xor");
  EXPECT_EQ(type_named("unknown"), std::nullopt);
  EXPECT_EQ(type_named(""), std::nullopt);
  EXPECT_EQ(op_named("unknown"), std::nullopt);
  EXPECT_EQ(op_named("Sum"), std::nullopt);
}

TEST(Reduce, bytes_that_mean_nothing_are_told_apart) {
  for (const int raw : {0, 10, 127, 255}) EXPECT_FALSE(known_type(static_cast<uint8_t>(raw)));
  for (const int raw : {0, 9, 127, 255}) EXPECT_FALSE(known_op(static_cast<uint8_t>(raw)));
  EXPECT_STREQ(name_of(static_cast<Type>(200)), "unknown");
  EXPECT_STREQ(name_of(static_cast<Op>(200)), "unknown");
}

TEST(Reduce, sizes_are_those_of_the_types) {
  for (const Type type : all_types()) {
    with_type(type, [&](auto zero) { EXPECT_EQ(size_of(type), sizeof zero) << name_of(type); });
  }
}

TEST(Reduce, bitwise_operations_are_for_integers) {
  for (const Op op : all_ops()) {
    const bool bitwise = op == Op::bit_and || op == Op::bit_or || op == Op::bit_xor;
    for (const Type type : all_types()) {
      const bool floating = type == Type::float32 || type == Type::float64 ||
                            type == Type::float16 || type == Type::bfloat16;
      EXPECT_EQ(supports(op, type), !(bitwise && floating)) << name_of(op) << name_of(type);
    }
  }
}

TEST(Reduce, every_instruction_set_supports_the_same) {
  for (const Kernels* kernels : all_kernels()) {
    for (size_t type = 0; type < Kernels::kTypes; ++type) {
      for (size_t op = 0; op < Kernels::kOps; ++op) {
        EXPECT_EQ(kernels->combine[op][type] != nullptr,
                  kPlainKernels.combine[op][type] != nullptr);
        EXPECT_EQ(kernels->accumulate[op][type] != nullptr,
                  kPlainKernels.accumulate[op][type] != nullptr);
      }
    }
  }
}

TEST(Reduce, a_mean_is_a_sum_that_is_divided_at_the_end) {
  std::vector<int32_t> integers = {-7, 7, 1, 2147483647};
  const std::vector<int32_t> more = {0, 0, 1, 1};
  combine(Op::mean, Type::int32, integers.data(), integers.data(), more.data(), 4);
  finish(Op::mean, Type::int32, integers.data(), 4, 2);
  EXPECT_THAT(integers, testing::ElementsAre(-3, 3, 1, -1073741824));
  finish(Op::sum, Type::int32, integers.data(), 4, 2);
  EXPECT_THAT(integers, testing::ElementsAre(-3, 3, 1, -1073741824));
}

// 2048 is where the half floats are two apart: one at a time, a thousand ones would be lost.
TEST(Reduce, half_floats_accumulate_without_loss) {
  const uint16_t one = 0x3c00;
  const uint16_t start = 0x6800;
  float wide = 0;
  widen(Type::float16, &wide, &start, 1);
  EXPECT_EQ(wide, 2048);
  for (int i = 0; i < 1000; ++i) accumulate(Op::mean, Type::float16, &wide, &one, 1);
  EXPECT_EQ(wide, 3048);
  finish(Op::mean, Type::float32, &wide, 1, 2);
  uint16_t result = 0;
  narrow(Type::float16, &result, &wide, 1);
  EXPECT_EQ(decoded(Type::float16, result), 1524);
  uint16_t rounded_each_time = start;
  for (int i = 0; i < 1000; ++i) {
    combine(Op::sum, Type::float16, &rounded_each_time, &rounded_each_time, &one, 1);
  }
  EXPECT_EQ(rounded_each_time, start);
}

TEST(Reduce, the_first_of_two_zeros_is_the_extreme) {
  const float negative = -0.0F;
  const float positive = 0.0F;
  for (const Op op : {Op::min, Op::max}) {
    float result = 1;
    combine(op, Type::float32, &result, &negative, &positive, 1);
    EXPECT_TRUE(std::signbit(result));
    combine(op, Type::float32, &result, &positive, &negative, 1);
    EXPECT_FALSE(std::signbit(result));
  }
}

TEST(Reduce, the_instruction_set_can_be_lowered_but_not_raised) {
  const auto tables = all_kernels();
  const Kernels* best = tables.back();
  EXPECT_EQ(&choose_kernels(nullptr), best);
  EXPECT_EQ(&choose_kernels(""), best);
  EXPECT_EQ(&choose_kernels("avx512"), best);
  EXPECT_EQ(&choose_kernels("plain"), &kPlainKernels);
  EXPECT_EQ(&choose_kernels("avx2"), tables[std::min<size_t>(tables.size(), 2) - 1]);
  EXPECT_EQ(instruction_set(), choose_kernels(std::getenv("WEFT_INSTRUCTIONS")).name);
}

TEST(Reduce, an_instruction_set_that_is_not_one_is_ignored_and_said) {
  std::string line;
  log_set_sink([&](std::string_view written) { line = written; });
  const Kernels& chosen = choose_kernels("sse9");
  log_set_sink({});
  EXPECT_EQ(&chosen, all_kernels().back());
  EXPECT_THAT(line, testing::HasSubstr("WEFT_INSTRUCTIONS=sse9"));
}

}  // namespace
}  // namespace weft::reduce
