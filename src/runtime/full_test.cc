// Full file systems: shared memory that cannot be had, and a trace that finds no room. The job
// goes on, and says why.
//
// Each test has a small file system of its own, in a process with mounts of its own.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <filesystem>
#include <mutex>

#include "processes.h"

namespace weft::runtime {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing_support::Child;
using testing_support::options_for;
using testing_support::run_ranks;

constexpr Nanos kPatience = Nanos::from_seconds(60);

bool put(const char* path, const std::string& words) {
  Fd file(::open(path, O_WRONLY | O_CLOEXEC));
  return file && ::write(file.get(), words.data(), words.size()) == std::ssize(words);
}

// From here on, what this process mounts is seen by it alone. A user who may not do that becomes
// root of a namespace of his own, where he may.
bool have_own_mounts() {
  if (::unshare(CLONE_NEWNS) != 0) {
    uid_t user = ::geteuid();
    gid_t group = ::getegid();
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    if (!put("/proc/self/setgroups", "deny") ||
        !put("/proc/self/uid_map", text("0 %u 1", unsigned{user})) ||
        !put("/proc/self/gid_map", text("0 %u 1", unsigned{group})))
      return false;
  }
  return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

bool mount_small(const std::string& where, const std::string& options, unsigned long flags = 0) {
  return ::mount("tmpfs", where.c_str(), "tmpfs", flags, options.c_str()) == 0;
}

// While it lives, warnings and what is worse come here.
class Warnings {
 public:
  Warnings() {
    log_set_sink([this](std::string_view line) {
      std::lock_guard lock(mutex_);
      lines_.emplace_back(line);
    });
  }
  ~Warnings() { log_set_sink({}); }
  Warnings(const Warnings&) = delete;
  Warnings& operator=(const Warnings&) = delete;
  std::vector<std::string> with(std::string_view words) const {
    std::lock_guard lock(mutex_);
    std::vector<std::string> out;
    for (const std::string& line : lines_)
      if (line.find(words) != std::string::npos) out.push_back(line);
    return out;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

Result<void> add_up(Group& group, size_t count) {
  std::vector<float> data(count, static_cast<float>(group.rank().index + 1));
  WEFT_TRY(group.all_reduce(data));
  uint32_t sum = group.ranks() * (group.ranks() + 1) / 2;
  if (std::all_of(data.begin(), data.end(), [&](float x) { return x == static_cast<float>(sum); }))
    return {};
  return error(Code::corrupt, "a wrong sum");
}

// What a job of `kRanks` says that runs with shared memory of this kind: the errors, the lanes'
// transports and the warnings.
void run_with_shared_memory(const std::string& options, unsigned long flags,
                            const Child::Say& say) {
  constexpr uint32_t kRanks = 3;
  if (!have_own_mounts() || !mount_small("/dev/shm", options, flags)) return say("skip ");
  Warnings warnings;
  std::string lanes;
  auto outcomes =
      run_ranks(kRanks, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
        for (size_t count : {size_t{10}, size_t{300000}, size_t{3000000}})
          WEFT_TRY(add_up(group, count));
        if (group.rank().index == 0) lanes = group.status();
        return group.barrier();
      });
  std::string problems;
  for (const auto& outcome : outcomes)
    if (!outcome) problems += outcome.error().message() + "; ";
  say("problems " + problems);
  std::erase(lanes, '\n');
  say("lanes " + lanes);
  auto told = warnings.with("no shared memory, so TCP");
  say("told " + text("%zu ", told.size()) + (told.empty() ? "" : told.front()));
  say("names " + text("%zu", testing_support::abandoned_memory().size()));
}

struct SharedMemory {
  const char* name;
  const char* options;
  unsigned long flags;
  const char* lanes;     // some are of this transport
  const char* no_lanes;  // and none of this
  const char* told;
};

class FullSharedMemory : public testing::TestWithParam<SharedMemory> {};

TEST_P(FullSharedMemory, means_tcp_and_a_word_about_it) {
  const SharedMemory& param = GetParam();
  Child child(
      [&](const Child::Say& say) { run_with_shared_memory(param.options, param.flags, say); });
  auto problems = child.hear("problems ", kPatience);
  if (!problems && child.else_heard() == "skip ; ")
    GTEST_SKIP() << "this user may not have mounts of his own here";
  ASSERT_TRUE(problems) << "the process ended: " << child.ended(kPatience).value_or(-1);
  EXPECT_EQ(*problems, "");
  std::string lanes = child.hear("lanes ", kPatience).value_or("");
  EXPECT_THAT(lanes, HasSubstr(param.lanes));
  EXPECT_THAT(lanes, Not(HasSubstr(param.no_lanes)));
  std::string told = child.hear("told ", kPatience).value_or("");
  EXPECT_THAT(told, HasSubstr(param.told));
  EXPECT_LE(std::stoi(told), 3) << "at most once a rank";
  EXPECT_EQ(child.hear("names ", kPatience), "0");
  auto status = child.ended(kPatience);
  ASSERT_TRUE(status);
  EXPECT_EQ(*status, 0);
}

constexpr const char* kTcp = "\"transport\":\"tcp\"";
constexpr const char* kShm = "\"transport\":\"shm\"";

INSTANTIATE_TEST_SUITE_P(
    All, FullSharedMemory,
    testing::Values(SharedMemory{"too_small", "size=64k", 0, kTcp, kShm,
                                 "make room with: mount -o remount,size=1G /dev/shm"},
                    SharedMemory{"for_one_lane_only", "size=3m", 0, kTcp, "no lane like this",
                                 "No space left"},
                    SharedMemory{"without_names", "nr_inodes=1", 0, kTcp, kShm, "No space left"},
                    SharedMemory{"read_only", "size=64m", MS_RDONLY, kTcp, kShm, "Read-only"},
                    SharedMemory{"large_enough", "size=64m", 0, kShm, kTcp, "0 "}),
    [](const auto& case_of) { return std::string(case_of.param.name); });

// ---- a trace ----------------------------------------------------------------------------------

// Two ranks that record into a file system that cannot hold it.
void run_with_full_disk(const std::string& folder, const Child::Say& say) {
  constexpr uint32_t kRanks = 2;
  constexpr int kOperations = 20000, kMore = 200;
  if (!have_own_mounts() || !mount_small(folder, "size=256k")) return say("skip ");
  Warnings warnings;
  std::vector<std::thread> threads;
  std::vector<std::string> said(kRanks);
  uint16_t port = testing_support::free_port();
  std::atomic<uint32_t> full{0};
  auto train = [&](uint32_t rank, capture::Recorder& recorder) -> Result<void> {
    Options options = options_for(rank, kRanks, port, plan::Plan());
    WEFT_ASSIGN(auto group, Group::join(options, recorder));
    int left = kOperations;
    for (bool counted = false; left > 0; --left) {
      WEFT_TRY(add_up(*group, 100));
      if (!counted && recorder.dropped() > 0) counted = full.fetch_add(1) < kRanks;
      // The ranks must agree when to end: by a sum.
      std::vector<float> seen(1, counted ? 1.0f : 0.0f);
      WEFT_TRY(group->all_reduce(seen));
      if (seen[0] == kRanks) break;
    }
    if (left == 0) return error(Code::io, "the disk did not fill");
    for (int i = 0; i < kMore; ++i) WEFT_TRY(add_up(*group, 100));
    return group->leave();
  };
  for (uint32_t rank = 0; rank < kRanks; ++rank)
    threads.emplace_back([&, rank] {
      capture::Options options;
      options.path = folder + "/" + trace::file_name(rank);
      options.environment = describe_rank(options_for(rank, kRanks, port, plan::Plan()));
      options.flush_interval = Nanos::from_millis(5);
      auto recorder = capture::Recorder::start(options);
      WEFT_CHECK(recorder.ok());
      auto trained = train(rank, **recorder);
      auto stopped = (*recorder)->stop();
      auto read = trace::read_process(options.path);
      said[rank] = text("job %s, trace %s, %s events, %s", trained ? "ok" : "failed",
                        stopped ? "ok" : stopped.error().message().c_str(),
                        read && !read->process.events.empty() ? "has" : "no",
                        read && read->damage.unfinished ? "unfinished" : "whole");
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& line : said) say("rank " + line);
  say("told " + text("%zu", warnings.with("recording ends early, and the job goes on").size()));
}

TEST(FullDisk, ends_the_trace_and_not_the_job) {
  std::string folder = std::filesystem::temp_directory_path() / "weft-full-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  Child child([&](const Child::Say& say) { run_with_full_disk(folder, say); });
  for (uint32_t rank = 0; rank < 2; ++rank) {
    auto said = child.hear("rank ", kPatience);
    if (!said && child.else_heard() == "skip ; ") {
      std::filesystem::remove_all(folder);
      GTEST_SKIP() << "this user may not have mounts of his own here";
    }
    ASSERT_TRUE(said) << "the process ended: " << child.ended(kPatience).value_or(-1);
    EXPECT_EQ(*said, text("job ok, trace %s/%s: writing: No space left on device, has events, "
                          "unfinished",
                          folder.c_str(), trace::file_name(rank).c_str()));
  }
  EXPECT_EQ(child.hear("told ", kPatience), "2") << "once a rank";
  EXPECT_EQ(child.ended(kPatience), 0);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace weft::runtime
