#include "worker/worker.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <new>

extern char** environ;

namespace weft::lane::worker {
namespace {

constexpr const char* kVerb = "lane-worker";
constexpr int kFirstNumber = 100;  // of the descriptors that an auxiliary process finds
// A worker turns at least every kLongestSleep, however little there is to do.
constexpr Nanos kStandsStill = Nanos::from_seconds(5);
// An auxiliary process has to be loaded first. Less than a lane may take to open (12 s), so that
// there is time to open it again.
constexpr Nanos kDoesNotStart = Nanos::from_seconds(8);
constexpr Nanos kEndsWithin = Nanos::from_seconds(2);

}  // namespace

Worker::Side::~Side() {
  if (base != nullptr) ::munmap(base, size);
}

std::string Worker::name() const {
  if (kind_ == LaneWorkers::Kind::process)
    return text("lane worker %u (process %d) of this rank", number_, static_cast<int>(process_));
  return text("lane worker %u (%s) of this rank", number_,
              task_ ? task_->name().c_str() : "not started");
}

Result<void> Worker::start(LaneWorkers::Kind kind, const Facts& facts, const std::string& program) {
  kind_ = kind;
  facts_ = facts;
  Side& side = *side_;
  side.size = memory_size(facts);
  side.memory = Fd(::memfd_create("weft lane worker", MFD_CLOEXEC));
  if (!side.memory || ::ftruncate(side.memory.get(), static_cast<off_t>(side.size)) != 0)
    return io_error(errno, "cannot get %zu bytes of memory for a lane worker", side.size);
  void* place =
      ::mmap(nullptr, side.size, PROT_READ | PROT_WRITE, MAP_SHARED, side.memory.get(), 0);
  if (place == MAP_FAILED) return io_error(errno, "cannot map the memory of a lane worker");
  side.base = static_cast<std::byte*>(place);
  Head* head = new (place) Head();
  head->facts = facts;
  head->events.reader_sleeps.store(1);
  commands_.emplace(head->commands);
  events_.emplace(head->events);
  free_.reserve(facts.send_buffers);  // for as many as there can ever be
  for (uint32_t i = 0; i < facts.send_buffers; ++i) free_.push_back(i);
  WEFT_ASSIGN(side.bell_in, network_.system().bell());
  WEFT_ASSIGN(side.bell_out, network_.system().bell());
  if (kind == LaneWorkers::Kind::thread) {
    WEFT_ASSIGN(task_, network_.system().start([own = side_, &network = network_] {
      serve(own->base, own->connections, *own->bell_in, *own->bell_out, network);
    }));
  } else {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0)
      return io_error(errno, "cannot make a channel to a lane worker");
    channel_ = Fd(pair[0]);
    channel_kept_.emplace(channel_.get());
    other_end_ = Fd(pair[1]);
    Fd watched(::fcntl(channel_.get(), F_DUPFD_CLOEXEC, 3));
    if (!watched) return io_error(errno, "cannot watch the channel to a lane worker");
    WEFT_TRY(spawn(program));
    other_end_.reset();
    channel_watch_ = net::adopt_bell(std::move(watched));
    WEFT_TRY(reactor_.add(*channel_watch_, 0, &end_));  // EPOLLHUP needs no asking
  }
  WEFT_TRY(reactor_.add(*side.bell_out, EPOLLIN, this));
  registered_ = true;
  return {};
}

Result<void> Worker::spawn(const std::string& program) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  // The same numbers in every worker; dup2 clears close-on-exec. From copies above those numbers: a
  // program with a hundred descriptors may have one of these four at a number of another, and it
  // would be gone before its turn.
  const int numbers[] = {side_->memory.get(), other_end_.get(), side_->bell_in->fd(),
                         side_->bell_out->fd()};
  std::array<Fd, 4> copies;
  for (size_t i = 0; i < copies.size(); ++i) {
    copies[i] = Fd(::fcntl(numbers[i], F_DUPFD_CLOEXEC, kFirstNumber + 4));
    if (!copies[i]) {
      posix_spawn_file_actions_destroy(&actions);
      return io_error(errno, "cannot hand a descriptor to an auxiliary process");
    }
    posix_spawn_file_actions_adddup2(&actions, copies[i].get(), kFirstNumber + static_cast<int>(i));
  }
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
  if (registered_ && !dead_) {
    reactor_.remove(*side_->bell_out);
    if (channel_watch_) reactor_.remove(*channel_watch_);
  }
  channel_watch_.reset();
  channel_kept_.reset();
  channel_.reset();  // its end is the end of an auxiliary process
  side_->connections.end();
  if (side_->bell_in) side_->bell_in->ring();
  if (process_ > 0) end_process();
  // What it uses is its own, so nobody has to wait for it for ever.
  if (!task_ || task_->finish(kEndsWithin)) return;
  try {
    WEFT_LOG(lane, warn, "%s does not end; it is left behind", name().c_str());
  } catch (const std::bad_alloc&) {
    return;  // it is, without a word
  }
}

void Worker::end_process() {
  int status = 0;
  for (int i = 0; i < 200 && !dead_ && ::waitpid(process_, &status, WNOHANG) == 0; ++i)
    ::usleep(1000);
  if (::waitpid(process_, &status, WNOHANG) != 0) return;
  ::kill(process_, SIGKILL);
  ::waitpid(process_, &status, 0);
}

void Worker::push(const Message& command) noexcept {
  if (dead_) return;
  pass_on();
  if (waiting_.empty() && commands_->push(command)) {
    wake();
    return;
  }
  try {
    waiting_.push_back(command);
  } catch (const std::bad_alloc&) {
    give_up();
  }
}

void Worker::wake() {
  if (head().commands.reader_sleeps.exchange(0) != 0) side_->bell_in->ring();
}

void Worker::pass_on() {
  bool any = false;
  while (!waiting_.empty() && commands_->push(waiting_.front())) {
    waiting_.pop_front();
    any = true;
  }
  if (any) wake();
}

Result<void> Worker::hand_over(uint32_t lane, std::unique_ptr<net::Socket>& socket) {
  if (kind_ == LaneWorkers::Kind::thread) {
    side_->connections.give(lane, std::move(socket));
    return {};
  }
  Handover words;
  words.lane = lane;
  if (auto seal = socket->hand_over()) {
    words.sealed = true;
    words.seal = *seal;
  }
  if (int failed = net::send_record(channel_.get(), std::as_bytes(std::span(&words, 1)),
                                    socket->fd(), false);
      failed != 0)
    return io_error(failed, "the connection could not be sent to %s", name().c_str());
  return {};
}

// A process may have been overwritten, or be another program: what it says is checked, so that it
// can harm its own lanes and nothing else.
bool Worker::makes_sense(const Message& event) const {
  switch (event.what) {
    case What::taken:
    case What::refused:
    case What::opened:
    case What::sent:
    case What::receipted:
    case What::broken:
    case What::closed: return true;
    case What::arrived:
      return event.buffer >= facts_.send_buffers &&
             event.buffer - facts_.send_buffers < facts_.receive_buffers &&
             event.header.length <= facts_.buffer_bytes;
    default: return false;
  }
}

void Worker::on_events(uint32_t) {
  std::shared_ptr<Side> side = side_;
  side->bell_out->quiet();
  do {
    Message event;
    for (;;) {
      RingReader::Outcome outcome = events_->pop(event);
      if (outcome == RingReader::Outcome::empty) break;
      if (outcome == RingReader::Outcome::nonsense || !makes_sense(event)) {
        retire(error(Code::peer_lost, "%s says what makes no sense", name().c_str()));
        return;
      }
      if (event.what == What::closed || event.what == What::broken)
        if (auto had = closing_.extract(event.lane); !had.empty())
          free_.insert(free_.end(), had.mapped().begin(), had.mapped().end());
      listener_.said(*this, event);
      if (dead_) return;
    }
    head().events.reader_sleeps.store(1, std::memory_order_seq_cst);
  } while (!events_->empty());
  pass_on();
}

void Worker::watch(Nanos now) {
  if (dead_) return;
  pass_on();
  if (given_up_)
    return retire(
        error(Code::peer_lost, "there was no memory for what %s is to be told", name().c_str()));
  if (head().lacked_memory.load() != 0)
    return retire(error(Code::peer_lost, "%s ran out of memory", name().c_str()));
  // This process may have been stopped itself, and the worker with it: only time that passes
  // between two looks of a process that runs counts.
  Nanos passed = looked_.count == 0 ? Nanos{0} : std::min(now - looked_, kLongestSleep);
  looked_ = now;
  uint64_t beats = head().beats.load(std::memory_order_relaxed);
  if (std::exchange(beats_, beats) != beats) {
    silent_ = {0};
    return;
  }
  silent_ += std::max(passed, Nanos{0});
  Nanos limit = beats == 0 ? kDoesNotStart : kStandsStill;
  if (silent_ < limit) return;
  retire(error(Code::peer_lost, "%s %s: no sign of life for %s", name().c_str(),
               beats == 0 ? "does not start" : "stands still", format_duration(limit).c_str()));
}

void Worker::ended() {
  if (dead_) return;
  // It closes its end a moment before it can be waited for.
  siginfo_t told{};
  for (int i = 0; i < 50; ++i) {
    told = {};
    if (::waitid(P_PID, static_cast<id_t>(process_), &told, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        told.si_pid == process_)
      break;
    ::usleep(1000);
  }
  std::string how = "ended";
  if (told.si_pid == process_)
    how = told.si_code == CLD_EXITED ? text("ended with status %d", told.si_status)
                                     : text("was ended by signal %d", told.si_status);
  retire(error(Code::peer_lost, "%s %s", name().c_str(), how.c_str()));
}

// It serves nothing any more. Its connections end now, so that the other ranks see it and lanes are
// opened anew; what it may still do concerns only its own copies.
void Worker::retire(const Error& why) {
  if (std::exchange(dead_, true)) return;
  WEFT_LOG(lane, warn, "%s; its lanes are opened again without it", why.message().c_str());
  reactor_.remove(*side_->bell_out);
  if (channel_watch_) reactor_.remove(*channel_watch_);
  if (process_ > 0) ::kill(process_, SIGKILL);
  side_->connections.end();
  for (int i = 0; i < 100 && kind_ == LaneWorkers::Kind::thread && !side_->connections.shut_all();
       ++i)
    ::usleep(1000);
  waiting_.clear();
  listener_.gone(*this, why);
}

uint32_t Worker::take_buffer() {
  uint32_t number = free_.back();
  free_.pop_back();
  return number;
}

void Worker::give_back_when_closed(uint32_t lane, std::vector<uint32_t> buffers) {
  if (!buffers.empty()) closing_[lane] = std::move(buffers);
}

}  // namespace weft::lane::worker
