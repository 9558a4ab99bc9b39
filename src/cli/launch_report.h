// Private to cli: how the processes of a job ended, for programs.
#pragma once

#include <nlohmann/json.hpp>

#include "weft/launch.h"

namespace weft::cli {

nlohmann::ordered_json described(const launch::Report& report);

// A time to wait that a verb's option may be; otherwise what is wrong with it.
std::string flaw_of_duration(const std::string& value);

}  // namespace weft::cli
