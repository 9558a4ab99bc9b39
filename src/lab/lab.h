// lab: a cluster on one machine, and training jobs to run in it.
//
// Hosts are network namespaces that belong to the process that made them, or, where those are
// forbidden, addresses on the loopback interface; links are limited to the asked rates; workers are
// real processes with real buffers, sockets and reductions. Only the device's compute is emulated,
// by timers that burn no processor, and every output says so.
//
// The user names the target cluster. One machine cannot carry it, so links and compute are slowed
// by one factor (dilation), and bytes and compute time divided by another (shrink). Traces keep
// what really happened with both factors; results here are in the target's time. docs/lab.md has
// the rules, and what no conclusion may be drawn from.
//
// A real program can be put on the hosts too (run_program): its compute and its messages are real,
// and only the links are made.
//
// Threads: run() and run_program() need a process with one thread, because they enter namespaces.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "weft/launch.h"
#include "weft/plan.h"
#include "weft/trace.h"

namespace weft::lab {

// Who communicates: weft, or one of the systems that it is compared with.
enum class Engine { weft, gloo, openmpi, horovod };
const char* name_of(Engine engine);
Result<Engine> engine_of(const std::string& name);

struct ClockError {
  Nanos offset;
  double drift_ppm = 0;
};

struct RunOptions {
  std::string model;  // a name of list_models(), or a file
  uint32_t hosts = 4;
  double link_bits_per_s = 25e9;  // of the target
  double flow_bits_per_s = 0;     // of the target; 0: no cap on a flow
  uint32_t iterations = 12;
  plan::Plan plan;
  Engine engine = Engine::weft;
  std::map<uint32_t, double> slow;       // rank -> speed of its compute, 0.5 is half
  std::map<uint32_t, ClockError> clock;  // rank -> how wrong its host's clock is
  std::map<uint16_t, double> lane_rate;  // lane -> bits a second of the target; a bad connection
  uint64_t seed = 1;                     // of the gradients' values
  std::string output;                    // folder to make; must be absent or empty
  bool record = true;                    // write traces
  bool probe = true;
  bool compute_only = false;  // leave communication out: is the emulated compute right?
  bool burn = false;          // compute takes processor time instead of waiting for timers
  std::optional<double> dilation, shrink;
  std::string congestion_control = "reno";
  uint32_t mtu = 9000;
};

struct RunResult {
  // Milliseconds of the target, between successive starts of forward on the slowest rank, the
  // first two dropped.
  Interval iteration_ms;
  std::vector<double> iterations_ms;  // of that rank, all that count
  uint32_t slowest_rank = 0;
  double compute_ms = 0;  // of the model: forward, backward, update
  double wire_ms = 0;     // 2(p-1)/p * bytes / link
  double floor_ms = 0;    // max of both: what a perfect plan approaches
  double gradient_bytes = 0;
  bool sums_exact = false;  // every element on every rank in every step
  double dilation = 1, shrink = 1;
  double cpu_busy_percent = 0, steal_percent = 0;
  // Real processor time of an iteration, mean over ranks: of training threads, of the rest of
  // their processes, and of auxiliary processes. Engine weft only.
  double training_cpu_ms = 0, communication_cpu_ms = 0, auxiliary_cpu_ms = 0;
  bool sound = true;  // not too busy to be believed
  std::string confinement;
  std::vector<std::string> remarks;    // what was lost or unsound, and what is emulated
  std::vector<std::string> explained;  // what the factors do
  double wall_seconds = 0;
};

// Runs a job to its end. `progress` gets lines for people. Fails with io, peer_lost, cancelled or
// timeout when the run failed, naming the rank; with invalid_argument on bad options.
Result<RunResult> run(const RunOptions& options,
                      const std::function<void(const std::string&)>& progress);

// A result as one JSON object, as run() leaves it in run.json.
std::string summary_json(const RunResult& result);

// ---- any program -----------------------------------------------------------------------------

// A real job on emulated hosts: nothing is slowed or shrunk, since its compute is real. All hosts
// have this machine's processors, and share them.
struct ProgramOptions {
  std::vector<std::string> command;  // of each rank; launched here, so without a launcher
  uint32_t hosts = 2;
  uint32_t ranks_per_host = 1;
  double link_bits_per_s = 1e9;
  double flow_bits_per_s = 0;  // 0: no cap on a flow
  std::string congestion_control = "reno";
  uint32_t mtu = 9000;
  std::map<std::string, std::string> variables;  // for every rank
  launch::Options how;
};

struct ProgramResult {
  launch::Report report;
  double cpu_busy_percent = 0, steal_percent = 0;  // of the whole machine, from start to end
  Nanos took;
  std::string confinement;
};

// Runs a program once a rank, with the variables from which weft and torch.distributed learn who
// they are, and WEFT_LAB with what its traces are to know of the lab. A rank that fails is in the
// report. Fails with unsupported where hosts cannot be had, and with what starting fails with.
Result<ProgramResult> run_program(const ProgramOptions& options,
                                  const std::function<void(const std::string&)>& progress);

// ---- the other sides -------------------------------------------------------------------------

// The other side of run(): one worker process. Returns its exit code.
int worker(const std::string& job_file);

// The other side of check() where iperf3 is of no use: the streams of one host. Returns its exit
// code.
int stream(const std::string& job);

// What can be run, for people and programs.
struct ModelSummary {
  std::string name;
  std::string source;
  std::string device;
  uint64_t batch = 0;
  uint64_t layers = 0, tensors = 0, parameters = 0;
  double forward_ms = 0, backward_ms = 0, update_ms = 0;
};
Result<std::vector<ModelSummary>> models();
Result<ModelSummary> describe_model(const std::string& name_or_path);

// Sets up a system that weft is compared with (gloo, openmpi, mpich, horovod) if it is missing,
// which may install packages and take minutes. Returns the Python that can import it, or the
// command that starts its processes. Fails with unsupported, saying why it is not to be had.
Result<std::string> set_up_peer(const std::string& name);

// Asks inside the emulated network whether rates are what was asked: iperf3, or streams of weft's
// own where only those are limited.
struct CheckOptions {
  uint32_t hosts = 4;
  double link_bits_per_s = 25e9;
  double flow_bits_per_s = 0;
  std::optional<double> dilation;
};
struct CheckRow {
  std::string pattern;
  uint32_t flows = 0;
  double asked_bits_per_s = 0;  // real, after dilation
  double measured_bits_per_s = 0;
  double cpu_busy_percent = 0;
};
struct CheckResult {
  std::vector<CheckRow> rows;
  double dilation = 1;
  bool sound = false;
  std::string measured_by;
  std::string confinement;
  std::string lost;  // what this confinement lacks; empty: nothing
};
Result<CheckResult> check(const CheckOptions& options,
                          const std::function<void(const std::string&)>& progress);

}  // namespace weft::lab
