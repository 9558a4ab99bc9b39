// Engines over real connections, ranks as threads; and a network with faults in it.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <barrier>
#include <cstring>
#include <set>
#include <thread>

#include "weft/collective.h"

namespace weft::collective::testing_support {

inline uint16_t free_port() {
  Fd fd(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  WEFT_CHECK(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  socklen_t size = sizeof address;
  getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin_port);
}

// ---- faults ------------------------------------------------------------------------------

// What happens to a connection when its byte `at` is to be sent by the side that opened it.
struct Fault {
  enum class Kind : uint8_t { cut, reset, stall, corrupt };
  size_t connection = 0;  // counted in the order in which this rank opens them
  Kind kind = Kind::cut;
  uint64_t at = 0;
};

// The kernel's network with faults in the connections that this rank opens.
class FaultyNetwork final : public net::Network {
 public:
  explicit FaultyNetwork(std::vector<Fault> faults) : faults_(std::move(faults)) {}

  Result<std::unique_ptr<net::Socket>> listen(const std::string& host, uint16_t port) override {
    return kernel_.listen(host, port);
  }
  Result<std::unique_ptr<net::Socket>> connect(const std::string& host, uint16_t port) override {
    WEFT_ASSIGN(auto socket, kernel_.connect(host, port));
    size_t number = opened_++;
    for (const Fault& fault : faults_)
      if (fault.connection == number)
        return std::unique_ptr<net::Socket>(
            std::make_unique<Line>(*this, fault, std::move(socket)));
    return socket;
  }
  Result<std::unique_ptr<net::Reactor>> reactor() override { return kernel_.reactor(); }
  const Clock& clock() const override { return kernel_.clock(); }
  std::string machine() const override { return kernel_.machine(); }

  size_t opened() const { return opened_; }
  std::atomic<bool> struck{false};    // some fault has happened
  std::atomic<bool> released{false};  // stalled connections go on

 private:
  class Line final : public net::Socket {
   public:
    Line(FaultyNetwork& network, const Fault& fault, std::unique_ptr<net::Socket> inner)
        : network_(network), fault_(fault), inner_(std::move(inner)) {}
    ssize_t send(const iovec* parts, size_t count) override {
      if (!over_ && sent_ >= fault_.at) {
        if (fault_.kind == Fault::Kind::corrupt) return send_damaged(parts, count);
        strike();
        if (!over_) return -EAGAIN;
      }
      if (over_) return inner_->send(parts, count);
      uint64_t before = fault_.at - sent_;
      std::vector<iovec> some;
      for (size_t i = 0; i < count && before > 0; ++i) {
        some.push_back({parts[i].iov_base, std::min<size_t>(parts[i].iov_len, before)});
        before -= some.back().iov_len;
      }
      ssize_t put = inner_->send(some.data(), some.size());
      if (put > 0) sent_ += static_cast<uint64_t>(put);
      return put;
    }
    ssize_t receive(const iovec* parts, size_t count) override {
      return inner_->receive(parts, count);
    }
    int connect_outcome() override { return inner_->connect_outcome(); }
    std::string local_host() const override { return inner_->local_host(); }
    uint16_t local_port() const override { return inner_->local_port(); }
    std::string peer() const override { return inner_->peer(); }
    void limit_unsent(uint32_t bytes) override { inner_->limit_unsent(bytes); }
    std::optional<net::TcpInfo> tcp_info() const override { return inner_->tcp_info(); }
    int fd() const override { return inner_->fd(); }

   private:
    void strike() {
      network_.struck = true;
      sockaddr nowhere{};
      nowhere.sa_family = AF_UNSPEC;
      over_ = true;
      if (fault_.kind == Fault::Kind::cut)
        ::shutdown(fd(), SHUT_RDWR);
      else if (fault_.kind == Fault::Kind::reset)
        (void)::connect(fd(), &nowhere, sizeof nowhere);  // what is on its way is lost as well
      else
        over_ = network_.released;
    }
    ssize_t send_damaged(const iovec* parts, size_t count) {
      network_.struck = true;
      while (count > 0 && parts->iov_len == 0) ++parts, --count;
      if (count == 0) return 0;
      std::byte damaged = *static_cast<const std::byte*>(parts->iov_base) ^ std::byte{0x10};
      iovec one{&damaged, 1};
      ssize_t put = inner_->send(&one, 1);
      over_ = put == 1;
      return put;
    }

    FaultyNetwork& network_;
    Fault fault_;
    std::unique_ptr<net::Socket> inner_;
    uint64_t sent_ = 0;
    bool over_ = false;
  };

  net::Network& kernel_ = net::kernel_network();
  std::vector<Fault> faults_;
  std::atomic<size_t> opened_{0};
};

// ---- ranks -------------------------------------------------------------------------------

// One rank: its connections and its engine, driven by the thread that owns it.
struct Node {
  join::Mesh mesh;
  capture::Recorder& recorder;
  std::unique_ptr<Engine> engine;
  std::vector<std::string> lost;
  std::set<uint64_t> done;  // numbers

  void turn() {
    mesh.reactor->run_once(engine->more_to_send() ? Nanos{0} : Nanos::from_millis(2));
    for (const Key& key : engine->poll(monotonic_clock().now()))
      WEFT_CHECK(done.insert(key.number).second);  // told once
  }
  // Turns until `until` says so; false after ten seconds or when a rank was lost.
  bool turn_until(const std::function<bool()>& until) {
    Nanos deadline = monotonic_clock().now() + Nanos::from_seconds(10);
    while (!until()) {
      if (!lost.empty() || monotonic_clock().now() > deadline) return false;
      turn();
    }
    return true;
  }
  void turn_for(Nanos time) {
    Nanos until = monotonic_clock().now() + time;
    while (monotonic_clock().now() < until) turn();
  }
  void start(Operation operation) {
    auto started = engine->start(std::move(operation));
    WEFT_CHECK(started.ok());
  }
  bool finish(uint64_t number) {
    return turn_until([&] { return done.contains(number); });
  }
};

struct Job {
  uint32_t ranks = 2;
  uint16_t lanes = 2;
  uint64_t chunk_bytes = 16384;
  uint64_t early_bytes_limit = 256u << 20;
  bool shared_memory = false;
  std::string folder{};                   // for traces; none when empty
  FaultyNetwork* network_of_0 = nullptr;  // rank 0's
};

inline join::Options join_options(uint32_t rank, const Job& job, uint16_t port) {
  join::Options join;
  join.rank = {rank};
  join.ranks = job.ranks;
  join.rendezvous = text("127.0.0.1:%u", unsigned{port});
  join.secret = "a secret of the test";
  join.host = "localhost";
  join.agreement = "the same";
  join.lanes = std::max<uint16_t>(job.lanes, 6);  // tests open some by hand
  join.probe = false;
  join.shared_memory = job.shared_memory;
  if (rank == 0) join.network = job.network_of_0;
  return join;
}

inline void run_nodes(const Job& job, const std::function<void(Node&)>& body) {
  uint16_t port = free_port();
  // Ranks go on turning until all are done: others may still need what they have sent.
  std::atomic<uint32_t> ready{0};
  std::barrier all_done(job.ranks);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < job.ranks; ++rank)
    threads.emplace_back([&, rank] {
      auto mesh = join::meet(join_options(rank, job, port));
      WEFT_CHECK(mesh.ok());
      std::unique_ptr<capture::Recorder> recorder = capture::Recorder::off();
      if (!job.folder.empty()) {
        capture::Options options;
        options.path = job.folder + "/" + trace::file_name(rank);
        options.environment.rank = rank;
        options.environment.ranks = job.ranks;
        auto started = capture::Recorder::start(options);
        WEFT_CHECK(started.ok());
        recorder = std::move(*started);
      }
      Node node{std::move(*mesh), *recorder, nullptr, {}, {}};
      Engine::Options options;
      options.lanes = job.lanes;
      options.chunk_bytes = job.chunk_bytes;
      options.early_bytes_limit = job.early_bytes_limit;
      node.engine = std::make_unique<Engine>(
          options, node.mesh, *recorder,
          [&](Rank peer, const Error& error) {
            node.lost.push_back(text("rank %u: %s", peer.index, error.message().c_str()));
            node.engine->halt();
          },
          [](std::unique_ptr<net::Socket>) {});
      WEFT_CHECK(node.engine->begin().ok());
      body(node);
      ++ready;
      while (ready < job.ranks) node.turn();
      all_done.arrive_and_wait();
      node.engine.reset();
      WEFT_CHECK(recorder->stop().ok());
    });
  for (std::thread& thread : threads) thread.join();
}

inline float value(uint64_t i, uint32_t rank, uint32_t operation) {
  return static_cast<float>((i * 7 + operation * 13) % 97 + rank);
}
inline float sum(uint64_t i, uint32_t ranks, uint32_t operation) {
  uint64_t of_ranks = ranks * (ranks - 1) / 2;
  return static_cast<float>(ranks * ((i * 7 + operation * 13) % 97) + of_ranks);
}

// An all-reduce of fp32 in uneven parts, in place.
struct Work {
  Work(uint32_t number, uint64_t elements, const Node& on)
      : data(elements), rank(on.mesh.rank.index), ranks(on.mesh.ranks), node(on) {
    operation.number = number;
    operation.shape.rank = rank;
    operation.shape.ranks = ranks;
    operation.shape.elements = elements;
    for (uint64_t i = 0; i < elements; ++i) data[i] = value(i, rank, number);
    Rng rng(number);
    for (uint64_t from = 0; from < elements;) {
      uint64_t size = std::min<uint64_t>(elements - from, 1 + rng.below(elements));
      operation.output.add(std::as_writable_bytes(std::span(data).subspan(from, size)));
      from += size;
    }
    operation.input = operation.output;
  }
  // Its memory goes: an engine that has not finished with it may not go on.
  ~Work() {
    if (!node.done.contains(key())) node.engine->halt();
  }
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  // The first element that is not the sum of all ranks; none if all are.
  std::optional<uint64_t> wrong() const {
    for (uint64_t i = 0; i < data.size(); ++i)
      if (data[i] != sum(i, ranks, static_cast<uint32_t>(operation.number))) return i;
    return std::nullopt;
  }
  uint64_t key() const { return operation.number; }

  Operation operation;
  std::vector<float> data;
  uint32_t rank, ranks;
  const Node& node;
};

}  // namespace weft::collective::testing_support
