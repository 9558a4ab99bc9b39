// Files, and what others may have put in their place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

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
