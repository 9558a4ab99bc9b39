#include "soundness.h"

#include <errno.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "streams.h"

namespace weft::lab {
namespace {

constexpr const char* kPort = "5201";
// Not counted: slow start, and iperf3's own start-up.
constexpr int kWarmUpSeconds = 1;

void sleep_for(double seconds) {
  const auto ns = static_cast<int64_t>(seconds * 1e9);
  timespec left = {ns / 1'000'000'000, ns % 1'000'000'000};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

// A server in each receiving host, ended with the object.
class Servers {
 public:
  explicit Servers(const Cluster& cluster) : cluster_(cluster) {}

  Result<void> start(uint32_t host, const std::string& program) {
    const Fd nowhere(open("/dev/null", O_WRONLY | O_CLOEXEC));
    process::Command command;
    command.argv = {program, "-s", "-p", kPort, "-B", cluster_.address(host)};
    command.descriptors = {{nowhere.get(), 1}, {nowhere.get(), 2}};
    WEFT_ASSIGN(process::Child server, cluster_.spawn(host, std::move(command)));
    servers_.push_back(std::move(server));
    return {};
  }

 private:
  const Cluster& cluster_;
  std::vector<process::Child> servers_;
};

struct Reading {
  double bits_per_s = 0;
  double round_trip_us = 0;
  uint64_t retransmits = 0;
};

Result<Reading> read_iperf(const process::Finished& finished) {
  const auto json = nlohmann::json::parse(finished.output, nullptr, false);
  if (json.is_discarded() || !json.is_object())
    return error(Code::corrupt, "iperf3 gave no JSON: %s", finished.errors.substr(0, 200).c_str());
  if (json.contains("error"))
    return error(Code::io, "iperf3: %s", json["error"].dump().substr(0, 200).c_str());
  try {
    const auto& end = json.at("end");
    Reading reading;
    reading.bits_per_s = end.at("sum_received").at("bits_per_second").get<double>();
    reading.retransmits = end.at("sum_sent").value("retransmits", uint64_t{0});
    double sum = 0;
    for (const auto& stream : end.at("streams")) sum += stream.at("sender").value("mean_rtt", 0.0);
    reading.round_trip_us =
        sum / static_cast<double>(std::max<size_t>(end.at("streams").size(), 1));
    return reading;
  } catch (const nlohmann::json::exception& problem) {
    return error(Code::corrupt, "iperf3's JSON: %s", problem.what());
  }
}

struct Client {
  uint32_t from = 0;
  uint32_t to = 0;
  bool reverse = false;
};

// One process of a measurement. Those that receive nothing are not asked what they measured.
struct Part {
  uint32_t host = 0;
  process::Command command;
  bool receives = true;
};

// How flows are made and their rates learned.
class Meter {
 public:
  virtual ~Meter() = default;
  virtual std::vector<Part> parts(const std::vector<Client>& clients, uint32_t flows,
                                  double seconds) const = 0;
  virtual Result<Reading> read(const process::Finished& finished) const = 0;
};

// A server on every host; a client's side tells the rate.
class Iperf final : public Meter {
 public:
  static Result<std::unique_ptr<Meter>> start(const Cluster& cluster) {
    Result<std::string> program = process::find_program("iperf3");
    if (!program)
      return error(Code::unsupported, "%s: the check needs it (Debian's package iperf3)",
                   program.error().message().c_str());
    auto iperf = std::make_unique<Iperf>(cluster, *program);
    for (uint32_t host = 0; host < cluster.size(); ++host)
      WEFT_TRY(iperf->servers_.start(host, *program));
    sleep_for(0.3);  // until they listen
    return std::unique_ptr<Meter>(std::move(iperf));
  }
  Iperf(const Cluster& cluster, std::string program)
      : cluster_(cluster), program_(std::move(program)), servers_(cluster) {}

  std::vector<Part> parts(const std::vector<Client>& clients, uint32_t flows,
                          double seconds) const override {
    std::vector<Part> out;
    for (const Client& client : clients) {
      Part part;
      part.host = client.from;
      part.command.argv = {program_,
                           "-c",
                           cluster_.address(client.to),
                           "-p",
                           kPort,
                           "-P",
                           std::to_string(flows),
                           "-t",
                           text("%.0f", std::max(1.0, std::ceil(seconds))),
                           "-O",
                           std::to_string(kWarmUpSeconds),
                           "-l",
                           "256K",
                           "-J"};
      if (client.reverse) part.command.argv.push_back("-R");
      out.push_back(std::move(part));
    }
    return out;
  }
  Result<Reading> read(const process::Finished& finished) const override {
    return read_iperf(finished);
  }

 private:
  const Cluster& cluster_;
  std::string program_;
  Servers servers_;
};

// A process on every host that sends or receives; the receiver's tells the rate.
class Streams final : public Meter {
 public:
  explicit Streams(const Cluster& cluster) : cluster_(cluster) {}

  std::vector<Part> parts(const std::vector<Client>& clients, uint32_t flows,
                          double seconds) const override {
    struct Host {
      StreamJob job;
      bool receives = false;
    };
    std::map<uint32_t, Host> hosts;
    for (const Client& client : clients) {
      hosts[client.from].job.calls.push_back({cluster_.address(client.to), flows, client.reverse});
      hosts[client.reverse ? client.from : client.to].receives = true;
      hosts[client.to];
    }
    const Nanos from = monotonic_clock().now() + Nanos::from_seconds(kWarmUpSeconds);
    std::vector<Part> out;
    for (auto& [number, host] : hosts) {
      host.job.station = *cluster_.station(number);
      host.job.from = from;
      host.job.until = from + Nanos::from_seconds(seconds);
      Part part;
      part.host = number;
      part.command.argv = {self_path(), "lab", "stream", write_stream_job(host.job)};
      part.receives = host.receives;
      out.push_back(std::move(part));
    }
    return out;
  }
  Result<Reading> read(const process::Finished& finished) const override {
    if (!finished.ending.ok())
      return error(Code::io, "%s: %s", finished.ending.words().c_str(),
                   finished.errors.substr(0, 200).c_str());
    WEFT_ASSIGN(const double bytes_per_s, read_stream_result(finished.output));
    return Reading{8 * bytes_per_s, 0, 0};
  }

 private:
  const Cluster& cluster_;
};

Result<SoundnessRow> measure(const Cluster& cluster, const Meter& meter,
                             const std::vector<Client>& clients, const std::string& pattern,
                             uint32_t flows, double seconds) {
  const std::vector<Part> parts = meter.parts(clients, flows, seconds);
  std::vector<Result<process::Finished>> finished(parts.size(), error(Code::io, "not run"));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < parts.size(); ++i)
    threads.emplace_back([&, i] {
      finished[i] = cluster.run(parts[i].host, parts[i].command, Nanos::from_seconds(seconds + 20));
    });
  // The processors' load in the middle of the transfer, not of its start and end.
  sleep_for(kWarmUpSeconds);
  const Result<CpuTimes> before = cpu_times();
  sleep_for(seconds * 0.8);
  const Result<CpuTimes> after = cpu_times();
  for (std::thread& thread : threads) thread.join();

  SoundnessRow row;
  row.pattern = pattern;
  row.flows = flows;
  const ClusterSpec& spec = cluster.spec();
  row.asked_bits_per_s = spec.flow_bits_per_s > 0
                             ? std::min(spec.link_bits_per_s, flows * spec.flow_bits_per_s)
                             : spec.link_bits_per_s;
  row.bits_per_s = HUGE_VAL;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string who = who_measures(cluster);
    if (!finished[i]) return Error(finished[i].error()).in(who);
    Result<Reading> read = meter.read(*finished[i]);
    if (!read) return std::move(read).error().in(who);
    if (!parts[i].receives) continue;
    const Reading& reading = *read;
    row.bits_per_s = std::min(row.bits_per_s, reading.bits_per_s);
    row.retransmits += reading.retransmits;
    row.round_trip_us = std::max(row.round_trip_us, reading.round_trip_us);
  }
  if (before && after) row.cpu = cpu_load(*before, *after);
  return row;
}

}  // namespace

std::string who_measures(const Cluster& cluster) {
  return cluster.station(0) ? "weft's own streams" : "iperf3";
}

Result<std::vector<SoundnessRow>> check_soundness(const Cluster& cluster,
                                                  const SoundnessOptions& options) {
  if (cluster.size() < 2) return error(Code::invalid_argument, "a network has at least 2 hosts");
  std::unique_ptr<Meter> meter = std::make_unique<Streams>(cluster);
  if (!cluster.station(0)) {
    WEFT_ASSIGN(meter, Iperf::start(cluster));
  }
  std::vector<SoundnessRow> rows;
  const auto add = [&](const std::vector<Client>& clients, const char* pattern,
                       uint32_t flows) -> Result<void> {
    WEFT_ASSIGN(SoundnessRow row,
                measure(cluster, *meter, clients, pattern, flows, options.seconds));
    rows.push_back(std::move(row));
    return {};
  };
  for (const uint32_t flows : options.flows) {
    if (options.pair) {
      WEFT_TRY(add({{0, 1, false}}, "forward", flows));
      WEFT_TRY(add({{0, 1, true}}, "reverse", flows));
    }
    if (options.ring) {
      std::vector<Client> ring;
      for (uint32_t host = 0; host < cluster.size(); ++host)
        ring.push_back({host, (host + 1) % cluster.size(), false});
      WEFT_TRY(add(ring, "ring", flows));
    }
  }
  return rows;
}

bool is_sound(const std::vector<SoundnessRow>& rows) {
  return std::all_of(rows.begin(), rows.end(), [](const SoundnessRow& row) {
    return std::abs(row.error_percent()) <= kSoundErrorPercent &&
           row.cpu.busy_percent + row.cpu.steal_percent <= kUnsoundBusyPercent;
  });
}

std::string soundness_table(const std::vector<SoundnessRow>& rows) {
  std::string table =
      "| pattern | flows | asked Mb/s | got Mb/s | off % | loaded rtt ms | resent | busy % | steal "
      "% "
      "|\n|---|---|---|---|---|---|---|---|---|\n";
  for (const SoundnessRow& row : rows)
    table +=
        text("| %s | %u | %.0f | %.0f | %+.1f | %s | %llu | %.0f | %.1f |\n", row.pattern.c_str(),
             row.flows, row.asked_bits_per_s * 1e-6, row.bits_per_s * 1e-6, row.error_percent(),
             // iperf3 tells the round trip of senders on its own side only.
             row.round_trip_us > 0 ? text("%.1f", row.round_trip_us * 1e-3).c_str() : "–",
             static_cast<unsigned long long>(row.retransmits), row.cpu.busy_percent,
             row.cpu.steal_percent);
  return table;
}

}  // namespace weft::lab
