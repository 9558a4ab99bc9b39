#include "output.h"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace weft::launch {

void Sink::append(std::string_view text) {
  if (!broken_) pending_ += text;
}

void Sink::write_some() {
  size_t done = 0;
  while (done < pending_.size()) {
    pollfd ready{.fd = fd_, .events = POLLOUT, .revents = 0};
    if (poll(&ready, 1, 0) <= 0) break;
    // A pipe that is ready takes this much without blocking, and no more is promised.
    const size_t size = std::min<size_t>(PIPE_BUF, pending_.size() - done);
    const ssize_t n = write(fd_, pending_.data() + done, size);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n < 0) {
      broken_ = true;
      pending_.clear();
      return;
    }
    done += static_cast<size_t>(n);
  }
  pending_.erase(0, done);
}

void Lines::feed(std::string_view text) {
  while (!text.empty()) {
    const size_t end = text.find('\n');
    const size_t room = kLineBytesMax - partial_.size();
    if (end != std::string_view::npos && end <= room) {
      partial_ += text.substr(0, end);
      put(partial_);
      partial_.clear();
      text.remove_prefix(end + 1);
    } else if (text.size() >= room) {
      partial_ += text.substr(0, room);
      put(partial_);
      partial_.clear();
      text.remove_prefix(room);
    } else {
      partial_ += text;
      return;
    }
  }
}

void Lines::finish() {
  if (!partial_.empty()) put(partial_);
  partial_.clear();
}

void Lines::put(std::string_view line) {
  sink_->append(prefix_);
  sink_->append(line);
  sink_->append("\n");
}

}  // namespace weft::launch
