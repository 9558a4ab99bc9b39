#include "text.h"

#include <algorithm>
#include <cmath>

namespace weft::report {
namespace {

bool is_plain(char32_t point) {
  if (point == '\n' || point == '\t') return true;
  if (is_control(point)) return false;
  const bool turns = (point >= 0x202a && point <= 0x202e) || (point >= 0x2066 && point <= 0x2069);
  return !turns && point != 0x2028 && point != 0x2029;
}

}  // namespace

std::string clean(std::string_view raw, size_t limit) {
  std::string out;
  out.reserve(std::min(raw.size(), limit) + 4);
  while (!raw.empty()) {
    if (out.size() >= limit) return out + "…";
    const Character character = first_character(raw);
    const size_t length = std::max<size_t>(character.length, 1);
    const bool plain = character.length != 0 && is_plain(character.point);
    out += plain ? raw.substr(0, length) : kReplacementCharacter;
    raw.remove_prefix(length);
  }
  return out;
}

std::string escaped(std::string_view raw, size_t limit) {
  std::string out;
  for (const char c : clean(raw, limit)) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  }
  return out;
}

void append_json_string(std::string& out, std::string_view raw, size_t limit) {
  weft::append_json_string(out, clean(raw, limit));
}

std::string figure(double value) {
  if (!std::isfinite(value)) return "unknown";
  const double size = std::fabs(value);
  if (size >= 1e9) return text("%.3g", value);
  if (size >= 999.95) return text("%.0f", value);
  if (size >= 9.995) return text("%.1f", value);
  if (size >= 0.9995) return text("%.2f", value);
  // Not "-0.000".
  return size < 0.0005 ? "0" : text("%.3f", value);
}

std::string fixed(double value, int decimals) {
  if (!std::isfinite(value) || std::fabs(value) >= 1e9) return figure(value);
  const double least = 0.5 * std::pow(10, -decimals);
  return text("%.*f", decimals, std::fabs(value) < least ? 0.0 : value);
}

std::string in_ms(double ms) { return std::isfinite(ms) ? figure(ms) + " ms" : "unknown"; }

std::string in_percent(double percent) {
  if (!std::isfinite(percent)) return "unknown";
  if (std::fabs(percent) >= 1e6) return text("%.3g %%", percent);
  return text("%.1f %%", std::fabs(percent) < 0.05 ? 0.0 : percent);
}

std::string grouped(uint64_t count) {
  std::string digits = std::to_string(count);
  for (size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, ",");
  return digits;
}

}  // namespace weft::report
