// One rank of an emulated training job: a device that is a timeline of timers, and everything else
// real.
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "cluster.h"
#include "gradients.h"
#include "job.h"
#include "weft/runtime.h"

namespace weft::lab {
namespace {

void sleep_until(Nanos deadline) {
  for (;;) {
    Nanos left = deadline - monotonic_clock().now();
    if (left.count <= 0) return;
    timespec time{left.count / 1'000'000'000, left.count % 1'000'000'000};
    clock_nanosleep(CLOCK_MONOTONIC, 0, &time, nullptr);
  }
}

Nanos processor_time(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return Nanos{int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec};
}

void burn(Nanos duration) {
  Nanos until = processor_time(CLOCK_THREAD_CPUTIME_ID) + duration;
  volatile uint64_t sink = 0;
  while (processor_time(CLOCK_THREAD_CPUTIME_ID) < until)
    for (uint64_t i = 0; i < 4096; ++i) sink = sink * 6364136223846793005u + i;
}

// The emulated device runs one thing after another. Work begins when the one before has ended and
// what it depends on is there; that a timer fires late delays neither, so lateness never adds up.
//
// One that burns takes processor time instead: it shares the cores with communication, as training
// on a processor does, and what it loses to others is lost.
class Device {
 public:
  Device(capture::Recorder& recorder, trace::TrackId track, bool burns)
      : recorder_(recorder), track_(track), burns_(burns), free_at_(monotonic_clock().now()) {}

  // Something that the next work depends on has just become true.
  void depends_on_now() { free_at_ = std::max(free_at_, monotonic_clock().now()); }

  void run(trace::Kind kind, Nanos duration, uint32_t layer, uint64_t step) {
    Nanos begin = free_at_, burnt{0};
    if (burns_) {
      begin = monotonic_clock().now();
      Nanos before = processor_time(CLOCK_THREAD_CPUTIME_ID);
      burn(duration);
      burnt = processor_time(CLOCK_THREAD_CPUTIME_ID) - before;
      free_at_ = monotonic_clock().now();
      duration = free_at_ - begin;
    } else {
      free_at_ += duration;
      sleep_until(free_at_);
    }
    trace::Event event;
    event.start_ns = on_trace_clock(begin).count;
    event.duration_ns = duration.count;
    event.kind = kind;
    event.track = track_;
    event.layer = static_cast<uint16_t>(layer);
    event.iteration = static_cast<uint32_t>(step);
    recorder_.record(event);
    if (burns_) recorder_.record(trace::processor_time_of(event, burnt.count));
  }

  Nanos free_at() const { return free_at_; }
  Nanos on_trace_clock(Nanos machine_time) const {
    return recorder_.now() - (monotonic_clock().now() - machine_time);
  }

 private:
  capture::Recorder& recorder_;
  trace::TrackId track_;
  bool burns_;
  Nanos free_at_;
};

class Worker {
 public:
  explicit Worker(Job job) : job_(std::move(job)) {
    if (job_.clock)
      clock_ = std::make_unique<SkewedClock>(monotonic_clock(), job_.clock->offset,
                                             job_.clock->drift_ppm);
    if (job_.station) network_ = network_at(*job_.station);
  }

  Result<WorkerResult> run() {
    WEFT_ASSIGN(plan::Plan plan, plan::parse(job_.plan));
    WEFT_TRY(start_recorder(plan));
    std::vector<std::vector<float>> memory;
    std::vector<std::span<float>> spans;
    for (const JobTensor& tensor : job_.tensors) memory.emplace_back(tensor.elements);
    for (auto& data : memory) spans.emplace_back(data);
    Gradients gradients(job_.rank, job_.ranks, job_.seed);
    Checker checker(gradients, spans);

    std::unique_ptr<runtime::Group> group;
    std::unique_ptr<runtime::Exchange> exchange;
    if (!job_.compute_only) {
      WEFT_ASSIGN(group, runtime::Group::join(joining(plan), *recorder_));
      std::vector<runtime::Tensor> tensors;
      for (uint32_t layer = 0; layer < job_.layers.size(); ++layer)
        for (uint32_t t : job_.layers[layer].tensors) {
          // The exchange knows tensors by their place: the job lists them in that order.
          if (t != tensors.size())
            return error(Code::invalid_argument,
                         "the job's tensors are not in the order of layers");
          tensors.push_back({job_.tensors[t].name, spans[t], layer});
        }
      WEFT_ASSIGN(exchange, group->exchange(std::move(tensors)));
    }
    WorkerResult result;
    WEFT_TRY(train(group.get(), exchange.get(), checker, result));
    if (group) WEFT_TRY(group->leave());
    result.exact = job_.compute_only || checker.finish();
    // The group's thread records too: it goes first.
    exchange.reset();
    group.reset();
    if (auto stopped = recorder_->stop(); !stopped) return std::move(stopped).error();
    return result;
  }

 private:
  Result<void> start_recorder(const plan::Plan& plan) {
    if (!job_.record) {
      recorder_ = capture::Recorder::off();
      return {};
    }
    capture::Options options;
    options.path = job_.folder + "/" + trace::file_name(job_.rank);
    options.clock = clock_.get();
    options.environment = runtime::describe_rank(joining(plan));
    trace::Environment& environment = options.environment;
    environment.dilation = job_.factors.dilation;
    environment.emulated_compute = true;
    environment.lab = job_.facts;
    WEFT_ASSIGN(recorder_, capture::Recorder::start(std::move(options)));

    trace::Model model;
    model.name = job_.model;
    model.tensors.resize(job_.tensors.size());
    for (uint32_t layer = 0; layer < job_.layers.size(); ++layer) {
      model.layers.push_back({job_.layers[layer].name});
      for (uint32_t t : job_.layers[layer].tensors)
        model.tensors[t] = {job_.tensors[t].name, job_.tensors[t].elements * 4, layer, layer,
                            layer};
    }
    recorder_->model(model);
    return {};
  }

  runtime::Options joining(const plan::Plan& plan) const {
    runtime::Options options;
    options.rank = {job_.rank};
    options.ranks = job_.ranks;
    options.rendezvous = text("%s:%u", job_.address.c_str(), unsigned{job_.port});
    options.secret = job_.secret;
    options.host = job_.host;
    options.plan = plan;
    options.shrink = job_.factors.shrink;
    options.probe = job_.probe;
    options.lane_rate = job_.lane_rate;
    options.network = network_.get();
    return options;
  }

  Result<void> train(runtime::Group* group, runtime::Exchange* exchange, Checker& checker,
                     WorkerResult& result) {
    trace::TrackId track = recorder_->track(
        {trace::TrackType::stream, "device (emulated)", trace::kNone16, trace::kNone16});
    Device device(*recorder_, track, job_.burn);
    bool by_tensor = exchange != nullptr && exchange->barrier() == plan::Barrier::tensor;
    std::optional<CpuTimes> cpu_from;
    Nanos thread_from{0}, process_from{0}, workers_from{0};

    // One more start than iterations: the last interval ends where the next would begin.
    for (uint64_t step = 0; step <= job_.iterations; ++step) {
      bool last = step == job_.iterations;
      if (step > 0 && !by_tensor) WEFT_TRY(synchronise_all(exchange, checker, device, step - 1));
      for (uint32_t layer = 0; layer < job_.layers.size(); ++layer) {
        if (step > 0 && by_tensor)
          WEFT_TRY(synchronise(*exchange, checker, device, layer, step - 1));
        if (layer == 0) mark_start(device, result, step);
        if (layer == 0 && step == kWarmUpIterations) {
          if (auto times = cpu_times()) cpu_from = *times;
          thread_from = processor_time(CLOCK_THREAD_CPUTIME_ID);
          process_from = processor_time(CLOCK_PROCESS_CPUTIME_ID);
          if (group != nullptr) workers_from = group->workers_processor_time();
        }
        if (!last) device.run(trace::Kind::forward, job_.layers[layer].forward, layer, step);
      }
      if (last) break;
      for (uint32_t layer = static_cast<uint32_t>(job_.layers.size()); layer-- > 0;) {
        device.run(trace::Kind::backward, job_.layers[layer].backward, layer, step);
        if (exchange == nullptr) continue;
        const std::vector<uint32_t>& tensors = job_.layers[layer].tensors;
        for (size_t i = tensors.size(); i-- > 0;) {
          checker.wait_filled(tensors[i], step);
          WEFT_TRY(exchange->ready(tensors[i], step));
        }
      }
    }
    if (auto times = cpu_times(); times && cpu_from) {
      CpuLoad load = cpu_load(*cpu_from, *times);
      result.cpu_busy_percent = load.busy_percent;
      result.steal_percent = load.steal_percent;
    }
    double counted = job_.iterations - kWarmUpIterations;
    Nanos training = processor_time(CLOCK_THREAD_CPUTIME_ID) - thread_from;
    Nanos all = processor_time(CLOCK_PROCESS_CPUTIME_ID) - process_from;
    Nanos workers = group != nullptr ? group->workers_processor_time() - workers_from : Nanos{0};
    result.training_cpu_ms = training.millis() / counted;
    result.communication_cpu_ms = (all - training).millis() / counted;
    // Threads that serve lanes are in this process already.
    if (group != nullptr && group->has_auxiliary_processes())
      result.auxiliary_cpu_ms = workers.millis() / counted;
    return {};
  }

  Result<void> synchronise(runtime::Exchange& exchange, Checker& checker, Device& device,
                           uint32_t layer, uint64_t step) {
    const JobLayer& job_layer = job_.layers[layer];
    for (uint32_t t : job_layer.tensors) {
      WEFT_TRY(exchange.wait(t, step));
      checker.done(t, step);
    }
    if (!job_layer.tensors.empty()) device.depends_on_now();
    if (job_layer.update.count > 0) device.run(trace::Kind::update, job_layer.update, layer, step);
    return {};
  }

  Result<void> synchronise_all(runtime::Exchange* exchange, Checker& checker, Device& device,
                               uint64_t step) {
    if (exchange != nullptr) {
      for (uint32_t layer = 0; layer < job_.layers.size(); ++layer)
        for (uint32_t t : job_.layers[layer].tensors) WEFT_TRY(exchange->wait(t, step));
      for (uint32_t t = 0; t < job_.tensors.size(); ++t) checker.done(t, step);
      device.depends_on_now();
    }
    for (uint32_t layer = 0; layer < job_.layers.size(); ++layer)
      if (job_.layers[layer].update.count > 0)
        device.run(trace::Kind::update, job_.layers[layer].update, layer, step);
    return {};
  }

  void mark_start(const Device& device, WorkerResult& result, uint64_t step) {
    Nanos start = device.free_at();
    if (step > 0) {
      trace::Event event;
      Nanos before{result.starts_ns.back()};
      event.start_ns = device.on_trace_clock(before).count;
      event.duration_ns = (start - before).count;
      event.kind = trace::Kind::iteration;
      event.track = recorder_->thread_track();
      event.iteration = static_cast<uint32_t>(step - 1);
      recorder_->record(event);
    }
    result.starts_ns.push_back(start.count);
  }

  Job job_;
  std::unique_ptr<SkewedClock> clock_;
  std::unique_ptr<net::Network> network_;  // null: the kernel's
  std::unique_ptr<capture::Recorder> recorder_;
};

}  // namespace

int worker(const std::string& job_file) {
  auto job = read_job(job_file);
  if (!job) {
    std::fprintf(stderr, "weft lab worker: %s\n", job.error().message().c_str());
    return 1;
  }
  log_set_prefix(text("rank %u", job->rank));
  prctl(PR_SET_TIMERSLACK, 1UL);  // timers stand for a device: they fire when they are due
  std::string path = result_path(job->folder, job->rank);
  auto result = Worker(std::move(*job)).run();
  if (!result) {
    std::fprintf(stderr, "%s\n", result.error().message().c_str());
    return 3;
  }
  if (auto written = write_result(path, *result); !written) {
    std::fprintf(stderr, "%s\n", written.error().message().c_str());
    return 3;
  }
  return 0;
}

}  // namespace weft::lab
