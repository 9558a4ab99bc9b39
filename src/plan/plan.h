// plan: what to do. The second of weft's two nouns; docs/plan_format.md is its contract.
//
// A Plan is a JSON document that says how gradients travel: how they are grouped and cut, in
// which order and how many at a time they are sent, over how many lanes, and what the next step
// waits for. The runtime obeys it, the replayer predicts it, the optimizer writes it, and none of
// the three knows another. It is checked when it is read, and again when it is applied.
//
// All sizes are bytes of the job that the plan is for. A lab that shrinks the job divides them.
//
// Threads: plain values.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "weft/base.h"

namespace weft::plan {

inline constexpr int kFormatVersion = 1;

// What a valid plan keeps to. The optimizer searches inside these; parse() and validate() name
// them when a value lies outside.
inline constexpr uint32_t kLanesMax = 64;
inline constexpr Bytes kChunkMin = kib(4);
inline constexpr Bytes kChunkMax = mib(64);
inline constexpr Bytes kPartitionMin = kib(4);
inline constexpr Bytes kSizeMax = {1ULL << 40};  // every other size; small enough to be exact in
                                                 // the floating point of any JSON reader
inline constexpr int64_t kPriorityMax = 1'000'000'000;  // and its negative
inline constexpr uint32_t kStalenessMax = 1'000'000;
inline constexpr size_t kNameMax = 256;         // bytes of Plan::name
inline constexpr size_t kCommentMax = 65536;    // bytes of Plan::comment
inline constexpr size_t kTensorNameMax = 1024;  // bytes of a tensor's name
inline constexpr Bytes kDocumentMax = mib(64);

// How tensors are grouped when no explicit groups are given: in the order in which backward
// makes them (last layer first), a bucket is closed once it reaches the limit (`may_exceed`: the
// tensor that crosses the limit still goes in, as DDP does) or before it would pass it.
struct BucketRule {
  Bytes first = mib(1);  // limit of the first bucket
  Bytes size = mib(25);  // limit of all others
  bool may_exceed = true;
  friend bool operator==(const BucketRule&, const BucketRule&) = default;
};

struct BucketSpec {
  std::vector<std::string> tensors;  // names, in the order in which they lie in the bucket
  std::optional<int64_t> priority;   // smaller is more urgent; absent: by Plan::order
  std::optional<std::string> codec;  // absent: Plan::codec
  friend bool operator==(const BucketSpec&, const BucketSpec&) = default;
};

enum class Order { ready, layer };   // first ready first; or first needed by forward first
enum class Barrier { all, tensor };  // next step waits for everything; or layer by layer
enum class LaneWorker { thread, process };
enum class Sync { synchronous, asynchronous, bounded_stale, local_sgd, one_step_delay };

struct AlgorithmRule {
  std::optional<Bytes> up_to;  // absent: all larger sizes; only the last rule may lack it
  std::string use;             // "ring"
  friend bool operator==(const AlgorithmRule&, const AlgorithmRule&) = default;
};

struct Plan {
  std::string name = "unnamed";
  std::string comment;
  BucketRule bucket_rule;
  std::vector<BucketSpec> buckets;  // explicit groups; tensors not named in any follow
                                    // bucket_rule
  std::optional<Bytes> partition;   // absent: a bucket is sent whole
  Order order = Order::ready;
  std::map<std::string, int64_t> priority;  // by tensor; a bucket takes its most urgent
  std::optional<Bytes> credit;              // bytes in flight at a time; absent: no limit
  Barrier barrier = Barrier::all;
  std::vector<AlgorithmRule> algorithm = {{std::nullopt, "ring"}};
  uint32_t lanes = 1;
  Bytes chunk = kib(256);
  LaneWorker lane_worker = LaneWorker::thread;
  uint32_t lane_workers = 1;   // threads or processes that serve the lanes
  std::string codec = "none";  // for every bucket that does not say its own
  Sync sync = Sync::synchronous;
  uint32_t staleness = 0;  // bounded_stale: steps; local_sgd: local steps

  friend bool operator==(const Plan&, const Plan&) = default;
};

// Text -> Plan. Every error names the JSON path, what was found and what was expected, and a near
// name for a key or word that is not known. Fails with invalid_argument, or with unsupported when
// the document is of a newer format.
Result<Plan> parse(std::string_view json);
// A file, or the name of a preset. A preset wins; "./ddp" is the file.
Result<Plan> load(const std::string& path_or_preset);

// Checks what the grammar cannot: ranges, and names used twice. parse() calls it, and whoever
// applies a plan calls it again, because a Plan can also be made by hand.
Result<void> validate(const Plan& plan);

// The one text of a plan: every field, fixed order, sizes in their shortest exact form, two-space
// indent, a newline at the end. Equal plans have equal texts, and parse() gives the plan back.
std::string canonical(const Plan& plan);
// 16 hex digits of XXH3-64 over the canonical text without name and comment: plans that do the
// same have the same hash.
std::string hash(const Plan& plan);

std::vector<std::string> preset_names();
Result<Plan> preset(const std::string& name);

struct Difference {
  std::string path;    // "/lanes"
  std::string before;  // "4MiB", "null", or "absent" where this plan has no such path
  std::string after;
};
// In the order of the canonical text; empty for equal plans. A list of names is one value.
std::vector<Difference> diff(const Plan& before, const Plan& after);

// The JSON Schema (draft 2020-12) of the document.
std::string schema();

// The words that the format knows for `use` and `codec`. A runtime may know fewer, and says so
// when a plan is applied.
const std::vector<std::string>& algorithm_names();
const std::vector<std::string>& codec_names();

const char* name_of(Order order);
const char* name_of(Barrier barrier);
const char* name_of(LaneWorker worker);
const char* name_of(Sync sync);

}  // namespace weft::plan
