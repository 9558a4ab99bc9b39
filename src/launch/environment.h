// What this process can find out about itself and its host.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "weft/base.h"

namespace weft::launch {

// Ranks travel in 16 bits, of which one value means "none".
inline constexpr uint32_t kRanksMax = 65535;

// "host:80", "10.0.0.1:80" or "[fd00::1]:80".
bool is_address_and_port(std::string_view value);

std::string host_name();

// A value from outside, as it may stand in a message: short, and nothing that moves a cursor.
std::string shown(std::string_view value);

// Number and start time, as "4711@123456", of the nearest process above this one whose name ends
// so.
std::optional<std::string> ancestor_named(std::string_view ending);

}  // namespace weft::launch
