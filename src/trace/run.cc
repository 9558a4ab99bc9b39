#include <algorithm>
#include <filesystem>
#include <new>
#include <system_error>

#include "format.h"

namespace weft::trace {
namespace fs = std::filesystem;
namespace {

void add(Trace& trace, ReadFile file) {
  if (file.damage.any() || !file.damage.details.empty())
    trace.damage.push_back(std::move(file.damage));
  trace.processes.push_back(std::move(file.process));
  trace.files.push_back(std::move(file.facts));
}

Result<std::vector<fs::path>> files_in(const std::string& folder) {
  std::vector<fs::path> files;
  std::error_code failed;
  for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end;
       entry.increment(failed)) {
    if (entry->path().extension() == ".weft") files.push_back(entry->path());
  }
  if (failed) return io_error(failed.value(), "%s", folder.c_str());
  if (files.empty())
    return error(Code::not_found, "%s: no trace in this folder (no *.weft file)", folder.c_str());
  std::sort(files.begin(), files.end());
  return files;
}

// Throws std::bad_alloc: a file that found no room is not a damaged one.
Result<Trace> read_run(const std::string& path, const ReadOptions& options) {
  Trace trace;
  std::error_code failed;
  if (!fs::is_directory(path, failed)) {
    WEFT_ASSIGN(ReadFile file, read_from(path, options));
    add(trace, std::move(file));
    return trace;
  }
  WEFT_ASSIGN(auto files, files_in(path));
  std::vector<ReadFile> read_files;
  std::optional<Error> first_error;
  for (const fs::path& file : files) {
    auto result = read_from(file.string(), options);
    if (result) {
      read_files.push_back(std::move(result).value());
      continue;
    }
    Damage damage;
    damage.file = file.string();
    const uintmax_t size = fs::file_size(file, failed);
    damage.bytes_lost = failed ? 0 : size;
    damage.unfinished = true;
    damage.details.push_back(result.error().message());
    trace.damage.push_back(std::move(damage));
    if (!first_error) first_error = std::move(result).error();
  }
  if (read_files.empty()) return *std::move(first_error);
  std::stable_sort(read_files.begin(), read_files.end(), [](const auto& a, const auto& b) {
    return a.process.environment.rank < b.process.environment.rank;
  });
  for (size_t i = 1; i < read_files.size(); ++i) {
    const uint32_t rank = read_files[i].process.environment.rank;
    if (read_files[i - 1].process.environment.rank == rank)
      return error(Code::invalid_argument, "%s and %s both claim rank %u",
                   read_files[i - 1].facts.path.c_str(), read_files[i].facts.path.c_str(), rank);
  }
  for (ReadFile& file : read_files) add(trace, std::move(file));
  return trace;
}

}  // namespace

Result<Trace> read(const std::string& path, const ReadOptions& options) {
  try {
    return read_run(path, options);
  } catch (const std::bad_alloc&) {
    return no_memory_for(path);
  }
}

}  // namespace weft::trace
