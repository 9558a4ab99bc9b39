// A rank dies in the middle of the work. The others learn who it was, make a new group of those
// that are left, and go on from the last step that all of them had finished.
//
//   weft run -n 3 -- ./survive
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "weft/api.h"

namespace {

constexpr uint64_t kSteps = 10, kDeath = 4;

// One step of "training": every rank adds its part, and all check the sum.
weft::Result<void> step(weft::Group& group, uint64_t number) {
  std::vector<float> data(30000, static_cast<float>(number + 1));
  WEFT_TRY(group.all_reduce(data));
  for (float value : data)
    if (value != static_cast<float>((number + 1) * group.ranks()))
      return weft::error(weft::Code::corrupt, "step %llu gave %g",
                         static_cast<unsigned long long>(number), double{value});
  return {};
}

weft::Result<void> run() {
  WEFT_ASSIGN(auto job, weft::api::join());
  const uint32_t first_rank = job->group().rank().index, first_ranks = job->group().ranks();
  const uint32_t doomed = first_ranks - 1;
  bool rebuilt = false;

  for (uint64_t number = 0; number < kSteps;) {
    if (!rebuilt && first_ranks > 1 && number == kDeath && first_rank == doomed) {
      // As if it had been killed: nothing is said to anyone. With another exit code a launcher
      // would end the whole job.
      std::_Exit(0);
    }
    auto done = step(job->group(), number);
    if (done) {
      ++number;
      continue;
    }
    // A wrong sum is nothing to survive; a lost rank is.
    if (done.error().code() == weft::Code::corrupt) return done;
    auto culprit = job->group().culprit();
    std::printf("rank %u: step %llu: %s\n", first_rank, static_cast<unsigned long long>(number),
                done.error().message().c_str());
    if (rebuilt || !culprit || culprit->index != doomed)
      return weft::error(weft::Code::corrupt, "another rank is blamed than the one that died");
    // All survivors come here. The wait ends when the time to settle is over: ranks that would come
    // later are left out.
    WEFT_ASSIGN(auto smaller, job->rebuild());
    job = std::move(smaller);
    rebuilt = true;
    // A rank may have finished the step before it heard of the death, and another not: all go on
    // from the lowest.
    auto lowest = static_cast<int64_t>(number);
    weft::Call call;
    call.output = &lowest;
    call.count = 1;
    call.type = weft::Type::int64;
    call.op = weft::Op::min;
    WEFT_TRY(job->group().run(call));
    number = static_cast<uint64_t>(lowest);
  }
  if (rebuilt != (first_ranks > 1) || job->group().ranks() != first_ranks - (rebuilt ? 1 : 0))
    return weft::error(weft::Code::corrupt, "%u ranks are left of %u", job->group().ranks(),
                       first_ranks);
  std::printf("rank %u: all %llu steps, the last ones with %u ranks\n", first_rank,
              static_cast<unsigned long long>(kSteps), job->group().ranks());
  return job->leave();
}

}  // namespace

int main() {
  if (auto done = run(); !done) {
    std::fprintf(stderr, "survive: %s\n", done.error().message().c_str());
    return 1;
  }
  return 0;
}
