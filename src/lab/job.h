// The job file that run() writes for each worker and a worker reads: JSON, because the workers of
// other engines are not C++. All times are wall nanoseconds and all sizes real elements: whatever
// the factors do has been done.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "factors.h"
#include "lab.h"
#include "model.h"
#include "station.h"

namespace weft::lab {

struct JobLayer {
  std::string name;
  Nanos forward, backward, update;
  std::vector<uint32_t> tensors;
};
struct JobTensor {
  std::string name;
  uint64_t elements = 0;
};

struct Job {
  uint32_t rank = 0;
  uint32_t ranks = 1;
  std::string host;
  std::string address;  // of rank 0
  uint16_t port = 0;
  std::string secret;
  uint32_t iterations = 0;
  uint64_t seed = 1;
  Factors factors;
  bool record = true, probe = true, compute_only = false;
  bool burn = false;
  std::map<uint16_t, double> lane_rate;  // bytes a second
  std::string folder;                    // for the trace and the result
  std::string model;
  std::string plan;  // canonical text
  std::optional<ClockError> clock;
  std::optional<Station> station;            // absent: the kernel's network is the host's
  std::map<std::string, std::string> facts;  // for the trace's environment
  std::vector<JobLayer> layers;
  std::vector<JobTensor> tensors;
  std::vector<std::vector<uint32_t>> buckets;  // in launch order; for engines that only bucket
};

std::string write_job(const Job& job);
Result<Job> read_job(const std::string& path);
std::string result_path(const std::string& folder, uint32_t rank);

// What a worker leaves behind.
struct WorkerResult {
  std::vector<int64_t> starts_ns;  // start of forward in each iteration, and of the one after
                                   // the last; on the machine's one true clock
  bool exact = false;
  double cpu_busy_percent = 0, steal_percent = 0;  // of the whole machine, in what counts
  // Processor time of one counted iteration: of the thread that trains, of the rest of its process,
  // and of auxiliary processes.
  double training_cpu_ms = 0, communication_cpu_ms = 0, auxiliary_cpu_ms = 0;
};
Result<void> write_result(const std::string& path, const WorkerResult& result);
Result<WorkerResult> read_result(const std::string& path);

using trace::kWarmUpIterations;

}  // namespace weft::lab
