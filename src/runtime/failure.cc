// What ends a group, who is to blame, and how a new one is made of those that are left.
#include <algorithm>

#include "group.h"

namespace weft::runtime {

using join::Control;
using join::Packer;

namespace {

constexpr Nanos kHeartbeat = Nanos::from_millis(250);
// A connection that ends may be the echo of another rank's failure, whose own words are on their
// way: wait this long for them before blaming the one that closed it.
constexpr Nanos kGrace = Nanos::from_millis(200);
// Rank 0 sees what everyone waits for, and speaks first.
constexpr Nanos kAfterRoot = Nanos::from_seconds(1);
constexpr Nanos kRelaySilence = Nanos::from_seconds(1);  // four heartbeats
constexpr Nanos kLinger = Nanos::from_millis(500);
constexpr Nanos kRetry = Nanos::from_millis(20);

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
  // Whoever waits gets the failure, and with it its memory back.
  engine->halt();
  WEFT_LOG(runtime, info, "group failed: %s", error.message().c_str());
  recorder.note("failure", error.message());
  Packer reason;
  reason.number(static_cast<uint8_t>(error.code())).number(blamed ? blamed->index : trace::kNone);
  reason.string(error.message().substr(0, 4096));
  for (auto& channel : mesh.control)
    if (channel && !channel->failure()) channel->send(Control::abort, reason);
  std::vector<std::function<void(Result<void>)>> callbacks;
  {
    std::lock_guard lock(mutex);
    failure = error;
    culprit = blamed;
    has_failed.store(true, std::memory_order_release);
    for (auto& [key, state] : works)
      for (auto& callback : state->callbacks) callbacks.push_back(std::move(callback));
    works.clear();
    changed.notify_all();
  }
  for (auto& callback : callbacks) callback(error);
}

Group::Impl::Waiting Group::Impl::own_waiting(Nanos at) const {
  Waiting out;
  collective::Progress progress = engine->progress();
  out.stuck = progress.operations > 0 && at - progress.last_change > options.progress_deadline;
  if (progress.operations == 0) return out;
  out.operation = progress.oldest.key;
  out.chunks_done = progress.oldest.chunks_done;
  if (progress.oldest.collective != Collective::all_to_all &&
      progress.oldest.collective != Collective::point_to_point)
    out.signature = progress.oldest.signature;
  if (progress.oldest.waits_for)
    out.waits_for = *progress.oldest.waits_for;
  else if (progress.cannot_send_to)
    out.waits_for = *progress.cannot_send_to;
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
               "operation %u is %s on rank %u, but %s on rank %u: all ranks must call the same",
               static_cast<uint32_t>(one.operation) & (kDirectOperations - 1),
               one.signature.c_str(), peer.index, two.signature.c_str(), other),
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
    auto number = static_cast<uint32_t>(waiting[r].operation) & (kDirectOperations - 1);
    bool absent = waiting[last].operation != waiting[r].operation;
    fail(error(Code::timeout,
               "%s %s operation %u, for which %s waits; nothing moved for more than %s",
               describe({last}).c_str(), absent ? "has not come to" : "does not go on with", number,
               describe({waiter}).c_str(), format_duration(options.progress_deadline).c_str()),
         Rank{last});
    return;
  }
}

void Group::Impl::check_deadlines(Nanos at) {
  {
    std::lock_guard lock(mutex);
    if (left) return;
  }
  auto in_flight = [&] {
    collective::Progress progress = engine->progress();
    if (progress.operations == 0) return std::string("nothing was in flight");
    return text("operation %u (%s) was in flight, %s of %s received, last progress %s ago",
                progress.oldest.number & (kDirectOperations - 1), progress.oldest.signature.c_str(),
                format_size(static_cast<double>(progress.oldest.bytes_done)).c_str(),
                format_size(static_cast<double>(progress.oldest.bytes_total)).c_str(),
                format_duration(at - progress.last_change).c_str());
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
  if (is_root()) blame(at);
  if (failed) return;
  collective::Progress progress = engine->progress();
  if (progress.operations > 0 &&
      at - progress.last_change > options.progress_deadline + kAfterRoot) {
    uint32_t peer = progress.oldest.waits_for ? *progress.oldest.waits_for
                                              : progress.cannot_send_to.value_or(mesh.next());
    fail(error(Code::timeout, "%s does not %s; %s", describe({peer}).c_str(),
               progress.oldest.waits_for ? "send data" : "take data", in_flight().c_str()),
         Rank{peer});
    return;
  }
  if (leaving_since && at - *leaving_since > options.progress_deadline + kAfterRoot + kAfterRoot) {
    auto absent = std::find(said_bye.begin(), said_bye.end(), false);
    Rank peer{is_root() ? static_cast<uint32_t>(absent - said_bye.begin()) : 0};
    fail(error(Code::timeout, "%s did not want to leave within %s", describe(peer).c_str(),
               format_duration(at - *leaving_since).c_str()),
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
    lacking_since = at;
  } else if (at - *lacking_since > options.ready_deadline) {
    Rank peer = lacking->missing.front();
    fail(error(Code::timeout,
               "%s has no gradients of bucket %u in step %llu, for which others wait since %s",
               describe(peer).c_str(), lacking->bucket,
               static_cast<unsigned long long>(lacking->step),
               format_duration(at - *lacking_since).c_str()),
         peer);
  }
}

void Group::Impl::send_heartbeats(Nanos at) {
  if (at < next_heartbeat) return;
  next_heartbeat = at + kHeartbeat;
  // The question keeps both sides' clocks of silence at bay, its answer bounds the offset between
  // the two hosts' clocks, and rank 0 learns who waits for whom.
  if (is_root() || mesh.control[0]->failure()) return;
  Waiting own = own_waiting(at);
  Packer question;
  question.number(recorder.now().count)
      .number(static_cast<uint8_t>(own.stuck))
      .number(own.operation)
      .number(own.waits_for)
      .number(own.chunks_done)
      .string(own.signature);
  mesh.control[0]->send(Control::ping, question);
}

// Closing a connection with something unread in it can take back what was sent. Everyone who fails
// says why, and everyone who reads rank 0's goodbye says so: whoever has spoken last words needs
// none from here.
void Group::Impl::linger() {
  Nanos until = now() + kLinger;
  for (bool open = true; open && now() < until;) {
    open = false;
    for (auto& channel : mesh.control) {
      if (!channel) continue;
      uint32_t peer = channel->peer().index;
      while (auto frame = channel->receive())
        if (frame->type == Control::abort || frame->type == Control::bye) last_words[peer] = true;
      open = open || (!last_words[peer] && !channel->failure());
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
  left = true;
  changed.notify_all();
}

Result<void> Group::leave() {
  Impl* impl = impl_.get();
  if (auto failure = impl->current_failure()) return *failure;
  if (impl->mesh.ranks == 1) return {};
  impl->post([impl] {
    impl->leaving_since = impl->now();
    impl->engine->acknowledge();
    if (!impl->is_root()) {
      impl->mesh.control[0]->send(Control::bye, Packer());
      return;
    }
    impl->said_bye[0] = true;  // as if rank 0 had told itself
    impl->say_goodbye();
  });
  impl->drive_until([&] {
    std::lock_guard lock(impl->mutex);
    return impl->left;
  });
  std::lock_guard lock(impl->mutex);
  if (impl->left) return {};
  return *impl->failure;
}

Result<std::unique_ptr<Group>> Group::rebuild(Nanos settle) {
  Impl& old = *impl_;
  std::optional<Rank> lost;
  {
    std::lock_guard lock(old.mutex);
    if (!old.failure)
      return error(Code::invalid_argument, "the group has not failed: there is nothing to rebuild");
    lost = old.culprit;
  }
  // Everyone knows whom the failure is blamed on, so everyone finds the same new root: the lowest
  // of the others, at the address where it listened before.
  uint32_t root = lost && lost->index == 0 ? 1 : 0;
  if (root >= old.mesh.ranks)
    return error(Code::peer_lost, "nobody is left to rebuild the group with");
  const join::Member& meeting = old.mesh.members[root];
  Options options = old.options;
  options.rendezvous = meeting.address.find(':') == std::string::npos
                           ? text("%s:%u", meeting.address.c_str(), unsigned{meeting.port})
                           : text("[%s]:%u", meeting.address.c_str(), unsigned{meeting.port});
  options.rank = old.mesh.rank;
  options.ranks = old.mesh.ranks;
  Impl::Survivors survivors{Rank{root}, settle, nullptr};
  {
    // Whoever comes from the old group finds nobody; the new one listens in its place.
    auto sits = old.take_seat();
    if (old.mesh.acceptor && options.rank == survivors.root)
      survivors.listener = old.mesh.acceptor->listener();
    old.mesh.acceptor.reset();
  }
  options.probe = false;
  auto reactor = old.mesh.network->reactor();
  Nanos until = old.now() + options.join_deadline;
  for (;;) {
    auto impl = Impl::join(options, old.recorder, old.epoch + 1, survivors);
    if (impl) return std::unique_ptr<Group>(new Group(std::move(*impl), nullptr, 0));
    // The new root may still listen for the old group, which refuses whoever comes from the new.
    options.join_deadline = until - old.now();
    bool refused = impl.error().code() == Code::peer_lost && options.rank != Rank{root};
    if (!refused || options.join_deadline <= kRetry) return std::move(impl).error();
    reactor->run_once(kRetry);
  }
}

}  // namespace weft::runtime
