#include <algorithm>
#include <array>
#include <cstring>

#include "weft/collective.h"

namespace weft::collective {

using schedule::ChunkId;
using schedule::ChunkRange;
using transport::ChunkHeader;
using transport::Landing;
using transport::Moment;
using transport::OutgoingChunk;

namespace {

constexpr size_t kRoundsPerPoll = 4;

constexpr std::array<const char*, 5> kTcpFields = {
    "round_trip_us", "congestion_window", "retransmitted", "unsent_bytes", "delivery_bytes_per_s"};

ChunkId id_of(const ChunkHeader& header) { return {header.step, header.chunk}; }

std::string signature(uint8_t collective, uint64_t elements, uint32_t root) {
  return text("%s of %llu elements%s",
              schedule::name_of(static_cast<schedule::Collective>(collective)),
              static_cast<unsigned long long>(elements),
              collective == static_cast<uint8_t>(schedule::Collective::broadcast)
                  ? text(" from rank %u", root).c_str()
                  : "");
}

}  // namespace

Engine::Engine(const Options& options, transport::Reactor& reactor, std::vector<Fd> lanes_out,
               std::vector<Fd> lanes_in, capture::Recorder& recorder, OnLost on_lost)
    : options_(options),
      recorder_(recorder),
      clock_(recorder),
      on_lost_(std::move(on_lost)),
      next_rank_((options.rank.index + 1) % options.ranks),
      previous_rank_((options.rank.index + options.ranks - 1) % options.ranks),
      // Ranks number their messages in ranges of their own; 0 stays free for "none".
      next_message_((uint64_t{options.rank.index} + 1) << 40),
      last_change_(monotonic_clock().now()) {
  operation_track_ =
      recorder_.track({trace::TrackType::stream, "operations", trace::kNone16, trace::kNone16});
  transport::ChunkHandler& handler = *this;
  size_t count = lanes_out.size();
  WEFT_CHECK(lanes_in.size() == count);
  scratch_.resize(count);
  landing_early_.resize(count);
  landing_.resize(count);
  uint32_t unsent = cost::unsent_limit(options.chunk_elements * schedule::kElementBytes);
  auto open = [&](std::vector<Fd>& sockets, size_t first, uint32_t peer, trace::TrackType type,
                  const char* format, std::vector<std::unique_ptr<transport::Lane>>& lanes) {
    for (size_t i = 0; i < count; ++i) {
      tracks_.push_back(recorder_.track({type, text(format, static_cast<unsigned>(i), peer),
                                         static_cast<uint16_t>(i), static_cast<uint16_t>(peer)}));
      lanes.push_back(std::make_unique<transport::Lane>(
          reactor, std::move(sockets[i]), static_cast<uint16_t>(first + i), handler, clock_, unsent,
          [this, peer](uint16_t, Error error) { on_lost_({peer}, std::move(error)); }));
    }
  };
  open(lanes_out, 0, next_rank_, trace::TrackType::lane_out, "lane %u to rank %u", out_);
  open(lanes_in, count, previous_rank_, trace::TrackType::lane_in, "lane %u from rank %u", in_);
  for (const char* field : kTcpFields) tcp_names_.push_back(recorder_.name(field));
}

Engine::~Engine() = default;

void Engine::start(Operation operation) {
  WEFT_CHECK(!running_.contains(operation.number));
  uint64_t elements = operation.buffer.elements();
  uint32_t number = operation.number;
  schedule::RingSteps steps(operation.collective, options_.rank, options_.ranks, elements,
                            options_.chunk_elements, operation.root);
  auto [place, inserted] =
      running_.emplace(number, Running{std::move(operation), std::move(steps), recorder_.now()});
  Running& running = place->second;
  running.bytes_total = elements * schedule::kElementBytes;
  last_change_ = monotonic_clock().now();
  for (ChunkId id : running.steps.start()) offer(running, id);

  if (auto waiting = early_.find(number); waiting != early_.end()) {
    std::vector<Early> chunks = std::move(waiting->second);
    early_.erase(waiting);
    for (const Early& chunk : chunks)
      if (auto taken = absorb_early(running, chunk); !taken) {
        on_lost_({previous_rank_}, std::move(taken).error());
        return;
      }
  }
  for (auto& lane : in_) lane->resume();
  finish_if_done(running);
}

void Engine::halt() {
  more_to_send_ = false;
  for (auto* lanes : {&out_, &in_})
    for (auto& lane : *lanes) lane->halt();
}

std::vector<uint32_t> Engine::poll() {
  // Round and round over the lanes, a chunk each, until the chunks or the room are used up. A few
  // rounds at most: on a fast path there is always room, and what arrives must not wait for it.
  size_t refused = 0, turns = kRoundsPerPoll * out_.size();
  while (!dispatch_.empty() && refused < out_.size() && turns-- > 0) {
    bool took = out_[next_lane_]->send_one();
    refused = took ? 0 : refused + 1;
    next_lane_ = (next_lane_ + 1) % out_.size();
  }
  more_to_send_ = !dispatch_.empty() && refused < out_.size();
  for (uint32_t number : finished_) running_.erase(number);
  return std::exchange(finished_, {});
}

void Engine::offer(const Running& running, ChunkId id) {
  dispatch_.push({running.operation.priority, running.operation.number, id});
}

bool Engine::take(uint16_t lane, OutgoingChunk& out) {
  if (lane >= lane_count()) return false;
  auto entry = dispatch_.pop();
  if (!entry) return false;
  Running& running = running_.at(entry->operation);
  ChunkRange range = running.steps.outgoing(entry->id);
  ChunkHeader& header = out.header;
  header = {};
  header.collective = static_cast<uint8_t>(running.operation.collective);
  header.step = entry->id.step;
  header.operation = entry->operation;
  header.chunk = entry->id.chunk;
  header.elements = running.operation.buffer.elements();
  header.first = range.first;
  header.length = static_cast<uint32_t>(range.elements * schedule::kElementBytes);
  header.root = running.operation.root.index;
  header.message = next_message_++;
  running.operation.buffer.slice(range.first, range.elements, [&](std::span<float> part) {
    out.payload.push_back(std::as_bytes(part));
  });
  return true;
}

void Engine::sent(uint16_t lane, const ChunkHeader& header, Moment when) {
  last_change_ = monotonic_clock().now();
  record_chunk(trace::Shape::send, lane, header, when);
  Running& running = running_.at(header.operation);
  running.steps.sent(id_of(header));
  finish_if_done(running);
}

// What a peer sends must be what this rank expects of that operation, to the letter.
Result<ChunkRange> Engine::check(const Running& running, const ChunkHeader& header) const {
  const Operation& operation = running.operation;
  auto collective = static_cast<uint8_t>(operation.collective);
  if (header.collective != collective || header.elements != operation.buffer.elements() ||
      header.root != operation.root.index)
    return error(Code::invalid_argument,
                 "operation %u is %s on rank %u, but %s on rank %u: all ranks must call the same",
                 header.operation,
                 signature(header.collective, header.elements, header.root).c_str(), previous_rank_,
                 signature(collective, operation.buffer.elements(), operation.root.index).c_str(),
                 options_.rank.index);
  WEFT_ASSIGN(ChunkRange range, running.steps.arriving(id_of(header)));
  if (is_landing(header))
    return error(Code::corrupt, "operation %u: chunk %u of step %u comes on two lanes at once",
                 header.operation, header.chunk, unsigned{header.step});
  if (header.first != range.first || header.length != range.elements * schedule::kElementBytes)
    return error(Code::corrupt, "operation %u: chunk %u of step %u is not cut as it is here",
                 header.operation, header.chunk, unsigned{header.step});
  return range;
}

// Whether a lane is receiving this chunk into its place right now.
bool Engine::is_landing(const ChunkHeader& header) const {
  return std::any_of(landing_.begin(), landing_.end(), [&](const std::optional<Place>& place) {
    return place && place->operation == header.operation && place->id == id_of(header);
  });
}

Result<Landing> Engine::arriving(uint16_t lane, const ChunkHeader& header) {
  if (lane < lane_count()) return error(Code::corrupt, "data on a lane that only sends");
  size_t in_lane = lane - lane_count();
  auto found = running_.find(header.operation);
  if (found == running_.end()) {
    // Not started here yet: keep it aside, unless that would be too much.
    if (early_bytes_ + header.length > options_.early_bytes_limit && early_bytes_ > 0)
      return Landing{true, {}};
    auto early = std::make_unique<Early>();
    early->payload.resize(header.length);
    early_bytes_ += header.length;
    Landing landing{false, {std::span(early->payload)}};
    landing_early_[in_lane] = std::move(early);
    return landing;
  }
  WEFT_ASSIGN(ChunkRange range, check(found->second, header));
  landing_[in_lane] = Place{header.operation, id_of(header)};
  if (range.reduce) {
    std::vector<std::byte>& scratch = scratch_[in_lane];
    scratch.resize(std::max<size_t>(scratch.size(), header.length));
    return Landing{false, {std::span(scratch).first(header.length)}};
  }
  Landing landing;
  found->second.operation.buffer.slice(range.first, range.elements, [&](std::span<float> part) {
    landing.payload.push_back(std::as_writable_bytes(part));
  });
  return landing;
}

Result<void> Engine::arrived(uint16_t lane, const ChunkHeader& header, Moment when) {
  last_change_ = monotonic_clock().now();
  size_t in_lane = lane - lane_count();
  auto found = running_.find(header.operation);
  if (std::unique_ptr<Early> early = std::move(landing_early_[in_lane])) {
    early->lane = lane;
    early->header = header;
    early->when = when;
    // Perhaps its operation was started while the payload was on its way.
    if (found != running_.end()) return absorb_early(found->second, *early);
    early_[header.operation].push_back(std::move(*early));
    return {};
  }
  // arriving() lets a chunk in once, so its operation cannot have ended without it.
  landing_[in_lane].reset();
  WEFT_CHECK(found != running_.end());
  record_chunk(trace::Shape::receive, lane, header, when);
  absorb(found->second, header, scratch_[in_lane].data());
  return {};
}

Result<void> Engine::absorb_early(Running& running, const Early& early) {
  early_bytes_ -= early.payload.size();
  WEFT_ASSIGN(ChunkRange range, check(running, early.header));
  if (!range.reduce) {
    const std::byte* from = early.payload.data();
    running.operation.buffer.slice(range.first, range.elements, [&](std::span<float> part) {
      std::memcpy(part.data(), from, part.size_bytes());
      from += part.size_bytes();
    });
  }
  record_chunk(trace::Shape::receive, early.lane, early.header, early.when);
  absorb(running, early.header, early.payload.data());
  return {};
}

// The chunk is here and sound; what must be added comes from `reduced_from`.
void Engine::absorb(Running& running, const ChunkHeader& header, const std::byte* reduced_from) {
  ChunkRange range = *running.steps.arriving(id_of(header));
  if (range.reduce) {
    const auto* from = reinterpret_cast<const float*>(reduced_from);
    running.operation.buffer.slice(range.first, range.elements, [&](std::span<float> part) {
      add_to(part, from);
      from += part.size();
    });
  }
  running.bytes_done += header.length;
  if (auto next = running.steps.received(id_of(header))) offer(running, *next);
  finish_if_done(running);
}

void Engine::finish_if_done(Running& running) {
  if (!running.steps.finished()) return;
  uint32_t number = running.operation.number;
  // A zero-length operation may be found finished twice in one turn.
  if (std::find(finished_.begin(), finished_.end(), number) != finished_.end()) return;
  finished_.push_back(number);
  trace::Event event;
  event.start_ns = running.since.count;
  event.duration_ns = (recorder_.now() - running.since).count;
  event.bytes = running.bytes_total;
  event.operation = number;
  event.iteration = running.operation.iteration;
  event.bucket = running.operation.bucket;
  event.partition = running.operation.partition;
  event.track = operation_track_;
  event.shape = trace::Shape::span;
  event.kind = running.operation.kind;
  recorder_.record(event);
}

void Engine::record_chunk(trace::Shape shape, uint16_t lane, const ChunkHeader& header,
                          Moment when) {
  trace::Event event;
  event.start_ns = when.first.count;
  event.duration_ns = (when.last - when.first).count;
  event.message = header.message;
  event.bytes = header.length;
  event.operation = header.operation;
  event.chunk = header.chunk;
  event.step = header.step;
  event.track = tracks_[lane];
  event.lane = static_cast<uint16_t>(lane % lane_count());
  event.peer = static_cast<uint16_t>(shape == trace::Shape::send ? next_rank_ : previous_rank_);
  event.shape = shape;
  event.kind = trace::Kind::chunk;
  if (auto found = running_.find(header.operation); found != running_.end()) {
    event.iteration = found->second.operation.iteration;
    event.bucket = found->second.operation.bucket;
    event.partition = found->second.operation.partition;
  }
  recorder_.record(event);
}

Progress Engine::progress() const {
  Progress out;
  out.last_change = last_change_;
  for (const auto& [number, running] : running_) {
    if (out.operations++ == 0 || number < out.oldest) {
      out.oldest = number;
      out.bytes_done = running.bytes_done;
      out.bytes_total = running.bytes_total;
    }
    if (!running.steps.finished()) out.waits_for_previous = true;
  }
  out.waits_for_next = !dispatch_.empty();
  return out;
}

void Engine::record_tcp_info() {
  for (size_t i = 0; i < out_.size(); ++i) {
    auto info = out_[i]->tcp_info();
    if (!info) continue;
    std::array<uint64_t, kTcpFields.size()> values = {info->round_trip_us, info->congestion_window,
                                                      info->retransmitted, info->unsent_bytes,
                                                      info->delivery_bytes_per_s};
    trace::Event event;
    event.start_ns = recorder_.now().count;
    event.shape = trace::Shape::counter;
    event.kind = trace::Kind::tcp_info;
    event.track = tracks_[i];
    event.lane = static_cast<uint16_t>(i);
    event.peer = static_cast<uint16_t>(next_rank_);
    for (size_t field = 0; field < values.size(); ++field) {
      event.name = tcp_names_[field];
      event.duration_ns = static_cast<int64_t>(values[field]);
      recorder_.record(event);
    }
  }
}

}  // namespace weft::collective
