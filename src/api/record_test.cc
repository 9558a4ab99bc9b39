// What a run leaves in its trace: what the program marked, and what the runtime recorded itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "testing.h"
#include "weft/api.h"

namespace weft::api {
namespace {

using ::testing::HasSubstr;
using trace::Event;
using trace::Kind;
using trace::kNone;

constexpr uint32_t kLayers = 3, kElements = 20'000;
constexpr uint64_t kSteps = 4;

// A program that marks what it does, and trains.
Result<void> train(Job& job, std::vector<std::vector<float>>& data) {
  mark::Marks& marks = job.marks();
  std::vector<Tensor> tensors;
  for (uint32_t l = 0; l < kLayers; ++l) tensors.emplace_back(text("w%u", l), data[l], l);
  WEFT_ASSIGN(auto exchange, job.exchange(std::move(tensors)));
  for (uint64_t step = 0; step < kSteps; ++step) {
    WEFT_TRY(marks.begin_iteration(step));
    marks.data_loading().end();
    for (uint32_t l = 0; l < kLayers; ++l) marks.forward(l).end();
    for (uint32_t l = kLayers; l-- > 0;) {
      {
        auto span = marks.backward(l);
        std::fill(data[l].begin(), data[l].end(), 1.0f);
      }
      WEFT_TRY(exchange->ready(l, step));
    }
    WEFT_TRY(exchange->wait_all(step));
    marks.update().end();
  }
  WEFT_TRY(marks.end_iteration());
  return {};
}

class Record : public ::testing::Test {
 protected:
  Record() : folder_(new_folder("record")) {}
  ~Record() override { std::filesystem::remove_all(folder_); }

  trace::Trace run(uint32_t ranks, const std::function<Result<void>(Job&)>& body) {
    run_ranks(ranks, {{"WEFT_TRACE", folder_}, {"WEFT_SHARED_MEMORY", "0"}},
              [&](std::unique_ptr<Job>& job) -> Result<void> {
                WEFT_TRY(body(*job));
                WEFT_TRY(job->leave());
                return job->recorder().stop();
              });
    auto trace = trace::read(folder_);
    EXPECT_TRUE(trace.ok()) << trace.error().message();
    EXPECT_EQ(trace->processes.size(), ranks);
    return std::move(*trace);
  }

  static size_t count(const trace::Process& process, Kind kind) {
    return static_cast<size_t>(std::count_if(process.events.begin(), process.events.end(),
                                             [&](const Event& e) { return e.kind == kind; }));
  }

  std::string folder_;
};

TEST_F(Record, marks_and_the_runtimes_own_records_stand_in_one_trace) {
  trace::Trace trace = run(2, [](Job& job) -> Result<void> {
    std::vector<std::vector<float>> data(kLayers, std::vector<float>(kElements));
    return train(job, data);
  });
  for (const trace::Process& process : trace.processes) {
    EXPECT_EQ(count(process, Kind::iteration), kSteps);
    EXPECT_EQ(count(process, Kind::forward), kSteps * kLayers);
    EXPECT_EQ(count(process, Kind::backward), kSteps * kLayers);
    EXPECT_EQ(count(process, Kind::update), kSteps);
    EXPECT_EQ(count(process, Kind::data_loading), kSteps);
    EXPECT_EQ(count(process, Kind::gradient_ready), kSteps * kLayers);
    EXPECT_EQ(count(process, Kind::tensor_done), kSteps * kLayers);
    EXPECT_EQ(count(process, Kind::processor_time), kSteps * (2 * kLayers + 1));
    EXPECT_GT(count(process, Kind::reduce), 0u);
    EXPECT_GT(count(process, Kind::control), 0u);
    EXPECT_EQ(process.dropped, 0u);
    ASSERT_EQ(process.model.layers.size(), kLayers);
    std::set<std::pair<uint32_t, uint32_t>> waited;  // tensor, step
    for (const Event& event : process.events) {
      if (event.kind != Kind::wait || event.tensor == kNone) continue;
      waited.emplace(event.tensor, event.iteration);
      EXPECT_EQ(event.layer, event.tensor);
      EXPECT_EQ(process.tracks[event.track].type, trace::TrackType::thread);
    }
    EXPECT_EQ(waited.size(), kSteps * kLayers);
  }
}

TEST_F(Record, what_a_program_calls_has_a_name_and_its_waits_are_known) {
  trace::Trace trace = run(2, [](Job& job) -> Result<void> {
    std::vector<float> data(10'000, 1);
    WEFT_TRY(job.group().all_reduce(data));
    WEFT_TRY(job.group().broadcast(data, {0}));
    WEFT_TRY(job.group().barrier());
    Call call;
    call.output = data.data();
    call.count = data.size();
    WEFT_ASSIGN(Work work, job.group().start(call));
    return work.wait();
  });
  size_t waits = 0;
  for (const trace::Process& process : trace.processes) {
    std::set<uint32_t> operations;
    std::multiset<std::string> names;
    for (const Event& event : process.events) {
      if (event.shape != trace::Shape::span || event.operation == kNone) continue;
      if (event.kind == Kind::operation || event.kind == Kind::broadcast ||
          event.kind == Kind::barrier) {
        operations.insert(event.operation);
        names.insert(process.label(event));
      }
    }
    EXPECT_EQ(names.count("all_reduce"), 2u);
    EXPECT_EQ(names.count("broadcast"), 1u);
    EXPECT_EQ(names.count("barrier"), 1u);
    EXPECT_EQ(count(process, Kind::broadcast), 1u);
    EXPECT_EQ(count(process, Kind::barrier), 1u);
    for (const Event& event : process.events)
      if (event.kind == Kind::wait) {
        ++waits;
        EXPECT_TRUE(operations.contains(event.operation));
      }
  }
  // What is done at once has no wait; but whoever comes first has to.
  EXPECT_GE(waits, 1u);
}

TEST_F(Record, layers_have_the_names_that_the_program_gave_them) {
  trace::Trace trace = run(2, [](Job& job) -> Result<void> {
    trace::Model model;
    model.name = "mine";
    for (const char* name : {"in", "middle", "out", "loss"}) model.layers.push_back({name});
    WEFT_TRY(job.marks().model(model));
    std::vector<float> data(100, 1);
    std::vector<Tensor> tensors;
    tensors.emplace_back("w", data, 2);
    WEFT_ASSIGN(auto exchange, job.exchange(tensors));
    job.marks().forward(3).end();  // one without tensors
    WEFT_TRY(exchange->ready(0, 0));
    return exchange->wait(0, 0);
  });
  const trace::Model& model = trace.processes[0].model;
  EXPECT_EQ(model.name, "mine");
  ASSERT_EQ(model.layers.size(), 4u);
  EXPECT_EQ(model.layers[3].name, "loss");
  ASSERT_EQ(model.tensors.size(), 1u);
  EXPECT_EQ(model.tensors[0].produced_by, 2u);
}

TEST_F(Record, an_exchange_that_the_model_does_not_know_is_refused) {
  run(2, [](Job& job) -> Result<void> {
    trace::Model model;
    model.layers = {{"a"}};
    model.tensors = {{"other", 400, 0, 0, 0}};
    WEFT_TRY(job.marks().model(model));
    std::vector<float> data(100);
    std::vector<Tensor> tensors;
    tensors.emplace_back("w", data, 0);
    auto exchange = job.exchange(tensors);
    EXPECT_FALSE(exchange.ok());
    if (!exchange) {
      EXPECT_THAT(exchange.error().message(), HasSubstr("other tensors"));
    }
    tensors.clear();
    tensors.emplace_back("w", data, 1);
    exchange = job.exchange(tensors);
    EXPECT_FALSE(exchange.ok());
    if (!exchange) {
      EXPECT_THAT(exchange.error().message(), HasSubstr("the model has 1"));
    }
    return {};
  });
}

TEST_F(Record, marks_that_make_no_sense_are_told_in_the_trace) {
  trace::Trace trace = run(1, [](Job& job) -> Result<void> {
    job.marks().forward(0).end();
    return {};
  });
  const auto& notes = trace.processes[0].notes;
  EXPECT_TRUE(std::any_of(notes.begin(), notes.end(), [](const trace::Note& note) {
    return note.key == trace::kMarksRefused && note.value.starts_with("1; the first: forward");
  }));
}

}  // namespace
}  // namespace weft::api
