// A rank that works, checks what it gets, and says what it sees when the group ends. For
// chaos_test.py, which strikes it.
//
//   chaos_sample NAME=VALUE...          the names are those of Setup; the secret is in WEFT_SECRET
//   chaos_sample lane-worker            as an auxiliary process of itself
//
// It says, a line each, with CLOCK_MONOTONIC in nanoseconds:
//   joined T | working T | leaving T | left T | rebuilding T | summed T | child PID | struck T
//   unjoined T CODE WORDS               there is no group
//   failed T CODE CULPRIT WORDS         the culprit is its first number, -1 for none
//   refused T CODE WORDS                there is no new group
//   rebuilt T RANK,RANK...              the new group, by first numbers
//   wrong WORDS                         what must never be
// It works until its input ends on any rank. Exit: 0 left in peace, 3 after a rebuild, 4 no new
// group, 5 not joined, 1 wrong.
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>

#include "weft/runtime.h"

namespace weft {
namespace {

using runtime::Call;
using runtime::Collective;
using runtime::Group;
using runtime::Type;

constexpr int kPeace = 0, kWrong = 1, kRebuilt = 3, kRefused = 4, kUnjoined = 5;
constexpr size_t kMost = 300'000;  // elements of an operation
constexpr int kRoundsAfter = 12;   // of a new group

struct Setup {
  std::map<std::string, std::string> words;

  std::string text_of(const std::string& name) const {
    auto found = words.find(name);
    return found == words.end() ? "" : found->second;
  }
  uint32_t number(const std::string& name) const {
    return static_cast<uint32_t>(std::strtoul(text_of(name).c_str(), nullptr, 10));
  }
  Nanos seconds(const std::string& name) const {
    return Nanos::from_seconds(std::strtod(text_of(name).c_str(), nullptr));
  }
  bool has(const std::string& name) const { return number(name) != 0; }
};

long long clock_now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// One write a line, and no memory: there may be none.
__attribute__((format(printf, 1, 2))) void say(const char* format, ...) {
  static char line[6000];
  va_list values;
  va_start(values, format);
  int length = std::vsnprintf(line, sizeof line - 1, format, values);
  va_end(values);
  length = std::min(length, static_cast<int>(sizeof line) - 2);
  std::replace(line, line + length, '\n', ' ');
  line[length] = '\n';
  if (::write(STDOUT_FILENO, line, static_cast<size_t>(length) + 1) < 0) ::_exit(kWrong);
}

bool input_ended() {
  pollfd input{STDIN_FILENO, POLLIN, 0};
  return ::poll(&input, 1, 0) > 0;
}

// ---- no memory -----------------------------------------------------------------------------

volatile sig_atomic_t told_to_eat = 0;
struct Eaten {
  Eaten* next;
};
Eaten* eaten = nullptr;

// From here on this process gets nothing, in any size.
void eat_all_memory() {
  unsigned long pages = 0;
  if (FILE* file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%lu", &pages) != 1) pages = 0;
    std::fclose(file);
  }
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = pages * static_cast<unsigned long>(::sysconf(_SC_PAGESIZE));
  setrlimit(RLIMIT_AS, &limit);
  for (size_t size = 1u << 20; size >= sizeof(Eaten); size = size > 1024 ? size / 2 : size - 16)
    while (auto* more = static_cast<Eaten*>(std::malloc(size))) {
      more->next = eaten;
      eaten = more;
    }
  say("struck %lld", clock_now());
}

void give_back_memory() {
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_AS, &limit);
  while (eaten != nullptr) std::free(std::exchange(eaten, eaten->next));
}

// ---- work ----------------------------------------------------------------------------------

Error wrong(const char* what) { return error(Code::corrupt, "wrong: %s", what); }

// Rounds of operations whose results are known. All ranks draw the same ones.
class Activity {
 public:
  Activity(Group& group, std::string mode, uint64_t seed)
      : group_(group), mode_(std::move(mode)), seed_(seed), in_(kMost), out_(kMost) {}

  // Whether any rank wants to end.
  Result<bool> round(uint64_t number, bool end) {
    Rng rng(seed_ * 1'000'003 + number);
    bool told = false;
    if (mode_.find('d') != std::string::npos) WEFT_TRY(direct(rng, number));
    if (mode_.find('p') != std::string::npos) WEFT_TRY(pairs(rng, number));
    if (mode_.find('x') != std::string::npos) {
      WEFT_ASSIGN(told, gradients(end));
    }
    if (mode_ == "x") return told;
    int32_t flag = end ? 1 : 0;
    Call call;
    call.type = Type::int32;
    call.output = &flag;
    call.count = 1;
    WEFT_TRY(group_.run(call));
    return flag > 0;
  }

 private:
  uint32_t ranks() const { return group_.ranks(); }
  uint32_t rank() const { return group_.rank().index; }
  static float value(uint64_t number, uint32_t rank, size_t i) {
    return static_cast<float>((number + 3 * rank + i) % 101);
  }

  Result<void> direct(Rng& rng, uint64_t number) {
    size_t count = 1 + rng.below(rng.below(3) == 0 ? kMost : 4000);
    auto root = static_cast<uint32_t>(rng.below(ranks()));
    switch (rng.below(4)) {
      case 0: return group_.barrier();
      case 1: {
        for (size_t i = 0; i < count; ++i)
          out_[i] = rank() == root ? value(number, root, i) : -1.0f;
        WEFT_TRY(group_.broadcast(std::span(out_).first(count), {root}));
        for (size_t i = 0; i < count; ++i)
          if (out_[i] != value(number, root, i)) return wrong("a broadcast");
        return {};
      }
      case 2: {
        size_t each = count / ranks();
        for (uint32_t to = 0; to < ranks(); ++to)
          for (size_t i = 0; i < each; ++i) in_[to * each + i] = value(number + to, rank(), i);
        Call call;
        call.collective = Collective::all_to_all;
        call.input = in_.data();
        call.output = out_.data();
        call.count = each * ranks();
        WEFT_TRY(group_.run(call));
        for (uint32_t from = 0; from < ranks(); ++from)
          for (size_t i = 0; i < each; ++i)
            if (out_[from * each + i] != value(number + rank(), from, i))
              return wrong("an all_to_all");
        return {};
      }
      default: break;
    }
    for (size_t i = 0; i < count; ++i) out_[i] = value(number, rank(), i);
    WEFT_TRY(group_.all_reduce(std::span(out_).first(count)));
    for (size_t i = 0; i < count; ++i) {
      float sum = 0;
      for (uint32_t from = 0; from < ranks(); ++from) sum += value(number, from, i);
      if (out_[i] != sum) return wrong("a sum");
    }
    return {};
  }

  // Each sends to the next rank and receives from the one before.
  Result<void> pairs(Rng& rng, uint64_t number) {
    size_t count = 1 + rng.below(rng.below(4) == 0 ? kMost : 2000);
    uint32_t from = (rank() + ranks() - 1) % ranks();
    for (size_t i = 0; i < count; ++i) in_[i] = value(number, rank(), i);
    Call send, receive;
    send.collective = receive.collective = Collective::point_to_point;
    send.count = receive.count = count;
    send.input = in_.data();
    send.root = (rank() + 1) % ranks();
    receive.output = out_.data();
    receive.root = from;
    receive.sends = false;
    WEFT_ASSIGN(auto sent, group_.start(send));
    WEFT_TRY(group_.run(receive));
    WEFT_TRY(sent.wait());
    for (size_t i = 0; i < count; ++i)
      if (out_[i] != value(number, from, i)) return wrong("a message");
    return {};
  }

  // Gradients as in training; the last one tells who wants to end.
  Result<bool> gradients(bool end) {
    constexpr size_t kSizes[] = {70'000, 12'000, 40'000, 300, 1};
    constexpr uint32_t kTensors = std::size(kSizes);
    if (!exchange_) {
      std::vector<runtime::Tensor> tensors;
      for (uint32_t t = 0; t < kTensors; ++t) {
        memory_[t].resize(kSizes[t]);
        tensors.push_back({text("t%u", t), memory_[t], t});
      }
      WEFT_ASSIGN(exchange_, group_.exchange(tensors));
    }
    for (uint32_t t = kTensors; t-- > 0;) {
      for (size_t i = 0; i < memory_[t].size(); ++i) memory_[t][i] = value(step_, rank(), i);
      if (t == kTensors - 1) memory_[t][0] = end ? 1.0f : 0.0f;
      WEFT_TRY(exchange_->ready(t, step_));
    }
    WEFT_TRY(exchange_->wait_all(step_));
    for (uint32_t t = 0; t + 1 < kTensors; ++t)
      for (size_t i = 0; i < memory_[t].size(); i += 7) {
        float sum = 0;
        for (uint32_t from = 0; from < ranks(); ++from) sum += value(step_, from, i);
        if (memory_[t][i] != sum) return wrong("a gradient");
      }
    ++step_;
    return memory_[kTensors - 1][0] > 0;
  }

  Group& group_;
  std::string mode_;
  uint64_t seed_;
  std::vector<float> in_, out_;
  std::vector<float> memory_[5];
  std::unique_ptr<runtime::Exchange> exchange_;
  uint64_t step_ = 0;
};

// ---- a life --------------------------------------------------------------------------------

// Lives on when this process dies, like a data loader's: until the driver lets go of it.
void fork_child(Group& group, int life) {
  pid_t child = ::fork();
  if (child < 0) return say("wrong fork");
  if (child > 0) return say("child %d", child);
  if (group.barrier()) say("wrong a forked child may use the group");
  pollfd held{life, POLLIN, 0};
  while (::poll(&held, 1, -1) < 0) continue;
  ::_exit(0);
}

runtime::Options options_of(const Setup& setup) {
  runtime::Options options;
  options.rank = {setup.number("rank")};
  options.ranks = setup.number("ranks");
  options.rendezvous = setup.text_of("rendezvous");
  const char* secret = std::getenv("WEFT_SECRET");
  options.secret = secret != nullptr ? secret : "";
  options.host = setup.text_of("host");
  options.plan.lanes = setup.number("lanes");
  options.plan.chunk = kib(64);
  options.plan.bucket_rule.size = kib(128);
  if (setup.text_of("worker") == "process") options.plan.lane_worker = plan::LaneWorker::process;
  options.plan.lane_workers = setup.number("workers");
  options.probe = false;
  options.shared_memory = setup.has("shm");
  options.sealed = setup.has("sealed");
  options.progress_thread = setup.has("progress");
  options.silence_deadline = setup.seconds("silence");
  options.join_deadline = setup.seconds("join");
  return options;
}

// Where each member of a new group was in the first one: it listens where it listened before.
std::vector<uint32_t> first_numbers(const Group& group, const std::vector<join::Member>& first) {
  std::vector<uint32_t> out;
  for (const join::Member& member : group.members())
    for (uint32_t rank = 0; rank < first.size(); ++rank)
      if (first[rank].address == member.address && first[rank].port == member.port)
        out.push_back(rank);
  return out;
}

class Life {
 public:
  explicit Life(const Setup& setup) : setup_(setup), rng_(setup.number("seed") * 64 + own()) {}

  int live() {
    ::usleep(static_cast<useconds_t>(setup_.number("wait_us")));
    auto joined = Group::join(options_of(setup_), *recorder_);
    if (!joined) {
      say("unjoined %lld %s %s", clock_now(), code_name(joined.error().code()),
          joined.error().message().c_str());
      return kUnjoined;
    }
    auto group = std::move(*joined);
    first_ = group->members();
    say("joined %lld", clock_now());
    auto numbers = first_numbers(*group, first_);
    auto outcome = work(*group);
    if (outcome) return kPeace;
    for (int again = 0; again < 3; ++again) {
      if (outcome.error().message().starts_with("wrong: ")) return is_wrong(outcome.error());
      if (!tell_failure(*group, outcome.error(), numbers)) return kWrong;
      say("rebuilding %lld", clock_now());
      auto rebuilt = group->rebuild(setup_.seconds("settle"));
      if (!rebuilt) {
        say("refused %lld %s %s", clock_now(), code_name(rebuilt.error().code()),
            rebuilt.error().message().c_str());
        return kRefused;
      }
      group = std::move(*rebuilt);
      numbers = first_numbers(*group, first_);
      std::string members;
      for (uint32_t rank : numbers) members += text("%s%u", members.empty() ? "" : ",", rank);
      say("rebuilt %lld %s", clock_now(), members.c_str());
      if (numbers.size() != group->ranks()) return is_wrong(wrong("members of the new group"));
      outcome = work_again(*group, numbers);
      if (outcome) return kRebuilt;
    }
    return is_wrong(wrong("the group fails again and again"));
  }

 private:
  uint32_t own() const { return setup_.number("rank"); }

  static int is_wrong(const Error& error) {
    say("wrong %s", error.message().c_str());
    return kWrong;
  }

  void think(uint64_t most_us) { ::usleep(static_cast<useconds_t>(rng_.below(most_us + 1))); }

  Result<void> work(Group& group) {
    Activity activity(group, setup_.text_of("mode"), setup_.number("seed"));
    uint64_t fork_at = setup_.has("fork") ? 1 + rng_.below(4) : 0;
    for (uint64_t number = 0;; ++number) {
      if (number == 5) say("working %lld", clock_now());
      if (fork_at > 0 && number == fork_at)
        fork_child(group, static_cast<int>(setup_.number("life")));
      if (told_to_eat != 0) {
        told_to_eat = 0;
        eat_all_memory();
      }
      auto ends = activity.round(number, input_ended());
      if (!ends) {
        give_back_memory();
        Error failure = ends.error();
        // Without memory it had no words.
        if (failure.code() == Code::exhausted && group.failure()) failure = *group.failure();
        // A call that was refused for want of memory leaves the group as it was; this program ends
        // it, since it cannot go on.
        if (failure.code() == Code::exhausted && !group.failure()) {
          group.abort(failure.message());
          while (!group.failure()) (void)group.barrier();
          return *group.failure();
        }
        return failure;
      }
      if (*ends) break;
      think(4000);
    }
    say("leaving %lld", clock_now());
    if (setup_.has("dawdle")) think(400'000);
    WEFT_TRY(group.leave());
    say("left %lld", clock_now());
    return {};
  }

  Result<void> work_again(Group& group, const std::vector<uint32_t>& numbers) {
    float expected = 0;
    for (uint32_t rank : numbers) expected += static_cast<float>(rank + 1);
    std::vector<float> data(100'003);
    for (int round = 0; round < kRoundsAfter; ++round) {
      std::fill(data.begin(), data.end(), static_cast<float>(own() + 1));
      WEFT_TRY(group.all_reduce(data));
      if (!std::all_of(data.begin(), data.end(), [&](float x) { return x == expected; }))
        return wrong("a sum of the new group");
      if (round == 0) say("summed %lld", clock_now());
      think(4000);
    }
    WEFT_TRY(group.leave());
    say("left %lld", clock_now());
    return {};
  }

  // Also: the group refuses work with the same words.
  bool tell_failure(Group& group, const Error& failure, const std::vector<uint32_t>& numbers) {
    auto culprit = group.culprit();
    bool known = culprit && culprit->index < numbers.size();
    say("failed %lld %s %d %s", clock_now(), code_name(failure.code()),
        known ? static_cast<int>(numbers[culprit->index]) : -1, failure.message().c_str());
    auto again = group.barrier();
    if (!again && again.error().message() == failure.message()) return true;
    say("wrong the group does not refuse work with the same words: %s",
        again ? "it works" : again.error().message().c_str());
    return false;
  }

  const Setup& setup_;
  Rng rng_;
  std::unique_ptr<capture::Recorder> recorder_ = capture::Recorder::off();
  std::vector<join::Member> first_;
};

}  // namespace
}  // namespace weft

int main(int count, char** words) {
  if (count == 2 && std::strcmp(words[1], "lane-worker") == 0)
    return weft::lane::run_lane_worker(100, 101, 102, 103);
  weft::Setup setup;
  for (int i = 1; i < count; ++i) {
    const char* middle = std::strchr(words[i], '=');
    if (middle == nullptr) return 2;
    setup.words[std::string(words[i], static_cast<size_t>(middle - words[i]))] = middle + 1;
  }
  struct sigaction eat {};
  eat.sa_handler = [](int) { weft::told_to_eat = 1; };
  eat.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &eat, nullptr);
  try {
    return weft::Life(setup).live();
  } catch (const std::exception& escaped) {
    weft::give_back_memory();
    weft::say("wrong an exception came out: %s", escaped.what());
    return weft::kWrong;
  }
}
