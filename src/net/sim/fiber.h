// A function with a stack of its own, which runs until it yields. One thread.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <functional>

namespace weft::net::sim {

class Fiber {
 public:
  explicit Fiber(std::function<void()> body);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void resume();  // from outside; returns when the body yields or ends
  void yield();   // from inside
  bool finished() const { return finished_; }

 private:
  static void enter(unsigned high, unsigned low);
  void leave_for_good();

  // As the C++ runtime keeps them: those that are caught, and how many are not yet.
  struct Exceptions {
    void* caught = nullptr;
    unsigned uncaught = 0;
  };

  std::function<void()> body_;
  Exceptions exceptions_;
  bool finished_ = false;
  std::byte* stack_ = nullptr;  // with a page in front that may not be touched
  ucontext_t inside_{};
  ucontext_t outside_{};
  // What the sanitizers must know about the stack that is left.
  void* inside_fake_ = nullptr;
  void* outside_fake_ = nullptr;
  const void* outside_bottom_ = nullptr;
  size_t outside_size_ = 0;
  void* inside_thread_ = nullptr;
  void* outside_thread_ = nullptr;
};

}  // namespace weft::net::sim
