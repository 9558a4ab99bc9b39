// protocol: what the harness and the workers of all engines say to each other.
//
// Each rank of each engine connects to the harness's Unix socket (its path is in
// WEFT_BENCH_CONTROL) and waits there in a blocking read. Lines of text, because the workers are
// C, C++ and Python:
//
//   worker   hello RANK PID VERSION...
//   harness  measure COLLECTIVE TYPE OP COUNT WARMUPS ITERATIONS CHECK SETTING
//   worker   done SECONDS WRONG           of all iterations together; elements found wrong
//            error MESSAGE...
//
// COUNT is in elements of the whole: all ranks' parts together for all-gather, reduce-scatter and
// all-to-all. SETTING is the wire's bytes a call, odd for small buffers; others ignore it. The end
// of the stream is the end of the worker.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "weft/base.h"

namespace weft::bench {

inline constexpr const char* kControlVariable = "WEFT_BENCH_CONTROL";
inline constexpr const char* kRankVariable = "WEFT_BENCH_RANK";
inline constexpr const char* kSizeVariable = "WEFT_BENCH_SIZE";
inline constexpr const char* kStoreVariable = "WEFT_BENCH_STORE";  // path of files to meet by
// Of weft itself.
inline constexpr const char* kSecretVariable = "WEFT_BENCH_SECRET";
inline constexpr const char* kLanesVariable = "WEFT_BENCH_LANES";
inline constexpr const char* kAlgorithmVariable = "WEFT_BENCH_ALGORITHM";

struct Request {
  std::string collective = "allreduce";
  std::string type = "float32";
  std::string op = "sum";
  uint64_t count = 0;
  uint32_t warmups = 1;
  uint32_t iterations = 1;
  bool check = false;
  uint64_t setting = 0;
};
std::string write_request(const Request& request);
Result<Request> read_request(const std::string& line);

struct Hello {
  uint32_t rank = 0;
  int pid = 0;
  std::string version;
};
Result<Hello> read_hello(const std::string& line);

struct Answer {
  double seconds = 0;
  uint64_t wrong = 0;
};
std::string write_answer(const Answer& answer);
// An "error" line is an unsupported error with the worker's words.
Result<Answer> read_answer(const std::string& line);

// The size of one element; 0 for a type that the bench does not know.
size_t element_bytes(const std::string& type);

// A connection that carries lines.
class Lines {
 public:
  explicit Lines(Fd fd) : fd_(std::move(fd)) {}
  int fd() const { return fd_.get(); }
  Result<void> write(std::string line);
  // The next line; nothing at the end of the stream. Blocks.
  Result<std::optional<std::string>> read();
  // A line that has arrived already, after one read() that does not block.
  Result<std::optional<std::string>> read_available();
  bool ended() const { return ended_; }

 private:
  std::optional<std::string> take();
  Result<void> fill(int flags);

  Fd fd_;
  std::string buffer_;
  bool ended_ = false;
};

// To the harness named in the environment.
Result<Lines> connect_to_harness();

}  // namespace weft::bench
