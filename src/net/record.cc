// Descriptors for other processes.
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "weft/net.h"

namespace weft::net {

int send_record(int channel, std::span<const std::byte> words, int fd, bool waits) {
  iovec part{const_cast<std::byte*>(words.data()), words.size()};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = space;
    message.msg_controllen = sizeof space;
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  }
  for (;;) {
    if (::sendmsg(channel, &message, MSG_NOSIGNAL | (waits ? 0 : MSG_DONTWAIT)) >= 0) return 0;
    if (errno != EINTR) return errno;
  }
}

Record receive_record(int channel, std::span<std::byte> words) {
  iovec part{words.data(), words.size()};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof space;
  Record out;
  do {
    out.bytes = ::recvmsg(channel, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (out.bytes < 0 && errno == EINTR);
  if (out.bytes < 0) {
    out.bytes = -errno;
    return out;
  }
  const cmsghdr* rights = CMSG_FIRSTHDR(&message);
  int fd = -1;
  if (rights != nullptr && rights->cmsg_type == SCM_RIGHTS &&
      rights->cmsg_len == CMSG_LEN(sizeof fd))
    std::memcpy(&fd, CMSG_DATA(rights), sizeof fd);
  out.fd = Fd(fd);
  return out;
}

}  // namespace weft::net
