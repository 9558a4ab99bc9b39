// Real sockets on loopback, paced by the kernel. No rights are needed.
#include "links.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>

namespace weft::lab {
namespace {

constexpr double kMega = 1e6;

struct Pair {
  std::unique_ptr<net::Socket> sender, receiver;
  uint64_t received = 0;
};

// A lab whose processes are all this one.
class Lab {
 public:
  explicit Lab(const ClusterSpec& spec) {
    auto links = Links::start(spec);
    WEFT_CHECK(links);
    links_ = std::move(*links);
    for (uint32_t host = 0; host < spec.hosts; ++host) {
      auto channel = links_->open_channel();
      WEFT_CHECK(channel);
      networks_.push_back(network_at(links_->station(host, channel->release())));
    }
  }

  Pair connect(uint32_t from, uint32_t to) {
    auto door = networks_[to]->listen(address(to), 0);
    WEFT_CHECK(door);
    Pair pair;
    auto sender = networks_[from]->connect(address(to), (*door)->local_port());
    WEFT_CHECK(sender);
    pair.sender = std::move(*sender);
    while (!pair.receiver) {
      auto receiver = (*door)->accept();
      WEFT_CHECK(receiver);
      pair.receiver = std::move(*receiver);
    }
    return pair;
  }
  std::string address(uint32_t host) const { return station_address(links_->block(), host); }
  net::Network& network(uint32_t host) { return *networks_[host]; }
  // The process of a host ends.
  void end(uint32_t host) { networks_[host].reset(); }
  const Links& links() const { return *links_; }

 private:
  std::unique_ptr<Links> links_;
  std::vector<std::unique_ptr<net::Network>> networks_;
};

// Sends as much as goes for so long.
void pump(const std::vector<Pair*>& pairs, double seconds) {
  std::vector<std::byte> block(256u << 10);
  for (Pair* pair : pairs) pair->sender->limit_unsent(256u << 10);
  const Nanos until = monotonic_clock().now() + Nanos::from_seconds(seconds);
  while (monotonic_clock().now() < until) {
    std::vector<pollfd> wait;
    for (Pair* pair : pairs) {
      wait.push_back({pair->sender->fd(), POLLOUT, 0});
      wait.push_back({pair->receiver->fd(), POLLIN, 0});
    }
    ::poll(wait.data(), wait.size(), 5);
    for (Pair* pair : pairs) {
      iovec part{block.data(), block.size()};
      pair->sender->send(&part, 1);
      const ssize_t got = pair->receiver->receive(&part, 1);
      if (got > 0) pair->received += static_cast<uint64_t>(got);
    }
  }
}

// Bits a second that each pair received; the start is not counted.
std::vector<double> rates(const std::vector<Pair*>& pairs, double seconds = 0.5) {
  pump(pairs, 0.2);
  for (Pair* pair : pairs) pair->received = 0;
  const Nanos from = monotonic_clock().now();
  pump(pairs, seconds);
  const double took = (monotonic_clock().now() - from).seconds();
  std::vector<double> out;
  for (Pair* pair : pairs) out.push_back(8 * static_cast<double>(pair->received) / took);
  return out;
}

double sum(const std::vector<double>& values) {
  double all = 0;
  for (double value : values) all += value;
  return all;
}

// Whoever else runs here may take the processors away for a while: one good try is proof.
void expect_near(const std::function<double()>& measure, double asked, double percent) {
  std::string tries;
  for (int i = 0; i < 5; ++i) {
    const double got = measure();
    if (std::abs(got / asked - 1) * 100 <= percent) return;
    tries += format_rate(got) + " ";
  }
  ADD_FAILURE() << "asked " << format_rate(asked) << ", got " << tries;
}

TEST(Links, AFlowHasItsCap) {
  Lab lab({.hosts = 2, .link_bits_per_s = 400 * kMega, .flow_bits_per_s = 100 * kMega});
  Pair one = lab.connect(0, 1);
  expect_near([&] { return rates({&one})[0]; }, 100 * kMega, 5);
}

TEST(Links, FlowsShareTheirSendersLink) {
  Lab lab({.hosts = 3, .link_bits_per_s = 200 * kMega, .flow_bits_per_s = 100 * kMega});
  std::vector<Pair> pairs;
  for (uint32_t i = 0; i < 4; ++i) pairs.push_back(lab.connect(0, 1 + i % 2));
  const std::vector<Pair*> all = {&pairs[0], &pairs[1], &pairs[2], &pairs[3]};
  expect_near([&] { return sum(rates(all)); }, 200 * kMega, 5);
  // What others leave is there for the rest.
  expect_near([&] { return sum(rates({&pairs[0], &pairs[1]})); }, 200 * kMega, 5);
  expect_near([&] { return rates({&pairs[2]})[0]; }, 100 * kMega, 5);
}

TEST(Links, AReceiversLinkHasALimitToo) {
  Lab lab({.hosts = 3, .link_bits_per_s = 200 * kMega});
  Pair one = lab.connect(0, 2), two = lab.connect(1, 2);
  expect_near([&] { return sum(rates({&one, &two})); }, 200 * kMega, 5);
}

TEST(Links, ASocketMayHaveALowerLimit) {
  Lab lab({.hosts = 2, .link_bits_per_s = 400 * kMega, .flow_bits_per_s = 100 * kMega});
  Pair bad = lab.connect(0, 1);
  bad.sender->limit_rate(50 * kMega / 8);
  expect_near([&] { return rates({&bad})[0]; }, 50 * kMega, 5);
}

TEST(Links, WhoeverServesASocketItIsPaced) {
  Lab lab({.hosts = 2, .link_bits_per_s = 200 * kMega});
  Pair one = lab.connect(0, 1), two = lab.connect(0, 1);
  // As another process has it: only the descriptor.
  Fd same(::dup(one.sender->fd()));
  one.sender->hand_over();
  one.sender = net::adopt(std::move(same));
  expect_near([&] { return sum(rates({&one, &two})); }, 200 * kMega, 5);
}

// What the other end receives when nothing more is sent: 0 is the end of the connection.
ssize_t last_word(net::Socket& socket) {
  char byte;
  iovec part{&byte, 1};
  const Nanos until = monotonic_clock().now() + Nanos::from_seconds(2);
  ssize_t got = -EAGAIN;
  while (got == -EAGAIN && monotonic_clock().now() < until) {
    ::usleep(1000);
    got = socket.receive(&part, 1);
  }
  return got;
}

TEST(Links, AConnectionEndsWithItsOwner) {
  Lab lab({.hosts = 2, .link_bits_per_s = 200 * kMega});
  Pair closed = lab.connect(0, 1);
  closed.sender.reset();
  EXPECT_EQ(last_word(*closed.receiver), 0);

  // One that another process served, and whose own process died with it.
  Pair left = lab.connect(0, 1);
  left.sender->hand_over();
  left.sender.reset();
  EXPECT_EQ(last_word(*left.receiver), -EAGAIN) << "the lab's copy was all that was left";
  lab.end(0);
  EXPECT_EQ(last_word(*left.receiver), 0);
}

TEST(Links, HostsHaveAddressesAndMemoryOfTheirOwn) {
  Lab lab({.hosts = 2, .link_bits_per_s = 200 * kMega}), beside({.hosts = 2});
  EXPECT_NE(lab.links().block(), beside.links().block());
  EXPECT_NE(lab.network(0).machine(), lab.network(1).machine());
  Pair pair = lab.connect(0, 1);
  EXPECT_EQ(pair.sender->local_host(), lab.address(0));
  EXPECT_EQ(pair.receiver->peer_host(), lab.address(0));
  EXPECT_FALSE(pair.sender->inside_machine());
  EXPECT_EQ(lab.network(0).connect("no-address", 1).error().code(), Code::not_found);
}

TEST(Links, RefuseACongestionControlThatIsNotThere) {
  const auto links = Links::start({.hosts = 2, .congestion_control = "nonsense"});
  ASSERT_FALSE(links);
  EXPECT_EQ(links.error().code(), Code::unsupported);
  EXPECT_NE(links.error().message().find("congestion_control"), std::string::npos);
}

TEST(Station, ComesBackFromJson) {
  const Station station{3, 2, 90, 1.5e6, 8948, "reno"};
  const Station back = station_from(to_json(station));
  EXPECT_EQ(to_json(back), to_json(station));
  EXPECT_EQ(station_address(back.block, back.host), "127.77.3.3");
}

}  // namespace
}  // namespace weft::lab
