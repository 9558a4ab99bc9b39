// A device for tests: what torch asks of an accelerator, in memory of the host.
//
// It is as asynchronous as a real one, so that whoever forgets to wait for something is seen: each
// stream is a thread that does what was queued on it in order, each copy takes as long as a test
// says, and memory that was given back is overwritten as soon as the streams that were said to use
// it have come so far. Copies from and to pinned memory are queued; others are waited for. What is
// not a copy or a fill is computed by the processor, on copies.
//
// With WEFT_TEST_DEVICE=blocking it has no streams but the one, and no events; with
// WEFT_TEST_DEVICE=unpinned there is no pinned memory.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string_view>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr c10::StreamId kPool = 4;  // streams of each priority
constexpr int kFreed = 0xDB;        // 0xDBDBDBDB is a float that no test expects

bool is_made(std::string_view how) {
  const char* asked = std::getenv("WEFT_TEST_DEVICE");
  return asked != nullptr && asked == how;
}
bool blocking() {
  static const bool is = is_made("blocking");
  return is;
}

std::atomic<int64_t> copy_takes{0};  // microseconds
std::atomic<uint64_t> queued_copies{0};

// ---- streams and events --------------------------------------------------------------------

class Queue {
 public:
  void add(std::function<void()> task) {
    {
      std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
      ++added_;
    }
    changed_.notify_all();
  }
  bool is_empty() {
    std::lock_guard lock(mutex_);
    return done_ == added_;
  }
  void wait() {
    std::unique_lock lock(mutex_);
    uint64_t until = added_;
    changed_.wait(lock, [&] { return done_ >= until; });
  }
  // Lives as long as the process.
  void run() {
    at::AutoDispatchBelowADInplaceOrView plain;
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
      ++done_;
      lock.unlock();
      changed_.notify_all();
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  uint64_t added_ = 0, done_ = 0;
};

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;

Queue& queue_of(StreamKey key) {
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::map<StreamKey, std::unique_ptr<Queue>>;
  std::lock_guard lock(mutex);
  std::unique_ptr<Queue>& queue = all[key];
  if (!queue) {
    queue = std::make_unique<Queue>();
    std::thread([one = queue.get()] { one->run(); }).detach();
  }
  return *queue;
}

StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {};

Queue& current_queue(c10::DeviceIndex device) { return queue_of({device, current_stream[device]}); }

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, done = 0;

  uint64_t next() {
    std::lock_guard lock(mutex);
    return ++recorded;
  }
  void reach(uint64_t version) {
    {
      std::lock_guard lock(mutex);
      done = std::max(done, version);
    }
    changed.notify_all();
  }
  uint64_t version() {
    std::lock_guard lock(mutex);
    return recorded;
  }
  void wait(uint64_t version) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done >= version; });
  }
};
using EventPtr = std::shared_ptr<Event>;
EventPtr& event_of(void* event) { return *static_cast<EventPtr*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no device ", device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  static c10::Stream stream(c10::DeviceIndex device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, {kType, device}, id);
  }
  static c10::DeviceIndex index(c10::Device device) {
    return device.has_index() ? device.index() : current_device;
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(index(device), current_stream[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(index(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    TORCH_CHECK(!blocking(), "this device has one stream");
    static std::atomic<c10::StreamId> next[2];
    return stream(index(device), 1 + (high ? kPool : 0) + next[high]++ % kPool);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    c10::Stream before = getStream(to.device());
    current_stream[to.device_index()] = to.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return queue_of(key_of(stream)).is_empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    queue_of(key_of(stream)).wait();
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    for (c10::StreamId id = 0; id <= 2 * kPool; ++id) queue_of({device, id}).wait();
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    TORCH_CHECK(!blocking(), "this device has no events");
    if (*event == nullptr) *event = new EventPtr(std::make_shared<Event>());
    EventPtr one = event_of(*event);
    queue_of(key_of(stream)).add([one, version = one->next()] { one->reach(version); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    EventPtr one = event_of(event);
    queue_of(key_of(stream)).add([one, version = one->version()] { one->wait(version); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    std::lock_guard lock(event_of(event)->mutex);
    return event_of(event)->done >= event_of(event)->recorded;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) event_of(event)->wait(event_of(event)->version());
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};

// ---- memory --------------------------------------------------------------------------------

void* memory_of(size_t bytes) {
  void* at = nullptr;
  TORCH_CHECK(posix_memalign(&at, 64, bytes) == 0, "there is no memory left");
  return at;
}

struct Block {
  void* at;
  size_t bytes;
  StreamKey stream;
  std::mutex mutex;
  std::set<StreamKey> users;
};

// In the order of the stream that it was allocated for, and after those that are known to use it.
void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  std::vector<EventPtr> users;
  for (StreamKey user : block->users) {
    auto event = std::make_shared<Event>();
    queue_of(user).add([event, version = event->next()] { event->reach(version); });
    users.push_back(std::move(event));
  }
  queue_of(block->stream).add([block, users] {
    for (const EventPtr& user : users) user->wait(1);
    std::memset(block->at, kFreed, block->bytes);
    std::free(block->at);
    delete block;
  });
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kType, current_device);
    if (bytes == 0) return {nullptr, device};
    auto* block = new Block{
        memory_of(bytes), bytes, {current_device, current_stream[current_device]}, {}, {}};
    std::memset(block->at, kFreed, bytes);
    return {block->at, block, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
Memory& memory() {
  static auto* one = new Memory;
  return *one;
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  auto* block = static_cast<Block*>(data.get_context());
  if (block == nullptr) return;
  std::lock_guard lock(block->mutex);
  block->users.insert(key_of(stream));
}

struct Pinned final : c10::Allocator {
  static std::map<const std::byte*, size_t>& known() {
    static auto* all = new std::map<const std::byte*, size_t>;
    return *all;
  }
  static std::mutex& mutex() {
    static auto* one = new std::mutex;
    return *one;
  }
  static bool has(const void* data) {
    const auto* at = static_cast<const std::byte*>(data);
    std::lock_guard lock(mutex());
    auto after = known().upper_bound(at);
    return after != known().begin() && at < std::prev(after)->first + std::prev(after)->second;
  }
  static void release(void* at) {
    std::lock_guard lock(mutex());
    auto found = known().find(static_cast<std::byte*>(at));
    std::memset(at, kFreed, found->second);
    known().erase(found);
    std::free(at);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* at = memory_of(std::max<size_t>(bytes, 1));
    std::lock_guard lock(mutex());
    known()[static_cast<std::byte*>(at)] = std::max<size_t>(bytes, 1);
    return {at, at, &release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return Pinned::has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(!is_made("unpinned"), "this device has no pinned memory");
    static auto* one = new Pinned;
    return one;
  }
};

// ---- operators -----------------------------------------------------------------------------

// Memory as the processor sees it; of nobody: what is queued keeps nothing alive.
at::Tensor seen(const at::Tensor& tensor) {
  at::Tensor view =
      at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                    at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

void add_slowly(Queue& queue, std::function<void()> task) {
  ++queued_copies;
  queue.add([task = std::move(task), takes = copy_takes.load()] {
    std::this_thread::sleep_for(std::chrono::microseconds(takes));
    task();
  });
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const at::Tensor& there = from.is_cpu() ? to : from;
  const at::Tensor& other = from.is_cpu() ? from : to;
  bool queued =
      non_blocking && !blocking() && (!other.is_cpu() || Pinned::has(other.storage().data()));
  Queue& queue = current_queue(there.get_device());
  at::AutoDispatchBelowADInplaceOrView plain;
  add_slowly(queue, [source = seen(from.expand(to.sizes())), target = seen(to)] {
    at::Tensor(target).copy_(source);
  });
  if (!queued && (from.is_cpu() || to.is_cpu())) queue.wait();
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  if (self.numel() == 0) return self;
  at::AutoDispatchBelowADInplaceOrView plain;
  add_slowly(current_queue(self.get_device()),
             [target = seen(self), value] { at::Tensor(target).fill_(value); });
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) { return self.cpu().item(); }

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &memory(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  current_queue(self.get_device()).wait();
  return at::native::resize_(self, size, format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

void by_the_processor(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("fill_.Scalar", &fill);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_processor>());
}

// Copies resolve conjugates by themselves; by default they are resolved by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

PYBIND11_MODULE(weft_test_device, module) {
  c10::SetAllocator(kType, &memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  module.def("copies_take", [](int64_t microseconds) { copy_takes = microseconds; });
  module.def("copies", [] { return queued_copies.load(); });
  module.def("device_count", [] { return static_cast<int>(kDevices); });
  module.def("current_device", [] { return static_cast<int>(current_device); });
  module.def("set_device", [](int device) {
    Guard().setDevice({kType, static_cast<c10::DeviceIndex>(device)});
  });
  module.def(
      "synchronize", [] { Guard().synchronizeDevice(current_device); },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("is_idle", [] { return Guard().queryStream(Guard().getStream({kType, -1})); });
}
