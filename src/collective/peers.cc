// The lanes to and from other ranks: opened when needed, opened again when they break.
#include <algorithm>
#include <array>

#include "keys.h"

namespace weft::collective {

using lane::Lane;

namespace {

// Nobody listens where the rank did: if its process lived, it would.
constexpr Nanos kReopen = Nanos::from_seconds(3);
// Somebody does, and is slow: many others may want something of it, strangers among them.
constexpr Nanos kAnswer = Nanos::from_seconds(12);
constexpr uint32_t kServedLanes = 32;  // for which a worker has buffers

constexpr std::array<const char*, 5> kTcpFields = {
    "round_trip_us", "congestion_window", "retransmitted", "unsent_bytes", "delivery_bytes_per_s"};

}  // namespace

Engine::Engine(const Options& options, join::Mesh& mesh, capture::Recorder& recorder,
               OnLost on_lost, OnAsked on_asked, OnBranch on_branch)
    : options_(options),
      mesh_(mesh),
      recorder_(recorder),
      clock_(recorder),
      on_lost_(std::move(on_lost)),
      settings_(options),
      peers_(mesh.ranks),
      // Ranks number their messages in ranges of their own; 0 stays free for "none".
      next_message_((uint64_t{mesh.rank.index} + 1) << 40),
      last_change_(mesh.network->clock().now()) {
  operation_track_ =
      recorder_.track({trace::TrackType::stream, "operations", trace::kNone16, trace::kNone16});
  for (const char* field : kTcpFields) tcp_names_.push_back(recorder_.name(field));
  for (uint8_t c = 0; c <= static_cast<uint8_t>(schedule::Collective::point_to_point); ++c)
    collective_names_.push_back(
        c == 0 ? trace::kNone
               : recorder_.name(schedule::name_of(static_cast<schedule::Collective>(c))));
  on_asked_ = std::move(on_asked);
  on_branch_ = std::move(on_branch);
}

Engine::~Engine() = default;

Result<void> Engine::begin() {
  WEFT_ASSIGN(workers_, start_workers(settings_, options_.chunk_bytes));
  join::Links::Callbacks callbacks;
  callbacks.opened = [this](Rank rank, uint16_t number, std::unique_ptr<net::Socket> socket,
                            std::shared_ptr<lane::shm::Segment> shared) {
    uint32_t lane = add_lane(true, rank, number, std::move(socket), std::move(shared));
    if (!slots_[lane].broken) peers_[rank.index].out[number] = lane;
  };
  callbacks.accepted = [this](Rank rank, uint16_t number, std::unique_ptr<net::Socket> socket,
                              std::shared_ptr<lane::shm::Segment> shared) {
    // Data that comes when all is over finds no place.
    if (halted_) return;
    replace_lane(rank, number);
    add_lane(false, rank, number, std::move(socket), std::move(shared));
  };
  callbacks.misbehaved = [this](Rank rank, Error error) { on_lost_(rank, std::move(error)); };
  callbacks.asked = on_asked_;
  callbacks.branched = on_branch_;
  links_ = std::make_unique<join::Links>(mesh_, std::move(callbacks));
  return {};
}

// None where the thread that drives serves the lanes itself. `chunk_bytes`: of the largest chunk.
Result<std::shared_ptr<lane::LaneWorkers>> Engine::start_workers(const LaneSettings& settings,
                                                                 uint64_t chunk_bytes) {
  std::shared_ptr<lane::LaneWorkers> started;
  if (!settings.worker || mesh_.ranks == 1) return started;
  lane::LaneWorkers::Options options;
  options.kind = *settings.worker;
  options.count = settings.workers;
  options.lanes = std::clamp<uint32_t>(settings.lanes, 1, kServedLanes);
  options.chunk_bytes = static_cast<uint32_t>(chunk_bytes);
  WEFT_ASSIGN(started,
              lane::LaneWorkers::start(
                  options, *mesh_.network, *mesh_.reactor, static_cast<lane::ChunkHandler&>(*this),
                  clock_, [this](uint32_t lane, Error error) { broke(lane, std::move(error)); }));
  std::lock_guard lock(workers_mutex_);
  all_workers_.push_back(started);
  return started;
}

Nanos Engine::workers_processor_time() const {
  std::lock_guard lock(workers_mutex_);
  Nanos sum = dismissed_time_;
  for (const auto& workers : all_workers_) sum += workers->processor_time();
  return sum;
}

bool Engine::has_processes() const {
  std::lock_guard lock(workers_mutex_);
  return settings_.worker == lane::LaneWorkers::Kind::process;
}

// ---- other lanes -------------------------------------------------------------------------

Result<void> Engine::get_ready(const LaneSettings& settings) {
  WEFT_CHECK(!change_);
  Change change{settings, workers_, false};
  // What a lane and a worker have from their beginning: how much may wait unsent, room for chunks.
  change.other_service =
      settings.chunk_bytes != settings_.chunk_bytes || settings.worker != settings_.worker ||
      (settings.worker &&
       (settings.workers != settings_.workers || settings.lanes != settings_.lanes));
  if (change.other_service) {
    // What went under the settings before may have to go again.
    const uint64_t largest = std::max({options_.chunk_bytes, settings_.chunk_bytes,
                                       settings.chunk_bytes, uint64_t{schedule::kKeptBytes}});
    WEFT_ASSIGN(workers_, start_workers(settings, largest));
  }
  // It stays at the most there ever were: a rank that has not changed yet may open one of these.
  mesh_.lanes = std::max(mesh_.lanes, settings.lanes);
  change_ = std::move(change);
  return {};
}

void Engine::change_lanes() {
  const Change change = *std::exchange(change_, std::nullopt);
  if (halted_) return;
  {
    std::lock_guard lock(workers_mutex_);
    settings_ = change.settings;
  }
  for (uint32_t rank = 0; rank < peers_.size(); ++rank)
    if (peers_[rank].wanted) renew_lanes(rank, change.other_service);
  dismiss_workers();
}

void Engine::forget_change() {
  workers_ = std::exchange(change_, std::nullopt)->workers_before;
  dismiss_workers();
}

uint16_t Engine::lanes_to(uint32_t rank) const {
  return mesh_.members[rank].shares_memory ? uint16_t{1} : settings_.lanes;
}

// Lanes through memory have no part in it: there is one, and nobody else serves it.
void Engine::renew_lanes(uint32_t rank, bool all) {
  Peer& to = peers_[rank];
  const auto before = static_cast<uint16_t>(to.out.size()), count = lanes_to(rank);
  links_->close({rank}, count);
  for (uint16_t number = all ? uint16_t{0} : count; number < before; ++number) {
    if (!to.out[number]) continue;  // it is being opened
    Slot& slot = slots_[*to.out[number]];
    if (slot.lane->shared()) continue;
    slot.lane->halt();
    broke(*to.out[number], error(Code::peer_lost, "it is closed, because the plan changed"));
  }
  to.out.resize(count);
  dispatcher_.change_lanes(rank, count);
  for (uint16_t number = before; number < count; ++number) links_->open({rank}, number);
}

// Those that serve nothing any more, and will not.
void Engine::dismiss_workers() {
  std::vector<std::shared_ptr<lane::LaneWorkers>> gone;
  {
    std::lock_guard lock(workers_mutex_);
    if (all_workers_.size() < 2 && (all_workers_.empty() || all_workers_.front() == workers_))
      return;
    std::erase_if(all_workers_, [&](const std::shared_ptr<lane::LaneWorkers>& one) {
      const bool used = one == workers_ || (change_ && one == change_->workers_before) ||
                        std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
                          return slot.lane && slot.served_by == one.get();
                        });
      if (used) return false;
      dismissed_time_ += one->processor_time();
      gone.push_back(one);
      return true;
    });
  }
}

uint32_t Engine::add_lane(bool outgoing, Rank rank, uint16_t number,
                          std::unique_ptr<net::Socket> socket,
                          std::shared_ptr<lane::shm::Segment> shared) {
  auto index = static_cast<uint32_t>(slots_.size());
  for (uint32_t i = 0; i < slots_.size(); ++i)
    if (!slots_[i].lane) index = i;
  if (index == slots_.size()) slots_.emplace_back();
  Slot& slot = slots_[index];
  slot = {};
  slot.peer = rank.index;
  slot.number = number;
  slot.outgoing = outgoing;
  slot.served_by = shared ? nullptr : workers_.get();
  slot.track = recorder_.track(
      {outgoing ? trace::TrackType::lane_out : trace::TrackType::lane_in,
       text(outgoing ? "lane %u to rank %u" : "lane %u from rank %u", unsigned{number}, rank.index),
       number, static_cast<uint16_t>(rank.index)});
  uint32_t unsent = cost::unsent_limit(settings_.chunk_bytes);
  if (auto rate = options_.lane_rate.find(number); outgoing && rate != options_.lane_rate.end())
    socket->limit_rate(rate->second);
  // Memory needs no system calls: this thread serves it itself.
  if (slot.served_by != nullptr) {
    slots_[index].lane = slot.served_by->serve(outgoing ? Lane::Role::out : Lane::Role::in,
                                               std::move(socket), number, index, unsent);
    return index;
  }
  auto made = std::make_unique<Lane>(
      outgoing ? Lane::Role::out : Lane::Role::in, *mesh_.reactor, std::move(socket),
      std::move(shared), index, static_cast<lane::ChunkHandler&>(*this), clock_, unsent,
      [this](uint32_t lane, Error error) { broke(lane, std::move(error)); });
  if (!options_.check_inside_machine) made->trust_this_machine();
  slots_[index].lane = std::move(made);
  return index;
}

// A rank opens a lane again after it saw it break. What was on its way there comes again.
void Engine::replace_lane(Rank rank, uint16_t number) {
  for (uint32_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.outgoing || slot.peer != rank.index || slot.number != number) continue;
    if (!slot.lane || slot.broken) continue;
    if (!slot.lane->drain() || slot.broken) continue;
    slot.lane->halt();
    broke(i, error(Code::peer_lost, "its sender opened it again"));
  }
}

void Engine::prepare(Rank rank) { open_lanes(rank.index); }

bool Engine::connected(Rank rank) const {
  const Peer& to = peers_[rank.index];
  return std::any_of(to.out.begin(), to.out.end(), [&](std::optional<uint32_t> lane) {
    return lane && slots_[*lane].lane->ready();
  });
}

void Engine::open_lanes(uint32_t rank) {
  Peer& to = peers_[rank];
  if (to.wanted || rank == mesh_.rank.index) return;
  to.wanted = true;
  to.down_since = mesh_.network->clock().now();
  const uint16_t count = lanes_to(rank);
  to.out.resize(count);
  dispatcher_.connect(rank, count);
  for (uint16_t lane = 0; lane < count; ++lane) links_->open({rank}, lane);
}

// A lane has ended. What it may not have delivered is sent again; the lane itself is opened again.
// Its memory stays until the turn is over, because it is the one that called.
void Engine::broke(uint32_t lane, Error error) {
  Slot& slot = slots_[lane];
  slot.broken = true;
  broken_.push_back(lane);
  if (halted_) return;
  if (error.code() != Code::peer_lost) {
    // What this process may not have more of is nobody else's fault.
    on_lost_(error.code() == Code::io ? mesh_.rank : Rank{slot.peer}, std::move(error));
    return;
  }
  if (slot.early) early_bytes_ -= slot.early->header.length;
  slot.early.reset();
  slot.landing.where = Landing::Where::nowhere;
  if (!slot.outgoing) return;  // its sender opens another
  WEFT_LOG(collective, info, "lane %u to rank %u broke: %s", unsigned{slot.number}, slot.peer,
           error.message().c_str());
  Peer& to = peers_[slot.peer];
  to.out[slot.number].reset();
  std::vector<lane::LanePort::Unsettled> kept;
  if (slot.lane) kept = slot.lane->take_unsettled();
  size_t next = 0;
  for (const auto& [ticket, what] : dispatcher_.broke(slot.peer, slot.number)) {
    lane::LanePort::Unsettled& chunk = kept.at(next++);
    WEFT_CHECK(chunk.token == ticket);
    if (resends_.contains(ticket)) continue;  // it was being sent again, and its copy is still here
    if (!chunk.retained) {
      // It may have arrived, and what followed from it be on its way to the same place: a copy
      // does not change while it is sent.
      chunk.header.again = true;
      chunk.payload = copy_of(*by_order_.at(what.operation), what.send);
    }
    resends_.emplace(ticket, Resend{chunk.header, std::move(chunk.payload)});
  }
  bool any = std::any_of(to.out.begin(), to.out.end(), [](const auto& other) { return !!other; });
  if (!any) to.down_since = mesh_.network->clock().now();
  if (slot.number < lanes_to(slot.peer)) links_->open({slot.peer}, slot.number);
}

// Lanes that ended go; a rank to which no lane can be opened for too long is lost.
void Engine::reap(Nanos now) {
  if (!broken_.empty()) {
    for (uint32_t lane : std::exchange(broken_, {})) slots_[lane].lane.reset();
    dismiss_workers();
  }
  for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& to = peers_[rank];
    if (!to.down_since) continue;
    if (connected({rank})) {
      to.down_since.reset();
      continue;
    }
    if (now - *to.down_since < kReopen) continue;
    join::Links::Attempts attempts = links_->attempts({rank});
    if (attempts.waiting) {
      to.down_since = now;  // this rank had no time for it yet
      continue;
    }
    Nanos patience = attempts.refused || attempts.own ? kReopen : kAnswer;
    if (now - *to.down_since < patience) continue;
    to.down_since.reset();
    if (attempts.own)
      on_lost_(mesh_.rank, std::move(*attempts.own).in(text("no lane to rank %u", rank)));
    else
      on_lost_({rank}, error(Code::peer_lost, "no lane to it could be opened within %s: %s",
                             format_duration(patience).c_str(),
                             attempts.problem.empty() ? "no answer" : attempts.problem.c_str()));
    return;
  }
}

schedule::Room Engine::room_of(uint32_t rank, uint16_t number) const {
  std::optional<uint32_t> lane = peers_[rank].out[number];
  return lane ? slots_[*lane].lane->room() : schedule::Room::none;
}

void Engine::send_some() {
  dispatcher_.begin_turn();
  auto room = [this](uint32_t rank, uint16_t number) { return room_of(rank, number); };
  while ((handing_ = dispatcher_.next(room))) {
    slots_[*peers_[handing_->peer].out[handing_->lane]].lane->send_one();
    WEFT_CHECK(!handing_);  // whoever has room takes
  }
  more_to_send_ = dispatcher_.cut_short();
}

void Engine::send_receipts(Nanos now) {
  if (owed_.due(now - owed_since_ > schedule::kReceiptPatience))
    for (Slot& slot : slots_)
      if (slot.lane && !slot.outgoing && !slot.broken) slot.lane->send_receipts();
  more_to_send_ = more_to_send_ || owed_.any();
}

std::vector<Key> Engine::poll(Nanos now) {
  if (halted_ || !links_) return {};
  links_->tick(now);
  for (const auto& workers : all_workers_) workers->watch(now);
  send_some();
  send_receipts(now);
  reap(now);
  for (const Key& key : finished_) {
    auto found = running_.find(key);
    by_order_.erase(found->second.order);
    running_.erase(found);
  }
  return std::exchange(finished_, {});
}

void Engine::acknowledge() {
  for (Slot& slot : slots_)
    if (slot.lane && !slot.outgoing && !slot.broken) slot.lane->send_receipts(true);
}

void Engine::halt() {
  halted_ = true;
  more_to_send_ = false;
  for (Slot& slot : slots_)
    if (slot.lane) slot.lane->halt();
}

std::vector<LaneStatus> Engine::lanes() const {
  std::vector<LaneStatus> out;
  for (const Slot& slot : slots_)
    if (slot.lane)
      out.push_back({slot.peer, slot.number, slot.outgoing, slot.lane->shared(), !slot.broken,
                     slot.lane->counters()});
  return out;
}

void Engine::record_tcp_info() {
  for (const Slot& slot : slots_) {
    if (!slot.lane || !slot.outgoing) continue;
    auto info = slot.lane->tcp_info();
    if (!info) continue;
    std::array<uint64_t, kTcpFields.size()> values = {info->round_trip_us, info->congestion_window,
                                                      info->retransmitted, info->unsent_bytes,
                                                      info->delivery_bytes_per_s};
    trace::Event event;
    event.start_ns = recorder_.now().count;
    event.shape = trace::Shape::counter;
    event.kind = trace::Kind::tcp_info;
    event.track = slot.track;
    event.lane = slot.number;
    event.peer = static_cast<uint16_t>(slot.peer);
    for (size_t field = 0; field < values.size(); ++field) {
      event.name = tcp_names_[field];
      event.duration_ns = static_cast<int64_t>(values[field]);
      recorder_.record(event);
    }
  }
}

}  // namespace weft::collective
