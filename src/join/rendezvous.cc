#include "rendezvous.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>

namespace weft::join::rendezvous {
namespace {

constexpr size_t kMaxAddress = 128;

Error not_ours(const std::string& path, const char* why) {
  return error(Code::invalid_argument,
               "%s is no rendezvous file: %s; name another path, or remove it", path.c_str(), why);
}

// What a file must be for its words to count.
Result<void> is_ours(const std::string& path, const struct stat& facts) {
  if (!S_ISREG(facts.st_mode)) return not_ours(path, "it is not a regular file");
  if (facts.st_uid != ::geteuid()) return not_ours(path, "it belongs to another user");
  if ((facts.st_mode & (S_IWGRP | S_IWOTH)) != 0) return not_ours(path, "others may write to it");
  return {};
}

}  // namespace

Result<std::string> read(const std::string& path) {
  // A pipe with nobody at its other end must not hold this process.
  Fd found(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
  if (!found && errno == ENOENT) return std::string();
  if (!found && errno == ELOOP) return not_ours(path, "it is a symbolic link");
  if (!found) return io_error(errno, "cannot read the rendezvous file %s", path.c_str());
  struct stat facts {};
  if (::fstat(found.get(), &facts) != 0)
    return io_error(errno, "cannot read the rendezvous file %s", path.c_str());
  WEFT_TRY(is_ours(path, facts));
  std::array<char, kMaxAddress> words;
  ssize_t got = ::read(found.get(), words.data(), words.size());
  if (got <= 0) return std::string();
  std::string address(words.data(), static_cast<size_t>(got));
  if (address.back() != '\n') return not_ours(path, "it holds something else than an address");
  address.pop_back();
  if (!net::split(address)) return not_ours(path, "it holds something else than an address");
  return address;
}

Result<Written> write(net::System& system, const std::string& path, const std::string& address) {
  auto failed = [&] {
    return io_error(errno, "cannot write the rendezvous file %s", path.c_str());
  };
  // What an earlier group left behind, or an empty file, may go; everything else is somebody's.
  struct stat facts {};
  bool replaces = ::lstat(path.c_str(), &facts) == 0;
  if (replaces) {
    auto before = read(path);
    if (!before) return std::move(before).error();
  }
  std::array<std::byte, 8> chance;
  WEFT_TRY(system.random(chance));
  std::string fresh = path + ".";
  for (std::byte part : chance) fresh += text("%02x", std::to_integer<unsigned>(part));
  Fd made(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!made) return failed();
  std::string line = address + "\n";
  bool whole = ::write(made.get(), line.data(), line.size()) == static_cast<ssize_t>(line.size()) &&
               ::fstat(made.get(), &facts) == 0;
  // A name that nobody has yet is taken only if that is still so.
  if (!whole || ::renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, path.c_str(),
                            replaces ? 0 : RENAME_NOREPLACE) != 0) {
    Error error = failed();
    ::unlink(fresh.c_str());
    return error;
  }
  return Written{facts.st_dev, facts.st_ino};
}

void remove(const std::string& path, const Written& written) {
  struct stat facts {};
  if (::lstat(path.c_str(), &facts) == 0 && facts.st_dev == written.device &&
      facts.st_ino == written.number)
    ::unlink(path.c_str());
}

}  // namespace weft::join::rendezvous
