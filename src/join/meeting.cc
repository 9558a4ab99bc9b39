#include "meeting.h"

#include <map>

namespace weft::join {
namespace {

constexpr size_t kEarlyLanes = 4096;
constexpr size_t kMaxWords = 1024;  // of a rank about itself

constexpr Nanos kSuspended = Nanos::from_seconds(1);

}  // namespace

Nanos suspension(Nanos now, Nanos& last_turn) {
  Nanos before = std::exchange(last_turn, now);
  return now - before < kSuspended ? Nanos{0} : now - before;
}

std::string rank_list(const std::vector<uint32_t>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size() && i < 8; ++i) {
    if (i > 0) out += i + 1 == ranks.size() ? " and " : ", ";
    out += std::to_string(ranks[i]);
  }
  if (ranks.size() > 8) out += text(" and %zu more", ranks.size() - 8);
  return out;
}

void pack_place(Packer& words, const std::string& host, const Member& member,
                const std::string& machine) {
  words.string(host).string(member.address).number(member.port).string(machine);
}

std::optional<Member> unpack_place(std::span<const std::byte> words, uint32_t rank,
                                   std::string& machine) {
  Unpacker fields(words);
  Member member{rank, fields.string(), 0, fields.string(), fields.number<uint16_t>()};
  machine = fields.string();
  if (!fields.complete() || member.host.size() + member.address.size() + machine.size() > kMaxWords)
    return std::nullopt;
  return member;
}

void number_hosts(std::vector<Member>& members) {
  std::map<std::string, uint32_t> hosts;
  for (Member& member : members)
    member.host_index =
        hosts.emplace(member.host, static_cast<uint32_t>(hosts.size())).first->second;
}

void pack_members(Packer& table, const std::vector<Member>& members,
                  const std::vector<std::string>& machines) {
  for (size_t rank = 0; rank < members.size(); ++rank)
    table.string(members[rank].host)
        .number(members[rank].host_index)
        .string(members[rank].address)
        .number(members[rank].port)
        .string(machines[rank]);
}

std::vector<Member> unpack_members(Unpacker& table, uint32_t ranks,
                                   std::vector<std::string>& machines) {
  std::vector<Member> members;
  for (uint32_t rank = 0; rank < ranks && !table.failed(); ++rank) {
    Member member;
    member.rank = rank;
    member.host = table.string();
    member.host_index = table.number<uint32_t>();
    member.address = table.string();
    member.port = table.number<uint16_t>();
    members.push_back(std::move(member));
    machines.push_back(table.string());
  }
  return members;
}

void find_sharers(Mesh& mesh, const std::vector<std::string>& machines, const std::string& host) {
  const std::string& own = machines[mesh.rank.index];
  for (Member& member : mesh.members)
    member.shares_memory = member.rank != mesh.rank.index && !own.empty() &&
                           machines[member.rank] == own && member.host == host;
}

Result<void> keep_early(EarlyLanes& early, std::unique_ptr<net::Socket>& socket,
                        const Hello& peer) {
  if (early.size() >= kEarlyLanes)
    return error(Code::invalid_argument, "%zu connections wait already", early.size());
  early.emplace_back(peer, std::move(socket));
  return {};
}

void open_to_members(Mesh& mesh) {
  Identity self = mesh.acceptor->identity();
  self.rank = mesh.rank.index;
  mesh.acceptor->set_identity(std::move(self));
  mesh.acceptor->set_on_connection(
      [early = mesh.early, rank = mesh.rank.index, ranks = mesh.ranks](
          std::unique_ptr<net::Socket>& socket, const Hello& peer) -> Result<void> {
        if (peer.rank >= ranks || peer.rank == rank)
          return error(Code::invalid_argument, "it is not one of the other ranks");
        if (is_for_links(peer)) return keep_early(*early, socket, peer);
        return error(Code::invalid_argument, "the group is complete");
      });
}

}  // namespace weft::join
