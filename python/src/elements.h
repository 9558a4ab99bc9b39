// elements: what weft is told of a torch tensor: where it lies, of what type, and what to do to it.
//
// weft knows nine types; the others travel as views of these. What only moves is as good as its
// bytes. What is combined keeps its meaning: a bool is true or false afterwards too, a complex
// number is two reals, and what has no meaning is refused.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "weft/api.h"

namespace weft::torch_backend {

struct Elements {
  Type type = Type::uint8;
  uint64_t each = 1;  // weft's elements in one of torch's
};
Elements elements_of(at::ScalarType type);

struct Reduction {
  Elements elements;
  Op op = Op::sum;
  std::optional<at::Scalar> factor;  // of what goes in
  // What the call is to be told of `tensor`; multiplied by the factor, if there is one.
  at::Tensor scaled(const at::Tensor& tensor) const { return factor ? tensor * *factor : tensor; }
};
// Raises with words for a combination that has no meaning.
Reduction reduction_of(at::ScalarType type, const c10d::ReduceOp& op);

// Raises unless it is a dense tensor, in the processor's memory or on a device that torch can
// guard.
void check_dense(const at::Tensor& tensor, const char* what);

// Memory that weft reads: the tensor's own if it lies there as weft needs it, else a copy.
at::Tensor readable(const at::Tensor& tensor);
// Memory that weft writes, and reads first if `filled`. Where it is not the tensor's own, the
// result has to be copied back.
at::Tensor writable(const at::Tensor& tensor, bool filled);

// Several tensors as one after the other. If they lie like that already it is their own memory.
at::Tensor joined(const std::vector<at::Tensor>& tensors, bool filled);
bool is_memory_of(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);
// Copies what was received for all of them to where they are.
void distribute(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

}  // namespace weft::torch_backend
