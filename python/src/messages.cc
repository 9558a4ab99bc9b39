// Messages between two ranks, and the barrier that says who did not come.
#include "backend.h"

namespace weft::torch_backend {

using c10d::OpType;

namespace {

// A message of no bytes would not be seen by who receives from any rank.
at::Tensor not_empty(const at::Tensor& memory) {
  return memory.numel() > 0 ? memory : at::zeros({1}, at::kByte);
}

Call message_call(const at::Tensor& memory, uint32_t peer, uint32_t tag, bool sends) {
  Call call;
  call.collective = Collective::point_to_point;
  if (sends)
    call.input = memory.const_data_ptr();
  else
    call.output = memory.mutable_data_ptr();
  call.count = static_cast<uint64_t>(memory.nbytes());
  call.type = Type::uint8;
  call.root = peer;
  call.sends = sends;
  call.tag = tag;
  return call;
}

}  // namespace

WorkPtr ProcessGroupWeft::message(Tensors& tensors, uint32_t peer, int tag, bool sends, OpType type,
                                  const char* title) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "weft: ", title, " takes one tensor, and got ",
                    tensors.size());
  Staging staging(roads_, title, {tensors});
  at::Tensor memory =
      not_empty(sends ? staging.readable(tensors[0]) : staging.writable(tensors[0], false));
  Task task{type, title, tensors, tensors, {memory}};
  task.collective = false;
  task.calls.push_back(message_call(memory, peer, static_cast<uint32_t>(tag), sends));
  if (!sends && tensors[0].numel() > 0)
    task.finish = [memory, to = tensors] { distribute(memory.view(-1), to); };
  return start(std::move(task), staging.finished());
}

WorkPtr ProcessGroupWeft::send(Tensors& tensors, int to, int tag) {
  check_rank(to, "send");
  return message(tensors, static_cast<uint32_t>(to), tag, true, OpType::SEND, "weft:send");
}

WorkPtr ProcessGroupWeft::recv(Tensors& tensors, int from, int tag) {
  check_rank(from, "recv");
  return message(tensors, static_cast<uint32_t>(from), tag, false, OpType::RECV, "weft:recv");
}

WorkPtr ProcessGroupWeft::recvAnysource(Tensors& tensors, int tag) {
  return message(tensors, runtime::kAnyRank, tag, false, OpType::RECVANYSOURCE,
                 "weft:recvAnySource");
}

// Rank 0 hears from everyone, and then tells everyone. Each barrier has a tag of its own, so that
// what is left of one that failed is not taken for the next.
void ProcessGroupWeft::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  if (size_ == 1) return;
  milliseconds timeout =
      options.timeout == c10d::kUnsetTimeout ? options_->timeout : options.timeout;
  auto until = std::chrono::steady_clock::now() + timeout;
  struct Answers {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<bool> came;
    std::optional<Error> error;
    size_t expected = 0, got = 0;
    at::Tensor byte = at::zeros({1}, at::kByte);
  };
  uint32_t tag;
  {
    std::lock_guard lock(mutex_);
    tag = barriers_++;
  }
  // A rank that does not come is told by the caller's clock, and must not end the job.
  constexpr Nanos kLong = Nanos::from_seconds(365.0 * 24 * 3600);
  auto exchange = [&](const std::vector<uint32_t>& peers, bool sends) {
    auto answers = std::make_shared<Answers>();
    answers->came.resize(ranks());
    answers->expected = peers.size();
    job_->use(side_part_, [&](Group& group) {
      for (uint32_t peer : peers) {
        Call call = message_call(answers->byte, peer, tag, sends);
        call.deadline = kLong;
        auto work = group.start(call);
        if (!work) raise(work.error());
        work->then([answers, peer](Result<void> ended) {
          std::lock_guard lock(answers->mutex);
          ++answers->got;
          if (ended)
            answers->came[peer] = true;
          else if (!answers->error)
            answers->error = std::move(ended).error();
          answers->changed.notify_all();
        });
      }
    });
    return answers;
  };
  auto wait = [&](Answers& answers) {
    std::unique_lock lock(answers.mutex);
    answers.changed.wait_until(lock, until,
                               [&] { return answers.error || answers.got == answers.expected; });
    if (answers.error) raise(*answers.error);
    return answers.got == answers.expected;
  };
  if (rank_ != 0) {
    auto sent = exchange({0}, true);
    auto heard = exchange({0}, false);
    TORCH_CHECK_WITH(DistBackendError, wait(*heard), "[Rank ", rank_, "]: weft: Rank ", rank_,
                     " successfully reached monitoredBarrier, but received errors while waiting "
                     "for send/recv from rank 0: no answer within ",
                     timeout.count(), " ms; its own message says who did not come");
    return;
  }
  auto own_time_is_over = [&](bool over) {
    TORCH_CHECK_WITH(DistBackendError, !over, "[Rank 0]: weft: Rank 0 timed out in ",
                     "monitoredBarrier after ", timeout.count(), " ms");
  };
  own_time_is_over(timeout.count() <= 0);
  std::vector<uint32_t> others;
  for (uint32_t r = 1; r < ranks(); ++r) others.push_back(r);
  auto heard = exchange(others, false);
  if (!wait(*heard)) {
    std::string absent;
    size_t missing = 0;
    std::lock_guard lock(heard->mutex);
    for (uint32_t r : others) {
      if (heard->came[r]) continue;
      if (missing > 0 && !wait_all_ranks) break;
      absent += (missing++ > 0 ? ", " : "") + std::to_string(r);
    }
    TORCH_CHECK_WITH(DistBackendError, false, "[Rank 0]: weft: ", missing > 1 ? "Ranks " : "Rank ",
                     absent, " failed to pass monitoredBarrier in ", timeout.count(), " ms");
  }
  own_time_is_over(!wait(*exchange(others, true)));
}

}  // namespace weft::torch_backend
