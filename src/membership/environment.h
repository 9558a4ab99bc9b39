// What this process can find out about those above it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace weft::membership {

// Number and start time, as "4711@123456", of the nearest process above this one whose name ends
// so.
std::optional<std::string> ancestor_named(std::string_view ending);

}  // namespace weft::membership
