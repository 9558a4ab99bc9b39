#include "engine_processes.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

namespace weft::bench {
namespace {

constexpr Nanos kStartPatience = Nanos::from_seconds(60);
constexpr Nanos kMeasurePatience = Nanos::from_seconds(120);
constexpr Nanos kEndPatience = Nanos::from_seconds(3);

Result<Fd> listen_at(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    return error(Code::invalid_argument, "%s is too long for a socket; set TMPDIR to a shorter one",
                 path.c_str());
  strcpy(address.sun_path, path.c_str());
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd || ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(fd.get(), 128) != 0)
    return io_error(errno, "listening at %s", path.c_str());
  return fd;
}

}  // namespace

Result<std::unique_ptr<EngineProcesses>> EngineProcesses::start(const std::string& name,
                                                                const Start& start,
                                                                const std::string& folder) {
  std::unique_ptr<EngineProcesses> processes(new EngineProcesses(name, folder));
  processes->restless_ = start.restless;
  const std::string path = folder + "/" + name + ".socket";
  WEFT_ASSIGN(Fd listener, listen_at(path));
  for (size_t i = 0; i < start.lines.size(); ++i) {
    Start::Line line = start.lines[i];
    line.environment.push_back(std::string(kControlVariable) + "=" + path);
    WEFT_TRY(processes->start_line(line, i));
  }
  WEFT_TRY(processes->greet(listener.get(), start.ranks, monotonic_clock().now() + kStartPatience));
  if (processes->restless_) {
    processes->signal_ranks(SIGSTOP);
    processes->stopped_ = true;
  }
  return processes;
}

Result<void> EngineProcesses::start_line(const Start::Line& line, size_t index) {
  const std::string log = text("%s/%s-%zu.log", folder_.c_str(), name_.c_str(), index);
  Fd out(::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!out) return io_error(errno, "opening %s", log.c_str());
  process::Command command;
  command.argv = line.argv;
  command.environment = line.environment;
  command.descriptors = {{out.get(), 1}, {out.get(), 2}};
  command.own_group = true;  // a launcher and what it starts are ended together
  command.dies_with_parent = true;
  WEFT_ASSIGN(process::Child child, process::Child::start(command));
  processes_.push_back(std::move(child));
  return {};
}

Result<void> EngineProcesses::greet(int listener, uint32_t ranks, Nanos deadline) {
  ranks_.resize(ranks);
  rank_pids_.resize(ranks);
  for (uint32_t greeted = 0; greeted < ranks;) {
    if (auto failure = ended()) return *failure;
    if (monotonic_clock().now() > deadline)
      return error(Code::timeout, "only %u of %u ranks came within %s%s", greeted, ranks,
                   format_duration(kStartPatience).c_str(), last_words().c_str());
    pollfd waiting{listener, POLLIN, 0};
    if (::poll(&waiting, 1, 20) <= 0) continue;
    Fd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (!fd) continue;
    const timeval patience{10, 0};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    auto lines = std::make_unique<Lines>(std::move(fd));
    WEFT_ASSIGN(std::optional<std::string> line, lines->read());
    if (!line) continue;
    WEFT_ASSIGN(Hello hello, read_hello(*line));
    if (hello.rank >= ranks || ranks_[hello.rank])
      return error(Code::corrupt, "rank %u of %u came, again or out of range", hello.rank, ranks);
    version_ = hello.version;
    rank_pids_[hello.rank] = hello.pid;
    ranks_[hello.rank] = std::move(lines);
    ++greeted;
  }
  return {};
}

std::string EngineProcesses::last_words() const {
  for (size_t i = 0; i < processes_.size(); ++i) {
    auto said = read_file(text("%s/%s-%zu.log", folder_.c_str(), name_.c_str(), i), mib(4));
    if (!said) continue;
    // Launchers draw boxes around what they say: the first line with words in it is the news.
    size_t from = 0;
    while (from < said->size()) {
      size_t to = std::min(said->find('\n', from), said->size());
      std::string line = said->substr(from, to - from);
      if (std::count_if(line.begin(), line.end(), [](char c) { return std::isalpha(c); }) > 8)
        return ": " + line.substr(0, 300);
      from = to + 1;
    }
  }
  return "";
}

std::optional<Error> EngineProcesses::ended() const {
  for (const process::Child& process : processes_) {
    if (const auto ending = process.ended())
      return error(Code::peer_lost, "a process of it %s%s", ending->words().c_str(),
                   last_words().c_str());
  }
  return std::nullopt;
}

void EngineProcesses::signal_ranks(int signal) const {
  for (int pid : rank_pids_)
    if (pid > 0) ::kill(pid, signal);
}

Result<Answer> EngineProcesses::measure(const Request& request) {
  if (stopped_) {
    signal_ranks(SIGCONT);
    stopped_ = false;
  }
  for (auto& rank : ranks_) WEFT_TRY(rank->write(write_request(request)));
  const Nanos deadline = monotonic_clock().now() + kMeasurePatience;
  Answer slowest;
  std::optional<Error> refused;
  std::vector<bool> answered(ranks_.size());
  for (size_t left = ranks_.size(); left > 0;) {
    std::vector<pollfd> waiting;
    for (size_t r = 0; r < ranks_.size(); ++r)
      waiting.push_back({answered[r] ? -1 : ranks_[r]->fd(), POLLIN, 0});
    if (::poll(waiting.data(), waiting.size(), 100) == 0) {
      if (auto failure = ended()) return *failure;
      if (monotonic_clock().now() > deadline)
        return error(Code::timeout, "%zu ranks did not answer within %s", left,
                     format_duration(kMeasurePatience).c_str());
      continue;
    }
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (answered[r] || waiting[r].revents == 0) continue;
      WEFT_ASSIGN(std::optional<std::string> line, ranks_[r]->read_available());
      if (!line) {
        if (!ranks_[r]->ended()) continue;
        return error(Code::peer_lost, "rank %zu ended%s", r, last_words().c_str());
      }
      answered[r] = true;
      --left;
      auto answer = read_answer(*line);
      if (!answer) {
        if (answer.error().code() != Code::unsupported) return std::move(answer).error();
        refused = answer.error();
        continue;
      }
      slowest.seconds = std::max(slowest.seconds, answer->seconds);
      slowest.wrong += answer->wrong;
    }
  }
  if (restless_) {
    signal_ranks(SIGSTOP);
    stopped_ = true;
  }
  if (refused) return *refused;
  return slowest;
}

EngineProcesses::~EngineProcesses() {
  if (stopped_) signal_ranks(SIGCONT);
  for (auto& rank : ranks_) rank.reset();  // the end of the stream is the end of the worker
  const Nanos deadline = monotonic_clock().now() + kEndPatience;
  const auto all_ended = [&] {
    return std::all_of(processes_.begin(), processes_.end(),
                       [](const process::Child& process) { return process.ended().has_value(); });
  };
  while (!all_ended() && monotonic_clock().now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  // Ranks that a launcher started are not in its group.
  if (!all_ended()) signal_ranks(SIGKILL);
}

}  // namespace weft::bench
