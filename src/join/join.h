// join: who is in the group, proved by a secret.
//
// Every connection begins with a proof of the job's secret (HMAC-SHA256 over fresh nonces of both
// sides); nothing else of it is read before. Ranks meet at a rendezvous, learn where the others
// listen, and keep one control channel to rank 0. Lanes are opened when they are first needed.
//
//   rank 0 <──control── rank r            small frames: ready, start, ping, abort, bye
//   rank r ──Links──> any rank            connections for lanes
//   rank r ──Links──> the one above it    a branch, where rank 0 does not hear of all itself
//
// Threads: one thread at a time drives a Mesh. Nothing blocks except meet() and call(), which have
// deadlines.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "weft/lane.h"

namespace weft::join {

inline constexpr uint16_t kProtocol = 6;
inline constexpr uint32_t kMaxControlBytes = 1u << 20;
inline constexpr uint32_t kMaxRanks = 4096;
inline constexpr size_t kMaxAgreement = 64;
inline constexpr uint32_t kAnyRank = 0xffffffff;

// ---- control channel ---------------------------------------------------------------------

// Types of control frames. On the wire: append, never renumber.
enum class Control : uint8_t {
  register_ = 1,  // where this rank listens
  table = 2,      // where everyone listens
  joined = 3,
  go = 4,
  probe_step = 5,
  probe_result = 6,
  ready = 7,  // a bucket is complete on this rank and all below it
  start = 8,  // operations to start, in order
  ping = 9,
  pong = 10,
  abort = 11,  // who is to blame, and why
  bye = 12,
  costs = 13,  // of all-reduces, as rank 0 knows them: all must choose alike
  query = 14,  // what is in flight? (weft status)
  answer = 15,
  owed = 16,  // who lacks a bucket for which others wait too long?
};

// Fields of control frames.
using weft::Packer;
using weft::Unpacker;

struct Frame {
  Control type;
  std::vector<std::byte> payload;
};

// Length-prefixed frames over one connection, never blocking. What arrives waits in order until
// it is taken, so that the phases of a group's life (join, probe, run) hand over without loss.
class ControlChannel final : public net::Reactor::Handler {
 public:
  ControlChannel(net::Reactor& reactor, std::unique_ptr<net::Socket> socket, Rank peer);
  ~ControlChannel() override;

  // A payload that is too long for a frame is not sent, and ends the channel with the reason.
  void send(Control type, const Packer& payload);
  std::optional<Frame> receive();
  // Ends the connection without a word, for one who has no memory for any.
  void hang_up();
  // Why the connection ended, once everything that came before is taken.
  const std::optional<Error>& failure() const { return failure_; }
  bool flushed() const { return out_.size() == out_done_; }
  Rank peer() const { return peer_; }
  void set_peer(Rank peer) { peer_ = peer; }  // its number in a new group
  std::string local_host() const;             // the address that this side has on the connection
  void on_events(uint32_t epoll_events) override;

 private:
  void write_some();
  void fail(Error error);

  net::Reactor& reactor_;
  std::unique_ptr<net::Socket> socket_;
  Rank peer_;
  std::optional<Error> failure_;
  std::vector<std::byte> out_;
  size_t out_done_ = 0;
  std::vector<std::byte> in_;
  std::deque<Frame> inbox_;
};

// ---- joining -----------------------------------------------------------------------------

// What a connection claims to be; read only after it has proved the secret.
enum class Purpose : uint8_t { control = 1, lane = 2, probe = 3, status = 4, branch = 5 };
struct Hello {
  uint16_t protocol = kProtocol;
  Purpose purpose = Purpose::control;
  uint32_t rank = 0;
  uint32_t ranks = 0;
  uint16_t lane = 0;
  uint16_t lanes = 0;
  uint8_t probe = 0;
  std::string agreement;  // what all ranks must have in common: the hash of plan and job
  std::string shared;     // lane: name of the memory that it offers; empty for none
  // Whom it means to reach: a proof that was made for one rank is worth nothing at another's door.
  uint32_t to = kAnyRank;  // status: whoever listens there
  std::string place;       // lane, probe, branch: where, as the table of members has it
  bool sealed = false;     // what follows the proof is sealed (net::seal)
  uint64_t attempt = 0;    // grows with every connection that the rank tries to open
};

// "10.0.0.1:4000" or "[::1]:4000", as in a Hello.
std::string place_of(const std::string& address, uint16_t port);

// Who listens, as callers know it.
struct Identity {
  uint32_t rank = kAnyRank;     // for all but these; kAnyRank while the group has not formed
  uint32_t control = kAnyRank;  // the root: its number among those who come to join
  std::string place;
};

// What the log says of those who were refused: a few lines a second, and then how many more.
class Refusals {
 public:
  bool may_say(Nanos now);       // one more may have a line of its own
  void count(std::string host);  // it may not
  void tick(Nanos now);
  void sum_up();

 private:
  static constexpr uint64_t kLinesPerSecond = 10;
  static constexpr size_t kHosts = 64;
  std::optional<Nanos> since_;
  uint64_t said_ = 0;
  uint64_t more_ = 0;
  std::set<std::string> hosts_;
};

// Listens, and lets in only those who prove the secret and are expected. Others are refused,
// counted and logged, and may cost those who are let in nothing (docs/wire.md, Strangers).
class Acceptor final : public net::Reactor::Handler {
 public:
  // Takes the socket of one who proved the secret, or says why it is not wanted.
  using OnConnection =
      std::function<Result<void>(std::unique_ptr<net::Socket>& socket, const Hello& hello)>;
  Acceptor(net::Network& network, net::Reactor& reactor, std::shared_ptr<net::Socket> listener,
           std::string secret, Identity identity, OnConnection on_connection);
  ~Acceptor() override;
  void on_events(uint32_t epoll_events) override;
  void set_on_connection(OnConnection on_connection) { on_connection_ = std::move(on_connection); }
  void set_identity(Identity identity) { identity_ = std::move(identity); }
  const Identity& identity() const { return identity_; }
  void tick(Nanos now);  // ends handshakes that take too long
  uint64_t refused() const { return refused_; }
  size_t unproved() const { return pending_.size(); }
  // Why this process can take nobody in at the moment, if that is so.
  const std::optional<Error>& problem() const { return problem_; }
  uint16_t port() const;
  std::string host() const { return listener_->local_host(); }
  // For another acceptor, when this one is gone: whoever calls meanwhile waits.
  std::shared_ptr<net::Socket> listener() const { return listener_; }

 private:
  class Pending;
  void watch();
  void take_callers(Nanos now);
  void rest(Nanos time);
  void lack(Error error);
  Pending* admit(std::unique_ptr<net::Socket> socket);
  void make_room(size_t source);
  bool evict(std::optional<size_t> source);
  void finish(Pending* pending, Result<Hello> outcome);
  void refuse(const net::Socket& socket, const std::string& rank, const std::string& why);

  net::Network& network_;
  net::Reactor& reactor_;
  std::shared_ptr<net::Socket> listener_;
  std::string secret_;
  Identity identity_;
  OnConnection on_connection_;
  std::deque<std::unique_ptr<Pending>> pending_;  // in the order in which they came
  std::vector<std::unique_ptr<Pending>> ended_;
  size_t places_;     // for those who are not proved
  Nanos in_hand_;     // of time for strangers
  Nanos counted_at_;  // when that was
  bool watched_ = false;
  std::optional<Nanos> rests_until_;
  Nanos besieged_until_{0};
  std::optional<Error> problem_;
  Refusals refusals_;
  uint64_t refused_ = 0;
};

struct Member {
  uint32_t rank = 0;
  std::string host;
  uint32_t host_index = 0;  // the same for ranks on one host
  std::string address;
  uint16_t port = 0;
  bool shares_memory = false;  // with this rank
};

struct Options {
  Rank rank;
  uint32_t ranks = 1;
  // "address:port" or "[v6 address]:port", where rank 0 listens; or "file:PATH", where rank 0
  // writes it, for ranks on one host.
  std::string rendezvous;
  // Rank 0, where the ranks have a way of their own to tell each other something: it listens at a
  // free port of the address that `rendezvous` is, and says which. The others are given what it
  // said.
  std::function<Result<void>(const std::string& rendezvous)> listening;
  std::string interface;  // whose address to use; empty: the one that reaches rank 0
  std::string secret;
  std::string host;       // this host's name
  std::string agreement;  // must be equal on all ranks; a rank that differs is named
  uint16_t lanes = 1;
  bool probe = true;          // open the connections that probe::measure() needs
  bool shared_memory = true;  // with ranks on this host
  bool sealed = false;        // connections, with keys made from the secret; alike on all ranks
  Nanos deadline = Nanos::from_seconds(30);
  net::Network* network = nullptr;  // null: the kernel's
};

// The connections of one rank.
struct Mesh {
  Rank rank;
  uint32_t ranks = 1;
  uint16_t lanes = 1;  // that a rank may open to another
  net::Network* network = nullptr;
  std::string secret;
  std::string agreement;
  bool sealed = false;
  std::vector<Member> members;  // by rank
  std::unique_ptr<net::Reactor> reactor;
  std::unique_ptr<Acceptor> acceptor;                    // of ranks > 1
  std::vector<std::unique_ptr<ControlChannel>> control;  // rank 0: by rank, none for itself;
                                                         // others: one, to rank 0
  std::vector<std::unique_ptr<net::Socket>> probe_out,
      probe_in;  // to the next rank, from the previous
  // Lanes and branches of faster ranks; the acceptor puts them here until Links takes over.
  std::shared_ptr<std::vector<std::pair<Hello, std::unique_ptr<net::Socket>>>> early;
  uint64_t attempts = 0;  // connections that this rank tried to open
  uint32_t next() const { return (rank.index + 1) % ranks; }
  uint32_t previous() const { return (rank.index + ranks - 1) % ranks; }
};

// Meets the others at the rendezvous. Errors name the ranks that did not come, or that came with
// another plan.
Result<Mesh> meet(const Options& options);

// Those that are left of a group that failed, and where they find each other.
struct ReunionOptions {
  Rank rank;                    // in the group that failed
  uint32_t ranks = 1;           // that it had
  std::vector<Member> members;  // of it
  std::optional<Rank> lost;     // who is not waited for
  uint32_t least = 0;           // ranks of the new group; 0: more than half of the old one
  Nanos settle = Nanos::from_seconds(5);  // how long others are waited for once there are enough
  Nanos deadline = Nanos::from_seconds(30);
  std::string secret;
  std::string host;
  std::string agreement;  // another than that of the group that failed
  uint16_t lanes = 1;
  bool sealed = false;
  bool shared_memory = true;
  net::Network* network = nullptr;  // null: the kernel's
  // This rank's, from the group that failed. Closing it and listening again would lose those who
  // call in that moment: for some the connection opens, and nobody is at the other end.
  std::shared_ptr<net::Socket> listener;
};
// Any of them meet, whichever ranks are lost, and form one group or none: reunion.cc tells how. The
// new group has the order of the old one.
Result<Mesh> meet_again(const ReunionOptions& options);

// A connection to a member of a running job, for a purpose that is not membership.
Result<std::unique_ptr<net::Socket>> call(const std::string& address, const std::string& secret,
                                          Purpose purpose, Nanos deadline);

// Opens lanes and branches to other ranks when asked, takes those that others open, and refuses
// everyone else.
class Links {
 public:
  struct Callbacks {
    // This rank opened a lane to `peer`; `shared` is what it offered.
    std::function<void(Rank peer, uint16_t lane, std::unique_ptr<net::Socket> socket,
                       std::shared_ptr<lane::shm::Segment> shared)>
        opened;
    // `peer` opened a lane to this rank. If there is one of this number, it is over: the peer has
    // seen it break, and this side perhaps has not.
    std::function<void(Rank peer, uint16_t lane, std::unique_ptr<net::Socket> socket,
                       std::shared_ptr<lane::shm::Segment> shared)>
        accepted;
    // A branch to `peer` is there, whoever opened it. One that comes again replaces the one before,
    // which its opener gave up before it used it.
    std::function<void(Rank peer, std::unique_ptr<net::Socket> socket)> branched;
    // Someone who knows the secret asks how the job is doing.
    std::function<void(std::unique_ptr<net::Socket> socket)> asked;
    // `peer` is a member and did what no member does; it was refused, and cannot stay.
    std::function<void(Rank peer, Error error)> misbehaved;
  };
  Links(Mesh& mesh, Callbacks callbacks);
  ~Links();
  // Tries until it works or it is closed. Few are tried at a time, so that a large group does
  // not look like a flood to its own members; the others wait their turn.
  void open(Rank peer, uint16_t lane);
  void open_branch(Rank peer);
  void close(Rank peer, uint16_t from);  // lanes of this number and above are not opened
  void tick(Nanos now);  // tries again what failed, and ends handshakes that take too long
  struct Attempts {
    bool waiting = false;      // for their turn: none has begun
    bool refused = false;      // nobody listens there
    std::string problem;       // why the last attempt failed; empty if none did
    std::optional<Error> own;  // the same, if that is this process's own fault
  };
  // How opening lanes to `peer` goes.
  Attempts attempts(Rank peer) const;

 private:
  struct Opening;
  Result<void> accept(std::unique_ptr<net::Socket>& socket, const Hello& hello);
  Result<void> is_latest(const Hello& hello, uint16_t lane);
  Hello hello_to(Rank peer, Purpose purpose) const;
  void begin_some(Nanos now);
  Mesh& mesh_;
  Callbacks callbacks_;
  std::vector<std::unique_ptr<Opening>> openings_;
  // By rank and lane, or kBranch: the last attempt.
  static constexpr uint16_t kBranch = 0xffff;
  std::map<std::pair<uint32_t, uint16_t>, uint64_t> accepted_;
  bool told_no_memory_ = false;
};

}  // namespace weft::join
