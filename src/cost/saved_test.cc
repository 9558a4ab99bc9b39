#include <gtest/gtest.h>

#include "weft/cost.h"

namespace weft::cost {
namespace {

TEST(Saved, constants_come_back_to_the_last_bit) {
  Costs costs = typical();
  costs.round_trip_idle_ns = {12345.678901234567, 0, 0, 3};
  costs.copy_ns_per_byte = {0.1, 0.1, 0.1, 2};
  auto again = from_json(to_json(costs));
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ(again->round_trip_idle_ns->value, costs.round_trip_idle_ns->value);
  EXPECT_EQ(again->link_bytes_per_s->value, costs.link_bytes_per_s->value);
  EXPECT_EQ(again->cpu_ns_per_chunk->value, costs.cpu_ns_per_chunk->value);
  EXPECT_EQ(again->copy_ns_per_byte->value, costs.copy_ns_per_byte->value);
  EXPECT_EQ(again->reduce_ns_per_byte->value, costs.reduce_ns_per_byte->value);
  for (uint32_t ranks : {2u, 5u, 8u})
    EXPECT_EQ(*ring_all_reduce_seconds(*again, 1e6, ranks, 1),
              *ring_all_reduce_seconds(costs, 1e6, ranks, 1));
}

TEST(Saved, what_was_not_measured_stays_absent) {
  Costs costs;
  costs.link_bytes_per_s = {1e9, 1e9, 1e9, 1};
  costs.round_trip_idle_ns = {1e4, 1e4, 1e4, 1};
  auto again = from_json(to_json(costs));
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_FALSE(again->cpu_ns_per_chunk);
  EXPECT_FALSE(again->reduce_ns_per_byte);
}

TEST(Saved, refuses_what_no_machine_has) {
  for (const char* text :
       {"", "{", "[]", "7", "{}", R"({"weft_costs": 2, "bytes_per_s": 1, "round_trip_ns": 1})",
        R"({"weft_costs": 1})", R"({"weft_costs": 1, "bytes_per_s": 1e9})",
        R"({"weft_costs": 1, "bytes_per_s": 0, "round_trip_ns": 1})",
        R"({"weft_costs": 1, "bytes_per_s": -1, "round_trip_ns": 1})",
        R"({"weft_costs": 1, "bytes_per_s": "fast", "round_trip_ns": 1})",
        R"({"weft_costs": 1, "bytes_per_s": 1e300, "round_trip_ns": 1})",
        R"({"weft_costs": 1, "bytes_per_s": 1e9, "round_trip_ns": 1, "message_ns": null})"}) {
    auto costs = from_json(text);
    ASSERT_FALSE(costs) << text;
    EXPECT_EQ(costs.error().code(), Code::corrupt) << text;
  }
}

TEST(Saved, refuses_what_is_too_deep_to_be_shown) {
  const std::string deep(100'000, '['), end(100'000, ']');
  auto costs =
      from_json(R"({"weft_costs": 1, "round_trip_ns": 1, "bytes_per_s": )" + deep + end + "}");
  ASSERT_FALSE(costs);
  EXPECT_EQ(costs.error().code(), Code::corrupt);
  EXPECT_EQ(costs.error().message(),
            "not a file of costs: line 1, column 61: nested deeper than 8 levels");
}

}  // namespace
}  // namespace weft::cost
