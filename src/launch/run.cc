// Starting and minding: one loop around poll().
//
// Each child leads a process group, so that what it forks is reached too, and Ctrl-C at a terminal
// comes to the launcher alone, which passes it on exactly once. A child that has exited stays a
// zombie until the end of the run: as long as it is one, the number of its group cannot come to
// mean somebody else's.
//
// If the launcher is killed, the kernel kills each child (parent death signal). That does not
// reach what the children forked; for these there is a process::Minder.
//
// A child with an input is an agent for a process on another host. It is not signalled, since that
// would end the connection and leave the process to guess: signals go to the other end as bytes,
// and only to kill is the agent itself killed, whose end is seen there as the end of the input.

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "output.h"
#include "weft/launch.h"
#include "weft/process.h"

namespace weft::launch {

namespace {

// How long a pipe is read after its child has exited, when something else keeps it open.
constexpr Nanos kOutputGrace = Nanos::from_millis(500);
// How often exits are looked for where the kernel has no process descriptors.
constexpr Nanos kTick = Nanos::from_millis(20);
constexpr size_t kReadBytes = 64 << 10;
constexpr size_t kPipeBytesMax = 1 << 20;  // what the kernel lets an ordinary user put in a pipe
constexpr int kPassedOn[] = {SIGINT, SIGTERM, SIGHUP};

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

 private:
  sigset_t taken_;
  sigset_t before_;
};

// ---- one child -----------------------------------------------------------------------------

struct Stream {
  Fd pipe;
  Lines lines;
};

struct Child {
  const Process* process = nullptr;
  process::Child child;
  std::vector<Stream> streams;
  Fd input;            // of an agent
  std::string unsent;  // of its input
  bool running = false;
  Outcome outcome;

  bool failed() const { return outcome.signal != 0 || outcome.exit_code != 0; }
};

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
  Run(const Options& options, process::Minder minder)
      : options_(options), minder_(std::move(minder)) {}
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
  process::Minder minder_;
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

process::Command command_of(const Process& process) {
  process::Command command;
  command.argv = process.argv;
  for (const auto& [name, value] : process.environment) {
    command.environment.push_back(text("%s=%s", name.c_str(), value.c_str()));
  }
  command.own_group = true;
  command.dies_with_parent = true;
  command.keeps_descriptors = true;  // `weft run -- program 3> log` is meant
  command.before_exec = process.before_exec;
  return command;
}

Result<void> Run::start(const Process& process) {
  process::Command command = command_of(process);
  process::Pipe out, err, input;
  if (options_.prefix_output) {
    WEFT_ASSIGN(out, process::make_pipe());
    WEFT_ASSIGN(err, process::make_pipe());
    command.descriptors = {{out.write.get(), STDOUT_FILENO}, {err.write.get(), STDERR_FILENO}};
  } else if (options_.output_to_stderr) {
    command.descriptors = {{STDERR_FILENO, STDOUT_FILENO}};
  }
  // Otherwise standard input is empty: a process group in the background may not read the
  // terminal, and several ranks could not share it.
  if (process.input) {
    WEFT_ASSIGN(input, process::make_socket_pair());
    command.descriptors.push_back({input.read.get(), STDIN_FILENO});
  }
  auto started = process::Child::start(command);
  if (!started) return std::move(started).error().in(text("rank %u", process.rank));
  minder_.watch(*started);

  Child child;
  child.process = &process;
  child.child = *std::move(started);
  child.running = true;
  child.outcome.rank = process.rank;
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
      child.child.signal(signal_number);
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
    const auto ending = child.child.ended();
    if (!ending) continue;
    child.running = false;
    child.input.reset();
    child.outcome.after = elapsed();
    child.outcome.exit_code = ending->exit_code;
    child.outcome.signal = ending->signal;
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
    if (child.running && child.child.fd() >= 0) {
      polled.push_back({.fd = child.child.fd(), .events = POLLIN, .revents = 0});
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
  WEFT_ASSIGN(process::Minder minder, process::Minder::start(processes.size()));
  Run run(options, std::move(minder));
  for (const Process& process : processes) WEFT_TRY(run.start(process));
  return run.mind();
}

}  // namespace weft::launch
