#include "weft/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

namespace weft::plan {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// The message with which parse() refuses `json`, or "accepted".
std::string refusal(const std::string& json) {
  auto plan = parse(json);
  return plan ? "accepted" : plan.error().message();
}

// The same for a plan with one or more fields beside the version.
std::string refusal_of(const std::string& fields) {
  return refusal("{\"weft_plan\": 1, " + fields + "}");
}

Plan parsed(const std::string& fields) {
  auto plan = parse("{\"weft_plan\": 1, " + fields + "}");
  EXPECT_TRUE(plan.ok()) << plan.error().message();
  return plan ? *plan : Plan{};
}

// ---- reading -----------------------------------------------------------------------------

TEST(PlanParse, TheLeastPlanIsTheDefaultPlan) {
  auto plan = parse("{\"weft_plan\": 1}");
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(*plan, Plan{});
}

TEST(PlanParse, ReadsEveryKey) {
  const Plan plan = parsed(R"(
    "name": "vgg-lanes", "comment": "why",
    "bucket_rule": {"first": "2MiB", "size": 1000, "may_exceed": false},
    "buckets": [{"tensors": ["fc8.weight", "fc8.bias"], "priority": -3, "codec": "fp16"},
                {"tensors": ["a"]}],
    "partition": "4MiB", "order": "layer", "priority": {"conv1/w": 0, "x~y": 7},
    "credit": "16MiB", "barrier": "tensor",
    "algorithm": [{"up_to": "64KiB", "use": "tree"}, {"use": "ring"}],
    "lanes": 8, "chunk": "512KiB", "lane_worker": "process", "lane_workers": 2, "codec": "bf16",
    "sync": {"mode": "bounded_stale", "staleness": 4})");
  EXPECT_EQ(plan.name, "vgg-lanes");
  EXPECT_EQ(plan.comment, "why");
  EXPECT_EQ(plan.bucket_rule, (BucketRule{mib(2), {1000}, false}));
  ASSERT_EQ(plan.buckets.size(), 2u);
  EXPECT_EQ(plan.buckets[0], (BucketSpec{{"fc8.weight", "fc8.bias"}, -3, "fp16"}));
  EXPECT_EQ(plan.buckets[1], (BucketSpec{{"a"}, std::nullopt, std::nullopt}));
  EXPECT_EQ(plan.partition, mib(4));
  EXPECT_EQ(plan.order, Order::layer);
  EXPECT_EQ(plan.priority, (std::map<std::string, int64_t>{{"conv1/w", 0}, {"x~y", 7}}));
  EXPECT_EQ(plan.credit, mib(16));
  EXPECT_EQ(plan.barrier, Barrier::tensor);
  EXPECT_EQ(plan.algorithm,
            (std::vector<AlgorithmRule>{{kib(64), "tree"}, {std::nullopt, "ring"}}));
  EXPECT_EQ(plan.lanes, 8u);
  EXPECT_EQ(plan.chunk, kib(512));
  EXPECT_EQ(plan.lane_worker, LaneWorker::process);
  EXPECT_EQ(plan.lane_workers, 2u);
  EXPECT_EQ(plan.codec, "bf16");
  EXPECT_EQ(plan.sync, Sync::bounded_stale);
  EXPECT_EQ(plan.staleness, 4u);
}

TEST(PlanParse, NullMeansNoPartitionAndNoCredit) {
  EXPECT_EQ(parsed(R"("partition": null, "credit": null)"), Plan{});
}

TEST(PlanParse, SizesAreTextOrBytes) {
  EXPECT_EQ(parsed(R"("credit": 16777216)").credit, mib(16));
  EXPECT_EQ(parsed(R"("credit": "16MiB")").credit, mib(16));
  EXPECT_EQ(parsed(R"("credit": "16777216")").credit, mib(16));
  EXPECT_EQ(parsed(R"("credit": "1.5MiB")").credit, kib(1536));
  EXPECT_EQ(parsed(R"("credit": "16MB")").credit, Bytes{16'000'000});
  EXPECT_EQ(parsed(R"("credit": 4096.0)").credit, kib(4));
  EXPECT_EQ(parsed(R"("credit": "1024GiB")").credit, kSizeMax);
}

TEST(PlanParse, NumbersWithAZeroFractionAreIntegers) {
  EXPECT_EQ(parsed(R"("lanes": 4.0)").lanes, 4u);
  EXPECT_EQ(parsed(R"("sync": {"mode": "bounded_stale", "staleness": 1e3})").staleness, 1000u);
}

// ---- refusing ----------------------------------------------------------------------------

TEST(PlanErrors, UnknownKeysNameANearOne) {
  EXPECT_EQ(refusal_of(R"("barier": "all")"), "/barier: unknown key; did you mean \"barrier\"?");
  EXPECT_EQ(refusal_of(R"("bucket_rule": {"firs": 1})"),
            "/bucket_rule/firs: unknown key; did you mean \"first\"?");
  EXPECT_EQ(refusal_of(R"("buckets": [{"tensors": ["a"]}, {"tensor": ["b"]}])"),
            "/buckets/1/tensor: unknown key; did you mean \"tensors\"?");
  EXPECT_EQ(refusal_of(R"("algorithm": [{"use": "ring", "upto": 1}])"),
            "/algorithm/0/upto: unknown key; did you mean \"up_to\"?");
  EXPECT_EQ(refusal_of(R"("sync": {"stalenes": 1})"),
            "/sync/stalenes: unknown key; did you mean \"staleness\"?");
  EXPECT_EQ(refusal_of(R"("something_else": 1)"), "/something_else: unknown key");
}

TEST(PlanErrors, WordsNameANearOne) {
  EXPECT_EQ(refusal_of(R"("order": "redy")"),
            "/order: found \"redy\", expected ready or layer; did you mean \"ready\"?");
  EXPECT_EQ(refusal_of(R"("barrier": 1)"), "/barrier: found 1, expected all or tensor");
  EXPECT_EQ(refusal_of(R"("codec": "fp1")"),
            "/codec: found \"fp1\", expected one of none, fp16, bf16, one_bit, qsgd, terngrad, "
            "top_k, dgc, power_sgd; did you mean \"fp16\"?");
  EXPECT_EQ(refusal_of(R"("algorithm": [{"use": "rng"}])"),
            "/algorithm/0/use: found \"rng\", expected one of ring, halving_doubling, tree, "
            "hierarchical, doubling, direct, auto; did you mean \"ring\"?");
  EXPECT_THAT(refusal_of(R"("sync": {"mode": "synchronus"})"),
              AllOf(StartsWith("/sync/mode: "), EndsWith("did you mean \"synchronous\"?")));
  EXPECT_EQ(refusal_of(R"("lane_worker": "fiber")"),
            "/lane_worker: found \"fiber\", expected thread or process");
  EXPECT_THAT(refusal_of(R"("buckets": [{"tensors": ["a"], "codec": "zip"}])"),
              StartsWith("/buckets/0/codec: found \"zip\", expected one of none, "));
}

TEST(PlanErrors, IntegersOutOfRange) {
  const std::string lanes = "expected an integer from 1 to 64";
  EXPECT_EQ(refusal_of(R"("lanes": "four")"), "/lanes: found \"four\", " + lanes);
  for (const char* found :
       {"0", "65", "-1", "4294967297", "18446744073709551615", "1.5", "true", "null"})
    EXPECT_EQ(refusal_of(text("\"lanes\": %s", found)), text("/lanes: found %s, ", found) + lanes);
  EXPECT_EQ(refusal_of(R"("lanes": [1])"), "/lanes: found an array, " + lanes);
  EXPECT_EQ(refusal_of(R"("lanes": {})"), "/lanes: found an object, " + lanes);
  EXPECT_EQ(refusal_of(R"("priority": {"a/b": 1000000001})"),
            "/priority/a~1b: found 1000000001, expected an integer from -1000000000 to 1000000000");
  EXPECT_EQ(refusal_of(R"("sync": {"mode": "bounded_stale", "staleness": 1000001})"),
            "/sync/staleness: found 1000001, expected an integer from 0 to 1000000");
}

TEST(PlanErrors, SizesOutOfRange) {
  const std::string chunk = "expected a size from 4KiB to 64MiB";
  EXPECT_EQ(refusal_of(R"("chunk": "1KiB")"), "/chunk: found \"1KiB\", " + chunk);
  EXPECT_EQ(refusal_of(R"("chunk": 67108865)"), "/chunk: found 67108865, " + chunk);
  EXPECT_EQ(refusal_of(R"("chunk": -4096)"), "/chunk: found -4096, " + chunk);
  EXPECT_EQ(refusal_of(R"("chunk": null)"), "/chunk: found null, " + chunk);
  for (const char* found : {"", "x", "4 KiB", " 4KiB", "+4KiB", "4KiBs", "4kib", ".5MiB", "1e4"})
    EXPECT_EQ(refusal_of(text("\"chunk\": \"%s\"", found)),
              text("/chunk: found \"%s\", ", found) + chunk);
  EXPECT_EQ(refusal_of(R"("partition": "4095B")"),
            "/partition: found \"4095B\", expected a size from 4KiB to 1024GiB, or null");
  EXPECT_EQ(refusal_of(R"("credit": 0)"),
            "/credit: found 0, expected a size from 1B to 1024GiB, or null");
  EXPECT_EQ(refusal_of(R"("bucket_rule": {"size": "1025GiB"})"),
            "/bucket_rule/size: found \"1025GiB\", expected a size from 1B to 1024GiB");
}

TEST(PlanErrors, WrongTypes) {
  EXPECT_EQ(refusal("[1]"), "document: found an array, expected an object");
  EXPECT_EQ(refusal("7"), "document: found 7, expected an object");
  EXPECT_EQ(refusal_of(R"("bucket_rule": [])"), "/bucket_rule: found an array, expected an object");
  EXPECT_EQ(refusal_of(R"("bucket_rule": {"may_exceed": 1})"),
            "/bucket_rule/may_exceed: found 1, expected true or false");
  EXPECT_EQ(refusal_of(R"("buckets": {})"),
            "/buckets: found an object, expected an array of buckets");
  EXPECT_EQ(refusal_of(R"("buckets": [{"tensors": "a"}])"),
            "/buckets/0/tensors: found \"a\", expected an array of tensor names");
  EXPECT_EQ(refusal_of(R"("buckets": [{"tensors": ["a", 2]}])"),
            "/buckets/0/tensors/1: found 2, expected a name");
  EXPECT_EQ(refusal_of(R"("buckets": [{}])"), "/buckets/0: the key \"tensors\" is missing");
  EXPECT_EQ(refusal_of(R"("algorithm": [{"up_to": 1}])"),
            "/algorithm/0: the key \"use\" is missing");
  EXPECT_EQ(refusal_of(R"("priority": [])"),
            "/priority: found an array, expected an object of tensor names and integers");
  EXPECT_EQ(refusal_of(R"("comment": 1)"), "/comment: found 1, expected text");
}

TEST(PlanErrors, Names) {
  EXPECT_EQ(refusal_of(R"("name": "")"), "/name: the name \"\" is empty");
  EXPECT_EQ(refusal_of(R"("name": "a\nb")"),
            "/name: the name \"a\\x0ab\" holds a control character");
  EXPECT_EQ(refusal_of("\"name\": \"" + std::string(256, 'n') + "\""), "accepted");
  EXPECT_THAT(
      refusal_of("\"name\": \"" + std::string(257, 'n') + "\""),
      AllOf(StartsWith("/name: the name \"nnn"), EndsWith("...\" is longer than 256 bytes")));
  EXPECT_EQ(refusal_of("\"priority\": {\"" + std::string(1024, 'n') + "\": 1}"), "accepted");
  EXPECT_THAT(refusal_of("\"priority\": {\"" + std::string(1025, 'n') + "\": 1}"),
              EndsWith("is longer than 1024 bytes"));
  EXPECT_THAT(refusal_of("\"buckets\": [{\"tensors\": [\"\"]}]"),
              StartsWith("/buckets/0/tensors/0: the name \"\" is empty"));
  EXPECT_THAT(refusal_of("\"comment\": \"" + std::string(65537, 'n') + "\""),
              EndsWith("is longer than 65536 bytes"));
}

TEST(PlanErrors, RulesBetweenFields) {
  EXPECT_EQ(refusal_of(R"("buckets": [{"tensors": ["a", "b"]}, {"tensors": ["c", "a"]}])"),
            "/buckets/1/tensors/1: \"a\" is already in /buckets/0; expected each tensor in one "
            "bucket");
  EXPECT_EQ(refusal_of(R"("buckets": [{"tensors": []}])"),
            "/buckets/0/tensors: found an empty array, expected at least one tensor name");
  EXPECT_EQ(refusal_of(R"("lanes": 2, "lane_workers": 4)"),
            "/lane_workers: found 4, expected an integer from 1 to 2, the number of lanes");
  EXPECT_EQ(refusal_of(R"("algorithm": [])"),
            "/algorithm: found an empty array, expected at least one rule");
  EXPECT_EQ(refusal_of(R"("algorithm": [{"use": "ring"}, {"use": "tree"}])"),
            "/algorithm/0: has no \"up_to\", so no later rule can apply; expected that of the last "
            "rule only");
  EXPECT_EQ(refusal_of(R"("algorithm": [{"use": "ring", "up_to": 9}])"),
            "/algorithm/0: has an \"up_to\", so larger sizes have no algorithm; expected none in "
            "the last rule");
  EXPECT_EQ(refusal_of(R"("algorithm": [{"use": "ring", "up_to": "2KiB"},
                                        {"use": "tree", "up_to": "2048B"}, {"use": "ring"}])"),
            "/algorithm/1/up_to: found 2KiB, expected more than the 2KiB of the rule before it");
  EXPECT_EQ(refusal_of(R"("sync": {"staleness": 3})"),
            "/sync/staleness: found 3, expected 0, because the mode is synchronous");
  EXPECT_EQ(refusal_of(R"("sync": {"mode": "local_sgd"})"),
            "/sync/staleness: found 0, expected an integer from 1 to 1000000 local steps for "
            "local_sgd");
}

TEST(PlanErrors, Versions) {
  EXPECT_EQ(refusal("{}"), "/weft_plan: missing, expected 1, the format's version");
  EXPECT_EQ(refusal("{\"weft_plan\": \"1\"}"),
            "/weft_plan: found \"1\", expected 1, the format's version");
  EXPECT_EQ(refusal("{\"weft_plan\": 0}"), "/weft_plan: found 0, expected 1, the format's version");
  // A key of the future must not hide that the plan is of the future.
  auto newer = parse("{\"weft_plan\": 2, \"a_key_of_version_two\": {}}");
  ASSERT_FALSE(newer.ok());
  EXPECT_EQ(newer.error().code(), Code::unsupported);
  EXPECT_EQ(
      newer.error().message(),
      text("/weft_plan: the plan is of format version 2, and weft %s reads up to 1", version()));
}

TEST(PlanErrors, SyntaxHasLineAndColumn) {
  EXPECT_THAT(refusal("{\n  \"weft_plan\": ,\n}"),
              AllOf(StartsWith("line 2, column 16: "), HasSubstr("unexpected ','")));
  EXPECT_THAT(refusal(""), AllOf(StartsWith("line 1, column 1: "), HasSubstr("end of input")));
  EXPECT_THAT(refusal("{\"weft_plan\": 1} x"), StartsWith("line 1, column 18: "));
  EXPECT_THAT(refusal("{\"lanes\": 1e999}"), HasSubstr("number overflow"));
  EXPECT_THAT(refusal("{\"name\": \"\xff\"}"),
              AllOf(StartsWith("line 1, column 11: "), HasSubstr("\\xff")));
  EXPECT_THAT(refusal("// a comment\n{}"), StartsWith("line 1, column 1: "));
}

TEST(PlanErrors, KeysGivenTwice) {
  EXPECT_EQ(refusal_of(R"("lanes": 1, "lanes": 2)"), "/lanes: the key is given twice");
  EXPECT_EQ(refusal_of(R"("buckets": [{"tensors": ["a"]}, {"priority": 1, "priority": 1}])"),
            "/buckets/1/priority: the key is given twice");
}

TEST(PlanErrors, DepthAndSizeAreBounded) {
  EXPECT_THAT(refusal_of("\"buckets\": " + std::string(100000, '[')),
              HasSubstr(": nested deeper than 8 levels"));
  // What stands in a string is no nesting, and closes none.
  EXPECT_EQ(refusal_of("\"comment\": \"" + std::string(100, '[') + "\""), "accepted");
  EXPECT_THAT(refusal_of("\"comment\": \"" + std::string(100, ']') +
                         "\", \"buckets\": " + std::string(100, '[')),
              HasSubstr(": nested deeper than 8 levels"));
  EXPECT_EQ(refusal(std::string((64u << 20) + 1, ' ')), "document: larger than 64MiB");
  std::string many = "[0";
  for (int i = 0; i < (1 << 22); ++i) many += ",0";
  EXPECT_THAT(refusal_of("\"buckets\": " + many + "]"), HasSubstr(": more than 4194304 values"));
}

TEST(PlanErrors, ValidateChecksPlansMadeByHand) {
  const auto fault = [](auto change) {
    Plan plan;
    change(plan);
    auto result = validate(plan);
    return result ? std::string("valid") : result.error().message();
  };
  EXPECT_EQ(fault([](Plan&) {}), "valid");
  EXPECT_EQ(fault([](Plan& p) { p.lanes = 0; }),
            "/lanes: found 0, expected an integer from 1 to 64");
  EXPECT_EQ(fault([](Plan& p) { p.chunk = kib(1); }),
            "/chunk: found 1KiB, expected a size from 4KiB to 64MiB");
  EXPECT_EQ(fault([](Plan& p) { p.credit = Bytes{0}; }),
            "/credit: found 0B, expected a size from 1B to 1024GiB");
  EXPECT_THAT(fault([](Plan& p) { p.codec = "zip"; }), StartsWith("/codec: found \"zip\""));
  EXPECT_EQ(fault([](Plan& p) { p.name = "\xc0\xaf"; }),
            "/name: the name \"\\xc0\\xaf\" is not UTF-8");
  EXPECT_EQ(fault([](Plan& p) { p.comment = "\xed\xa0\x80"; }), "/comment: is not UTF-8");
  EXPECT_EQ(fault([](Plan& p) { p.priority["t"] = INT64_MIN; }),
            "/priority/t: found -9223372036854775808, expected an integer from -1000000000 to "
            "1000000000");
}

// ---- the canonical text and the hash -----------------------------------------------------

std::string random_name(Rng& rng) {
  static const std::vector<std::string> parts = {"conv", "fc", ".",  "/", "~",    "weight", "\"",
                                                 "\\",   "é",  "层", " ", "bias", "0"};
  std::string name;
  for (uint64_t i = 0; i <= rng.below(6); ++i) name += parts[rng.below(parts.size())];
  return name;
}

Bytes random_size(Rng& rng, Bytes low, Bytes high) {
  // Of every magnitude, half of them round.
  const uint64_t size = (rng.next() >> rng.below(64)) & (rng.below(2) == 0 ? ~0ULL : ~0xfffULL);
  return {std::clamp(size, low.count, high.count)};
}

Plan random_plan(Rng& rng) {
  Plan plan;
  const auto coin = [&rng] { return rng.below(2) == 0; };
  const auto priority = [&rng] {
    return static_cast<int64_t>(rng.below(2 * kPriorityMax + 1)) - kPriorityMax;
  };
  plan.name = random_name(rng);
  plan.comment = coin() ? "" : "line\n\tline " + random_name(rng);
  plan.bucket_rule = {random_size(rng, {1}, kSizeMax), random_size(rng, {1}, kSizeMax), coin()};
  for (uint64_t i = 0; i < rng.below(4); ++i) {
    BucketSpec bucket;
    for (uint64_t j = 0; j <= rng.below(3); ++j)
      bucket.tensors.push_back(random_name(rng) +
                               text("#%zu.%zu", plan.buckets.size(), bucket.tensors.size()));
    if (coin()) bucket.priority = priority();
    if (coin()) bucket.codec = codec_names()[rng.below(codec_names().size())];
    plan.buckets.push_back(std::move(bucket));
  }
  if (coin()) plan.partition = random_size(rng, kPartitionMin, kSizeMax);
  plan.order = coin() ? Order::ready : Order::layer;
  for (uint64_t i = 0; i < rng.below(4); ++i) plan.priority[random_name(rng)] = priority();
  if (coin()) plan.credit = random_size(rng, {1}, kSizeMax);
  plan.barrier = coin() ? Barrier::all : Barrier::tensor;
  plan.algorithm.clear();
  Bytes up_to{0};
  for (uint64_t i = 0; i < rng.below(3); ++i) {
    up_to += Bytes{1 + rng.below(1 << 30)};
    plan.algorithm.push_back({up_to, algorithm_names()[rng.below(algorithm_names().size())]});
  }
  plan.algorithm.push_back({std::nullopt, algorithm_names()[rng.below(algorithm_names().size())]});
  plan.lanes = static_cast<uint32_t>(1 + rng.below(kLanesMax));
  plan.chunk = random_size(rng, kChunkMin, kChunkMax);
  plan.lane_worker = coin() ? LaneWorker::thread : LaneWorker::process;
  plan.lane_workers = static_cast<uint32_t>(1 + rng.below(plan.lanes));
  plan.codec = codec_names()[rng.below(codec_names().size())];
  plan.sync = static_cast<Sync>(rng.below(5));
  if (plan.sync == Sync::bounded_stale || plan.sync == Sync::local_sgd)
    plan.staleness = static_cast<uint32_t>(1 + rng.below(kStalenessMax));
  return plan;
}

TEST(PlanCanonical, ReadsBackAsTheSamePlan) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(text("seed %llu", static_cast<unsigned long long>(seed)));
    Rng rng(seed);
    const Plan plan = random_plan(rng);
    const std::string once = canonical(plan);
    auto again = parse(once);
    ASSERT_TRUE(again.ok()) << again.error().message() << "\n" << once;
    ASSERT_EQ(*again, plan) << once;
    ASSERT_EQ(canonical(*again), once);
    ASSERT_EQ(hash(*again), hash(plan));
    ASSERT_TRUE(diff(plan, *again).empty());
    // Another plan differs in text, in hash and in diff, or in none of them.
    const Plan other = random_plan(rng);
    ASSERT_EQ(canonical(other) == once, other == plan);
    ASSERT_EQ(diff(plan, other).empty(), other == plan);
  }
}

TEST(PlanCanonical, IsThisText) {
  Plan plan;
  plan.name = "golden";
  plan.buckets = {{{"b", "a"}, 3, std::nullopt}};
  plan.priority = {{"z", 1}, {"a", 2}};
  plan.algorithm = {{kib(64), "tree"}, {std::nullopt, "ring"}};
  plan.credit = Bytes{1000};
  EXPECT_EQ(canonical(plan), R"({
  "weft_plan": 1,
  "name": "golden",
  "comment": "",
  "bucket_rule": {
    "first": "1MiB",
    "size": "25MiB",
    "may_exceed": true
  },
  "buckets": [
    {
      "tensors": [
        "b",
        "a"
      ],
      "priority": 3
    }
  ],
  "partition": null,
  "order": "ready",
  "priority": {
    "a": 2,
    "z": 1
  },
  "credit": "1000B",
  "barrier": "all",
  "algorithm": [
    {
      "up_to": "64KiB",
      "use": "tree"
    },
    {
      "use": "ring"
    }
  ],
  "lanes": 1,
  "chunk": "256KiB",
  "lane_worker": "thread",
  "lane_workers": 1,
  "codec": "none",
  "sync": {
    "mode": "synchronous",
    "staleness": 0
  }
}
)");
}

TEST(PlanCanonical, NeverThrowsOnTextThatIsNotUtf8) {
  Plan plan;
  plan.name = "\xff\xfe";
  EXPECT_FALSE(canonical(plan).empty());
}

TEST(PlanHash, IgnoresNameAndCommentAndNothingElse) {
  const Plan plan;
  Plan named = plan;
  named.name = "other";
  named.comment = "other";
  EXPECT_EQ(hash(named), hash(plan));
  named.lanes = 2;
  EXPECT_NE(hash(named), hash(plan));
}

TEST(PlanHash, IgnoresHowSizesAndOrderOfKeysAreWritten) {
  EXPECT_EQ(hash(parsed(R"("credit": 16777216, "lanes": 2)")),
            hash(parsed(R"("lanes": 2.0, "credit": "16MiB")")));
}

// Traces and caches hold hashes: a change here needs a new version of the format.
TEST(PlanHash, OfThePresetsIsFixed) {
  EXPECT_EQ(hash(*preset("ddp")), "f792474d48113d9d");
  EXPECT_EQ(hash(*preset("default")), "1913febe28cc794c");
  EXPECT_EQ(hash(*preset("horovod")), "3abcbcbe13deca22");
}

// ---- presets -----------------------------------------------------------------------------

TEST(PlanPresets, AreValidNamedAndDistinct) {
  for (const std::string& name : preset_names()) {
    auto plan = preset(name);
    ASSERT_TRUE(plan.ok()) << name;
    EXPECT_TRUE(validate(*plan).ok()) << name;
    EXPECT_EQ(plan->name, name);
    EXPECT_FALSE(plan->comment.empty()) << name;
    auto loaded = load(name);
    ASSERT_TRUE(loaded.ok());
    EXPECT_EQ(*loaded, *plan);
  }
}

TEST(PlanPresets, APlanThatSaysNothingDoesWhatDdpDoes) {
  EXPECT_EQ(hash(Plan{}), hash(*preset("ddp")));
}

TEST(PlanPresets, UnknownOnesNameANearOne) {
  EXPECT_EQ(preset("hovorod").error().message(),
            "no preset is named \"hovorod\"; expected one of ddp, default, horovod; did you mean "
            "\"horovod\"?");
  auto plan = load("defualt");
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.error().code(), Code::not_found);
  EXPECT_THAT(plan.error().message(), HasSubstr("did you mean \"default\"?"));
}

TEST(PlanLoad, ErrorsNameTheFile) {
  const std::string path = ::testing::TempDir() + "weft_plan_test.json";
  ASSERT_TRUE(write_file(path, "{\"weft_plan\": 1, \"lanes\": 3}").ok());
  ASSERT_TRUE(load(path).ok());
  EXPECT_EQ(load(path)->lanes, 3u);
  ASSERT_TRUE(write_file(path, "{\"weft_plan\": 1, \"lane\": 3}").ok());
  EXPECT_EQ(load(path).error().message(), path + ": /lane: unknown key; did you mean \"lanes\"?");
  std::remove(path.c_str());
}

// ---- diff --------------------------------------------------------------------------------

std::vector<std::string> lines(const std::vector<Difference>& differences) {
  std::vector<std::string> out;
  out.reserve(differences.size());
  for (const Difference& d : differences)
    out.push_back(d.path + ": " + d.before + " -> " + d.after);
  return out;
}

TEST(PlanDiff, NamesPathsAndValues) {
  Plan before;
  before.priority = {{"a/b", 1}, {"c", 2}};
  before.buckets = {{{"x", "y"}, std::nullopt, std::nullopt}};
  Plan after = before;
  after.lanes = 8;
  after.partition = mib(4);
  after.order = Order::layer;
  after.bucket_rule.may_exceed = false;
  after.priority = {{"a/b", 5}, {"d", 3}};
  after.buckets = {{{"y", "x"}, 1, std::nullopt}, {{"z"}, std::nullopt, std::nullopt}};
  after.algorithm = {{kib(64), "tree"}, {std::nullopt, "ring"}};
  EXPECT_THAT(lines(diff(before, after)),
              ::testing::ElementsAre(
                  "/bucket_rule/may_exceed: true -> false",
                  "/buckets/0/tensors: [\"x\",\"y\"] -> [\"y\",\"x\"]",
                  "/buckets/0/priority: absent -> 1", "/buckets/1: absent -> {\"tensors\":[\"z\"]}",
                  "/partition: null -> 4MiB", "/order: ready -> layer", "/priority/a~1b: 1 -> 5",
                  "/priority/c: 2 -> absent", "/priority/d: absent -> 3",
                  "/algorithm/0/use: ring -> tree", "/algorithm/0/up_to: absent -> 64KiB",
                  "/algorithm/1: absent -> {\"use\":\"ring\"}", "/lanes: 1 -> 8"));
  EXPECT_TRUE(diff(after, after).empty());
}

// ---- schema ------------------------------------------------------------------------------

TEST(PlanSchema, IsTheDocumentedOne) {
  const char* root = std::getenv("WEFT_SOURCE_DIR");
  if (root == nullptr) GTEST_SKIP() << "WEFT_SOURCE_DIR is not set";
  auto documented = read_file(std::string(root) + "/docs/plan.schema.json", mib(1));
  ASSERT_TRUE(documented.ok()) << documented.error().message();
  EXPECT_EQ(*documented, schema()) << "run: weft plan schema > docs/plan.schema.json";
}

TEST(PlanSchema, HasTheKeysTheDefaultsAndTheWordsOfTheParser) {
  const auto json = nlohmann::json::parse(schema());
  const auto plain = nlohmann::json::parse(canonical(Plan{}));
  std::vector<std::string> keys;
  for (const auto& [key, value] : json["properties"].items()) {
    keys.push_back(key);
    if (value.contains("default")) {
      EXPECT_EQ(value["default"], plain[key]) << key;
    }
    if (!value.contains("properties")) continue;
    for (const auto& [inner, entry] : value["properties"].items())
      EXPECT_EQ(entry["default"], plain[key][inner]) << key << "/" << inner;
  }
  std::vector<std::string> expected;
  for (const auto& [key, value] : plain.items()) expected.push_back(key);
  EXPECT_EQ(keys, expected);
  EXPECT_EQ(json["$defs"]["codec"]["enum"], nlohmann::json(codec_names()));
  EXPECT_EQ(json["properties"]["algorithm"]["items"]["properties"]["use"]["enum"],
            nlohmann::json(algorithm_names()));
  EXPECT_EQ(json["properties"]["lanes"]["maximum"], kLanesMax);
  EXPECT_EQ(json["$defs"]["priority"]["maximum"], kPriorityMax);
  EXPECT_EQ(json["$defs"]["tensor"]["maxLength"], kTensorNameMax);
}

}  // namespace
}  // namespace weft::plan
