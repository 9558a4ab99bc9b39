// Meeting by a file, in folders where others write too.
#include "rendezvous.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "testing.h"

namespace weft::join {
namespace {

using testing::HasSubstr;

std::string rendezvous_file(const char* name) {
  return testing::TempDir() + text("weft-rendezvous-%d-%s", ::getpid(), name);
}

TEST(Rendezvous, by_a_file_that_is_gone_when_all_have_met) {
  std::string path = rendezvous_file("new");
  auto meshes = join_all(4, 1, [&](Options& options) { options.rendezvous = "file:" + path; });
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  struct stat facts {};
  EXPECT_NE(::stat(path.c_str(), &facts), 0);
}

TEST(Rendezvous, by_a_file_that_is_gone_when_not_all_came) {
  std::string path = rendezvous_file("alone");
  Options options = options_for(0, 2, 1);
  options.rendezvous = "file:" + path;
  options.deadline = Nanos::from_millis(50);
  EXPECT_FALSE(meet(options));
  struct stat facts {};
  EXPECT_NE(::stat(path.c_str(), &facts), 0);
}

TEST(Rendezvous, by_a_file_that_an_earlier_group_left_behind) {
  std::string path = rendezvous_file("old");
  ASSERT_TRUE(write_file(path, text("127.0.0.1:%u\n", unsigned{free_port()})));
  std::vector<std::optional<Result<Mesh>>> outcomes(2);
  std::vector<std::thread> threads;
  for (uint32_t rank : {1u, 0u}) {
    threads.emplace_back([&, rank] {
      Options options = options_for(rank, 2, 1);
      options.rendezvous = "file:" + path;
      outcomes[rank] = meet(options);
    });
    pause_ms(100);  // rank 1 finds the old one first
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& outcome : outcomes) ASSERT_TRUE(outcome->ok()) << outcome->error().message();
}

TEST(Rendezvous, by_a_file_says_when_nobody_writes_it) {
  Options options = options_for(1, 2, 1);
  std::string path = rendezvous_file("none");
  options.rendezvous = "file:" + path;
  options.deadline = Nanos::from_millis(50);
  auto mesh = meet(options);
  ASSERT_FALSE(mesh);
  EXPECT_EQ(mesh.error().code(), Code::timeout);
  EXPECT_THAT(mesh.error().message(), HasSubstr("rank 0 did not write " + path));
  options = options_for(0, 2, 1);
  options.rendezvous = "file:/nonexistent/folder/file";
  EXPECT_THAT(meet(options).error().message(),
              HasSubstr("cannot write the rendezvous file /nonexistent/folder/file: No such"));
}

// ---- what may lie there ------------------------------------------------------------------

class Folder {
 public:
  Folder() : path_(testing::TempDir() + text("weft-rendezvous-%d", ::getpid())) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directory(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string operator/(const char* name) const { return path_ + "/" + name; }
  size_t files() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::string path_;
};

mode_t mode_of(const std::string& path) {
  struct stat facts {};
  EXPECT_EQ(::lstat(path.c_str(), &facts), 0);
  return facts.st_mode;
}

TEST(RendezvousFile, is_for_its_user_only_and_goes_with_who_wrote_it) {
  Folder folder;
  std::string path = folder / "meet";
  auto written = rendezvous::write(net::kernel_system(), path, "127.0.0.1:4000");
  ASSERT_TRUE(written) << written.error().message();
  EXPECT_EQ(mode_of(path) & 07777, 0600u);
  EXPECT_EQ(*rendezvous::read(kernel_files(), path), "127.0.0.1:4000");
  auto again = rendezvous::write(net::kernel_system(), path, "127.0.0.1:4001");
  ASSERT_TRUE(again) << "an earlier group left it behind";
  rendezvous::remove(kernel_files(), path, *written);
  EXPECT_EQ(*rendezvous::read(kernel_files(), path), "127.0.0.1:4001") << "another's, by now";
  rendezvous::remove(kernel_files(), path, *again);
  EXPECT_EQ(*rendezvous::read(kernel_files(), path), "") << "nobody has written it";
  EXPECT_EQ(folder.files(), 0u);
}

TEST(RendezvousFile, that_is_empty_may_be_written_to) {
  Folder folder;
  std::string path = folder / "made-by-mktemp";
  Fd made(::open(path.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600));
  EXPECT_EQ(*rendezvous::read(kernel_files(), path), "");
  EXPECT_TRUE(rendezvous::write(net::kernel_system(), path, "127.0.0.1:4000"));
}

TEST(RendezvousFile, that_is_something_else_is_neither_read_nor_replaced) {
  Folder folder;
  std::string words = folder / "words", link = folder / "link", pipe = folder / "pipe",
              open = folder / "open", folder_path = folder / "folder", dangling = folder / "to";
  ASSERT_TRUE(write_file(words, "the only copy of a thesis\n"));
  ASSERT_TRUE(write_file(open, "127.0.0.1:4000\n"));
  ASSERT_EQ(::chmod(open.c_str(), 0666), 0);
  ASSERT_TRUE(write_file(folder / "target", "127.0.0.1:4000\n"));
  ASSERT_EQ(::symlink((folder / "target").c_str(), link.c_str()), 0);
  ASSERT_EQ(::symlink((folder / "nothing").c_str(), dangling.c_str()), 0);
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  ASSERT_EQ(::mkdir(folder_path.c_str(), 0700), 0);
  size_t before = folder.files();
  struct {
    std::string path;
    const char* why;
  } cases[] = {{words, "it holds something else than an address"},
               {open, "others may write to it"},
               {link, "it is a symbolic link"},
               {dangling, "it is a symbolic link"},
               {pipe, "it is not a regular file"},
               {folder_path, "it is not a regular file"}};
  for (auto& one : cases) {
    SCOPED_TRACE(one.path);
    mode_t mode = mode_of(one.path);
    auto read = rendezvous::read(kernel_files(), one.path);
    ASSERT_FALSE(read);
    EXPECT_THAT(read.error().message(), HasSubstr(one.path + " is no rendezvous file: "));
    EXPECT_THAT(read.error().message(), HasSubstr(one.why));
    auto written = rendezvous::write(net::kernel_system(), one.path, "127.0.0.1:4001");
    ASSERT_FALSE(written);
    EXPECT_THAT(written.error().message(), HasSubstr(one.why));
    EXPECT_EQ(mode_of(one.path), mode);
    Options options = options_for(1, 2, 1);
    options.rendezvous = "file:" + one.path;
    EXPECT_THAT(meet(options).error().message(), HasSubstr(one.why));
  }
  EXPECT_EQ(folder.files(), before);
  EXPECT_EQ(*read_file(words, kib(1)), "the only copy of a thesis\n");
}

}  // namespace
}  // namespace weft::join
