#include "sim/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace weft::net::sim {

// One rank's view of it.
class Memories::Mapped final : public SharedMemory {
 public:
  Mapped(Memories& all, uint32_t rank, std::string name, bool own, std::shared_ptr<const Fd> file,
         shm::Mapping mapping)
      : all_(all),
        rank_(rank),
        name_(std::move(name)),
        own_(own),
        file_(std::move(file)),
        mapping_(std::move(mapping)) {
    all_.mapped_.push_back(this);
  }
  ~Mapped() override {
    remove_name();
    std::erase(all_.mapped_, this);
  }
  const std::string& name() const override { return name_; }
  std::byte* head() const override { return mapping_.head(); }
  std::byte* ring() const override { return mapping_.ring(); }
  size_t capacity() const override { return mapping_.capacity(); }
  void unlink() override { remove_name(); }

  uint32_t rank() const { return rank_; }
  void cut_off() { WEFT_CHECK(mapping_.make_private(*file_).ok()); }

 private:
  // Who was killed removes nothing.
  void remove_name() {
    if (std::exchange(own_, false) && all_.alive_[rank_]) all_.names_.erase(name_);
  }

  Memories& all_;
  uint32_t rank_;
  std::string name_;
  bool own_;
  std::shared_ptr<const Fd> file_;
  shm::Mapping mapping_;
};

Memories::Memories(const Options& options)
    : machines_(options.machines), capacity_(options.ring), alive_(options.ranks, true) {
  WEFT_CHECK(machines_.empty() || machines_.size() == options.ranks);
  WEFT_CHECK(capacity_ > 0 && capacity_ % static_cast<size_t>(::getpagesize()) == 0);
}

std::string Memories::machine_of(uint32_t rank) const {
  return machines_.empty() ? std::string() : text("machine %u", machines_[rank]);
}

Result<std::unique_ptr<SharedMemory>> Memories::map(uint32_t rank, const std::string& name,
                                                    bool own, std::shared_ptr<const Fd> file) {
  WEFT_ASSIGN(shm::Mapping mapping, shm::Mapping::of(*file, capacity_));
  return std::unique_ptr<SharedMemory>(
      std::make_unique<Mapped>(*this, rank, name, own, std::move(file), std::move(mapping)));
}

Result<std::unique_ptr<SharedMemory>> Memories::make(uint32_t rank, const std::string& name) {
  std::erase_if(names_, [&](const auto& one) {
    uint32_t maker = one.second.maker;
    return !alive_[maker] && machine_of(maker) == machine_of(rank);
  });
  auto file = std::make_shared<const Fd>(::memfd_create("weft-simulated", MFD_CLOEXEC));
  if (!*file ||
      ::ftruncate(file->get(), static_cast<off_t>(SharedMemory::kHeadBytes + capacity_)) != 0)
    return own_error(errno, "cannot make shared memory");
  WEFT_ASSIGN(auto made, map(rank, name, true, file));
  if (alive_[rank]) names_[name] = {rank, std::move(file)};
  return made;
}

Result<std::unique_ptr<SharedMemory>> Memories::attach(uint32_t rank, const std::string& name) {
  auto found = names_.find(name);
  if (!alive_[rank] || found == names_.end() || machine_of(found->second.maker) != machine_of(rank))
    return io_error(ENOENT, "cannot open shared memory %s", name.c_str());
  return map(rank, name, false, found->second.file);
}

void Memories::die(uint32_t rank) {
  alive_[rank] = false;
  for (Mapped* one : mapped_)
    if (one->rank() == rank) one->cut_off();
}

}  // namespace weft::net::sim
