#include "checks.h"

namespace weft::doctor {

const char* name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::ok: return "ok";
    case Verdict::note: return "note";
    case Verdict::problem: return "problem";
  }
  return "unknown";
}

std::vector<Check> examine(const Options& options) {
  Checks checks;
  check_network(checks, options);
  check_host(checks, options);
  if (options.rates) check_loopback_rate(checks);
  for (const std::string& host : options.hosts) check_other_host(checks, options, host);
  return checks.take();
}

}  // namespace weft::doctor
