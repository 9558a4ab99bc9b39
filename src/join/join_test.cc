// Joining and control frames. Lanes are opened in links_test.cc, strangers come in
// strangers_test.cc.
#include "weft/join.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>

#include "testing.h"

namespace weft::join {
namespace {

using testing::HasSubstr;

TEST(Fields, read_back) {
  Packer packer;
  packer.number(uint8_t{7}).string("").number(int64_t{-5}).string("rank 3").number(uint16_t{9});
  Unpacker fields(packer.bytes());
  EXPECT_EQ(fields.number<uint8_t>(), 7);
  EXPECT_EQ(fields.string(), "");
  EXPECT_EQ(fields.number<int64_t>(), -5);
  EXPECT_FALSE(fields.complete());
  EXPECT_TRUE(fields.more());
  EXPECT_EQ(fields.string(), "rank 3");
  EXPECT_EQ(fields.number<uint16_t>(), 9);
  EXPECT_TRUE(fields.complete());
  EXPECT_FALSE(fields.more());
}

TEST(Fields, that_are_cut_off_anywhere_fail_for_good) {
  Packer packer;
  packer.number(uint32_t{1}).string("some words").number(uint64_t{2});
  std::span<const std::byte> bytes(packer.bytes());
  for (size_t size = 0; size < bytes.size(); ++size) {
    Unpacker fields(bytes.first(size));
    fields.number<uint32_t>();
    fields.string();
    fields.number<uint64_t>();
    EXPECT_TRUE(fields.failed()) << size;
    EXPECT_FALSE(fields.complete());
    EXPECT_EQ(fields.number<uint8_t>(), 0) << "nothing is read after a failure";
  }
}

TEST(Fields, a_string_that_claims_more_than_there_is_allocates_nothing) {
  Packer packer;
  packer.number(uint32_t{0xffffffff}).number(uint64_t{0});
  Unpacker fields(packer.bytes());
  EXPECT_EQ(fields.string(), "");
  EXPECT_TRUE(fields.failed());
}

TEST(Fields, a_hello_reads_back_and_others_are_refused) {
  Hello hello;
  hello.purpose = Purpose::lane;
  hello.rank = 3;
  hello.ranks = 5;
  hello.lane = 7;
  hello.lanes = 8;
  hello.probe = 1;
  hello.agreement = std::string(kMaxAgreement, 'h');
  hello.shared = std::string(40, 's');
  hello.attempt = 1ull << 40;
  hello.to = 4;
  hello.place = std::string(kMaxPlace, 'p');
  hello.sealed = true;
  auto bytes = encode_hello(hello);
  auto read = decode_hello(bytes);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->purpose, Purpose::lane);
  EXPECT_EQ(read->rank, 3u);
  EXPECT_EQ(read->ranks, 5u);
  EXPECT_EQ(read->lane, 7);
  EXPECT_EQ(read->lanes, 8);
  EXPECT_EQ(read->probe, 1);
  EXPECT_EQ(read->agreement, hello.agreement);
  EXPECT_EQ(read->shared, hello.shared);
  EXPECT_EQ(read->attempt, hello.attempt);
  EXPECT_EQ(read->to, 4u);
  EXPECT_EQ(read->place, hello.place);
  EXPECT_TRUE(read->sealed);
  bytes[2] = std::byte{9};
  EXPECT_FALSE(decode_hello(bytes));
  hello.protocol = kProtocol + 1;
  auto newer = decode_hello(encode_hello(hello));
  ASSERT_FALSE(newer);
  EXPECT_EQ(newer.error().code(), Code::unsupported);
}

// ---- joining -----------------------------------------------------------------------------

TEST(Join, tells_every_rank_where_the_others_are) {
  for (uint32_t ranks : {2u, 3u, 5u}) {
    SCOPED_TRACE(ranks);
    auto meshes = join_all(ranks, free_port());
    ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      Mesh& mesh = *meshes[rank];
      EXPECT_EQ(mesh.rank.index, rank);
      EXPECT_TRUE(mesh.probe_out.empty());
      EXPECT_EQ(mesh.acceptor->refused(), 0u);
      ASSERT_EQ(mesh.members.size(), ranks);
      for (uint32_t other = 0; other < ranks; ++other) {
        EXPECT_EQ(mesh.members[other].rank, other);
        EXPECT_EQ(mesh.members[other].host, text("host%u", other / 2));
        EXPECT_EQ(mesh.members[other].host_index, other / 2);
        EXPECT_EQ(mesh.members[other].address, "127.0.0.1");
        EXPECT_FALSE(mesh.members[other].shares_memory);
      }
    }
    expect_data_flows(meshes);
  }
}

TEST(Join, alone_needs_nobody) {
  auto mesh = meet(options_for(0, 1, 1));
  ASSERT_TRUE(mesh);
  EXPECT_EQ(mesh->next(), 0u);
}

TEST(Join, refuses_options_that_make_no_sense) {
  Options options = options_for(2, 2, 1);
  EXPECT_THAT(meet(options).error().message(), HasSubstr("rank 2 of 2"));
  options = options_for(0, 2, 1);
  options.secret.clear();
  EXPECT_THAT(meet(options).error().message(), HasSubstr("needs a secret"));
  options = options_for(0, 2, 1);
  options.rendezvous = "nowhere";
  EXPECT_THAT(meet(options).error().message(), HasSubstr("expected HOST:PORT"));
  options = options_for(0, 2, 1);
  options.agreement = std::string(kMaxAgreement + 1, 'x');
  EXPECT_THAT(meet(options).error().message(), HasSubstr("65 characters"));
}

TEST(Join, names_the_rank_that_differs_to_everyone) {
  struct {
    std::function<void(Options&)> change;
    const char* words;
  } cases[] = {
      {[](Options& o) { o.agreement = "another"; }, "rank 1 differs: it has plan and job another"},
      {[](Options& o) { o.lanes = 4; }, "rank 1 was started with other options"},
      {[](Options& o) { o.ranks = 4; }, "rank 1 was started for 4 ranks, rank 0 for 3"},
  };
  for (auto& one : cases) {
    auto meshes = join_all(3, free_port(), [&](Options& options) {
      if (options.rank.index == 1) one.change(options);
    });
    for (auto& mesh : meshes) {
      ASSERT_FALSE(mesh);
      EXPECT_THAT(mesh.error().message(), HasSubstr(one.words));
    }
  }
}

// It lets rank 1 in, and stops before it has told where the others are.
TEST(Join, a_root_that_falls_silent_is_named) {
  net::Network& network = net::kernel_network();
  auto listener = network.listen("127.0.0.1", 0);
  ASSERT_TRUE(listener);
  uint16_t port = (*listener)->local_port();
  std::atomic<bool> over{false};
  std::thread root([&] {
    auto reactor = network.reactor();
    Identity self;
    self.control = 0;
    std::unique_ptr<net::Socket> let_in;
    Acceptor acceptor(network, **reactor, std::move(*listener), kSecret, self,
                      [&](std::unique_ptr<net::Socket>& socket, const Hello&) -> Result<void> {
                        let_in = std::move(socket);
                        return {};
                      });
    while (!let_in && !over) (*reactor)->run_once(Nanos::from_millis(5));
    while (!over) pause_ms(5);
  });
  Options options = options_for(1, 3, 1);
  options.rendezvous = text("127.0.0.1:%u", unsigned{port});
  options.deadline = Nanos::from_millis(300);
  auto mesh = meet(options);
  over = true;
  root.join();
  ASSERT_FALSE(mesh);
  EXPECT_EQ(mesh.error().code(), Code::timeout);
  EXPECT_THAT(mesh.error().message(), HasSubstr(": rank 0 says neither who is here nor why"));
}

TEST(Join, a_rank_with_another_secret_does_not_come_in) {
  LogLines log;
  auto meshes = join_all(3, free_port(), [](Options& options) {
    options.deadline = Nanos::from_millis(400);
    if (options.rank.index == 2) options.secret = "another";
  });
  for (auto& mesh : meshes) ASSERT_FALSE(mesh);
  EXPECT_THAT(meshes[0].error().message(), HasSubstr("rank 2 did not come"));
  EXPECT_THAT(meshes[1].error().message(), HasSubstr("did not come"));
  EXPECT_THAT(meshes[2].error().message(), HasSubstr("rank 0 at 127.0.0.1"));
  EXPECT_GE(log.count("does not know the job's secret"), 1u) << log.all();
}

TEST(Join, something_that_is_not_weft_at_the_rendezvous_is_said) {
  // A server that answers everyone with a page.
  uint16_t port = free_port();
  Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = loopback(port);
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(listener.get(), 8), 0);
  std::atomic<bool> stop = false;
  std::thread server([&] {
    while (!stop) {
      Fd client(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (client) send_all(client.get(), "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
    }
  });
  Options options = options_for(1, 2, port);
  options.deadline = Nanos::from_millis(300);
  auto mesh = meet(options);
  stop = true;
  connect_to(port);
  server.join();
  ASSERT_FALSE(mesh);
  EXPECT_EQ(mesh.error().code(), Code::timeout);
  EXPECT_THAT(mesh.error().message(), HasSubstr("does not speak weft's protocol"));
}

// ---- control frames ----------------------------------------------------------------------

TEST(Control, frames_arrive_in_order_however_they_are_cut) {
  auto [one, two] = tcp_pair();
  auto world = new_reactor();
  net::Reactor& reactor = *world;
  ControlChannel channel(reactor, net::adopt(std::move(one)), {3});
  std::vector<std::byte> stream;
  for (uint32_t i = 0; i < 50; ++i) {
    Packer words;
    words.number(i).string(std::string(i * 100, 'w'));
    auto length = static_cast<uint32_t>(words.bytes().size());
    const auto* raw = reinterpret_cast<const std::byte*>(&length);
    stream.insert(stream.end(), raw, raw + 4);
    stream.push_back(static_cast<std::byte>(Control::ready));
    std::array<uint64_t, 2> proved = {
        hash64(words.bytes()), uint64_t{length} * 256 + static_cast<uint8_t>(Control::ready)};
    auto checksum = static_cast<uint32_t>(hash64(std::as_bytes(std::span(proved))));
    const auto* sum = reinterpret_cast<const std::byte*>(&checksum);
    stream.insert(stream.end(), sum, sum + 4);
    stream.insert(stream.end(), words.bytes().begin(), words.bytes().end());
  }
  Rng rng(7);
  uint32_t expected = 0;
  for (size_t from = 0; from < stream.size();) {
    size_t size = std::min<size_t>(1 + rng.below(4000), stream.size() - from);
    ASSERT_TRUE(send_all(two.get(), std::span(stream).subspan(from, size)));
    from += size;
    reactor.run_once(Nanos::from_millis(1));
    while (auto frame = channel.receive()) {
      Unpacker fields(frame->payload);
      EXPECT_EQ(fields.number<uint32_t>(), expected);
      EXPECT_EQ(fields.string().size(), expected * 100);
      EXPECT_TRUE(fields.complete());
      ++expected;
    }
  }
  EXPECT_TRUE(turn_until(reactor, [&] {
    while (channel.receive()) ++expected;
    return expected == 50;
  }));
  // The last words are kept although the connection has ended.
  ASSERT_TRUE(send_all(two.get(), std::span(stream).first(9 + 8)));
  two.reset();
  EXPECT_TRUE(turn_until(reactor, [&] { return channel.failure().has_value(); }));
  EXPECT_EQ(channel.failure()->code(), Code::peer_lost);
  EXPECT_TRUE(channel.receive());
  EXPECT_FALSE(channel.receive());
}

TEST(Control, a_frame_that_was_damaged_ends_the_channel) {
  Packer words;
  words.string("10.0.0.4").number(uint16_t{40000});
  for (size_t at = 4; at < 9 + words.bytes().size(); ++at) {
    auto [one, two] = tcp_pair();
    auto [three, four] = tcp_pair();
    auto world = new_reactor();
    ControlChannel from(*world, net::adopt(std::move(one)), {1});
    ControlChannel to(*world, net::adopt(std::move(three)), {0});
    from.send(Control::register_, words);
    std::vector<std::byte> stream(9 + words.bytes().size());
    ASSERT_EQ(::recv(two.get(), stream.data(), stream.size(), MSG_WAITALL),
              static_cast<ssize_t>(stream.size()));
    stream[at] ^= std::byte{0x04};
    ASSERT_TRUE(send_all(four.get(), stream));
    ASSERT_TRUE(turn_until(*world, [&] { return to.failure().has_value(); })) << at;
    EXPECT_EQ(to.failure()->message(), "a control frame was damaged on the way");
    EXPECT_FALSE(to.receive());
  }
}

TEST(Control, sends_more_than_the_kernel_takes) {
  auto [one, two] = tcp_pair();
  auto world = new_reactor();
  net::Reactor& reactor = *world;
  ControlChannel from(reactor, net::adopt(std::move(one)), {1});
  ControlChannel to(reactor, net::adopt(std::move(two)), {0});
  Packer words;
  words.string(std::string(kMaxControlBytes - 4, 'x'));
  for (int i = 0; i < 24; ++i) from.send(Control::start, words);
  EXPECT_FALSE(from.flushed());
  int received = 0;
  EXPECT_TRUE(turn_until(reactor, [&] {
    while (auto frame = to.receive()) received += frame->payload.size() == kMaxControlBytes ? 1 : 0;
    return received == 24;
  })) << received;
  EXPECT_TRUE(from.flushed());
}

// A connection that needs memory to send, as a sealed one does, and finds none.
class Poor : public net::Socket {
 public:
  Poor(std::unique_ptr<net::Socket> inner, const bool& is_poor)
      : inner_(std::move(inner)), is_poor_(is_poor) {}
  ssize_t send(const iovec* parts, size_t count) override {
    if (is_poor_) throw std::bad_alloc();
    return inner_->send(parts, count);
  }
  ssize_t receive(const iovec* parts, size_t count) override {
    return inner_->receive(parts, count);
  }
  std::string local_host() const override { return inner_->local_host(); }
  std::string peer() const override { return inner_->peer(); }
  int fd() const override { return inner_->fd(); }
  net::Socket& carrier() override { return inner_->carrier(); }

 private:
  std::unique_ptr<net::Socket> inner_;
  const bool& is_poor_;
};

TEST(Control, a_frame_for_which_there_was_no_memory_goes_with_the_next_one) {
  auto [one, two] = tcp_pair();
  auto world = new_reactor();
  bool is_poor = true;
  ControlChannel poor(*world, std::make_unique<Poor>(net::adopt(std::move(one)), is_poor), {3});
  ControlChannel other(*world, net::adopt(std::move(two)), {4});
  EXPECT_THROW(poor.send(Control::abort, Packer().string("first")), std::bad_alloc);
  // While there is none, nobody is left to believe that it was said.
  EXPECT_THROW(poor.send(Control::abort, Packer().string("second")), std::bad_alloc);
  is_poor = false;
  poor.send(Control::abort, Packer().string("third"));
  EXPECT_TRUE(poor.flushed());
  for (const char* said : {"first", "second", "third"}) {
    std::optional<Frame> frame;
    ASSERT_TRUE(turn_until(*world, [&] { return (frame = other.receive()).has_value(); })) << said;
    EXPECT_EQ(Unpacker(frame->payload).string(), said);
  }
}

TEST(Control, a_length_of_4_gib_ends_the_channel_at_once) {
  for (uint32_t length : {0xffffffffu, kMaxControlBytes + 1}) {
    auto [one, two] = tcp_pair();
    auto world = new_reactor();
    net::Reactor& reactor = *world;
    ControlChannel channel(reactor, net::adopt(std::move(one)), {3});
    std::array<std::byte, 5> head;
    std::memcpy(head.data(), &length, 4);
    head[4] = static_cast<std::byte>(Control::ready);
    ASSERT_TRUE(send_all(two.get(), head));
    // No more than the five bytes has come: nothing was waited for, nothing set aside.
    EXPECT_TRUE(turn_until(reactor, [&] { return channel.failure().has_value(); }));
    EXPECT_EQ(channel.failure()->code(), Code::corrupt);
    EXPECT_EQ(channel.failure()->message(),
              text("control frame of %u bytes; at most 1048576 are allowed", length));
    channel.send(Control::ready, Packer());  // no effect, no crash
  }
}

TEST(Control, a_frame_that_is_too_long_is_not_sent_and_said) {
  auto [one, two] = tcp_pair();
  auto world = new_reactor();
  ControlChannel channel(*world, net::adopt(std::move(one)), {3});
  Packer words;
  words.string(std::string(kMaxControlBytes, 'x'));
  channel.send(Control::answer, words);
  ASSERT_TRUE(channel.failure());
  EXPECT_EQ(channel.failure()->message(),
            "a control frame of 1048580 bytes is too long; 1048576 are allowed");
  char byte = 0;
  EXPECT_LT(::recv(two.get(), &byte, 1, MSG_DONTWAIT), 1);
}

TEST(Control, a_length_of_4_gib_while_joining_names_the_rank) {
  uint16_t port = free_port();
  Fd insider;
  auto meshes = join_all(
      3, port, [](Options& options) { options.deadline = Nanos::from_seconds(2); },
      [&] {
        insider = connect_to(port);
        EXPECT_TRUE(prove(insider.get(), kSecret,
                          hello_of(2, 3, Purpose::control, place_of("127.0.0.1", port))));
        send_all(insider.get(), std::string(5, '\xff'));
      });
  ASSERT_FALSE(meshes[0]);
  EXPECT_THAT(meshes[0].error().message(), HasSubstr("rank 2 left while the group was forming: "
                                                     "control frame of 4294967295 bytes"));
  ASSERT_FALSE(meshes[1]);
  ASSERT_FALSE(meshes[2]);
}

// ---- sealed groups -----------------------------------------------------------------------

TEST(Sealed, a_group_joins_and_everything_it_says_is_sealed) {
  auto meshes = join_all(4, free_port(), [](Options& options) {
    options.sealed = true;
    options.probe = true;
  });
  expect_joined(meshes);
  for (const auto& mesh : meshes) {
    EXPECT_TRUE(mesh->sealed);
    for (const auto& socket : mesh->probe_out) EXPECT_TRUE(socket->sealed());
    for (const auto& socket : mesh->probe_in) EXPECT_TRUE(socket->sealed());
  }
  LinkedGroup group(meshes);
  group.sides[1].links->open({2}, 0);
  ASSERT_TRUE(group.turn_until(
      [&] { return !group.sides[1].opened.empty() && !group.sides[2].accepted.empty(); }));
  EXPECT_TRUE(group.sides[1].opened[0].socket->sealed());
  EXPECT_TRUE(group.sides[2].accepted[0].socket->sealed());
}

TEST(Sealed, data_flows_both_ways) {
  auto meshes = join_all(3, free_port(), [](Options& options) { options.sealed = true; });
  expect_joined(meshes);
  expect_data_flows(meshes);
}

TEST(Sealed, a_rank_that_differs_is_named_with_what_to_set) {
  for (uint32_t odd : {0u, 2u}) {
    auto meshes = join_all(3, free_port(),
                           [&](Options& options) { options.sealed = options.rank.index == odd; });
    for (uint32_t rank = 0; rank < 3; ++rank) {
      ASSERT_FALSE(meshes[rank].ok());
      EXPECT_THAT(meshes[rank].error().message(),
                  HasSubstr(odd == 0 ? "was started with WEFT_SEAL=0, rank 0 with WEFT_SEAL=1"
                                     : "rank 2 was started with WEFT_SEAL=1, rank 0 with"))
          << rank;
    }
  }
}

}  // namespace
}  // namespace weft::join
