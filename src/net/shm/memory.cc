#include "shm/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "shm/name.h"

namespace weft::net::shm {
namespace {

constexpr size_t kCapacity = 2u << 20;  // a few chunks, and still in a core's cache
constexpr size_t kWhole = SharedMemory::kHeadBytes + kCapacity;

class KernelMemory final : public SharedMemory {
 public:
  // `held`: of the maker, as long as the name exists (name.h).
  KernelMemory(std::string name, Fd held, Mapping mapping)
      : name_(std::move(name)), held_(std::move(held)), mapping_(std::move(mapping)) {}
  ~KernelMemory() override { remove_name(); }
  const std::string& name() const override { return name_; }
  std::byte* head() const override { return mapping_.head(); }
  std::byte* ring() const override { return mapping_.ring(); }
  size_t capacity() const override { return mapping_.capacity(); }
  void unlink() override { remove_name(); }

 private:
  void remove_name() {
    if (!held_) return;
    ::shm_unlink(name_.c_str());
    held_.reset();  // last: a name without a lock is anybody's to remove
  }

  std::string name_;
  Fd held_;
  Mapping mapping_;
};

// Takes the pages now: a full file system is an error here, and a signal later.
int reserve(const Fd& file) {
  int failure = EINTR;
  while (failure == EINTR) failure = ::posix_fallocate(file.get(), 0, kWhole);
  return failure;
}

Error no_room(int failure) {
  Error error = io_error(failure, "cannot get %zu bytes of shared memory", kWhole);
  if (failure != ENOSPC) return error;
  return Error(error.code(),
               error.message() +
                   "; make room with: mount -o remount,size=1G /dev/shm (a container: docker run "
                   "--shm-size=1g), or set WEFT_SHARED_MEMORY=0");
}

}  // namespace

bool Mapping::put(const Fd& file, int kind) {
  auto one = [&](std::byte* at, size_t size, off_t offset) {
    return ::mmap(at, size, PROT_READ | PROT_WRITE, kind | MAP_FIXED, file.get(), offset) !=
           MAP_FAILED;
  };
  constexpr size_t kHead = SharedMemory::kHeadBytes;
  return one(base_, kHead, 0) && one(base_ + kHead, capacity_, kHead) &&
         one(base_ + kHead + capacity_, capacity_, kHead);
}

Result<Mapping> Mapping::of(const Fd& file, size_t capacity) {
  // One stretch of addresses for the head and twice the data; then the file's pages into it.
  void* place = ::mmap(nullptr, SharedMemory::kHeadBytes + 2 * capacity, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place == MAP_FAILED) return io_error(errno, "cannot reserve memory for a lane");
  Mapping made(static_cast<std::byte*>(place), capacity);
  if (!made.put(file, MAP_SHARED)) return io_error(errno, "cannot map the memory of a lane");
  return made;
}

Result<void> Mapping::make_private(const Fd& file) {
  if (!put(file, MAP_PRIVATE)) return io_error(errno, "cannot map the memory of a lane");
  return {};
}

Mapping::~Mapping() {
  if (base_ != nullptr) ::munmap(base_, SharedMemory::kHeadBytes + 2 * capacity_);
}

Result<std::unique_ptr<SharedMemory>> make() {
  sweep_if_due();
  WEFT_ASSIGN(NamedFile made, make_named());
  if (int failure = reserve(made.file); failure != 0) {
    ::shm_unlink(made.name.c_str());
    return no_room(failure);
  }
  auto mapping = Mapping::of(made.file, kCapacity);
  if (!mapping) {
    ::shm_unlink(made.name.c_str());
    return std::move(mapping).error();
  }
  return std::unique_ptr<SharedMemory>(std::make_unique<KernelMemory>(
      std::move(made.name), std::move(made.file), std::move(*mapping)));
}

Result<std::unique_ptr<SharedMemory>> attach(const std::string& name) {
  if (!is_lane_name(name))
    return error(Code::invalid_argument, "\"%s\" is not a lane's memory", name.c_str());
  Fd file(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0));
  if (!file) return io_error(errno, "cannot open shared memory %s", name.c_str());
  struct stat facts {};
  if (::fstat(file.get(), &facts) != 0 || facts.st_uid != ::geteuid() ||
      facts.st_size != static_cast<off_t>(kWhole))
    return error(Code::invalid_argument, "shared memory %s is not a lane's", name.c_str());
  WEFT_ASSIGN(Mapping mapping, Mapping::of(file, kCapacity));
  return std::unique_ptr<SharedMemory>(
      std::make_unique<KernelMemory>(name, Fd(), std::move(mapping)));
}

}  // namespace weft::net::shm
