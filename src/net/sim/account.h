// Memory that runs out under the seed: who is charged for an allocation, and which are refused.
//
// One account at a time is charged in a thread; none is charged for what the simulation needs for
// itself, or its own state would break. A stack is only ever left and entered while none is, so
// each finds its own account when it goes on.
#pragma once

#include "weft/net.h"

namespace weft::net::sim {

// What one rank has asked for.
struct Account {
  World::Impl* world = nullptr;
  uint32_t rank = 0;
  uint64_t asked = 0;
};

class Charge {
 public:
  // Null: nobody.
  explicit Charge(Account* account);
  ~Charge();
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;
  Account* before() const { return before_; }

 private:
  Account* before_;
};

}  // namespace weft::net::sim
