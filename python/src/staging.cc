#include "staging.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "weft/api.h"

namespace weft::torch_backend {
namespace {

c10::impl::VirtualGuardImpl guard_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

// A stream that nobody else waits for, if the device has such a thing.
std::optional<c10::Stream> stream_of_own(c10::Device device) {
  auto guard = guard_of(device);
  try {
    return guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  } catch (const c10::Error&) {
  }
  try {
    return guard.getNewStream(device);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

bool has_events(c10::Stream stream) {
  try {
    arrival_on(stream);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

bool is_over(const HostMemory::Block& block) { return !block.busy || block.busy->event.query(); }

// Blocks of few sizes find a second user more often.
size_t rounded(size_t bytes) {
  constexpr size_t kLeast = 4096, kStep = size_t{1} << 20;
  if (bytes >= kStep) return (bytes + kStep - 1) / kStep * kStep;
  size_t size = kLeast;
  while (size < bytes) size *= 2;
  return size;
}

size_t size_of(const HostMemory::Block& block) { return block.bytes.nbytes(); }

// Never frees it.
void leave(HostMemory::Block& block) { block.bytes.unsafeReleaseTensorImpl(); }

// Whoever frees the tensor early must not have its memory used again before the stream has come
// so far.
void record_use(const at::Tensor& tensor, c10::Stream stream) {
  guard_of(stream.device()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

}  // namespace

ArrivalPtr arrival_on(c10::Stream stream) {
  auto arrival = std::make_shared<Arrival>(Arrival{stream, c10::Event(stream.device_type())});
  arrival->event.record(stream);
  return arrival;
}

// ---- HostMemory --------------------------------------------------------------------------

HostMemory::~HostMemory() {
  constexpr auto kPatience = std::chrono::seconds(1);
  const auto until = std::chrono::steady_clock::now() + kPatience;
  size_t left = 0;
  for (Block& block : free_) {
    bool over = false;
    try {
      while (!(over = is_over(block)) && std::chrono::steady_clock::now() < until)
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    } catch (const c10::Error&) {
      // Of a device that cannot be asked any more.
    }
    if (over) continue;
    left += size_of(block);
    leave(block);
  }
  if (left > 0)
    WEFT_LOG(runtime, warn, "%zu bytes of memory for copies are not freed: a device uses them",
             left);
}

HostMemory::Block HostMemory::take(size_t bytes, bool pinned) {
  const size_t least = rounded(bytes);
  std::unique_lock lock(mutex_);
  auto best = free_.end();
  for (auto one = free_.begin(); one != free_.end(); ++one) {
    bool fits =
        one->pinned == (pinned && can_pin_) && size_of(*one) >= least && size_of(*one) <= 2 * least;
    if (fits && (best == free_.end() || size_of(*one) < size_of(*best)) && is_over(*one))
      best = one;
  }
  if (best != free_.end()) {
    Block block = std::move(*best);
    free_.erase(best);
    block.busy = nullptr;
    figures_.kept -= size_of(block);
    figures_.used += size_of(block);
    return block;
  }
  Block block;
  auto options = at::TensorOptions().dtype(at::kByte);
  auto size = static_cast<int64_t>(least);
  if (pinned && can_pin_) {
    try {
      block.bytes = at::empty({size}, options.pinned_memory(true));
      block.pinned = true;
    } catch (const c10::Error& failure) {
      can_pin_ = false;
      WEFT_LOG(runtime, warn, "there is no pinned memory (%s): copies will be waited for",
               failure.what_without_backtrace());
    }
  }
  if (!block.pinned) block.bytes = at::empty({size}, options);
  ++figures_.allocations;
  figures_.used += size_of(block);
  return block;
}

void HostMemory::give_back(Block block) {
  std::vector<Block> dropped;  // freed without the lock
  std::lock_guard lock(mutex_);
  figures_.used -= size_of(block);
  figures_.kept += size_of(block);
  free_.push_back(std::move(block));
  // What a copy may still use is not freed: its allocator would not know of it.
  for (auto one = free_.begin(); figures_.kept > kKeptMax && one != free_.end();) {
    if (!is_over(*one)) {
      ++one;
      continue;
    }
    figures_.kept -= size_of(*one);
    dropped.push_back(std::move(*one));
    one = free_.erase(one);
  }
}

HostMemory::Figures HostMemory::figures() {
  std::lock_guard lock(mutex_);
  return figures_;
}

// ---- Road --------------------------------------------------------------------------------

Road::Road(c10::Device to) : device(to) {
  in = stream_of_own(device);
  if (in && !has_events(*in)) in.reset();
  if (in) out = stream_of_own(device);
}

Road Roads::to(c10::Device device) {
  std::lock_guard lock(mutex_);
  for (const Road& road : roads_)
    if (road.device == device) return road;
  return roads_.emplace_back(device);
}

// ---- Passage -----------------------------------------------------------------------------

Passage::Passage(std::shared_ptr<HostMemory> memory, Road road)
    : memory_(std::move(memory)), road_(road) {
  auto guard = guard_of(road_.device);
  c10::Stream caller = guard.getStream(road_.device);
  if (road_.in) {
    arrival_on(caller)->event.block(*road_.in);
    return;
  }
  try {
    guard.synchronizeStream(caller);
  } catch (const c10::Error&) {
    // Without streams nothing is queued.
  }
}

Passage::~Passage() {
  try {
    if (!brought_) close_in();
    // It was given up in the middle, and what was queued goes on.
    if (!is_there())
      for (const at::Tensor& tensor : inputs_) record_use(tensor, *road_.in);
  } catch (const c10::Error& failure) {
    WEFT_LOG(runtime, warn, "memory for copies is not used again: %s",
             failure.what_without_backtrace());
    for (HostMemory::Block& block : blocks_) leave(block);
    return;
  }
  for (HostMemory::Block& block : blocks_) {
    block.busy = back_ ? back_ : brought_;
    try {
      memory_->give_back(std::move(block));
    } catch (const c10::Error& failure) {
      // Of a device that cannot be asked any more.
      WEFT_LOG(runtime, warn, "memory for copies is not used again: %s",
               failure.what_without_backtrace());
    }
  }
}

at::Tensor Passage::host(at::IntArrayRef sizes, at::ScalarType type) {
  int64_t elements = 1;
  for (int64_t size : sizes) elements *= size;
  auto bytes = elements * static_cast<int64_t>(c10::elementSize(type));
  if (bytes == 0) return at::empty(sizes, at::TensorOptions().dtype(type));
  blocks_.push_back(memory_->take(static_cast<size_t>(bytes), road_.in.has_value()));
  return blocks_.back().bytes.narrow(0, 0, bytes).view(type).view(sizes);
}

void Passage::bring(const at::Tensor& host, const at::Tensor& from) {
  if (host.numel() == 0) return;
  at::Tensor source = from.detach().resolve_conj().resolve_neg();
  inputs_.push_back(source);
  at::Tensor(host).copy_(source, host.is_pinned());
}

void Passage::close_in() {
  if (road_.in) brought_ = arrival_on(*road_.in);
}

ArrivalPtr Passage::come_back(const std::function<void()>& finish) {
  if (!road_.out) {
    if (finish) finish();
    return nullptr;
  }
  c10::StreamGuard guard(*road_.out);
  try {
    if (finish) finish();
  } catch (...) {
    back_ = arrival_on(*road_.out);
    throw;
  }
  back_ = arrival_on(*road_.out);
  for (const at::Tensor& tensor : outputs_) record_use(tensor, *road_.out);
  return back_;
}

// ---- Staging -----------------------------------------------------------------------------

Staging::Staging(Roads& roads, const char* what, std::initializer_list<at::TensorList> lists) {
  const at::Tensor* first = nullptr;
  for (const at::TensorList& list : lists)
    for (const at::Tensor& tensor : list) {
      check_dense(tensor, what);
      if (first == nullptr) first = &tensor;
      TORCH_CHECK_VALUE(tensor.device() == first->device(), "weft: ", what, " got tensors on ",
                        first->device(), " and on ", tensor.device(),
                        ": give it tensors of one device");
    }
  if (first == nullptr || first->is_cpu()) return;
  passage_ = std::make_shared<Passage>(roads.shared_memory(), roads.to(first->device()));
  if (passage_->road().in) guard_.reset_stream(*passage_->road().in);
}

std::shared_ptr<Passage> Staging::finished() {
  if (passage_) passage_->close_in();
  return passage_;
}

at::Tensor Staging::brought(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView plain;  // it is no operation of training
  at::Tensor host = passage_->host(tensor.sizes(), tensor.scalar_type());
  passage_->bring(host, tensor);
  return host;
}

at::Tensor Staging::readable(const at::Tensor& tensor) {
  return passage_ ? brought(tensor) : torch_backend::readable(tensor);
}

at::Tensor Staging::writable(const at::Tensor& tensor, bool filled) {
  if (!passage_) return torch_backend::writable(tensor, filled);
  passage_->returns_to(tensor);
  return filled ? brought(tensor) : passage_->host(tensor.sizes(), tensor.scalar_type());
}

at::Tensor Staging::joined(const std::vector<at::Tensor>& tensors, bool filled) {
  if (!passage_) return torch_backend::joined(tensors, filled);
  at::AutoDispatchBelowADInplaceOrView plain;
  int64_t total = 0;
  for (const at::Tensor& tensor : tensors) total += tensor.numel();
  at::Tensor flat = passage_->host({total}, tensors.front().scalar_type());
  int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    if (filled)
      passage_->bring(flat.narrow(0, at, tensor.numel()).view(tensor.sizes()), tensor);
    else
      passage_->returns_to(tensor);
    at += tensor.numel();
  }
  return flat;
}

at::Tensor Staging::summand(const at::Tensor& tensor, const Reduction& reduction) {
  return passage_ ? brought(reduction.scaled(tensor))
                  : reduction.scaled(torch_backend::readable(tensor));
}

at::Tensor Staging::summand_in_place(const at::Tensor& tensor, const Reduction& reduction) {
  if (passage_) {
    passage_->returns_to(tensor);
    return brought(reduction.scaled(tensor));
  }
  at::Tensor memory = torch_backend::writable(tensor, true);
  if (reduction.factor) memory.mul_(*reduction.factor);
  return memory;
}

at::Tensor Staging::summands(const std::vector<at::Tensor>& tensors, const Reduction& reduction) {
  if (!passage_) return reduction.scaled(torch_backend::joined(tensors, true));
  if (!reduction.factor) return joined(tensors, true);
  std::vector<at::Tensor> scaled;
  for (const at::Tensor& tensor : tensors) scaled.push_back(reduction.scaled(tensor));
  return joined(scaled, true);
}

}  // namespace weft::torch_backend
