#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "weft/cli.h"

namespace weft::cli {
namespace {

struct Called {
  int exit_code = 0;
  std::string out;
  std::string err;
};

Called call_run(std::vector<std::string> words) {
  words.insert(words.begin(), {"weft", "run"});
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  Called called;
  called.exit_code = main(static_cast<int>(words.size()), arguments.data());
  called.out = ::testing::internal::GetCapturedStdout();
  called.err = ::testing::internal::GetCapturedStderr();
  return called;
}

TEST(VerbRun, PassesOutputAndWordsOn) {
  const Called called = call_run({"-n", "1", "--", "echo", "plan", "--", "--json", "-n", "7"});
  EXPECT_EQ(called.exit_code, kExitDone);
  EXPECT_EQ(called.out, "[0] plan -- --json -n 7\n");
  EXPECT_EQ(called.err, "");
}

TEST(VerbRun, TellsWhoFailed) {
  const Called called = call_run({"-n", "2", "--", "sh", "-c", "exit $((WEFT_RANK * 4))"});
  EXPECT_EQ(called.exit_code, kExitRunFailed);
  EXPECT_EQ(called.err.find("weft run: rank 1 exited with code 4 after "), 0u) << called.err;
}

TEST(VerbRun, PrintsOneJsonObject) {
  const Called called =
      call_run({"-n", "2", "--json", "--", "sh", "-c", "echo text; exit $WEFT_RANK"});
  EXPECT_EQ(called.exit_code, kExitRunFailed);
  const auto report = nlohmann::json::parse(called.out);
  EXPECT_EQ(report["ok"], false);
  EXPECT_EQ(report["first_failure"], 1);
  EXPECT_EQ(report["outcomes"].size(), 2u);
  EXPECT_EQ(report["outcomes"][1]["exit_code"], 1);
}

TEST(VerbRun, HostsSayHowManyRanks) {
  const Called called =
      call_run({"-H", "localhost:2", "--", "sh", "-c", "echo $WEFT_RANK of $WEFT_SIZE"});
  EXPECT_EQ(called.exit_code, kExitDone) << called.err;
  EXPECT_NE(called.out.find("[1] 1 of 2\n"), std::string::npos) << called.out;
  EXPECT_EQ(call_run({"-n", "3", "-H", "localhost:2", "--", "true"}).exit_code, kExitBadInput);
  EXPECT_EQ(call_run({"-H", "local host", "--", "true"}).exit_code, kExitBadInput);
}

TEST(VerbRun, TellsTheRanksWhereToMeet) {
  const Called called = call_run({"-n", "1", "--rendezvous", "127.0.0.1:2345", "--interface", "lo",
                                  "--", "sh", "-c", "echo $WEFT_RENDEZVOUS $WEFT_INTERFACE"});
  EXPECT_EQ(called.out, "[0] 127.0.0.1:2345 lo\n") << called.err;
  EXPECT_EQ(call_run({"-n", "1", "--rendezvous", "2345", "--", "true"}).exit_code, kExitBadInput);
}

TEST(VerbRun, VariablesAreGivenToEveryRank) {
  const Called called = call_run({"-n", "2", "-x", "ASKED=for it", "--env", "OTHER=two", "--", "sh",
                                  "-c", "echo $ASKED $OTHER $WEFT_SIZE"});
  EXPECT_EQ(called.exit_code, kExitDone) << called.err;
  EXPECT_NE(called.out.find("[0] for it two 2\n"), std::string::npos) << called.out;
  EXPECT_NE(called.out.find("[1] for it two 2\n"), std::string::npos) << called.out;
  const Called unset = call_run({"-n", "1", "-x", "WEFT_NOT_SET_HERE", "--", "true"});
  EXPECT_EQ(unset.exit_code, kExitBadInput);
  EXPECT_NE(unset.err.find("WEFT_NOT_SET_HERE is not set here"), std::string::npos) << unset.err;
}

TEST(VerbRun, TheFailureOfAnAgentIsTold) {
  const Called called = call_run({"-H", "localhost,weft-far.invalid", "--rendezvous", "h:1",
                                  "--agent", "false", "--weft", "weft", "--", "sleep", "60"});
  EXPECT_EQ(called.exit_code, kExitRunFailed);
  EXPECT_NE(called.err.find("rank 1 on weft-far.invalid exited with code 1"), std::string::npos)
      << called.err;
}

TEST(VerbRun, RefusesBadCalls) {
  EXPECT_EQ(call_run({"-n", "2"}).exit_code, kExitBadCall);
  EXPECT_EQ(call_run({"--", "true"}).exit_code, kExitBadCall);
  EXPECT_EQ(call_run({"-n", "1", "--timeout", "soon", "--", "true"}).exit_code, kExitBadCall);
  const Called zero = call_run({"-n", "0", "--", "true"});
  EXPECT_EQ(zero.exit_code, kExitBadCall);
  EXPECT_NE(zero.err.find("--ranks"), std::string::npos) << zero.err;
  EXPECT_EQ(call_run({"-n", "1", "--", "/absent/program"}).exit_code, kExitBadInput);
}

TEST(VerbRun, EndsAtTheTimeout) {
  const Called called = call_run({"-n", "1", "--timeout", "100ms", "--", "sleep", "60"});
  EXPECT_EQ(called.exit_code, kExitRunFailed);
  EXPECT_NE(called.err.find("still running: rank 0"), std::string::npos) << called.err;
}

}  // namespace
}  // namespace weft::cli
