// Strangers, who may cost a group nothing, and members who do what no member does.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "testing.h"

namespace weft::join {
namespace {

bool turn_until(Mesh& mesh, const std::function<bool()>& done) {
  return weft::turn_until(*mesh.reactor, [&] {
    mesh.acceptor->tick(monotonic_clock().now());
    return done();
  });
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
  Hello joins = hello_of(1, 2, Purpose::control, "");
  EXPECT_FALSE(prove(wrong.get(), "not the secret", joins));
  // Bytes in the form of a proof, with a MAC of zeros.
  Fd forged = connect_to(port);
  std::vector<std::byte> proof(kProof);
  auto hello = encode_hello(joins);
  std::memcpy(proof.data() + kNonce, hello.data(), hello.size());
  send_all(forged.get(), proof);
  EXPECT_TRUE(is_closed_by_peer(forged.get()));
  return open;
}

TEST(Strangers, during_join_are_refused_and_the_job_is_unharmed) {
  LogLines log;
  uint16_t port = free_port();
  std::string place = place_of("127.0.0.1", port);
  std::vector<Fd> open;
  auto meshes = join_all(
      2, port, [](Options& options) { options.lanes = 2; },
      [&] {
        open = send_strangers(port);
        // Those who know the secret, but are not expected.
        std::vector<Hello> unexpected = {
            hello_of(7, 2, Purpose::control, place), hello_of(0, 2, Purpose::lane, place),
            hello_of(1, 2, Purpose::status, place), hello_of(1, 2, Purpose::probe, place)};
        for (const Hello& hello : unexpected) {
          Fd fd = connect_to(port);
          EXPECT_TRUE(prove(fd.get(), kSecret, hello));
          EXPECT_TRUE(is_closed_by_peer(fd.get()));
        }
        Hello newer = hello_of(1, 2, Purpose::control, place);
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
  EXPECT_EQ(
      log.count(text("it speaks protocol %u, this weft %u", kProtocol + 1u, unsigned{kProtocol})),
      1u)
      << log.all();
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
        Hello hello = lane_hello(*mesh, mesh->previous(), 0, 1);
        hello.purpose = purpose;
        Fd fd = connect_to(mesh->members[mesh->rank.index].port);
        // Nobody but rank 0 says that it is where ranks join.
        bool answers = purpose == Purpose::probe || mesh->rank.index == 0;
        EXPECT_EQ(prove(fd.get(), kSecret, hello), answers);
        EXPECT_TRUE(is_closed_by_peer(fd.get()));
      }
      done = true;
    });
    EXPECT_TRUE(turn_until(*mesh, [&] { return done.load(); }));
    strangers.join();
    // The two that stayed without a word have gone by now.
    EXPECT_TRUE(turn_until(*mesh, [&] { return mesh->acceptor->refused() == 8; }))
        << mesh->acceptor->refused() << log.all();
  }
  EXPECT_EQ(log.count("it does not know the job's secret"), 9u) << log.all();
  EXPECT_EQ(log.count("the group is complete"), 4u) << log.all();
  EXPECT_EQ(log.count("which is not here"), 2u) << log.all();
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
  mesh.acceptor->tick(now + Nanos::from_seconds(2));
  EXPECT_EQ(mesh.acceptor->refused(), 0u);
  mesh.acceptor->tick(now + Nanos::from_seconds(4));
  EXPECT_EQ(mesh.acceptor->refused(), 2u);
  EXPECT_EQ(log.count("it did not prove the secret within 3"), 2u) << log.all();
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
  Handshake theirs(net::kernel_system(), Handshake::Role::connector, kSecret,
                   lane_hello(mesh, 1, 0, 1));
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
  EXPECT_TRUE(turn_until(mesh, [&] { return mesh.acceptor->refused() == 1; }));
  EXPECT_EQ(log.count("does not know the job's secret"), 1u) << log.all();
}

// Rank 2 hears what rank 0 says to rank 1, and says it to rank 1's neighbour.
TEST(Strangers, cannot_carry_a_proof_to_another_door) {
  LogLines log;
  auto meshes = join_all(3, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  LinkedGroup group(meshes);
  // Rank 0 means rank 1, and its packets end up at rank 2, byte by byte.
  Fd to_two = connect_to(meshes[2]->members[2].port);
  std::unique_ptr<net::Socket> socket = net::adopt(std::move(to_two));
  Handshake deceived(net::kernel_system(), Handshake::Role::connector, kSecret,
                     lane_hello(*meshes[1], 0, 0, 1));
  std::optional<Error> refused;
  ASSERT_TRUE(group.turn_until([&] {
    auto finished = deceived.advance(*socket);
    EXPECT_FALSE(finished && *finished) << "rank 2 has passed for rank 1";
    if (!finished) refused = std::move(finished).error();
    return refused.has_value();
  }));
  EXPECT_TRUE(group.sides[2].accepted.empty());
  EXPECT_EQ(
      log.count(text("it means rank 1 at 127.0.0.1:%u, and not this one at 127.0.0.1:%u",
                     unsigned{meshes[1]->members[1].port}, unsigned{meshes[2]->members[2].port})),
      1u)
      << log.all();
  // The right door at the wrong number is no better.
  Hello hello = lane_hello(*meshes[2], 0, 0, 1);
  hello.to = 1;
  std::unique_ptr<net::Socket> other = net::adopt(connect_to(meshes[2]->members[2].port));
  Handshake misled(net::kernel_system(), Handshake::Role::connector, kSecret, hello);
  ASSERT_TRUE(group.turn_until([&] { return !misled.advance(*other).ok(); }));
  EXPECT_EQ(log.count("it means rank 1 at"), 2u) << log.all();
  EXPECT_TRUE(group.sides[2].accepted.empty());
}

// ---- in great number ---------------------------------------------------------------------

// Callers who say nothing, and stay.
std::vector<Fd> idle_crowd(size_t count, uint16_t port) {
  std::vector<Fd> crowd;
  sockaddr_in address = loopback(port);
  for (size_t i = 0; i < count; ++i) {
    Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    (void)::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address);
    crowd.push_back(std::move(fd));
  }
  return crowd;
}

TEST(Strangers, in_great_number_cannot_keep_a_group_from_forming) {
  LogLines log;
  uint16_t port = free_port();
  std::vector<Fd> crowd;
  Nanos began{0};
  auto meshes = join_all(4, port, {}, [&] {
    connect_to(port);  // it listens
    crowd = idle_crowd(700, port);
    began = monotonic_clock().now();
  });
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  EXPECT_LT((monotonic_clock().now() - began).seconds(), 2);
  expect_data_flows(meshes);
}

TEST(Strangers, in_great_number_cannot_keep_lanes_from_opening) {
  LogLines log;
  auto meshes = join_all(2, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  LinkedGroup group(meshes);
  auto crowd = idle_crowd(700, meshes[0]->members[0].port);
  for (int i = 0; i < 200; ++i) meshes[0]->reactor->run_once(Nanos{0});
  size_t unproved = meshes[0]->acceptor->unproved();
  EXPECT_GE(unproved, 32u);
  EXPECT_LE(unproved, 512u) << "one address has half of the places";
  Nanos began = monotonic_clock().now();
  for (uint16_t lane = 0; lane < 8; ++lane) group.sides[1].links->open({0}, lane);
  ASSERT_TRUE(group.turn_until([&] { return group.sides[0].accepted.size() == 8; }));
  EXPECT_LT((monotonic_clock().now() - began).seconds(), 1);
  EXPECT_TRUE(group.turn_until([&] { return group.sides[1].opened.size() == 8; }));
  // What the log says of them is short, and counts them all.
  for (int i = 0; i < 150; ++i) {
    pause_ms(10);
    group.turn_until([] { return true; });
    meshes[0]->acceptor->tick(monotonic_clock().now());
  }
  EXPECT_LE(log.count("refused a connection from 127.0.0.1:"), 40u);
  EXPECT_GT(meshes[0]->acceptor->refused(), 40u);
  EXPECT_GE(log.count("more connections from 1 address within a second"), 1u) << log.all();
}

// The one who has been silent for longest goes first, and who speaks stays.
TEST(Strangers, who_are_silent_make_room_for_who_speaks) {
  LogLines log;
  auto meshes = join_all(2, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  Mesh& mesh = *meshes[0];
  auto turn = [&](int times) {
    for (int i = 0; i < times; ++i) mesh.reactor->run_once(Nanos{0});
  };
  // The first of all has begun its proof; a slow link carries the rest.
  std::unique_ptr<net::Socket> slow = net::adopt(connect_to(mesh.members[0].port));
  turn(3);
  Handshake proof(net::kernel_system(), Handshake::Role::connector, kSecret,
                  lane_hello(mesh, 1, 0, 1));
  std::array<std::byte, kChallenge> challenge;
  iovec part{challenge.data(), challenge.size()};
  ASSERT_EQ(slow->receive(&part, 1), static_cast<ssize_t>(kChallenge));
  auto [near, far] = tcp_pair();
  ASSERT_TRUE(send_all(far.get(), challenge));
  std::unique_ptr<net::Socket> aside = net::adopt(std::move(near));
  ASSERT_TRUE(proof.advance(*aside));
  std::array<std::byte, kProof> words;
  ASSERT_EQ(::recv(far.get(), words.data(), words.size(), MSG_WAITALL),
            static_cast<ssize_t>(kProof));
  iovec first{words.data(), 100}, rest{words.data() + 100, kProof - 100};
  ASSERT_EQ(slow->send(&first, 1), 100);
  turn(3);
  std::vector<Fd> crowd;
  for (int i = 0; i < 30; ++i) {
    auto more = idle_crowd(40, mesh.members[0].port);
    std::move(more.begin(), more.end(), std::back_inserter(crowd));
    pause_ms(20);
    mesh.acceptor->tick(monotonic_clock().now());
    turn(100);
  }
  EXPECT_GT(mesh.acceptor->refused(), 100u) << "some had to go";
  ASSERT_EQ(slow->send(&rest, 1), static_cast<ssize_t>(kProof - 100));
  turn(100);
  EXPECT_EQ(mesh.early->size(), 1u) << log.all();
}

TEST(Strangers, that_come_and_go_all_the_time_wait_for_the_group) {
  LogLines log;
  auto meshes = join_all(2, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  LinkedGroup group(meshes);
  // Of a processor, by this thread, which drives both ranks.
  auto used_in_a_second = [&] {
    auto used = [] {
      timespec time{};
      ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
      return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
    };
    Nanos from = monotonic_clock().now();
    double before = used();
    group.turn_until([&] { return (monotonic_clock().now() - from).seconds() > 1; });
    return (used() - before) / (monotonic_clock().now() - from).seconds();
  };
  double alone = used_in_a_second();
  std::atomic<bool> stop = false;
  std::atomic<uint64_t> calls = 0;
  std::thread flood([&] {
    for (Nanos from = monotonic_clock().now(); !stop; calls += 20) {
      idle_crowd(20, meshes[0]->members[0].port);
      while (static_cast<double>(calls) > 18'000 * (monotonic_clock().now() - from).seconds())
        pause_ms(1);
    }
  });
  Nanos began = monotonic_clock().now();
  ASSERT_TRUE(group.turn_until([&] { return calls > 2000; }));
  double among = used_in_a_second();
  EXPECT_LT(among - alone, 0.10) << "the driving thread has something else to do";
  EXPECT_GT(meshes[0]->acceptor->refused(), 1000u);
  for (uint16_t lane = 0; lane < 4; ++lane) group.sides[1].links->open({0}, lane);
  EXPECT_TRUE(group.turn_until([&] { return group.sides[0].accepted.size() == 4; }));
  stop = true;
  flood.join();
  double seconds = (monotonic_clock().now() - began).seconds();
  EXPECT_LE(static_cast<double>(log.count("refused")), 12 * (seconds + 2)) << "lines in the log";
  EXPECT_GE(log.count("more connections from 1 address within a second"), 1u);
  RecordProperty("seen",
                 text("%.0f calls a second take %.0f %% of the thread; 4 lanes open among them",
                      static_cast<double>(calls) / seconds, 100 * (among - alone)));
}

// A call that waits unheard at a crowded door, as it does when the kernel's queue was full just
// when it came, is not the only one.
TEST(Strangers, who_crowd_the_door_do_not_keep_a_member_waiting_for_one_call) {
  Fd door(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(::bind(door.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(door.get(), 16), 0);
  ASSERT_EQ(::getsockname(door.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  auto reactor = new_reactor();
  uint64_t attempts = 0;
  Hello hello = hello_of(1, 2, Purpose::lane, "");
  Dial dial(net::kernel_network(), *reactor, "127.0.0.1", ntohs(address.sin_port), kSecret, hello,
            attempts);
  Nanos began = monotonic_clock().now();
  std::vector<Fd> unheard;
  std::unique_ptr<net::Socket> heard;
  Handshake answer(net::kernel_system(), Handshake::Role::acceptor, kSecret, Hello{});
  auto done = [&] {
    return dial.done() || monotonic_clock().now() - began > Nanos::from_seconds(5);
  };
  while (!done()) {
    dial.tick(monotonic_clock().now());
    reactor->run_once(Nanos::from_millis(2));
    pollfd waits{door.get(), POLLIN, 0};
    if (::poll(&waits, 1, 0) == 1) {
      Fd caller(::accept4(door.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (unheard.empty())
        unheard.push_back(std::move(caller));
      else if (!heard)
        heard = net::adopt(std::move(caller));
    }
    if (heard) {
      ASSERT_TRUE(answer.advance(*heard));
    }
  }
  ASSERT_TRUE(dial.done()) << dial.last_problem();
  EXPECT_EQ(answer.hello().attempt, 2u);
  // Of the calls only one has proved anything; the others are over.
  char byte = 0;
  EXPECT_EQ(::recv(unheard[0].get(), &byte, 1, 0), 0);
  EXPECT_FALSE(dial.trying());
}

TEST(Strangers, that_were_reset_are_named_too) {
  LogLines log;
  auto meshes = join_all(2, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  Fd caller = connect_to(meshes[0]->members[0].port);
  linger at_once{1, 0};
  setsockopt(caller.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  caller.reset();
  ASSERT_TRUE(turn_until(*meshes[0], [&] { return meshes[0]->acceptor->refused() == 1; }));
  EXPECT_EQ(log.count("refused a connection from 127.0.0.1:"), 1u) << log.all();
}

// A process that may not have more descriptors does not turn in circles, and nobody is lost.
TEST(Strangers, wait_while_there_are_no_descriptors) {
  pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    LogLines log;
    auto reactor = new_reactor();
    auto listener = net::kernel_network().listen("127.0.0.1", 0);
    size_t taken = 0;
    Acceptor acceptor(net::kernel_network(), *reactor, std::move(*listener), kSecret, Identity{},
                      [&](std::unique_ptr<net::Socket>&, const Hello&) -> Result<void> {
                        ++taken;
                        return {};
                      });
    Fd caller = connect_to(acceptor.port());
    Fd spare(::dup(0));
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = static_cast<rlim_t>(spare.get()) + 1;
    setrlimit(RLIMIT_NOFILE, &limit);
    auto turn_for = [&](double seconds) {
      int turns = 0;
      for (Nanos from = monotonic_clock().now();
           (monotonic_clock().now() - from).seconds() < seconds; ++turns) {
        reactor->run_once(Nanos::from_millis(20));
        acceptor.tick(monotonic_clock().now());
      }
      return turns;
    };
    int turns = turn_for(0.5);
    bool waits = acceptor.problem() && acceptor.unproved() == 0 && turns < 100;
    bool said = log.count("cannot accept a connection: Too many open files; this process may") == 1;
    spare.reset();
    turn_for(0.3);
    bool goes_on = !acceptor.problem() && acceptor.unproved() == 1;
    // The next one takes the place of one who says nothing.
    ::close(0);
    Fd second(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = loopback(acceptor.port());
    bool called =
        ::connect(second.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    turn_for(0.3);
    bool replaced = acceptor.refused() == 1 && acceptor.unproved() == 1;
    if (!(waits && said && goes_on && called && replaced))
      std::fprintf(stderr, "%d %d %d %d %d, %d turns\n%s", waits, said, goes_on, called, replaced,
                   turns, log.all().c_str());
    ::_exit(waits && said && goes_on && called && replaced ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Refused, are_summed_up_beyond_a_few_lines_a_second) {
  LogLines log;
  Refusals refusals;
  Nanos now = Nanos::from_seconds(1);
  int said = 0;
  for (int i = 0; i < 522; ++i) {
    if (refusals.may_say(now))
      ++said;
    else
      refusals.count(text("10.0.0.%d", i % 3));
  }
  EXPECT_EQ(said, 10);
  EXPECT_EQ(log.count("more connections"), 0u);
  refusals.tick(now + Nanos::from_millis(999));
  EXPECT_EQ(log.count("more connections"), 0u);
  refusals.tick(now + Nanos::from_seconds(1));
  EXPECT_EQ(log.count("refused 512 more connections from 3 addresses within a second"), 1u)
      << log.all();
  EXPECT_TRUE(refusals.may_say(now + Nanos::from_seconds(2)));
}

// ---- members that do what no member does -------------------------------------------------

TEST(Members, who_open_a_lane_again_replace_it_and_twice_by_one_attempt_are_expelled) {
  LogLines log;
  auto meshes = join_all(2, free_port());
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  LinkedGroup group(meshes);
  auto& side = group.sides[0];
  std::vector<Fd> open;
  auto call = [&](const Hello& hello, size_t accepted, uint64_t refused) {
    std::atomic<bool> done = false;
    std::thread member([&] {
      open.push_back(connect_to(meshes[0]->members[0].port));
      EXPECT_TRUE(prove(open.back().get(), kSecret, hello));
      done = true;
    });
    EXPECT_TRUE(group.turn_until([&] {
      return done && side.accepted.size() == accepted && meshes[0]->acceptor->refused() == refused;
    })) << side.accepted.size()
        << " " << log.all();
    member.join();
  };
  call(lane_hello(*meshes[0], 1, 3, 7), 1, 0);
  call(lane_hello(*meshes[0], 1, 4, 8), 2, 0);
  call(lane_hello(*meshes[0], 1, 3, 9), 3, 0);  // lane 3 broke, says its sender
  call(lane_hello(*meshes[0], 1, 3, 6), 3, 1);  // was given up, and is late
  EXPECT_TRUE(side.misbehaved.empty());
  call(lane_hello(*meshes[0], 1, 3, 9), 3, 2);
  ASSERT_EQ(side.misbehaved.size(), 1u);
  EXPECT_EQ(side.misbehaved[0].first, Rank{1});
  EXPECT_EQ(side.misbehaved[0].second.message(), "rank 1 opened lane 3 twice in one attempt");
  call(lane_hello(*meshes[0], 1, 8, 10), 3, 3);  // of 8
  ASSERT_EQ(side.misbehaved.size(), 2u);
  EXPECT_EQ(side.misbehaved[1].second.message(), "rank 1 opened lane 8; the plan has 8 lanes");
  EXPECT_EQ(log.count("(rank 1): rank 1 opened lane 3 twice in one attempt"), 1u) << log.all();
}

// All of a group's own connections at once are no flood.
TEST(Members, open_a_few_lanes_at_a_time) {
  auto meshes = join_all(2, free_port(), [](Options& options) { options.lanes = 200; });
  ASSERT_NO_FATAL_FAILURE(expect_joined(meshes));
  LinkedGroup group(meshes);
  for (uint16_t lane = 0; lane < 200; ++lane) group.sides[1].links->open({0}, lane);
  size_t most = 0;
  ASSERT_TRUE(group.turn_until([&] {
    most = std::max(most, meshes[0]->acceptor->unproved());
    return group.sides[1].opened.size() == 200 && group.sides[0].accepted.size() == 200;
  }));
  EXPECT_LE(most, 4u);
  EXPECT_EQ(meshes[0]->acceptor->refused(), 0u);
}

}  // namespace
}  // namespace weft::join
