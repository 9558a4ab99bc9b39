#include <algorithm>
#include <map>

#include "handshake.h"
#include "meeting.h"
#include "rendezvous.h"
#include "weft/join.h"
#include "weft/net.h"

namespace weft::join {
namespace {

constexpr Nanos kTurn = Nanos::from_millis(5);
constexpr Nanos kGrace = Nanos::from_seconds(2);
constexpr Nanos kCallsAgain = Nanos::from_millis(500);  // ten times what a caller waits
constexpr uint16_t kProbeFlows = 16;

class Joiner {
 public:
  explicit Joiner(const Options& options)
      : options_(options),
        network_(options.network != nullptr ? *options.network : net::kernel_network()),
        deadline_(network_.clock().now() + options.deadline),
        last_turn_(network_.clock().now()),
        machine_(options.shared_memory ? network_.machine() : std::string()),
        file_(options.rendezvous.starts_with(kFile) ? options.rendezvous.substr(kFile.size())
                                                    : std::string()),
        registered_(options.ranks, false),
        gone_since_(options.ranks) {
    mesh_.rank = options.rank;
    mesh_.ranks = options.ranks;
    mesh_.lanes = options.lanes;
    mesh_.network = &network_;
    mesh_.secret = options.secret;
    mesh_.agreement = options.agreement;
    mesh_.sealed = options.sealed;
    mesh_.members.resize(options.ranks);
    mesh_.early = std::make_shared<EarlyLanes>();
    mesh_.control.resize(is_root() ? options.ranks : 1);
    probe_flows_ = options.probe ? kProbeFlows : 0;
    mesh_.probe_out.resize(probe_flows_);
    mesh_.probe_in.resize(probe_flows_);
  }

  // Whatever ended it: an error, or memory that ran out.
  ~Joiner() { remove_file(); }
  Joiner(const Joiner&) = delete;
  Joiner& operator=(const Joiner&) = delete;

  Result<Mesh> run() {
    WEFT_ASSIGN(mesh_.reactor, network_.reactor());
    auto met = is_root() ? gather() : register_with_root();
    if (met && mesh_.ranks > 1) met = open_probe();
    if (met) met = agree_to_go();
    if (!met) {
      // Everyone who came learns why, instead of waiting for a deadline.
      if (is_root()) tell_all(met.error());
      remove_file();
      return std::move(met).error();
    }
    open_to_members(mesh_);
    return std::move(mesh_);
  }

 private:
  bool is_root() const { return options_.rank.index == 0; }

  Hello hello(Purpose purpose, uint16_t lane, uint32_t to) const {
    Hello out;
    out.to = to;
    out.purpose = purpose;
    out.rank = options_.rank.index;
    out.ranks = options_.ranks;
    out.lane = lane;
    out.lanes = options_.lanes;
    out.probe = options_.probe ? 1 : 0;
    out.agreement = options_.agreement;
    out.sealed = options_.sealed;
    return out;
  }

  // One turn of the loop; false when the deadline, and `grace`, have passed.
  bool turn(Nanos grace = {0}) {
    mesh_.reactor->run_once(kTurn);
    Nanos now = network_.clock().now();
    Nanos stood = suspension(now, last_turn_);
    deadline_ += stood;
    suspended_ += stood;
    if (mesh_.acceptor) mesh_.acceptor->tick(now);
    for (auto& dial : dials_) dial->tick(now);
    return now < deadline_ + grace;
  }

  Error late(const std::string& what) const {
    std::string words = text("joining took longer than %s: %s",
                             format_duration(options_.deadline).c_str(), what.c_str());
    // They may have come, and found no place.
    if (mesh_.acceptor && mesh_.acceptor->problem())
      return {Code::io, words + "; this rank " + mesh_.acceptor->problem()->message()};
    return {Code::timeout, std::move(words)};
  }

  Result<void> accept(std::unique_ptr<net::Socket>& socket, const Hello& peer) {
    auto refuse = [](const char* why) { return error(Code::invalid_argument, "%s", why); };
    if (peer.rank >= options_.ranks || peer.rank == options_.rank.index)
      return refuse("it is not one of the other ranks");
    // Of a control channel that is said to everyone (compare()).
    if (peer.purpose != Purpose::control && peer.sealed != options_.sealed)
      return refuse(sealed_differs(peer.sealed));
    if (peer.purpose == Purpose::control) {
      if (!is_root()) return refuse("control channels go to rank 0");
      if (formed_) return refuse("the group has formed without it");
      if (registered_[peer.rank]) return refuse("that rank is here already");
      // One that calls again before it was heard has given up the connection that it had.
      gone_since_[peer.rank].reset();
      hellos_[peer.rank] = peer;
      mesh_.control[peer.rank] =
          std::make_unique<ControlChannel>(*mesh_.reactor, std::move(socket), Rank{peer.rank});
      return {};
    }
    // Another rank may be told to go a moment before this one.
    if (is_for_links(peer)) return keep_early(*mesh_.early, socket, peer);
    if (peer.purpose != Purpose::probe) return refuse("the group is not complete yet");
    if (peer.rank != mesh_.previous()) return refuse("it is not the previous rank of the ring");
    auto& places = mesh_.probe_in;
    if (peer.lane >= places.size() || places[peer.lane]) return refuse("no such lane is missing");
    places[peer.lane] = std::move(socket);
    return {};
  }

  Result<void> listen(const std::string& host, uint16_t port) {
    WEFT_ASSIGN(std::unique_ptr<net::Socket> listener, network_.listen(host, port));
    accept_from(std::move(listener));
    return {};
  }

  void accept_from(std::shared_ptr<net::Socket> listener) {
    Identity self;
    if (is_root()) self.control = options_.rank.index;
    self.place = place_of(listener->local_host(), listener->local_port());
    mesh_.acceptor = std::make_unique<Acceptor>(
        network_, *mesh_.reactor, std::move(listener), options_.secret, std::move(self),
        [this](std::unique_ptr<net::Socket>& socket, const Hello& peer) {
          return accept(socket, peer);
        });
  }

  // ---- where rank 0 is

  bool by_file() const { return !file_.empty(); }

  void remove_file() {
    rendezvous::remove(network_.system().files(), file_, std::exchange(written_, {}));
  }

  // Others: where rank 0 listens; empty while that is not known. A file may be one that an earlier
  // group left behind, so it is read again until rank 0 is reached.
  Result<std::string> root_address() {
    if (!by_file()) return options_.rendezvous;
    return rendezvous::read(network_.system().files(), file_);
  }

  Result<void> reach_root() {
    std::string address;
    while (dials_.empty() || !dials_[0]->done()) {
      WEFT_ASSIGN(std::string now, root_address());
      if (now != address && !now.empty()) {
        WEFT_ASSIGN(net::HostPort root, net::split(now));
        // A name that cannot be found will not be found later either.
        if (options_.network == nullptr) WEFT_TRY(net::find_host(root.host));
        dials_.clear();
        dial(root.host, root.port, hello(Purpose::control, 0, 0));
        address = now;
      }
      if (turn()) continue;
      if (dials_.empty())
        return late("rank 0 did not write " + file_ + ", or gave up and took it away again");
      return late(text("rank 0 at %s was not reached: %s", address.c_str(), problem(*dials_[0])));
    }
    return {};
  }

  void dial(const std::string& host, uint16_t port, Hello hello) {
    dials_.push_back(std::make_unique<Dial>(network_, *mesh_.reactor, host, port, options_.secret,
                                            std::move(hello), mesh_.attempts));
    dials_.back()->tick(network_.clock().now());
  }

  static const char* problem(const Dial& dial) {
    return dial.last_problem().empty() ? "no answer" : dial.last_problem().c_str();
  }

  // What a rank must have in common with rank 0.
  Result<void> compare(const Hello& peer) const {
    if (peer.ranks != options_.ranks)
      return error(Code::invalid_argument, "rank %u was started for %u ranks, rank 0 for %u",
                   peer.rank, peer.ranks, options_.ranks);
    if (peer.agreement != options_.agreement)
      return error(
          Code::invalid_argument,
          "rank %u differs: it has plan and job %s, rank 0 has %s; all ranks need the same "
          "plan and the same tensors",
          peer.rank, peer.agreement.c_str(), options_.agreement.c_str());
    if (peer.sealed != options_.sealed)
      return error(Code::invalid_argument,
                   "rank %u was started with WEFT_SEAL=%d, rank 0 with WEFT_SEAL=%d: set it alike "
                   "on all ranks",
                   peer.rank, peer.sealed ? 1 : 0, options_.sealed ? 1 : 0);
    if (peer.lanes != options_.lanes || (peer.probe != 0) != options_.probe)
      return error(Code::invalid_argument, "rank %u was started with other options than rank 0",
                   peer.rank);
    return {};
  }

  // Rank 0: waits for all others to come and say where they listen.
  Result<void> gather() {
    net::HostPort place{"127.0.0.1", 0};
    if (!by_file()) {
      WEFT_ASSIGN(place, net::split(options_.rendezvous));
    }
    WEFT_TRY(listen(place.host, place.port));
    if (by_file()) {
      WEFT_ASSIGN(written_,
                  rendezvous::write(network_.system(), file_,
                                    text("127.0.0.1:%u", unsigned{mesh_.acceptor->port()})));
    }
    mesh_.members[0] = {0, options_.host, 0, mesh_.acceptor->host(), mesh_.acceptor->port()};
    machines_.resize(options_.ranks);
    machines_[0] = machine_;
    registered_[0] = true;
    std::optional<Error> differs;
    for (;;) {
      std::vector<uint32_t> absent;
      std::optional<uint32_t> left;
      for (uint32_t r = 1; r < options_.ranks; ++r) {
        ControlChannel* channel = mesh_.control[r].get();
        if (channel != nullptr && !registered_[r]) {
          // The reason is kept until all are here to hear it.
          if (auto same = compare(hellos_[r]); !same && !differs) differs = same.error();
          if (auto frame = channel->receive()) {
            auto member = unpack_place(frame->payload, r, machines_[r]);
            if (frame->type != Control::register_ || !member)
              return error(Code::corrupt, "rank %u sent something else than where it listens", r);
            mesh_.members[r] = *member;
            registered_[r] = true;
          }
        }
        if (!registered_[r]) absent.push_back(r);
        if (channel == nullptr || !channel->failure()) continue;
        // One that was not heard yet may have waited too long for an answer, because this rank was
        // stopped: then it calls again.
        bool may_come = !registered_[r] && channel->failure()->code() == Code::peer_lost;
        if (!gone_since_[r]) gone_since_[r] = network_.clock().now();
        if (!may_come || network_.clock().now() - *gone_since_[r] > kCallsAgain) left = r;
      }
      if (left) return left_early(*mesh_.control[*left], absent);
      if (absent.empty()) break;
      if (!turn()) return differs ? *differs : late(rank_list(absent) + " did not come");
    }
    if (differs) return *differs;
    number_hosts(mesh_.members);
    remove_file();
    Packer table;
    pack_members(table, mesh_.members, machines_);
    if (table.bytes().size() > kMaxControlBytes)
      return error(Code::invalid_argument, "the names of %u hosts are too long for one table",
                   options_.ranks);
    for (auto& channel : mesh_.control)
      if (channel) channel->send(Control::table, table);
    formed_ = true;
    find_sharers(mesh_, machines_, options_.host);
    return {};
  }

  // The frame that rank 0 sends next, or its reason for ending the group.
  Result<Frame> from_root(Control expected, const std::string& waiting_for) {
    ControlChannel& root = *mesh_.control[0];
    for (;;) {
      if (auto frame = root.receive()) {
        if (frame->type == Control::abort) {
          Unpacker fields(frame->payload);
          auto code = fields.number<uint8_t>();
          fields.number<uint32_t>();
          std::string reason = fields.string();
          return Error(code_from(code), reason);
        }
        if (frame->type != expected)
          return error(Code::corrupt, "rank 0 sent frame %u while joining",
                       static_cast<unsigned>(frame->type));
        return std::move(*frame);
      }
      if (root.failure()) return left_early(root, {});
      // Rank 0 has the same deadline, and can say who is missing.
      if (!turn(kGrace)) return late(waiting_for);
    }
  }

  Result<void> register_with_root() {
    WEFT_TRY(reach_root());
    mesh_.control[0] = std::make_unique<ControlChannel>(*mesh_.reactor, dials_[0]->take(), Rank{0});
    dials_.clear();

    // The address that reaches rank 0 is the one that the others can reach.
    std::string own = mesh_.control[0]->local_host();
    if (!options_.interface.empty()) {
      WEFT_ASSIGN(own, net::address_of_interface(options_.interface, own));
    }
    WEFT_TRY(listen(own, 0));
    Packer place;
    pack_place(place, options_.host, {0, {}, 0, own, mesh_.acceptor->port()}, machine_);
    mesh_.control[0]->send(Control::register_, place);

    // Rank 0 names who is missing; if it does not, it is the one.
    WEFT_ASSIGN(Frame frame, from_root(Control::table, "rank 0 says neither who is here nor why"));
    Unpacker fields(frame.payload);
    mesh_.members = unpack_members(fields, mesh_.ranks, machines_);
    if (!fields.complete()) return error(Code::corrupt, "rank 0 sent a table of other ranks");
    find_sharers(mesh_, machines_, options_.host);
    return {};
  }

  // The probe's connections, to the next rank and from the previous one.
  Result<void> open_probe() {
    if (probe_flows_ == 0) return {};
    const Member& next = mesh_.members[mesh_.next()];
    for (uint16_t lane = 0; lane < probe_flows_; ++lane) {
      Hello words = hello(Purpose::probe, lane, mesh_.next());
      words.place = place_of(next.address, next.port);
      dial(next.address, next.port, std::move(words));
    }
    for (;;) {
      bool out = std::all_of(dials_.begin(), dials_.end(), [](auto& dial) { return dial->done(); });
      bool in = std::all_of(mesh_.probe_in.begin(), mesh_.probe_in.end(),
                            [](const auto& socket) { return socket != nullptr; });
      if (out && in) break;
      if (!turn()) {
        if (!out)
          for (auto& dial : dials_)
            if (!dial->done())
              return late(text("rank %u was not reached: %s", mesh_.next(), problem(*dial)));
        return late(text("rank %u did not open its connections", mesh_.previous()));
      }
      WEFT_TRY(others_are_here());
    }
    for (size_t i = 0; i < dials_.size(); ++i) mesh_.probe_out[i] = dials_[i]->take();
    dials_.clear();
    return {};
  }

  // It may have waited in vain for others, or for this rank.
  Error left_early(const ControlChannel& channel, std::vector<uint32_t> absent) const {
    std::erase(absent, channel.peer().index);
    // What this process may not have more of is nobody else's fault.
    if (channel.failure()->code() == Code::io)
      return error(Code::io, "rank %u: %s", options_.rank.index,
                   channel.failure()->message().c_str());
    std::string words = text("rank %u left while the group was forming: %s", channel.peer().index,
                             channel.failure()->message().c_str());
    if (!absent.empty()) words += "; " + rank_list(absent) + " had not come";
    if (suspended_.count > 0)
      words += text("; rank %u did not run for %s", options_.rank.index,
                    format_duration(suspended_).c_str());
    return {Code::peer_lost, std::move(words)};
  }

  Result<void> others_are_here() const {
    for (const auto& channel : mesh_.control)
      if (channel && channel->failure()) return left_early(*channel, {});
    return {};
  }

  Result<void> agree_to_go() {
    if (!is_root()) {
      mesh_.control[0]->send(Control::joined, Packer());
      auto frame = from_root(Control::go, "rank 0 did not see all ranks joined");
      if (!frame) return std::move(frame).error();
      return {};
    }
    std::vector<bool> joined(mesh_.ranks, false);
    joined[0] = true;
    for (;;) {
      std::vector<uint32_t> absent;
      for (uint32_t r = 1; r < mesh_.ranks; ++r) {
        if (joined[r]) continue;
        if (auto frame = mesh_.control[r]->receive()) {
          if (frame->type != Control::joined)
            return error(Code::corrupt, "rank %u sent frame %u while joining", r,
                         static_cast<unsigned>(frame->type));
          joined[r] = true;
          continue;
        }
        absent.push_back(r);
      }
      if (absent.empty()) break;
      WEFT_TRY(others_are_here());
      if (!turn()) return late(rank_list(absent) + " did not open all connections");
    }
    for (uint32_t r = 1; r < mesh_.ranks; ++r) mesh_.control[r]->send(Control::go, Packer());
    return {};
  }

  void tell_all(const Error& failure) {
    Packer reason;
    reason.number(static_cast<uint8_t>(failure.code())).number(trace::kNone);
    reason.string(failure.message());
    std::vector<bool> told(mesh_.control.size(), false);
    // They close when they have read it; closing first could take the words back. Some are still
    // on their way here.
    Nanos until = network_.clock().now() + Nanos::from_seconds(1);
    for (bool open = true; open && network_.clock().now() < until;) {
      open = false;
      for (size_t r = 0; r < told.size(); ++r) {
        ControlChannel* channel = mesh_.control[r].get();
        if (channel != nullptr && !told[r]) channel->send(Control::abort, reason);
        told[r] = channel != nullptr;
        bool absent = channel == nullptr && r != mesh_.rank.index;
        open = open || absent || (channel != nullptr && !channel->failure());
      }
      mesh_.reactor->run_once(kTurn);
    }
  }

  static constexpr std::string_view kFile = "file:";

  const Options& options_;
  net::Network& network_;
  Nanos deadline_;
  Nanos last_turn_;
  Nanos suspended_{0};
  std::string machine_;
  std::vector<std::string> machines_;  // by rank
  std::string file_;                   // where rank 0 says where it listens; empty: that is known
  std::vector<bool> registered_;       // rank 0, by rank: it has said where it listens
  std::vector<std::optional<Nanos>> gone_since_;
  Mesh mesh_;
  rendezvous::Written written_;  // rank 0
  bool formed_ = false;          // rank 0: nobody else is let in
  uint16_t probe_flows_ = 0;
  std::map<uint32_t, Hello> hellos_;
  std::vector<std::unique_ptr<Dial>> dials_;
};

}  // namespace

Result<Mesh> meet(const Options& options) {
  if (options.ranks == 0 || options.ranks > kMaxRanks || options.rank.index >= options.ranks)
    return error(Code::invalid_argument, "rank %u of %u is not possible", options.rank.index,
                 options.ranks);
  if (options.secret.empty())
    return error(Code::invalid_argument, "a group needs a secret; set WEFT_SECRET");
  if (options.agreement.size() > kMaxAgreement)
    return error(Code::invalid_argument,
                 "the agreement has %zu characters; at most %zu are possible",
                 options.agreement.size(), kMaxAgreement);
  if (options.ranks == 1) {
    Mesh alone;
    alone.rank = options.rank;
    alone.network = options.network != nullptr ? options.network : &net::kernel_network();
    alone.members = {{0, options.host, 0, "", 0}};
    WEFT_ASSIGN(alone.reactor, alone.network->reactor());
    return alone;
  }
  auto mesh = Joiner(options).run();
  if (!mesh) return std::move(mesh).error().in("join");
  return mesh;
}

Result<std::unique_ptr<net::Socket>> call(const std::string& address, const std::string& secret,
                                          Purpose purpose, Nanos deadline) {
  WEFT_ASSIGN(net::HostPort place, net::split(address));
  net::Network& network = net::kernel_network();
  WEFT_ASSIGN(auto reactor, network.reactor());
  Hello hello;
  hello.purpose = purpose;
  hello.sealed = true;  // whatever the job does: what is told may name hosts and tensors
  uint64_t attempts = 0;
  Dial dial(network, *reactor, place.host, place.port, secret, hello, attempts);
  Nanos until = network.clock().now() + deadline;
  while (!dial.done()) {
    if (network.clock().now() > until)
      return error(Code::timeout, "%s was not reached within %s: %s", address.c_str(),
                   format_duration(deadline).c_str(), dial.last_problem().c_str());
    dial.tick(network.clock().now());
    reactor->run_once(kTurn);
  }
  return dial.take();
}

}  // namespace weft::join
