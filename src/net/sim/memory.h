// Memory that ranks of one simulated machine share: real pages, under names that only this world
// knows.
#pragma once

#include <map>

#include "shm/memory.h"
#include "weft/net.h"

namespace weft::net::sim {

class Memories {
 public:
  explicit Memories(const Options& options);
  // What rank `rank` says to be its machine; empty: it shares nothing.
  std::string machine_of(uint32_t rank) const;
  // Names of the dead go first, as in a real folder.
  Result<std::unique_ptr<SharedMemory>> make(uint32_t rank, const std::string& name);
  Result<std::unique_ptr<SharedMemory>> attach(uint32_t rank, const std::string& name);
  // What it has written stays; what its stack still does before it notices is seen by nobody.
  void die(uint32_t rank);

 private:
  class Mapped;
  struct Named {
    uint32_t maker = 0;
    std::shared_ptr<const Fd> file;
  };
  Result<std::unique_ptr<SharedMemory>> map(uint32_t rank, const std::string& name, bool own,
                                            std::shared_ptr<const Fd> file);

  std::vector<uint32_t> machines_;
  size_t capacity_;
  std::vector<bool> alive_;
  std::map<std::string, Named> names_;
  std::vector<Mapped*> mapped_;
};

}  // namespace weft::net::sim
