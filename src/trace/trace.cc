#include "weft/trace.h"

#include <algorithm>

#include "format.h"

namespace weft::trace {

// ---- names -------------------------------------------------------------------------------

const char* name_of(Shape shape) {
  switch (shape) {
    case Shape::span: return "span";
    case Shape::instant: return "instant";
    case Shape::counter: return "counter";
    case Shape::send: return "send";
    case Shape::receive: return "receive";
  }
  return "unknown";
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::other: return "other";
    case Kind::iteration: return "iteration";
    case Kind::forward: return "forward";
    case Kind::backward: return "backward";
    case Kind::update: return "update";
    case Kind::gradient_ready: return "gradient_ready";
    case Kind::tensor_done: return "tensor_done";
    case Kind::operation: return "operation";
    case Kind::chunk: return "chunk";
    case Kind::wait: return "wait";
    case Kind::barrier: return "barrier";
    case Kind::broadcast: return "broadcast";
    case Kind::control: return "control";
    case Kind::tcp_info: return "tcp_info";
    case Kind::reduce: return "reduce";
    case Kind::probe: return "probe";
    case Kind::admitted: return "admitted";
    case Kind::processor_time: return "processor_time";
    case Kind::data_loading: return "data_loading";
    case Kind::host: return "host";
    case Kind::memory: return "memory";
  }
  return "unknown";
}

const char* name_of(TrackType type) {
  switch (type) {
    case TrackType::thread: return "thread";
    case TrackType::stream: return "stream";
    case TrackType::lane_out: return "lane_out";
    case TrackType::lane_in: return "lane_in";
    case TrackType::control: return "control";
  }
  return "unknown";
}

const char* name_of(ProbeType type) {
  switch (type) {
    case ProbeType::rate: return "rate";
    case ProbeType::copy: return "copy";
    case ProbeType::reduce: return "reduce";
    case ProbeType::checksum: return "checksum";
  }
  return "unknown";
}

const char* name_of(ProbeScope scope) {
  switch (scope) {
    case ProbeScope::local: return "local";
    case ProbeScope::pair: return "pair";
    case ProbeScope::ring: return "ring";
  }
  return "unknown";
}

bool is_known(Shape shape) { return shape >= Shape::span && shape <= Shape::receive; }
bool is_known(Kind kind) { return kind <= Kind::memory; }
bool is_known(TrackType type) { return type >= TrackType::thread && type <= TrackType::control; }
bool is_known(ProbeType type) { return type >= ProbeType::rate && type <= ProbeType::checksum; }
bool is_known(ProbeScope scope) { return scope <= ProbeScope::ring; }

std::string file_name(uint32_t rank) { return text("rank-%u.weft", rank); }

Event processor_time_of(const Event& span, int64_t ns) {
  Event out;
  out.start_ns = span.start_ns;
  out.duration_ns = ns;
  out.track = span.track;
  out.iteration = span.iteration;
  out.layer = span.layer;
  out.tensor = span.tensor;
  out.shape = Shape::counter;
  out.kind = Kind::processor_time;
  return out;
}

// ---- what may stand in a file ------------------------------------------------------------

const char* flaw_of(const Event& event) {
  if (!is_known(event.shape)) return "unknown shape";
  if (event.reserved != 0) return "the reserved field is not 0";
  if (event.start_ns > kMaxTime || event.start_ns < -kMaxTime) return "start out of range";
  if (event.shape == Shape::counter) return nullptr;
  if (event.duration_ns < 0) return "negative duration";
  if (event.duration_ns > kMaxDuration) return "duration out of range";
  if (event.shape == Shape::instant && event.duration_ns != 0) return "an instant that lasts";
  return nullptr;
}

const char* flaw_of(const Environment& environment) {
  if (environment.ranks == 0) return "no ranks";
  if (environment.rank >= environment.ranks) return "rank is not below the number of ranks";
  // Said so that no number at all is refused too.
  if (!(environment.dilation >= 1 && environment.dilation <= kMaxFactor))
    return "dilation is not a number from 1 to 1000000";
  if (!(environment.shrink >= 1 && environment.shrink <= kMaxFactor))
    return "shrink is not a number from 1 to 1000000";
  return nullptr;
}

const char* flaw_of(const Model& model) {
  if (model.layers.size() >= kNone16) return "too many layers";
  if (model.tensors.size() >= kNone) return "too many tensors";
  for (const Tensor& tensor : model.tensors) {
    for (uint32_t layer : {tensor.produced_by, tensor.updated_by, tensor.consumed_by}) {
      if (layer != kNone && layer >= model.layers.size())
        return "a tensor names a layer that is not there";
    }
  }
  return nullptr;
}

const char* flaw_of(const PingSample& ping) {
  if (ping.loaded > 1) return "loaded is neither 0 nor 1";
  for (int64_t t : {ping.t0, ping.t1, ping.t2, ping.t3}) {
    if (t > kMaxTime || t < -kMaxTime) return "time out of range";
  }
  return nullptr;
}

const char* flaw_of(const ProbeResult& result) {
  if (!is_known(result.type)) return "unknown type";
  if (!is_known(result.scope)) return "unknown scope";
  if (result.reverse > 1) return "reverse is neither 0 nor 1";
  if (result.reserved != 0) return "the reserved field is not 0";
  if (result.duration_ns < 0 || result.duration_ns > kMaxDuration) return "duration out of range";
  return nullptr;
}

// ---- Process and Trace -------------------------------------------------------------------

void Process::sort() {
  // Stable: of two equal spans, the one recorded first stays the outer one.
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    if (a.start_ns != b.start_ns) return a.start_ns < b.start_ns;
    return a.end_ns() > b.end_ns();
  });
}

std::string Process::label(const Event& event) const {
  if (event.name < names.size() && !names[event.name].empty()) return names[event.name];
  std::string out = name_of(event.kind);
  if (event.layer < model.layers.size()) {
    out += ' ';
    out += model.layers[event.layer].name;
  } else if (event.tensor < model.tensors.size()) {
    out += ' ';
    out += model.tensors[event.tensor].name;
  } else if (event.bucket != kNone) {
    out += text(" bucket %u", event.bucket);
    if (event.partition != kNone16) out += text(".%u", event.partition);
  } else if (event.operation != kNone) {
    out += text(" %u", event.operation);
  } else if (event.kind == Kind::iteration && event.iteration != kNone) {
    out += text(" %u", event.iteration);
  }
  return out;
}

const Process* Trace::of_rank(uint32_t rank) const {
  for (const Process& process : processes) {
    if (process.environment.rank == rank) return &process;
  }
  return nullptr;
}

}  // namespace weft::trace
