// check(): the emulated network against the rates that were asked for, as a meter inside sees it.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <thread>

#include "cluster.h"
#include "factors.h"
#include "lab.h"
#include "soundness.h"

namespace weft::lab {

Result<CheckResult> check(const CheckOptions& options,
                          const std::function<void(const std::string&)>& progress) {
  Target target{options.hosts, options.link_bits_per_s, options.flow_bits_per_s};
  FactorLimits limits;
  limits.cores = std::max(1u, std::thread::hardware_concurrency());
  WEFT_ASSIGN(Factors factors, choose_factors(target, Workload{}, limits, options.dilation, 1.0));
  WEFT_ASSIGN(const Confinement first, asked_confinement());
  // The inner process measures; a pipe carries the rows out.
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return io_error(errno, "cannot make a pipe");
  Fd from_inside(ends[0]), to_outside(ends[1]);
  const auto inside = [&](const Isolation& isolation) {
    nlohmann::json out;
    uint64_t escaped = 0;
    auto measure = [&]() -> Result<std::vector<SoundnessRow>> {
      ClusterSpec spec;
      spec.hosts = options.hosts;
      spec.link_bits_per_s = factors.to_real_rate(options.link_bits_per_s);
      spec.flow_bits_per_s = factors.to_real_rate(options.flow_bits_per_s);
      WEFT_ASSIGN(Cluster cluster, Cluster::create(spec, isolation));
      out["measured_by"] = who_measures(cluster);
      out["confinement"] = confinement_name(isolation.confinement);
      out["lost"] = isolation.lost;
      if (progress) progress("the network is up; it is measured by " + who_measures(cluster));
      SoundnessOptions what;
      what.flows = {1, 4, 8};
      Result<std::vector<SoundnessRow>> rows = check_soundness(cluster, what);
      escaped = cluster.unlimited_sockets();
      return rows;
    };
    if (auto rows = measure()) {
      out["sound"] = is_sound(*rows) && escaped == 0;
      for (const SoundnessRow& row : *rows)
        out["rows"].push_back(
            {row.pattern, row.flows, row.asked_bits_per_s, row.bits_per_s, row.cpu.busy_percent});
    } else {
      out["error"] = rows.error().message();
      out["code"] = static_cast<int>(rows.error().code());
    }
    std::string words = out.dump();
    return write_all(to_outside.get(), std::as_bytes(std::span(words))) == 0 ? 0 : 1;
  };
  WEFT_ASSIGN(int status, run_isolated(inside, first));
  to_outside.reset();
  if (status > 128) return error(Code::cancelled, "ended by signal %d", status - 128);
  std::string words(1 << 16, '\0');  // a pipe's size: what was written fits
  ssize_t got = ::read(from_inside.get(), words.data(), words.size());
  words.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  try {
    nlohmann::json in = nlohmann::json::parse(words);
    if (in.contains("error"))
      return Error(static_cast<Code>(in.at("code").get<int>()), in.at("error").get<std::string>());
    CheckResult result;
    result.dilation = factors.dilation;
    result.sound = in.at("sound");
    result.measured_by = in.at("measured_by");
    result.confinement = in.at("confinement");
    result.lost = in.at("lost");
    for (const nlohmann::json& row : in.at("rows"))
      result.rows.push_back({row[0], row[1], row[2], row[3], row[4]});
    return result;
  } catch (const nlohmann::json::exception& failure) {
    return error(Code::corrupt, "the inner process said nothing that makes sense: %s",
                 failure.what());
  }
}

}  // namespace weft::lab
