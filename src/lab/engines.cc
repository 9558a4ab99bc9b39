#include "engines.h"

#include <fcntl.h>

#include <cerrno>

namespace weft::lab {
namespace {

Result<EngineProcess> start_one(const Cluster& cluster, uint32_t host, process::Command command,
                                const std::string& name, const std::string& log) {
  Fd out(::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!out) return io_error(errno, "cannot write the log of %s", name.c_str());
  command.descriptors = {{out.get(), 1}, {out.get(), 2}};
  // Workers of other engines import their neighbours; nothing is to be left beside those.
  command.environment.push_back("PYTHONDONTWRITEBYTECODE=1");
  WEFT_ASSIGN(process::Child child, cluster.spawn(host, std::move(command)));
  return EngineProcess{std::move(child), name, log};
}

// mpirun stands in the first host and enters the others by way of a process in each.
Result<process::Command> mpirun(const std::string& program, const Cluster& cluster,
                                const std::string& folder, std::vector<process::Child>& holders) {
  WEFT_ASSIGN(std::string script, data_path("lab/openmpi_worker.py"));
  WEFT_ASSIGN(std::string agent, data_path("lab/openmpi_agent.sh"));
  WEFT_ASSIGN(std::string python, set_up_peer("gloo"));  // its worker keeps gradients in torch
  const std::string ranks = std::to_string(cluster.size());
  process::Command command;
  command.argv = {program, "--allow-run-as-root", "-n", ranks, "--bind-to", "none"};
  const auto add = [&](std::initializer_list<std::string> words) {
    command.argv.insert(command.argv.end(), words);
  };
  add({"--mca", "pml", "ob1", "--mca", "btl", "tcp,self"});
  add({"--mca", "btl_tcp_if_include", cluster.interface()});
  // In the lab the hosts share the processors: a rank that waits must let others run.
  add({"--mca", "mpi_yield_when_idle", "1"});
  if (cluster.interface() != "lo") {
    std::string hosts, numbers = "WEFT_LAB_HOSTS=";
    for (uint32_t host = 0; host < cluster.size(); ++host) {
      process::Command sleeper;
      sleeper.argv = {"sleep", "infinity"};
      WEFT_ASSIGN(process::Child holder, cluster.spawn(host, std::move(sleeper)));
      hosts += (host > 0 ? "," : "") + cluster.name(host) + ":1";
      numbers += (host > 0 ? " " : "") + cluster.name(host) + "=" + std::to_string(holder.pid());
      holders.push_back(std::move(holder));
    }
    command.environment.push_back(numbers);
    add({"--host", hosts, "--map-by", "node"});
    add({"--mca", "oob_tcp_if_include", cluster.interface()});
    add({"--mca", "plm_rsh_agent", "sh " + agent, "--mca", "plm_rsh_no_tree_spawn", "1"});
  } else {
    add({"--oversubscribe"});
  }
  add({python, script, folder});
  return command;
}

Result<std::vector<std::string>> rank_command(Engine engine, const std::string& program) {
  if (engine == Engine::weft) return std::vector<std::string>{program, "lab", "worker"};
  WEFT_ASSIGN(std::string script, data_path(text("lab/%s_worker.py", name_of(engine))));
  return std::vector<std::string>{program, script};
}

}  // namespace

Result<std::string> prepare_engine(Engine engine) {
  if (engine == Engine::weft) return self_path();
  auto program = set_up_peer(name_of(engine));
  if (!program && engine == Engine::gloo)
    return std::move(program).error().in("the gloo engine needs PyTorch");
  if (program && engine == Engine::openmpi) WEFT_TRY(set_up_peer("gloo"));
  return program;
}

Result<std::vector<EngineProcess>> start_engine(Engine engine, const std::string& program,
                                                const Cluster& cluster, const std::string& folder,
                                                std::vector<process::Child>& helpers) {
  std::vector<EngineProcess> out;
  if (engine == Engine::openmpi) {
    WEFT_ASSIGN(process::Command command, mpirun(program, cluster, folder, helpers));
    WEFT_ASSIGN(EngineProcess one,
                start_one(cluster, 0, std::move(command), "mpirun", folder + "/mpirun.log"));
    out.push_back(std::move(one));
    return out;
  }
  WEFT_ASSIGN(std::vector<std::string> arguments, rank_command(engine, program));
  for (uint32_t rank = 0; rank < cluster.size(); ++rank) {
    process::Command command;
    command.argv = arguments;
    command.argv.push_back(text("%s/rank-%u.job.json", folder.c_str(), rank));
    command.environment = {"GLOO_SOCKET_IFNAME=" + cluster.interface()};
    WEFT_ASSIGN(EngineProcess one,
                start_one(cluster, rank, std::move(command), text("rank %u", rank),
                          text("%s/rank-%u.log", folder.c_str(), rank)));
    out.push_back(std::move(one));
  }
  return out;
}

}  // namespace weft::lab
