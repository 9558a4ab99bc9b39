#include "weft/cli.h"

#include <gtest/gtest.h>

#include "progress.h"
#include "table.h"
#include "verb.h"

namespace weft::cli {
namespace {

TEST(Table, AlignsAndLeavesNoTrailingSpace) {
  Table table({{"rank", Align::right}, {"what"}, {"time", Align::right}, {"note"}});
  table.add({"0", "forward", "1.5 ms", ""});
  table.add({"10", "é", "211 ms", "slow"});
  EXPECT_EQ(table.text(),
            "rank  what       time  note\n"
            "   0  forward  1.5 ms\n"
            "  10  é        211 ms  slow\n");
}

TEST(Table, WithoutNamesHasNoHeader) {
  Table table({{}, {}});
  EXPECT_EQ(table.text(), "");
  table.add({"a", "b\x1b[2J"});
  EXPECT_EQ(table.text(), "a  b\\x1b[2J\n");
}

TEST(Table, ShortensByCharacters) {
  EXPECT_EQ(shortened("abcdef", 6), "abcdef");
  EXPECT_EQ(shortened("abcdefg", 6), "abc...");
  EXPECT_EQ(shortened("ééééééé", 6), "ééé...");
}

TEST(Outcome, TellsBadInputFromAFailedRun) {
  EXPECT_EQ(Outcome().exit_code(), 0);
  EXPECT_EQ(Outcome(Result<void>()).exit_code(), 0);
  EXPECT_EQ(Outcome(error(Code::corrupt, "x")).exit_code(), 1);
  EXPECT_EQ(Outcome(error(Code::not_found, "x")).exit_code(), 1);
  EXPECT_EQ(Outcome::bad_call("x").exit_code(), 2);
  EXPECT_EQ(Outcome(error(Code::peer_lost, "x")).exit_code(), 3);
  EXPECT_EQ(Outcome(Result<void>(error(Code::timeout, "why"))).message(), "why");
}

class HandClock final : public Clock {
 public:
  Nanos now() const override { return time; }
  Nanos time;
};

TEST(Progress, WaitsASecondAndWipesItsLine) {
  HandClock clock;
  ::testing::internal::CaptureStderr();
  {
    Progress progress("reading", clock, true);
    progress.update(1, 4);
    clock.time = Nanos::from_seconds(1);
    progress.update(2, 4);
    progress.update(3, 4);  // too soon after the last
    clock.time = Nanos::from_seconds(2);
    progress.update(7, 0);
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "\r\x1b[Kreading  50%\r\x1b[Kreading 7\r\x1b[K");
}

TEST(Progress, IsSilentWithoutATerminal) {
  HandClock clock;
  ::testing::internal::CaptureStderr();
  {
    Progress progress("reading", clock, false);
    clock.time = Nanos::from_seconds(5);
    progress.update(1, 4);
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

int call(std::vector<std::string> words) {
  words.insert(words.begin(), "weft");
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  const int status = weft::cli::main(static_cast<int>(words.size()), arguments.data());
  ::testing::internal::GetCapturedStdout();
  ::testing::internal::GetCapturedStderr();
  return status;
}

// tests/system/cli_test.py looks at the texts; this shows that main() can be called twice.
TEST(Main, ReturnsTheExitCode) {
  EXPECT_EQ(call({"--version"}), kExitDone);
  EXPECT_EQ(call({"plan", "check", "ddp"}), kExitDone);
  EXPECT_EQ(call({"plan", "check", "no such file"}), kExitBadInput);
  EXPECT_EQ(call({"plan", "chek", "ddp"}), kExitBadCall);
}

}  // namespace
}  // namespace weft::cli
