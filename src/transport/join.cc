#include <netinet/in.h>

#include <algorithm>
#include <map>

#include "tcp/handshake.h"
#include "tcp/socket.h"
#include "weft/transport.h"

namespace weft::transport {
namespace {

constexpr Nanos kTurn = Nanos::from_millis(5);
constexpr uint16_t kProbeFlows = 16;

// "rank 2", "ranks 1, 4 and 7", and not a page of them.
std::string rank_list(const std::vector<uint32_t>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size() && i < 8; ++i) {
    if (i > 0) out += i + 1 == ranks.size() ? " and " : ", ";
    out += std::to_string(ranks[i]);
  }
  if (ranks.size() > 8) out += text(" and %zu more", ranks.size() - 8);
  return out;
}

class Joiner {
 public:
  explicit Joiner(const JoinOptions& options)
      : options_(options), deadline_(monotonic_clock().now() + options.deadline) {
    mesh_.rank = options.rank;
    mesh_.ranks = options.ranks;
    mesh_.reactor = std::make_unique<Reactor>();
    mesh_.members.resize(options.ranks);
    mesh_.control.resize(options.rank.index == 0 ? options.ranks : 1);
    mesh_.lanes_out.resize(options.lanes);
    mesh_.lanes_in.resize(options.lanes);
    probe_flows_ = options.probe ? kProbeFlows : 0;
    mesh_.probe_out.resize(probe_flows_);
    mesh_.probe_in.resize(probe_flows_);
  }

  Result<Mesh> run() {
    auto met = is_root() ? gather() : register_with_root();
    if (met) met = open_lanes();
    if (met) met = agree_to_go();
    if (!met) {
      // Everyone who came learns why, instead of waiting for a deadline.
      if (is_root()) tell_all(met.error());
      return std::move(met).error();
    }
    mesh_.acceptor->set_on_connection([](Fd&, const Hello&) -> Result<void> {
      return error(Code::invalid_argument, "the group is complete");
    });
    return std::move(mesh_);
  }

 private:
  bool is_root() const { return options_.rank.index == 0; }

  Hello hello(Purpose purpose, uint16_t lane) const {
    Hello out;
    out.purpose = purpose;
    out.rank = options_.rank.index;
    out.ranks = options_.ranks;
    out.lane = lane;
    out.lanes = options_.lanes;
    out.probe = options_.probe ? 1 : 0;
    out.agreement = options_.agreement;
    return out;
  }

  // One turn of the loop; false when the deadline has passed.
  bool turn() {
    mesh_.reactor->run_once(kTurn);
    Nanos now = monotonic_clock().now();
    if (mesh_.acceptor) mesh_.acceptor->tick(now);
    for (auto& dial : dials_) dial->tick(now);
    return now < deadline_;
  }

  Error late(const std::string& what) const {
    return error(Code::timeout, "joining took longer than %s: %s",
                 format_duration(options_.deadline).c_str(), what.c_str());
  }

  Result<void> accept(Fd& socket, const Hello& peer) {
    auto refuse = [](const char* why) { return error(Code::invalid_argument, "%s", why); };
    if (peer.rank >= options_.ranks || peer.rank == options_.rank.index)
      return refuse("it is not one of the other ranks");
    if (peer.purpose == Purpose::control) {
      if (!is_root()) return refuse("control channels go to rank 0");
      if (mesh_.control[peer.rank]) return refuse("that rank is here already");
      hellos_[peer.rank] = peer;
      mesh_.control[peer.rank] =
          std::make_unique<ControlChannel>(*mesh_.reactor, std::move(socket), Rank{peer.rank});
      return {};
    }
    if (peer.rank != mesh_.previous()) return refuse("it is not the previous rank of the ring");
    auto& places = peer.purpose == Purpose::lane ? mesh_.lanes_in : mesh_.probe_in;
    if (peer.lane >= places.size() || places[peer.lane]) return refuse("no such lane is missing");
    places[peer.lane] = std::move(socket);
    return {};
  }

  Result<void> listen(const sockaddr_in& address) {
    WEFT_ASSIGN(Fd listener, tcp::listen_on(address));
    mesh_.acceptor = std::make_unique<Acceptor>(
        *mesh_.reactor, std::move(listener), options_.secret,
        [this](Fd& socket, const Hello& peer) { return accept(socket, peer); });
    return {};
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
    if (peer.lanes != options_.lanes || (peer.probe != 0) != options_.probe)
      return error(Code::invalid_argument, "rank %u was started with other options than rank 0",
                   peer.rank);
    return {};
  }

  // Rank 0: waits for all others to come and say where they listen.
  Result<void> gather() {
    WEFT_ASSIGN(sockaddr_in address, tcp::resolve(options_.rendezvous));
    WEFT_TRY(listen(address));
    std::string own = tcp::to_text(address);
    mesh_.members[0] = {0, options_.host, 0, own.substr(0, own.rfind(':')), mesh_.acceptor->port()};
    std::vector<bool> registered(options_.ranks, false);
    registered[0] = true;
    std::optional<Error> differs;
    for (;;) {
      std::vector<uint32_t> absent;
      for (uint32_t r = 1; r < options_.ranks; ++r) {
        ControlChannel* channel = mesh_.control[r].get();
        if (channel != nullptr && !registered[r]) {
          // The reason is kept until all are here to hear it.
          if (auto same = compare(hellos_[r]); !same && !differs) differs = same.error();
          if (auto frame = channel->receive()) {
            Unpacker fields(frame->payload);
            Member member{r, fields.string(), 0, fields.string(), fields.number<uint16_t>()};
            if (frame->type != Control::register_ || !fields.complete())
              return error(Code::corrupt, "rank %u sent something else than where it listens", r);
            mesh_.members[r] = member;
            registered[r] = true;
          }
        }
        if (channel != nullptr && channel->failure())
          return error(Code::peer_lost, "rank %u left while the group was forming: %s", r,
                       channel->failure()->message().c_str());
        if (!registered[r]) absent.push_back(r);
      }
      if (absent.empty()) break;
      if (!turn()) return differs ? *differs : late(rank_list(absent) + " did not come");
    }
    if (differs) return *differs;
    std::map<std::string, uint32_t> hosts;
    for (Member& member : mesh_.members)
      member.host_index =
          hosts.emplace(member.host, static_cast<uint32_t>(hosts.size())).first->second;
    Packer table;
    for (const Member& member : mesh_.members)
      table.string(member.host)
          .number(member.host_index)
          .string(member.address)
          .number(member.port);
    for (uint32_t r = 1; r < options_.ranks; ++r) mesh_.control[r]->send(Control::table, table);
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
          return Error(static_cast<Code>(std::clamp<uint8_t>(code, 1, 8)), reason);
        }
        if (frame->type != expected)
          return error(Code::corrupt, "rank 0 sent frame %u while joining",
                       static_cast<unsigned>(frame->type));
        return std::move(*frame);
      }
      if (root.failure())
        return error(Code::peer_lost, "rank 0 left while the group was forming: %s",
                     root.failure()->message().c_str());
      if (!turn()) return late(waiting_for);
    }
  }

  Result<void> register_with_root() {
    WEFT_ASSIGN(sockaddr_in address, tcp::resolve(options_.rendezvous));
    dials_.push_back(std::make_unique<tcp::Dial>(*mesh_.reactor, address, options_.secret,
                                                 hello(Purpose::control, 0)));
    while (!dials_[0]->done())
      if (!turn())
        return late(text("rank 0 at %s was not reached: %s", options_.rendezvous.c_str(),
                         dials_[0]->last_problem().c_str()));
    mesh_.control[0] = std::make_unique<ControlChannel>(*mesh_.reactor, dials_[0]->take(), Rank{0});
    dials_.clear();

    // The address that reaches rank 0 is the one that the others can reach.
    WEFT_ASSIGN(sockaddr_in own, tcp::resolve(mesh_.control[0]->local_host(), 0));
    WEFT_TRY(listen(own));
    Packer place;
    place.string(options_.host)
        .string(mesh_.control[0]->local_host())
        .number(mesh_.acceptor->port());
    mesh_.control[0]->send(Control::register_, place);

    WEFT_ASSIGN(Frame frame, from_root(Control::table, "other ranks did not come to rank 0"));
    Unpacker fields(frame.payload);
    for (uint32_t r = 0; r < options_.ranks; ++r) {
      Member& member = mesh_.members[r];
      member.rank = r;
      member.host = fields.string();
      member.host_index = fields.number<uint32_t>();
      member.address = fields.string();
      member.port = fields.number<uint16_t>();
    }
    if (!fields.complete()) return error(Code::corrupt, "rank 0 sent a table of other ranks");
    return {};
  }

  Result<void> open_lanes() {
    if (options_.ranks == 1) return {};
    const Member& next = mesh_.members[mesh_.next()];
    WEFT_ASSIGN(sockaddr_in address, tcp::resolve(next.address, next.port));
    for (uint16_t lane = 0; lane < options_.lanes; ++lane)
      dials_.push_back(std::make_unique<tcp::Dial>(*mesh_.reactor, address, options_.secret,
                                                   hello(Purpose::lane, lane)));
    for (uint16_t lane = 0; lane < probe_flows_; ++lane)
      dials_.push_back(std::make_unique<tcp::Dial>(*mesh_.reactor, address, options_.secret,
                                                   hello(Purpose::probe, lane)));
    auto present = [](const std::vector<Fd>& places) {
      return std::all_of(places.begin(), places.end(), [](const Fd& fd) { return bool(fd); });
    };
    for (;;) {
      bool out = std::all_of(dials_.begin(), dials_.end(), [](auto& dial) { return dial->done(); });
      bool in = present(mesh_.lanes_in) && present(mesh_.probe_in);
      if (out && in) break;
      if (!turn()) {
        if (!out)
          for (auto& dial : dials_)
            if (!dial->done())
              return late(
                  text("rank %u was not reached: %s", mesh_.next(), dial->last_problem().c_str()));
        return late(text("rank %u did not open its lanes", mesh_.previous()));
      }
      WEFT_TRY(others_are_here());
    }
    for (size_t i = 0; i < dials_.size(); ++i) {
      bool is_lane = i < options_.lanes;
      (is_lane ? mesh_.lanes_out[i] : mesh_.probe_out[i - options_.lanes]) = dials_[i]->take();
    }
    dials_.clear();
    return {};
  }

  Result<void> others_are_here() const {
    for (const auto& channel : mesh_.control)
      if (channel && channel->failure())
        return error(Code::peer_lost, "rank %u left while the group was forming: %s",
                     channel->peer().index, channel->failure()->message().c_str());
    return {};
  }

  Result<void> agree_to_go() {
    if (!is_root()) {
      mesh_.control[0]->send(Control::joined, Packer());
      auto frame = from_root(Control::go, "rank 0 did not see all ranks joined");
      if (!frame) return std::move(frame).error();
      return {};
    }
    std::vector<bool> joined(options_.ranks, false);
    joined[0] = true;
    for (;;) {
      std::vector<uint32_t> absent;
      for (uint32_t r = 1; r < options_.ranks; ++r) {
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
      if (!turn()) return late(rank_list(absent) + " did not open all lanes");
    }
    for (uint32_t r = 1; r < options_.ranks; ++r) mesh_.control[r]->send(Control::go, Packer());
    return {};
  }

  void tell_all(const Error& failure) {
    Packer reason;
    reason.number(static_cast<uint8_t>(failure.code())).number(trace::kNone);
    reason.string(failure.message());
    for (auto& channel : mesh_.control)
      if (channel) channel->send(Control::abort, reason);
    // They close when they have read it; closing first could take the words back.
    Nanos until = monotonic_clock().now() + Nanos::from_seconds(1);
    for (bool open = true; open && monotonic_clock().now() < until;) {
      mesh_.reactor->run_once(kTurn);
      open = false;
      for (auto& channel : mesh_.control) open = open || (channel && !channel->failure());
    }
  }

  const JoinOptions& options_;
  Nanos deadline_;
  Mesh mesh_;
  uint16_t probe_flows_ = 0;
  std::map<uint32_t, Hello> hellos_;
  std::vector<std::unique_ptr<tcp::Dial>> dials_;
};

}  // namespace

Result<Mesh> join(const JoinOptions& options) {
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
    alone.members = {{0, options.host, 0, "", 0}};
    alone.reactor = std::make_unique<Reactor>();
    return alone;
  }
  auto mesh = Joiner(options).run();
  if (!mesh) return std::move(mesh).error().in("join");
  return mesh;
}

}  // namespace weft::transport
