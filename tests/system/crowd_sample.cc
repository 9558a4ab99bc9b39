// A rank of a large group over TCP, or the strangers around it. For crowd_test.py.
//
//   crowd_sample member RANK RANKS RENDEZVOUS LANES   the secret is in WEFT_SECRET
//   crowd_sample strangers HELD RATE PORT...          until its input ends
//
// A member carries out blocks of all-to-alls and all-reduces and checks every element. Rank 0 says
// where all listen, begins a block for each line of its input, and says how long it took.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "weft/runtime.h"

namespace weft {
namespace {

constexpr uint64_t kToEach = 1024;  // elements of an all-to-all
constexpr size_t kReduced = 1u << 16;
constexpr int kRounds = 3;  // of a block

Result<void> one_round(runtime::Group& group, uint32_t round) {
  uint32_t rank = group.rank().index, ranks = group.ranks();
  auto value = [](uint32_t from, uint32_t to, uint64_t i, uint32_t in) {
    return static_cast<int32_t>(from * 1'000'003u + to * 10'007u + i * 31u + in);
  };
  std::vector<int32_t> out(kToEach * ranks), in(kToEach * ranks);
  for (uint32_t to = 0; to < ranks; ++to)
    for (uint64_t i = 0; i < kToEach; ++i) out[to * kToEach + i] = value(rank, to, i, round);
  runtime::Call call;
  call.collective = runtime::Collective::all_to_all;
  call.input = out.data();
  call.output = in.data();
  call.count = out.size();
  call.type = runtime::Type::int32;
  WEFT_TRY(group.run(call));
  for (uint32_t from = 0; from < ranks; ++from)
    for (uint64_t i = 0; i < kToEach; ++i)
      if (in[from * kToEach + i] != value(from, rank, i, round))
        return error(Code::corrupt, "element %llu from rank %u is wrong",
                     static_cast<unsigned long long>(i), from);
  std::vector<float> sum(kReduced);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] = static_cast<float>(rank + i % 100);
  WEFT_TRY(group.all_reduce(sum));
  for (size_t i = 0; i < sum.size(); ++i)
    if (sum[i] != static_cast<float>(ranks * (ranks - 1) / 2 + ranks * (i % 100)))
      return error(Code::corrupt, "element %zu of the sum is wrong", i);
  return {};
}

Result<void> be_member(char** words) {
  runtime::Options options;
  options.rank = {static_cast<uint32_t>(std::atoi(words[0]))};
  options.ranks = static_cast<uint32_t>(std::atoi(words[1]));
  options.rendezvous = words[2];
  const char* secret = std::getenv("WEFT_SECRET");
  options.secret = secret != nullptr ? secret : "";
  options.host = text("host%u", options.rank.index);
  WEFT_ASSIGN(options.plan, plan::preset("default"));
  options.plan.lanes = static_cast<uint32_t>(std::atoi(words[3]));
  options.probe = false;
  options.shared_memory = false;
  options.spin = {0};  // there are more ranks than processors
  options.join_deadline = Nanos::from_seconds(120);
  options.progress_deadline = Nanos::from_seconds(120);
  options.silence_deadline = Nanos::from_seconds(60);
  const auto recorder = capture::Recorder::off();
  WEFT_ASSIGN(const auto group, runtime::Group::join(options, *recorder));
  bool first = options.rank.index == 0;
  if (first) {
    std::printf("ports");
    for (const auto& member : group->members()) std::printf(" %u", unsigned{member.port});
    std::printf("\n");
    std::fflush(stdout);
  }
  uint32_t round = 0;
  for (;;) {
    float more[1] = {0};
    char line[16];
    if (first && std::fgets(line, sizeof line, stdin) != nullptr) more[0] = 1;
    WEFT_TRY(group->broadcast(more, {0}));
    if (more[0] == 0) break;
    Nanos began = monotonic_clock().now();
    for (int i = 0; i < kRounds; ++i) WEFT_TRY(one_round(*group, round++));
    if (!first) continue;
    std::printf("block %.6f\n", (monotonic_clock().now() - began).seconds());
    std::fflush(stdout);
  }
  return group->leave();
}

Fd call(uint16_t port) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  (void)::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address);
  return fd;
}

bool hung_up(int fd) {
  char bytes[64];
  ssize_t got;
  while ((got = ::recv(fd, bytes, sizeof bytes, MSG_DONTWAIT)) > 0) continue;
  return got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
}

// Holds connections open, calling again when one was ended, and makes others that leave at once.
int be_strangers(int count, char** words) {
  auto held = static_cast<size_t>(std::atoi(words[0]));
  double rate = std::atof(words[1]);
  std::vector<uint16_t> ports;
  for (int i = 2; i < count; ++i) ports.push_back(static_cast<uint16_t>(std::atoi(words[i])));
  std::vector<Fd> crowd(held);
  uint64_t calls = 0, again = 0;
  Nanos began = monotonic_clock().now(), looked{0};
  for (;;) {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (::poll(&input, 1, 5) > 0) break;
    Nanos now = monotonic_clock().now();
    if (now - looked > Nanos::from_millis(250)) {
      looked = now;
      for (size_t i = 0; i < crowd.size(); ++i)
        if (!crowd[i] || hung_up(crowd[i].get())) {
          crowd[i] = call(ports[i % ports.size()]);
          ++again;
        }
    }
    auto due = static_cast<uint64_t>((now - began).seconds() * rate);
    while (calls < due) call(ports[calls++ % ports.size()]);
  }
  std::printf("%.0f calls a second, %llu of those who stayed\n",
              static_cast<double>(calls) / (monotonic_clock().now() - began).seconds(),
              static_cast<unsigned long long>(again));
  return 0;
}

}  // namespace
}  // namespace weft

int main(int count, char** words) {
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  if (count >= 5 && std::strcmp(words[1], "strangers") == 0)
    return weft::be_strangers(count - 2, words + 2);
  if (count != 6 || std::strcmp(words[1], "member") != 0) return 2;
  if (auto done = weft::be_member(words + 2); !done) {
    std::fprintf(stderr, "rank %s: %s\n", words[2], done.error().message().c_str());
    return 1;
  }
  return 0;
}
