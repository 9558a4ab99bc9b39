// From a Command to a process: what happens between vfork and exec, and how it is watched.
//
// The child borrows the caller's memory until exec, and the calling thread stands still so long.
// So the child makes system calls only, writes to nothing but its own stack, and no handler of the
// caller's may run in it: all signals are blocked until their handlers are gone. Why it could not
// become the program it says over a pipe. The pipe is not read to its end, which another child that
// was forked at the same moment could hold open: when vfork returns, everything is in it.

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "weft/process.h"

extern "C" char** environ;

#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC (1U << 2)
#endif

// ThreadSanitizer turns vfork into fork: then the pipe has to be waited for.
#if defined(__SANITIZE_THREAD__)
#define WEFT_VFORK_IS_FORK 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define WEFT_VFORK_IS_FORK 1
#endif
#endif

namespace weft::process {
namespace {

constexpr int kDescriptorsMax = 65536;  // looked at, where the kernel cannot do it at once
// How often the end of a process is looked for where the kernel has no process descriptors.
constexpr int kTickMs = 1;

// What a child writes to its parent when it could not become the program.
struct StartFailure {
  enum class Stage : int { prepare, descriptors, exec } stage = Stage::exec;
  int error_number = 0;
};

std::vector<std::string> merged_environment(const std::vector<std::string>& added) {
  std::vector<std::string> merged = added;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string_view entry = *at;
    const std::string_view name = entry.substr(0, entry.find('=') + 1);
    const bool replaced = std::any_of(added.begin(), added.end(), [&](const std::string& other) {
      return std::string_view(other).starts_with(name);
    });
    if (!replaced) merged.emplace_back(entry);
  }
  return merged;
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (std::string& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

// A descriptor from which `content` can be read.
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

// All that the child needs, made before it is: it must not allocate.
struct Start {
  const Command* command = nullptr;
  std::string path;
  std::vector<std::string> words, environment, shell_words;
  std::vector<char*> argv, envp, shell_argv;
  std::vector<Descriptor> descriptors;
  std::vector<int> copies;  // one each, for the child to fill in
  int above = 3;            // the first number that no descriptor of the child has
  Fd input;
  pid_t parent = 0;
  int report = -1;
};

Result<Start> prepare(const Command& command) {
  if (command.argv.empty() || command.argv[0].empty()) {
    return error(Code::invalid_argument, "no program to start");
  }
  Start start;
  start.command = &command;
  start.environment = merged_environment(command.environment);
  WEFT_ASSIGN(start.path, find_program(command.argv[0], start.environment));
  start.words = command.argv;
  // A script without a first line that says who reads it is read by the shell, as execvp does.
  start.shell_words = {"sh", start.path};
  start.shell_words.insert(start.shell_words.end(), command.argv.begin() + 1, command.argv.end());
  start.argv = pointers_to(start.words);
  start.envp = pointers_to(start.environment);
  start.shell_argv = pointers_to(start.shell_words);
  start.descriptors = command.descriptors;
  if (command.input) {
    WEFT_ASSIGN(start.input, readable(*command.input));
    start.descriptors.push_back({start.input.get(), 0});
  }
  const auto named = [&](int number) {
    return std::any_of(start.descriptors.begin(), start.descriptors.end(),
                       [&](const Descriptor& one) { return one.theirs == number; });
  };
  if (!named(0)) {
    start.input = Fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!start.input) return io_error(errno, "opening /dev/null");
    start.descriptors.push_back({start.input.get(), 0});
  }
  for (const Descriptor& one : start.descriptors) {
    WEFT_CHECK(one.ours >= 0 && one.theirs >= 0);
    start.above = std::max(start.above, one.theirs + 1);
  }
  start.copies.resize(start.descriptors.size(), -1);
  start.parent = getpid();
  return start;
}

void close_all_on_exec() {
  if (syscall(SYS_close_range, 3U, ~0U, CLOSE_RANGE_CLOEXEC) == 0) return;
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const int end = static_cast<int>(std::min<rlim_t>(limit.rlim_cur, kDescriptorsMax));
  for (int fd = 3; fd < end; ++fd) {
    const int flags = fcntl(fd, F_GETFD);
    if (flags >= 0) fcntl(fd, F_SETFD, flags | FD_CLOEXEC);
  }
}

// Copies first, above all numbers that are asked for, so that none overwrites one that is still
// needed. A copy keeps nothing open in the program; dup2 makes what does.
bool move_descriptors(Start& start) {
  for (size_t i = 0; i < start.descriptors.size(); ++i) {
    start.copies[i] = fcntl(start.descriptors[i].ours, F_DUPFD_CLOEXEC, start.above);
    if (start.copies[i] < 0) return false;
  }
  if (!start.command->keeps_descriptors) close_all_on_exec();
  for (size_t i = 0; i < start.descriptors.size(); ++i) {
    if (dup2(start.copies[i], start.descriptors[i].theirs) < 0) return false;
  }
  return true;
}

// What is ignored stays so, but a broken pipe ends a program again.
void reset_signals() {
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction now {};
    if (sigaction(number, nullptr, &now) != 0) continue;
    if (now.sa_handler == SIG_DFL || (now.sa_handler == SIG_IGN && number != SIGPIPE)) continue;
    sigaction(number, &standard, nullptr);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

[[noreturn, gnu::noinline]] void become(Start& start) {
  const auto give_up = [&](StartFailure::Stage stage, int error_number) {
    const StartFailure failure{stage, error_number};
    (void)!write(start.report, &failure, sizeof(failure));
    _exit(127);
  };
  if (start.command->own_group) setpgid(0, 0);
  const auto die_with_parent = [&] {
    if (!start.command->dies_with_parent) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    // The parent may have died before the line above; then nobody sends that signal.
    if (getppid() != start.parent) _exit(127);
  };
  die_with_parent();
  if (start.command->before_exec) {
    if (const int number = start.command->before_exec(); number != 0) {
      give_up(StartFailure::Stage::prepare, number);
    }
    // Entering a namespace changes credentials, and that clears the signal.
    die_with_parent();
  }
  if (!move_descriptors(start)) give_up(StartFailure::Stage::descriptors, errno);
  reset_signals();
  execve(start.path.c_str(), start.argv.data(), start.envp.data());
  if (errno == ENOEXEC) execve("/bin/sh", start.shell_argv.data(), start.envp.data());
  give_up(StartFailure::Stage::exec, errno);
  _exit(127);
}

Error start_error(const std::string& program, const StartFailure& failure) {
  switch (failure.stage) {
    case StartFailure::Stage::prepare:
      return io_error(failure.error_number, "cannot prepare to start \"%s\"", program.c_str());
    case StartFailure::Stage::descriptors:
      return io_error(failure.error_number, "cannot hand descriptors to \"%s\"", program.c_str());
    case StartFailure::Stage::exec: break;
  }
  if (failure.error_number == ENOENT) {
    return error(Code::not_found, "there is no program \"%s\"", program.c_str());
  }
  return io_error(failure.error_number, "cannot start \"%s\"", program.c_str());
}

// Blocks every signal in this thread while it lives.
class AllBlocked {
 public:
  AllBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~AllBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  AllBlocked(const AllBlocked&) = delete;
  AllBlocked& operator=(const AllBlocked&) = delete;

 private:
  sigset_t before_{};
};

[[gnu::noinline]] pid_t vfork_and_become(Start& start) {
  const pid_t pid = vfork();  // NOLINT(clang-analyzer-security.insecureAPI.vfork): see the top
  if (pid == 0) become(start);
  return pid;
}

std::optional<StartFailure> told_by(Pipe report) {
  report.write.reset();
#ifndef WEFT_VFORK_IS_FORK
  fcntl(report.read.get(), F_SETFL, O_NONBLOCK);
#endif
  StartFailure told;
  ssize_t n = 0;
  do {
    n = read(report.read.get(), &told, sizeof(told));
  } while (n < 0 && errno == EINTR);
  return n == sizeof(told) ? std::optional(told) : std::nullopt;
}

Ending ending_of(const siginfo_t& info) {
  Ending ending;
  (info.si_code == CLD_EXITED ? ending.exit_code : ending.signal) = info.si_status;
  return ending;
}

}  // namespace

std::string Ending::words() const {
  if (signal != 0) return text("was killed by signal %d (%s)", signal, strsignal(signal));
  if (exit_code == kUnknown) return "ended, and somebody else took its exit code";
  return text("exited with code %d", exit_code);
}

Child::Child(pid_t pid, bool leads_group)
    : pid_(pid),
      leads_group_(leads_group),
      pidfd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}

Child::Child(Child&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      leads_group_(other.leads_group_),
      pidfd_(std::move(other.pidfd_)) {}

Child& Child::operator=(Child&& other) noexcept {
  if (this != &other) {
    kill_and_reap();
    pid_ = std::exchange(other.pid_, -1);
    leads_group_ = other.leads_group_;
    pidfd_ = std::move(other.pidfd_);
  }
  return *this;
}

Child::~Child() { kill_and_reap(); }

Result<Child> Child::start(const Command& command) {
  WEFT_ASSIGN(Start start, prepare(command));
  WEFT_ASSIGN(Pipe report, make_pipe());
  start.report = report.write.get();
  pid_t pid = -1;
  int failure = 0;
  {
    const AllBlocked blocked;
    pid = vfork_and_become(start);
    failure = errno;
  }
  if (pid < 0) return io_error(failure, "cannot start \"%s\"", command.argv[0].c_str());
  Child child(pid, command.own_group);
  if (const auto told = told_by(std::move(report))) return start_error(command.argv[0], *told);
  return child;
}

Result<Child> Child::fork(const std::function<int()>& body, bool own_group) {
  const pid_t pid = ::fork();
  if (pid < 0) return io_error(errno, "cannot fork");
  if (pid == 0) {
    if (own_group) setpgid(0, 0);
    _exit(body());
  }
  if (own_group) setpgid(pid, pid);  // whoever comes first, the group exists from now on
  return Child(pid, own_group);
}

std::optional<Ending> Child::ended() const {
  siginfo_t info{};
  if (pid_ <= 0) return std::nullopt;
  if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
    return errno == ECHILD ? std::optional(Ending{.exit_code = kUnknown}) : std::nullopt;
  }
  return info.si_pid == 0 ? std::nullopt : std::optional(ending_of(info));
}

std::optional<Ending> Child::wait(Nanos patience) const {
  const Nanos until = monotonic_clock().now() + patience;
  for (;;) {
    if (auto ending = ended()) return ending;
    const double left_ms = (until - monotonic_clock().now()).millis();
    if (left_ms <= 0 || pid_ <= 0) return std::nullopt;
    pollfd waiting{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    const int timeout_ms = static_cast<int>(std::min(left_ms + 1, 60'000.0));
    ::poll(&waiting, 1, pidfd_ ? timeout_ms : std::min(timeout_ms, kTickMs));
  }
}

// In a copy of the process that started it (a data loader, forked) the child is somebody else's;
// and so is its number when somebody else has reaped it.
bool Child::ours() const {
  siginfo_t info{};
  return pid_ > 0 &&
         waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

void Child::signal(int number) const {
  if (ours()) ::kill(leads_group_ ? -pid_ : pid_, number);
}

Ending Child::end(int number, Nanos patience) {
  if (number != 0) signal(number);
  wait(patience);
  return kill_and_reap();
}

Ending Child::kill_and_reap() {
  Ending ending{.exit_code = kUnknown};
  if (ours()) {
    signal(SIGKILL);
    siginfo_t info{};
    int failure = 0;
    do {
      failure = waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED);
    } while (failure != 0 && errno == EINTR);
    if (failure == 0) ending = ending_of(info);
  }
  pid_ = -1;
  pidfd_.reset();
  return ending;
}

}  // namespace weft::process
