// The two short forms in which Slurm writes lists.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "weft/base.h"

namespace weft::membership {

// "gpu[01-04,7],login1" -> gpu01, gpu02, gpu03, gpu04, gpu7, login1. A name may have several
// brackets, as in "rack[1-2]node[1-8]". Fails on what is not such a list, and on more than
// 65535 names.
Result<std::vector<std::string>> expand_nodes(std::string_view list);

// "2(x3),1" -> 2, 2, 2, 1.
Result<std::vector<uint32_t>> expand_counts(std::string_view list);

}  // namespace weft::membership
