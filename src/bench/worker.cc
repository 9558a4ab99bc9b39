#include "worker.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "weft/bench.h"

namespace weft::bench {
namespace {

Result<uint32_t> number(const char* name) {
  const char* value = getenv(name);
  char* end = nullptr;
  const unsigned long n = value == nullptr ? 0 : strtoul(value, &end, 10);
  if (value == nullptr || *value == '\0' || *end != '\0' || n > 65535)
    return error(Code::invalid_argument, "%s is not a number; `weft bench` sets it", name);
  return static_cast<uint32_t>(n);
}

std::string variable(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

Result<std::unique_ptr<Engine>> make(const std::string& name) {
  Place place;
  WEFT_ASSIGN(place.rank, number(kRankVariable));
  WEFT_ASSIGN(place.ranks, number(kSizeVariable));
  if (place.rank >= place.ranks)
    return error(Code::invalid_argument, "rank %u of %u", place.rank, place.ranks);
  place.store = variable(kStoreVariable);
  if (name == "weft-tcp" || name == "weft-shm") {
    WEFT_ASSIGN(place.lanes, number(kLanesVariable));
    place.secret = variable(kSecretVariable);
    place.algorithm = variable(kAlgorithmVariable);
    place.sealed = variable("WEFT_SEAL") == "1";
    return make_weft(place, name == "weft-shm");
  }
  if (name == "wire-tcp" || name == "wire-shm") return make_wire(place, name == "wire-shm");
  return error(Code::invalid_argument, "there is no engine \"%s\" in this program", name.c_str());
}

Result<void> serve(const std::string& name) {
  WEFT_ASSIGN(std::unique_ptr<Engine> engine, make(name));
  WEFT_ASSIGN(Lines harness, connect_to_harness());
  WEFT_ASSIGN(uint32_t rank, number(kRankVariable));
  WEFT_TRY(harness.write(
      text("hello %u %d %s", rank, static_cast<int>(getpid()), engine->version().c_str())));
  for (;;) {
    WEFT_ASSIGN(std::optional<std::string> line, harness.read());
    if (!line) return {};
    WEFT_ASSIGN(Request request, read_request(*line));
    auto answer = engine->measure(request);
    WEFT_TRY(harness.write(answer ? write_answer(*answer) : "error " + answer.error().message()));
    // What one rank cannot do, none can: only then are they still together.
    if (!answer && answer.error().code() != Code::unsupported) return std::move(answer).error();
  }
}

}  // namespace

int worker(const std::string& engine) {
  if (auto served = serve(engine); !served) {
    std::fprintf(stderr, "%s\n", served.error().message().c_str());
    return 3;
  }
  return 0;
}

}  // namespace weft::bench
