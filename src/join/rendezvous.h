// The file by which ranks of one host find rank 0: one line, "address:port".
//
// It may lie in a folder that others write to, so it is trusted only if it is a regular file of
// this user that nobody else may write; links are not followed, nothing is waited for, and what is
// not such a file is neither replaced nor removed.
#pragma once

#include <sys/types.h>

#include "weft/net.h"

namespace weft::join::rendezvous {

// Which file it was that was written.
struct Written {
  dev_t device = 0;
  ino_t number = 0;
};

// Whole or not at all. Replaces only what an earlier group left behind, or an empty file.
Result<Written> write(net::System& system, const std::string& path, const std::string& address);
// The address; empty while there is none.
Result<std::string> read(Files& files, const std::string& path);
// Removes it if it is still the same file. Where that is refused, the log says so: an address that
// nobody listens on does no harm to the next group, which replaces it.
void remove(Files& files, const std::string& path, const Written& written);

}  // namespace weft::join::rendezvous
