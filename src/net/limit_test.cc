// What a process that may not have more descriptors is told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "weft_testing/loopback.h"
#include "weft_testing/turns.h"

namespace weft::net {
namespace {

using testing::HasSubstr;

// Runs `body` in a child that can open `spare` more descriptors; what it returns is printed there,
// and must be empty.
void with_descriptors(int spare, const std::function<std::string()>& body,
                      const std::function<void()>& before = {}) {
  pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (before) before();
    int next = ::dup(0);
    ::close(next);
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = static_cast<rlim_t>(next) + static_cast<rlim_t>(spare);
    setrlimit(RLIMIT_NOFILE, &limit);
    std::string wrong = body();
    if (!wrong.empty()) std::fprintf(stderr, "%s\n", wrong.c_str());
    ::_exit(wrong.empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

std::string lacks(const std::string& message, const std::string& words) {
  return message.find(words) == std::string::npos ? message + " does not say: " + words : "";
}

TEST(Limits, a_reactor_that_cannot_be_made_is_an_error_that_names_the_limit) {
#if defined(__SANITIZE_ADDRESS__)
  // It opens a pipe to find out whether an object's memory can be read, and without descriptors it
  // takes every object for a bad one.
  GTEST_SKIP() << "the sanitizer of undefined behaviour needs descriptors of its own";
#endif
  for (int spare : {0, 1})
    with_descriptors(spare, [] {
      auto reactor = kernel_network().reactor();
      if (reactor) return std::string("there was one");
      if (reactor.error().code() != Code::io) return std::string("it blames somebody else");
      return lacks(reactor.error().message(), "Too many open files; this process may have ") +
             lacks(reactor.error().message(), "(ulimit -n): raise that limit");
    });
  with_descriptors(2, [] {
    auto reactor = kernel_network().reactor();
    return reactor ? std::string() : reactor.error().message();
  });
}

TEST(Limits, a_connection_that_cannot_be_made_is_an_error_of_this_process) {
  with_descriptors(0, [] {
    auto socket = kernel_network().connect("127.0.0.1", 1);
    if (socket || socket.error().code() != Code::io) return std::string("no error of its own");
    return lacks(socket.error().message(), "cannot make a socket: Too many open files; this ");
  });
}

TEST(Limits, who_calls_waits_while_there_are_no_descriptors) {
  std::unique_ptr<Socket> listener;
  Fd caller;
  auto called = [&] {
    auto made = kernel_network().listen("127.0.0.1", 0);
    WEFT_CHECK(made.ok());
    listener = std::move(*made);
    caller = connect_to(listener->local_port());
  };
  with_descriptors(
      0,
      [&]() -> std::string {
        auto refused = listener->accept();
        if (refused || refused.error().code() != Code::io) return "no error";
        std::string wrong =
            lacks(refused.error().message(), "cannot accept a connection: Too many");
        if (!wrong.empty()) return wrong;
        ::close(0);
        auto taken = listener->accept();
        if (!taken || !*taken) return "nobody waits";
        auto nobody = listener->accept();
        return nobody && !*nobody ? "" : "an error, and nobody waits";
      },
      called);
}

TEST(Limits, what_cannot_be_watched_is_an_error) {
  auto reactor = new_reactor();
  auto [one, other] = tcp_pair();
  std::unique_ptr<Socket> socket = adopt(std::move(one));
  struct Nothing final : Reactor::Handler {
    void on_events(uint32_t) override {}
  } handler;
  ASSERT_TRUE(reactor->add(*socket, EPOLLIN, &handler));
  // The kernel's answer to a limit cannot be had without the user's whole allowance; any other of
  // its refusals takes the same way.
  auto twice = reactor->add(*socket, EPOLLIN, &handler);
  ASSERT_FALSE(twice);
  EXPECT_THAT(twice.error().message(), HasSubstr("cannot watch a connection: File exists"));
  EXPECT_THAT(own_error(ENOSPC, "cannot watch").message(), HasSubstr("fs.epoll.max_user_watches"));
  reactor->remove(*socket);
}

// The first of a round removes the second, and a third takes over its descriptor.
TEST(Reactor, tells_nobody_what_happened_to_another) {
  auto reactor = new_reactor();
  auto [one, one_end] = tcp_pair();
  auto [two, two_end] = tcp_pair();
  std::unique_ptr<Socket> first = adopt(std::move(one)), second = adopt(std::move(two)), third;
  struct Counted final : Reactor::Handler {
    void on_events(uint32_t) override {
      ++times;
      if (then) std::exchange(then, {})();
    }
    int times = 0;
    std::function<void()> then;
  } of_first, of_second, of_third;
  int descriptor = second->fd();
  Fd later(::dup(one_end.get()));
  auto take_over = [&](std::unique_ptr<Socket>& gone) {
    reactor->remove(*gone);
    gone.reset();
    third = adopt(Fd(::dup2(later.get(), descriptor)));
    EXPECT_TRUE(reactor->add(*third, EPOLLIN, &of_third));
  };
  ASSERT_TRUE(reactor->add(*first, EPOLLIN, &of_first));
  ASSERT_TRUE(reactor->add(*second, EPOLLIN, &of_second));
  // Whichever comes first ends the second.
  of_first.then = [&] { take_over(second); };
  ASSERT_TRUE(send_all(one_end.get(), "x"));
  ASSERT_TRUE(send_all(two_end.get(), "x"));
  ASSERT_TRUE(turn_until(*reactor, [&] { return of_first.times > 0 && third != nullptr; }));
  reactor->run_once(Nanos{0});
  EXPECT_LE(of_second.times, 1) << "only if it was first";
  EXPECT_EQ(of_third.times, 0) << "nothing came there";
  reactor->remove(*first);
  reactor->remove(*third);
}

TEST(Address, of_a_connection_is_known_after_it_was_reset) {
  auto listener = kernel_network().listen("127.0.0.1", 0);
  ASSERT_TRUE(listener);
  Fd caller = connect_to((*listener)->local_port());
  sockaddr_in local{};
  socklen_t size = sizeof local;
  getsockname(caller.get(), reinterpret_cast<sockaddr*>(&local), &size);
  linger at_once{1, 0};
  setsockopt(caller.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  caller.reset();
  auto socket = (*listener)->accept();
  ASSERT_TRUE(socket && *socket);
  EXPECT_EQ((*socket)->peer(), text("127.0.0.1:%u", unsigned{ntohs(local.sin_port)}));
  EXPECT_EQ((*socket)->peer_host(), "127.0.0.1");
}

}  // namespace
}  // namespace weft::net
