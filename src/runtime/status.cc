// How a running job is doing: asked of rank 0, answered by all.
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "group.h"
#include "status.h"

namespace weft::runtime {

using Json = nlohmann::ordered_json;
using join::Control;

namespace {

constexpr size_t kInquiries = 8;
constexpr Nanos kPatience = Nanos::from_seconds(1);       // for the answers of others
constexpr size_t kLongest = join::kMaxControlBytes - 16;  // in a control frame

// Names come from outside: bytes that are no text are replaced, and never an exception.
std::string words_of(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

// Of a large group not everything fits into one answer: first the lanes go, then the operations,
// then all but the numbers of the ranks.
std::string fitting(Json status, size_t longest) {
  std::string words = words_of(status);
  bool of_many = status.contains("answered");
  for (const char* part : {"lanes", "operations", "host"}) {
    if (words.size() <= longest) return words;
    auto drop = [&](Json& one) {
      if (one.is_object()) one.erase(part);
    };
    if (of_many)
      for (Json& one : status["answered"]) drop(one);
    else
      drop(status);
    status["left_out"].push_back(part);
    words = words_of(status);
  }
  if (words.size() <= longest) return words;
  status["answered"] = Json::array();
  status["left_out"].push_back("ranks");
  return words_of(status);
}

std::string Group::Impl::status_of_this_rank() {
  Json flights = Json::array();
  for (const collective::Flight& flight : engine->flights()) {
    Json one = {{"operation", flight.key.number},
                {"group", flight.key.group},
                {"what", flight.signature},
                {"bytes_received", flight.bytes_done},
                {"bytes_to_receive", flight.bytes_total},
                {"seconds", (recorder.now() - flight.since).seconds()},
                {"waits_for", flight.waits_for ? Json(*flight.waits_for) : Json()}};
    flights.push_back(std::move(one));
    if (flights.size() == 32) break;
  }
  Json lanes = Json::array();
  double seconds = std::max(1e-9, (now() - began).seconds());
  for (const collective::LaneStatus& lane : engine->lanes())
    lanes.push_back(
        {{"peer", lane.peer},
         {"lane", lane.number},
         {"direction", lane.outgoing ? "out" : "in"},
         {"transport", lane.shared_memory ? "shm" : "tcp"},
         {"bytes", lane.outgoing ? lane.counters.bytes_sent : lane.counters.bytes_received},
         {"bytes_per_s", static_cast<double>(lane.outgoing ? lane.counters.bytes_sent
                                                           : lane.counters.bytes_received) /
                             seconds}});
  Json out = {
      {"rank", mesh.rank.index},
      {"host", options.host},
      {"pid", static_cast<int>(::getpid())},
      {"operations", std::move(flights)},
      {"last_progress_seconds_ago", (now() - engine->progress(now()).last_change).seconds()},
      {"lanes", std::move(lanes)}};
  return fitting(std::move(out), kLongest);
}

// Someone who knows the secret connected.
void Group::Impl::asked(std::unique_ptr<net::Socket> socket) {
  if (inquiries.size() >= kInquiries) return;
  inquiries.push_back(
      {std::make_unique<join::ControlChannel>(*mesh.reactor, std::move(socket), Rank{mesh.ranks}),
       now(),
       false,
       false,
       {}});
}

void Group::Impl::serve_status(Nanos at) {
  for (size_t i = 0; i < inquiries.size();) {
    Inquiry& inquiry = inquiries[i];
    if (inquiry.answered) {
      // The words must be out before the connection goes.
      if (inquiry.channel->flushed() || inquiry.channel->failure())
        inquiries.erase(inquiries.begin() + static_cast<ptrdiff_t>(i));
      else
        ++i;
      continue;
    }
    if (!inquiry.asked) {
      inquiry.asked = true;
      inquiry.answers[mesh.rank.index] = status_of_this_rank();
      if (is_root())
        for (auto& channel : mesh.control)
          if (channel) channel->send(Control::query, Packer());
    }
    bool complete = !is_root() || inquiry.answers.size() == mesh.ranks;
    bool over = complete || at - inquiry.since > kPatience || inquiry.channel->failure();
    if (!over) {
      ++i;
      continue;
    }
    Json ranks = Json::array();
    for (const auto& [rank, words] : inquiry.answers) {
      Json one = Json::parse(words, nullptr, false);
      if (!one.is_discarded()) ranks.push_back(std::move(one));
    }
    Json silent = Json::array();
    for (uint32_t r = 0; r < mesh.ranks; ++r)
      if (is_root() && !inquiry.answers.contains(r)) silent.push_back(r);
    Json answer = {{"ranks", mesh.ranks}, {"answered", std::move(ranks)}, {"silent", silent}};
    Packer words;
    inquiry.channel->send(Control::answer, words.string(fitting(std::move(answer), kLongest)));
    inquiry.answered = true;
  }
}

void Group::Impl::tell_status() {
  if (!status_wanted.exchange(false)) return;
  uint64_t asked = 0;
  {
    std::lock_guard lock(mutex);
    asked = status_asked;
  }
  std::string words = status_of_this_rank();
  std::lock_guard lock(mutex);
  status_words = std::move(words);
  status_told = asked;
  changed.notify_all();
}

// Whoever drives may stay for as long as an operation takes: it is asked, and answers in its next
// turn. Only a driver that does not come to one, in a callback of the program, stays silent.
std::string Group::status() {
  try {
    return impl_->status();
  } catch (const std::bad_alloc&) {
    return "{}";
  }
}

std::string Group::Impl::status() {
  if (driven_by_this_thread()) return status_of_this_rank();
  std::unique_lock lock(mutex);
  uint64_t ticket = ++status_asked;
  status_wanted.store(true);
  lock.unlock();
  mesh.reactor->wake();
  Nanos until = now() + kPatience;
  do {
    if (Seat sits = try_seat()) return status_of_this_rank();
    lock.lock();
    if (changed.wait_for(lock, std::chrono::milliseconds(1), [&] { return status_told >= ticket; }))
      return status_words;
    lock.unlock();
  } while (now() < until);
  Json out = {{"rank", mesh.rank.index},
              {"host", options.host},
              {"pid", static_cast<int>(::getpid())},
              {"busy", true}};
  return words_of(out);
}

Result<std::string> ask_status(const std::string& address, const std::string& secret,
                               Nanos deadline) {
  WEFT_ASSIGN(std::unique_ptr<net::Socket> socket,
              join::call(address, secret, join::Purpose::status, deadline));
  WEFT_ASSIGN(auto reactor, net::kernel_network().reactor());
  join::ControlChannel channel(*reactor, std::move(socket), Rank{0});
  Nanos until = monotonic_clock().now() + deadline;
  for (;;) {
    if (auto frame = channel.receive()) {
      Unpacker fields(frame->payload);
      std::string words = fields.string();
      if (frame->type != Control::answer || !fields.complete())
        return error(Code::corrupt, "%s answered something else than a status", address.c_str());
      return words;
    }
    if (channel.failure())
      return error(Code::peer_lost, "%s hung up: %s", address.c_str(),
                   channel.failure()->message().c_str());
    if (monotonic_clock().now() > until)
      return error(Code::timeout, "%s did not answer within %s", address.c_str(),
                   format_duration(deadline).c_str());
    reactor->run_once(Nanos::from_millis(20));
  }
}

}  // namespace weft::runtime
