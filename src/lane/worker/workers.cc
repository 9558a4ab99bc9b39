// The engine's side of lane workers: chunks are handed over, and what the workers tell is passed on
// as if this thread had served the lane itself.
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <map>
#include <thread>

#include "weft/net.h"
#include "worker/shared.h"

extern char** environ;

namespace weft::lane {
namespace {

using worker::Facts;
using worker::Head;
using worker::Message;
using worker::What;

constexpr uint32_t kAtATime = 2;  // chunks that a lane may have: one that is sent, one behind it
constexpr const char* kVerb = "lane-worker";

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

// One worker with its memory and bells.
class Worker final : public net::Reactor::Handler {
 public:
  Worker(Workers& owner, net::Reactor& reactor) : owner_(owner), reactor_(reactor) {}
  ~Worker() override;
  Result<void> start(LaneWorkers::Kind kind, const Facts& facts, const std::string& program);
  void on_events(uint32_t) override;

  bool push(const Message& message) {
    if (dead_ || !head_->commands.push(message)) return false;
    if (head_->commands.reader_sleeps.exchange(0) != 0) bell_in_->ring();
    return true;
  }
  void hand_over(const worker::Handover& handover, net::Socket& socket);
  std::byte* buffer(uint32_t number) const {
    return base_ + worker::buffers_at() + size_t{number} * head_->facts.buffer_bytes;
  }
  bool copies() const { return kind_ == LaneWorkers::Kind::process; }
  bool dead() const { return dead_; }
  Nanos processor_time() const { return Nanos{head_->processor_ns.load()}; }

  std::vector<uint32_t> free_send;  // buffers
  std::vector<uint32_t> lanes;      // that it serves

 private:
  Result<void> spawn(const std::string& program);
  Workers& owner_;
  net::Reactor& reactor_;
  LaneWorkers::Kind kind_ = LaneWorkers::Kind::thread;
  Fd memory_;
  std::byte* base_ = nullptr;
  size_t size_ = 0;
  Head* head_ = nullptr;
  std::unique_ptr<worker::Bell> bell_in_, bell_out_;
  Fd channel_, other_end_;
  std::unique_ptr<net::Socket> channel_watch_;
  std::thread thread_;
  pid_t process_ = 0;
  bool dead_ = false;
  bool registered_ = false;

  // A process that ends closes its side of the channel.
  struct End final : net::Reactor::Handler {
    explicit End(Worker& worker) : worker_(worker) {}
    void on_events(uint32_t) override { worker_.ended(); }
    Worker& worker_;
  } end_{*this};
  void ended();
};

// A lane that a worker serves.
class ServedLane final : public LanePort {
 public:
  ServedLane(Workers& owner, Worker& worker, Lane::Role role, uint32_t index)
      : owner_(owner), worker_(worker), role_(role), index_(index) {}
  ~ServedLane() override;

  bool send_one() override;
  void resume() override;
  void halt() override { halted_ = true; }
  bool ready() const override { return !broken_ && (opened_ || role_ != Lane::Role::out); }
  bool shared() const override { return false; }
  const LaneCounters& counters() const override { return counters_; }
  std::optional<net::TcpInfo> tcp_info() const override { return std::nullopt; }
  std::vector<Unsettled> take_unsettled() override;
  void handle(const Message& event);
  bool broken() const { return broken_; }
  void break_off(Error error);

 private:
  Moment on_clock_of_owner(const Message& event) const;
  bool deliver(const Message& event);
  struct Given {
    ChunkHeader header;
    uint64_t token;
    uint32_t buffer;
    bool left = false;
  };
  Workers& owner_;
  Worker& worker_;
  Lane::Role role_;
  uint32_t index_;
  bool opened_ = false;
  bool halted_ = false;
  bool broken_ = false;
  LaneCounters counters_;
  std::deque<Given> given_;
  std::map<uint64_t, std::vector<std::byte>> gathered_;  // by message: payloads of many parts
  std::deque<Message> not_yet_;
};

class Workers final : public LaneWorkers {
 public:
  Workers(const Options& options, net::Reactor& reactor, ChunkHandler& handler_in,
          const Clock& clock_in, Lane::OnError on_error_in)
      : handler(handler_in),
        clock(clock_in),
        on_error(std::move(on_error_in)),
        options_(options),
        reactor_(reactor) {}

  Result<void> start() {
    Facts facts;
    facts.magic = worker::kFactsMagic;
    facts.buffer_bytes = (options_.chunk_bytes + 4095) / 4096 * 4096;
    facts.send_buffers = options_.kind == Kind::process ? 2 * kAtATime * options_.lanes : 0;
    facts.receive_buffers = 4 * options_.lanes + 4;
    std::string program = options_.program.empty() ? find_program() : options_.program;
    for (uint32_t i = 0; i < options_.count; ++i) {
      workers_.push_back(std::make_unique<Worker>(*this, reactor_));
      WEFT_TRY(workers_.back()->start(options_.kind, facts, program));
    }
    return {};
  }

  std::unique_ptr<LanePort> serve(Lane::Role role, std::unique_ptr<net::Socket> socket,
                                  uint16_t number, uint32_t index, uint32_t unsent_limit) override {
    // A worker that has died leaves its lanes to the others.
    Worker* worker = workers_[number % workers_.size()].get();
    for (size_t i = 0; worker->dead() && i < workers_.size(); ++i) worker = workers_[i].get();
    auto lane = std::make_unique<ServedLane>(*this, *worker, role, index);
    lanes_.resize(std::max<size_t>(lanes_.size(), index + 1));
    lanes_[index] = lane.get();
    worker->lanes.push_back(index);
    worker->hand_over({index, unsent_limit, role}, *socket);
    return lane;
  }

  Nanos processor_time() const override {
    Nanos sum{0};
    for (const auto& worker : workers_) sum += worker->processor_time();
    return sum;
  }

  ServedLane* lane(uint32_t index) { return index < lanes_.size() ? lanes_[index] : nullptr; }
  void forget(uint32_t index, const ServedLane* which) {
    if (lane(index) == which) lanes_[index] = nullptr;
  }

  ChunkHandler& handler;
  const Clock& clock;
  Lane::OnError on_error;

 private:
  const Options options_;
  net::Reactor& reactor_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<ServedLane*> lanes_;  // by index
};

// ---- a worker --------------------------------------------------------------------------------

Result<void> Worker::start(LaneWorkers::Kind kind, const Facts& facts, const std::string& program) {
  kind_ = kind;
  size_ = worker::memory_size(facts);
  memory_ = Fd(::memfd_create("weft lane worker", MFD_CLOEXEC));
  if (!memory_ || ::ftruncate(memory_.get(), static_cast<off_t>(size_)) != 0)
    return io_error(errno, "cannot get %zu bytes of memory for a lane worker", size_);
  void* place = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, memory_.get(), 0);
  if (place == MAP_FAILED) return io_error(errno, "cannot map the memory of a lane worker");
  base_ = static_cast<std::byte*>(place);
  head_ = new (place) Head();
  head_->facts = facts;
  head_->events.reader_sleeps.store(1);
  for (uint32_t i = 0; i < facts.send_buffers; ++i) free_send.push_back(i);
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0)
    return io_error(errno, "cannot make a channel to a lane worker");
  channel_ = Fd(pair[0]);
  other_end_ = Fd(pair[1]);
  Fd in(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), out(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!in || !out) return io_error(errno, "cannot make the bells of a lane worker");
  bell_in_ = std::make_unique<worker::Bell>(std::move(in));
  bell_out_ = std::make_unique<worker::Bell>(std::move(out));
  if (kind == LaneWorkers::Kind::thread) {
    // It must not take the signals of the program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ =
        std::thread([this] { worker::serve(base_, other_end_.get(), *bell_in_, *bell_out_); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  } else {
    WEFT_TRY(spawn(program));
    other_end_.reset();
    channel_watch_ =
        std::make_unique<worker::Bell>(Fd(::fcntl(channel_.get(), F_DUPFD_CLOEXEC, 3)));
    WEFT_TRY(reactor_.add(*channel_watch_, 0, &end_));  // EPOLLHUP needs no asking
  }
  WEFT_TRY(reactor_.add(*bell_out_, EPOLLIN, this));
  registered_ = true;
  return {};
}

Result<void> Worker::spawn(const std::string& program) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  // The same numbers in every worker; dup2 clears close-on-exec.
  const int numbers[] = {memory_.get(), other_end_.get(), bell_in_->fd(), bell_out_->fd()};
  for (int i = 0; i < 4; ++i) posix_spawn_file_actions_adddup2(&actions, numbers[i], 100 + i);
  std::string name = program, verb = kVerb;
  char* arguments[] = {name.data(), verb.data(), nullptr};
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  // Ctrl-C is for the program that it serves, whose end ends it.
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  int failure =
      ::posix_spawnp(&process_, program.c_str(), &actions, &attributes, arguments, environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (failure != 0)
    return io_error(failure,
                    "cannot start an auxiliary process: \"%s\" (WEFT_PROGRAM may name the weft "
                    "program)",
                    program.c_str());
  return {};
}

Worker::~Worker() {
  if (registered_) {
    reactor_.remove(*bell_out_);
    if (channel_watch_ && !dead_) reactor_.remove(*channel_watch_);
  }
  channel_watch_.reset();
  channel_.reset();  // its end is the worker's end
  if (bell_in_) bell_in_->ring();
  if (thread_.joinable()) thread_.join();
  if (process_ > 0) {
    // It ends by itself at once; one that does not is not waited for.
    for (int i = 0; i < 200 && ::waitpid(process_, nullptr, WNOHANG) == 0; ++i) ::usleep(1000);
    if (::waitpid(process_, nullptr, WNOHANG) == 0) {
      ::kill(process_, SIGKILL);
      ::waitpid(process_, nullptr, 0);
    }
  }
  if (base_ != nullptr) ::munmap(base_, size_);
}

void Worker::hand_over(const worker::Handover& handover, net::Socket& socket) {
  worker::Handover words = handover;
  iovec part{&words, sizeof words};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof space;
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  int fd = socket.fd();
  // A worker's lane owns its descriptor; this one goes with `socket`.
  std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  [[maybe_unused]] ssize_t put = ::sendmsg(channel_.get(), &message, MSG_NOSIGNAL);
  bell_in_->ring();
}

void Worker::on_events(uint32_t) {
  bell_out_->quiet();
  do {
    Message event;
    while (head_->events.pop(event)) {
      if (ServedLane* lane = owner_.lane(event.lane)) {
        lane->handle(event);
      } else if (event.buffer != worker::kNoBuffer) {
        event.what = What::release;
        push(event);
      }
    }
    head_->events.reader_sleeps.store(1, std::memory_order_seq_cst);
  } while (!head_->events.empty());
}

void Worker::ended() {
  if (dead_) return;
  dead_ = true;
  reactor_.remove(*channel_watch_);
  for (uint32_t index : std::vector<uint32_t>(lanes))
    if (ServedLane* lane = owner_.lane(index))
      lane->break_off(error(Code::peer_lost, "its auxiliary process ended"));
}

// ---- a lane --------------------------------------------------------------------------------

ServedLane::~ServedLane() {
  owner_.forget(index_, this);
  std::erase(worker_.lanes, index_);
}

bool ServedLane::send_one() {
  if (broken_ || halted_ || !opened_) return false;
  size_t waiting = 0;
  for (const Given& one : given_) waiting += one.left ? 0 : 1;
  if (waiting >= kAtATime) return false;
  if (worker_.copies() && worker_.free_send.empty()) return false;
  OutgoingChunk out;
  if (!owner_.handler.take(index_, out)) return false;
  Message command;
  command.what = What::send;
  command.lane = index_;
  command.header = out.header;
  command.token = out.token;
  bool copies = worker_.copies() || out.payload.size() > worker::kPointers;
  if (worker_.copies()) {
    command.buffer = worker_.free_send.back();
    worker_.free_send.pop_back();
    std::byte* to = worker_.buffer(command.buffer);
    for (std::span<const std::byte> part : out.payload) {
      std::memcpy(to, part.data(), part.size());
      to += part.size();
    }
  } else if (copies) {
    // More parts than a message can name: one piece is made of them, and kept until it arrived.
    auto& whole = gathered_[out.header.message];
    for (std::span<const std::byte> part : out.payload)
      whole.insert(whole.end(), part.begin(), part.end());
    command.parts = 1;
    command.part[0] = {reinterpret_cast<uint64_t>(whole.data()), whole.size()};
  } else {
    for (std::span<const std::byte> part : out.payload)
      command.part[command.parts++] = {reinterpret_cast<uint64_t>(part.data()), part.size()};
  }
  given_.push_back({out.header, out.token, command.buffer, false});
  // The ring holds more messages than lanes can have chunks.
  WEFT_CHECK(worker_.push(command) || worker_.dead());
  return true;
}

// One difference for both: what passes between two looks at the clocks is not part of the chunk.
Moment ServedLane::on_clock_of_owner(const Message& event) const {
  Nanos ahead = owner_.clock.now() - monotonic_clock().now();
  return {Nanos{event.first} + ahead, Nanos{event.last} + ahead};
}

void ServedLane::handle(const Message& event) {
  Moment when = on_clock_of_owner(event);
  auto given = std::find_if(given_.begin(), given_.end(), [&](const Given& one) {
    return one.header.message == event.header.message;
  });
  switch (event.what) {
    case What::opened: opened_ = true; return;
    case What::sent:
      if (given == given_.end() || halted_) return;
      given->left = true;
      ++counters_.chunks_sent;
      counters_.bytes_sent += event.header.length + kChunkHeaderBytes;
      owner_.handler.sent(index_, event.header, event.token, when);
      return;
    case What::settled: {
      if (given == given_.end()) return;
      if (given->buffer != worker::kNoBuffer) worker_.free_send.push_back(given->buffer);
      gathered_.erase(event.header.message);
      given_.erase(given);
      if (!halted_) owner_.handler.settled(index_, event.header, event.token);
      return;
    }
    case What::arrived:
      counters_.bytes_received += event.header.length + kChunkHeaderBytes;
      ++counters_.chunks_received;
      if (!not_yet_.empty() || !deliver(event)) not_yet_.push_back(event);
      return;
    case What::broken:
      break_off(Error(code_from(event.code), event.words));
      return;
    default: return;
  }
}

// False when there is no place for it yet.
bool ServedLane::deliver(const Message& event) {
  const std::byte* data = worker_.buffer(event.buffer);
  auto give_back = [&] {
    Message command;
    command.what = What::release;
    command.buffer = event.buffer;
    WEFT_CHECK(worker_.push(command) || worker_.dead());
  };
  if (halted_ || broken_) {
    give_back();
    return true;
  }
  auto landing = owner_.handler.arriving(index_, event.header, true);
  if (landing && landing->not_yet) return false;
  Moment when = on_clock_of_owner(event);
  Result<void> taken;
  if (!landing) {
    taken = std::move(landing).error();
  } else {
    const std::byte* from = data;
    for (std::span<std::byte> part : landing->payload) {
      std::memcpy(part.data(), from, part.size());
      from += part.size();
    }
    taken = owner_.handler.arrived(index_, event.header, landing->in_place ? data : nullptr, when);
  }
  give_back();
  if (!taken) break_off(std::move(taken).error());
  return true;
}

void ServedLane::resume() {
  while (!not_yet_.empty()) {
    if (!deliver(not_yet_.front())) return;
    not_yet_.pop_front();
  }
}

void ServedLane::break_off(Error error) {
  if (broken_) return;
  broken_ = true;
  if (!halted_) owner_.on_error(index_, std::move(error));
}

std::vector<LanePort::Unsettled> ServedLane::take_unsettled() {
  std::vector<Unsettled> out;
  for (Given& one : given_) {
    if (one.buffer != worker::kNoBuffer) worker_.free_send.push_back(one.buffer);
    out.push_back({one.header, one.token, false, {}});
  }
  given_.clear();
  gathered_.clear();
  return out;
}

}  // namespace

Result<std::unique_ptr<LaneWorkers>> LaneWorkers::start(const Options& options,
                                                        net::Reactor& reactor,
                                                        ChunkHandler& handler, const Clock& clock,
                                                        Lane::OnError on_error) {
  auto workers = std::make_unique<Workers>(options, reactor, handler, clock, std::move(on_error));
  WEFT_TRY(workers->start());
  return std::unique_ptr<LaneWorkers>(std::move(workers));
}

}  // namespace weft::lane
