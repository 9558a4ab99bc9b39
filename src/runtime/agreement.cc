// Who has which bucket, and what starts next: reports go up a tree of ranks to rank 0, what it
// starts comes down the same way (weft/schedule.h). Between rank 0 and the ranks right below it
// these frames use the control channels; every other rank opens a branch to the one above it.
#include <algorithm>

#include "group.h"

namespace weft::runtime {

using join::Control;
using join::Frame;

namespace {
// A rank that is asked who owes a bucket finds out, or passes the question on, within this time.
constexpr Nanos kAskAgain = Nanos::from_seconds(1);
constexpr Nanos kNoAnswer = Nanos::from_seconds(5);
}  // namespace

// ---- branches ----------------------------------------------------------------------------

bool Group::Impl::is_branch(uint32_t peer) const {
  const uint32_t own = mesh.rank.index;
  if (own == 0 || peer == 0) return false;
  return tree.above(own) == peer || tree.above(peer) == own;
}

void Group::Impl::branched(Rank peer, std::unique_ptr<net::Socket> socket) {
  // Before rank 0 has said what the tree is, those below may know it already.
  if (costs && !is_branch(peer.index)) return misplaced(peer);
  Branch made{std::make_unique<join::ControlChannel>(*mesh.reactor, std::move(socket), peer), false,
              now()};
  if (costs && tree.above(mesh.rank.index) == peer.index) {
    made.channel->send(Control::joined, Packer());
    made.used = true;
  }
  branches.insert_or_assign(peer.index, std::move(made));
}

void Group::Impl::misplaced(Rank peer) {
  fail(error(Code::invalid_argument, "%s opened a branch to %s, which is not above it",
             describe(peer).c_str(), describe(mesh.rank).c_str()),
       peer);
}

// All that this rank needs are there before anything can be reported.
Result<void> Group::Impl::open_branches() {
  for (const auto& [peer, branch] : branches)
    if (!is_branch(peer)) misplaced({peer});
  const uint32_t own = mesh.rank.index;
  if (own > 0 && is_branch(tree.above(own))) engine->open_branch({tree.above(own)});
  std::vector<uint32_t> awaited;
  for (uint32_t peer = 1; peer < mesh.ranks; ++peer)
    if (is_branch(peer)) awaited.push_back(peer);
  auto is_there = [&](uint32_t peer) {
    auto found = branches.find(peer);
    return found != branches.end() && found->second.used;
  };
  Nanos until = ran() + options.join_deadline;
  for (;;) {
    if (has_failed.load()) return *current_failure();
    std::erase_if(awaited, is_there);
    if (awaited.empty()) return {};
    turn(Nanos::from_millis(1));
    if (ran() > until && !has_failed.load())
      return error(Code::timeout, "join: no branch to %s was opened within %s",
                   describe({awaited.front()}).c_str(),
                   format_duration(options.join_deadline).c_str());
  }
}

void Group::Impl::handle_branches() {
  for (auto& [rank, branch] : branches) {
    while (auto frame = branch.channel->receive()) {
      branch.heard = now();
      handle_branch({rank}, branch, *frame);
      if (failed) return;
    }
    // When this rank wants to leave, the others may have left already.
    const std::optional<Error>& broken = branch.channel->failure();
    if (!broken || leaving_since) continue;
    // What this rank lacks is its own fault, and no other branch mends it. Otherwise one that was
    // given up before it was used is replaced.
    const bool own = broken->code() == Code::io || broken->code() == Code::exhausted;
    if (own || branch.used) suspect(own ? mesh.rank : Rank{rank}, *broken);
  }
}

void Group::Impl::handle_branch(Rank peer, Branch& branch, const Frame& frame) {
  switch (frame.type) {
    case Control::joined: branch.used = true; return;
    case Control::pong: return;  // it lives
    case Control::ready: return hear_ready(peer, frame);
    case Control::start: return hear_starts(peer, frame);
    case Control::owed: return hear_owed(peer, frame);
    default: return makes_no_sense(peer, frame.type);
  }
}

void Group::Impl::tend_branches() {
  for (auto& [rank, branch] : branches)
    if (branch.used) branch.channel->send(Control::pong, Packer());
}

void Group::Impl::check_branches(Nanos at) {
  if (leaving_since) return;
  for (const auto& [rank, branch] : branches) {
    Nanos silent = at - branch.heard;
    if (!branch.used || silent <= options.silence_deadline) continue;
    return fail(
        error(Code::peer_lost, "%s gave no sign of life to %s for %s", describe({rank}).c_str(),
              describe(mesh.rank).c_str(), format_duration(silent).c_str()),
        Rank{rank});
  }
}

join::ControlChannel* Group::Impl::channel_to(uint32_t peer) {
  if (is_root()) return mesh.control[peer].get();
  if (peer == 0) return mesh.control[0].get();
  auto found = branches.find(peer);
  return found == branches.end() ? nullptr : found->second.channel.get();
}

void Group::Impl::tell(uint32_t peer, Control type, const Packer& words) {
  join::ControlChannel* channel = channel_to(peer);
  if (channel == nullptr) return;
  ++frames_told;
  channel->send(type, words);
}

// ---- up ------------------------------------------------------------------------------------

void Group::Impl::bucket_ready(uint32_t bucket, uint64_t step) {
  auto noted = has_ready(mesh.rank, bucket, step);
  WEFT_CHECK(noted.ok());
}

Result<void> Group::Impl::has_ready(Rank rank, uint32_t bucket, uint64_t step) {
  if (is_root()) {
    WEFT_TRY(exchange->course->admission->ready(rank, bucket, step));
    admit();
    return {};
  }
  WEFT_ASSIGN(bool all_have_it, exchange->course->reports->ready(rank, bucket, step));
  if (!all_have_it) return {};
  Packer words;
  words.number(bucket).number(step);
  const uint32_t above = tree.above(mesh.rank.index);
  tell(above, Control::ready, words);
  record_control(says_ready, bucket, step, {above});
  return {};
}

void Group::Impl::hear_ready(Rank peer, const Frame& frame) {
  Unpacker fields(frame.payload);
  auto bucket = fields.number<uint32_t>();
  auto step = fields.number<uint64_t>();
  if (!fields.complete() || !exchange) return makes_no_sense(peer, frame.type);
  ++frames_heard;
  if (bucket < exchange->course->layout.buckets.size())
    record_control(hears_ready, bucket, step, peer);
  if (auto noted = has_ready(peer, bucket, step); !noted) fail(std::move(noted).error(), peer);
}

// ---- down ----------------------------------------------------------------------------------

void Group::Impl::hand_down(const Packer& words) {
  const uint32_t own = mesh.rank.index, first = tree.first_below(own);
  for (uint32_t peer = first; peer < first + tree.below(own); ++peer)
    tell(peer, Control::start, words);
}

// Rank 0: everything that may start now starts, in one order, everywhere.
void Group::Impl::admit() {
  for (;;) {
    Packer words;
    std::vector<schedule::Start> starts;
    // In frames well below the limit of a control frame.
    while (starts.size() < 4096) {
      auto next = exchange->course->admission->next();
      if (!next) break;
      words.number(next->operation).number(next->piece).number(next->step);
      starts.push_back(*next);
    }
    if (starts.empty()) return;
    hand_down(words);
    for (const schedule::Start& begin : starts) {
      const schedule::Piece& piece = exchange->course->layout.pieces[begin.piece];
      trace::Event event;
      event.start_ns = recorder.now().count;
      event.shape = trace::Shape::instant;
      event.kind = trace::Kind::admitted;
      event.track = control_track;
      event.operation = collective::trace_number({collective::kExchangeGroup, 0, begin.operation});
      event.iteration = static_cast<uint32_t>(begin.step);
      event.bucket = piece.bucket;
      event.partition = piece.partition;
      event.bytes = piece.elements * exchange->course->layout.buckets[piece.bucket].element_bytes;
      recorder.record(event);
      start(begin);
      if (failed) return;
    }
  }
}

void Group::Impl::hear_starts(Rank peer, const Frame& frame) {
  if (is_root() || !exchange || tree.above(mesh.rank.index) != peer.index)
    return makes_no_sense(peer, frame.type);
  Unpacker fields(frame.payload);
  Packer words;
  std::vector<schedule::Start> starts;
  while (fields.more()) {
    schedule::Start begin;
    begin.operation = fields.number<uint64_t>();
    begin.piece = fields.number<uint32_t>();
    begin.step = fields.number<uint64_t>();
    // They are numbered in the order in which they start.
    if (fields.failed() || begin.piece >= exchange->course->layout.pieces.size() ||
        begin.operation != exchange->told + starts.size())
      return makes_no_sense(peer, frame.type);
    words.number(begin.operation).number(begin.piece).number(begin.step);
    starts.push_back(begin);
  }
  ++frames_heard;
  exchange->told += starts.size();
  hand_down(words);  // first: those below wait for it
  for (const schedule::Start& begin : starts) {
    record_control(hears_start, exchange->course->layout.pieces[begin.piece].bucket, begin.step,
                   peer);
    start(begin);
    if (failed) return;
  }
}

// ---- who owes a bucket ---------------------------------------------------------------------

// Each rank knows which of those right below it have not reported. One with others below it may
// wait for these itself, so it is asked, and passes the question on until it reaches the rank that
// lacks the bucket.
void Group::Impl::check_owed(Nanos at) {
  if (!exchange) return;
  auto lacking =
      is_root() ? exchange->course->admission->lacking() : exchange->course->reports->lacking();
  if (!lacking) {
    lacking_what.reset();
    return;
  }
  std::pair<uint32_t, uint64_t> what{lacking->bucket, lacking->step};
  if (lacking_what != what) {
    lacking_what = what;
    lacking_since = at;
    ask_owed_at = at + options.ready_deadline;
    return;
  }
  if (at <= ask_owed_at) return;
  ask_owed_at = at + kAskAgain;
  find_owing(lacking->missing.front(), lacking->bucket, lacking->step, at - *lacking_since);
}

void Group::Impl::find_owing(Rank missing, uint32_t bucket, uint64_t step, Nanos waited) {
  const bool asks = missing != mesh.rank && tree.below(missing.index) > 0;
  if (asks && waited <= options.ready_deadline + kNoAnswer) {
    Packer words;
    words.number(bucket).number(step).number(waited.count);
    return tell(missing.index, Control::owed, words);
  }
  fail(error(Code::timeout, "%s %s bucket %u in step %llu, for which others wait since %s",
             describe(missing).c_str(), asks ? "does not say who owes" : "has no gradients of",
             bucket, static_cast<unsigned long long>(step), format_duration(waited).c_str()),
       missing);
}

void Group::Impl::hear_owed(Rank peer, const Frame& frame) {
  Unpacker fields(frame.payload);
  auto bucket = fields.number<uint32_t>();
  auto step = fields.number<uint64_t>();
  Nanos waited{fields.number<int64_t>()};
  if (!fields.complete() || is_root() || !exchange ||
      bucket >= exchange->course->layout.buckets.size() ||
      tree.above(mesh.rank.index) != peer.index)
    return makes_no_sense(peer, frame.type);
  // None if the report is on its way by now.
  std::vector<Rank> missing = exchange->course->reports->missing(bucket, step);
  if (!missing.empty()) find_owing(missing.front(), bucket, step, waited);
}

}  // namespace weft::runtime
