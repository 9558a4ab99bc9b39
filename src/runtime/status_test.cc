// Answers that are too long, and names that are no text.
#include "status.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "testing.h"
#include "weft/runtime.h"

namespace weft::runtime {
namespace {

using Json = nlohmann::ordered_json;
using namespace testing_support;  // NOLINT(google-build-using-namespace): this module's own

Json rank_with(uint32_t rank, size_t lanes) {
  Json out = {{"rank", rank}, {"host", "node"}, {"operations", Json::array()}};
  for (size_t i = 0; i < lanes; ++i) out["lanes"].push_back({{"peer", i}, {"lane", i}});
  for (int i = 0; i < 20; ++i) out["operations"].push_back({{"what", "all_reduce"}});
  return out;
}

TEST(Status, that_is_too_long_loses_its_details_first) {
  Json tree = {{"ranks", 100}, {"answered", Json::array()}, {"silent", {100, 101}}};
  Answers all{100, {}, {100, 101}};
  for (uint32_t rank = 0; rank < 100; ++rank) {
    tree["answered"].push_back(rank_with(rank, 100));
    all.answered.push_back(rank_with(rank, 100).dump());
  }
  std::string whole = fitting(all, 1u << 20);
  EXPECT_EQ(Json::parse(whole), tree);
  size_t before = whole.size() + 1;
  struct {
    size_t longest;
    size_t left_out;
  } cases[] = {{100'000, 1}, {10'000, 2}, {2'000, 3}, {200, 4}};
  for (auto& one : cases) {
    std::string words = fitting(all, one.longest);
    EXPECT_LE(words.size(), one.longest);
    EXPECT_LT(words.size(), before);
    before = words.size();
    Json status = Json::parse(words, nullptr, false);
    ASSERT_TRUE(status.is_object()) << words;
    EXPECT_EQ(status["left_out"].size(), one.left_out) << words;
    EXPECT_EQ(status["ranks"], 100);
    EXPECT_EQ(status["silent"][0], 100);
    EXPECT_EQ(status["answered"].size(), one.left_out < 4 ? 100u : 0u);
  }
  Json one = Json::parse(fitting(rank_with(7, 100).dump(), 1000));
  EXPECT_EQ(one["rank"], 7);
  EXPECT_EQ(one["left_out"], Json({"lanes"}));
}

// What other ranks say is taken apart as text: brackets and quotes in a name are no structure.
TEST(Status, loses_members_by_name_and_nothing_else) {
  constexpr std::array<std::string_view, 2> kGone = {"lanes", "host"};
  const char* cases[][2] = {
      {R"({})", R"({})"},
      {R"( {"lanes":[]} )", R"({})"},
      {R"({"a":1,"lanes":[{"x":[1,2]},"]}"],"b":{"host":3}})", R"({"a":1,"b":{"host":3}})"},
      {R"({"host":"\\\"},{","rank":0})", R"({"rank":0})"},
      {R"({"lanes2":1, "lane":2 , "host" : null})", R"({"lanes2":1,"lane":2})"},
      {R"({"k":"lanes","x":"\"lanes\":"})", R"({"k":"lanes","x":"\"lanes\":"})"},
      {R"([1,2])", R"([1,2])"},
      {R"(7)", R"(7)"}};
  for (const auto& [before, after] : cases) {
    ASSERT_TRUE(Json::accept(before)) << before;
    EXPECT_EQ(Json::parse(without(before, kGone), nullptr, false), Json::parse(after)) << before;
  }
}

TEST(Status, of_a_host_whose_name_is_no_text_is_told) {
  std::string asked_of, asked_itself;
  auto outcomes = run_ranks(
      2, plan::Plan(),
      [&](Group& group, capture::Recorder&) -> Result<void> {
        if (group.rank().index == 0) asked_itself = group.status();
        if (group.rank().index == 1) {
          WEFT_ASSIGN(asked_of, ask_status(text("127.0.0.1:%u", unsigned{group.members()[0].port}),
                                           "a secret of the test", Nanos::from_seconds(10)));
        }
        return group.barrier();
      },
      [](Options& options) { options.host = "node\xff\xc3"; });
  for (auto& outcome : outcomes) ASSERT_TRUE(outcome) << outcome.error().message();
  Json status = Json::parse(asked_of, nullptr, false);
  ASSERT_TRUE(status.is_object()) << asked_of;
  ASSERT_EQ(status["answered"].size(), 2u) << asked_of;
  EXPECT_EQ(status["answered"][0]["host"], "node\ufffd\ufffd");
  EXPECT_EQ(Json::parse(asked_itself)["host"], "node\ufffd\ufffd");
}

}  // namespace
}  // namespace weft::runtime
