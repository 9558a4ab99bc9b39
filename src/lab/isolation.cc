// Enters the namespaces. Three processes take part:
//
//   outer ──fork──► middle: leaves for new namespaces; its next child is their process 1
//                     └──fork──► inner: runs the caller's function
//
// A process namespace only holds processes that are made after it was asked for, hence the middle
// one; it does nothing but wait. The outer one writes the user map, because root may then keep all
// of its users (a lab run by root must be able to write where root could).

#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <array>

#include "cluster.h"

namespace weft::lab {
namespace {

constexpr int kGraceMs = 500;

// What the processes tell each other over a socket pair. Both ends are of one program.
struct Message {
  enum class Kind : uint8_t { left, ready, failed, go } kind = Kind::failed;
  pid_t inner = 0;
  int error_number = 0;
  std::array<char, 96> doing = {};
};

Message failed(const char* doing, int error_number) {
  Message message;
  message.kind = Message::Kind::failed;
  message.error_number = error_number;
  snprintf(message.doing.data(), message.doing.size(), "%s", doing);
  return message;
}

bool send_message(int fd, const Message& message) {
  return send(fd, &message, sizeof message, MSG_NOSIGNAL) == sizeof message;
}

bool receive_message(int fd, Message& message) {
  ssize_t n;
  do {
    n = recv(fd, &message, sizeof message, 0);
  } while (n < 0 && errno == EINTR);
  return n == sizeof message;
}

Result<void> write_text(const std::string& path, const std::string& content) {
  Fd fd(open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (!fd || write(fd.get(), content.data(), content.size()) < 0)
    return io_error(errno, "writing %s", path.c_str());
  return {};
}

// The map that gives every id that we have its own number inside.
Result<std::string> identity_map(const char* path) {
  WEFT_ASSIGN(const std::string map, read_file(path, kib(64)));
  std::string identity;
  const char* at = map.c_str();
  unsigned first = 0, outside = 0, count = 0;
  int used = 0;
  while (sscanf(at, "%u %u %u%n", &first, &outside, &count, &used) == 3) {
    identity += text("%u %u %u\n", first, first, count);
    at += used;
  }
  return identity;
}

Result<void> write_maps(pid_t pid) {
  const std::string process = "/proc/" + std::to_string(pid);
  if (geteuid() == 0) {
    Result<std::string> users = identity_map("/proc/self/uid_map");
    Result<std::string> groups = identity_map("/proc/self/gid_map");
    if (users && groups && write_text(process + "/uid_map", *users) &&
        write_text(process + "/gid_map", *groups))
      return {};
  }
  // A group map without privilege needs setgroups to be given up first. Refused when the map
  // above was half written; what counts is the maps themselves.
  (void)write_text(process + "/setgroups", "deny");
  Result<void> users = write_text(process + "/uid_map", text("0 %u 1\n", geteuid()));
  Result<void> groups = write_text(process + "/gid_map", text("0 %u 1\n", getegid()));
  if (!users) return users;
  return groups;
}

int raise_loopback() {
  Fd fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd) return errno;
  ifreq request = {};
  snprintf(request.ifr_name, sizeof request.ifr_name, "lo");
  request.ifr_flags = IFF_UP;
  return ioctl(fd.get(), SIOCSIFFLAGS, &request) == 0 ? 0 : errno;
}

[[noreturn]] void inner(int control, const sigset_t& signals,
                        const std::function<int(const Isolation&)>& inside,
                        const Isolation& isolation) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (isolation.confinement != Confinement::loopback) {
    const char* doing = nullptr;
    int error_number = 0;
    if (mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
      doing = "making mounts private";
      error_number = errno;
    } else if (error_number = raise_loopback(); error_number != 0) {
      // Some systems let anyone make a user namespace and then deny its powers: seen here.
      doing = "bringing the loopback interface up";
    }
    if (doing != nullptr) {
      send_message(control, failed(doing, error_number));
      _exit(125);
    }
    // Inside a container the machine's /proc may be hidden in part, and then a new one is refused.
    // The old one works for all that the lab needs.
    if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr) != 0)
      WEFT_LOG(lab, info, "no /proc of the lab's own: %s", strerror(errno));
  }
  Message message;
  message.kind = Message::Kind::ready;
  // The outer process answers only if it and the middle one still live. Had one died before the
  // request above to be killed with it, the answer would be an end of file.
  if (!send_message(control, message) || !receive_message(control, message)) _exit(125);
  close(control);
  sigprocmask(SIG_SETMASK, &signals, nullptr);
  const int code = inside(isolation);
  fflush(nullptr);
  _exit(code);
}

[[noreturn]] void middle(int control, pid_t outer, const sigset_t& signals,
                         const std::function<int(const Isolation&)>& inside,
                         const Isolation& isolation) {
  int flags = CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC;
  if (isolation.confinement == Confinement::user_namespaces) flags |= CLONE_NEWUSER;
  if (isolation.confinement != Confinement::loopback && unshare(flags) != 0) {
    send_message(control, failed("leaving for new namespaces", errno));
    _exit(125);
  }
  // After unshare, which clears it.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != outer) _exit(125);
  Message message;
  message.kind = Message::Kind::left;
  if (!send_message(control, message) || !receive_message(control, message)) _exit(125);
  const auto child =
      process::Child::fork([&]() -> int { inner(control, signals, inside, isolation); });
  if (!child) {
    send_message(control, failed("starting the inner process", errno));
    _exit(125);
  }
  message.inner = child->pid();
  send_message(control, message);
  close(control);
  std::optional<process::Ending> ending;
  while (!ending) ending = child->wait(Nanos::from_seconds(3600));
  _exit(ending->code());
}

int64_t now_ms() { return monotonic_clock().now().count / 1'000'000; }

// Waits for the middle process, forwarding what it is told to.
int wait_forwarding(int signal_fd, const process::Child& middle, pid_t inner_pid) {
  int64_t kill_at = -1;
  int told = 0;
  for (;;) {
    if (const auto ending = middle.ended()) {
      return told != 0 && ending->code() == 128 + SIGKILL ? 128 + told : ending->code();
    }
    const int64_t left = kill_at < 0 ? -1 : kill_at - now_ms();
    if (kill_at >= 0 && left <= 0) {
      kill(inner_pid, SIGKILL);
      kill_at = -1;
      continue;
    }
    pollfd waiting = {signal_fd, POLLIN, 0};
    if (poll(&waiting, 1, static_cast<int>(left)) <= 0) continue;
    signalfd_siginfo info;
    if (read(signal_fd, &info, sizeof info) != sizeof info) continue;
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGCHLD) continue;
    // Said twice: no more patience.
    kill(inner_pid, told == 0 ? signal : SIGKILL);
    if (told == 0) kill_at = now_ms() + kGraceMs;
    told = signal;
  }
}

struct Attempt {
  int exit_code = 0;
  std::string refused;  // why the namespaces could not be had; empty: they could
};

Result<Attempt> attempt(const Isolation& isolation, int signal_fd, const sigset_t& signals,
                        const std::function<int(const Isolation&)>& inside) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    return io_error(errno, "making a socket pair");
  Fd ours(ends[0]), theirs(ends[1]);
  const pid_t outer = getpid();
  fflush(nullptr);
  // A group of its own: Ctrl-C reaches the outer process alone, which forwards it once.
  WEFT_ASSIGN(const process::Child child, process::Child::fork(
                                              [&]() -> int {
                                                ours.reset();
                                                middle(theirs.release(), outer, signals, inside,
                                                       isolation);
                                              },
                                              true));
  theirs.reset();

  // Left the old namespaces -> maps written -> the inner one started -> it is ready -> go.
  pid_t inner_pid = 0;
  bool ready = false;
  std::string refused;
  while (refused.empty() && (inner_pid == 0 || !ready)) {
    Message message;
    if (!receive_message(ours.get(), message)) {
      refused = "it ended before it was ready";
    } else if (message.kind == Message::Kind::failed) {
      refused = text("%s: %s", message.doing.data(), strerror(message.error_number));
    } else if (message.kind == Message::Kind::ready) {
      ready = true;
    } else if (message.inner != 0) {
      inner_pid = message.inner;
    } else {
      if (isolation.confinement == Confinement::user_namespaces) {
        if (Result<void> mapped = write_maps(child.pid()); !mapped)
          refused = mapped.error().message();
      }
      message.kind = Message::Kind::left;
      if (refused.empty()) send_message(ours.get(), message);
    }
  }
  if (refused.empty() && !child.ended()) {
    Message message;
    message.kind = Message::Kind::go;
    send_message(ours.get(), message);
    ours.reset();
    return Attempt{wait_forwarding(signal_fd, child, inner_pid), ""};
  }
  ours.reset();
  return Attempt{0, refused.empty() ? "it ended before it was ready" : refused};
}

}  // namespace

namespace {

std::string what_loopback_loses(const std::string& why) {
  return (why.empty() ? "asked for" : why) +
         ": hosts are addresses on the loopback interface, the kernel paces weft's own flows and "
         "links are shared out among them; other engines are not limited, and hosts are not apart";
}

}  // namespace

const char* confinement_name(Confinement confinement) {
  switch (confinement) {
    case Confinement::user_namespaces: return "user_namespaces";
    case Confinement::root_namespaces: return "root_namespaces";
    case Confinement::loopback: return "loopback";
  }
  return "unknown";
}

Result<Confinement> asked_confinement() {
  const char* asked = getenv("WEFT_LAB_CONFINEMENT");
  if (asked == nullptr || *asked == '\0') return Confinement::user_namespaces;
  for (const Confinement one :
       {Confinement::user_namespaces, Confinement::root_namespaces, Confinement::loopback})
    if (confinement_name(one) == std::string_view(asked)) return one;
  return error(Code::invalid_argument,
               "WEFT_LAB_CONFINEMENT is \"%s\"; expected user_namespaces, root_namespaces or "
               "loopback",
               asked);
}

Result<int> run_isolated(const std::function<int(const Isolation&)>& inside, Confinement first) {
  sigset_t forwarded, before;
  sigemptyset(&forwarded);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&forwarded, signal);
  if (sigprocmask(SIG_BLOCK, &forwarded, &before) != 0) return io_error(errno, "blocking signals");
  struct Restore {
    const sigset_t& mask;
    ~Restore() { sigprocmask(SIG_SETMASK, &mask, nullptr); }
  } restore{before};
  Fd signal_fd(signalfd(-1, &forwarded, SFD_CLOEXEC));
  if (!signal_fd) return io_error(errno, "making a descriptor for signals");

  std::string why;
  for (const Confinement confinement :
       {Confinement::user_namespaces, Confinement::root_namespaces, Confinement::loopback}) {
    if (confinement < first) continue;
    if (confinement == Confinement::root_namespaces && geteuid() != 0) continue;
    Isolation isolation{confinement, ""};
    if (confinement == Confinement::loopback) isolation.lost = what_loopback_loses(why);
    WEFT_ASSIGN(Attempt tried, attempt(isolation, signal_fd.get(), before, inside));
    if (tried.refused.empty()) return tried.exit_code;
    why += text("%s%s are forbidden here (%s)", why.empty() ? "" : ", ",
                confinement_name(confinement), tried.refused.c_str());
    WEFT_LOG(lab, info, "%s", why.c_str());
  }
  return error(Code::unsupported, "the lab cannot start: %s", why.c_str());
}

}  // namespace weft::lab
