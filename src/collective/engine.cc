// Operations: from their start, chunk by chunk, to their end.
#include <algorithm>
#include <cstring>
#include <new>
#include <tuple>

#include "keys.h"

namespace weft::collective {

using lane::ChunkHeader;
using lane::Moment;
using lane::OutgoingChunk;
using schedule::Collective;
using schedule::Receive;
using schedule::Send;
using schedule::Space;

namespace {

constexpr size_t kSpareEarly = 8;  // buffers of early chunks that are kept
constexpr size_t kEnded = 4096;    // operations that are remembered after their end

std::string describe(uint8_t collective, uint8_t type, uint8_t op, uint16_t root,
                     uint64_t elements) {
  auto what = static_cast<Collective>(collective);
  std::string out =
      text("%s of %llu %s", schedule::name_of(what), static_cast<unsigned long long>(elements),
           reduce::name_of(static_cast<reduce::Type>(type)));
  if (what == Collective::all_reduce || what == Collective::reduce_scatter ||
      what == Collective::reduce)
    out += text(" (%s)", reduce::name_of(static_cast<reduce::Op>(op)));
  if (what == Collective::broadcast || what == Collective::reduce || what == Collective::gather ||
      what == Collective::scatter)
    out += text(" with root %u", unsigned{root});
  return out;
}

trace::Kind kind_of(Collective collective) {
  switch (collective) {
    case Collective::broadcast: return trace::Kind::broadcast;
    case Collective::barrier: return trace::Kind::barrier;
    default: return trace::Kind::operation;
  }
}

bool has_op(Collective collective) {
  return collective == Collective::all_reduce || collective == Collective::reduce_scatter ||
         collective == Collective::reduce;
}

// Calls f(a's memory, b's memory, bytes) for stretches that are contiguous in both.
template <typename F>
void slice_together(const Buffer& a, uint64_t first_a, const Buffer& b, uint64_t first_b,
                    uint64_t count, F&& f) {
  a.slice(first_a, count, [&](std::span<std::byte> part) {
    std::byte* at = part.data();
    b.slice(first_b, part.size(), [&](std::span<std::byte> other) {
      f(at, other.data(), other.size());
      at += other.size();
    });
    first_b += part.size();
  });
}

}  // namespace

Key key_of(const Operation& operation) {
  if (operation.shape.collective == Collective::point_to_point) {
    uint32_t peer =
        operation.members ? (*operation.members)[operation.shape.root] : operation.shape.root;
    return pair_key(operation.group, peer, operation.shape.sends, operation.number);
  }
  return {operation.group, 0, operation.number};
}

size_t KeyHash::operator()(const Key& key) const {
  uint64_t mixed = (uint64_t{key.group} << 32 | key.pair) * 0x9e3779b97f4a7c15 + key.number;
  return static_cast<size_t>((mixed ^ (mixed >> 29)) * 0xbf58476d1ce4e5b9);
}

uint32_t trace_number(const Key& key) {
  uint32_t low = static_cast<uint32_t>(key.number) & (kExchangeGroup - 1);
  return key.group == kExchangeGroup ? low : low | kExchangeGroup;
}

uint32_t Engine::global(const Operation& operation, uint32_t member) const {
  return operation.members ? (*operation.members)[member] : member;
}

const Buffer& Engine::space_of(const Running& running, Space space) {
  switch (space) {
    case Space::input: return running.operation.input;
    case Space::output: return running.operation.output;
    case Space::temporary: break;
  }
  return running.temporary_buffer;
}

// What an operation needs beside its data: nothing for the most usual ones.
void Engine::prepare_memory(Running& running) {
  const schedule::Program& program = running.steps.program();
  Operation& operation = running.operation;
  size_t size = reduce::size_of(operation.type);
  if (uint64_t elements = program.temporary_elements(); elements > 0) {
    if (!spare_.empty()) {
      running.temporary = std::move(spare_.back());
      spare_.pop_back();
    }
    if (running.temporary.size() < elements * size) running.temporary.resize(elements * size);
    running.temporary_buffer.add(std::span(running.temporary).first(elements * size));
  }
  running.wide.resize(program.wide_elements());
  if (program.in_place() || operation.input.bytes() == 0) return;
  const std::byte *from = nullptr, *to = nullptr;
  operation.input.slice(0, 1, [&](std::span<std::byte> part) { from = part.data(); });
  operation.output.slice(0, std::min<uint64_t>(1, operation.output.bytes()),
                         [&](std::span<std::byte> part) { to = part.data(); });
  if (from != to) return;
  running.input_copy.resize(operation.input.bytes());
  std::byte* at = running.input_copy.data();
  operation.input.slice(0, operation.input.bytes(), [&](std::span<std::byte> part) {
    std::memcpy(at, part.data(), part.size());
    at += part.size();
  });
  operation.input = Buffer();
  operation.input.add(running.input_copy);
}

Result<void> Engine::start(Operation operation) {
  Key key = key_of(operation);
  if (running_.contains(key))
    return error(Code::invalid_argument,
                 "operation %llu of group %08x is running already: two groups have the same number",
                 static_cast<unsigned long long>(key.number), key.group);
  Signature what{static_cast<uint8_t>(operation.shape.collective),
                 static_cast<uint8_t>(operation.type), static_cast<uint8_t>(operation.op),
                 static_cast<uint16_t>(operation.shape.root), operation.shape.elements};
  uint64_t order = next_order_++;
  try {
    size_t size = reduce::size_of(operation.type);
    const uint64_t chunk_bytes =
        operation.chunk_bytes > 0 ? operation.chunk_bytes : options_.chunk_bytes;
    operation.shape.chunk_elements = std::max<uint64_t>(1, chunk_bytes / size);
    schedule::Steps steps(programs_.get(operation.shape));
    Running& running =
        running_.emplace(key, Running(std::move(operation), std::move(steps), recorder_.now()))
            .first->second;
    running.order = order;
    by_order_.emplace(order, &running);
    begin(running);
  } catch (const std::bad_alloc&) {
    dispatcher_.withdraw(order);
    by_order_.erase(order);
    running_.erase(key);
    return error(Code::exhausted, "not enough memory for %s",
                 describe(what.collective, what.type, what.op, what.root, what.elements).c_str());
  }
  return {};
}

void Engine::begin(Running& running) {
  Key key = key_of(running.operation);
  size_t size = reduce::size_of(running.operation.type);
  const schedule::Program& program = running.steps.program();
  running.queued.resize(running.operation.shape.ranks);
  running.unsettled.resize(running.operation.shape.ranks);
  running.taken.resize(program.receives().size());
  for (const Receive& receive : program.receives()) running.bytes_total += receive.elements * size;
  last_change_ = running.last_change = mesh_.network->clock().now();
  prepare_memory(running);
  for (const schedule::Copy& copy : program.copies())
    slice_together(running.operation.output, copy.to * size, running.operation.input,
                   copy.from * size, copy.elements * size,
                   [](std::byte* to, const std::byte* from, size_t bytes) {
                     if (to != from) std::memmove(to, from, bytes);
                   });
  ready_sends_.clear();
  running.steps.start(ready_sends_);
  for (uint32_t send : ready_sends_) offer(running, send);

  if (auto waiting = early_.find(key); waiting != early_.end()) {
    std::vector<Early> chunks = std::move(waiting->second);
    early_.erase(waiting);
    for (Early& chunk : chunks)
      if (auto taken = absorb_early(running, chunk); !taken) {
        on_lost_({chunk.line.peer}, std::move(taken).error());
        return;
      }
  }
  if (std::exchange(paused_any_, false))
    for (Slot& slot : slots_)
      if (slot.lane && !slot.outgoing) slot.lane->resume();
  finish_if_done(running);
}

void Engine::offer(Running& running, uint32_t send) {
  const Send& what = running.steps.program().sends()[send];
  uint32_t rank = global(running.operation, what.peer);
  open_lanes(rank);
  auto bytes = static_cast<uint32_t>(what.elements * reduce::size_of(running.operation.type));
  dispatcher_.offer(rank, {running.operation.priority, running.order, send, bytes});
  ++running.queued[what.peer];
  ++running.unsettled[what.peer];
}

std::vector<std::byte> Engine::copy_of(const Running& running, uint32_t send) {
  const Send& what = running.steps.program().sends()[send];
  size_t size = reduce::size_of(running.operation.type);
  std::vector<std::byte> out;
  out.reserve(what.elements * size);
  space_of(running, what.space)
      .slice(what.first * size, what.elements * size,
             [&](std::span<std::byte> part) { out.insert(out.end(), part.begin(), part.end()); });
  return out;
}

// ---- sending -----------------------------------------------------------------------------

bool Engine::take(uint32_t lane, OutgoingChunk& out) {
  if (!handing_) return false;
  schedule::Dispatcher::HandOver what = *std::exchange(handing_, std::nullopt);
  WEFT_CHECK(slots_[lane].peer == what.peer && slots_[lane].number == what.lane);
  out.token = what.ticket;
  out.keep = what.keep;
  if (what.again) {
    Resend& again = resends_.at(what.ticket);
    out.header = again.header;
    out.payload.push_back(again.payload);
    return true;
  }
  Running& running = *by_order_.at(what.chunk.operation);
  const Operation& operation = running.operation;
  const Send& send = running.steps.program().sends()[what.chunk.send];
  --running.queued[send.peer];
  size_t size = reduce::size_of(operation.type);
  Signature signature = signature_of(running, send.peer, true);
  ChunkHeader& header = out.header;
  header = {};
  header.collective = signature.collective;
  header.type = signature.type;
  header.op = signature.op;
  header.root = signature.root;
  header.elements = signature.elements;
  header.group = operation.group;
  header.operation = operation.number;
  header.step = send.id.step;
  header.chunk = send.id.chunk;
  header.first = send.offset;
  header.length = what.chunk.bytes;
  header.message = next_message_++;
  space_of(running, send.space)
      .slice(send.first * size, send.elements * size,
             [&](std::span<std::byte> part) { out.payload.push_back(part); });
  return true;
}

void Engine::sent(uint32_t lane, const ChunkHeader& header, uint64_t, Moment when) {
  last_change_ = peers_[slots_[lane].peer].last_sent = mesh_.network->clock().now();
  if (auto found = running_.find(chunk_key(header, slots_[lane].peer, true));
      found != running_.end())
    found->second.last_change = last_change_;
  record_chunk(trace::Shape::send, slots_[lane].line(), header, when);
  if (auto settled = dispatcher_.left(slots_[lane].peer, slots_[lane].number)) settle(*settled);
}

void Engine::receipted(uint32_t lane, const ChunkHeader&, uint64_t) {
  if (auto settled = dispatcher_.receipted(slots_[lane].peer, slots_[lane].number))
    settle(*settled);
}

void Engine::settle(const schedule::Dispatcher::Settled& settled) {
  resends_.erase(settled.ticket);
  if (!settled.first) return;
  Running& running = *by_order_.at(settled.chunk.operation);
  running.steps.sent(settled.chunk.send);
  --running.unsettled[running.steps.program().sends()[settled.chunk.send].peer];
  running.last_change = mesh_.network->clock().now();
  finish_if_done(running);
}

// ---- receiving ---------------------------------------------------------------------------

// Both sides of a message must agree on these. Where ranks have different totals, the total is
// that of the message between the two.
Engine::Signature Engine::signature_of(const Running& running, uint32_t peer, bool outgoing) {
  const Operation& operation = running.operation;
  const schedule::OperationShape& shape = operation.shape;
  Signature out{static_cast<uint8_t>(shape.collective), static_cast<uint8_t>(operation.type),
                has_op(shape.collective) ? static_cast<uint8_t>(operation.op) : uint8_t{0},
                static_cast<uint16_t>(shape.root), shape.elements};
  if (shape.collective == Collective::all_to_all && !shape.counts.empty())
    out.elements = (outgoing ? shape.counts : shape.receive_counts)[peer];
  if (shape.collective == Collective::point_to_point) out.root = 0;
  return out;
}

Error Engine::mismatch(uint32_t peer, const ChunkHeader& header, const Signature& own) const {
  return error(
      Code::invalid_argument,
      "operation %llu is %s on rank %u, but %s on rank %u: all ranks must call the same",
      static_cast<unsigned long long>(header.operation),
      describe(header.collective, header.type, header.op, header.root, header.elements).c_str(),
      peer, describe(own.collective, own.type, own.op, own.root, own.elements).c_str(),
      mesh_.rank.index);
}

// What a peer sends must be what this rank expects of that operation, to the letter. The index of
// the receive that it is.
Result<uint32_t> Engine::check(const Running& running, uint32_t peer,
                               const ChunkHeader& header) const {
  const Operation& operation = running.operation;
  uint32_t member = peer;
  if (operation.members) {
    const std::vector<uint32_t>& members = *operation.members;
    auto found = std::find(members.begin(), members.end(), peer);
    if (found == members.end())
      return error(Code::corrupt, "operation %llu: rank %u is not in its group",
                   static_cast<unsigned long long>(header.operation), peer);
    member = static_cast<uint32_t>(found - members.begin());
  }
  Signature own = signature_of(running, member, false);
  Signature theirs{header.collective, header.type, header.op, header.root, header.elements};
  if (theirs != own) return mismatch(peer, header, own);
  auto receive = running.steps.program().find(member, {header.step, header.chunk});
  if (!receive)
    return error(Code::corrupt, "operation %llu: chunk %u of step %u is not due from rank %u",
                 static_cast<unsigned long long>(header.operation), header.chunk,
                 unsigned{header.step}, peer);
  const Receive& expected = running.steps.program().receives()[*receive];
  if (header.first != expected.offset ||
      header.length != expected.elements * reduce::size_of(operation.type))
    return error(Code::corrupt, "operation %llu: chunk %u of step %u is not cut as it is here",
                 static_cast<unsigned long long>(header.operation), header.chunk,
                 unsigned{header.step});
  return *receive;
}

// A chunk that came twice has the bytes that it had before, unless it says that it is sent again
// from its place: that may have been used for what followed from its first arrival.
Result<void> Engine::is_the_same(const Running& running, uint32_t peer, uint32_t receive,
                                 const ChunkHeader& header) {
  uint64_t before = running.taken[receive];
  if (header.again || before == header.checksum || before == 0 || header.checksum == 0) return {};
  return error(Code::corrupt,
               "operation %llu: chunk %u of step %u came from rank %u twice, with different bytes",
               static_cast<unsigned long long>(header.operation), header.chunk,
               unsigned{header.step}, peer);
}

// Whether another lane is receiving this chunk right now: it was sent again.
bool Engine::lands_elsewhere(uint32_t lane, const Key& key, uint32_t receive) const {
  for (uint32_t i = 0; i < slots_.size(); ++i) {
    const Landing& landing = slots_[i].landing;
    if (i != lane && landing.where == Landing::Where::destination && landing.key == key &&
        landing.receive == receive)
      return true;
  }
  return false;
}

// The chunk is here. If the same one is on its way straight to its place over another lane, that
// lane must not write there any more: the operation may end now, and its owner have the memory
// back. Whoever sent the chunk again had given that lane up.
void Engine::give_up_landings(const Key& key, uint32_t receive) {
  for (uint32_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.landing.where != Landing::Where::destination || slot.landing.key != key ||
        slot.landing.receive != receive)
      continue;
    slot.landing.where = Landing::Where::nowhere;
    slot.lane->halt();
    slot.broken = true;
    broken_.push_back(i);
  }
}

Result<lane::Destination> Engine::arriving(uint32_t lane, const ChunkHeader& header,
                                           bool in_place) {
  Slot& slot = slots_[lane];
  if (slot.outgoing) return error(Code::corrupt, "data on a lane that only sends");
  Key key = chunk_key(header, slot.peer, false);
  auto to_scratch = [&] {
    if (in_place) return lane::Destination{false, true, {}};
    if (slot.scratch.size() < header.length) slot.scratch.resize(header.length);
    return lane::Destination{false, false, {std::span(slot.scratch).first(header.length)}};
  };
  auto found = running_.find(key);
  if (found == running_.end()) {
    if (auto ended = ended_.find(key); ended != ended_.end()) {
      Signature theirs{header.collective, header.type, header.op, header.root, header.elements};
      // Where each pair has its own total, that of this pair is not known any more.
      if (header.collective == static_cast<uint8_t>(Collective::all_to_all))
        theirs.elements = ended->second.elements;
      if (theirs != ended->second) return mismatch(slot.peer, header, ended->second);
      slot.landing = {Landing::Where::discard, key, 0};
      return to_scratch();
    }
    // Not started here yet: keep it aside, unless that would be too much.
    if (early_bytes_ + header.length > options_.early_bytes_limit && early_bytes_ > 0) {
      paused_any_ = true;
      return lane::Destination{true, false, {}};
    }
    slot.early = std::make_unique<Early>();
    slot.early->header = header;
    std::vector<std::byte>& payload = slot.early->payload;
    // Fresh memory costs more than the copy into it.
    if (!spare_early_.empty()) {
      payload = std::move(spare_early_.back());
      spare_early_.pop_back();
    }
    if (payload.size() < header.length) payload.resize(header.length);
    early_bytes_ += header.length;
    slot.landing = {Landing::Where::early, key, 0};
    return lane::Destination{false, false, {std::span(payload).first(header.length)}};
  }
  Running& running = found->second;
  WEFT_ASSIGN(uint32_t index, check(running, slot.peer, header));
  if (!running.steps.is_due(index)) {
    WEFT_TRY(is_the_same(running, slot.peer, index, header));
    slot.landing = {Landing::Where::discard, key, index};
    return to_scratch();
  }
  const Receive& receive = running.steps.program().receives()[index];
  bool straight = !receive.combine && !in_place && running.steps.may_apply(index) &&
                  !lands_elsewhere(lane, key, index);
  slot.landing = {straight ? Landing::Where::destination : Landing::Where::scratch, key, index};
  if (!straight) return to_scratch();
  lane::Destination landing;
  size_t size = reduce::size_of(running.operation.type);
  space_of(running, receive.space)
      .slice(receive.first * size, receive.elements * size,
             [&](std::span<std::byte> part) { landing.payload.push_back(part); });
  return landing;
}

Result<void> Engine::arrived(uint32_t lane, const ChunkHeader& header, const std::byte* payload,
                             Moment when) {
  last_change_ = mesh_.network->clock().now();
  Slot& slot = slots_[lane];
  if (header.wants_receipt && owed_.wanted()) owed_since_ = last_change_;
  Landing landing = std::exchange(slot.landing, Landing{Landing::Where::nowhere, {}, 0});
  if (landing.where == Landing::Where::discard) return {};
  auto found = running_.find(landing.key);
  if (landing.where == Landing::Where::early) {
    std::unique_ptr<Early> early = std::move(slot.early);
    early->line = slot.line();
    early->header = header;
    early->when = when;
    // Perhaps its operation was started while the payload was on its way.
    if (found != running_.end()) return absorb_early(found->second, *early);
    early_[landing.key].push_back(std::move(*early));
    return {};
  }
  // Sent again over another lane, it may have been taken meanwhile, and its operation be over.
  if (found == running_.end()) return {};
  if (!found->second.steps.is_due(landing.receive))
    return is_the_same(found->second, slot.peer, landing.receive, header);
  found->second.taken[landing.receive] = header.checksum;
  record_chunk(trace::Shape::receive, slot.line(), header, when);
  const std::byte* data = payload != nullptr ? payload : slot.scratch.data();
  take_in(found->second, landing.receive,
          landing.where == Landing::Where::destination ? nullptr : data);
  return {};
}

Result<void> Engine::absorb_early(Running& running, Early& early) {
  early_bytes_ -= early.header.length;
  WEFT_ASSIGN(uint32_t receive, check(running, early.line.peer, early.header));
  if (!running.steps.is_due(receive))
    return is_the_same(running, early.line.peer, receive, early.header);
  running.taken[receive] = early.header.checksum;
  record_chunk(trace::Shape::receive, early.line, early.header, early.when);
  take_in(running, receive, early.payload.data());
  if (spare_early_.size() < kSpareEarly) spare_early_.push_back(std::move(early.payload));
  return {};
}

// The chunk is here and sound: `data`, or in its place already when that is null.
void Engine::take_in(Running& running, uint32_t receive, const std::byte* data) {
  size_t size = reduce::size_of(running.operation.type);
  uint64_t bytes = running.steps.program().receives()[receive].elements * size;
  running.bytes_done += bytes;
  running.last_change = mesh_.network->clock().now();
  // Nothing more comes for this one: those who sent it may be waiting to hear so.
  if (running.bytes_done == running.bytes_total) owed_.received_all();
  ++running.chunks_done;
  give_up_landings(key_of(running.operation), receive);
  if (!running.steps.take(receive)) {
    WEFT_CHECK(data != nullptr);
    running.held[receive].assign(data, data + bytes);
    return;
  }
  apply(running, receive, data);
  // What it allows may allow more.
  std::vector<uint32_t> next = std::exchange(ready_receives_, {});
  while (!next.empty()) {
    uint32_t one = next.back();
    next.pop_back();
    auto held = running.held.extract(one);
    WEFT_CHECK(!held.empty());
    apply(running, one, held.mapped().data());
    next.insert(next.end(), ready_receives_.begin(), ready_receives_.end());
    ready_receives_.clear();
  }
  finish_if_done(running);
}

void Engine::apply(Running& running, uint32_t index, const std::byte* data) {
  const Receive& receive = running.steps.program().receives()[index];
  const Operation& operation = running.operation;
  size_t size = reduce::size_of(operation.type);
  uint64_t bytes = receive.elements * size;
  const Buffer& to = space_of(running, receive.space);
  const bool timed = recorder_.on() && (receive.wide || receive.combine);
  const Nanos begin = timed ? recorder_.now() : Nanos{0};
  if (receive.wide) {
    float* sums = running.wide.data() + receive.wide_at;
    if (receive.wide_opens) {
      float* at = sums;
      space_of(running, receive.with)
          .slice(receive.with_first * size, bytes, [&](std::span<std::byte> part) {
            reduce::widen(operation.type, at, part.data(), part.size() / size);
            at += part.size() / size;
          });
    }
    reduce::accumulate(operation.op, operation.type, sums, data, receive.elements);
    if (receive.wide_closes) {
      reduce::finish(operation.op, reduce::Type::float32, sums, receive.elements,
                     operation.shape.ranks);
      to.slice(receive.first * size, bytes, [&](std::span<std::byte> part) {
        reduce::narrow(operation.type, part.data(), sums, part.size() / size);
        sums += part.size() / size;
      });
    }
  } else if (receive.combine) {
    slice_together(
        to, receive.first * size, space_of(running, receive.with), receive.with_first * size, bytes,
        [&](std::byte* out, const std::byte* own, size_t count) {
          const std::byte* first = receive.received_first ? data : own;
          const std::byte* second = receive.received_first ? own : data;
          reduce::combine(operation.op, operation.type, out, first, second, count / size);
          data += count;
        });
  } else if (data != nullptr) {
    to.slice(receive.first * size, bytes, [&](std::span<std::byte> part) {
      std::memcpy(part.data(), data, part.size());
      data += part.size();
    });
  }
  if (timed) record_reduce(running, receive, begin);
  ready_sends_.clear();
  running.steps.applied(index, ready_sends_, ready_receives_);
  for (uint32_t send : ready_sends_) offer(running, send);
}

void Engine::finish_if_done(Running& running) {
  if (!running.steps.finished()) return;
  Operation& operation = running.operation;
  Key key = key_of(operation);
  // A zero-length operation may be found finished twice in one turn.
  if (std::find(finished_.begin(), finished_.end(), key) != finished_.end()) return;
  finished_.push_back(key);
  if (has_op(operation.shape.collective) && !operation.shape.wide)
    operation.output.slice(0, operation.output.bytes(), [&](std::span<std::byte> part) {
      reduce::finish(operation.op, operation.type, part.data(),
                     part.size() / reduce::size_of(operation.type), operation.shape.ranks);
    });
  if (!running.temporary.empty() && spare_.size() < 4)
    spare_.push_back(std::move(running.temporary));
  ended_[key] = signature_of(running, 0, false);
  ended_order_.push_back(key);
  if (ended_order_.size() > kEnded) {
    ended_.erase(ended_order_.front());
    ended_order_.pop_front();
  }
  trace::Event event;
  event.start_ns = running.since.count;
  event.duration_ns = (recorder_.now() - running.since).count;
  event.bytes = operation.shape.elements * reduce::size_of(operation.type);
  event.operation = trace_number(key);
  event.iteration = operation.iteration;
  event.bucket = operation.bucket;
  event.partition = operation.partition;
  event.track = operation_track_;
  event.shape = trace::Shape::span;
  event.kind = kind_of(operation.shape.collective);
  // Those of the exchange have a bucket to be called by.
  if (key.group != kExchangeGroup)
    event.name = collective_names_[static_cast<size_t>(operation.shape.collective)];
  recorder_.record(event);
}

// What the thread that moves things along did between arrival and the next send.
void Engine::record_reduce(const Running& running, const Receive& receive, Nanos begin) {
  trace::Event event;
  event.start_ns = begin.count;
  event.duration_ns = (recorder_.now() - begin).count;
  event.bytes = receive.elements * reduce::size_of(running.operation.type);
  event.operation = trace_number(key_of(running.operation));
  event.iteration = running.operation.iteration;
  event.bucket = running.operation.bucket;
  event.partition = running.operation.partition;
  event.step = receive.id.step;
  event.chunk = receive.id.chunk;
  event.peer = static_cast<uint16_t>(global(running.operation, receive.peer));
  event.track = recorder_.thread_track();
  event.kind = trace::Kind::reduce;
  recorder_.record(event);
}

void Engine::record_chunk(trace::Shape shape, const Line& line, const ChunkHeader& header,
                          Moment when) {
  if (!recorder_.on()) return;
  trace::Event event;
  event.start_ns = when.first.count;
  event.duration_ns = (when.last - when.first).count;
  event.message = header.message;
  event.bytes = header.length;
  event.operation = trace_number(chunk_key(header, line.peer, shape == trace::Shape::send));
  event.chunk = header.chunk;
  event.step = header.step;
  event.track = line.track;
  event.lane = line.number;
  event.peer = static_cast<uint16_t>(line.peer);
  event.shape = shape;
  event.kind = trace::Kind::chunk;
  auto found = running_.find(chunk_key(header, line.peer, shape == trace::Shape::send));
  if (found != running_.end()) {
    event.iteration = found->second.operation.iteration;
    event.bucket = found->second.operation.bucket;
    event.partition = found->second.operation.partition;
  }
  recorder_.record(event);
}

Flight Engine::flight_of(const Key& key, const Running& running) const {
  Flight flight;
  flight.key = key;
  flight.collective = running.operation.shape.collective;
  flight.chunks_done = running.chunks_done;
  flight.bytes_done = running.bytes_done;
  flight.bytes_total = running.bytes_total;
  flight.since = running.since;
  flight.last_change = running.last_change;
  flight.deadline = running.operation.deadline;
  if (auto member = running.steps.waits_for())
    flight.waits_for = global(running.operation, *member);
  for (uint32_t member = 0; member < running.unsettled.size(); ++member) {
    if (running.unsettled[member] == 0) continue;
    uint32_t rank = global(running.operation, member);
    flight.cannot_send_to = rank;
    // It waits its turn behind others, and they move.
    if (running.queued[member] > 0)
      flight.last_change = std::max(flight.last_change, peers_[rank].last_sent);
  }
  Signature signature = signature_of(running, 0, false);
  flight.signature = describe(signature.collective, signature.type, signature.op, signature.root,
                              signature.elements);
  return flight;
}

std::vector<Flight> Engine::flights() const {
  std::vector<Flight> out;
  for (const auto& [key, running] : running_) out.push_back(flight_of(key, running));
  std::sort(out.begin(), out.end(),
            [](const Flight& a, const Flight& b) { return a.since < b.since; });
  return out;
}

Progress Engine::progress(Nanos now) const {
  Progress out;
  out.last_change = last_change_;
  out.operations = running_.size();
  bool overdue = false, first = true;
  uint64_t order = 0;
  for (const auto& [key, running] : running_) {
    // Nothing can be overdue that moved since: spare the description of most of them.
    bool may_be = now - running.last_change > running.operation.deadline;
    if (!first && running.order > order && (overdue || !may_be)) continue;
    Flight flight = flight_of(key, running);
    bool is = now - flight.last_change > flight.deadline;
    if (!first && (is == overdue ? running.order > order : overdue)) continue;
    out.foremost = std::move(flight);
    overdue = is;
    order = running.order;
    first = false;
  }
  return out;
}

void Engine::forgive(Nanos gap) {
  last_change_ += gap;
  for (auto& [key, running] : running_) running.last_change += gap;
  for (Peer& peer : peers_) {
    peer.last_sent += gap;
    if (peer.down_since) *peer.down_since += gap;
  }
}

}  // namespace weft::collective
