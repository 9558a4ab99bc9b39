#include "weft/api.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <latch>
#include <thread>

#include "testing.h"

namespace weft::api {
namespace {

using testing::HasSubstr;
Result<void> expect_sum(Group& group) {
  std::vector<float> data(1003, static_cast<float>(group.rank().index + 1));
  WEFT_TRY(group.all_reduce(data));
  const uint32_t sum = group.ranks() * (group.ranks() + 1) / 2;
  for (float value : data)
    if (value != static_cast<float>(sum))
      return error(Code::corrupt, "%g instead of %u", double{value}, sum);
  return {};
}

std::string refusal(const Variables& variables) {
  JoinOptions options;
  options.environment = environment(variables);
  auto job = join(options);
  return job ? "joined" : job.error().message();
}

TEST(Join, a_process_that_nobody_started_is_a_group_of_one) {
  JoinOptions options;
  options.environment = environment({});
  auto job = join(options);
  ASSERT_TRUE(job.ok()) << job.error().message();
  EXPECT_EQ((*job)->group().ranks(), 1u);
  EXPECT_EQ((*job)->group().rank().index, 0u);
  EXPECT_EQ((*job)->membership().launcher, "");
  EXPECT_EQ((*job)->plan().name, "default");
  EXPECT_FALSE((*job)->recorder().on());
  EXPECT_TRUE(expect_sum((*job)->group()).ok());
  EXPECT_TRUE((*job)->leave().ok());
}

TEST(Join, follows_the_environment) {
  run_ranks(3, {{"WEFT_PLAN", "ddp"}, {"WEFT_SHARED_MEMORY", "0"}},
            [](std::unique_ptr<Job>& job) -> Result<void> {
              EXPECT_EQ(job->group().ranks(), 3u);
              EXPECT_EQ(job->membership().launcher, "weft");
              EXPECT_EQ(job->plan().name, "ddp");
              for (const join::Member& member : job->group().members())
                EXPECT_FALSE(member.shares_memory);
              WEFT_TRY(expect_sum(job->group()));
              return job->leave();
            });
}

TEST(Join, uses_shared_memory_on_one_host_unasked) {
  run_ranks(2, {}, [](std::unique_ptr<Job>& job) -> Result<void> {
    const uint32_t other = 1 - job->group().rank().index;
    EXPECT_TRUE(job->group().members()[other].shares_memory);
    WEFT_TRY(expect_sum(job->group()));
    return job->leave();
  });
}

TEST(Join, refuses_wrong_variables_by_name) {
  EXPECT_THAT(refusal({{"WEFT_SHARED_MEMORY", "maybe"}}),
              HasSubstr("WEFT_SHARED_MEMORY is \"maybe\""));
  EXPECT_THAT(refusal({{"WEFT_SEAL", "yes"}}), HasSubstr("WEFT_SEAL is \"yes\""));
  EXPECT_THAT(refusal({{"WEFT_PROGRESS_TIMEOUT", "soon\n"}}),
              HasSubstr("WEFT_PROGRESS_TIMEOUT is \"soon?\""));
  EXPECT_THAT(refusal({{"WEFT_PROGRESS_TIMEOUT", "-1s"}}), HasSubstr("WEFT_PROGRESS_TIMEOUT"));
  EXPECT_THAT(refusal({{"WEFT_READY_TIMEOUT", "later"}}),
              HasSubstr("WEFT_READY_TIMEOUT is \"later\""));
  EXPECT_THAT(refusal({{"WEFT_JOIN_TIMEOUT", "0s"}}), HasSubstr("WEFT_JOIN_TIMEOUT"));
  EXPECT_THAT(refusal({{"WEFT_JOIN_TIMEOUT", "9000000s"}}), HasSubstr("WEFT_JOIN_TIMEOUT"));
  EXPECT_THAT(refusal({{"WEFT_PLAN", "no_such_plan"}}), HasSubstr("WEFT_PLAN"));
  EXPECT_THAT(refusal({{"WEFT_COSTS", "/no/such/file"}}), HasSubstr("WEFT_COSTS"));
  EXPECT_THAT(refusal({{"WEFT_COSTS", "/proc/version"}}), HasSubstr("not a file of costs"));
  EXPECT_THAT(refusal({{"WEFT_TRACE", "/proc/weft"}}), HasSubstr("/proc/weft"));
  for (const char* words : {"lab", "[]", "7", "{\"hosts\": 2}", "[[[[", "{\"a\": {}}"})
    EXPECT_THAT(refusal({{"WEFT_TRACE", new_folder("lab")}, {"WEFT_LAB", words}}),
                HasSubstr("WEFT_LAB is \"" + std::string(words) + "\""));
  EXPECT_THAT(refusal({{"WEFT_RANK", "3"}, {"WEFT_SIZE", "3"}}), HasSubstr("WEFT_RANK"));
  EXPECT_THAT(refusal({{"WEFT_RANK", "0"}}), HasSubstr("WEFT_SIZE"));
}

TEST(Join, a_given_secret_that_is_too_short_is_refused) {
  JoinOptions options;
  options.environment = environment({});
  options.membership.emplace();
  for (const char* secret :
       {"", "secret", "0011223344556677", "no hexadecimal digits, but 32 long"}) {
    options.membership->secret = secret;
    auto job = join(options);
    ASSERT_FALSE(job.ok()) << secret;
    EXPECT_THAT(job.error().message(), HasSubstr("hexadecimal digits, 32 at least"));
  }
}

TEST(Join, options_win_over_the_environment) {
  JoinOptions options;
  options.environment = environment({{"WEFT_PLAN", "no_such_plan"},
                                     {"WEFT_TRACE", "/proc/weft"},
                                     {"WEFT_SHARED_MEMORY", "maybe"},
                                     {"WEFT_JOIN_TIMEOUT", "soon"},
                                     {"WEFT_PROGRESS_TIMEOUT", "soon"},
                                     {"WEFT_RANK", "none"}});
  options.membership.emplace();
  options.membership->secret = membership::new_secret();
  options.plan = plan::preset("horovod").value();
  options.trace = "";
  options.shared_memory = true;
  options.join_timeout = Nanos::from_seconds(5);
  options.progress_timeout = Nanos::from_seconds(5);
  auto job = join(options);
  ASSERT_TRUE(job.ok()) << job.error().message();
  EXPECT_EQ((*job)->plan().name, "horovod");
  options.progress_timeout = Nanos{0};
  EXPECT_FALSE(join(options).ok());
}

TEST(Join, records_a_file_a_rank_with_the_tensors_of_the_exchange) {
  const std::string outer = new_folder("trace"), folder = outer + "/made/on/demand";
  run_ranks(2, {{"WEFT_TRACE", folder}}, [](std::unique_ptr<Job>& job) -> Result<void> {
    std::vector<float> first(10, 1), second(2000, 2);
    WEFT_ASSIGN(auto exchange, job->exchange({{"first", first, 0}, {"second", second, 2}}));
    WEFT_TRY(exchange->ready(1, 0));
    WEFT_TRY(exchange->ready(0, 0));
    WEFT_TRY(exchange->wait_all(0));
    EXPECT_EQ(first, std::vector<float>(10, 2));
    EXPECT_EQ(second, std::vector<float>(2000, 4));
    WEFT_TRY(job->leave());
    exchange.reset();
    job.reset();
    return {};
  });
  for (uint32_t rank = 0; rank < 2; ++rank) {
    auto file = trace::read_process(folder + "/" + trace::file_name(rank));
    ASSERT_TRUE(file.ok()) << file.error().message();
    const trace::Process* process = &file->process;
    EXPECT_EQ(process->environment.rank, rank);
    EXPECT_EQ(process->environment.ranks, 2u);
    EXPECT_EQ(process->environment.plan_name, "default");
    ASSERT_EQ(process->model.tensors.size(), 2u);
    EXPECT_EQ(process->model.tensors[1].name, "second");
    EXPECT_EQ(process->model.tensors[1].bytes, 8000u);
    EXPECT_EQ(process->model.layers.size(), 3u);
    EXPECT_FALSE(process->events.empty());
  }
  std::filesystem::remove_all(outer);
}

TEST(Job, refuses_a_layer_that_a_trace_cannot_name) {
  JoinOptions options;
  options.environment = environment({});
  auto job = join(options);
  ASSERT_TRUE(job.ok());
  std::vector<float> data(3);
  auto exchange = (*job)->exchange({{"far", data, 70000}});
  ASSERT_FALSE(exchange.ok());
  EXPECT_THAT(exchange.error().message(), HasSubstr("layer 70000"));
}

TEST(Job, a_rank_that_does_not_come_is_named_after_the_progress_timeout) {
  run_ranks(2, {{"WEFT_PROGRESS_TIMEOUT", "300ms"}}, [](std::unique_ptr<Job>& job) -> Result<void> {
    if (job->group().rank().index == 0) {
      auto done = expect_sum(job->group());
      EXPECT_FALSE(done.ok());
      if (!done) {
        EXPECT_EQ(done.error().code(), Code::timeout) << done.error().message();
      }
    } else {
      // The failure reaches this rank too, which does nothing but look.
      while (!job->group().failure()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(job->group().culprit(), Rank{1});
    return {};
  });
}

TEST(Job, a_rank_that_never_has_a_gradient_is_named_after_the_ready_timeout) {
  run_ranks(2, {{"WEFT_READY_TIMEOUT", "300ms"}}, [](std::unique_ptr<Job>& job) -> Result<void> {
    std::vector<float> data(10);
    WEFT_ASSIGN(auto exchange, job->exchange({{"only", data, 0}}));
    if (job->group().rank().index == 0) {
      WEFT_TRY(exchange->ready(0, 0));
      auto done = exchange->wait(0, 0);
      EXPECT_FALSE(done.ok());
      if (!done) {
        EXPECT_EQ(done.error().code(), Code::timeout) << done.error().message();
      }
    } else {
      while (!job->group().failure()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(job->group().culprit(), Rank{1});
    return {};
  });
}

TEST(Job, goes_on_with_the_survivors) {
  std::latch both(2);
  run_ranks(3, {}, [&](std::unique_ptr<Job>& job) -> Result<void> {
    WEFT_TRY(expect_sum(job->group()));
    if (job->group().rank().index == 2) {
      job.reset();  // without a word
      return {};
    }
    while (expect_sum(job->group())) continue;
    EXPECT_EQ(job->group().culprit(), Rank{2});
    both.arrive_and_wait();
    WEFT_ASSIGN(auto smaller, job->rebuild());
    EXPECT_EQ(smaller->group().ranks(), 2u);
    EXPECT_EQ(smaller->membership().size, 2u);
    EXPECT_EQ(&smaller->recorder(), &job->recorder());
    job.reset();  // neither needs the other
    WEFT_TRY(expect_sum(smaller->group()));
    return smaller->leave();
  });
}

TEST(Job, is_not_rebuilt_without_a_failure) {
  JoinOptions options;
  options.environment = environment({});
  auto job = join(options);
  ASSERT_TRUE(job.ok());
  auto again = (*job)->rebuild();
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.error().code(), Code::invalid_argument);
}

}  // namespace
}  // namespace weft::api
