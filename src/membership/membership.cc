// Who started this process, and what that launcher says about the group.
//
// Each launcher is a row of kLaunchers and a function that finds the rendezvous: where rank 0 is
// known by address that address is used; where it is not, and all ranks are on this host, a file.

#include "weft/membership.h"

#include <unistd.h>

#include <charconv>
#include <cstdlib>

#include "environment.h"
#include "nodelist.h"
#include "secret.h"

namespace weft::membership {

namespace {

constexpr const char* kSecretForm =
    "an even number of hexadecimal digits, 32 at least, the same on every rank";
constexpr const char* kMakeSecret = "export WEFT_SECRET=$(openssl rand -hex 32)";
constexpr const char* kRendezvousForm =
    "ADDRESS:PORT of rank 0, such as 10.0.0.1:29400 or [fd00::1]:29400, or file:PATH on one host";

// ---- variables -----------------------------------------------------------------------------

bool is_set(const Lookup& lookup, const char* name) { return lookup(name).has_value(); }

Result<std::string> variable(const Lookup& lookup, const char* name, const char* expected) {
  auto value = lookup(name);
  if (!value) {
    return error(Code::not_found, "%s is not set: expected %s (`weft run -n N -- PROGRAM` sets it)",
                 name, expected);
  }
  return *std::move(value);
}

Result<uint32_t> number_variable(const Lookup& lookup, const char* name, const char* expected,
                                 uint32_t low, uint32_t high) {
  WEFT_ASSIGN(const std::string value, variable(lookup, name, expected));
  uint32_t number = 0;
  const char* end = value.data() + value.size();
  const auto [stopped, failure] = std::from_chars(value.data(), end, number);
  if (failure != std::errc{} || stopped != end || number < low || number > high) {
    return error(Code::invalid_argument, "%s is \"%s\": expected %s", name, shown(value).c_str(),
                 expected);
  }
  return number;
}

// ---- the launchers -------------------------------------------------------------------------

// What identifies the job, the same on all its ranks.
using Identity = Result<std::string> (*)(const Lookup&, const Membership&);
// "address:port" or "file:PATH".
using Meeting = Result<std::string> (*)(const Lookup&, const Membership&);

struct Launcher {
  const char* name;
  const char* rank;
  const char* size;
  const char* local_rank;  // may be absent from the environment
  const char* local_size;
  bool (*present)(const Lookup&);
  Identity identity;
  Meeting meeting;
  const char* mend;  // how its ranks get a secret, after the line that makes one
};

std::string join_values(const Lookup& lookup, std::initializer_list<const char*> names) {
  std::string joined;
  for (const char* name : names) joined += text("%s=%s;", name, lookup(name).value_or("").c_str());
  return joined;
}

// An IPv6 address has colons of its own and stands in brackets.
std::string with_port(const std::string& address, uint32_t port) {
  const bool bare_v6 = address.find(':') != std::string::npos && address.front() != '[';
  return text(bare_v6 ? "[%s]:%u" : "%s:%u", address.c_str(), port);
}

// Rank 0 listens one port above the one in the variables, which belongs to the launcher's store.
Result<std::string> next_port(const Lookup& lookup, const char* address_name,
                              const char* port_name) {
  WEFT_ASSIGN(const std::string address,
              variable(lookup, address_name, "the address of rank 0's host"));
  WEFT_ASSIGN(const uint32_t port,
              number_variable(lookup, port_name, "a port, 1 to 65535", 1, 65535));
  const std::string meeting = with_port(address, port == 65535 ? 1024 : port + 1);
  if (!is_address_and_port(meeting)) {
    return error(Code::invalid_argument, "%s is \"%s\": expected the address of rank 0's host",
                 address_name, shown(address).c_str());
  }
  return meeting;
}

// A file on this host, for launchers that do not tell where rank 0 is.
Result<std::string> file_meeting(const Lookup& lookup, const Membership& membership,
                                 Identity identity) {
  if (membership.local_size != membership.size) {
    const std::string here = membership.local_size == 0 ? std::string("an unknown number")
                                                        : std::to_string(membership.local_size);
    return error(Code::not_found,
                 "WEFT_RENDEZVOUS is not set, and %s does not say at which address rank 0 is: %s "
                 "of %u ranks are on this host; set it to %s",
                 membership.launcher.c_str(), here.c_str(), membership.size, kRendezvousForm);
  }
  WEFT_ASSIGN(const std::string job, identity(lookup, membership));
  WEFT_ASSIGN(const std::string folder, users_folder(lookup));
  return text("file:%s/%016llx", folder.c_str(),
              static_cast<unsigned long long>(digest(membership.launcher + job, 0)));
}

// ---- torchrun

bool torchrun_present(const Lookup& lookup) {
  return is_set(lookup, "RANK") && is_set(lookup, "WORLD_SIZE");
}

Result<std::string> torchrun_identity(const Lookup& lookup, const Membership&) {
  return join_values(lookup, {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR",
                              "MASTER_PORT", "WORLD_SIZE"});
}

Result<std::string> torchrun_meeting(const Lookup& lookup, const Membership&) {
  return next_port(lookup, "MASTER_ADDR", "MASTER_PORT");
}

// ---- Open MPI

bool open_mpi_present(const Lookup& lookup) { return is_set(lookup, "OMPI_COMM_WORLD_RANK"); }

Result<std::string> open_mpi_identity(const Lookup& lookup, const Membership&) {
  const char* id = is_set(lookup, "PMIX_NAMESPACE") ? "PMIX_NAMESPACE" : "OMPI_MCA_ess_base_jobid";
  WEFT_TRY(variable(lookup, id, "the job's name, which mpirun sets"));
  // Ids come back after a while; the key, which Open MPI 4 hands to all ranks, does not.
  return join_values(lookup, {id, "OMPI_MCA_orte_precondition_transports"});
}

Result<std::string> open_mpi_meeting(const Lookup& lookup, const Membership& membership) {
  return file_meeting(lookup, membership, open_mpi_identity);
}

// ---- MPICH

// srun sets PMI_RANK too, for programs that speak PMI; but then Slurm tells more.
bool mpich_present(const Lookup& lookup) {
  return is_set(lookup, "PMI_RANK") &&
         (is_set(lookup, "MPI_LOCALNRANKS") || !is_set(lookup, "SLURM_STEP_ID"));
}

// Hydra names the job only to those who speak PMI with it. All ranks of a host descend from one
// proxy, though, and a process is identified by its number and when it started.
Result<std::string> mpich_identity(const Lookup&, const Membership& membership) {
  if (membership.local_size != membership.size) {
    return error(
        Code::not_found,
        "WEFT_SECRET is not set, and MPICH says nothing of the job that is the same on all "
        "its hosts; set it to %s",
        kSecretForm);
  }
  if (const auto proxy = ancestor_named("pmi_proxy")) return *proxy;
  return error(Code::not_found,
               "WEFT_RENDEZVOUS or WEFT_SECRET is not set, and nothing tells this job from others: "
               "no process above this one is Hydra's pmi_proxy; set them to %s, and %s",
               kRendezvousForm, kSecretForm);
}

Result<std::string> mpich_meeting(const Lookup& lookup, const Membership& membership) {
  return file_meeting(lookup, membership, mpich_identity);
}

// ---- Slurm

// A batch script has SLURM_PROCID too, but only srun makes it one of several.
bool slurm_present(const Lookup& lookup) {
  return is_set(lookup, "SLURM_PROCID") && is_set(lookup, "SLURM_STEP_ID");
}

Result<std::string> slurm_identity(const Lookup& lookup, const Membership&) {
  return join_values(
      lookup, {"SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"});
}

Result<std::string> slurm_meeting(const Lookup& lookup, const Membership&) {
  const char* name =
      is_set(lookup, "SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
  WEFT_ASSIGN(const std::string list, variable(lookup, name, "the hosts of the job"));
  auto nodes = expand_nodes(list);
  if (!nodes) return std::move(nodes).error().in(name);
  WEFT_ASSIGN(const uint32_t job,
              number_variable(lookup, "SLURM_JOB_ID", "the job's number", 0, UINT32_MAX));
  WEFT_ASSIGN(const uint32_t step,
              number_variable(lookup, "SLURM_STEP_ID", "the step's number", 0, UINT32_MAX));
  // Below the ports that the kernel gives away by itself. A prime, so that neighbours differ.
  constexpr uint32_t kFirstPort = 20000, kPorts = 12007;
  const uint32_t port = kFirstPort + static_cast<uint32_t>((uint64_t{job} * 31 + step) % kPorts);
  return with_port(nodes->front(), port);
}

// How many ranks Slurm put on this node, from "2(x3),1" and the node's index.
uint32_t slurm_local_size(const Lookup& lookup) {
  const auto counts = expand_counts(lookup("SLURM_STEP_TASKS_PER_NODE").value_or(""));
  const auto node = number_variable(lookup, "SLURM_NODEID", "", 0, kRanksMax);
  if (!counts || !node || *node >= counts->size()) return 0;
  return (*counts)[*node];
}

// ---- Horovod

bool horovod_present(const Lookup& lookup) { return is_set(lookup, "HOROVOD_RANK"); }

Result<std::string> horovod_identity(const Lookup& lookup, const Membership&) {
  return join_values(lookup, {"HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT",
                              "HOROVOD_SECRET_KEY", "HOROVOD_SIZE"});
}

Result<std::string> horovod_meeting(const Lookup& lookup, const Membership&) {
  return next_port(lookup, "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT");
}

// ---- DMLC (ps-lite, BytePS)

bool dmlc_present(const Lookup& lookup) { return is_set(lookup, "DMLC_ROLE"); }

Result<std::string> dmlc_identity(const Lookup& lookup, const Membership&) {
  return join_values(lookup, {"DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER"});
}

Result<std::string> dmlc_meeting(const Lookup& lookup, const Membership&) {
  return next_port(lookup, "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT");
}

// ---- weft

bool weft_present(const Lookup& lookup) {
  return is_set(lookup, "WEFT_RANK") || is_set(lookup, "WEFT_SIZE");
}

Result<std::string> weft_meeting(const Lookup& lookup, const Membership&) {
  return variable(lookup, "WEFT_RENDEZVOUS", kRendezvousForm);
}

constexpr Launcher kLaunchers[] = {
    {"weft", "WEFT_RANK", "WEFT_SIZE", "WEFT_LOCAL_RANK", "WEFT_LOCAL_SIZE", weft_present, nullptr,
     weft_meeting, ""},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", torchrun_present,
     torchrun_identity, torchrun_meeting,
     " once, and the same value on every host before torchrun, which passes it on"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", open_mpi_present, open_mpi_identity, open_mpi_meeting,
     " and `mpirun -x WEFT_SECRET ...`"},
    {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", mpich_present,
     mpich_identity, mpich_meeting, " before mpiexec, which passes it on"},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE",
     slurm_present, slurm_identity, slurm_meeting, " before srun or sbatch, which pass it on"},
    {"Horovod", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
     horovod_present, horovod_identity, horovod_meeting, " before horovodrun, which passes it on"},
    {"DMLC", "DMLC_WORKER_ID", "DMLC_NUM_WORKER", "BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE",
     dmlc_present, dmlc_identity, dmlc_meeting,
     " once, and the same value in the environment of every worker"},
};

const Launcher* find_launcher(const Lookup& lookup) {
  for (const Launcher& launcher : kLaunchers) {
    if (launcher.present(lookup)) return &launcher;
  }
  return nullptr;
}

// ---- the secret ----------------------------------------------------------------------------

Result<bool> is_insecure(const Lookup& lookup) {
  const std::string value = lookup("WEFT_INSECURE").value_or("0");
  if (value == "0" || value.empty()) return false;
  if (value == "1") return true;
  return error(Code::invalid_argument, "WEFT_INSECURE is \"%s\": expected 0 or 1",
               shown(value).c_str());
}

// All ranks are processes of this user on this host: what only they can read, they share.
Result<std::string> agreed_secret(const Lookup& lookup, const Launcher& launcher,
                                  const Membership& membership) {
  WEFT_ASSIGN(const std::string folder, users_folder(lookup));
  WEFT_ASSIGN(const std::string own, users_secret(folder));
  // Jobs that meet elsewhere, or are other jobs in the launcher's words, have other secrets.
  const auto identity = launcher.identity(lookup, membership);
  return secret_of_job(own, text("%s;%s;%u;%s", launcher.name, membership.rendezvous.c_str(),
                                 membership.size, identity ? identity->c_str() : ""));
}

Error no_secret(const Launcher& launcher, const Membership& membership) {
  const std::string here =
      membership.local_size == 0
          ? text("%s does not say how many ranks are on this host", launcher.name)
          : text("%u of %u ranks are on this host", membership.local_size, membership.size);
  return error(
      Code::not_found,
      "WEFT_SECRET is not set, and %s, so that they cannot agree on one here: `%s`%s; or put "
      "one into ~/.weft/secret (mode 0600) on every host; or WEFT_INSECURE=1, and anyone "
      "who knows the job's numbers can join it",
      here.c_str(), kMakeSecret, launcher.mend);
}

Result<std::string> find_secret(const Lookup& lookup, const Launcher& launcher,
                                const Membership& membership) {
  if (auto secret = lookup("WEFT_SECRET")) {
    WEFT_TRY(check_secret(*secret, "WEFT_SECRET"));
    return *std::move(secret);
  }
  if (const auto path = lookup("WEFT_SECRET_FILE")) {
    return secret_from_file(*path, "WEFT_SECRET_FILE");
  }
  if (const auto number = lookup("WEFT_SECRET_FD")) return secret_from_descriptor(*number);
  if (launcher.identity == nullptr) return variable(lookup, "WEFT_SECRET", kSecretForm);
  const std::string own = lookup("HOME").value_or("") + "/.weft/secret";
  if (own.starts_with('/') && access(own.c_str(), F_OK) == 0) {
    return secret_from_file(own, "the secret in the home folder");
  }
  WEFT_ASSIGN(const bool insecure, is_insecure(lookup));
  if (membership.local_size == membership.size || membership.size == 1) {
    auto agreed = agreed_secret(lookup, launcher, membership);
    if (agreed || !insecure) return agreed;
  } else if (!insecure) {
    return no_secret(launcher, membership);
  }
  WEFT_ASSIGN(const std::string job, launcher.identity(lookup, membership));
  WEFT_LOG(membership, warn,
           "WEFT_INSECURE is 1: the job's secret is made from what %s says of the job, and anyone "
           "who knows that can join and change what is computed; set WEFT_SECRET, the same on all "
           "ranks",
           launcher.name);
  return computable_secret(job);
}

// ---- together ------------------------------------------------------------------------------

Result<void> check_role(const Lookup& lookup) {
  const std::string role = lookup("DMLC_ROLE").value_or("");
  if (role == "worker") return {};
  return error(Code::unsupported,
               "DMLC_ROLE is \"%s\": weft has no servers and no scheduler; only a worker joins",
               shown(role).c_str());
}

Result<void> find_size(const Lookup& lookup, const Launcher& launcher, Membership& membership) {
  const char* size = launcher.size;
  // A step may be smaller than the job that it is part of.
  const bool step = launcher.present == slurm_present && is_set(lookup, "SLURM_STEP_NUM_TASKS");
  if (step) size = "SLURM_STEP_NUM_TASKS";
  WEFT_ASSIGN(membership.size,
              number_variable(lookup, size, "the number of ranks, 1 to 65535", 1, kRanksMax));
  const std::string below = text("a whole number below %s (%u)", size, membership.size);
  WEFT_ASSIGN(membership.rank,
              number_variable(lookup, launcher.rank, below.c_str(), 0, membership.size - 1));
  return {};
}

Result<void> find_local(const Lookup& lookup, const Launcher& launcher, Membership& membership) {
  if (launcher.present == slurm_present && is_set(lookup, "SLURM_STEP_TASKS_PER_NODE")) {
    membership.local_size = slurm_local_size(lookup);
    if (membership.local_size > membership.size) {
      return error(Code::invalid_argument,
                   "SLURM_STEP_TASKS_PER_NODE puts %u ranks on this host, but there are %u",
                   membership.local_size, membership.size);
    }
  } else if (is_set(lookup, launcher.local_size)) {
    const std::string expected = text("how many of the %u ranks are on this host", membership.size);
    WEFT_ASSIGN(membership.local_size,
                number_variable(lookup, launcher.local_size, expected.c_str(), 1, membership.size));
  }
  if (!is_set(lookup, launcher.local_rank)) return {};
  const uint32_t ranks = membership.local_size == 0 ? membership.size : membership.local_size;
  const std::string expected =
      text("a whole number below the number of ranks on this host (%u)", ranks);
  WEFT_ASSIGN(membership.local_rank,
              number_variable(lookup, launcher.local_rank, expected.c_str(), 0, ranks - 1));
  return {};
}

Result<std::string> find_rendezvous(const Lookup& lookup, const Launcher& launcher,
                                    const Membership& membership) {
  const auto own = lookup("WEFT_RENDEZVOUS");
  if (!own) return launcher.meeting(lookup, membership);
  const bool file = own->starts_with("file:/") && own->find('\0') == std::string::npos;
  if (file || is_address_and_port(*own)) return *own;
  return error(Code::invalid_argument, "WEFT_RENDEZVOUS is \"%s\": expected %s",
               shown(*own).c_str(), kRendezvousForm);
}

std::optional<std::string> environment_variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace

Result<Membership> from_environment(const Lookup& lookup) {
  const Launcher* launcher = find_launcher(lookup);
  if (launcher == nullptr) {
    return error(Code::not_found,
                 "WEFT_RANK is not set, nor the variables of torchrun, Open MPI, MPICH, Slurm, "
                 "Horovod or DMLC: nobody started this process as a rank "
                 "(`weft run -n N -- PROGRAM` does)");
  }
  Membership membership;
  membership.launcher = launcher->name;
  if (launcher->present == dmlc_present) WEFT_TRY(check_role(lookup));
  WEFT_TRY(find_size(lookup, *launcher, membership));
  WEFT_TRY(find_local(lookup, *launcher, membership));
  membership.host = lookup("WEFT_HOST").value_or(host_name());
  membership.interface = lookup("WEFT_INTERFACE").value_or("");
  WEFT_ASSIGN(membership.rendezvous, find_rendezvous(lookup, *launcher, membership));
  WEFT_ASSIGN(membership.secret, find_secret(lookup, *launcher, membership));
  return membership;
}

Result<Membership> from_environment() { return from_environment(environment_variable); }

std::optional<std::string> launcher(const Lookup& lookup) {
  const Launcher* found = find_launcher(lookup);
  return found == nullptr ? std::nullopt : std::optional<std::string>(found->name);
}

std::optional<std::string> launcher() { return launcher(environment_variable); }

}  // namespace weft::membership
