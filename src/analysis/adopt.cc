// Gradients that a framework had summed by calling all-reduces itself, understood as an exchange.
#include <algorithm>
#include <map>
#include <set>

#include "weft/analysis.h"

namespace weft::analysis {
namespace {

using trace::Event;
using trace::Kind;
using trace::kNone;

constexpr const char* kAdopted = "called_sums_adopted";  // the key of a note
constexpr uint32_t kCalled = 1u << 31;  // operations from here on stand in no common order

// A bucket of one iteration, as one rank saw it.
struct Bucket {
  std::vector<uint32_t> tensors;
  uint64_t bytes = 0;
  int64_t ready_ns = 0;  // all of them were
};
using Step = std::map<uint32_t, Bucket>;  // by bucket

struct Call {
  uint32_t number = 0;
  int64_t start_ns = 0;
  uint64_t bytes = 0;
};

using Place = std::pair<uint32_t, uint32_t>;  // iteration, bucket
using Found = std::map<Place, uint32_t>;      // numbers of operations

bool is_sum(const Event& event) {
  return event.kind == Kind::operation && event.shape == trace::Shape::span &&
         trace::flaw_of(event) == nullptr;
}

bool names_its_bucket(const Event& event) {
  return event.kind == Kind::gradient_ready && event.bucket != kNone && event.iteration != kNone &&
         event.tensor != kNone && trace::flaw_of(event) == nullptr;
}

std::map<uint32_t, Step> steps_of(const trace::Process& process) {
  std::map<uint32_t, Step> steps;
  for (const Event& event : process.events) {
    if (!names_its_bucket(event) || event.tensor >= process.model.tensors.size()) continue;
    auto [at, made] =
        steps[event.iteration].try_emplace(event.bucket, Bucket{{}, 0, event.start_ns});
    at->second.tensors.push_back(event.tensor);
    at->second.bytes += event.bytes;
    at->second.ready_ns = std::max(at->second.ready_ns, event.start_ns);
  }
  return steps;
}

// In the order in which they were called. Two groups may have used one number: then nobody knows
// whose messages bear it.
std::vector<Call> calls_of(const trace::Process& process) {
  std::vector<Call> calls;
  std::map<uint32_t, size_t> times;
  for (const Event& event : process.events)
    if (is_sum(event) && event.operation >= kCalled && event.operation != kNone) {
      calls.push_back({event.operation, event.start_ns, event.bytes});
      ++times[event.operation];
    }
  std::erase_if(calls, [&](const Call& call) { return times[call.number] > 1; });
  std::sort(calls.begin(), calls.end(),
            [](const Call& a, const Call& b) { return a.start_ns < b.start_ns; });
  return calls;
}

// Buckets are summed in their order, each when it is there: the first operation of its size since.
Found match(const std::map<uint32_t, Step>& steps, const std::vector<Call>& calls) {
  Found found;
  auto call = calls.begin();
  for (auto step = steps.begin(); step != steps.end(); ++step) {
    // What begins later is of the next iteration.
    int64_t until = INT64_MAX;
    if (auto next = std::next(step); next != steps.end())
      for (const auto& [number, bucket] : next->second) until = std::min(until, bucket.ready_ns);
    for (const auto& [number, bucket] : step->second) {
      auto at = std::find_if(call, calls.end(), [&, wanted = &bucket](const Call& one) {
        return one.start_ns >= wanted->ready_ns && one.start_ns < until &&
               one.bytes == wanted->bytes;
      });
      if (at == calls.end()) break;
      found[{step->first, number}] = at->number;
      call = std::next(at);
    }
  }
  return found;
}

// DDP's wait ends when it has copied the sums to where they belong: only until the last of them is
// there was it waiting.
void end_waits_with_sums(trace::Process& process) {
  std::map<uint32_t, int64_t> last;  // by iteration
  for (const Event& event : process.events)
    if (is_sum(event) && event.operation < kCalled && event.iteration != kNone) {
      auto [at, made] = last.try_emplace(event.iteration, event.end_ns());
      at->second = std::max(at->second, event.end_ns());
    }
  for (Event& event : process.events) {
    if (event.kind != Kind::wait || event.tensor != kNone) continue;
    if (auto at = last.find(event.iteration); at != last.end() && at->second < event.end_ns())
      event.duration_ns = std::max<int64_t>(0, at->second - event.start_ns);
  }
}

// What all ranks say alike, and whole iterations of it only.
Found agreed(const std::vector<Found>& by_rank, const std::map<uint32_t, Step>& steps) {
  Found out = by_rank.front();
  std::erase_if(out, [&](const auto& one) {
    return !std::all_of(by_rank.begin(), by_rank.end(), [&](const Found& other) {
      auto at = other.find(one.first);
      return at != other.end() && at->second == one.second;
    });
  });
  for (const auto& [iteration, step] : steps) {
    auto of = [number = iteration](const auto& one) { return one.first.first == number; };
    if (static_cast<size_t>(std::count_if(out.begin(), out.end(), of)) != step.size())
      std::erase_if(out, of);
  }
  return out;
}

void rewrite(trace::Process& process, const std::map<uint32_t, Step>& steps,
             const std::set<uint32_t>& iterations,
             const std::map<uint32_t, std::pair<uint32_t, Place>>& by_call) {
  // What became of the gradients of other iterations is not known.
  std::erase_if(process.events, [&](const Event& event) {
    return event.kind == Kind::gradient_ready && !iterations.contains(event.iteration);
  });
  std::vector<Event> done;
  for (Event& event : process.events) {
    auto at = by_call.find(event.operation);
    if (at == by_call.end()) continue;
    const auto& [number, place] = at->second;
    event.operation = number;
    event.iteration = place.first;
    event.bucket = place.second;
    event.partition = 0;
    if (!is_sum(event)) continue;
    for (uint32_t tensor : steps.at(place.first).at(place.second).tensors) {
      Event& one = done.emplace_back();
      one.start_ns = event.end_ns();
      one.shape = trace::Shape::instant;
      one.kind = Kind::tensor_done;
      one.track = event.track;
      one.iteration = place.first;
      one.tensor = tensor;
      const uint32_t layer = process.model.tensors[tensor].consumed_by;
      if (layer < trace::kNone16) one.layer = static_cast<uint16_t>(layer);
      one.bytes = process.model.tensors[tensor].bytes;
    }
  }
  process.events.insert(process.events.end(), done.begin(), done.end());
  end_waits_with_sums(process);
}

// What the framework did, said as a plan. Lanes and chunks were those of the plan in force; where
// somebody else carried the sums, weft's would be those of its default.
Result<plan::Plan> plan_of(const trace::Process& process, const Step& step, bool by_others) {
  WEFT_ASSIGN(plan::Plan plan,
              by_others ? plan::preset("default") : plan::parse(process.environment.plan_text));
  plan.name = "ddp";
  plan.comment = "what PyTorch's DistributedDataParallel did by itself";
  plan.buckets.clear();
  for (const auto& [number, bucket] : step) {
    plan::BucketSpec& spec = plan.buckets.emplace_back();
    for (uint32_t tensor : bucket.tensors)
      spec.tensors.push_back(process.model.tensors[tensor].name);
  }
  plan.partition.reset();
  plan.order = plan::Order::ready;
  plan.priority.clear();
  plan.credit.reset();
  plan.barrier = plan::Barrier::all;
  WEFT_TRY(plan::validate(plan));
  return plan;
}

// Weft records every message of an operation, any other library none.
bool are_summed_by_others(const trace::Trace& trace) {
  if (trace.processes.size() < 2) return false;
  for (const trace::Process& process : trace.processes)
    for (const Event& event : process.events)
      if (event.kind == Kind::chunk) return false;
  return true;
}

}  // namespace

std::vector<std::string> adopt_called_sums(trace::Trace& trace) {
  bool named = false;
  for (const trace::Process& process : trace.processes)
    for (const Event& event : process.events) {
      if (is_sum(event) && event.operation < kCalled) return {};  // there is an exchange
      named = named || names_its_bucket(event);
    }
  if (!named) return {};
  std::vector<std::map<uint32_t, Step>> steps;
  std::vector<Found> found;
  for (const trace::Process& process : trace.processes) {
    steps.push_back(steps_of(process));
    found.push_back(match(steps.back(), calls_of(process)));
  }
  const Found all = agreed(found, steps.front());
  if (all.empty())
    return {
        "gradients were summed in buckets, and no operation of their sizes was found: how they "
        "travelled is not known"};
  const bool by_others = are_summed_by_others(trace);
  auto plan =
      plan_of(trace.processes.front(), steps.front().at(all.rbegin()->first.first), by_others);
  if (!plan) return {"the plan in the trace cannot be read: " + plan.error().message()};
  std::map<uint32_t, std::pair<uint32_t, Place>> by_call;
  std::set<uint32_t> iterations;
  for (const auto& [place, call] : all) {
    by_call[call] = {static_cast<uint32_t>(by_call.size()), place};
    iterations.insert(place.first);
  }
  for (size_t p = 0; p < trace.processes.size(); ++p) {
    rewrite(trace.processes[p], steps[p], iterations, by_call);
    trace::Environment& environment = trace.processes[p].environment;
    environment.plan_name = plan->name;
    environment.plan_hash = plan::hash(*plan);
    environment.plan_text = plan::canonical(*plan);
    trace.processes[p].notes.push_back({0, kAdopted, std::to_string(by_call.size())});
  }
  std::vector<std::string> said = {
      text("gradients went by all-reduces that the framework called, one a bucket, %zu in an "
           "iteration, from iteration %u on: this is taken for the plan in force",
           plan->buckets.size(), *iterations.begin())};
  if (by_others) {
    for (trace::Process& process : trace.processes)
      process.notes.push_back({0, graph::kSumsBy, "another backend"});
    said.push_back(
        "another backend summed them, not weft: what it was measured to take is all that is known "
        "of that; the plan in force stands for weft with these buckets and the lanes of its "
        "default");
  }
  return said;
}

bool framework_cuts(const trace::Trace& trace) {
  return std::any_of(
      trace.processes.begin(), trace.processes.end(), [](const trace::Process& process) {
        return std::any_of(process.notes.begin(), process.notes.end(),
                           [](const trace::Note& note) { return note.key == kAdopted; });
      });
}

const std::vector<std::string>& passes_of_an_exchange() {
  static const std::vector<std::string> passes = {"order",     "barrier", "bucket",
                                                  "partition", "credit",  "boundaries"};
  return passes;
}

}  // namespace weft::analysis
