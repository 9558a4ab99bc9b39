// Names of shared memory: whose they are, and what becomes of those of a process that was killed.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "shm/name.h"
#include "weft_testing/loopback.h"

namespace weft::net {
namespace {

bool exists(const std::string& name) {
  struct stat facts {};
  return ::lstat(("/dev/shm" + name).c_str(), &facts) == 0;
}

// A process that makes a segment, tells its name, and lives until it is killed.
class Maker {
 public:
  using Then = std::function<void()>;

  explicit Maker(const Then& then = {}) {
    int ends[2];
    WEFT_CHECK(::pipe(ends) == 0);
    process_ = ::fork();
    WEFT_CHECK(process_ >= 0);
    if (process_ == 0) {
      auto made = kernel_system().make_memory();
      WEFT_CHECK(made.ok());
      const std::string& name = (*made)->name();
      if (then) then();
      WEFT_CHECK(::write(ends[1], name.data(), name.size()) == static_cast<ssize_t>(name.size()));
      for (;;) ::pause();
    }
    ::close(ends[1]);
    Fd in(ends[0]);
    char name[64];
    ssize_t got = ::read(in.get(), name, sizeof name);
    if (got > 0) name_.assign(name, static_cast<size_t>(got));
  }
  ~Maker() { kill(); }
  Maker(const Maker&) = delete;
  Maker& operator=(const Maker&) = delete;

  void kill() {
    if (process_ == 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(std::exchange(process_, 0), nullptr, 0);
  }
  const std::string& name() const { return name_; }

 private:
  pid_t process_ = 0;
  std::string name_;
};

// Runs `body` in a process of its own, which ends well if it returns true.
pid_t start(const std::function<bool()>& body) {
  pid_t process = ::fork();
  WEFT_CHECK(process >= 0);
  if (process == 0) ::_exit(body() ? 0 : 1);
  return process;
}
bool ended_well(pid_t process) {
  int status = 0;
  return ::waitpid(process, &status, 0) == process && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// A file of this test, under `name` in the folder of shared memory; not locked.
class Planted {
 public:
  explicit Planted(std::string name) : name_(std::move(name)) {
    file_ = Fd(::shm_open(name_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    WEFT_CHECK(static_cast<bool>(file_));
  }
  ~Planted() { ::shm_unlink(name_.c_str()); }
  Planted(const Planted&) = delete;
  Planted& operator=(const Planted&) = delete;
  const std::string& name() const { return name_; }
  int fd() const { return file_.get(); }

 private:
  std::string name_;
  Fd file_;
};

// 24 digits that no other test process uses now.
std::string digits() { return text("%024x", static_cast<unsigned>(::getpid())); }

TEST(SharedName, is_spelled_in_one_way_only) {
  EXPECT_TRUE(shm::is_lane_name("/weft-lane-0123456789abcdef01234567"));
  for (const char* name :
       {"", "/", "/weft-lane-", "weft-lane-0123456789abcdef01234567",
        "/weft-lane-0123456789abcdef0123456", "/weft-lane-0123456789abcdef012345678",
        "/weft-lane-0123456789ABCDEF01234567", "/weft-lane-../456789abcdef01234567",
        "/weft-0123456789abcdef01234567", "/weft-lame-0123456789abcdef01234567"})
    EXPECT_FALSE(shm::is_lane_name(name)) << name;
  auto made = shm::make_named();
  ASSERT_TRUE(made);
  EXPECT_TRUE(shm::is_lane_name(made->name));
  ::shm_unlink(made->name.c_str());
}

TEST(SharedName, of_a_killed_process_goes_with_the_next_segment_that_is_made) {
  Maker maker;
  ASSERT_TRUE(exists(maker.name())) << maker.name();
  maker.kill();
  pause_ms(1100);  // this process may have swept just now, for another test
  auto made = kernel_system().make_memory();
  ASSERT_TRUE(made);
  EXPECT_FALSE(exists(maker.name()));
  EXPECT_TRUE(exists((*made)->name()));
}

TEST(SharedName, of_a_living_process_stays) {
  Maker maker;
  auto own = kernel_system().make_memory();
  ASSERT_TRUE(own);
  for (int i = 0; i < 3; ++i) shm::sweep();
  EXPECT_TRUE(ended_well(start([] {
    shm::sweep();
    return true;
  })));
  EXPECT_TRUE(exists(maker.name()));
  EXPECT_TRUE(exists((*own)->name()));
  auto attached = kernel_system().attach_memory(maker.name());
  EXPECT_TRUE(attached) << "and can be used";
}

TEST(SharedName, lasts_as_long_as_a_forked_child_of_its_maker_lives) {
  int hold[2];
  ASSERT_EQ(::pipe(hold), 0);
  Fd held(hold[0]), release(hold[1]);
  Maker maker([&] {
    if (::fork() != 0) return;
    ::close(hold[1]);
    char byte;
    [[maybe_unused]] ssize_t ended = ::read(hold[0], &byte, 1);  // until the test lets it go
    ::_exit(0);
  });
  maker.kill();
  shm::sweep();
  EXPECT_TRUE(exists(maker.name()));
  release.reset();
  for (int i = 0; i < 2000 && exists(maker.name()); ++i) {
    pause_ms(5);
    shm::sweep();
  }
  EXPECT_FALSE(exists(maker.name()));
}

TEST(SharedName, that_is_not_a_lanes_stays) {
  Planted other("/weft-test-" + digits()), longer("/weft-lane-" + digits() + "0");
  // Ours by its spelling, and a folder or a link.
  std::string folder = "/dev/shm/weft-lane-f" + digits().substr(1);
  std::string link = "/dev/shm/weft-lane-e" + digits().substr(1);
  ASSERT_EQ(::mkdir(folder.c_str(), 0700), 0);
  ASSERT_EQ(::symlink(("/dev/shm" + other.name()).c_str(), link.c_str()), 0);
  shm::sweep();
  EXPECT_TRUE(exists(other.name()));
  EXPECT_TRUE(exists(longer.name()));
  EXPECT_EQ(::rmdir(folder.c_str()), 0);
  EXPECT_EQ(::unlink(link.c_str()), 0);
}

TEST(SharedName, of_another_user_stays) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file to another user";
  Planted planted("/weft-lane-" + digits());
  // Locked until it is another's, so that no other test removes it before.
  ASSERT_EQ(::flock(planted.fd(), LOCK_EX | LOCK_NB), 0);
  ASSERT_EQ(::fchown(planted.fd(), 12345, 12345), 0);
  ASSERT_EQ(::flock(planted.fd(), LOCK_UN), 0);
  shm::sweep();
  EXPECT_TRUE(exists(planted.name()));
  ASSERT_EQ(::fchown(planted.fd(), ::geteuid(), ::getegid()), 0);
  shm::sweep();
  EXPECT_FALSE(exists(planted.name())) << "and goes when it is ours";
}

TEST(SharedName, is_found_among_thousands_of_others) {
  constexpr int kOthers = 5000;
  auto name_of = [](int i) { return text("/weft-other-%d-%d", ::getpid(), i); };
  Maker maker;
  for (int i = 0; i < kOthers; ++i)
    Fd(::shm_open(name_of(i).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)).reset();
  maker.kill();
  shm::sweep();
  EXPECT_FALSE(exists(maker.name()));
  int left = 0;
  for (int i = 0; i < kOthers; ++i) left += ::shm_unlink(name_of(i).c_str()) == 0 ? 1 : 0;
  EXPECT_EQ(left, kOthers);
}

// Those of other users and of living processes must not use up what a sweep is ready to do.
TEST(SharedName, is_found_behind_many_that_must_stay) {
  constexpr int kOthers = 600;
  for (bool of_another_user : {false, true}) {
    if (of_another_user && ::geteuid() != 0) continue;  // only root can give a file away
    SCOPED_TRACE(of_another_user ? "of another user" : "held");
    Maker before;
    std::vector<std::unique_ptr<Planted>> others;
    for (int i = 0; i < kOthers; ++i) {
      others.push_back(
          std::make_unique<Planted>(text("/weft-lane-%016x%08x", unsigned(::getpid()), i)));
      ASSERT_EQ(::flock(others.back()->fd(), LOCK_EX | LOCK_NB), 0);
      if (!of_another_user) continue;
      ASSERT_EQ(::fchown(others.back()->fd(), 12345, 12345), 0);
      ASSERT_EQ(::flock(others.back()->fd(), LOCK_UN), 0);
    }
    // One was made before them and one after: whatever the order of the folder, one is behind.
    Maker after;
    before.kill();
    after.kill();
    shm::sweep();
    EXPECT_FALSE(exists(before.name()));
    EXPECT_FALSE(exists(after.name()));
    for (const auto& other : others) ASSERT_TRUE(exists(other->name()));
  }
}

TEST(SharedName, is_kept_by_makers_that_race_with_sweepers) {
  // Each name must be there, and lead to its own file, from its making until its end.
  auto make_many = [] {
    for (int i = 0; i < 2000; ++i) {
      auto made = shm::make_named();
      if (!made) return false;
      if (i % 3 == 0) shm::sweep();
      Fd again(::shm_open(made->name.c_str(), O_RDWR | O_CLOEXEC, 0));
      struct stat one {
      }, two{};
      bool same = again && ::fstat(made->file.get(), &one) == 0 &&
                  ::fstat(again.get(), &two) == 0 && one.st_ino == two.st_ino;
      if (!same || ::shm_unlink(made->name.c_str()) != 0) return false;
    }
    return true;
  };
  int stop[2];
  ASSERT_EQ(::pipe2(stop, O_NONBLOCK | O_CLOEXEC), 0);
  pid_t sweeper = start([&] {
    ::close(stop[1]);
    char byte;
    while (::read(stop[0], &byte, 1) != 0) shm::sweep();
    return true;
  });
  pid_t one = start(make_many), two = start(make_many);
  EXPECT_TRUE(ended_well(one));
  EXPECT_TRUE(ended_well(two));
  ::close(stop[0]);
  ::close(stop[1]);
  EXPECT_TRUE(ended_well(sweeper));
}

}  // namespace
}  // namespace weft::net
