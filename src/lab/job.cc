#include "job.h"

namespace weft::lab {

using nlohmann::json;

namespace {

// Of what a job and a result are made of: many layers, never deep.
constexpr JsonLimits kLimits = {.depth = 16, .values = 1u << 22};

// Throws json::exception when it is no JSON.
Result<json> read_json(const std::string& path) {
  WEFT_ASSIGN(std::string content, read_file(path, mib(64)));
  if (auto small = check_json(content, kLimits); !small) return std::move(small).error().in(path);
  return json::parse(content);
}

}  // namespace

std::string write_job(const Job& job) {
  json out;
  out["rank"] = job.rank;
  out["size"] = job.ranks;
  out["host"] = job.host;
  out["master_addr"] = job.address;
  out["master_port"] = job.port;
  out["secret"] = job.secret;
  out["iterations"] = job.iterations;
  out["seed"] = job.seed;
  out["dilation"] = job.factors.dilation;
  out["shrink"] = job.factors.shrink;
  out["record"] = job.record;
  out["probe"] = job.probe;
  out["compute_only"] = job.compute_only;
  out["burn"] = job.burn;
  out["lane_rate"] = job.lane_rate;
  out["folder"] = job.folder;
  out["model"] = job.model;
  out["plan"] = job.plan;
  out["verify"] = true;
  out["result"] = result_path(job.folder, job.rank);
  out["facts"] = job.facts;
  if (job.clock)
    out["clock"] = {{"offset_ns", job.clock->offset.count}, {"drift_ppm", job.clock->drift_ppm}};
  if (job.station) out["station"] = to_json(*job.station);
  for (const JobLayer& layer : job.layers)
    out["layers"].push_back({{"name", layer.name},
                             {"forward_ns", layer.forward.count},
                             {"backward_ns", layer.backward.count},
                             {"update_ns", layer.update.count},
                             {"tensors", layer.tensors}});
  for (const JobTensor& tensor : job.tensors)
    out["tensors"].push_back({{"name", tensor.name}, {"elements", tensor.elements}});
  out["buckets"] = job.buckets;
  return out.dump();
}

Result<Job> read_job(const std::string& path) {
  try {
    WEFT_ASSIGN(json in, read_json(path));
    Job job;
    job.rank = in.at("rank");
    job.ranks = in.at("size");
    job.host = in.at("host");
    job.address = in.at("master_addr");
    job.port = in.at("master_port");
    job.secret = in.at("secret");
    job.iterations = in.at("iterations");
    job.seed = in.at("seed");
    job.factors.dilation = in.at("dilation");
    job.factors.shrink = in.at("shrink");
    job.record = in.at("record");
    job.probe = in.at("probe");
    job.compute_only = in.at("compute_only");
    job.burn = in.at("burn");
    job.lane_rate = in.at("lane_rate").get<std::map<uint16_t, double>>();
    job.folder = in.at("folder");
    job.model = in.at("model");
    job.plan = in.at("plan");
    job.facts = in.at("facts");
    if (in.contains("clock"))
      job.clock = ClockError{{in["clock"].at("offset_ns")}, in["clock"].at("drift_ppm")};
    if (in.contains("station")) job.station = station_from(in["station"]);
    for (const json& layer : in.at("layers"))
      job.layers.push_back({layer.at("name"),
                            {layer.at("forward_ns")},
                            {layer.at("backward_ns")},
                            {layer.at("update_ns")},
                            layer.at("tensors")});
    for (const json& tensor : in.at("tensors"))
      job.tensors.push_back({tensor.at("name"), tensor.at("elements")});
    for (const JobLayer& layer : job.layers)
      for (uint32_t t : layer.tensors)
        if (t >= job.tensors.size())
          return error(Code::invalid_argument, "%s: tensor %u is not in the list", path.c_str(), t);
    return job;
  } catch (const json::exception& failure) {
    return error(Code::invalid_argument, "%s is not a job: %s", path.c_str(), failure.what());
  }
}

std::string result_path(const std::string& folder, uint32_t rank) {
  return text("%s/rank-%u.result.json", folder.c_str(), rank);
}

Result<void> write_result(const std::string& path, const WorkerResult& result) {
  json out = {{"starts_ns", result.starts_ns},
              {"exact", result.exact},
              {"cpu_busy_percent", result.cpu_busy_percent},
              {"steal_percent", result.steal_percent},
              {"training_cpu_ms", result.training_cpu_ms},
              {"communication_cpu_ms", result.communication_cpu_ms},
              {"auxiliary_cpu_ms", result.auxiliary_cpu_ms}};
  return write_file(path, out.dump());
}

Result<WorkerResult> read_result(const std::string& path) {
  try {
    WEFT_ASSIGN(json in, read_json(path));
    WorkerResult result;
    result.starts_ns = in.at("starts_ns").get<std::vector<int64_t>>();
    result.exact = in.at("exact");
    result.cpu_busy_percent = in.value("cpu_busy_percent", 0.0);
    result.steal_percent = in.value("steal_percent", 0.0);
    result.training_cpu_ms = in.value("training_cpu_ms", 0.0);
    result.communication_cpu_ms = in.value("communication_cpu_ms", 0.0);
    result.auxiliary_cpu_ms = in.value("auxiliary_cpu_ms", 0.0);
    return result;
  } catch (const json::exception& failure) {
    return error(Code::corrupt, "%s: %s", path.c_str(), failure.what());
  }
}

}  // namespace weft::lab
