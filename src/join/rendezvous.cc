#include "rendezvous.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

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

Result<std::string> read(Files& files, const std::string& path) {
  auto failed = [&] { return io_error(errno, "cannot read the rendezvous file %s", path.c_str()); };
  // A pipe with nobody at its other end must not hold this process.
  Fd found = files.open(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
  if (!found && errno == ENOENT) return std::string();
  if (!found && errno == ELOOP) return not_ours(path, "it is a symbolic link");
  if (!found) return failed();
  struct stat facts {};
  if (files.status(found.get(), facts) != 0) return failed();
  WEFT_TRY(is_ours(path, facts));
  std::array<char, kMaxAddress> words;
  ssize_t got = files.read_beginning(found.get(), std::as_writable_bytes(std::span(words)));
  if (got < 0) return failed();
  if (got == 0) return std::string();
  std::string address(words.data(), static_cast<size_t>(got));
  if (address.back() != '\n') return not_ours(path, "it holds something else than an address");
  address.pop_back();
  if (!net::split(address)) return not_ours(path, "it holds something else than an address");
  return address;
}

Result<Written> write(net::System& system, const std::string& path, const std::string& address) {
  Files& files = system.files();
  auto failed = [&](int failure) {
    return io_error(failure, "cannot write the rendezvous file %s", path.c_str());
  };
  // What an earlier group left behind, or an empty file, may go; everything else is somebody's.
  struct stat facts {};
  bool replaces = files.status(path, facts, false) == 0;
  if (!replaces && errno != ENOENT) return failed(errno);
  if (replaces) WEFT_TRY(read(files, path));
  std::array<std::byte, 8> chance;
  WEFT_TRY(system.random(chance));
  std::string fresh = path + ".";
  for (std::byte part : chance) fresh += text("%02x", std::to_integer<unsigned>(part));
  std::string line = address + "\n";  // from here on no memory is needed
  Fd made = create_file(fresh, Readers::owner, files);
  if (!made) return failed(errno);
  int failure = files.write_all(made.get(), std::as_bytes(std::span(line)));
  if (failure == 0 && files.status(made.get(), facts) != 0) failure = errno;
  // A name that nobody has yet is taken only if that is still so.
  if (failure == 0 && files.rename(fresh, path, replaces) != 0) failure = errno;
  if (failure == 0) return Written{facts.st_dev, facts.st_ino};
  files.unlink(fresh);
  return failed(failure);
}

void remove(Files& files, const std::string& path, const Written& written) {
  if (written.number == 0) return;
  struct stat facts {};
  if (files.status(path, facts, false) == 0) {
    if (facts.st_dev != written.device || facts.st_ino != written.number) return;
    if (files.unlink(path) == 0) return;
  }
  if (errno != ENOENT)
    WEFT_LOG(join, warn, "the rendezvous file %s stays behind: %s", path.c_str(),
             std::strerror(errno));
}

}  // namespace weft::join::rendezvous
