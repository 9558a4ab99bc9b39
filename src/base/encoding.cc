// What bytes and characters mean: hashes, UTF-8, JSON as text, numbers in a row.
#include <algorithm>
#include <cstring>

#include "weft/base.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace weft {

uint64_t hash64(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

uint64_t hash64(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

// ---- characters --------------------------------------------------------------------------

Character first_character(std::string_view input) {
  if (input.empty()) return {};
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(input[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {1, lead};
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || input.size() < length) return {};
  char32_t point = lead & (0xffU >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return {};
    point = point << 6U | (byte(i) & 0x3fU);
  }
  static constexpr char32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = point >= 0xd800 && point <= 0xdfff;
  if (point < kSmallest[length] || point > 0x10ffff || surrogate) return {};
  return {length, point};
}

bool is_control(char32_t point) { return point < 0x20 || (point >= 0x7f && point < 0xa0); }

std::string printable(std::string_view input, size_t limit) {
  std::string out;
  for (size_t i = 0; i < input.size();) {
    if (i >= limit) return out + "...";
    const Character character = first_character(input.substr(i));
    const std::string_view bytes = input.substr(i, std::max<size_t>(character.length, 1));
    if (character.length == 0 || is_control(character.point)) {
      for (char c : bytes) out += text("\\x%02x", static_cast<unsigned char>(c));
    } else {
      out += bytes;
    }
    i += bytes.size();
  }
  return out;
}

// ---- JSON --------------------------------------------------------------------------------

void append_json_string(std::string& out, std::string_view raw) {
  const auto plain = [](char c) {
    return c >= ' ' && c < 0x7f && c != '"' && c != '\\' && c != '<' && c != '>' && c != '&';
  };
  out += '"';
  while (!raw.empty()) {
    const auto end = std::find_if_not(raw.begin(), raw.end(), plain);
    out.append(raw.begin(), end);
    raw.remove_prefix(static_cast<size_t>(end - raw.begin()));
    if (raw.empty()) break;
    const char c = raw.front();
    const size_t length = first_character(raw).length;
    if (length != 1) {
      out += length == 0 ? kReplacementCharacter : raw.substr(0, length);
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else {
      out += text("\\u%04x", static_cast<unsigned>(c));
    }
    raw.remove_prefix(std::max<size_t>(length, 1));
  }
  out += '"';
}

Result<void> check_json(std::string_view json, const JsonLimits& limits) {
  size_t depth = 0;
  size_t values = 0;  // strings, brackets and literals that begin, less the strings that are keys
  bool in_literal = false;
  const auto refuse = [&](size_t at, const std::string& why) {
    const std::string_view before = json.substr(0, at);
    const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0: the first line
    return error(Code::invalid_argument, "line %zu, column %zu: %s",
                 1 + static_cast<size_t>(std::count(before.begin(), before.end(), '\n')),
                 at - line_start + 1, why.c_str());
  };
  for (size_t at = 0; at < json.size(); ++at) {
    const size_t start = at;
    const bool literal_before = std::exchange(in_literal, false);
    size_t keys = 0;  // the last string may turn out to be one
    switch (json[at]) {
      case ' ':
      case '\t':
      case '\r':
      case '\n':
      case ',': break;
      case ':':
        if (values > 0) --values;
        break;
      case ']':
      case '}':
        if (depth > 0) --depth;
        break;
      case '[':
      case '{':
        if (++depth > limits.depth)
          return refuse(at, text("nested deeper than %zu levels", limits.depth));
        ++values;
        break;
      case '"':
        ++values;
        keys = 1;
        for (++at; at < json.size() && json[at] != '"'; ++at)
          if (json[at] == '\\') ++at;
        break;
      default:
        if (!literal_before) ++values;
        in_literal = true;
    }
    if (values > limits.values + keys)
      return refuse(start, text("more than %zu values", limits.values));
  }
  if (values > limits.values)
    return refuse(json.size(), text("more than %zu values", limits.values));
  return {};
}

// ---- packing -----------------------------------------------------------------------------

Packer& Packer::raw(std::span<const std::byte> bytes) {
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  return *this;
}

Packer& Packer::string(std::string_view value) {
  number(static_cast<uint32_t>(value.size()));
  return raw(std::as_bytes(std::span(value)));
}

std::span<const std::byte> Unpacker::raw(size_t size) {
  if (failed_ || size > bytes_.size()) {
    failed_ = true;
    return {};
  }
  const auto taken = bytes_.first(size);
  bytes_ = bytes_.subspan(size);
  return taken;
}

std::string_view Unpacker::text(size_t size) {
  const auto taken = raw(size);
  return {reinterpret_cast<const char*>(taken.data()), taken.size()};
}

}  // namespace weft
