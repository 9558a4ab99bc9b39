#include "shm/name.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>

namespace weft::net::shm {
namespace {

constexpr const char* kFolder = "/dev/shm";  // where shm_open() puts its names
constexpr std::string_view kPrefix = "/weft-lane-";
constexpr size_t kRandomBytes = 12;
constexpr int kNamesTried = 16;
constexpr int kEntriesRead = 20000;  // a few milliseconds
constexpr int kNamesRemoved = 512;
constexpr Nanos kPause = Nanos::from_seconds(1);

bool has_name(const struct stat& facts) { return facts.st_nlink > 0; }
bool is_own_file(const struct stat& facts) {
  return S_ISREG(facts.st_mode) && facts.st_uid == ::geteuid();
}

// Removes `name` if it is this user's and nobody holds it. The lock is kept until the name is gone,
// so that a maker who has not locked yet sees one or the other. True if it is gone.
bool remove_if_abandoned(int folder, const char* name) {
  struct stat facts {};
  if (::fstatat(folder, name, &facts, AT_SYMLINK_NOFOLLOW) != 0 || !is_own_file(facts))
    return false;
  Fd file(::openat(folder, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!file || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0) return false;
  if (::fstat(file.get(), &facts) != 0 || !is_own_file(facts) || !has_name(facts)) return false;
  if (::unlinkat(folder, name, 0) != 0) return false;
  WEFT_LOG(net, info, "removed %s/%s, which a process that was killed left behind", kFolder, name);
  return true;
}

}  // namespace

bool is_lane_name(std::string_view name) {
  return name.size() == kPrefix.size() + 2 * kRandomBytes && name.starts_with(kPrefix) &&
         name.find_first_not_of("0123456789abcdef", kPrefix.size()) == std::string_view::npos;
}

Result<std::string> random_name(System& system) {
  std::array<std::byte, kRandomBytes> random;
  WEFT_TRY(system.random(random));
  std::string name(kPrefix);
  for (std::byte part : random) name += text("%02x", std::to_integer<unsigned>(part));
  return name;
}

Result<NamedFile> make_named() {
  for (int attempt = 0; attempt < kNamesTried; ++attempt) {
    WEFT_ASSIGN(std::string name, random_name(kernel_system()));
    Fd file(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!file) return io_error(errno, "cannot make shared memory");
    bool locked = ::flock(file.get(), LOCK_EX | LOCK_NB) == 0;
    int why = errno;
    struct stat facts {};
    if (locked && ::fstat(file.get(), &facts) == 0 && has_name(facts))
      return NamedFile{std::move(name), std::move(file)};
    // Another process swept before the lock was there: it holds the file, or has removed it.
    ::shm_unlink(name.c_str());
    if (!locked && why != EWOULDBLOCK) return io_error(why, "cannot lock shared memory");
  }
  return error(Code::io, "cannot keep a name of shared memory: something removes names in %s",
               kFolder);
}

void sweep() {
  std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(kFolder), &::closedir);
  if (!folder) return;
  // Names of other users and of the living cost a look and are not counted: however many there are,
  // they do not keep what is behind them.
  int removed = 0;
  for (int read = 0; read < kEntriesRead && removed < kNamesRemoved; ++read) {
    const dirent* entry = ::readdir(folder.get());
    if (entry == nullptr) return;
    if (!is_lane_name(std::string("/") + entry->d_name)) continue;
    if (remove_if_abandoned(::dirfd(folder.get()), entry->d_name)) ++removed;
  }
}

void sweep_if_due() {
  static std::atomic<int64_t> due{0};
  Nanos now = monotonic_clock().now();
  int64_t seen = due.load();
  if (now.count >= seen && due.compare_exchange_strong(seen, (now + kPause).count)) sweep();
}

}  // namespace weft::net::shm
