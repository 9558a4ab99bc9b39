#include "world.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

namespace weft::scenarios {
namespace {

cost::Fitted exactly(double value) { return {value, value, value, 8}; }

Error unknown(const Words& line, const std::string& word) {
  return error(Code::invalid_argument, "%s: what is %s?", line[0].c_str(), word.c_str());
}

Result<double> number(const std::string& word) {
  char* end = nullptr;
  double value = std::strtod(word.c_str(), &end);
  if (word.empty() || *end != '\0')
    return error(Code::invalid_argument, "%s is no number", word.c_str());
  return value;
}

// The value of a key of a plan, as JSON: 4, true, null, [...], or a word.
nlohmann::json value_of(const std::string& word) {
  nlohmann::json parsed = nlohmann::json::parse(word, nullptr, false);
  return parsed.is_discarded() ? nlohmann::json(word) : parsed;
}

}  // namespace

Result<plan::Plan> changed(const plan::Plan& base, std::span<const std::string> changes) {
  if (changes.size() % 2 != 0)
    return error(Code::invalid_argument, "a plan is changed by pairs of a key and a value");
  auto document = nlohmann::ordered_json::parse(plan::canonical(base));
  for (size_t i = 0; i < changes.size(); i += 2)
    document[nlohmann::ordered_json::json_pointer("/" + changes[i])] = value_of(changes[i + 1]);
  return plan::parse(document.dump());
}

Result<bool> World::take(const Words& line) {
  const std::string& what = line[0];
  auto done = [](Result<void> result) -> Result<bool> {
    if (!result) return std::move(result).error();
    return true;
  };
  if (what == "cluster") return done(take_cluster(line));
  if (what == "costs") return done(take_costs(line));
  if (what == "layer" || what == "layers") return done(take_layer(line));
  if (what == "plan" && line.size() >= 2) {
    WEFT_ASSIGN(plan::Plan base, plan::preset(line[1]));
    WEFT_ASSIGN(plan_, changed(base, std::span(line).subspan(2)));
    return true;
  }
  if (what == "iterations" && line.size() == 2) {
    WEFT_ASSIGN(double count, number(line[1]));
    iterations_ = static_cast<uint32_t>(count);
    return true;
  }
  if (what == "burns" && line.size() == 2) {
    WEFT_ASSIGN(burns_, number(line[1]));
    return true;
  }
  bool rank = what == "rank", host = what == "host";
  if (!rank && !host) return false;
  if (line.size() != 4 || line[2] != (rank ? "speed" : "link")) return unknown(line, "this");
  WEFT_ASSIGN(double index, number(line[1]));
  WEFT_ASSIGN(double factor, number(line[3]));
  (rank ? speed_ : share_of_link_)[static_cast<uint32_t>(index)] = factor;
  return true;
}

Result<void> World::take_cluster(const Words& line) {
  costs_ = {};
  hosts_ = 0;
  double link = 0, flow = 0;
  for (size_t i = 1; i + 1 < line.size(); i += 2) {
    const std::string &key = line[i], &value = line[i + 1];
    if (key == "link" || key == "flow") {
      WEFT_ASSIGN((key == "link" ? link : flow), parse_rate(value));
    } else if (key == "latency") {
      WEFT_ASSIGN(Nanos latency, parse_duration(value));
      costs_.round_trip_idle_ns = exactly(2 * static_cast<double>(latency.count));
    } else if (key == "ranks" || key == "hosts" || key == "cores") {
      WEFT_ASSIGN(double count, number(value));
      auto whole = static_cast<uint32_t>(count);
      (key == "ranks" ? ranks_ : key == "hosts" ? hosts_ : costs_.sending.cores) = whole;
    } else {
      return unknown(line, key);
    }
  }
  link /= 8;
  flow = flow > 0 ? flow / 8 : link;
  costs_.link_bytes_per_s = exactly(link);
  if (flow < link) costs_.flow_bytes_per_s = exactly(flow);
  for (uint32_t flows : {1u, 4u, 16u})
    costs_.ring_rates.push_back({flows, exactly(std::min(flows * flow, link))});
  for (auto* constant : {&costs_.cpu_ns_per_byte, &costs_.cpu_ns_per_chunk,
                         &costs_.reduce_ns_per_byte, &costs_.copy_ns_per_byte})
    *constant = exactly(0);
  if (!costs_.round_trip_idle_ns) costs_.round_trip_idle_ns = exactly(0);
  return {};
}

Result<void> World::take_costs(const Words& line) {
  using Constant = std::optional<cost::Fitted> cost::Costs::*;
  static const std::map<std::string, Constant> kPerByte = {
      {"byte", &cost::Costs::cpu_ns_per_byte},
      {"copy", &cost::Costs::copy_ns_per_byte},
      {"reduce", &cost::Costs::reduce_ns_per_byte}};
  static const std::map<std::string, Constant> kTimes = {{"chunk", &cost::Costs::cpu_ns_per_chunk},
                                                         {"report", &cost::Costs::report_ns},
                                                         {"begin", &cost::Costs::begin_ns},
                                                         {"hand_over", &cost::Costs::hand_over_ns},
                                                         {"wake_up", &cost::Costs::wake_up_ns}};
  for (size_t i = 1; i + 1 < line.size(); i += 2) {
    if (auto found = kPerByte.find(line[i]); found != kPerByte.end()) {
      WEFT_ASSIGN(double ns, number(line[i + 1]));
      costs_.*found->second = exactly(ns);
    } else if (auto time = kTimes.find(line[i]); time != kTimes.end()) {
      WEFT_ASSIGN(Nanos ns, parse_duration(line[i + 1]));
      costs_.*time->second = exactly(static_cast<double>(ns.count));
    } else {
      return unknown(line, line[i]);
    }
  }
  return {};
}

Result<void> World::take_layer(const Words& line) {
  if (line.size() < 3) return unknown(line, "it");
  Layer layer;
  WEFT_ASSIGN(layer.bytes, parse_bytes(line[2]));
  for (size_t i = 3; i + 1 < line.size(); i += 2) {
    const std::string& key = line[i];
    WEFT_ASSIGN(Nanos time, parse_duration(line[i + 1]));
    if (key == "forward")
      layer.forward = time;
    else if (key == "backward")
      layer.backward = time;
    else if (key == "update")
      layer.update = time;
    else if (key == "gap")
      layer.gap = time;
    else
      return unknown(line, key);
  }
  if (line[0] == "layers") {
    WEFT_ASSIGN(double count, number(line[1]));
    layers_.clear();
    for (uint32_t l = 0; l < static_cast<uint32_t>(count); ++l) {
      layer.name = text("layer%u", l);
      layers_.push_back(layer);
    }
    return {};
  }
  layer.name = line[1];
  auto same = std::find_if(layers_.begin(), layers_.end(),
                           [&](const Layer& other) { return other.name == layer.name; });
  if (same != layers_.end())
    *same = layer;
  else
    layers_.push_back(layer);
  return {};
}

cost::Group World::group() const { return {ranks_, plan_.lanes, hosts_ == 0 ? ranks_ : hosts_}; }

double World::gradient_bytes() const {
  double sum = 0;
  for (const Layer& layer : layers_) sum += static_cast<double>(layer.bytes.count);
  return sum;
}

graph::Graph World::compute() const {
  graph::Graph graph;
  graph.ranks = graph.environment.ranks = ranks_;
  graph.environment.cores = costs_.sending.cores;
  graph.environment.plan_text = plan::canonical(plan_);
  if (hosts_ > 0)
    for (uint32_t r = 0; r < ranks_; ++r) graph.host_of.push_back(r * hosts_ / ranks_);
  graph.model.name = "scenario";
  for (uint32_t l = 0; l < layers_.size(); ++l) {
    graph.model.layers.push_back({layers_[l].name});
    graph.model.tensors.push_back({layers_[l].name, layers_[l].bytes.count, l, l, l});
  }
  graph::Iteration iteration;
  for (uint32_t r = 0; r < ranks_; ++r) {
    auto found = speed_.find(r);
    double slower = found == speed_.end() ? 1 : 1 / found->second;
    std::vector<graph::LayerTimes>& own = iteration.layers.emplace_back();
    for (const Layer& layer : layers_) {
      graph::LayerTimes& times = own.emplace_back(
          graph::LayerTimes{layer.forward.scaled(slower).count, layer.backward.scaled(slower).count,
                            layer.update.scaled(slower).count, 0, layer.gap.count});
      if (burns_ <= 0) continue;
      times.forward_cpu_ns = Nanos{times.forward_ns}.scaled(burns_).count;
      times.backward_cpu_ns = Nanos{times.backward_ns}.scaled(burns_).count;
      times.update_cpu_ns = Nanos{times.update_ns}.scaled(burns_).count;
    }
  }
  iteration.start_ns.assign(ranks_, 0);
  iteration.end_ns.assign(ranks_, 1);
  graph.iterations.push_back(std::move(iteration));
  return graph;
}

Result<World::Run> World::run() const {
  WEFT_ASSIGN(replay::Replayer maker, replay::Replayer::make(compute(), costs_));
  replay::Question question;
  question.make_trace = true;
  question.interval = false;
  question.iterations = iterations_;
  WEFT_ASSIGN(replay::Prediction made, maker.predict(question));
  WEFT_ASSIGN(graph::Graph graph, graph::build(*made.trace));
  for (const auto& [host, share] : share_of_link_) slow_down(graph, host, share, costs_);
  WEFT_ASSIGN(replay::Replayer replayer, replay::Replayer::make(graph, costs_));
  return Run{std::move(graph), std::move(replayer)};
}

namespace {

// Bytes of one message of each operation that leaves `rank`: the same share for all of them.
std::vector<double> bytes_of_messages(const graph::Graph& graph, uint32_t rank) {
  std::vector<double> messages(graph.operations.size(), 0);
  for (const graph::Node& node : graph.nodes)
    if (node.type == graph::NodeType::send && node.rank == rank) ++messages[node.subject];
  for (size_t i = 0; i < messages.size(); ++i)
    if (messages[i] > 0)
      messages[i] =
          cost::ring_bytes_per_rank(static_cast<double>(graph.operations[i].bytes), graph.ranks) /
          messages[i];
  return messages;
}

// All nodes, each after its causes; otherwise in the order of their starts.
std::vector<uint32_t> causes_first(const graph::Graph& graph) {
  std::vector<uint32_t> missing(graph.nodes.size(), 0), out;
  std::vector<std::vector<uint32_t>> effects(graph.nodes.size());
  for (const auto* edges : {&graph.required, &graph.recorded})
    for (const graph::Edge& edge : *edges) {
      ++missing[edge.to];
      effects[edge.from].push_back(edge.to);
    }
  std::set<uint32_t> due;
  for (uint32_t i = 0; i < missing.size(); ++i)
    if (missing[i] == 0) due.insert(i);
  while (!due.empty()) {
    uint32_t next = *due.begin();
    due.erase(due.begin());
    out.push_back(next);
    for (uint32_t effect : effects[next])
      if (--missing[effect] == 0) due.insert(effect);
  }
  WEFT_CHECK(out.size() == graph.nodes.size());
  return out;
}

// Iterations begin and end where the first layer's forwards do.
void mark_iterations(graph::Graph& graph, const std::vector<int64_t>& moved_by_end) {
  for (graph::Iteration& iteration : graph.iterations)
    for (uint32_t r = 0; r < graph.ranks; ++r) iteration.end_ns[r] += moved_by_end[r];
  for (const graph::Node& node : graph.nodes) {
    if (node.type != graph::NodeType::forward || node.subject != 0) continue;
    for (graph::Iteration& iteration : graph.iterations) {
      if (iteration.number == node.iteration) iteration.start_ns[node.rank] = node.start_ns;
      if (iteration.number + 1 == node.iteration) iteration.end_ns[node.rank] = node.start_ns;
    }
  }
}

}  // namespace

void slow_down(graph::Graph& graph, uint32_t host, double share, const cost::Costs& costs) {
  using graph::NodeType;
  const double ns_per_byte = 1e9 / (share * costs.link_bytes_per_s->value);
  const auto latency = static_cast<int64_t>(costs.round_trip_idle_ns->value / 2);
  const std::vector<double> bytes = bytes_of_messages(graph, host);
  const std::vector<graph::Node> before = graph.nodes;
  graph::Predecessors predecessors(graph);
  std::vector<int64_t> left(graph.nodes.size(), 0);  // by send: when the slow link had passed it
  std::vector<int64_t> moved(graph.ranks, 0);        // by rank: how late its last node is
  int64_t link_free = 0;
  for (uint32_t at : causes_first(graph)) {
    graph::Node& node = graph.nodes[at];
    int64_t cause_was = 0, cause_is = 0, passed = 0;
    for (graph::Predecessors::In in : predecessors.of(at)) {
      cause_was = std::max(cause_was, std::min(before[in.from].end_ns(), before[at].start_ns));
      cause_is = std::max(cause_is, graph.nodes[in.from].end_ns());
      if (node.type == NodeType::receive) passed = std::max(passed, left[in.from]);
    }
    node.start_ns = cause_is + before[at].start_ns - cause_was;
    if (node.type == NodeType::receive && passed > 0)
      node.start_ns = std::max(node.start_ns, passed + latency);
    if (node.type == NodeType::send && node.rank == host) {
      link_free = std::max(link_free, node.start_ns) +
                  static_cast<int64_t>(bytes[node.subject] * ns_per_byte);
      left[at] = link_free;
      // The socket takes no more than is soon sent, so a send lasts about until it has left.
      node.duration_ns = std::max(node.duration_ns, link_free - node.start_ns);
    }
    moved[node.rank] = node.end_ns() - before[at].end_ns();
  }
  mark_iterations(graph, moved);
  // The order of nodes is that of their starts; edges follow.
  std::vector<uint32_t> order(graph.nodes.size()), place(graph.nodes.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return graph.nodes[a].start_ns < graph.nodes[b].start_ns;
  });
  std::vector<graph::Node> sorted;
  for (uint32_t i = 0; i < order.size(); ++i) {
    place[order[i]] = i;
    sorted.push_back(graph.nodes[order[i]]);
  }
  graph.nodes = std::move(sorted);
  for (auto* edges : {&graph.required, &graph.recorded})
    for (graph::Edge& edge : *edges) edge = {place[edge.from], place[edge.to]};
}

}  // namespace weft::scenarios
