// The wire engine as it is, its ranks in threads of one process.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <thread>

#include "weft/bench.h"
#include "worker.h"

namespace weft::bench {
namespace {

class Wire : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    folder_ = (std::filesystem::temp_directory_path() / "weft-wire-test-XXXXXX").string();
    ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // All ranks do what is asked; returns their errors, empty where there was none.
  std::vector<std::string> run(uint32_t ranks, const std::vector<Request>& requests) {
    std::vector<std::string> problems(ranks);
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < ranks; ++rank)
      threads.emplace_back([&, rank] {
        Place place;
        place.rank = rank;
        place.ranks = ranks;
        place.store = folder_ + "/wire";
        auto engine = make_wire(place, GetParam());
        if (!engine) {
          problems[rank] = engine.error().message();
          return;
        }
        for (const Request& request : requests) {
          auto answer = (*engine)->measure(request);
          if (!answer)
            problems[rank] = answer.error().message();
          else if (!(answer->seconds > 0))
            problems[rank] = "no time passed";
        }
      });
    for (std::thread& thread : threads) thread.join();
    return problems;
  }

  std::string folder_;
};

TEST_P(Wire, MovesWhatEachCollectiveMovesOnAnyNumberOfRanks) {
  for (uint32_t ranks : {2u, 3u, 5u}) {
    std::vector<Request> requests;
    for (const std::string& collective : collectives())
      for (uint64_t count : {uint64_t{ranks}, uint64_t{300'000} * ranks}) {
        Request request;
        request.collective = collective;
        request.count = count;
        request.iterations = 3;
        request.setting = 1 << 18;
        requests.push_back(request);
      }
    for (const std::string& problem : run(ranks, requests)) EXPECT_EQ(problem, "") << ranks;
    TearDown();
    SetUp();
  }
}

TEST_P(Wire, RefusesARequestWithoutBytesACall) {
  Request request;
  request.count = 100;
  for (const std::string& problem : run(2, {request}))
    EXPECT_EQ(problem, "no bytes a call are named");
}

INSTANTIATE_TEST_SUITE_P(Over, Wire, ::testing::Bool(),
                         [](const auto& of) { return of.param ? "shm" : "tcp"; });

}  // namespace
}  // namespace weft::bench
