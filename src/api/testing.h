// Ranks as threads of one process, that join as a launcher's would.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "weft/api.h"

namespace weft::api {

using Variables = std::map<std::string, std::string>;

inline membership::Lookup environment(Variables variables) {
  return [variables = std::move(variables)](const char* name) -> std::optional<std::string> {
    auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

inline std::string new_folder(const char* name) {
  std::string folder = ::testing::TempDir() + "/weft_api_" + name + "_" + membership::new_secret();
  std::filesystem::create_directories(folder);
  return folder;
}

// What `weft run` would say to a rank; ranks meet by a file.
inline Variables launched(uint32_t rank, uint32_t ranks, const std::string& folder) {
  return {{"WEFT_RANK", std::to_string(rank)},
          {"WEFT_SIZE", std::to_string(ranks)},
          {"WEFT_RENDEZVOUS", "file:" + folder + "/meeting"},
          {"WEFT_SECRET", "00112233445566778899aabbccddeeff"}};
}

// Runs `body` once a rank, each in a thread, and expects that all succeed.
inline void run_ranks(uint32_t ranks, const Variables& more,
                      const std::function<Result<void>(std::unique_ptr<Job>&)>& body) {
  std::string folder = new_folder("ranks");
  std::vector<Result<void>> outcomes(ranks);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      Variables variables = launched(rank, ranks, folder);
      variables.insert(more.begin(), more.end());
      JoinOptions options;
      options.environment = environment(variables);
      auto job = join(options);
      outcomes[rank] = job ? body(*job) : Result<void>(job.error());
    });
  for (std::thread& thread : threads) thread.join();
  for (uint32_t rank = 0; rank < ranks; ++rank)
    EXPECT_TRUE(outcomes[rank].ok())
        << "rank " << rank << ": " << (outcomes[rank] ? "" : outcomes[rank].error().message());
  std::filesystem::remove_all(folder);
}

}  // namespace weft::api
