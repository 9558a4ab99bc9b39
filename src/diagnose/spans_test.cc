#include "spans.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace weft::diagnose {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(Spans, united_sorts_joins_and_drops_what_is_empty) {
  EXPECT_THAT(united({{5, 8}, {1, 3}, {3, 4}, {7, 9}, {20, 20}, {30, 25}}),
              ElementsAre(Span{1, 4}, Span{5, 9}));
  EXPECT_THAT(united({}), IsEmpty());
}

TEST(Spans, within_cuts_at_both_ends) {
  std::vector<Span> spans = {{0, 10}, {20, 30}, {40, 50}};
  EXPECT_THAT(within(spans, {5, 45}), ElementsAre(Span{5, 10}, Span{20, 30}, Span{40, 45}));
  EXPECT_THAT(within(spans, {10, 20}), IsEmpty());
}

TEST(Spans, the_intersection_is_what_two_sets_share) {
  EXPECT_THAT(intersection({{0, 10}, {20, 30}}, {{5, 25}, {29, 40}}),
              ElementsAre(Span{5, 10}, Span{20, 25}, Span{29, 30}));
  EXPECT_THAT(intersection({{0, 10}}, {}), IsEmpty());
}

TEST(Spans, the_longest_span_has_a_length) {
  constexpr int64_t kFar = int64_t{1} << 62;
  EXPECT_DOUBLE_EQ((Span{-kFar, kFar}.length()), 0x1p63);
  EXPECT_DOUBLE_EQ((Span{3, 1}.length()), 0);
  EXPECT_DOUBLE_EQ(length({{0, 4}, {6, 7}}), 5);
}

}  // namespace
}  // namespace weft::diagnose
