#include "recording.h"

#include <algorithm>

namespace weft::replay {
namespace {

using trace::Event;
using trace::Kind;
using trace::Shape;
using trace::TrackId;
using trace::TrackType;

constexpr TrackId kDevice = 0, kTraining = 1, kOperations = 2, kControl = 3, kFramework = 4;

std::vector<trace::Track> tracks() {
  constexpr uint16_t none = trace::kNone16;
  return {{TrackType::stream, "device (predicted)", none, none},
          {TrackType::thread, "training thread", none, none},
          {TrackType::stream, "operations", none, none},
          {TrackType::control, "control", none, none},
          {TrackType::thread, "framework", none, none}};
}

}  // namespace

Recording::Recording(const trace::Environment& like, const trace::Model& model,
                     const plan::Plan& plan, const std::vector<uint32_t>& host_of, uint32_t lanes)
    : ranks_(static_cast<uint32_t>(host_of.size())), lanes_(lanes) {
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    trace::Process process;
    process.environment = like;
    process.environment.weft_version = version();
    process.environment.host = text("host%u", host_of[rank]);
    process.environment.host_index = host_of[rank];
    process.environment.rank = rank;
    process.environment.ranks = ranks_;
    process.environment.plan_name = plan.name;
    process.environment.plan_hash = plan::hash(plan);
    process.environment.plan_text = plan::canonical(plan);
    process.environment.predicted = true;
    process.model = model;
    process.tracks = tracks();
    trace_.processes.push_back(std::move(process));
  }
}

Event& Recording::add(uint32_t rank, TrackId track, Kind kind, Shape shape, int64_t start,
                      int64_t end) {
  Event& event = trace_.processes[rank].events.emplace_back();
  event.start_ns = start;
  event.duration_ns = std::max<int64_t>(0, end - start);
  event.track = track;
  event.kind = kind;
  event.shape = shape;
  return event;
}

void Recording::compute(uint32_t rank, Kind kind, uint32_t layer, uint32_t iteration, int64_t start,
                        int64_t end, int64_t cpu_ns) {
  Event& event = add(rank, kDevice, kind, Shape::span, start, end);
  event.layer = static_cast<uint16_t>(layer);
  event.iteration = iteration;
  if (cpu_ns >= 0) {
    const Event span = event;
    trace_.processes[rank].events.push_back(trace::processor_time_of(span, cpu_ns));
  }
}

void Recording::iteration(uint32_t rank, uint32_t iteration, int64_t start, int64_t end) {
  add(rank, kTraining, Kind::iteration, Shape::span, start, end).iteration = iteration;
}

void Recording::wait(uint32_t rank, uint32_t tensor, uint32_t layer, uint32_t iteration,
                     int64_t start, int64_t end) {
  Event& event = add(rank, kTraining, Kind::wait, Shape::span, start, end);
  event.tensor = tensor;
  event.layer = static_cast<uint16_t>(layer);
  event.iteration = iteration;
}

void Recording::ready(uint32_t rank, uint32_t tensor, uint32_t layer, uint32_t bucket,
                      uint32_t iteration, int64_t at) {
  Event& event = add(rank, kFramework, Kind::gradient_ready, Shape::instant, at, at);
  event.tensor = tensor;
  event.layer = static_cast<uint16_t>(layer);
  event.bucket = bucket;
  event.iteration = iteration;
  event.bytes = trace_.processes[rank].model.tensors[tensor].bytes;
}

void Recording::done(uint32_t rank, uint32_t tensor, uint32_t layer, uint32_t iteration,
                     int64_t at) {
  Event& event = add(rank, kControl, Kind::tensor_done, Shape::instant, at, at);
  event.tensor = tensor;
  event.layer = static_cast<uint16_t>(layer);
  event.iteration = iteration;
  event.bytes = trace_.processes[rank].model.tensors[tensor].bytes;
}

void Recording::admitted(uint32_t operation, const schedule::Piece& piece, uint32_t iteration,
                         int64_t at) {
  Event& event = add(0, kControl, Kind::admitted, Shape::instant, at, at);
  event.operation = operation;
  event.bucket = piece.bucket;
  event.partition = piece.partition;
  event.iteration = iteration;
  event.bytes = piece.elements * schedule::kElementBytes;
}

void Recording::operation(uint32_t rank, uint32_t operation, const schedule::Piece& piece,
                          uint32_t iteration, int64_t start, int64_t end) {
  Event& event = add(rank, kOperations, Kind::operation, Shape::span, start, end);
  event.operation = operation;
  event.bucket = piece.bucket;
  event.partition = piece.partition;
  event.iteration = iteration;
  event.bytes = piece.elements * schedule::kElementBytes;
}

void Recording::chunk(uint32_t rank, TrackId track, Shape shape, uint16_t lane, uint32_t peer,
                      const Chunk& chunk, int64_t start, int64_t end) {
  Event& event = add(rank, track, Kind::chunk, shape, start, end);
  event.message = chunk.message;
  event.bytes = chunk.bytes;
  event.operation = chunk.operation;
  event.chunk = chunk.id.chunk;
  event.step = chunk.id.step;
  event.iteration = chunk.iteration;
  event.lane = lane;
  event.peer = static_cast<uint16_t>(peer);
}

TrackId Recording::lanes_between(uint32_t rank, uint32_t peer, TrackType type) {
  bool out = type == TrackType::lane_out;
  TrackId& first = (out ? outgoing_ : incoming_)[uint64_t{rank} * ranks_ + peer];
  if (first != 0) return first;
  std::vector<trace::Track>& all = trace_.processes[rank].tracks;
  first = static_cast<TrackId>(all.size());
  for (uint32_t i = 0; i < lanes_; ++i)
    all.push_back({type, text("lane %u %s rank %u", i, out ? "to" : "from", peer),
                   static_cast<uint16_t>(i), static_cast<uint16_t>(peer)});
  return first;
}

void Recording::sent(uint32_t rank, uint32_t to, uint16_t lane, const Chunk& chunk_sent,
                     int64_t start, int64_t end) {
  auto track = static_cast<TrackId>(lanes_between(rank, to, TrackType::lane_out) + lane);
  chunk(rank, track, Shape::send, lane, to, chunk_sent, start, end);
}

void Recording::received(uint32_t rank, uint32_t from, uint16_t lane, const Chunk& chunk_received,
                         int64_t start, int64_t end) {
  auto track = static_cast<TrackId>(lanes_between(rank, from, TrackType::lane_in) + lane);
  chunk(rank, track, Shape::receive, lane, from, chunk_received, start, end);
}

trace::Trace Recording::take() && {
  for (trace::Process& process : trace_.processes) process.sort();
  return std::move(trace_);
}

}  // namespace weft::replay
