#include "job.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <thread>

#include <c10/util/Exception.h>

namespace weft::torch_backend {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTimeoutMax = std::chrono::hours(24 * 29);

// Never destroyed: who closes last may do so while the process ends.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Job>> jobs;  // in the order in which they were made
};
Registry& registry() {
  static auto* one = new Registry;
  return *one;
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : value;
}

// Two processes of which this is equal reach each other by loopback.
std::string this_machine() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char net[64] = {};
  ssize_t got = ::readlink("/proc/self/ns/net", net, sizeof net - 1);
  if (boot.empty() || got <= 0) return membership::host_name();
  return boot + " " + net;
}

// The own address from which `host` is reached; empty if that is not known, or loopback.
std::string address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (host.empty() || ::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return {};
  std::string out;
  for (const addrinfo* one = found; one != nullptr && out.empty(); one = one->ai_next) {
    Fd socket(::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    // A datagram socket that is connected has sent nothing, and has an address.
    if (!socket || ::connect(socket.get(), one->ai_addr, one->ai_addrlen) != 0 ||
        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0)
      continue;
    char words[NI_MAXHOST];
    if (::getnameinfo(reinterpret_cast<sockaddr*>(&own), size, words, sizeof words, nullptr, 0,
                      NI_NUMERICHOST) != 0)
      continue;
    std::string address(words);
    bool loopback = address == "::1" || address.starts_with("127.");
    bool link_local = address.find('%') != std::string::npos;
    if (!loopback && !link_local) out = address;
  }
  ::freeaddrinfo(found);
  return out;
}

// Rank 0: where the others can reach it.
Result<std::string> own_address(const std::vector<std::string>& machines,
                                const std::vector<std::string>& hosts) {
  auto other = std::find_if(machines.begin(), machines.end(),
                            [&](const std::string& machine) { return machine != machines[0]; });
  bool alone = other == machines.end();
  if (std::string interface = variable("WEFT_INTERFACE"); !interface.empty())
    return net::address_of_interface(interface, "0.0.0.0");
  if (alone) return std::string("127.0.0.1");
  const std::string& far = hosts[static_cast<size_t>(other - machines.begin())];
  for (const std::string& towards : {variable("MASTER_ADDR"), far})
    if (std::string address = address_towards(towards); !address.empty()) return address;
  return error(Code::invalid_argument,
               "rank 0 does not know by which address %s can reach it: set WEFT_INTERFACE to the "
               "name of a network interface that all hosts have, or MASTER_ADDR to an address of "
               "rank 0 that is not loopback",
               membership::shown(far).c_str());
}

// What the ranks tell each other through the store, under names that differ from meeting to
// meeting: a store may outlive a group, and the next group must not read what the last one wrote.
class Board {
 public:
  Board(c10d::Store& store, uint32_t rank, milliseconds timeout)
      : store_(store), timeout_(timeout) {
    int64_t times = store.add(text("weft/came/%u", rank), 1);
    prefix_ = text("weft/%lld/", static_cast<long long>(times));
  }
  void put(const std::string& name, const std::string& value) { store_.set(prefix_ + name, value); }
  std::string take(const std::string& name) {
    store_.wait({prefix_ + name}, timeout_);
    return store_.get_to_str(prefix_ + name);
  }
  void remove(const std::string& name) {
    try {
      store_.deleteKey(prefix_ + name);
    } catch (const std::exception&) {
      // Some stores cannot; the secret is of this job only, and the job has met.
    }
  }

 private:
  c10d::Store& store_;
  milliseconds timeout_;
  std::string prefix_;
};

constexpr const char* kMet = "at ";
constexpr const char* kFailed = "failed ";

Result<std::unique_ptr<api::Job>> meet_by(Board& board, uint32_t rank, uint32_t ranks,
                                          milliseconds timeout) {
  api::JoinOptions options;
  options.join_timeout = options.progress_timeout = options.ready_timeout = Nanos::from_millis(
      static_cast<double>(std::clamp(timeout, milliseconds(1), kTimeoutMax).count()));
  membership::Membership& member = options.membership.emplace();
  member.rank = rank;
  member.size = ranks;
  member.launcher = "torch";
  member.host = variable("WEFT_HOST").empty() ? membership::host_name() : variable("WEFT_HOST");
  member.interface = variable("WEFT_INTERFACE");
  member.secret = variable("WEFT_SECRET");
  bool own_secret = !member.secret.empty();
  if (own_secret) WEFT_TRY(membership::check_secret(member.secret, "WEFT_SECRET"));
  if (ranks == 1) {
    if (!own_secret) member.secret = membership::new_secret();
    return api::join(options);
  }
  board.put(text("host/%u", rank), this_machine() + "\n" + member.host);
  if (rank == 0) {
    std::vector<std::string> machines, hosts;
    for (uint32_t r = 0; r < ranks; ++r) {
      std::string words = board.take(text("host/%u", r));
      size_t end = words.find('\n');
      machines.push_back(words.substr(0, end));
      hosts.push_back(end == std::string::npos ? "" : words.substr(end + 1));
    }
    WEFT_ASSIGN(member.rendezvous, own_address(machines, hosts));
    if (!own_secret) {
      member.secret = membership::new_secret();
      board.put("secret", member.secret);
    }
    options.listening = [&](const std::string& where) -> Result<void> {
      board.put("place", kMet + where);
      return {};
    };
    WEFT_ASSIGN(auto job, api::join(options));
    board.remove("secret");
    board.remove("place");
    return job;
  }
  std::string place = board.take("place");
  if (place.starts_with(kFailed))
    return error(Code::peer_lost, "rank 0 cannot join: %s",
                 place.substr(std::string(kFailed).size()).c_str());
  if (!place.starts_with(kMet))
    return error(Code::corrupt, "the store says \"%s\" where the address of rank 0 should be",
                 membership::shown(place).c_str());
  member.rendezvous = place.substr(std::string(kMet).size());
  if (!own_secret) member.secret = board.take("secret");
  return api::join(options);
}

}  // namespace

std::exception_ptr exception_of(const Error& error) {
  // Whoever looks into messages looks for these words.
  bool late = error.code() == Code::timeout;
  std::string words = (late ? "weft: Timed out because " : "weft: ") + error.message();
  try {
    switch (error.code()) {
      case Code::peer_lost:
      case Code::io: TORCH_CHECK_WITH(DistNetworkError, false, words);
      default: TORCH_CHECK_WITH(DistBackendError, false, words);
    }
  } catch (...) {
    return std::current_exception();
  }
}

void raise(const Error& error) { std::rethrow_exception(exception_of(error)); }

std::shared_ptr<Job> Job::meet(c10d::Store& store, uint32_t rank, std::vector<int64_t> global,
                               milliseconds timeout) {
  Board board(store, rank, timeout);
  Result<std::unique_ptr<api::Job>> joined = error(Code::cancelled, "not joined");
  try {
    joined = meet_by(board, rank, static_cast<uint32_t>(global.size()), timeout);
  } catch (const std::exception& failure) {
    if (rank == 0) board.put("place", kFailed + std::string(failure.what()));
    throw;
  }
  if (!joined) {
    if (rank == 0) board.put("place", kFailed + joined.error().message());
    raise(joined.error());
  }
  std::shared_ptr<Job> job(new Job);
  job->global_ = std::move(global);
  job->job_ = std::move(*joined);
  job->plan_ = job->job_->plan();
  job->process_ = ::getpid();
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.jobs, [](const std::weak_ptr<Job>& one) { return one.expired(); });
  all.jobs.push_back(job);
  return job;
}

std::shared_ptr<Job> Job::with(const std::vector<int64_t>& global) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  for (const std::weak_ptr<Job>& one : all.jobs) {
    std::shared_ptr<Job> job = one.lock();
    if (!job || job->process_ != ::getpid()) continue;
    std::shared_lock open(job->gate_);
    bool has_all = job->job_ && std::all_of(global.begin(), global.end(), [&](int64_t rank) {
                     return std::count(job->global_.begin(), job->global_.end(), rank) > 0;
                   });
    if (has_all) return job;
  }
  return nullptr;
}

bool Job::in_same_process() const { return process_ == ::getpid(); }

Job::~Job() {
  if (in_same_process()) return;
  // A forked child has copies of what belongs to its parent.
  static_cast<void>(sums_.release());
  static_cast<void>(job_.release());
  for (auto& [id, group] : parts_) static_cast<void>(group.release());
}

uint64_t Job::part(const std::vector<int64_t>& global) {
  std::vector<uint32_t> ranks;
  for (int64_t rank : global) {
    auto found = std::find(global_.begin(), global_.end(), rank);
    ranks.push_back(static_cast<uint32_t>(found - global_.begin()));
  }
  std::unique_lock lock(gate_);
  if (!job_) raise(*ended_);
  auto group = job_->group().subgroup(ranks);
  if (!group) raise(group.error());
  parts_[next_part_] = std::move(*group);
  return next_part_++;
}

void Job::drop(uint64_t part) {
  std::unique_lock lock(gate_);
  parts_.erase(part);
}

void Job::use(uint64_t part, const std::function<void(Group&)>& use) {
  std::shared_lock lock(gate_);
  if (!job_) raise(*ended_);
  if (part == 0) return use(job_->group());
  auto found = parts_.find(part);
  if (found == parts_.end()) raise(Error(Code::cancelled, "the process group was shut down"));
  use(*found->second);
}

void Job::exchange(const Gradients& gradients, const std::vector<at::Tensor>& parameters) {
  std::lock_guard making(making_sums_);
  std::shared_lock lock(gate_);
  if (!job_) raise(*ended_);
  if (!sums_) {
    sums_ = std::make_unique<Sums>(*job_, gradients, parameters);
    return;
  }
  TORCH_CHECK_VALUE(sums_->is_of(gradients, parameters),
                    "weft: this process group has an exchange of gradients already, of another "
                    "model; there is one a process group, of one model: destroy it and make it "
                    "again for another");
}

plan::Plan Job::plan() {
  std::shared_lock lock(gate_);
  return sums_ && job_ ? sums_->plan() : plan_;
}

void Job::use_sums(const std::function<void(Sums&)>& use) {
  std::shared_lock lock(gate_);
  use(*sums_);
}

std::optional<Error> Job::failure() {
  std::shared_lock lock(gate_);
  return job_ ? job_->group().failure() : ended_;
}

std::optional<int64_t> Job::culprit() {
  std::shared_lock lock(gate_);
  auto who = job_ ? job_->group().culprit() : std::nullopt;
  return who ? std::optional(global_[who->index]) : std::nullopt;
}

std::string Job::status() {
  std::shared_lock lock(gate_);
  return job_ ? job_->group().status() : std::string();
}

std::shared_ptr<mark::Marks> Job::marks() {
  std::shared_lock lock(gate_);
  return job_ && job_->marks().on() ? job_->shared_marks() : nullptr;
}

void Job::before_closing(std::function<void()> act) {
  std::unique_lock lock(gate_);
  before_closing_.push_back(std::move(act));
}

void Job::abort(const std::string& reason) {
  std::shared_lock lock(gate_);
  if (job_) job_->group().abort(reason);
}

void Job::close(milliseconds patience) {
  if (!in_same_process()) return;
  std::vector<std::function<void()>> acts;
  {
    std::unique_lock lock(gate_);
    acts.swap(before_closing_);
  }
  for (const auto& act : acts) act();
  {
    std::shared_lock lock(gate_);
    if (!job_) return;
    if (!job_->group().failure()) {
      // A rank that only ends is no reason to keep the process for ever.
      std::mutex mutex;
      std::condition_variable changed;
      bool left = false;
      std::thread guard([&] {
        std::unique_lock waits(mutex);
        if (changed.wait_for(waits, patience, [&] { return left; })) return;
        job_->group().abort("its program ended while others were at work");
      });
      if (sums_ && sums_->in_the_middle())
        job_->group().abort("its program left in the middle of a step");
      else if (sums_)
        sums_->settle();
      if (auto done = job_->leave(); !done)
        WEFT_LOG(runtime, info, "left without ceremony: %s", done.error().message().c_str());
      {
        std::lock_guard waits(mutex);
        left = true;
      }
      changed.notify_all();
      guard.join();
    }
  }
  std::unique_lock lock(gate_);
  if (!job_) return;
  ended_ = job_->group().failure();
  if (!ended_) ended_ = Error(Code::cancelled, "the process group was destroyed");
  parts_.clear();
  if (sums_) sums_->end(*ended_);
  job_.reset();
}

void Job::close_all(milliseconds patience) {
  std::vector<std::shared_ptr<Job>> live;
  {
    Registry& all = registry();
    std::lock_guard lock(all.mutex);
    for (const std::weak_ptr<Job>& one : all.jobs)
      if (auto job = one.lock()) live.push_back(std::move(job));
  }
  for (const std::shared_ptr<Job>& job : live) job->close(patience);
}

}  // namespace weft::torch_backend
