// What a run's own messages say: made-up runs whose truth is known.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "weft/cost.h"

namespace weft::cost {
namespace {

using trace::Event;
using trace::Kind;
using trace::Shape;

trace::Process process_of(uint32_t rank) {
  trace::Process process;
  process.environment.rank = rank;
  process.environment.host_index = rank;
  process.environment.ranks = 2;
  process.environment.cores = 8;
  return process;
}

Event event_of(Kind kind, Shape shape, int64_t start, int64_t duration, uint32_t iteration) {
  Event event;
  event.kind = kind;
  event.shape = shape;
  event.start_ns = start;
  event.duration_ns = duration;
  event.iteration = iteration;
  return event;
}

// Rank 0 hands `count` chunks to one lane, which carries `bytes_per_ns` and always has three.
trace::Trace busy_lane(size_t count, double bytes_per_ns, uint64_t bytes = 20'000,
                       uint16_t lane = 0) {
  trace::Trace trace;
  trace.processes = {process_of(0), process_of(1)};
  const double each = static_cast<double>(bytes + kHeaderBytes) / bytes_per_ns;
  for (size_t i = 0; i < count; ++i) {
    const double arrival = 1e6 + static_cast<double>(i + 1) * each;
    for (Shape shape : {Shape::send, Shape::receive}) {
      double start = shape == Shape::send ? std::max(0.0, arrival - 3 * each) : arrival;
      Event event = event_of(Kind::chunk, shape, static_cast<int64_t>(start), 0, 3);
      event.message = (uint64_t{lane} << 32) + i + 1;
      event.bytes = bytes;
      event.lane = lane;
      trace.processes[shape == Shape::send ? 0 : 1].events.push_back(event);
    }
  }
  return trace;
}

TEST(Messages, a_busy_lane_tells_its_rate) {
  Costs costs = fit(busy_lane(200, 0.0155));
  ASSERT_TRUE(costs.lane_bytes_per_s.has_value());
  EXPECT_NEAR(costs.lane_bytes_per_s->value, 15.5e6, 0.02e6);
  EXPECT_EQ(costs.lanes, 1u);
  EXPECT_FALSE(costs.link_bytes_per_s.has_value()) << "one lane does not know the link";
}

TEST(Messages, a_lane_that_waited_tells_nothing) {
  trace::Trace trace = busy_lane(200, 0.0155);
  // Each chunk is handed over only when the one before has arrived.
  for (size_t i = 1; i < 200; ++i)
    trace.processes[0].events[i].start_ns = trace.processes[1].events[i - 1].start_ns;
  EXPECT_FALSE(fit(trace).lane_bytes_per_s.has_value());
  EXPECT_FALSE(fit(busy_lane(10, 0.0155)).lane_bytes_per_s.has_value()) << "too few to tell";
}

TEST(Messages, a_lane_far_slower_than_the_others_of_its_rank_is_no_cap) {
  auto run = [](double slow, size_t chunks) {
    trace::Trace trace = busy_lane(200, 0.0155);
    for (uint16_t lane = 1; lane < 4; ++lane) {
      trace::Trace more =
          lane == 2 ? busy_lane(chunks, slow, 20'000, lane) : busy_lane(200, 0.0155, 20'000, lane);
      for (size_t p : {0, 1})
        trace.processes[p].events.insert(trace.processes[p].events.end(),
                                         more.processes[p].events.begin(),
                                         more.processes[p].events.end());
    }
    return fit(trace);
  };
  Costs costs = run(0.002, 25);
  ASSERT_EQ(costs.slow_lanes.size(), 1u);
  const Costs::SlowLane& slow = costs.slow_lanes[0];
  EXPECT_EQ(std::tuple(slow.from, slow.to, slow.lane), std::tuple(0u, 1u, 2));
  EXPECT_NEAR(slow.bytes_per_s.value, 2e6, 0.02e6);
  EXPECT_NEAR(slow.others_bytes_per_s, 15.5e6, 0.2e6);
  EXPECT_NEAR(costs.lane_bytes_per_s->low, 15.5e6, 0.2e6) << "the slow one does not count";
  EXPECT_THAT(run(0.011, 200).slow_lanes, testing::IsEmpty()) << "a little slower";
  EXPECT_THAT(run(0.002, 5).slow_lanes, testing::IsEmpty()) << "too few to tell";
}

void add_probe(trace::Trace& trace, uint16_t flows, double bytes_per_s) {
  trace::ProbeResult result;
  result.scope = trace::ProbeScope::ring;
  result.flows = flows;
  result.chunk_bytes = 20'000;
  result.duration_ns = 10'000'000;
  result.bytes = static_cast<uint64_t>(bytes_per_s * 0.01);
  trace.processes[0].probe.push_back(result);
}

TEST(Messages, the_run_overrules_the_probe_where_the_link_was_not_full) {
  trace::Trace trace = busy_lane(200, 0.0155);
  auto probe = [&](uint16_t flows, double rate) { add_probe(trace, flows, rate); };
  probe(1, 17e6);
  probe(2, 34e6);
  probe(8, 78e6);
  probe(16, 77e6);
  Costs costs = fit(trace);
  EXPECT_NEAR(costs.flow_bytes_per_s->value, 15.5e6, 0.02e6);
  EXPECT_NEAR(costs.link_bytes_per_s->value, 77.5e6, 0.1e6);
  // A receiver that was held up: more than in proportion is not believed.
  probe(32, 900e6);
  EXPECT_NEAR(fit(trace).link_bytes_per_s->value, 77.5e6, 0.1e6);
}

TEST(Messages, a_run_that_carried_more_than_its_probe_overrules_it) {
  trace::Trace trace = busy_lane(20'000, 0.0625);  // for 6 s
  for (int flows : {1, 2, 8}) add_probe(trace, static_cast<uint16_t>(flows), 40e6);
  EXPECT_NEAR(fit(trace).link_bytes_per_s->value, 62.5e6, 0.5e6);
  // Not by a little, nor for a moment.
  trace::Trace close = busy_lane(20'000, 0.042);
  trace::Trace brief = busy_lane(500, 0.0625);
  for (trace::Trace* one : {&close, &brief}) {
    for (int flows : {1, 2, 8}) add_probe(*one, static_cast<uint16_t>(flows), 40e6);
    EXPECT_NEAR(fit(*one).link_bytes_per_s->value, 40e6, 0.1e6);
  }
}

// At 1 Gb/s a chunk of 512 KiB over one of eight lanes is under way for 34 ms, and a stretch of 50
// ms holds twelve ends of chunks, or thirteen, or sixteen: that is no rate.
TEST(Messages, large_chunks_do_not_count_whole_where_they_end) {
  trace::Trace trace;
  trace.processes = {process_of(0), process_of(1)};
  for (uint16_t lane = 0; lane < 8; ++lane) {
    trace::Trace one = busy_lane(800, 0.124 / 8, 512u << 10, lane);
    for (int rank = 0; rank < 2; ++rank)
      trace.processes[rank].events.insert(trace.processes[rank].events.end(),
                                          one.processes[rank].events.begin(),
                                          one.processes[rank].events.end());
  }
  for (int flows : {1, 2, 8}) add_probe(trace, static_cast<uint16_t>(flows), 124e6);
  Costs costs = fit(trace);
  EXPECT_NEAR(costs.link_bytes_per_s->value, 124e6, 0.1e6);
  EXPECT_FALSE(costs.probed_link_bytes_per_s);
  // The same lanes show that a probe which found half of that was wrong.
  for (trace::ProbeResult& result : trace.processes[0].probe) result.bytes /= 2;
  costs = fit(trace);
  ASSERT_TRUE(costs.probed_link_bytes_per_s);
  EXPECT_NEAR(costs.probed_link_bytes_per_s->value, 62e6, 0.1e6);
  EXPECT_GT(costs.link_bytes_per_s->value, 0.85 * 124e6);
  EXPECT_LE(costs.link_bytes_per_s->value, 124.1e6) << "never more than there was";
  auto without = without_corrections(costs);
  ASSERT_EQ(without.size(), 1u);
  EXPECT_NEAR(without[0].link_bytes_per_s->value, 62e6, 0.1e6);
  EXPECT_FALSE(without[0].probed_link_bytes_per_s);
}

TEST(Messages, what_stays_inside_a_host_says_nothing_about_its_link) {
  trace::Trace trace = busy_lane(20'000, 0.0625);
  for (int flows : {1, 2, 8}) add_probe(trace, static_cast<uint16_t>(flows), 40e6);
  trace.processes.push_back(process_of(2));  // elsewhere
  trace.processes[1].environment.host_index = 0;
  EXPECT_NEAR(fit(trace).link_bytes_per_s->value, 40e6, 0.1e6);
}

// Lanes of two senders that meet at one receiver fill its link, though neither fills its own.
TEST(Messages, lanes_that_meet_do_not_overrule_the_probe) {
  trace::Trace trace = busy_lane(200, 0.0155);
  for (auto [flows, rate] : {std::pair(1, 20e6), {2, 34e6}, {8, 34e6}})
    add_probe(trace, static_cast<uint16_t>(flows), rate);
  EXPECT_NEAR(fit(trace).flow_bytes_per_s->value, 15.5e6, 0.02e6);
  trace::Trace other = busy_lane(200, 0.0155);
  other.processes[0].environment.rank = 2;
  for (auto& process : other.processes)
    for (Event& event : process.events) event.message += 1000;
  trace.processes.push_back(other.processes[0]);
  auto& received = trace.processes[1].events;
  received.insert(received.end(), other.processes[1].events.begin(),
                  other.processes[1].events.end());
  Costs costs = fit(trace);
  EXPECT_EQ(costs.lanes, 1u);
  EXPECT_EQ(costs.connections, 2u);
  EXPECT_NEAR(costs.flow_bytes_per_s->value, 20e6, 0.1e6);
}

TEST(Messages, delays_are_those_between_the_events) {
  trace::Trace trace;
  trace.processes = {process_of(0), process_of(1)};
  for (uint32_t i = 0; i < 5; ++i) {
    int64_t base = int64_t{i} * 1'000'000'000;
    for (uint32_t r = 0; r < 2; ++r) {
      auto& events = trace.processes[r].events;
      Event backward = event_of(Kind::backward, Shape::span, base, 1'000'000, i);
      backward.layer = 4;
      events.push_back(backward);
      // Rank 1 is later: the report counts from its hand-over.
      int64_t handed = base + 1'040'000 + (r == 1 ? 500'000 : 0);
      if (r == 1) events.back().duration_ns += 500'000;
      Event ready = event_of(Kind::gradient_ready, Shape::instant, handed, 0, i);
      ready.layer = 4;
      ready.tensor = 7;
      ready.bucket = 2;
      events.push_back(ready);
      Event operation =
          event_of(Kind::operation, Shape::span, base + 1'640'000 + r * 25'000, 9'000'000, i);
      operation.operation = i;
      events.push_back(operation);
      Event done = event_of(Kind::tensor_done, Shape::instant, base + 12'000'000, 0, i);
      done.tensor = 7;
      events.push_back(done);
      Event wait = event_of(Kind::wait, Shape::span, base + 2'000'000, 10'030'000, i);
      wait.tensor = 7;
      events.push_back(wait);
    }
    Event admitted = event_of(Kind::admitted, Shape::instant, base + 1'640'000, 0, i);
    admitted.operation = i;
    admitted.bucket = 2;
    admitted.partition = 0;
    trace.processes[0].events.push_back(admitted);
  }
  Costs costs = fit(trace);
  EXPECT_EQ(costs.hand_over_ns->value, 40'000);
  EXPECT_EQ(costs.report_ns->value, 100'000);
  EXPECT_EQ(costs.begin_ns->value, 25'000);
  EXPECT_EQ(costs.wake_up_ns->value, 30'000);
}

TEST(Messages, recorded_facts_are_read_and_bounded) {
  trace::Trace trace = busy_lane(100, 0.1);
  auto& lab = trace.processes[0].environment.lab;
  lab = {{"lab.gso_max_bytes", "32499"},
         {"net.ipv4.tcp_limit_output_bytes", "40000"},
         {"lab.flow_burst_bytes", "9000"},
         {"lab.link_burst_bytes", "39062"}};
  Costs costs = fit(trace);
  EXPECT_EQ(costs.sending.packet_bytes, 32499);
  EXPECT_EQ(costs.sending.queue_bytes, 40000);
  EXPECT_TRUE(costs.sending.shaped);
  EXPECT_EQ(costs.sending.cores, 8u);
  lab = {{"lab.gso_max_bytes", "1"}, {"lab.flow_burst_bytes", "-5"}, {"lab.link_burst_bytes", "x"}};
  costs = fit(trace);
  EXPECT_GE(costs.sending.packet_bytes, 4096);
  EXPECT_EQ(costs.sending.flow_burst_bytes, 0);
  EXPECT_FALSE(costs.sending.shaped);
}

TEST(Messages, all_ranks_of_a_lab_share_its_processors) {
  trace::Trace trace = busy_lane(100, 0.1);
  EXPECT_FALSE(fit(trace).sending.shared_processor);
  trace.processes[0].environment.lab = {{"lab.confinement", "user_namespaces"}};
  EXPECT_TRUE(fit(trace).sending.shared_processor);  // a real program's
  trace.processes[0].environment.lab.clear();
  trace.processes[0].environment.emulated_compute = true;
  EXPECT_TRUE(fit(trace).sending.shared_processor);
}

TEST(Messages, hostile_records_are_survived) {
  Rng rng(7);
  for (int round = 0; round < 200; ++round) {
    trace::Trace trace;
    trace.processes = {process_of(0), process_of(1)};
    for (auto& process : trace.processes)
      for (int i = 0; i < 60; ++i) {
        Event event;
        event.start_ns = static_cast<int64_t>(rng.next() >> 2) * (rng.below(2) == 0 ? 1 : -1);
        event.duration_ns = static_cast<int64_t>(rng.next() >> 2);
        event.message = rng.below(40);
        event.bytes = rng.next();
        event.iteration = static_cast<uint32_t>(rng.below(3));
        event.tensor = static_cast<uint32_t>(rng.next());
        event.operation = static_cast<uint32_t>(rng.below(5));
        event.lane = static_cast<uint16_t>(rng.next());
        event.shape = static_cast<Shape>(1 + rng.below(5));
        event.kind = static_cast<Kind>(rng.below(17));
        if (event.shape != Shape::span) event.duration_ns = 0;
        process.events.push_back(event);
      }
    Costs costs = fit(trace);
    if (costs.lane_bytes_per_s) {
      EXPECT_GE(costs.lane_bytes_per_s->value, 0);
    }
  }
}

}  // namespace
}  // namespace weft::cost
