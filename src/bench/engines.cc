#include "engines.h"

#include <algorithm>
#include <thread>

#include "machine.h"
#include "weft/lab.h"
#include "weft/process.h"

namespace weft::bench {
namespace {

constexpr Nanos kCompilePatience = Nanos::from_seconds(120);

// A rank each, of this program or of a Python script.
Start one_process_a_rank(const std::vector<std::string>& argv, const CollectiveOptions& options,
                         const std::string& store, std::vector<std::string> environment = {}) {
  Start start;
  start.ranks = options.ranks;
  environment.push_back(text("%s=%u", kSizeVariable, options.ranks));
  environment.push_back(text("%s=%s", kStoreVariable, store.c_str()));
  environment.push_back("PYTHONDONTWRITEBYTECODE=1");
  for (uint32_t rank = 0; rank < options.ranks; ++rank) {
    start.lines.push_back({argv, environment});
    start.lines.back().environment.push_back(text("%s=%u", kRankVariable, rank));
  }
  return start;
}

bool crowded(const CollectiveOptions& options) {
  return options.ranks > std::max(1u, std::thread::hardware_concurrency());
}

// Open MPI's own settings. With more ranks than cores it has to yield, which oversubscribe asks
// for. Not bound to cores: Horovod's ranks have two threads each.
std::vector<std::string> mpirun_openmpi(const CollectiveOptions& options) {
  std::vector<std::string> out = {"mpirun.openmpi",
                                  "--allow-run-as-root",
                                  "-n",
                                  std::to_string(options.ranks),
                                  "--bind-to",
                                  "none"};
  if (crowded(options)) out.push_back("--oversubscribe");
  out.insert(out.end(), {"--mca", "pml", "ob1", "--mca", "btl",
                         options.transport == Transport::shm ? "vader,self" : "tcp,self"});
  if (options.transport == Transport::tcp)
    out.insert(out.end(), {"--mca", "btl_tcp_if_include", "lo"});
  return out;
}

// The MPI worker, made by the compiler of that MPI.
Result<std::string> compiled_worker(const std::string& peer, const std::string& folder) {
  WEFT_ASSIGN(std::string source, data_path("bench/mpi_worker.c"));
  std::string program = folder + "/mpi_worker-" + peer;
  process::Command compile;
  compile.argv = {"mpicc." + peer, "-O2", "-o", program, source};
  WEFT_ASSIGN(const process::Finished finished, process::run(compile, kCompilePatience));
  if (finished.ending.ok()) return program;
  return error(
      Code::io, "mpicc.%s cannot compile its worker: %s", peer.c_str(),
      finished.errors.empty() ? "it said nothing" : finished.errors.substr(0, 300).c_str());
}

Result<Entrant> openmpi(const CollectiveOptions& options, const std::string& folder) {
  WEFT_ASSIGN(std::string program, compiled_worker("openmpi", folder));
  std::vector<std::string> argv = mpirun_openmpi(options);
  Entrant out{"openmpi", options.transport, process::command_line(argv), {}};
  argv.push_back(program);
  out.start.ranks = options.ranks;
  out.start.lines.push_back({argv, {}});
  return out;
}

Result<Entrant> mpich(const CollectiveOptions& options, const std::string& folder) {
  WEFT_ASSIGN(std::string program, compiled_worker("mpich", folder));
  std::vector<std::string> argv = {"mpiexec.hydra", "-n", std::to_string(options.ranks)};
  Entrant out{"mpich", options.transport, "", {}};
  std::vector<std::string> environment;
  // Debian's MPICH speaks through UCX.
  if (options.transport == Transport::tcp)
    environment = {"MPIR_CVAR_NOLOCAL=1", "UCX_TLS=tcp,self", "UCX_NET_DEVICES=lo"};
  out.how = process::command_line(environment) + (environment.empty() ? "" : " ") +
            process::command_line(argv);
  argv.push_back(program);
  out.start.ranks = options.ranks;
  out.start.lines.push_back({argv, environment});
  return out;
}

Result<Entrant> gloo(const CollectiveOptions& options, const std::string& folder,
                     const std::string& python) {
  WEFT_ASSIGN(std::string script, data_path("bench/torch_worker.py"));
  Entrant out{"gloo", Transport::tcp, "GLOO_SOCKET_IFNAME=lo, one process a rank", {}};
  out.start = one_process_a_rank({python, script, "gloo"}, options, folder + "/gloo.store",
                                 {"GLOO_SOCKET_IFNAME=lo"});
  return out;
}

Result<Entrant> horovod(const CollectiveOptions& options, const std::string& folder,
                        const std::string& python, const std::string& name) {
  WEFT_ASSIGN(std::string script, data_path("bench/torch_worker.py"));
  // What it waits between two looks for work is a millisecond by default, which would be most of
  // what is measured. It may wait for hours while others are measured.
  std::vector<std::string> environment = {"HOROVOD_CYCLE_TIME=0.1",
                                          "HOROVOD_GLOO_TIMEOUT_SECONDS=36000"};
  Entrant out{name, options.transport, "", {}};
  const bool mpi = name == "horovod-mpi" || options.transport == Transport::shm;
  if (mpi) {
    std::vector<std::string> argv = mpirun_openmpi(options);
    out.how = environment[0] + " " + process::command_line(argv);
    argv.insert(argv.end(), {python, script, "horovod"});
    out.start.ranks = options.ranks;
    out.start.lines.push_back({argv, environment});
  } else {
    WEFT_ASSIGN(uint16_t port, free_port());
    environment.push_back(text("WEFT_BENCH_PORT=%u", port));
    out.how = environment[0] + ", Gloo on lo, one process a rank";
    out.start = one_process_a_rank({python, script, "horovod"}, options, folder, environment);
  }
  out.start.restless = true;
  return out;
}

}  // namespace

Result<Entrant> peer(const std::string& name, const CollectiveOptions& options,
                     const std::string& folder) {
  const std::string which = name == "horovod-mpi" ? "horovod" : name;
  WEFT_ASSIGN(std::string program, lab::set_up_peer(which));
  if (which == "horovod") return horovod(options, folder, program, name);
  if (which == "gloo") return gloo(options, folder, program);
  return which == "mpich" ? mpich(options, folder) : openmpi(options, folder);
}

Entrant weft(const CollectiveOptions& options, const std::string& folder, bool sealed) {
  const std::string engine = text("weft-%s", name_of(options.transport));
  Entrant out{sealed ? kSealed : "weft", options.transport, "", {}};
  out.how = options.algorithm.empty() ? "its own choice of algorithm" : options.algorithm;
  if (sealed) out.how += ", connections sealed (WEFT_SEAL=1)";
  out.start = one_process_a_rank(
      {self_path(), "bench", "worker", engine}, options, folder + "/" + out.name + ".store",
      {std::string(kSecretVariable) + "=" + membership::new_secret(),
       text("WEFT_SEAL=%d", sealed ? 1 : 0), text("%s=%u", kLanesVariable, options.lanes),
       std::string(kAlgorithmVariable) + "=" + options.algorithm});
  return out;
}

Entrant wire(const CollectiveOptions& options, const std::string& folder) {
  const std::string engine = text("wire-%s", name_of(options.transport));
  Entrant out{
      "wire", options.transport, "the same bytes around a ring, with nothing else done", {}};
  out.start =
      one_process_a_rank({self_path(), "bench", "worker", engine}, options, folder + "/wire");
  return out;
}

}  // namespace weft::bench
