// Where a job's secret comes from.
#pragma once

#include <string>

#include "weft/membership.h"

namespace weft::membership {

// From a file that nobody else can read or have put there: a regular one of this user's, not
// through a link, mode 0600 or less. `source` names it in messages.
Result<std::string> secret_from_file(const std::string& path, const std::string& source,
                                     Files& files = kernel_files());
// From WEFT_SECRET_FD: to its end or the end of a line. The descriptor is closed on exec from now.
Result<std::string> secret_from_descriptor(const std::string& number);

// A folder that only this user can enter, made if need be: weft in XDG_RUNTIME_DIR, or weft-UID in
// TMPDIR or the system's folder for temporary files. Refuses what somebody else put there.
Result<std::string> users_folder(const Lookup& lookup, Files& files = kernel_files());
// The random secret of this user on this host, which lies in that folder; made if need be.
Result<std::string> users_secret(const std::string& folder, Files& files = kernel_files());
// The secret of one job of that user. Who knows it does not know the user's, or another job's.
std::string secret_of_job(const std::string& users_secret, const std::string& job);

// A number from text, the same everywhere (FNV-1a). No secret is kept by it.
uint64_t digest(std::string_view text, uint64_t seed);
// What anyone who knows `job` can make.
std::string computable_secret(const std::string& job);

}  // namespace weft::membership
