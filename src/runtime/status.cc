// How a running job is doing: asked of rank 0, answered by all.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "group.h"
#include "status.h"

namespace weft::runtime {

using join::Control;

namespace {

constexpr size_t kInquiries = 8;
constexpr Nanos kPatience = Nanos::from_seconds(1);       // for the answers of others
constexpr size_t kLongest = join::kMaxControlBytes - 16;  // in a control frame

constexpr size_t kFlights = 32;

// Of a large group not everything fits into one answer: these go, in this order.
constexpr std::array<std::string_view, 3> kDetails = {"lanes", "operations", "host"};

void append_list(std::string& out, std::string_view name, std::span<const std::string_view> words) {
  out += text(",\"%.*s\":[", static_cast<int>(name.size()), name.data());
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) out += ',';
    append_json_string(out, words[i]);
  }
  out += ']';
}

// Where a value, or a name with its value, that begins at `at` ends. REQUIRES: `json` is valid.
size_t end_of_value(std::string_view json, size_t at) {
  size_t depth = 0;
  bool in_string = false;
  for (; at < json.size(); ++at) {
    char c = json[at];
    if (in_string) {
      if (c == '\\') ++at;
      if (c == '"') in_string = false;
      continue;
    }
    if (depth == 0 && (c == ',' || c == '}' || c == ']')) return at;
    if (c == '"') in_string = true;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
  }
  return at;
}

}  // namespace

// As text: a tree of it would need memory to be freed, and end a process that has none.
std::string without(std::string_view object, std::span<const std::string_view> members) {
  size_t at = object.find_first_not_of(" \t\r\n");
  if (at == std::string_view::npos || object[at] != '{') return std::string(object);
  std::string out = "{";
  for (++at; at < object.size() && object[at] != '}';) {
    size_t end = end_of_value(object, at);
    std::string_view member = object.substr(at, end - at);
    bool goes = std::any_of(members.begin(), members.end(), [&](std::string_view name) {
      size_t quote = member.find('"');
      return quote != std::string_view::npos && member.substr(quote + 1).starts_with(name) &&
             member.substr(quote + 1 + name.size()).starts_with('"');
    });
    if (!goes) {
      if (out.size() > 1) out += ',';
      out += member;
    }
    at = end < object.size() && object[end] == ',' ? end + 1 : end;
  }
  return out + "}";
}

std::string fitting(const std::string& status, size_t longest) {
  for (size_t left_out = 0;; ++left_out) {
    std::span<const std::string_view> gone(kDetails.data(), left_out);
    std::string words = without(status, gone);
    if (left_out > 0) {
      words.pop_back();
      append_list(words, "left_out", gone);
      words += '}';
    }
    if (words.size() <= longest || left_out == kDetails.size()) return words;
  }
}

std::string fitting(const Answers& answers, size_t longest) {
  for (size_t left_out = 0;; ++left_out) {
    bool numbers_only = left_out > kDetails.size();
    std::vector<std::string_view> gone(
        kDetails.begin(),
        kDetails.begin() + static_cast<ptrdiff_t>(std::min(left_out, kDetails.size())));
    std::string words = text("{\"ranks\":%u,\"answered\":[", answers.ranks);
    for (size_t i = 0; i < answers.answered.size() && !numbers_only; ++i) {
      if (i > 0) words += ',';
      words += without(answers.answered[i], gone);
    }
    words += "],\"silent\":[";
    for (size_t i = 0; i < answers.silent.size(); ++i)
      words += text(i > 0 ? ",%u" : "%u", answers.silent[i]);
    words += ']';
    if (numbers_only) gone.push_back("ranks");
    if (!gone.empty()) append_list(words, "left_out", gone);
    words += '}';
    if (words.size() <= longest || numbers_only) return words;
  }
}

std::string Group::Impl::status_of_this_rank() {
  std::string flights, lanes;
  size_t count = 0;
  for (const collective::Flight& flight : engine->flights()) {
    if (count++ == kFlights) break;
    flights += text("%s{\"operation\":%llu,\"group\":%llu,\"what\":", count > 1 ? "," : "",
                    static_cast<unsigned long long>(flight.key.number),
                    static_cast<unsigned long long>(flight.key.group));
    append_json_string(flights, flight.signature);
    flights +=
        text(",\"bytes_received\":%llu,\"bytes_to_receive\":%llu,\"seconds\":%.9g,\"waits_for\":",
             static_cast<unsigned long long>(flight.bytes_done),
             static_cast<unsigned long long>(flight.bytes_total),
             (recorder.now() - flight.since).seconds());
    flights += flight.waits_for ? text("%u}", *flight.waits_for) : "null}";
  }
  double seconds = std::max(1e-9, (now() - began).seconds());
  for (const collective::LaneStatus& lane : engine->lanes()) {
    uint64_t bytes = lane.outgoing ? lane.counters.bytes_sent : lane.counters.bytes_received;
    lanes += text(
        "%s{\"peer\":%u,\"lane\":%u,\"direction\":\"%s\",\"transport\":\"%s\",\"bytes\":%llu,"
        "\"bytes_per_s\":%.9g}",
        lanes.empty() ? "" : ",", lane.peer, unsigned{lane.number}, lane.outgoing ? "out" : "in",
        lane.shared_memory ? "shm" : "tcp", static_cast<unsigned long long>(bytes),
        static_cast<double>(bytes) / seconds);
  }
  std::string out = names_of_this_rank();
  out += ",\"operations\":[" + flights + "],";
  out += text("\"agreement\":{\"fan_out\":%u,\"frames_heard\":%llu,\"frames_told\":%llu},",
              tree.fan_out, static_cast<unsigned long long>(frames_heard),
              static_cast<unsigned long long>(frames_told));
  out += text("\"last_progress_seconds_ago\":%.9g,",
              (now() - engine->progress(now()).last_change).seconds());
  out += "\"lanes\":[" + lanes + "]}";
  return fitting(out, kLongest);
}

// The beginning of what it says of itself. Names come from outside, and need not be text.
std::string Group::Impl::names_of_this_rank() const {
  std::string out = text("{\"rank\":%u,\"host\":", mesh.rank.index);
  append_json_string(out, options.host);
  return out + text(",\"pid\":%d", static_cast<int>(::getpid()));
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
    Answers answers{mesh.ranks, {}, {}};
    for (auto& [rank, words] : inquiry.answers)
      if (nlohmann::json::accept(words)) answers.answered.push_back(std::move(words));
    for (uint32_t r = 0; r < mesh.ranks; ++r)
      if (is_root() && !inquiry.answers.contains(r)) answers.silent.push_back(r);
    Packer words;
    inquiry.channel->send(Control::answer, words.string(fitting(answers, kLongest)));
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
  std::string words;
  try {
    words = status_of_this_rank();
  } catch (const std::bad_alloc&) {
    words = "{}";  // whoever asked is told nothing, and the group goes on
  }
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
  return names_of_this_rank() + ",\"busy\":true}";
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
