// What a forked child must not keep.
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "weft/net.h"

namespace weft::net {
namespace {

// Bits by descriptor. The child of a process with threads may call only what is safe in a signal
// handler, so there is no lock here and nothing is allocated. Descriptors beyond are kept by
// children: a process with so many has its limit raised on purpose.
constexpr size_t kMostDescriptors = size_t{1} << 20;
std::array<std::atomic<uint64_t>, kMostDescriptors / 64> kept_from_children;
std::atomic<size_t> words_in_use{0};
std::atomic<uint64_t> forks{0};

void let_go() {
  forks.fetch_add(1);
  // Numbers stay taken: whoever closes them later closes nothing else.
  int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (size_t word = 0; word < words_in_use.load(); ++word) {
    uint64_t bits = kept_from_children[word].load();
    for (; bits != 0; bits &= bits - 1) {
      int fd = static_cast<int>(word * 64) + __builtin_ctzll(bits);
      if (nothing >= 0)
        ::dup3(nothing, fd, O_CLOEXEC);
      else
        ::close(fd);
    }
  }
  if (nothing >= 0) ::close(nothing);
}

void watch_forks() {
  [[maybe_unused]] static const int watched = ::pthread_atfork(nullptr, nullptr, let_go);
}

}  // namespace

KeptFromChildren::KeptFromChildren(int fd) : fd_(fd) {
  watch_forks();
  if (fd < 0 || static_cast<size_t>(fd) >= kMostDescriptors) return;
  auto word = static_cast<size_t>(fd) / 64;
  size_t seen = words_in_use.load();
  while (seen <= word && !words_in_use.compare_exchange_weak(seen, word + 1)) {
  }
  kept_from_children[word].fetch_or(uint64_t{1} << (fd % 64));
}

KeptFromChildren::~KeptFromChildren() {
  if (fd_ < 0 || static_cast<size_t>(fd_) >= kMostDescriptors) return;
  kept_from_children[static_cast<size_t>(fd_) / 64].fetch_and(~(uint64_t{1} << (fd_ % 64)));
}

uint64_t times_forked() { return forks.load(std::memory_order_relaxed); }

}  // namespace weft::net
