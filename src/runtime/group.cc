#include "group.h"

#include <algorithm>

namespace weft::runtime {

using transport::Control;
using transport::Frame;
using transport::Packer;
using transport::Unpacker;

namespace {

constexpr Nanos kTurn = Nanos::from_millis(20);
constexpr Nanos kHeartbeat = Nanos::from_millis(250);
constexpr Nanos kTcpInfo = Nanos::from_millis(100);
constexpr Nanos kCheck = Nanos::from_millis(50);
// A connection that ends may be the echo of another rank's failure, whose own words are on their
// way: wait this long for them before blaming the one that closed it.
constexpr Nanos kGrace = Nanos::from_millis(200);

Code code_of(uint8_t raw) { return static_cast<Code>(std::clamp<uint8_t>(raw, 1, 8)); }

}  // namespace

Group::Impl::Impl(const Options& given, capture::Recorder& recorder_in, transport::Mesh mesh_in)
    : options(given),
      recorder(recorder_in),
      mesh(std::move(mesh_in)),
      said_bye(given.ranks, false),
      last_heard(given.ranks, monotonic_clock().now()) {
  plan::Plan sized = schedule::scaled(options.plan, options.shrink);
  collective::Engine::Options engine_options;
  engine_options.rank = options.rank;
  engine_options.ranks = options.ranks;
  engine_options.chunk_elements = schedule::chunk_elements(sized);
  engine = std::make_unique<collective::Engine>(
      engine_options, *mesh.reactor, std::move(mesh.lanes_out), std::move(mesh.lanes_in), recorder,
      [this](Rank peer, Error error) { suspect(peer, std::move(error)); });
  control_track =
      recorder.track({trace::TrackType::control, "control", trace::kNone16, trace::kNone16});
  thread = std::thread([this] { loop(); });
}

Group::Impl::~Impl() {
  {
    std::lock_guard lock(mutex);
    stopping = true;
  }
  mesh.reactor->wake();
  thread.join();
}

void Group::Impl::post(std::function<void()> command) {
  {
    std::lock_guard lock(mutex);
    commands.push_back(std::move(command));
  }
  mesh.reactor->wake();
}

std::optional<Error> Group::Impl::current_failure() {
  std::lock_guard lock(mutex);
  return failure;
}

Result<void> Group::Impl::run(collective::Operation operation) {
  std::unique_lock lock(mutex);
  if (failure) return *failure;
  uint32_t number = next_direct++;
  operation.number = number;
  direct_done[number] = false;
  auto shared = std::make_shared<collective::Operation>(std::move(operation));
  commands.push_back([this, shared] { engine->start(std::move(*shared)); });
  mesh.reactor->wake();
  changed.wait(lock, [&] { return failure.has_value() || direct_done[number]; });
  bool done = direct_done[number];
  direct_done.erase(number);
  if (!done) return *failure;
  return {};
}

std::string Group::Impl::describe(Rank rank) const {
  if (rank.index >= mesh.members.size()) return text("rank %u", rank.index);
  return text("rank %u on %s", rank.index, mesh.members[rank.index].host.c_str());
}

// ---- the progress thread -----------------------------------------------------------------

void Group::Impl::loop() {
  for (;;) {
    mesh.reactor->run_once(engine->more_to_send() ? Nanos{0} : kTurn);
    Nanos now = monotonic_clock().now();
    std::vector<std::function<void()>> todo;
    bool stop = false;
    {
      std::lock_guard lock(mutex);
      stop = stopping;
      todo.swap(commands);
    }
    // Also before stopping: a reason for failing may be among them, and the others need it.
    for (auto& command : todo)
      if (!failed) command();
    if (stop) return;
    if (failed) {
      // Nothing moves any more; only what is still to be told to others goes out.
      if (mesh.acceptor) mesh.acceptor->tick(now);
      continue;
    }
    handle_frames();
    for (uint32_t operation : engine->poll()) finished(operation);
    if (now >= next_check) {
      next_check = now + kCheck;
      if (mesh.acceptor) mesh.acceptor->tick(now);
      check_deadlines(now);
    }
    send_heartbeats(now);
    if (now >= next_tcp_info) {
      next_tcp_info = now + kTcpInfo;
      if (!engine->idle()) engine->record_tcp_info();
    }
    // What frames and commands started should not wait for the next event.
    for (uint32_t operation : engine->poll()) finished(operation);
  }
}

void Group::Impl::handle_frames() {
  for (auto& channel : mesh.control) {
    if (!channel) continue;
    while (auto frame = channel->receive()) {
      last_heard[channel->peer().index] = monotonic_clock().now();
      handle(*channel, *frame);
      if (failed) return;
    }
    if (channel->failure() && !said_bye[channel->peer().index])
      suspect(channel->peer(), *channel->failure());
  }
}

void Group::Impl::handle(transport::ControlChannel& from, const Frame& frame) {
  Unpacker fields(frame.payload);
  Rank peer = from.peer();
  auto bad = [&] {
    fail(error(Code::corrupt, "%s sent a control frame that makes no sense (type %u)",
               describe(peer).c_str(), static_cast<unsigned>(frame.type)),
         peer);
  };
  switch (frame.type) {
    case Control::ready: {
      auto bucket = fields.number<uint32_t>();
      auto step = fields.number<uint64_t>();
      if (!fields.complete() || !is_root() || !exchange) return bad();
      if (auto noted = exchange->admission->ready(peer, bucket, step); !noted)
        return fail(std::move(noted).error(), peer);
      admit();
      return;
    }
    case Control::start: {
      if (is_root() || !exchange) return bad();
      while (fields.more()) {
        schedule::Start begin;
        begin.operation = fields.number<uint32_t>();
        begin.piece = fields.number<uint32_t>();
        begin.step = fields.number<uint64_t>();
        if (fields.failed() || begin.piece >= exchange->layout.pieces.size() ||
            begin.operation >= kDirectOperations || exchange->running.contains(begin.operation))
          return bad();
        start(begin);
      }
      return;
    }
    case Control::ping: {
      int64_t t1 = recorder.now().count;
      auto t0 = fields.number<int64_t>();
      if (!fields.complete()) return bad();
      Packer answer;
      answer.number(t0).number(t1).number(recorder.now().count);
      from.send(Control::pong, answer);
      return;
    }
    case Control::pong: {
      trace::PingSample sample;
      sample.t3 = recorder.now().count;
      sample.peer = peer.index;
      sample.loaded = engine->idle() ? 0 : 1;
      sample.t0 = fields.number<int64_t>();
      sample.t1 = fields.number<int64_t>();
      sample.t2 = fields.number<int64_t>();
      if (!fields.complete()) return bad();
      recorder.ping(sample);
      return;
    }
    case Control::abort: {
      Code code = code_of(fields.number<uint8_t>());
      auto culprit = fields.number<uint32_t>();
      std::string reason = fields.string();
      if (!fields.complete()) return bad();
      fail(Error(code, reason),
           culprit < options.ranks ? std::optional(Rank{culprit}) : std::nullopt);
      return;
    }
    case Control::bye: {
      said_bye[peer.index] = true;
      if (is_root()) {
        for (uint32_t r = 1; r < options.ranks; ++r)
          if (!said_bye[r]) return;
        if (!said_bye[0]) return;
        for (auto& channel : mesh.control)
          if (channel) channel->send(Control::bye, Packer());
      }
      std::lock_guard lock(mutex);
      left = true;
      changed.notify_all();
      return;
    }
    default: return bad();
  }
}

void Group::Impl::bucket_ready(uint32_t bucket, uint64_t step) {
  if (!is_root()) {
    Packer words;
    words.number(bucket).number(step);
    mesh.control[0]->send(Control::ready, words);
    return;
  }
  auto noted = exchange->admission->ready({0}, bucket, step);
  WEFT_CHECK(noted.ok());
  admit();
}

// Rank 0: everything that may start now starts, in one order, everywhere.
void Group::Impl::admit() {
  for (;;) {
    Packer words;
    std::vector<schedule::Start> starts;
    // In frames well below the limit of a control frame.
    while (starts.size() < 4096) {
      auto next = exchange->admission->next();
      if (!next) break;
      words.number(next->operation).number(next->piece).number(next->step);
      starts.push_back(*next);
    }
    if (starts.empty()) return;
    for (auto& channel : mesh.control)
      if (channel) channel->send(Control::start, words);
    for (const schedule::Start& begin : starts) {
      const schedule::Piece& piece = exchange->layout.pieces[begin.piece];
      trace::Event event;
      event.start_ns = recorder.now().count;
      event.shape = trace::Shape::instant;
      event.kind = trace::Kind::admitted;
      event.track = control_track;
      event.operation = begin.operation;
      event.iteration = static_cast<uint32_t>(begin.step);
      event.bucket = piece.bucket;
      event.partition = piece.partition;
      event.bytes = piece.elements * schedule::kElementBytes;
      recorder.record(event);
      start(begin);
    }
  }
}

void Group::Impl::start(const schedule::Start& begin) {
  const schedule::Piece& piece = exchange->layout.pieces[begin.piece];
  const schedule::Bucket& bucket = exchange->layout.buckets[piece.bucket];
  collective::Operation operation;
  operation.number = begin.operation;
  operation.priority = bucket.priority;
  operation.iteration = static_cast<uint32_t>(begin.step);
  operation.bucket = piece.bucket;
  operation.partition = piece.partition;
  // The piece's stretch of the bucket, as parts of the tensors that lie in it.
  uint64_t first = piece.first, end = piece.first + piece.elements;
  for (size_t i = 0; i < bucket.tensors.size(); ++i) {
    std::span<float> data = exchange->tensors[bucket.tensors[i]].data;
    uint64_t from = std::max(first, bucket.offsets[i]);
    uint64_t to = std::min(end, bucket.offsets[i] + data.size());
    if (from < to) operation.buffer.add(data.subspan(from - bucket.offsets[i], to - from));
  }
  exchange->running[begin.operation] = {begin.piece, begin.step};
  engine->start(std::move(operation));
}

void Group::Impl::finished(uint32_t operation) {
  if (operation >= kDirectOperations) {
    std::lock_guard lock(mutex);
    direct_done[operation] = true;
    changed.notify_all();
    return;
  }
  auto found = exchange->running.find(operation);
  WEFT_CHECK(found != exchange->running.end());
  Exchange::Impl::RunningPiece done = found->second;
  exchange->running.erase(found);

  bool changed_any = false;
  for (uint32_t t : exchange->of_piece[done.piece]) {
    Exchange::Impl::TensorState& state = exchange->states[t];
    if (--state.pieces_left > 0) continue;
    state.pieces_left = state.pieces;
    changed_any = true;
    trace::Event event;
    event.start_ns = recorder.now().count;
    event.shape = trace::Shape::instant;
    event.kind = trace::Kind::tensor_done;
    event.track = control_track;
    event.tensor = t;
    event.layer = static_cast<uint16_t>(exchange->tensors[t].layer);
    event.iteration = static_cast<uint32_t>(done.step);
    event.bytes = exchange->tensors[t].data.size_bytes();
    recorder.record(event);
    std::lock_guard lock(mutex);
    ++state.steps_done;
  }
  if (changed_any) changed.notify_all();
  if (is_root()) {
    auto returned = exchange->admission->finished(operation);
    WEFT_CHECK(returned.ok());
    admit();
  }
}

// ---- failure -----------------------------------------------------------------------------

void Group::Impl::suspect(Rank peer, Error error) {
  if (suspicion || said_bye[peer.index]) return;
  {
    // When everyone has said goodbye, closed connections are what was agreed.
    std::lock_guard lock(mutex);
    if (left || stopping) return;
  }
  suspicion = Suspicion{peer, std::move(error), monotonic_clock().now()};
}

void Group::Impl::fail(Error error, std::optional<Rank> culprit) {
  if (failed) return;
  failed = true;
  // Whoever waits gets the failure, and with it its memory back.
  engine->halt();
  WEFT_LOG(runtime, info, "group failed: %s", error.message().c_str());
  recorder.note("failure", error.message());
  Packer reason;
  reason.number(static_cast<uint8_t>(error.code())).number(culprit ? culprit->index : trace::kNone);
  reason.string(error.message().substr(0, 4096));
  for (auto& channel : mesh.control)
    if (channel && !channel->failure()) channel->send(Control::abort, reason);
  std::lock_guard lock(mutex);
  failure = std::move(error);
  changed.notify_all();
}

void Group::Impl::check_deadlines(Nanos now) {
  {
    std::lock_guard lock(mutex);
    if (left) return;
  }
  collective::Progress progress = engine->progress();
  auto in_flight = [&] {
    if (progress.operations == 0) return std::string("nothing was in flight");
    return text("operation %u was in flight, %s of %s received, last progress %s ago",
                progress.oldest & (kDirectOperations - 1),
                format_size(static_cast<double>(progress.bytes_done)).c_str(),
                format_size(static_cast<double>(progress.bytes_total)).c_str(),
                format_duration(now - progress.last_change).c_str());
  };
  if (suspicion && now - suspicion->since >= kGrace) {
    Rank peer = suspicion->peer;
    fail(error(suspicion->error.code(), "%s is lost: %s; %s", describe(peer).c_str(),
               suspicion->error.message().c_str(), in_flight().c_str()),
         peer);
    return;
  }
  for (auto& channel : mesh.control) {
    if (!channel || said_bye[channel->peer().index]) continue;
    Rank peer = channel->peer();
    Nanos silent = now - last_heard[peer.index];
    if (silent > options.silence_deadline) {
      fail(error(Code::peer_lost, "%s gave no sign of life for %s; %s", describe(peer).c_str(),
                 format_duration(silent).c_str(), in_flight().c_str()),
           peer);
      return;
    }
  }
  if (progress.operations > 0 && now - progress.last_change > options.progress_deadline) {
    Rank peer{progress.waits_for_next ? mesh.next() : mesh.previous()};
    fail(error(Code::timeout, "%s does not %s; %s", describe(peer).c_str(),
               progress.waits_for_next ? "take data" : "send data", in_flight().c_str()),
         peer);
    return;
  }
  if (!is_root() || !exchange) return;
  auto lacking = exchange->admission->lacking();
  if (!lacking) {
    lacking_what.reset();
    return;
  }
  std::pair<uint32_t, uint64_t> what{lacking->bucket, lacking->step};
  if (lacking_what != what) {
    lacking_what = what;
    lacking_since = now;
  } else if (now - *lacking_since > options.ready_deadline) {
    Rank peer = lacking->missing.front();
    fail(error(Code::timeout,
               "%s has no gradients of bucket %u in step %llu, for which others wait since %s",
               describe(peer).c_str(), lacking->bucket,
               static_cast<unsigned long long>(lacking->step),
               format_duration(now - *lacking_since).c_str()),
         peer);
  }
}

void Group::Impl::send_heartbeats(Nanos now) {
  if (now < next_heartbeat) return;
  next_heartbeat = now + kHeartbeat;
  // The question keeps both sides' clocks of silence at bay, and its answer bounds the offset
  // between the two hosts' clocks.
  if (!is_root() && !mesh.control[0]->failure()) {
    Packer question;
    question.number(recorder.now().count);
    mesh.control[0]->send(Control::ping, question);
  }
}

// ---- the public face ---------------------------------------------------------------------

Group::Group(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Group::~Group() = default;

Result<std::unique_ptr<Group>> Group::join(const Options& options, capture::Recorder& recorder) {
  WEFT_TRY(plan::validate(options.plan));
  // A plan that cannot be carried out is refused before anyone is met.
  WEFT_TRY(schedule::supported(options.plan));
  if (!(options.shrink >= 1))
    return error(Code::invalid_argument, "shrink is %g; it must be at least 1", options.shrink);
  plan::Plan sized = schedule::scaled(options.plan, options.shrink);
  transport::JoinOptions join_options;
  join_options.rank = options.rank;
  join_options.ranks = options.ranks;
  join_options.rendezvous = options.rendezvous;
  join_options.secret = options.secret;
  join_options.host = options.host;
  join_options.agreement = text("%s/%g", plan::hash(options.plan).c_str(), options.shrink);
  join_options.lanes = static_cast<uint16_t>(options.plan.lanes);
  join_options.probe = options.probe;
  join_options.deadline = options.join_deadline;
  WEFT_ASSIGN(transport::Mesh mesh, transport::join(join_options));
  if (options.probe && options.ranks > 1) {
    transport::ProbeOptions probe_options;
    auto chunk = static_cast<uint32_t>(schedule::chunk_elements(sized) * schedule::kElementBytes);
    probe_options.chunk_bytes = chunk;
    probe_options.other_chunk_bytes = std::max(4096u, chunk / 4);
    if (auto measured = transport::probe(mesh, probe_options, recorder); !measured)
      return std::move(measured).error();
  }
  return std::unique_ptr<Group>(
      new Group(std::make_unique<Impl>(options, recorder, std::move(mesh))));
}

Rank Group::rank() const { return impl_->options.rank; }
uint32_t Group::ranks() const { return impl_->options.ranks; }

Result<void> Group::all_reduce(std::span<float> data) {
  collective::Operation operation;
  operation.buffer.add(data);
  return impl_->run(std::move(operation));
}

Result<void> Group::broadcast(std::span<float> data, Rank root) {
  if (root.index >= ranks())
    return error(Code::invalid_argument, "rank %u cannot broadcast in a group of %u", root.index,
                 ranks());
  collective::Operation operation;
  operation.collective = schedule::Collective::broadcast;
  operation.root = root;
  operation.kind = trace::Kind::broadcast;
  operation.buffer.add(data);
  return impl_->run(std::move(operation));
}

Result<void> Group::barrier() {
  // Nobody can have the sum before everyone gave an element to it.
  std::vector<float> one(ranks(), 1.0f);
  collective::Operation operation;
  operation.kind = trace::Kind::barrier;
  operation.buffer.add(one);
  return impl_->run(std::move(operation));
}

void Group::abort(const std::string& reason) {
  Impl* impl = impl_.get();
  impl->post([impl, reason] {
    impl->fail(error(Code::cancelled, "%s ended the group: %s",
                     impl->describe(impl->options.rank).c_str(), reason.c_str()),
               impl->options.rank);
  });
}

std::optional<Error> Group::failure() const { return impl_->current_failure(); }

Result<void> Group::leave() {
  Impl* impl = impl_.get();
  std::unique_lock lock(impl->mutex);
  if (impl->failure) return *impl->failure;
  if (impl->options.ranks == 1) return {};
  impl->commands.push_back([impl] {
    if (impl->is_root()) {
      // As if rank 0 had told itself.
      impl->said_bye[0] = true;
      for (uint32_t r = 1; r < impl->options.ranks; ++r)
        if (!impl->said_bye[r]) return;
      for (auto& channel : impl->mesh.control)
        if (channel) channel->send(Control::bye, Packer());
      std::lock_guard done(impl->mutex);
      impl->left = true;
      impl->changed.notify_all();
    } else {
      impl->mesh.control[0]->send(Control::bye, Packer());
    }
  });
  impl->mesh.reactor->wake();
  bool in_time =
      impl->changed.wait_for(lock, std::chrono::nanoseconds(impl->options.progress_deadline.count),
                             [&] { return impl->left || impl->failure.has_value(); });
  if (impl->left) return {};
  if (impl->failure) return *impl->failure;
  WEFT_CHECK(!in_time);
  return error(Code::timeout, "not all ranks wanted to leave within %s",
               format_duration(impl->options.progress_deadline).c_str());
}

}  // namespace weft::runtime
