#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "weft/trace.h"

namespace weft::trace {
namespace {

// What falls into one row while events are read; wall time and real bytes of one process are
// converted as they come in.
struct Cell {
  std::vector<double> durations;
  double bytes = 0;
  std::vector<std::pair<int64_t, int64_t>> spans;  // wall time of one process
};

// The length of the union, in wall time.
double covered(std::vector<std::pair<int64_t, int64_t>> spans) {
  std::sort(spans.begin(), spans.end());
  double sum = 0;
  int64_t until = std::numeric_limits<int64_t>::min();
  for (const auto& [start, end] : spans) {
    if (end > until) sum += static_cast<double>(end - std::max(start, until));
    until = std::max(until, end);
  }
  return sum;
}

void fill(SummaryRow& row, std::vector<double> durations) {
  row.count = durations.size();
  if (durations.empty()) return;
  row.total_ns = std::accumulate(durations.begin(), durations.end(), 0.0);
  row.mean_ns = row.total_ns / static_cast<double>(durations.size());
  row.p50_ns = quantile(durations, 0.5);
  row.p95_ns = quantile(std::move(durations), 0.95);
}

bool is_compute(Kind kind) {
  return kind == Kind::forward || kind == Kind::backward || kind == Kind::update;
}

bool has_duration(const Event& event) {
  return event.shape != Shape::counter && event.shape != Shape::instant;
}

bool is_message(const Event& event) {
  return event.shape == Shape::send || event.shape == Shape::receive;
}

using Processes = std::vector<const Process*>;

void by_iteration(const Processes& processes, std::vector<SummaryRow>& rows) {
  struct Iteration {
    std::vector<double> durations;
    double longest = -1;
    uint32_t slowest = kNone;
    double compute_ns = 0;
    double wait_ns = 0;
    double ranks = 0;
    double bytes = 0;
  };
  std::map<uint32_t, Iteration> iterations;
  for (const Process* process : processes) {
    std::map<uint32_t, std::vector<std::pair<int64_t, int64_t>>> compute;
    const Environment& environment = process->environment;
    for (const Event& event : process->events) {
      if (event.iteration == kNone || !has_duration(event)) continue;
      Iteration& iteration = iterations[event.iteration];
      const double ns = environment.to_target_ns(static_cast<double>(event.duration_ns));
      auto& spans = compute[event.iteration];
      if (is_compute(event.kind)) spans.emplace_back(event.start_ns, event.end_ns());
      if (event.kind == Kind::wait) iteration.wait_ns += ns;
      if (event.shape == Shape::send)
        iteration.bytes += environment.to_target_bytes(static_cast<double>(event.bytes));
      if (event.kind != Kind::iteration) continue;
      iteration.durations.push_back(ns);
      if (ns > iteration.longest) {
        iteration.longest = ns;
        iteration.slowest = environment.rank;
      }
    }
    for (auto& [number, spans] : compute) {
      iterations[number].ranks += 1;
      iterations[number].compute_ns += environment.to_target_ns(covered(std::move(spans)));
    }
  }
  for (auto& [number, iteration] : iterations) {
    SummaryRow& row = rows.emplace_back();
    row.what = std::to_string(number);
    row.compute_ns = iteration.compute_ns / iteration.ranks;
    row.wait_ns = iteration.wait_ns / iteration.ranks;
    row.bytes = iteration.bytes;
    row.slowest = iteration.slowest;
    fill(row, std::move(iteration.durations));
  }
}

// A row a layer: what its compute takes in an iteration of a rank, how long its gradients travel
// (from the first that is ready to the last that is done), and how long training waits for them.
void by_layer(const Processes& processes, std::vector<SummaryRow>& rows) {
  struct Layer {
    double forward_ns = 0, backward_ns = 0, update_ns = 0, wait_ns = 0, bytes = 0;
    std::set<std::pair<uint32_t, uint32_t>> visits;  // (rank, iteration)
    std::vector<double> travel;
  };
  std::map<std::pair<uint16_t, std::string>, Layer> layers;
  for (const Process* process : processes) {
    const Environment& environment = process->environment;
    const Model& model = process->model;
    struct Travel {
      int64_t first = std::numeric_limits<int64_t>::max();
      int64_t last = std::numeric_limits<int64_t>::min();
    };
    std::map<std::pair<uint16_t, uint32_t>, Travel> travels;  // by layer and iteration
    std::map<uint16_t, double> bytes;
    for (const Tensor& tensor : model.tensors)
      if (tensor.produced_by < model.layers.size())
        bytes[static_cast<uint16_t>(tensor.produced_by)] +=
            environment.to_target_bytes(static_cast<double>(tensor.bytes));
    for (const Event& event : process->events) {
      if (event.layer >= model.layers.size()) continue;
      Layer& layer = layers[{event.layer, model.layers[event.layer].name}];
      layer.bytes = bytes[event.layer];
      Travel& travel = travels[{event.layer, event.iteration}];
      const double ns = environment.to_target_ns(static_cast<double>(event.duration_ns));
      switch (event.kind) {
        case Kind::forward:
          layer.forward_ns += ns;
          layer.visits.emplace(environment.rank, event.iteration);
          break;
        case Kind::backward: layer.backward_ns += ns; break;
        case Kind::update: layer.update_ns += ns; break;
        case Kind::wait: layer.wait_ns += ns; break;
        case Kind::gradient_ready: travel.first = std::min(travel.first, event.start_ns); break;
        case Kind::tensor_done: travel.last = std::max(travel.last, event.start_ns); break;
        default: break;
      }
    }
    for (const auto& [key, travel] : travels)
      if (travel.first <= travel.last)
        layers[{key.first, model.layers[key.first].name}].travel.push_back(
            environment.to_target_ns(static_cast<double>(travel.last - travel.first)));
  }
  for (auto& [key, layer] : layers) {
    SummaryRow& row = rows.emplace_back();
    const double visits = std::max<double>(1, static_cast<double>(layer.visits.size()));
    row.what = key.second;
    row.forward_ns = layer.forward_ns / visits;
    row.backward_ns = layer.backward_ns / visits;
    row.update_ns = layer.update_ns / visits;
    row.wait_ns = layer.wait_ns / visits;
    row.bytes = layer.bytes;
    fill(row, std::move(layer.travel));
  }
}

void by_tensor(const Processes& processes, std::vector<SummaryRow>& rows) {
  std::map<std::pair<uint32_t, std::string>, Cell> cells;
  for (const Process* process : processes) {
    const std::vector<Tensor>& tensors = process->model.tensors;
    for (uint32_t i = 0; i < tensors.size(); ++i)
      cells[{i, tensors[i].name}].bytes =
          process->environment.to_target_bytes(static_cast<double>(tensors[i].bytes));
    std::map<std::pair<uint32_t, uint32_t>, int64_t> ready;  // by iteration and tensor
    for (const Event& event : process->events) {
      if (event.kind == Kind::gradient_ready)
        ready.try_emplace({event.iteration, event.tensor}, event.start_ns);
    }
    for (const Event& event : process->events) {
      if (event.kind != Kind::tensor_done || event.tensor >= tensors.size()) continue;
      const auto start = ready.find({event.iteration, event.tensor});
      if (start == ready.end() || start->second > event.start_ns) continue;
      cells[{event.tensor, tensors[event.tensor].name}].durations.push_back(
          process->environment.to_target_ns(static_cast<double>(event.start_ns - start->second)));
      ready.erase(start);  // a second "done" is not a second reduction
    }
  }
  for (auto& [key, cell] : cells) {
    SummaryRow& row = rows.emplace_back();
    row.what = key.second;
    row.bytes = cell.bytes;
    fill(row, std::move(cell.durations));
  }
}

void by_link(const Processes& processes, bool lanes, std::vector<SummaryRow>& rows) {
  for (const Process* process : processes) {
    const Environment& environment = process->environment;
    std::map<std::tuple<Shape, uint16_t, uint16_t>, Cell> cells;  // direction, peer, lane
    for (const Event& event : process->events) {
      if (!is_message(event) || event.peer == kNone16) continue;
      if (lanes && event.lane == kNone16) continue;
      Cell& cell = cells[{event.shape, event.peer, lanes ? event.lane : kNone16}];
      cell.durations.push_back(environment.to_target_ns(static_cast<double>(event.duration_ns)));
      cell.bytes += environment.to_target_bytes(static_cast<double>(event.bytes));
      cell.spans.emplace_back(event.start_ns, event.end_ns());
    }
    for (auto& [key, cell] : cells) {
      const auto& [direction, peer, lane] = key;
      SummaryRow& row = rows.emplace_back();
      if (lanes) row.what = text("lane %u ", lane);
      row.what += text("%s rank %u", direction == Shape::send ? "to" : "from", peer);
      row.rank = environment.rank;
      row.bytes = cell.bytes;
      // Over all the time from the first message to the last: handing data to the kernel, or taking
      // it, is quicker than the wire.
      int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
      for (const auto& [start, end] : cell.spans) {
        first = std::min(first, start);
        last = std::max(last, end);
      }
      const double elapsed = environment.to_target_ns(static_cast<double>(last - first));
      if (elapsed > 0) row.rate_bps = row.bytes * 8e9 / elapsed;
      row.busy_ns = environment.to_target_ns(covered(std::move(cell.spans)));
      fill(row, std::move(cell.durations));
    }
  }
}

void by_kind(const Processes& processes, std::vector<SummaryRow>& rows) {
  std::map<std::pair<Kind, Shape>, Cell> cells;
  for (const Process* process : processes) {
    for (const Event& event : process->events) {
      Cell& cell = cells[{event.kind, event.shape}];
      const double ns = has_duration(event) ? static_cast<double>(event.duration_ns) : 0;
      cell.durations.push_back(process->environment.to_target_ns(ns));
      cell.bytes += process->environment.to_target_bytes(static_cast<double>(event.bytes));
    }
  }
  for (auto& [key, cell] : cells) {
    SummaryRow& row = rows.emplace_back();
    if (key.second != Shape::span) row.what = std::string(name_of(key.second)) + ' ';
    row.what += name_of(key.first);
    row.bytes = cell.bytes;
    fill(row, std::move(cell.durations));
  }
}

constexpr By kAllBy[] = {By::iteration, By::layer, By::tensor, By::lane, By::peer, By::kind};

}  // namespace

const char* name_of(By by) {
  switch (by) {
    case By::iteration: return "iteration";
    case By::layer: return "layer";
    case By::tensor: return "tensor";
    case By::lane: return "lane";
    case By::peer: return "peer";
    case By::kind: return "kind";
  }
  return "unknown";
}

Result<By> parse_by(std::string_view word) {
  std::string known;
  for (By by : kAllBy) {
    if (word == name_of(by)) return by;
    known += known.empty() ? "" : ", ";
    known += name_of(by);
  }
  return error(Code::invalid_argument, "\"%.*s\" is not one of %s", static_cast<int>(word.size()),
               word.data(), known.c_str());
}

Summary summarize(const Trace& trace, By by, std::optional<uint32_t> rank) {
  Summary summary;
  summary.by = by;
  Processes processes;
  for (const Process& process : trace.processes) {
    if (!rank || process.environment.rank == *rank) processes.push_back(&process);
  }
  if (processes.empty()) return summary;
  summary.dilation = processes.front()->environment.dilation;
  summary.shrink = processes.front()->environment.shrink;
  switch (by) {
    case By::iteration: by_iteration(processes, summary.rows); break;
    case By::layer: by_layer(processes, summary.rows); break;
    case By::tensor: by_tensor(processes, summary.rows); break;
    case By::lane:
    case By::peer: by_link(processes, by == By::lane, summary.rows); break;
    case By::kind: by_kind(processes, summary.rows); break;
  }
  return summary;
}

std::vector<ProbeSummary> summarize_probe(const Trace& trace) {
  std::map<std::tuple<ProbeType, ProbeScope, uint16_t, uint16_t>, std::vector<double>> rates;
  for (const Process& process : trace.processes) {
    for (const ProbeResult& result : process.probe) {
      if (result.duration_ns <= 0) continue;
      rates[{result.type, result.scope, result.flows, result.reverse}].push_back(
          static_cast<double>(result.bytes) * 8e9 / static_cast<double>(result.duration_ns));
    }
  }
  std::vector<ProbeSummary> out;
  for (auto& [key, values] : rates) {
    ProbeSummary& row = out.emplace_back();
    std::tie(row.type, row.scope, row.flows, row.reverse) = key;
    row.count = values.size();
    row.slowest_bps = *std::min_element(values.begin(), values.end());
    row.fastest_bps = *std::max_element(values.begin(), values.end());
    row.median_bps = quantile(std::move(values), 0.5);
  }
  return out;
}

}  // namespace weft::trace
