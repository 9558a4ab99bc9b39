// Lanes over sealed connections, and payloads that nobody proves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "weft/lane.h"
#include "weft_testing/chunks.h"
#include "weft_testing/loopback.h"

namespace weft::lane {
namespace {

using testing::HasSubstr;
using Role = Lane::Role;

net::Seal keys(bool connector) {
  return net::derive_seal("a secret of the test", {}, {}, {}, connector);
}

// A connection on which one byte is changed, and which says that it comes from another host.
class Elsewhere final : public net::Socket {
 public:
  explicit Elsewhere(std::unique_ptr<net::Socket> inner, uint64_t damage_at = UINT64_MAX)
      : inner_(std::move(inner)), damage_at_(damage_at) {}
  ssize_t send(const iovec* parts, size_t count) override { return inner_->send(parts, count); }
  ssize_t receive(const iovec* parts, size_t count) override {
    ssize_t got = inner_->receive(parts, count);
    for (ssize_t i = 0; i < got; ++i, ++received_)
      if (received_ == damage_at_) *at(parts, static_cast<size_t>(i)) ^= std::byte{4};
    return got;
  }
  std::string local_host() const override { return inner_->local_host(); }
  std::string peer() const override { return inner_->peer(); }
  int fd() const override { return inner_->fd(); }

 private:
  static std::byte* at(const iovec* parts, size_t byte) {
    while (byte >= parts->iov_len) byte -= parts++->iov_len;
    return static_cast<std::byte*>(parts->iov_base) + byte;
  }
  std::unique_ptr<net::Socket> inner_;
  uint64_t damage_at_;
  uint64_t received_ = 0;
};

struct SealedLane {
  explicit SealedLane(uint64_t damage_at = UINT64_MAX) : SealedLane(tcp_pair(), damage_at) {}
  SealedLane(std::pair<Fd, Fd> ends, uint64_t damage_at)
      : world(new_reactor()),
        out(Role::out, *world, net::seal(net::adopt(std::move(ends.first)), keys(true))),
        in(Role::in, *world,
           net::seal(std::make_unique<Elsewhere>(net::adopt(std::move(ends.second)), damage_at),
                     keys(false))) {}
  std::unique_ptr<net::Reactor> world;
  End out, in;
};

TEST(SealedLane, carries_chunks_of_all_sizes_and_makes_no_checksums) {
  SealedLane lane;
  std::vector<std::vector<std::byte>> expected;
  Rng rng(5);
  for (uint32_t chunk = 0; chunk < 60; ++chunk) {
    expected.push_back(noise(chunk % 4 == 0 ? rng.below(400000) : rng.below(900), chunk));
    size_t half = expected.back().size() / 2;
    auto middle = expected.back().begin() + static_cast<ptrdiff_t>(half);
    lane.out.handler.queue(
        0, chunk, {{expected.back().begin(), middle}, {}, {middle, expected.back().end()}});
  }
  ASSERT_TRUE(turn_until(*lane.world, [&] {
    lane.out.send_all();
    lane.in.lane.send_receipts(true);
    return lane.in.handler.arrived_.size() == expected.size() && lane.out.handler.held() == 0;
  })) << (lane.in.error ? lane.in.error->message() : "");
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(lane.in.handler.arrived_[i].payload, expected[i]) << i;
    EXPECT_EQ(lane.in.handler.arrived_[i].header.checksum, 0u);
  }
}

TEST(SealedLane, ends_at_a_changed_byte_with_the_record_that_it_is_in) {
  for (uint64_t at : {2u, 30u, 4u + 64u + 100u, 250u}) {
    SealedLane lane(at);
    for (uint32_t chunk = 0; chunk < 4; ++chunk) lane.out.handler.queue(0, chunk, {noise(90, 1)});
    ASSERT_TRUE(turn_until(*lane.world, [&] {
      lane.out.send_all();
      return lane.in.error.has_value();
    }));
    EXPECT_EQ(lane.in.error->code(), Code::corrupt);
    EXPECT_THAT(lane.in.error->message(), HasSubstr(text("record %d of a sealed", at > 174)));
    EXPECT_EQ(lane.in.handler.arrived_.size(), at > 174 ? 1u : 0u);
  }
}

// The chunk as somebody sends it who leaves the checksum out.
std::vector<std::byte> unproved(size_t size) {
  ChunkHeader header;
  header.operation = 7;
  header.chunk = 31;
  header.message = 5;
  header.length = static_cast<uint32_t>(size);
  std::vector<std::byte> out(kChunkHeaderBytes);
  encode(header, std::span(out).first<kChunkHeaderBytes>());
  std::vector<std::byte> payload = noise(size, 1);
  out.insert(out.end(), payload.begin(), payload.end());
  return out;
}

TEST(Lane, a_payload_without_a_checksum_is_refused_between_hosts) {
  for (bool elsewhere : {false, true})
    for (size_t size : {size_t{0}, size_t{1}, size_t{5000}}) {
      SCOPED_TRACE(text("%s, %zu bytes", elsewhere ? "another host" : "this machine", size));
      auto [one, two] = tcp_pair();
      auto world = new_reactor();
      std::unique_ptr<net::Socket> socket = net::adopt(std::move(one));
      if (elsewhere) socket = std::make_unique<Elsewhere>(std::move(socket));
      End in(Role::in, *world, std::move(socket));
      ASSERT_TRUE(send_all(two.get(), unproved(size)));
      ASSERT_TRUE(turn_until(*world, [&] { return in.error || !in.handler.arrived_.empty(); }));
      bool refused = elsewhere && size > 0;
      ASSERT_EQ(in.error.has_value(), refused);
      if (!refused) continue;
      EXPECT_EQ(in.error->code(), Code::corrupt);
      EXPECT_THAT(in.error->message(), HasSubstr("chunk 31 came without a checksum"));
    }
}

}  // namespace
}  // namespace weft::lane
