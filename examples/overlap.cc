// Operations that run while the program computes: blocks of an array are summed over all ranks as
// they are made, and used when they are there.
//
//   weft run -n 3 -- ./overlap
#include <atomic>
#include <cstdio>
#include <vector>

#include "weft/api.h"

namespace {

constexpr size_t kBlocks = 16, kBlock = 20000;

// Something to compute, with results that are whole numbers: sums of them are exact.
void make(std::span<float> block, size_t number, uint32_t rank) {
  for (size_t i = 0; i < block.size(); ++i)
    block[i] = static_cast<float>((i * 31 + number * 17) % 257 + rank);
}

bool is_sum(std::span<const float> block, size_t number, uint32_t ranks) {
  const uint32_t of_ranks = ranks * (ranks - 1) / 2;
  for (size_t i = 0; i < block.size(); ++i)
    if (block[i] != static_cast<float>((i * 31 + number * 17) % 257 * ranks + of_ranks))
      return false;
  return true;
}

weft::Result<void> run() {
  // What operations and callbacks touch stands before the job, and so outlives it.
  std::vector<float> data(kBlocks * kBlock);
  std::atomic<size_t> done = 0;
  WEFT_ASSIGN(auto job, weft::api::join());
  weft::Group& group = job->group();
  auto block = [&](size_t number) { return std::span(data).subspan(number * kBlock, kBlock); };

  // All ranks start the same operations in the same order; how fast each one is does not matter.
  std::vector<weft::Work> works;
  for (size_t number = 0; number < kBlocks; ++number) {
    make(block(number), number, group.rank().index);
    weft::Call call;
    call.output = block(number).data();  // belongs to the operation until it is done
    call.count = kBlock;
    call.priority = static_cast<int64_t>(number);  // the first block is used first
    WEFT_ASSIGN(weft::Work work, group.start(call));
    // Runs in whichever thread finds the operation done: short, and it must not wait for weft.
    work.then([&done](const weft::Result<void>& result) { done += result.ok() ? 1 : 0; });
    works.push_back(std::move(work));
  }

  for (size_t number = 0; number < kBlocks; ++number) {
    WEFT_TRY(works[number].wait());
    if (!is_sum(block(number), number, group.ranks()))
      return weft::error(weft::Code::corrupt, "block %zu is not the sum", number);
  }
  // Callbacks come right after the operation is seen to be done, so the last may still be running:
  // leaving is a round trip, and the group's end waits for whoever drives it.
  WEFT_TRY(job->leave());
  works.clear();  // handles go before their job
  const uint32_t rank = group.rank().index;
  job.reset();
  if (done != kBlocks)
    return weft::error(weft::Code::corrupt, "%zu callbacks of %zu came", done.load(), kBlocks);
  std::printf("rank %u: %zu blocks were summed while others were made\n", rank, kBlocks);
  return {};
}

}  // namespace

int main() {
  if (auto done = run(); !done) {
    std::fprintf(stderr, "overlap: %s\n", done.error().message().c_str());
    return 1;
  }
  return 0;
}
