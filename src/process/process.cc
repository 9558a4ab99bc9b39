// What is built from a Child: one that is waited for, and the pipes and names around it.

#include "weft/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>

namespace weft::process {
namespace {

constexpr size_t kSaidMax = 64 << 20;
// How long pipes are read after the process has ended, when something else keeps them open.
constexpr Nanos kOutputGrace = Nanos::from_millis(500);
constexpr Nanos kTick = Nanos::from_millis(20);
constexpr const char* kSystemFolders =
    ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

std::string path_of(std::span<const std::string> environment) {
  for (const std::string& entry : environment) {
    if (entry.starts_with("PATH=")) return entry.substr(5);
  }
  const char* path = environment.empty() ? std::getenv("PATH") : nullptr;
  return path == nullptr ? "" : path;
}

}  // namespace

std::string command_line(const std::vector<std::string>& argv) {
  std::string line;
  for (const std::string& word : argv) line += (line.empty() ? "" : " ") + word;
  return line;
}

Result<std::string> find_program(const std::string& name,
                                 std::span<const std::string> environment) {
  if (name.find('/') != std::string::npos) return name;
  const std::string folders = path_of(environment) + kSystemFolders;
  for (size_t from = 0; from <= folders.size();) {
    const size_t to = std::min(folders.find(':', from), folders.size());
    const std::string candidate = folders.substr(from, to - from) + "/" + name;
    struct stat status {};
    if (to > from && stat(candidate.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
        access(candidate.c_str(), X_OK) == 0) {
      return candidate;
    }
    from = to + 1;
  }
  return error(Code::not_found, "there is no program \"%s\"", name.c_str());
}

Result<Pipe> make_pipe() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return io_error(errno, "cannot make a pipe");
  return Pipe{Fd(ends[0]), Fd(ends[1])};
}

Result<Pipe> make_socket_pair() {
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    return io_error(errno, "cannot make a pair of sockets");
  }
  return Pipe{Fd(ends[0]), Fd(ends[1])};
}

Result<Finished> run(const Command& command, Nanos patience) {
  WEFT_ASSIGN(Pipe output, make_pipe());
  WEFT_ASSIGN(Pipe errors, make_pipe());
  Command piped = command;
  piped.descriptors.push_back({output.write.get(), 1});
  piped.descriptors.push_back({errors.write.get(), 2});
  WEFT_ASSIGN(Child child, Child::start(piped));
  output.write.reset();
  errors.write.reset();

  Finished finished;
  Nanos deadline = monotonic_clock().now() + patience;
  bool ended = false;
  std::array<pollfd, 2> waiting = {pollfd{output.read.get(), POLLIN, 0},
                                   pollfd{errors.read.get(), POLLIN, 0}};
  while (waiting[0].fd >= 0 || waiting[1].fd >= 0) {
    const Nanos now = monotonic_clock().now();
    if (!ended && child.ended()) {
      ended = true;
      deadline = std::min(deadline, now + kOutputGrace);
    }
    if (now >= deadline) break;
    const Nanos turn = std::min(deadline - now, kTick);
    if (poll(waiting.data(), waiting.size(), static_cast<int>(turn.millis()) + 1) <= 0) continue;
    for (pollfd& one : waiting) {
      if (one.revents == 0) continue;
      std::array<char, 16384> buffer{};
      const ssize_t n = read(one.fd, buffer.data(), buffer.size());
      if (n < 0 && errno == EINTR) continue;
      std::string& said = &one == waiting.data() ? finished.output : finished.errors;
      if (n > 0 && said.size() < kSaidMax) said.append(buffer.data(), static_cast<size_t>(n));
      if (n <= 0) one.fd = -1;
    }
  }
  if (!child.wait(deadline - monotonic_clock().now())) {
    return error(Code::timeout, "%s did not end within %s", command_line(command.argv).c_str(),
                 format_duration(patience).c_str());
  }
  finished.ending = child.kill_and_reap();
  return finished;
}

}  // namespace weft::process
