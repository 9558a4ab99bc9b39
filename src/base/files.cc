// Files that are read and written whole.
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

Result<std::string> read_file(const std::string& path, Bytes limit) {
  Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return io_error(errno, "cannot open %s", path.c_str());
  std::string content;
  std::array<char, 65536> buffer;
  for (;;) {
    ssize_t got = ::read(file.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return io_error(errno, "cannot read %s", path.c_str());
    if (got == 0) return content;
    content.append(buffer.data(), static_cast<size_t>(got));
    if (content.size() > limit.count)
      return error(Code::invalid_argument, "%s is larger than %s", path.c_str(),
                   format_bytes(limit).c_str());
  }
}

int write_all(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(fd, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return put < 0 ? errno : EIO;
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
  return 0;
}

Fd create_file(const std::string& path, Readers readers) {
  return Fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                   readers == Readers::owner ? 0600 : 0644));
}

namespace {

// Nobody can have put anything there before: the name cannot be guessed.
std::string name_beside(const std::string& path) {
  uint64_t number = 0;
  random_bytes(std::as_writable_bytes(std::span(&number, 1)));
  return path + text(".%016llx.tmp", static_cast<unsigned long long>(number));
}

}  // namespace

Result<void> write_file(const std::string& path, std::string_view content, Readers readers) {
  struct stat there {};
  if (::stat(path.c_str(), &there) == 0 && !S_ISREG(there.st_mode))
    return error(Code::invalid_argument, "cannot write %s: it is not a regular file; name a file",
                 path.c_str());
  const std::string beside = name_beside(path);
  const Fd file = create_file(beside, readers);
  if (!file) return io_error(errno, "cannot write %s", path.c_str());
  int failed = write_all(file.get(), std::as_bytes(std::span(content)));
  if (failed == 0 && ::rename(beside.c_str(), path.c_str()) != 0) failed = errno;
  if (failed == 0) return {};
  ::unlink(beside.c_str());
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
