// bench: how fast weft is, beside other systems and beside what the machine could do.
//
// Collectives are measured from the outside: each engine (weft, its peers, and the bare wire) is a
// set of processes that is started once and asked in turns, so that whatever else the machine does
// meets all of them alike. docs/ has the tables that come of it.
//
// Replay is measured on jobs made in memory, the same on every machine; that says nothing about a
// cluster.
//
// Threads: one at a time; engines are child processes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "weft/base.h"
#include "weft/membership.h"

namespace weft::bench {

// ---- collectives -------------------------------------------------------------------------

enum class Transport : uint8_t { tcp, shm };
const char* name_of(Transport transport);

// allreduce, reduce-scatter, all-gather, broadcast, all-to-all, sendrecv.
const std::vector<std::string>& collectives();
// Types and operations that may be asked for; a peer may lack some.
const std::vector<std::string>& types();
const std::vector<std::string>& operations();
// gloo, openmpi, mpich, horovod (over Gloo; with shared memory, over MPI), horovod-mpi.
const std::vector<std::string>& peers();

// What weft is called among the engines when its connections are sealed.
inline constexpr const char* kSealed = "weft-sealed";

struct CollectiveOptions {
  std::string collective = "allreduce";
  uint32_t ranks = 4;
  Bytes from = kib(1), to = mib(64);  // of the whole, as nccl-tests counts
  uint32_t factor = 4;                // from one size to the next
  Transport transport = Transport::tcp;
  std::string type = "float32", op = "sum";
  uint32_t lanes = 0;                           // of weft; 0: what its default plan says
  std::string algorithm;                        // of weft; empty: its own choice
  bool sealed = false;                          // weft once more, with sealed connections
  std::vector<std::string> peers;               // of peers()
  uint32_t repeats = 7;                         // of each measurement; medians count
  bool check = false;                           // compare results with what they must be
  Nanos repeat_time = Nanos::from_millis(150);  // that one repeat should take
};

// One engine at one size. Times are those of the slowest rank, for one collective.
struct Row {
  std::string engine;
  Transport transport = Transport::tcp;  // that this engine used
  uint32_t ranks = 0;
  uint64_t bytes = 0, count = 0;
  double time_us = 0, time_us_low = 0, time_us_high = 0;  // median and quartiles
  double algbw = 0;                                       // GB/s: bytes / time
  double busbw = 0;               // GB/s: algbw times what each link carries for a byte of result
  std::optional<uint64_t> wrong;  // elements, over all ranks; absent when not checked
  uint32_t lanes = 0;             // of weft
  std::string algorithm;          // of weft
  uint32_t iterations = 0;        // in one repeat
};

struct EngineReport {
  std::string name;
  std::string version;  // what it says of itself
  std::string how;      // how it was started, for people
  std::string absent;   // why it is not in the rows; empty: it is
};

struct CollectiveResult {
  std::vector<Row> rows;  // by size, then by engine
  std::vector<EngineReport> engines;
  uint32_t cores = 0;
  double steal_percent = 0;               // taken by other guests during the run
  std::optional<double> iperf3_gb_per_s;  // one connection each way at once, each way's rate
  double seconds = 0;
};

using Say = std::function<void(const std::string&)>;

// Measures all engines. One that cannot be set up or that fails is reported as absent, and the rest
// goes on. Fails with invalid_argument on bad options.
Result<CollectiveResult> measure_collective(const CollectiveOptions& options, const Say& say);

// What a link carries for each byte of result: 2(n-1)/n for all-reduce and so on.
double bus_factor(const std::string& collective, uint32_t ranks);

// The other side: one rank of an engine that is part of this program. Returns its exit code.
int worker(const std::string& engine);

// ---- lanes -------------------------------------------------------------------------------

struct LanesOptions {
  uint32_t max = 16;      // tries 1, 2, 4, ... up to this
  Bytes bytes = mib(64);  // of an all-reduce; less where that would take long
  uint32_t repeats = 5;
};

struct LanesRow {
  uint32_t lanes = 0;
  double time_us = 0, time_us_low = 0, time_us_high = 0;
  double algbw = 0, busbw = 0;
};

struct LanesResult {
  uint32_t ranks = 0;
  uint64_t bytes = 0;
  std::vector<LanesRow> rows;
  uint32_t best = 0;                    // the fewest lanes that are as fast as the fastest
  std::optional<uint32_t> losing_from;  // from so many on, more lanes are slower than the best
  double loss_percent = 0;              // of the best rate, with that many
  uint32_t cores = 0;
  double steal_percent = 0;
};

// One rank of a job that finds the best count of lanes on the network between its hosts. All ranks
// call it, and get the same figures.
Result<LanesResult> measure_lanes(const membership::Membership& member,
                                  const LanesOptions& options);

// ---- algorithms --------------------------------------------------------------------------

struct AlgorithmsOptions {
  Bytes from = kib(1), to = mib(16);
  uint32_t factor = 4;
  uint32_t repeats = 5;
  bool shared_memory = true;  // between ranks of one host, as jobs have it
};

struct AlgorithmsRow {
  uint64_t bytes = 0;
  std::vector<double> time_us;      // of each of AlgorithmsResult::algorithms, medians
  std::vector<double> reckoned_us;  // the same by the fitted constants
  uint32_t chosen = 0;              // by the constants; an index
  double loss_percent = 0;          // of the chosen one against the fastest
};

struct AlgorithmsResult {
  uint32_t ranks = 0, hosts = 0;
  std::vector<std::string> algorithms;
  std::vector<AlgorithmsRow> rows;
  std::string costs;  // the constants, as WEFT_COSTS reads them
  uint32_t cores = 0;
  double steal_percent = 0;
};

// One rank of a job that times every all-reduce and fits the constants by which one is chosen. All
// ranks call it, and get the same figures.
Result<AlgorithmsResult> measure_algorithms(const membership::Membership& member,
                                            const AlgorithmsOptions& options);

// ---- replay ------------------------------------------------------------------------------

struct ReplayOptions {
  uint64_t operations = 1'000'000;        // at least as many are simulated
  Nanos search = Nanos::from_seconds(2);  // budget of the search whose parts are told
};

struct ReplaySpeed {
  uint32_t ranks = 0, layers = 0, iterations = 0;
  // Of the simulated graph: compute, gradients ready and done, decisions, operations, sends and
  // receives. Events are steps of the simulator, which are more.
  uint64_t operations = 0, events = 0;
  double seconds = 0;  // of one replay, the best of a few
  double operations_per_second = 0, events_per_second = 0;
  double replay_share_percent = 0;  // of a search's time
  uint64_t search_replays = 0;
  double search_seconds = 0;
};

Result<ReplaySpeed> replay_speed(const ReplayOptions& options, const Clock& clock);

}  // namespace weft::bench
