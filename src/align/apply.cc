#include <algorithm>
#include <map>

#include "weft/align.h"

#include "evidence.h"

namespace weft::align {

namespace {

using trace::Event;
using trace::Process;
using trace::Shape;

// The longest that may stand in a trace.
constexpr int64_t kMaxDuration = int64_t{1} << 61;

int64_t end_of(const Event& event) {
  int64_t end = 0;
  if (__builtin_add_overflow(event.start_ns, event.duration_ns, &end))
    return event.duration_ns < 0 ? INT64_MIN : INT64_MAX;
  return end;
}

int64_t duration_between(int64_t start, int64_t end) {
  int64_t duration = 0;
  if (__builtin_sub_overflow(end, start, &duration)) return kMaxDuration;
  return std::clamp<int64_t>(duration, 0, kMaxDuration);
}

void move_event(const Alignment& alignment, size_t process, Event& event) {
  const int64_t start = alignment.to_reference(process, event.start_ns);
  if (event.shape != Shape::counter && event.duration_ns > 0)
    event.duration_ns = duration_between(start, alignment.to_reference(process, end_of(event)));
  event.start_ns = start;
}

void move_ping(const Alignment& alignment, size_t process,
               const std::map<uint32_t, size_t>& of_rank, trace::PingSample& ping) {
  ping.t0 = alignment.to_reference(process, ping.t0);
  ping.t3 = alignment.to_reference(process, ping.t3);
  if (const auto peer = of_rank.find(ping.peer); peer != of_rank.end()) {
    ping.t1 = alignment.to_reference(peer->second, ping.t1);
    ping.t2 = alignment.to_reference(peer->second, ping.t2);
  }
}

void move_process(const Alignment& alignment, size_t index,
                  const std::map<uint32_t, size_t>& of_rank, Process& process) {
  for (Event& event : process.events) move_event(alignment, index, event);
  for (trace::ClockSample& sample : process.clock_samples)
    sample.trace_ns = alignment.to_reference(index, sample.trace_ns);
  for (trace::PingSample& ping : process.pings) move_ping(alignment, index, of_rank, ping);
  for (trace::Note& note : process.notes)
    note.time_ns = alignment.to_reference(index, note.time_ns);
}

// The end of the receive stays where it is, unless the start is moved beyond it.
void start_after_send(const Event& send, Event& receive) {
  if (receive.start_ns >= send.start_ns) return;
  const int64_t end = std::max(end_of(receive), send.start_ns);
  receive.start_ns = send.start_ns;
  receive.duration_ns = duration_between(receive.start_ns, end);
}

}  // namespace

void apply(const Alignment& alignment, trace::Trace& trace) {
  WEFT_CHECK(alignment.of_process.size() == trace.processes.size());
  std::map<uint32_t, size_t> of_rank;
  for (size_t p = 0; p < trace.processes.size(); ++p)
    of_rank[trace.processes[p].environment.rank] = p;
  for (size_t p = 0; p < trace.processes.size(); ++p)
    move_process(alignment, p, of_rank, trace.processes[p]);
  for (const Message& message : match(trace).messages) {
    Event& receive = trace.processes[message.receive.process].events[message.receive.event];
    start_after_send(event_at(trace, message.send), receive);
  }
}

}  // namespace weft::align
