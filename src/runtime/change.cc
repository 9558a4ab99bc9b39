// Another plan while the job runs: what all ranks can take, all take, and otherwise none does.
//
// Every rank first makes everything that the new plan needs and that can fail: the layout, the
// workers, room for the lanes that others may open. Then the ranks tell each other what they have.
// If all have the same, each puts it in force, and the barrier behind makes sure that no rank
// begins a step before all have done so.
#include <algorithm>
#include <array>
#include <cstring>

#include "group.h"

namespace weft::runtime {
namespace {

constexpr size_t kNameMax = 64;               // bytes of a plan's name that others hear of
constexpr const char* kPlanChanged = "plan";  // the key of a note
constexpr size_t kWordsMax = 4096;            // of a reason

// What a rank says of itself, to all others.
struct Vote {
  std::array<char, 24> hash{};
  std::array<char, kNameMax> name{};
  uint64_t step = 0;
  uint32_t code = 0;   // why it cannot; 0: it can
  uint32_t words = 0;  // bytes of the reason

  std::string hash_text() const { return {hash.data(), strnlen(hash.data(), hash.size())}; }
  std::string name_text() const { return {name.data(), strnlen(name.data(), name.size())}; }
};

template <size_t N>
void put(std::array<char, N>& to, const std::string& from) {
  std::copy_n(from.begin(), std::min(N - 1, from.size()), to.begin());
}

}  // namespace

struct Exchange::Impl::Proposal {
  std::unique_ptr<Course> course;
  std::optional<Error> refusal;
  bool lanes_ready = false;
  Vote vote;
};

Result<void> Exchange::change_plan(Result<plan::Plan> plan) {
  return impl_->group->together([&]() -> Result<void> {
    Impl& impl = *impl_;
    WEFT_TRY(impl.group->may_wait());
    {
      std::lock_guard lock(impl.group->mutex);
      if (impl.group->failure) return *impl.group->failure;
      if (std::exchange(impl.changing, true))
        return error(Code::invalid_argument,
                     "another thread of this rank is changing the plan already");
    }
    auto done = impl.change_plan(std::move(plan));
    std::lock_guard lock(impl.group->mutex);
    impl.changing = false;
    return done;
  });
}

Result<void> Exchange::Impl::change_plan(Result<plan::Plan> plan) {
  Proposal own = propose(std::move(plan));
  if (auto agreed = agree(own); !agreed) {
    auto sits = group->take_seat();
    if (own.lanes_ready) group->engine->forget_change();
    return agreed;
  }
  const uint64_t step = own.vote.step;
  const std::string text_of_plan = plan::canonical(own.course->plan);
  {
    auto sits = group->take_seat();
    if (group->failed) return *group->current_failure();
    group->engine->change_lanes();
    std::lock_guard lock(group->mutex);
    take(std::move(own.course));
  }
  uint8_t nothing = 0;
  Call barrier;
  barrier.collective = Collective::barrier;
  barrier.output = &nothing;
  barrier.count = 1;
  barrier.type = Type::uint8;
  WEFT_TRY(run(barrier));
  // Behind the barrier: what was recorded before it is not of the new plan.
  group->recorder.note(kPlanChanged,
                       text("%llu\n", static_cast<unsigned long long>(step)) + text_of_plan);
  return {};
}

// What all tensors have done, if nothing is under way.
Result<uint64_t> Exchange::Impl::step_between() const {
  std::lock_guard lock(group->mutex);
  const schedule::Readiness& readiness = course->readiness;
  uint64_t step = 0;
  for (uint32_t t = 0; t < tensors.size(); ++t) step = std::max(step, readiness.due(t));
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    if (readiness.due(t) == step && states[t].steps_done.load() == step) continue;
    return error(Code::invalid_argument,
                 "step %llu is not over: \"%s\" %s; a plan changes when all sums of a step are "
                 "there and no gradient of the next is ready",
                 static_cast<unsigned long long>(step - 1), tensors[t].name.c_str(),
                 readiness.due(t) == step ? "is on its way" : "was not ready in it");
  }
  return step;
}

Exchange::Impl::Proposal Exchange::Impl::propose(Result<plan::Plan> plan) {
  Proposal out;
  auto prepared = [&]() -> Result<void> {
    if (!plan) return plan.error();
    put(out.vote.name, plan->name);
    WEFT_TRY(plan::validate(*plan));
    WEFT_TRY(schedule::supported(*plan));
    put(out.vote.hash, plan::hash(*plan));
    WEFT_ASSIGN(out.vote.step, step_between());
    schedule::Beginning from{out.vote.step, 0};
    {
      auto sits = group->take_seat();
      from.operation = group->is_root() ? course->admission->next_operation() : told;
    }
    WEFT_ASSIGN(out.course, Course::make(*group, *plan, tensors, from));
    auto sits = group->take_seat();
    if (group->failed) return *group->current_failure();
    WEFT_TRY(group->engine->get_ready(lanes_of(schedule::scaled(*plan, group->options.shrink))));
    out.lanes_ready = true;
    return {};
  }();
  if (prepared) return out;
  out.refusal = std::move(prepared).error();
  out.vote.code = static_cast<uint32_t>(out.refusal->code());
  out.vote.words = static_cast<uint32_t>(std::min(kWordsMax, out.refusal->message().size()));
  return out;
}

// The same outcome on all ranks, because it follows from what all have heard.
Result<void> Exchange::Impl::agree(const Proposal& own) {
  const uint32_t ranks = group->mesh.ranks;
  std::vector<Vote> votes(ranks);
  votes[group->mesh.rank.index] = own.vote;
  Call gather;
  gather.collective = Collective::all_gather;
  gather.output = votes.data();
  gather.count = ranks * sizeof(Vote);
  gather.type = Type::uint8;
  WEFT_TRY(run(gather));
  auto goes_on = [](Code code, const std::string& why) {
    return Error(code, why + "; the plan before goes on");
  };
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const Vote& vote = votes[rank];
    if (vote.code == 0) continue;
    std::string words(std::min<size_t>(vote.words, kWordsMax), ' ');
    if (own.refusal && rank == group->mesh.rank.index)
      words = own.refusal->message().substr(0, words.size());
    Call tell;
    tell.collective = Collective::broadcast;
    tell.output = words.data();
    tell.count = words.size();
    tell.type = Type::uint8;
    tell.root = rank;
    WEFT_TRY(run(tell));
    const std::string name = vote.name_text();
    return goes_on(code_from(static_cast<uint8_t>(vote.code)),
                   text("%s cannot take %s: %s", group->describe({rank}).c_str(),
                        name.empty() ? "another plan" : text("plan \"%s\"", name.c_str()).c_str(),
                        words.c_str()));
  }
  for (uint32_t rank = 1; rank < ranks; ++rank) {
    const Vote &one = votes[rank], &root = votes[0];
    if (one.step != root.step)
      return goes_on(
          Code::invalid_argument,
          text("%s changes the plan before step %llu, %s before step %llu: all ranks do so between "
               "the same two",
               group->describe({rank}).c_str(), static_cast<unsigned long long>(one.step),
               group->describe({0}).c_str(), static_cast<unsigned long long>(root.step)));
    if (one.hash != root.hash)
      return goes_on(
          Code::invalid_argument,
          text("%s was given plan \"%s\" (%s), %s plan \"%s\" (%s): all ranks take the "
               "same",
               group->describe({rank}).c_str(), one.name_text().c_str(), one.hash_text().c_str(),
               group->describe({0}).c_str(), root.name_text().c_str(), root.hash_text().c_str()));
  }
  return {};
}

Result<void> Exchange::Impl::run(const Call& call) {
  WEFT_ASSIGN(auto state,
              group->prepare(call, nullptr, 0, group->mesh.rank.index, group->mesh.ranks));
  group->want_progress_thread();
  auto done = [&] { return state->done.load(std::memory_order_acquire); };
  group->drive_until(done);
  if (done()) return {};
  return *group->current_failure();
}

}  // namespace weft::runtime
