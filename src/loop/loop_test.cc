#include "weft/loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

namespace weft::loop {
namespace {

namespace fs = std::filesystem;

class Loop : public ::testing::Test {
 protected:
  Loop()
      : folder_(fs::path(::testing::TempDir()) /
                text("weft-loop-%s-%d",
                     ::testing::UnitTest::GetInstance()->current_test_info()->name(), getpid())) {
    fs::remove_all(folder_);
  }
  ~Loop() override { fs::remove_all(folder_); }

  std::string path(const char* name) const { return (folder_ / name).string(); }

  fs::path folder_;
};

TEST_F(Loop, RefusesWhatHasNothingToImprove) {
  Options options;
  options.output = path("out");
  options.lab.model = "alexnet";
  options.lab.compute_only = true;
  auto compute_only = run(options, {});
  ASSERT_FALSE(compute_only.ok());
  EXPECT_EQ(compute_only.error().code(), Code::invalid_argument);
  options.lab.compute_only = false;
  options.lab.engine = lab::Engine::gloo;
  auto gloo = run(options, {});
  ASSERT_FALSE(gloo.ok());
  EXPECT_EQ(gloo.error().code(), Code::unsupported);
  EXPECT_FALSE(fs::exists(path("out")));
}

TEST_F(Loop, TheOutcomeAsJsonIsInTheTargetsTime) {
  Outcome outcome;
  outcome.before.iteration_ms = {100, 99, 101};
  outcome.after.iteration_ms = {50, 49, 51};
  outcome.before.sums_exact = outcome.after.sums_exact = true;
  outcome.before.cpu_busy_percent = 10;
  outcome.after.cpu_busy_percent = 30;
  outcome.after.sound = false;
  outcome.predicted_ms = {55, 50, 60};
  outcome.environment.dilation = 40;
  outcome.environment.shrink = 20;
  outcome.optimized.bound_ns = 80e6;
  diagnose::Finding finding;
  finding.name = "straggler";
  finding.rank = 2;
  outcome.diagnosis.findings = {finding};
  auto object = nlohmann::json::parse(json(outcome));
  EXPECT_EQ(object["before"]["iteration_ms"], 100);
  EXPECT_EQ(object["after"]["high"], 51);
  EXPECT_EQ(object["predicted"]["low"], 50);
  EXPECT_EQ(object["communication_free_ms"], 40);
  EXPECT_EQ(object["cpu_busy_percent"], 30);
  EXPECT_EQ(object["sound"], false);
  EXPECT_EQ(object["gradients_equal"], true);
  EXPECT_EQ(object["findings"][0]["rank"], 2);
}

}  // namespace
}  // namespace weft::loop
