// How the probe works: rank 0 announces one step after another; in each, some ranks send for a
// fixed time over a number of connections, and the receivers count. The receiver's count of bytes
// in the middle of the step is the rate, so neither the start-up of a connection nor its draining
// is in it. Processor time is that of the thread, from the kernel.
#include <sys/resource.h>
#include <sys/time.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>

#include "weft/probe.h"

namespace weft::probe {
namespace {

constexpr uint8_t kProbeCollective = 0xfe;
constexpr uint32_t kEndOfStep = 0xffffffff;  // header.chunk of a lane's last message
constexpr Nanos kIdleTime = Nanos::from_millis(20);
constexpr Nanos kTurn = Nanos::from_millis(1);
constexpr Nanos kTogether = Nanos::from_micros(200);
// A steady part faster than this times the whole step was not steady.
constexpr double kImplausible = 1.25;
constexpr double kWarmUp = 0.35;  // share of a step that is not counted

enum class StepType : uint8_t { idle, rate };

struct Step {
  StepType type = StepType::rate;
  trace::ProbeScope scope = trace::ProbeScope::ring;
  bool reverse = false;
  uint16_t flows = 1;
  uint32_t chunk_bytes = 0;

  // How much of the time it gets. What a full link carries is the constant that most depends on,
  // and the hardest: a thread that waits for a processor counts too little, or too much at once.
  int64_t weight() const {
    if (type == StepType::idle) return 0;
    return scope == trace::ProbeScope::ring && flows >= 8 ? 3 : 1;
  }
};

// The same list on all ranks.
std::vector<Step> make_steps(const Options& options) {
  std::vector<Step> steps;
  steps.push_back({StepType::idle, trace::ProbeScope::ring, false, 0, 0});
  using Scope = trace::ProbeScope;
  // The other chunk size first: what the budget cuts off is at the end.
  steps.push_back({StepType::rate, Scope::pair, false, 4, options.other_chunk_bytes});
  steps.push_back({StepType::rate, Scope::ring, false, 4, options.other_chunk_bytes});
  for (bool reverse : {false, true})
    for (Scope scope : {Scope::ring, Scope::pair})
      for (unsigned flows : {1u, 2u, 4u, 8u, 16u})
        steps.push_back(
            {StepType::rate, scope, reverse, static_cast<uint16_t>(flows), options.chunk_bytes});
  return steps;
}

int64_t thread_cpu_ns() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  auto ns = [](const timeval& t) { return (int64_t{t.tv_sec} * 1'000'000 + t.tv_usec) * 1000; };
  return ns(usage.ru_utime) + ns(usage.ru_stime);
}

struct Counted {
  uint64_t bytes = 0;
  int64_t duration_ns = 0;
  uint64_t chunks = 0;
  int64_t cpu_ns = 0;  // of a receiver that does not send
};

// Bytes received until a moment.
struct Sample {
  Nanos at;
  uint64_t bytes;
};

// Bytes and time (as `at`) of the steady part of a step, between the end of the warm-up and the
// moment at which the sender stopped. A receiver that had to wait for a processor counts late what
// arrived in time, so only samples on the upper hull tell what arrived; its ends may be late ones.
std::optional<Sample> steady_part(const std::vector<Sample>& samples, Nanos first, Nanos length) {
  std::vector<Sample> hull;
  auto below = [](const Sample& a, const Sample& b, const Sample& c) {
    auto steep = [](const Sample& from, const Sample& to) {
      return static_cast<double>(to.bytes - from.bytes) /
             static_cast<double>((to.at - from.at).count);
    };
    return steep(a, b) <= steep(b, c);
  };
  for (const Sample& sample : samples) {
    Nanos age = sample.at - first;
    if (age < length.scaled(kWarmUp) || age > length) continue;
    while (hull.size() > 1 && below(hull[hull.size() - 2], hull.back(), sample)) hull.pop_back();
    hull.push_back(sample);
  }
  if (hull.size() < 2) return std::nullopt;
  const Sample* from = &hull.front();
  const Sample* to = &hull.back();
  if (hull.size() > 3 && hull[hull.size() - 2].at - hull[1].at > (to->at - from->at).scaled(0.5)) {
    from = &hull[1];
    to = &hull[hull.size() - 2];
  }
  // One that stood still for most of the step found nearly all of it at once: then only the whole
  // step tells the rate.
  auto rate = [](uint64_t bytes, Nanos time) {
    return static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(1, time.count));
  };
  const Sample whole{samples.back().at - first, samples.back().bytes};
  const Sample steady{to->at - from->at, to->bytes - from->bytes};
  if (rate(steady.bytes, steady.at) > kImplausible * rate(whole.bytes, whole.at))
    return whole.at.count > 0 ? std::optional(whole) : std::nullopt;
  return steady.bytes > 0 ? std::optional(steady) : std::nullopt;
}

// Sends and swallows chunks of the current step.
class Traffic final : public lane::ChunkHandler {
 public:
  Traffic(const Clock& clock, uint32_t largest_chunk)
      : clock_(clock), source_(largest_chunk), scratch_(32) {}

  void begin(const Step& step, uint32_t index, bool sends, bool receives, bool send_on_out,
             Nanos duration) {
    step_ = step;
    index_ = index;
    stop_at_ = clock_.now() + duration;
    send_first_ = send_on_out ? 0 : kLanes;
    sends_ = sends;
    ends_due_ = receives ? step.flows : 0;
    ends_to_send_ = sends ? step.flows : 0;
    ended_.assign(2 * kLanes, false);
    chunks_in_ = 0;
  }
  bool done() const { return ends_due_ == 0 && ends_to_send_ == 0; }
  uint64_t chunks_in() const { return chunks_in_; }

  bool take(uint32_t lane, lane::OutgoingChunk& out) override {
    if (!sends_ || lane < send_first_ || lane >= send_first_ + step_.flows || ended_[lane])
      return false;
    bool end = clock_.now() >= stop_at_;
    if (end) ended_[lane] = true;
    out.header = {};
    out.header.collective = kProbeCollective;
    out.header.operation = index_;
    out.header.chunk = end ? kEndOfStep : 0;
    out.header.length = end ? 0 : step_.chunk_bytes;
    if (!end) out.payload.push_back(std::span(source_).first(step_.chunk_bytes));
    return true;
  }
  void sent(uint32_t, const lane::ChunkHeader& header, uint64_t, lane::Moment) override {
    if (header.chunk == kEndOfStep) --ends_to_send_;
  }
  Result<lane::Destination> arriving(uint32_t lane, const lane::ChunkHeader& header,
                                     bool) override {
    if (header.collective != kProbeCollective || header.length > source_.size())
      return error(Code::corrupt, "something else than probe traffic on a probe connection");
    if (header.operation > index_)
      return lane::Destination{true, false, {}};  // the next step, not begun here
    scratch_[lane].resize(std::max<size_t>(scratch_[lane].size(), header.length));
    return lane::Destination{false, false, {std::span(scratch_[lane]).first(header.length)}};
  }
  Result<void> arrived(uint32_t, const lane::ChunkHeader& header, const std::byte*,
                       lane::Moment) override {
    if (header.chunk == kEndOfStep && ends_due_ > 0)
      --ends_due_;
    else
      ++chunks_in_;
    if (on_arrival) on_arrival();
    return {};
  }

  std::function<void()> on_arrival;  // after each chunk

  static constexpr uint16_t kLanes = 16;  // out: 0 to 15, in: 16 to 31

 private:
  const Clock& clock_;
  std::vector<std::byte> source_;
  std::vector<std::vector<std::byte>> scratch_;
  Step step_;
  uint32_t index_ = 0;
  Nanos stop_at_;
  uint16_t send_first_ = 0;
  bool sends_ = false;
  int ends_due_ = 0;
  int ends_to_send_ = 0;
  std::vector<bool> ended_;
  uint64_t chunks_in_ = 0;
};

class Prober {
 public:
  Prober(join::Mesh& mesh, const Options& options, capture::Recorder& recorder)
      : mesh_(mesh),
        options_(options),
        recorder_(recorder),
        steps_(make_steps(options)),
        traffic_(clock_, std::max(options.chunk_bytes, options.other_chunk_bytes)) {
    auto open = [&](std::vector<std::unique_ptr<net::Socket>>& sockets, uint16_t first) {
      for (size_t i = 0; i < sockets.size(); ++i)
        lanes_.push_back(std::make_unique<lane::Lane>(
            lane::Lane::Role::without_receipts, *mesh_.reactor, std::move(sockets[i]), nullptr,
            static_cast<uint32_t>(first + i), traffic_, clock_,
            cost::unsent_limit(options.chunk_bytes), [this](uint32_t, Error error) {
              if (!failure_) failure_ = std::move(error);
            }));
      sockets.clear();
    };
    open(mesh_.probe_out, 0);
    open(mesh_.probe_in, Traffic::kLanes);
    // What is left for one step after the idle part, with a third for announcing and draining.
    int64_t weights = 0;
    for (const Step& step : steps_) weights += step.weight();
    send_unit_ = Nanos{(options.budget - kIdleTime).count / weights}.scaled(0.68);
  }

  Result<std::vector<trace::ProbeResult>> run() {
    measure_processor();
    Nanos begin = clock_.now();
    uint32_t count = static_cast<uint32_t>(steps_.size());
    for (uint32_t index = 0; index <= count; ++index) {
      // The announcement carries what the receivers of the step before counted.
      bool last = index == count;
      if (is_root() && clock_.now() - begin > options_.budget) last = true;
      WEFT_ASSIGN(bool finished, announce(index, last));
      if (finished) break;
      WEFT_TRY(perform(steps_[index], index));
      WEFT_TRY(report(index));
    }
    return std::move(results_);
  }

 private:
  bool is_root() const { return mesh_.rank.index == 0; }

  Result<void> turn(Nanos patience = kTurn) {
    mesh_.reactor->run_once(patience);
    mesh_.acceptor->tick(clock_.now());
    // Between steps nothing is due on these connections, and the first to finish closes them.
    if (failure_ && !traffic_.done())
      return Error(failure_->code(), failure_->message()).in("probe");
    for (auto& channel : mesh_.control) {
      if (!channel) continue;
      // What comes behind the announcement of the end belongs to whoever runs next.
      while (!announced_) {
        auto frame = channel->receive();
        if (!frame) break;
        handle(*channel, *frame);
      }
      if (channel->failure())
        return error(Code::peer_lost, "probe: rank %u left: %s", channel->peer().index,
                     channel->failure()->message().c_str());
    }
    if (clock_.now() > give_up_) return error(Code::timeout, "probe: no answer within 10 s");
    return {};
  }

  void handle(join::ControlChannel& from, const join::Frame& frame) {
    Unpacker fields(frame.payload);
    if (frame.type == join::Control::ping && is_root()) {
      int64_t t1 = recorder_.now().count;
      auto t0 = fields.number<int64_t>();
      Packer answer;
      answer.number(t0).number(t1).number(recorder_.now().count);
      from.send(join::Control::pong, answer);
    } else if (frame.type == join::Control::pong) {
      trace::PingSample sample;
      sample.peer = 0;
      sample.loaded = loaded_ ? 1 : 0;
      sample.t0 = fields.number<int64_t>();
      sample.t1 = fields.number<int64_t>();
      sample.t2 = fields.number<int64_t>();
      sample.t3 = recorder_.now().count;
      if (fields.complete()) recorder_.ping(sample);
      ping_out_ = false;
    } else if (frame.type == join::Control::probe_step) {
      announced_ = frame;
    } else if (frame.type == join::Control::probe_result && is_root()) {
      Counted counted;
      auto index = fields.number<uint32_t>();
      counted.bytes = fields.number<uint64_t>();
      counted.duration_ns = fields.number<int64_t>();
      counted.chunks = fields.number<uint64_t>();
      counted.cpu_ns = fields.number<int64_t>();
      if (fields.complete() && index == current_) {
        counted_[from.peer().index] = counted;
        ++reported_;
      }
    }
  }

  void send_ping() {
    if (is_root() || ping_out_) return;
    Packer question;
    question.number(recorder_.now().count);
    mesh_.control[0]->send(join::Control::ping, question);
    ping_out_ = true;
  }

  // Agrees on the next step. True when there is none.
  Result<bool> announce(uint32_t index, bool last) {
    if (is_root()) {
      Packer words;
      words.number(index).number(uint8_t{last});
      for (const Counted& counted : counted_)
        words.number(counted.bytes)
            .number(counted.duration_ns)
            .number(counted.chunks)
            .number(counted.cpu_ns);
      for (auto& channel : mesh_.control)
        if (channel) channel->send(join::Control::probe_step, words);
      keep_result(index);
      return last;
    }
    give_up_ = clock_.now() + Nanos::from_seconds(10);
    while (!announced_) WEFT_TRY(turn());
    Unpacker fields(announced_->payload);
    auto announced_index = fields.number<uint32_t>();
    bool finished = fields.number<uint8_t>() != 0;
    counted_.assign(mesh_.ranks, {});
    for (Counted& counted : counted_) {
      if (index == 0) break;
      counted.bytes = fields.number<uint64_t>();
      counted.duration_ns = fields.number<int64_t>();
      counted.chunks = fields.number<uint64_t>();
      counted.cpu_ns = fields.number<int64_t>();
    }
    if (!fields.complete() || announced_index != index)
      return error(Code::corrupt, "probe: rank 0 announced something else than step %u", index);
    announced_.reset();
    keep_result(index);
    return finished;
  }

  // The record of the step before belongs to the rank that sent.
  void keep_result(uint32_t index) {
    if (index > 0 && sent_) {
      const Step& step = steps_[index - 1];
      const Counted& counted = counted_[receiver_];
      if (step.type == StepType::rate && counted.duration_ns > 0) {
        trace::ProbeResult result;
        result.type = trace::ProbeType::rate;
        result.scope = step.scope;
        result.flows = step.flows;
        result.reverse = step.reverse ? 1 : 0;
        result.peer = receiver_;
        result.chunk_bytes = step.chunk_bytes;
        result.bytes = counted.bytes;
        result.duration_ns = counted.duration_ns;
        result.chunks = counted.chunks;
        result.cpu_send_ns = cpu_send_ns_;
        result.cpu_receive_ns = counted.cpu_ns;
        recorder_.probe(result);
        results_.push_back(result);
      }
    }
    counted_.assign(mesh_.ranks, {});
  }

  Result<void> perform(const Step& step, uint32_t index) {
    current_ = index;
    reported_ = 0;
    sent_ = false;
    own_ = {};
    give_up_ = clock_.now() + Nanos::from_seconds(10);
    if (step.type == StepType::idle) {
      loaded_ = false;
      Nanos until = clock_.now() + kIdleTime;
      // The root goes on answering while it waits for the reports.
      while (!is_root() && (clock_.now() < until || ping_out_)) {
        send_ping();
        WEFT_TRY(turn());
      }
      return {};
    }
    loaded_ = step.scope == trace::ProbeScope::ring;
    uint32_t rank = mesh_.rank.index;
    bool ring = step.scope == trace::ProbeScope::ring;
    // Of the pair, rank 0 has the connections as its outgoing ones.
    sent_ = ring || rank == (step.reverse ? 1u : 0u);
    bool receives = ring || rank == (step.reverse ? 0u : 1u);
    receiver_ = step.reverse ? mesh_.previous() : mesh_.next();
    const Nanos send_time{send_unit_.count * step.weight()};
    traffic_.begin(step, index, sent_, receives, !step.reverse, send_time);
    for (auto& lane : lanes_) lane->resume();
    int64_t cpu_before = thread_cpu_ns();
    bool room = fill_lanes();

    Nanos first_arrival{0};
    Nanos last_ping{0};
    std::vector<Sample> samples;
    uint64_t base = received_bytes();
    auto count = [&] {
      uint64_t bytes = received_bytes() - base;
      if (!receives || bytes == 0 || (!samples.empty() && bytes == samples.back().bytes)) return;
      Nanos now = clock_.now();
      if (first_arrival.count == 0) first_arrival = now;
      // Chunks of one packet come together: a sample in their middle would count the packet half.
      if (!samples.empty() && now - samples.back().at < kTogether)
        samples.back().bytes = bytes;
      else
        samples.push_back({now, bytes});
    };
    // A turn with many full connections may last as long as the step: count within it too.
    traffic_.on_arrival = count;
    while (!traffic_.done()) {
      if (auto turned = turn(room ? Nanos{0} : kTurn); !turned) {
        traffic_.on_arrival = {};
        return std::move(turned).error();
      }
      Nanos now = clock_.now();
      room = fill_lanes();
      count();
      if (loaded_ && now - last_ping > Nanos::from_millis(3)) {
        send_ping();
        last_ping = now;
      }
    }
    traffic_.on_arrival = {};
    int64_t cpu = thread_cpu_ns() - cpu_before;
    uint64_t total = received_bytes() - base;

    double share = 1;
    if (auto steady = steady_part(samples, first_arrival, send_time)) {
      own_.bytes = steady->bytes;
      own_.duration_ns = steady->at.count;
      share = total > 0 ? static_cast<double>(own_.bytes) / static_cast<double>(total) : 0;
      own_.chunks = static_cast<uint64_t>(static_cast<double>(traffic_.chunks_in()) * share);
    }
    auto counted_cpu = static_cast<int64_t>(static_cast<double>(cpu) * share);
    // A rank that does both reports all of its time as a sender's.
    own_.cpu_ns = sent_ ? 0 : counted_cpu;
    cpu_send_ns_ =
        sent_ ? static_cast<int64_t>(static_cast<double>(cpu) * (receives ? share : 1 - kWarmUp))
              : 0;
    return {};
  }

  Result<void> report(uint32_t index) {
    Packer words;
    words.number(index)
        .number(own_.bytes)
        .number(own_.duration_ns)
        .number(own_.chunks)
        .number(own_.cpu_ns);
    if (!is_root()) {
      mesh_.control[0]->send(join::Control::probe_result, words);
      return {};
    }
    counted_.resize(mesh_.ranks);
    counted_[0] = own_;
    give_up_ = clock_.now() + Nanos::from_seconds(10);
    while (reported_ + 1 < mesh_.ranks) WEFT_TRY(turn());
    return {};
  }

  // A few chunks a lane; true when there may be room for more. Not until all are full: where the
  // next rank is as fast as this one they never are, and this rank has to receive as well.
  bool fill_lanes() {
    constexpr int kRounds = 4;
    for (int round = 0; round < kRounds; ++round) {
      bool more = false;
      for (auto& lane : lanes_) more = lane->send_one() || more;
      if (!more) return false;
    }
    return true;
  }

  uint64_t received_bytes() const {
    uint64_t sum = 0;
    for (const auto& lane : lanes_) sum += lane->counters().bytes_received;
    return sum;
  }

  void measure_processor() {
    constexpr size_t kFloats = 1u << 18;  // 1 MiB: beyond the nearest caches, as chunks are
    std::vector<float> from(kFloats, 1.0f), to(kFloats, 2.0f);
    auto measure = [&](trace::ProbeType type, auto&& work) {
      work();  // pages in
      constexpr int kRounds = 4;
      Nanos begin = clock_.now();
      for (int i = 0; i < kRounds; ++i) work();
      trace::ProbeResult result;
      result.type = type;
      result.bytes = kRounds * kFloats * sizeof(float);
      result.duration_ns = (clock_.now() - begin).count;
      recorder_.probe(result);
      results_.push_back(result);
    };
    measure(trace::ProbeType::copy,
            [&] { std::memcpy(to.data(), from.data(), kFloats * sizeof(float)); });
    measure(trace::ProbeType::reduce, [&] {
      for (size_t i = 0; i < kFloats; ++i) to[i] += from[i];
    });
    std::span<const std::byte> bytes = std::as_bytes(std::span(from));
    uint64_t sink = 0;
    measure(trace::ProbeType::checksum, [&] { sink += lane::checksum({&bytes, 1}); });
    WEFT_CHECK(sink != 1);  // keeps the compiler from leaving the work out
  }

  join::Mesh& mesh_;
  const Options& options_;
  capture::Recorder& recorder_;
  const Clock& clock_ = monotonic_clock();
  std::vector<Step> steps_;
  Traffic traffic_;
  std::vector<std::unique_ptr<lane::Lane>> lanes_;
  std::optional<Error> failure_;
  Nanos send_unit_;  // of a step of weight 1
  Nanos give_up_;
  std::optional<join::Frame> announced_;
  std::vector<Counted> counted_;
  uint32_t current_ = 0;
  uint32_t reported_ = 0;
  uint32_t receiver_ = 0;
  bool sent_ = false;
  bool loaded_ = false;
  bool ping_out_ = false;
  Counted own_;
  int64_t cpu_send_ns_ = 0;
  std::vector<trace::ProbeResult> results_;
};

}  // namespace

Result<std::vector<trace::ProbeResult>> measure(join::Mesh& mesh, const Options& options,
                                                capture::Recorder& recorder) {
  if (mesh.ranks == 1) return std::vector<trace::ProbeResult>();
  if (mesh.probe_out.empty() || mesh.probe_in.empty())
    return error(Code::invalid_argument, "the group was joined without connections for the probe");
  return Prober(mesh, options, recorder).run();
}

}  // namespace weft::probe
