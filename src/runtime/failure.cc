// What ends a group, who is to blame, and how a new one is made of those that are left.
#include <algorithm>

#include "group.h"

namespace weft::runtime {

using join::Control;

namespace {

constexpr Nanos kHeartbeat = Nanos::from_millis(250);
// A connection that ends may be the echo of another rank's failure, whose own words are on their
// way: wait this long for them before blaming the one that closed it.
constexpr Nanos kGrace = Nanos::from_millis(200);
// Rank 0 sees what everyone waits for, and speaks first.
constexpr Nanos kAfterRoot = Nanos::from_seconds(1);
constexpr Nanos kRelaySilence = Nanos::from_seconds(1);  // four heartbeats
constexpr Nanos kLinger = Nanos::from_millis(500);
// Rank 0's word on which of several reasons was the first.
constexpr Nanos kVerdict = Nanos::from_millis(500);
// A driver that did not turn for so long did not run. Others may have been silent, or not.
constexpr Nanos kSuspended = Nanos::from_seconds(1);

}  // namespace

std::string Group::Impl::describe(Rank rank) const {
  if (rank.index >= mesh.members.size()) return text("rank %u", rank.index);
  return text("rank %u on %s", rank.index, mesh.members[rank.index].host.c_str());
}

void Group::Impl::suspect(Rank peer, Error error) {
  if (error.code() != Code::peer_lost) {
    // It speaks, and says what it must not.
    Code code = error.code();
    std::string words = error.message();
    if (code == Code::corrupt)
      words = text("the link from %s to %s: %s", describe(peer).c_str(),
                   describe(mesh.rank).c_str(), words.c_str());
    if (code == Code::io) words = describe(peer) + ": " + words;  // what it lacks itself
    fail(Error(code, words), peer);
    return;
  }
  // Rank 0 passes on what the others say: without it, nobody else can be blamed for silence.
  bool relay_lost = peer.index == 0 && suspicion && suspicion->peer.index != 0;
  if ((suspicion && !relay_lost) || said_bye[peer.index]) return;
  {
    // When everyone has said goodbye, closed connections are what was agreed.
    std::lock_guard lock(mutex);
    if (left || stopping) return;
  }
  suspicion = Suspicion{peer, std::move(error), now()};
}

void Group::Impl::fail(const Error& error, std::optional<Rank> blamed) {
  if (failed) return;
  failed = true;
  // Whoever waits will get the failure, and with it its memory back.
  engine->halt();
  Packer reason;
  reason.number(static_cast<uint8_t>(error.code())).number(blamed ? blamed->index : trace::kNone);
  reason.string(error.message().substr(0, 4096));
  for (auto& channel : mesh.control)
    if (channel && !channel->failure()) channel->send(Control::abort, reason);
  bool root_hears = !is_root() && !mesh.control[0]->failure() && !last_words[0] &&
                    now() - last_heard[0] < kRelaySilence;
  if (!root_hears) return declare(error, blamed);
  accusation = Accusation{error, blamed, now()};
}

// Rank 0 answers with the reason that it heard, or found, first; if it does not, our own stands.
void Group::Impl::await_verdict(Nanos at) {
  while (auto frame = mesh.control[0]->receive()) {
    if (frame->type != Control::abort) continue;
    Unpacker fields(frame->payload);
    Code code = code_from(fields.number<uint8_t>());
    auto blamed = fields.number<uint32_t>();
    std::string reason = fields.string();
    if (!fields.complete()) break;
    last_words[0] = true;
    accusation.reset();
    return declare(Error(code, reason),
                   blamed < mesh.ranks ? std::optional(Rank{blamed}) : std::nullopt);
  }
  if (!mesh.control[0]->failure() && at - accusation->since < kVerdict) return;
  Accusation own = *std::exchange(accusation, std::nullopt);
  declare(std::move(own.error), own.culprit);
}

void Group::Impl::declare(Error error, std::optional<Rank> blamed) {
  WEFT_LOG(runtime, info, "group failed: %s", error.message().c_str());
  recorder.note("failure", error.message());
  std::optional<Error> reason(std::move(error));
  end_works(reason, blamed);
}

// From here on nothing needs memory.
void Group::Impl::end_works(std::optional<Error>& reason, std::optional<Rank> blamed) {
  decltype(works) ended;
  {
    std::lock_guard lock(mutex);
    failure.swap(reason);
    culprit = blamed;
    has_failed.store(true, std::memory_order_release);
    ended.swap(works);
    changed.notify_all();
  }
  // It is set once, so it may be read without the lock.
  for (auto& [key, state] : ended)
    for (auto& callback : std::exchange(state->callbacks, {})) callback(copy_of(*failure));
}

// Nothing more can be had: what was made before must do.
void Group::Impl::ran_out_of_memory() noexcept {
  bool before = failed;
  try {
    fail(no_memory, mesh.rank);
    // Rank 0 decides. Who finds no memory while it waits for the answer does not wait on.
    if (accusation && !before) return;
  } catch (const std::bad_alloc&) {
  }
  if (has_failed.load()) return;
  engine->halt();
  for (auto& channel : mesh.control) {
    if (!channel || accusation) continue;
    try {
      channel->send(Control::abort, last_message);
    } catch (const std::bad_alloc&) {
      channel->hang_up();  // that is understood too
    }
  }
  std::optional<Rank> blamed = mesh.rank;
  std::optional<Error> reason;
  if (accusation) {
    blamed = accusation->culprit;
    reason = std::move(accusation->error);
    accusation.reset();
  } else {
    reason = std::move(last_reason);
  }
  end_works(reason, blamed);
}

// A process that was stopped (Ctrl-Z, a paused container) finds all others silent, and may be the
// only one that was. So their clocks start again; if it was the only one, they have said so.
void Group::Impl::forgive_suspension(Nanos at) {
  Nanos gap = at - std::exchange(last_turn, at);
  if (gap < kSuspended) return;
  WEFT_LOG(runtime, info, "did not run for %s", format_duration(gap).c_str());
  suspended += gap;
  for (Nanos& heard : last_heard) heard += gap;
  for (auto& [rank, branch] : branches) branch.heard += gap;
  engine->forgive(gap);
  if (suspicion) suspicion->since += gap;
  for (AnyReceive& receive : any_receives) receive.since += gap;
  if (lacking_since) *lacking_since += gap;
  ask_owed_at += gap;
  if (leaving_since) *leaving_since += gap;
  if (first_bye) *first_bye += gap;
  if (accusation) accusation->since += gap;
  if (!exchange) return;
  std::lock_guard lock(mutex);
  for (Exchange::Impl::Waiter& waiter : exchange->waiters) waiter.since += gap;
}

Group::Impl::Waiting Group::Impl::own_waiting(Nanos at) const {
  Waiting out;
  collective::Progress progress = engine->progress(at);
  if (progress.operations == 0) return out;
  const collective::Flight& flight = progress.foremost;
  out.stuck = at - flight.last_change > flight.deadline;
  out.operation = flight.key;
  out.chunks_done = flight.chunks_done;
  if (flight.collective != Collective::all_to_all &&
      flight.collective != Collective::point_to_point)
    out.signature = flight.signature;
  if (flight.waits_for)
    out.waits_for = *flight.waits_for;
  else if (flight.cannot_send_to)
    out.waits_for = *flight.cannot_send_to;
  return out;
}

// Rank 0: ranks that called different things may all wait, and no data would tell them. In the end
// all wait in the same operation, so it is enough to compare neighbours.
void Group::Impl::compare_calls(Rank peer, Nanos at) {
  waiting[0] = own_waiting(at);
  const Waiting& one = waiting[peer.index];
  for (uint32_t other : {0u, (peer.index + 1) % mesh.ranks}) {
    const Waiting& two = waiting[other];
    if (one.operation != two.operation || one.signature.empty() || two.signature.empty() ||
        one.signature == two.signature)
      continue;
    fail(error(Code::invalid_argument,
               "operation %llu is %s on rank %u, but %s on rank %u: all ranks must call the same",
               static_cast<unsigned long long>(one.operation.number), one.signature.c_str(),
               peer.index, two.signature.c_str(), other),
         peer);
    return;
  }
}

// Rank 0: someone is stuck. Whoever it waits for may be stuck as well, on yet another rank: the
// one at the end of that chain is to blame.
void Group::Impl::blame(Nanos at) {
  waiting[0] = own_waiting(at);
  for (uint32_t r = 0; r < mesh.ranks; ++r) {
    if (!waiting[r].stuck || waiting[r].waits_for >= mesh.ranks) continue;
    uint32_t waiter = r, last = waiting[r].waits_for;
    std::vector<uint32_t> chain = {r};
    while (waiting[last].operation == waiting[r].operation &&
           waiting[last].waits_for < mesh.ranks &&
           std::find(chain.begin(), chain.end(), last) == chain.end()) {
      chain.push_back(last);
      last = waiting[last].waits_for;
    }
    auto circle = std::find(chain.begin(), chain.end(), last);
    if (circle != chain.end()) {
      // Each waits for the one before it: the one that has least is next to the trouble.
      waiter = *std::min_element(circle, chain.end(), [&](uint32_t a, uint32_t b) {
        return waiting[a].chunks_done < waiting[b].chunks_done;
      });
      last = waiting[waiter].waits_for;
    }
    auto number = static_cast<unsigned long long>(waiting[r].operation.number);
    bool absent = waiting[last].operation != waiting[r].operation;
    fail(error(Code::timeout,
               "%s %s operation %llu, for which %s waits and in which nothing moved for too long",
               describe({last}).c_str(), absent ? "has not come to" : "does not go on with", number,
               describe({waiter}).c_str()),
         Rank{last});
    return;
  }
}

void Group::Impl::check_deadlines(Nanos at) {
  if (left.load()) return;
  auto in_flight = [&] {
    collective::Progress progress = engine->progress(at);
    if (progress.operations == 0) return std::string("nothing was in flight");
    const collective::Flight& flight = progress.foremost;
    return text("operation %llu (%s) was in flight, %s of %s received, last progress %s ago",
                static_cast<unsigned long long>(flight.key.number), flight.signature.c_str(),
                format_size(static_cast<double>(flight.bytes_done)).c_str(),
                format_size(static_cast<double>(flight.bytes_total)).c_str(),
                format_duration(at - flight.last_change).c_str());
  };
  // Another rank may have left because rank 0 is gone: then its reason cannot come here, and rank
  // 0's own silence will tell.
  bool relay_silent = !is_root() && at - last_heard[0] > kRelaySilence;
  if (suspicion && at - suspicion->since >= kGrace &&
      (suspicion->peer.index == 0 || !relay_silent)) {
    Rank peer = suspicion->peer;
    fail(error(suspicion->error.code(), "%s is lost: %s; %s", describe(peer).c_str(),
               suspicion->error.message().c_str(), in_flight().c_str()),
         peer);
    return;
  }
  for (auto& channel : mesh.control) {
    if (!channel || said_bye[channel->peer().index]) continue;
    Rank peer = channel->peer();
    Nanos silent = at - last_heard[peer.index];
    if (silent > options.silence_deadline) {
      fail(error(Code::peer_lost, "%s gave no sign of life for %s; %s", describe(peer).c_str(),
                 format_duration(silent).c_str(), in_flight().c_str()),
           peer);
      return;
    }
  }
  check_branches(at);
  if (failed) return;
  if (is_root()) blame(at);
  if (failed) return;
  collective::Progress progress = engine->progress(at);
  const collective::Flight& flight = progress.foremost;
  if (progress.operations > 0 && at - flight.last_change > flight.deadline + kAfterRoot) {
    uint32_t peer =
        flight.waits_for ? *flight.waits_for : flight.cannot_send_to.value_or(mesh.next());
    fail(error(Code::timeout, "%s does not %s; %s", describe({peer}).c_str(),
               flight.waits_for ? "send data" : "take data", in_flight().c_str()),
         Rank{peer});
    return;
  }
  // Rank 0 knows who has said goodbye, and may itself be the one that has not.
  if (first_bye && at - *first_bye > options.progress_deadline + kAfterRoot) {
    auto absent = std::find(said_bye.begin(), said_bye.end(), false);
    Rank peer{static_cast<uint32_t>(absent - said_bye.begin())};
    fail(error(Code::timeout, "%s did not want to leave within %s of the first that did",
               describe(peer).c_str(), format_duration(at - *first_bye).c_str()),
         peer);
    return;
  }
  if (!is_root() && leaving_since &&
      at - *leaving_since > options.progress_deadline + kAfterRoot + kAfterRoot + kAfterRoot) {
    fail(error(Code::timeout, "%s did not end the group within %s", describe({0}).c_str(),
               format_duration(at - *leaving_since).c_str()),
         Rank{0});
    return;
  }
  check_waiters(at);
  if (!failed) check_any(at);
  if (failed) return;
  check_owed(at);
}

// A gradient that is waited for, and that this rank itself never made ready, will not come.
void Group::Impl::check_waiters(Nanos at) {
  if (!exchange) return;
  Nanos limit = options.ready_deadline + (is_root() ? Nanos{0} : kAfterRoot);
  std::optional<Error> found;
  {
    std::lock_guard lock(mutex);
    for (const Exchange::Impl::Waiter& waiter : exchange->waiters) {
      if (at - waiter.since <= limit) continue;
      std::vector<uint32_t> lacking =
          exchange->course->readiness.lacking(waiter.tensor, waiter.step);
      if (lacking.empty()) continue;  // others lack it: rank 0 sees that
      found = error(
          Code::timeout,
          "%s waits for tensor \"%s\" of step %llu since %s, but never made \"%s\" ready%s",
          describe(mesh.rank).c_str(), exchange->tensors[waiter.tensor].name.c_str(),
          static_cast<unsigned long long>(waiter.step), format_duration(at - waiter.since).c_str(),
          exchange->tensors[lacking.front()].name.c_str(),
          lacking.front() == waiter.tensor ? "" : ", which is in the same bucket");
      break;
    }
  }
  if (found) fail(*found, mesh.rank);
}

void Group::Impl::send_heartbeats(Nanos at) {
  if (at < next_heartbeat) return;
  next_heartbeat = at + kHeartbeat;
  tend_branches();
  // The question keeps both sides' clocks of silence at bay, its answer bounds the offset between
  // the two hosts' clocks, and rank 0 learns who waits for whom.
  if (is_root() || mesh.control[0]->failure()) return;
  Waiting own = own_waiting(at);
  Packer question;
  question.number(recorder.now().count)
      .number(static_cast<uint8_t>(own.stuck))
      .number(own.operation.group)
      .number(own.operation.pair)
      .number(own.operation.number)
      .number(own.waits_for)
      .number(own.chunks_done)
      .string(own.signature);
  mesh.control[0]->send(Control::ping, question);
}

// Closing a connection with something unread in it can take back what was sent. Everyone who fails
// says why, and everyone who reads rank 0's goodbye says so: whoever has spoken last words needs
// none from here. A rank that said goodbye because it wants to leave has not: it still waits for
// rank 0's word, and that may be why the group failed.
void Group::Impl::linger() {
  Nanos until = now() + kLinger;
  for (bool open = true; open && now() < until;) {
    open = false;
    for (auto& channel : mesh.control) {
      if (!channel) continue;
      uint32_t peer = channel->peer().index;
      while (auto frame = channel->receive())
        if (frame->type == Control::abort ||
            (frame->type == Control::bye && (left.load() || !is_root())))
          last_words[peer] = true;
      bool told = last_words[peer] && channel->flushed();
      open = open || (!told && !channel->failure());
    }
    if (open) mesh.reactor->run_once(Nanos::from_millis(5));
  }
}

// ---- leaving and starting again ------------------------------------------------------------

// Rank 0, when someone said goodbye: once all have, it is told to all. Others: they were told.
void Group::Impl::say_goodbye() {
  if (is_root()) {
    if (!std::all_of(said_bye.begin(), said_bye.end(), [](bool said) { return said; })) return;
    for (auto& channel : mesh.control)
      if (channel) channel->send(Control::bye, Packer());
  } else {
    mesh.control[0]->send(Control::bye, Packer());  // it was read
  }
  std::lock_guard lock(mutex);
  left.store(true);
  changed.notify_all();
}

Result<void> Group::leave() {
  return impl_->together([&] { return impl_->leave(); });
}

Result<void> Group::Impl::leave() {
  WEFT_TRY(may_wait());
  if (auto reason = current_failure()) return *std::move(reason);
  if (mesh.ranks == 1) return {};
  post([this] {
    leaving_since = now();
    engine->acknowledge();
    if (!is_root()) {
      mesh.control[0]->send(Control::bye, Packer());
      return;
    }
    said_bye[0] = true;  // as if rank 0 had told itself
    if (!first_bye) first_bye = now();
    say_goodbye();
  });
  drive_until([&] { return left.load(); });
  if (left.load()) return {};
  return *current_failure();
}

Result<std::shared_ptr<Group::Impl>> Group::Impl::rebuilt(Nanos settle, uint32_t least) {
  join::ReunionOptions survivors;
  {
    std::lock_guard lock(mutex);
    if (!failure)
      return error(Code::invalid_argument, "the group has not failed: there is nothing to rebuild");
    survivors.lost = culprit;
  }
  if (survivors.lost == mesh.rank) survivors.lost.reset();  // it is here after all
  survivors.rank = mesh.rank;
  survivors.ranks = mesh.ranks;
  survivors.members = mesh.members;
  survivors.least = least;
  survivors.settle = settle;
  {
    // Whoever comes from the old group finds nobody; the new one listens in its place.
    auto sits = take_seat();
    // Nobody turns this group any more: its last words go now, or never.
    if (!options.progress_thread) {
      linger();
      for (auto& channel : mesh.control)
        if (channel && !channel->flushed()) channel->hang_up();  // that is understood too
    }
    if (mesh.acceptor) listener = mesh.acceptor->listener();
    mesh.acceptor.reset();
  }
  survivors.listener = listener;
  if (!survivors.listener)
    return error(Code::peer_lost, "nobody is left to rebuild the group with");
  Options again = options;
  again.probe = false;
  return Impl::join(again, recorder, epoch + 1, &survivors);
}

Result<std::unique_ptr<Group>> Group::rebuild(Nanos settle, uint32_t least) {
  return impl_->alone([&]() -> Result<std::unique_ptr<Group>> {
    WEFT_TRY(impl_->may_wait());
    // A rank that is lost before the new group has begun to work ends that group for all who are in
    // it, whether or not their program has seen it: they begin again from there.
    std::vector<std::shared_ptr<Impl>> failed = {impl_};
    for (uint32_t left = impl_->mesh.ranks;; --left) {
      WEFT_ASSIGN(auto next, failed.back()->rebuilt(settle, least));
      if (!next->has_failed.load())
        return std::unique_ptr<Group>(new Group(std::move(next), nullptr, 0));
      if (left == 0) return *next->current_failure();
      failed.push_back(std::move(next));
    }
  });
}

}  // namespace weft::runtime
