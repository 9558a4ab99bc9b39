#include "secret.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>

namespace weft::membership {

namespace {

constexpr size_t kSecretBytes = 32;
constexpr size_t kSecretFileMax = 4096;
constexpr size_t kDigitsMin = 32;
constexpr Nanos kDescriptorPatience = Nanos::from_seconds(5);
constexpr const char* kSecretName = "secret";

std::string hex_of(std::span<const unsigned char> bytes) {
  std::string hex;
  for (const unsigned char byte : bytes) hex += text("%02x", unsigned{byte});
  return hex;
}

std::string trimmed(std::string content) {
  content.erase(content.find_last_not_of(" \t\r\n") + 1);
  return content;
}

bool only_ours(const struct stat& status) {
  return status.st_uid == geteuid() && (status.st_mode & 077) == 0;
}

Result<std::string> checked(std::string secret, const std::string& source) {
  WEFT_TRY(check_secret(secret, source));
  return secret;
}

// The beginning of an open file, wherever others who share it have read to.
Result<std::string> content_of(Files& files, int file) {
  std::string content(kSecretFileMax + 1, '\0');
  const ssize_t n = files.read_beginning(file, std::as_writable_bytes(std::span(content)));
  if (n < 0) return io_error(errno, "cannot be read");
  if (static_cast<size_t>(n) > kSecretFileMax) {
    return error(Code::invalid_argument, "has more than %zu bytes, which is no secret",
                 kSecretFileMax);
  }
  content.resize(static_cast<size_t>(n));
  return trimmed(std::move(content));
}

// What an open file holds, if it is one that only this user can read.
Result<std::string> secret_in(Files& files, int file, const std::string& path,
                              const std::string& source) {
  struct stat status {};
  if (files.status(file, status) != 0)
    return io_error(errno, "%s: %s", source.c_str(), path.c_str());
  if (!S_ISREG(status.st_mode) || !only_ours(status)) {
    return error(Code::invalid_argument,
                 "%s: %s must be a file of this user that nobody else may read: chmod 600 it",
                 source.c_str(), path.c_str());
  }
  auto content = content_of(files, file);
  if (!content) return std::move(content).error().in(path).in(source);
  return checked(*std::move(content), source + ": " + path);
}

// Of a pipe or a socket: to its end, to the end of the line, or for so long.
Result<std::string> line_from(int fd) {
  std::string line;
  const Nanos until = monotonic_clock().now() + kDescriptorPatience;
  while (line.size() < kSecretFileMax) {
    pollfd ready{.fd = fd, .events = POLLIN, .revents = 0};
    const double left_ms = (until - monotonic_clock().now()).millis();
    if (left_ms <= 0 || poll(&ready, 1, static_cast<int>(left_ms) + 1) == 0) {
      return error(Code::timeout, "nothing more comes within %s",
                   format_duration(kDescriptorPatience).c_str());
    }
    char c = 0;
    const ssize_t n = read(fd, &c, 1);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n < 0) return io_error(errno, "cannot be read");
    if (n == 0 || c == '\n') break;
    line += c;
  }
  return trimmed(std::move(line));
}

// Opens a folder that is this user's alone, and makes it if it is not there.
Result<Fd> open_own_folder(Files& files, const std::string& path) {
  if (files.make_folder(path, 0700) != 0 && errno != EEXIST) {
    return io_error(errno, "cannot make %s for the secrets of this user", shown(path).c_str());
  }
  // Looked at through the open folder, so that nobody exchanges it in between.
  Fd folder = files.open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  struct stat status {};
  // What is there is no folder, or a link to one, or may not be entered.
  const bool of_others = !folder && (errno == ENOTDIR || errno == ELOOP || errno == EACCES);
  if (!of_others && (!folder || files.status(folder.get(), status) != 0)) {
    return io_error(errno, "cannot open %s for the secrets of this user", shown(path).c_str());
  }
  if (of_others || !only_ours(status)) {
    return error(Code::invalid_argument,
                 "%s is not a folder that this user alone may enter (mode 0700): somebody else may "
                 "have put it there; set WEFT_SECRET, or TMPDIR to another folder",
                 shown(path).c_str());
  }
  return folder;
}

// Not if it cannot be looked at: all processes of this user must come to the same answer.
Result<bool> is_own_folder(Files& files, const std::string& path) {
  const Fd folder = files.open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  struct stat status {};
  const bool none =
      !folder && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP || errno == EACCES);
  if (none) return false;
  if (!folder || files.status(folder.get(), status) != 0) {
    return io_error(errno, "cannot open %s", shown(path).c_str());
  }
  return only_ours(status);
}

// Puts a new secret under its name, unless one is there already. The name appears with the whole
// content or not at all, whoever else does the same at this moment.
Result<void> make_secret(Files& files, int folder, const std::string& path) {
  const std::string draft = text("%s.%s", kSecretName, new_secret().substr(0, 16).c_str());
  const std::string content = new_secret() + "\n";
  Fd file = files.open(draft, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600, folder);
  if (!file) return io_error(errno, "cannot write a secret into %s", path.c_str());
  int failure = files.write_all(file.get(), std::as_bytes(std::span(content)));
  if (failure == 0 && files.sync(file.get()) != 0) failure = errno;
  if (failure == 0 && files.link(folder, draft, kSecretName) != 0 && errno != EEXIST) {
    failure = errno;
  }
  files.unlink(draft, folder);
  if (failure != 0) return io_error(failure, "cannot write a secret into %s", path.c_str());
  return {};
}

}  // namespace

// ---- secrets as such -----------------------------------------------------------------------

std::string new_secret() {
  std::array<std::byte, kSecretBytes> bytes;
  random_bytes(bytes);
  std::string hex;
  for (const std::byte byte : bytes) hex += text("%02x", std::to_integer<unsigned>(byte));
  return hex;
}

Result<void> check_secret(std::string_view secret, const std::string& source) {
  const bool hex = secret.find_first_not_of("0123456789abcdefABCDEF") == std::string_view::npos;
  if (secret.size() >= kDigitsMin && secret.size() % 2 == 0 && hex) return {};
  // Messages end up in logs, so the value itself is not told.
  return error(Code::invalid_argument,
               "%s has %zu characters%s: expected an even number of hexadecimal digits, %zu at "
               "least, the same on every rank (`openssl rand -hex 32` makes one)",
               source.c_str(), secret.size(), hex ? "" : ", not all of them hexadecimal",
               kDigitsMin);
}

bool same_secret(std::string_view one, std::string_view other) {
  return one.size() == other.size() && CRYPTO_memcmp(one.data(), other.data(), one.size()) == 0;
}

// ---- secrets that are given ----------------------------------------------------------------

Result<std::string> secret_from_file(const std::string& path, const std::string& source,
                                     Files& files) {
  // Looked at through the open file, so that nobody exchanges it in between.
  const Fd file = files.open(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
  if (!file && errno == ELOOP) {
    return error(Code::invalid_argument, "%s: %s is a link; name the file itself", source.c_str(),
                 shown(path).c_str());
  }
  if (!file) return io_error(errno, "%s: cannot open %s", source.c_str(), shown(path).c_str());
  return secret_in(files, file.get(), shown(path), source);
}

Result<std::string> secret_from_descriptor(const std::string& number) {
  int fd = -1;
  const char* end = number.data() + number.size();
  const auto [stopped, failure] = std::from_chars(number.data(), end, fd);
  struct stat status {};
  if (failure != std::errc{} || stopped != end || fd < 0 || fstat(fd, &status) != 0) {
    return error(Code::invalid_argument,
                 "WEFT_SECRET_FD is \"%s\": expected the number of an open descriptor",
                 shown(number).c_str());
  }
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  const std::string source = "WEFT_SECRET_FD";
  // A file without a name (memfd_create) can be opened by nobody else, whatever its mode.
  if (S_ISREG(status.st_mode) && status.st_nlink > 0)
    return secret_in(kernel_files(), fd, number, source);
  auto content = S_ISREG(status.st_mode) ? content_of(kernel_files(), fd) : line_from(fd);
  if (!content) return std::move(content).error().in(source);
  return checked(*std::move(content), source);
}

// ---- the secret of a user on this host -----------------------------------------------------

Result<std::string> users_folder(const Lookup& lookup, Files& files) {
  const std::string session = lookup("XDG_RUNTIME_DIR").value_or("");
  std::string path;
  bool own = false;
  if (session.starts_with('/')) {
    WEFT_ASSIGN(own, is_own_folder(files, session));
  }
  if (own) {
    path = session + "/weft";
  } else {
    const std::string temporary = lookup("TMPDIR").value_or("");
    const bool usable = temporary.starts_with('/') && access(temporary.c_str(), W_OK | X_OK) == 0;
    path = text("%s/weft-%u", usable ? temporary.c_str() : P_tmpdir, unsigned{geteuid()});
  }
  WEFT_TRY(open_own_folder(files, path));
  return path;
}

Result<std::string> users_secret(const std::string& folder, Files& files) {
  WEFT_ASSIGN(const Fd own, open_own_folder(files, folder));
  const std::string path = folder + "/" + kSecretName;
  for (int attempt = 0;; ++attempt) {
    const Fd file = files.open(kSecretName, O_RDONLY | O_NONBLOCK | O_NOFOLLOW, 0, own.get());
    if (file) {
      // Used, so not old: what cleans temporary folders goes by this. It may not be ours to set.
      (void)!futimens(file.get(), nullptr);
      return secret_in(files, file.get(), path, "the secret of this user on this host");
    }
    if (errno != ENOENT || attempt > 0) return io_error(errno, "cannot open %s", path.c_str());
    WEFT_TRY(make_secret(files, own.get(), path));
  }
}

std::string secret_of_job(const std::string& users_secret, const std::string& job) {
  const std::string message = "weft job;" + job;
  std::array<unsigned char, EVP_MAX_MD_SIZE> out{};
  unsigned size = 0;
  HMAC(EVP_sha256(), users_secret.data(), static_cast<int>(users_secret.size()),
       reinterpret_cast<const unsigned char*>(message.data()), message.size(), out.data(), &size);
  return hex_of(std::span(out).first(size));
}

// ---- what is no secret ---------------------------------------------------------------------

uint64_t digest(std::string_view text, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325 ^ (seed * 0x9e3779b97f4a7c15);
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return hash;
}

std::string computable_secret(const std::string& job) {
  std::string secret;
  for (uint64_t part = 1; part <= 4; ++part) {
    secret += text("%016llx", static_cast<unsigned long long>(Rng(digest(job, part)).next()));
  }
  return secret;
}

}  // namespace weft::membership
