#include "protocol.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cmath>
#include <cstdlib>

namespace weft::bench {
namespace {

constexpr size_t kLineMax = 4096;

}  // namespace

std::string write_request(const Request& r) {
  return text("measure %s %s %s %" PRIu64 " %u %u %d %" PRIu64, r.collective.c_str(),
              r.type.c_str(), r.op.c_str(), r.count, r.warmups, r.iterations, r.check ? 1 : 0,
              r.setting);
}

Result<Request> read_request(const std::string& line) {
  char collective[32], type[16], op[16];
  Request r;
  int check = 0;
  if (sscanf(line.c_str(), "measure %31s %15s %15s %" SCNu64 " %u %u %d %" SCNu64, collective, type,
             op, &r.count, &r.warmups, &r.iterations, &check, &r.setting) != 8)
    return error(Code::corrupt, "the harness said \"%s\"", line.c_str());
  r.collective = collective;
  r.type = type;
  r.op = op;
  r.check = check != 0;
  return r;
}

Result<Hello> read_hello(const std::string& line) {
  Hello hello;
  int used = 0;
  if (sscanf(line.c_str(), "hello %u %d %n", &hello.rank, &hello.pid, &used) != 2 || used == 0)
    return error(Code::corrupt, "a worker said \"%s\" for a greeting", line.c_str());
  hello.version = line.substr(static_cast<size_t>(used));
  return hello;
}

std::string write_answer(const Answer& answer) {
  return text("done %.9f %" PRIu64, answer.seconds, answer.wrong);
}

Result<Answer> read_answer(const std::string& line) {
  if (line.rfind("error ", 0) == 0) return Error(Code::unsupported, line.substr(6));
  Answer answer;
  if (sscanf(line.c_str(), "done %lf %" SCNu64, &answer.seconds, &answer.wrong) != 2 ||
      !std::isfinite(answer.seconds) || answer.seconds < 0)
    return error(Code::corrupt, "a worker answered \"%s\"", line.c_str());
  return answer;
}

size_t element_bytes(const std::string& type) {
  static constexpr std::pair<const char*, size_t> kTypes[] = {
      {"float64", 8}, {"float32", 4}, {"float16", 2}, {"bfloat16", 2}, {"int8", 1},
      {"uint8", 1},   {"int16", 2},   {"int32", 4},   {"int64", 8}};
  for (const auto& [name, bytes] : kTypes)
    if (type == name) return bytes;
  return 0;
}

Result<void> Lines::write(std::string line) {
  line += '\n';
  std::string_view left = line;
  while (!left.empty()) {
    const ssize_t n = ::send(fd_.get(), left.data(), left.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return io_error(errno, "writing to the other side of the bench");
    left.remove_prefix(static_cast<size_t>(n));
  }
  return {};
}

std::optional<std::string> Lines::take() {
  const size_t end = buffer_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  std::string line = buffer_.substr(0, end);
  buffer_.erase(0, end + 1);
  return line;
}

Result<void> Lines::fill(int flags) {
  if (buffer_.size() > kLineMax) return error(Code::corrupt, "a line of the bench has no end");
  char bytes[kLineMax];
  const ssize_t n = ::recv(fd_.get(), bytes, sizeof bytes, flags);
  if (n > 0) buffer_.append(bytes, static_cast<size_t>(n));
  if (n == 0 || (n < 0 && errno == ECONNRESET)) ended_ = true;
  if (n < 0 && errno != EINTR && errno != EAGAIN && errno != ECONNRESET)
    return io_error(errno, "reading from the other side of the bench");
  return {};
}

Result<std::optional<std::string>> Lines::read() {
  for (;;) {
    if (auto line = take()) return line;
    if (ended_) return std::optional<std::string>();
    WEFT_TRY(fill(0));
  }
}

Result<std::optional<std::string>> Lines::read_available() {
  if (auto line = take()) return line;
  if (!ended_) WEFT_TRY(fill(MSG_DONTWAIT));
  return take();
}

Result<Lines> connect_to_harness() {
  const char* path = getenv(kControlVariable);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path == nullptr || strlen(path) >= sizeof address.sun_path)
    return error(Code::invalid_argument, "%s does not name a socket; `weft bench` sets it",
                 kControlVariable);
  strcpy(address.sun_path, path);
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd || ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
    return io_error(errno, "connecting to the bench at %s", path);
  return Lines(std::move(fd));
}

}  // namespace weft::bench
