#include "sim/fiber.h"

#include <cxxabi.h>
#include <sys/mman.h>

#include <cstdint>
#include <utility>

#include "weft/base.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WEFT_ASAN 1
#endif
#if __has_feature(thread_sanitizer)
#define WEFT_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define WEFT_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__)
#define WEFT_TSAN 1
#endif

#if defined(WEFT_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(WEFT_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace weft::net::sim {
namespace {

constexpr size_t kGuard = 64u << 10;
constexpr size_t kStack = 1u << 20;

void leaving([[maybe_unused]] void** fake, [[maybe_unused]] const void* bottom,
             [[maybe_unused]] size_t size, [[maybe_unused]] void* thread) {
#if defined(WEFT_ASAN)
  __sanitizer_start_switch_fiber(fake, bottom, size);
#endif
#if defined(WEFT_TSAN)
  __tsan_switch_to_fiber(thread, 0);
#endif
}

void arrived([[maybe_unused]] void* fake, [[maybe_unused]] const void** bottom,
             [[maybe_unused]] size_t* size) {
#if defined(WEFT_ASAN)
  __sanitizer_finish_switch_fiber(fake, bottom, size);
#endif
}

}  // namespace

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)) {
  void* place = ::mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  WEFT_CHECK(place != MAP_FAILED);
  WEFT_CHECK(::mprotect(place, kGuard, PROT_NONE) == 0);
  stack_ = static_cast<std::byte*>(place);
  WEFT_CHECK(::getcontext(&inside_) == 0);
  inside_.uc_stack.ss_sp = stack_ + kGuard;
  inside_.uc_stack.ss_size = kStack;
  inside_.uc_link = nullptr;
  auto address = reinterpret_cast<uintptr_t>(this);
  ::makecontext(&inside_, reinterpret_cast<void (*)()>(&Fiber::enter), 2,
                static_cast<unsigned>(address >> 32), static_cast<unsigned>(address));
#if defined(WEFT_TSAN)
  inside_thread_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(WEFT_TSAN)
  __tsan_destroy_fiber(inside_thread_);
#endif
  ::munmap(stack_, kGuard + kStack);
}

void Fiber::enter(unsigned high, unsigned low) {
  auto* fiber = reinterpret_cast<Fiber*>((uintptr_t{high} << 32) | uintptr_t{low});
  arrived(nullptr, &fiber->outside_bottom_, &fiber->outside_size_);
  fiber->body_();
  fiber->body_ = nullptr;
  fiber->leave_for_good();
}

void Fiber::leave_for_good() {
  finished_ = true;
  leaving(nullptr, outside_bottom_, outside_size_, outside_thread_);
  ::setcontext(&outside_);
}

void Fiber::resume() {
  WEFT_CHECK(!finished_);
  // Exceptions that are on their way are counted by thread, and belong to a stack.
  std::swap(exceptions_, *reinterpret_cast<Exceptions*>(abi::__cxa_get_globals()));
#if defined(WEFT_TSAN)
  outside_thread_ = __tsan_get_current_fiber();
#endif
  leaving(&outside_fake_, stack_ + kGuard, kStack, inside_thread_);
  ::swapcontext(&outside_, &inside_);
  arrived(outside_fake_, nullptr, nullptr);
  std::swap(exceptions_, *reinterpret_cast<Exceptions*>(abi::__cxa_get_globals()));
}

void Fiber::yield() {
  leaving(&inside_fake_, outside_bottom_, outside_size_, outside_thread_);
  ::swapcontext(&inside_, &outside_);
  arrived(inside_fake_, &outside_bottom_, &outside_size_);
}

}  // namespace weft::net::sim
