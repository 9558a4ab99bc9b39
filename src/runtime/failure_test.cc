// Ranks that die, stop or fall silent, and strangers at the door; with real processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <barrier>
#include <latch>
#include <nlohmann/json.hpp>

#include "processes.h"

namespace weft::runtime {
namespace {

using testing::HasSubstr;
using namespace testing_support;  // NOLINT(google-build-using-namespace): this module's own

// ---- what ranks are doing when it happens --------------------------------------------------

enum class What : uint8_t { all_reduce, broadcast, all_to_all, barrier, exchange };
constexpr What kWhat[] = {What::all_reduce, What::broadcast, What::all_to_all, What::barrier,
                          What::exchange};
constexpr const char* kWhatNames[] = {"all_reduce", "broadcast", "all_to_all", "barrier",
                                      "exchange"};

class Activity {
 public:
  Activity(What what, Group& group) : what_(what), group_(group), data_(1536u << 10) {}

  Result<void> once() {
    switch (what_) {
      case What::all_reduce: return group_.all_reduce(data_);
      case What::broadcast: return group_.broadcast(data_, {1});
      case What::barrier: return group_.barrier();
      case What::exchange: return exchange_step();
      case What::all_to_all: break;
    }
    Call call;
    call.collective = Collective::all_to_all;
    call.output = data_.data();
    call.count = data_.size() / group_.ranks() * group_.ranks();
    return group_.run(call);
  }

  // After a failure the memory is ours: nobody else writes to it.
  bool memory_is_ours() {
    std::fill(data_.begin(), data_.end(), 77.0f);
    sleep_ms(30);
    return std::all_of(data_.begin(), data_.end(), [](float x) { return x == 77; });
  }

 private:
  Result<void> exchange_step() {
    if (!exchange_) {
      std::vector<Tensor> tensors;
      size_t each = data_.size() / 6;
      for (uint32_t t = 0; t < 6; ++t)
        tensors.push_back({text("t%u", t), std::span(data_).subspan(t * each, each), t});
      WEFT_ASSIGN(exchange_, group_.exchange(tensors));
    }
    for (uint32_t t = 6; t-- > 0;) WEFT_TRY(exchange_->ready(t, step_));
    return exchange_->wait_all(step_++);
  }

  What what_;
  Group& group_;
  std::vector<float> data_;
  std::unique_ptr<Exchange> exchange_;
  uint64_t step_ = 0;
};

enum class Phase : uint8_t { before, during, last };
constexpr const char* kPhaseNames[] = {"before", "during", "last"};

struct Scene {
  What what = What::all_reduce;
  Phase phase = Phase::during;
  uint32_t ranks = 3;
  uint32_t victim = 1;
  bool shared_memory = true;
  bool falls_silent = false;  // instead of a signal that the kernel obeys
  Nanos silence_deadline = Nanos::from_seconds(15);

  std::string name() const {
    return text("%s, %s, rank %u of %u, %s", kWhatNames[static_cast<int>(what)],
                kPhaseNames[static_cast<int>(phase)], victim, ranks, shared_memory ? "shm" : "tcp");
  }
};

// The one that it happens to: takes no part, or does so for a while, or until it happens.
void be_victim(const Scene& scene, Group& group, const Child::Say& say) {
  Activity activity(scene.what, group);
  for (int round = 0; scene.phase != Phase::before; ++round) {
    if (round == 3) {
      say("here");
      if (scene.phase == Phase::last) break;
    }
    if (auto done = activity.once(); !done) {
      say("ended with " + done.error().message());
      break;
    }
  }
  if (scene.phase == Phase::before) say("here");
  for (;;) ::pause();
}

// The others: work until it fails, look at how, and go on without the one that is lost.
void be_survivor(const Scene& scene, Group& group, const Child::Say& say) {
  Activity activity(scene.what, group);
  Result<void> outcome;
  while (outcome) outcome = activity.once();
  say(text("failed %lld", static_cast<long long>(monotonic_clock().now().count)));
  say(text("culprit %u", group.culprit().value_or(Rank{99}).index));
  say("reason " + outcome.error().message());
  if (!activity.memory_is_ours()) say("wrong: the memory was written to");
  auto again = group.barrier();
  if (again || again.error().message() != outcome.error().message())
    say("wrong: the group does not refuse work with the same words");
  auto rebuilt = group.rebuild(Nanos::from_millis(900));
  if (!rebuilt) return say("wrong: not rebuilt: " + rebuilt.error().message());
  if ((*rebuilt)->ranks() != scene.ranks - 1)
    return say(text("wrong: %u ranks are left", (*rebuilt)->ranks()));
  std::vector<float> data(300001, static_cast<float>((*rebuilt)->rank().index + 1));
  if (auto summed = (*rebuilt)->all_reduce(data); !summed)
    return say("wrong: after the rebuild: " + summed.error().message());
  const uint32_t sum = scene.ranks * (scene.ranks - 1) / 2;
  const auto expected = static_cast<float>(sum);
  if (!std::all_of(data.begin(), data.end(), [&](float x) { return x == expected; }))
    return say("wrong: sum after the rebuild");
  if (auto left = (*rebuilt)->leave(); !left) return say("wrong: " + left.error().message());
  say("rebuilt");
}

std::vector<Child> start(const Scene& scene) {
  uint16_t port = free_port();
  std::vector<Child> out;
  for (uint32_t rank = 0; rank < scene.ranks; ++rank)
    out.emplace_back([&](const Child::Say& say) {
      std::signal(SIGUSR1, [](int) { SilentNetwork::silent = true; });
      Options options = options_for(rank, scene.ranks, port, plan::Plan());
      options.shared_memory = scene.shared_memory;
      options.silence_deadline = scene.silence_deadline;
      SilentNetwork network;
      if (scene.falls_silent && rank == scene.victim) options.network = &network;
      auto recorder = capture::Recorder::off();
      auto group = Group::join(options, *recorder);
      if (!group) return say("wrong: " + group.error().message());
      if (rank == scene.victim)
        be_victim(scene, **group, say);
      else
        be_survivor(scene, **group, say);
    });
  return out;
}

// Every survivor names the victim, within `in_time`, and works on with the other survivors.
void expect_named(const Scene& scene, std::vector<Child>& children, Nanos happened, Nanos in_time) {
  constexpr Nanos kPatience = Nanos::from_seconds(20);
  for (uint32_t rank = 0; rank < scene.ranks; ++rank) {
    if (rank == scene.victim) continue;
    SCOPED_TRACE(text("rank %u", rank));
    Child& child = children[rank];
    auto failed = child.hear("failed ", kPatience);
    ASSERT_TRUE(failed) << child.else_heard();
    EXPECT_LT((Nanos{std::stoll(*failed)} - happened).seconds(), in_time.seconds());
    EXPECT_EQ(child.hear("culprit ", kPatience), std::to_string(scene.victim));
    auto reason = child.hear("reason ", kPatience);
    ASSERT_TRUE(reason);
    EXPECT_THAT(*reason, HasSubstr(text("rank %u on localhost", scene.victim)));
    EXPECT_TRUE(child.hear("rebuilt", kPatience)) << *reason << "; then " << child.else_heard();
    EXPECT_EQ(child.ended(kPatience), 0) << "the process lives, and ends by itself";
  }
}

void expect_no_names_left(const std::set<std::string>& before) {
  std::set<std::string> left;
  for (int i = 0; i < 60; ++i) {
    left.clear();
    for (const std::string& name : abandoned_memory())
      if (!before.contains(name)) left.insert(name);
    if (left.empty()) break;
    sleep_ms(50);
  }
  EXPECT_TRUE(left.empty()) << "still there: " << *left.begin();
}

// ---- death -------------------------------------------------------------------------------

class Death : public testing::TestWithParam<Phase> {};

TEST_P(Death, is_told_to_all_within_a_second) {
  std::set<std::string> before = abandoned_memory();
  for (What what : kWhat) {
    auto number = static_cast<uint32_t>(what);
    Scene scene{.what = what, .phase = GetParam(), .ranks = 3 + number % 2};
    scene.victim = (number + static_cast<uint32_t>(scene.phase)) % scene.ranks;
    scene.shared_memory = number % 2 == 0;
    SCOPED_TRACE(scene.name());
    std::vector<Child> children = start(scene);
    ASSERT_TRUE(children[scene.victim].hear("here", Nanos::from_seconds(20)))
        << children[scene.victim].else_heard();
    sleep_ms(30);
    Nanos happened = monotonic_clock().now();
    children[scene.victim].signal(SIGKILL);
    expect_named(scene, children, happened, Nanos::from_seconds(1));
  }
  expect_no_names_left(before);
}

INSTANTIATE_TEST_SUITE_P(Phases, Death, testing::Values(Phase::before, Phase::during, Phase::last),
                         [](const auto& given) {
                           return std::string(kPhaseNames[static_cast<int>(given.param)]);
                         });

// ---- silence -------------------------------------------------------------------------------

// Stopped, or cut off from the network without a word: all its connections stay open.
class Silence : public testing::TestWithParam<std::tuple<bool, Phase>> {};

TEST_P(Silence, is_told_when_its_deadline_has_passed) {
  auto [cut_off, phase] = GetParam();
  std::vector<Scene> scenes;
  std::vector<std::vector<Child>> all;
  // All at the same time: they wait, most of it.
  for (What what : kWhat) {
    auto number = static_cast<uint32_t>(what);
    Scene scene{.what = what, .phase = phase};
    scene.victim = (number + static_cast<uint32_t>(phase)) % scene.ranks;
    scene.falls_silent = cut_off;
    scene.shared_memory = !cut_off && number % 2 == 1;
    scene.silence_deadline = Nanos::from_millis(1500);
    scenes.push_back(scene);
    all.push_back(start(scene));
  }
  std::vector<Nanos> happened;
  for (size_t i = 0; i < all.size(); ++i) {
    Child& victim = all[i][scenes[i].victim];
    SCOPED_TRACE(scenes[i].name());
    ASSERT_TRUE(victim.hear("here", Nanos::from_seconds(20))) << victim.else_heard();
    sleep_ms(20);
    happened.push_back(monotonic_clock().now());
    victim.signal(cut_off ? SIGUSR1 : SIGSTOP);
  }
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(scenes[i].name());
    expect_named(scenes[i], all[i], happened[i], Nanos::from_seconds(6));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Phases, Silence,
    testing::Combine(testing::Bool(), testing::Values(Phase::before, Phase::during, Phase::last)),
    [](const auto& given) {
      return text("%s_%s", std::get<0>(given.param) ? "cut_off" : "stopped",
                  kPhaseNames[static_cast<int>(std::get<1>(given.param))]);
    });

// ---- abort -------------------------------------------------------------------------------

TEST(Abort, from_another_thread_ends_all_waits) {
  auto outcomes = run_ranks(3, plan::Plan(), [](Group& group, capture::Recorder&) -> Result<void> {
    // Nobody can get through: rank 2 does not take part.
    std::vector<std::thread> waiters;
    std::atomic<int> ended{0};
    std::vector<float> data(100000), gradient(1000);
    auto exchange = group.exchange({{"t", gradient, 0}});
    EXPECT_TRUE(exchange);
    if (group.rank().index != 2)
      waiters.emplace_back([&] {
        EXPECT_FALSE(group.all_reduce(data));
        ++ended;
      });
    waiters.emplace_back([&] {
      if (exchange) {
        EXPECT_FALSE((*exchange)->wait_all(0));
      }
      ++ended;
    });
    waiters.emplace_back([&] {
      uint8_t byte = 0;
      EXPECT_FALSE(group.receive(&byte, 1, Type::uint8, {(group.rank().index + 1) % 3}));
      ++ended;
    });
    if (group.rank().index == 2) {
      sleep_ms(50);
      EXPECT_EQ(ended, 0);
      group.abort("enough");
    }
    for (std::thread& waiter : waiters) waiter.join();
    EXPECT_EQ(group.culprit(), Rank{2});
    return *group.failure();
  });
  for (auto& outcome : outcomes) {
    ASSERT_FALSE(outcome);
    EXPECT_EQ(outcome.error().code(), Code::cancelled);
    EXPECT_THAT(outcome.error().message(),
                HasSubstr("rank 2 on localhost ended the group: enough"));
  }
}

TEST(Rebuild, is_refused_while_the_group_is_well) {
  auto outcomes = run_ranks(2, plan::Plan(), [](Group& group, capture::Recorder&) -> Result<void> {
    auto rebuilt = group.rebuild();
    if (rebuilt) return error(Code::corrupt, "rebuilt");
    EXPECT_THAT(rebuilt.error().message(), HasSubstr("has not failed"));
    return group.barrier();
  });
  for (auto& outcome : outcomes) EXPECT_TRUE(outcome);
}

TEST(Rebuild, goes_on_after_a_second_loss) {
  auto outcomes = run_ranks(4, plan::Plan(), [](Group& group, capture::Recorder&) -> Result<void> {
    WEFT_TRY(group.barrier());
    if (group.rank().index == 0) return error(Code::cancelled, "left");
    while (group.barrier()) continue;
    WEFT_ASSIGN(auto second, group.rebuild(Nanos::from_millis(700)));
    if (second->ranks() != 3) return error(Code::corrupt, "%u ranks", second->ranks());
    WEFT_TRY(second->barrier());
    if (second->rank().index == 1) return error(Code::cancelled, "left");
    while (second->barrier()) continue;
    EXPECT_EQ(second->culprit(), Rank{1});
    WEFT_ASSIGN(auto third, second->rebuild(Nanos::from_millis(700)));
    if (third->ranks() != 2) return error(Code::corrupt, "%u ranks", third->ranks());
    std::vector<float> data(1000, 1);
    WEFT_TRY(third->all_reduce(data));
    if (data[500] != 2) return error(Code::corrupt, "wrong sum");
    WEFT_TRY(third->leave());
    return error(Code::cancelled, "well");
  });
  for (uint32_t rank : {1u, 3u}) {
    ASSERT_FALSE(outcomes[rank]);
    EXPECT_EQ(outcomes[rank].error().message(), "well") << "rank " << rank;
  }
}

// ---- strangers -----------------------------------------------------------------------------

class LogLines {
 public:
  LogLines() {
    log_set_sink([this](std::string_view line) {
      std::lock_guard lock(mutex_);
      lines_ += std::string(line) + "\n";
    });
  }
  ~LogLines() { log_set_sink({}); }
  std::string all() const {
    std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  mutable std::mutex mutex_;
  std::string lines_;
};

Fd connect_to(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  timeval patience{10, 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return Fd();
  return fd;
}

// Says `words` to whoever listens there, and waits to be shown the door.
bool is_refused(uint16_t port, const std::string& words) {
  Fd fd = connect_to(port);
  if (!fd) return false;
  ::send(fd.get(), words.data(), words.size(), MSG_NOSIGNAL);
  char some[256];
  ssize_t got;
  while ((got = ::recv(fd.get(), some, sizeof some, 0)) > 0) continue;
  return got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
}

TEST(Stranger, at_any_port_of_a_running_job_is_refused_and_the_job_unharmed) {
  LogLines log;
  std::atomic<bool> over{false};
  std::atomic<uint32_t> rounds{0};
  auto outcomes = run_ranks(3, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
    std::vector<float> data(1u << 20, 1);
    std::thread stranger;
    if (group.rank().index == 0)
      stranger = std::thread([&] {
        while (rounds < 3 && !over) sleep_ms(1);
        for (const join::Member& member : group.members()) {
          std::string place = text("127.0.0.1:%u", unsigned{member.port});
          EXPECT_TRUE(is_refused(member.port, "GET / HTTP/1.1\r\n\r\n" + std::string(400, 'x')));
          EXPECT_TRUE(is_refused(member.port, std::string(4000, '\xff')));  // a length of 4 GiB
          EXPECT_TRUE(is_refused(member.port, std::string(256, '\0')));
          auto wrong =
              join::call(place, "another secret", join::Purpose::status, Nanos::from_millis(300));
          EXPECT_FALSE(wrong);
          // Those who know the secret, and still have no business here.
          for (join::Purpose purpose : {join::Purpose::control, join::Purpose::lane,
                                        join::Purpose::probe, join::Purpose::branch}) {
            auto socket =
                join::call(place, "a secret of the test", purpose, Nanos::from_millis(100));
            EXPECT_FALSE(socket) << "it answers to any name";
          }
        }
        // Connections that never say a word do no harm either.
        std::vector<Fd> mute;
        for (int i = 0; i < 50; ++i) mute.push_back(connect_to(group.members()[1].port));
        uint32_t seen = rounds;
        while (rounds < seen + 6 && !over) sleep_ms(1);
        over = true;
      });
    Result<void> outcome;
    float expected = 1;
    for (int round = 0; outcome; ++round) {
      outcome = group.all_reduce(data);
      if (!outcome) break;
      expected *= 3;
      if (data[12345] != expected) outcome = error(Code::corrupt, "wrong sum");
      if (round % 10 == 9) std::fill(data.begin(), data.end(), expected = 1);
      ++rounds;
      // All end in the same round: one says so, the others are told with the data.
      std::vector<float> ends = {over && group.rank().index == 0 ? 1.0f : 0.0f};
      outcome = group.broadcast(ends, {0});
      if (ends[0] != 0) break;
    }
    over = true;
    if (stranger.joinable()) stranger.join();
    return outcome;
  });
  for (auto& outcome : outcomes) EXPECT_TRUE(outcome) << outcome.error().message();
  EXPECT_THAT(log.all(), HasSubstr("refused a connection from 127.0.0.1"));
}

// ---- limits ------------------------------------------------------------------------------

TEST(Limits, a_process_without_descriptors_names_itself_and_the_limit) {
  pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    plan::Plan plan;
    plan.lanes = 4;
    std::barrier together(4);
    auto outcomes = run_ranks(
        4, plan,
        [&](Group& group, capture::Recorder&) -> Result<void> {
          WEFT_TRY(group.barrier());
          together.arrive_and_wait();
          if (group.rank().index == 0) {
            Fd next(::dup(0));
            rlimit limit{};
            getrlimit(RLIMIT_NOFILE, &limit);
            limit.rlim_cur = static_cast<rlim_t>(next.get());
            setrlimit(RLIMIT_NOFILE, &limit);
          }
          together.arrive_and_wait();
          // Lanes to others than the neighbours are not open yet.
          std::vector<float> in(4000, 1), out(4000);
          Call call;
          call.collective = Collective::all_to_all;
          call.input = in.data();
          call.output = out.data();
          call.count = in.size();
          return group.run(call);
        },
        [](Options& options) { options.shared_memory = false; });
    bool right = true;
    for (auto& outcome : outcomes) {
      if (!outcome && outcome.error().code() == Code::io &&
          outcome.error().message().find("Too many open files; this process may have") !=
              std::string::npos &&
          outcome.error().message().find("(ulimit -n)") != std::string::npos)
        continue;
      right = false;
      std::fprintf(stderr, "%s\n", outcome ? "no error" : outcome.error().message().c_str());
    }
    ::_exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// ---- status --------------------------------------------------------------------------------

TEST(Status, of_a_running_job_tells_who_waits_for_whom) {
  std::atomic<bool> answered{false};
  std::string answer;
  auto outcomes = run_ranks(3, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
    std::vector<float> data(100000, 1);
    WEFT_TRY(group.all_reduce(data));
    if (group.rank().index == 2) {
      // The last one comes late, and asks first what the others do.
      sleep_ms(100);
      auto asked = ask_status(text("127.0.0.1:%u", unsigned{group.members()[0].port}),
                              "a secret of the test", Nanos::from_seconds(10));
      if (!asked) return std::move(asked).error();
      answer = *asked;
      answered = true;
    }
    return group.all_reduce(data);
  });
  for (auto& outcome : outcomes) EXPECT_TRUE(outcome) << outcome.error().message();
  ASSERT_TRUE(answered);
  auto status = nlohmann::json::parse(answer, nullptr, false);
  ASSERT_TRUE(status.is_object()) << answer;
  EXPECT_EQ(status["ranks"], 3);
  ASSERT_EQ(status["answered"].size(), 3u) << answer;
  EXPECT_TRUE(status["silent"].empty());
  bool someone_waits_for_2 = false;
  for (const auto& rank : status["answered"]) {
    EXPECT_FALSE(rank["lanes"].empty());
    if (rank["rank"] == 2) {
      EXPECT_TRUE(rank["operations"].empty()) << answer;
      continue;
    }
    ASSERT_EQ(rank["operations"].size(), 1u) << answer;
    const auto& operation = rank["operations"][0];
    EXPECT_EQ(operation["operation"], 1);
    EXPECT_EQ(operation["what"], "all_reduce of 100000 float32 (sum)");
    someone_waits_for_2 = someone_waits_for_2 || operation["waits_for"] == 2;
  }
  EXPECT_TRUE(someone_waits_for_2) << answer;
}

// One thread drives for as long as its operation takes, and that is until another has the answer.
TEST(Status, is_told_while_another_thread_drives) {
  for (bool progress_thread : {true, false}) {
    std::latch answered(1);
    auto body = [&](Group& group, capture::Recorder&) -> Result<void> {
      WEFT_TRY(group.barrier());  // all have joined: nobody needs rank 1 before it has the answer
      if (group.rank().index == 1) {
        answered.wait();
        return group.barrier();
      }
      Result<void> outcome;
      std::thread driver([&] { outcome = group.barrier(); });
      nlohmann::json status;
      do status = nlohmann::json::parse(group.status(), nullptr, false);
      while (status["operations"].empty() && !group.failure());
      EXPECT_EQ(status["rank"], 0);
      EXPECT_EQ(status["operations"][0]["waits_for"], 1) << status.dump();
      answered.count_down();
      driver.join();
      return outcome;
    };
    auto outcomes = run_ranks(2, plan::Plan(), body, [&](Options& options) {
      options.progress_thread = progress_thread;
      options.progress_deadline = Nanos::from_seconds(10);
    });
    for (auto& outcome : outcomes) EXPECT_TRUE(outcome) << outcome.error().message();
  }
}

TEST(Status, says_that_a_callback_holds_up_the_group) {
  std::latch attached(1), called(1), answered(1);
  auto outcomes = run_ranks(2, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
    if (group.rank().index == 1) {
      attached.wait();
      return group.barrier();
    }
    uint8_t byte = 0;
    Call call;
    call.collective = Collective::barrier;
    call.output = &byte;
    call.count = 1;
    call.type = Type::uint8;
    WEFT_ASSIGN(Work work, group.start(call));
    work.then([&](const Result<void>&) {
      called.count_down();
      answered.wait();
    });
    attached.count_down();
    called.wait();
    auto status = nlohmann::json::parse(group.status(), nullptr, false);
    EXPECT_EQ(status["rank"], 0);
    EXPECT_EQ(status["busy"], true) << status.dump();
    answered.count_down();
    auto later = nlohmann::json::parse(group.status(), nullptr, false);
    EXPECT_FALSE(later.contains("busy")) << later.dump();
    return work.wait();
  });
  for (auto& outcome : outcomes) EXPECT_TRUE(outcome) << outcome.error().message();
}

TEST(Status, is_refused_to_those_without_the_secret) {
  auto outcomes = run_ranks(2, plan::Plan(), [&](Group& group, capture::Recorder&) -> Result<void> {
    if (group.rank().index == 0) {
      auto asked = ask_status(text("127.0.0.1:%u", unsigned{group.members()[0].port}), "a guess",
                              Nanos::from_millis(400));
      EXPECT_FALSE(asked);
    }
    WEFT_TRY(group.barrier());
    auto own = nlohmann::json::parse(group.status(), nullptr, false);
    EXPECT_EQ(own["rank"], group.rank().index);
    return group.barrier();
  });
  for (auto& outcome : outcomes) EXPECT_TRUE(outcome) << outcome.error().message();
}

}  // namespace
}  // namespace weft::runtime
