// engines: how the processes of a job start, whoever communicates.
//
// weft, Gloo and Horovod are a process a rank, started inside its host. Open MPI's processes are
// started by its own mpirun in the first host, which enters the others through an agent in place
// of ssh.
#pragma once

#include <string>
#include <vector>

#include "cluster.h"
#include "lab.h"

namespace weft::lab {

struct EngineProcess {
  process::Child child;
  std::string name;  // "rank 2", for messages
  std::string log;   // what it printed
};

// What must be on the machine before the lab closes itself off: a Python, a launcher. Sets it up.
Result<std::string> prepare_engine(Engine engine);

// Starts all ranks. `program` is what prepare_engine returned; `folder` holds rank-N.job.json.
// Others that the engine needs while it runs are added to `helpers`.
Result<std::vector<EngineProcess>> start_engine(Engine engine, const std::string& program,
                                                const Cluster& cluster, const std::string& folder,
                                                std::vector<process::Child>& helpers);

}  // namespace weft::lab
