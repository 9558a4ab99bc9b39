// What a status says, as JSON, cut so that it fits.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base.h"

namespace weft::runtime {

// Of a whole group.
struct Answers {
  uint32_t ranks = 0;
  std::vector<std::string> answered;  // each what one rank says of itself
  std::vector<uint32_t> silent;
};

// As text of at most `longest` bytes; `left_out` in it names what there was no room for: first the
// lanes go, then the operations, then the hosts, and of a group all but the numbers of the ranks.
// REQUIRES: `status`, and what ranks say, is valid JSON.
std::string fitting(const std::string& status, size_t longest);
std::string fitting(const Answers& answers, size_t longest);
// An object without those members. REQUIRES: valid JSON; what is no object stays as it is.
std::string without(std::string_view object, std::span<const std::string_view> members);

}  // namespace weft::runtime
