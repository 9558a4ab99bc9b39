// weft itself as an engine: the public API, nothing else.
#include <string.h>

#include <bit>
#include <cstdlib>

#include "weft/capture.h"
#include "weft/plan.h"
#include "weft/runtime.h"
#include "worker.h"

namespace weft::bench {
namespace {

using runtime::Call;
using runtime::Collective;
using runtime::Type;

// Element i of what rank r contributes.
uint32_t value_of(uint64_t r, uint64_t i) { return static_cast<uint32_t>((i + 3 * r) % 11); }

uint32_t reduced(const std::string& op, uint32_t ranks, uint64_t i) {
  uint32_t result = value_of(0, i);
  for (uint32_t r = 1; r < ranks; ++r) {
    const uint32_t next = value_of(r, i);
    if (op == "sum") result += next;
    if (op == "min") result = std::min(result, next);
    if (op == "max") result = std::max(result, next);
  }
  return result;
}

// Small whole numbers, which every type has exactly.
void put(Type type, std::byte* at, uint32_t value) {
  const auto write = [&](auto number) { memcpy(at, &number, sizeof number); };
  switch (type) {
    case Type::float64: return write(static_cast<double>(value));
    case Type::float32: return write(static_cast<float>(value));
    case Type::bfloat16:
      return write(static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16));
    case Type::float16: {
      const int exponent = std::bit_width(value) - 1;
      return write(value == 0 ? uint16_t{0}
                              : static_cast<uint16_t>(((exponent + 15) << 10) |
                                                      ((value << (10 - exponent)) & 0x3ff)));
    }
    case Type::int8:
    case Type::uint8: return write(static_cast<uint8_t>(value));
    case Type::int16: return write(static_cast<uint16_t>(value));
    case Type::int32: return write(value);
    case Type::int64: return write(static_cast<uint64_t>(value));
  }
}

class Weft final : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> join(const Place& place, bool shm) {
    auto out = std::make_unique<Weft>();
    runtime::Options options;
    WEFT_ASSIGN(options.plan, plan::preset("default"));
    options.plan_was_named = false;
    options.rank = {place.rank};
    options.ranks = place.ranks;
    options.rendezvous = "file:" + place.store;
    options.secret = place.secret;
    // Inside one machine nothing holds a single connection back.
    options.plan.lanes = std::max(1u, place.lanes);
    options.shared_memory = shm;
    options.sealed = place.sealed;
    options.probe = false;
    if (!place.algorithm.empty()) {
      out->algorithm_ = schedule::algorithm_named(place.algorithm);
      if (!out->algorithm_)
        return error(Code::invalid_argument, "there is no algorithm \"%s\"",
                     place.algorithm.c_str());
    }
    out->lanes_ = options.plan.lanes;
    WEFT_ASSIGN(out->group_, runtime::Group::join(options, *out->recorder_));
    return std::unique_ptr<Engine>(std::move(out));
  }
  ~Weft() override {
    if (group_) (void)group_->leave();
  }

  Result<Answer> measure(const Request& request) override {
    const auto type = reduce::type_named(request.type);
    const auto op = reduce::op_named(request.op);
    if (!type || !op)
      return error(Code::unsupported, "no %s of %s here", request.op.c_str(), request.type.c_str());
    const uint64_t bytes = request.count * element_bytes(request.type);
    input_.assign(bytes, {});
    output_.assign(bytes, {});
    const std::vector<Call> calls = calls_of(request, *type, *op);
    for (uint32_t i = 0; i < request.warmups; ++i) WEFT_TRY(once(calls));
    WEFT_TRY(group_->barrier());
    const Nanos begin = monotonic_clock().now();
    for (uint32_t i = 0; i < request.iterations; ++i) WEFT_TRY(once(calls));
    Answer answer{(monotonic_clock().now() - begin).seconds(), 0};
    if (request.check) {
      WEFT_ASSIGN(answer.wrong, wrong(request, *type, calls));
    }
    WEFT_TRY(group_->barrier());
    return answer;
  }

  std::string version() const override {
    return text("weft %s, %u lanes", weft::version(), lanes_);
  }

 private:
  std::vector<Call> calls_of(const Request& request, Type type, reduce::Op op) {
    Call call;
    call.output = output_.data();
    call.count = request.count;
    call.type = type;
    call.op = op;
    call.algorithm = algorithm_;
    const std::string& name = request.collective;
    call.input = name == "allreduce" || name == "broadcast" ? nullptr : input_.data();
    call.collective = name == "allreduce"        ? Collective::all_reduce
                      : name == "reduce-scatter" ? Collective::reduce_scatter
                      : name == "all-gather"     ? Collective::all_gather
                      : name == "broadcast"      ? Collective::broadcast
                      : name == "all-to-all"     ? Collective::all_to_all
                                                 : Collective::point_to_point;
    if (name == "allreduce" || name == "reduce-scatter") return {call};
    call.algorithm = {};
    if (name != "sendrecv") return {call};
    const uint32_t ranks = group_->ranks(), rank = group_->rank().index;
    Call receive = call;
    receive.sends = false;
    receive.input = nullptr;
    receive.root = (rank + ranks - 1) % ranks;
    call.root = (rank + 1) % ranks;
    call.output = nullptr;
    return {receive, call};
  }

  Result<void> once(const std::vector<Call>& calls) {
    if (calls.size() == 1) return group_->run(calls[0]);
    WEFT_ASSIGN(runtime::Work receive, group_->start(calls[0]));
    WEFT_TRY(group_->run(calls[1]));
    return receive.wait();
  }

  // One more time with data that tells; how many elements are wrong.
  Result<uint64_t> wrong(const Request& request, Type type, const std::vector<Call>& calls) {
    const uint64_t count = request.count, size = element_bytes(request.type);
    const uint32_t ranks = group_->ranks(), rank = group_->rank().index;
    const uint64_t part = count / ranks;
    const std::string& name = request.collective;
    const bool in_output = name == "allreduce" || (name == "broadcast" && rank == 0);
    for (uint64_t i = 0; i < count; ++i) {
      put(type, input_.data() + i * size, value_of(rank, i));
      put(type, output_.data() + i * size, in_output ? value_of(rank, i) : 100);
    }
    WEFT_TRY(once(calls));
    const auto expected = [&](uint64_t i) {
      if (name == "allreduce") return reduced(request.op, ranks, i);
      if (name == "reduce-scatter") return reduced(request.op, ranks, rank * part + i);
      if (name == "broadcast") return value_of(0, i);
      if (name == "all-gather") return value_of(i / part, i % part);
      if (name == "all-to-all") return value_of(i / part, rank * part + i % part);
      return value_of((rank + ranks - 1) % ranks, i);
    };
    const uint64_t mine = name == "reduce-scatter" ? part : count;
    uint64_t found = 0;
    for (uint64_t i = 0; i < mine; ++i) {
      std::byte must[8];
      put(type, must, expected(i));
      found += memcmp(must, output_.data() + i * size, size) != 0;
    }
    return found;
  }

  std::unique_ptr<capture::Recorder> recorder_ = capture::Recorder::off();
  std::unique_ptr<runtime::Group> group_;  // goes before what it records to
  std::optional<schedule::Algorithm> algorithm_;
  uint32_t lanes_ = 0;
  std::vector<std::byte> input_, output_;
};

}  // namespace

Result<std::unique_ptr<Engine>> make_weft(const Place& place, bool shm) {
  return Weft::join(place, shm);
}

}  // namespace weft::bench
