// Sums of sparse tensors: each rank says how much it has, and then what. The steps of one follow
// each other on a thread of their own, in a group of their own, so that they need not fit into the
// order of other calls.
#include "backend.h"

#include <future>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/sparse_coo_tensor.h>

namespace weft::torch_backend {

using c10d::OpType;

namespace {

constexpr int64_t kDimensionsMax = 64;

}  // namespace

void ProcessGroupWeft::run_and_wait(const Call& call) {
  // Not by Work::wait(): closing the job must not wait for this thread. If the job goes without a
  // word, so does the promise, and that is an exception here.
  std::future<Result<void>> end;
  job_->use(side_part_, [&](Group& group) {
    auto promise = std::make_shared<std::promise<Result<void>>>();
    end = promise->get_future();
    auto work = group.start(call);
    if (!work) raise(work.error());
    work->then([promise](Result<void> result) { promise->set_value(std::move(result)); });
  });
  if (Result<void> result = end.get(); !result) raise(result.error());
}

void ProcessGroupWeft::sum_sparse(const at::Tensor& tensor, bool mean, Nanos deadline) {
  at::Tensor own = tensor.detach().coalesce();
  at::Tensor indices = own.indices().contiguous(), values = own.values().contiguous();
  int64_t n = size_;
  auto gather = [&](const at::Tensor& from, const std::vector<int64_t>& sizes) {
    int64_t total = 0;
    std::vector<uint64_t> counts;
    Elements elements = elements_of(from.scalar_type());
    for (int64_t size : sizes) {
      total += size;
      counts.push_back(static_cast<uint64_t>(size) * elements.each);
    }
    at::Tensor to = at::empty({total}, from.options());
    Call call;
    call.collective = Collective::all_gather;
    call.input = from.const_data_ptr();
    call.output = to.mutable_data_ptr();
    call.count = static_cast<uint64_t>(total) * elements.each;
    call.type = elements.type;
    call.counts = counts;
    call.deadline = deadline;
    run_and_wait(call);
    return to;
  };

  // The shape must be the same everywhere; the number of elements may not be.
  TORCH_CHECK_VALUE(own.dim() <= kDimensionsMax, "weft: a sparse tensor of ", own.dim(),
                    " dimensions");
  at::Tensor head = at::zeros({kDimensionsMax + 3}, at::kLong);
  auto* word = head.mutable_data_ptr<int64_t>();
  word[0] = own._nnz();
  word[1] = own.sparse_dim();
  word[2] = own.dim();
  for (int64_t d = 0; d < own.dim(); ++d) word[3 + d] = own.size(d);
  at::Tensor heads =
      gather(head, std::vector<int64_t>(static_cast<size_t>(n), head.numel())).view({n, -1});
  std::vector<int64_t> many_indices, many_values, nnz;
  int64_t row = 1;
  for (int64_t d = own.sparse_dim(); d < own.dim(); ++d) row *= own.size(d);
  for (int64_t r = 0; r < n; ++r) {
    TORCH_CHECK_VALUE(
        at::equal(heads[r].narrow(0, 1, heads.size(1) - 1), head.narrow(0, 1, head.numel() - 1)),
        "weft: the sparse tensors of rank ", r, " and rank ", rank_,
        " differ in shape or in sparse dimensions");
    nnz.push_back(heads[r][0].item<int64_t>());
    many_indices.push_back(nnz.back() * own.sparse_dim());
    many_values.push_back(nnz.back() * row);
  }
  at::Tensor all_indices = gather(indices.view(-1), many_indices);
  at::Tensor all_values = gather(values.reshape({-1}), many_values);

  // In the order of ranks, so that all have the same bits.
  Tensors parts_of_indices, parts_of_values;
  int64_t first_index = 0, first_value = 0;
  std::vector<int64_t> shape = values.sizes().vec();
  for (size_t r = 0; r < nnz.size(); ++r) {
    shape[0] = nnz[r];
    parts_of_indices.push_back(
        all_indices.narrow(0, first_index, many_indices[r]).view({own.sparse_dim(), nnz[r]}));
    parts_of_values.push_back(all_values.narrow(0, first_value, many_values[r]).view(shape));
    first_index += many_indices[r];
    first_value += many_values[r];
  }
  at::Tensor sum = at::sparse_coo_tensor(at::cat(parts_of_indices, 1), at::cat(parts_of_values),
                                         own.sizes(), own.options())
                       .coalesce();
  if (mean) sum.values().div_(n);
  // Not to a detached one: what a sparse tensor consists of is replaced, not overwritten.
  at::Tensor(tensor).copy_(sum);
}

WorkPtr ProcessGroupWeft::start_sparse(at::Tensor tensor, const c10d::AllreduceOptions& options) {
  using RedOp = c10d::ReduceOp::RedOpType;
  RedOp op = options.reduceOp;
  TORCH_CHECK(op == RedOp::SUM || op == RedOp::AVG,
              "weft: sparse tensors can be combined with SUM and AVG only");
  TORCH_CHECK(tensor.layout() == at::kSparse && tensor.device().is_cpu(),
              "weft: allreduce takes sparse tensors in the processor's memory, in COO layout");
  std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, !closed_, "weft: the process group was destroyed");
  ++sequence_;
  Tensors tensors{tensor};
  auto outcome = remember(tensors);
  auto work = c10::make_intrusive<Handle>(rank_, OpType::_ALLREDUCE_SPARSE,
                                          "weft:sparse_all_reduce", tensors, outcome);
  if (!stepper_) stepper_ = Completer::start();
  // Whoever closes the group waits for this thread first.
  stepper_->post([this, tensor = std::move(tensor), outcome, mean = op == RedOp::AVG,
                  deadline = deadline_of(options.timeout)]() mutable {
    std::exception_ptr failure;
    try {
      sum_sparse(tensor, mean, deadline);
    } catch (...) {
      failure = std::current_exception();
    }
    tensor.reset();
    outcome->settle(std::move(failure));
  });
  return work;
}

}  // namespace weft::torch_backend
