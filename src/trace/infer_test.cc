#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "weft/trace.h"

namespace weft::trace {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Events one after the other, 10 ns each.
class Script {
 public:
  Script() {
    process_.model.layers = {{"a"}, {"b"}};
    process_.tracks.push_back({TrackType::thread, "t", kNone16, kNone16});
  }

  Event& add(Kind kind, uint16_t layer = kNone16, Shape shape = Shape::span) {
    Event event;
    event.start_ns = now_;
    event.duration_ns = shape == Shape::span ? 5 : 0;
    event.kind = kind;
    event.layer = layer;
    event.shape = shape;
    now_ += 10;
    process_.events.push_back(event);
    return process_.events.back();
  }
  void call(uint64_t bytes, Kind kind = Kind::operation) {
    Event& event = add(kind);
    event.operation = (1u << 31) + calls_++;
    event.bytes = bytes;
  }
  void ready(uint32_t step) { add(Kind::gradient_ready, 0, Shape::instant).iteration = step; }

  std::vector<std::string> infer() {
    Trace trace;
    trace.processes.push_back(process_);
    auto out = infer_iterations(trace);
    process_ = trace.processes[0];
    return out;
  }
  std::vector<uint32_t> iterations_of(Kind kind) const {
    std::vector<uint32_t> out;
    for (const Event& event : process_.events)
      if (event.kind == kind) out.push_back(event.iteration);
    return out;
  }
  std::vector<int64_t> lengths() const {
    std::vector<int64_t> out;
    for (const Event& event : process_.events)
      if (event.kind == Kind::iteration) out.push_back(event.duration_ns);
    return out;
  }

 private:
  Process process_;
  int64_t now_ = 1000;
  uint32_t calls_ = 0;
};

TEST(Infer, a_step_begins_with_the_first_layers_forward) {
  Script script;
  for (int step = 0; step < 3; ++step) {
    script.add(Kind::forward, 0);
    script.add(Kind::forward, 1);
    script.add(Kind::backward, 1);
    script.add(Kind::backward, 0);
    script.add(Kind::update);
  }
  EXPECT_THAT(script.infer(), ElementsAre(HasSubstr("begins with the forward of \"a\"")));
  EXPECT_THAT(script.iterations_of(Kind::forward), ElementsAre(0, 0, 1, 1, 2, 2));
  EXPECT_THAT(script.iterations_of(Kind::update), ElementsAre(0, 1, 2));
  EXPECT_THAT(script.iterations_of(Kind::iteration), ElementsAre(0, 1));
  EXPECT_THAT(script.lengths(), ElementsAre(50, 50));
}

TEST(Infer, an_accumulated_step_is_one) {
  Script script;
  for (uint32_t step = 4; step < 7; ++step) {
    for (int part = 0; part < 2; ++part) {
      script.add(Kind::forward, 0);
      script.add(Kind::backward, 0);
    }
    script.ready(step);
  }
  ASSERT_EQ(script.infer().size(), 1u);
  // The numbers are the exchange's.
  EXPECT_THAT(script.iterations_of(Kind::forward), ElementsAre(4, 4, 5, 5, 6, 6));
  EXPECT_THAT(script.iterations_of(Kind::iteration), ElementsAre(4, 5));
}

TEST(Infer, an_update_in_the_next_step_is_of_the_one_before) {
  Script script;
  for (uint32_t step = 0; step < 3; ++step) {
    for (uint16_t layer : {uint16_t{0}, uint16_t{1}}) {
      if (step > 0) script.add(Kind::update, layer);
      script.add(Kind::forward, layer);
    }
    for (uint16_t layer : {uint16_t{1}, uint16_t{0}}) script.add(Kind::backward, layer);
    script.ready(step);
  }
  ASSERT_EQ(script.infer().size(), 1u);
  EXPECT_THAT(script.iterations_of(Kind::update), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(script.iterations_of(Kind::forward), ElementsAre(0, 0, 1, 1, 2, 2));
}

TEST(Infer, processor_time_goes_with_its_span) {
  Script script;
  for (int step = 0; step < 3; ++step) {
    Event& forward = script.add(Kind::forward, 0);
    Event used = processor_time_of(forward, 3);
    script.add(Kind::processor_time, 0, Shape::counter) = used;
    script.add(Kind::backward, 0);
  }
  script.infer();
  EXPECT_THAT(script.iterations_of(Kind::processor_time), ElementsAre(0, 1, 2));
}

TEST(Infer, what_was_marked_stays) {
  Script script;
  for (uint32_t step = 0; step < 3; ++step) script.add(Kind::forward, 0).iteration = step + 7;
  EXPECT_TRUE(script.infer().empty());
  EXPECT_THAT(script.iterations_of(Kind::forward), ElementsAre(7, 8, 9));
  EXPECT_TRUE(script.lengths().empty());
}

TEST(Infer, without_compute_the_steps_of_the_exchange_count) {
  Script script;
  for (uint32_t step = 0; step < 4; ++step)
    for (int tensor = 0; tensor < 3; ++tensor) script.ready(step);
  EXPECT_THAT(script.infer(), ElementsAre(HasSubstr("first gradient of a step")));
  EXPECT_THAT(script.lengths(), ElementsAre(30, 30, 30));
}

TEST(Infer, operations_repeat_after_a_beginning) {
  Script script;
  script.call(1, Kind::broadcast);
  script.call(2, Kind::broadcast);
  for (int step = 0; step < 4; ++step)
    for (uint64_t bytes : {100, 200, 100, 300}) script.call(bytes);
  EXPECT_THAT(script.infer(), ElementsAre(HasSubstr("4 operations repeat")));
  EXPECT_THAT(script.lengths(), ElementsAre(40, 40, 40));
  EXPECT_THAT(script.iterations_of(Kind::broadcast), ElementsAre(kNone, kNone));
  EXPECT_THAT(script.iterations_of(Kind::operation),
              ElementsAre(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
}

TEST(Infer, what_does_not_repeat_has_no_iterations) {
  Script script;
  for (uint64_t bytes : {1, 2, 3, 4, 5, 6, 7, 8, 1, 2}) script.call(bytes);
  EXPECT_TRUE(script.infer().empty());
  EXPECT_TRUE(script.lengths().empty());
  Script nothing;
  EXPECT_TRUE(nothing.infer().empty());
}

}  // namespace
}  // namespace weft::trace
