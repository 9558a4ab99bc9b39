// A lane that was halted leaves memory alone: it neither writes nor reads what its user has back,
// and tells nobody anything. The memory is taken away in the moment of the halt, so that any touch
// ends the test.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "weft/lane.h"
#include "weft_testing/chunks.h"
#include "weft_testing/loopback.h"

namespace weft::lane {
namespace {

using Role = Lane::Role;

// Memory that can be taken away: whoever touches it then gets a signal, and the kernel EFAULT.
class Pages {
 public:
  explicit Pages(size_t size) : size_(size) {
    void* place = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    WEFT_CHECK(place != MAP_FAILED);
    base_ = static_cast<std::byte*>(place);
  }
  ~Pages() { ::munmap(base_, size_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::span<std::byte> all() { return {base_, size_}; }
  void take_back() { WEFT_CHECK(::mprotect(base_, size_, PROT_NONE) == 0); }

 private:
  std::byte* base_ = nullptr;
  size_t size_;
};

enum class Call : uint8_t { take, sent, receipted, arriving, arrived };
constexpr Call kCalls[] = {Call::take, Call::sent, Call::receipted, Call::arriving, Call::arrived};
constexpr const char* kCallNames[] = {"take", "sent", "receipted", "arriving", "arrived"};

constexpr uint32_t kChunks = 40;
constexpr uint32_t kLargest = 200000;

// Sends kChunks out of its memory and receives into it; halts its lane inside its n-th call of one
// kind.
class Halter final : public ChunkHandler {
 public:
  explicit Halter(bool sends) : left_to_send_(sends ? kChunks : 0) {}
  void halt_in(Call call, uint32_t nth) {
    when_ = call;
    nth_ = nth;
  }
  void halt() {
    lane->halt();
    pages_.take_back();
    halted = true;
  }

  bool take(uint32_t, OutgoingChunk& out) override {
    if (left_to_send_ == 0) return false;
    uint32_t number = --left_to_send_;
    out.header = {};
    out.header.chunk = number;
    out.header.message = number;
    // Small ones, of which the lane keeps copies, and large ones, in two parts.
    out.header.length = number % 3 == 0 ? kLargest - number : 100 * number;
    std::span<const std::byte> whole = pages_.all().first(out.header.length);
    out.keep = number % 3 != 0;
    out.payload = {whole.first(whole.size() / 2), whole.subspan(whole.size() / 2)};
    called(Call::take);
    return true;
  }
  void sent(uint32_t, const ChunkHeader&, uint64_t, Moment) override { called(Call::sent); }
  void receipted(uint32_t, const ChunkHeader&, uint64_t) override { called(Call::receipted); }
  Result<Destination> arriving(uint32_t, const ChunkHeader& header, bool can_stay) override {
    called(Call::arriving);
    if (can_stay && header.chunk % 2 == 0) return Destination{false, true, {}};
    return Destination{false, false, {pages_.all().first(header.length)}};
  }
  Result<void> arrived(uint32_t, const ChunkHeader&, const std::byte*, Moment) override {
    ++arrivals;
    called(Call::arrived);
    return {};
  }

  Lane* lane = nullptr;
  bool halted = false;
  uint32_t arrivals = 0;

 private:
  void called(Call call) {
    EXPECT_FALSE(halted) << kCallNames[static_cast<size_t>(call)] << " was called after the halt";
    if (call == when_ && nth_ > 0 && --nth_ == 0) halt();
  }

  Pages pages_{1u << 20};
  uint32_t left_to_send_;
  Call when_ = Call::take;
  uint32_t nth_ = 0;
};

enum class Way : uint8_t { tcp, shared };

// A lane with a halter at both ends.
struct Course {
  explicit Course(Way way) : Course(way, tcp_pair()) {}
  Course(Way way, std::pair<Fd, Fd> ends) : world(new_reactor()) {
    std::shared_ptr<shm::Segment> offered, attached;
    if (way == Way::shared) {
      auto made = shm::make(net::kernel_system());
      WEFT_CHECK(made.ok());
      offered = *made;
      auto again = shm::attach(net::kernel_system(), shm::name_of(*offered));
      WEFT_CHECK(again.ok());
      attached = *again;
    }
    auto make = [&](Role role, Fd socket, std::shared_ptr<shm::Segment> memory, Halter& handler,
                    std::optional<Error>& error) {
      auto lane =
          std::make_unique<Lane>(role, *world, net::adopt(std::move(socket)), std::move(memory), 0,
                                 handler, monotonic_clock(), cost::unsent_limit(64u << 10),
                                 [&error](uint32_t, Error told) { error = std::move(told); });
      handler.lane = lane.get();
      return lane;
    };
    out = make(Role::out, std::move(ends.first), offered, sender, sender_error);
    in = make(Role::in, std::move(ends.second), attached, receiver, receiver_error);
  }
  void turn() {
    for (int i = 0; i < 5 && out->send_one(); ++i) {
    }
    in->resume();
    in->send_receipts();
    world->run_once(Nanos::from_millis(1));
  }
  // Until one of them has halted, and for a while after; false if that never came.
  bool run() {
    Nanos deadline = monotonic_clock().now() + Nanos::from_seconds(10);
    while (!sender.halted && !receiver.halted && receiver.arrivals < kChunks)
      if (monotonic_clock().now() > deadline)
        return false;
      else
        turn();
    for (int i = 0; i < 15; ++i) turn();
    return true;
  }

  std::unique_ptr<net::Reactor> world;
  Halter sender{true}, receiver{false};
  std::optional<Error> sender_error, receiver_error;
  std::unique_ptr<Lane> out, in;
};

TEST(HaltedLane, touches_nothing_whichever_callback_halted_it) {
  size_t halts = 0;
  for (Way way : {Way::tcp, Way::shared})
    for (Call call : kCalls)
      for (uint32_t nth : {1u, 2u, 3u, 7u, 20u}) {
        if (way == Way::shared && call == Call::receipted) continue;  // memory needs none
        SCOPED_TRACE(text("%s, in call %u of %s", way == Way::tcp ? "tcp" : "shared memory", nth,
                          kCallNames[static_cast<size_t>(call)]));
        Course course(way);
        bool of_sender = call == Call::take || call == Call::sent || call == Call::receipted;
        Halter& halter = of_sender ? course.sender : course.receiver;
        halter.halt_in(call, nth);
        ASSERT_TRUE(course.run());
        EXPECT_TRUE(halter.halted);
        // Nobody is told; the other end sees a connection that is open and silent.
        EXPECT_FALSE(course.sender_error);
        EXPECT_FALSE(course.receiver_error);
        // What it may not have delivered can still be asked for, and has no memory of the user's.
        for (const LanePort::Unsettled& chunk : course.out->take_unsettled())
          EXPECT_EQ(chunk.payload.size(), chunk.retained ? chunk.header.length : 0u);
        ++halts;
      }
  EXPECT_EQ(halts, 45u);
}

TEST(HaltedLane, touches_nothing_whenever_it_was_halted) {
  for (Way way : {Way::tcp, Way::shared})
    for (bool of_sender : {false, true})
      for (int turns = 1; turns <= 12; ++turns) {
        SCOPED_TRACE(text("%s, %s, after %d turns", way == Way::tcp ? "tcp" : "shared memory",
                          of_sender ? "sender" : "receiver", turns));
        Course course(way);
        for (int i = 0; i < turns; ++i) course.turn();
        (of_sender ? course.sender : course.receiver).halt();
        ASSERT_TRUE(course.run());
        EXPECT_FALSE(course.sender_error);
        EXPECT_FALSE(course.receiver_error);
        EXPECT_FALSE(of_sender && course.out->send_one());
      }
}

}  // namespace
}  // namespace weft::lane
