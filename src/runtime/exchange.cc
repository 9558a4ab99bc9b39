#include <algorithm>

#include "group.h"

namespace weft::runtime {
namespace {

constexpr uint64_t kTensorsMax = 1u << 24;

// A number for each tensor that differs when its name, size, type or layer does.
std::vector<uint64_t> fingerprints(const std::vector<Tensor>& tensors) {
  std::vector<uint64_t> out;
  for (const Tensor& tensor : tensors) {
    uint64_t hash = 0xcbf29ce484222325;
    auto mix = [&](std::span<const std::byte> bytes) {
      for (std::byte byte : bytes) hash = (hash ^ static_cast<uint64_t>(byte)) * 0x100000001b3;
    };
    uint64_t bytes = tensor.data.size();
    mix(std::as_bytes(std::span(tensor.name)));
    mix(std::as_bytes(std::span(&bytes, 1)));
    mix(std::as_bytes(std::span(&tensor.layer, 1)));
    mix(std::as_bytes(std::span(&tensor.type, 1)));
    out.push_back(hash);
  }
  return out;
}

std::string describe(const Tensor& tensor) {
  return text("\"%s\", %llu %s of layer %u", tensor.name.c_str(),
              static_cast<unsigned long long>(tensor.elements()), reduce::name_of(tensor.type),
              tensor.layer);
}

bool is_float(Type type) {
  return type == Type::float64 || type == Type::float32 || type == Type::float16 ||
         type == Type::bfloat16;
}

// Gradients are numbers that can be added with little loss.
Result<void> check(const Tensor& tensor) {
  if (!reduce::known_type(static_cast<uint8_t>(tensor.type)) || !is_float(tensor.type))
    return error(Code::invalid_argument,
                 "tensor \"%s\": its elements are %s; an exchange takes float64, float32, float16 "
                 "and bfloat16",
                 tensor.name.c_str(), reduce::name_of(tensor.type));
  if (tensor.data.data() == nullptr && !tensor.data.empty())
    return error(Code::invalid_argument, "tensor \"%s\" has no memory", tensor.name.c_str());
  return {};
}

Error being_changed() {
  return error(Code::invalid_argument,
               "another plan is being taken: gradients are ready before that or after it");
}

Call broadcast_of(std::span<std::byte> bytes) {
  Call call;
  call.collective = Collective::broadcast;
  call.output = bytes.data();
  call.count = bytes.size();
  call.type = Type::uint8;
  return call;
}

}  // namespace

Exchange::Impl::Course::Course(plan::Plan its_plan, schedule::Layout its_layout,
                               uint64_t first_step)
    : plan(std::move(its_plan)),
      layout(std::move(its_layout)),
      readiness(layout, first_step),
      of_piece(schedule::tensors_by_piece(layout)) {}

Result<std::unique_ptr<Exchange::Impl::Course>> Exchange::Impl::Course::make(
    Group::Impl& group, const plan::Plan& plan, const std::vector<Tensor>& tensors,
    const schedule::Beginning& from) {
  std::vector<schedule::Tensor> described;
  for (const Tensor& tensor : tensors)
    described.push_back({tensor.name, tensor.elements(), tensor.layer,
                         static_cast<uint32_t>(reduce::size_of(tensor.type)),
                         static_cast<uint8_t>(tensor.type)});
  const plan::Plan sized = schedule::scaled(plan, group.options.shrink);
  WEFT_ASSIGN(schedule::Layout layout, schedule::make_layout(sized, described));
  auto made = std::make_unique<Course>(plan, std::move(layout), from.step);
  const schedule::Choice& choice =
      group.choice_among(group.mesh.ranks, group.hosts_of(nullptr), plan.lanes);
  for (const schedule::Piece& piece : made->layout.pieces)
    made->algorithm_of.push_back(
        schedule::algorithm_for(sized, piece.words * schedule::kElementBytes, choice));
  made->chunk_bytes = lanes_of(sized).chunk_bytes;
  if (group.is_root())
    made->admission = std::make_unique<schedule::Admission>(made->layout, group.tree, from);
  else
    made->reports =
        std::make_unique<schedule::Reports>(made->layout, group.tree, group.mesh.rank, from.step);
  return made;
}

Exchange::Impl::Impl(Group::Impl& its_group, std::vector<Tensor> registered,
                     std::unique_ptr<Course> first)
    : group(&its_group), tensors(std::move(registered)), states(tensors.size()) {
  take(std::move(first));
}

void Exchange::Impl::take(std::unique_ptr<Course> next) {
  course = std::move(next);
  for (TensorState& state : states) state.pieces = 0;
  for (const std::vector<uint32_t>& in_piece : course->of_piece)
    for (uint32_t t : in_piece) states[t].pieces_left = ++states[t].pieces;
}

Exchange::Exchange(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Exchange::~Exchange() = default;

plan::Barrier Exchange::barrier() const {
  std::lock_guard lock(impl_->group->mutex);
  return impl_->course->layout.barrier;
}
size_t Exchange::buckets() const {
  std::lock_guard lock(impl_->group->mutex);
  return impl_->course->layout.buckets.size();
}
plan::Plan Exchange::plan() const {
  std::lock_guard lock(impl_->group->mutex);
  return impl_->course->plan;
}

Result<void> Exchange::ready(uint32_t tensor, uint64_t step) {
  return impl_->group->together([&] { return impl_->ready(tensor, step, true); });
}

Result<void> Exchange::ready_without(uint32_t tensor, uint64_t step) {
  return impl_->group->together([&] { return impl_->ready(tensor, step, false); });
}

Result<void> Exchange::Impl::ready(uint32_t tensor, uint64_t step, bool has_gradient) {
  WEFT_TRY(group->same_process());
  // Its memory is the caller's until this call, if it is the next step's turn. Whether it is, is
  // looked at again when it counts.
  if (!has_gradient) WEFT_TRY(clear(tensor, step));
  trace::Event event;
  event.start_ns = group->recorder.now().count;
  event.shape = trace::Shape::instant;
  event.kind = trace::Kind::gradient_ready;
  event.track = group->recorder.thread_track();
  event.tensor = tensor;
  event.iteration = static_cast<uint32_t>(step);
  std::optional<uint32_t> bucket;
  {
    std::lock_guard lock(group->mutex);
    if (group->failure) return *group->failure;
    if (changing) return being_changed();
    WEFT_ASSIGN(bucket, course->readiness.ready(tensor, step));
    event.bucket = course->layout.bucket_of[tensor];
    if (bucket) {
      group->commands.push_back([to = group, b = *bucket, step] { to->bucket_ready(b, step); });
      group->has_commands.store(true, std::memory_order_release);
    }
  }
  event.layer = static_cast<uint16_t>(tensors[tensor].layer);
  event.bytes = tensors[tensor].data.size();
  group->recorder.record(event);
  if (bucket) {
    group->want_progress_thread();
    group->mesh.reactor->wake();
  }
  return {};
}

// A gradient that is not there counts as zeros.
Result<void> Exchange::Impl::clear(uint32_t tensor, uint64_t step) {
  {
    std::lock_guard lock(group->mutex);
    if (group->failure) return *group->failure;
    if (changing) return being_changed();
    WEFT_TRY(course->readiness.may_be_ready(tensor, step));
  }
  std::fill(tensors[tensor].data.begin(), tensors[tensor].data.end(), std::byte{0});
  return {};
}

Result<void> Exchange::wait(uint32_t tensor, uint64_t step) {
  return impl_->group->alone([&] { return impl_->wait(tensor, step); });
}

Result<void> Exchange::Impl::wait(uint32_t tensor, uint64_t step) {
  if (tensor >= tensors.size())
    return error(Code::invalid_argument, "tensor %u is not registered (there are %zu)", tensor,
                 tensors.size());
  if (!group->recorder.on()) return wait_unrecorded(tensor, step);
  trace::Event event;
  event.start_ns = group->recorder.now().count;
  auto done = wait_unrecorded(tensor, step);
  event.duration_ns = group->recorder.now().count - event.start_ns;
  event.kind = trace::Kind::wait;
  event.track = group->recorder.thread_track();
  event.tensor = tensor;
  event.layer = static_cast<uint16_t>(tensors[tensor].layer);
  event.iteration = static_cast<uint32_t>(step);
  group->recorder.record(event);
  return done;
}

Result<void> Exchange::Impl::wait_unrecorded(uint32_t tensor, uint64_t step) {
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

// Everyone compares with rank 0 before the first gradient can travel.
Result<void> Group::compare_with_root(const std::vector<Tensor>& tensors) {
  Impl& group = *impl_;
  const std::vector<uint64_t> own = fingerprints(tensors);
  uint64_t count = own.size();
  WEFT_TRY(run(broadcast_of(std::as_writable_bytes(std::span(&count, 1)))));
  auto differs = [&](const std::string& how) {
    Error refusal =
        error(Code::invalid_argument, "%s differs: it registered other tensors than rank 0: %s",
              group.describe(group.mesh.rank).c_str(), how.c_str());
    group.post([&group, refusal] { group.fail(refusal, group.mesh.rank); });
    return refusal;
  };
  if (count > kTensorsMax)
    return differs(text("%llu are too many", static_cast<unsigned long long>(count)));
  std::vector<uint64_t> root = own;
  root.resize(count);
  WEFT_TRY(run(broadcast_of(std::as_writable_bytes(std::span(root)))));
  for (size_t t = 0; t < std::min<size_t>(count, own.size()); ++t)
    if (root[t] != own[t])
      return differs(text("tensor %zu here is %s", t, weft::runtime::describe(tensors[t]).c_str()));
  if (count == own.size()) return {};
  return differs(text("%zu here, %llu there", own.size(), static_cast<unsigned long long>(count)));
}

Result<std::unique_ptr<Exchange>> Group::make_exchange(std::vector<Tensor> tensors) {
  Impl& group = *impl_;
  WEFT_TRY(group.may_wait());
  for (const Tensor& tensor : tensors) WEFT_TRY(check(tensor));
  {
    std::lock_guard lock(group.mutex);
    if (std::exchange(group.exchange_asked_for, true))
      return error(
          Code::invalid_argument,
          "the group has its exchange already, and the set of tensors stays what it was: a "
          "tensor that has no gradient in a step is told by ready_without(); for another set "
          "of tensors, leave and join again");
  }
  WEFT_ASSIGN(auto course, Exchange::Impl::Course::make(group, group.options.plan, tensors, {}));

  WEFT_TRY(compare_with_root(tensors));

  auto made = std::make_shared<Exchange::Impl>(group, std::move(tensors), std::move(course));
  // The progress thread must know the exchange before any frame about it is handled, and any
  // rank may be first: a barrier behind the hand-over makes sure of it.
  group.post([&group, made] { group.exchange = made; });
  WEFT_TRY(barrier());
  return std::unique_ptr<Exchange>(new Exchange(made));
}

}  // namespace weft::runtime
