// The simulated connections: bytes on their way, what time it is, and what goes wrong.
#pragma once

#include <map>
#include <queue>

#include "weft/net.h"

namespace weft::net::sim {

// Bytes that travel together, or the end of the stream, or a reset.
struct Parcel {
  enum class Kind : uint8_t { bytes, end, reset };
  Kind kind = Kind::bytes;
  Nanos arrival{0};
  std::vector<std::byte> bytes;
};

// One direction of a connection.
struct Pipe {
  std::deque<Parcel> flying;
  size_t flying_bytes = 0;
  std::vector<std::byte> here;  // has arrived and was not read
  size_t read = 0;              // of `here`
  uint64_t sent = 0;
  Nanos last_arrival{0};
  bool expected = false;  // an event will look at the first parcel
  bool ended = false;     // the end of the stream has arrived
  bool lost = false;      // what is sent from now on goes nowhere
  bool times_out = false;
  size_t unread() const { return here.size() - read; }
};

// Side 0 called, side 1 was called; side s sends into pipes[s].
struct Connection {
  enum class State : uint8_t { opening, open, failed, closed };
  uint64_t number = 0;
  std::array<uint32_t, 2> ranks{};
  uint16_t port = 0;
  bool loopback = false;
  std::array<Pipe, 2> pipes;
  std::array<State, 2> states{};
  std::array<int, 2> failures{};  // errno
};

class Wire {
 public:
  explicit Wire(const Options& options);

  Nanos now() const { return now_; }
  Rng& rng() { return rng_; }
  void after(Nanos delay, std::function<void()> what);
  std::optional<Nanos> next_event() const;
  // Time goes on, and everything that is due happens.
  void advance_to(Nanos moment);

  std::shared_ptr<Connection> call(uint32_t from, uint32_t to, uint16_t port);
  bool listen(uint32_t rank, uint16_t port);
  uint16_t free_port(uint32_t rank);
  void stop_listening(uint32_t rank, uint16_t port);
  std::shared_ptr<Connection> accept(uint32_t rank, uint16_t port);
  bool has_caller(uint32_t rank, uint16_t port) const;

  ssize_t send(Connection& connection, size_t side, const iovec* parts, size_t count);
  ssize_t receive(Connection& connection, size_t side, const iovec* parts, size_t count);
  uint32_t events(const Connection& connection, size_t side) const;
  void close(Connection& connection, size_t side);

  void die(uint32_t rank, bool silently);
  bool alive(uint32_t rank) const { return alive_[rank]; }
  // A fault of this kind that holds for the rank now.
  const Fault* active(Fault::Kind kind, uint32_t rank) const;

  // What happened, as a number and in words.
  void note(const char* what, uint64_t a, uint64_t b = 0, uint64_t c = 0);
  uint64_t course() const { return course_; }
  std::string lines() const;
  std::optional<Nanos> died(uint32_t rank) const { return died_[rank]; }
  std::optional<std::pair<Rank, Rank>> ends_of(uint64_t number) const;

 private:
  struct Event {
    Nanos at;
    uint64_t number;
    std::function<void()> what;
    bool operator<(const Event& other) const {
      return std::tie(other.at, other.number) < std::tie(at, number);
    }
  };

  Nanos delay_between(uint32_t one, uint32_t other);
  Nanos blocked_until(uint32_t one, uint32_t other) const;
  void knock(const std::shared_ptr<Connection>& connection);
  void launch(Connection& connection, size_t side, Parcel parcel);
  void expect(Connection& connection, size_t side, Nanos delay);
  void deliver(Connection& connection, size_t side);
  void lose(Connection& connection, size_t side);
  void break_off(Connection& connection, size_t side, int failure);
  void reset_peer(Connection& connection, size_t side);
  // The fault that a byte in the next `count` triggers, if there is one.
  Fault* due(const Connection& connection, size_t side, uint64_t count);
  size_t room(const Connection& connection, size_t side) const;

  Options options_;
  Rng rng_;
  Nanos now_;
  Nanos began_;
  std::priority_queue<Event> queue_;
  uint64_t events_ = 0;
  std::vector<std::shared_ptr<Connection>> connections_;
  std::map<std::pair<uint32_t, uint16_t>, std::deque<std::shared_ptr<Connection>>> listeners_;
  std::vector<uint16_t> ports_;
  std::vector<bool> alive_, dark_;  // dark: without power
  std::vector<std::optional<Nanos>> died_;
  std::vector<bool> used_;  // faults that happen once
  uint64_t course_ = 14695981039346656037ull;
  std::deque<std::string> lines_;
};

}  // namespace weft::net::sim
