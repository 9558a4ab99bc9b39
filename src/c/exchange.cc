// The gradient exchange.
#include "handles.h"
#include "weft/c.h"

namespace weft::c {
namespace {

constexpr size_t kTensorsMax = 1u << 20;

// The elements of the list lie as far apart as the caller's struct is large.
Result<std::vector<Tensor>> tensors_of(const weft_tensor* given, size_t count) {
  if (count > kTensorsMax)
    return error(Code::invalid_argument, "%zu tensors: at most %zu are possible", count,
                 kTensorsMax);
  if (given == nullptr && count > 0) return is_null("the list of tensors");
  std::vector<Tensor> tensors;
  const auto* at = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = 0; i < count; ++i) {
    WEFT_ASSIGN(const weft_tensor one,
                copied(reinterpret_cast<const weft_tensor*>(at), "weft_tensor"));
    if (one.struct_size != given->struct_size)
      return error(Code::invalid_argument, "struct_size of tensor %zu is %zu, of tensor 0 %zu", i,
                   one.struct_size, given->struct_size);
    void* const memory = one.memory != nullptr ? one.memory : one.data;
    if (one.memory != nullptr && one.data != nullptr)
      return error(Code::invalid_argument, "tensor %zu has both data and memory: leave one NULL",
                   i);
    if (one.name == nullptr || (memory == nullptr && one.count > 0))
      return error(Code::invalid_argument, "the name or the data of tensor %zu is null", i);
    if (one.count > (uint64_t{1} << 48))
      return error(Code::invalid_argument, "tensor %zu (%s) has too many elements", i, one.name);
    auto type = Type::float32;
    // What it cannot be is refused by the exchange, by name.
    if (one.type != 0) {
      if (one.type < 0 || one.type > WEFT_UINT8)
        return error(Code::invalid_argument, "the type of tensor %zu (%s) is %d: expected 1 to %d",
                     i, one.name, static_cast<int>(one.type), static_cast<int>(WEFT_UINT8));
      type = static_cast<Type>(one.type);
    }
    tensors.emplace_back(one.name, memory, one.count, type, one.layer);
    at += one.struct_size;
  }
  return tensors;
}

}  // namespace
}  // namespace weft::c

using namespace weft;     // NOLINT(google-build-using-namespace): C has no names to qualify
using namespace weft::c;  // NOLINT(google-build-using-namespace)

weft_status weft_exchange_create(weft_group* group, const weft_tensor* tensors, size_t count,
                                 weft_exchange** exchange) {
  return guarded([&]() -> Result<void> {
    if (group == nullptr || exchange == nullptr)
      return is_null("the group or the place for the exchange");
    WEFT_TRY(may_wait());
    if (group->part)
      return error(Code::unsupported,
                   "an exchange is of the whole job, not of a part of its ranks");
    WEFT_ASSIGN(std::vector<Tensor> list, tensors_of(tensors, count));
    auto handle = std::make_unique<weft_exchange>(weft_exchange{group->job, nullptr});
    WEFT_ASSIGN(handle->exchange, group->job->exchange(std::move(list)));
    *exchange = handle.release();
    return {};
  });
}

weft_status weft_exchange_ready(weft_exchange* exchange, uint32_t tensor, uint64_t step) {
  return guarded([&]() -> Result<void> {
    if (exchange == nullptr) return is_null("the exchange");
    return exchange->exchange->ready(tensor, step);
  });
}

weft_status weft_exchange_ready_without(weft_exchange* exchange, uint32_t tensor, uint64_t step) {
  return guarded([&]() -> Result<void> {
    if (exchange == nullptr) return is_null("the exchange");
    return exchange->exchange->ready_without(tensor, step);
  });
}

weft_status weft_exchange_wait(weft_exchange* exchange, uint32_t tensor, uint64_t step) {
  return guarded([&]() -> Result<void> {
    if (exchange == nullptr) return is_null("the exchange");
    WEFT_TRY(may_wait());
    return exchange->exchange->wait(tensor, step);
  });
}

weft_status weft_exchange_wait_all(weft_exchange* exchange, uint64_t step) {
  return guarded([&]() -> Result<void> {
    if (exchange == nullptr) return is_null("the exchange");
    WEFT_TRY(may_wait());
    return exchange->exchange->wait_all(step);
  });
}

weft_status weft_exchange_change_plan(weft_exchange* exchange, const char* plan) {
  return guarded([&]() -> Result<void> {
    if (exchange == nullptr) return is_null("the exchange");
    WEFT_TRY(may_wait());
    // One that this rank cannot read is refused on all: the others wait for its word.
    return exchange->exchange->change_plan(plan == nullptr ? Result<plan::Plan>(is_null("the plan"))
                                                           : plan::load(plan));
  });
}

void weft_exchange_free(weft_exchange* exchange) { delete exchange; }
