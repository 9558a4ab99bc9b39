// Files, and what others may have put in their place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "weft/base.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Files : public ::testing::Test {
 protected:
  Files() {
    std::string pattern = (fs::temp_directory_path() / "weft-files-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~Files() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  size_t count() const {
    return static_cast<size_t>(
        std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }
  static mode_t mode_of(const std::string& path) {
    struct stat status {};
    return ::stat(path.c_str(), &status) == 0 ? status.st_mode & 0777 : 0;
  }

  fs::path folder_;
};

TEST_F(Files, are_written_whole_and_bounded_when_read) {
  ASSERT_TRUE(write_file(path("x"), "hello"));
  EXPECT_EQ(*read_file(path("x"), {100}), "hello");
  EXPECT_EQ(read_file(path("x"), {4}).error().code(), Code::invalid_argument);
  EXPECT_EQ(read_file(path("missing"), {4}).error().code(), Code::not_found);
  auto written = write_file("/nonexistent-folder/x", "y");
  ASSERT_FALSE(written);
  EXPECT_EQ(written.error().message(),
            "cannot write /nonexistent-folder/x: No such file or directory");
  EXPECT_EQ(count(), 1u);
}

TEST_F(Files, are_readable_by_whom_they_are_for) {
  const mode_t before = ::umask(0);
  ASSERT_TRUE(write_file(path("open"), "x"));
  ASSERT_TRUE(write_file(path("secret"), "x", Readers::owner));
  ASSERT_TRUE(write_file(path("open"), "y", Readers::owner));
  ::umask(before);
  EXPECT_EQ(mode_of(path("secret")), 0600u);
  EXPECT_EQ(mode_of(path("open")), 0600u);  // the new file counts, not the one that it replaced
}

// Someone who knows the process id could have put links beside the target.
TEST_F(Files, do_not_go_through_links_that_lie_in_wait) {
  ASSERT_TRUE(write_file(path("precious"), "kept"));
  fs::create_symlink(path("precious"), path(text("x.%d.tmp", static_cast<int>(::getpid()))));
  fs::create_symlink(path("precious"), path("x"));
  ASSERT_TRUE(write_file(path("x"), "new"));
  EXPECT_EQ(*read_file(path("precious"), {100}), "kept");
  EXPECT_EQ(*read_file(path("x"), {100}), "new");
  EXPECT_FALSE(fs::is_symlink(path("x")));
}

// As root, a rename would have made a plain file of /dev/null.
TEST_F(Files, do_not_replace_what_is_no_file) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  fs::create_directory(path("folder"));
  fs::create_symlink(path("pipe"), path("link"));
  for (const char* name : {"pipe", "folder", "link"}) {
    auto written = write_file(path(name), "x");
    ASSERT_FALSE(written) << name;
    EXPECT_THAT(written.error().message(), HasSubstr("not a regular file; name a file"));
  }
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
  EXPECT_EQ(count(), 3u);
}

// Refuses the `at`-th request with `failure`; 0: half of the bytes.
class Refusing final : public weft::Files {
 public:
  Refusing(uint64_t at, int failure) : at_(at), failure_(failure) {}
  bool met() const { return asked_ >= at_; }

 private:
  int refusal(Call call, size_t& bytes) override {
    if (++asked_ != at_) return 0;
    const bool moves = call == Call::read || call == Call::write;
    if (failure_ == 0 && moves) bytes = (bytes + 1) / 2;
    // Where a signal can interrupt.
    if (failure_ == EINTR && !moves && call != Call::open) return 0;
    return failure_;
  }

  uint64_t asked_ = 0;
  uint64_t at_;
  int failure_;
};

TEST_F(Files, that_cannot_be_written_stay_as_they_were_and_leave_nothing) {
  for (const int failure : {ENOSPC, EACCES, EIO, EMFILE}) {
    uint64_t at = 1;
    for (;; ++at) {
      ASSERT_TRUE(write_file(path("x"), "old"));
      Refusing files(at, failure);
      const auto written = write_file(path("x"), "new", Readers::everyone, files);
      EXPECT_EQ(count(), 1u) << at;
      if (!files.met()) {
        EXPECT_TRUE(written);
        break;
      }
      ASSERT_FALSE(written) << at;
      EXPECT_EQ(written.error().code(), Code::io);
      EXPECT_THAT(written.error().message(), HasSubstr(path("x")));
      EXPECT_THAT(written.error().message(), HasSubstr(std::strerror(failure)));
      EXPECT_EQ(*read_file(path("x"), {100}), "old") << at;
    }
    EXPECT_EQ(at, 6u) << "status, open, write, close, rename";
    for (at = 1;; ++at) {
      Refusing files(at, failure);
      const auto read = read_file(path("x"), {100}, files);
      if (!files.met()) break;
      ASSERT_FALSE(read) << at;
      EXPECT_THAT(read.error().message(), HasSubstr(path("x")));
    }
    EXPECT_EQ(at, 4u) << "open, read, read";
  }
}

TEST_F(Files, that_are_interrupted_or_moved_in_pieces_are_whole) {
  for (const int failure : {EINTR, 0})
    for (uint64_t at = 1; at < 8; ++at) {
      Refusing writing(at, failure), reading(at, failure);
      ASSERT_TRUE(write_file(path("x"), "a content", Readers::everyone, writing)) << at;
      const auto read = read_file(path("x"), {100}, reading);
      ASSERT_TRUE(read) << at;
      EXPECT_EQ(*read, "a content") << at;
      EXPECT_EQ(count(), 1u);
    }
}

TEST_F(Files, that_are_created_were_not_there) {
  fs::create_symlink(path("nowhere"), path("link"));
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  for (const char* name : {"link", "pipe"}) {
    EXPECT_FALSE(create_file(path(name), Readers::owner)) << name;
    EXPECT_EQ(errno, EEXIST);
  }
  EXPECT_FALSE(fs::exists(path("nowhere")));
  EXPECT_TRUE(create_file(path("new"), Readers::owner));
  EXPECT_EQ(mode_of(path("new")), 0600u);
}

}  // namespace
}  // namespace weft
