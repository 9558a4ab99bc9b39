// What a status says, cut so that it fits.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace weft::runtime {

// `status` of one rank or of all, as text of at most `longest` bytes; `left_out` in it names what
// there was no room for.
std::string fitting(nlohmann::ordered_json status, size_t longest);

}  // namespace weft::runtime
