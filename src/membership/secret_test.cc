#include "secret.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <thread>

namespace weft::membership {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

namespace fs = std::filesystem;

using Variables = std::map<std::string, std::string>;

Result<Membership> member(const Variables& variables) {
  return from_environment([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

std::string complaint(const Variables& variables) {
  const auto membership = member(variables);
  return membership.ok() ? "no complaint" : membership.error().message();
}

Variables with(Variables variables, const Variables& changed) {
  for (const auto& [name, value] : changed) variables[name] = value;
  return variables;
}

// Rank 0 of two, both on this host.
const Variables kHere = {{"RANK", "0"},
                         {"WORLD_SIZE", "2"},
                         {"LOCAL_RANK", "0"},
                         {"LOCAL_WORLD_SIZE", "2"},
                         {"MASTER_ADDR", "127.0.0.1"},
                         {"MASTER_PORT", "29500"},
                         {"TORCHELASTIC_RUN_ID", "none"},
                         {"TORCHELASTIC_RESTART_COUNT", "0"}};
const Variables kTwoHosts = with(kHere, {{"LOCAL_WORLD_SIZE", "1"}, {"MASTER_ADDR", "10.0.0.1"}});
const Variables kRank1 = {{"RANK", "1"}, {"LOCAL_RANK", "1"}};

class SecretTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = fs::temp_directory_path() / "weft-secret-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    here_ = with(kHere, {{"TMPDIR", folder_}});
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string put(const std::string& name, const std::string& content, mode_t mode) const {
    std::string path = folder_ + "/" + name;
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path) << content;
    chmod(path.c_str(), mode);
    return path;
  }
  std::string users() const { return text("%s/weft-%u", folder_.c_str(), unsigned{geteuid()}); }
  std::string folder_;
  Variables here_;
};

// ---- as such ---------------------------------------------------------------------------------

TEST(Secret, IsNewEachTime) {
  EXPECT_EQ(new_secret().size(), 64u);
  EXPECT_NE(new_secret(), new_secret());
}

TEST(Secret, HasALeastLength) {
  EXPECT_TRUE(check_secret(new_secret(), "x").ok());
  EXPECT_TRUE(check_secret(std::string(32, 'A'), "x").ok());
  for (const std::string& bad : {std::string(), std::string(30, 'a'), std::string(33, 'a'),
                                 std::string(64, 'g'), std::string("a secret")}) {
    const auto refused = check_secret(bad, "the secret of the test");
    ASSERT_FALSE(refused.ok()) << bad;
    EXPECT_THAT(refused.error().message(),
                AllOf(StartsWith("the secret of the test has"), HasSubstr("32 at least")));
    EXPECT_TRUE(bad.empty() || refused.error().message().find(bad) == std::string::npos);
  }
}

TEST(Secret, IsComparedWhole) {
  EXPECT_TRUE(same_secret("abcd", "abcd"));
  EXPECT_TRUE(same_secret("", ""));
  for (const char* other : {"abce", "bbcd", "abc", "abcde", ""}) {
    EXPECT_FALSE(same_secret("abcd", other)) << other;
  }
}

// ---- given -----------------------------------------------------------------------------------

TEST_F(SecretTest, OfAFileIsReadWhenNobodyElseMay) {
  const std::string secret(64, 'e');
  const auto named = [&](const std::string& path) {
    return with(kTwoHosts, {{"WEFT_SECRET_FILE", path}});
  };
  EXPECT_EQ(member(named(put("secret", secret + "\n", 0600)))->secret, secret);
  EXPECT_EQ(member(named(put("read-only", secret, 0400)))->secret, secret);
  EXPECT_THAT(complaint(named(put("open", secret, 0640))), HasSubstr("chmod 600"));
  EXPECT_THAT(complaint(named(folder_)), HasSubstr("chmod 600"));
  EXPECT_THAT(complaint(named(folder_ + "/none")), HasSubstr("cannot open"));
  EXPECT_THAT(complaint(named("/dev/null")), HasSubstr("chmod 600"));
  ASSERT_EQ(symlink("secret", (folder_ + "/link").c_str()), 0);
  EXPECT_THAT(complaint(named(folder_ + "/link")), HasSubstr("is a link"));
  EXPECT_THAT(complaint(named(put("long", std::string(5000, 'e'), 0600))),
              HasSubstr("more than 4096"));
  const std::string words = "not hex at all, but long enough to be taken for one";
  EXPECT_THAT(complaint(named(put("bad", words, 0600))),
              AllOf(HasSubstr("hexadecimal"), Not(HasSubstr("not hex at"))));
  // The variable wins over the file.
  EXPECT_EQ(
      member(with(named(folder_ + "/secret"), {{"WEFT_SECRET", std::string(32, 'b')}}))->secret,
      std::string(32, 'b'));
}

TEST_F(SecretTest, OfAFileOfAnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  const std::string path = put("theirs", std::string(64, 'e'), 0600);
  ASSERT_EQ(chown(path.c_str(), 12345, 12345), 0);
  EXPECT_THAT(complaint(with(kTwoHosts, {{"WEFT_SECRET_FILE", path}})),
              HasSubstr("a file of this user"));
}

TEST_F(SecretTest, OfTheHomeFolderIsUsedBeforeMakingOne) {
  put(".weft/secret", std::string(64, 'c'), 0600);
  EXPECT_EQ(member(with(kTwoHosts, {{"HOME", folder_}}))->secret, std::string(64, 'c'));
  put(".weft/secret", std::string(64, 'c'), 0644);
  EXPECT_THAT(complaint(with(kTwoHosts, {{"HOME", folder_}})), HasSubstr("chmod 600"));
}

TEST_F(SecretTest, OfADescriptorIsRead) {
  const std::string secret(64, 'd');
  const auto from = [&](int fd) {
    return with(kTwoHosts, {{"WEFT_SECRET_FD", std::to_string(fd)}});
  };
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const Fd reader(ends[0]), writer(ends[1]);  // whose other end stays open
  ASSERT_EQ(write(writer.get(), (secret + "\n").data(), 65), 65);
  EXPECT_EQ(member(from(reader.get()))->secret, secret);
  EXPECT_EQ(fcntl(reader.get(), F_GETFD), FD_CLOEXEC) << "not for the program's own children";
  // Ranks may share one open file: each reads all of it.
  const Fd memory(memfd_create("secret", 0));
  ASSERT_EQ(write(memory.get(), secret.data(), secret.size()), 64);
  EXPECT_EQ(member(from(memory.get()))->secret, secret);
  EXPECT_EQ(member(from(memory.get()))->secret, secret);
  const Fd open_file(open(put("open", secret, 0644).c_str(), O_RDONLY));
  EXPECT_THAT(complaint(from(open_file.get())), HasSubstr("chmod 600"));
  for (const char* bad : {"", "x", "-1", "1000000", "3x"}) {
    EXPECT_THAT(complaint(with(kTwoHosts, {{"WEFT_SECRET_FD", bad}})),
                StartsWith(text("WEFT_SECRET_FD is \"%s\"", bad)));
  }
  ASSERT_EQ(write(writer.get(), "short\n", 6), 6);
  EXPECT_THAT(complaint(from(reader.get())), StartsWith("WEFT_SECRET_FD has 5 characters"));
}

// ---- agreed on -------------------------------------------------------------------------------

TEST_F(SecretTest, RanksOfOneHostAgreeOnOneThatNobodyCanCompute) {
  const auto rank0 = member(here_), rank1 = member(with(here_, kRank1));
  ASSERT_TRUE(rank0.ok() && rank1.ok()) << complaint(here_);
  EXPECT_EQ(rank0->secret.size(), 64u);
  EXPECT_EQ(rank1->secret, rank0->secret);
  // Everything that the launcher says is the same, but not who asks.
  std::string other = folder_ + "/other";
  ASSERT_EQ(mkdir(other.c_str(), 0700), 0);
  EXPECT_NE(member(with(here_, {{"TMPDIR", other}}))->secret, rank0->secret);
  // Another job, or the same one started again by its launcher.
  EXPECT_NE(member(with(here_, {{"MASTER_PORT", "29501"}}))->secret, rank0->secret);
  EXPECT_NE(member(with(here_, {{"TORCHELASTIC_RESTART_COUNT", "1"}}))->secret, rank0->secret);
  struct stat status {};
  ASSERT_EQ(stat((users() + "/secret").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600u);
  ASSERT_EQ(stat(users().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0700u);
  EXPECT_EQ(std::distance(fs::directory_iterator(users()), {}), 1) << "no draft is left";
}

TEST_F(SecretTest, TheFolderOfTheSessionComesFirst) {
  const std::string session = folder_ + "/session";
  ASSERT_EQ(mkdir(session.c_str(), 0700), 0);
  ASSERT_TRUE(member(with(here_, {{"XDG_RUNTIME_DIR", session}})).ok());
  EXPECT_TRUE(fs::exists(session + "/weft/secret"));
  EXPECT_FALSE(fs::exists(users()));
  // Not one that others may enter.
  chmod(session.c_str(), 0755);
  ASSERT_TRUE(member(with(here_, {{"XDG_RUNTIME_DIR", session}})).ok());
  EXPECT_TRUE(fs::exists(users()));
}

TEST_F(SecretTest, ManyAtOnceAgree) {
  std::vector<std::string> got(16);
  std::vector<std::thread> threads;
  for (std::string& secret : got) {
    threads.emplace_back([&] {
      if (auto membership = member(here_)) secret = membership->secret;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::set<std::string>(got.begin(), got.end()).size(), 1u);
  EXPECT_EQ(got[0].size(), 64u);
}

TEST_F(SecretTest, WhatOthersPlantedIsRefused) {
  const std::string elsewhere = folder_ + "/elsewhere";
  ASSERT_EQ(mkdir(elsewhere.c_str(), 0700), 0);
  ASSERT_EQ(symlink(elsewhere.c_str(), users().c_str()), 0);
  EXPECT_THAT(complaint(here_), HasSubstr("somebody else may have put it there"));
  fs::remove(users());
  ASSERT_EQ(mkdir(users().c_str(), 0777), 0);
  chmod(users().c_str(), 0777);
  EXPECT_THAT(complaint(here_), HasSubstr("somebody else may have put it there"));
  fs::remove(users());
  put("elsewhere/secret", std::string(64, 'e'), 0600);
  ASSERT_EQ(mkdir(users().c_str(), 0700), 0);
  ASSERT_EQ(symlink((elsewhere + "/secret").c_str(), (users() + "/secret").c_str()), 0);
  EXPECT_THAT(complaint(here_), HasSubstr("cannot open"));
  fs::remove(users() + "/secret");
  std::ofstream(users() + "/secret") << std::string(64, 'e');
  chmod((users() + "/secret").c_str(), 0644);
  EXPECT_THAT(complaint(here_), HasSubstr("chmod 600"));
  if (geteuid() != 0) return;
  chmod((users() + "/secret").c_str(), 0600);
  ASSERT_EQ(chown((users() + "/secret").c_str(), 12345, 12345), 0);
  EXPECT_THAT(complaint(here_), HasSubstr("a file of this user"));
  ASSERT_EQ(chown(users().c_str(), 12345, 12345), 0);
  EXPECT_THAT(complaint(here_), HasSubstr("somebody else may have put it there"));
}

// ---- none ------------------------------------------------------------------------------------

TEST_F(SecretTest, WithoutOneSeveralHostsAreRefusedWithTheLineThatMendsIt) {
  EXPECT_THAT(complaint(kTwoHosts),
              AllOf(StartsWith("WEFT_SECRET is not set, and 1 of 2 ranks are on this host"),
                    HasSubstr("`export WEFT_SECRET=$(openssl rand -hex 32)`"),
                    HasSubstr("before torchrun"), HasSubstr("WEFT_INSECURE=1")));
  Variables unknown = kHere;
  unknown.erase("LOCAL_WORLD_SIZE");
  EXPECT_THAT(complaint(unknown), HasSubstr("does not say how many ranks are on this host"));
  EXPECT_THAT(complaint({{"SLURM_PROCID", "1"},
                         {"SLURM_NTASKS", "2"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_NODEID", "1"},
                         {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                         {"SLURM_JOB_NODELIST", "a,b"},
                         {"SLURM_JOB_ID", "1"},
                         {"SLURM_STEP_ID", "0"}}),
              HasSubstr("before srun or sbatch"));
  EXPECT_THAT(complaint({{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                         {"WEFT_RENDEZVOUS", "10.0.0.1:5000"}}),
              HasSubstr("mpirun -x WEFT_SECRET"));
}

TEST_F(SecretTest, WithoutOneInsecurityMustBeAskedForAndEveryRankWarns) {
  const Variables insecure = with(kTwoHosts, {{"WEFT_INSECURE", "1"}});
  std::vector<std::string> lines;
  log_set_sink([&](std::string_view line) { lines.emplace_back(line); });
  const auto rank0 = member(insecure);
  const auto rank1 = member(with(insecure, {{"RANK", "1"}}));
  const auto agreed = member(with(here_, {{"WEFT_INSECURE", "1"}}));
  log_set_sink({});
  ASSERT_TRUE(rank0.ok() && rank1.ok() && agreed.ok());
  EXPECT_EQ(rank0->secret, rank1->secret);
  ASSERT_EQ(lines.size(), 2u) << "and nobody who has a secret";
  for (const std::string& line : lines) EXPECT_THAT(line, HasSubstr("set WEFT_SECRET"));
  EXPECT_EQ(complaint(with(kTwoHosts, {{"WEFT_INSECURE", "0"}})), complaint(kTwoHosts));
  EXPECT_THAT(complaint(with(kTwoHosts, {{"WEFT_INSECURE", "yes"}})),
              StartsWith("WEFT_INSECURE is \"yes\""));
}

// ---- files that fail -----------------------------------------------------------------------

struct Died {};

// What happens at the `at`-th request: an errno, half of the bytes (0), or whatever `then` does.
class At final : public Files {
 public:
  At(uint64_t at, int failure) : at_(at), failure_(failure) {}
  At(uint64_t at, std::function<void()> then) : at_(at), then_(std::move(then)) {}
  bool met() const { return asked_ >= at_; }
  std::optional<Call> refused;

 private:
  int refusal(Call call, size_t& bytes) override {
    if (++asked_ != at_) return 0;
    if (then_) return then_(), 0;
    const bool moves = call == Call::read || call == Call::write;
    if (failure_ == 0 && moves) bytes = (bytes + 1) / 2;
    if (failure_ == EINTR && !moves && call != Call::open && call != Call::sync) return 0;
    if (failure_ != 0) refused = call;
    return failure_;
  }

  uint64_t asked_ = 0;
  uint64_t at_;
  int failure_ = 0;
  std::function<void()> then_;
};

class SecretFiles : public SecretTest {
 protected:
  void SetUp() override {
    SecretTest::SetUp();
    own_ = (fs::path(folder_) / "own").string();
  }
  size_t count() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(own_), {}));
  }
  std::string own_;
};

TEST_F(SecretFiles, that_fail_at_any_request_are_told_with_their_path_and_spoil_nothing) {
  for (const int failure : {ENOSPC, EACCES, EIO, EMFILE})
    for (const bool exists : {false, true}) {
      uint64_t at = 1;
      for (;; ++at) {
        fs::remove_all(own_);
        std::string before;
        if (exists) before = *users_secret(own_);
        At files(at, failure);
        const auto secret = users_secret(own_, files);
        if (!files.met()) {
          EXPECT_TRUE(secret);
          break;
        }
        // A draft that cannot be removed does no harm to the secret.
        if (files.refused == Files::Call::unlink) {
          EXPECT_TRUE(secret);
        } else {
          ASSERT_FALSE(secret) << at;
          EXPECT_THAT(secret.error().message(), HasSubstr(own_));
        }
        const auto after = users_secret(own_);
        ASSERT_TRUE(after) << at << ": " << after.error().message();
        EXPECT_TRUE(!exists || *after == before) << at;
        EXPECT_EQ(count(), files.refused == Files::Call::unlink ? 2u : 1u) << at;
      }
      EXPECT_GT(at, exists ? 6u : 12u);
    }
}

TEST_F(SecretFiles, that_are_interrupted_or_moved_in_pieces_give_the_secret) {
  for (const int failure : {EINTR, 0})
    for (uint64_t at = 1; at < 20; ++at) {
      fs::remove_all(own_);
      At files(at, failure);
      const auto secret = users_secret(own_, files);
      ASSERT_TRUE(secret) << at << ": " << secret.error().message();
      EXPECT_EQ(*secret, *users_secret(own_));
      EXPECT_EQ(count(), 1u);
    }
}

// At every request of one process, another one does the same from beginning to end.
TEST_F(SecretFiles, that_two_processes_make_at_once_hold_one_secret) {
  bool met = true;
  for (uint64_t at = 1; met; ++at) {
    fs::remove_all(own_);
    std::string other;
    At files(at, [&] { other = *users_secret(own_); });
    const auto secret = users_secret(own_, files);
    ASSERT_TRUE(secret) << at << ": " << secret.error().message();
    met = files.met();
    EXPECT_TRUE(!met || *secret == other) << at;
    EXPECT_EQ(count(), 1u) << at;
  }
}

// A process is killed at any of its requests: the next one finds a whole secret, or none.
TEST_F(SecretFiles, of_a_process_that_died_are_whole_or_not_there) {
  for (uint64_t at = 1;; ++at) {
    fs::remove_all(own_);
    At files(at, [] { throw Died(); });
    try {
      ASSERT_TRUE(users_secret(own_, files));
      break;
    } catch (const Died&) {
      const auto secret = users_secret(own_);
      ASSERT_TRUE(secret) << at << ": " << secret.error().message();
      EXPECT_EQ(*secret, *users_secret(own_));
    }
  }
}

TEST_F(SecretFiles, of_a_session_that_cannot_be_looked_at_are_not_replaced_by_others) {
  const std::string session = (fs::path(folder_) / "session").string();
  fs::create_directory(session);
  fs::permissions(session, fs::perms::owner_all);
  const auto lookup = [&](const char* name) -> std::optional<std::string> {
    if (std::string_view(name) == "XDG_RUNTIME_DIR") return session;
    return std::nullopt;
  };
  for (const int failure : {EIO, EMFILE})
    for (uint64_t at = 1;; ++at) {
      At files(at, failure);
      const auto found = users_folder(lookup, files);
      if (!files.met()) {
        EXPECT_EQ(*found, session + "/weft");
        break;
      }
      ASSERT_FALSE(found) << at << ": " << *found;
      EXPECT_THAT(found.error().message(), HasSubstr(session));
    }
}

}  // namespace
}  // namespace weft::membership
