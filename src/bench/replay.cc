#include "weft/bench.h"

#include <algorithm>
#include <cmath>

#include "weft/optimize.h"
#include "weft/replay.h"
#include "weft/schedule.h"

namespace weft::bench {
namespace {

constexpr uint32_t kRanks = 8;
constexpr uint32_t kLayers = 64;
constexpr int kRepeats = 3;

// Layers of a transformer's sort: many of one size, and a large one at each end.
trace::Model model_of(uint32_t layers) {
  trace::Model model;
  model.name = "bench";
  for (uint32_t l = 0; l < layers; ++l) {
    model.layers.push_back({text("layer%u", l)});
    uint64_t elements = l == 0 || l + 1 == layers ? 4'000'000 : 1'000'000;
    model.tensors.push_back(
        {text("layer%u.weight", l), elements * schedule::kElementBytes, l, l, l});
    model.tensors.push_back({text("layer%u.bias", l), 1024 * schedule::kElementBytes, l, l, l});
  }
  return model;
}

plan::Plan plan_of() {
  plan::Plan plan;
  plan.name = "bench";
  plan.lanes = 4;
  plan.order = plan::Order::layer;
  plan.barrier = plan::Barrier::tensor;
  plan.partition = mib(4);
  plan.credit = mib(16);
  return plan;
}

// Four recorded iterations, a little different on each rank.
graph::Graph job_of(uint32_t ranks, uint32_t layers) {
  graph::Graph graph;
  graph.ranks = ranks;
  graph.environment.ranks = ranks;
  graph.environment.cores = 8;
  graph.environment.plan_text = plan::canonical(plan_of());
  graph.model = model_of(layers);
  Rng rng(1);
  for (uint32_t i = 0; i < 4; ++i) {
    graph::Iteration iteration;
    iteration.number = i;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      std::vector<graph::LayerTimes> times(layers);
      for (graph::LayerTimes& layer : times) {
        auto about = [&](double us) {
          return Nanos::from_micros(us * (0.95 + 0.1 * rng.uniform())).count;
        };
        layer = {about(500), about(1000), about(50), 0, 0};
      }
      iteration.layers.push_back(std::move(times));
      iteration.start_ns.push_back(int64_t{i} * 200'000'000);
      iteration.end_ns.push_back(int64_t{i + 1} * 200'000'000);
    }
    graph.iterations.push_back(std::move(iteration));
  }
  return graph;
}

// Links of 25 Gb/s whose flows are capped at 5 Gb/s.
cost::Costs costs_of() {
  auto exactly = [](double value) { return cost::Fitted{value, value, value, 8}; };
  cost::Costs costs;
  costs.link_bytes_per_s = exactly(3.1e9);
  costs.flow_bytes_per_s = exactly(0.62e9);
  costs.ring_rates = {{1, exactly(0.62e9)}, {4, exactly(2.48e9)}, {8, exactly(3.1e9)}};
  costs.round_trip_idle_ns = exactly(40'000);
  costs.cpu_ns_per_byte = exactly(0.05);
  costs.cpu_ns_per_chunk = exactly(2'000);
  costs.report_ns = exactly(30'000);
  costs.begin_ns = exactly(30'000);
  costs.hand_over_ns = exactly(5'000);
  costs.wake_up_ns = exactly(10'000);
  costs.sending.cores = 8;
  return costs;
}

bool is_operation(const trace::Event& event) {
  switch (event.kind) {
    case trace::Kind::forward:
    case trace::Kind::backward:
    case trace::Kind::update:
    case trace::Kind::gradient_ready:
    case trace::Kind::tensor_done:
    case trace::Kind::admitted:
    case trace::Kind::operation:
    case trace::Kind::chunk: return true;
    default: return false;
  }
}

Result<uint64_t> operations_of(const replay::Replayer& replayer, uint32_t iterations) {
  replay::Question question;
  question.iterations = iterations;
  question.interval = false;
  question.make_trace = true;
  WEFT_ASSIGN(replay::Prediction counted, replayer.predict(question));
  WEFT_CHECK(counted.trace.has_value());
  uint64_t sum = 0;
  for (const trace::Process& process : counted.trace->processes)
    sum += static_cast<uint64_t>(
        std::count_if(process.events.begin(), process.events.end(), is_operation));
  return sum;
}

}  // namespace

Result<ReplaySpeed> replay_speed(const ReplayOptions& options, const Clock& clock) {
  ReplaySpeed out;
  out.ranks = kRanks;
  out.layers = kLayers;
  WEFT_ASSIGN(replay::Replayer replayer,
              replay::Replayer::make(job_of(out.ranks, out.layers), costs_of()));
  // Every iteration has the same operations, only at other times.
  constexpr uint32_t kCounted = 4;
  WEFT_ASSIGN(uint64_t few, operations_of(replayer, kCounted));
  double iterations =
      std::ceil(static_cast<double>(options.operations) * kCounted / static_cast<double>(few));
  out.iterations = std::max(kCounted, static_cast<uint32_t>(iterations));
  out.operations = few / kCounted * out.iterations;

  replay::Question question;
  question.iterations = out.iterations;
  question.interval = false;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    Nanos begin = clock.now();
    WEFT_ASSIGN(replay::Prediction prediction, replayer.predict(question));
    double seconds = (clock.now() - begin).seconds();
    if (repeat == 0 || seconds < out.seconds) out.seconds = seconds;
    out.events = prediction.events;
  }
  if (out.seconds > 0) {
    out.operations_per_second = static_cast<double>(out.operations) / out.seconds;
    out.events_per_second = static_cast<double>(out.events) / out.seconds;
  }

  WEFT_ASSIGN(replay::Replayer smaller, replay::Replayer::make(job_of(4, 24), costs_of()));
  optimize::Options search;
  search.budget = options.search;
  WEFT_ASSIGN(optimize::Optimized found, optimize::optimize(smaller, search));
  out.search_replays = found.replays;
  out.search_seconds = found.seconds;
  if (found.seconds > 0) out.replay_share_percent = 100 * found.replay_seconds / found.seconds;
  return out;
}

}  // namespace weft::bench
