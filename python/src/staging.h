// staging: tensors on an accelerator as memory that the network can use.
//
//   tensor ──in──► pinned memory ──lanes──► pinned memory ──out──► tensor
//
// The copies are queued on two streams of the device that are the process group's own, so that they
// run beside what the program computes. What goes in waits for what the caller's stream had queued
// at the call; who waits for the operation lets its own stream wait for what came out. No thread of
// the program waits for a copy. Nothing here names a device: torch's guards, streams and events do
// what there is to do. A device without streams of its own has its copies done at once, by the
// thread that asks.
//
// One operation has one Passage, and with it the pinned memory, which is used again.
//
// Threads: any for HostMemory and Roads; a Passage belongs to one at a time.
#pragma once

#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include "elements.h"

namespace weft::torch_backend {

// The moment when what was queued on a stream before is done.
struct Arrival {
  c10::Stream stream;
  c10::Event event;
};
using ArrivalPtr = std::shared_ptr<Arrival>;
// Now, on this stream.
ArrivalPtr arrival_on(c10::Stream stream);

// Memory of the host for copies from and to a device, kept for the next operation.
class HostMemory {
 public:
  // What is kept while nobody uses it.
  static constexpr size_t kKeptMax = size_t{256} << 20;

  struct Block {
    at::Tensor bytes;
    bool pinned = false;
    ArrivalPtr busy;  // until then a copy may use it
  };
  HostMemory() = default;
  // Waits a moment for copies that still use it; what they use for longer is never freed.
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // REQUIRES: bytes > 0.
  Block take(size_t bytes, bool pinned);
  void give_back(Block block);

  struct Figures {
    uint64_t allocations = 0, used = 0, kept = 0;  // ever; bytes
  };
  Figures figures();

 private:
  std::mutex mutex_;
  std::deque<Block> free_;  // the one that was used last is the last
  Figures figures_;
  bool can_pin_ = true;
};

// How copies go between the host and one device.
struct Road {
  explicit Road(c10::Device to);
  c10::Device device;
  // None: the device has no streams of its own, and copies are done where they are asked for.
  std::optional<c10::Stream> in, out;
};

class Roads {
 public:
  Road to(c10::Device device);
  HostMemory& memory() { return *memory_; }
  const std::shared_ptr<HostMemory>& shared_memory() const { return memory_; }

 private:
  std::mutex mutex_;
  std::vector<Road> roads_;
  std::shared_ptr<HostMemory> memory_ = std::make_shared<HostMemory>();
};

// The copies of one operation.
class Passage {
 public:
  Passage(std::shared_ptr<HostMemory> memory, Road road);
  ~Passage();
  Passage(const Passage&) = delete;
  Passage& operator=(const Passage&) = delete;

  const Road& road() const { return road_; }
  // Memory for a tensor; to be filled, or to be copied from.
  at::Tensor host(at::IntArrayRef sizes, at::ScalarType type);
  void bring(const at::Tensor& host, const at::Tensor& from);
  // This tensor is what the copies back go to.
  void returns_to(const at::Tensor& tensor) { outputs_.push_back(tensor); }

  // Nothing more is brought.
  void close_in();
  // Whether everything was brought.
  bool is_there() const { return !brought_ || brought_->event.query(); }
  // Queues what `finish` copies. Null where it is done already.
  ArrivalPtr come_back(const std::function<void()>& finish);

 private:
  std::shared_ptr<HostMemory> memory_;
  const Road road_;
  std::vector<HostMemory::Block> blocks_;
  std::vector<at::Tensor> inputs_, outputs_;
  ArrivalPtr brought_, back_;
};

// What a call does with its tensors, wherever they are: they are on the host or on one device.
// While it lives the copies of the calling thread are queued where they belong.
class Staging {
 public:
  // Raises unless all these are dense, and on one device.
  Staging(Roads& roads, const char* what, std::initializer_list<at::TensorList> tensors);

  // As the functions of these names in elements.h.
  at::Tensor readable(const at::Tensor& tensor);
  at::Tensor writable(const at::Tensor& tensor, bool filled);
  at::Tensor joined(const std::vector<at::Tensor>& tensors, bool filled);
  // The same for what is to be combined, multiplied by the operation's factor.
  at::Tensor summand(const at::Tensor& tensor, const Reduction& reduction);
  at::Tensor summand_in_place(const at::Tensor& tensor, const Reduction& reduction);
  at::Tensor summands(const std::vector<at::Tensor>& tensors, const Reduction& reduction);

  // For whoever carries the operation out; null for tensors of the host.
  std::shared_ptr<Passage> finished();

 private:
  at::Tensor brought(const at::Tensor& tensor);

  std::shared_ptr<Passage> passage_;
  c10::OptionalStreamGuard guard_;
};

}  // namespace weft::torch_backend
