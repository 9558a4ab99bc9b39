// The engine and the simulator let the same Dispatcher decide, and do what it says.
//
// A seeded job is simulated, with several peers, lanes of uneven speed and lanes that break. All
// that happens to one of its ranks is written down: operations that begin, chunks and receipts that
// arrive, lanes that have room, break and return. Then a real engine lives through the same, over
// real connections whose room is as it was in the simulation, with the test at their other ends. It
// must hand the same chunks over to the same lanes in the same order, and end its operations at the
// same points. Neither side is told what the other one decided.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <thread>

#include "simulator.h"
#include "weft/collective.h"

namespace weft {
namespace {

using replay::Seen;

struct HandedOver {
  uint32_t peer = 0;
  uint16_t lane = 0;
  uint64_t operation = 0;
  schedule::ChunkId id;
  friend bool operator==(const HandedOver&, const HandedOver&) = default;
};

std::string words(const std::vector<HandedOver>& all) {
  std::string out;
  for (const HandedOver& one : all)
    out +=
        text(" %u.%u:%llu/%u.%u", one.peer, unsigned{one.lane},
             static_cast<unsigned long long>(one.operation), unsigned{one.id.step}, one.id.chunk);
  return out.empty() ? " nothing" : out;
}

// One thing that happens to the rank, and what the simulated one does then.
struct Step {
  std::optional<Seen> fact = {};  // none: its last turn was cut short
  bool turned = false;
  std::vector<HandedOver> handed_over = {};
  std::map<std::pair<uint32_t, uint16_t>, int> whole = {};  // by lane: chunks that left at once
  std::vector<uint64_t> finished = {};
};

// ---- the simulated rank --------------------------------------------------------------------

struct Course {
  uint32_t rank = 0;  // that is watched
  uint32_t ranks = 3;
  schedule::Layout layout;
  std::vector<schedule::Algorithm> algorithms;  // by piece
  std::vector<uint32_t> order;                  // pieces, by operation
  std::vector<Step> steps;
  size_t handed_over = 0, blocked = 0, cut_short = 0, breaks = 0;
};

void note(Course& course, const Seen& seen) {
  std::vector<Step>& steps = course.steps;
  switch (seen.what) {
    case Seen::What::turn:
      // One turn a step; a second one is there because the first was cut short.
      if (std::exchange(steps.back().turned, true)) {
        steps.push_back({.turned = true});
        ++course.cut_short;
      }
      return;
    case Seen::What::hands_over:
      steps.back().handed_over.push_back({seen.peer, seen.lane, seen.operation, seen.id});
      steps.back().whole[{seen.peer, seen.lane}] += static_cast<int>(seen.chunks);
      ++course.handed_over;
      course.blocked += 1 - seen.chunks;
      return;
    case Seen::What::finishes: steps.back().finished.push_back(seen.operation); return;
    case Seen::What::breaks: ++course.breaks; [[fallthrough]];
    case Seen::What::begins:
    case Seen::What::arrives:
    case Seen::What::room:
    case Seen::What::receipt:
    case Seen::What::returns: steps.push_back({.fact = seen}); return;
  }
}

Course simulated(uint64_t seed) {
  Rng rng(seed);
  auto one_of = [&](auto... values) {
    std::array all{values...};
    return all[rng.below(all.size())];
  };
  Course out;
  out.ranks = 3 + static_cast<uint32_t>(rng.below(3));
  out.rank = static_cast<uint32_t>(rng.below(out.ranks));

  plan::Plan plan;
  plan.lanes = 1 + static_cast<uint32_t>(rng.below(4));
  plan.chunk = Bytes{one_of(4096u, 16384u, 65536u, 65540u, 98304u)};
  plan.order = rng.below(2) == 0 ? plan::Order::layer : plan::Order::ready;
  plan.bucket_rule = {Bytes{1}, Bytes{1}, false};  // a bucket for each tensor
  if (rng.below(2) == 0) plan.credit = Bytes{plan.chunk.count * (1 + rng.below(60))};
  if (rng.below(2) == 0) plan.partition = Bytes{plan.chunk.count * (4 + rng.below(20))};

  trace::Model model;
  std::vector<schedule::Tensor> tensors;
  uint32_t layers = 2 + static_cast<uint32_t>(rng.below(4));
  for (uint32_t layer = 0; layer < layers; ++layer) {
    uint64_t elements = 1 + rng.below(out.ranks * 8 * plan.chunk.count / schedule::kElementBytes);
    model.layers.push_back({text("layer%u", layer)});
    model.tensors.push_back(
        {text("tensor%u", layer), elements * schedule::kElementBytes, layer, layer, layer});
    tensors.push_back({text("tensor%u", layer), elements, layer});
  }
  auto layout = schedule::make_layout(plan, tensors);
  WEFT_CHECK(layout.ok());
  out.layout = std::move(*layout);
  for (size_t i = 0; i < out.layout.pieces.size(); ++i)
    out.algorithms.push_back(rng.below(2) == 0 ? schedule::Algorithm::direct
                                               : schedule::kAlgorithms[rng.below(6)]);

  replay::Job job;
  job.ranks = out.ranks;
  job.host_of.resize(out.ranks);
  std::iota(job.host_of.begin(), job.host_of.end(), 0u);
  job.iterations = 1;
  job.model = &model;
  auto nanos = [&](uint64_t most) { return static_cast<int64_t>(rng.below(most)); };
  std::vector<std::vector<graph::LayerTimes>> times(out.ranks);
  for (auto& of_rank : times)
    for (uint32_t layer = 0; layer < layers; ++layer)
      of_rank.push_back({nanos(50'000), nanos(400'000), nanos(10'000), 0, 0});
  for (const auto& of_rank : times) job.compute.push_back({&of_rank});

  replay::Network network;
  network.link_bytes_per_ns = 0.2 + 4 * rng.uniform();
  if (rng.below(3) > 0) network.flow_bytes_per_ns = network.link_bytes_per_ns * rng.uniform();
  network.packet_bytes = one_of(4096.0, 16384.0, 65536.0);
  network.queue_bytes = one_of(8192.0, 65536.0, 1e6);
  network.shaped = rng.below(2) == 0;
  network.latency_ns = nanos(60'000);
  network.report_ns = nanos(40'000);
  network.begin_ns = nanos(40'000);
  network.wake_up_ns = nanos(20'000);
  if (rng.below(4) > 0) {
    network.send_ns_per_chunk = network.receive_ns_per_chunk = 4000 * rng.uniform();
    network.send_ns_per_byte = network.receive_ns_per_byte = 0.3 * rng.uniform();
    network.reduce_ns_per_byte = 0.2 * rng.uniform();
  }
  network.shared_processor = rng.below(2) == 0;
  network.cores = 2;
  // Lanes of any speed; and once it is known how long all takes, lanes that break in that time.
  for (uint32_t from = 0; from < out.ranks; ++from)
    for (uint32_t to = 0; to < out.ranks; ++to)
      for (uint16_t lane = 0; from != to && lane < plan.lanes; ++lane)
        if (rng.below(3) == 0)
          network.odd_lanes.push_back(
              {from, to, lane, network.link_bytes_per_ns * (0.02 + rng.uniform())});
  auto whole = replay::simulate(job, out.layout, out.algorithms, network, nullptr);
  for (uint32_t from = 0; from < out.ranks; ++from)
    for (uint32_t to = 0; to < out.ranks; ++to)
      for (uint16_t lane = 0; from != to && lane < plan.lanes; ++lane)
        if (rng.below(from == out.rank ? 3 : 12) == 0) {
          int64_t end = whole.starts[0].back();
          int64_t at = nanos(static_cast<uint64_t>(end));
          network.odd_lanes.push_back({from, to, lane, std::numeric_limits<double>::infinity(), at,
                                       at + 1 + nanos(static_cast<uint64_t>(end) / 3)});
        }
  auto last =
      replay::simulate(job, out.layout, out.algorithms, network, nullptr, [&](const Seen& seen) {
        if (seen.rank == out.rank) note(out, seen);
      });
  out.order = last.order;
  return out;
}

// ---- the engine ----------------------------------------------------------------------------

class ScriptedNetwork;

// A connection that the engine opened. What it sends goes nowhere; how much of it is taken is what
// the script says.
class Line final : public net::Socket {
 public:
  Line(ScriptedNetwork& network, std::unique_ptr<net::Socket> inner)
      : network_(network), inner_(std::move(inner)) {}
  ~Line() override;
  ssize_t send(const iovec* parts, size_t count) override;
  ssize_t receive(const iovec* parts, size_t count) override {
    ssize_t got = inner_->receive(parts, count);
    if (got > 0) received += static_cast<uint64_t>(got);
    if (got == 0) ended = true;
    return got;
  }
  int connect_outcome() override { return inner_->connect_outcome(); }
  std::string local_host() const override { return inner_->local_host(); }
  uint16_t local_port() const override { return inner_->local_port(); }
  std::string peer() const override { return inner_->peer(); }
  int fd() const override { return inner_->fd(); }

  uint32_t to = 0;
  uint16_t lane = 0;
  int may_take = 0;  // whole chunks
  bool waits = false;
  bool ended = false;
  uint64_t received = 0;

 private:
  ScriptedNetwork& network_;
  std::unique_ptr<net::Socket> inner_;
};

uint16_t port_of(const std::string& address) {
  return static_cast<uint16_t>(std::stoul(address.substr(address.rfind(':') + 1)));
}

class ScriptedNetwork final : public net::Network {
 public:
  Result<std::unique_ptr<net::Socket>> listen(const std::string& host, uint16_t port) override {
    return kernel_.listen(host, port);
  }
  Result<std::unique_ptr<net::Socket>> connect(const std::string& host, uint16_t port) override {
    WEFT_ASSIGN(auto socket, kernel_.connect(host, port));
    auto line = std::make_unique<Line>(*this, std::move(socket));
    lines.push_back(line.get());
    return std::unique_ptr<net::Socket>(std::move(line));
  }
  Result<std::unique_ptr<net::Reactor>> reactor() override { return kernel_.reactor(); }
  const Clock& clock() const override { return kernel_.clock(); }
  std::string machine() const override { return kernel_.machine(); }

  // The other end of an accepted connection. The kernel may give one port to two connections that
  // go to different places.
  Line* other_end_of(const net::Socket& accepted) {
    for (Line* line : lines)
      if (port_of(accepted.peer()) == line->local_port() &&
          port_of(line->peer()) == accepted.local_port())
        return line;
    return nullptr;
  }

  std::vector<Line*> lines;  // that are there
  std::vector<HandedOver> handed_over;

 private:
  net::Network& kernel_ = net::kernel_network();
};

Line::~Line() { std::erase(network_.lines, this); }

ssize_t Line::send(const iovec* parts, size_t count) {
  size_t total = 0;
  for (size_t i = 0; i < count; ++i) total += parts[i].iov_len;
  std::array<std::byte, lane::kChunkHeaderBytes> head;
  if (count == 0 || parts[0].iov_len != head.size()) return inner_->send(parts, count);
  std::memcpy(head.data(), parts[0].iov_base, head.size());
  auto header = lane::decode(head);
  if (!header) return inner_->send(parts, count);  // of the handshake
  WEFT_CHECK(total == head.size() + header->length);
  if (!std::exchange(waits, true))
    network_.handed_over.push_back({to, lane, header->operation, {header->step, header->chunk}});
  if (may_take == 0) return -EAGAIN;
  --may_take;
  waits = false;
  return static_cast<ssize_t>(total);
}

uint16_t free_port() {
  Fd fd(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  WEFT_CHECK(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  socklen_t size = sizeof address;
  getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin_port);
}

// A rank that the test plays.
struct Other {
  join::Mesh mesh;
  std::unique_ptr<join::Links> links;
  std::unique_ptr<net::Socket> to_engine;
  uint64_t sent = 0;  // chunks
  struct FromEngine {
    std::unique_ptr<net::Socket> socket;
    Line* line = nullptr;
    uint64_t receipted = 0;
  };
  std::map<uint16_t, FromEngine> from_engine;  // by the number of the lane

  void put(net::Socket& socket, std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
      ssize_t moved = socket.send(&part, 1);
      WEFT_CHECK(moved > 0 || moved == -EAGAIN);
      if (moved > 0) bytes = bytes.subspan(static_cast<size_t>(moved));
    }
  }
  void put_receipt(FromEngine& lane) const {
    std::array<uint32_t, 4> receipt = {0x6b634177, 0, static_cast<uint32_t>(lane.receipted), 0};
    put(*lane.socket, std::as_bytes(std::span(receipt)));
  }
};

// One rank is the engine's, all others are the test's. Used by one course after the other.
class Group {
 public:
  Group(uint32_t ranks, uint32_t rank) : rank_(rank), others_(ranks) {
    uint16_t port = free_port();
    std::vector<std::optional<Result<join::Mesh>>> met(ranks);
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < ranks; ++r)
      threads.emplace_back([&, r] {
        join::Options options;
        options.rank = {r};
        options.ranks = ranks;
        options.rendezvous = text("127.0.0.1:%u", unsigned{port});
        options.secret = "a secret of the test";
        options.host = "localhost";
        options.agreement = "the same";
        options.lanes = 4;
        options.probe = false;
        options.shared_memory = false;
        if (r == rank_) options.network = &network;
        met[r] = join::meet(options);
      });
    for (std::thread& thread : threads) thread.join();
    for (uint32_t r = 0; r < ranks; ++r) {
      WEFT_CHECK(met[r]->ok());
      (r == rank_ ? mesh : others_[r].mesh) = std::move(**met[r]);
    }
  }

  void begin(const Course& course) {
    for (uint32_t r = 0; r < others_.size(); ++r) {
      if (r == rank_) continue;
      Other& other = others_[r];
      join::Links::Callbacks callbacks;
      callbacks.opened = [&other](Rank, uint16_t, auto socket, auto) {
        other.to_engine = std::move(socket);
      };
      callbacks.accepted = [this, &other, r](Rank, uint16_t number, auto socket, auto) {
        Line* line = network.other_end_of(*socket);
        WEFT_CHECK(line != nullptr);
        line->to = r;
        line->lane = number;
        other.from_engine[number] = {std::move(socket), line, 0};
      };
      callbacks.misbehaved = [](Rank, const Error& error) { FAIL() << error.message(); };
      other.links = std::make_unique<join::Links>(other.mesh, std::move(callbacks));
    }
    collective::Engine::Options options;
    options.lanes = static_cast<uint16_t>(course.layout.lanes);
    options.chunk_bytes = course.layout.chunk_elements * schedule::kElementBytes;
    engine = std::make_unique<collective::Engine>(
        options, mesh, *recorder_,
        [](Rank rank, const Error& error) { FAIL() << rank.index << ": " << error.message(); },
        [](std::unique_ptr<net::Socket>) {});
    WEFT_CHECK(engine->begin().ok());
    for (uint32_t r = 0; r < others_.size(); ++r)
      if (r != rank_) engine->prepare({r}), others_[r].links->open({rank_}, 0);
  }
  // All connections go; the group stays.
  void end() {
    engine.reset();
    for (Other& other : others_) {
      other.links.reset();
      other.to_engine.reset();
      other.from_engine.clear();
      other.sent = 0;
    }
    network.handed_over.clear();
  }

  Other& other(uint32_t rank) { return others_[rank]; }

  // Moves bytes, and lets the engine handle them, but gives it no turn.
  bool until(const std::function<bool()>& done) {
    Nanos deadline = monotonic_clock().now() + Nanos::from_seconds(10);
    while (!done()) {
      if (monotonic_clock().now() > deadline) return false;
      mesh.reactor->run_once(Nanos{0});
      for (Other& other : others_)
        if (other.links) {
          other.mesh.reactor->run_once(Nanos{0});
          other.links->tick(monotonic_clock().now());
        }
    }
    return true;
  }
  std::vector<uint64_t> turn() {
    std::vector<uint64_t> out;
    for (const collective::Key& key : engine->poll(monotonic_clock().now()))
      out.push_back(key.number);
    return out;
  }
  // Once both sides have proved who they are, a turn of the engine adds the lane. Before the first
  // operation it may have as many as it needs for that.
  bool until_the_lane_is_there(uint32_t to, uint16_t number) {
    return until([&] {
      auto all = engine->lanes();
      if (std::any_of(all.begin(), all.end(), [&](const collective::LaneStatus& one) {
            return one.outgoing && one.alive && one.peer == to && one.number == number;
          }))
        return others_[to].from_engine.contains(number);
      EXPECT_TRUE(turn().empty());
      return false;
    });
  }
  bool greet(uint32_t to, uint16_t number) {
    if (!until_the_lane_is_there(to, number)) return false;
    Other::FromEngine& lane = others_[to].from_engine.at(number);
    proof_bytes_ = lane.line->received;
    others_[to].put_receipt(lane);
    return until([&] { return lane.line->received == proof_bytes_ + 16; });
  }
  // The engine sees that the lane broke, and connects again: its next turn adds the lane.
  bool break_lane(uint32_t to, uint16_t number) {
    std::map<uint16_t, Other::FromEngine>& lanes = others_[to].from_engine;
    Line* line = lanes.at(number).line;
    lanes.at(number).socket.reset();
    if (!until([&] { return line->ended; })) return false;
    lanes.erase(number);
    return until(
        [&] { return lanes.contains(number) && lanes.at(number).line->received == proof_bytes_; });
  }

  ScriptedNetwork network;
  join::Mesh mesh;
  std::unique_ptr<collective::Engine> engine;

 private:
  uint32_t rank_;
  uint64_t proof_bytes_ = 0;  // that come before the greeting of a lane
  std::vector<Other> others_;
  std::unique_ptr<capture::Recorder> recorder_ = capture::Recorder::off();
};

class Life {
 public:
  Life(const Course& course, Group& group) : course_(course), group_(group) {
    group_.begin(course);
    data_.resize(course.order.size());
  }
  ~Life() { group_.end(); }
  Life(const Life&) = delete;
  Life& operator=(const Life&) = delete;

  bool connect() {
    for (uint32_t r = 0; r < course_.ranks; ++r) {
      if (r == course_.rank) continue;
      for (uint16_t lane = 0; lane < course_.layout.lanes; ++lane)
        if (!group_.greet(r, lane)) return false;
      if (!group_.until([&] { return group_.other(r).to_engine != nullptr; })) return false;
    }
    return true;
  }

  // What the engine does after the same fact; false if the fact itself could not be had.
  bool live(const Step& step, std::vector<HandedOver>& handed_over,
            std::vector<uint64_t>& finished) {
    group_.network.handed_over.clear();
    if (step.fact && !happens(*step.fact)) return false;
    EXPECT_TRUE(group_.network.handed_over.empty()) << "outside of its turn";
    for (Line* line : group_.network.lines) {
      auto whole = step.whole.find({line->to, line->lane});
      line->may_take = whole == step.whole.end() ? 0 : whole->second;
    }
    finished = group_.turn();
    handed_over = group_.network.handed_over;
    for (Line* line : group_.network.lines) line->may_take = 0;
    return true;
  }

 private:
  schedule::OperationShape shape_of(uint64_t operation, uint32_t rank) const {
    uint32_t piece = course_.order[operation];
    schedule::OperationShape shape;
    shape.algorithm = course_.algorithms[piece];
    shape.rank = rank;
    shape.ranks = course_.ranks;
    shape.elements = course_.layout.pieces[piece].elements;
    shape.chunk_elements = course_.layout.chunk_elements;
    shape.host_of.resize(course_.ranks);
    std::iota(shape.host_of.begin(), shape.host_of.end(), 0u);
    return shape;
  }

  bool happens(const Seen& fact) {
    switch (fact.what) {
      case Seen::What::begins: return begins(fact.operation);
      case Seen::What::arrives: return arrives(fact);
      case Seen::What::room: {
        Line* line = lane_of(fact).line;
        line->may_take = 1;
        return line->waits && group_.until([&] { return line->may_take == 0; });
      }
      case Seen::What::receipt: {
        Other::FromEngine& lane = lane_of(fact);
        uint64_t before = lane.line->received;
        lane.receipted += fact.chunks;
        group_.other(fact.peer).put_receipt(lane);
        return group_.until([&] { return lane.line->received == before + 16; });
      }
      case Seen::What::breaks: return group_.break_lane(fact.peer, fact.lane);
      case Seen::What::returns: return group_.greet(fact.peer, fact.lane);
      case Seen::What::turn:
      case Seen::What::hands_over:
      case Seen::What::finishes: break;
    }
    return false;
  }

  Other::FromEngine& lane_of(const Seen& fact) {
    return group_.other(fact.peer).from_engine.at(fact.lane);
  }

  bool begins(uint32_t number) {
    collective::Operation operation;
    operation.number = number;
    operation.shape = shape_of(number, course_.rank);
    const schedule::Piece& piece = course_.layout.pieces[course_.order[number]];
    operation.priority = course_.layout.buckets[piece.bucket].priority;
    data_[number].resize(operation.shape.elements);
    operation.output.add(std::as_writable_bytes(std::span(data_[number])));
    operation.input = operation.output;
    return group_.engine->start(std::move(operation)).ok();
  }

  bool arrives(const Seen& fact) {
    Other& other = group_.other(fact.peer);
    auto program = programs_.get(shape_of(fact.operation, fact.peer));
    auto sends = program->sends();
    auto send = std::find_if(sends.begin(), sends.end(), [&](const schedule::Send& one) {
      return one.peer == course_.rank && one.id == fact.id;
    });
    if (send == sends.end()) return false;
    lane::ChunkHeader header;
    header.collective = static_cast<uint8_t>(schedule::Collective::all_reduce);
    header.type = static_cast<uint8_t>(reduce::Type::float32);
    header.op = static_cast<uint8_t>(reduce::Op::sum);
    header.operation = fact.operation;
    header.elements = program->shape().elements;
    header.step = fact.id.step;
    header.chunk = fact.id.chunk;
    header.first = send->offset;
    header.length = static_cast<uint32_t>(send->elements * schedule::kElementBytes);
    header.message = ++other.sent;
    std::vector<float> payload(send->elements, 1);
    std::span<const std::byte> bytes = std::as_bytes(std::span(payload));
    header.checksum = lane::checksum({&bytes, 1});
    std::array<std::byte, lane::kChunkHeaderBytes> head;
    lane::encode(header, head);
    other.put(*other.to_engine, head);
    // Little by little: nobody else reads while this thread writes.
    for (; !bytes.empty(); bytes = bytes.subspan(std::min<size_t>(bytes.size(), 32768))) {
      other.put(*other.to_engine, bytes.first(std::min<size_t>(bytes.size(), 32768)));
      group_.mesh.reactor->run_once(Nanos{0});
    }
    return group_.until([&] {
      for (const collective::LaneStatus& one : group_.engine->lanes())
        if (!one.outgoing && one.peer == fact.peer)
          return one.counters.chunks_received == other.sent;
      return false;
    });
  }

  const Course& course_;
  Group& group_;
  schedule::Programs programs_;
  std::vector<std::vector<float>> data_;  // by operation
};

// -----------------------------------------------------------------------------------------------

TEST(EngineAndSimulator, hand_over_the_same_chunks_to_the_same_lanes_in_the_same_order) {
  constexpr uint64_t kSeeds = 200;
  std::map<std::pair<uint32_t, uint32_t>, std::unique_ptr<Group>> groups;
  Course all;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SCOPED_TRACE(text("seed %llu", static_cast<unsigned long long>(seed)));
    Course course = simulated(seed);
    std::unique_ptr<Group>& group = groups[{course.ranks, course.rank}];
    if (!group) group = std::make_unique<Group>(course.ranks, course.rank);
    Life life(course, *group);
    ASSERT_TRUE(life.connect());
    size_t ended = 0;
    for (size_t i = 0; i < course.steps.size(); ++i) {
      const Step& step = course.steps[i];
      std::vector<HandedOver> handed_over;
      std::vector<uint64_t> finished;
      ASSERT_TRUE(life.live(step, handed_over, finished)) << "step " << i;
      ASSERT_EQ(handed_over, step.handed_over)
          << "step " << i << ": the engine handed over" << words(handed_over)
          << "\nand the simulator" << words(step.handed_over);
      ASSERT_EQ(finished, step.finished) << "step " << i;
      ended += finished.size();
    }
    EXPECT_EQ(ended, course.order.size());
    all.handed_over += course.handed_over;
    all.cut_short += course.cut_short;
    all.breaks += course.breaks;
    all.blocked += course.blocked;
  }
  std::printf("%zu chunks, %zu of them waited for room, %zu turns cut short, %zu lanes broke\n",
              all.handed_over, all.blocked, all.cut_short, all.breaks);
  // The seeds reach what they are meant to reach.
  EXPECT_GT(all.handed_over, 10'000u);
  EXPECT_GT(all.blocked, 1'000u);
  EXPECT_GT(all.cut_short, 100u);
  EXPECT_GT(all.breaks, 100u);
}

}  // namespace
}  // namespace weft
