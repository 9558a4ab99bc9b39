// Runs whose every time is known, for tests: each layer has one tensor, each tensor is a bucket and
// an operation, and an operation is a ring with one chunk a step on one lane.
#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "weft/graph.h"
#include "weft/plan.h"

namespace weft::graph {

struct Sample {
  uint32_t ranks = 2;
  uint32_t layers = 3;
  uint32_t iterations = 3;
  plan::Barrier barrier = plan::Barrier::all;
  bool credit = false;        // one operation at a time
  bool urgent_first = false;  // the first layer's tensor goes before all others
  bool communicates = true;
  bool updates = true;
  int64_t forward = 10'000, backward = 20'000, update = 5'000;
  int64_t message = 30'000;          // from the last byte sent to the last received
  std::vector<int64_t> slower;       // by rank: each backward takes this much longer
  int64_t late_before_backward = 0;  // rank 0's host, before backward of the first layer

  trace::Trace make() {
    trace = {};
    for (uint32_t rank = 0; rank < ranks; ++rank) trace.processes.push_back(process(rank));
    free_.assign(ranks, 1'000'000);
    lane_.assign(ranks, 0);
    started_.assign(ranks, 0);
    for (uint32_t i = 0; i <= iterations; ++i) {
      for (uint32_t rank = 0; rank < ranks; ++rank) go_forward(rank, i);
      if (i == iterations) break;
      std::vector<std::vector<int64_t>> ready(layers, std::vector<int64_t>(ranks));
      for (uint32_t rank = 0; rank < ranks; ++rank) go_backward(rank, i, ready);
      done_.assign(layers, std::vector<int64_t>(ranks));
      if (!communicates) continue;
      for (uint32_t k = layers; k-- > 0;) {
        uint32_t layer = urgent_first ? layers - 1 - k : k;
        reduce(i, layer, ready[layer]);
      }
    }
    return trace;
  }

  trace::Trace trace;

 private:
  trace::Process process(uint32_t rank) const {
    trace::Process out;
    out.environment.rank = rank;
    out.environment.ranks = ranks;
    plan::Plan plan;
    plan.barrier = barrier;
    if (credit) plan.credit = mib(1);
    out.environment.plan_text = plan::canonical(plan);
    for (uint32_t layer = 0; layer < layers; ++layer) {
      out.model.layers.push_back({text("layer%u", layer)});
      out.model.tensors.push_back({text("tensor%u", layer), 1 << 20, layer, layer, layer});
    }
    return out;
  }

  trace::Event& put(uint32_t rank, trace::Kind kind, uint32_t iteration, int64_t start,
                    int64_t duration, trace::Shape shape = trace::Shape::span) {
    trace::Event event;
    event.kind = kind;
    event.iteration = iteration;
    event.start_ns = start;
    event.duration_ns = duration;
    event.shape = shape;
    trace.processes[rank].events.push_back(event);
    return trace.processes[rank].events.back();
  }

  void compute(uint32_t rank, trace::Kind kind, uint32_t iteration, uint32_t layer, int64_t took) {
    put(rank, kind, iteration, free_[rank], took).layer = static_cast<uint16_t>(layer);
    free_[rank] += took;
  }

  void wait_for(uint32_t rank, uint32_t layer) {
    if (communicates) free_[rank] = std::max(free_[rank], done_[layer][rank] + 1'000);
  }

  void go_forward(uint32_t rank, uint32_t i) {
    if (i > 0 && barrier == plan::Barrier::all) {
      for (uint32_t layer = 0; layer < layers; ++layer) wait_for(rank, layer);
      for (uint32_t layer = 0; updates && layer < layers; ++layer)
        compute(rank, trace::Kind::update, i - 1, layer, update);
    }
    for (uint32_t layer = 0; layer < layers; ++layer) {
      if (i > 0 && barrier == plan::Barrier::tensor) {
        wait_for(rank, layer);
        if (updates) compute(rank, trace::Kind::update, i - 1, layer, update);
      }
      if (layer == 0 && i > 0)
        put(rank, trace::Kind::iteration, i - 1, started_[rank], free_[rank] - started_[rank]);
      if (layer == 0) started_[rank] = free_[rank];
      if (i < iterations) compute(rank, trace::Kind::forward, i, layer, forward);
    }
  }

  void go_backward(uint32_t rank, uint32_t i, std::vector<std::vector<int64_t>>& ready) {
    for (uint32_t layer = layers; layer-- > 0;) {
      if (rank == 0 && layer == 0) free_[rank] += late_before_backward;
      compute(rank, trace::Kind::backward, i, layer,
              backward + (rank < slower.size() ? slower[rank] : 0));
      ready[layer][rank] = free_[rank];
      if (!communicates) continue;
      trace::Event& event =
          put(rank, trace::Kind::gradient_ready, i, free_[rank], 0, trace::Shape::instant);
      event.tensor = layer;
      event.bucket = layers - 1 - layer;
    }
  }

  void describe(trace::Event& event, uint32_t number, uint32_t layer) const {
    event.operation = number;
    event.bucket = layers - 1 - layer;
    event.partition = 0;
    event.bytes = 1 << 20;
  }

  void reduce(uint32_t i, uint32_t layer, const std::vector<int64_t>& ready) {
    uint32_t number = next_operation_++;
    int64_t admitted = *std::max_element(ready.begin(), ready.end()) + 2'000;
    if (credit) admitted = std::max(admitted, last_end_ + 500);
    describe(put(0, trace::Kind::admitted, i, admitted, 0, trace::Shape::instant), number, layer);
    std::vector<int64_t> may_send(ranks), ended(ranks);
    for (uint32_t rank = 0; rank < ranks; ++rank)
      may_send[rank] = ended[rank] = admitted + (rank == 0 ? 0 : 1'000);
    std::vector<int64_t> begun = may_send;
    const auto steps = static_cast<uint16_t>(2 * (ranks - 1));
    for (uint16_t step = 0; step < steps; ++step) {
      std::vector<int64_t> arrived(ranks);
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        uint32_t peer = (rank + 1) % ranks;
        int64_t start = std::max(may_send[rank], lane_[rank]);
        int64_t end = start + 5'000;
        lane_[rank] = end;
        uint64_t id = ++next_message_;
        chunk(rank, trace::Shape::send, i, layer, number, step, id, start, end);
        arrived[peer] = end + message;
        chunk(peer, trace::Shape::receive, i, layer, number, step, id, start + 2'000,
              end + message);
        ended[rank] = std::max(ended[rank], end);
        ended[peer] = std::max(ended[peer], arrived[peer]);
      }
      may_send = arrived;
    }
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      int64_t end = ended[rank] + 300;
      describe(put(rank, trace::Kind::operation, i, begun[rank], end - begun[rank]), number, layer);
      done_[layer][rank] = end + 100;
      put(rank, trace::Kind::tensor_done, i, end + 100, 0, trace::Shape::instant).tensor = layer;
      if (rank == 0) last_end_ = end;
    }
  }

  void chunk(uint32_t rank, trace::Shape shape, uint32_t i, uint32_t layer, uint32_t number,
             uint16_t step, uint64_t id, int64_t start, int64_t end) {
    trace::Event& event = put(rank, trace::Kind::chunk, i, start, end - start, shape);
    describe(event, number, layer);
    event.message = id;
    event.chunk = 0;
    event.step = step;
    event.lane = 0;
  }

  std::vector<int64_t> free_, lane_, started_;
  std::vector<std::vector<int64_t>> done_;  // by layer, by rank, of the iteration under way
  uint32_t next_operation_ = 0;
  uint64_t next_message_ = 0;
  int64_t last_end_ = 0;
};

// The node of that sort, or the graph's size. `step` counts for sends and receives only.
inline uint32_t find(const Graph& graph, NodeType type, uint32_t rank, uint32_t iteration,
                     uint32_t subject, uint16_t step = 0) {
  for (uint32_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (node.type == type && node.rank == rank && node.iteration == iteration &&
        node.subject == subject && node.step == step)
      return n;
  }
  return static_cast<uint32_t>(graph.nodes.size());
}

inline bool has(const std::vector<Edge>& edges, uint32_t from, uint32_t to) {
  return std::any_of(edges.begin(), edges.end(),
                     [&](const Edge& edge) { return edge.from == from && edge.to == to; });
}

// Takes away what nothing is waited for by, again and again, until nothing or a circle is left.
inline bool is_without_circle(const Graph& graph) {
  std::vector<std::vector<uint32_t>> after(graph.nodes.size());
  std::vector<uint32_t> waits(graph.nodes.size(), 0), free;
  for (const auto* edges : {&graph.required, &graph.recorded})
    for (const Edge& edge : *edges) after[edge.from].push_back(edge.to), ++waits[edge.to];
  for (uint32_t n = 0; n < waits.size(); ++n)
    if (waits[n] == 0) free.push_back(n);
  size_t seen = 0;
  for (; seen < free.size(); ++seen)
    for (uint32_t next : std::vector<uint32_t>(after[free[seen]]))
      if (--waits[next] == 0) free.push_back(next);
  return seen == graph.nodes.size();
}

}  // namespace weft::graph
