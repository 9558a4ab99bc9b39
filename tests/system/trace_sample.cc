// Writes a run with everything in it that viewers and readers find hard, for the tests beside it.
//
//   trace_sample FOLDER [iterations]
//
// Three ranks on three hosts whose clocks disagree; lanes on which chunks overlap; spans that
// start together, that are equal, or that take no time; messages with a missing half or with ids
// beyond 2^53; names that need escaping. Equal arguments give equal files.
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "weft/trace.h"

namespace weft::trace {
namespace {

constexpr uint32_t kRanks = 3;
constexpr int64_t kMs = 1'000'000;
// Rank 2's clock is wrong by more than a message takes: receives come before their sends.
constexpr int64_t kClock[kRanks] = {0, 137, -2 * kMs - 1};

enum : TrackId { device, comm, out0, in0, out1, in1, stress };

class Sample {
 public:
  Sample(uint32_t rank, uint32_t iterations) : rank_(rank), rng_(rank + 1) {
    describe();
    for (uint32_t i = 0; i < iterations; ++i) iteration(i);
    hard_cases();
  }

  Process take() { return std::move(p_); }

 private:
  void describe() {
    Environment& e = p_.environment;
    e.weft_version = version();
    e.host = std::string("host-") + static_cast<char>('a' + rank_);
    e.host_index = rank_;
    e.rank = rank_;
    e.ranks = kRanks;
    e.cores = 16;
    e.kernel = "6.1.0";
    e.congestion_control = "cubic";
    e.sysctls = {{"net.ipv4.tcp_wmem", "4096 16384 4194304"}};
    e.plan_name = "sample";
    e.plan_hash = "0123456789abcdef";
    e.plan_text = "{\"name\": \"sample\"}";
    e.dilation = 8;
    e.shrink = 4;
    e.emulated_compute = true;
    e.lab = {{"link", "25gbit"}, {"seed", "1"}};
    p_.model.name = "sample";
    p_.model.layers = {{"conv1"}, {"layer \"two\"\n"}, {"fc\xff"}};
    for (uint32_t i = 0; i < 3; ++i)
      p_.model.tensors.push_back({p_.model.layers[i].name + ".weight", 1u << (18 + i), i, i, i});
    const auto next = static_cast<uint16_t>((rank_ + 1) % kRanks);
    const auto last = static_cast<uint16_t>((rank_ + kRanks - 1) % kRanks);
    p_.tracks = {{TrackType::stream, "device", kNone16, kNone16},
                 {TrackType::thread, "communication", kNone16, kNone16}};
    for (uint16_t lane = 0; lane < 2; ++lane) {
      p_.tracks.push_back(
          {TrackType::lane_out, text("lane %u to rank %u", lane, next), lane, next});
      p_.tracks.push_back(
          {TrackType::lane_in, text("lane %u from rank %u", lane, last), lane, last});
    }
    p_.tracks.push_back({TrackType::thread, "hard cases \xe2\x9a\xa0", kNone16, kNone16});
    p_.names = {"tcpi_rtt", "tab\there \\ \"quoted\" \x01 \xc3\x28 \xf0\x9f\xa7\xb6", "same", ""};
    p_.clock_samples = {{at(0), 1'700'000'000'000'000'000}};
    p_.pings = {{next, 0, at(0), at(0) + 30'000, at(0) + 31'000, at(0) + 61'000}};
    ProbeResult rate;
    rate.scope = ProbeScope::pair;
    rate.flows = 2;
    rate.peer = next;
    rate.chunk_bytes = 256 << 10;
    rate.bytes = 64 << 20;
    rate.duration_ns = 50 * kMs;
    rate.chunks = 256;
    p_.probe = {rate};
    p_.notes = {{at(1), "lane 1 reconnected", "after 3 ms"}};
    p_.dropped = rank_;
  }

  // A true moment on this rank's clock.
  int64_t at(int64_t true_ns) const { return 86'400'000'000'000 + true_ns + kClock[rank_]; }

  Event& add(Shape shape, Kind kind, TrackId track, int64_t true_ns, int64_t duration) {
    Event& e = p_.events.emplace_back();
    e.shape = shape;
    e.kind = kind;
    e.track = track;
    e.start_ns = at(true_ns);
    e.duration_ns = duration;
    return e;
  }

  void iteration(uint32_t i) {
    const int64_t t = int64_t{i} * 10 * kMs;
    add(Shape::span, Kind::iteration, comm, t, 10 * kMs).iteration = i;
    for (uint16_t l = 0; l < 3; ++l) {
      for (bool forward : {true, false}) {
        const int64_t start = t + (forward ? l : 5 - l) * kMs;  // one ends where the next starts
        Event& e = add(Shape::span, forward ? Kind::forward : Kind::backward, device, start, kMs);
        e.iteration = i;
        e.layer = l;
        const Event spent = processor_time_of(e, kMs / 2 + l);
        p_.events.push_back(spent);
      }
      Event& ready = add(Shape::instant, Kind::gradient_ready, device, t + (6 - l) * kMs, 0);
      ready.iteration = i;
      ready.tensor = l;
    }
    // Operations overlap in time without nesting.
    for (uint32_t op = 0; op < 3; ++op) {
      Event& e = add(Shape::span, Kind::operation, comm, t + (3 + op) * kMs, 2 * kMs + kMs / 2);
      e.iteration = i;
      e.bucket = op;
      e.operation = 3 * i + op;
      Event& done = add(Shape::instant, Kind::tensor_done, comm, e.end_ns() - at(0), 0);
      done.iteration = i;
      done.tensor = op;
      messages(i, op, t + (3 + op) * kMs);
    }
    Event& wait = add(Shape::span, Kind::wait, comm, t + 6 * kMs, 2 * kMs);
    wait.iteration = i;
    Event& rtt = add(Shape::counter, Kind::tcp_info, out0, t, 40'000 + int64_t{i});
    rtt.name = 0;
    rtt.lane = 0;
  }

  // Every rank draws the same numbers, so both halves agree without talking.
  void messages(uint32_t i, uint32_t op, int64_t start) {
    for (uint32_t sender = 0; sender < kRanks; ++sender) {
      Rng rng(1 + sender + kRanks * (op + 3 * i));
      for (uint32_t chunk = 0; chunk < 6; ++chunk) {
        const uint64_t id =
            (uint64_t{1} << 60) + ((uint64_t{i} * 3 + op) * 6 + chunk) * kRanks + sender;
        const auto lane = static_cast<uint16_t>(rng.below(2));
        const auto when = start + static_cast<int64_t>(rng.below(2 * kMs));
        const auto took = 1 + static_cast<int64_t>(rng.below(kMs / 2));
        const bool halved = chunk == 5 && i == 0 && op == 0;
        if (sender == rank_) message(Shape::send, id, lane, i, op, chunk, when, took);
        if ((sender + 1) % kRanks == rank_ && !halved)
          message(Shape::receive, id, lane, i, op, chunk, when + 30'001, took + 999);
      }
    }
  }

  void message(Shape shape, uint64_t id, uint16_t lane, uint32_t i, uint32_t op, uint32_t chunk,
               int64_t when, int64_t took) {
    const bool send = shape == Shape::send;
    Event& e = add(shape, Kind::chunk, send ? (lane == 0 ? out0 : out1) : (lane == 0 ? in0 : in1),
                   when, took);
    e.message = id;
    e.bytes = 65536;
    e.iteration = i;
    e.bucket = op;
    e.operation = 3 * i + op;
    e.chunk = chunk;
    e.lane = lane;
    e.peer = p_.tracks[e.track].peer;
  }

  void hard_cases() {
    const auto span = [this](int64_t start, int64_t duration) -> Event& {
      Event& e = add(Shape::span, Kind::other, stress, start, duration);
      e.name = 1;
      return e;
    };
    // Equal, nested with one end shared, adjacent, crossing by a nanosecond.
    for (int i = 0; i < 3; ++i) span(1'001, 1'001).name = 2;
    span(2'002, 1'001);
    span(3'002, 1'001);
    span(5'000, 100);
    span(5'000, 99);
    span(5'001, 99);
    // No time at all: alone, together, at both ends of another, and as an empty name.
    span(7'000, 0);
    for (int i = 0; i < 3; ++i) span(8'000, 0);
    span(9'000, 500);
    span(9'000, 0);
    span(9'500, 0).name = 3;
    for (int i = 0; i < 3; ++i) add(Shape::instant, Kind::admitted, stress, 9'250, 0).operation = 1;
    // Fractions that a double spoils.
    for (int i = 0; i < 500; ++i) span(20'000 + 1'009 * i, static_cast<int64_t>(rng_.below(1'010)));
    // Messages that take no time, two at one moment, to itself.
    for (uint64_t i = 0; i < 2; ++i) {
      for (Shape shape : {Shape::send, Shape::receive}) {
        Event& e = add(shape, Kind::control, stress, 10'000, 0);
        e.message = 1 + rank_ * 2 + i;
        e.peer = static_cast<uint16_t>(rank_);
      }
    }
    // An id that three halves claim.
    if (rank_ == 0) {
      for (int i = 0; i < 3; ++i)
        add(i == 0 ? Shape::send : Shape::receive, Kind::control, stress, 11'000 + i, 1).message =
            99;
    }
  }

  uint32_t rank_;
  Rng rng_;
  Process p_;
};

}  // namespace
}  // namespace weft::trace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const auto iterations = static_cast<uint32_t>(argc > 2 ? std::atoi(argv[2]) : 4);
  std::filesystem::create_directories(argv[1]);
  for (uint32_t rank = 0; rank < weft::trace::kRanks; ++rank) {
    const std::string path = std::string(argv[1]) + "/" + weft::trace::file_name(rank);
    if (auto written = weft::trace::write(path, weft::trace::Sample(rank, iterations).take());
        !written) {
      std::fprintf(stderr, "trace_sample: %s\n", written.error().message().c_str());
      return 1;
    }
  }
  return 0;
}
