// Groups that join over loopback, their ranks as threads.
#pragma once

#include <gtest/gtest.h>

#include "weft/join.h"
#include "weft_testing/loopback.h"
#include "weft_testing/turns.h"

namespace weft::join {

inline constexpr const char* kSecret = "a secret of the test";

inline Options options_for(uint32_t rank, uint32_t ranks, uint16_t port) {
  Options options;
  options.rank = {rank};
  options.ranks = ranks;
  options.rendezvous = text("127.0.0.1:%u", unsigned{port});
  options.secret = kSecret;
  options.host = text("host%u", rank / 2);
  options.agreement = "the same";
  options.lanes = 8;
  options.probe = false;
  options.shared_memory = false;
  options.deadline = Nanos::from_seconds(10);
  return options;
}

// Joins all ranks, each in a thread. `before` runs when rank 0 is joining and the others are not.
inline std::vector<Result<Mesh>> join_all(uint32_t ranks, uint16_t port,
                                          const std::function<void(Options&)>& change = {},
                                          const std::function<void()>& before = {}) {
  std::vector<std::optional<Result<Mesh>>> outcomes(ranks);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Options options = options_for(rank, ranks, port);
      if (change) change(options);
      outcomes[rank] = meet(options);
    });
    if (rank == 0 && before) before();
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<Result<Mesh>> out;
  out.reserve(ranks);
  for (auto& outcome : outcomes) out.push_back(std::move(*outcome));
  return out;
}

// The lanes of a group that all live in this thread.
struct LinkedGroup {
  struct Line {
    Rank peer;
    uint16_t lane;
    std::unique_ptr<net::Socket> socket;
    std::shared_ptr<lane::shm::Segment> shared;
  };
  struct Side {
    std::vector<Line> opened, accepted;
    std::unique_ptr<net::Socket> asked;
    std::map<uint32_t, std::unique_ptr<net::Socket>> branches;  // by peer
    std::vector<std::pair<Rank, Error>> misbehaved;
    std::unique_ptr<Links> links;
  };

  explicit LinkedGroup(std::vector<Result<Mesh>>& joined) : meshes(joined), sides(joined.size()) {
    for (size_t rank = 0; rank < meshes.size(); ++rank) {
      Side& side = sides[rank];
      Links::Callbacks callbacks;
      callbacks.opened = [&side](Rank peer, uint16_t lane, auto socket, auto shared) {
        side.opened.push_back({peer, lane, std::move(socket), std::move(shared)});
      };
      callbacks.accepted = [&side](Rank peer, uint16_t lane, auto socket, auto shared) {
        side.accepted.push_back({peer, lane, std::move(socket), std::move(shared)});
      };
      callbacks.asked = [&side](auto socket) { side.asked = std::move(socket); };
      callbacks.branched = [&side](Rank peer, auto socket) {
        side.branches[peer.index] = std::move(socket);
      };
      callbacks.misbehaved = [&side](Rank peer, Error error) {
        side.misbehaved.emplace_back(peer, std::move(error));
      };
      side.links = std::make_unique<Links>(*meshes[rank], std::move(callbacks));
    }
  }

  // Turns all of them until `done` says so; false after ten seconds.
  bool turn_until(const std::function<bool()>& done) {
    Nanos deadline = monotonic_clock().now() + Nanos::from_seconds(10);
    while (!done()) {
      if (monotonic_clock().now() > deadline) return false;
      for (size_t rank = 0; rank < meshes.size(); ++rank) {
        meshes[rank]->reactor->run_once(Nanos::from_millis(1));
        sides[rank].links->tick(monotonic_clock().now());
      }
    }
    return true;
  }

  std::vector<Result<Mesh>>& meshes;
  std::vector<Side> sides;
};

// Every rank reaches the next one by two lanes, both ways, and rank 0 by its control channel.
inline void expect_data_flows(std::vector<Result<Mesh>>& meshes) {
  auto ranks = static_cast<uint32_t>(meshes.size());
  LinkedGroup group(meshes);
  for (uint32_t rank = 0; rank < ranks; ++rank)
    for (uint16_t lane = 0; lane < 2; ++lane)
      group.sides[rank].links->open({meshes[rank]->next()}, lane);
  ASSERT_TRUE(group.turn_until([&] {
    return std::all_of(group.sides.begin(), group.sides.end(), [](const auto& side) {
      return side.opened.size() == 2 && side.accepted.size() == 2;
    });
  }));
  auto pass = [](net::Socket& from, net::Socket& to, uint8_t byte) {
    iovec part{&byte, 1};
    ASSERT_EQ(from.send(&part, 1), 1);
    uint8_t got = 0;
    part.iov_base = &got;
    for (int attempt = 0; attempt < 2000 && to.receive(&part, 1) != 1; ++attempt) pause_ms(1);
    EXPECT_EQ(got, byte);
  };
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    Mesh& mesh = *meshes[rank];
    for (auto& out : group.sides[rank].opened)
      for (auto& in : group.sides[mesh.next()].accepted)
        if (in.peer.index == rank && in.lane == out.lane) {
          auto mark = static_cast<uint8_t>(1 + rank * 16 + out.lane);
          pass(*out.socket, *in.socket, mark);
          pass(*in.socket, *out.socket, static_cast<uint8_t>(255 - mark));
        }
    if (rank == 0) continue;
    Packer words;
    words.number(rank);
    mesh.control[0]->send(Control::ping, words);
    Mesh& root = *meshes[0];
    std::optional<Frame> frame;
    ASSERT_TRUE(turn_until(*root.reactor,
                           [&] { return (frame = root.control[rank]->receive()).has_value(); }));
    EXPECT_EQ(frame->type, Control::ping);
    EXPECT_EQ(Unpacker(frame->payload).number<uint32_t>(), rank);
  }
}

inline void expect_joined(const std::vector<Result<Mesh>>& meshes) {
  for (size_t rank = 0; rank < meshes.size(); ++rank)
    ASSERT_TRUE(meshes[rank].ok()) << "rank " << rank << ": " << meshes[rank].error().message();
}

}  // namespace weft::join
