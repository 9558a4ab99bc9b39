// The worker's side: connections, and nothing that decides.
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <new>

#include "weft/net.h"
#include "worker/shared.h"

namespace weft::lane::worker {
namespace {

Nanos thread_time() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  auto ns = [](const timeval& t) { return (int64_t{t.tv_sec} * 1'000'000 + t.tv_usec) * 1000; };
  return Nanos{ns(usage.ru_utime) + ns(usage.ru_stime)};
}

class Server final : public ChunkHandler, net::Reactor::Handler {
 public:
  Server(std::byte* base, Connections& connections, net::Bell& bell_in, net::Bell& bell_out,
         std::unique_ptr<net::Reactor> reactor, const Clock& clock)
      : head_(*reinterpret_cast<Head*>(base)),
        facts_(head_.facts),
        buffers_(base + buffers_at()),
        connections_(connections),
        commands_(head_.commands),
        events_(head_.events),
        bell_in_(bell_in),
        bell_out_(bell_out),
        reactor_(std::move(reactor)),
        clock_(clock) {
    free_.reserve(facts_.receive_buffers);  // for as many as there can ever be
    for (uint32_t i = 0; i < facts_.receive_buffers; ++i) free_.push_back(facts_.send_buffers + i);
  }
  Result<void> begin() { return reactor_->add(bell_in_, EPOLLIN, this); }
  ~Server() override {
    while (!lanes_.empty()) drop(lanes_.begin()->first);
    reactor_->remove(bell_in_);
  }

  void run() {
    Nanos next_account{0};
    while (!connections_.ended()) {
      head_.beats.fetch_add(1, std::memory_order_relaxed);
      head_.commands.reader_sleeps.store(1, std::memory_order_seq_cst);
      bool more = more_ || !commands_.empty();
      reactor_->run_once(more ? Nanos{0} : kLongestSleep);
      head_.commands.reader_sleeps.store(0);
      if (!take_commands()) return;
      send_all();
      flush_events();
      Nanos now = clock_.now();
      if (now < next_account) continue;
      next_account = now + Nanos::from_millis(20);
      head_.processor_ns.store(thread_time().count, std::memory_order_relaxed);
    }
  }

  // ---- from lanes
  bool take(uint32_t lane, OutgoingChunk& out) override {
    auto& waiting = places_.at(lane).waiting;
    if (waiting.empty()) return false;
    const Message& next = waiting.front();
    out.header = next.header;
    out.token = next.token;
    out.payload.push_back({buffer(next.buffer), next.header.length});
    waiting.pop_front();
    return true;
  }
  void sent(uint32_t lane, const ChunkHeader& header, uint64_t token, Moment when) override {
    tell(What::sent, lane, header, token, kNoBuffer, when);
  }
  void receipted(uint32_t lane, const ChunkHeader& header, uint64_t token) override {
    tell(What::receipted, lane, header, token, kNoBuffer, {});
  }
  Result<Destination> arriving(uint32_t lane, const ChunkHeader& header, bool) override {
    if (header.length > facts_.buffer_bytes)
      return error(Code::corrupt, "a chunk of %u bytes; at most %u are expected", header.length,
                   facts_.buffer_bytes);
    if (free_.empty()) {
      paused_ = true;
      return Destination{true, false, {}};
    }
    uint32_t number = free_.back();
    free_.pop_back();
    places_.at(lane).landing = number;
    return Destination{false, false, {std::span(buffer(number), header.length)}};
  }
  Result<void> arrived(uint32_t lane, const ChunkHeader& header, const std::byte*,
                       Moment when) override {
    Place& place = places_.at(lane);
    tell(What::arrived, lane, header, 0, std::exchange(place.landing, kNoBuffer), when);
    return {};
  }

 private:
  struct Place {
    std::deque<Message> waiting;
    uint32_t landing = kNoBuffer;
    bool opened = false;
  };

  std::byte* buffer(uint32_t number) const {
    return buffers_ + size_t{number} * facts_.buffer_bytes;
  }

  void on_events(uint32_t) override { bell_in_.quiet(); }

  void open(const Message& command) {
    auto socket = connections_.take(command.lane);
    if (!socket) {
      tell_error(What::refused, command.lane, socket.error());
      return;
    }
    places_[command.lane] = {};
    net::Socket& served = **socket;
    auto lane = std::make_unique<Lane>(
        command.role, *reactor_, std::move(*socket), nullptr, command.lane, *this, clock_,
        command.unsent_limit, [this](uint32_t index, const Error& error) { broke(index, error); });
    lanes_[command.lane] = std::move(lane);
    // Only now: what runs out of memory before has closed it without a word.
    connections_.serves(command.lane, served);
    tell(What::taken, command.lane, {}, 0, kNoBuffer, {});
  }

  void drop(uint32_t lane) {
    connections_.closes(lane);
    lanes_.erase(lane);
    auto place = places_.find(lane);
    if (place == places_.end()) return;
    if (place->second.landing != kNoBuffer) free_.push_back(place->second.landing);
    places_.erase(place);
  }

  void tell_error(What what, uint32_t lane, const Error& error) {
    Message event;
    event.what = what;
    event.lane = lane;
    event.code = static_cast<uint8_t>(error.code());
    std::strncpy(event.words, error.message().c_str(), sizeof event.words - 1);
    unsaid_.push_back(event);
  }

  // The lane itself called: it goes at the end of the turn.
  void broke(uint32_t lane, const Error& error) {
    places_.at(lane).waiting.clear();
    tell_error(What::broken, lane, error);
    broken_.push_back(lane);
  }

  void tell(What what, uint32_t lane, const ChunkHeader& header, uint64_t token, uint32_t number,
            Moment when) {
    Message event;
    event.what = what;
    event.lane = lane;
    event.header = header;
    event.token = token;
    event.buffer = number;
    event.first = when.first.count;
    event.last = when.last.count;
    unsaid_.push_back(event);
  }

  // False when what comes makes no sense.
  bool take_commands() {
    Message command;
    RingReader::Outcome outcome;
    while ((outcome = commands_.pop(command)) == RingReader::Outcome::message) {
      switch (command.what) {
        case What::open: open(command); break;
        case What::send:
          if (command.buffer >= facts_.send_buffers || command.header.length > facts_.buffer_bytes)
            return false;
          if (auto place = places_.find(command.lane); place != places_.end())
            place->second.waiting.push_back(command);
          break;
        case What::release:
          if (command.buffer - facts_.send_buffers >= facts_.receive_buffers) return false;
          free_.push_back(command.buffer);
          if (std::exchange(paused_, false))
            for (auto& [number, lane] : lanes_) lane->resume();
          break;
        case What::close:
          drop(command.lane);
          tell(What::closed, command.lane, {}, 0, kNoBuffer, {});
          break;
        default: return false;
      }
    }
    return outcome == RingReader::Outcome::empty;
  }

  void send_all() {
    more_ = false;
    for (auto& [number, lane] : lanes_) {
      lane->send_receipts();
      Place& place = places_.at(number);
      if (!place.opened && lane->ready()) {
        place.opened = true;
        tell(What::opened, number, {}, 0, kNoBuffer, {});
      }
      if (!place.waiting.empty() && lane->send_one()) more_ = more_ || !place.waiting.empty();
    }
    for (uint32_t lane : std::exchange(broken_, {})) drop(lane);
  }

  void flush_events() {
    bool any = false;
    while (!unsaid_.empty() && events_.push(unsaid_.front())) {
      unsaid_.pop_front();
      any = true;
    }
    if (!unsaid_.empty()) more_ = true;
    if (any && head_.events.reader_sleeps.exchange(0) != 0) bell_out_.ring();
  }

  Head& head_;
  Facts facts_;
  std::byte* buffers_;
  Connections& connections_;
  RingReader commands_;
  RingWriter events_;
  net::Bell& bell_in_;
  net::Bell& bell_out_;
  std::unique_ptr<net::Reactor> reactor_;
  const Clock& clock_;
  std::map<uint32_t, std::unique_ptr<Lane>> lanes_;  // by their numbers, each used once
  std::map<uint32_t, Place> places_;
  std::vector<uint32_t> free_;
  std::vector<uint32_t> broken_;
  std::deque<Message> unsaid_;
  bool paused_ = false;
  bool more_ = false;
};

// Those of an auxiliary process: they come over a channel, whose end is the end of the process that
// we serve.
class SentConnections final : public Connections {
 public:
  explicit SentConnections(int channel) : channel_(channel) {}

  Result<std::unique_ptr<net::Socket>> take(uint32_t lane) override {
    receive();
    auto found = waiting_.extract(lane);
    if (found.empty())
      return error(Code::io, "the connection did not come over the channel to the worker");
    auto& [handover, fd] = found.mapped();
    if (!fd)
      return error(Code::io,
                   "the worker has no descriptor left for it: raise the limit of open files "
                   "(ulimit -n)");
    auto socket = net::adopt(std::move(fd));
    if (handover.sealed) socket = net::seal(std::move(socket), handover.seal);
    return socket;
  }
  bool ended() override {
    receive();
    return ended_;
  }

 private:
  void receive() {
    for (;;) {
      Handover handover;
      net::Record record =
          net::receive_record(channel_, std::as_writable_bytes(std::span(&handover, 1)));
      bool nothing = record.bytes == -EAGAIN || record.bytes == -EWOULDBLOCK;
      if (record.bytes <= 0 && !nothing) ended_ = true;
      if (record.bytes != static_cast<ssize_t>(sizeof handover)) return;
      waiting_[handover.lane] = {handover, std::move(record.fd)};
    }
  }

  int channel_;
  std::map<uint32_t, std::pair<Handover, Fd>> waiting_;
  bool ended_ = false;
};

}  // namespace

void GivenConnections::give(uint32_t lane, std::unique_ptr<net::Socket> socket) {
  std::lock_guard lock(mutex_);
  given_[lane] = std::move(socket);
}

Result<std::unique_ptr<net::Socket>> GivenConnections::take(uint32_t lane) {
  std::lock_guard lock(mutex_);
  auto found = given_.extract(lane);
  if (found.empty()) return error(Code::io, "the connection was not given to the worker");
  return std::move(found.mapped());
}

void GivenConnections::serves(uint32_t lane, net::Socket& socket) {
  std::lock_guard lock(mutex_);
  served_[lane] = &socket;
}

void GivenConnections::closes(uint32_t lane) {
  std::lock_guard lock(mutex_);
  served_.erase(lane);
}

bool GivenConnections::shut_all() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  for (const auto& [lane, socket] : served_) socket->shut();
  given_.clear();
  return true;
}

namespace {

void serve_while_there_is_memory(std::byte* base, Connections& connections, net::Bell& bell_in,
                                 net::Bell& bell_out, net::Network& network) {
  auto reactor = network.reactor();
  if (!reactor) {
    WEFT_LOG(lane, error, "a lane worker cannot begin: %s", reactor.error().message().c_str());
    return;
  }
  Server server(base, connections, bell_in, bell_out, std::move(*reactor), network.clock());
  if (auto begun = server.begin(); !begun) {
    WEFT_LOG(lane, error, "a lane worker cannot begin: %s", begun.error().message().c_str());
    return;
  }
  server.run();
}

}  // namespace

void serve(std::byte* base, Connections& connections, net::Bell& bell_in, net::Bell& bell_out,
           net::Network& network) {
  try {
    serve_while_there_is_memory(base, connections, bell_in, bell_out, network);
  } catch (const std::bad_alloc&) {
    // Its lanes are closed by now. The owner need not wait until it misses the worker.
    reinterpret_cast<Head*>(base)->lacked_memory.store(1);
    bell_out.ring();
  }
}

}  // namespace weft::lane::worker

namespace weft::lane {

int run_lane_worker(int memory, int channel, int bell_in, int bell_out) {
  Fd file(memory), wire(channel);
  auto in = net::adopt_bell(Fd(bell_in)), out = net::adopt_bell(Fd(bell_out));
  struct stat facts {};
  if (::fstat(file.get(), &facts) != 0 || facts.st_size < static_cast<off_t>(worker::buffers_at()))
    return 2;
  auto size = static_cast<size_t>(facts.st_size);
  void* place = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (place == MAP_FAILED) return 2;
  auto* head = static_cast<worker::Head*>(place);
  if (head->facts.magic != worker::kFactsMagic || worker::memory_size(head->facts) > size) return 2;
  worker::SentConnections connections(wire.get());
  worker::serve(static_cast<std::byte*>(place), connections, *in, *out, net::kernel_network());
  return 0;
}

}  // namespace weft::lane
