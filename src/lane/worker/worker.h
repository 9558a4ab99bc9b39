// One lane worker, seen from the process that it serves: a thread or an auxiliary process with its
// memory, bells and connections; and the watch over it.
#pragma once

#include <deque>
#include <map>
#include <set>

#include "worker/shared.h"

namespace weft::lane::worker {

class Worker final : public net::Reactor::Handler {
 public:
  // Who is told what a worker says, in the thread that drives the reactor.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void said(Worker& worker, const Message& event) = 0;
    // It serves nothing any more.
    virtual void gone(Worker& worker, const Error& why) = 0;
  };

  Worker(Listener& listener, net::Network& network, net::Reactor& reactor, uint32_t number)
      : listener_(listener), network_(network), reactor_(reactor), number_(number) {}
  ~Worker() override;
  Result<void> start(LaneWorkers::Kind kind, const Facts& facts, const std::string& program);
  void on_events(uint32_t) override;

  // Commands go in order, and wait here while the ring is full. One for which there is no memory is
  // lost, and the worker with it: see give_up().
  void push(const Message& command) noexcept;
  // Takes `socket` only if that worked.
  Result<void> hand_over(uint32_t lane, std::unique_ptr<net::Socket>& socket);
  // Notices a worker that stands still, and passes on commands that wait.
  void watch(Nanos now);
  // It was not told something: the next look ends it.
  void give_up() noexcept { given_up_ = true; }

  std::byte* buffer(uint32_t number) const {
    return side_->base + buffers_at() + size_t{number} * facts_.buffer_bytes;
  }
  uint32_t buffer_bytes() const { return facts_.buffer_bytes; }
  bool dead() const { return dead_; }
  std::string name() const;
  Nanos processor_time() const { return Nanos{head().processor_ns.load()}; }

  // Send buffers. What a lane had when it was closed comes back when the worker says so.
  bool has_buffer() const { return !free_.empty(); }
  uint32_t take_buffer();  // REQUIRES: has_buffer()
  void give_back(uint32_t buffer) { free_.push_back(buffer); }
  void give_back_when_closed(uint32_t lane, std::vector<uint32_t> buffers);

  std::set<uint32_t> lanes;  // that it serves

 private:
  // What a thread shares with us; one that does not end keeps it for itself.
  struct Side {
    ~Side();
    Fd memory;
    std::byte* base = nullptr;
    size_t size = 0;
    std::unique_ptr<net::Bell> bell_in, bell_out;
    GivenConnections connections;
  };
  // A process that ends closes its side of the channel.
  struct End final : net::Reactor::Handler {
    explicit End(Worker& worker) : worker_(worker) {}
    void on_events(uint32_t) override { worker_.ended(); }
    Worker& worker_;
  };

  Head& head() const { return *reinterpret_cast<Head*>(side_->base); }
  Result<void> spawn(const std::string& program);
  bool makes_sense(const Message& event) const;
  void pass_on();
  void wake();
  void ended();
  void retire(const Error& why);
  void end_process();

  Listener& listener_;
  net::Network& network_;
  net::Reactor& reactor_;
  const uint32_t number_;
  LaneWorkers::Kind kind_ = LaneWorkers::Kind::thread;
  Facts facts_;
  std::shared_ptr<Side> side_ = std::make_shared<Side>();
  std::optional<RingWriter> commands_;
  std::optional<RingReader> events_;
  std::deque<Message> waiting_;
  std::vector<uint32_t> free_;
  std::map<uint32_t, std::vector<uint32_t>> closing_;  // buffers of lanes that are being closed
  Fd channel_, other_end_;
  // A forked child that kept it would keep the auxiliary process, and its connections, alive.
  std::optional<net::KeptFromChildren> channel_kept_;
  std::unique_ptr<net::Socket> channel_watch_;
  End end_{*this};
  std::unique_ptr<net::Task> task_;
  pid_t process_ = 0;
  bool dead_ = false;
  bool given_up_ = false;
  bool registered_ = false;
  uint64_t beats_ = 0;
  Nanos looked_{0};
  Nanos silent_{0};
};

}  // namespace weft::lane::worker
