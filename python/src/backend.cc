#include "backend.h"

#include <algorithm>

#include <torch/csrc/utils/pybind.h>

namespace weft::torch_backend {

using c10d::OpType;

namespace {

// For an end that nobody asked for: a program that is over.
constexpr milliseconds kPatienceAtEnd = std::chrono::seconds(5);

uint64_t size_of(const at::Tensor& tensor) { return static_cast<uint64_t>(tensor.numel()); }

void check_alike(const at::Tensor& one, const at::Tensor& other, const char* what) {
  TORCH_CHECK_TYPE(one.scalar_type() == other.scalar_type(), "weft: ", what, " got tensors of ",
                   one.scalar_type(), " and of ", other.scalar_type());
}

void check_single(const Tensors& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "weft: ", what, " takes one tensor, and got ",
                    tensors.size());
}

Tensors flattened(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

at::TensorList first_of(const std::vector<Tensors>& lists) {
  return lists.empty() ? at::TensorList() : at::TensorList(lists.front());
}

void* output_of(const at::Tensor& tensor) { return tensor.mutable_data_ptr(); }
const void* input_of(const at::Tensor& tensor) { return tensor.const_data_ptr(); }

}  // namespace

c10::intrusive_ptr<ProcessGroupWeft> ProcessGroupWeft::make(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, milliseconds timeout,
    std::vector<int64_t> global) {
  TORCH_CHECK_VALUE(size > 0 && rank >= 0 && rank < size, "weft: there is no rank ", rank,
                    " among ", size);
  // The default group is not told which ranks it has: they are all.
  for (int64_t r = 0; global.size() < static_cast<size_t>(size); ++r) global.push_back(r);
  std::shared_ptr<Job> job = Job::with(global);
  uint64_t part = 0;
  if (job)
    part = job->part(global);
  else
    job = Job::meet(*store, static_cast<uint32_t>(rank), global, timeout);
  return c10::make_intrusive<ProcessGroupWeft>(std::move(job), part, rank, std::move(global),
                                               timeout);
}

ProcessGroupWeft::ProcessGroupWeft(std::shared_ptr<Job> job, uint64_t part, int rank,
                                   std::vector<int64_t> global, milliseconds timeout)
    : Backend(rank, static_cast<int>(global.size())),
      job_(std::move(job)),
      part_(part),
      global_(std::move(global)),
      completer_(Completer::start()),
      options_(c10::make_intrusive<Options>(timeout)) {
  options_->global_ranks_in_group.assign(global_.begin(), global_.end());
  side_part_ = job_->part(global_);
  init();
}

ProcessGroupWeft::~ProcessGroupWeft() {
  // It may come with Python's lock, which a thread that ends here may be waiting for.
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    pybind11::gil_scoped_release others;
    close(kPatienceAtEnd);
  } else {
    close(kPatienceAtEnd);
  }
}

Nanos ProcessGroupWeft::deadline_of(milliseconds timeout) const {
  constexpr milliseconds kMost = std::chrono::hours(24 * 365);
  if (timeout.count() <= 0) timeout = options_->timeout;
  timeout = std::clamp(timeout, milliseconds(1), kMost);
  return Nanos{timeout.count() * 1'000'000};
}

void ProcessGroupWeft::check_rank(int64_t rank, const char* what) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "weft: ", what, ": there is no rank ", rank,
                    " among ", size_);
}

std::shared_ptr<Outcome> ProcessGroupWeft::remember(Tensors results,
                                                    std::vector<c10::Device> devices) {
  auto outcome = std::make_shared<Outcome>(std::move(results), std::move(devices));
  std::erase_if(outcomes_, [](const std::weak_ptr<Outcome>& one) {
    auto known = one.lock();
    return !known || known->completed();
  });
  outcomes_.push_back(outcome);
  if (coalescing_) coalesced_.push_back(outcome);
  return outcome;
}

WorkPtr ProcessGroupWeft::start(Task task, std::shared_ptr<Passage> passage) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, !closed_, "weft: the process group was destroyed");
  if (task.collective) ++sequence_;
  auto flight = std::make_shared<Flight>();
  flight->outcome =
      remember(task.results, passage && passage->road().in ? std::vector{passage->road().device}
                                                           : std::vector<c10::Device>{});
  auto work =
      c10::make_intrusive<Handle>(rank_, task.type, task.title, task.inputs, flight->outcome);
  flight->held = std::move(task.held);
  flight->held.insert(flight->held.end(), task.inputs.begin(), task.inputs.end());
  flight->held.insert(flight->held.end(), task.results.begin(), task.results.end());
  flight->finish = std::move(task.finish);
  flight->passage = std::move(passage);
  flight->pending = task.calls.size() + 1;
  Nanos deadline = deadline_of(task.timeout);
  for (Call& call : task.calls) call.deadline = deadline;
  // What was called after an operation that waits for its copies is started after it.
  if (waiting_ > 0 || (flight->passage && !flight->passage->is_there()))
    start_when_there(flight, std::make_shared<Task>(std::move(task)), deadline);
  else
    start_now(flight, task);
  return work;
}

void ProcessGroupWeft::start_now(const std::shared_ptr<Flight>& flight, const Task& task) {
  const std::shared_ptr<Completer>& completer = completer_;
  job_->use(part_, [&](Group& group) {
    for (const Call& call : task.calls) {
      auto started = group.start(call);
      if (!started) {
        // What follows it is not started either: the ranks would not agree on the order.
        size_t left = static_cast<size_t>(&task.calls.back() - &call);
        for (size_t i = 0; i < left; ++i) completer->done(flight, started.error());
        completer->done(flight, started.error());
        break;
      }
      bool from_any =
          call.collective == Collective::point_to_point && call.root == runtime::kAnyRank;
      if (from_any) flight->work = *started;
      started->then(
          [completer, flight](Result<void> ended) { completer->done(flight, std::move(ended)); });
    }
  });
  completer->done(flight, {});
}

void ProcessGroupWeft::start_when_there(const std::shared_ptr<Flight>& flight,
                                        std::shared_ptr<const Task> task, Nanos deadline) {
  if (!starter_) {
    starter_ = Completer::start();
    // Before the job ends it has all that the program has called.
    job_->before_closing([starter = starter_, hurry = hurry_] {
      *hurry = true;
      starter->stop();
    });
  }
  bool posted = starter_->post([this, flight, task = std::move(task), deadline] {
    std::exception_ptr failure = wait_for_copies(*flight, deadline);
    std::lock_guard lock(mutex_);
    --waiting_;
    try {
      if (failure) std::rethrow_exception(failure);
      start_now(flight, *task);
    } catch (...) {
      // Where the ranks do not agree any more on what comes next, nothing can.
      job_->abort("an operation on " + flight->device_name() + " could not be started");
      completer_->fail(flight, std::current_exception());
    }
  });
  TORCH_CHECK_WITH(DistBackendError, posted, "weft: the process group was destroyed");
  ++waiting_;
}

std::exception_ptr ProcessGroupWeft::wait_for_copies(const Flight& flight, Nanos deadline) {
  using Clock = std::chrono::steady_clock;
  if (!flight.passage) return nullptr;
  const auto began = Clock::now();
  auto limit = std::chrono::nanoseconds(deadline.count);
  try {
    for (;;) {
      if (flight.passage->is_there()) return nullptr;
      auto waited = Clock::now() - began;
      if (auto failure = job_->failure()) return exception_of(*failure);
      if (waited > (*hurry_ ? std::min<std::chrono::nanoseconds>(limit, kPatienceAtEnd) : limit))
        return exception_of(Error(
            Code::timeout,
            text("what %s had queued before the operation did not end within "
                 "%.1f s",
                 flight.device_name().c_str(), std::chrono::duration<double>(waited).count())));
      // Late by a fraction of what was waited for anyway.
      std::this_thread::sleep_for(std::clamp<std::chrono::nanoseconds>(
          waited / 8, std::chrono::microseconds(5), std::chrono::microseconds(500)));
    }
  } catch (...) {
    return std::current_exception();
  }
}

// ---- one to all, all to all ----------------------------------------------------------------

WorkPtr ProcessGroupWeft::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_single(tensors, "broadcast");
  check_rank(options.rootRank, "broadcast");
  Staging staging(roads_, "broadcast", {tensors});
  at::Tensor memory = staging.writable(tensors[0], options.rootRank == rank_);
  Task task{OpType::BROADCAST, "weft:broadcast", tensors, tensors, {memory}, options.timeout};
  Elements elements = elements_of(memory.scalar_type());
  Call& call = task.calls.emplace_back();
  call.collective = Collective::broadcast;
  call.output = output_of(memory);
  call.count = size_of(memory) * elements.each;
  call.type = elements.type;
  call.root = static_cast<uint32_t>(options.rootRank);
  if (options.rootRank != rank_)
    task.finish = [memory, to = tensors] { distribute(memory.view(-1), to); };
  return start(std::move(task), staging.finished());
}

WorkPtr ProcessGroupWeft::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  TORCH_CHECK_VALUE(!tensors.empty(), "weft: allreduce got no tensor");
  if (tensors[0].layout() == at::kSparse) {
    check_single(tensors, "allreduce of sparse tensors");
    return start_sparse(tensors[0], options);
  }
  bool many = tensors.size() > 1;
  Task task{many ? OpType::ALLREDUCE_COALESCED : OpType::ALLREDUCE,
            "weft:all_reduce",
            tensors,
            tensors,
            {},
            options.timeout};
  Staging staging(roads_, "allreduce", {tensors});
  for (const at::Tensor& tensor : tensors) {
    Reduction reduction = reduction_of(tensor.scalar_type(), options.reduceOp);
    at::Tensor memory = staging.summand_in_place(tensor, reduction);
    Call& call = task.calls.emplace_back();
    call.output = output_of(memory);
    call.count = size_of(memory) * reduction.elements.each;
    call.type = reduction.elements.type;
    call.op = reduction.op;
    task.held.push_back(memory);
  }
  task.finish = [from = task.held, to = tensors] {
    for (size_t i = 0; i < to.size(); ++i) distribute(from[i].view(-1), {to[i]});
  };
  return start(std::move(task), staging.finished());
}

WorkPtr ProcessGroupWeft::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

WorkPtr ProcessGroupWeft::allreduce_sparse(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) {
  check_single(tensors, "allreduce of sparse tensors");
  return start_sparse(tensors[0], options);
}

WorkPtr ProcessGroupWeft::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_single(tensors, "reduce");
  check_rank(options.rootRank, "reduce");
  Staging staging(roads_, "reduce", {tensors});
  Reduction reduction = reduction_of(tensors[0].scalar_type(), options.reduceOp);
  bool root = options.rootRank == rank_;
  at::Tensor memory = root ? staging.summand_in_place(tensors[0], reduction)
                           : staging.summand(tensors[0], reduction);
  Task task{OpType::REDUCE, "weft:reduce", tensors, tensors, {memory}, options.timeout};
  Call& call = task.calls.emplace_back();
  call.collective = Collective::reduce;
  call.input = input_of(memory);
  if (root) call.output = output_of(memory);
  call.count = size_of(memory) * reduction.elements.each;
  call.type = reduction.elements.type;
  call.op = reduction.op;
  call.root = static_cast<uint32_t>(options.rootRank);
  if (root) task.finish = [memory, to = tensors] { distribute(memory.view(-1), to); };
  return start(std::move(task), staging.finished());
}

// ---- gathering ---------------------------------------------------------------------------

// Each rank's input goes to that rank's output, everywhere; they may be of different sizes.
WorkPtr ProcessGroupWeft::gather_into(Task task, const Tensors& outputs, const at::Tensor& input) {
  Staging staging(roads_, "allgather", {input, outputs});
  at::Tensor from = staging.readable(input);
  at::Tensor flat = staging.joined(outputs, false);
  Elements elements = elements_of(input.scalar_type());
  std::vector<uint64_t> counts;
  for (const at::Tensor& output : outputs) counts.push_back(size_of(output) * elements.each);
  Call& call = task.calls.emplace_back();
  call.collective = Collective::all_gather;
  call.input = input_of(from);
  call.output = output_of(flat);
  call.count = size_of(flat) * elements.each;
  call.type = elements.type;
  call.counts = task.keep(std::move(counts));
  task.held.insert(task.held.end(), {from, flat});
  task.finish = [flat, outputs, next = std::move(task.finish)] {
    distribute(flat, outputs);
    if (next) next();
  };
  return start(std::move(task), staging.finished());
}

namespace {

void check_outputs(const Tensors& outputs, const at::Tensor& input, int rank, int size,
                   const char* what) {
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size), "weft: ", what, " needs ", size,
                    " output tensors, and got ", outputs.size());
  check_dense(input, what);
  for (const at::Tensor& output : outputs) {
    check_dense(output, what);
    check_alike(output, input, what);
  }
  TORCH_CHECK_VALUE(outputs[static_cast<size_t>(rank)].numel() == input.numel(), "weft: ", what,
                    ": this rank's output has ", outputs[static_cast<size_t>(rank)].numel(),
                    " elements, its input ", input.numel());
}

}  // namespace

WorkPtr ProcessGroupWeft::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  check_single(inputs, "allgather");
  TORCH_CHECK_VALUE(outputs.size() == 1, "weft: allgather takes one list of outputs");
  check_outputs(outputs[0], inputs[0], rank_, size_, "allgather");
  Task task{OpType::ALLGATHER, "weft:all_gather", inputs, outputs[0], {}, options.timeout};
  return gather_into(std::move(task), outputs[0], inputs[0]);
}

WorkPtr ProcessGroupWeft::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPtr ProcessGroupWeft::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size() && !inputs.empty(),
                    "weft: allgather needs as many outputs as inputs");
  bool many = inputs.size() > 1;
  Task task{many ? OpType::ALLGATHER_INTO_TENSOR_COALESCED : OpType::_ALLGATHER_BASE,
            many ? "weft:all_gather_into_tensor_coalesced" : "weft:_all_gather_base",
            inputs,
            outputs,
            {},
            options.timeout};
  Tensors flat;
  Staging staging(roads_, "allgather", {inputs, outputs});
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_alike(outputs[i], inputs[i], "allgather");
    TORCH_CHECK_VALUE(outputs[i].numel() == inputs[i].numel() * size_,
                      "weft: allgather: the output has ", outputs[i].numel(), " elements, not ",
                      size_, " times the ", inputs[i].numel(), " of the input");
    at::Tensor from = staging.readable(inputs[i]);
    at::Tensor to = staging.writable(outputs[i], false);
    Elements elements = elements_of(from.scalar_type());
    Call& call = task.calls.emplace_back();
    call.collective = Collective::all_gather;
    call.input = input_of(from);
    call.output = output_of(to);
    call.count = size_of(to) * elements.each;
    call.type = elements.type;
    task.held.insert(task.held.end(), {from, to});
    flat.push_back(to);
  }
  task.finish = [flat, outputs] {
    for (size_t i = 0; i < outputs.size(); ++i) distribute(flat[i].view(-1), {outputs[i]});
  };
  return start(std::move(task), staging.finished());
}

WorkPtr ProcessGroupWeft::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == ranks(),
                    "weft: allgather_coalesced needs a list of outputs for each rank");
  Task task{OpType::ALLGATHER_COALESCED, "weft:all_gather", inputs, {}, {}, options.timeout};
  std::vector<std::pair<at::Tensor, Tensors>> gathered;
  Staging staging(roads_, "allgather_coalesced", {inputs, flattened(outputs)});
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors to;
    for (const Tensors& of_rank : outputs) {
      TORCH_CHECK_VALUE(of_rank.size() == inputs.size(), "weft: allgather_coalesced: a rank has ",
                        of_rank.size(), " outputs for ", inputs.size(), " inputs");
      to.push_back(of_rank[i]);
    }
    check_outputs(to, inputs[i], rank_, size_, "allgather_coalesced");
    at::Tensor from = staging.readable(inputs[i]);
    at::Tensor flat = staging.joined(to, false);
    Elements elements = elements_of(from.scalar_type());
    std::vector<uint64_t> counts;
    for (const at::Tensor& one : to) counts.push_back(size_of(one) * elements.each);
    Call& call = task.calls.emplace_back();
    call.collective = Collective::all_gather;
    call.input = input_of(from);
    call.output = output_of(flat);
    call.count = size_of(flat) * elements.each;
    call.type = elements.type;
    call.counts = task.keep(std::move(counts));
    task.held.insert(task.held.end(), {from, flat});
    task.results.insert(task.results.end(), to.begin(), to.end());
    gathered.emplace_back(flat, std::move(to));
  }
  task.finish = [gathered] {
    for (const auto& [flat, to] : gathered) distribute(flat, to);
  };
  return start(std::move(task), staging.finished());
}

WorkPtr ProcessGroupWeft::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& options) {
  check_single(inputs, "gather");
  check_rank(options.rootRank, "gather");
  Staging staging(roads_, "gather", {inputs, first_of(outputs)});
  bool root = options.rootRank == rank_;
  at::Tensor from = staging.readable(inputs[0]);
  Elements elements = elements_of(from.scalar_type());
  Task task{OpType::GATHER, "weft:gather", inputs, {}, {from}, options.timeout};
  Call call;
  call.collective = Collective::gather;
  call.input = input_of(from);
  call.count = size_of(from) * elements.each * ranks();
  call.type = elements.type;
  call.root = static_cast<uint32_t>(options.rootRank);
  if (root) {
    TORCH_CHECK_VALUE(outputs.size() == 1, "weft: gather takes one list of outputs on its root");
    check_outputs(outputs[0], inputs[0], rank_, size_, "gather");
    for (const at::Tensor& output : outputs[0])
      TORCH_CHECK_VALUE(output.numel() == inputs[0].numel(),
                        "weft: gather: the outputs differ in size");
    at::Tensor flat = staging.joined(outputs[0], false);
    call.output = output_of(flat);
    task.held.push_back(flat);
    task.results = outputs[0];
    task.finish = [flat, to = outputs[0]] { distribute(flat, to); };
  } else {
    TORCH_CHECK_VALUE(outputs.empty() || outputs[0].empty(),
                      "weft: gather has outputs on its root only");
  }
  task.calls.push_back(call);
  return start(std::move(task), staging.finished());
}

WorkPtr ProcessGroupWeft::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                  const c10d::ScatterOptions& options) {
  check_single(outputs, "scatter");
  check_rank(options.rootRank, "scatter");
  Staging staging(roads_, "scatter", {outputs, first_of(inputs)});
  at::Tensor to = staging.writable(outputs[0], false);
  Elements elements = elements_of(to.scalar_type());
  Task task{OpType::SCATTER, "weft:scatter", {}, outputs, {to}, options.timeout};
  Call call;
  call.collective = Collective::scatter;
  call.output = output_of(to);
  call.count = size_of(to) * elements.each * ranks();
  call.type = elements.type;
  call.root = static_cast<uint32_t>(options.rootRank);
  if (options.rootRank == rank_) {
    TORCH_CHECK_VALUE(inputs.size() == 1 && inputs[0].size() == ranks(), "weft: scatter needs ",
                      size_, " inputs on its root");
    for (const at::Tensor& input : inputs[0]) {
      check_alike(input, outputs[0], "scatter");
      TORCH_CHECK_VALUE(input.numel() == outputs[0].numel(),
                        "weft: scatter: the inputs differ in size");
    }
    at::Tensor flat = staging.joined(inputs[0], true);
    call.input = input_of(flat);
    task.inputs = inputs[0];
    task.held.push_back(flat);
  } else {
    TORCH_CHECK_VALUE(inputs.empty() || inputs[0].empty(),
                      "weft: scatter has inputs on its root only");
    task.inputs = outputs;
  }
  task.finish = [to, outputs] { distribute(to.view(-1), outputs); };
  task.calls.push_back(call);
  return start(std::move(task), staging.finished());
}

// ---- reducing and scattering -------------------------------------------------------------

WorkPtr ProcessGroupWeft::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  check_single(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "weft: reduce_scatter takes one list of inputs");
  check_outputs(inputs[0], outputs[0], rank_, size_, "reduce_scatter");
  Reduction reduction = reduction_of(outputs[0].scalar_type(), options.reduceOp);
  Staging staging(roads_, "reduce_scatter", {outputs, inputs[0]});
  at::Tensor from = staging.summands(inputs[0], reduction);
  at::Tensor to = staging.writable(outputs[0], false);
  Task task{OpType::REDUCE_SCATTER, "weft:reduce_scatter", inputs[0], outputs, {from, to},
            options.timeout};
  std::vector<uint64_t> counts;
  for (const at::Tensor& input : inputs[0])
    counts.push_back(size_of(input) * reduction.elements.each);
  Call& call = task.calls.emplace_back();
  call.collective = Collective::reduce_scatter;
  call.input = input_of(from);
  call.output = output_of(to);
  call.count = size_of(from) * reduction.elements.each;
  call.type = reduction.elements.type;
  call.op = reduction.op;
  call.counts = task.keep(std::move(counts));
  task.finish = [to, outputs] { distribute(to.view(-1), outputs); };
  return start(std::move(task), staging.finished());
}

WorkPtr ProcessGroupWeft::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr ProcessGroupWeft::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size() && !inputs.empty(),
                    "weft: reduce_scatter needs as many outputs as inputs");
  bool many = inputs.size() > 1;
  Task task{many ? OpType::REDUCE_SCATTER_TENSOR_COALESCED : OpType::_REDUCE_SCATTER_BASE,
            many ? "weft:reduce_scatter_tensor_coalesced" : "weft:_reduce_scatter_base",
            inputs,
            outputs,
            {},
            options.timeout};
  Tensors flat;
  Staging staging(roads_, "reduce_scatter", {inputs, outputs});
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_alike(outputs[i], inputs[i], "reduce_scatter");
    TORCH_CHECK_VALUE(inputs[i].numel() == outputs[i].numel() * size_,
                      "weft: reduce_scatter: the input has ", inputs[i].numel(), " elements, not ",
                      size_, " times the ", outputs[i].numel(), " of the output");
    Reduction reduction = reduction_of(inputs[i].scalar_type(), options.reduceOp);
    at::Tensor from = staging.summand(inputs[i], reduction);
    at::Tensor to = staging.writable(outputs[i], false);
    Call& call = task.calls.emplace_back();
    call.collective = Collective::reduce_scatter;
    call.input = input_of(from);
    call.output = output_of(to);
    call.count = size_of(from) * reduction.elements.each;
    call.type = reduction.elements.type;
    call.op = reduction.op;
    task.held.insert(task.held.end(), {from, to});
    flat.push_back(to);
  }
  task.finish = [flat, outputs] {
    for (size_t i = 0; i < outputs.size(); ++i) distribute(flat[i].view(-1), {outputs[i]});
  };
  return start(std::move(task), staging.finished());
}

// ---- all to all --------------------------------------------------------------------------

WorkPtr ProcessGroupWeft::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits,
                                        const c10d::AllToAllOptions& options) {
  Staging staging(roads_, "all_to_all", {input, output});
  check_alike(output, input, "all_to_all");
  auto sizes = [&](const at::Tensor& tensor, const std::vector<int64_t>& splits, uint64_t each) {
    std::vector<uint64_t> out;
    int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
    if (splits.empty()) {
      TORCH_CHECK_VALUE(rows % size_ == 0, "weft: all_to_all: ", rows, " rows cannot be cut into ",
                        size_, " equal parts");
      out.assign(ranks(), size_of(tensor) / ranks() * each);
      return out;
    }
    TORCH_CHECK_VALUE(splits.size() == ranks(), "weft: all_to_all: ", splits.size(),
                      " split sizes for ", size_, " ranks");
    int64_t total = 0;
    uint64_t row = rows > 0 ? size_of(tensor) / static_cast<uint64_t>(rows) : 0;
    for (int64_t split : splits) {
      TORCH_CHECK_VALUE(split >= 0 && split <= rows - total,
                        "weft: all_to_all: the split sizes do not add up to the ", rows,
                        " rows of the tensor");
      total += split;
      out.push_back(static_cast<uint64_t>(split) * row * each);
    }
    TORCH_CHECK_VALUE(total == rows, "weft: all_to_all: the split sizes add up to ", total,
                      ", the tensor has ", rows, " rows");
    return out;
  };
  Elements elements = elements_of(input.scalar_type());
  at::Tensor from = staging.readable(input), to = staging.writable(output, false);
  Task task{OpType::ALLTOALL_BASE, "weft:all_to_all", {input}, {output}, {from, to},
            options.timeout};
  Call& call = task.calls.emplace_back();
  call.collective = Collective::all_to_all;
  call.input = input_of(from);
  call.output = output_of(to);
  call.count = size_of(from) * elements.each;
  call.type = elements.type;
  call.counts = task.keep(sizes(from, input_splits, elements.each));
  call.receive_counts = task.keep(sizes(to, output_splits, elements.each));
  task.finish = [to, output] { distribute(to.view(-1), {output}); };
  return start(std::move(task), staging.finished());
}

WorkPtr ProcessGroupWeft::alltoall(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == ranks() && inputs.size() == ranks(),
                    "weft: all_to_all needs ", size_, " inputs and ", size_, " outputs");
  Staging staging(roads_, "all_to_all", {inputs, outputs});
  for (const Tensors* list : {&inputs, &outputs})
    for (const at::Tensor& tensor : *list) check_alike(tensor, inputs[0], "all_to_all");
  Elements elements = elements_of(inputs[0].scalar_type());
  auto sizes = [&](const Tensors& list) {
    std::vector<uint64_t> out;
    for (const at::Tensor& tensor : list) out.push_back(size_of(tensor) * elements.each);
    return out;
  };
  at::Tensor from = staging.joined(inputs, true), to = staging.joined(outputs, false);
  Task task{OpType::ALLTOALL, "weft:all_to_all", inputs, outputs, {from, to}, options.timeout};
  Call& call = task.calls.emplace_back();
  call.collective = Collective::all_to_all;
  call.input = input_of(from);
  call.output = output_of(to);
  call.count = size_of(from) * elements.each;
  call.type = elements.type;
  call.counts = task.keep(sizes(inputs));
  call.receive_counts = task.keep(sizes(outputs));
  task.finish = [to, outputs] { distribute(to, outputs); };
  return start(std::move(task), staging.finished());
}

WorkPtr ProcessGroupWeft::barrier(const c10d::BarrierOptions& options) {
  at::Tensor nothing = at::zeros({1}, at::kByte);
  Task task{OpType::BARRIER, "weft:barrier", {}, {}, {nothing}, options.timeout};
  Call& call = task.calls.emplace_back();
  call.collective = Collective::barrier;
  call.output = output_of(nothing);
  call.count = 1;
  call.type = Type::uint8;
  return start(std::move(task));
}

// ---- several as one ----------------------------------------------------------------------

void ProcessGroupWeft::startCoalescing() {
  std::lock_guard lock(mutex_);
  coalescing_ = true;
  coalesced_.clear();
}

WorkPtr ProcessGroupWeft::endCoalescing() {
  std::vector<std::shared_ptr<Outcome>> parts;
  {
    std::lock_guard lock(mutex_);
    coalescing_ = false;
    parts.swap(coalesced_);
  }
  Tensors results;
  std::vector<c10::Device> devices;
  for (const auto& part : parts) {
    results.insert(results.end(), part->results().begin(), part->results().end());
    devices.insert(devices.end(), part->devices().begin(), part->devices().end());
  }
  std::shared_ptr<Outcome> whole;
  {
    std::lock_guard lock(mutex_);
    whole = remember(std::move(results), std::move(devices));
  }
  auto work = c10::make_intrusive<Handle>(rank_, OpType::COALESCED, nullptr, std::nullopt, whole);
  struct Rest {
    std::atomic<size_t> left;
    std::mutex mutex;
    std::exception_ptr failure;
    std::vector<ArrivalPtr> arrivals;
  };
  auto rest = std::make_shared<Rest>();
  rest->left = parts.size() + 1;
  auto one_less = [rest, whole](std::exception_ptr failure, std::vector<ArrivalPtr> arrivals) {
    {
      std::lock_guard lock(rest->mutex);
      if (failure && !rest->failure) rest->failure = std::move(failure);
      rest->arrivals.insert(rest->arrivals.end(), arrivals.begin(), arrivals.end());
    }
    if (rest->left.fetch_sub(1) == 1) whole->settle(rest->failure, -1, rest->arrivals);
  };
  for (const auto& part : parts)
    // Whoever completes a part holds it; a callback that did so would hold itself.
    part->future()->addCallback([one_less, one = std::weak_ptr(part)](c10::ivalue::Future& done) {
      auto ended = one.lock();
      one_less(done.hasError() ? done.exception_ptr() : nullptr,
               ended ? ended->arrivals() : std::vector<ArrivalPtr>{});
    });
  one_less(nullptr, {});
  return work;
}

// ---- the group itself --------------------------------------------------------------------

c10::intrusive_ptr<c10d::Backend> ProcessGroupWeft::split(
    const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  auto found = std::find(ranks.begin(), ranks.end(), rank_);
  if (found == ranks.end()) return nullptr;
  std::vector<int64_t> global;
  for (int rank : ranks) {
    check_rank(rank, "split");
    global.push_back(global_[static_cast<size_t>(rank)]);
  }
  uint64_t part = job_->part(global);
  return c10::make_intrusive<ProcessGroupWeft>(job_, part, static_cast<int>(found - ranks.begin()),
                                               std::move(global),
                                               options ? options->timeout : options_->timeout);
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupWeft::getBackendOptions() {
  return options_;
}

void ProcessGroupWeft::setTimeout(milliseconds timeout) {
  std::lock_guard lock(mutex_);
  options_->timeout = timeout;
}

c10d::ErrorType ProcessGroupWeft::getError() {
  auto failure = job_->failure();
  if (!failure) return c10d::ErrorType::SUCCESS;
  if (failure->code() == Code::timeout) return c10d::ErrorType::TIMEOUT;
  return failure->code() == Code::peer_lost ? c10d::ErrorType::REMOTE_ERROR
                                            : c10d::ErrorType::COMM_ERROR;
}

void ProcessGroupWeft::abort() {
  job_->abort("the program aborted the process group");
  close(kPatienceAtEnd);
}

void ProcessGroupWeft::shutdown() { close(options_->timeout); }

void ProcessGroupWeft::close(milliseconds patience) {
  if (!job_->in_same_process()) return;
  std::list<std::weak_ptr<Outcome>> left;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
  }
  *hurry_ = *hurry_ || patience <= kPatienceAtEnd;
  if (starter_) starter_->stop();
  // The first group of a job is the job.
  if (part_ == 0) job_->close(patience);
  if (stepper_) stepper_->stop();
  completer_->stop();
  {
    std::lock_guard lock(mutex_);
    left.swap(outcomes_);
  }
  auto failure = job_->failure();
  std::exception_ptr reason =
      exception_of(failure ? *failure : Error(Code::cancelled, "the process group was destroyed"));
  for (const std::weak_ptr<Outcome>& one : left)
    if (auto outcome = one.lock()) outcome->settle(reason);
  job_->drop(side_part_);
  if (part_ != 0) job_->drop(part_);
}

}  // namespace weft::torch_backend
