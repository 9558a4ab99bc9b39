#include "nodelist.h"

#include <charconv>

#include "weft/membership.h"

namespace weft::membership {

namespace {

constexpr size_t kItemsMax = 65535;
constexpr size_t kListBytesMax = 1 << 20;
constexpr size_t kNameBytesMax = 253;  // the longest name that DNS has

Error flaw(std::string_view list, const char* what) {
  return error(Code::invalid_argument, "\"%s\" is no list of hosts: %s", shown(list).c_str(), what);
}

bool parse_number(std::string_view digits, uint32_t& number) {
  const char* end = digits.data() + digits.size();
  const auto [stopped, failure] = std::from_chars(digits.data(), end, number);
  return failure == std::errc{} && stopped == end && !digits.empty();
}

// The text up to a comma that stands outside brackets.
std::string_view first_item(std::string_view list) {
  int depth = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i] == '[') ++depth;
    if (list[i] == ']') --depth;
    if (list[i] == ',' && depth == 0) return list.substr(0, i);
  }
  return list;
}

// "01-04,7" -> 01, 02, 03, 04, 7: as wide as the first number of a range is written.
Result<std::vector<std::string>> expand_range(std::string_view ranges, std::string_view list) {
  std::vector<std::string> out;
  while (true) {
    const size_t comma = ranges.find(',');
    const std::string_view range = ranges.substr(0, comma);
    const size_t dash = range.find('-');
    const std::string_view low_digits = range.substr(0, dash);
    const std::string_view high_digits =
        dash == std::string_view::npos ? low_digits : range.substr(dash + 1);
    uint32_t low = 0, high = 0;
    if (low_digits.size() > 9 || !parse_number(low_digits, low) ||
        !parse_number(high_digits, high)) {
      return flaw(list, "a range in brackets is made of numbers, as in [01-04,7]");
    }
    if (high < low) return flaw(list, "a range ends before it begins");
    if (high - low >= kItemsMax - out.size()) return flaw(list, "more than 65535 hosts");
    for (uint32_t number = low; number <= high; ++number) {
      out.push_back(text("%0*u", static_cast<int>(low_digits.size()), number));
    }
    if (comma == std::string_view::npos) return out;
    ranges.remove_prefix(comma + 1);
  }
}

Result<std::vector<std::string>> expand_item(std::string_view item, std::string_view list) {
  std::vector<std::string> names = {""};
  while (!item.empty()) {
    const size_t open = item.find('[');
    const std::string_view plain = item.substr(0, open);
    if (plain.find(']') != std::string_view::npos) return flaw(list, "a ] without its [");
    if (plain.size() > kNameBytesMax) return flaw(list, "a name is too long");
    for (std::string& name : names) name += plain;
    if (open == std::string_view::npos) break;
    const size_t close = item.find(']', open);
    if (close == std::string_view::npos) return flaw(list, "a [ without its ]");
    WEFT_ASSIGN(const auto numbers, expand_range(item.substr(open + 1, close - open - 1), list));
    if (names.size() * numbers.size() > kItemsMax) return flaw(list, "more than 65535 hosts");
    std::vector<std::string> longer;
    longer.reserve(names.size() * numbers.size());
    for (const std::string& name : names) {
      if (name.size() > kNameBytesMax) return flaw(list, "a name is too long");
      for (const std::string& number : numbers) longer.push_back(name + number);
    }
    names = std::move(longer);
    item.remove_prefix(close + 1);
  }
  return names;
}

}  // namespace

Result<std::vector<std::string>> expand_nodes(std::string_view list) {
  if (list.size() > kListBytesMax) return flaw(list, "it is longer than 1 MiB");
  std::vector<std::string> nodes;
  for (std::string_view rest = list;;) {
    const std::string_view item = first_item(rest);
    if (item.empty()) return flaw(list, "a name is empty");
    WEFT_ASSIGN(auto names, expand_item(item, list));
    if (nodes.size() + names.size() > kItemsMax) return flaw(list, "more than 65535 hosts");
    nodes.insert(nodes.end(), std::make_move_iterator(names.begin()),
                 std::make_move_iterator(names.end()));
    if (item.size() == rest.size()) return nodes;
    rest.remove_prefix(item.size() + 1);
  }
}

Result<std::vector<uint32_t>> expand_counts(std::string_view list) {
  const auto bad = [&] {
    return error(Code::invalid_argument, "\"%s\" is no list of counts such as 2(x3),1",
                 shown(list).c_str());
  };
  std::vector<uint32_t> counts;
  for (std::string_view rest = list;;) {
    const size_t comma = rest.find(',');
    std::string_view item = rest.substr(0, comma);
    uint32_t count = 0, times = 1;
    if (const size_t open = item.find("(x"); open != std::string_view::npos) {
      if (item.back() != ')' ||
          !parse_number(item.substr(open + 2, item.size() - open - 3), times)) {
        return bad();
      }
      item = item.substr(0, open);
    }
    if (!parse_number(item, count) || times > kItemsMax - counts.size()) return bad();
    counts.insert(counts.end(), times, count);
    if (comma == std::string_view::npos) return counts;
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace weft::membership
