// Text for a page. Strings of a trace are hostile: none reaches the page but through these.
#pragma once

#include <charconv>
#include <concepts>
#include <string>
#include <string_view>

#include "weft/base.h"

namespace weft::report {

// The longest piece of foreign text that a page repeats, in bytes; the rest becomes "…".
inline constexpr size_t kTextMax = 400;

// Valid UTF-8 of at most about `limit` bytes. What is no UTF-8, control characters and marks that
// turn the direction of writing become U+FFFD; line breaks and tabs stay.
std::string clean(std::string_view raw, size_t limit = kTextMax);
// The same for HTML, between tags or in a quoted attribute.
std::string escaped(std::string_view raw, size_t limit = kTextMax);
// The same as a JSON string with its quotes that may stand in a <script>: no '<', '>' or '&'.
void append_json_string(std::string& out, std::string_view raw, size_t limit = kTextMax);

template <std::integral T>
void append_number(std::string& out, T value) {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  out.append(digits, end);
}

// For people: the digits that count ("1397", "275.6", "1.23", "0.512"); "unknown" if not a number.
std::string figure(double value);
// With the same decimals in a whole column.
std::string fixed(double value, int decimals);
std::string in_ms(double ms);            // "275.6 ms"
std::string in_percent(double percent);  // "12.3 %"
// "12,345"
std::string grouped(uint64_t count);

}  // namespace weft::report
