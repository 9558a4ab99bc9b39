// Names of shared memory, and their end when the process that made them was killed.
//
// A segment has a name from its making until the other side has mapped it. As long as it has one,
// its maker holds an exclusive flock() on the file; the kernel drops that when the maker dies, so
// a name whose lock can be had belongs to nobody and may go. The lock is of the open file, not of
// the process: a child that a program forks and that does not exec keeps it with its copy of the
// descriptor, and the name of a dead parent then lasts until that child ends. Lane workers do not:
// they are exec'd, the descriptor is close-on-exec, and their own memory has no name.
//
// Threads: any.
#pragma once

#include "weft/net.h"

namespace weft::net::shm {

// "/weft-lane-" and 96 bits in hexadecimal. What is not spelled so is never removed: it was not
// made by code that takes the lock.
bool is_lane_name(std::string_view name);
Result<std::string> random_name(System& system);

struct NamedFile {
  std::string name;
  Fd file;  // holds the lock: close it after the name is gone
};
// A new and empty file under a name that nobody can guess, and locked.
Result<NamedFile> make_named();

// Removes the names that killed processes of this user left. Looks at a bounded number of names:
// it is not for a lane to put a full folder in order.
void sweep();
// At most once a second in a process: many lanes are opened at once when a group joins, and one
// look serves them all. Not once in a process's life, since the survivors of a killed rank join
// again without starting again.
void sweep_if_due();

}  // namespace weft::net::shm
