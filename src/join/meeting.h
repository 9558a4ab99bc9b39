// What ranks tell each other when they meet, for the first time or again.
#pragma once

#include "weft/join.h"

namespace weft::join {

// "rank 2", "ranks 1, 4 and 7", and not a page of them.
std::string rank_list(const std::vector<uint32_t>& ranks);

// How long a process that turns all the time did not run: it was stopped. What others said
// meanwhile waits for it, so that time is no reason to give up.
Nanos suspension(Nanos now, Nanos& last_turn);

// A rank's words about itself: its host, where it listens, and the machine that it is on.
void pack_place(Packer& words, const std::string& host, const Member& member,
                const std::string& machine);
// Nothing if a rank cannot have sent it.
std::optional<Member> unpack_place(std::span<const std::byte> words, uint32_t rank,
                                   std::string& machine);

// The table of all: the words of each, and which are on one host.
void number_hosts(std::vector<Member>& members);
void pack_members(Packer& table, const std::vector<Member>& members,
                  const std::vector<std::string>& machines);
std::vector<Member> unpack_members(Unpacker& table, uint32_t ranks,
                                   std::vector<std::string>& machines);
// Names of hosts can be chosen, and equal on different machines: both must agree.
void find_sharers(Mesh& mesh, const std::vector<std::string>& machines, const std::string& host);

// Lanes of ranks that were faster, until Links takes over.
// What comes to a group that works, from ranks that were told to go a moment earlier than this one.
inline bool is_for_links(const Hello& hello) {
  return hello.purpose == Purpose::lane || hello.purpose == Purpose::branch;
}
using EarlyLanes = std::vector<std::pair<Hello, std::unique_ptr<net::Socket>>>;
Result<void> keep_early(EarlyLanes& early, std::unique_ptr<net::Socket>& socket, const Hello& peer);
// The group has formed: from now on the acceptor lets only lanes of its members in.
void open_to_members(Mesh& mesh);

}  // namespace weft::join
