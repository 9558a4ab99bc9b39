// The engine's side of lane workers: chunks are handed over, and what the workers tell is passed on
// as if this thread had served the lane itself.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <new>

#include "weft/net.h"
#include "worker/worker.h"

namespace weft::lane {
namespace {

using worker::Facts;
using worker::Message;
using worker::What;
using worker::Worker;

constexpr uint32_t kAtATime = 2;  // chunks that a lane may have: one that is sent, one behind it

// The weft program: what runs now, what the environment names, or what stands beside the library.
std::string find_program() {
  if (const char* named = std::getenv("WEFT_PROGRAM"); named != nullptr && *named != '\0')
    return named;
  char self[4096];
  ssize_t size = ::readlink("/proc/self/exe", self, sizeof self - 1);
  std::string path(self, size > 0 ? static_cast<size_t>(size) : 0);
  if (path.ends_with("/weft")) return path;
  Dl_info library{};
  if (::dladdr(reinterpret_cast<const void*>(&find_program), &library) != 0) {
    std::string folder = library.dli_fname;
    folder = folder.substr(0, folder.rfind('/') + 1);
    for (const char* place : {"weft", "../bin/weft", "../weft"})
      if (::access((folder + place).c_str(), X_OK) == 0) return folder + place;
  }
  return "weft";
}

class Workers;

// A lane that a worker serves; or, if it could not take the connection, this thread.
class ServedLane final : public LanePort {
 public:
  ServedLane(Workers& owner, Worker& worker, Lane::Role role, uint32_t number, uint32_t index,
             uint32_t unsent_limit)
      : owner_(owner),
        worker_(worker),
        role_(role),
        number_(number),
        index_(index),
        unsent_limit_(unsent_limit) {}
  ~ServedLane() override;
  void hand_over(std::unique_ptr<net::Socket> socket);

  schedule::Room room() const override;
  bool send_one() override;
  void resume() override;
  // Workers have copies only, so there is nothing to wait for: what is on its way out may still go.
  void halt() override {
    halted_ = true;
    if (here_) here_->halt();
  }
  void send_receipts(bool all) override {
    if (here_) here_->send_receipts(all);
  }
  bool ready() const override {
    if (here_) return here_->ready();
    return !broken_ && (opened_ || role_ != Lane::Role::out);
  }
  bool shared() const override { return false; }
  const LaneCounters& counters() const override { return here_ ? here_->counters() : counters_; }
  std::optional<net::TcpInfo> tcp_info() const override {
    return here_ ? here_->tcp_info() : std::nullopt;
  }
  std::vector<Unsettled> take_unsettled() override;
  void handle(const Message& event);
  void break_off(Error error);

 private:
  struct Given {
    ChunkHeader header;
    uint64_t token = 0;
    uint32_t buffer = worker::kNoBuffer;  // none: it has left
  };
  Moment on_clock_of_owner(const Message& event) const;
  bool deliver(const Message& event);
  void release(uint32_t buffer);
  void give_back(Given& given);
  void serve_here(const Error& why);

  Workers& owner_;
  Worker& worker_;
  Lane::Role role_;
  uint32_t number_;  // for the worker: used once
  uint32_t index_;   // for the handler
  uint32_t unsent_limit_;
  std::unique_ptr<net::Socket> socket_;  // until the worker has it
  std::unique_ptr<Lane> here_;
  bool opened_ = false;
  bool halted_ = false;
  bool broken_ = false;
  bool worker_has_it_ = true;
  LaneCounters counters_;
  std::deque<Given> given_;
  std::vector<uint32_t> held_;  // buffers of chunks that were asked back
  std::deque<Message> not_yet_;
};

class Workers final : public LaneWorkers, public Worker::Listener {
 public:
  Workers(const Options& options, net::Network& network_in, net::Reactor& reactor_in,
          ChunkHandler& handler_in, const Clock& clock_in, Lane::OnError on_error_in)
      : network(network_in),
        reactor(reactor_in),
        handler(handler_in),
        clock(clock_in),
        on_error(std::move(on_error_in)),
        options_(options) {}

  Result<void> start() {
    Facts facts;
    facts.magic = worker::kFactsMagic;
    facts.buffer_bytes = (options_.chunk_bytes + 4095) / 4096 * 4096;
    facts.send_buffers = 2 * kAtATime * options_.lanes;
    facts.receive_buffers = 4 * options_.lanes + 4;
    std::string program = options_.program.empty() ? find_program() : options_.program;
    for (uint32_t i = 0; i < options_.count; ++i) {
      workers_.push_back(std::make_unique<Worker>(*this, network, reactor, i));
      WEFT_TRY(workers_.back()->start(options_.kind, facts, program));
    }
    return {};
  }

  std::unique_ptr<LanePort> serve(Lane::Role role, std::unique_ptr<net::Socket> socket,
                                  uint16_t number, uint32_t index, uint32_t unsent_limit) override {
    // A worker that is gone leaves its lanes to the others, and the last one to this thread.
    Worker* worker = workers_[number % workers_.size()].get();
    for (size_t i = 0; worker->dead() && i < workers_.size(); ++i) worker = workers_[i].get();
    // A connection that has no descriptor cannot be sent to another process.
    if (worker->dead() || (options_.kind == Kind::process && socket->fd() < 0))
      return std::make_unique<Lane>(role, reactor, std::move(socket), nullptr, index, handler,
                                    clock, unsent_limit, on_error);
    uint32_t fresh = next_number_++;
    auto lane = std::make_unique<ServedLane>(*this, *worker, role, fresh, index, unsent_limit);
    lanes_[fresh] = lane.get();
    worker->lanes.insert(fresh);
    lane->hand_over(std::move(socket));
    return lane;
  }

  void watch(Nanos now) override {
    for (auto& worker : workers_) worker->watch(now);
  }

  Nanos processor_time() const override {
    Nanos sum{0};
    for (const auto& worker : workers_) sum += worker->processor_time();
    return sum;
  }

  void forget(uint32_t number) { lanes_.erase(number); }

  net::Network& network;
  net::Reactor& reactor;
  ChunkHandler& handler;
  const Clock& clock;
  Lane::OnError on_error;

 private:
  void said(Worker& worker, const Message& event) override {
    if (auto lane = lanes_.find(event.lane);
        lane != lanes_.end() && worker.lanes.contains(event.lane)) {
      lane->second->handle(event);
    } else if (event.what == What::arrived) {
      Message command;
      command.what = What::release;
      command.buffer = event.buffer;
      worker.push(command);
    }
  }
  void gone(Worker& worker, const Error& why) override {
    for (uint32_t number : std::vector<uint32_t>(worker.lanes.begin(), worker.lanes.end()))
      if (auto lane = lanes_.find(number); lane != lanes_.end()) lane->second->break_off(why);
  }

  const Options options_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::map<uint32_t, ServedLane*> lanes_;  // by number
  uint32_t next_number_ = 1;
};

// ---- a lane --------------------------------------------------------------------------------

ServedLane::~ServedLane() {
  owner_.forget(number_);
  worker_.lanes.erase(number_);
  if (worker_.dead()) return;
  for (const Message& event : not_yet_) release(event.buffer);
  if (!worker_has_it_) {
    for (Given& one : given_) give_back(one);
    for (uint32_t buffer : held_) worker_.give_back(buffer);
    return;
  }
  try {
    for (Given& one : given_)
      if (one.buffer != worker::kNoBuffer) held_.push_back(one.buffer);
    worker_.give_back_when_closed(number_, std::move(held_));
  } catch (const std::bad_alloc&) {
    worker_.give_up();  // or those buffers would be lost to it
  }
  Message command;
  command.what = What::close;
  command.lane = number_;
  worker_.push(command);
}

void ServedLane::hand_over(std::unique_ptr<net::Socket> socket) {
  // A process gets a copy of the descriptor; this one stays until it has it.
  auto given = worker_.hand_over(number_, socket);
  socket_ = std::move(socket);
  if (!given) {
    serve_here(given.error());
    return;
  }
  Message command;
  command.what = What::open;
  command.lane = number_;
  command.role = role_;
  command.unsent_limit = unsent_limit_;
  worker_.push(command);
}

void ServedLane::serve_here(const Error& why) {
  WEFT_LOG(lane, warn, "a lane is served by the engine's thread: %s", why.message().c_str());
  worker_has_it_ = false;
  here_ = std::make_unique<Lane>(role_, owner_.reactor, std::move(socket_), nullptr, index_,
                                 owner_.handler, owner_.clock, unsent_limit_, owner_.on_error);
  if (halted_) here_->halt();
}

schedule::Room ServedLane::room() const {
  if (here_) return here_->room();
  if (broken_ || halted_ || !opened_ || !worker_.has_buffer()) return schedule::Room::none;
  auto waiting = std::count_if(given_.begin(), given_.end(),
                               [](const Given& one) { return one.buffer != worker::kNoBuffer; });
  return waiting < kAtATime ? schedule::Room::worker : schedule::Room::none;
}

bool ServedLane::send_one() {
  if (here_) return here_->send_one();
  if (room() == schedule::Room::none) return false;
  uint32_t buffer = worker_.take_buffer();
  OutgoingChunk out;
  if (!owner_.handler.take(index_, out) || halted_) {
    worker_.give_back(buffer);
    return false;
  }
  Message command;
  command.what = What::send;
  command.lane = number_;
  command.header = out.header;
  command.token = out.token;
  command.buffer = buffer;
  std::byte* to = worker_.buffer(buffer);
  for (std::span<const std::byte> part : out.payload) {
    if (part.empty()) continue;
    std::memcpy(to, part.data(), part.size());
    to += part.size();
  }
  given_.push_back({out.header, out.token, buffer});
  worker_.push(command);
  return true;
}

// One difference for both: what passes between two looks at the clocks is not part of the chunk.
Moment ServedLane::on_clock_of_owner(const Message& event) const {
  Nanos ahead = owner_.clock.now() - owner_.network.clock().now();
  return {Nanos{event.first} + ahead, Nanos{event.last} + ahead};
}

// The worker does not read it any more.
void ServedLane::give_back(Given& given) {
  uint32_t buffer = std::exchange(given.buffer, worker::kNoBuffer);
  if (buffer != worker::kNoBuffer) worker_.give_back(buffer);
}

void ServedLane::handle(const Message& event) {
  auto still_here = [](const Given& one) { return one.buffer != worker::kNoBuffer; };
  auto given = std::find_if(given_.begin(), given_.end(), [&](const Given& one) {
    return one.header.message == event.header.message;
  });
  switch (event.what) {
    case What::taken: socket_.reset(); return;
    case What::refused:
      if (socket_)
        serve_here(Error(Code::io, event.words));
      else
        break_off(error(Code::peer_lost, "%s", event.words));
      return;
    case What::opened: opened_ = true; return;
    case What::sent: {
      if (given == given_.end()) return;
      // Chunks leave and arrive in the order in which they were given: whoever settles them relies
      // on that, and a process is not believed.
      if (std::any_of(given_.begin(), given, still_here) || !still_here(*given))
        return break_off(error(Code::peer_lost, "its worker tells of chunks out of their order"));
      give_back(*given);
      ++counters_.chunks_sent;
      counters_.bytes_sent += given->header.length + kChunkHeaderBytes;
      Given one = *given;
      if (!halted_) owner_.handler.sent(index_, one.header, one.token, on_clock_of_owner(event));
      return;
    }
    case What::receipted: {
      if (given == given_.end()) return;
      if (given != given_.begin() || still_here(*given))
        return break_off(error(Code::peer_lost, "its worker tells of chunks out of their order"));
      Given one = *given;
      given_.erase(given);
      if (!halted_) owner_.handler.receipted(index_, one.header, one.token);
      return;
    }
    case What::arrived:
      counters_.bytes_received += event.header.length + kChunkHeaderBytes;
      ++counters_.chunks_received;
      if (!not_yet_.empty() || !deliver(event)) not_yet_.push_back(event);
      return;
    case What::broken:
      worker_has_it_ = false;
      for (Given& one : given_) give_back(one);
      for (uint32_t buffer : std::exchange(held_, {})) worker_.give_back(buffer);
      break_off(Error(code_from(event.code), event.words));
      return;
    default: return;
  }
}

void ServedLane::release(uint32_t buffer) {
  Message command;
  command.what = What::release;
  command.buffer = buffer;
  worker_.push(command);
}

// False when there is no place for it yet.
bool ServedLane::deliver(const Message& event) {
  const std::byte* data = worker_.buffer(event.buffer);
  if (halted_ || broken_) {
    release(event.buffer);
    return true;
  }
  ChunkHeader header = event.header;
  header.wants_receipt = false;  // the worker has seen to it
  auto landing = owner_.handler.arriving(index_, header, true);
  if (landing && landing->not_yet) return false;
  Result<void> taken;
  if (!landing) {
    taken = std::move(landing).error();
  } else if (!halted_) {
    const std::byte* from = data;
    for (std::span<std::byte> part : landing->payload) {
      if (part.empty()) continue;
      std::memcpy(part.data(), from, part.size());
      from += part.size();
    }
    taken = owner_.handler.arrived(index_, header, landing->in_place ? data : nullptr,
                                   on_clock_of_owner(event));
  }
  release(event.buffer);
  if (!taken) break_off(std::move(taken).error());
  return true;
}

void ServedLane::resume() {
  if (here_) {
    here_->resume();
    return;
  }
  while (!not_yet_.empty()) {
    if (!deliver(not_yet_.front())) return;
    not_yet_.pop_front();
  }
}

void ServedLane::break_off(Error error) {
  if (broken_ || here_) return;
  broken_ = true;
  if (!halted_) owner_.on_error(index_, std::move(error));
}

std::vector<LanePort::Unsettled> ServedLane::take_unsettled() {
  if (here_) return here_->take_unsettled();
  std::vector<Unsettled> out;
  for (Given& one : given_) {
    if (one.buffer != worker::kNoBuffer) held_.push_back(one.buffer);
    out.push_back({one.header, one.token, false, {}});
  }
  given_.clear();
  return out;
}

}  // namespace

Result<std::unique_ptr<LaneWorkers>> LaneWorkers::start(const Options& options,
                                                        net::Network& network,
                                                        net::Reactor& reactor,
                                                        ChunkHandler& handler, const Clock& clock,
                                                        Lane::OnError on_error) {
  auto workers =
      std::make_unique<Workers>(options, network, reactor, handler, clock, std::move(on_error));
  WEFT_TRY(workers->start());
  return std::unique_ptr<LaneWorkers>(std::move(workers));
}

}  // namespace weft::lane
