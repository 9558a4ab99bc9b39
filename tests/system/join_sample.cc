// Joins the group that its launcher says it belongs to, adds one number over all ranks, and prints
// one line of JSON: what the launcher said, and the sum. For the tests beside it.
#include <cstdio>

#include "weft/membership.h"
#include "weft/runtime.h"

namespace weft {
namespace {

Result<std::string> join_and_add() {
  WEFT_ASSIGN(const membership::Membership member, membership::from_environment());
  runtime::Options options;
  options.rank = {member.rank};
  options.ranks = member.size;
  options.rendezvous = member.rendezvous;
  options.interface = member.interface;
  options.secret = member.secret;
  options.host = member.host;
  WEFT_ASSIGN(options.plan, plan::preset("default"));
  options.probe = false;
  const auto recorder = capture::Recorder::off();
  WEFT_ASSIGN(const auto group, runtime::Group::join(options, *recorder));
  float sum[1] = {static_cast<float>(member.rank + 1)};
  WEFT_TRY(group->all_reduce(sum));
  WEFT_TRY(group->leave());
  return text(
      "{\"launcher\": \"%s\", \"rank\": %u, \"size\": %u, \"local_rank\": %u, "
      "\"local_size\": %u, \"rendezvous\": \"%s\", \"sum\": %.0f}\n",
      member.launcher.c_str(), member.rank, member.size, member.local_rank, member.local_size,
      member.rendezvous.c_str(), static_cast<double>(sum[0]));
}

}  // namespace
}  // namespace weft

int main() {
  const auto line = weft::join_and_add();
  if (!line) {
    std::fprintf(stderr, "join_sample: %s\n", line.error().message().c_str());
    return 1;
  }
  std::fputs(line->c_str(), stdout);
  return 0;
}
