// Private to cli: columns of text, aligned with spaces, as every verb shows them.
//
//   Table table({{"rank", Align::right}, {"time", Align::right}, {"what"}});
//   table.add({"0", "1.5 ms", "forward"});
//   print(table.text());
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace weft::cli {

enum class Align { left, right };

struct Column {
  std::string name;  // no column named: no header line
  Align align = Align::left;
};

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // REQUIRES: as many cells as columns.
  void add(std::vector<std::string> cells);
  // Two spaces between columns, none at the end of a line. Control characters become '?', so a
  // name from a file cannot move the cursor.
  std::string text() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// `input`, or its beginning and "..." where it is wider than `width` characters.
std::string shortened(std::string_view input, size_t width);

}  // namespace weft::cli
