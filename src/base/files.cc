// Files: what is asked of the system about them, and those that are read and written whole.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>

#include "weft/base.h"

namespace weft {

void Fd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

// ---- the system's calls --------------------------------------------------------------------

static_assert(Files::kHere == AT_FDCWD);

namespace {

// What a signal interrupts before anything was done is done again.
template <typename Attempt>
auto uninterrupted(const Attempt& attempt) {
  for (;;) {
    auto out = attempt();
    if (out >= 0 || errno != EINTR) return out;
  }
}

}  // namespace

int Files::refusal(Call, size_t&) { return 0; }

bool Files::refused(Call call) {
  size_t none = 0;
  const int failure = refusal(call, none);
  if (failure != 0) errno = failure;
  return failure != 0;
}

Fd Files::open(const std::string& path, int flags, unsigned mode, int folder) {
  return Fd(uninterrupted([&] {
    return refused(Call::open) ? -1 : ::openat(folder, path.c_str(), flags | O_CLOEXEC, mode);
  }));
}

ssize_t Files::read(int fd, std::span<std::byte> out) {
  return uninterrupted([&]() -> ssize_t {
    size_t bytes = out.size();
    if (const int failure = refusal(Call::read, bytes); failure != 0) return errno = failure, -1;
    return ::read(fd, out.data(), bytes);
  });
}

ssize_t Files::read_beginning(int fd, std::span<std::byte> out) {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = uninterrupted([&]() -> ssize_t {
      size_t bytes = out.size() - done;
      if (const int failure = refusal(Call::read, bytes); failure != 0) return errno = failure, -1;
      return ::pread(fd, out.data() + done, bytes, static_cast<off_t>(done));
    });
    if (got < 0) return -1;
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return static_cast<ssize_t>(done);
}

int Files::write_all(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = uninterrupted([&]() -> ssize_t {
      size_t now = bytes.size();
      if (const int failure = refusal(Call::write, now); failure != 0) return errno = failure, -1;
      return ::write(fd, bytes.data(), now);
    });
    if (put <= 0) return put < 0 ? errno : EIO;
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
  return 0;
}

int Files::status(int fd, struct stat& facts) {
  return refused(Call::status) ? -1 : ::fstat(fd, &facts);
}
int Files::status(const std::string& path, struct stat& facts, bool follow_link) {
  if (refused(Call::status)) return -1;
  return ::fstatat(AT_FDCWD, path.c_str(), &facts, follow_link ? 0 : AT_SYMLINK_NOFOLLOW);
}
int Files::sync(int fd) {
  return uninterrupted([&] { return refused(Call::sync) ? -1 : ::fdatasync(fd); });
}
int Files::close(Fd file) {
  const bool refuses = refused(Call::close);
  const int failure = refuses ? errno : 0;
  const int closed = ::close(file.release());  // never again: the number may be another's by then
  if (refuses) errno = failure;
  return refuses ? -1 : closed;
}
int Files::rename(const std::string& from, const std::string& to, bool replaces) {
  if (refused(Call::rename)) return -1;
  return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), replaces ? 0 : RENAME_NOREPLACE);
}
int Files::link(int folder, const std::string& from, const std::string& to) {
  return refused(Call::link) ? -1 : ::linkat(folder, from.c_str(), folder, to.c_str(), 0);
}
int Files::unlink(const std::string& path, int folder) {
  return refused(Call::unlink) ? -1 : ::unlinkat(folder, path.c_str(), 0);
}
int Files::make_folder(const std::string& path, unsigned mode) {
  return refused(Call::make_folder) ? -1 : ::mkdir(path.c_str(), mode);
}

Files& kernel_files() {
  static Files files;
  return files;
}

// ---- files that are read and written whole -------------------------------------------------

Result<std::string> read_file(const std::string& path, Bytes limit, Files& files) {
  const Fd file = files.open(path, O_RDONLY);
  if (!file) return io_error(errno, "cannot open %s", path.c_str());
  std::string content;
  std::array<std::byte, 65536> buffer;
  for (;;) {
    const ssize_t got = files.read(file.get(), buffer);
    if (got < 0) return io_error(errno, "cannot read %s", path.c_str());
    if (got == 0) return content;
    content.append(reinterpret_cast<const char*>(buffer.data()), static_cast<size_t>(got));
    if (content.size() > limit.count)
      return error(Code::invalid_argument, "%s is larger than %s", path.c_str(),
                   format_bytes(limit).c_str());
  }
}

int write_all(int fd, std::span<const std::byte> bytes) {
  return kernel_files().write_all(fd, bytes);
}

Fd create_file(const std::string& path, Readers readers, Files& files) {
  return files.open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW,
                    readers == Readers::owner ? 0600 : 0644);
}

namespace {

// Nobody can have put anything there before: the name cannot be guessed.
std::string name_beside(const std::string& path) {
  uint64_t number = 0;
  random_bytes(std::as_writable_bytes(std::span(&number, 1)));
  return path + text(".%016llx.tmp", static_cast<unsigned long long>(number));
}

}  // namespace

Result<void> write_file(const std::string& path, std::string_view content, Readers readers,
                        Files& files) {
  struct stat there {};
  const bool something = files.status(path, there, true) == 0;
  // What cannot be looked at is not replaced. A link that leads nowhere, or to itself, may be.
  if (!something && errno != ENOENT && errno != ELOOP)
    return io_error(errno, "cannot write %s", path.c_str());
  if (something && !S_ISREG(there.st_mode))
    return error(Code::invalid_argument, "cannot write %s: it is not a regular file; name a file",
                 path.c_str());
  const std::string beside = name_beside(path);
  Fd file = create_file(beside, readers, files);
  if (!file) return io_error(errno, "cannot write %s", path.c_str());
  int failed = files.write_all(file.get(), std::as_bytes(std::span(content)));
  // Some file systems say only here that the disk is full.
  if (failed == 0 && files.close(std::move(file)) != 0) failed = errno;
  if (failed == 0 && files.rename(beside, path) != 0) failed = errno;
  if (failed == 0) return {};
  files.unlink(beside);
  return io_error(failed, "cannot write %s", path.c_str());
}

std::string self_path() {
  std::error_code ignored;
  return std::filesystem::read_symlink("/proc/self/exe", ignored).string();
}

Result<std::string> data_path(const std::string& name) {
  namespace fs = std::filesystem;
  fs::path here = fs::path(self_path()).parent_path();
  // Beside the program in a build tree, one up in an installation; the tests' programs stand in
  // the build tree too, at most two folders down.
  for (const fs::path& base : {here, here.parent_path(), here.parent_path().parent_path()}) {
    fs::path candidate = base / "share" / "weft" / name;
    std::error_code ignored;
    if (fs::exists(candidate, ignored)) return candidate.string();
  }
  return error(Code::not_found, "share/weft/%s is not installed beside %s", name.c_str(),
               self_path().c_str());
}

}  // namespace weft
