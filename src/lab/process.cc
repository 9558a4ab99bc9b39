#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

extern "C" char** environ;

namespace weft::lab {
namespace {

constexpr size_t kSaidMax = 64 << 20;

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  result.reserve(strings.size() + 1);
  for (std::string& string : strings) result.push_back(string.data());
  result.push_back(nullptr);
  return result;
}

// The caller's environment, with what `added` says instead or as well.
std::vector<std::string> merged_environment(const std::vector<std::string>& added) {
  std::vector<std::string> merged = added;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string_view entry = *at;
    const std::string_view name = entry.substr(0, entry.find('=') + 1);
    const bool replaced = std::any_of(added.begin(), added.end(), [&](const std::string& other) {
      return other.compare(0, name.size(), name) == 0;
    });
    if (!replaced) merged.emplace_back(entry);
  }
  return merged;
}

// What a child that could not become the program says over a pipe.
struct Failure {
  int error_number;
  int step;  // index into kSteps
};
constexpr const char* kSteps[] = {"entering the host", "opening /dev/null", "moving descriptors",
                                  "starting"};

// In the child, between fork and exec: nothing here may allocate.
[[noreturn]] void become(const char* path, char* const* arguments, char* const* environment,
                         const Command& command, const ProcessPlace& place, pid_t parent,
                         int report) {
  const auto fail = [&](int step) {
    const Failure failure{errno, step};
    (void)!write(report, &failure, sizeof failure);
    _exit(127);
  };
  for (const int fd : place.namespaces)
    if (setns(fd, 0) != 0) fail(0);
  if (place.dies_with_parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
  }
  int input = command.stdin_fd;
  if (input < 0) input = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (input < 0) fail(1);
  // Copies first, above 2, so that an asked descriptor that is itself 0, 1 or 2 is not overwritten.
  const int copies[3] = {fcntl(input, F_DUPFD_CLOEXEC, 3),
                         fcntl(command.stdout_fd < 0 ? 1 : command.stdout_fd, F_DUPFD_CLOEXEC, 3),
                         fcntl(command.stderr_fd < 0 ? 2 : command.stderr_fd, F_DUPFD_CLOEXEC, 3)};
  for (int fd = 0; fd < 3; ++fd)
    if (copies[fd] >= 0 && dup2(copies[fd], fd) < 0) fail(2);
  for (const int fd : place.kept)
    if (fcntl(fd, F_SETFD, 0) != 0) fail(2);
  struct sigaction standard = {};
  standard.sa_handler = SIG_DFL;
  for (int signal = 1; signal < 32; ++signal) sigaction(signal, &standard, nullptr);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  execve(path, arguments, environment);
  fail(3);
  _exit(127);
}

int exit_code_of(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

std::string command_line(const std::vector<std::string>& arguments) {
  std::string line;
  for (const std::string& argument : arguments) line += (line.empty() ? "" : " ") + argument;
  return line;
}

Result<std::string> find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  const char* path = getenv("PATH");
  std::string folders = path == nullptr ? "" : path;
  folders += ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
  for (size_t from = 0; from <= folders.size();) {
    const size_t to = std::min(folders.find(':', from), folders.size());
    const std::string candidate = folders.substr(from, to - from) + "/" + name;
    struct stat status;
    if (to > from && stat(candidate.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
        access(candidate.c_str(), X_OK) == 0)
      return candidate;
    from = to + 1;
  }
  return error(Code::not_found, "there is no program %s", name.c_str());
}

Result<Fd> readable(std::string_view content) {
  Fd fd(memfd_create("weft", MFD_CLOEXEC));
  if (!fd) return io_error(errno, "making a file in memory");
  while (!content.empty()) {
    const ssize_t n = write(fd.get(), content.data(), content.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return io_error(errno, "writing a file in memory");
    content.remove_prefix(static_cast<size_t>(n));
  }
  if (lseek(fd.get(), 0, SEEK_SET) != 0) return io_error(errno, "rewinding a file in memory");
  return fd;
}

Result<pid_t> start_process(const Command& command, const ProcessPlace& place) {
  if (command.arguments.empty()) return error(Code::invalid_argument, "no program to start");
  WEFT_ASSIGN(const std::string path, find_program(command.arguments.front()));
  std::vector<std::string> arguments = command.arguments;
  std::vector<std::string> environment = merged_environment(command.environment);
  const std::vector<char*> argument_pointers = pointers(arguments);
  const std::vector<char*> environment_pointers = pointers(environment);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return io_error(errno, "making a pipe");
  Fd read_end(ends[0]), write_end(ends[1]);
  const pid_t parent = getpid();
  // No signal handler of ours may run in the child before it has put back the defaults.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const pid_t child = fork();
  if (child == 0)
    become(path.c_str(), argument_pointers.data(), environment_pointers.data(), command, place,
           parent, write_end.get());
  const int fork_error = errno;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (child < 0) return io_error(fork_error, "starting %s", path.c_str());
  write_end.reset();
  Failure failure;
  ssize_t n;
  do {
    n = read(read_end.get(), &failure, sizeof failure);
  } while (n < 0 && errno == EINTR);
  if (n == sizeof failure) {
    while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
    return io_error(failure.error_number, "%s for %s", kSteps[failure.step & 3],
                    command_line(arguments).c_str());
  }
  return child;
}

Result<Finished> finish_process(Command command, const ProcessPlace& place, Nanos patience) {
  int output[2], errors[2];
  if (pipe2(output, O_CLOEXEC) != 0) return io_error(errno, "making a pipe");
  Fd output_read(output[0]), output_write(output[1]);
  if (pipe2(errors, O_CLOEXEC) != 0) return io_error(errno, "making a pipe");
  Fd errors_read(errors[0]), errors_write(errors[1]);
  command.stdout_fd = output_write.get();
  command.stderr_fd = errors_write.get();
  WEFT_ASSIGN(const pid_t child, start_process(command, place));
  output_write.reset();
  errors_write.reset();

  Finished finished;
  const Nanos deadline = monotonic_clock().now() + patience;
  pollfd waiting[2] = {{output_read.get(), POLLIN, 0}, {errors_read.get(), POLLIN, 0}};
  bool late = false;
  while ((waiting[0].fd >= 0 || waiting[1].fd >= 0) && !late) {
    const int64_t left_ms = (deadline - monotonic_clock().now()).count / 1'000'000;
    late = left_ms <= 0;
    if (late || poll(waiting, 2, static_cast<int>(std::min<int64_t>(left_ms, 60'000))) <= 0)
      continue;
    for (pollfd& one : waiting) {
      if (one.revents == 0) continue;
      char buffer[16384];
      const ssize_t n = read(one.fd, buffer, sizeof buffer);
      if (n < 0 && errno == EINTR) continue;
      std::string& said = &one == &waiting[0] ? finished.output : finished.errors;
      if (n > 0 && said.size() < kSaidMax) said.append(buffer, static_cast<size_t>(n));
      if (n <= 0) one.fd = -1;
    }
  }
  if (late) kill(child, SIGKILL);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (late)
    return error(Code::timeout, "%s did not end within %s", command_line(command.arguments).c_str(),
                 format_duration(patience).c_str());
  finished.exit_code = exit_code_of(status);
  return finished;
}

}  // namespace weft::lab
