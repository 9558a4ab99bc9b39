#include "simulator.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <deque>
#include <memory>
#include <numeric>
#include <queue>

#include "recording.h"
#include "weft/cost.h"

namespace weft::replay {
namespace {

using schedule::Dispatcher;
using schedule::Fifo;
using schedule::Room;
using trace::Kind;

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

enum class What : uint8_t {
  device,     // rank: its device is free, or what it waited for is there
  handed,     // rank, a: layer, b: iteration: its gradients are handed over
  report,     // rank, a: bucket, b: iteration: rank 0 has to read it
  reported,   // the same: rank 0 knows
  begin,      // rank, a: operation
  ended,      // a: operation, on rank 0
  turn,       // rank: the last turn was cut short
  egress,     // rank: a packet may leave
  arrived,    // a: lane, b: how many chunks are complete with this packet
  absorb,     // a: lane: a chunk has been dealt with
  patience,   // rank: those who wait for receipts have waited long enough
  receipt,    // rank, a: lane, b: how many chunks it tells of: it has come back
  receipted,  // rank: it reads those that have come
  breaks,     // a: one of those that break
  returns,    // a: one of these: it is open again
};

struct Event {
  int64_t at;
  uint32_t sequence;
  What what;
  uint16_t rank;
  uint32_t a;
  uint32_t b;
  bool operator>(const Event& other) const {
    return at != other.at ? at > other.at : sequence > other.sequence;
  }
};

struct QueuedChunk {
  uint32_t operation;
  uint32_t send;  // of the sender's program
  schedule::ChunkId id;
  uint32_t bytes;  // with header
  int64_t taken;   // when the lane took it
  uint64_t message;
  bool wants_receipt;
};

struct Lane {
  uint32_t from = 0, to = 0;  // whose networks they are
  uint32_t peer = 0;          // what the sender calls the receiver; not folded: to
  uint16_t index = 0;         // among those from the one to the other
  bool broken = false;
  double flow = 0;           // most bytes a nanosecond
  double unsent = 0;         // in the socket, not yet given to the network's queue
  double held = 0;           // rest of a chunk that the socket did not take
  bool blocked = false;      // the socket has no room until half of it is sent
  double queued = 0;         // in the network's queue
  Fifo<double> packets;      // these, one by one
  Fifo<QueuedChunk> chunks;  // what those bytes are, oldest first
  double head_left = 0;      // bytes of the oldest chunk that have not left
  Fifo<QueuedChunk> flying;  // left whole, not yet absorbed
  uint32_t landed = 0;       // of these: arrived, and the thread will deal with them
  QueuedChunk rest{};        // blocked: the chunk of which `held` bytes are left
  int64_t ready = 0;         // the cap of a flow allows the next packet
  int64_t filled = 0;        // the thread put its last bytes here at this time
  schedule::Receipts receipts;
  uint64_t receipted = 0;  // chunks, by receipts that have left
};

struct Early {
  uint32_t from;
  schedule::ChunkId id;
};

struct Running {
  std::optional<schedule::Steps> steps;
  int64_t begun = 0;
  bool ended = false;
  size_t to_receive = 0;
  std::vector<Early> early;  // arrived before the operation began here
};

// A receipt that has come: so many chunks of a lane have arrived.
struct Unread {
  uint32_t lane;
  uint32_t chunks;
};

// One thing that a device does, after everything in `needs` is summed for the step before.
struct Work {
  Kind kind;
  uint32_t layer;
  std::vector<uint32_t> needs;
  bool from_second;  // not in the first iteration: there is nothing to apply yet
};

struct Device {
  uint32_t iteration = 0;
  size_t next = 0;         // into the program
  int64_t free_at = 0;     // end of the work before
  int64_t wait_since = 0;  // the thread began to wait for what the next work needs
  bool waiting = false;
};

struct Host {
  Dispatcher dispatcher;
  std::vector<std::vector<uint32_t>> lanes_to;  // by rank, by number; made when first needed
  std::vector<uint32_t> lanes;                  // all of these
  std::vector<uint32_t> incoming;
  size_t next_to_send = 0;
  int64_t link_ready = 0;
  int64_t ingress_ready = 0;
  int64_t egress_at = kNever;
  int64_t turn_at = kNever;
  int64_t patience_ends = 0;
  bool patience_is_watched = false;
  Fifo<Unread> unread;
  schedule::Owed owed;
  int64_t thread_free = 0;
  std::vector<int64_t> workers_free;  // empty: the thread serves the sockets itself
  uint64_t next_message = 0;
  std::vector<Running> running;      // by operation
  std::vector<uint32_t> steps_done;  // by tensor
  std::vector<uint32_t> pieces_left;
};

bool rotates(schedule::Algorithm algorithm) {
  return algorithm == schedule::Algorithm::ring || algorithm == schedule::Algorithm::direct;
}

class Simulator {
 public:
  Simulator(const Job& job, const schedule::Layout& layout,
            const std::vector<schedule::Algorithm>& algorithms, const Network& network,
            Recording* recording, const Witness& witness)
      : job_(job),
        layout_(layout),
        algorithms_(algorithms),
        network_(network),
        recording_(recording),
        witness_(witness),
        admission_(layout, static_cast<uint32_t>(job.compute.size())),
        unsent_limit_(cost::unsent_limit(layout.chunk_elements * schedule::kElementBytes)) {
    make_program();
    find_pieces();
    shape_.ranks = job.ranks;
    shape_.chunk_elements = layout.chunk_elements;
    if (!job.folded()) shape_.host_of = job.host_of;
    size_t operations = layout.pieces.size() * job.iterations;
    cores_.assign(network.shared_processor ? network.cores : 0, 0);
    for (uint32_t r = 0; r < (job.folded() ? 1 : job.ranks); ++r) {
      Host& host = hosts_.emplace_back();
      host.lanes_to.resize(job.ranks);
      host.workers_free.assign(network.lane_workers, 0);
      host.running.resize(operations);
      host.steps_done.assign(job.model->tensors.size(), 0);
      host.pieces_left = pieces_of_;
      host.next_message = (uint64_t{r} + 1) << 40;
    }
    count_frames();
    devices_.resize(job.compute.size());
    for (size_t i = 0; i < devices_.size(); ++i) readiness_.emplace_back(layout);
    summed_.assign(job.model->tensors.size(), 0);
    iteration_of_.reserve(operations);
    result_.starts.resize(devices_.size());
  }

  Simulated run() {
    for (uint32_t d = 0; d < devices_.size(); ++d) push(0, What::device, d);
    for (uint32_t i = 0; i < network_.odd_lanes.size(); ++i) {
      const OddLane& odd = network_.odd_lanes[i];
      if (odd.breaks_ns < 0) continue;
      push(odd.breaks_ns, What::breaks, odd.from, i);
      push(odd.returns_ns, What::returns, odd.from, i);
    }
    while (!events_.empty()) {
      Event event = events_.top();
      events_.pop();
      ++result_.events;
      now_ = event.at;
      handle(event);
    }
    double cores = network_.cores;
    if (!network_.shared_processor) cores *= static_cast<double>(hosts_.size());
    if (now_ > 0) result_.processor_busy = worked_ns_ / (cores * static_cast<double>(now_));
    return std::move(result_);
  }

 private:
  // ---- set-up ------------------------------------------------------------------------------

  void make_program() {
    const trace::Model& model = *job_.model;
    size_t layers = model.layers.size();
    produced_.resize(layers);
    std::vector<std::vector<uint32_t>> updated(layers);         // tensors by layer
    std::vector<std::vector<uint32_t>> updates_before(layers);  // layers by layer
    for (uint32_t t = 0; t < model.tensors.size(); ++t) {
      const trace::Tensor& tensor = model.tensors[t];
      produced_[std::min<size_t>(tensor.produced_by, layers - 1)].push_back(t);
      updated[std::min<size_t>(tensor.updated_by, layers - 1)].push_back(t);
      auto& before = updates_before[std::min<size_t>(tensor.consumed_by, layers - 1)];
      uint32_t update = static_cast<uint32_t>(std::min<size_t>(tensor.updated_by, layers - 1));
      if (std::find(before.begin(), before.end(), update) == before.end()) before.push_back(update);
    }
    for (auto& tensors : produced_) std::reverse(tensors.begin(), tensors.end());
    std::vector<bool> placed(layers, false);
    bool by_tensor = layout_.barrier == plan::Barrier::tensor;
    if (!by_tensor) {
      std::vector<uint32_t> all(model.tensors.size());
      for (uint32_t t = 0; t < all.size(); ++t) all[t] = t;
      for (uint32_t l = 0; l < layers; ++l)
        program_.push_back({Kind::update, l, l == 0 ? all : std::vector<uint32_t>(), true});
    }
    for (uint32_t l = 0; l < layers; ++l) {
      if (by_tensor)
        for (uint32_t u : updates_before[l]) {
          if (placed[u]) continue;
          placed[u] = true;
          program_.push_back({Kind::update, u, updated[u], true});
        }
      program_.push_back({Kind::forward, l, {}, false});
    }
    for (uint32_t l = static_cast<uint32_t>(layers); l-- > 0;)
      program_.push_back({Kind::backward, l, {}, false});
  }

  void find_pieces() {
    of_piece_ = schedule::tensors_by_piece(layout_);
    pieces_of_.assign(job_.model->tensors.size(), 0);
    for (const std::vector<uint32_t>& tensors : of_piece_)
      for (uint32_t t : tensors) ++pieces_of_[t];
  }

  void count_frames() {
    uint32_t first = 0;
    for (size_t i = 0; i < job_.compute.size(); ++i) {
      uint32_t end = first + (job_.folded() ? job_.alike[i] : 1);
      frames_of_.push_back(end - std::clamp(network_.ranks_in_delays, first, end));
      first = end;
    }
    frames_ = std::accumulate(frames_of_.begin(), frames_of_.end(), uint64_t{0});
  }

  // The rank whose network a device uses, or that plays this rank's part.
  uint32_t played_by(uint32_t rank) const { return job_.folded() ? 0 : rank; }

  // ---- time --------------------------------------------------------------------------------

  void push(int64_t at, What what, uint32_t rank, uint32_t a = 0, uint32_t b = 0) {
    events_.push({at, sequence_++, what, static_cast<uint16_t>(rank), a, b});
  }

  // A thread works for `ns` from `from` or from when it is free; in a lab a core must be free as
  // well. Returns when it is done.
  int64_t work(int64_t& thread_free, int64_t from, double ns) {
    int64_t start = std::max(from, thread_free);
    if (ns <= 0) return start;
    worked_ns_ += ns;
    if (!cores_.empty()) {
      auto core = std::min_element(cores_.begin(), cores_.end());
      start = std::max(start, *core);
      *core = start + static_cast<int64_t>(ns);
    }
    thread_free = start + static_cast<int64_t>(ns);
    return thread_free;
  }

  // Who serves a lane of a host: a worker of its own choice for ever, or the engine's thread.
  static int64_t& server_of(Host& host, const Lane& lane) {
    if (host.workers_free.empty()) return host.thread_free;
    return host.workers_free[lane.index % host.workers_free.size()];
  }

  void handle(const Event& event) {
    uint32_t r = event.rank;
    switch (event.what) {
      case What::device: return advance(r);
      case What::handed: return handed(r, event.a, event.b);
      case What::report: return read_report(r, event.a, event.b);
      case What::reported: return reported(r, event.a, event.b);
      case What::begin: return begin(r, event.a);
      case What::ended: return ended(event.a);
      case What::turn: hosts_[r].turn_at = kNever; return turn(r);
      case What::egress:
        if (event.at == hosts_[r].egress_at) {
          hosts_[r].egress_at = kNever;
          send_packets(r);
        }
        return;
      case What::arrived: return arrived(lanes_[event.a], event.a, event.b);
      case What::absorb: return absorb(event.a);
      case What::patience: return end_of_patience(r);
      case What::receipt: return receipt(event.a, event.b);
      case What::receipted: return read_receipts(r);
      case What::breaks: return breaks(network_.odd_lanes[event.a]);
      case What::returns: return returns(network_.odd_lanes[event.a]);
    }
  }

  // ---- the device --------------------------------------------------------------------------

  const graph::LayerTimes& times(uint32_t r, uint32_t iteration, uint32_t layer) const {
    const auto& recorded = job_.compute[r];
    return (*recorded[iteration % recorded.size()])[layer];
  }

  // Runs work until something is missing or the run is over.
  void advance(uint32_t r) {
    Device& device = devices_[r];
    const Host& host = hosts_[played_by(r)];
    // Several sums may have woken it; the first one did.
    if (!device.waiting && now_ < device.free_at) return;
    for (;;) {
      const Work& work = program_[device.next];
      // The last gradients are still applied; then the run is over.
      if (work.kind == Kind::backward && device.iteration == job_.iterations) return;
      bool applies = !work.from_second || device.iteration > 0;
      if (applies && !work.needs.empty()) {
        if (!device.waiting) device.wait_since = std::max(now_, device.free_at);
        for (uint32_t t : work.needs)
          if (host.steps_done[t] < device.iteration) {
            device.waiting = true;
            return;
          }
        // The thread that waits finds out a little after the device is free, or after the sum.
        int64_t seen = device.waiting ? now_ : device.free_at + network_.hand_over_ns;
        record_wait(r, work, device, seen);
        device.free_at = std::max(device.free_at, seen);
        device.waiting = false;
      }
      if (applies) run(r, device, work);
      if (++device.next < program_.size()) {
        // Devices do not look ahead of the events around them.
        if (device.free_at > now_) {
          push(device.free_at, What::device, r);
          return;
        }
        continue;
      }
      device.next = 0;
      ++device.iteration;
      push(device.free_at, What::device, r);
      return;
    }
  }

  void run(uint32_t r, Device& device, const Work& work) {
    bool update = work.kind == Kind::update;
    const graph::LayerTimes& own =
        times(r, update ? device.iteration - 1 : device.iteration, work.layer);
    int64_t duration = own.update_ns;
    if (work.kind == Kind::forward) {
      if (work.layer == 0) mark_start(r, device);
      if (device.iteration == job_.iterations) return;
      device.free_at += work.layer == 0 ? 0 : own.gap_before_forward_ns;
      duration = own.forward_ns;
    } else if (work.kind == Kind::backward) {
      device.free_at += own.gap_before_backward_ns;
      duration = own.backward_ns;
    }
    int64_t start = device.free_at;
    device.free_at += duration;
    if (recording_ != nullptr && (!update || duration > 0))
      recording_->compute(r, work.kind, work.layer, device.iteration - (update ? 1 : 0), start,
                          device.free_at);
    if (work.kind == Kind::backward && !produced_[work.layer].empty())
      push(device.free_at + network_.hand_over_ns, What::handed, r, work.layer, device.iteration);
  }

  void mark_start(uint32_t r, const Device& device) {
    std::vector<int64_t>& starts = result_.starts[r];
    if (recording_ != nullptr && !starts.empty())
      recording_->iteration(r, device.iteration - 1, starts.back(), device.free_at);
    starts.push_back(device.free_at);
  }

  void record_wait(uint32_t r, const Work& work, const Device& device, int64_t end) {
    if (recording_ == nullptr) return;
    for (uint32_t t : work.needs)
      recording_->wait(r, t, job_.model->tensors[t].consumed_by, device.iteration - 1,
                       std::min(device.wait_since, end), end);
  }

  // ---- from gradients to operations --------------------------------------------------------

  void handed(uint32_t r, uint32_t layer, uint32_t iteration) {
    for (uint32_t t : produced_[layer]) {
      if (recording_ != nullptr)
        recording_->ready(r, t, layer, layout_.bucket_of[t], iteration, now_);
      if (network_.free) {
        if (++summed_[t] % devices_.size() == 0)
          for (uint32_t other = 0; other < hosts_.size(); ++other)
            sum_is_there(other, t, iteration);
        continue;
      }
      auto bucket = readiness_[r].ready(t, iteration);
      WEFT_CHECK(bucket.ok());
      if (!*bucket) continue;
      // Rank 0 tells itself; the others' report crosses the network.
      bool itself = r == 0 && (!job_.folded() || job_.alike[0] == 1);
      int64_t delay = itself ? network_.report_ns / 2 : network_.report_ns;
      push(now_ + delay, frames_of_[r] > 0 ? What::report : What::reported, r, **bucket, iteration);
    }
  }

  // Frames come to rank 0's thread, one after the other, between its chunks.
  void read_report(uint32_t r, uint32_t bucket, uint32_t iteration) {
    int64_t read = work(hosts_[0].thread_free, now_, network_.receive_ns_per_chunk * frames_of_[r]);
    push(read, What::reported, r, bucket, iteration);
  }

  void reported(uint32_t r, uint32_t bucket, uint32_t iteration) {
    auto noted = admission_.ready({r}, bucket, iteration);
    WEFT_CHECK(noted.ok());
    admit();
  }

  // One frame a rank tells of all that may start now.
  void admit() {
    int64_t told = now_;
    for (bool first = true; auto start = admission_.next(); first = false) {
      WEFT_CHECK(start->operation == iteration_of_.size());
      auto operation = static_cast<uint32_t>(start->operation);  // a simulation has few
      iteration_of_.push_back(static_cast<uint32_t>(start->step));
      result_.order.push_back(start->piece);
      if (recording_ != nullptr)
        recording_->admitted(operation, layout_.pieces[start->piece], iteration_of_.back(), now_);
      if (first && frames_ > 0)
        told = work(hosts_[0].thread_free, now_,
                    network_.send_ns_per_chunk * static_cast<double>(frames_));
      // An operation ends when the rank that began last lets it: that one stands for all.
      if (job_.folded()) {
        push(told + network_.begin_ns, What::begin, 0, operation);
        continue;
      }
      for (uint32_t r = 1; r < job_.ranks; ++r)
        push(told + network_.begin_ns, What::begin, r, operation);
      if (told > now_)
        push(told, What::begin, 0, operation);
      else
        begin(0, operation);
    }
  }

  const schedule::Piece& piece_of(uint32_t operation) const {
    return layout_.pieces[result_.order[operation]];
  }

  std::shared_ptr<const schedule::Program> program_of(uint32_t r, uint32_t operation) {
    uint32_t piece = result_.order[operation];
    shape_.algorithm = algorithms_[piece];
    shape_.elements = layout_.pieces[piece].elements;
    // Parts that differ by an element would not come back as what they left: all are as the
    // largest.
    if (job_.folded() && shape_.algorithm != schedule::Algorithm::doubling)
      shape_.elements = (shape_.elements + job_.ranks - 1) / job_.ranks * job_.ranks;
    shape_.rank = r;
    return programs_.get(shape_);
  }

  void begin(uint32_t r, uint32_t operation) {
    Host& host = hosts_[r];
    Running& running = host.running[operation];
    saw({Seen::What::begins, r, 0, 0, operation});
    running.begun = now_;
    running.steps.emplace(program_of(r, operation));
    running.to_receive = running.steps->program().receives().size();
    allowed_.clear();
    running.steps->start(allowed_);
    offer(r, operation);
    for (const Early& early : std::exchange(running.early, {})) take_in(r, operation, early);
    if (running.steps) finish_if_done(r, operation);
    turn(r);
    tell_arrivals(r, false);
  }

  // Hands what is in allowed_ to the dispatcher.
  void offer(uint32_t r, uint32_t operation) {
    int64_t priority = layout_.buckets[piece_of(operation).bucket].priority;
    const schedule::Program& program = hosts_[r].running[operation].steps->program();
    for (uint32_t send : allowed_) {
      const schedule::Send& what = program.sends()[send];
      connect(r, what.peer);
      hosts_[r].dispatcher.offer(what.peer,
                                 {priority, operation, send,
                                  static_cast<uint32_t>(what.elements * schedule::kElementBytes)});
    }
    allowed_.clear();
  }

  void connect(uint32_t r, uint32_t to) {
    std::vector<uint32_t>& lanes = hosts_[r].lanes_to[to];
    if (!lanes.empty()) return;
    hosts_[r].dispatcher.connect(to, static_cast<uint16_t>(layout_.lanes));
    lanes.assign(layout_.lanes, kNone);
    for (uint32_t number = 0; number < layout_.lanes; ++number)
      open_lane(r, to, static_cast<uint16_t>(number));
  }

  void open_lane(uint32_t r, uint32_t to, uint16_t number) {
    auto index = static_cast<uint32_t>(lanes_.size());
    hosts_[r].lanes_to[to][number] = index;
    hosts_[r].lanes.push_back(index);
    hosts_[played_by(to)].incoming.push_back(index);
    Lane& lane = lanes_.emplace_back();
    lane.from = r;
    lane.to = played_by(to);
    lane.peer = to;
    lane.index = number;
    lane.flow = network_.flow_bytes_per_ns;
    for (const OddLane& odd : network_.odd_lanes)
      if (odd.from == r && odd.to == to && odd.lane == number)
        lane.flow = std::min(lane.flow, odd.bytes_per_ns);
  }

  void breaks(const OddLane& odd) {
    Host& host = hosts_[odd.from];
    if (host.lanes_to[odd.to].empty()) return;
    uint32_t index = std::exchange(host.lanes_to[odd.to][odd.lane], kNone);
    if (index == kNone) return;
    saw({Seen::What::breaks, odd.from, odd.to, odd.lane});
    lanes_[index].broken = true;
    std::erase(host.lanes, index);
    std::erase(hosts_[odd.to].incoming, index);
    if (host.next_to_send >= host.lanes.size()) host.next_to_send = 0;
    host.dispatcher.broke(odd.to, odd.lane);
    turn(odd.from);
  }

  void returns(const OddLane& odd) {
    Host& host = hosts_[odd.from];
    if (host.lanes_to[odd.to].empty() || host.lanes_to[odd.to][odd.lane] != kNone) return;
    saw({Seen::What::returns, odd.from, odd.to, odd.lane});
    open_lane(odd.from, odd.to, odd.lane);
    turn(odd.from);
  }

  // ---- sending -----------------------------------------------------------------------------

  Room room_of(const Host& host, uint32_t to, uint16_t number) const {
    uint32_t index = host.lanes_to[to][number];
    if (index == kNone || lanes_[index].blocked) return Room::none;
    return host.workers_free.empty() ? Room::connection : Room::worker;
  }

  // What the engine does after each thing that happened to it.
  void turn(uint32_t r) {
    Host& host = hosts_[r];
    saw({Seen::What::turn, r});
    host.dispatcher.begin_turn();
    bool filled = false;
    auto room = [&](uint32_t to, uint16_t number) { return room_of(host, to, number); };
    while (auto next = host.dispatcher.next(room)) {
      take(r, *next);
      filled = true;
    }
    // What has arrived meanwhile comes before the next turn.
    if (host.dispatcher.cut_short() && host.turn_at == kNever) {
      host.turn_at = std::max(now_, host.thread_free);
      push(host.turn_at, What::turn, r);
    }
    if (filled) wake_egress(r);
  }

  void take(uint32_t r, const Dispatcher::HandOver& what) {
    Host& host = hosts_[r];
    Lane& lane = lanes_[host.lanes_to[what.peer][what.lane]];
    auto operation = static_cast<uint32_t>(what.chunk.operation);
    auto bytes = static_cast<uint32_t>(what.chunk.bytes + cost::kHeaderBytes);
    int64_t there = now_;
    if (network_.copy_ns_per_byte > 0)
      there = work(host.thread_free, now_, network_.copy_ns_per_byte * bytes);
    lane.filled = work(server_of(host, lane), there,
                       network_.send_ns_per_chunk + network_.send_ns_per_byte * bytes);
    if (lane.chunks.empty()) lane.head_left = bytes;
    // One that goes again may be of an operation that has ended here.
    const std::optional<schedule::Steps>& steps = host.running[operation].steps;
    const schedule::Program& program = steps ? steps->program() : *program_of(r, operation);
    schedule::ChunkId id = program.sends()[what.chunk.send].id;
    QueuedChunk chunk{operation, what.chunk.send, id, bytes, now_, host.next_message++, !what.keep};
    lane.chunks.push(chunk);
    lane.held = bytes;
    bool whole = give_to_socket(lane);
    saw({Seen::What::hands_over, r, what.peer, what.lane, operation, id, whole ? 1u : 0u});
    if (whole)
      left(lane, chunk);
    else
      lane.rest = chunk;
  }

  // The socket takes segments while less than its limit is unsent. True when it has taken the whole
  // chunk.
  bool give_to_socket(Lane& lane) const {
    while (lane.held > 0 && lane.unsent < unsent_limit_) {
      double segment = std::min(lane.held, network_.packet_bytes);
      lane.held -= segment;
      lane.unsent += segment;
      make_packets(lane);
    }
    lane.blocked = lane.held > 0;
    return !lane.blocked;
  }

  void left(const Lane& lane, const QueuedChunk& chunk) {
    if (recording_ != nullptr)
      recording_->sent(lane.from, lane.peer, lane.index, recorded(chunk), chunk.taken,
                       std::max(now_, lane.filled));
    settle(lane.from, hosts_[lane.from].dispatcher.left(lane.peer, lane.index));
  }

  void settle(uint32_t r, const std::optional<Dispatcher::Settled>& settled) {
    if (!settled || !settled->first) return;
    auto operation = static_cast<uint32_t>(settled->chunk.operation);
    hosts_[r].running[operation].steps->sent(settled->chunk.send);
    finish_if_done(r, operation);
  }

  Recording::Chunk recorded(const QueuedChunk& chunk) const {
    return {chunk.operation, chunk.id, chunk.bytes - cost::kHeaderBytes,
            iteration_of_[chunk.operation], chunk.message};
  }

  void make_packets(Lane& lane) const {
    while (lane.unsent > 0 && lane.queued < network_.queue_bytes) {
      double packet = std::min(lane.unsent, network_.packet_bytes);
      lane.unsent -= packet;
      lane.queued += packet;
      lane.packets.push(packet);
    }
  }

  void wake_egress(uint32_t r) {
    Host& host = hosts_[r];
    int64_t next = kNever;
    for (uint32_t index : host.lanes) {
      const Lane& lane = lanes_[index];
      if (!lane.packets.empty()) next = std::min(next, std::max(lane.ready, lane.filled));
    }
    if (next == kNever) return;
    next = std::max({next, host.link_ready, now_});
    if (next >= host.egress_at) return;
    host.egress_at = next;
    push(next, What::egress, r);
  }

  // Lanes take turns, packet by packet: an equal share for each that is not held back by its own
  // cap, which is max-min fairness.
  void send_packets(uint32_t r) {
    Host& host = hosts_[r];
    size_t count = host.lanes.size();
    size_t tried = 0;
    while (host.link_ready <= now_ && tried < count) {
      size_t index = host.next_to_send;
      host.next_to_send = (index + 1) % count;
      Lane& lane = lanes_[host.lanes[index]];
      if (lane.packets.empty() || lane.ready > now_ || lane.filled > now_) {
        ++tried;
        continue;
      }
      tried = 0;
      send_packet(lane, host.lanes[index]);
    }
    wake_egress(r);
  }

  static int64_t later(int64_t from, double bytes, double rate) {
    return from + static_cast<int64_t>(std::llround(bytes / rate));
  }

  void send_packet(Lane& lane, uint32_t index) {
    Host& host = hosts_[lane.from];
    double bytes = lane.packets.front();
    lane.packets.pop();
    double link = network_.link_bytes_per_ns, flow = lane.flow;
    auto from = [&](int64_t ready, double burst, double rate) {
      return std::max(ready, now_ - static_cast<int64_t>(burst / rate));
    };
    if (std::isfinite(flow))
      lane.ready = later(from(lane.ready, network_.flow_burst_bytes, flow), bytes, flow);
    host.link_ready = later(from(host.link_ready, network_.link_burst_bytes, link), bytes, link);

    // Through the receiver's own link.
    Host& receiver = hosts_[lane.to];
    int64_t through = std::max(now_, receiver.ingress_ready);
    receiver.ingress_ready =
        later(from(receiver.ingress_ready, network_.link_burst_bytes, link), bytes, link);
    int64_t arrival = through + network_.latency_ns + (network_.shaped ? 0 : later(0, bytes, link));

    lane.queued -= bytes;
    uint32_t complete = 0;
    for (double left = bytes; left > 0;) {
      double part = std::min(left, lane.head_left);
      left -= part;
      lane.head_left -= part;
      if (lane.head_left > 0) break;
      lane.flying.push(lane.chunks.front());
      lane.chunks.pop();
      ++complete;
      if (lane.chunks.empty()) break;
      lane.head_left = lane.chunks.front().bytes;
    }
    if (complete > 0) push(arrival, What::arrived, lane.to, index, complete);

    make_packets(lane);
    if (lane.blocked && 2 * lane.unsent < unsent_limit_) {
      lane.filled = std::max(now_, server_of(host, lane));
      if (!give_to_socket(lane)) return;
      saw({Seen::What::room, lane.from, lane.peer, lane.index});
      left(lane, lane.rest);
      turn(lane.from);
    }
  }

  // ---- receiving ---------------------------------------------------------------------------

  void arrived(Lane& lane, uint32_t index, uint32_t chunks) {
    if (lane.broken) return;
    Host& host = hosts_[lane.to];
    for (uint32_t i = 0; i < chunks; ++i) {
      double bytes = lane.flying[lane.landed++].bytes;
      int64_t read = work(server_of(host, lane), now_,
                          network_.receive_ns_per_chunk + network_.receive_ns_per_byte * bytes);
      if (network_.copy_ns_per_byte > 0)
        read = work(host.thread_free, read, network_.copy_ns_per_byte * bytes);
      push(read, What::absorb, lane.to, index);
    }
  }

  void absorb(uint32_t index) {
    Lane& lane = lanes_[index];
    if (lane.broken) return;
    QueuedChunk chunk = lane.flying.front();
    lane.flying.pop();
    --lane.landed;
    uint32_t r = lane.to;
    Host& host = hosts_[r];
    saw({Seen::What::arrives, r, lane.from, lane.index, chunk.operation, chunk.id});
    if (recording_ != nullptr)
      recording_->received(r, lane.from, lane.index, recorded(chunk), now_, now_);
    lane.receipts.arrived(chunk.bytes - cost::kHeaderBytes, chunk.wants_receipt);
    // A worker tells at once; the engine's thread, when it is worth it.
    bool served = !host.workers_free.empty();
    if (chunk.wants_receipt && !served && host.owed.wanted()) {
      host.patience_ends = now_ + schedule::kReceiptPatience.count;
      if (!std::exchange(host.patience_is_watched, true))
        push(host.patience_ends, What::patience, r);
    }
    Running& running = host.running[chunk.operation];
    Early arriving{sender_of(lane, chunk.operation), chunk.id};
    if (running.steps)
      take_in(r, chunk.operation, arriving);
    else if (!running.ended)
      running.early.push_back(arriving);
    turn(r);
    if (lane.receipts.due(served)) send_receipt(index);
    tell_arrivals(r, false);
  }

  // Folded: who sends to this rank what it sends to that peer.
  uint32_t sender_of(const Lane& lane, uint32_t operation) const {
    if (!job_.folded()) return lane.from;
    return rotates(algorithms_[result_.order[operation]]) ? job_.ranks - lane.peer : lane.peer;
  }

  // ---- receipts ----------------------------------------------------------------------------

  // One event watches over a rank; most receipts are sent before it comes.
  void end_of_patience(uint32_t r) {
    Host& host = hosts_[r];
    host.patience_is_watched = host.owed.any() && now_ < host.patience_ends;
    if (host.patience_is_watched)
      push(host.patience_ends, What::patience, r);
    else
      tell_arrivals(r, true);
  }

  void tell_arrivals(uint32_t r, bool out_of_patience) {
    Host& host = hosts_[r];
    if (!host.owed.due(out_of_patience)) return;
    for (uint32_t index : host.incoming)
      if (lanes_[index].receipts.due(true)) send_receipt(index);
  }

  // A few bytes, which cost time only.
  void send_receipt(uint32_t index) {
    Lane& lane = lanes_[index];
    uint64_t chunks = lane.receipts.take();
    int64_t leaves = work(server_of(hosts_[lane.to], lane), now_, 0);
    push(leaves + network_.latency_ns, What::receipt, lane.from, index,
         static_cast<uint32_t>(chunks - std::exchange(lane.receipted, chunks)));
  }

  // Read when the thread is free, together with those that came until then.
  void receipt(uint32_t index, uint32_t chunks) {
    Lane& lane = lanes_[index];
    Host& host = hosts_[lane.from];
    bool first = host.unread.empty();
    host.unread.push({index, chunks});
    if (!first) return;
    int64_t read = work(server_of(host, lane), now_, 0);
    if (read > now_)
      push(read, What::receipted, lane.from);
    else
      read_receipts(lane.from);
  }

  void read_receipts(uint32_t r) {
    for (Fifo<Unread>& unread = hosts_[r].unread; !unread.empty(); unread.pop())
      receipted(lanes_[unread.front().lane], unread.front().chunks);
  }

  void receipted(const Lane& lane, uint32_t chunks) {
    if (lane.broken) return;
    saw({Seen::What::receipt, lane.from, lane.peer, lane.index, 0, {}, chunks});
    for (uint32_t i = 0; i < chunks; ++i)
      settle(lane.from, hosts_[lane.from].dispatcher.receipted(lane.peer, lane.index));
    turn(lane.from);
  }

  void take_in(uint32_t r, uint32_t operation, const Early& arriving) {
    Running& running = hosts_[r].running[operation];
    schedule::Steps& steps = *running.steps;
    auto receive = steps.program().find(arriving.from, arriving.id);
    WEFT_CHECK(receive.has_value());
    if (!steps.is_due(*receive)) return;  // it was sent again for nothing
    if (--running.to_receive == 0) hosts_[r].owed.received_all();
    if (!steps.take(*receive)) return;
    due_.assign(1, *receive);
    while (!due_.empty()) {
      uint32_t next = due_.back();
      due_.pop_back();
      const schedule::Receive& how = steps.program().receives()[next];
      if (network_.reduce_ns_per_byte > 0 && how.combine)
        work(hosts_[r].thread_free, now_,
             network_.reduce_ns_per_byte *
                 static_cast<double>(how.elements * schedule::kElementBytes + cost::kHeaderBytes));
      steps.applied(next, allowed_, due_);
    }
    offer(r, operation);
    finish_if_done(r, operation);
  }

  void finish_if_done(uint32_t r, uint32_t operation) {
    Host& host = hosts_[r];
    Running& running = host.running[operation];
    if (!running.steps || !running.steps->finished()) return;
    running.steps.reset();
    running.ended = true;
    saw({Seen::What::finishes, r, 0, 0, operation});
    const schedule::Piece& piece = piece_of(operation);
    if (recording_ != nullptr)
      recording_->operation(r, operation, piece, iteration_of_[operation], running.begun, now_);
    for (uint32_t t : of_piece_[result_.order[operation]])
      if (--host.pieces_left[t] == 0) {
        host.pieces_left[t] = pieces_of_[t];
        sum_is_there(r, t, iteration_of_[operation]);
      }
    // Its credit returns when the turn in which it ended is over.
    if (r == 0) push(now_, What::ended, 0, operation);
  }

  void ended(uint32_t operation) {
    auto returned = admission_.finished(operation);
    WEFT_CHECK(returned.ok());
    admit();
  }

  void sum_is_there(uint32_t r, uint32_t tensor, uint32_t iteration) {
    Host& host = hosts_[r];
    ++host.steps_done[tensor];
    if (recording_ != nullptr)
      recording_->done(r, tensor, job_.model->tensors[tensor].consumed_by, iteration, now_);
    uint32_t first = job_.folded() ? 0 : r;
    uint32_t end = job_.folded() ? static_cast<uint32_t>(devices_.size()) : r + 1;
    for (uint32_t d = first; d < end; ++d)
      if (devices_[d].waiting) push(now_ + network_.wake_up_ns, What::device, d);
  }

  void saw(const Seen& what) const {
    if (witness_) witness_(what);
  }

  const Job& job_;
  const schedule::Layout& layout_;
  const std::vector<schedule::Algorithm>& algorithms_;
  const Network& network_;
  Recording* recording_;
  const Witness& witness_;
  schedule::Admission admission_;
  std::vector<schedule::Readiness> readiness_;  // by device
  double unsent_limit_;
  std::vector<Work> program_;
  std::vector<std::vector<uint32_t>> produced_;  // tensors by layer, in the order of hand-over
  std::vector<std::vector<uint32_t>> of_piece_;  // tensors by piece
  std::vector<uint32_t> pieces_of_;              // by tensor
  schedule::Programs programs_;
  schedule::OperationShape shape_;  // of the program that was asked for last
  std::vector<uint32_t> allowed_;   // sends, by a receive
  std::vector<uint32_t> due_;       // receives, by another
  std::vector<Host> hosts_;
  std::deque<Lane> lanes_;              // of all hosts; those that broke stay
  std::vector<Device> devices_;         // as Job::compute
  std::vector<int64_t> cores_;          // when each is free; empty: every rank has enough
  std::vector<uint32_t> frames_of_;     // by device: those that rank 0 reads for a bucket
  uint64_t frames_ = 0;                 // of all
  std::vector<uint32_t> iteration_of_;  // by operation
  std::vector<uint64_t> summed_;        // free communication: gradients seen, by tensor
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  uint32_t sequence_ = 0;
  int64_t now_ = 0;
  double worked_ns_ = 0;
  Simulated result_;
};

}  // namespace

bool folds(schedule::Algorithm algorithm, uint32_t ranks) {
  bool halves = algorithm == schedule::Algorithm::halving_doubling ||
                algorithm == schedule::Algorithm::doubling;
  return rotates(algorithm) || (halves && std::has_single_bit(ranks));
}

Simulated simulate(const Job& job, const schedule::Layout& layout,
                   const std::vector<schedule::Algorithm>& algorithms, const Network& network,
                   Recording* recording, const Witness& witness) {
  if (job.folded()) {
    WEFT_CHECK(recording == nullptr && !witness && !network.shared_processor);
    WEFT_CHECK(network.odd_lanes.empty());
    for (schedule::Algorithm algorithm : algorithms) WEFT_CHECK(folds(algorithm, job.ranks));
  }
  return Simulator(job, layout, algorithms, network, recording, witness).run();
}

}  // namespace weft::replay
