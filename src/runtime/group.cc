// The driver's turn: frames, operations of the exchange, and the public face of a group.
#include "group.h"

#include <algorithm>
#include <csignal>
#include <new>
#include <set>
#include <system_error>

#include "weft/probe.h"

namespace weft::runtime {

using join::Control;
using join::Frame;

namespace {

constexpr Nanos kTcpInfo = Nanos::from_millis(100);
constexpr Nanos kCheck = Nanos::from_millis(50);
// Below this an operation is bound by latency rather than by the wire.
constexpr uint64_t kSmall = 64u << 10;

}  // namespace

collective::LaneSettings lanes_of(const plan::Plan& sized) {
  collective::LaneSettings out;
  out.lanes = static_cast<uint16_t>(sized.lanes);
  out.chunk_bytes = schedule::chunk_elements(sized) * schedule::kElementBytes;
  if (sized.lane_worker == plan::LaneWorker::process)
    out.worker = lane::LaneWorkers::Kind::process;
  else if (sized.lane_workers > 1)
    out.worker = lane::LaneWorkers::Kind::thread;
  out.workers = sized.lane_workers;
  return out;
}

Group::Impl::Impl(const Options& given, uint32_t epoch_in, capture::Recorder& recorder_in,
                  join::Mesh mesh_in)
    : options(given),
      epoch(epoch_in),
      forks(net::times_forked()),
      began(mesh_in.network->clock().now()),
      recorder(recorder_in),
      mesh(std::move(mesh_in)),
      said_bye(mesh.ranks, false),
      last_words(mesh.ranks, false),
      no_memory(error(Code::exhausted, "%s ran out of memory", describe(mesh.rank).c_str())),
      last_reason(no_memory),
      last_turn(began),
      last_heard(mesh.ranks, began),
      waiting(mesh.ranks) {
  last_message.number(static_cast<uint8_t>(no_memory.code())).number(mesh.rank.index);
  last_message.string(no_memory.message());
  for (const join::Member& member : mesh.members) host_of.push_back(member.host_index);
  all_hosts = static_cast<uint32_t>(std::set<uint32_t>(host_of.begin(), host_of.end()).size());
  plan::Plan sized = schedule::scaled(options.plan, options.shrink);
  collective::Engine::Options engine_options;
  static_cast<collective::LaneSettings&>(engine_options) = lanes_of(sized);
  engine_options.lane_rate = options.lane_rate;
  engine_options.check_inside_machine = options.check_inside_machine;
  engine = std::make_unique<collective::Engine>(
      engine_options, mesh, recorder,
      [this](Rank peer, Error error) { suspect(peer, std::move(error)); },
      [this](std::unique_ptr<net::Socket> socket) { asked(std::move(socket)); },
      [this](Rank peer, std::unique_ptr<net::Socket> socket) {
        branched(peer, std::move(socket));
      });
  control_track =
      recorder.track({trace::TrackType::control, "control", trace::kNone16, trace::kNone16});
  says_ready = recorder.name("bucket ready, told");
  hears_ready = recorder.name("bucket ready, heard of");
  hears_start = recorder.name("start, heard of");
}

Result<std::shared_ptr<Group::Impl>> Group::Impl::join(const Options& options,
                                                       capture::Recorder& recorder, uint32_t epoch,
                                                       const join::ReunionOptions* survivors) {
  WEFT_TRY(plan::validate(options.plan));
  // A plan that cannot be carried out is refused before anyone is met.
  WEFT_TRY(schedule::supported(options.plan));
  if (!(options.shrink >= 1))
    return error(Code::invalid_argument, "shrink is %g; it must be at least 1", options.shrink);
  plan::Plan sized = schedule::scaled(options.plan, options.shrink);
  join::Options join_options;
  join_options.rank = options.rank;
  join_options.ranks = options.ranks;
  join_options.rendezvous = options.rendezvous;
  join_options.listening = options.listening;
  join_options.interface = options.interface;
  join_options.secret = options.secret;
  join_options.host = options.host;
  // What belongs to another epoch is refused by this word.
  join_options.agreement =
      text("%s/%g/%u", plan::hash(options.plan).c_str(), options.shrink, epoch);
  join_options.lanes = static_cast<uint16_t>(options.plan.lanes);
  join_options.probe = options.probe;
  join_options.shared_memory = options.shared_memory;
  join_options.sealed = options.sealed;
  join_options.deadline = options.join_deadline;
  join_options.network = options.network;
  join::Mesh mesh;
  if (survivors != nullptr) {
    join::ReunionOptions reunion = *survivors;
    reunion.secret = join_options.secret;
    reunion.host = join_options.host;
    reunion.agreement = join_options.agreement;
    reunion.lanes = join_options.lanes;
    reunion.sealed = join_options.sealed;
    reunion.shared_memory = join_options.shared_memory;
    reunion.deadline = join_options.deadline;
    reunion.network = join_options.network;
    WEFT_ASSIGN(mesh, join::meet_again(reunion));
  } else {
    WEFT_ASSIGN(mesh, join::meet(join_options));
  }
  if (options.probe && mesh.ranks > 1) {
    probe::Options probe_options;
    auto chunk = static_cast<uint32_t>(schedule::chunk_elements(sized) * schedule::kElementBytes);
    probe_options.chunk_bytes = chunk;
    probe_options.other_chunk_bytes = std::max(4096u, chunk / 4);
    if (auto measured = probe::measure(mesh, probe_options, recorder); !measured)
      return std::move(measured).error();
  }
  auto impl = std::make_shared<Impl>(options, epoch, recorder, std::move(mesh));
  auto ready = impl->meet_neighbours();
  if (ready) ready = impl->agree_on_costs();
  if (ready) ready = impl->open_branches();
  if (ready) ready = impl->begin();
  // Survivors that lose another one now are left of this group, and not of the old one.
  if (ready || (survivors != nullptr && impl->has_failed.load())) return impl;
  return std::move(ready).error();
}

trace::Environment describe_rank(const Options& options) {
  trace::Environment environment = capture::describe_machine();
  environment.host = options.host;
  environment.host_index = options.rank.index;
  environment.rank = options.rank.index;
  environment.ranks = options.ranks;
  environment.plan_name = options.plan.name;
  environment.plan_hash = plan::hash(options.plan);
  environment.plan_text = plan::canonical(options.plan);
  environment.shrink = options.shrink;
  return environment;
}

// The ring is used by every large operation: its lanes are open before the first one.
Result<void> Group::Impl::meet_neighbours() {
  WEFT_TRY(engine->begin());
  if (mesh.ranks == 1) return {};
  Rank next{mesh.next()};
  engine->prepare(next);
  Nanos until = ran() + options.join_deadline;
  while (!engine->connected(next)) {
    turn(Nanos::from_millis(1));
    if (has_failed.load()) return *current_failure();
    if (ran() > until)
      return error(Code::timeout, "join: no lane to %s was opened within %s",
                   describe(next).c_str(), format_duration(options.join_deadline).c_str());
  }
  return {};
}

// Ranks that chose different algorithms, or different trees, would not understand each other.
Result<void> Group::Impl::agree_on_costs() {
  if (is_root()) {
    costs = options.costs.value_or(cost::typical());
    tree = schedule::choose_tree(*costs, mesh.ranks);
    if (options.fan_out > 0) tree.fan_out = options.fan_out;
    Packer words;
    words.string(cost::to_json(*costs)).number(tree.fan_out);
    for (auto& channel : mesh.control)
      if (channel) channel->send(Control::costs, words);
  }
  Nanos until = ran() + options.join_deadline;
  while (!costs) {
    turn(Nanos::from_millis(1));
    if (has_failed.load()) return *current_failure();
    if (ran() > until)
      return error(Code::timeout, "join: %s did not say what all-reduces cost within %s",
                   describe({0}).c_str(), format_duration(options.join_deadline).c_str());
  }
  recorder.note(cost::kAgreedNote, cost::to_json(*costs));
  return {};
}

const schedule::Choice& Group::Impl::choice_among(uint32_t ranks, uint32_t hosts, uint32_t lanes) {
  std::lock_guard lock(mutex);
  auto found = choices.find({ranks, hosts, lanes});
  if (found != choices.end()) return found->second;
  schedule::Choice made = schedule::choose_all_reduce(*costs, {ranks, lanes, hosts});
  return choices.emplace(std::tuple(ranks, hosts, lanes), std::move(made)).first->second;
}

uint32_t Group::Impl::hosts_of(const collective::Members& members) const {
  if (!members) return all_hosts;
  std::set<uint32_t> met;
  for (uint32_t member : *members) met.insert(host_of[member]);
  return static_cast<uint32_t>(met.size());
}

Result<void> Group::Impl::begin() {
  if (!options.progress_thread) return {};
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Result<void> begun;
  try {
    thread = std::thread([this] { loop(); });
  } catch (const std::system_error& refused) {
    begun = net::own_error(refused.code().value(), "cannot start a thread");
  } catch (const std::bad_alloc&) {
    begun = copy_of(no_memory);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return begun;
}

Group::Impl::~Impl() {
  if (!in_same_process()) {
    // The thread is not here, and locks may be held by others that are not: nothing is touched.
    if (thread.joinable()) thread.detach();
    static_cast<void>(engine.release());
    static_cast<void>(new (std::nothrow) std::map(std::move(branches)));
    static_cast<void>(new (std::nothrow) join::Mesh(std::move(mesh)));
    return;
  }
  {
    std::lock_guard lock(mutex);
    stopping = true;
  }
  unpark.notify_all();
  mesh.reactor->wake();
  if (thread.joinable()) thread.join();
  Seat sits(*this, std::unique_lock(seat));
  engine->halt();
  bool waits_for_readers = failed || (is_root() && left);
  try {
    if (waits_for_readers && mesh.ranks > 1) linger();
  } catch (const std::bad_alloc&) {
    return;  // what was said must do
  }
}

// ---- a turn ------------------------------------------------------------------------------

bool Group::Impl::turn(Nanos timeout) {
  try {
    return turn_once(timeout);
  } catch (const std::bad_alloc&) {
    ran_out_of_memory();
    return true;
  }
}

bool Group::Impl::turn_once(Nanos timeout) {
  if (ran_out.load(std::memory_order_relaxed) && ran_out.exchange(false)) ran_out_of_memory();
  bool sleeps =
      timeout.count > 0 && !engine->more_to_send() && !has_commands.load(std::memory_order_acquire);
  bool moved = mesh.reactor->run_once(sleeps ? timeout : Nanos{0});
  if (has_commands.load(std::memory_order_acquire)) {
    std::vector<std::function<void()>> todo;
    {
      std::lock_guard lock(mutex);
      todo.swap(commands);
      has_commands.store(false);
    }
    for (auto& command : todo)
      if (!failed) command();
  }
  if (status_wanted.load(std::memory_order_relaxed)) tell_status();
  Nanos at = now();
  forgive_suspension(at);
  if (failed) {
    // Nothing moves any more; only what is still to be told to others goes out.
    if (mesh.acceptor) mesh.acceptor->tick(at);
    if (accusation) await_verdict(at);
    return moved;
  }
  handle_frames();
  if (!failed) handle_branches();
  for (const collective::Key& key : engine->poll(at)) finished(key);
  if (!any_receives.empty()) match_any();
  if (at >= next_check) {
    next_check = at + kCheck;
    check_deadlines(at);
    if (!inquiries.empty()) serve_status(at);
  }
  send_heartbeats(at);
  if (at >= next_tcp_info) {
    next_tcp_info = at + kTcpInfo;
    if (!engine->idle()) engine->record_tcp_info();
  }
  return moved;
}

void Group::Impl::handle_frames() {
  for (auto& channel : mesh.control) {
    if (!channel) continue;
    while (auto frame = channel->receive()) {
      last_heard[channel->peer().index] = now();
      handle(*channel, *frame);
      if (failed) return;
    }
    if (channel->failure() && !said_bye[channel->peer().index])
      suspect(channel->peer(), *channel->failure());
  }
}

void Group::Impl::makes_no_sense(Rank peer, Control type) {
  fail(error(Code::corrupt, "%s sent a control frame that makes no sense (type %u)",
             describe(peer).c_str(), static_cast<unsigned>(type)),
       peer);
}

void Group::Impl::handle(join::ControlChannel& from, const Frame& frame) {
  Unpacker fields(frame.payload);
  Rank peer = from.peer();
  auto bad = [&] { makes_no_sense(peer, frame.type); };
  switch (frame.type) {
    case Control::ready: return is_root() ? hear_ready(peer, frame) : bad();
    case Control::start: return hear_starts(peer, frame);
    case Control::owed: return hear_owed(peer, frame);
    case Control::ping: {
      int64_t t1 = recorder.now().count;
      auto t0 = fields.number<int64_t>();
      Waiting told;
      told.stuck = fields.number<uint8_t>() != 0;
      told.operation.group = fields.number<uint32_t>();
      told.operation.pair = fields.number<uint32_t>();
      told.operation.number = fields.number<uint64_t>();
      told.waits_for = fields.number<uint32_t>();
      told.chunks_done = fields.number<uint64_t>();
      told.signature = fields.string();
      if (!fields.complete() || !is_root()) return bad();
      waiting[peer.index] = std::move(told);
      Packer answer;
      answer.number(t0).number(t1).number(recorder.now().count);
      from.send(Control::pong, answer);
      compare_calls(peer, now());
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
      Code code = code_from(fields.number<uint8_t>());
      auto blamed = fields.number<uint32_t>();
      std::string reason = fields.string();
      if (!fields.complete()) return bad();
      last_words[peer.index] = true;
      fail(Error(code, reason), blamed < mesh.ranks ? std::optional(Rank{blamed}) : std::nullopt);
      return;
    }
    case Control::bye:
      if (is_root() && !first_bye) first_bye = now();
      last_words[peer.index] = said_bye[peer.index];  // the second time: it has read ours
      if (last_words[peer.index]) return;
      said_bye[peer.index] = true;
      say_goodbye();
      return;
    case Control::costs: {
      std::string words = fields.string();
      auto fan_out = fields.number<uint32_t>();
      auto told = cost::from_json(words);
      if (!fields.complete() || peer.index != 0 || costs || !told || fan_out == 0) return bad();
      tree = {mesh.ranks, fan_out};
      costs = std::move(*told);
      return;
    }
    case Control::query: {
      if (is_root()) return bad();
      Packer answer;
      from.send(Control::answer, answer.string(status_of_this_rank()));
      return;
    }
    case Control::answer: {
      if (!is_root()) return bad();
      std::string words = fields.string();
      if (!fields.complete()) return bad();
      for (Inquiry& inquiry : inquiries) inquiry.answers[peer.index] = words;
      return;
    }
    default: return bad();
  }
}

// ---- the exchange ------------------------------------------------------------------------

// A message of the protocol, at the moment at which it is handed to the control channel or taken
// from it.
void Group::Impl::record_control(trace::NameId name, uint32_t bucket, uint64_t step, Rank peer) {
  if (!recorder.on()) return;
  trace::Event event;
  event.start_ns = recorder.now().count;
  event.shape = trace::Shape::instant;
  event.kind = trace::Kind::control;
  event.name = name;
  event.track = control_track;
  event.iteration = static_cast<uint32_t>(step);
  event.bucket = bucket;
  event.peer = static_cast<uint16_t>(peer.index);
  recorder.record(event);
}

void Group::Impl::start(const schedule::Start& begin) {
  const Exchange::Impl::Course& course = *exchange->course;
  const schedule::Piece& piece = course.layout.pieces[begin.piece];
  const schedule::Bucket& bucket = course.layout.buckets[piece.bucket];
  collective::Operation operation;
  operation.group = collective::kExchangeGroup;
  operation.number = begin.operation;
  operation.deadline = options.progress_deadline;
  operation.chunk_bytes = course.chunk_bytes;
  operation.priority = bucket.priority;
  operation.iteration = static_cast<uint32_t>(begin.step);
  operation.bucket = piece.bucket;
  operation.partition = piece.partition;
  operation.shape.algorithm = course.algorithm_of[begin.piece];
  operation.shape.rank = mesh.rank.index;
  operation.shape.ranks = mesh.ranks;
  operation.shape.elements = piece.elements;
  if (operation.shape.algorithm == Algorithm::hierarchical) operation.shape.host_of = host_of;
  operation.type = exchange->tensors[bucket.tensors.front()].type;
  // Where all data meets in one place, sixteen bits are rounded once; elsewhere at every step.
  operation.shape.wide =
      operation.shape.algorithm == Algorithm::direct && bucket.element_bytes == 2 && mesh.ranks > 2;
  // The piece's stretch of the bucket, as parts of the tensors that lie in it.
  uint64_t first = piece.first, end = piece.first + piece.elements;
  for (size_t i = 0; i < bucket.tensors.size(); ++i) {
    const Tensor& tensor = exchange->tensors[bucket.tensors[i]];
    uint64_t from = std::max(first, bucket.offsets[i]);
    uint64_t to = std::min(end, bucket.offsets[i] + tensor.elements());
    if (from < to)
      operation.output.add(tensor.data.subspan((from - bucket.offsets[i]) * bucket.element_bytes,
                                               (to - from) * bucket.element_bytes));
  }
  operation.input = operation.output;
  exchange->running[begin.operation] = {begin.piece, begin.step};
  start(std::move(operation));
}

void Group::Impl::finished(const collective::Key& key) {
  if (failed) return;  // a callback may have ended the group
  if (key.group == collective::kExchangeGroup) return finished_piece(key.number);
  std::shared_ptr<Work::State> state;
  std::vector<std::function<void(Result<void>)>> callbacks;
  {
    std::lock_guard lock(mutex);
    auto found = works.find(key);
    WEFT_CHECK(found != works.end());
    state = std::move(found->second);
    works.erase(found);
    state->done.store(true, std::memory_order_release);
    callbacks.swap(state->callbacks);
    // Whoever waits without driving is told.
    if (callers.load() > 1) changed.notify_all();
  }
  for (auto& callback : callbacks) callback({});
}

void Group::Impl::finished_piece(uint64_t operation) {
  auto found = exchange->running.find(operation);
  WEFT_CHECK(found != exchange->running.end());
  Exchange::Impl::RunningPiece done = found->second;
  exchange->running.erase(found);

  bool changed_any = false;
  for (uint32_t t : exchange->course->of_piece[done.piece]) {
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
    event.bytes = exchange->tensors[t].data.size();
    recorder.record(event);
    state.steps_done.fetch_add(1, std::memory_order_release);
  }
  if (changed_any) {
    std::lock_guard lock(mutex);  // or one who has just looked would miss it
    changed.notify_all();
  }
  if (is_root()) {
    auto returned = exchange->course->admission->finished(operation);
    WEFT_CHECK(returned.ok());
    admit();
  }
}

// ---- the public face ---------------------------------------------------------------------

Group::Group(std::shared_ptr<Impl> impl, collective::Members members, uint32_t id)
    : impl_(std::move(impl)), members_(std::move(members)), id_(id) {
  rank_ = impl_->mesh.rank.index;
  hosts_ = impl_->hosts_of(members_);
  if (!members_) return;
  auto found = std::find(members_->begin(), members_->end(), rank_);
  rank_ = static_cast<uint32_t>(found - members_->begin());
}
Group::~Group() = default;

Result<std::unique_ptr<Group>> Group::join(const Options& options, capture::Recorder& recorder) {
  try {
    WEFT_ASSIGN(auto impl, Impl::join(options, recorder, 0));
    return std::unique_ptr<Group>(new Group(std::move(impl), nullptr, 0));
  } catch (const std::bad_alloc&) {
    return Error(Code::exhausted, kNoMemory);
  }
}

Rank Group::rank() const { return {rank_}; }
uint32_t Group::ranks() const {
  return members_ ? static_cast<uint32_t>(members_->size()) : impl_->mesh.ranks;
}
uint32_t Group::hosts() const { return hosts_; }
uint32_t Group::epoch() const { return impl_->epoch; }
const std::vector<join::Member>& Group::members() const { return impl_->mesh.members; }

namespace {

// The sizes of what goes in and comes out, and what cannot be.
Result<collective::Operation> described(const Call& call, uint32_t rank, uint32_t ranks) {
  collective::Operation operation;
  schedule::OperationShape& shape = operation.shape;
  shape.collective = call.collective;
  shape.rank = rank;
  shape.ranks = ranks;
  shape.root = call.root;
  shape.elements = call.count;
  shape.sends = call.sends;
  shape.counts.assign(call.counts.begin(), call.counts.end());
  shape.receive_counts.assign(call.receive_counts.begin(), call.receive_counts.end());
  operation.type = call.type;
  operation.op = call.op;
  operation.priority = call.priority;
  operation.deadline = call.deadline;
  if (call.collective == Collective::point_to_point) operation.number = uint64_t{call.tag} << 32;
  auto refuse = [&](const std::string& why) {
    return error(Code::invalid_argument, "%s: %s", schedule::name_of(call.collective), why.c_str());
  };
  if (!reduce::known_type(static_cast<uint8_t>(call.type)) ||
      !reduce::known_op(static_cast<uint8_t>(call.op)))
    return refuse("no such type or operation");
  bool reduces = call.collective == Collective::all_reduce ||
                 call.collective == Collective::reduce_scatter ||
                 call.collective == Collective::reduce;
  if (reduces && !reduce::supports(call.op, call.type))
    return refuse(
        text("%s of %s is not possible", reduce::name_of(call.op), reduce::name_of(call.type)));
  bool from_any =
      call.collective == Collective::point_to_point && !call.sends && call.root == kAnyRank;
  if (call.root >= ranks && !from_any)
    return refuse(text("there is no rank %u among %u", call.root, ranks));
  if (call.count > (uint64_t{1} << 48)) return refuse("too many elements");
  auto sum = [&](std::span<const uint64_t> counts) -> std::optional<uint64_t> {
    uint64_t total = 0;
    for (uint64_t count : counts)
      if (count > (uint64_t{1} << 48) || (total += count) > (uint64_t{1} << 48))
        return std::nullopt;
    return total;
  };
  for (std::span<const uint64_t> counts : {call.counts, call.receive_counts})
    if (!counts.empty() && counts.size() != ranks)
      return refuse(text("%zu counts for %u ranks", counts.size(), ranks));
  if (!call.counts.empty() && sum(call.counts) != call.count)
    return refuse("the counts do not add up to the count");
  if (call.collective == Collective::all_to_all) {
    if (call.counts.empty() != call.receive_counts.empty())
      return refuse("it needs both kinds of counts, or none");
    if (call.counts.empty() && call.count % ranks != 0)
      return refuse(text("%llu elements cannot be cut into %u equal blocks",
                         static_cast<unsigned long long>(call.count), ranks));
    if (!call.counts.empty() && call.counts[rank] != call.receive_counts[rank])
      return refuse("a rank sends itself as much as it receives from itself");
    if (!sum(call.receive_counts)) return refuse("too many elements");
  }
  if (call.collective == Collective::point_to_point && call.root == rank)
    return refuse("a rank cannot send to itself");
  return operation;
}

// Where the data lies. What the caller leaves out is in the other one's memory.
Result<void> attach_memory(const Call& call, collective::Operation& operation) {
  const schedule::OperationShape& shape = operation.shape;
  uint64_t own = call.count / shape.ranks + (shape.rank < call.count % shape.ranks ? 1 : 0);
  uint64_t before = shape.rank * (call.count / shape.ranks) +
                    std::min<uint64_t>(shape.rank, call.count % shape.ranks);
  if (!call.counts.empty()) {
    own = call.counts[shape.rank];
    before = 0;
    for (uint32_t r = 0; r < shape.rank; ++r) before += call.counts[r];
  }
  bool root = shape.rank == call.root;
  uint64_t in = call.count, out = call.count;
  int64_t out_in_input = 0, in_in_output = 0;  // offsets when one lies in the other
  auto offset = static_cast<int64_t>(before);
  switch (call.collective) {
    case Collective::all_reduce:
    case Collective::barrier: break;
    case Collective::reduce_scatter:
      out = own, out_in_input = offset, in_in_output = -offset;
      break;
    case Collective::all_gather: in = own, in_in_output = offset; break;
    case Collective::broadcast: in = root ? call.count : 0; break;
    case Collective::reduce: out = root ? call.count : 0; break;
    case Collective::gather: in = own, in_in_output = offset, out = root ? call.count : 0; break;
    case Collective::scatter: in = root ? call.count : 0, out = own, out_in_input = offset; break;
    case Collective::all_to_all:
      if (!call.receive_counts.empty()) {
        out = 0;
        for (uint64_t count : call.receive_counts) out += count;
      }
      break;
    case Collective::point_to_point:
      in = call.sends ? call.count : 0;
      out = call.sends ? 0 : call.count;
      break;
  }
  auto size = static_cast<int64_t>(reduce::size_of(call.type));
  // The engine reads the input only; its memory type is the same for both.
  auto* input = static_cast<std::byte*>(const_cast<void*>(call.input));
  auto* output = static_cast<std::byte*>(call.output);
  bool may_lie_in_output = call.collective != Collective::reduce_scatter &&
                           call.collective != Collective::scatter &&
                           (call.collective != Collective::reduce || root) &&
                           (call.collective != Collective::gather || root);
  if (input == nullptr && output != nullptr && may_lie_in_output)
    input = output + in_in_output * size;
  if (output == nullptr && input != nullptr) output = input + out_in_input * size;
  if ((in > 0 && input == nullptr) || (out > 0 && output == nullptr))
    return error(Code::invalid_argument, "%s: %s is null", schedule::name_of(call.collective),
                 in > 0 && input == nullptr ? "the input" : "the output");
  if (in > 0) operation.input.add({input, in * static_cast<uint64_t>(size)});
  if (out > 0) operation.output.add({output, out * static_cast<uint64_t>(size)});
  return {};
}

}  // namespace

Result<Work> Group::start(const Call& call) {
  return impl_->together([&]() -> Result<Work> {
    WEFT_TRY(impl_->same_process());
    WEFT_ASSIGN(auto state, impl_->prepare(call, members_, id_, rank_, ranks()));
    impl_->want_progress_thread();
    return Work(std::move(state), impl_);
  });
}

Result<void> Group::run(const Call& call) {
  return impl_->together([&]() -> Result<void> {
    WEFT_TRY(impl_->may_wait());
    WEFT_ASSIGN(Work work, start(call));
    return work.wait();
  });
}

Result<std::shared_ptr<Work::State>> Group::Impl::prepare(const Call& call,
                                                          const collective::Members& members,
                                                          uint32_t id, uint32_t rank,
                                                          uint32_t ranks) {
  WEFT_ASSIGN(collective::Operation operation, described(call, rank, ranks));
  operation.group = id;
  operation.members = members;
  schedule::OperationShape& shape = operation.shape;
  size_t size = reduce::size_of(call.type);
  uint64_t bytes = call.count * size;
  bool sixteen = call.type == Type::float16 || call.type == Type::bfloat16;
  bool arithmetic = call.op == Op::sum || call.op == Op::mean || call.op == Op::product;
  bool sums = (call.collective == Collective::all_reduce || call.collective == Collective::reduce ||
               call.collective == Collective::reduce_scatter) &&
              sixteen && arithmetic && ranks > 2;
  if (call.algorithm) {
    shape.algorithm = *call.algorithm;
  } else if (sums) {
    shape.algorithm = Algorithm::direct;  // the one that can round once
  } else if (call.collective == Collective::all_reduce) {
    const schedule::Choice& choice = choice_among(ranks, hosts_of(members), options.plan.lanes);
    shape.algorithm = options.plan_was_named ? schedule::algorithm_for(options.plan, bytes, choice)
                                             : choice.at(bytes);
  } else if (call.collective == Collective::broadcast || call.collective == Collective::reduce) {
    shape.algorithm = bytes <= kSmall ? Algorithm::tree : Algorithm::ring;
  } else {
    shape.algorithm = bytes <= kSmall ? Algorithm::direct : Algorithm::ring;
  }
  shape.wide = sums && shape.algorithm == Algorithm::direct;
  if (shape.algorithm == Algorithm::hierarchical)
    for (uint32_t member = 0; member < ranks; ++member)
      shape.host_of.push_back(host_of[members ? (*members)[member] : member]);
  WEFT_TRY(attach_memory(call, operation));
  if (call.root == kAnyRank) return receive_any(std::move(operation));
  return launch(std::move(operation));
}

Result<void> Group::all_reduce(std::span<float> data) {
  Call call;
  call.output = data.data();
  call.count = data.size();
  return run(call);
}

Result<void> Group::broadcast(std::span<float> data, Rank root) {
  Call call;
  call.collective = Collective::broadcast;
  call.output = data.data();
  call.count = data.size();
  call.root = root.index;
  return run(call);
}

Result<void> Group::barrier() {
  uint8_t nothing = 0;
  Call call;
  call.collective = Collective::barrier;
  call.output = &nothing;
  call.count = 1;
  call.type = Type::uint8;
  return run(call);
}

Result<void> Group::send(const void* data, uint64_t count, Type type, Rank to) {
  Call call;
  call.collective = Collective::point_to_point;
  call.input = data;
  call.count = count;
  call.type = type;
  call.root = to.index;
  return run(call);
}

Result<void> Group::receive(void* data, uint64_t count, Type type, Rank from) {
  Call call;
  call.collective = Collective::point_to_point;
  call.output = data;
  call.count = count;
  call.type = type;
  call.root = from.index;
  call.sends = false;
  return run(call);
}

Result<std::unique_ptr<Group>> Group::subgroup(std::span<const uint32_t> ranks) {
  return impl_->alone([&]() -> Result<std::unique_ptr<Group>> {
    std::vector<uint32_t> global;
    bool here = false;
    for (uint32_t member : ranks) {
      if (member >= this->ranks())
        return error(Code::invalid_argument, "there is no rank %u among %u", member, this->ranks());
      global.push_back(members_ ? (*members_)[member] : member);
      if (std::count(global.begin(), global.end(), global.back()) > 1)
        return error(Code::invalid_argument, "rank %u is named twice", member);
      here = here || member == rank_;
    }
    if (!here) return error(Code::invalid_argument, "rank %u is not in the new group", rank_);
    auto members = std::make_shared<const std::vector<uint32_t>>(global);
    std::unique_ptr<Group> made(new Group(impl_, members, 0));
    // The members agree on a number without asking each other: it follows from who they are and
    // from how many such groups there were. It is counted last, when nothing can be lacking.
    uint64_t hash = 0xcbf29ce484222325;
    auto mix = [&](uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
    {
      std::lock_guard lock(impl_->mutex);
      mix(++impl_->subgroups[std::move(global)]);
    }
    for (uint32_t member : *members) mix(member);
    made->id_ = std::max(1u, static_cast<uint32_t>((hash >> 32) ^ hash) & 0x7fffffffu);
    return made;
  });
}

void Group::abort(const std::string& reason) {
  Impl* impl = impl_.get();
  if (!impl->in_same_process()) return;
  try {
    impl->post([impl, reason] {
      impl->fail(error(Code::cancelled, "%s ended the group: %s",
                       impl->describe(impl->mesh.rank).c_str(), reason.c_str()),
                 impl->mesh.rank);
    });
  } catch (const std::bad_alloc&) {
    impl->ran_out.store(true);  // it ends all the same, if not with these words
    impl->mesh.reactor->wake();
  }
  if (!impl->options.progress_thread) impl->once();
}

std::optional<Error> Group::failure() const { return impl_->current_failure(); }
std::optional<Rank> Group::culprit() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->culprit;
}

Nanos Group::workers_processor_time() const { return impl_->engine->workers_processor_time(); }
bool Group::has_auxiliary_processes() const { return impl_->engine->has_processes(); }

}  // namespace weft::runtime
