#include "weft/reduce.h"

#include <cstdlib>

#include "kernels.h"
#include "weft/base.h"

namespace weft::reduce {
namespace {

struct TypeRow {
  const char* name;
  size_t size;
};

// By number; 0 is not a type.
constexpr TypeRow kTypeRows[Kernels::kTypes] = {
    {"unknown", 0}, {"float32", 4}, {"float64", 8}, {"float16", 2}, {"bfloat16", 2},
    {"int8", 1},    {"int16", 2},   {"int32", 4},   {"int64", 8},   {"uint8", 1},
};
constexpr const char* kOpNames[Kernels::kOps] = {
    "unknown", "sum", "mean", "min", "max", "product", "bit_and", "bit_or", "bit_xor",
};

size_t index_of(Type type) {
  WEFT_CHECK(known_type(static_cast<uint8_t>(type)));
  return static_cast<size_t>(type);
}

size_t index_of(Op op) {
  WEFT_CHECK(known_op(static_cast<uint8_t>(op)));
  return static_cast<size_t>(op);
}

const Kernels& kernels() {
  static const Kernels& chosen = choose_kernels(std::getenv("WEFT_INSTRUCTIONS"));
  return chosen;
}

}  // namespace

bool known_type(uint8_t raw) { return raw > 0 && raw < Kernels::kTypes; }

bool known_op(uint8_t raw) { return raw > 0 && raw < Kernels::kOps; }

size_t size_of(Type type) { return kTypeRows[index_of(type)].size; }

const char* name_of(Type type) {
  const auto raw = static_cast<uint8_t>(type);
  return kTypeRows[known_type(raw) ? raw : 0].name;
}

const char* name_of(Op op) {
  const auto raw = static_cast<uint8_t>(op);
  return kOpNames[known_op(raw) ? raw : 0];
}

std::optional<Type> type_named(std::string_view name) {
  for (uint8_t raw = 1; known_type(raw); ++raw) {
    if (name == kTypeRows[raw].name) return static_cast<Type>(raw);
  }
  return std::nullopt;
}

std::optional<Op> op_named(std::string_view name) {
  for (uint8_t raw = 1; known_op(raw); ++raw) {
    if (name == kOpNames[raw]) return static_cast<Op>(raw);
  }
  return std::nullopt;
}

bool supports(Op op, Type type) {
  return kPlainKernels.combine[index_of(op)][index_of(type)] != nullptr;
}

void combine(Op op, Type type, void* to, const void* a, const void* b, size_t count) {
  const auto kernel = kernels().combine[index_of(op)][index_of(type)];
  WEFT_CHECK(kernel != nullptr);
  kernel(to, a, b, count);
}

void finish(Op op, Type type, void* data, size_t count, uint32_t ranks) {
  WEFT_CHECK(ranks > 0);
  if (op == Op::mean) kernels().divide[index_of(type)](data, data, count, ranks);
}

void widen(Type type, float* to, const void* from, size_t count) {
  const auto kernel = kernels().widen[index_of(type)];
  WEFT_CHECK(kernel != nullptr);
  kernel(to, from, count);
}

void accumulate(Op op, Type type, float* to, const void* from, size_t count) {
  const auto kernel = kernels().accumulate[index_of(op)][index_of(type)];
  WEFT_CHECK(kernel != nullptr);
  kernel(to, to, from, count);
}

void narrow(Type type, void* to, const float* from, size_t count) {
  const auto kernel = kernels().narrow[index_of(type)];
  WEFT_CHECK(kernel != nullptr);
  kernel(to, from, count);
}

const char* instruction_set() { return kernels().name; }

}  // namespace weft::reduce
