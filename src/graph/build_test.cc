#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "sample.h"

namespace weft::graph {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;
using trace::Kind;
using trace::Shape;

Graph build_or_fail(const trace::Trace& trace) {
  auto graph = build(trace);
  EXPECT_TRUE(graph.ok()) << graph.error().message();
  return graph.ok() ? std::move(*graph) : Graph();
}

size_t count(const Graph& graph, NodeType type) {
  return static_cast<size_t>(std::count_if(graph.nodes.begin(), graph.nodes.end(),
                                           [&](const Node& node) { return node.type == type; }));
}

template <typename Remove>
trace::Trace without(trace::Trace trace, Remove remove) {
  for (trace::Process& process : trace.processes) std::erase_if(process.events, remove);
  return trace;
}

TEST(Build, has_a_node_for_all_that_happened) {
  Graph graph = build_or_fail(Sample().make());
  EXPECT_EQ(graph.ranks, 2u);
  EXPECT_THAT(graph.remarks, IsEmpty());
  for (NodeType type : {NodeType::forward, NodeType::backward, NodeType::update, NodeType::ready,
                        NodeType::bucket, NodeType::operation, NodeType::done})
    EXPECT_EQ(count(graph, type), 2u * 3 * 3) << name_of(type);
  EXPECT_EQ(count(graph, NodeType::sum), 9u);
  EXPECT_EQ(count(graph, NodeType::admitted), 9u);
  EXPECT_EQ(count(graph, NodeType::send), 2u * 9 * 2);
  EXPECT_EQ(count(graph, NodeType::receive), 2u * 9 * 2);
  EXPECT_TRUE(std::is_sorted(graph.nodes.begin(), graph.nodes.end(),
                             [](const Node& a, const Node& b) { return a.start_ns < b.start_ns; }));
  ASSERT_EQ(graph.operations.size(), 9u);
  EXPECT_EQ(graph.operations[4].number, 4u);
  EXPECT_EQ(graph.operations[4].iteration, 1u);
  EXPECT_EQ(graph.operations[4].bucket, 1u);
  EXPECT_EQ(graph.operations[4].bytes, 1u << 20);
}

TEST(Build, layers_may_compute_in_another_order_than_they_are_named) {
  Sample sample;
  sample.late_before_backward = 4'000;
  const trace::Trace named_in_order = sample.make();
  trace::Trace trace = named_in_order;
  auto other = [](auto layer) {
    return layer == 0 ? decltype(layer){1} : layer == 1 ? decltype(layer){0} : layer;
  };
  for (trace::Process& process : trace.processes) {
    for (trace::Tensor& tensor : process.model.tensors)
      for (uint32_t* layer : {&tensor.produced_by, &tensor.updated_by, &tensor.consumed_by})
        *layer = other(*layer);
    for (trace::Event& event : process.events) event.layer = other(event.layer);
  }
  const Graph expected = build_or_fail(named_in_order), graph = build_or_fail(trace);
  ASSERT_EQ(graph.iterations.size(), expected.iterations.size());
  for (size_t i = 0; i < graph.iterations.size(); ++i)
    for (uint32_t rank = 0; rank < 2; ++rank)
      for (uint32_t layer = 0; layer < 3; ++layer) {
        const LayerTimes& a = expected.iterations[i].layers[rank][layer];
        const LayerTimes& b = graph.iterations[i].layers[rank][other(layer)];
        EXPECT_EQ(b.gap_before_forward_ns, a.gap_before_forward_ns) << i << " " << layer;
        EXPECT_EQ(b.gap_before_backward_ns, a.gap_before_backward_ns) << i << " " << layer;
      }
}

TEST(Build, times_every_layer) {
  Sample sample;
  sample.slower = {0, 7'000};
  sample.late_before_backward = 4'000;
  Graph graph = build_or_fail(sample.make());
  ASSERT_EQ(graph.iterations.size(), 3u);
  EXPECT_EQ(graph.first_counted(), 0u);
  for (uint32_t i = 0; i < 3; ++i) {
    const Iteration& iteration = graph.iterations[i];
    EXPECT_EQ(iteration.number, i);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(iteration.start_ns[rank],
                graph.nodes[find(graph, NodeType::forward, rank, i, 0)].start_ns);
      if (i > 0) {
        EXPECT_EQ(iteration.start_ns[rank], graph.iterations[i - 1].end_ns[rank]);
      }
      for (uint32_t layer = 0; layer < 3; ++layer) {
        const LayerTimes& times = iteration.layers[rank][layer];
        EXPECT_EQ(times.forward_ns, 10'000);
        EXPECT_EQ(times.backward_ns, rank == 0 ? 20'000 : 27'000);
        EXPECT_EQ(times.update_ns, 5'000);
        EXPECT_EQ(times.gap_before_forward_ns, 0);
        EXPECT_EQ(times.gap_before_backward_ns, rank == 0 && layer == 0 ? 4'000 : 0);
      }
    }
  }
}

TEST(Build, knows_how_much_of_a_span_was_processor_time) {
  trace::Trace trace = Sample().make();
  std::vector<trace::Event>& events = trace.processes[1].events;
  for (size_t i = 0, all = events.size(); i < all; ++i) {
    trace::Event span = events[i];
    if (span.kind == Kind::backward && span.layer == 1)
      events.push_back(trace::processor_time_of(span, 12'345));
    if (span.kind == Kind::forward && span.layer == 2) {
      span.start_ns += 1;  // no span starts there
      events.push_back(trace::processor_time_of(span, 1));
    }
  }
  Graph graph = build_or_fail(trace);
  ASSERT_EQ(graph.iterations.size(), 3u);
  for (const Iteration& iteration : graph.iterations)
    for (uint32_t rank = 0; rank < 2; ++rank)
      for (uint32_t layer = 0; layer < 3; ++layer) {
        const LayerTimes& times = iteration.layers[rank][layer];
        EXPECT_EQ(times.backward_cpu_ns, rank == 1 && layer == 1 ? 12'345 : -1);
        EXPECT_EQ(times.forward_cpu_ns, -1);
        EXPECT_EQ(times.update_cpu_ns, -1);
      }
}

TEST(Build, requires_what_any_plan_must_obey) {
  Graph graph = build_or_fail(Sample().make());
  auto at = [&](NodeType type, uint32_t rank, uint32_t iteration, uint32_t subject) {
    return find(graph, type, rank, iteration, subject);
  };
  auto required = [&](uint32_t from, uint32_t to) { return has(graph.required, from, to); };
  for (uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(required(at(NodeType::forward, rank, 1, 0), at(NodeType::forward, rank, 1, 1)));
    EXPECT_TRUE(required(at(NodeType::forward, rank, 1, 2), at(NodeType::backward, rank, 1, 2)));
    EXPECT_TRUE(required(at(NodeType::backward, rank, 1, 2), at(NodeType::backward, rank, 1, 1)));
    EXPECT_TRUE(required(at(NodeType::backward, rank, 1, 0), at(NodeType::forward, rank, 2, 0)));
    for (uint32_t k = 0; k < 3; ++k) {
      EXPECT_TRUE(required(at(NodeType::backward, rank, 1, k), at(NodeType::ready, rank, 1, k)));
      // The sum stands on the rank that was last; both were at once, and the later node counts.
      EXPECT_TRUE(required(at(NodeType::ready, rank, 1, k), at(NodeType::sum, 1, 1, k)));
      EXPECT_TRUE(required(at(NodeType::sum, 1, 1, k), at(NodeType::done, rank, 1, k)));
      EXPECT_TRUE(required(at(NodeType::done, rank, 1, k), at(NodeType::update, rank, 1, k)));
      EXPECT_TRUE(required(at(NodeType::update, rank, 1, k), at(NodeType::forward, rank, 2, k)));
    }
  }
}

TEST(Build, records_the_way_of_a_tensor_through_the_ring) {
  Sample sample;
  sample.ranks = 3;
  Graph graph = build_or_fail(sample.make());
  auto recorded = [&](uint32_t from, uint32_t to) { return has(graph.recorded, from, to); };
  // Operation 4 is bucket 1, tensor 1, of iteration 1.
  uint32_t admitted = find(graph, NodeType::admitted, 0, 1, 4);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    uint32_t bucket = find(graph, NodeType::bucket, rank, 1, 1);
    EXPECT_TRUE(recorded(find(graph, NodeType::ready, rank, 1, 1), bucket));
    EXPECT_TRUE(recorded(bucket, admitted));
    uint32_t operation = find(graph, NodeType::operation, rank, 1, 4);
    EXPECT_TRUE(recorded(admitted, operation));
    EXPECT_TRUE(recorded(operation, find(graph, NodeType::send, rank, 1, 4, 0)));
    for (uint16_t step = 0; step < 4; ++step) {
      uint32_t send = find(graph, NodeType::send, rank, 1, 4, step);
      uint32_t receive = find(graph, NodeType::receive, (rank + 1) % 3, 1, 4, step);
      EXPECT_TRUE(recorded(send, receive));
      if (step == 3) continue;
      EXPECT_TRUE(recorded(receive, find(graph, NodeType::send, (rank + 1) % 3, 1, 4,
                                         static_cast<uint16_t>(step + 1))));
      EXPECT_TRUE(
          recorded(send, find(graph, NodeType::send, rank, 1, 4, static_cast<uint16_t>(step + 1))))
          << "the same lane";
    }
    EXPECT_TRUE(recorded(find(graph, NodeType::receive, rank, 1, 4, 3),
                         find(graph, NodeType::done, rank, 1, 1)));
  }
}

TEST(Build, has_no_circle_and_follows_time) {
  for (uint32_t ranks : {1u, 2u, 3u})
    for (plan::Barrier barrier : {plan::Barrier::all, plan::Barrier::tensor})
      for (bool credit : {false, true})
        for (bool updates : {false, true}) {
          Sample sample;
          sample.ranks = ranks;
          sample.barrier = barrier;
          sample.credit = credit;
          sample.updates = updates;
          Graph graph = build_or_fail(sample.make());
          EXPECT_THAT(graph.remarks, IsEmpty());
          EXPECT_TRUE(is_without_circle(graph));
          for (const auto* edges : {&graph.required, &graph.recorded})
            for (const Edge& edge : *edges)
              EXPECT_LE(graph.nodes[edge.from].end_ns(), graph.nodes[edge.to].end_ns());
        }
}

TEST(Build, says_which_operation_was_held_back_by_which) {
  Sample sample;
  sample.credit = true;
  Graph held = build_or_fail(sample.make());
  uint32_t last = find(held, NodeType::receive, 0, 1, 3, 1);
  EXPECT_TRUE(has(held.recorded, last, find(held, NodeType::admitted, 0, 1, 4)));
  EXPECT_FALSE(has(held.recorded, find(held, NodeType::receive, 0, 0, 2, 1),
                   find(held, NodeType::admitted, 0, 1, 3)))
      << "the first of an iteration waits for its gradients only";

  sample.credit = false;
  Graph free = build_or_fail(sample.make());
  for (const Edge& edge : free.recorded)
    if (free.nodes[edge.to].type == NodeType::admitted) {
      EXPECT_EQ(free.nodes[edge.from].type, NodeType::bucket);
    }
}

TEST(Build, records_the_barrier_of_the_plan) {
  Sample sample;
  Graph all = build_or_fail(sample.make());
  EXPECT_TRUE(
      has(all.recorded, find(all, NodeType::done, 1, 0, 2), find(all, NodeType::update, 1, 0, 0)));
  sample.updates = false;
  Graph bare = build_or_fail(sample.make());
  EXPECT_TRUE(has(bare.recorded, find(bare, NodeType::done, 1, 0, 2),
                  find(bare, NodeType::forward, 1, 1, 0)));
  EXPECT_TRUE(has(bare.required, find(bare, NodeType::done, 1, 0, 2),
                  find(bare, NodeType::forward, 1, 1, 2)));

  sample.updates = true;
  sample.barrier = plan::Barrier::tensor;
  Graph tensor = build_or_fail(sample.make());
  for (const Edge& edge : tensor.recorded) EXPECT_NE(tensor.nodes[edge.from].type, NodeType::done);
  EXPECT_TRUE(has(tensor.recorded, find(tensor, NodeType::forward, 1, 1, 0),
                  find(tensor, NodeType::update, 1, 0, 1)))
      << "updates stand between the forwards of a device";
}

TEST(Build, reads_the_barrier_from_events_when_no_plan_is_known) {
  for (plan::Barrier barrier : {plan::Barrier::all, plan::Barrier::tensor}) {
    Sample sample;
    sample.barrier = barrier;
    sample.urgent_first = true;
    trace::Trace trace = sample.make();
    for (trace::Process& process : trace.processes) process.environment.plan_text.clear();
    Graph graph = build_or_fail(trace);
    bool held = has(graph.recorded, find(graph, NodeType::done, 1, 0, 1),
                    find(graph, NodeType::update, 1, 0, 0));
    EXPECT_EQ(held, barrier == plan::Barrier::all);
  }
}

TEST(Build, finds_iterations_by_forward_where_spans_are_missing) {
  trace::Trace trace = without(
      Sample().make(), [](const trace::Event& event) { return event.kind == Kind::iteration; });
  Graph graph = build_or_fail(trace);
  ASSERT_EQ(graph.iterations.size(), 2u) << "nobody knows where the last ended";
  EXPECT_EQ(graph.iterations[1].number, 1u);
}

// The sample's thread begins to wait so long after the last backward, and goes on so long after
// that.
trace::Trace with_waits(Sample sample, int64_t before, int64_t after) {
  trace::Trace trace = sample.make();
  for (trace::Process& process : trace.processes) {
    std::map<uint32_t, int64_t> backward_end, update_start;
    for (const trace::Event& event : process.events) {
      if (event.kind == Kind::backward)
        backward_end[event.iteration] = std::max(backward_end[event.iteration], event.end_ns());
      if (event.kind == Kind::update) {
        auto at = update_start.try_emplace(event.iteration, event.start_ns).first;
        at->second = std::min(at->second, event.start_ns);
      }
    }
    for (auto [iteration, start] : update_start) {
      trace::Event wait;
      wait.kind = Kind::wait;
      wait.start_ns = backward_end[iteration] + before;
      wait.duration_ns = start - after - wait.start_ns;
      wait.iteration = iteration;
      process.events.push_back(wait);
    }
  }
  return trace;
}

TEST(Build, where_compute_is_real_a_thread_that_does_something_else_is_seen) {
  trace::Trace trace = with_waits(Sample(), 3'000, 400);
  Graph graph = build_or_fail(trace);
  ASSERT_EQ(graph.iterations.size(), 3u);
  for (uint32_t i = 0; i < 3; ++i)
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const std::vector<LayerTimes>& layers = graph.iterations[i].layers[rank];
      EXPECT_EQ(layers[0].before_wait_ns, i == 0 ? 0 : 3'000);
      EXPECT_EQ(layers[0].gap_before_update_ns, 400);
      EXPECT_EQ(layers[1].gap_before_update_ns, 0);
      EXPECT_EQ(layers[0].gap_before_forward_ns, 0);
    }
  // A timer that stands for a device is late for reasons of its own.
  for (trace::Process& process : trace.processes) process.environment.emulated_compute = true;
  graph = build_or_fail(trace);
  EXPECT_EQ(graph.iterations[1].layers[0][0].before_wait_ns, 0);
  EXPECT_EQ(graph.iterations[1].layers[0][0].gap_before_update_ns, 0);
}

TEST(Build, data_that_is_loaded_beside_compute_costs_nothing) {
  trace::Trace trace = Sample().make();
  for (trace::Process& process : trace.processes) {
    std::vector<trace::Event> loading;
    for (const trace::Event& event : process.events) {
      if (event.kind != Kind::forward || event.layer != 0) continue;
      trace::Event load = event;
      load.kind = Kind::data_loading;
      load.start_ns -= 600;  // 600 ns before the forward, 500 beside it
      load.duration_ns = 1'100;
      loading.push_back(load);
    }
    process.events.insert(process.events.end(), loading.begin(), loading.end());
  }
  Graph graph = build_or_fail(trace);
  ASSERT_EQ(graph.iterations.size(), 3u);
  // In later iterations the update of the last layer ends where the forward begins.
  EXPECT_EQ(graph.iterations[0].loading_ns, (std::vector<int64_t>{600, 600}));
  EXPECT_EQ(graph.iterations[1].loading_ns, (std::vector<int64_t>{0, 0}));
}

TEST(Build, an_update_of_all_layers_is_shared_out_by_their_bytes) {
  trace::Trace trace = Sample().make();
  for (trace::Process& process : trace.processes) {
    process.model.tensors[2].bytes = 2 << 20;
    std::map<uint32_t, trace::Event> whole;
    for (const trace::Event& event : process.events) {
      if (event.kind != Kind::update) continue;
      auto [at, made] = whole.try_emplace(event.iteration, event);
      at->second.layer = trace::kNone16;
      if (!made) at->second.duration_ns += event.duration_ns;
    }
    std::erase_if(process.events, [](const trace::Event& e) { return e.kind == Kind::update; });
    for (const auto& [iteration, update] : whole) {
      process.events.push_back(update);
      process.events.push_back(trace::processor_time_of(update, 8'000));
    }
  }
  Graph graph = build_or_fail(trace);
  ASSERT_EQ(graph.iterations.size(), 3u);
  EXPECT_THAT(graph.remarks, Contains(HasSubstr("for all layers at once")));
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const std::vector<LayerTimes>& layers = graph.iterations[1].layers[rank];
    EXPECT_EQ(layers[0].update_ns, 3'750);
    EXPECT_EQ(layers[1].update_ns, 3'750);
    EXPECT_EQ(layers[2].update_ns, 7'500);
    EXPECT_EQ(layers[2].update_cpu_ns, 4'000);
  }
}

TEST(Build, leaves_out_iterations_that_a_rank_has_not_whole) {
  trace::Trace trace = Sample().make();
  std::erase_if(trace.processes[1].events, [](const trace::Event& event) {
    return event.kind == Kind::backward && event.iteration == 1 && event.layer == 2;
  });
  Graph graph = build_or_fail(trace);
  ASSERT_EQ(graph.iterations.size(), 2u);
  EXPECT_EQ(graph.iterations[1].number, 2u);
  EXPECT_THAT(graph.remarks, Contains(HasSubstr("1 iterations are left out")));
}

TEST(Build, makes_a_graph_of_one_iteration_and_one_of_compute_alone) {
  Sample sample;
  sample.iterations = 1;
  EXPECT_EQ(build_or_fail(sample.make()).iterations.size(), 1u);
  sample.iterations = 3;
  sample.communicates = false;
  Graph graph = build_or_fail(sample.make());
  EXPECT_EQ(graph.iterations.size(), 3u);
  EXPECT_EQ(graph.nodes.size(), 2u * 3 * 3 * 3);
  EXPECT_TRUE(has(graph.required, find(graph, NodeType::backward, 0, 1, 2),
                  find(graph, NodeType::update, 0, 1, 2)));
}

TEST(Build, does_not_count_the_first_two_iterations_of_many) {
  Sample sample;
  sample.iterations = 4;
  EXPECT_EQ(build_or_fail(sample.make()).first_counted(), 2u);
}

TEST(Build, names_what_is_missing) {
  EXPECT_EQ(build({}).error().code(), Code::invalid_argument);

  Sample sample;
  sample.ranks = 3;
  trace::Trace trace = sample.make();
  trace.processes.erase(trace.processes.begin() + 1);
  EXPECT_THAT(build(trace).error().message(), HasSubstr("rank 1 is missing"));
  for (trace::Process& process : trace.processes) process.environment.ranks = 60'000;
  EXPECT_THAT(build(trace).error().message(), HasSubstr("1, 3, 4, 5, 6, 7, 8, 9 and 59990 more"));
  for (trace::Process& process : trace.processes) process.environment.ranks = 4'000'000'000;
  EXPECT_EQ(build(trace).error().code(), Code::invalid_argument);
  trace.processes[1].environment.rank = 0;
  for (trace::Process& process : trace.processes) process.environment.ranks = 2;
  EXPECT_THAT(build(trace).error().message(), HasSubstr("twice"));

  trace = sample.make();
  for (trace::Process& process : trace.processes) process.model = {};
  EXPECT_THAT(build(trace).error().message(), HasSubstr("no model"));

  trace =
      without(sample.make(), [](const trace::Event& event) { return event.kind == Kind::forward; });
  for (trace::Process& process : trace.processes)
    std::erase_if(process.events,
                  [](const trace::Event& event) { return event.kind == Kind::backward; });
  EXPECT_THAT(build(trace).error().message(),
              HasSubstr("no forward and no backward of any layer: what the program computes is "
                        "unknown; mark it"));
}

TEST(Build, counts_halves_that_are_lost) {
  trace::Trace trace = without(Sample().make(), [](const trace::Event& event) {
    return event.shape == Shape::send && event.operation == 3;
  });
  Graph graph = build_or_fail(trace);
  EXPECT_TRUE(is_without_circle(graph));
  EXPECT_THAT(graph.remarks,
              Contains(HasSubstr("4 received messages have no record of being sent")));

  trace = without(Sample().make(), [](const trace::Event& event) {
    return event.shape == Shape::receive && event.operation == 3;
  });
  graph = build_or_fail(trace);
  EXPECT_THAT(graph.remarks,
              Contains(HasSubstr("4 sent messages have no record of being received")));
  EXPECT_THAT(graph.remarks, Contains(HasSubstr("2 sent chunks lack the record of the chunk")));

  trace = without(Sample().make(), [](const trace::Event& event) {
    return event.kind == Kind::operation || event.kind == Kind::admitted ||
           (event.kind == Kind::tensor_done && event.tensor == 0);
  });
  graph = build_or_fail(trace);
  EXPECT_EQ(graph.iterations.size(), 3u);
  EXPECT_THAT(graph.remarks, Contains(HasSubstr("6 sums never reached a rank")));
}

TEST(Build, leaves_out_set_up_and_what_the_model_lacks) {
  trace::Trace trace = Sample().make();
  Graph before = build_or_fail(trace);
  trace::Event odd = trace.processes[0].events[0];
  auto put = [&](auto change) {
    trace::Event event = odd;
    change(event);
    trace.processes[0].events.push_back(event);
  };
  put([](trace::Event& e) { e.kind = Kind::forward, e.layer = 60'000; });
  put([](trace::Event& e) { e.kind = Kind::gradient_ready, e.tensor = 4'000'000'000; });
  put([](trace::Event& e) { e.kind = Kind::tensor_done, e.iteration = trace::kNone; });
  put([](trace::Event& e) { e.kind = Kind::forward, e.start_ns = INT64_MIN; });
  put([](trace::Event& e) { e.kind = Kind::backward, e.duration_ns = -1; });
  put([](trace::Event& e) { e.kind = Kind::operation, e.operation = 1; });
  uint64_t unusable = 6;
  put([](trace::Event& e) { e.kind = Kind::operation, e.operation = 1u << 31, e.bucket = 0; });
  put([](trace::Event& e) { e.kind = Kind::chunk, e.operation = (1u << 31) + 5, e.step = 0; });
  put([](trace::Event& e) { e.kind = Kind::broadcast, e.operation = 1u << 31; });
  Graph graph = build_or_fail(trace);
  EXPECT_EQ(graph.nodes.size(), before.nodes.size());
  EXPECT_THAT(graph.remarks, Contains(text("%d events say too little, or name what the model lacks",
                                           static_cast<int>(unusable))));
}

TEST(Build, survives_layers_that_the_tensors_do_not_name) {
  trace::Trace trace = Sample().make();
  for (trace::Process& process : trace.processes)
    for (trace::Tensor& tensor : process.model.tensors)
      tensor.produced_by = 77, tensor.updated_by = trace::kNone, tensor.consumed_by = 4'000'000'000;
  Graph graph = build_or_fail(trace);
  EXPECT_EQ(graph.iterations.size(), 3u);
  EXPECT_TRUE(is_without_circle(graph));
}

TEST(Build, believes_no_number_of_iterations_or_layers) {
  Sample sample;
  sample.communicates = false;
  trace::Trace trace = sample.make();
  for (trace::Process& process : trace.processes) {
    process.model.layers.resize(6'000);
    for (uint32_t i = 0; i < 100; ++i) {
      trace::Event event;
      event.kind = Kind::iteration;
      event.iteration = 4'000'000'000 + i;
      event.start_ns = i;
      event.duration_ns = 1;
      process.events.push_back(event);
    }
    for (trace::Event event : std::vector<trace::Event>(process.events))
      if (event.kind == Kind::forward || event.kind == Kind::backward || event.kind == Kind::update)
        for (uint32_t i = 10; i < 40; ++i) {
          event.iteration = i * 1'000'000;
          process.events.push_back(event);
          trace::Event span;
          span.kind = Kind::iteration;
          span.iteration = event.iteration;
          span.duration_ns = 10'000'000;
          process.events.push_back(span);
        }
  }
  Graph graph = build_or_fail(trace);
  EXPECT_EQ(graph.iterations.size(), ((1u << 16) + 8 * graph.nodes.size()) / (2 * 6'000));
  EXPECT_THAT(graph.remarks, Contains(HasSubstr("so many layers and so few events")));
}

// The first message that rank 1 receives is said to be one that it sends because of it.
void make_a_circle(trace::Trace& trace) {
  uint64_t id = 0;
  for (const trace::Event& event : trace.processes[1].events)
    if (event.shape == Shape::send && event.operation == 0 && event.step == 1) id = event.message;
  ASSERT_NE(id, 0u);
  for (trace::Event& event : trace.processes[1].events)
    if (event.shape == Shape::receive && event.operation == 0 && event.step == 0)
      event.message = id;
}

TEST(Build, breaks_a_circle_that_damaged_messages_make) {
  trace::Trace trace = Sample().make();
  make_a_circle(trace);
  Graph graph = build_or_fail(trace);
  EXPECT_TRUE(is_without_circle(graph));
  EXPECT_THAT(graph.remarks, Contains(HasSubstr("made a circle")));
}

// What is recorded a little too late is no circle.
TEST(Build, breaks_nothing_but_the_circle) {
  trace::Trace trace = Sample().make();
  make_a_circle(trace);
  int64_t begun = 0;
  for (const trace::Event& event : trace.processes[1].events)
    if (event.kind == Kind::operation && event.operation == 4) begun = event.start_ns;
  for (trace::Event& event : trace.processes[0].events)
    if (event.kind == Kind::admitted && event.operation == 4) event.start_ns = begun + 10;
  Graph graph = build_or_fail(trace);
  EXPECT_TRUE(is_without_circle(graph));
  EXPECT_THAT(graph.remarks, Contains(HasSubstr("made a circle")));
  EXPECT_TRUE(has(graph.recorded, find(graph, NodeType::admitted, 0, 1, 4),
                  find(graph, NodeType::operation, 1, 1, 4)));
}

TEST(Build, a_forward_that_was_over_did_not_wait_for_a_later_update) {
  trace::Trace trace = Sample().make();
  int64_t over = 0;
  for (const trace::Event& event : trace.processes[0].events)
    if (event.kind == Kind::forward && event.iteration == 2 && event.layer == 0)
      over = event.start_ns + event.duration_ns;
  for (trace::Event& event : trace.processes[0].events)
    if (event.kind == Kind::update && event.iteration == 1 && event.layer == 0)
      event.start_ns = over;
  Graph graph = build_or_fail(trace);
  EXPECT_THAT(graph.remarks, IsEmpty());
  for (uint32_t rank : {0u, 1u})
    EXPECT_EQ(has(graph.required, find(graph, NodeType::update, rank, 1, 0),
                  find(graph, NodeType::forward, rank, 2, 0)),
              rank == 1);
}

TEST(Build, is_the_same_whatever_the_order_of_files) {
  trace::Trace trace = Sample().make();
  Graph one = build_or_fail(trace);
  std::reverse(trace.processes.begin(), trace.processes.end());
  for (trace::Process& process : trace.processes) process.sort();
  Graph other = build_or_fail(trace);
  auto shown = [](const Graph& graph) {
    std::string out;
    for (const Node& node : graph.nodes)
      out += text("%s %u %u %u %lld %lld\n", name_of(node.type), unsigned{node.rank},
                  node.iteration, node.subject, static_cast<long long>(node.start_ns),
                  static_cast<long long>(node.duration_ns));
    for (const auto* edges : {&graph.required, &graph.recorded})
      for (const Edge& edge : *edges) out += text("%u %u\n", edge.from, edge.to);
    return out;
  };
  EXPECT_EQ(shown(one), shown(other));
}

}  // namespace
}  // namespace weft::graph
