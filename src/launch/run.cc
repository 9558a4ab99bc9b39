// Starting and minding: one loop around poll().
//
// Each child leads a process group, so that what it forks is reached too, and Ctrl-C at a terminal
// comes to the launcher alone, which passes it on exactly once. A child that has exited stays a
// zombie until the end of the run: as long as it is one, the number of its group cannot come to
// mean somebody else's.
//
// If the launcher is killed, the kernel kills each child (parent death signal). That does not
// reach what the children forked; for these there is a minder, a process that does nothing but wait
// for the launcher's end of a pipe to close, and then kills the groups.
//
// A child with an input is an agent for a process on another host. It is not signalled, since that
// would end the connection and leave the process to guess: signals go to the other end as bytes,
// and only to kill is the agent itself killed, whose end is seen there as the end of the input.

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "output.h"
#include "weft/launch.h"

extern char** environ;

namespace weft::launch {

namespace {

// How long a pipe is read after its child has exited, when something else keeps it open.
constexpr Nanos kOutputGrace = Nanos::from_millis(500);
// How often exits are looked for where the kernel has no process descriptors.
constexpr Nanos kTick = Nanos::from_millis(20);
constexpr size_t kReadBytes = 64 << 10;
constexpr size_t kPipeBytesMax = 1 << 20;  // what the kernel lets an ordinary user put in a pipe
constexpr int kPassedOn[] = {SIGINT, SIGTERM, SIGHUP};

struct Pipe {
  Fd read;
  Fd write;
};

Result<Pipe> make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return io_error(errno, "cannot make a pipe");
  return Pipe{Fd(ends[0]), Fd(ends[1])};
}

// A pipe of sockets: a write to somebody who was killed does not raise SIGPIPE.
Result<Pipe> make_socket_pair() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return io_error(errno, "cannot make a pair of sockets");
  }
  return Pipe{Fd(ends[0]), Fd(ends[1])};
}

// Keeps the signals that are passed on from acting on the launcher while a run lasts.
class SignalGuard {
 public:
  SignalGuard() {
    sigemptyset(&taken_);
    for (int number : kPassedOn) {
      struct sigaction action {};
      // Who started the launcher with a signal ignored (nohup) wants the job to ignore it too.
      if (sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) continue;
      sigaddset(&taken_, number);
    }
    pthread_sigmask(SIG_BLOCK, &taken_, &before_);
  }
  ~SignalGuard() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;

  const sigset_t& taken() const { return taken_; }
  const sigset_t& before() const { return before_; }

 private:
  sigset_t taken_;
  sigset_t before_;
};

// ---- the minder ----------------------------------------------------------------------------

class Minder {
 public:
  static Result<Minder> start(size_t groups) {
    WEFT_ASSIGN(Pipe pipe, make_socket_pair());
    std::vector<pid_t> known(groups);  // made before fork: nothing is allocated after it
    const pid_t pid = fork();
    if (pid < 0) return io_error(errno, "cannot fork");
    if (pid == 0) wait_and_kill(pipe.read.get(), known);
    setpgid(pid, pid);
    return Minder(pid, std::move(pipe.write));
  }

  Minder(Minder&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), pipe_(std::move(other.pipe_)) {}
  Minder& operator=(Minder&&) = delete;
  ~Minder() {
    if (pid_ < 0) return;
    watch(0);  // all is well
    pipe_.reset();
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }

  void watch(pid_t group) {
    while (send(pipe_.get(), &group, sizeof(group), MSG_NOSIGNAL) < 0 && errno == EINTR) {
    }
  }

 private:
  Minder(pid_t pid, Fd pipe) : pid_(pid), pipe_(std::move(pipe)) {}

  [[noreturn]] static void wait_and_kill(int pipe, std::vector<pid_t>& known) {
    setpgid(0, 0);
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, nullptr);
    // Anything that stays open here would keep somebody waiting for its end.
    dup2(pipe, 0);
    if (syscall(SYS_close_range, 1U, ~0U, 0U) != 0) {
      for (int fd = 1; fd < 1024; ++fd) close(fd);
    }
    size_t count = 0;
    pid_t group = 0;
    for (;;) {
      const ssize_t n = read(0, &group, sizeof(group));
      if (n < 0 && errno == EINTR) continue;
      if (n != sizeof(group)) break;
      if (group == 0) _exit(0);
      if (count < known.size()) known[count++] = group;
    }
    for (size_t i = 0; i < count; ++i) kill(-known[i], SIGKILL);
    _exit(0);
  }

  pid_t pid_;
  Fd pipe_;
};

// ---- one child -----------------------------------------------------------------------------

struct Stream {
  Fd pipe;
  Lines lines;
};

struct Child {
  const Process* process = nullptr;
  pid_t pid = -1;
  Fd pidfd;  // absent where the kernel has none
  std::vector<Stream> streams;
  Fd input;            // of an agent
  std::string unsent;  // of its input
  bool running = false;
  Outcome outcome;

  bool failed() const { return outcome.signal != 0 || outcome.exit_code != 0; }
};

// What a child writes to its parent when it could not become the program.
struct StartFailure {
  enum class Stage : int { orphaned, before_exec, exec } stage;
  int error_number;
};

std::vector<std::string> merged_environment(const std::map<std::string, std::string>& added) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view line(*entry);
    if (!added.contains(std::string(line.substr(0, line.find('='))))) merged.emplace_back(line);
  }
  for (const auto& [name, value] : added)
    merged.push_back(text("%s=%s", name.c_str(), value.c_str()));
  return merged;
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (std::string& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

// In the child, between fork and exec: nothing but system calls and `before_exec`.
[[noreturn]] void become(const Process& process, char** argv, char** environment, pid_t launcher,
                         const sigset_t& mask, int in, int out, int err, int failure_pipe) {
  const auto give_up = [&](StartFailure::Stage stage, int error_number) {
    const StartFailure failure{stage, error_number};
    (void)!write(failure_pipe, &failure, sizeof(failure));
    _exit(127);
  };
  setpgid(0, 0);
  const auto die_with_launcher = [&] {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    // The launcher may have died before the line above; then nobody sends that signal.
    if (getppid() != launcher) give_up(StartFailure::Stage::orphaned, 0);
  };
  die_with_launcher();
  if (process.before_exec) {
    if (const int number = process.before_exec(); number != 0) {
      give_up(StartFailure::Stage::before_exec, number);
    }
    // Entering a namespace changes credentials, and that clears the signal.
    die_with_launcher();
  }
  // A process group in the background may not read the terminal, and several ranks could not share
  // it.
  if (in < 0) in = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (in > 0) dup2(in, 0);
  if (out >= 0) dup2(out, 1);
  if (err >= 0) dup2(err, 2);
  signal(SIGPIPE, SIG_DFL);
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  environ = environment;
  execvp(argv[0], argv);
  give_up(StartFailure::Stage::exec, errno);
  _exit(127);
}

Error start_error(const Process& process, const StartFailure& failure) {
  const char* program = process.argv[0].c_str();
  if (failure.stage == StartFailure::Stage::before_exec) {
    return io_error(failure.error_number, "rank %u: cannot prepare to start \"%s\"", process.rank,
                    program);
  }
  if (failure.error_number == ENOENT) {
    return error(Code::not_found, "rank %u: there is no program \"%s\"", process.rank, program);
  }
  return io_error(failure.error_number, "rank %u: cannot start \"%s\"", process.rank, program);
}

// What the exit code of an agent may say beyond that of the program.
std::string meaning_of_agents(int exit_code) {
  if (exit_code == 255) return " (so says an agent such as ssh that cannot connect)";
  if (exit_code == 127) return " (weft or the program is not there)";
  const int number = exit_code - 128;
  if (number < 1 || number >= NSIG) return "";
  return text(" (signal %d, %s)", number, strsignal(number));
}

// ---- the run -------------------------------------------------------------------------------

class Run {
 public:
  Run(const Options& options, Minder minder) : options_(options), minder_(std::move(minder)) {}
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  Result<void> start(const Process& process);
  Result<Report> mind();

 private:
  using Poll = std::vector<pollfd>;

  bool any_running() const {
    return std::any_of(children_.begin(), children_.end(),
                       [](const Child& child) { return child.running; });
  }
  bool any_open() const {
    return std::any_of(children_.begin(), children_.end(),
                       [](const Child& child) { return !child.streams.empty(); });
  }
  Nanos elapsed() const { return monotonic_clock().now() - start_; }

  void wait_for_something(int signal_fd);
  void read_signals(int signal_fd);
  void read_control();
  void end_by(int signal_number, const std::string& by);
  void send_inputs();
  bool read_stream(Stream& stream);
  void read_output();
  void read_the_rest();
  void look_for_exits();
  void tell_failure(const Child& child);
  void ask_to_end(int signal_number);
  void kill_all();

  const Options options_;
  Minder minder_;
  SignalGuard signals_;
  const Nanos start_ = monotonic_clock().now();
  Sink out_{STDOUT_FILENO};
  Sink err_{STDERR_FILENO};
  std::string buffer_ = std::string(kReadBytes, '\0');
  std::vector<Child> children_;
  std::optional<Nanos> kill_at_;
  std::optional<Nanos> output_until_;
  bool killed_ = false;
  bool control_open_ = options_.control_fd >= 0;
  Report report_;
};

Run::~Run() {
  for (const Child& child : children_) kill(-child.pid, SIGKILL);
  for (const Child& child : children_) {
    while (waitpid(child.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

Result<void> Run::start(const Process& process) {
  Pipe out, err;
  if (options_.prefix_output) {
    WEFT_ASSIGN(out, make_pipe());
    WEFT_ASSIGN(err, make_pipe());
  }
  Pipe input;
  if (process.input) {
    WEFT_ASSIGN(input, make_socket_pair());
  }
  WEFT_ASSIGN(Pipe failure, make_pipe());
  std::vector<std::string> arguments = process.argv;
  std::vector<std::string> environment = merged_environment(process.environment);
  const std::vector<char*> argv = pointers_to(arguments);
  const std::vector<char*> envp = pointers_to(environment);

  const pid_t launcher = getpid();
  const pid_t pid = fork();
  if (pid < 0) return io_error(errno, "rank %u: cannot fork", process.rank);
  if (pid == 0) {
    const int out_fd = options_.prefix_output      ? out.write.get()
                       : options_.output_to_stderr ? STDERR_FILENO
                                                   : -1;
    become(process, const_cast<char**>(argv.data()), const_cast<char**>(envp.data()), launcher,
           signals_.before(), input.read.get(), out_fd, err.write.get(), failure.write.get());
  }
  setpgid(pid, pid);  // here too: whoever comes first, the group exists from now on
  minder_.watch(pid);

  Child child;
  child.process = &process;
  child.pid = pid;
  child.running = true;
  child.outcome.rank = process.rank;
  child.pidfd = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  child.input = std::move(input.write);
  child.unsent = process.input.value_or("");
  const std::string prefix = text("[%u] ", process.rank);
  if (options_.prefix_output) {
    fcntl(out.read.get(), F_SETFL, O_NONBLOCK);
    fcntl(err.read.get(), F_SETFL, O_NONBLOCK);
    Sink& printed = options_.output_to_stderr ? err_ : out_;
    child.streams.push_back({std::move(out.read), Lines(prefix, printed)});
    child.streams.push_back({std::move(err.read), Lines(prefix, err_)});
  }
  children_.push_back(std::move(child));

  failure.write.reset();
  StartFailure told{};
  ssize_t n = 0;
  do {
    n = read(failure.read.get(), &told, sizeof(told));
  } while (n < 0 && errno == EINTR);
  if (n == sizeof(told)) return start_error(process, told);
  return {};
}

void Run::ask_to_end(int signal_number) {
  for (Child& child : children_) {
    if (!child.running) continue;
    child.outcome.ended_by_us = true;
    if (child.input && signal_number != SIGKILL) {
      child.unsent += static_cast<char>(signal_number);
    } else {
      child.input.reset();
      kill(-child.pid, signal_number);
    }
  }
  if (!kill_at_) kill_at_ = monotonic_clock().now() + options_.grace;
}

void Run::kill_all() {
  killed_ = true;
  ask_to_end(SIGKILL);
}

void Run::tell_failure(const Child& child) {
  const Outcome& outcome = child.outcome;
  const std::string after = format_duration(outcome.after);
  report_.first_failure = outcome.rank;
  std::string who = text("rank %u", outcome.rank);
  if (!child.process->host.empty()) who += " on " + child.process->host;
  if (outcome.signal != 0) {
    report_.reason = text("%s was killed by signal %d (%s) after %s", who.c_str(), outcome.signal,
                          strsignal(outcome.signal), after.c_str());
  } else {
    report_.reason =
        text("%s exited with code %d after %s", who.c_str(), outcome.exit_code, after.c_str());
    if (child.process->input) report_.reason += meaning_of_agents(outcome.exit_code);
  }
}

void Run::look_for_exits() {
  const Child* culprit = nullptr;
  for (Child& child : children_) {
    if (!child.running) continue;
    siginfo_t info{};
    // Looks without reaping: see the top of the file.
    if (waitid(P_PID, static_cast<id_t>(child.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid == 0) {
      continue;
    }
    child.running = false;
    child.pidfd.reset();
    child.input.reset();
    child.outcome.after = elapsed();
    if (info.si_code == CLD_EXITED) {
      child.outcome.exit_code = info.si_status;
    } else {
      child.outcome.signal = info.si_status;
    }
    if (!child.failed() || child.outcome.ended_by_us) continue;
    // Of several that are found at once, one that crashed is rather the cause, and one that exited
    // rather lost its peer.
    if (culprit == nullptr || (culprit->outcome.signal == 0 && child.outcome.signal != 0)) {
      culprit = &child;
    }
  }
  if (culprit == nullptr || !report_.reason.empty()) return;
  tell_failure(*culprit);
  ask_to_end(SIGTERM);
}

void Run::read_signals(int signal_fd) {
  signalfd_siginfo info{};
  while (read(signal_fd, &info, sizeof(info)) == sizeof(info)) {
    const int number = static_cast<int>(info.ssi_signo);
    if (!any_running()) {
      // Only output is left, and whoever should read it does not.
      for (Child& child : children_) child.streams.clear();
      out_.discard();
      err_.discard();
    } else {
      end_by(number, text("signal %d (%s) to the launcher", number, strsignal(number)));
    }
  }
}

// The first time asks, the second time kills.
void Run::end_by(int signal_number, const std::string& by) {
  if (!report_.reason.empty()) {
    kill_all();
    return;
  }
  report_.reason = text("ended by %s after %s", by.c_str(), format_duration(elapsed()).c_str());
  ask_to_end(signal_number);
}

void Run::read_control() {
  while (control_open_ && any_running()) {
    pollfd ready{.fd = options_.control_fd, .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, 0) <= 0) return;
    unsigned char number = 0;
    const ssize_t n = read(options_.control_fd, &number, 1);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (n <= 0) {
      control_open_ = false;
      end_by(SIGTERM, "the end of the connection to the launcher");
    } else if (std::find(std::begin(kPassedOn), std::end(kPassedOn), int{number}) !=
               std::end(kPassedOn)) {
      end_by(number, text("signal %d (%s) from the launcher", number, strsignal(number)));
    }
  }
}

void Run::send_inputs() {
  for (Child& child : children_) {
    while (child.input && !child.unsent.empty()) {
      const ssize_t n = send(child.input.get(), child.unsent.data(), child.unsent.size(),
                             MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) break;
      // Who does not read any more will exit, and that is what is reported.
      child.unsent.erase(0, n < 0 ? child.unsent.size() : static_cast<size_t>(n));
    }
  }
}

// Reads once from a pipe. Returns whether more may come.
bool Run::read_stream(Stream& stream) {
  const ssize_t n = read(stream.pipe.get(), buffer_.data(), buffer_.size());
  if (n > 0) stream.lines.feed(std::string_view(buffer_).substr(0, static_cast<size_t>(n)));
  if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) return true;
  stream.lines.finish();
  return false;
}

void Run::read_output() {
  for (Child& child : children_) {
    std::erase_if(child.streams, [this](Stream& stream) {
      return !out_.full() && !err_.full() && !read_stream(stream);
    });
  }
}

// Somebody whom the children left behind keeps the pipes open: what is in them counts, what comes
// later does not.
void Run::read_the_rest() {
  for (Child& child : children_) {
    for (Stream& stream : child.streams) {
      for (size_t i = 0; i < kPipeBytesMax / kReadBytes && read_stream(stream); ++i) {
      }
      stream.lines.finish();
    }
    child.streams.clear();
  }
}

void Run::wait_for_something(int signal_fd) {
  Poll polled;
  polled.push_back({.fd = signal_fd, .events = POLLIN, .revents = 0});
  if (control_open_ && any_running()) {
    polled.push_back({.fd = options_.control_fd, .events = POLLIN, .revents = 0});
  }
  std::optional<Nanos> wake_at;
  const auto no_later_than = [&](Nanos time) { wake_at = std::min(wake_at.value_or(time), time); };
  const bool room = !out_.full() && !err_.full();
  for (const Child& child : children_) {
    if (child.running && child.pidfd) {
      polled.push_back({.fd = child.pidfd.get(), .events = POLLIN, .revents = 0});
    } else if (child.running) {
      no_later_than(monotonic_clock().now() + kTick);
    }
    if (child.input && !child.unsent.empty()) {
      polled.push_back({.fd = child.input.get(), .events = POLLOUT, .revents = 0});
    }
    for (const Stream& stream : child.streams) {
      if (room) polled.push_back({.fd = stream.pipe.get(), .events = POLLIN, .revents = 0});
    }
  }
  for (const Sink* sink : {&out_, &err_}) {
    if (sink->pending()) polled.push_back({.fd = sink->fd(), .events = POLLOUT, .revents = 0});
  }
  if (any_running() && kill_at_ && !killed_) no_later_than(*kill_at_);
  if (any_running() && options_.deadline.count > 0 && report_.reason.empty()) {
    no_later_than(start_ + options_.deadline);
  }
  if (output_until_ && any_open()) no_later_than(*output_until_);

  int timeout_ms = -1;
  if (wake_at) {
    const double left_ms = (*wake_at - monotonic_clock().now()).millis();
    timeout_ms = static_cast<int>(std::clamp(left_ms + 1, 0.0, 1e9));
  }
  poll(polled.data(), polled.size(), timeout_ms);
}

Result<Report> Run::mind() {
  const Fd signal_fd(signalfd(-1, &signals_.taken(), SFD_NONBLOCK | SFD_CLOEXEC));
  if (!signal_fd) return io_error(errno, "cannot take signals");
  for (;;) {
    look_for_exits();
    read_signals(signal_fd.get());
    read_control();
    send_inputs();
    read_output();
    out_.write_some();
    err_.write_some();
    const Nanos now = monotonic_clock().now();
    if (any_running()) {
      if (options_.deadline.count > 0 && report_.reason.empty() &&
          now >= start_ + options_.deadline) {
        std::string late;
        for (const Child& child : children_) {
          if (child.running) late += text("%s%u", late.empty() ? "" : ", ", child.outcome.rank);
        }
        report_.reason = text("not done after %s, still running: rank %s",
                              format_duration(options_.deadline).c_str(), late.c_str());
        ask_to_end(SIGTERM);
      }
      if (kill_at_ && now >= *kill_at_ && !killed_) kill_all();
    } else {
      if (!output_until_) output_until_ = now + kOutputGrace;
      if (any_open() && now >= *output_until_ && !out_.full() && !err_.full()) {
        read_the_rest();
      }
      if (!any_open() && !out_.pending() && !err_.pending()) break;
    }
    wait_for_something(signal_fd.get());
  }
  for (const Child& child : children_) report_.outcomes.push_back(child.outcome);
  std::sort(report_.outcomes.begin(), report_.outcomes.end(),
            [](const Outcome& a, const Outcome& b) { return a.rank < b.rank; });
  return std::move(report_);
}

}  // namespace

Result<Report> run(const std::vector<Process>& processes, const Options& options) {
  if (processes.empty()) return error(Code::invalid_argument, "no process to start");
  std::set<uint32_t> ranks;
  for (const Process& process : processes) {
    if (process.argv.empty() || process.argv[0].empty()) {
      return error(Code::invalid_argument, "rank %u: no program to start", process.rank);
    }
    if (!ranks.insert(process.rank).second) {
      return error(Code::invalid_argument, "rank %u is there twice", process.rank);
    }
  }
  WEFT_ASSIGN(Minder minder, Minder::start(processes.size()));
  Run run(options, std::move(minder));
  for (const Process& process : processes) WEFT_TRY(run.start(process));
  return run.mind();
}

}  // namespace weft::launch
