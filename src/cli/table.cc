#include "table.h"

#include <algorithm>

#include "weft/base.h"

namespace weft::cli {

namespace {

bool starts_character(char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }

size_t width_of(std::string_view input) {
  return static_cast<size_t>(std::count_if(input.begin(), input.end(), starts_character));
}

}  // namespace

std::string shortened(std::string_view input, size_t width) {
  if (width_of(input) <= width) return std::string(input);
  const size_t kept = width > 3 ? width - 3 : 0;
  size_t end = 0;
  size_t characters = 0;
  for (; end < input.size(); ++end)
    if (starts_character(input[end]) && characters++ == kept) break;
  return std::string(input.substr(0, end)) + "...";
}

void Table::add(std::vector<std::string> cells) {
  WEFT_CHECK(cells.size() == columns_.size());
  for (std::string& cell : cells) cell = printable(cell, cell.size());
  rows_.push_back(std::move(cells));
}

std::string Table::text() const {
  std::vector<std::vector<std::string>> lines;
  const bool named = std::any_of(columns_.begin(), columns_.end(),
                                 [](const Column& column) { return !column.name.empty(); });
  if (named) {
    auto& header = lines.emplace_back();
    for (const Column& column : columns_) header.push_back(column.name);
  }
  lines.insert(lines.end(), rows_.begin(), rows_.end());

  std::vector<size_t> widths(columns_.size(), 0);
  for (const auto& line : lines)
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], width_of(line[i]));

  std::string out;
  for (const auto& line : lines) {
    std::string row;
    for (size_t i = 0; i < line.size(); ++i) {
      const std::string gap(widths[i] - width_of(line[i]), ' ');
      if (i > 0) row += "  ";
      row += columns_[i].align == Align::right ? gap + line[i] : line[i] + gap;
    }
    row.erase(row.find_last_not_of(' ') + 1);
    out += row + "\n";
  }
  return out;
}

}  // namespace weft::cli
