#include <algorithm>

#include "group.h"

namespace weft::runtime {
namespace {

// A number for a list of tensors that differs when names, sizes or order differ, cut into parts
// that a float holds exactly.
std::vector<float> fingerprint(const std::vector<Tensor>& tensors) {
  uint64_t hash = 0xcbf29ce484222325;
  auto mix = [&](std::span<const std::byte> bytes) {
    for (std::byte byte : bytes) hash = (hash ^ static_cast<uint64_t>(byte)) * 0x100000001b3;
  };
  for (const Tensor& tensor : tensors) {
    uint64_t elements = tensor.data.size();
    mix(std::as_bytes(std::span(tensor.name)));
    mix(std::as_bytes(std::span(&elements, 1)));
    mix(std::as_bytes(std::span(&tensor.layer, 1)));
  }
  std::vector<float> parts;
  for (int i = 0; i < 4; ++i) parts.push_back(static_cast<float>((hash >> (16 * i)) & 0xffff));
  return parts;
}

}  // namespace

Exchange::Impl::Impl(std::vector<Tensor> registered, schedule::Layout made)
    : tensors(std::move(registered)), layout(std::move(made)), readiness(layout) {
  states = std::vector<TensorState>(tensors.size());
  of_piece = schedule::tensors_by_piece(layout);
  for (const std::vector<uint32_t>& in_piece : of_piece)
    for (uint32_t t : in_piece) states[t].pieces_left = ++states[t].pieces;
}

Exchange::Exchange(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Exchange::~Exchange() = default;

plan::Barrier Exchange::barrier() const { return impl_->layout.barrier; }
size_t Exchange::buckets() const { return impl_->layout.buckets.size(); }

Result<void> Exchange::ready(uint32_t tensor, uint64_t step) {
  return impl_->group->together([&] { return impl_->ready(tensor, step); });
}

Result<void> Exchange::Impl::ready(uint32_t tensor, uint64_t step) {
  WEFT_TRY(group->same_process());
  trace::Event event;
  event.start_ns = group->recorder.now().count;
  event.shape = trace::Shape::instant;
  event.kind = trace::Kind::gradient_ready;
  event.track = track;
  event.tensor = tensor;
  event.iteration = static_cast<uint32_t>(step);
  std::optional<uint32_t> bucket;
  {
    std::lock_guard lock(group->mutex);
    if (group->failure) return *group->failure;
    WEFT_ASSIGN(bucket, readiness.ready(tensor, step));
    if (bucket) {
      group->commands.push_back([to = group, b = *bucket, step] { to->bucket_ready(b, step); });
      group->has_commands.store(true, std::memory_order_release);
    }
  }
  event.layer = static_cast<uint16_t>(tensors[tensor].layer);
  event.bucket = layout.bucket_of[tensor];
  event.bytes = tensors[tensor].data.size_bytes();
  group->recorder.record(event);
  if (bucket) {
    group->want_progress_thread();
    group->mesh.reactor->wake();
  }
  return {};
}

Result<void> Exchange::wait(uint32_t tensor, uint64_t step) {
  return impl_->group->alone([&] { return impl_->wait(tensor, step); });
}

Result<void> Exchange::Impl::wait(uint32_t tensor, uint64_t step) {
  if (tensor >= tensors.size())
    return error(Code::invalid_argument, "tensor %u is not registered (there are %zu)", tensor,
                 tensors.size());
  const std::atomic<uint64_t>& steps_done = states[tensor].steps_done;
  auto done = [&] { return steps_done.load(std::memory_order_acquire) > step; };
  if (done()) return {};
  WEFT_TRY(group->may_wait());
  std::unique_lock lock(group->mutex);
  if (group->failure) return *group->failure;
  // Whoever drives sees to it that this does not stand for ever.
  auto waiter = waiters.insert(waiters.end(), {tensor, step, group->now()});
  if (group->options.progress_thread) {
    group->changed.wait(lock, [&] { return group->failure.has_value() || done(); });
  } else {
    lock.unlock();
    group->drive_until(done);
    lock.lock();
  }
  waiters.erase(waiter);
  if (done()) return {};
  return *group->failure;
}

Result<void> Exchange::wait_all(uint64_t step) {
  for (uint32_t t = 0; t < impl_->tensors.size(); ++t) WEFT_TRY(wait(t, step));
  return {};
}

Result<std::unique_ptr<Exchange>> Group::exchange(std::vector<Tensor> tensors) {
  return impl_->together([&] { return make_exchange(std::move(tensors)); });
}

Result<std::unique_ptr<Exchange>> Group::make_exchange(std::vector<Tensor> tensors) {
  Impl& group = *impl_;
  WEFT_TRY(group.may_wait());
  {
    std::lock_guard lock(group.mutex);
    if (std::exchange(group.exchange_asked_for, true))
      return error(Code::invalid_argument, "the group has its exchange already; there is only one");
  }
  std::vector<schedule::Tensor> described;
  for (const Tensor& tensor : tensors)
    described.push_back({tensor.name, tensor.data.size(), tensor.layer});
  plan::Plan sized = schedule::scaled(group.options.plan, group.options.shrink);
  WEFT_ASSIGN(schedule::Layout layout, schedule::make_layout(sized, described));

  // Everyone compares with rank 0 before the first gradient can travel.
  std::vector<float> own = fingerprint(tensors);
  std::vector<float> root = own;
  WEFT_TRY(broadcast(root, {0}));
  if (root != own) {
    Error differs = error(Code::invalid_argument,
                          "%s differs: it registered other tensors than rank 0 (%zu here)",
                          group.describe(group.mesh.rank).c_str(), tensors.size());
    group.post([&group, differs] { group.fail(differs, group.mesh.rank); });
    return differs;
  }

  auto made = std::make_shared<Exchange::Impl>(std::move(tensors), std::move(layout));
  made->group = &group;
  const schedule::Choice& choice = group.choice_among(group.mesh.ranks, group.hosts_of(nullptr));
  for (const schedule::Piece& piece : made->layout.pieces)
    made->algorithm_of.push_back(
        schedule::algorithm_for(sized, piece.elements * schedule::kElementBytes, choice));
  made->track =
      group.recorder.track({trace::TrackType::thread, "framework", trace::kNone16, trace::kNone16});
  if (group.is_root())
    made->admission = std::make_unique<schedule::Admission>(made->layout, group.tree);
  else
    made->reports = std::make_unique<schedule::Reports>(made->layout, group.tree, group.mesh.rank);
  // The progress thread must know the exchange before any frame about it is handled, and any
  // rank may be first: a barrier behind the hand-over makes sure of it.
  group.post([&group, made] { group.exchange = made; });
  WEFT_TRY(barrier());
  return std::unique_ptr<Exchange>(new Exchange(made));
}

}  // namespace weft::runtime
