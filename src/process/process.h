// process: starts, minds and ends child processes, for everyone who has some.
//
//   Child::start(command) ──► Child ── ended(): how, once it has; signal(); end(): asks, then kills
//                               └── gone with its Child: killed, with what it started, and reaped
//   run(command, patience) ──► how it ended and what it said
//
// A child that has ended stays a zombie until its Child is destroyed: so long, its number, which is
// also that of its group, cannot come to mean somebody else's, and a signal never goes astray.
//
// What a child gets is said in its Command, and nothing else: of the descriptors only 0, 1, 2 and
// those that are named; no signal is blocked; signals that the caller handles are as they were
// born, those that it ignores stay ignored (nohup), except SIGPIPE.
//
// A program is started without a copy of the caller's memory (vfork), which may be that of a large
// training process. A program that cannot be started is an error here, not an exit code later.
//
// Threads: any; one Child by one thread at a time. What dies with its parent dies with the thread
// that started it. Not here: what goes over the pipes.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "weft/base.h"

namespace weft::process {

struct Descriptor {
  int ours = -1;    // of the caller; it stays open here
  int theirs = -1;  // its number in the child
};

struct Command {
  std::vector<std::string> argv;         // the first is looked for in PATH
  std::vector<std::string> environment;  // "NAME=value": added to the caller's, or instead of it
  // Without a word on it, 0 is /dev/null, and 1 and 2 are the caller's own.
  std::vector<Descriptor> descriptors;
  std::optional<std::string> input;  // what it reads from its standard input
  // Leads a process group: Ctrl-C at a terminal does not reach it, and signals that are sent
  // through its Child reach what it forks as well.
  bool own_group = false;
  // Killed by the kernel with the thread that starts it. What it forks is not: see Minder.
  bool dies_with_parent = false;
  // All descriptors of the caller that are not close-on-exec go along, as from a shell.
  bool keeps_descriptors = false;
  // Called in the child before exec, to enter namespaces for instance; returns 0 or errno. System
  // calls only: it runs in the caller's memory while the caller stands still.
  std::function<int()> before_exec;
};

// Of a process that somebody else reaped: who ignores SIGCHLD, or waits for any child.
inline constexpr int kUnknown = -1;

// How a process ended.
struct Ending {
  int exit_code = 0;  // valid when signal == 0; may be kUnknown
  int signal = 0;
  bool ok() const { return signal == 0 && exit_code == 0; }
  // As a shell says it: 128 more than the signal.
  int code() const { return signal != 0 ? 128 + signal : exit_code; }
  // "exited with code 3", "was killed by signal 9 (Killed)"
  std::string words() const;
};

class Child {
 public:
  // Fails with not_found if there is no such program.
  static Result<Child> start(const Command& command);
  // A copy of this process that runs `body` and exits with what it returns. Signals stay as they
  // are. REQUIRES: this process has one thread, if `body` does more than system calls.
  static Result<Child> fork(const std::function<int()>& body, bool own_group = false);

  Child() = default;  // none
  Child(Child&& other) noexcept;
  Child& operator=(Child&& other) noexcept;
  ~Child();  // kill_and_reap()

  explicit operator bool() const { return pid_ > 0; }
  pid_t pid() const { return pid_; }
  // Readable when it has ended; -1 where the kernel has no process descriptors.
  int fd() const { return pidfd_.get(); }

  // How it ended, if it has. It stays a zombie.
  std::optional<Ending> ended() const;
  // The same, after waiting that long for it at most.
  std::optional<Ending> wait(Nanos patience) const;
  // To its group, if it leads one, even when it has ended itself.
  void signal(int number) const;
  // Sends `number`, if it is not 0, waits for its end, and kills it when that does not come.
  Ending end(int number, Nanos patience);
  // With its group. After this there is no child.
  Ending kill_and_reap();

 private:
  bool ours() const;
  Child(pid_t pid, bool leads_group);

  pid_t pid_ = -1;
  bool leads_group_ = false;
  Fd pidfd_;
};

// ---- one that is waited for ----------------------------------------------------------------

struct Finished {
  Ending ending;
  std::string output;
  std::string errors;
};
// Starts it, reads its output and errors to the end, and waits. After `patience` it is killed and
// the result is timeout. Of each, 64 MiB are kept.
Result<Finished> run(const Command& command, Nanos patience);

// The first program of this name in PATH (that of `environment`, if it has one) or where system
// programs are, which an ordinary user's PATH lacks. A name with a slash is itself.
Result<std::string> find_program(const std::string& name,
                                 std::span<const std::string> environment = {});

// "ip -batch -", for messages.
std::string command_line(const std::vector<std::string>& argv);

// ---- pipes -----------------------------------------------------------------------------------

// Both ends are close-on-exec.
struct Pipe {
  Fd read;
  Fd write;
};
Result<Pipe> make_pipe();
// A pipe of sockets: a write to somebody who was killed does not raise SIGPIPE.
Result<Pipe> make_socket_pair();

// ---- what outlives its parent ----------------------------------------------------------------

// A process that does nothing but wait for the end of this one, however that comes, and then kills
// the groups that it was told of: the kernel ends children with their parent, but not theirs.
class Minder {
 public:
  // REQUIRES: at most `groups` are watched.
  static Result<Minder> start(size_t groups);
  Minder(Minder&&) = default;
  Minder& operator=(Minder&&) = delete;
  ~Minder();  // all is well: nobody is killed

  void watch(const Child& leader) { tell(leader.pid()); }

 private:
  Minder(Child child, Fd pipe) : child_(std::move(child)), pipe_(std::move(pipe)) {}
  void tell(pid_t group);

  Child child_;
  Fd pipe_;
};

}  // namespace weft::process
