#include "elements.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace weft::torch_backend {
namespace {

using RedOp = c10d::ReduceOp::RedOpType;

const char* name_of(RedOp op) {
  switch (op) {
    case RedOp::SUM: return "SUM";
    case RedOp::AVG: return "AVG";
    case RedOp::PRODUCT: return "PRODUCT";
    case RedOp::MIN: return "MIN";
    case RedOp::MAX: return "MAX";
    case RedOp::BAND: return "BAND";
    case RedOp::BOR: return "BOR";
    case RedOp::BXOR: return "BXOR";
    case RedOp::PREMUL_SUM: return "PREMUL_SUM";
    default: return "an unknown operation";
  }
}

[[noreturn]] void refuse(at::ScalarType type, RedOp op) {
  TORCH_CHECK_TYPE(false, "weft cannot combine tensors of ", type, " with ", name_of(op));
  std::abort();  // not reached
}

// Numbers of half a bit pattern: what addition, multiplication and logic do to them does not depend
// on whether the highest bit is a sign.
std::optional<Type> unsigned_as(at::ScalarType type) {
  switch (type) {
    case at::ScalarType::UInt16: return Type::int16;
    case at::ScalarType::UInt32: return Type::int32;
    case at::ScalarType::UInt64: return Type::int64;
    default: return std::nullopt;
  }
}

bool is_bitwise(RedOp op) { return op == RedOp::BAND || op == RedOp::BOR || op == RedOp::BXOR; }

}  // namespace

Elements elements_of(at::ScalarType type) {
  switch (type) {
    case at::ScalarType::Float: return {Type::float32, 1};
    case at::ScalarType::Double: return {Type::float64, 1};
    case at::ScalarType::Half: return {Type::float16, 1};
    case at::ScalarType::BFloat16: return {Type::bfloat16, 1};
    case at::ScalarType::Char: return {Type::int8, 1};
    case at::ScalarType::Short: return {Type::int16, 1};
    case at::ScalarType::Int: return {Type::int32, 1};
    case at::ScalarType::Long: return {Type::int64, 1};
    case at::ScalarType::ComplexHalf: return {Type::float16, 2};
    case at::ScalarType::ComplexFloat: return {Type::float32, 2};
    case at::ScalarType::ComplexDouble: return {Type::float64, 2};
    default: return {Type::uint8, c10::elementSize(type)};
  }
}

Reduction reduction_of(at::ScalarType type, const c10d::ReduceOp& given) {
  RedOp op = given;
  Reduction out{elements_of(type), Op::sum, std::nullopt};
  if (type == at::ScalarType::Bool) {
    // true and false are the bytes 1 and 0, and nothing else may come of them.
    switch (op) {
      case RedOp::SUM:
      case RedOp::MAX:
      case RedOp::BOR: out.op = Op::bit_or; return out;
      case RedOp::PRODUCT:
      case RedOp::MIN:
      case RedOp::BAND: out.op = Op::bit_and; return out;
      case RedOp::BXOR: out.op = Op::bit_xor; return out;
      default: refuse(type, op);
    }
  }
  if (auto as = unsigned_as(type)) {
    if (op != RedOp::SUM && op != RedOp::PRODUCT && !is_bitwise(op)) refuse(type, op);
    out.elements = {*as, 1};
  } else if (out.elements.type == Type::uint8 && type != at::ScalarType::Byte) {
    refuse(type, op);
  }
  if (is_bitwise(op) && !c10::isIntegralType(type, false)) refuse(type, op);
  if (c10::isComplexType(type) && !c10d::isComplexViewAsRealAllowed(given)) refuse(type, op);
  switch (op) {
    case RedOp::SUM: out.op = Op::sum; break;
    case RedOp::AVG: out.op = Op::mean; break;
    case RedOp::PRODUCT: out.op = Op::product; break;
    case RedOp::MIN: out.op = Op::min; break;
    case RedOp::MAX: out.op = Op::max; break;
    case RedOp::BAND: out.op = Op::bit_and; break;
    case RedOp::BOR: out.op = Op::bit_or; break;
    case RedOp::BXOR: out.op = Op::bit_xor; break;
    case RedOp::PREMUL_SUM: {
      const auto* scale = dynamic_cast<const c10d::PreMulSumSupplement*>(given.supplement_.get());
      TORCH_CHECK(scale != nullptr, "PREMUL_SUM without a factor");
      out.factor = scale->tensor_factor.defined() ? scale->tensor_factor.item()
                                                  : at::Scalar(scale->double_factor);
      break;
    }
    default: refuse(type, op);
  }
  return out;
}

namespace {

bool has_guard(c10::Device device) { return c10::impl::hasDeviceGuardImpl(device.type()); }

}  // namespace

void check_dense(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK(tensor.defined(), "weft: ", what, " got an undefined tensor");
  TORCH_CHECK(tensor.device().is_cpu() || (!tensor.is_meta() && has_guard(tensor.device())),
              "weft: ", what, " got a tensor on ", tensor.device(),
              "; it takes tensors in the processor's memory, or on an accelerator of this torch");
  TORCH_CHECK(tensor.layout() == at::kStrided, "weft: ", what,
              " takes dense tensors only, and got ", tensor.layout());
}

namespace {

bool lies_well(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

at::Tensor readable(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

at::Tensor writable(const at::Tensor& tensor, bool filled) {
  if (lies_well(tensor)) return tensor.detach();
  at::Tensor copy = at::empty(tensor.sizes(), tensor.options());
  if (filled) copy.copy_(tensor.detach());
  return copy;
}

bool is_memory_of(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  const auto* at = static_cast<const std::byte*>(flat.const_data_ptr());
  for (const at::Tensor& tensor : tensors) {
    if (!lies_well(tensor) || tensor.const_data_ptr() != at) return false;
    at += tensor.nbytes();
  }
  return true;
}

at::Tensor joined(const std::vector<at::Tensor>& tensors, bool filled) {
  int64_t total = 0;
  for (const at::Tensor& tensor : tensors) total += tensor.numel();
  const at::Tensor& first = tensors.front();
  if (total > 0 && lies_well(first) && is_memory_of(first, tensors) &&
      first.storage_offset() + total <=
          static_cast<int64_t>(first.storage().nbytes() / first.element_size()))
    return first.detach().as_strided({total}, {1});
  at::Tensor flat = at::empty({total}, first.options());
  if (!filled) return flat;
  int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    flat.narrow(0, at, tensor.numel()).view(tensor.sizes()).copy_(tensor.detach());
    at += tensor.numel();
  }
  return flat;
}

void distribute(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  if (is_memory_of(flat, tensors)) return;
  int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    // Pinned memory stays as it is until the copy is done; other memory may not.
    bool queued = !tensor.is_cpu() && flat.is_pinned();
    tensor.detach().copy_(flat.narrow(0, at, tensor.numel()).view(tensor.sizes()), queued);
    at += tensor.numel();
  }
}

}  // namespace weft::torch_backend
