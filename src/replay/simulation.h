// The inside of the simulator: what stands in the queue, what hosts, lanes and devices are in, and
// who changes it. simulator.cc runs the events, device.cc computes, agreement.cc puts operations in
// order, operations.cc takes their steps, lanes.cc sends, receiving.cc takes in and tells of it.
#pragma once

#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <queue>
#include <vector>

#include "processor.h"
#include "recording.h"
#include "simulator.h"
#include "weft/cost.h"

namespace weft::replay {

using schedule::Dispatcher;
using schedule::Fifo;
using schedule::Room;
using trace::Kind;

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
  uint32_t filling = 0;      // pieces of work that put bytes here and are not done
  Fifo<QueuedChunk> filled;  // recording: left, as soon as the thread has put all of it here
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
  int64_t computes_since = kNever;  // its thread is at the work
  uint32_t thread = 0;
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
  bool turn_is_due = false;
  int64_t patience_ends = 0;
  bool patience_is_watched = false;
  Fifo<Unread> unread;
  schedule::Owed owed;
  uint32_t processor = 0;
  uint32_t thread = 0;
  bool spins = false;             // it looks for what has arrived, because receipts are owed
  std::vector<uint32_t> workers;  // threads; empty: the one above serves the sockets itself
  uint64_t next_message = 0;
  std::vector<Running> running;      // by operation
  std::vector<uint32_t> steps_done;  // by tensor
  std::vector<uint32_t> pieces_left;
};

inline bool rotates(schedule::Algorithm algorithm) {
  return algorithm == schedule::Algorithm::ring || algorithm == schedule::Algorithm::direct;
}

class Simulator {
 public:
  Simulator(const Job& job, const schedule::Layout& layout,
            const std::vector<schedule::Algorithm>& algorithms, const Network& network,
            Recording* recording, const Witness& witness);

  Simulated run();

 private:
  // The rank whose network a device uses, or that plays this rank's part.
  uint32_t played_by(uint32_t rank) const { return job_.folded() ? 0 : rank; }

  // ---- time: simulator.cc ------------------------------------------------------------------

  void push(int64_t at, What what, uint32_t rank, uint32_t a = 0, uint32_t b = 0) {
    events_.push({at, sequence_++, what, static_cast<uint16_t>(rank), a, b});
  }

  void handle(const Event& event);

  void make_processors();
  // A thread of a host works for `ns` when it has done all that it was given before; then `then`
  // happens, at once if it has nothing to do.
  void work(const Host& host, uint32_t thread, double ns, Then then);
  // True if that is now: then nothing happens, and the caller goes on by itself.
  bool worked(const Host& host, uint32_t thread, double ns, Then then);
  void submit(uint32_t processor, uint32_t thread, double ns, Then then);
  // While receipts are owed a rank's thread does not sleep.
  void spin_while_owed(Host& host);
  // Lets happen what its threads have done, and sees to it that it is asked again in time.
  void look(uint32_t processor);
  void watch(uint32_t processor);

  // Who serves a lane of a host: a worker of its own choice for ever, or the engine's thread.
  static uint32_t server_of(const Host& host, const Lane& lane) {
    if (host.workers.empty()) return host.thread;
    return host.workers[lane.index % host.workers.size()];
  }

  void saw(const Seen& what) const {
    if (witness_) witness_(what);
  }

  // ---- the device: device.cc ---------------------------------------------------------------

  void make_program();
  const graph::LayerTimes& times(uint32_t r, uint32_t iteration, uint32_t layer) const;
  // Runs work until something is missing or the run is over.
  void advance(uint32_t r);
  // True if its thread computes now, and goes on by itself.
  bool run(uint32_t r, Device& device, const Work& work);
  void computes(uint32_t d);
  void computed(uint32_t d);
  void end_work(uint32_t d, const Work& work, int64_t start, int64_t cpu_ns);
  int64_t cpu_ns(uint32_t d, const Work& work) const;
  // To the next work; true if that begins now.
  bool go_on(uint32_t d);
  void mark_start(uint32_t r, const Device& device);
  void record_wait(uint32_t r, const Work& work, const Device& device, int64_t end);
  void sum_is_there(uint32_t r, uint32_t tensor, uint32_t iteration);

  // ---- from gradients to operations: agreement.cc ------------------------------------------

  void count_frames();
  void handed(uint32_t r, uint32_t layer, uint32_t iteration);
  // A rank has this gradient, which somebody else sums.
  void carry(uint32_t tensor, uint32_t iteration);
  void carried(uint32_t r, uint32_t bucket, uint32_t iteration);
  // A rank and all below it have the bucket: it says so.
  void report(uint32_t r, uint32_t bucket, uint32_t iteration);
  // Frames come to a rank's thread, one after the other, between its chunks.
  void read_report(uint32_t r, uint32_t bucket, uint32_t iteration);
  void reported(uint32_t r, uint32_t bucket, uint32_t iteration);
  // One frame a rank tells of all that may start now.
  void admit();
  // Rank `r` learns of an operation now, tells those below it, and begins.
  void told(uint32_t r, uint32_t operation, bool first);
  void tells(uint32_t r, uint32_t operation, bool first);
  void begin(uint32_t r, uint32_t operation);
  void ended(uint32_t operation);

  // ---- their steps: operations.cc ----------------------------------------------------------

  void find_pieces();
  const schedule::Piece& piece_of(uint32_t operation) const {
    return layout_.pieces[result_.order[operation]];
  }
  std::shared_ptr<const schedule::Program> program_of(uint32_t r, uint32_t operation);
  // Hands what is in allowed_ to the dispatcher.
  void offer(uint32_t r, uint32_t operation);
  void take_in(uint32_t r, uint32_t operation, const Early& arriving);
  void finish_if_done(uint32_t r, uint32_t operation);

  // ---- sending: lanes.cc -------------------------------------------------------------------

  void connect(uint32_t r, uint32_t to);
  void open_lane(uint32_t r, uint32_t to, uint16_t number);
  void breaks(const OddLane& odd);
  void returns(const OddLane& odd);
  Room room_of(const Host& host, uint32_t to, uint16_t number) const;
  // What the engine does after each thing that happened to it.
  void turn(uint32_t r);
  void take(uint32_t r, const Dispatcher::HandOver& what);
  bool hands(uint32_t index, uint32_t bytes);
  void filled(uint32_t index);
  // The socket takes segments while less than its limit is unsent. True when it has taken the whole
  // chunk.
  bool give_to_socket(Lane& lane) const;
  void left(Lane& lane, const QueuedChunk& chunk);
  void settle(uint32_t r, const std::optional<Dispatcher::Settled>& settled);
  Recording::Chunk recorded(const QueuedChunk& chunk) const;
  void record_sent(const Lane& lane, const QueuedChunk& chunk);
  void make_packets(Lane& lane) const;
  void wake_egress(uint32_t r);
  // Lanes take turns, packet by packet: an equal share for each that is not held back by its own
  // cap, which is max-min fairness.
  void send_packets(uint32_t r);
  void send_packet(Lane& lane, uint32_t index);

  // ---- receiving: receiving.cc -------------------------------------------------------------

  void arrived(Lane& lane, uint32_t index, uint32_t chunks);
  void copied(uint32_t index, uint32_t bytes);
  void absorb(uint32_t index);
  // Folded: who sends to this rank what it sends to that peer.
  uint32_t sender_of(const Lane& lane, uint32_t operation) const;
  // One event watches over a rank; most receipts are sent before it comes.
  void end_of_patience(uint32_t r);
  void tell_arrivals(uint32_t r, bool out_of_patience);
  // A few bytes, which cost time only.
  void send_receipt(uint32_t index);
  // Read when the thread is free, together with those that came until then.
  void receipt(uint32_t index, uint32_t chunks);
  void read_receipts(uint32_t r);
  void receipted(const Lane& lane, uint32_t chunks);

  const Job& job_;
  const schedule::Layout& layout_;
  const std::vector<schedule::Algorithm>& algorithms_;
  const Network& network_;
  Recording* recording_;
  const Witness& witness_;
  schedule::Tree tree_;  // of the ranks that are simulated, or that report: those of job_.compute
  schedule::Admission admission_;
  std::vector<schedule::Reports> reports_;      // by rank; none of rank 0, nor of a folded job
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
  std::deque<Lane> lanes_;       // of all hosts; those that broke stay
  std::vector<Device> devices_;  // as Job::compute
  std::vector<Processor> processors_;
  std::vector<int64_t> look_at_;  // by processor: the event that is in the queue for it
  // Beside those that the delays hold already. By device: frames that are read for its bucket.
  std::vector<uint32_t> frames_of_;
  std::vector<uint64_t> frames_below_;  // by rank: frames that tell those below it
  int64_t report_passes_ns_ = 0;        // folded: from the farthest rank to the ones below rank 0
  int64_t begin_passes_ns_ = 0;         // folded: from there to the farthest rank
  std::vector<uint32_t> iteration_of_;  // by operation
  std::vector<uint64_t> summed_;        // free communication: gradients seen, by tensor
  std::vector<uint64_t> carried_;       // carried by somebody else: the same, by bucket
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  uint32_t sequence_ = 0;
  int64_t now_ = 0;
  double worked_ns_ = 0;
  Simulated result_;
};

}  // namespace weft::replay
