// Hashes, UTF-8, JSON as text, packing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "weft/base.h"

namespace weft {
namespace {

TEST(Hash, is_xxh3) {
  EXPECT_EQ(hash64(std::string_view()), 0x2d06800538d394c2u);
  const std::string_view words = "weft";
  EXPECT_EQ(hash64(words), hash64(std::as_bytes(std::span(words))));
  EXPECT_NE(hash64(words), hash64(std::string_view("wefT")));
}

TEST(Characters, are_told_from_other_bytes) {
  const auto is = [](std::string_view input, size_t length, char32_t point) {
    const Character found = first_character(input);
    return found.length == length && found.point == point;
  };
  EXPECT_TRUE(is("a", 1, U'a'));
  EXPECT_TRUE(is("\xc3\xa9x", 2, 0xe9));
  EXPECT_TRUE(is("\xe2\x82\xac", 3, 0x20ac));
  EXPECT_TRUE(is("\xf0\x9f\x98\x80", 4, 0x1f600));
  EXPECT_TRUE(is(std::string_view("\0", 1), 1, 0));
  for (const char* none : {"", "\x80", "\xff", "\xc3", "\xc3(", "\xe2\x82", "\xc0\xaf",
                           "\xe0\x80\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xf0\x80\x80\x80"})
    EXPECT_EQ(first_character(none).length, 0u) << none;
}

TEST(Printable, is_one_harmless_line) {
  EXPECT_EQ(printable("caf\xc3\xa9"), "caf\xc3\xa9");
  EXPECT_EQ(printable("a\n\x1b[2J\x7f"), "a\\x0a\\x1b[2J\\x7f");
  EXPECT_EQ(printable("\xc2\x9b\xff"), "\\xc2\\x9b\\xff");  // a control character of Latin-1
  EXPECT_EQ(printable("12345", 5), "12345");
  EXPECT_EQ(printable("123456", 5), "12345...");
}

std::string json_of(std::string_view raw) {
  std::string out;
  append_json_string(out, raw);
  return out;
}

TEST(Json, strings_are_escaped_and_always_utf8) {
  EXPECT_EQ(json_of("plain"), "\"plain\"");
  EXPECT_EQ(json_of("a\"b\\c\n\x01\x7f"), "\"a\\\"b\\\\c\\u000a\\u0001\\u007f\"");
  EXPECT_EQ(json_of(std::string_view("\0", 1)), "\"\\u0000\"");
  EXPECT_EQ(json_of("\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"),
            "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"");
  const std::string bad = "\"\xef\xbf\xbd\"";
  EXPECT_EQ(json_of("\xff"), bad);
  EXPECT_EQ(json_of("\xc3"), bad);                                 // cut off
  EXPECT_EQ(json_of("\xc0\xaf"), "\"\xef\xbf\xbd\xef\xbf\xbd\"");  // overlong
  EXPECT_EQ(json_of("\xed\xa0\x80").size(), 2 + 3 * 3u);           // a surrogate
  EXPECT_EQ(json_of("\xf4\x90\x80\x80").size(), 2 + 4 * 3u);       // beyond U+10FFFF
  EXPECT_EQ(json_of("\xe2\x82(").substr(1, 6), "\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_EQ(json_of("</script>&"), "\"\\u003c/script\\u003e\\u0026\"");
}

TEST(Json, depth_counts_brackets_and_not_what_stands_in_strings) {
  const auto depth = [](const std::string& json, size_t most) {
    return check_json(json, {.depth = most, .values = 1000}).ok();
  };
  EXPECT_TRUE(depth("[[{}]]", 3));
  EXPECT_FALSE(depth("[[{}]]", 2));
  EXPECT_TRUE(depth("[[],[],[[]]]", 3));
  EXPECT_TRUE(depth(R"(["[[[[{{{{"])", 1));
  EXPECT_TRUE(depth(R"(["\"[[[[", "\\"])", 1));
  EXPECT_FALSE(depth(R"({"a\\": "]]]]", "b": [[]]})", 2));
  EXPECT_FALSE(depth("]]]]" + std::string(5, '['), 4));
  EXPECT_TRUE(depth("\"never closed [[[[", 1));
  EXPECT_TRUE(depth("\"\\", 1));
  EXPECT_TRUE(depth("", 0));
  EXPECT_EQ(check_json("{\n \"a\": [[", {.depth = 2, .values = 9}).error().message(),
            "line 2, column 8: nested deeper than 2 levels");
}

TEST(Json, values_are_counted_exactly) {
  const auto values = [](const char* json) {
    size_t least = 0;
    while (!check_json(json, {.depth = 9, .values = least})) ++least;
    return least;
  };
  EXPECT_EQ(values(""), 0u);
  EXPECT_EQ(values("17"), 1u);
  EXPECT_EQ(values("\"a:b,[c\""), 1u);
  EXPECT_EQ(values("[]"), 1u);
  EXPECT_EQ(values("[1, -2.5e3,true ,null]"), 5u);
  EXPECT_EQ(values(R"({"a": 1, "b": {"c": []}, "d": "e"})"), 5u);
  EXPECT_EQ(values(R"([[], {}, "x", [{"y": "z"}]])"), 7u);
  EXPECT_EQ(check_json("[1,\n2,3]", {.depth = 1, .values = 3}).error().message(),
            "line 2, column 3: more than 3 values");
}

TEST(Packing, gives_back_what_was_put_in) {
  enum class Word : uint16_t { one = 1, big = 0xfffe };
  Packer packer;
  packer.number(uint8_t{7}).number(-3.5).number(Word::big).string("two words").string("");
  EXPECT_EQ(packer.bytes().size(), 1 + 8 + 2 + 4 + 9 + 4u);
  Unpacker in(packer.bytes());
  EXPECT_EQ(in.number<uint8_t>(), 7);
  EXPECT_EQ(in.number<double>(), -3.5);
  EXPECT_EQ(in.number<Word>(), Word::big);
  EXPECT_EQ(in.string(), "two words");
  EXPECT_TRUE(in.more());
  EXPECT_EQ(in.text(), "");
  EXPECT_TRUE(in.complete());
  EXPECT_FALSE(in.more());
}

TEST(Packing, fails_for_good_where_bytes_end) {
  Packer packer;
  packer.number(uint32_t{0xffffffff}).number(uint32_t{1});
  Unpacker text(packer.bytes());
  EXPECT_EQ(text.string(), "");  // a length that nothing stands behind
  EXPECT_TRUE(text.failed());
  EXPECT_EQ(text.number<uint32_t>(), 0u);
  EXPECT_EQ(text.left(), 0u);
  EXPECT_FALSE(text.complete());
  Unpacker number(packer.bytes());
  EXPECT_EQ(number.number<uint32_t>(), 0xffffffffu);
  EXPECT_EQ(number.number<uint64_t>(), 0u);
  EXPECT_TRUE(number.failed());
}

}  // namespace
}  // namespace weft
