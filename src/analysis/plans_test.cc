// A run whose plan changed is read as several.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "weft/analysis.h"

namespace weft::analysis {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

plan::Plan named(const std::string& name, uint32_t lanes) {
  plan::Plan plan;
  plan.name = name;
  plan.lanes = lanes;
  return plan;
}

trace::Note change(int64_t at_ns, uint32_t step, const plan::Plan& plan) {
  return {at_ns, "plan", text("%u\n", step) + plan::canonical(plan)};
}

// Steps of 1000 ns with a gradient, its sum, and a call of the program that says no step. The plan
// changes before steps 3 and 5; each rank has a clock of its own.
trace::Trace run_of(uint32_t ranks, uint32_t steps) {
  trace::Trace trace;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    trace::Process process;
    const int64_t zero = int64_t{rank} * 1'000'000;
    const plan::Plan first = named("first", 1);
    process.environment.rank = rank;
    process.environment.ranks = ranks;
    process.environment.plan_name = first.name;
    process.environment.plan_hash = plan::hash(first);
    process.environment.plan_text = plan::canonical(first);
    for (uint32_t step = 0; step < steps; ++step) {
      trace::Event event;
      event.shape = trace::Shape::instant;
      event.iteration = step;
      event.tensor = 0;
      for (trace::Kind kind : {trace::Kind::gradient_ready, trace::Kind::tensor_done}) {
        event.kind = kind;
        event.start_ns = zero + step * 1000 + (kind == trace::Kind::tensor_done ? 500 : 100);
        process.events.push_back(event);
      }
      trace::Event call;
      call.kind = trace::Kind::operation;
      call.start_ns = zero + step * 1000 + 600;
      call.operation = 0x80000000u + step;
      process.events.push_back(call);
    }
    process.notes.push_back(change(zero + 3000, 3, named("second", 2)));
    process.notes.push_back({zero + 3500, "another", "note"});
    process.notes.push_back(change(zero + 5000, 5, named("third", 3)));
    trace.processes.push_back(std::move(process));
  }
  return trace;
}

std::vector<uint32_t> steps_of(const trace::Process& process) {
  std::vector<uint32_t> out;
  for (const trace::Event& event : process.events)
    if (event.kind == trace::Kind::tensor_done) out.push_back(event.iteration);
  return out;
}

std::vector<uint32_t> calls_of(const trace::Process& process) {
  std::vector<uint32_t> out;
  for (const trace::Event& event : process.events)
    if (event.kind == trace::Kind::operation) out.push_back(event.operation - 0x80000000u);
  return out;
}

TEST(Plans, the_last_plan_is_taken_or_the_one_that_is_named_and_said) {
  struct Case {
    const char *which, *name, *said;
    std::vector<uint32_t> steps;
  };
  const std::string hash = plan::hash(named("second", 2));
  for (const Case& one :
       {Case{"", "third", "the steps from 5 on, under plan \"third\"", {5, 6}},
        Case{"first", "first", "the steps 0 to 2, under plan \"first\"", {0, 1, 2}},
        Case{hash.c_str(), "second", "the steps 3 to 4, under plan \"second\"", {3, 4}}}) {
    SCOPED_TRACE(one.which);
    trace::Trace trace = run_of(2, 7);
    auto said = keep_one_plan(trace, one.which);
    ASSERT_TRUE(said.ok()) << said.error().message();
    EXPECT_THAT(*said, ElementsAre(HasSubstr(one.said)));
    for (const trace::Process& process : trace.processes) {
      EXPECT_EQ(steps_of(process), one.steps);
      EXPECT_EQ(calls_of(process), one.steps);
      EXPECT_EQ(process.environment.plan_name, one.name);
      EXPECT_EQ(plan::parse(process.environment.plan_text)->name, one.name);
      ASSERT_EQ(process.notes.size(), 1u);
      EXPECT_EQ(process.notes[0].key, "another");
    }
    // What is left has one plan.
    auto again = keep_one_plan(trace);
    ASSERT_TRUE(again.ok());
    EXPECT_TRUE(again->empty());
  }
}

TEST(Plans, one_under_which_nothing_moved_is_passed_over_unless_it_is_named) {
  trace::Trace trace = run_of(2, 5);  // ends where the last one begins
  auto said = keep_one_plan(trace);
  ASSERT_TRUE(said.ok());
  EXPECT_THAT(*said, ElementsAre(HasSubstr("under plan \"second\"")));
  trace = run_of(2, 5);
  ASSERT_TRUE(keep_one_plan(trace, "third").ok());
  EXPECT_TRUE(steps_of(trace.processes[0]).empty());
}

TEST(Plans, a_name_that_none_has_is_refused_with_those_there_were) {
  trace::Trace trace = run_of(2, 7);
  auto said = keep_one_plan(trace, "fourth");
  ASSERT_FALSE(said.ok());
  EXPECT_EQ(said.error().code(), Code::not_found);
  for (const char* name : {"\"fourth\"", "\"first\"", "\"second\"", "\"third\""})
    EXPECT_THAT(said.error().message(), HasSubstr(name));
  EXPECT_EQ(steps_of(trace.processes[0]).size(), 7u);
}

TEST(Plans, a_rank_whose_file_ends_early_is_cut_by_its_steps) {
  trace::Trace trace = run_of(3, 7);
  trace.processes[1].notes.clear();
  ASSERT_TRUE(keep_one_plan(trace, "second").ok());
  EXPECT_THAT(steps_of(trace.processes[1]), ElementsAre(3u, 4u));
  EXPECT_EQ(trace.processes[1].environment.plan_name, "second");
}

TEST(Plans, ranks_that_say_different_plans_or_nonsense_are_refused) {
  trace::Trace trace = run_of(2, 7);
  trace.processes[1].notes[0] = change(0, 3, named("second", 9));
  auto said = keep_one_plan(trace);
  ASSERT_FALSE(said.ok());
  EXPECT_THAT(said.error().message(), HasSubstr("rank 1 changed to other plans"));
  for (const char* words : {"", "3", "x\n{}", "3\n{}", "99999999999\n{}", "3\nnot a plan"}) {
    trace = run_of(2, 7);
    trace.processes[1].notes[0].value = words;
    EXPECT_FALSE(keep_one_plan(trace).ok()) << words;
  }
  trace = run_of(1, 7);
  std::swap(trace.processes[0].notes[0], trace.processes[0].notes[2]);
  said = keep_one_plan(trace);
  ASSERT_FALSE(said.ok());
  EXPECT_THAT(said.error().message(), HasSubstr("before step 3 after step 5"));
}

}  // namespace
}  // namespace weft::analysis
