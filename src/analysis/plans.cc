// A run whose plan changed is several: the steps of one plan are kept.
#include <algorithm>
#include <charconv>
#include <limits>

#include "weft/analysis.h"

namespace weft::analysis {
namespace {

constexpr const char* kPlanChanged = "plan";  // the key of a note
constexpr size_t kNamed = 8;                  // of the other plans

struct Change {
  int64_t at_ns = 0;  // on the clock of its rank
  PlanInForce plan;
};

Result<Change> change_of(const trace::Note& note) {
  const std::string_view words = note.value;
  const size_t line = words.find('\n');
  Change out;
  out.at_ns = note.time_ns;
  const char* end = words.data() + std::min(line, words.size());
  auto [at, problem] = std::from_chars(words.data(), end, out.plan.first);
  if (line == std::string_view::npos || problem != std::errc() || at != end)
    return error(Code::corrupt, "a change of the plan does not say its step");
  WEFT_ASSIGN(const plan::Plan plan, plan::parse(words.substr(line + 1)));
  out.plan.name = plan.name;
  out.plan.hash = plan::hash(plan);
  out.plan.text = plan::canonical(plan);
  return out;
}

Result<std::vector<Change>> changes_of(const trace::Process& process) {
  std::vector<Change> out;
  for (const trace::Note& note : process.notes) {
    if (note.key != kPlanChanged) continue;
    auto change = change_of(note);
    if (!change) return std::move(change).error().in(text("rank %u", process.environment.rank));
    if (!out.empty() && change->plan.first < out.back().plan.first)
      return error(Code::corrupt, "rank %u: its plan changes before step %u after step %u",
                   process.environment.rank, change->plan.first, out.back().plan.first);
    out.push_back(std::move(*change));
  }
  return out;
}

// A rank whose file ends early knows fewer than the others.
Result<std::vector<std::vector<Change>>> changes_by_process(const trace::Trace& trace) {
  std::vector<std::vector<Change>> out;
  const std::vector<Change>* all = nullptr;
  for (const trace::Process& process : trace.processes) {
    WEFT_ASSIGN(std::vector<Change> own, changes_of(process));
    out.push_back(std::move(own));
  }
  for (const auto& own : out)
    if (all == nullptr || own.size() > all->size()) all = &own;
  for (size_t p = 0; p < out.size(); ++p)
    for (size_t c = 0; c < out[p].size(); ++c)
      if (out[p][c].plan.first != (*all)[c].plan.first ||
          out[p][c].plan.hash != (*all)[c].plan.hash)
        return error(Code::corrupt, "rank %u changed to other plans than the other ranks did",
                     trace.processes[p].environment.rank);
  return out;
}

bool moved_gradients(const trace::Trace& trace, const PlanInForce& plan) {
  for (const trace::Process& process : trace.processes)
    for (const trace::Event& event : process.events)
      if (event.kind == trace::Kind::tensor_done && plan.holds(event.iteration)) return true;
  return false;
}

Result<size_t> choose(const trace::Trace& trace, const std::vector<PlanInForce>& plans,
                      const std::string& which) {
  // One that was taken when the run was nearly over has nothing to show.
  for (size_t p = plans.size(); p-- > 0;)
    if (which.empty() ? moved_gradients(trace, plans[p])
                      : plans[p].name == which || plans[p].hash == which)
      return p;
  if (which.empty()) return plans.size() - 1;
  std::string names;
  for (const PlanInForce& plan : plans)
    names += text("%s\"%s\" (%s)", names.empty() ? "" : ", ", plan.name.c_str(), plan.hash.c_str());
  return error(Code::not_found, "no plan \"%s\" was in force in this run; there was %s",
               which.c_str(), names.c_str());
}

}  // namespace

bool PlanInForce::holds(uint32_t step) const { return step >= first && (!end || step < *end); }

std::string PlanInForce::steps() const {
  if (!end) return weft::text("steps from %u on", first);
  if (*end == first) return "no step";
  return *end == first + 1 ? weft::text("step %u", first)
                           : weft::text("steps %u to %u", first, *end - 1);
}

Result<std::vector<PlanInForce>> plans_of(const trace::Trace& trace) {
  std::vector<PlanInForce> out;
  if (trace.processes.empty()) return out;
  const trace::Environment& environment = trace.processes.front().environment;
  out.push_back({environment.plan_name, environment.plan_hash, environment.plan_text, 0, {}});
  WEFT_ASSIGN(const auto changes, changes_by_process(trace));
  const auto longest =
      std::max_element(changes.begin(), changes.end(),
                       [](const auto& a, const auto& b) { return a.size() < b.size(); });
  for (const Change& change : *longest) {
    out.back().end = change.plan.first;
    out.push_back(change.plan);
  }
  return out;
}

Result<std::vector<std::string>> keep_one_plan(trace::Trace& trace, const std::string& which) {
  WEFT_ASSIGN(const std::vector<PlanInForce> plans, plans_of(trace));
  if (plans.empty()) return std::vector<std::string>();
  WEFT_ASSIGN(const size_t chosen, choose(trace, plans, which));
  if (plans.size() == 1) return std::vector<std::string>();
  const PlanInForce& kept = plans[chosen];
  WEFT_ASSIGN(const auto changes, changes_by_process(trace));
  for (size_t p = 0; p < trace.processes.size(); ++p) {
    trace::Process& process = trace.processes[p];
    // What says no step is told by its time: nothing of an exchange is under way in a change.
    int64_t from = std::numeric_limits<int64_t>::min(), to = std::numeric_limits<int64_t>::max();
    if (chosen > 0 && chosen <= changes[p].size()) from = changes[p][chosen - 1].at_ns;
    if (chosen < changes[p].size()) to = changes[p][chosen].at_ns;
    std::erase_if(process.events, [&](const trace::Event& event) {
      if (event.iteration != trace::kNone) return !kept.holds(event.iteration);
      return event.start_ns < from || event.start_ns >= to;
    });
    std::erase_if(process.notes, [](const trace::Note& note) { return note.key == kPlanChanged; });
    process.environment.plan_name = kept.name;
    process.environment.plan_hash = kept.hash;
    process.environment.plan_text = kept.text;
  }
  std::string others;
  size_t named = 0;
  for (size_t p = 0; p < plans.size(); ++p)
    if (p != chosen && ++named <= kNamed)
      others += text("%s\"%s\" (%s)", others.empty() ? "" : ", ", plans[p].name.c_str(),
                     plans[p].steps().c_str());
  if (named > kNamed) others += text(" and %zu more", named - kNamed);
  return std::vector<std::string>{
      text("the plan changed %zu time%s in this run: this is of the %s, under plan \"%s\"; others "
           "were in force too: %s",
           plans.size() - 1, plans.size() == 2 ? "" : "s", kept.steps().c_str(), kept.name.c_str(),
           others.c_str())};
}

}  // namespace weft::analysis
