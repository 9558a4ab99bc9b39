// Ranks as processes of their own, which can be killed, stopped and cut off.
#pragma once

#include <dirent.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <set>

#include "testing.h"

namespace weft::runtime::testing_support {

inline void sleep_ms(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// A process that runs `body` and tells what it sees, line by line.
class Child {
 public:
  using Say = std::function<void(const std::string& line)>;

  // REQUIRES: this process has no other threads now.
  explicit Child(const std::function<void(const Say&)>& body) {
    int ends[2];
    WEFT_CHECK(::pipe(ends) == 0);
    process_ = ::fork();
    WEFT_CHECK(process_ >= 0);
    if (process_ == 0) {
      ::close(ends[0]);
      body([out = ends[1]](const std::string& line) {
        std::string whole = line + "\n";
        WEFT_CHECK(::write(out, whole.data(), whole.size()) == static_cast<ssize_t>(whole.size()));
      });
      ::_exit(0);
    }
    ::close(ends[1]);
    out_ = Fd(ends[0]);
  }
  ~Child() {
    if (process_ <= 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  Child(Child&& other) noexcept
      : process_(std::exchange(other.process_, 0)),
        out_(std::move(other.out_)),
        said_(std::move(other.said_)) {}
  Child& operator=(Child&&) = delete;

  void signal(int number) const { ::kill(process_, number); }

  // The first line from now on that begins with `start`, without that; nothing if the process
  // ends before, or does not say it in time.
  std::optional<std::string> hear(const std::string& start, Nanos patience) {
    Nanos until = monotonic_clock().now() + patience;
    for (;;) {
      for (size_t end; (end = said_.find('\n')) != std::string::npos;) {
        std::string line = said_.substr(0, end);
        said_.erase(0, end + 1);
        if (line.starts_with(start)) return line.substr(start.size());
        other_ += line + "; ";
      }
      auto left = static_cast<int>((until - monotonic_clock().now()).millis());
      if (left <= 0) return std::nullopt;
      pollfd wait{out_.get(), POLLIN, 0};
      if (::poll(&wait, 1, left) <= 0) continue;
      char some[4096];
      ssize_t got = ::read(out_.get(), some, sizeof some);
      if (got <= 0) return std::nullopt;
      said_.append(some, static_cast<size_t>(got));
    }
  }
  const std::string& else_heard() const { return other_; }

  // How it ended; nothing if it did not in time.
  std::optional<int> ended(Nanos patience) {
    Nanos until = monotonic_clock().now() + patience;
    int status = 0;
    while (::waitpid(process_, &status, WNOHANG) == 0) {
      if (monotonic_clock().now() > until) return std::nullopt;
      sleep_ms(5);
    }
    process_ = 0;
    return status;
  }

 private:
  pid_t process_ = 0;
  Fd out_;
  std::string said_, other_;
};

// The kernel's network, until it goes silent: connections stay open, and nothing passes.
class SilentNetwork final : public net::Network {
 public:
  static inline std::atomic<bool> silent{false};

  Result<std::unique_ptr<net::Socket>> listen(const std::string& host, uint16_t port) override {
    WEFT_ASSIGN(auto socket, kernel_.listen(host, port));
    return wrap(std::move(socket));
  }
  Result<std::unique_ptr<net::Socket>> connect(const std::string& host, uint16_t port) override {
    WEFT_ASSIGN(auto socket, kernel_.connect(host, port));
    return wrap(std::move(socket));
  }
  Result<std::unique_ptr<net::Reactor>> reactor() override {
    WEFT_ASSIGN(auto inner, kernel_.reactor());
    return std::unique_ptr<net::Reactor>(std::make_unique<Turns>(std::move(inner)));
  }
  const Clock& clock() const override { return kernel_.clock(); }
  std::string machine() const override { return kernel_.machine(); }

 private:
  // The kernel's, except that what is ready and may not be read does not make it spin.
  class Turns final : public net::Reactor {
   public:
    explicit Turns(std::unique_ptr<net::Reactor> inner) : inner_(std::move(inner)) {}
    Result<void> add(net::Socket& socket, uint32_t events, Handler* handler) override {
      return inner_->add(socket, events, handler);
    }
    void modify(net::Socket& socket, uint32_t events, Handler* handler) override {
      inner_->modify(socket, events, handler);
    }
    void remove(net::Socket& socket) override { inner_->remove(socket); }
    bool run_once(Nanos timeout) override {
      if (silent) sleep_ms(10);
      return inner_->run_once(silent ? Nanos{0} : timeout);
    }
    void wake() override { inner_->wake(); }

   private:
    std::unique_ptr<net::Reactor> inner_;
  };
  class Line final : public net::Socket {
   public:
    explicit Line(std::unique_ptr<net::Socket> inner) : inner_(std::move(inner)) {}
    ssize_t send(const iovec* parts, size_t count) override {
      return silent ? -EAGAIN : inner_->send(parts, count);
    }
    ssize_t receive(const iovec* parts, size_t count) override {
      return silent ? -EAGAIN : inner_->receive(parts, count);
    }
    Result<std::unique_ptr<net::Socket>> accept() override {
      if (silent) return std::unique_ptr<net::Socket>();
      WEFT_ASSIGN(auto socket, inner_->accept());
      return socket ? wrap(std::move(socket)) : nullptr;
    }
    int connect_outcome() override { return inner_->connect_outcome(); }
    std::string local_host() const override { return inner_->local_host(); }
    uint16_t local_port() const override { return inner_->local_port(); }
    std::string peer() const override { return inner_->peer(); }
    void limit_unsent(uint32_t bytes) override { inner_->limit_unsent(bytes); }
    std::optional<net::TcpInfo> tcp_info() const override { return inner_->tcp_info(); }
    int fd() const override { return inner_->fd(); }

   private:
    std::unique_ptr<net::Socket> inner_;
  };
  static std::unique_ptr<net::Socket> wrap(std::unique_ptr<net::Socket> inner) {
    return std::make_unique<Line>(std::move(inner));
  }
  net::Network& kernel_ = net::kernel_network();
};

// Memory of lanes that has a name, and nobody who uses it.
inline std::set<std::string> abandoned_memory() {
  auto names_in = [](const std::string& folder, const char* start) {
    std::set<std::string> out;
    DIR* open = ::opendir(folder.c_str());
    if (open == nullptr) return out;
    while (const dirent* entry = ::readdir(open))
      if (std::string_view(entry->d_name).starts_with(start)) out.insert(entry->d_name);
    ::closedir(open);
    return out;
  };
  std::set<std::string> out = names_in("/dev/shm", "weft-");
  if (out.empty()) return out;
  for (const std::string& process : names_in("/proc", "")) {
    std::ifstream maps("/proc/" + process + "/maps");
    for (std::string line; std::getline(maps, line);)
      if (size_t at = line.find("/weft-"); at != std::string::npos)
        out.erase(line.substr(at + 1, line.find(' ', at) - at - 1));
  }
  return out;
}

}  // namespace weft::runtime::testing_support
