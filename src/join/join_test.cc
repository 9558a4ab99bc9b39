// Joining, control frames, and what strangers cannot do. Lanes are opened in links_test.cc.
#include "weft/join.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

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

// The port never closes: who calls while the old group ends is answered by the new one.
TEST(Join, a_survivor_that_calls_between_two_groups_is_served) {
  auto made = net::kernel_network().listen("127.0.0.1", 0);
  ASSERT_TRUE(made.ok()) << made.error().message();
  auto old_reactor = new_reactor();
  auto old = std::make_unique<Acceptor>(
      net::kernel_network(), *old_reactor, std::move(*made), kSecret,
      [](std::unique_ptr<net::Socket>&, const Hello&) -> Result<void> {
        return error(Code::invalid_argument, "it belongs to another group");
      });
  uint16_t port = old->port();
  auto survivor = [&](uint32_t rank) {
    Options options = options_for(rank, 3, port);
    options.survivors = true;
    options.settle = Nanos::from_seconds(1);
    return options;
  };
  Result<Mesh> second = error(Code::cancelled, "not joined");
  std::thread caller([&] { second = meet(survivor(2)); });
  Options options = survivor(0);
  options.listener = old->listener();
  pollfd called{options.listener->fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&called, 1, 10'000), 1);
  old.reset();
  Result<Mesh> first = meet(options);
  caller.join();
  ASSERT_TRUE(first.ok()) << first.error().message();
  ASSERT_TRUE(second.ok()) << second.error().message();
  EXPECT_EQ(first->members[0].port, port);
  EXPECT_EQ(first->ranks, 2u);
  EXPECT_EQ(second->rank, Rank{1}) << "the new number of rank 2";
  EXPECT_EQ(first->acceptor->refused(), 0u);
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

// ---- strangers ---------------------------------------------------------------------------

Hello hello_of(uint32_t rank, uint32_t ranks, Purpose purpose, uint16_t lane = 0) {
  Hello hello;
  hello.purpose = purpose;
  hello.rank = rank;
  hello.ranks = ranks;
  hello.lane = lane;
  hello.lanes = 2;
  hello.agreement = "the same";
  return hello;
}

// Everything that may come to a port. Returns the connections that stay open without a proof.
std::vector<Fd> send_strangers(uint16_t port) {
  std::vector<Fd> open;
  open.push_back(connect_to(port));  // says nothing
  open.push_back(connect_to(port));
  send_all(open.back().get(), "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  {
    Fd garbage = connect_to(port);  // then leaves
    send_all(garbage.get(), std::string(100, '\xff'));
  }
  Fd flood = connect_to(port);
  std::string megabyte(1u << 20, 'x');
  for (int i = 0; i < 16; ++i)
    if (!send_all(flood.get(), megabyte)) break;
  EXPECT_TRUE(is_closed_by_peer(flood.get()));
  Fd wrong = connect_to(port);
  EXPECT_FALSE(prove(wrong.get(), "not the secret", hello_of(1, 2, Purpose::control)));
  // Bytes in the form of a proof, with a MAC of zeros.
  Fd forged = connect_to(port);
  std::vector<std::byte> proof(kProof);
  auto hello = encode_hello(hello_of(1, 2, Purpose::control));
  std::copy(hello.begin(), hello.end(), proof.begin() + kNonce);
  send_all(forged.get(), proof);
  EXPECT_TRUE(is_closed_by_peer(forged.get()));
  return open;
}

TEST(Strangers, during_join_are_refused_and_the_job_is_unharmed) {
  LogLines log;
  uint16_t port = free_port();
  std::vector<Fd> open;
  auto meshes = join_all(
      2, port, [](Options& options) { options.lanes = 2; },
      [&] {
        open = send_strangers(port);
        // Those who know the secret, but are not expected.
        std::vector<Hello> unexpected = {
            hello_of(7, 2, Purpose::control), hello_of(0, 2, Purpose::lane),
            hello_of(1, 2, Purpose::status), hello_of(1, 2, Purpose::probe, 0)};
        for (const Hello& hello : unexpected) {
          Fd fd = connect_to(port);
          EXPECT_TRUE(prove(fd.get(), kSecret, hello));
          EXPECT_TRUE(is_closed_by_peer(fd.get()));
        }
        Hello newer = hello_of(1, 2, Purpose::control);
        newer.protocol = kProtocol + 1;
        Fd fd = connect_to(port);
        EXPECT_FALSE(prove(fd.get(), kSecret, newer));
      });
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  EXPECT_EQ(log.count("it does not know the job's secret"), 3u) << log.all();
  EXPECT_EQ(log.count("it closed before it proved the secret"), 1u) << log.all();
  EXPECT_EQ(log.count("(rank 7): it is not one of the other ranks"), 1u) << log.all();
  EXPECT_EQ(log.count("(rank 0): it is not one of the other ranks"), 1u) << log.all();
  EXPECT_EQ(log.count("(rank 1): the group is not complete yet"), 1u) << log.all();
  EXPECT_EQ(log.count("(rank 1): no such lane is missing"), 1u) << log.all();
  EXPECT_EQ(log.count("it speaks protocol 3, this weft 2"), 1u) << log.all();
  EXPECT_EQ(meshes[0]->acceptor->refused(), 9u);
  expect_data_flows(meshes);
}

TEST(Strangers, after_join_are_refused_and_the_job_is_unharmed) {
  LogLines log;
  uint16_t port = free_port();
  auto meshes = join_all(3, port, [](Options& options) { options.lanes = 2; });
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  for (auto& mesh : meshes) {
    std::atomic<bool> done = false;
    std::thread strangers([&] {
      auto open = send_strangers(mesh->members[mesh->rank.index].port);
      for (Purpose purpose : {Purpose::control, Purpose::probe}) {
        Fd fd = connect_to(mesh->members[mesh->rank.index].port);
        EXPECT_TRUE(prove(fd.get(), kSecret, hello_of(mesh->previous(), 3, purpose)));
        EXPECT_TRUE(is_closed_by_peer(fd.get()));
      }
      done = true;
    });
    EXPECT_TRUE(turn_until(*mesh->reactor, [&] { return done.load(); }));
    strangers.join();
    // The two that stayed without a word have gone by now.
    EXPECT_TRUE(turn_until(*mesh->reactor, [&] { return mesh->acceptor->refused() == 8; }))
        << mesh->acceptor->refused() << log.all();
  }
  EXPECT_EQ(log.count("it does not know the job's secret"), 9u) << log.all();
  EXPECT_EQ(log.count("the group is complete"), 6u) << log.all();
  expect_data_flows(meshes);
}

TEST(Strangers, who_do_not_prove_the_secret_in_time_are_dropped) {
  LogLines log;
  auto meshes = join_all(2, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  Mesh& mesh = *meshes[0];
  Fd silent = connect_to(mesh.members[0].port);
  Fd slow = connect_to(mesh.members[0].port);
  send_all(slow.get(), "a few bytes");
  for (int i = 0; i < 20; ++i) mesh.reactor->run_once(Nanos::from_millis(2));
  Nanos now = monotonic_clock().now();
  mesh.acceptor->tick(now + Nanos::from_seconds(4));
  EXPECT_EQ(mesh.acceptor->refused(), 0u);
  mesh.acceptor->tick(now + Nanos::from_seconds(6));
  EXPECT_EQ(mesh.acceptor->refused(), 2u);
  EXPECT_EQ(log.count("it did not prove the secret within 5"), 2u) << log.all();
  EXPECT_TRUE(is_closed_by_peer(silent.get()));
  EXPECT_TRUE(is_closed_by_peer(slow.get()));
  expect_data_flows(meshes);
}

TEST(Strangers, cannot_use_a_proof_that_they_overheard) {
  LogLines log;
  auto meshes = join_all(2, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  Mesh& mesh = *meshes[0];
  // A rank proves itself to us while we pose as the acceptor of its group, knowing the secret; a
  // stranger in between would see the same bytes.
  auto [rank_end, our_end] = tcp_pair();
  std::unique_ptr<net::Socket> rank_socket = net::adopt(std::move(rank_end));
  Handshake theirs(Handshake::Role::connector, kSecret, hello_of(1, 2, Purpose::lane));
  std::vector<std::byte> challenge(kChallenge);
  std::memcpy(challenge.data(), kMagic.data(), kMagic.size());
  send_all(our_end.get(), challenge);
  std::vector<std::byte> proof(kProof);
  for (int i = 0; i < 1000 && ::recv(our_end.get(), proof.data(), 1, MSG_PEEK | MSG_DONTWAIT) < 1;
       ++i) {
    ASSERT_TRUE(theirs.advance(*rank_socket));
    pause_ms(1);
  }
  ASSERT_EQ(::recv(our_end.get(), proof.data(), proof.size(), MSG_WAITALL),
            static_cast<ssize_t>(proof.size()));
  Fd replay = connect_to(mesh.members[0].port);
  send_all(replay.get(), proof);
  EXPECT_TRUE(turn_until(*mesh.reactor, [&] { return mesh.acceptor->refused() == 1; }));
  EXPECT_EQ(log.count("does not know the job's secret"), 1u) << log.all();
}

TEST(Strangers, in_great_number_are_bounded) {
  LogLines log;
  auto meshes = join_all(2, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  Mesh& mesh = *meshes[0];
  std::vector<Fd> crowd;
  for (int i = 0; i < 300; ++i) {
    crowd.push_back(connect_to(mesh.members[0].port));
    mesh.reactor->run_once(Nanos{0});
  }
  EXPECT_TRUE(turn_until(*mesh.reactor, [&] { return mesh.acceptor->refused() == 44; }));
  EXPECT_EQ(log.count("256 others are still unproved"), 44u);
  expect_data_flows(meshes);
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
  ASSERT_TRUE(send_all(two.get(), std::span(stream).first(5 + 8)));
  two.reset();
  EXPECT_TRUE(turn_until(reactor, [&] { return channel.failure().has_value(); }));
  EXPECT_EQ(channel.failure()->code(), Code::peer_lost);
  EXPECT_TRUE(channel.receive());
  EXPECT_FALSE(channel.receive());
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

TEST(Control, a_length_of_4_gib_while_joining_names_the_rank) {
  uint16_t port = free_port();
  Fd insider;
  auto meshes = join_all(
      3, port, [](Options& options) { options.deadline = Nanos::from_seconds(2); },
      [&] {
        insider = connect_to(port);
        EXPECT_TRUE(prove(insider.get(), kSecret, hello_of(2, 3, Purpose::control)));
        send_all(insider.get(), std::string(5, '\xff'));
      });
  ASSERT_FALSE(meshes[0]);
  EXPECT_THAT(meshes[0].error().message(), HasSubstr("rank 2 left while the group was forming: "
                                                     "control frame of 4294967295 bytes"));
  ASSERT_FALSE(meshes[1]);
  ASSERT_FALSE(meshes[2]);
}

}  // namespace
}  // namespace weft::join
