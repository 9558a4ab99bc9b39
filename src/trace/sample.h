// A small process with something of everything in it, for the module's tests.
#pragma once

#include "weft/trace.h"

namespace weft::trace {

inline Process sample_process(uint32_t rank, uint32_t ranks, size_t iterations) {
  Process p;
  p.environment.weft_version = "0.1.0";
  p.environment.host = "host-" + std::to_string(rank);
  p.environment.host_index = rank;
  p.environment.rank = rank;
  p.environment.ranks = ranks;
  p.environment.cores = 8;
  p.environment.sysctls = {{"net.ipv4.tcp_wmem", "4096 16384 4194304"}, {"empty", ""}};
  p.environment.plan_name = "default";
  p.environment.plan_hash = "00ff";
  p.environment.plan_text = "{}";
  p.environment.dilation = 8;
  p.environment.shrink = 4;
  p.environment.emulated_compute = true;
  p.environment.lab = {{"link", "25gbit"}};
  p.model.name = "two layers";
  p.model.layers = {{"conv1"}, {"fc"}};
  p.model.tensors = {{"conv1.w", 4096, 0, 0, 0}, {"fc.w", 1 << 20, 1, 1, 1}};
  p.names = {"load \"batch\"", "tcpi_rtt", "never used"};
  const auto next = static_cast<uint16_t>((rank + 1) % ranks);
  const auto previous = static_cast<uint16_t>((rank + ranks - 1) % ranks);
  p.tracks = {{TrackType::stream, "device", kNone16, kNone16},
              {TrackType::lane_out, "lane 0 to rank " + std::to_string(next), 0, next},
              {TrackType::lane_in, "lane 0 from rank " + std::to_string(previous), 0, previous},
              {TrackType::thread, "never used", kNone16, kNone16}};
  const auto add = [&p](Shape shape, Kind kind, TrackId track, int64_t start, int64_t duration) {
    Event e;
    e.shape = shape;
    e.kind = kind;
    e.track = track;
    e.start_ns = start;
    e.duration_ns = duration;
    return &p.events.emplace_back(e);
  };
  for (size_t i = 0; i < iterations; ++i) {
    const int64_t t = 1'000'000 * static_cast<int64_t>(i + 1);
    const auto iteration = static_cast<uint32_t>(i);
    add(Shape::span, Kind::iteration, 0, t, 900'000)->iteration = iteration;
    Event* forward = add(Shape::span, Kind::forward, 0, t, 100'000);
    forward->iteration = iteration;
    forward->layer = 0;
    Event* load = add(Shape::span, Kind::other, 0, t + 100'000, 1);
    load->name = 0;
    Event* ready = add(Shape::instant, Kind::gradient_ready, 0, t + 150'000, 0);
    ready->iteration = iteration;
    ready->tensor = 1;
    for (uint16_t step = 0; step < 2; ++step) {
      const auto id = [&](uint32_t sender) {
        return 1 + ((static_cast<uint64_t>(i) * 2 + step) * ranks + sender);
      };
      const int64_t at = t + 200'000 + 100'000 * step;
      for (bool send : {true, false}) {
        Event* m = add(send ? Shape::send : Shape::receive, Kind::chunk, send ? 1 : 2,
                       send ? at : at + 20'000, 60'000);
        m->message = id(send ? rank : previous);
        m->bytes = 65536;
        m->iteration = iteration;
        m->bucket = 0;
        m->operation = 0;
        m->chunk = 0;
        m->step = step;
        m->lane = 0;
        m->peer = send ? next : previous;
      }
    }
    Event* done = add(Shape::instant, Kind::tensor_done, 0, t + 500'000, 0);
    done->iteration = iteration;
    done->tensor = 1;
    Event* rtt = add(Shape::counter, Kind::tcp_info, 1, t + 600'000, 40 + static_cast<int64_t>(i));
    rtt->name = 1;
    rtt->lane = 0;
    rtt->peer = next;
  }
  p.clock_samples = {{1'000'000, 1'700'000'000'000'000'000}};
  p.pings = {{next, 0, 10, 25, 30, 45}, {next, 1, 100, 125, 130, 195}};
  p.probe = {
      {ProbeType::rate, ProbeScope::pair, 2, 0, 0, next, 262144, 1 << 24, 9'000'000, 64, 1, 2},
      {ProbeType::copy, ProbeScope::local, 0, 0, 0, kNone, 0, 1 << 24, 1'000'000, 0, 0, 0}};
  p.notes = {{5, "lane 0 reconnected", "after 3 ms"}};
  p.dropped = 7;
  return p;
}

}  // namespace weft::trace
