// A profile as torch.profiler writes it (Kineto's Chrome JSON), read event by event: such files
// have gigabytes, and are never a tree in memory. Private to the module.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "weft/base.h"

namespace weft::trace {

struct ProfileHead {
  int64_t base_ns = 0;                // what times in the file count from, as the wall clock has it
  std::optional<uint32_t> rank;       // if the file says it
  uint64_t events = 0;                // that have a time
  int64_t first_ns = 0, last_ns = 0;  // of these, by the wall clock
};

// Reads the file once. Fails with corrupt if it is no profile, saying what it is.
Result<ProfileHead> read_profile_head(const std::string& path);

// Reads it again: every event, and when it was by the wall clock, if it has a time.
using ProfileUser = std::function<void(nlohmann::json& event, std::optional<int64_t> wall_ns)>;
Result<void> read_profile(const std::string& path, const ProfileHead& head,
                          const ProfileUser& user);

}  // namespace weft::trace
