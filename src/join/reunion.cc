// How those that are left of a group find each other again.
//
// Everyone listens where it listened before, and calls all ranks that are lower than itself.
// Whoever reaches nobody lower leads; the others register with the lowest that they reach. So it
// does not matter which ranks are lost, and nobody has to know. The leader forms the group when all
// have come, or when `settle` has passed and there are enough. Enough is more than half of the old
// group unless the caller says otherwise: then two groups cannot form, since nobody is in both.
#include <algorithm>
#include <map>

#include "handshake.h"
#include "meeting.h"

namespace weft::join {
namespace {

constexpr Nanos kTurn = Nanos::from_millis(5);
constexpr Nanos kCallAgain = Nanos::from_millis(50);
// One that called, and does not say where it is or does not answer the table for so long, is not
// waited for any more.
constexpr Nanos kAnswer = Nanos::from_seconds(2);
// The leader shows those who wait for it that it lives; one that does not for so long leads nobody.
// Longer than an answer may take, since it waits for those in silence.
constexpr Nanos kSignOfLife = Nanos::from_millis(250);
constexpr Nanos kLeaderSilent = Nanos::from_seconds(4);

class Reunion {
 public:
  explicit Reunion(const ReunionOptions& options)
      : options_(options),
        network_(options.network != nullptr ? *options.network : net::kernel_network()),
        began_(network_.clock().now()),
        settles_from_(began_),
        last_turn_(began_),
        machine_(options.shared_memory ? network_.machine() : std::string()),
        early_(std::make_shared<EarlyLanes>()) {
    for (uint32_t rank = 0; rank < options_.rank.index; ++rank)
      if (!options_.lost || rank != options_.lost->index) lower_[rank];
  }

  Result<Mesh> run() {
    WEFT_ASSIGN(reactor_, network_.reactor());
    Identity self;
    self.control = options_.rank.index;
    self.place = place_of(options_.listener->local_host(), options_.listener->local_port());
    acceptor_ = std::make_unique<Acceptor>(
        network_, *reactor_, options_.listener, options_.secret, std::move(self),
        [this](std::unique_ptr<net::Socket>& socket, const Hello& hello) {
          return accept(socket, hello);
        });
    while (turn()) {
      if (auto leader = lowest_reached()) {
        if (auto mesh = follow(*leader)) return std::move(*mesh);
      } else if (may_form()) {
        if (auto mesh = form()) return std::move(*mesh);
        wait_anew();
      }
    }
    std::vector<uint32_t> here = {options_.rank.index};
    for (const auto& [rank, caller] : callers_)
      if (caller.member) here.push_back(rank);
    return error(Code::timeout,
                 "no new group: %s %s of %u within %s, and %u are needed so that there is only one",
                 rank_list(here).c_str(), here.size() == 1 ? "came" : "came together",
                 options_.ranks, format_duration(options_.deadline).c_str(), least());
  }

 private:
  // A rank that is lower than this one.
  struct Lower {
    std::unique_ptr<Dial> dial;
    std::unique_ptr<ControlChannel> channel;
    Nanos call_at{0};
  };
  // One that called, and what it said of itself.
  struct Caller {
    std::unique_ptr<ControlChannel> channel;
    Nanos since;
    std::optional<Member> member;
    std::string machine;
  };

  // A group that had begun to form did not: all call anew, and the first ones must not form one
  // without those who call a moment later.
  void wait_anew() { settles_from_ = network_.clock().now(); }

  uint32_t least() const { return options_.least > 0 ? options_.least : options_.ranks / 2 + 1; }

  Hello hello(uint32_t to) const {
    Hello out;
    out.to = to;
    out.sealed = options_.sealed;
    out.purpose = Purpose::control;
    out.rank = options_.rank.index;
    out.ranks = options_.ranks;
    out.lanes = options_.lanes;
    out.agreement = options_.agreement;
    return out;
  }

  Result<void> accept(std::unique_ptr<net::Socket>& socket, const Hello& peer) {
    auto refuse = [](const char* why) { return error(Code::invalid_argument, "%s", why); };
    if (peer.agreement != options_.agreement) return refuse("it belongs to another group");
    if (peer.sealed != options_.sealed) return refuse(sealed_differs(peer.sealed));
    if (peer.rank >= options_.ranks) return refuse("there is no such rank");
    // Ranks that were told to go a moment earlier.
    if (is_for_links(peer)) return keep_early(*early_, socket, peer);
    if (peer.purpose != Purpose::control || peer.rank <= options_.rank.index)
      return refuse("only higher ranks come here");
    // One that comes again has given up what it said before.
    callers_[peer.rank] =
        Caller{std::make_unique<ControlChannel>(*reactor_, std::move(socket), Rank{peer.rank}),
               network_.clock().now(),
               {},
               {}};
    return {};
  }

  // One turn of the loop; false when the deadline has passed.
  bool turn() {
    reactor_->run_once(kTurn);
    Nanos now = network_.clock().now();
    // Nobody's silence counts while this process did not run.
    stopped_for_ = suspension(now, last_turn_);
    began_ += stopped_for_;
    settles_from_ += stopped_for_;
    for (auto& [rank, caller] : callers_) caller.since += stopped_for_;
    acceptor_->tick(now);
    for (auto& [rank, lower] : lower_) {
      if (lower.channel && lower.channel->failure()) {
        // It is not there yet, or not any more.
        lower.channel.reset();
        lower.call_at = now + kCallAgain;
      }
      if (!lower.channel && !lower.dial && now >= lower.call_at) {
        const Member& member = options_.members[rank];
        lower.dial = std::make_unique<Dial>(network_, *reactor_, member.address, member.port,
                                            options_.secret, hello(rank), attempts_);
      }
      if (!lower.dial) continue;
      lower.dial->tick(now);
      if (!lower.dial->done()) continue;
      lower.channel = std::make_unique<ControlChannel>(*reactor_, lower.dial->take(), Rank{rank});
      lower.dial.reset();
    }
    for (auto place = callers_.begin(); place != callers_.end();) {
      Caller& caller = place->second;
      if (!caller.member) hear(place->first, caller);
      if (caller.member && now >= next_sign_) caller.channel->send(Control::pong, Packer());
      place = caller.channel->failure() ? callers_.erase(place) : std::next(place);
    }
    if (now >= next_sign_) next_sign_ = now + kSignOfLife;
    return now - began_ < options_.deadline;
  }

  void hear(uint32_t rank, Caller& caller) {
    auto frame = caller.channel->receive();
    if (!frame || frame->type != Control::register_) return;
    caller.member = unpack_place(frame->payload, rank, caller.machine);
  }

  // The lowest rank that answered: it is in the reunion too.
  std::optional<uint32_t> lowest_reached() const {
    for (const auto& [rank, lower] : lower_)
      if (lower.channel) return rank;
    return std::nullopt;
  }

  bool may_form() const {
    uint32_t here = 1, awaited = options_.ranks - 1 - (options_.lost ? 1 : 0);
    bool someone_comes = false;
    for (const auto& [rank, caller] : callers_) {
      here += caller.member ? 1 : 0;
      // The one that is blamed may come after all, and takes nobody's place.
      if (caller.member && options_.lost != Rank{rank}) --awaited;
      someone_comes =
          someone_comes || (!caller.member && network_.clock().now() - caller.since < kAnswer);
    }
    if (here < least()) return false;
    return awaited == 0 ||
           (!someone_comes && network_.clock().now() - settles_from_ > options_.settle);
  }

  // ---- the leader

  // Nothing if one of them left again, or fell silent: then all call anew.
  std::optional<Mesh> form() {
    Mesh mesh;
    std::vector<std::string> machines = {machine_};
    mesh.members.push_back(options_.members[options_.rank.index]);
    mesh.members[0].host = options_.host;
    mesh.control.emplace_back();
    Packer table;
    std::vector<uint32_t> old = {options_.rank.index};
    for (auto& [rank, caller] : callers_) {
      if (!caller.member) continue;
      old.push_back(rank);
      mesh.members.push_back(*caller.member);
      machines.push_back(caller.machine);
      caller.channel->set_peer({static_cast<uint32_t>(mesh.control.size())});
      mesh.control.push_back(std::move(caller.channel));
    }
    callers_.clear();
    mesh.ranks = static_cast<uint32_t>(mesh.members.size());
    number_hosts(mesh.members);
    table.number(mesh.ranks);
    for (uint32_t rank : old) table.number(rank);
    pack_members(table, mesh.members, machines);
    for (auto& channel : mesh.control)
      if (channel) channel->send(Control::table, table);
    std::vector<bool> joined(mesh.ranks, false);
    joined[0] = true;
    Nanos asked = network_.clock().now();
    while (std::count(joined.begin(), joined.end(), false) > 0) {
      bool in_time = turn();
      asked += stopped_for_;
      in_time = in_time && network_.clock().now() - asked < kAnswer;
      for (uint32_t rank = 1; rank < mesh.ranks; ++rank) {
        if (joined[rank]) continue;
        if (auto frame = mesh.control[rank]->receive())
          joined[rank] = frame->type == Control::joined;
        if (!joined[rank] && (mesh.control[rank]->failure() || !in_time)) return std::nullopt;
      }
    }
    // If this rank was stopped meanwhile, those who answered may have left it since.
    for (uint32_t rank = 1; rank < mesh.ranks; ++rank)
      if (mesh.control[rank]->failure()) return std::nullopt;
    for (uint32_t rank = 1; rank < mesh.ranks; ++rank)
      mesh.control[rank]->send(Control::go, Packer());
    return complete(std::move(mesh), machines);
  }

  // ---- the others

  // Nothing if there is somebody lower after all, or the leader is gone or silent.
  std::optional<Mesh> follow(uint32_t leader) {
    Lower& place = lower_[leader];
    Packer where;
    pack_place(where, options_.host, options_.members[options_.rank.index], machine_);
    place.channel->send(Control::register_, where);
    std::optional<Mesh> mesh;
    std::vector<std::string> machines;
    Nanos heard = network_.clock().now();
    for (;;) {
      bool in_time = turn();
      heard += stopped_for_;
      bool silent = network_.clock().now() - heard > kLeaderSilent;
      if (silent || (mesh && !place.channel)) wait_anew();
      if (!place.channel || !in_time) return std::nullopt;
      if (silent || (!mesh && lowest_reached() != leader)) {
        place.channel.reset();  // whoever led until now hears that this rank is gone
        return std::nullopt;
      }
      auto frame = place.channel->receive();
      if (!frame) continue;
      heard = network_.clock().now();
      if (frame->type == Control::pong) continue;
      if (!mesh && frame->type == Control::table) {
        mesh = read_table(*frame, machines);
        if (!mesh) break;
        place.channel->send(Control::joined, Packer());
        continue;
      }
      if (!mesh || frame->type != Control::go) break;
      place.channel->set_peer({0});
      mesh->control.push_back(std::move(place.channel));
      return complete(std::move(*mesh), machines);
    }
    place.channel.reset();  // it says what it must not
    return std::nullopt;
  }

  std::optional<Mesh> read_table(const Frame& frame, std::vector<std::string>& machines) const {
    Unpacker fields(frame.payload);
    Mesh mesh;
    mesh.ranks = fields.number<uint32_t>();
    if (mesh.ranks > options_.ranks) return std::nullopt;
    bool named = false;
    for (uint32_t rank = 0; rank < mesh.ranks; ++rank) {
      if (fields.number<uint32_t>() != options_.rank.index) continue;
      mesh.rank = {rank};
      named = true;
    }
    mesh.members = unpack_members(fields, mesh.ranks, machines);
    if (!named || !fields.complete()) return std::nullopt;
    return mesh;
  }

  std::optional<Mesh> complete(Mesh mesh, const std::vector<std::string>& machines) {
    mesh.network = &network_;
    mesh.lanes = options_.lanes;
    mesh.sealed = options_.sealed;
    mesh.attempts = attempts_;
    mesh.secret = options_.secret;
    mesh.agreement = options_.agreement;
    for (uint32_t rank = 0; rank < mesh.ranks; ++rank) mesh.members[rank].rank = rank;
    find_sharers(mesh, machines, options_.host);
    lower_.clear();
    callers_.clear();
    mesh.early = early_;
    mesh.acceptor = std::move(acceptor_);
    open_to_members(mesh);
    mesh.reactor = std::move(reactor_);
    return mesh;
  }

  const ReunionOptions& options_;
  net::Network& network_;
  Nanos began_;
  Nanos settles_from_;
  Nanos next_sign_{0};
  Nanos last_turn_;
  Nanos stopped_for_{0};  // before the last turn
  std::string machine_;
  uint64_t attempts_ = 0;
  std::unique_ptr<net::Reactor> reactor_;
  std::shared_ptr<EarlyLanes> early_;
  std::unique_ptr<Acceptor> acceptor_;
  std::map<uint32_t, Lower> lower_;
  std::map<uint32_t, Caller> callers_;
};

}  // namespace

Result<Mesh> meet_again(const ReunionOptions& options) {
  if (options.least > options.ranks)
    return error(Code::invalid_argument, "at least %u of %u ranks cannot come", options.least,
                 options.ranks);
  return Reunion(options).run();
}

}  // namespace weft::join
