// Runs one fuzz target without a fuzzer: over every file of its corpus, then over seeded random
// inputs, most of them mutations of the corpus. Equal arguments give equal inputs.
//
//   parse_fuzz [--runs n] [--seed n] [file or folder]...
//
// When the target dies, the input that killed it is left in <program>.crash; naming that file as
// an argument runs it again.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Input = std::vector<std::uint8_t>;

// Read by the signal handler, hence plain globals.
const std::uint8_t* current_data = nullptr;
std::size_t current_size = 0;
char crash_path[4096];

void save_input(int signal_number) {
  const int fd = ::open(crash_path, O_CREAT | O_TRUNC | O_WRONLY, 0644);
  if (fd >= 0) {
    std::size_t done = 0;
    while (done < current_size) {
      const ssize_t n = ::write(fd, current_data + done, current_size - done);
      if (n <= 0) break;
      done += static_cast<std::size_t>(n);
    }
    ::close(fd);
  }
  std::signal(signal_number, SIG_DFL);
  std::raise(signal_number);
}

void run(const Input& input) {
  // An exact copy on the heap, so that a sanitizer sees a read past the end.
  const Input copy(input.begin(), input.end());
  current_data = copy.data();
  current_size = copy.size();
  LLVMFuzzerTestOneInput(copy.data(), copy.size());
}

Input mutate(Input input, const std::vector<Input>& corpus, std::mt19937_64& rng) {
  const auto below = [&rng](std::size_t n) { return static_cast<std::size_t>(rng() % n); };
  const std::size_t edits = 1 + below(8);
  for (std::size_t i = 0; i < edits; ++i) {
    const std::size_t at = below(input.size() + 1);
    const auto where = input.begin() + static_cast<std::ptrdiff_t>(at);
    switch (below(6)) {
      case 0:  // flip a bit
        if (at < input.size()) input[at] = static_cast<std::uint8_t>(input[at] ^ (1u << below(8)));
        break;
      case 1:  // a value that lengths and counts are wrong at
        if (at < input.size()) {
          static constexpr std::uint8_t kEdges[] = {0, 1, 0x7f, 0x80, 0xff};
          input[at] = kEdges[below(std::size(kEdges))];
        }
        break;
      case 2: input.insert(where, static_cast<std::uint8_t>(rng())); break;
      case 3:
        input.erase(where, where + static_cast<std::ptrdiff_t>(below(input.size() - at + 1)));
        break;
      case 4: input.resize(at); break;
      default:  // the tail of another input
        if (!corpus.empty()) {
          const Input& other = corpus[below(corpus.size())];
          const std::size_t from = below(other.size() + 1);
          input.resize(at);
          input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
        }
    }
  }
  return input;
}

void read_into(std::vector<Input>& corpus, const std::filesystem::path& path) {
  if (std::filesystem::is_directory(path)) {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    for (const auto& file : files) read_into(corpus, file);
    return;
  }
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    std::exit(2);
  }
  corpus.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

}  // namespace

int main(int argc, char** argv) {
  std::size_t runs = 1000;
  std::uint64_t seed = 1;
  std::vector<Input> corpus;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--runs" && i + 1 < argc) {
      runs = std::strtoull(argv[++i], nullptr, 10);
    } else if (arg == "--seed" && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else {
      read_into(corpus, arg);
    }
  }
  std::snprintf(crash_path, sizeof crash_path, "%s.crash", argv[0]);
  std::signal(SIGABRT, save_input);
  std::signal(SIGSEGV, save_input);
  std::signal(SIGFPE, save_input);

  run({});
  for (const Input& input : corpus) run(input);
  std::mt19937_64 rng(seed);
  for (std::size_t i = 0; i < runs; ++i) {
    Input input;
    if (!corpus.empty() && rng() % 8 != 0) {
      input = corpus[static_cast<std::size_t>(rng() % corpus.size())];
    } else {
      input.resize(static_cast<std::size_t>(rng() % 256));
      for (auto& byte : input) byte = static_cast<std::uint8_t>(rng());
    }
    run(mutate(std::move(input), corpus, rng));
  }
  std::printf("%zu inputs of the corpus and %zu made with seed %llu\n", corpus.size(), runs,
              static_cast<unsigned long long>(seed));
  return 0;
}
