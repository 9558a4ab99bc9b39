// membership: how a process finds its group, from what its launcher put into its environment.
//
// A process that weft started gets WEFT_RANK, WEFT_SIZE, WEFT_RENDEZVOUS and WEFT_SECRET; one that
// another launcher started finds rank, size and rendezvous in that launcher's variables
// (docs/launch.md).
//
// The secret is one that others cannot compute. It is given, as text, by a file or by a descriptor;
// or, where all ranks are on this host, made from a random one that only this user can read:
//
//   WEFT_SECRET, WEFT_SECRET_FILE, WEFT_SECRET_FD, ~/.weft/secret ──────────────► secret
//   $XDG_RUNTIME_DIR/weft/secret, the job's name and rendezvous ─── HMAC ───────► secret
//
// That file is one for a user and a host: whichever process needs it first makes it, whole or not
// at all, and nobody removes it. So there is no order in which ranks or jobs must come, and what an
// earlier job left is as good as new. Where there is no secret, joining is refused with the line
// that mends it, or allowed by WEFT_INSECURE=1 and warned of.
//
// Threads: any. Not here: meeting the others.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "weft/base.h"

namespace weft::membership {

// Ranks travel in 16 bits, of which one value means "none".
inline constexpr uint32_t kRanksMax = 65535;

struct Membership {
  uint32_t rank = 0;
  uint32_t size = 1;
  uint32_t local_rank = 0;  // among the ranks of this host
  uint32_t local_size = 0;  // 0: the launcher does not say
  std::string launcher;     // "weft", "torchrun", "Open MPI", "MPICH", "Slurm", "Horovod", "DMLC"
  std::string host;         // this host's name, for messages
  std::string interface;    // WEFT_INTERFACE, or empty: the one that routes to rank 0
  std::string rendezvous;   // "address:port" of rank 0, "[v6]:port", or "file:PATH" on one host
  std::string secret;       // hex; proves that a connection belongs to this job
};

// The value of a variable of the environment, or nothing if it is not set.
using Lookup = std::function<std::optional<std::string>(const char* name)>;

// WEFT_RANK and WEFT_SIZE win; then the first launcher of the list above whose variables are set.
// Fails with not_found where nobody started this process as a rank, and with the name of the
// variable that is wrong or missing.
Result<Membership> from_environment();
Result<Membership> from_environment(const Lookup& lookup);
// The launcher that started this process as a rank, if one did.
std::optional<std::string> launcher();
std::optional<std::string> launcher(const Lookup& lookup);

// ---- secrets ---------------------------------------------------------------------------------

// 32 random bytes, as hexadecimal digits.
std::string new_secret();
// Refuses what is not an even number of hexadecimal digits, 32 at least. The message names
// `source` and not the secret.
Result<void> check_secret(std::string_view secret, const std::string& source);
// Whether they are equal, in a time that does not tell where they differ.
bool same_secret(std::string_view one, std::string_view other);

// ---- words that a launcher needs as well -----------------------------------------------------

// "host:80", "10.0.0.1:80" or "[fd00::1]:80".
bool is_address_and_port(std::string_view value);
std::string host_name();
// A value from outside, as it may stand in a message: short, and nothing that moves a cursor.
std::string shown(std::string_view value);

}  // namespace weft::membership
