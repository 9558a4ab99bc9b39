// A source and a sink of chunks that remember everything, and a lane with both.
#pragma once

#include <gtest/gtest.h>

#include <map>

#include "weft/lane.h"
#include "weft_testing/turns.h"

namespace weft::lane {

inline std::vector<std::byte> noise(size_t size, uint64_t seed) {
  std::vector<std::byte> out(size);
  Rng rng(seed);
  for (std::byte& b : out) b = std::byte(rng.below(256));
  return out;
}

// Chunks up to this size are kept by the lane that they leave over.
inline constexpr uint32_t kKept = 64u << 10;

// Sends what is queued, keeps what arrives.
class TestHandler final : public ChunkHandler {
 public:
  using Parts = std::vector<std::vector<std::byte>>;

  void queue(uint32_t operation, uint32_t chunk, Parts parts) {
    ChunkHeader header;
    header.operation = operation;
    header.chunk = chunk;
    header.step = 2;
    header.message = 1000 + chunk;
    for (auto& part : parts) header.length += static_cast<uint32_t>(part.size());
    queue_.push_back({header, std::move(parts)});
  }

  bool take(uint32_t, OutgoingChunk& out) override {
    if (queue_.empty()) return false;
    // Payload stays valid until it is settled: by message, because lanes send at the same time.
    auto [place, inserted] =
        held_.emplace(queue_.front().header.message, std::move(queue_.front()));
    queue_.pop_front();
    out.header = place->second.header;
    out.token = out.header.message * 7;
    out.keep = out.header.length <= kKept;
    for (auto& part : place->second.parts) out.payload.push_back(part);
    return true;
  }
  void sent(uint32_t lane, const ChunkHeader& header, uint64_t token, Moment when) override {
    EXPECT_LE(when.first, when.last);
    EXPECT_EQ(token, header.message * 7);
    EXPECT_TRUE(held_.contains(header.message)) << "settled before it was sent";
    moments.push_back(when);
    sent_.push_back(header.chunk);
    ++sent_by_lane[lane];
    if (!header.wants_receipt) settle(header);
  }
  void receipted(uint32_t, const ChunkHeader& header, uint64_t token) override {
    EXPECT_EQ(token, header.message * 7);
    receipted_.push_back(header.chunk);
    if (header.wants_receipt) settle(header);
  }
  Result<Destination> arriving(uint32_t, const ChunkHeader& header, bool can_stay) override {
    ++offers;
    offered_in_place += can_stay ? 1 : 0;
    if (header.operation >= first_unknown) return Destination{true, false, {}};
    if (refuse) return error(Code::invalid_argument, "not wanted");
    Arrived& place = arriving_[header.message];
    place.header = header;
    if (can_stay && prefer_in_place) return Destination{false, true, {}};
    // In uneven parts, some empty.
    Destination landing;
    place.payload.resize(header.length);
    for (size_t from = 0, size = 0; from < header.length; from += size, size = size * 2 + 1) {
      size_t here = std::min<size_t>(size, header.length - from);
      landing.payload.push_back(std::span(place.payload).subspan(from, here));
      size = here;
    }
    return landing;
  }
  Result<void> arrived(uint32_t lane, const ChunkHeader& header, const std::byte* payload,
                       Moment when) override {
    EXPECT_LE(when.first, when.last);
    moments.push_back(when);
    Arrived& place = arriving_.at(header.message);
    if (payload != nullptr) place.payload.assign(payload, payload + header.length);
    in_place += payload != nullptr ? 1 : 0;
    arrived_.push_back(std::move(place));
    arriving_.erase(header.message);
    ++arrived_by_lane[lane];
    if (on_arrival) on_arrival();
    return {};
  }

  struct Arrived {
    ChunkHeader header;
    std::vector<std::byte> payload;
  };
  std::vector<Arrived> arrived_;
  std::vector<uint32_t> sent_, settled_, receipted_;  // chunks, in order
  std::vector<Moment> moments;                        // of what was sent and of what arrived
  std::map<uint32_t, size_t> sent_by_lane, arrived_by_lane;
  size_t offers = 0;
  size_t offered_in_place = 0;
  size_t in_place = 0;
  uint32_t first_unknown = 0xffffffff;
  bool refuse = false;
  bool prefer_in_place = true;
  std::function<void()> on_arrival;
  size_t held() const { return held_.size(); }
  size_t waiting() const { return queue_.size(); }

 private:
  // From here on the bytes may be anything.
  void settle(const ChunkHeader& header) {
    settled_.push_back(header.chunk);
    for (auto& part : held_.at(header.message).parts)
      std::fill(part.begin(), part.end(), std::byte{0xee});
    held_.erase(header.message);
  }

  struct Queued {
    ChunkHeader header;
    Parts parts;
  };
  std::deque<Queued> queue_;
  std::map<uint64_t, Queued> held_;
  std::map<uint64_t, Arrived> arriving_;
};

// A lane with its own handler and the error that ended it.
struct End {
  End(Lane::Role role, net::Reactor& reactor, std::unique_ptr<net::Socket> socket,
      std::shared_ptr<shm::Segment> shared = nullptr, uint32_t index = 0)
      : lane(role, reactor, std::move(socket), std::move(shared), index, handler, monotonic_clock(),
             cost::unsent_limit(64u << 10), [this](uint32_t, Error told) {
               EXPECT_FALSE(error) << "told twice";
               error = std::move(told);
             }) {}
  End(net::Reactor& reactor, Fd socket)
      : End(Lane::Role::without_receipts, reactor, net::adopt(std::move(socket))) {}
  void send_all() {
    while (lane.send_one()) {
    }
  }
  TestHandler handler;
  std::optional<Error> error;
  Lane lane;
};

}  // namespace weft::lane
