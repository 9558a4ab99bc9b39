#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "weft/process.h"

namespace weft::process {
namespace {

constexpr Nanos kEndPatience = Nanos::from_seconds(5);

int wait_and_kill(int pipe, std::vector<pid_t>& known) {
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
    if (group == 0) return 0;
    if (count < known.size()) known[count++] = group;
  }
  for (size_t i = 0; i < count; ++i) kill(-known[i], SIGKILL);
  return 0;
}

}  // namespace

Result<Minder> Minder::start(size_t groups) {
  WEFT_ASSIGN(Pipe pipe, make_socket_pair());
  std::vector<pid_t> known(groups);  // made before fork: nothing is allocated after it
  WEFT_ASSIGN(Child child,
              Child::fork([&] { return wait_and_kill(pipe.read.get(), known); }, true));
  return Minder(std::move(child), std::move(pipe.write));
}

void Minder::tell(pid_t group) {
  while (send(pipe_.get(), &group, sizeof(group), MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

Minder::~Minder() {
  if (!child_) return;
  tell(0);
  pipe_.reset();
  child_.end(0, kEndPatience);
}

}  // namespace weft::process
