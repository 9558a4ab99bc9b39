// Private to plan: what the reader and the checker share, so that both say a thing alike.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "weft/plan.h"

namespace weft::plan {

template <typename T>
struct Word {
  const char* name;
  T value;
};

inline constexpr std::array<Word<Order>, 2> kOrders = {
    {{"ready", Order::ready}, {"layer", Order::layer}}};
inline constexpr std::array<Word<Barrier>, 2> kBarriers = {
    {{"all", Barrier::all}, {"tensor", Barrier::tensor}}};
inline constexpr std::array<Word<LaneWorker>, 2> kLaneWorkers = {
    {{"thread", LaneWorker::thread}, {"process", LaneWorker::process}}};
inline constexpr std::array<Word<Sync>, 5> kSyncs = {{{"synchronous", Sync::synchronous},
                                                      {"asynchronous", Sync::asynchronous},
                                                      {"bounded_stale", Sync::bounded_stale},
                                                      {"local_sgd", Sync::local_sgd},
                                                      {"one_step_delay", Sync::one_step_delay}}};

// Text of others between quotes, fit for one line of a terminal.
std::string in_quotes(std::string_view input);

// One step of a JSON pointer, "/" included: a key that may hold "/" and "~".
std::string pointer_step(std::string_view key);

// PATH: found FOUND, expected EXPECTED.
Error mismatch(const std::string& path, const std::string& found, const std::string& expected);

std::string integer_range(int64_t low, int64_t high);
std::string size_range(Bytes low, Bytes high);
// What is wrong with a name as text, if anything: empty, too long, or with control characters.
std::string name_fault(std::string_view name, size_t limit);
// "one of ring, tree", and a near one if there is: `; did you mean "tree"?`.
std::string one_of(std::string_view found, const std::vector<std::string>& words);

}  // namespace weft::plan
