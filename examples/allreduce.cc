// The smallest job: every rank brings an array, and all get the sum.
//
//   weft run -n 3 -- ./allreduce        or torchrun, mpirun, srun; alone it is a group of one
#include <cstdio>
#include <vector>

#include "weft/api.h"

namespace {

weft::Result<void> run() {
  // The environment says which rank this is, and where the others are.
  WEFT_ASSIGN(auto job, weft::api::join());
  weft::Group& group = job->group();
  const uint32_t rank = group.rank().index, ranks = group.ranks();

  std::vector<float> data(100003);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i % 100 + rank);
  WEFT_TRY(group.all_reduce(data));  // in place; the same bits on every rank

  const uint32_t of_ranks = ranks * (ranks - 1) / 2;
  for (size_t i = 0; i < data.size(); ++i)
    if (data[i] != static_cast<float>(i % 100 * ranks + of_ranks))
      return weft::error(weft::Code::corrupt, "element %zu is %g", i, double{data[i]});

  // Other types and operations go through a Call: here the largest of 64-bit integers, to rank 0.
  int64_t mine = 1000 + rank, largest = 0;
  weft::Call call;
  call.collective = weft::Collective::reduce;
  call.input = &mine;
  call.output = &largest;
  call.count = 1;
  call.type = weft::Type::int64;
  call.op = weft::Op::max;
  WEFT_TRY(group.run(call));
  if (rank == 0 && largest != 999 + int64_t{ranks})
    return weft::error(weft::Code::corrupt, "the largest is %lld", static_cast<long long>(largest));

  std::printf("rank %u of %u: the sums are right\n", rank, ranks);
  // Without this the others would take our end for a loss.
  return job->leave();
}

}  // namespace

int main() {
  if (auto done = run(); !done) {
    std::fprintf(stderr, "allreduce: %s\n", done.error().message().c_str());
    return 1;
  }
  return 0;
}
