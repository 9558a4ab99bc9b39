// Threads, bells and chance, as the kernel has them.
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <system_error>
#include <thread>

#include "shm/memory.h"

namespace weft::net {
namespace {

class EventBell final : public Bell {
 public:
  explicit EventBell(Fd fd) : fd_(std::move(fd)), kept_(fd_.get()) {}
  int fd() const override { return fd_.get(); }
  void ring() override {
    uint64_t one = 1;
    [[maybe_unused]] ssize_t put = ::write(fd_.get(), &one, sizeof one);
  }
  void quiet() override {
    uint64_t ignored;
    [[maybe_unused]] ssize_t got = ::read(fd_.get(), &ignored, sizeof ignored);
  }

 private:
  Fd fd_;
  KeptFromChildren kept_;
};

class ThreadTask final : public Task {
 public:
  ~ThreadTask() override {
    if (!thread_.joinable()) return;
    if (state_->ended)
      thread_.join();
    else
      thread_.detach();
  }
  Result<void> start(std::function<void()> body) {
    // It must not take the signals of the program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    Result<void> started;
    try {
      thread_ = std::thread([state = state_, run = std::move(body)]() mutable {
        state->number = ::gettid();
        run();
        run = nullptr;  // what it used goes before anyone is told
        state->ended = true;
      });
    } catch (const std::system_error& failure) {
      started = own_error(failure.code().value(), "cannot start a thread");
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
  }
  std::string name() const override { return text("thread %d", state_->number.load()); }
  bool finish(Nanos patience) override {
    Nanos until = monotonic_clock().now() + patience;
    while (!state_->ended && monotonic_clock().now() < until) ::usleep(1000);
    return state_->ended;
  }

 private:
  struct State {
    std::atomic<int> number{0};  // the kernel's
    std::atomic<bool> ended{false};
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

class KernelSystem final : public System {
 public:
  Result<std::unique_ptr<Bell>> bell() override {
    Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!fd) return own_error(errno, "cannot make a bell");
    return adopt_bell(std::move(fd));
  }
  Result<std::unique_ptr<Task>> start(std::function<void()> body) override {
    auto task = std::make_unique<ThreadTask>();
    WEFT_TRY(task->start(std::move(body)));
    return std::unique_ptr<Task>(std::move(task));
  }
  Result<std::unique_ptr<SharedMemory>> make_memory() override { return shm::make(); }
  Result<std::unique_ptr<SharedMemory>> attach_memory(const std::string& name) override {
    return shm::attach(name);
  }
  Result<void> random(std::span<std::byte> out) override {
    while (!out.empty()) {
      ssize_t got = ::getrandom(out.data(), out.size(), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return io_error(errno, "no random numbers");
      out = out.subspan(static_cast<size_t>(got));
    }
    return {};
  }
};

}  // namespace

std::unique_ptr<Bell> adopt_bell(Fd eventfd) {
  return std::make_unique<EventBell>(std::move(eventfd));
}

System& kernel_system() {
  static KernelSystem system;
  return system;
}

}  // namespace weft::net
